"""Kernels measured on the device at hand, and a file that keeps what was measured for later programs.

Estimates of kernels were fitted on one GPU. `tune` measures those with the least estimates instead, and dense
beside them, for products that count, and writes what it finds to a file. Programs read the file when they
import this package; what it says of a product on their device then comes before estimates, in C++ as well as
here.
"""

from __future__ import annotations

import fcntl
import json
import os
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import _C, functional
from .._arguments import checked
from .._checks import DTYPES, checked_count, checked_device, checked_number
from .._runtime import launch as _launch
from ..checkpoint import manifest as checkpoint
from ..errors import InvalidArgumentError, TileSparseError, TuneFileError
from ..nn.linear import BlockSparseLinear
from ..storage.values import expand
from .selection import KINDS, OPS, Device, Product, choose, default_device, dtype_name, kernels, multiplied
from .timing import Call, medians, name_of_cpu, own_numbers

VARIABLE = "TILESPARSE_TUNE_FILE"
FORMAT, VERSION = "tilesparse tune", 1
_DTYPES = {dtype_name(dtype): dtype for dtype in DTYPES}

Timer = Callable[[Sequence[Call], torch.device, int], list[float]]


@dataclass(frozen=True)
class Measurement:
    """What a product takes on a device.

    Attributes:
        product, device: what was measured, and where.
        microseconds: by the name of the kernel, the fastest first.
        dense_microseconds: of writing W out and computing with that.
    """

    product: Product
    device: Device
    microseconds: Mapping[str, float]
    dense_microseconds: float

    @property
    def kernel(self) -> str:
        """The fastest one."""
        return next(iter(self.microseconds))

    def __str__(self) -> str:
        times = [*self.microseconds.items(), ("dense", self.dense_microseconds)]
        return "\n".join([f"{self.product}:", *(f"  {name:34}{time:12.1f} us" for name, time in times)])


# ---- measuring ----


@checked
@torch.no_grad()
def tune(
    products: Iterable[Product],
    device: torch.device | str | int | None = None,
    *,
    candidates: int = 3,
    repetitions: int = 21,
    timer: Timer = medians,
) -> list[Measurement]:
    """Measures kernels for products on a device that is there, and keeps which is the fastest.

    Of each product the kernels with the least estimates are measured, and dense beside them; on the CPU,
    which has no estimates, the first that the library prefers. What is found counts in this process from then
    on, and is written to the file after each product. With it the policy "auto" compares measured times, also
    on the CPU and on GPUs for which nothing was estimated.

    Args:
        products: of any number of layers; see `Product.of`. Equal ones are measured once.
        device: None is the current CUDA device if kernels of the library run there, otherwise the CPU; a
            warning says so where there is a GPU all the same.
        candidates: how many kernels of each product are measured.
        repetitions: of which the median is taken.
        timer: gives milliseconds of a call of each of some functions, on a device, as medians of so many.

    Raises:
        InvalidArgumentError: an argument is not allowed; among them a product that is feature-major and not
            stored plain, or in TF32 where PyTorch's settings say otherwise.
        UnsupportedError: no kernel computes a product there.
        TuneFileError: the file is damaged or cannot be written; nothing was measured then.
    """
    wanted = list(dict.fromkeys(products))
    candidates, repetitions = (
        checked_count("candidates", candidates),
        checked_count("repetitions", repetitions),
    )
    on = _checked_device(device)
    described = Device.find(on)
    for product in wanted:
        _check_measurable(product, on)
        choose(product, described)
    path = file()
    if path is not None:
        _measurements(path)
        _write(path, _read(path))  # so that it fails now if it must
    found = []
    for product in wanted:
        found.append(_measured(product, on, described, candidates, repetitions, timer))
        _add(found[-1])
        _launch.measurements_changed()
        if path is not None:
            with _alone_in(path.parent):
                _write(path, _merged(_read(path), found[-1]))
    return found


def _checked_device(device: object) -> torch.device:
    found = checked_device(default_device() if device is None else device)
    if found.type not in KINDS:
        raise InvalidArgumentError(f"device: cpu or cuda expected, got {device!r}")
    return found


def _check_measurable(product: object, device: torch.device) -> None:
    if not isinstance(product, Product):
        raise InvalidArgumentError(f"products: of tilesparse.Product expected, got {type(product).__name__}")
    if product.feature_major and product.storage != "plain":
        raise InvalidArgumentError(f"products: {product}: storage 'plain' expected where it is feature-major")
    now = Product(16, 16, 1, block_shape=16, dtype=product.dtype).tf32
    if device.type == "cuda" and product.tf32 != now:
        raise InvalidArgumentError(
            f"products: {product}: tf32={now} expected, as torch.backends.cuda.matmul has it now"
        )


def _measured(
    product: Product, device: torch.device, described: Device, count: int, repetitions: int, timer: Timer
) -> Measurement:
    names = [candidate.kernel for candidate in choose(product, described).candidates[:count]]
    with own_numbers(device):
        sparse, dense = _calls(product, device)
    calls = [_on_kernel(1 + _number(name), sparse) for name in names]
    calls.append(_on_kernel(0, dense))  # so that none has more to do than another
    *times, dense_time = (1e3 * time for time in timer(calls, device, repetitions))
    fastest_first = dict(sorted(zip(names, times, strict=True), key=lambda each: each[1]))
    return Measurement(product, described, fastest_first, dense_time)


def _on_kernel(asked: int, call: Call) -> Call:
    def on_kernel() -> Any:
        with _launch.ask_for(asked):
            return call()

    return on_kernel


def _number(name: str) -> int:
    return [kernel.name for kernel in kernels()].index(name)


def _calls(product: Product, device: torch.device) -> tuple[Call, Call]:
    """The product with random operands, and what the policy "dense" has in its place."""
    layer = BlockSparseLinear(
        product.in_features,
        product.out_features,
        False,
        product.nnz / product.blocks,  # a density that rounds to just that number
        block_shape=product.block_shape,
        nm=product.nm,
        storage=product.storage,
        device=device,
        dtype=product.dtype,
        generator=torch.Generator().manual_seed(0),
    )
    pattern, values = layer.pattern, layer.weight.detach()

    def activations(features: int) -> Tensor:
        size = (features, product.tokens) if product.feature_major else (product.tokens, features)
        made = torch.randn(size, device=device, dtype=product.dtype)
        return made.t() if product.feature_major else made

    x, y = activations(product.in_features), activations(product.out_features)
    kept = _launch.prepared(pattern.index_on(device))
    if product.op == "wgrad":
        return lambda: functional.sdd(y, x, pattern), lambda: _launch.gather(y.t() @ x, kept)
    metadata, scales = getattr(layer, "metadata", None), getattr(layer, "scales", None)
    forward = product.op == "forward"
    source = x if forward else y

    def sparse() -> Tensor:
        if product.feature_major:
            return functional.dsd(values, pattern, source.t(), transpose=not forward).t()
        return functional.dds(source, values, pattern, transpose=forward, metadata=metadata, scales=scales)

    def dense() -> Tensor:
        stored = metadata is not None or scales is not None
        plain = expand(values, metadata, scales, product.dtype) if stored else values
        weight = _launch.expand(plain, kept)
        return F.linear(source, weight) if forward else source @ weight

    return sparse, dense


@checked
def products_of(folder: str | Path, tokens: Iterable[int], ops: Iterable[str] = OPS) -> list[Product]:
    """What the layers of a checkpoint do, for each number of tokens; no weight is read.

    Layers that are not stored plain have no gradient of their weight, and so no product "wgrad".

    Args:
        folder: of the checkpoint.
        tokens: numbers of rows of x.
        ops: of "forward", "dgrad" (the gradient of x) and "wgrad" (that of W).

    Returns:
        Each product once, in the order of the layers.

    Raises:
        CheckpointError: the folder has no checkpoint, or a damaged one.
        InvalidArgumentError: an argument is not allowed.
    """
    tokens, ops = list(tokens), list(ops)
    found: dict[Product, None] = {}
    for form in checkpoint.forms(Path(folder)).values():
        (rows, columns), (bn, bk) = form.shape, form.block_shape
        if form.nnz == 0:
            continue
        density = form.nnz / (rows // bn * (columns // bk))
        for op in ops:
            if op == "wgrad" and form.storage != "plain":
                continue
            storage, nm = multiplied(op, form.storage, form.nm)
            for count in tokens:
                product = Product(columns, rows, count, density, (bn, bk), form.dtype, op, storage, nm)
                found[product] = None
    return list(found)


# ---- what counts in this process ----


def _add(measurement: Measurement) -> None:
    device = measurement.device.info()
    _launch.add_measurement(
        measurement.product.descriptor(device),
        device,
        _number(measurement.kernel),
        measurement.microseconds[measurement.kernel],
        measurement.dense_microseconds,
    )


@checked
def load(path: Path | None = None) -> tuple[list[Measurement], int]:
    """Has what a file says count in this process, in place of all that did.

    Args:
        path: of the file; None is that of the environment.

    Returns:
        What counts, and how many measurements do not, being of other CPUs or versions of the library.

    Raises:
        TuneFileError: the file is damaged, foreign or newer; then none counts.
    """
    _C.measurements_clear()
    _launch.measurements_changed()
    path = path or file()
    found, others = ([], 0) if path is None else _measurements(path)
    for measurement in found:
        _add(measurement)
    _launch.measurements_changed()
    return found, others


def load_on_import() -> None:
    """Warns of a file that cannot be used."""
    try:
        load()
    except TuneFileError as error:
        warnings.warn(
            f"what tilesparse tune has measured does not count: {error}", RuntimeWarning, stacklevel=3
        )


def status() -> str:
    """What the file has, in a line for people."""
    path = file()
    if path is None:
        return f"measured kernels: none are kept, {VARIABLE} is empty or the user has no home"
    try:
        found, others = load(path)
    except TuneFileError as error:
        return f"measured kernels: none count: {error}"
    if not path.exists():
        return f"measured kernels: none, there is no {path} (tilesparse tune makes it)"
    devices = Counter(measurement.device.name for measurement in found)
    counts = ", ".join(f"{count} products on {name}" for name, count in devices.items()) or "none that count"
    ignored = f"; {others} of other CPUs or versions of the library do not count" if others else ""
    return f"measured kernels: {counts}{ignored}; {path}"


# ---- the file ----

# What reading a document of another form raises; the last of one that is nested too deeply.
_DAMAGES = (TileSparseError, ValueError, LookupError, TypeError, AttributeError, RecursionError)

_ADVICE = f"delete it, or name another file in {VARIABLE}"


def file() -> Path | None:
    """Where measurements are kept: ``TILESPARSE_TUNE_FILE``, or tune.json in the user's cache of tilesparse.

    None where the variable is empty, or the user has no home: then no file is read or written.
    """
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named) if named else None
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # which does not count, as its standard has it
        cache = os.path.expanduser("~/.cache")
    return Path(cache, "tilesparse", "tune.json") if os.path.isabs(cache) else None


def _read(path: Path) -> dict[str, Any]:
    """A document, an empty one where there is no file.

    It has sections, each of one device and one version of the library with its products.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe would let every program wait
            raise TuneFileError(f"{path}: a regular file expected; name another one in {VARIABLE}")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {"format": FORMAT, "version": VERSION, "sections": []}
    except TuneFileError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise TuneFileError(f"{path}: cannot be read: {error}; {_ADVICE}") from error
    try:
        document = json.loads(text)
        if document["format"] != FORMAT:
            raise ValueError(f"format {FORMAT!r} expected, got {document['format']!r}")
        if document["version"] != VERSION:
            raise ValueError(f"version {VERSION} expected, got {document['version']!r}")
        for section in document["sections"]:
            if not isinstance(section["library"], str) or not isinstance(section["products"], list):
                raise TypeError("a library and products expected in each section")
            _device_of(section)
    except _DAMAGES as error:
        raise _damaged(path, error) from error
    found: dict[str, Any] = document
    return found


def _damaged(path: Path | None, error: Exception) -> TuneFileError:
    return TuneFileError(f"{path}: no file of tilesparse tune, or damaged, or newer: {error!r}; {_ADVICE}")


def _measurements(path: Path) -> tuple[list[Measurement], int]:
    """What of a file counts, and how many do not."""
    cpu, found, others = Device.find("cpu"), [], 0
    for section in _read(path)["sections"]:
        device = _device_of(section)
        is_cpu = device.compute_capability is None
        if section["library"] != _library() or (is_cpu and device != _recorded(cpu)):
            others += len(section["products"])
            continue
        try:
            found += [_parsed(entry, cpu if is_cpu else device) for entry in section["products"]]
        except _DAMAGES as error:
            raise _damaged(path, error) from error
    return found, others


def _parsed(entry: Mapping[str, Any], device: Device) -> Measurement:
    fields = dict(entry["product"])
    product = Product(**fields | {"dtype": _DTYPES[fields["dtype"]]})
    times = {
        name: checked_number(name, time, above_zero=True) for name, time in entry["microseconds"].items()
    }
    if not times or not set(times) <= {kernel.name for kernel in kernels()}:
        raise ValueError(f"names of kernels expected, got {list(times)}")
    asked = product.descriptor(device.info())
    for name in times:
        asked.estimate(device.info(), _number(name))  # refuses a kernel that does not compute it
    dense = checked_number("dense_microseconds", entry["dense_microseconds"])
    return Measurement(product, device, dict(sorted(times.items(), key=lambda each: each[1])), dense)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Within it other programs wait to add what they have measured, where the file system has locks."""
    with ExitStack() as stack:
        with suppress(OSError):
            opened = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, opened)
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def _write(path: Path, document: Mapping[str, Any]) -> None:
    """All of it or nothing: readers see the old file or the new one. A link stays one."""
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".tune-{uuid.uuid4().hex}")  # others may read it, unlike those of tempfile
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("x", encoding="utf-8") as stream:
            stream.write(json.dumps(document, indent=1) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise TuneFileError(
            f"{path}: cannot be written: {error.strerror or error}; free the space or the folder, name a "
            f"file elsewhere in {VARIABLE}, or set that empty to keep nothing"
        ) from error


def _library() -> str:
    """Whose kernels were measured: names of kernels, and times, are those of one version."""
    return f"{_C.version()} for {_C.architectures()}"


def _device_of(section: Mapping[str, Any]) -> Device:
    return Device(**section["device"])


def _recorded(device: Device) -> Device:
    """As the file names it: the library calls every CPU by one name."""
    if device.compute_capability is not None:
        return device
    return Device(name_of_cpu(), None, device.multiprocessors)


def _merged(document: Mapping[str, Any], measurement: Measurement) -> dict[str, Any]:
    """The document with a measurement, in place of one of the same product there."""
    device = _recorded(measurement.device)
    fields = asdict(measurement.product) | {"dtype": dtype_name(measurement.product.dtype)}
    entry = {
        "product": json.loads(json.dumps(fields)),
        "microseconds": dict(measurement.microseconds),
        "dense_microseconds": measurement.dense_microseconds,
    }
    sections, products = [], []
    for section in document["sections"]:
        if section["library"] == _library() and _device_of(section) == device:
            products = [old for old in section["products"] if old["product"] != entry["product"]]
        else:
            sections.append(section)
    own = {"device": asdict(device), "library": _library(), "products": [*products, entry]}
    return {**document, "sections": [*sections, own]}

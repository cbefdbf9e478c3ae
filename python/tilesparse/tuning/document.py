"""The file that keeps what was measured, for later programs."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import platformdirs

from .. import _C
from .._checks import DTYPES, checked_number
from .._files import replacing
from .._runtime.timing import name_of_cpu
from ..errors import TileSparseError, TuneFileError
from .devices import Device
from .products import Product, dtype_name
from .selection import kernels

VARIABLE = "TILESPARSE_TUNE_FILE"
FORMAT, VERSION = "tilesparse tune", 1
_DTYPES = {dtype_name(dtype): dtype for dtype in DTYPES}
# Errors of reading a document of another form; the last is that of one that is nested too deeply.
_DAMAGES = (TileSparseError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
_ADVICE = f"delete it, or name another file in {VARIABLE}"


@dataclass(frozen=True)
class Measurement:
    """Measured times of a product on a device.

    Attributes:
        product, device: what was measured, and where.
        microseconds: time by the name of the kernel, the fastest first.
        dense_microseconds: time of writing W out and the dense product.
    """

    product: Product
    device: Device
    microseconds: Mapping[str, float]
    dense_microseconds: float

    @property
    def kernel(self) -> str:
        """Name of the fastest kernel."""
        return next(iter(self.microseconds))

    def __str__(self) -> str:
        times = [*self.microseconds.items(), ("dense", self.dense_microseconds)]
        return "\n".join([f"{self.product}:", *(f"  {name:34}{time:12.1f} us" for name, time in times)])


def file() -> Path | None:
    """Return the path of the measurements: ``TILESPARSE_TUNE_FILE``, or tune.json in the user's cache.

    It is None if the variable is empty or the user has no home: no file is read or written.
    """
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named) if named else None
    try:
        cache = platformdirs.user_cache_path("tilesparse")
    except RuntimeError:  # a user without a home
        return None
    return cache / "tune.json" if cache.is_absolute() else None


def read(path: Path) -> dict[str, Any]:
    """Read a document; it is empty if there is no file.

    It has sections, one for each device and version of the library, with the products measured there.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe would let every program wait
            raise TuneFileError(f"{path} must be a regular file; name another one in {VARIABLE}")
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
            raise ValueError(f"format must be {FORMAT!r}, got {document['format']!r}")
        if document["version"] != VERSION:
            raise ValueError(f"version must be {VERSION}, got {document['version']!r}")
        for section in document["sections"]:
            if not isinstance(section["library"], str) or not isinstance(section["products"], list):
                raise TypeError("each section must have a library and products")
            _device_of(section)
    except _DAMAGES as error:
        raise _damaged(path, error) from error
    found: dict[str, Any] = document
    return found


def _damaged(path: Path | None, error: Exception) -> TuneFileError:
    return TuneFileError(f"{path} is no file of tilesparse tune, or damaged, or newer: {error!r}; {_ADVICE}")


def measurements(path: Path) -> tuple[list[Measurement], int]:
    """Return the measurements of a file that count here, and the number of those that do not."""
    cpu, found, others = Device.find("cpu"), [], 0
    for section in read(path)["sections"]:
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
        raise ValueError(f"microseconds must be by names of kernels, got {list(times)}")
    asked = product.descriptor(device.info())
    for name in times:
        asked.estimate(device.info(), kernel_number(name))  # refuses a kernel that does not compute it
    dense = checked_number("dense_microseconds", entry["dense_microseconds"])
    return Measurement(product, device, dict(sorted(times.items(), key=lambda each: each[1])), dense)


def kernel_number(name: str) -> int:
    """Return the number by which the native module knows a kernel."""
    return [kernel.name for kernel in kernels()].index(name)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Have other programs wait before they add measurements, where the file system has locks.

    The folder itself is locked, unlike a file lock's own file: nothing is left behind, and users who share a
    folder need no permission to write a lock of somebody else.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            opened = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, opened)
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Write a whole document or nothing: readers see the old file or the new one, and a link stays a link."""
    try:
        Path(os.path.realpath(path)).parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, temporary.open("x", encoding="utf-8") as stream:
            stream.write(json.dumps(document, indent=1) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise TuneFileError(
            f"{path}: cannot be written: {error.strerror or error}; free the space or the folder, name a "
            f"file elsewhere in {VARIABLE}, or set that empty to keep nothing"
        ) from error


def _library() -> str:
    """Return the version whose kernels are measured: names and times of kernels belong to one version."""
    return f"{_C.version()} for {_C.architectures()}"


def _device_of(section: Mapping[str, Any]) -> Device:
    return Device(**section["device"])


def _recorded(device: Device) -> Device:
    """Return the device as the file names it: the library has one name for all CPUs."""
    if device.compute_capability is not None:
        return device
    return Device(name_of_cpu(), None, device.multiprocessors)


def merged(document: Mapping[str, Any], measurement: Measurement) -> dict[str, Any]:
    """Add a measurement to a document, replacing one of the same product on the same device."""
    device = _recorded(measurement.device)
    fields = asdict(measurement.product) | {"dtype": dtype_name(measurement.product.dtype)}
    if fields["activations"] is None:  # as entries were before there were any
        del fields["activations"]
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
    recorded = {name: value for name, value in asdict(device).items() if name != "max_cluster"}
    own = {"device": recorded, "library": _library(), "products": [*products, entry]}
    return {**document, "sections": [*sections, own]}

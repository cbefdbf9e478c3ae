"""The file that keeps the measured times of kernels for later programs.

A document has sections. Each has the device and the versions that it was measured with, and "products".
"""

from __future__ import annotations

import fcntl
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import _C
from .._checks import DTYPES, checked_number, shown
from .._files import VARIABLE, replacing, tune_file
from .._runtime.select import add_measurement, measurements_changed
from ..errors import InvalidTypeError, TileSparseError, TuneFileError
from .product import Device, Product, dtype_name, kernels, recorded

FORMAT, VERSION = "tilesparse measurements", 1
_DTYPES = {dtype_name(dtype): dtype for dtype in DTYPES}
# Errors of reading a document of another form; the last is that of one that is nested too deeply.
_DAMAGES = (TileSparseError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


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


def read(path: Path) -> list[dict[str, Any]]:
    """Return the sections of a document; there are none if there is no file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise TuneFileError(f"{path}: cannot be read: {error}{_advice(path)}") from error
    with _parsing(path):
        document = json.loads(text)
        if document["format"] != FORMAT:
            raise ValueError(f"format must be {FORMAT!r}, got {document['format']!r}")
        if document["version"] != VERSION:
            raise ValueError(f"version must be {VERSION}, got {document['version']!r}")
        sections: list[dict[str, Any]] = document["sections"]
        for section in sections:
            _origin_of(section)
            if not isinstance(section.get("products", []), list):
                raise TypeError("products must be a list")
    return sections


def write(path: Path, sections: Iterable[Mapping[str, Any]]) -> None:
    """Write a whole document or nothing: readers see the old file or the new one, and a link stays a link."""
    document = {"format": FORMAT, "version": VERSION, "sections": [*sections]}
    try:
        Path(os.path.realpath(path)).parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, temporary.open("x", encoding="utf-8") as stream:
            stream.write(json.dumps(document, indent=1) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise TuneFileError(f"{path}: cannot be written: {error.strerror or error}{_advice(path)}") from error


@contextmanager
def _parsing(path: Path) -> Iterator[None]:
    try:
        yield
    except _DAMAGES as error:
        raise TuneFileError(
            f"{path} is no file of measurements, or damaged, or newer: {error!r}{_advice(path)}"
        ) from error


def _advice(path: Path) -> str:
    is_own = path == tune_file()
    return f"; delete it, name another file in {VARIABLE}, or set that empty" if is_own else ""


def _origin_of(section: Mapping[str, Any]) -> tuple[Device, dict[str, str]]:
    """Return the device and versions of a section."""
    versions = {str(name): version for name, version in section["versions"].items()}
    if not all(isinstance(version, str) for version in versions.values()):
        raise TypeError(f"versions must be strings, got {versions}")
    return Device(**section["device"]), versions


def _section(device: Device, versions: Mapping[str, str], **content: Any) -> dict[str, Any]:
    fields = {name: value for name, value in asdict(device).items() if name != "max_cluster"}
    return {"device": fields, "versions": dict(versions), **content}


def measurements(path: Path) -> tuple[list[Measurement], int]:
    """Return the measurements of a file that count here, and the number of those that do not."""
    cpu, found, others = Device.find("cpu"), [], 0
    for section in read(path):
        device, versions = _origin_of(section)
        is_cpu, products = device.compute_capability is None, section.get("products", [])
        if versions != _versions() or (is_cpu and device != recorded(cpu)):
            others += len(products)
            continue
        with _parsing(path):
            found += [_measurement_of(entry, cpu if is_cpu else device) for entry in products]
    return found, others


def _versions() -> dict[str, str]:
    """Return the version whose kernels are measured: names and times of kernels belong to one version."""
    return {"tilesparse": _C.version(), "architectures": _C.architectures()}


def _measurement_of(entry: Mapping[str, Any], device: Device) -> Measurement:
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


def add_to_file(path: Path, measurement: Measurement) -> None:
    """Add a measurement to a file, in place of one of the same product on the same device.

    Other programs wait meanwhile where the file system locks folders, which leaves no file behind.
    """
    device = recorded(measurement.device)
    fields = asdict(measurement.product) | {"dtype": dtype_name(measurement.product.dtype)}
    entry = {
        "product": json.loads(json.dumps(fields)),
        "microseconds": dict(measurement.microseconds),
        "dense_microseconds": measurement.dense_microseconds,
    }
    with ExitStack() as stack:
        with suppress(OSError):
            folder = os.open(path.parent, os.O_RDONLY)
            stack.callback(os.close, folder)
            fcntl.flock(folder, fcntl.LOCK_EX)
        sections, products = [], []
        for section in read(path):
            if "products" in section and _origin_of(section) == (device, _versions()):
                products = [old for old in section["products"] if old["product"] != entry["product"]]
            else:
                sections.append(section)
        write(path, [*sections, _section(device, _versions(), products=[*products, entry])])


def count_measurement(measurement: Measurement) -> None:
    """Have a measurement count from now on, in place of one of the same product."""
    device = measurement.device.info()
    add_measurement(
        measurement.product.descriptor(device),
        device,
        kernel_number(measurement.kernel),
        measurement.microseconds[measurement.kernel],
        measurement.dense_microseconds,
    )


def load(path: str | os.PathLike[str] | None = None) -> tuple[list[Measurement], int]:
    """Load the measurements of a file into this process, replacing all that counted.

    Args:
        path: path of the file; None is that of the environment.

    Returns:
        The measurements that count, and the number of those that do not because they are of other CPUs or
        versions of the library.

    Raises:
        TuneFileError: the file is damaged, foreign or newer; no measurement counts.
    """
    _C.measurements_clear()
    measurements_changed()
    if path is not None and not isinstance(path, str | os.PathLike):
        raise InvalidTypeError(f"path must be that of a file or None, got {shown(path)}")
    path = Path(path) if path else tune_file()
    found, others = ([], 0) if path is None else measurements(path)
    for measurement in found:
        count_measurement(measurement)
    measurements_changed()
    return found, others


def load_on_import() -> None:
    """Load the file of the environment, if there is one; warn if it cannot be used."""
    try:
        load()
    except TuneFileError as error:
        warnings.warn(
            f"what tilesparse tune has measured does not count: {error}", RuntimeWarning, stacklevel=4
        )


def status() -> str:
    """Describe the content of the file in a line."""
    path = tune_file()
    if path is None:
        return f"measured kernels: none are kept, {VARIABLE} is empty or the user has no home"
    try:
        found, others = load(path)
    except TuneFileError as error:
        return f"measured kernels: none count: {error}"
    ignored = f"; {others} of other CPUs or versions of the library do not count" if others else ""
    return f"measured kernels: {len(found)} products that count{ignored}; {path}"

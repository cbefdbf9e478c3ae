"""Load measurements into this process, for the choice of kernels in C++ and here."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path

from .. import _C
from .._arguments import checked
from .._runtime.choice import add_measurement, measurements_changed
from ..errors import TuneFileError
from .document import VARIABLE, Measurement, file, kernel_number, measurements


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


@checked
def load(path: Path | None = None) -> tuple[list[Measurement], int]:
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
    path = path or file()
    found, others = ([], 0) if path is None else measurements(path)
    for measurement in found:
        count_measurement(measurement)
    measurements_changed()
    return found, others


def load_on_import() -> None:
    """Load the file of the environment; warn if it cannot be used."""
    try:
        load()
    except TuneFileError as error:
        warnings.warn(
            f"what tilesparse tune has measured does not count: {error}", RuntimeWarning, stacklevel=3
        )


def status() -> str:
    """Describe the content of the file in a line."""
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

"""The devices that kernels are chosen for, also GPUs that are not there."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .. import _C
from .._arguments import checked
from .._checks import checked_count
from ..errors import InvalidArgumentError

KINDS = ("cpu", "cuda")  # likewise, device
OF_ONE_CAPABILITY = (90,)  # whose kernels use what only GPUs of that compute capability have
# Compute capability, multiprocessors, and KiB of shared memory that a thread block may use. The first GPU of
# a compute capability stands for it.
GPUS: dict[str, tuple[tuple[int, int], int, int]] = {
    "V100": ((7, 0), 80, 96),
    "T4": ((7, 5), 40, 64),
    "A100": ((8, 0), 108, 163),
    "A10": ((8, 6), 72, 99),
    "A40": ((8, 6), 84, 99),
    "RTX 3090": ((8, 6), 82, 99),
    "AGX Orin": ((8, 7), 16, 163),
    "L40S": ((8, 9), 142, 99),
    "L4": ((8, 9), 58, 99),
    "RTX 4090": ((8, 9), 128, 99),
    "H100": ((9, 0), 132, 227),
    "H100 PCIe": ((9, 0), 114, 227),
    "H200": ((9, 0), 132, 227),
    "B200": ((10, 0), 148, 227),
    "B300": ((10, 3), 148, 227),
    "RTX 5090": ((12, 0), 170, 99),
    "RTX PRO 6000": ((12, 0), 188, 99),
    "GB10": ((12, 1), 48, 99),
}

# The GPUs that estimates were fitted on, as in cuda/common/coefficients.inc; the first stands for others.
MEASURED = ("H100", "H200")


@dataclass(frozen=True)
class Device:
    """The properties of a CPU or GPU that kernels are chosen by; the device need not be there.

    Attributes:
        name: name that the driver gives, or that of a GPU that stands for others; "CPU".
        compute_capability: (major, minor); None for a CPU.
        multiprocessors: number of multiprocessors, or of processors of a CPU.
        shared_memory: bytes that a thread block may use; 0 for a CPU.
        max_cluster: thread blocks of a cluster for which the device has room; 0 if that is not known and
            taken to suffice. Kernels for compute capability 9.0 need 2, which some slices of a GPU lack.
            Devices that differ in it alone are equal: what one of them measured counts for the other.

    Raises:
        InvalidArgumentError: no device has such a value; the text names it.
    """

    name: str
    compute_capability: tuple[int, int] | None
    multiprocessors: int
    shared_memory: int = 0
    max_cluster: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise InvalidArgumentError(f"name must be a string, got {self.name!r}")
        if self.compute_capability is not None:
            capability = _checked_capability(self.compute_capability)
            object.__setattr__(self, "compute_capability", capability)
        for name, least, most in (
            ("multiprocessors", 1, 1 << 16),
            ("shared_memory", 0, 1 << 24),
            ("max_cluster", 0, 16),
        ):
            object.__setattr__(self, name, checked_count(name, getattr(self, name), least, most))

    @classmethod
    @checked
    def find(cls, what: Device | torch.device | str | tuple[int, int] | None = None) -> Device:
        """Find a device by its name or compute capability.

        Args:
            what: "cpu"; "cuda" or "cuda:1", a device that is there; the name of a GPU, as "H100" or
                "RTX 4090"; a compute capability, as "8.6" or (8, 6), for which one such GPU stands. None is
                the current CUDA device if kernels of the library run there, otherwise the CPU; a warning
                says why if there is a GPU all the same.

        Raises:
            InvalidArgumentError: no such name is known; the text lists them. Any other GPU can be described
                by a `Device` of your own.
            NoDeviceError: "cuda" is not there.
        """
        if isinstance(what, Device):
            return what
        if what is None:
            what = default_device()
        if isinstance(what, tuple):
            what = ".".join(map(str, what))
        text = str(what)
        kind, _, ordinal = text.partition(":")
        if kind in KINDS and (not ordinal or (ordinal.isdecimal() and len(ordinal) < 10)):
            return cls.of(_C.device_info(KINDS.index(kind), int(ordinal) if ordinal else -1))
        for name, (capability, multiprocessors, kibibytes) in GPUS.items():
            if text == name or text == f"{capability[0]}.{capability[1]}":
                return cls(name, capability, multiprocessors, kibibytes << 10)
        raise InvalidArgumentError(
            f'device must be "cpu", "cuda", "cuda:N", one of {list(GPUS)}, or the compute capability of '
            f"one of these, got {what!r}"
        )

    @classmethod
    def of(cls, info: _C.DeviceInfo) -> Device:
        """Describe a device as the native module does."""
        capability = divmod(info.compute_capability, 10) if info.device else None
        return cls(info.name, capability, info.multiprocessors, info.shared_memory, info.max_cluster)

    def info(self) -> _C.DeviceInfo:
        """Describe the device to the native module.

        Raises:
            InvalidArgumentError: the name has more than 63 bytes or is not printable.
        """
        if not self.name.isprintable() or len(self.name.encode()) > 63:
            raise InvalidArgumentError(f"name must be at most 63 bytes of printable text, got {self.name!r}")
        if self.compute_capability is None:
            return _C.DeviceInfo(0, 0, self.multiprocessors, 0, self.name)
        major, minor = self.compute_capability
        return _C.DeviceInfo(
            1, 10 * major + minor, self.multiprocessors, self.shared_memory, self.name, self.max_cluster
        )

    def __str__(self) -> str:
        if self.compute_capability is None:
            return f"{self.name} ({self.multiprocessors} processors)"
        major, minor = self.compute_capability
        return f"{self.name} (compute capability {major}.{minor}, {self.multiprocessors} multiprocessors)"


def _checked_capability(capability: object) -> tuple[int, int]:
    if isinstance(capability, Sequence) and not isinstance(capability, str) and len(capability) == 2:
        major, minor = capability
        return (
            checked_count("major of compute_capability", major, 1, 99),
            checked_count("minor of compute_capability", minor, 0, 9),
        )
    raise InvalidArgumentError(f"compute_capability must be (major, minor) or None, got {capability!r}")


def describe_estimates(device: Device) -> str:
    """Say what estimated times of a GPU rest on: measurements of it, or of which other GPU."""
    reference = Device.find(MEASURED[0])
    name = next((name for name in MEASURED if name in device.name.split()), None)
    if name is not None and device.multiprocessors == Device.find(name).multiprocessors:
        return "measured on this GPU"
    kernels = "" if device.compute_capability == reference.compute_capability else " with kernels for 8.0"
    return (
        f"nothing was measured on this GPU; those of an {reference.name}{kernels}, scaled to "
        f"{device.multiprocessors} multiprocessors and to clock, bandwidth and rate of tensor cores"
    )


def runs_on(kernel: _C.KernelInfo, device: int, compute_capability: int) -> bool:
    """Return True if a kernel runs on a device of this kind and compute capability (see `_C.DeviceInfo`)."""
    least = kernel.min_compute_capability
    newer = least <= compute_capability and least not in OF_ONE_CAPABILITY
    return kernel.device == device and (newer or least == compute_capability)


def default_device() -> torch.device:
    """Return the current CUDA device if kernels of this library run there, otherwise the CPU.

    A warning says why a GPU that is there is not taken.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    major, minor = torch.cuda.get_device_capability()
    if any(runs_on(kernel, KINDS.index("cuda"), 10 * major + minor) for kernel in _C.kernels()):
        return torch.device("cuda")
    warnings.warn(
        f"on the CPU: no kernel of this library runs on {torch.cuda.get_device_name()}, compute capability "
        f"{major}.{minor}",
        stacklevel=2,
    )
    return torch.device("cpu")

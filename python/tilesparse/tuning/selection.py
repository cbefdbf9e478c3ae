"""Which kernel computes a product on a GPU or CPU, and why; also on a GPU that is not there.

`choose` asks the library what it would do. The choice is a function of the product, the device, what
`tilesparse.tune` has measured on such a device, and preferences: a `prefer` that is in force, and the
environment's ``TILESPARSE_KERNEL``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from .. import _C
from .._arguments import checked
from .._checks import (
    DTYPES,
    POLICIES,
    QUANTIZED,
    check_block_shape,
    check_policy,
    check_shapes,
    checked_count,
    checked_fraction,
)
from .._runtime import launch as _launch
from .._runtime.private import tf32_allowed
from ..config import QUANTIZED_BY_NAME, check_nm, check_nm_blocks, check_storage
from ..errors import InvalidArgumentError, UnsupportedError
from ..nn.linear import BlockSparseLinear

OPS = ("forward", "dgrad", "wgrad")  # in the order of the numbers of ts_matmul_desc.op
KINDS = ("cpu", "cuda")  # likewise, device
OF_ONE_CAPABILITY = (90,)  # whose kernels use what only GPUs of that compute capability have

_MOST = (1 << 31) - 1  # tokens or features

# Multiprocessors, and KiB of shared memory that a thread block may use. The first GPU of a compute capability
# stands for it.
_GPUS: dict[str, tuple[tuple[int, int], int, int]] = {
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


@dataclass(frozen=True)
class Device:
    """What kernels are chosen by, of a CPU or a GPU that need not be there.

    Attributes:
        name: as the driver says it, or of a GPU that stands for others; "CPU".
        compute_capability: (major, minor); None of a CPU.
        multiprocessors: of a CPU its processors.
        shared_memory: bytes that a thread block may use; 0 of a CPU.

    Raises:
        InvalidArgumentError: a value is of no device; the text names it.
    """

    name: str
    compute_capability: tuple[int, int] | None
    multiprocessors: int
    shared_memory: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise InvalidArgumentError(f"name: a string expected, got {self.name!r}")
        if self.compute_capability is not None:
            capability = _checked_capability(self.compute_capability)
            object.__setattr__(self, "compute_capability", capability)
        for name, least, most in (("multiprocessors", 1, 1 << 16), ("shared_memory", 0, 1 << 24)):
            object.__setattr__(self, name, checked_count(name, getattr(self, name), least, most))

    @classmethod
    @checked
    def find(cls, what: Device | torch.device | str | tuple[int, int] | None = None) -> Device:
        """The device that is meant.

        Args:
            what: "cpu"; "cuda" or "cuda:1", one that is there; the name of a GPU, as "H100" or "RTX 4090"; a
                compute capability, as "8.6" or (8, 6), for which one such GPU stands. None is the current
                CUDA device if kernels of the library run there, otherwise the CPU; a warning says why where
                there is a GPU all the same.

        Raises:
            InvalidArgumentError: no such name is known; the text lists them. With a `Device` of your own any
                GPU can be described.
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
        for name, (capability, multiprocessors, kibibytes) in _GPUS.items():
            if text == name or text == f"{capability[0]}.{capability[1]}":
                return cls(name, capability, multiprocessors, kibibytes << 10)
        raise InvalidArgumentError(
            f'device: "cpu", "cuda", "cuda:N", one of {list(_GPUS)}, or the compute capability of one of '
            f"these expected, got {what!r}"
        )

    @classmethod
    def of(cls, info: _C.DeviceInfo) -> Device:
        """What the native module says of one."""
        capability = divmod(info.compute_capability, 10) if info.device else None
        return cls(info.name, capability, info.multiprocessors, info.shared_memory)

    def info(self) -> _C.DeviceInfo:
        """The same for the native module.

        Raises:
            InvalidArgumentError: the name has more than 63 bytes, or is no printable text.
        """
        if not self.name.isprintable() or len(self.name.encode()) > 63:
            raise InvalidArgumentError(f"name: up to 63 bytes of printable text expected, got {self.name!r}")
        if self.compute_capability is None:
            return _C.DeviceInfo(0, 0, self.multiprocessors, 0, self.name)
        major, minor = self.compute_capability
        return _C.DeviceInfo(1, 10 * major + minor, self.multiprocessors, self.shared_memory, self.name)

    def __str__(self) -> str:
        if self.compute_capability is None:
            return f"{self.name} ({self.multiprocessors} processors)"
        major, minor = self.compute_capability
        return f"{self.name} (compute capability {major}.{minor}, {self.multiprocessors} multiprocessors)"


def _checked_capability(capability: object) -> tuple[int, int]:
    if isinstance(capability, Sequence) and not isinstance(capability, str) and len(capability) == 2:
        major, minor = capability
        return (
            checked_count("compute_capability: major", major, 1, 99),
            checked_count("compute_capability: minor", minor, 0, 9),
        )
    raise InvalidArgumentError(f"compute_capability: (major, minor) or None expected, got {capability!r}")


@dataclass(frozen=True)
class Product:
    """One product with a block-sparse weight W [out_features, in_features].

    Attributes:
        in_features, out_features: of W.
        tokens: rows of x and y.
        density: fraction of the blocks that is kept.
        block_shape: (bn, bk), or one number for both.
        dtype: of activations.
        op: "forward", y = x Wᵀ; "dgrad", its gradient for x; "wgrad", that for W.
        storage: of the values, as `BlockSparseLinear` has it: "plain", "compressed", "int8" or
            "float8_e4m3fn".
        nm: (2, 4) of values that are 2:4 and not stored plain.
        feature_major: whether x and y lie in memory feature by feature, as in `functional.dsd`.
        tf32: whether float32 is multiplied in TF32 on CUDA devices; None as PyTorch's settings say now. Of
            other dtypes it becomes False.

    Raises:
        InvalidArgumentError: a value breaks a rule of products; the text names it.
    """

    in_features: int
    out_features: int
    tokens: int
    density: float = 0.5
    block_shape: int | Sequence[int] = (32, 32)
    dtype: torch.dtype = torch.float32
    op: str = "forward"
    storage: str = "plain"
    nm: tuple[int, int] | None = None
    feature_major: bool = False
    tf32: bool | None = None

    def __post_init__(self) -> None:
        for name in ("in_features", "out_features", "tokens"):
            object.__setattr__(self, name, checked_count(name, getattr(self, name), most=_MOST))
        object.__setattr__(self, "density", checked_fraction("density", self.density))
        block_shape = check_block_shape(self.block_shape)
        object.__setattr__(self, "block_shape", block_shape)
        check_shapes((self.out_features, self.in_features), block_shape)
        if not isinstance(self.dtype, torch.dtype) or self.dtype not in DTYPES:
            raise InvalidArgumentError(f"dtype: one of {list(map(str, DTYPES))} expected, got {self.dtype}")
        if self.op not in OPS:
            raise InvalidArgumentError(f"op: one of {list(OPS)} expected, got {self.op!r}")
        check_nm(self.nm, False)
        if self.nm is not None:
            object.__setattr__(self, "nm", tuple(self.nm))  # which has a hash
        check_nm_blocks(self.nm, False, block_shape)
        check_storage(self.storage, self.nm)
        if self.storage == "plain" and self.nm is not None:
            raise InvalidArgumentError("nm: None expected with storage 'plain'; kernels read 2:4 compressed")
        if self.storage != "plain" and self.op == "wgrad":
            raise InvalidArgumentError(f"storage: 'plain' expected of wgrad, got {self.storage!r}")
        if not isinstance(self.feature_major, bool):
            raise InvalidArgumentError(f"feature_major: True or False expected, got {self.feature_major!r}")
        if not isinstance(self.tf32, bool | None):
            raise InvalidArgumentError(f"tf32: True, False or None expected, got {self.tf32!r}")
        tf32 = tf32_allowed() if self.tf32 is None else self.tf32
        object.__setattr__(self, "tf32", self.dtype == torch.float32 and tf32)

    @classmethod
    @checked
    def of(cls, layer: BlockSparseLinear, *, tokens: int, op: str = "forward") -> Product:
        """What a layer does for so many tokens; while it trains with 2:4, its product with compressed values.

        Args:
            layer: whose sizes, pattern, dtype and storage count.
            tokens: rows of x, the product of its leading dimensions.
            op: "forward", "dgrad" (the gradient of x) or "wgrad" (that of W).

        Raises:
            InvalidArgumentError: no BlockSparseLinear, no such op, or another argument is not allowed.
        """
        bn, bk = layer.block_shape
        blocks = layer.out_features // bn * (layer.in_features // bk)
        storage, nm = multiplied(op, layer.storage, layer.nm)
        return cls(
            layer.in_features,
            layer.out_features,
            tokens,
            layer.col_indices.shape[0] / blocks if blocks else 0.0,
            (bn, bk),
            layer._dtype,
            op,
            storage,
            nm,
        )

    @property
    def nnz(self) -> int:
        """The number of kept blocks."""
        return round(self.density * self.blocks)

    @property
    def blocks(self) -> int:
        """The number of all blocks, kept or not."""
        bn, bk = self._block_shape
        return self.out_features // bn * (self.in_features // bk)

    @property
    def _block_shape(self) -> tuple[int, int]:
        return check_block_shape(self.block_shape)

    def descriptor(self, device: _C.DeviceInfo, *, policy: int = 0, prefer: str = "") -> _C.Product:
        """The same for the native module, without operands.

        Args:
            device: on which it is computed.
            policy: 0 for sparse, 1 for auto, 2 for dense.
            prefer: the beginning of the names of kernels to take if they can.
        """
        shape = self.out_features, self.in_features
        layout = int(self.feature_major)
        ldx, ldy = (self.tokens, self.tokens) if layout else (self.in_features, self.out_features)
        quantized = QUANTIZED_BY_NAME.get(self.storage)
        return _C.Product(
            _C.Pattern(*self._block_shape, *shape, self.nnz, 0, 0, 0),
            OPS.index(self.op),
            DTYPES[self.dtype],
            device.device,
            self.tokens,
            precision=int(bool(self.tf32) and device.device == KINDS.index("cuda")),
            policy=policy,
            x_layout=layout,
            ldx=ldx,
            y_layout=layout,
            ldy=ldy,
            storage=int(self.nm is not None),
            values_dtype=-1 if quantized is None else QUANTIZED[quantized],
            row_scales=quantized is not None,
            prefer=prefer,
        )

    def __str__(self) -> str:
        bn, bk = self._block_shape
        extras = [self.storage] * (self.storage != "plain") + ["2:4"] * (self.nm is not None)
        extras += ["feature-major"] * self.feature_major + ["TF32"] * bool(self.tf32)
        words = [
            f"{self.op} of {self.in_features} -> {self.out_features} features",
            f"{self.tokens} tokens",
            f"density {self.density:.4g}",
            f"blocks {bn}x{bk}",
            dtype_name(self.dtype),
            *extras,
        ]
        return ", ".join(words)


def multiplied(op: str, storage: str, nm: tuple[int, int] | None) -> tuple[str, tuple[int, int] | None]:
    """Storage and nm of the values that a layer with these multiplies: its gradient is plain."""
    if op == "wgrad":
        return "plain", None
    return "compressed" if nm is not None and storage == "plain" else storage, nm


@dataclass(frozen=True)
class KernelInfo:
    """One kernel of the library.

    Attributes:
        name: which `prefer` and ``TILESPARSE_KERNEL`` take, or its beginning.
        device: "cpu" or "cuda".
        compute_capability: (major, minor), the least it needs; None on the CPU.
        ops: of "forward", "dgrad", "wgrad".
        dtypes: of activations.
        tf32: whether it multiplies float32 in TF32.
        tile: tokens and features that are computed together; None where that is not fixed.
        max_tokens: for which it is made; None for any number.
        storages: of "plain" and "compressed", what values it reads as they are.
        values_dtypes: of values of 8 bits that it reads as they are; empty: none, values have the dtype of
            the activations.
    """

    name: str
    device: str
    compute_capability: tuple[int, int] | None
    ops: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    tf32: bool
    tile: tuple[int, int] | None
    max_tokens: int | None
    storages: tuple[str, ...]
    values_dtypes: tuple[torch.dtype, ...]

    def __str__(self) -> str:
        where = self.device
        if self.compute_capability is not None:
            where += f" from {self.compute_capability[0]}.{self.compute_capability[1]}"
        what = f"{', '.join(self.ops)}; {', '.join(dtype_name(dtype) for dtype in self.dtypes)}"
        few = f"; up to {self.max_tokens} tokens" if self.max_tokens else ""
        return f"{self.name}: {where}; {what}{few}"


def dtype_name(dtype: torch.dtype) -> str:
    """Without the module: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


@cache
def kernels() -> tuple[KernelInfo, ...]:
    """All kernels of the library, those of the CPU first. What runs where is `choose`'s to say."""
    return tuple(map(_kernel_info, _C.kernels()))


def _kernel_info(kernel: _C.KernelInfo) -> KernelInfo:
    def members(bits: int, names: Mapping[Any, int]) -> tuple[Any, ...]:
        return tuple(name for name, place in names.items() if bits >> place & 1)

    capability = kernel.min_compute_capability
    return KernelInfo(
        kernel.name,
        KINDS[kernel.device],
        divmod(capability, 10) if capability else None,
        members(kernel.ops, {op: place for place, op in enumerate(OPS)}),
        members(kernel.dtypes, DTYPES),
        kernel.precision == 1,
        (kernel.tile_tokens, kernel.tile_features) if kernel.tile_tokens else None,
        kernel.max_tokens or None,
        members(kernel.storages, {"plain": 0, "compressed": 1}),
        members(kernel.values_dtypes, QUANTIZED),
    )


def runs_on(kernel: _C.KernelInfo, device: int, compute_capability: int) -> bool:
    """Whether a kernel runs on a device of that kind and compute capability, as `_C.DeviceInfo` has them."""
    least = kernel.min_compute_capability
    newer = least <= compute_capability and least not in OF_ONE_CAPABILITY
    return kernel.device == device and (newer or least == compute_capability)


def default_device() -> torch.device:
    """The current CUDA device if there is one on which kernels of this library run, otherwise the CPU.

    Where there is a GPU and it is not taken a warning says why.
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


@dataclass(frozen=True)
class Candidate:
    """A kernel that computes a product.

    Attributes:
        kernel: its name.
        microseconds: that are estimated; None where there are no estimates.
    """

    kernel: str
    microseconds: float | None

    def __str__(self) -> str:
        return f"{self.kernel}, {_microseconds(self.microseconds)}"


@dataclass(frozen=True)
class KernelChoice:
    """What computes a product on a device.

    Attributes:
        product, device: what was asked for.
        kernel: its name; None where W is to be written out and multiplied densely.
        reason: why, with what was estimated or measured.
        microseconds: that are estimated for what was chosen; None where there is no estimate.
        runner_up: what has the least estimate of the other kernels, or None.
        dense_microseconds: that are estimated for writing W out and the dense product; None where that was
            not measured on such a device.
        candidates: all kernels that compute the product, the least estimate first, otherwise as the library
            prefers them.
        refused: why the other kernels of this kind of device do not, by name.
    """

    product: Product
    device: Device
    kernel: str | None
    reason: str
    microseconds: float | None
    runner_up: Candidate | None
    dense_microseconds: float | None
    candidates: tuple[Candidate, ...]
    refused: Mapping[str, str]

    def __str__(self) -> str:
        lines = [
            str(self.product),
            f"  on {self.device}",
            f"  {self.kernel or 'dense'}: {self.reason}",
            f"  next: {self.runner_up or 'no other kernel computes it'}",
        ]
        return "\n".join(lines)


@checked
def choose(
    product: Product,
    device: Device | torch.device | str | tuple[int, int] | None = None,
    *,
    policy: str = "sparse",
) -> KernelChoice:
    """What would compute a product, and why; nothing is run.

    Args:
        product: its sizes, dtypes and storage.
        device: see `Device.find`; a GPU need not be there. What `tilesparse.tune` has measured counts for
            devices of the same name.
        policy: that of a layer: "sparse", "auto" or "dense".

    Raises:
        InvalidArgumentError: no such device or policy; or TILESPARSE_KERNEL names no kernel.
        UnsupportedError: no kernel computes the product there, and why.
        NoDeviceError: the device "cuda" is not there.
    """
    check_policy(policy)
    on = Device.find(device)
    info, names = on.info(), [kernel.name for kernel in kernels()]
    asked = product.descriptor(info, policy=POLICIES.index(policy), prefer=_launch.preference())
    index, reason = asked.select(info)
    candidates, refused = _candidates(product, info)
    dense = asked.estimate(info, _launch.EXPAND_AND_RUN_DENSE) or None
    kernel = None if index == _launch.EXPAND_AND_RUN_DENSE else names[index]
    times = {candidate.kernel: candidate.microseconds for candidate in candidates}
    return KernelChoice(
        product,
        on,
        kernel,
        reason,
        dense if kernel is None else times[kernel],
        next((candidate for candidate in candidates if candidate.kernel != kernel), None),
        dense,
        candidates,
        refused,
    )


def _candidates(product: Product, info: _C.DeviceInfo) -> tuple[tuple[Candidate, ...], dict[str, str]]:
    found, refused = [], {}
    asked = product.descriptor(info)
    for number, kernel in enumerate(kernels()):
        if kernel.device != KINDS[info.device]:
            continue
        try:
            found.append(Candidate(kernel.name, asked.estimate(info, number) or None))
        except UnsupportedError as error:
            refused[kernel.name] = str(error).partition(": ")[2]
    return tuple(sorted(found, key=lambda each: each.microseconds or math.inf)), refused


def _microseconds(time: float | None) -> str:
    return "no estimate" if time is None else f"estimated {time:.1f} us"


@checked
@contextmanager
def prefer(kernel: str) -> Iterator[None]:
    """Within it products run on kernels with a certain name or beginning of one, where these compute them.

    All others run on what is best; ``TILESPARSE_LOG=1`` and `choose` say which. It comes before
    ``TILESPARSE_KERNEL``, what was measured, estimates, and the policy "auto". It counts for the whole
    process, since backward passes run in threads of their own: for those that run within it, whenever their
    forward pass did. Compiled code follows it but for what the policy "auto" has decided; a captured CUDA
    graph keeps its kernels.

    Args:
        kernel: as "sm80_dds_nt_bf16_128x128", or the beginning of several names, as "sm80_".

    Raises:
        InvalidArgumentError: no kernel's name begins so; the text lists all.
        UnsupportedError: it is within code that is being compiled or exported; enter it around the call.
    """
    if torch.compiler.is_compiling():
        raise UnsupportedError(
            "tilesparse.prefer is within code that is compiled, where it would be lost; enter it around the "
            "call of the compiled function"
        )
    names = [known.name for known in kernels()]
    if not isinstance(kernel, str) or not kernel or not any(name.startswith(kernel) for name in names):
        raise InvalidArgumentError(
            f"kernel: the name of a kernel or its beginning expected, got {kernel!r}; there are "
            f"{', '.join(names)}"
        )
    with _launch.prefer_kernels(kernel):
        yield

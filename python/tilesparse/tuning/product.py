"""Descriptions of products, of the ways to compute a layer and of devices, and the choice of a kernel.

`choose` asks the library for its choice, which depends on the product, the device, what `tune` has measured
on such a device, and preferences: an active `prefer` and the environment's ``TILESPARSE_KERNEL``.
"""

from __future__ import annotations

import math
import platform
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TypeAlias

import torch

from .. import _C
from .._checks import (
    BLOCK_SIDES,
    DTYPES,
    POLICIES,
    QUANTIZED,
    SCALED,
    check_block_shape,
    check_choice,
    check_flag,
    check_kind,
    check_policy,
    check_shapes,
    checked_count,
    checked_fraction,
    grid_of,
    pattern_shapes,
)
from .._runtime.launch import prefer_kernels, preference
from .._runtime.select import DECODE_TOKENS, DEQUANTIZE_AND_RUN_DENSE
from .._runtime.torch_private import tf32_allowed
from ..config import (
    BlockSparseConfig,
    LayerSpec,
    check_nm,
    check_nm_blocks,
    check_quantized_activations,
    check_storage,
)
from ..errors import InvalidArgumentError, UnsupportedError
from ..nn.linear import BlockSparseLinear
from ..nn.weight import INDEX_NAMES, dense_blocks
from ..storage.formats import storage_of

OPS = ("forward", "dgrad", "wgrad")  # in the order of the numbers of ts_matmul_desc.op
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

# A way to compute a layer: block-sparse as a config says, dense with both factors in 8 bits of this dtype, or
# dense in the dtype of the layer, None.
Way: TypeAlias = BlockSparseConfig | torch.dtype | None

_MOST = (1 << 31) - 1  # tokens or features


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
    def find(cls, what: Device | torch.device | str | tuple[int, int] | None = None) -> Device:
        """Find a device by its name or compute capability.

        Args:
            what: "cpu"; "cuda" or "cuda:1", a device that is there; the name of a GPU, as "H100" or
                "RTX 4090"; a compute capability, as "8.6" or (8, 6), for which one such GPU stands. None is
                the current CUDA device if kernels of the library run there, otherwise the CPU; a warning
                says why if there is a GPU all the same.

        Raises:
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
        """Describe the device to the native module."""
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


def recorded(device: torch.device | Device) -> Device:
    """Describe a device for a file: unlike the library, it tells CPUs apart."""
    found = Device.find(device)
    return found if found.compute_capability is not None else replace(found, name=name_of_cpu())


def name_of_cpu() -> str:
    """Return the name of the CPU that Linux gives, or at least its architecture."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


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


@dataclass(frozen=True)
class Product:
    """One product with a block-sparse weight W [out_features, in_features].

    Attributes:
        in_features, out_features: features of W.
        tokens: rows of x and y.
        density: kept fraction of the blocks.
        block_shape: (bn, bk), or one number for both.
        dtype: dtype of the activations.
        op: "forward", y = x Wᵀ; "dgrad", the gradient of x; "wgrad", the gradient of W.
        storage: storage of the values, as in `BlockSparseLinear`: "plain", "compressed", "int8",
            "float8_e4m3fn" or "int4".
        nm: (2, 4) for values that are 2:4 and not stored plain.
        column_major: True for column-major (transposed) x and y, as in `functional.dsd`.
        activations: None, or the name of the storage: x is multiplied in 8 bits, too; op is "forward" then.
        tf32: True multiplies float32 in TF32 on CUDA devices; None takes PyTorch's current setting. It
            becomes False for other dtypes.
        use_fast_accum: True lets tensor cores of CUDA devices add all products of float8, as in
            `functional.quantized_linear`. It becomes False unless activations are "float8_e4m3fn".
    """

    in_features: int
    out_features: int
    tokens: int
    density: float = 0.5
    block_shape: int | Sequence[int] = (64, 64)
    dtype: torch.dtype = torch.float32
    op: str = "forward"
    storage: str = "plain"
    nm: tuple[int, int] | None = None
    column_major: bool = False
    tf32: bool | None = None
    activations: str | None = None
    use_fast_accum: bool = False

    def __post_init__(self) -> None:
        for name in ("in_features", "out_features", "tokens"):
            object.__setattr__(self, name, checked_count(name, getattr(self, name), most=_MOST))
        object.__setattr__(self, "density", checked_fraction("density", self.density))
        shapes = pattern_shapes if self.storage == "plain" and self.nm is None else check_shapes
        block_shape = shapes((self.out_features, self.in_features), self.block_shape)[1]
        object.__setattr__(self, "block_shape", block_shape)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("op", self.op, OPS)
        check_nm(self.nm, False)
        if self.nm is not None:
            object.__setattr__(self, "nm", tuple(self.nm))  # which has a hash
        check_nm_blocks(self.nm, False, block_shape)
        check_storage(self.storage, self.nm)
        storage = storage_of(self.storage)
        if storage.multiplied(self.nm) != self.storage:
            raise InvalidArgumentError("nm must be None with storage 'plain': kernels read 2:4 compressed")
        if not storage.trainable and self.op == "wgrad":
            raise InvalidArgumentError(f"storage must be 'plain' for wgrad, got {self.storage!r}")
        self._check_activations()
        check_flag("column_major", self.column_major)
        if not isinstance(self.tf32, bool | None):
            raise InvalidArgumentError(f"tf32 must be True, False or None, got {self.tf32!r}")
        tf32 = tf32_allowed() if self.tf32 is None else self.tf32
        is_tf32 = self.dtype == torch.float32 and tf32 and self.activations is None
        object.__setattr__(self, "tf32", is_tf32)
        check_flag("use_fast_accum", self.use_fast_accum)
        fast = self.use_fast_accum and self.activations == "float8_e4m3fn"
        object.__setattr__(self, "use_fast_accum", fast)

    def _check_activations(self) -> None:
        if self.activations is None:
            return
        check_quantized_activations(self.activations, self.storage, self.in_features)
        for name, wanted in (("op", "forward"), ("column_major", False)):
            if getattr(self, name) != wanted:
                raise InvalidArgumentError(
                    f"{name} must be {wanted!r} with activations, got {getattr(self, name)!r}"
                )
        if self.dtype == torch.float64:
            raise InvalidArgumentError("dtype must have 16 or 32 bits with activations, got torch.float64")

    @classmethod
    def of(cls, layer: BlockSparseLinear, *, tokens: int, op: str = "forward") -> Product:
        """Describe a product of a layer; while it trains with 2:4, the product with compressed values.

        Layers with 8-bit activations multiply gradients, and few tokens on CUDA, in their own dtype.

        Args:
            layer: a BlockSparseLinear.
            tokens: rows of x, the product of its leading dimensions.
            op: "forward", "dgrad" (the gradient of x) or "wgrad" (the gradient of W).
        """
        few = layer.weight.is_cuda and tokens <= DECODE_TOKENS
        product = product_of_spec(layer.spec, tokens, op, None if few else layer.activations)
        return replace(product, use_fast_accum=layer.use_fast_accum)

    @property
    def nnz(self) -> int:
        """Number of kept blocks."""
        return round(self.density * self.blocks)

    @property
    def blocks(self) -> int:
        """Number of all blocks, kept or not."""
        return math.prod(grid_of((self.out_features, self.in_features), self._block_shape))

    @property
    def _block_shape(self) -> tuple[int, int]:
        return check_block_shape(self.block_shape, BLOCK_SIDES)

    def descriptor(self, device: _C.DeviceInfo, *, policy: int = 0, prefer: str = "") -> _C.Product:
        """Describe the product to the native module, without operands; ``policy`` is a number of POLICIES."""
        shape = self.out_features, self.in_features
        layout = int(self.column_major)
        eight = QUANTIZED[getattr(torch, self.activations)] if self.activations is not None else None
        stored = storage_of(self.storage).product_fields(self.nm, self.activations)
        on_cuda = device.device == KINDS.index("cuda")
        ldx, ldy = (self.tokens, self.tokens) if layout else (self.in_features, self.out_features)
        return _C.Product(
            _C.Pattern(*self._block_shape, *shape, self.nnz, 0, 0, 0),
            OPS.index(self.op),
            DTYPES[self.dtype] if eight is None else eight,
            device.device,
            self.tokens,
            precision=int((bool(self.tf32) or self.use_fast_accum) and on_cuda),
            result_dtype=0 if eight is None else DTYPES[self.dtype],
            policy=policy,
            x_layout=layout,
            ldx=ldx,
            y_layout=layout,
            ldy=ldy,
            prefer=prefer,
            **stored,
        )

    def __str__(self) -> str:
        bn, bk = self._block_shape
        extras = [self.storage] * (not storage_of(self.storage).trainable) + ["2:4"] * (self.nm is not None)
        extras += ["W8A8"] * (self.activations is not None)
        extras += ["column-major"] * self.column_major + ["TF32"] * bool(self.tf32)
        extras += ["fast sums"] * self.use_fast_accum
        words = [
            f"{self.op} of {self.in_features} -> {self.out_features} features",
            f"{self.tokens} tokens",
            f"density {self.density:.4g}",
            f"blocks {bn}x{bk}",
            dtype_name(self.dtype),
            *extras,
        ]
        return ", ".join(words)


def product_of_spec(spec: LayerSpec, tokens: int, op: str, activations: str | None) -> Product:
    """Describe a product of a layer; gradients know no 8-bit activations, and that of W no 2:4."""
    rows, columns = spec.shape
    blocks = math.prod(spec.grid)
    nm = None if op == "wgrad" else spec.nm
    return Product(
        columns,
        rows,
        tokens,
        spec.nnz / blocks if blocks else 0.0,
        spec.block_shape,
        spec.dtype,
        op,
        "plain" if op == "wgrad" else storage_of(spec.storage).multiplied(nm),
        nm,
        activations=activations if op == "forward" else None,
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the module: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def describe_way(way: Way) -> str:
    """Describe a way to compute a layer: "dense", "dense int8" or "density 0.5, 32x32, int8 W8A8"."""
    if not isinstance(way, BlockSparseConfig):
        return "dense" if way is None else f"dense {dtype_name(way).removesuffix('_e4m3fn')}"
    bn, bk = check_block_shape(way.block_shape)
    storage = storage_of(way.storage)
    extra = "" if storage.trainable and way.nm is None else f", {storage.describe(way.nm, way.activations)}"
    return f"density {way.density:g}, {bn}x{bk}{extra}"


def in_own_dtype(way: Way) -> Way:
    """Return the way with the same blocks whose weights and activations have the dtype of the model."""
    return BlockSparseConfig(way.density, way.block_shape) if isinstance(way, BlockSparseConfig) else None


@cache
def kernels() -> tuple[_C.KernelInfo, ...]:
    """Return all kernels of the library, those of the CPU first, by the numbers that it knows them by."""
    return tuple(_C.kernels())


@dataclass(frozen=True)
class KernelChoice:
    """The choice of a kernel for a product on a device.

    Attributes:
        product, device: arguments of `choose`.
        kernel: name of the kernel; None if W is written out and multiplied densely.
        reason: reason of the choice, with estimated or measured times.
        microseconds: estimated time of the choice; None if there is no estimate.
        dense_microseconds: estimated time of writing W out and the dense product; None if dense products
            were not measured on such a device.
        candidates: estimated microseconds, or None, of all kernels that compute the product by name, the
            least estimate first, otherwise in the order in which the library prefers them.
    """

    product: Product
    device: Device
    kernel: str | None
    reason: str
    microseconds: float | None
    dense_microseconds: float | None
    candidates: Mapping[str, float | None]

    @property
    def dequantizes(self) -> bool:
        """True if every call first writes dense blocks of values that are stored in fewer bytes."""
        product = self.product
        storage = storage_of(product.storage)
        if storage.trainable or self.kernel is None:
            return not storage.trainable
        if product.activations is not None:
            return False
        kernel = next(kernel for kernel in kernels() if kernel.name == self.kernel)
        reads = storage.dtype is None or kernel.values_dtypes >> SCALED[storage.dtype] & 1
        return not (kernel.storages >> (product.nm is not None) & 1 and reads)

    def __str__(self) -> str:
        lines = [
            str(self.product),
            f"  on {self.device}",
            f"  {self.kernel or 'dense'}: {self.reason}",
        ]
        return "\n".join(lines)


def choose(
    product: Product,
    device: Device | torch.device | str | tuple[int, int] | None = None,
    *,
    policy: str = "sparse",
) -> KernelChoice:
    """Return the kernel that would compute a product, and the reason; nothing is run.

    Args:
        product: sizes, dtypes and storage.
        device: see `Device.find`; a GPU need not be there. Measurements of `tilesparse.tuning.tune` count for
            devices of the same name.
        policy: policy of the layer: "sparse", "auto" or "dense".

    Raises:
        UnsupportedError: no kernel computes the product there; the text says why.
        NoDeviceError: the device "cuda" is not there.
    """
    check_policy(policy)
    check_kind("product", product, Product)
    on = Device.find(device)
    info, names = on.info(), [kernel.name for kernel in kernels()]
    asked = product.descriptor(info, policy=POLICIES.index(policy), prefer=preference())
    index, reason = asked.select(info)
    candidates: dict[str, float | None] = {}
    for number, known in enumerate(kernels()):
        if known.device == info.device:
            with suppress(UnsupportedError):
                candidates[known.name] = asked.estimate(info, number) or None
    candidates = dict(sorted(candidates.items(), key=lambda each: each[1] or math.inf))
    dense = asked.estimate(info, DEQUANTIZE_AND_RUN_DENSE) or None
    kernel = None if index == DEQUANTIZE_AND_RUN_DENSE else names[index]
    estimate = dense if kernel is None else candidates[kernel]
    return KernelChoice(product, on, kernel, reason, estimate, dense, candidates)


@contextmanager
def prefer(kernel: str) -> Iterator[None]:
    """Prefer kernels by name or prefix for the products that run within this context.

    Products that these kernels do not compute run on the best other kernel; ``TILESPARSE_LOG=1`` and `choose`
    say which. The preference comes before ``TILESPARSE_KERNEL``, measurements, estimates and the policy
    "auto". It holds for the whole process, because backward passes run in threads of their own: for each
    backward pass that runs within the context, whenever its forward pass ran. Compiled code follows it except
    for decisions of the policy "auto"; a captured CUDA graph keeps its kernels.

    Args:
        kernel: a name as "sm80_dds_nt_bf16_128x128", or the prefix of several names, as "sm80_".

    Raises:
        UnsupportedError: the code is being compiled or exported; enter the context around the call.
    """
    if torch.compiler.is_compiling():
        raise UnsupportedError(
            "prefer has no effect within code that is compiled; enter it around the call of the "
            "compiled function"
        )
    names = [known.name for known in kernels()]
    if not isinstance(kernel, str) or not kernel or not any(name.startswith(kernel) for name in names):
        raise InvalidArgumentError(
            f"kernel must be the name of a kernel or a prefix of it, got {kernel!r}; there are "
            f"{', '.join(names)}"
        )
    with prefer_kernels(kernel):
        yield


def is_converted_in_calls(layer: BlockSparseLinear, tokens: Iterable[int] = ()) -> bool:
    """Return True if products with so many tokens would convert a layer's values in every call.

    Without numbers of tokens that of decode counts, 1: some kernels of the CPU read 4 bits of few tokens.
    """
    if storage_of(layer.storage).multiplied(layer.nm) != layer.storage:
        return True
    products = [Product.of(layer, tokens=count) for count in tokens or (1,)]
    return any(choose(product, layer.weight.device).dequantizes for product in products)


def stored_for_kernels(layer: BlockSparseLinear, tokens: int = 1) -> BlockSparseLinear:
    """Return a layer whose values no call of so many tokens has to convert: kernels read them so."""
    if choose(Product.of(layer, tokens=tokens), layer.weight.device).dequantizes:
        spec = replace(
            layer.spec, storage="plain", nm=None, transposable=False, granularity=None, activations=None
        )
        own = {name: layer.get_buffer(name) for name in INDEX_NAMES}
        own |= {} if layer.bias is None else {"bias": layer.bias}
        return type(layer).from_state(spec, {"weight": dense_blocks(layer), **own})
    multiplied = storage_of(layer.storage).multiplied(layer.nm)
    return layer if multiplied == layer.storage else layer.to_storage(multiplied)

"""Products with a block-sparse weight, as kernels are chosen and measured for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import _C
from .._arguments import checked
from .._checks import DTYPES, QUANTIZED, check_block_shape, check_shapes, checked_count, checked_fraction
from .._runtime.choice import DECODE_TOKENS
from .._runtime.private import tf32_allowed
from ..config import check_nm, check_nm_blocks, check_quantized_activations, check_storage
from ..errors import InvalidArgumentError
from ..nn.linear import BlockSparseLinear
from ..storage.registry import storage_of
from .devices import KINDS

OPS = ("forward", "dgrad", "wgrad")  # in the order of the numbers of ts_matmul_desc.op
_MOST = (1 << 31) - 1  # tokens or features


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
        feature_major: True for column-major (transposed) x and y, as in `functional.dsd`.
        activations: None, or the name of the storage: x is multiplied in 8 bits, too; op is "forward" then.
        tf32: True multiplies float32 in TF32 on CUDA devices; None takes PyTorch's current setting. It
            becomes False for other dtypes.

    Raises:
        InvalidArgumentError: a value breaks a rule of products; the text names it.
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
    feature_major: bool = False
    tf32: bool | None = None
    activations: str | None = None

    def __post_init__(self) -> None:
        for name in ("in_features", "out_features", "tokens"):
            object.__setattr__(self, name, checked_count(name, getattr(self, name), most=_MOST))
        object.__setattr__(self, "density", checked_fraction("density", self.density))
        block_shape = check_block_shape(self.block_shape)
        object.__setattr__(self, "block_shape", block_shape)
        check_shapes((self.out_features, self.in_features), block_shape)
        if not isinstance(self.dtype, torch.dtype) or self.dtype not in DTYPES:
            raise InvalidArgumentError(f"dtype must be one of {list(map(str, DTYPES))}, got {self.dtype}")
        if self.op not in OPS:
            raise InvalidArgumentError(f"op must be one of {list(OPS)}, got {self.op!r}")
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
        if not isinstance(self.feature_major, bool):
            raise InvalidArgumentError(f"feature_major must be True or False, got {self.feature_major!r}")
        if not isinstance(self.tf32, bool | None):
            raise InvalidArgumentError(f"tf32 must be True, False or None, got {self.tf32!r}")
        tf32 = tf32_allowed() if self.tf32 is None else self.tf32
        is_tf32 = self.dtype == torch.float32 and tf32 and self.activations is None
        object.__setattr__(self, "tf32", is_tf32)

    def _check_activations(self) -> None:
        if self.activations is None:
            return
        check_quantized_activations(self.activations, self.storage, self.in_features)
        for name, wanted in (("op", "forward"), ("feature_major", False)):
            if getattr(self, name) != wanted:
                raise InvalidArgumentError(
                    f"{name} must be {wanted!r} with activations, got {getattr(self, name)!r}"
                )
        if self.dtype == torch.float64:
            raise InvalidArgumentError("dtype must have 16 or 32 bits with activations, got torch.float64")

    @classmethod
    @checked
    def of(cls, layer: BlockSparseLinear, *, tokens: int, op: str = "forward") -> Product:
        """Describe a product of a layer; while it trains with 2:4, the product with compressed values.

        Layers with 8-bit activations multiply gradients, and few tokens on CUDA, in their own dtype.

        Args:
            layer: a BlockSparseLinear.
            tokens: rows of x, the product of its leading dimensions.
            op: "forward", "dgrad" (the gradient of x) or "wgrad" (the gradient of W).

        Raises:
            InvalidArgumentError: ``layer`` is not a BlockSparseLinear, or another argument is invalid.
        """
        bn, bk = layer.block_shape
        blocks = layer.out_features // bn * (layer.in_features // bk)
        storage, nm = multiplied(op, layer.storage, layer.nm)
        few = layer.weight.is_cuda and tokens <= DECODE_TOKENS
        return cls(
            layer.in_features,
            layer.out_features,
            tokens,
            layer.col_indices.shape[0] / blocks if blocks else 0.0,
            (bn, bk),
            layer.spec.dtype,
            op,
            storage,
            nm,
            activations=None if few or op != "forward" else layer.activations,
        )

    @property
    def nnz(self) -> int:
        """Number of kept blocks."""
        return round(self.density * self.blocks)

    @property
    def blocks(self) -> int:
        """Number of all blocks, kept or not."""
        bn, bk = self._block_shape
        return self.out_features // bn * (self.in_features // bk)

    @property
    def _block_shape(self) -> tuple[int, int]:
        return check_block_shape(self.block_shape)

    def descriptor(self, device: _C.DeviceInfo, *, policy: int = 0, prefer: str = "") -> _C.Product:
        """Describe the product to the native module, without operands.

        Args:
            device: device that computes it.
            policy: 0 for sparse, 1 for auto, 2 for dense.
            prefer: prefix of the names of kernels to prefer.
        """
        shape = self.out_features, self.in_features
        layout = int(self.feature_major)
        eight = QUANTIZED[getattr(torch, self.activations)] if self.activations is not None else None
        stored = storage_of(self.storage).product_fields(self.nm, self.activations)
        on_cuda = device.device == KINDS.index("cuda")
        fast = self.tf32 if eight is None else self.activations == "float8_e4m3fn"
        ldx, ldy = (self.tokens, self.tokens) if layout else (self.in_features, self.out_features)
        return _C.Product(
            _C.Pattern(*self._block_shape, *shape, self.nnz, 0, 0, 0),
            OPS.index(self.op),
            DTYPES[self.dtype] if eight is None else eight,
            device.device,
            self.tokens,
            precision=int(bool(fast) and on_cuda),
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
        extras += ["column-major"] * self.feature_major + ["TF32"] * bool(self.tf32)
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
    """Return the storage and nm of the values that a layer multiplies; the gradient of W is plain."""
    if op == "wgrad":
        return "plain", None
    return storage_of(storage).multiplied(nm), nm


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the module: "bfloat16"."""
    return str(dtype).removeprefix("torch.")

"""The stored form of layers: as asked for (`BlockSparseConfig`), and as one layer has it (`LayerSpec`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any, NamedTuple

import torch

from ._checks import (
    DTYPES,
    PACKED,
    POLICIES,
    QUANTIZED,
    SCALE_GROUP,
    as_number,
    check_block_shape,
    check_choice,
    check_compressible,
    check_exact_sums,
    check_flag,
    check_policy,
    check_shapes,
    checked_count,
    checked_threshold,
    grid_of,
    pattern_shapes,
    shown,
)
from .errors import InvalidArgumentError

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


METHOD = "tilesparse"  # in Transformers' configurations
# Fields of a manifest's entry that its first version does not have, and the version that has them.
NEWER = {"activations": 2, "experts": 3, "threshold": 4}


@dataclass(frozen=True)
class BlockSparseConfig:
    """The way in which dense linear layers become block-sparse, whatever their shapes.

    Attributes:
        density: kept fraction of the blocks, from 0 to 1.
        block_shape: (bn, bk), rows (out) and columns (in) of a block, each 16, 32, 64 or 128; or one number
            for both. The default everywhere is 64: large layers of density 0.5 are 1.7 times as fast as dense
            ones with blocks of 64, 1.2 times with 32 and 1.9 times with 128 (bfloat16, 8192 tokens, H200);
            smaller blocks keep more of a model's quality.
        nm: (2, 4) for 2:4 inside the blocks, or None.
        storage: "plain", "compressed" (2:4 alone), "int8", "float8_e4m3fn" or "int4" (without 2:4), see
            `BlockSparseLinear.to_storage`.
        transposable: keep two of each four weights in a column as well, so that the gradient of x is a 2:4
            product, too.
        granularity: what has a scale of its own in 8 and 4 bits, a "row" of a block or a "block". With
            `activations` "row" becomes "feature", and "block" is for float8_e4m3fn in blocks of 128 x 128:
            x has a scale for each 128 features of a token then, as in the float8 checkpoints of DeepSeek.
        policy: "sparse", "auto" or "dense", see `functional.linear`.
        activations: None, or the name of the storage, "int8" or "float8_e4m3fn": x is then multiplied in 8
            bits as well, see `functional.quantized_linear`; not with ``nm`` where scales are those
            of blocks.
    """

    density: float = 0.5
    block_shape: int | Sequence[int] = (64, 64)
    nm: Sequence[int] | None = None
    storage: str = "plain"
    _: KW_ONLY
    transposable: bool = False
    granularity: str = "row"
    policy: str = "sparse"
    activations: str | None = None

    def __post_init__(self) -> None:
        density = as_number(self.density)
        if not 0 <= density <= 1:
            raise InvalidArgumentError(f"density must be a number from 0 to 1, got {shown(self.density)}")
        block_shape = check_block_shape(self.block_shape)
        _check_form(self, block_shape)
        granularity = checked_granularity(self.granularity, self.activations, block_shape)
        # Python's own numbers and tuples, so that equal configs are one key of a dictionary.
        vars(self).update(
            density=density, block_shape=block_shape, nm=as_nm(self.nm), granularity=granularity
        )

    @classmethod
    def w8a8(cls, storage: str = "int8", **options: Any) -> BlockSparseConfig:
        """Return a config of weights and activations in 8 bits; `options` are the other fields."""
        return cls(storage=storage, activations=storage, **options)

    @classmethod
    def w8a16(cls, storage: str = "int8", **options: Any) -> BlockSparseConfig:
        """Return a config of weights in 8 bits, multiplied in the dtype of x; `options` as of `w8a8`."""
        return cls(storage=storage, **options)

    @classmethod
    def w4a16(cls, **options: Any) -> BlockSparseConfig:
        """Return a config of weights in 4 bits, multiplied in the dtype of x; `options` as of `w8a8`."""
        return cls(storage="int4", **options)


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """The stored form of one block-sparse layer: everything but the tensors themselves.

    Attributes:
        shape: (out_features, in_features).
        block_shape: (bn, bk).
        nnz: number of kept blocks.
        dtype: of the dense blocks: float64, float32, float16 or bfloat16.
        storage, nm, transposable, policy, activations: as in `BlockSparseConfig`.
        granularity: "row" or "block" where the storage has 8 or 4 bits, with activations "feature" or
            "block", else None.
        experts: how many weights of equal shape lie below each other in W, each for tokens of its own, see
            `BlockSparseExperts`; None is an ordinary layer.
        threshold: magnitude up to which numbers of x count as zero, see `sparsify_activations_`; None
            multiplies all of them.
    """

    shape: tuple[int, int]
    block_shape: tuple[int, int]
    nnz: int
    dtype: torch.dtype
    storage: str = "plain"
    nm: tuple[int, int] | None = None
    transposable: bool = False
    granularity: str | None = None
    policy: str = "sparse"
    activations: str | None = None
    experts: int | None = None
    threshold: float | None = None

    @classmethod
    def of(cls, pattern: Any, dtype: torch.dtype, **fields: Any) -> LayerSpec:
        """Return the spec of a layer with this `BlockPattern`; ``fields`` are the other attributes."""
        sizes = {"shape": pattern.shape, "block_shape": pattern.block_shape, "nnz": pattern.nnz}
        return cls(**sizes, dtype=dtype, **fields)

    def __post_init__(self) -> None:
        is_plain = self.storage == "plain" and self.nm is None and self.experts is None
        shapes = pattern_shapes if is_plain else check_shapes
        shape, block_shape, (rows, columns) = shapes(self.shape, self.block_shape)
        nnz = checked_count("nnz", self.nnz, 0, rows * columns)
        check_choice("dtype", self.dtype, DTYPES)
        _check_form(self, block_shape, shape[1])
        has_scales = traits_of(self.storage).dtype is not None
        allowed: tuple[str | None, ...] = GRANULARITIES if has_scales else (None,)
        if self.activations is not None:
            inside = _may_be_inside(self.activations, block_shape)
            allowed = (PER_FEATURE, "block") if inside else (PER_FEATURE,)
        if self.granularity not in allowed:
            raise InvalidArgumentError(
                f"granularity must be one of {list(allowed)} with storage {self.storage!r} and activations "
                f"{self.activations!r}, got {shown(self.granularity)}"
            )
        if self.experts is not None:
            check_experts(self.experts, shape[0], block_shape[0])
            check_of_experts(self.policy, self.activations, self.granularity)
        threshold = checked_threshold("threshold", self.threshold)
        own = {"shape": shape, "block_shape": block_shape, "nnz": nnz, "nm": as_nm(self.nm)}
        vars(self).update(own, threshold=threshold)

    @property
    def grid(self) -> tuple[int, int]:
        """(R, C): numbers of block rows and block columns."""
        return grid_of(self.shape, self.block_shape)

    @property
    def density(self) -> float:
        """Kept fraction of the blocks; 0 without any."""
        rows, columns = self.grid
        return self.nnz / (rows * columns) if rows * columns else 0.0

    @property
    def values_shape(self) -> tuple[int, int, int]:
        """(nnz, bn, bk) of the dense blocks."""
        return self.nnz, *self.block_shape

    def with_storage(
        self, storage: str, granularity: str = "row", activations: str | None = None
    ) -> LayerSpec:
        """Return the spec of the same layer in another storage; `granularity` counts where it has scales."""
        check_storage(storage, self.nm)
        check_quantized_activations(activations, storage)
        checked = checked_granularity(granularity, activations, self.block_shape)
        own = None if traits_of(storage).dtype is None else checked
        return replace(self, storage=storage, granularity=own, activations=activations)

    def to_json(self) -> dict[str, Any]:
        """Return the entry of a checkpoint's manifest for this layer; what is newer is in it only if set."""
        entry = {
            "shape": list(self.shape),
            "block_shape": list(self.block_shape),
            "nnz": self.nnz,
            "dtype": str(self.dtype).removeprefix("torch."),
            "storage": self.storage,
            "nm": None if self.nm is None else list(self.nm),
            "transposable": self.transposable,
            "scales": self.granularity,  # the format's name of the field
            "policy": self.policy,
        }
        newer = {name: getattr(self, name) for name in NEWER}
        return {**entry, **{name: value for name, value in newer.items() if value is not None}}

    @classmethod
    def from_json(cls, entry: object) -> LayerSpec:
        """Return the spec that a manifest's entry describes."""
        names = ["scales" if field.name == "granularity" else field.name for field in fields(cls)]
        if not isinstance(entry, Mapping) or {*entry, *NEWER} != {*names}:
            raise InvalidArgumentError(f"entry must have exactly {', '.join(names)}, got {shown(entry)}")
        pairs = {name: entry[name] for name in ("shape", "block_shape")}
        for name, pair in pairs.items():
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise InvalidArgumentError(f"{name} must be two numbers, got {shown(pair)}")
        counts = {name: [entry[name]] for name in ("nnz", "experts") if name in entry}
        for name, numbers in {**pairs, **counts}.items():
            if not all(type(number) is int and 0 <= number < 2**31 for number in numbers):
                raise InvalidArgumentError(
                    f"{name} must be integers from 0 to 2^31 - 1, got {shown(entry[name])}"
                )
        for name, allowed in (("dtype", tuple(_DTYPES)), ("policy", POLICIES)):
            check_choice(name, entry[name], allowed)
        own = {**entry, "dtype": _DTYPES[entry["dtype"]]}
        return cls(granularity=own.pop("scales"), **own)


def _check_form(form: BlockSparseConfig | LayerSpec, block_shape: tuple[int, int], *in_features: int) -> None:
    """Check the fields that configs and specs share, but for the granularity of scales."""
    check_flag("transposable", form.transposable)
    check_nm(form.nm, form.transposable)
    check_nm_blocks(form.nm, form.transposable, block_shape)
    check_storage(form.storage, form.nm)
    check_quantized_activations(form.activations, form.storage, *in_features)
    if form.activations is not None and form.granularity == "block" and form.nm is not None:
        raise InvalidArgumentError(  # scales inside of the sums and 2:4: there is no such product
            f"nm must be None with activations={form.activations!r} and granularity='block', got "
            f"{shown(form.nm)}"
        )
    check_policy(form.policy)


def check_experts(experts: object, rows: int, block_rows: int) -> None:
    """Raise InvalidArgumentError unless a weight of so many rows can be that of so many experts."""
    if not isinstance(experts, int) or experts < 1 or rows % (experts * block_rows):
        raise InvalidArgumentError(
            f"experts must divide the {rows} rows of W into whole blocks of {block_rows} rows, got "
            f"{shown(experts)}"
        )


def check_of_experts(policy: str, activations: str | None, granularity: str | None) -> None:
    """Raise InvalidArgumentError for a policy, or for scales beside 8-bit activations, that experts lack."""
    if policy != "sparse":
        raise InvalidArgumentError(f"policy must be 'sparse' with experts, got {policy!r}")
    if activations is not None and granularity == "block":
        raise InvalidArgumentError(
            f"granularity must be {PER_FEATURE!r} with experts and 8-bit activations, got 'block'"
        )


def check_quantized_activations(activations: object, storage: str, in_features: int | None = None) -> None:
    """Raise InvalidArgumentError unless x can be multiplied in 8 bits by weights that are stored so."""
    if activations is None:
        return
    if traits_of(storage).dtype not in QUANTIZED or activations != storage:
        raise InvalidArgumentError(
            f"activations must be None, or the dtype of the storage where that has 8 bits, got "
            f"{shown(activations)} with storage {storage!r}"
        )
    if in_features is not None:
        check_exact_sums("in_features", in_features, traits_of(storage).dtype)


def checked_granularity(
    granularity: object, activations: str | None, block_shape: tuple[int, int] | None = None
) -> str:
    """Return what has a scale of its own: with 8-bit activations a feature in place of a row."""
    if activations is not None and granularity in ("row", PER_FEATURE):
        return PER_FEATURE
    if granularity == "block" and (activations is None or _may_be_inside(activations, block_shape)):
        return "block"
    if activations is not None or granularity not in GRANULARITIES:
        allowed = (
            f"{PER_FEATURE!r} with 8-bit activations, or 'block' with float8_e4m3fn in blocks of 128 x 128"
            if activations
            else "'row' or 'block'"
        )
        raise InvalidArgumentError(f"granularity must be {allowed}, got {shown(granularity)}")
    return str(granularity)


def _may_be_inside(activations: str, block_shape: tuple[int, int] | None) -> bool:
    """Return True where scales of blocks may be inside of the sums."""
    return activations == "float8_e4m3fn" and block_shape in (None, (SCALE_GROUP, SCALE_GROUP))


def as_nm(nm: Sequence[int] | None) -> tuple[int, int] | None:
    """Return a checked `nm` as a tuple."""
    return None if nm is None else (int(nm[0]), int(nm[1]))


def check_nm(nm: object, transposable: bool = False) -> None:
    """Raise InvalidArgumentError unless nm is 2:4 or None; only 2:4 has transposable masks."""
    if nm is not None and (not isinstance(nm, tuple | list) or tuple(nm) != (2, 4)):
        raise InvalidArgumentError(f"nm must be (2, 4) or None, got {shown(nm)}")
    if transposable and nm is None:
        raise InvalidArgumentError("transposable must be False without nm=(2, 4), got True")


def check_nm_blocks(nm: object, transposable: bool, block_shape: tuple[int, int]) -> None:
    """Raise InvalidArgumentError unless groups of four and their metadata fit into the blocks."""
    if nm is not None:
        check_compressible("nm: 2:4", block_shape)
    if transposable:
        check_compressible("transposable: 2:4", block_shape, transposed=True)


def check_storage(storage: Any, nm: object) -> None:
    """Raise InvalidArgumentError unless the storage exists and can store weights with this nm."""
    if storage not in STORAGES:
        raise InvalidArgumentError(f"storage must be one of {list(STORAGES)}, got {shown(storage)}")
    if traits_of(storage).needs_nm and nm is None:
        raise InvalidArgumentError(f"storage must not be {storage!r} without nm=(2, 4)")
    if not traits_of(storage).allows_nm and nm is not None:
        raise InvalidArgumentError(
            f"nm must be None with storage {storage!r}, whose blocks are dense, got {shown(nm)}"
        )


GRANULARITIES = ("row", "block")  # what may have a scale of its own in 8 and 4 bits
PER_FEATURE = "feature"  # what has one where x has 8 bits as well


class Traits(NamedTuple):
    """One storage of values.

    Attributes:
        name: as in `LayerSpec.storage`.
        dtype: of the stored values, which are finite and have scales; None is the layer's, without scales.
        trainable: True where the weight is its dense blocks, the only form that has a gradient.
        needs_nm: True where only 2:4 can be stored.
        allows_nm: False where 2:4 cannot be stored.
    """

    name: str
    dtype: torch.dtype | None = None
    trainable: bool = False
    needs_nm: bool = False
    allows_nm: bool = True


_BY_NAME = {
    traits.name: traits
    for traits in (
        Traits("plain", trainable=True),
        Traits("compressed", needs_nm=True),
        Traits("int8", torch.int8),
        Traits("float8_e4m3fn", torch.float8_e4m3fn),
        Traits("int4", PACKED, allows_nm=False),
    )
}
STORAGES = tuple(_BY_NAME)
STORED_DTYPES = frozenset(traits.dtype for traits in _BY_NAME.values()) - {None}  # not those of layers


def traits_of(storage: str) -> Traits:
    """Return the traits of the storage of this name, one of `STORAGES`."""
    return _BY_NAME[storage]

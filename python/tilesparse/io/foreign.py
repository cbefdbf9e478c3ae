"""Weights in the checkpoints of other libraries, recognised by the names of their tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._checks import QUANTIZED, SCALE_GROUP
from .._files import StoredTensor, checked_texts, named, read_header, read_json, read_tensor, sentence
from ..errors import CheckpointError, CheckpointNotFoundError, InvalidArgumentError, UnsupportedError
from .manifest import CONFIG, INDEX, WEIGHTS
from .matrices import MATRICES, read_matrix

PICKLES = (".pt", ".pth", ".bin")


class Weight(NamedTuple):
    """One weight as its file has it: W is values, times scales where there are any.

    Attributes:
        values: [out_features, in_features], with ``slots`` half as many columns: floats, or int8 and
            float8_e4m3fn codes.
        scales: float32 [out_features, groups of equal width along in_features], or [R, C] with ``blocks``.
        bits: 4 for int8 codes from -8 to 7, else 8; None without scales.
        blocks: True where scales belong to blocks of 128 x 128.
        slots: uint8 [out_features, in_features / 8], bits of the two places in each four that values are of,
            zeros among them; None where values are of all places.
        reason: why no storage holds these values exactly, which then are floats; empty otherwise.
    """

    values: Tensor
    scales: Tensor | None = None
    bits: int | None = None
    blocks: bool = False
    slots: Tensor | None = None
    reason: str = ""

    @property
    def shape(self) -> tuple[int, int]:
        """[out_features, in_features]."""
        rows, columns = self.values.shape
        return rows, columns if self.slots is None else 2 * columns

    def expanded(self) -> Weight:
        """Return the same weight with the values of all places."""
        if self.slots is None:
            return self
        return self._replace(values=_placed(self.values, bools_of(self.slots)), slots=None)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return W [out_features, in_features]."""
        if self.slots is not None:
            return self.expanded().dense(dtype)
        if self.scales is None:
            return self.values.to(dtype)
        (rows, columns), scales = self.shape, self.scales
        if self.blocks:
            scales = scales.repeat_interleave(SCALE_GROUP, 0)[:rows]
        width = SCALE_GROUP if self.blocks else columns // scales.shape[1]
        return (self.values.float() * scales.repeat_interleave(width, 1)[:, :columns]).to(dtype)


Parts = Mapping[str, Tensor]


class Format(NamedTuple):
    """One library's form of a weight.

    Attributes:
        name: as its library calls it.
        needs: ends of names that a weight in this format has; ``allows``: those that it may have.
        read: makes the weight of these tensors and of the settings of the checkpoint.
    """

    name: str
    needs: frozenset[str]
    allows: frozenset[str]
    read: Callable[[Parts, Settings], Weight]


class Settings(NamedTuple):
    """Quantized values as a configuration has them: bits, and whether x is multiplied in 8 bits, too."""

    bits: int | None = None
    activations: bool = False


def _bits(parts: Parts) -> tuple[Tensor, int]:
    """Return the checked bitmask, uint8 with the lowest bit first, and in_features."""
    shape, bits = parts["shape"].flatten(), parts["bitmask"]
    if shape.dtype != torch.int64 or shape.numel() != 2:
        raise CheckpointError(f"shape must be two numbers of int64, got {list(shape.shape)} of {shape.dtype}")
    rows, columns = shape.tolist()
    if rows < 0 or columns < 0 or bits.dtype != torch.uint8 or bits.shape != (rows, -(-columns // 8)):
        raise CheckpointError(
            f"bitmask must be uint8 with a bit for each value of {rows} x {columns}, got "
            f"{list(bits.shape)} of {bits.dtype}"
        )
    if columns % 8 and bool((bits[:, -1] >> columns % 8).any()):
        raise CheckpointError("bitmask must have zeros behind the last column of a row, got ones")
    return bits, columns


def bools_of(bits: Tensor) -> Tensor:
    """Return the bools [rows, 8 n] of bits [rows, n]."""
    return (bits[..., None] >> torch.arange(8, dtype=torch.uint8)).bitwise_and_(1).flatten(1).bool()


def _placed(values: Tensor, mask: Tensor) -> Tensor:
    """Return values, in the order of the mask, in a matrix with zeros elsewhere."""
    _check_count(values, int(mask.count_nonzero()))  # several times as fast as a sum
    placed = torch.zeros(mask.shape, dtype=values.dtype)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize]
    placed.view(integers).masked_scatter_(mask, values.flatten().view(integers))
    return placed


def _check_count(values: Tensor, count: int) -> None:
    if values.numel() != count:
        raise CheckpointError(
            f"compressed must have a value for each of the {count} bits that are set, got {values.numel()}"
        )


def _bitmask(parts: Parts, settings: Settings) -> Weight:
    bits, columns = _bits(parts)
    mask = bools_of(bits)[:, :columns].contiguous()
    starts = parts.get("row_offsets")
    counts = mask.count_nonzero(1)
    if starts is not None and not torch.equal(starts.flatten(), counts.cumsum(0) - counts):
        raise CheckpointError("row_offsets must be where the rows of bitmask begin, got others")
    return _scaled(Weight(_placed(parts["compressed"], mask)), parts)


def _bitmask_2_4(parts: Parts, settings: Settings) -> Weight:
    (bits, columns), values = _bits(parts), parts["compressed"]
    if columns % 8 == 0:
        pairs = bits - ((bits >> 1) & 0x55)
        if bool(((pairs & 0x33) + ((pairs >> 2) & 0x33) != 0x22).any()):
            raise CheckpointError(_NOT_2_4)
        _check_count(values, 4 * bits.numel())
        return _scaled(Weight(values.reshape(len(bits), columns // 2), slots=bits), parts)
    # Groups run over the whole matrix: one may cross the end of a row.
    mask = bools_of(bits)[:, :columns].contiguous()
    if mask.numel() % 4 or not bool((mask.view(-1, 4).sum(1) == 2).all()):
        raise CheckpointError(_NOT_2_4)
    return _scaled(Weight(_placed(values, mask)), parts)


_NOT_2_4 = "bitmask must have two bits in every four, as 2:4 has, got another number"


def _scaled(weight: Weight, parts: Parts) -> Weight:
    """Return a weight of 8-bit codes with the scales beside them; others have none."""
    values = weight.values
    if values.dim() != 2:
        raise CheckpointError(f"weight must be a matrix, got shape {list(values.shape)}")
    scale = parts.get("weight_scale")
    if scale is None:
        if values.dtype in QUANTIZED:
            raise CheckpointError(f"weight_scale must be there for values of {values.dtype}, it is missing")
        return weight
    if values.dtype not in QUANTIZED:
        raise CheckpointError(f"weight_scale must not be there for values of {values.dtype}")
    return _symmetric(weight._replace(scales=_scales(scale, weight.shape), bits=8), parts)


def _scales(scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return checked scales as float32 [out_features, groups]."""
    rows, columns = shape
    scales = scale.float()
    if scales.numel() == 1:
        scales = scales.reshape(1, 1).expand(rows, 1)
    elif scales.dim() == 1:
        scales = scales[:, None]
    if not scale.is_floating_point() or scales.dim() != 2 or scales.shape[0] != rows or not scales.shape[1]:
        raise CheckpointError(f"weight_scale must be numbers for {rows} rows, got {list(scale.shape)}")
    if columns % scales.shape[1]:
        raise CheckpointError(
            f"weight_scale must divide {columns} columns into equal groups, got {scales.shape[1]} of them"
        )
    if not bool(scales.isfinite().all()):
        raise CheckpointError("weight_scale must be finite")
    return scales.contiguous()


def _symmetric(weight: Weight, parts: Parts) -> Weight:
    """Return the weight, dequantized where zero points or an order of columns leave no exact storage."""
    scales, points, order = weight.scales, parts.get("weight_zero_point"), parts.get("weight_g_idx")
    assert scales is not None
    rows, columns = weight.shape
    groups = scales.shape[1]
    if order is not None:
        if order.shape != (columns,) or not bool(((order >= 0) & (order < groups)).all()):
            raise CheckpointError(f"weight_g_idx must have a group for each of {columns} columns")
        if torch.equal(order.long(), torch.arange(groups).repeat_interleave(columns // groups)):
            order = None
    if points is not None:
        points = _points(points, rows, groups, weight.bits or 8)
        if not bool(points.any()):
            points = None
    if order is None and points is None:
        return weight
    of_columns = torch.arange(groups).repeat_interleave(columns // groups) if order is None else order.long()
    codes = weight.expanded().values.float()
    if points is not None:
        codes = codes - points.float()[:, of_columns]
    reason = "zero points" if points is not None else "columns in another order than their scales"
    return Weight(codes * scales[:, of_columns], reason=reason)


def _points(points: Tensor, rows: int, groups: int, bits: int) -> Tensor:
    """Return zero points [out_features, groups], which 4-bit formats pack along out_features."""
    if points.dtype == torch.int32 and points.shape == (-(-rows // (32 // bits)), groups):
        return _unpacked(points.t().contiguous(), rows, bits).t()
    if points.numel() in (1, rows * groups):
        return points.expand(rows, groups) if points.numel() == 1 else points.reshape(rows, groups)
    raise CheckpointError(f"weight_zero_point must be numbers for {rows} rows, got {list(points.shape)}")


def _unpacked(words: Tensor, columns: int, bits: int) -> Tensor:
    """Return int8 codes [rows, columns] of int32 words [rows, n], lowest bits first, without their offset."""
    if bits == 8:
        return (words.view(torch.uint8)[:, :columns] ^ 128).view(torch.int8)
    if bits == 4:  # whole bytes at a time
        pairs = words.view(torch.uint8)
        codes = torch.stack([pairs & 15, pairs >> 4], -1).flatten(1)[:, :columns]
        return codes.view(torch.int8) - 8
    shifts = torch.arange(0, 32 // bits * bits, bits, dtype=torch.int32)
    codes = (words[..., None] >> shifts).bitwise_and_((1 << bits) - 1).flatten(1)[:, :columns]
    return (codes - (1 << (bits - 1))).to(torch.int8)


def _packed(parts: Parts, settings: Settings) -> Weight:
    words, shape = parts["weight_packed"], parts["weight_shape"].flatten()
    if shape.numel() != 2 or words.dtype != torch.int32 or words.dim() != 2:
        raise CheckpointError("weight_packed must be int32 and a matrix, and weight_shape two numbers")
    rows, columns = shape.tolist()
    fitting = [bits for bits in (4, 8, 2, 3) if words.shape == (rows, -(-columns // (32 // bits)))]
    bits = settings.bits if settings.bits in fitting else next(iter(fitting), None)
    if bits is None or rows < 0 or columns < 1:
        raise CheckpointError(
            f"weight_packed must hold {rows} x {columns} codes of 2, 3, 4 or 8 bits, got {list(words.shape)}"
        )
    codes = _unpacked(words, columns, bits)
    return _symmetric(Weight(codes, _scales(parts["weight_scale"], codes.shape), max(4, bits)), parts)


def _block_scales(parts: Parts, settings: Settings) -> Weight:
    weight, scales = parts["weight"], parts["weight_scale_inv"]
    grid = tuple(-(-size // SCALE_GROUP) for size in weight.shape)
    if weight.dim() != 2 or weight.dtype != torch.float8_e4m3fn or scales.shape != grid:
        raise CheckpointError(
            "weight must be a matrix of float8_e4m3fn, and weight_scale_inv have a number for each block of "
            f"128 x 128, got {list(weight.shape)} of {weight.dtype} and {list(scales.shape)}"
        )
    return Weight(weight, scales.float(), 8, blocks=True)


def _times_mask(weight: str, mask: str) -> Callable[[Parts, Settings], Weight]:
    def read(parts: Parts, settings: Settings) -> Weight:
        values, kept = parts[weight], parts[mask]
        if values.shape != kept.shape or not bool(((kept == 0) | (kept == 1)).all()):
            raise CheckpointError(f"{mask} must have a 0 or 1 for each value of {weight}, got others")
        if values.dim() != 2:
            return Weight(values * kept, reason="no matrix")
        return Weight(torch.where(kept.bool(), values, torch.zeros((), dtype=values.dtype)))

    return read


def _hugging_face_blocks(parts: Parts, settings: Settings) -> Weight:
    """Read a weight of pytorch_block_sparse, whose blocks of 32 x 32 are stored transposed."""
    data, kept = parts["weight.data"], parts["weight.block_mask"]
    columns, starts = parts["weight.cols_a"], parts["weight.row_start_ends_a"]
    nnz = int(kept.sum()) if kept.dim() == 2 else -1
    if data.shape != (32 * nnz, 32) or columns.shape != (nnz, 2) or starts.shape != (len(kept) + 1,):
        raise CheckpointError("weight.data, block_mask, cols_a and row_start_ends_a must be of one pattern")
    counts, blocks = starts.diff(), columns[:, 1].long()
    rows = torch.arange(len(kept)).repeat_interleave(counts.clamp(0, kept.shape[1]).long())
    places = kept.nonzero()
    right = len(rows) == nnz and torch.equal(places, torch.stack([rows, columns[:, 0].long()], 1))
    if not right or not torch.equal(blocks.sort().values, torch.arange(nnz)):
        raise CheckpointError("cols_a and row_start_ends_a must list the blocks of block_mask, each once")
    dense = torch.zeros(*kept.shape, 32, 32, dtype=data.dtype)
    dense[kept.bool()] = data.view(nnz, 32, 32)[blocks].mT
    return Weight(dense.transpose(1, 2).reshape(32 * kept.shape[0], 32 * kept.shape[1]))


def _plain(parts: Parts, settings: Settings) -> Weight:
    return _scaled(Weight(parts["weight"]), parts)


def _refused(text: str) -> Callable[[Parts, Settings], Weight]:
    def read(parts: Parts, settings: Settings) -> Weight:
        raise UnsupportedError(text)

    return read


def _format(name: str, needs: str, allows: str, read: Callable[[Parts, Settings], Weight]) -> Format:
    return Format(name, frozenset(needs.split()), frozenset(allows.split()), read)


_ZEROS = "weight_zero_point weight_g_idx input_scale"
# The most particular first: a weight has the first format whose tensors are all there.
FORMATS = (
    _format(
        "marlin-24",
        "weight_packed meta scale_packed",
        "",
        _refused("its places are permuted for one kernel; convert the checkpoint that it was made of"),
    ),
    _format("sparse-bitmask", "compressed bitmask shape row_offsets", f"weight_scale {_ZEROS}", _bitmask),
    _format("sparse-24-bitmask", "compressed bitmask shape", f"weight_scale {_ZEROS}", _bitmask_2_4),
    _format("pack-quantized", "weight_packed weight_scale weight_shape", _ZEROS, _packed),
    _format("float8 with block scales", "weight weight_scale_inv", "", _block_scales),
    _format("quantized", "weight weight_scale", _ZEROS, _plain),
    _format("torch.nn.utils.prune", "weight_orig weight_mask", "", _times_mask("weight_orig", "weight_mask")),
    _format("modelopt", "weight _weight_mask", "", _times_mask("weight", "_weight_mask")),
    _format(
        "pytorch_block_sparse",
        "weight.data weight.block_mask weight.cols_a weight.row_start_ends_a",
        "weight.rows_b weight.col_start_ends_b weight.blocks",
        _hugging_face_blocks,
    ),
    _format(
        "nn_pruning",
        "mask_module.context_modules.0.mask_scores",
        "weight mask_module.context_modules.1.mask_scores",
        _refused("a training checkpoint: the threshold is in no tensor; compile the model there first"),
    ),
    _format(
        "torch.ao.pruning",
        "parametrizations.weight.original",
        "",
        _refused("a prepared model: its mask is in no tensor; call squash_mask there first"),
    ),
    _format("dense", "weight", "", _plain),
)
_PARTS = (  # ends that nothing but a part of a weight has
    *("compressed", "bitmask", "weight_packed", "weight_shape", "weight_scale", "weight_scale_inv"),
    *("weight_zero_point", "scale_packed", "weight_orig", "weight.data", "weight.block_mask"),
)
_ENDS = sorted({end for each in FORMATS for end in each.needs | each.allows}, key=len, reverse=True)


class Found(NamedTuple):
    """A weight of a checkpoint: the names of its tensors by their ends, and how to read it."""

    name: str  # of the layer
    format: Format
    tensors: Mapping[str, str]

    def read(self, source: Source) -> Weight:
        """Read and check the weight."""
        try:
            parts = {end: source.tensor(name) for end, name in self.tensors.items()}
            return self.format.read(parts, source.settings)
        except (CheckpointError, UnsupportedError) as error:
            raise type(error)(f"{self.name or 'the matrix'}: {self.format.name}: {error}") from error


class Source:
    """A checkpoint to read: a folder of safetensors files, or a file of `torch.save`, scipy or Matrix Market.

    Attributes:
        config: what its ``config.json`` has.
        settings: what that says of quantized values.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: dict[str, Any] = {}
        self._stored: dict[str, StoredTensor] = {}
        self._loaded: dict[str, Tensor] = {}
        if path.is_dir():
            self._open_folder(path)
        elif path.suffix == ".safetensors":
            self._stored = read_header(path)[0]
        elif path.suffix in PICKLES:
            self._loaded = _load_pickle(path)
        elif path.name.endswith(MATRICES):
            self._loaded = {"weight": read_matrix(path)}
        elif not path.exists():
            raise CheckpointNotFoundError(
                f"source must be a folder or a file, there is none at {str(path)!r}"
            )
        else:
            raise InvalidArgumentError(
                f"source must be a folder, or a file of .safetensors, {', '.join((*PICKLES, *MATRICES))}, "
                f"got {str(path)!r}"
            )
        self.settings = _settings(self.config.get("quantization_config"))

    def _open_folder(self, folder: Path) -> None:
        if (folder / CONFIG).exists():
            self.config = read_json(folder / CONFIG)[0]
        if (folder / INDEX).exists():
            with named(INDEX):
                places = checked_texts("weight_map", read_json(folder / INDEX)[0].get("weight_map"))
            files = sorted(set(places.values()))
            if any(Path(file).name != file for file in files):
                raise CheckpointError(f"{INDEX} must name files beside it, got others")
        elif (folder / WEIGHTS).exists():
            files = [WEIGHTS]
        else:
            pickles = sorted(file for file in folder.iterdir() if file.suffix in PICKLES)
            if not pickles:
                raise CheckpointNotFoundError(
                    f"source must have {WEIGHTS} or {INDEX}, {str(folder)!r} has none"
                )
            for pickle in pickles:
                self._loaded |= _load_pickle(pickle)
            return
        for file in files:
            self._stored |= read_header(folder / file)[0]
        if (folder / INDEX).exists() and places.keys() != self._stored.keys():
            raise CheckpointError(f"{INDEX} names other tensors than its files have")

    def names(self) -> list[str]:
        """Return the names of all tensors, in the order of files."""
        return [*self._stored, *self._loaded]

    def tensor(self, name: str) -> Tensor:
        """Read one tensor, with the zeros of a sparse one."""
        stored = self._stored.get(name)
        if stored is not None:
            return read_tensor(stored)
        loaded = self._loaded[name]
        if not _is_sparse(loaded):
            return loaded
        try:
            return loaded.to_dense()
        except Exception as error:
            raise CheckpointError(f"{name}: a sparse tensor cannot be read: {sentence(error)}") from error

    def form(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype of one tensor, which is not read."""
        found = self._stored.get(name) or self._loaded[name]
        return tuple(found.shape), found.dtype

    def nbytes(self, name: str) -> int:
        """Return the bytes of one tensor."""
        shape, dtype = self.form(name)
        return dtype.itemsize * math.prod(shape)

    def weights(self) -> Iterator[Found]:
        """Yield the weights; what belongs to none of them is a tensor that nothing converts."""
        layers: dict[str, dict[str, str]] = {}
        for name in self.names():
            for end in _ENDS:
                if name == end or name.endswith(f".{end}"):
                    layers.setdefault(name.removesuffix(end).removesuffix("."), {})[end] = name
                    break
        for layer, ends in layers.items():
            for format in FORMATS:
                if format.needs <= ends.keys():
                    own = {end: ends[end] for end in ends if end in format.needs | format.allows}
                    yield Found(layer, format, own)
                    break
            else:
                if not ends.keys().isdisjoint(_PARTS):
                    raise CheckpointError(f"{layer}: tensors are missing beside {', '.join(sorted(ends))}")


def _settings(quantization: object) -> Settings:
    """Return what a quantization_config says; what is strange in it counts as nothing."""
    groups: Any = quantization.get("config_groups") if isinstance(quantization, Mapping) else None
    found = (
        [group for group in groups.values() if isinstance(group, Mapping)]
        if isinstance(groups, Mapping)
        else []
    )
    bits: set[object] = set()
    dynamic: list[bool] = []
    for group in found:
        weights, activations = group.get("weights"), group.get("input_activations")
        bits.add(weights.get("num_bits") if isinstance(weights, Mapping) else None)
        dynamic.append(
            isinstance(activations, Mapping)
            and activations.get("num_bits") == 8
            and activations.get("dynamic") is True
            and activations.get("strategy") == "token"
        )
    only = next(iter(bits)) if len(bits) == 1 else None
    return Settings(only if isinstance(only, int) else None, bool(dynamic) and all(dynamic))


_LARGEST = 1 << 32  # elements of a sparse tensor, which is read with its zeros


def _is_sparse(tensor: Tensor) -> bool:
    from torch.sparse import SparseSemiStructuredTensor

    return tensor.layout != torch.strided or isinstance(tensor, SparseSemiStructuredTensor)


def _load_pickle(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file of `torch.save`, of which nothing is executed."""
    from torch.sparse import SparseSemiStructuredTensorCUSPARSELT, SparseSemiStructuredTensorCUTLASS

    kinds: list[Any] = [SparseSemiStructuredTensorCUTLASS, SparseSemiStructuredTensorCUSPARSELT]
    checks: Any = torch.sparse.check_sparse_tensor_invariants
    try:
        with torch.serialization.safe_globals(kinds), checks():
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointError(f"{file.name}: cannot be read as tensors alone: {sentence(error)}") from error
    if isinstance(content, Tensor):
        content = {"weight": content}
    for key in ("state_dict", "model_state_dict"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{file.name}: must hold a state dict or a tensor, got {type(content).__name__}"
        )
    tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    for name, tensor in tensors.items():
        if isinstance(tensor, SparseSemiStructuredTensorCUSPARSELT):
            raise UnsupportedError(f"{name}: a buffer of cuSPARSELt; convert the dense weight")
        if tensor.numel() > _LARGEST or (not _is_sparse(tensor) and tensor.nbytes > file.stat().st_size):
            raise CheckpointError(f"{file.name}: {name}: {list(tensor.shape)} is more than the file can hold")
    return tensors

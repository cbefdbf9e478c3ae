"""Conversion of other libraries' sparse and quantized checkpoints; nothing is rounded."""

from __future__ import annotations

import math
import os
import re
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .._checks import (
    BLOCK_SIZES,
    COMPRESSIBLE,
    DTYPES,
    PACKED,
    QUANTIZED,
    SCALE_GROUP,
    aligned,
    is_regular,
    shown,
)
from .._files import write_json
from .._runtime.pattern_cache import blocks_of
from ..config import METHOD, LayerSpec
from ..errors import InvalidArgumentError, UnsupportedError
from ..nn.weight import INDEX_NAMES
from ..pattern import BLOCK_COSTS, BlockPattern
from ..storage.formats import storage_of
from ..storage.quantize import compress
from .foreign import PICKLES, Found, Source, Weight, bools_of
from .manifest import CONFIG, SAVING, Shards, byte_limit, checked_folder, joined, put_in_place, section_of
from .matrices import Matrix

_In = TypeVar("_In")
_Out = TypeVar("_Out")
_Converted = tuple["ConvertedLayer | None", dict[str, Tensor], LayerSpec | None]
_OF_2_4 = 0.75  # of the time of dense blocks
_WORTH = 0.9  # of a dense product: above, weights that are not quantized stay dense
_EXPERTS = re.compile(r"\.experts\.\d+\.")


class Structure(NamedTuple):
    """Zeros of a weight, -0.0 among them.

    Attributes:
        zeros: fraction of zeros.
        most_of_four, most_of_eight: largest number of nonzeros in four and eight neighbours of a row.
        rows, columns: numbers of rows and columns without a nonzero.
        kept: fraction of blocks with a nonzero, for each block size that divides the weight.
    """

    zeros: float
    most_of_four: int
    most_of_eight: int
    rows: int
    columns: int
    kept: Mapping[int, float]

    @property
    def nm(self) -> str:
        """The N:M structure along rows: "2:4", "5:8", …; empty without any."""
        if self.most_of_four < 4:
            return f"{self.most_of_four}:4"
        return f"{self.most_of_eight}:8" if self.most_of_eight < 8 else ""


@dataclass(frozen=True)
class ConvertedLayer:
    """One weight of a checkpoint: what it is, and how it is stored afterwards.

    `spec` is None for a weight that stays dense, and `reason` says why. `nbytes` are those before and after.
    """

    name: str
    format: str
    shape: tuple[int, int]
    structure: Structure
    spec: LayerSpec | None
    nbytes: tuple[int, int]
    reason: str

    @property
    def storage(self) -> str:
        """Name the storage as reports do: "dense", "plain", "2:4 compressed", "int8 W8A8" and others."""
        spec = self.spec
        return "dense" if spec is None else storage_of(spec.storage).describe(spec.nm, spec.activations)


@dataclass(frozen=True)
class ConvertReport:
    """Weights of a checkpoint; ``str()`` makes a table of it. Other tensors are copied, `copied` of them."""

    layers: tuple[ConvertedLayer, ...]
    copied: int

    def __str__(self) -> str:
        head = ("weight", "format", "shape", "zeros", "N:M", "blocks 16/32/64/128", "stored", "MB")
        rows = [head]
        for layer in self.layers:
            found = layer.structure
            kept = "/".join(f"{found.kept[size]:.2f}" if size in found.kept else "-" for size in BLOCK_SIZES)
            stored = layer.storage
            if layer.spec is not None:
                stored += (
                    f" {layer.spec.block_shape[0]}x{layer.spec.block_shape[1]} at {layer.spec.density:.2f}"
                )
            size = " -> ".join(f"{nbytes / 1e6:.1f}" for nbytes in layer.nbytes)
            shape = f"{layer.shape[0]}x{layer.shape[1]}"
            rows.append(
                (layer.name, layer.format, shape, f"{found.zeros:.2f}", found.nm or "-", kept, stored, size)
            )
        reasons: dict[str, list[str]] = {}
        for layer in self.layers:
            if layer.reason:
                reasons.setdefault(layer.reason, []).append(layer.name)
        notes = [f"dense, {reason}: {', '.join(names)}" for reason, names in reasons.items()]
        return "\n".join([*aligned(rows), *notes, f"other tensors, copied: {self.copied}"])


def convert(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str] | None,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "2GB",
) -> ConvertReport:
    """Convert a checkpoint of another library to one that `load`, Transformers and vLLM read.

    Weights are read two at a time and stored as their zeros and codes allow without rounding: blocks, 2:4, 8
    or 4 bits with the scales of the file. What fits no structure stays dense and is reported; nothing is
    pruned.

    Args:
        source: a folder of safetensors files or of files of `torch.save`, or one file: .safetensors, .pt,
            .pth, .bin, a matrix of scipy (.npz), or Matrix Market (.mtx, .mtx.gz). Formats:
            compressed-tensors sparse-bitmask, sparse-24-bitmask, int-quantized, float-quantized and
            pack-quantized, float8 with scales for blocks of 128 x 128, torch.nn.utils.prune, modelopt,
            pytorch_block_sparse, and dense weights with zeros.
        folder: the new checkpoint, empty or not there yet; None writes nothing and only reports.
        dtype: of activations, biases and dequantized weights where weights are quantized; None is that of the
            configuration, or bfloat16.
        max_shard_size: as of `save`; memory holds one such file and two weights.

    Raises:
        CheckpointError: a file is damaged or contradicts another; nothing was written.
        UnsupportedError: a weight has a format that cannot be read elsewhere; the text names it.
        OSError: reading or writing fails.
    """
    if not isinstance(source, str | os.PathLike):
        raise InvalidArgumentError(f"source must be a path, got {shown(source)}")
    if dtype is not None and dtype not in DTYPES:
        raise InvalidArgumentError(f"dtype must be one of {list(DTYPES)} or None, got {shown(dtype)}")
    limit = byte_limit(max_shard_size)
    if folder is None:
        return _converted(Source(Path(source)), dtype, None)[0]
    target = checked_folder(folder)
    if target.exists() and any(target.iterdir()):
        raise InvalidArgumentError(f"folder must be empty or not exist, got {str(target)!r}")
    opened = Source(Path(source))
    existed = target.exists()
    target.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=SAVING, dir=target) as made:
            temporary = Path(made)
            shards = Shards(temporary, limit)
            report, layers = _converted(opened, dtype, shards)
            files = shards.finish()
            others = _copied_files(opened.path, temporary)
            own = {**section_of(layers), "files": files}
            config = {key: value for key, value in opened.config.items() if key not in _OF_OTHERS}
            if "model_type" in config:
                config["quantization_config"] = {"quant_method": METHOD, **own}
            else:
                config[METHOD] = own
            write_json(temporary / CONFIG, config)
            put_in_place(temporary, target, [*files, *others])
    except BaseException:
        if not existed:
            with suppress(OSError):
                target.rmdir()
        raise
    return report


_OF_OTHERS = {"quantization_config", "compression_config", "sparsity_config", METHOD}


def _copied_files(source: Path, folder: Path) -> list[str]:
    """Copy the files beside the weights, such as those of a tokenizer, and return their names."""
    names: list[str] = []
    for file in sorted(source.iterdir()) if source.is_dir() else ():
        is_weights = file.suffix in (".safetensors", *PICKLES) or file.name.endswith(".index.json")
        if file.is_file() and not is_weights and file.name != CONFIG and not file.name.startswith("."):
            shutil.copyfile(file, folder / file.name)
            names.append(file.name)
    return names


@torch.no_grad()
def _converted(
    source: Source, dtype: torch.dtype | None, shards: Shards | None
) -> tuple[ConvertReport, dict[str, Any]]:
    """Convert weight after weight, and return the entries of the manifest; without shards none is kept."""
    text = str(source.config.get("dtype") or source.config.get("torch_dtype") or "bfloat16")
    named = getattr(torch, text.removeprefix("torch."), None)
    dtype = dtype or (named if named in DTYPES else torch.bfloat16)
    weights = list(source.weights())
    taken = {name for found in weights for name in found.tensors.values()}
    copied, names = 0, source.names()
    masks = {name.removesuffix("orig") + "mask" for name in names if name.endswith("bias_orig")}
    for name in names:
        if name in taken or name in masks:
            continue
        tensor, copied = source.tensor(name), copied + 1
        if name.endswith("bias_orig"):
            tensor = tensor * source.tensor(name.removesuffix("orig") + "mask")
            name = name.removesuffix("_orig")
        if shards is not None:
            shards.add(name, tensor)
    layers, entries = list[ConvertedLayer](), dict[str, Any]()
    of_weights = [found.name for found in weights]
    results: Iterable[_Converted] = _two_at_a_time(partial(_converted_weight, source, dtype=dtype), weights)
    if source.matrix is not None:  # then there are no weights
        of_weights, results = [""], [_converted_matrix(source.matrix)]
    for name, (layer, tensors, spec) in zip(of_weights, results, strict=True):
        if layer is None:
            copied += 1
        else:
            layers.append(layer)
        if spec is not None:
            entries[name] = spec.to_json()
        if shards is not None:
            for own, tensor in tensors.items():
                shards.add(joined(name, own), tensor)
    return ConvertReport(tuple(layers), copied), entries


def _two_at_a_time(function: Callable[[_In], _Out], items: Iterable[_In]) -> Iterator[_Out]:
    """Map in order, in two threads, with no more than two results that wait."""
    with ThreadPoolExecutor(2) as pool:
        pending = deque[Future[_Out]]()
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) == 2:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


@torch.no_grad()
def _converted_weight(source: Source, found: Found, dtype: torch.dtype) -> _Converted:
    """Return the report on a weight, its tensors, and its spec unless it stays dense."""
    if found.format.name == "dense":
        (name,) = found.tensors.values()
        shape, own_dtype = source.form(name)
        if len(shape) != 2 or own_dtype not in (*DTYPES, *QUANTIZED) or 0 in shape:
            return None, {"weight": source.tensor(name)}, None
    weight = found.read(source)
    if weight.values.dim() != 2:
        return None, {"weight": weight.values}, None
    if weight.reason:  # dequantized
        weight = weight._replace(values=weight.values.to(dtype))
    nonzero = _nonzero(weight)
    structure = _structure(nonzero, weight.slots)
    before = sum(map(source.nbytes, found.tensors.values()))
    choice = _choice(weight, structure, source.settings.activations and found.format.name != "pack-quantized")
    reason = (weight.reason or choice) if isinstance(choice, str) else ""
    if _EXPERTS.search(found.name):
        reason = "of experts, which Transformers joins as it loads them"
    if reason or isinstance(choice, str):
        own_dtype = weight.values.dtype if weight.scales is None else dtype
        tensors, spec = {"weight": weight.dense(own_dtype)}, None
    else:
        if weight.slots is not None and choice.nm is None:
            weight = weight.expanded()
            nonzero = _nonzero(weight)
        tensors, spec = _stored(weight, nonzero, choice, dtype)
    after = sum(tensor.nbytes for tensor in tensors.values())
    layer = ConvertedLayer(
        name=found.name,
        format=found.format.name,
        shape=weight.shape,
        structure=structure,
        spec=spec,
        nbytes=(before, after),
        reason=reason,
    )
    return layer, tensors, spec


def _nonzero(weight: Weight) -> Tensor:
    is_float8 = weight.values.dtype == torch.float8_e4m3fn
    return (weight.values.view(torch.uint8) & 127 if is_float8 else weight.values) != 0


def _converted_matrix(matrix: Matrix) -> _Converted:
    """Return the same of a matrix that is held without its zeros; it has no name."""
    entries, block_shape, nm = matrix.entries, matrix.block_shape or (0, 0), None
    structure = _structure_of_entries(entries)
    shape, dtype = (int(entries.shape[0]), int(entries.shape[1])), getattr(torch, entries.dtype.name)
    choice = _choice(Weight(torch.empty(shape, dtype=dtype, device="meta")), structure, False)
    if matrix.block_shape is not None and not is_regular(shape, block_shape):
        choice = _Choice("plain", 0, None, None)
    elif isinstance(choice, _Choice):
        block_shape, nm = (choice.size, choice.size), choice.nm
    spec, reason = None, ""
    if isinstance(choice, str):
        if math.prod(shape) > _LARGEST:
            raise UnsupportedError(
                f"the matrix must have blocks of 16 to 128, be a BSR matrix, or be small enough to be stored "
                f"dense, got {shape[0]} x {shape[1]}: {choice}; BlockSparseMatrix.from_scipy takes what "
                "scipy.sparse.load_npz and scipy.io.mmread return"
            )
        reason, tensors = choice, {"weight": torch.from_numpy(entries.toarray())}
    else:
        bsr = entries.tobsr(blocksize=block_shape)
        bsr.sort_indices()
        starts, columns, blocks = (torch.from_numpy(array) for array in (bsr.indptr, bsr.indices, bsr.data))
        pattern = BlockPattern(starts, columns, shape=shape, block_shape=block_shape)
        tensors = {name: getattr(pattern, name) for name in INDEX_NAMES} | {"weight": blocks}
        if nm is not None:
            tensors["weight"], tensors["metadata"] = compress(blocks, blocks != 0)
        spec = LayerSpec.of(pattern, dtype, storage=choice.storage, nm=nm)
    before = sum(array.nbytes for array in (entries.data, entries.indices, entries.indptr))
    after = sum(tensor.nbytes for tensor in tensors.values())
    return ConvertedLayer("", matrix.format, shape, structure, spec, (before, after), reason), tensors, spec


_LARGEST = 1 << 28  # elements of a matrix that is stored dense though its file is not


def _structure_of_entries(entries: Any) -> Structure:
    """Return the structure of a CSR array without zeros."""
    import numpy as np
    from scipy.sparse import csr_array

    def cells(matrix: Any, height: int, width: int) -> Any:
        """Return a CSR array with the number of entries in each cell that has one."""
        ones = np.ones(matrix.nnz, np.int16)
        shape = matrix.shape[0] // height, matrix.shape[1] // width
        starts = matrix.indptr[::height].copy()  # which is changed below
        merged = csr_array((ones, matrix.indices // width, starts), shape=shape)
        merged.sum_duplicates()
        return merged

    def most(size: int) -> int:
        if columns % size or not entries.nnz:
            return size if columns % size else 0
        return int(cells(entries, 1, size).data.max())

    rows, columns = map(int, entries.shape)
    kept, tiles, side = dict[int, float](), entries, 1
    for size in sorted(BLOCK_SIZES):
        if rows % size == 0 and columns % size == 0:
            tiles, side = cells(tiles, size // side, size // side), size
            kept[size] = tiles.nnz / math.prod(tiles.shape)
    most_of_four = most(4)
    return Structure(
        zeros=1 - entries.nnz / (rows * columns),
        most_of_four=most_of_four,
        most_of_eight=most(8) if most_of_four == 4 else 2 * most_of_four,
        rows=rows - int((entries.indptr[1:] > entries.indptr[:-1]).sum()),
        columns=columns - len(np.unique(entries.indices)),
        kept=kept,
    )


def _structure(nonzero: Tensor, slots: Tensor | None = None) -> Structure:
    """Return the structure of a matrix; with slots the bools are of two places in each four, see `Weight`."""
    per = 1 if slots is None else 2  # columns that a bool is for
    rows, columns = nonzero.shape[0], per * nonzero.shape[1]
    least = min(BLOCK_SIZES)
    # The fewest passes over the matrix: rows in groups first, then columns of those.
    bands = nonzero.view(torch.uint8)
    if rows % least == 0:
        bands = _bands(bands, least)
    kept = {}
    if rows % least == 0 and columns % least == 0:
        tiles = _tiles(bands, least // per)
        for size in BLOCK_SIZES:
            if rows % size == 0 and columns % size == 0:
                grid = tiles.view(rows // size, size // least, columns // size, size // least)
                kept[size] = float(grid.amax((1, 3)).double().mean())
    of_rows = nonzero.view(torch.uint8).amax(1) if columns else nonzero.new_zeros(rows)
    count = int(nonzero.count_nonzero())
    if slots is None:
        most_of_four, of_columns = _most(nonzero, 4), bands.amax(0)
    else:
        most_of_four, of_columns = _most(nonzero, 2), _columns(nonzero, slots)
    return Structure(
        zeros=1 - count / max(1, rows * columns),
        most_of_four=most_of_four,
        most_of_eight=_most(nonzero, 8) if most_of_four == 4 else 2 * most_of_four,
        rows=rows - int(of_rows.count_nonzero()),
        columns=columns - int(of_columns.count_nonzero()),
        kept=kept,
    )


def _columns(nonzero: Tensor, slots: Tensor) -> Tensor:
    """Return which columns have a nonzero, [in_features], of bools of the places in slots."""
    words = nonzero.view(torch.int32)  # of the four values of a byte of slots
    if bool((words != 0x01010101).any()):
        taken = (words | words >> 7 | words >> 14 | words >> 21) & 15
        slots = _taken()[taken << 8 | slots]
    while len(slots) > 1:
        half = -(-len(slots) // 2)
        slots = slots[:half] | torch.cat([slots[half:], slots[: 2 * half - len(slots)]])
    return bools_of(slots)[0] if len(slots) else slots.new_zeros(2 * nonzero.shape[1])


@cache
def _taken() -> Tensor:
    """Return uint8 [16 * 256]: bytes of slots with those bits alone whose value is not zero, by which are."""
    found = [0] * (16 << 8)
    for taken, byte in product(range(16), range(256)):
        places = [bit for bit in range(8) if byte >> bit & 1]
        found[taken << 8 | byte] = sum(1 << bit for i, bit in enumerate(places[:4]) if taken >> i & 1)
    return torch.tensor(found, dtype=torch.uint8)


@cache
def _pairs() -> Tensor:
    """Return uint8 [256]: the metadata of the two fours of a byte of slots, two bits for each place."""
    found = [0] * 256
    for low, high in product(combinations(range(4), 2), repeat=2):
        (a, b), (c, d) = low, high
        found[1 << a | 1 << b | 16 << c | 16 << d] = a | b << 2 | c << 4 | d << 6
    return torch.tensor(found, dtype=torch.uint8)


def _bands(bytes: Tensor, size: int) -> Tensor:
    """Return the largest of each column in rows of a size, together with `_tiles` the fastest order."""
    return bytes.view(-1, size, bytes.shape[1]).amax(1)


def _tiles(bands: Tensor, size: int) -> Tensor:
    return bands.view(len(bands), -1, size).amax(2)


def _most(nonzero: Tensor, size: int) -> int:
    """Return the largest number of nonzeros in two, four or eight neighbours of a row."""
    if nonzero.shape[1] % size or not nonzero.numel():
        return size
    most, of_words = 0, {2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    for words in torch.split(nonzero.view(of_words).flatten(), 1 << 17):  # which a cache holds
        shift = 4 * size
        while shift >= 8:
            words = words + (words >> shift)  # the lowest byte counts the bools of all
            shift //= 2
        most = max(most, int((words & 15).max()))
    return most


class _Choice(NamedTuple):
    storage: str
    size: int  # of blocks
    nm: tuple[int, int] | None
    activations: str | None


def _choice(weight: Weight, structure: Structure, activations: bool) -> _Choice | str:
    """Return how to store a weight, or why it stays dense."""
    if not structure.kept:
        return f"no block size divides {' x '.join(map(str, weight.shape))}"
    if weight.blocks:
        if SCALE_GROUP not in structure.kept:
            return "blocks of 128 x 128 with a scale do not divide it"
        return _Choice("float8_e4m3fn", SCALE_GROUP, None, "float8_e4m3fn")
    costs = {(size, False): kept * BLOCK_COSTS[size] for size, kept in structure.kept.items()}
    if structure.most_of_four <= 2:
        of_2_4 = {(size, True): _OF_2_4 * cost for (size, _), cost in costs.items() if size >= COMPRESSIBLE}
        costs |= of_2_4
    if weight.scales is None:
        if weight.values.dtype not in DTYPES:
            return f"no storage has values of {weight.values.dtype}"
        (size, compressed), cost = min(costs.items(), key=lambda item: item[1])
        if cost > _WORTH and not compressed:
            return "too few blocks are empty, and it is not 2:4"
        return _Choice("compressed" if compressed else "plain", size, (2, 4) if compressed else None, None)
    width = weight.shape[1] // weight.scales.shape[1]
    costs = {key: cost for key, cost in costs.items() if weight.scales.shape[1] == 1 or width % key[0] == 0}
    if not costs:
        return f"groups of {width} columns have a scale, which no block size divides"
    size, compressed = min(costs, key=costs.__getitem__)
    eight = "float8_e4m3fn" if weight.values.dtype == torch.float8_e4m3fn else "int8"
    storage = "int4" if weight.bits == 4 and not compressed else eight
    together = activations and weight.bits == 8 and weight.scales.shape[1] == 1
    return _Choice(storage, size, (2, 4) if compressed else None, storage if together else None)


def _stored(
    weight: Weight, nonzero: Tensor, choice: _Choice, dtype: torch.dtype
) -> tuple[dict[str, Tensor], LayerSpec]:
    """Return the tensors of a layer with this weight, and its spec."""
    size, (storage, _, nm, activations) = choice.size, choice
    width = size if weight.slots is None else size // 2  # of values
    kept = _tiles(_bands(nonzero.view(torch.uint8), size), width)
    pattern = BlockPattern.from_block_mask(kept.bool(), block_shape=size)
    rows, columns = pattern.block_indices()
    integers = weight.values.view(torch.uint8) if weight.values.itemsize == 1 else weight.values
    blocks = blocks_of(integers, (size, width))[rows, columns].view(weight.values.dtype)
    tensors = {name: getattr(pattern, name) for name in INDEX_NAMES}
    granularity = None
    if weight.scales is not None:
        scales, group = weight.scales, weight.shape[1] // weight.scales.shape[1]
        if weight.blocks:
            granularity, tensors["scales"] = "block", scales[rows, columns][:, None]
        elif activations is not None:
            granularity, tensors["scales"] = "feature", scales[:, 0]
        else:
            of_rows = scales.view(-1, size, scales.shape[1])
            granularity, tensors["scales"] = "row", of_rows[rows, :, columns * size // group]
        tensors["scales"] = tensors["scales"].contiguous()
    if weight.slots is not None:
        tensors["weight"] = blocks
        tensors["metadata"] = _metadata(blocks_of(weight.slots, (size, size // 8))[rows, columns])
    elif nm is not None:
        mask = blocks_of(nonzero, (size, size))[rows, columns]
        tensors["weight"], tensors["metadata"] = compress(blocks, mask)
    elif storage == "int4":
        low, high = blocks.view(torch.uint8).view(-1, size, size // 2, 2).unbind(-1)
        tensors["weight"] = ((low & 15) | (high << 4)).view(PACKED)
    else:
        tensors["weight"] = blocks
    spec = LayerSpec.of(
        pattern,
        dtype if weight.scales is not None else weight.values.dtype,
        storage=storage,
        nm=nm,
        granularity=granularity,
        activations=activations,
    )
    return tensors, spec


def _metadata(slots: Tensor) -> Tensor:
    """Return the metadata [nnz, bk / 32, bn] of blocks of slots [nnz, bn, bk / 8]."""
    nnz, rows, bytes = slots.shape
    halves = _pairs()[slots.int()].view(torch.int16)  # of 16 columns
    halves = halves.view(nnz, rows // 16, 2, 8, bytes // 4, 2).permute(0, 4, 1, 3, 5, 2)
    return halves.contiguous().view(torch.int32).view(nnz, bytes // 4, rows)

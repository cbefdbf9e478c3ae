"""Conversion of other libraries' sparse and quantized checkpoints; nothing is rounded."""

from __future__ import annotations

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
from typing import Any, NamedTuple

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
    check_choice,
    shown,
)
from .._files import write_json
from .._runtime.pattern_cache import blocks_of
from ..config import METHOD, LayerSpec
from ..errors import InvalidArgumentError
from ..nn.weight import INDEX_NAMES
from ..pattern import BLOCK_COSTS, BlockPattern
from ..storage.formats import storage_of
from ..storage.quantize import compress
from .foreign import PICKLES, Found, Source, Weight
from .manifest import (
    CONFIG,
    SAVING,
    Shards,
    byte_limit,
    checked_folder,
    joined,
    put_in_place,
    section_of,
)

_Converted = tuple["ConvertedLayer | None", dict[str, Tensor], LayerSpec | None]
_OF_2_4 = 0.75  # of the time of dense blocks
_WORTH = 0.9  # of a dense product: above, weights that are not quantized stay dense
_EXPERTS = re.compile(r"\.experts\.\d+\.")


class Structure(NamedTuple):
    """Zeros of a weight, -0.0 among them.

    Attributes:
        zeros: fraction of zeros.
        most_of_four, most_of_eight: largest number of nonzeros in four and eight neighbours of a row.
        kept: fraction of blocks with a nonzero, for each block size that divides the weight.
    """

    zeros: float
    most_of_four: int
    most_of_eight: int
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
            .pth, .bin, a matrix of scipy (.npz) or Matrix Market (.mtx, .mtx.gz). Formats:
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
    check_choice("dtype", dtype, (*DTYPES, None))
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
    for found, (layer, tensors, spec) in _two_at_a_time(
        partial(_converted_weight, source, dtype=dtype), weights
    ):
        if layer is None:
            copied += 1
        else:
            layers.append(layer)
        if spec is not None:
            entries[found.name] = spec.to_json()
        if shards is not None:
            for own, tensor in tensors.items():
                shards.add(joined(found.name, own), tensor)
    return ConvertReport(tuple(layers), copied), entries


def _two_at_a_time(
    function: Callable[[Found], _Converted], weights: Iterable[Found]
) -> Iterator[tuple[Found, _Converted]]:
    """Yield each weight with its result, of which no more than two wait."""
    with ThreadPoolExecutor(2) as pool:
        pending = deque[tuple[Found, Future[_Converted]]]()
        for found in weights:
            pending.append((found, pool.submit(function, found)))
            if len(pending) == 2:
                first, result = pending.popleft()
                yield first, result.result()
        for last, result in pending:
            yield last, result.result()


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
    structure = _structure(nonzero, 1 if weight.slots is None else 2)
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


def _structure(nonzero: Tensor, per: int = 1) -> Structure:
    """Return the structure of a matrix of bools, each for ``per`` columns, see `Weight`."""
    rows, columns = nonzero.shape[0], per * nonzero.shape[1]
    least, kept = min(BLOCK_SIZES), {}
    if rows % least == 0 and columns % least == 0:
        tiles = _kept_blocks(nonzero, least, least // per)
        for size in BLOCK_SIZES:
            if rows % size == 0 and columns % size == 0:
                kept[size] = float(_kept_blocks(tiles, size // least, size // least).double().mean())
    return Structure(
        zeros=1 - int(nonzero.count_nonzero()) / max(1, rows * columns),
        most_of_four=_most(nonzero, 4 // per),
        most_of_eight=_most(nonzero, 8 // per),
        kept=kept,
    )


def _kept_blocks(nonzero: Tensor, height: int, width: int) -> Tensor:
    """Return uint8 [R, C]: which blocks of a matrix of bools have a nonzero, in the fastest order."""
    rows, columns = nonzero.shape[0] // height, nonzero.shape[1]
    bands = nonzero.view(torch.uint8).view(rows, height, columns).amax(1)
    return bands.view(rows, columns // width, width).amax(2)


def _most(nonzero: Tensor, size: int) -> int:
    """Return the largest number of nonzeros in two, four or eight neighbours of a row."""
    if nonzero.shape[1] % size or not nonzero.numel():
        return size
    most, of_words = 0, {2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    halves = [bits for bits in (32, 16, 8) if bits < 8 * size]
    for words in torch.split(nonzero.view(of_words).flatten(), 1 << 17):  # which a cache holds
        for bits in halves:
            words = words + (words >> bits)  # the lowest byte counts the bools of all
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
    pattern = BlockPattern.from_block_mask(_kept_blocks(nonzero, size, width).bool(), block_shape=size)
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


@cache
def _pairs() -> Tensor:
    """Return uint8 [256]: the metadata of the two fours of a byte of slots, two bits for each place."""
    found = [0] * 256
    for (a, b), (c, d) in product(combinations(range(4), 2), repeat=2):
        found[1 << a | 1 << b | 16 << c | 16 << d] = a | b << 2 | c << 4 | d << 6
    return torch.tensor(found, dtype=torch.uint8)


def _metadata(slots: Tensor) -> Tensor:
    """Return the metadata [nnz, bk / 32, bn] of blocks of slots [nnz, bn, bk / 8]."""
    nnz, rows, bytes = slots.shape
    # Several times as fast as an index. Halves are of 16 columns.
    halves = _pairs().index_select(0, slots.flatten().int()).view(torch.int16)
    halves = halves.view(nnz, rows // 16, 2, 8, bytes // 4, 2).permute(0, 4, 1, 3, 5, 2)
    return halves.contiguous().view(torch.int32).view(nnz, bytes // 4, rows)

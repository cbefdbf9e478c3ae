"""The data of figures: layers of models and checkpoints, snapshots of patterns, and measured points."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from .._arguments import checked
from .._checks import as_integer
from .._names import NamePattern
from .._runtime.tensor_files import StoredTensor, few, named, read_header, read_tensor, shown, write_tensors
from ..checkpoint.files import read_headers
from ..checkpoint.manifest import read_section
from ..checkpoint.names import joined
from ..config import LayerSpec
from ..errors import CheckpointError, InvalidArgumentError
from ..nn.linear import BlockSparseLinear
from ..nn.tensors import INDEX_NAMES
from ..pattern.block_pattern import BlockPattern
from ..storage.registry import forms_of, storage_of

Snapshots: TypeAlias = Sequence[tuple[int, Mapping[str, Tensor]]]  # by step, then by layer: bool [R, C]
Layer: TypeAlias = tuple[BlockPattern, Tensor]  # and dense blocks [nnz, bn, bk]

_POINT = {"label", "x", "y", "spread", "note"}
_STEPS = "tilesparse.steps"  # in the metadata of a file of snapshots


class Map(NamedTuple):
    """Data of one layer's map, block by block."""

    name: str
    caption: str
    aspect: float  # height over width of W
    kept: Tensor  # [R, C] bool
    shades: Tensor  # [R, C] float32, zero where no block is kept
    left: Tensor | None = None  # [R, C] bool: kept once, and not now


def chosen(names: Iterable[str], layers: str | None) -> list[str]:
    """Return the names that a name or regular expression matches, in their order."""
    names = list(names)
    if layers is None:
        return names
    pattern = NamePattern.parse(layers, argument="layers")
    found = [name for name in names if pattern.match(name)]
    if not found:
        raise InvalidArgumentError(f"layers: {layers!r} matches none of {few(names)}")
    return found


# Layers.


def layers_of(source: object) -> dict[str, Callable[[], Layer]]:
    """Return, by name, a function that reads each block-sparse layer of a model or a checkpoint."""
    found: dict[str, Callable[[], Layer]] = {}
    if isinstance(source, nn.Module):
        for name, module in source.named_modules():
            if isinstance(module, BlockSparseLinear):
                if module.weight.is_meta:
                    raise InvalidArgumentError(
                        f"source must have weights, but those of {name!r} are on the meta device"
                    )
                found[name] = partial(_of_model, module)
    elif isinstance(source, str | os.PathLike):
        forms, ties, files = read_section(Path(source))
        stored = read_headers(Path(source), files)
        for name in sorted(forms, key=_numerically):
            found[name] = partial(_of_checkpoint, name, forms[name], stored, ties)
    else:
        raise InvalidArgumentError(f"source must be a model or a folder, got {type(source).__name__}")
    if not found:
        raise InvalidArgumentError("source must have block-sparse layers, got none")
    return found


def _numerically(name: str) -> list[tuple[str, int]]:
    """Return a key that sorts layer 2 before layer 10."""
    return [(text, int(digits or -1)) for text, digits in re.findall(r"(\D*)(\d*)", name)]


def _of_model(layer: BlockSparseLinear) -> Layer:
    return layer.pattern, layer.plain_values()


def _of_checkpoint(
    name: str, form: LayerSpec, stored: Mapping[str, StoredTensor], ties: Mapping[str, str]
) -> Layer:
    """Read one layer; no other tensor is read."""
    block_rows = form.shape[0] // form.block_shape[0]
    sizes = {"crow_indices": block_rows + 1, "col_indices": form.nnz, "slot": form.nnz}
    forms: dict[str, tuple[tuple[int, ...], torch.dtype]]
    forms = {array: ((sizes[array],), torch.int32) for array in INDEX_NAMES}
    forms |= forms_of(form)
    own: dict[str, Tensor] = {}
    for attribute, (shape, dtype) in forms.items():
        full_name = joined(name, attribute)
        source = stored.get(ties.get(full_name, full_name))
        if source is None:
            raise CheckpointError(f"tensors: {shown(full_name)} is missing")
        allowed = (torch.int32, torch.int64) if attribute in INDEX_NAMES else (dtype,)
        if source.shape != shape or source.dtype not in allowed:
            raise CheckpointError(
                f"{source.file.name}: {shown(source.name)} must have shape {shape} of {dtype}, "
                f"got {source.shape} of {source.dtype}"
            )
        own[attribute] = read_tensor(source)
    crow, col, slot = (own[array] for array in INDEX_NAMES)
    with named(shown(name)):
        pattern = BlockPattern(crow, col, slot=slot, shape=form.shape, block_shape=form.block_shape)
    return pattern, storage_of(form.storage).dense_blocks(own, form, pattern)


def block_norms(name: str, layer: Layer) -> Map:
    """Map the root mean square of each block's weights, relative to the largest."""
    pattern, values = layer
    dtype = torch.promote_types(values.dtype, torch.float32)
    norms = torch.linalg.vector_norm(values, dim=(-2, -1), dtype=dtype)
    if not bool(norms.isfinite().all()):
        raise InvalidArgumentError(f"source must have finite weights, but some of {name!r} are not")
    shades = torch.zeros(pattern.grid, device="cpu")
    if pattern.nnz:
        rows, cols = (index.cpu() for index in pattern.block_indices())
        shades[rows, cols] = (norms / norms.max().clamp(min=torch.finfo(dtype).tiny)).float().cpu()
    (out_features, in_features), (bn, bk) = pattern.shape, pattern.block_shape
    caption = f"{out_features} x {in_features} in {bn} x {bk}, density {pattern.density:.3g}"
    return Map(name, caption, out_features / in_features, pattern.to_block_mask().cpu(), shades)


# Snapshots.


def histories(snapshots: object) -> tuple[list[int], dict[str, Tensor]]:
    """Return the steps, and the masks of each layer as one bool tensor [T, R, C] on the host."""
    if not isinstance(snapshots, Sequence) or len(snapshots) < 2:
        raise InvalidArgumentError(
            "snapshots must be a sequence of two or more (step, masks), got "
            + (f"{len(snapshots)}" if isinstance(snapshots, Sequence) else type(snapshots).__name__)
        )
    steps: list[int] = []
    stacks: dict[str, list[Tensor]] = {}
    for number, snapshot in enumerate(snapshots):
        try:
            step, masks = snapshot
            steps.append(as_integer(step))
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"snapshots[{number}] must be (step, masks), got {shown(snapshot)}"
            ) from error
        if not isinstance(masks, Mapping) or not masks or not all(isinstance(name, str) for name in masks):
            raise InvalidArgumentError(
                f"snapshots must have a mask by each layer's name, got {shown(masks)} at step {step}"
            )
        if number and set(masks) != set(stacks):
            raise InvalidArgumentError(
                f"snapshots must have the same layers; at step {step} they differ in "
                f"{few(sorted(set(masks) ^ set(stacks)))}"
            )
        for name, mask in masks.items():
            first = stacks.setdefault(name, [])
            _check_block_mask(f"snapshots: step {step}: {name!r}", mask, first)
            first.append(mask.detach().cpu())
    if any(later <= earlier for earlier, later in pairwise(steps)):
        raise InvalidArgumentError(f"snapshots must have ascending steps, got {shown(steps)}")
    return steps, {name: torch.stack(stack) for name, stack in stacks.items()}


def _check_block_mask(place: str, mask: object, earlier: Sequence[Tensor]) -> None:
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.dtype != torch.bool or not mask.numel():
        given = f"{tuple(mask.shape)} of {mask.dtype}" if isinstance(mask, Tensor) else shown(mask)
        raise InvalidArgumentError(f"{place} must be a bool tensor [R, C], got {given}")
    if earlier and mask.shape != earlier[0].shape:
        raise InvalidArgumentError(
            f"{place} must have the {tuple(earlier[0].shape)} blocks of the first, got {tuple(mask.shape)}"
        )


def ages(name: str, steps: Sequence[int], history: Tensor) -> Map:
    """Map for how many steps each block of the last snapshot has been kept, and the blocks that left."""
    kept = history[-1]
    # The snapshots, from the last one back, in which a block has been kept without a break.
    unbroken = history.flip(0).long().cumprod(0).sum(0)
    since = torch.tensor(steps, device=unbroken.device)[(len(steps) - unbroken).clamp(max=len(steps) - 1)]
    shades = torch.where(kept, (steps[-1] - since).float(), 0.0)
    rows, cols = kept.shape
    caption = f"{rows} x {cols} blocks, density {kept.float().mean().item():.3g}"
    return Map(name, caption, rows / cols, kept, shades, left=history.any(0) & ~kept)


@checked
def save_snapshots(path: str | os.PathLike[str], snapshots: Snapshots) -> None:
    """Write snapshots as one safetensors file: a bool tensor [T, R, C] for each layer, and the steps.

    Args:
        path: path of the file, which is replaced.
        snapshots: see `evolution`.

    Raises:
        InvalidArgumentError: `evolution` would refuse the snapshots, or the file cannot be written.
    """
    steps, layers = histories(snapshots)
    try:
        write_tensors(Path(path), layers, {_STEPS: json.dumps(steps)})
    except OSError as error:
        raise InvalidArgumentError(f"path: {str(path)!r} cannot be written: {error}") from error


@checked
def load_snapshots(path: str | os.PathLike[str]) -> Snapshots:
    """Read snapshots that `save_snapshots` has written.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CheckpointError: the file holds no snapshots.
    """
    from safetensors import safe_open

    file = Path(path)
    stored, _ = read_header(file)
    with safe_open(file, framework="pt") as opened:
        text = (opened.metadata() or {}).get(_STEPS)
    try:
        steps = json.loads(text or "")
        layers = {name: read_tensor(source) for name, source in stored.items()}
        if any(len(history) != len(steps) for history in layers.values()):
            raise ValueError(f"each layer must have {len(steps)} masks")
        snapshots = [
            (step, {name: history[number] for name, history in layers.items()})
            for number, step in enumerate(steps)
        ]
        histories(snapshots)
    except (TypeError, ValueError) as error:  # also those of checks
        raise CheckpointError(f"{file.name} has no snapshots of patterns: {error}") from error
    return snapshots


# Points.


def checked_points(points: object) -> list[dict[str, Any]]:
    """Return measured points, each with all keys."""
    if not isinstance(points, Iterable) or isinstance(points, str | Mapping):
        raise InvalidArgumentError(f"points must be a list of points, got {shown(points)}")
    checked = [_checked_point(number, point) for number, point in enumerate(points)]
    if not checked:
        raise InvalidArgumentError("points must be at least one, got none")
    return checked


def _checked_point(number: int, point: object) -> dict[str, Any]:
    place = f"points[{number}]"
    if not isinstance(point, Mapping) or not {"label", "x", "y"} <= set(point) <= _POINT:
        raise InvalidArgumentError(
            f"{place} must have label, x and y, and may have spread and note, got {shown(point)}"
        )
    complete = {"spread": 0.0, "note": "", **point}
    for key in ("label", "note"):
        if not isinstance(complete[key], str):
            raise InvalidArgumentError(f"{place}: {key} must be a text, got {shown(complete[key])}")
    for key in ("x", "y", "spread"):
        given = complete[key]
        if not _is_finite(given) or (key == "spread" and given < 0):
            wanted = "a number of at least 0" if key == "spread" else "a finite number"
            raise InvalidArgumentError(f"{place}: {key} must be {wanted}, got {shown(given)}")
        complete[key] = float(given)
    return complete


def _is_finite(given: object) -> bool:
    try:
        return isinstance(given, Real) and not isinstance(given, bool) and math.isfinite(given)
    except OverflowError:  # an integer beyond all floats
        return False


def load_points(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read a JSON file with a list of points, see `tilesparse.plot.tradeoff`."""
    file = Path(path)
    try:
        return checked_points(json.loads(file.read_text()))
    except (OSError, ValueError, RecursionError) as error:  # also those of checks
        raise InvalidArgumentError(f"{file.name} has no points: {error}") from error

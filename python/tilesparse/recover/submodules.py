"""The submodules of a model that are fitted, and the blocks that they lie in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..calibrate.stream import Stream, stacks
from ..errors import InvalidArgumentError, UnsupportedError
from ..nn.convert import is_conv1d
from ..nn.linear import BlockSparseLinear
from .distillation import Forward
from .fitting import trained_parameters
from .report import SkippedSubmodule


class Piece(NamedTuple):
    """Blocks that data go through one by one, and the submodules in them that are fitted."""

    blocks: list[str]
    names: list[str]


def _stacks(model: nn.Module) -> list[list[str]]:
    """Return the blocks of all stacks that have block-sparse layers; none where most layers lie outside."""
    modules = dict(model.named_modules())
    sparse = [name for name, module in modules.items() if isinstance(module, BlockSparseLinear)]
    linear = [
        name
        for name, module in modules.items()
        if isinstance(module, nn.Linear | BlockSparseLinear) or is_conv1d(module)
    ]
    found: list[list[str]] = []
    held = 0
    for stack in stacks(model, linear):
        container: Any = modules[stack]
        blocks = [_join(stack, key) for key, _ in container.named_children()]
        others = [block for other in found for block in other]
        if any(is_within(a, b) or is_within(b, a) for a in blocks for b in others):
            continue
        inside = sum(any(is_within(layer, block) for block in blocks) for layer in sparse)
        if inside and len(blocks) == len(container):  # none is there twice
            found.append(blocks)
            held += inside
    return found if 2 * held > len(sparse) else []


def pieces_of(model: nn.Module, names: Sequence[str]) -> list[Piece]:
    """Return the stacks with their submodules, or the whole model where a submodule lies in no stack."""
    pieces = [
        Piece(blocks, [name for name in names if any(is_within(name, block) for block in blocks)])
        for blocks in _stacks(model)
    ]
    if sum(len(piece.names) for piece in pieces) < len(names):
        return [Piece([""], list(names))]
    return [piece for piece in pieces if piece.names]


def in_order(
    model: nn.Module, pieces: list[Piece], batch: Any, run: Forward, device: torch.device
) -> list[Piece]:
    """Return pieces in the order in which they run, without those that do not."""
    if len(pieces) == 1:
        return pieces
    by_head = {piece.blocks[0]: piece for piece in pieces}
    return [by_head[name] for name in stream_of(model, list(by_head), [batch], run, device).order]


def stream_of(
    model: nn.Module, blocks: Sequence[str], batches: Sequence[Any], run: Forward, device: torch.device
) -> Stream:
    """Record how batches run through blocks.

    Raises:
        InvalidArgumentError: a block is given keys and values of former calls, which each run would change.
        UnsupportedError: a block runs more than once in a forward pass.
    """
    stream = Stream(model, blocks, batches, run, device)
    if stream.repeated is not None:
        raise UnsupportedError(f"model must run {stream.repeated!r} at most once in a forward pass")
    if stream.cached is not None:
        raise InvalidArgumentError(
            f"batches must come without past_key_values and use_cache=True, which reach {stream.cached!r}"
        )
    return stream


def checked_names(model: nn.Module, teacher: nn.Module, submodules: Sequence[str] | None) -> list[str]:
    """Return the names to fit, once both models are known to have them."""
    if submodules is None:
        names = _default_names(model)
        if not names:
            raise InvalidArgumentError("model must have a BlockSparseLinear; name submodules to fit others")
    elif isinstance(submodules, str) or not isinstance(submodules, Sequence) or not submodules:
        raise InvalidArgumentError(f"submodules must be a sequence of names, got {submodules!r}")
    else:
        names = list(submodules)
    for whose, one in (("model", model), ("teacher", teacher)):
        known = {name for name, _ in one.named_modules(remove_duplicate=False)}
        for name in names:
            if name not in known:
                raise InvalidArgumentError(f"submodules must name modules of the {whose}, {name!r} is none")
    for name in names:
        if sum(is_within(name, other) for other in names) > 1:
            raise InvalidArgumentError(f"submodules: {name!r} is there twice, or lies within another")
    for tensor in (*model.parameters(), *teacher.parameters()):
        if tensor.is_meta:
            raise InvalidArgumentError(
                "model and teacher must have parameters with data, got the meta device"
            )
    return names


def _default_names(model: nn.Module) -> list[str]:
    names = []
    for block in (block for blocks in _stacks(model) or [[""]] for block in blocks):
        module = model.get_submodule(block)
        names += _parts(block, module) or ([block] if _has_sparse(module) else [])
    return names


def _parts(name: str, module: nn.Module) -> list[str]:
    """Return the children with block-sparse layers, and the items of containers, which are never called."""
    parts = []
    for key, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            parts += _parts(_join(name, key), child)
        elif _has_sparse(child):
            parts.append(_join(name, key))
    return parts


def outside(model: nn.Module, names: Sequence[str]) -> list[SkippedSubmodule]:
    """Return the block-sparse layers that are in no submodule."""
    return [
        SkippedSubmodule(name, "outside of the stack of blocks; fitted where submodules names it")
        for name, module in model.named_modules()
        if isinstance(module, BlockSparseLinear) and not any(is_within(name, one) for one in names)
    ]


def check_separate(model: nn.Module, names: Sequence[str]) -> None:
    """Raise UnsupportedError where two submodules share a trained parameter."""
    owners: dict[int, str] = {}
    for name in names:
        for parameter in trained_parameters(model.get_submodule(name)).values():
            other = owners.setdefault(id(parameter), name)
            if other != name:
                raise UnsupportedError(f"submodules: {other!r} and {name!r} share a parameter")


def check_running(names: Sequence[str], blocks: Sequence[str]) -> None:
    """Raise InvalidArgumentError unless each name lies in one of the blocks that run."""
    for name in names:
        if not any(is_within(name, block) for block in blocks):
            raise InvalidArgumentError(f"submodules: {name!r} does not run in a forward pass")


def check_runs(names: Iterable[str], found: Mapping[str, Sequence[Any]], batches: int) -> None:
    """Raise unless each submodule runs once in every batch."""
    for name in names:
        runs = len(found.get(name, ()))
        if runs < batches:
            raise InvalidArgumentError(f"submodules: {name!r} does not run in every forward pass")
        if runs > batches:
            raise UnsupportedError(f"submodules: {name!r} runs more than once in a forward pass")


def _has_sparse(module: nn.Module) -> bool:
    return any(isinstance(one, BlockSparseLinear) for one in module.modules())


def is_within(name: str, block: str) -> bool:
    """Return True for the block and what lies in it; the name of the model itself is empty."""
    return not block or name == block or name.startswith(f"{block}.")


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key

"""The MLPs of a model, found by what its modules compute in a call."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from .._names import names_of_modules
from ..calibrate.stream import call_apart
from ..errors import UnsupportedError
from ..nn.mlp import BlockSparseMLP
from ..nn.mlp_forms import form_of_sequence, may_be_mlp, reason_not_fused
from ..nn.state import evaluating
from .modules import Target, what_would_be_lost
from .reports import SkippedLayer


def mlps_to_fuse(model: nn.Module, batch: Any) -> tuple[list[Target], list[SkippedLayer]]:
    """Return the MLPs of a model with what is to replace them, and modules named so that stay.

    Args:
        model: only read.
        batch: what it is called with; None calls nothing.
    """
    reasons: dict[nn.Module, str | None] = {}
    waiting: list[nn.Module] = []  # for a call
    names = names_of_modules(model)
    for module in names:
        known = form_of_sequence(module) is not None
        if isinstance(module, BlockSparseMLP) or not (known or _is_named(module) or may_be_mlp(module)):
            continue
        reasons[module] = what_would_be_lost(module) or reason_not_fused(module)
        if module is model:
            reasons[module] = "the model itself cannot be replaced in place"
        if not known and reasons[module] is None:
            waiting.append(module)
    found = _seen(model, batch, waiting) if waiting and batch is not None else {}
    targets, skipped = [], []
    for module, reason in reasons.items():
        seen: BlockSparseMLP | str
        if reason is not None:
            seen = reason
        elif module not in waiting:
            seen = BlockSparseMLP.from_module(module)
        elif batch is None:
            seen = "a call shows what it computes: pass a batch"
        else:
            seen = found.get(module, "the batch does not call it")
        if isinstance(seen, BlockSparseMLP):
            targets.append(Target(names[module], module, seen))
        elif _is_named(module):
            skipped.append(SkippedLayer(names[module][0], type(module).__name__, seen))
    return targets, skipped


def _is_named(module: nn.Module) -> bool:
    return "mlp" in type(module).__name__.lower()


def _seen(
    model: nn.Module, batch: Any, modules: Iterable[nn.Module]
) -> dict[nn.Module, BlockSparseMLP | str]:
    """Call the model; return of each module what can replace it in all of its calls, or why nothing can."""
    found: dict[nn.Module, BlockSparseMLP | str] = {}

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(found.get(module), str):
            return
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            found[module] = "it is called with more than one tensor, or by keyword"
            return
        try:
            found[module] = BlockSparseMLP.from_module(module, args[0])
        except UnsupportedError as error:
            found[module] = str(error).removeprefix("module: ")

    with ExitStack() as stack:
        for module in modules:
            hook = module.register_forward_pre_hook(look, with_kwargs=True)
            stack.callback(hook.remove)
        with evaluating(model), torch.inference_mode(False), torch.no_grad():
            call_apart(model, batch)
    return found

"""Functions of MLPs that `BlockSparseMLP` can take over: seen in a call, and compared with it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from .._runtime.private import exact_float32
from ..errors import InvalidArgumentError, UnsupportedError
from .linear import BlockSparseLinear
from .mlp_activation import name_of_activation

Form: TypeAlias = dict[str, str]  # names of layers and other parts, by their roles

_SEQUENCES = (
    ("up", "activation", "down"),
    ("up", "activation", "down", "dropout"),
    ("up", "activation", "hidden_dropout", "down"),
    ("up", "activation", "hidden_dropout", "down", "dropout"),
)
_TOLERANCE = 1e-4  # of results in float32; an activation that is another approximation differs more
_COARSE = 0.05  # where x is quantized to 8 bits, or layers cannot be compared in float32


def may_be_mlp(module: nn.Module) -> bool:
    """Return True if a call can show that a module is an MLP: it has the parts of one."""
    children = list(module.children())
    layers = sum(isinstance(child, BlockSparseLinear) for child in children)
    others = sum(not isinstance(child, BlockSparseLinear | nn.Dropout) for child in children)
    return 1 <= layers <= 3 and others == 1 and not isinstance(module, nn.Sequential)


def form_of_sequence(module: nn.Module) -> Form | None:
    """Return the form of a `torch.nn.Sequential` that is an MLP with an activation of kernels."""
    if type(module).forward is not nn.Sequential.forward:
        return None
    modules = module._modules
    for roles in _SEQUENCES:
        if len(roles) == len(modules) and all(map(_has_role, modules.values(), roles)):
            return dict(zip(roles, modules, strict=True))
    return None


def _has_role(module: nn.Module | None, role: str) -> bool:
    if role == "activation":
        return isinstance(module, nn.Module) and name_of_activation(module) is not None
    return isinstance(module, nn.Dropout if "dropout" in role else BlockSparseLinear)


def reason_not_fused(module: nn.Module) -> str | None:
    """Say what of a module a `BlockSparseMLP` would lose, or return None."""
    if "forward" in vars(module):
        return "its forward was replaced by another function, which would be lost"
    held = sorted({**module._parameters, **module._buffers})
    if held:
        return f"it holds {', '.join(held)}, which would be lost"
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            return f"its {name} is {type(child).__name__}, not BlockSparseLinear"
    if not (may_be_mlp(module) or form_of_sequence(module)):
        return "it has other parts than one to three BlockSparseLinear, an activation and dropouts"
    return None


class _PartCall(NamedTuple):
    """A call of a part of a module."""

    x: Tensor
    y: Tensor


@torch.no_grad()
def form_in_call(module: nn.Module, x: Tensor) -> Form:
    """Call a module, and return the roles of its parts by what each is called with.

    Raises:
        UnsupportedError: they are not called as those of an MLP.
    """
    calls: dict[str, _PartCall] = {}
    with ExitStack() as stack:
        for name, part in module.named_children():

            def note(_: nn.Module, args: Any, kwargs: Any, y: Any, name: str = name) -> None:
                if name in calls or len(args) != 1 or kwargs or not isinstance(y, Tensor):
                    raise UnsupportedError(f"it calls {name} more than once, or with more than one tensor")
                calls[name] = _PartCall(args[0], y)

            hook = part.register_forward_hook(note, with_kwargs=True)
            stack.callback(hook.remove)
        y = module.forward(x)
    if not isinstance(y, Tensor):
        raise UnsupportedError(f"it returns a {type(y).__name__}, not one tensor")
    unused = sorted({name for name, _ in module.named_children()} - calls.keys())
    if unused:
        raise UnsupportedError(f"it does not call {', '.join(unused)}")
    return _form(dict(module.named_children()), calls, x)


def _form(parts: Mapping[str, nn.Module], calls: Mapping[str, _PartCall], x: Tensor) -> Form:
    layers = [name for name in calls if isinstance(parts[name], BlockSparseLinear)]
    dropouts = [name for name in calls if isinstance(parts[name], nn.Dropout)]
    (activation,) = calls.keys() - {*layers, *dropouts}
    first = [name for name in layers if _is_same(calls[name].x, x)]
    rest = [name for name in layers if name not in first]
    gates = [name for name in first if _is_same(calls[activation].x, calls[name].y)]
    form: Form = {"activation": activation}
    if len(first) == 2 and len(gates) == 1:
        form |= {"gate": gates[0], "up": next(name for name in first if name not in gates)}
    elif len(first) == 1 and gates:
        form["up"] = first[0]
    elif len(first) == 1 and 2 * calls[activation].x.numel() == calls[first[0]].y.numel():
        form["gate_up"] = first[0]
    if len(form) == 1 or len(rest) > 1:
        raise UnsupportedError("its layers take other inputs than those of an MLP")
    if rest:
        form["down"] = rest[0]
    for name in dropouts:
        hidden = bool(rest) and _is_same(calls[name].y, calls[rest[0]].x)  # dropout gives what it takes here
        form["hidden_dropout" if hidden else "dropout"] = name
    return form


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.numel() == b.numel()


@torch.no_grad()
def check_same(
    module: nn.Module, x: Tensor, make: Callable[[nn.Module], nn.Module], down: str | None
) -> None:
    """Compare a module with what takes its place, on x: in float32, in evaluation and in training.

    Args:
        module: the MLP.
        x: its input.
        make: makes the other one of an MLP.
        down: name of the layer whose input is compared, too; or None.

    Raises:
        UnsupportedError: they differ, or give nothing that shows it.
    """
    layers = [layer for layer in module.children() if isinstance(layer, BlockSparseLinear)]
    tolerance = _COARSE if any(layer.activations is not None for layer in layers) else _TOLERANCE
    if x.dtype in (torch.float16, torch.bfloat16):
        if any(layer.shard is not None or layer.spec.dtype != x.dtype for layer in layers):
            tolerance = _COARSE  # they compute as they are
        else:
            module, x = copy.deepcopy(module).float(), x.float()
    try:
        for training in (False, True):
            module.train(training)
            expected, found = (_results(one, x, down) for one in (module, make(module)))
            for mine, theirs in zip(found, expected, strict=True):
                size = float(theirs.norm())
                if not 0 < size < float("inf"):
                    raise UnsupportedError("its inputs show nothing: it gives zeros, or no numbers")
                if mine.shape != theirs.shape or not float((mine - theirs).norm()) <= tolerance * size:
                    mode = "training" if training else "evaluation"
                    raise UnsupportedError(f"it computes something else than an MLP of its parts, in {mode}")
    except InvalidArgumentError as error:
        raise UnsupportedError(f"its parts make no MLP: {error}") from error


def _results(module: nn.Module, x: Tensor, down: str | None) -> list[Tensor]:
    """Return what a module gives, and before that what a layer in it takes; random numbers are the same."""
    found: list[Tensor] = []
    devices = [x.device] if x.is_cuda else []
    with torch.random.fork_rng(devices), exact_float32(), ExitStack() as stack:
        if down is not None:
            layer = module.get_submodule(down)
            hook = layer.register_forward_pre_hook(lambda _, args: found.append(args[0].clone()))
            stack.callback(hook.remove)
        torch.manual_seed(0)
        found.append(module.forward(x.clone()))
    return found

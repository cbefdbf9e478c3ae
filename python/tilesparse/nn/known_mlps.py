"""Functions of MLPs that are known, whatever the class that has them."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple

from torch import nn

from .linear import BlockSparseLinear
from .mlp_activation import name_of_activation


class _Form(NamedTuple):
    """A known function of a module, and the names of what it calls there."""

    forward: Callable[..., Any]
    names: dict[str, str]  # by role


def is_known(module: nn.Module) -> bool:
    """Whether a module's function is one that `BlockSparseMLP.from_module` knows, whatever its layers."""
    return form_of(module) is not None


def _llama(self: Any, x: Any) -> Any:
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj


def _phi3(self: Any, hidden_states: Any) -> Any:
    up_states = self.gate_up_proj(hidden_states)
    gate, up_states = up_states.chunk(2, dim=-1)
    up_states = up_states * self.activation_fn(gate)
    return self.down_proj(up_states)


def _modernbert(self: Any, hidden_states: Any) -> Any:
    input, gate = self.Wi(hidden_states).chunk(2, dim=-1)
    return self.Wo(self.drop(self.act(input) * gate))


def _gpt2(self: Any, hidden_states: Any) -> Any:
    hidden_states = self.c_fc(hidden_states)
    hidden_states = self.act(hidden_states)
    hidden_states = self.c_proj(hidden_states)
    hidden_states = self.dropout(hidden_states)
    return hidden_states


def _bert(self: Any, hidden_states: Any) -> Any:
    hidden_states = self.dense(hidden_states)
    hidden_states = self.intermediate_act_fn(hidden_states)
    return hidden_states


def _vit(self: Any, hidden_states: Any) -> Any:
    hidden_states = self.fc1(hidden_states)
    hidden_states = self.activation_fn(hidden_states)
    hidden_states = self.fc2(hidden_states)
    return hidden_states


_FORMS = (
    _Form(_llama, {"up": "up_proj", "down": "down_proj", "gate": "gate_proj", "activation": "act_fn"}),
    _Form(_phi3, {"gate_up": "gate_up_proj", "down": "down_proj", "activation": "activation_fn"}),
    _Form(_modernbert, {"gate_up": "Wi", "down": "Wo", "activation": "act", "hidden_dropout": "drop"}),
    _Form(_gpt2, {"up": "c_fc", "down": "c_proj", "activation": "act", "dropout": "dropout"}),
    _Form(_vit, {"up": "fc1", "down": "fc2", "activation": "activation_fn"}),
    _Form(_bert, {"up": "dense", "activation": "intermediate_act_fn"}),
)
_KINDS: dict[str, type[nn.Module]] = {  # of parts other than layers
    "activation": nn.Module,
    "dropout": nn.Dropout,
    "hidden_dropout": nn.Dropout,
}
_SEQUENCES = (
    ("up", "activation", "down"),
    ("up", "activation", "down", "dropout"),
    ("up", "activation", "hidden_dropout", "down"),
    ("up", "activation", "hidden_dropout", "down", "dropout"),
)


def form_of(module: nn.Module) -> _Form | None:
    """By the instructions of its forward: more than a hundred classes of Transformers have one of them."""
    if type(module).forward is nn.Sequential.forward:
        return _form_of_sequence(module)
    code = getattr(type(module).forward, "__code__", None)
    for form in _FORMS:
        if code is not None and _instructions(code) == _instructions(form.forward.__code__):
            return form
    return None


def _instructions(code: CodeType) -> tuple[Any, ...]:
    """All that decides on what they do but names of variables; constants without a docstring."""
    constants = [constant for constant in code.co_consts if not isinstance(constant, str | None)]
    return code.co_code, code.co_names, constants


def _form_of_sequence(module: nn.Module) -> _Form | None:
    modules = module._modules
    for roles in _SEQUENCES:
        if len(roles) == len(modules) and all(map(_has_role, modules.values(), roles)):
            return _Form(nn.Sequential.forward, dict(zip(roles, modules, strict=True)))
    return None


def _has_role(module: nn.Module | None, role: str) -> bool:
    if role == "activation":
        return isinstance(module, nn.Module) and name_of_activation(module) is not None
    return isinstance(module, _KINDS.get(role, BlockSparseLinear))


def reason_not_known(module: nn.Module) -> str | None:
    """What keeps a module from becoming a `BlockSparseMLP`; None if nothing does."""
    form = form_of(module)
    if form is None:
        return (
            "its forward is none that is known, those of LlamaMLP, Phi3MLP, ModernBertMLP, GPT2MLP, ViTMLP "
            "and BertIntermediate of Transformers, and of nn.Sequential with an activation of kernels "
            "between two BlockSparseLinear"
        )
    if "forward" in vars(module):
        return "its forward was replaced by another function, which would be lost"
    held = {**module._parameters, **module._buffers, **module._modules}
    unknown = sorted(set(held) - set(form.names.values()))
    if unknown:
        return f"it holds {', '.join(unknown)}, which would be lost"
    for role, name in form.names.items():
        part = held.get(name)
        kind = _KINDS.get(role, BlockSparseLinear)
        if not isinstance(part, kind):
            return f"its {name} is {type(part).__name__}, not {kind.__name__}"
    return None

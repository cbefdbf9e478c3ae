"""The two or three linear layers between which a transformer widens its features, as one module.

Gated ones follow Shazeer, "GLU Variants Improve Transformer" (2020).

The file is long because what is recognised of other libraries' MLPs belongs to what the module computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._arguments import check_types, checked
from .._ops.linear import combined
from .._runtime.native import ACTIVATIONS
from ..errors import InvalidArgumentError, UnsupportedError
from ..functional import gated
from .linear import BlockSparseLinear

_ROLES = ("up", "down", "gate", "gate_up", "activation", "dropout", "hidden_dropout")
_FEW_TOKENS = 1024  # up to which there are kernels that read row-major activations alone


class BlockSparseMLP(nn.Module):
    """y = dropout(down(act(up(x)))), or with a gate y = dropout(down(act(gate(x)) ⊙ up(x))).

    Without ``down`` it ends before that, for models that have their other half elsewhere, as BERT does.

    One layer of twice the rows may stand for two: of what ``gate_up`` gives the first half is that of the
    gate, and the second that of ``up``. Both are read where they lie, see `functional.gated`, and in training
    the gradient of both is one tensor.

    Where no gradient is recorded, activation and gate are fused into the products of ``up``, and a residual
    always into that of ``down``. Layers with hooks on their results, and what adapters put in their places,
    are called as they are. Activations that no kernel has, and dropout, are left to PyTorch.

    What ``up`` gives ``down`` is feature-major where that was measured to be faster (docs/performance.md): on
    CUDA, in 16 bits, for more than 1024 tokens, without gradients, if ``down`` has plain blocks at least 64
    high and at most 32 wide. Otherwise it is row-major.

    Args:
        up: [in_features → hidden_features]; None with ``gate_up``.
        down: [hidden_features → out_features], or None.
        gate: as ``up``, or None.
        gate_up: [in_features → 2 hidden_features], in the place of ``gate`` and ``up``, or None.
        activation: "none", "relu", "gelu" (with erf) or "silu", or a module that works element by element.
        dropout: of the result before the residual, or None.
        hidden_dropout: of what ``down`` multiplies, or None.
        names: of the attributes that the layers, and a module as activation, are to have: by any of "up",
            "down", "gate", "gate_up", "activation", "dropout" and "hidden_dropout", which are their names
            otherwise.

    Attributes:
        gated: whether there is a gate.
        activation_name: "none", "relu", "gelu" or "silu" where kernels have the activation, otherwise None.

    Raises:
        InvalidArgumentError: an argument is of another type, or layers do not fit each other.
    """

    gated: bool
    activation_name: str | None

    @checked
    def __init__(
        self,
        up: BlockSparseLinear | None,
        down: BlockSparseLinear | None,
        gate: BlockSparseLinear | None = None,
        *,
        gate_up: BlockSparseLinear | None = None,
        activation: str | nn.Module = "gelu",
        dropout: nn.Dropout | None = None,
        hidden_dropout: nn.Dropout | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        _check_layers(up, down, gate, gate_up)
        self._names = _checked_names(names)
        self.gated = gate is not None or gate_up is not None
        self.activation_name = _name_of(activation)
        self._features = 0 if gate_up is None else gate_up.out_features // 2  # of either half
        parts = up, down, gate, gate_up, activation, dropout, hidden_dropout
        for role, part in zip(_ROLES, parts, strict=True):
            if isinstance(part, nn.Module):
                self.add_module(self._names[role], part)

    @classmethod
    @checked
    def from_module(cls, module: nn.Module) -> BlockSparseMLP:
        """The same function of the same layers, under the same names.

        Known are modules that compute what ``LlamaMLP``, ``Phi3MLP``, ``ModernBertMLP``, ``GPT2MLP``,
        ``ViTMLP`` and, without the other half, ``BertIntermediate`` of Transformers do, most of its others
        among them: their ``forward`` has to be the same, whatever their class. So is a
        ``torch.nn.Sequential`` of a linear layer, an activation that kernels have, and another linear layer,
        either with a ``torch.nn.Dropout`` behind it or not.

        Args:
            module: its linear layers are `BlockSparseLinear`; it keeps them, and so shares them.

        Raises:
            UnsupportedError: it computes something else, or holds what would get lost.
        """
        form = _form_of(module)
        reason = reason_not_known(module)
        if form is None or reason is not None:
            raise UnsupportedError(f"module: {reason}")
        parts: dict[str, Any] = {role: getattr(module, name) for role, name in form.names.items()}
        mlp = cls(**{"up": None, "down": None} | parts, names=form.names)
        # Its mode, and what others may read of it, such as its config.
        vars(mlp).update((name, value) for name, value in vars(module).items() if name not in vars(mlp))
        mlp._modules = dict(module._modules)  # in their order, by which optimizers know parameters
        mlp.training = module.training
        return mlp

    def forward(self, x: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """Computes the function above.

        Args:
            x: [..., in_features].
            residual: [..., out_features], added to the result, or None.

        Returns:
            y [..., out_features], without ``down`` [..., hidden_features].
        """
        try:
            hidden = self._hidden(x)
        except UnsupportedError:
            raise
        except Exception:  # types are looked at only now, which takes calls that are right no time
            check_types(BlockSparseMLP.forward, locals())
            raise
        down, dropout = self._part("down"), self._part("dropout")
        hidden_dropout = self._part("hidden_dropout")
        if hidden_dropout is not None:
            hidden = hidden_dropout(hidden)
        drops = dropout is not None and dropout.training and dropout.p > 0
        if residual is not None and _is_bare(down) and not drops:
            y: Tensor = down(hidden, residual=residual)
            return y
        y = hidden if down is None else down(hidden)
        if dropout is not None:
            y = dropout(y)
        return combined(y, "none", residual, None)

    def _hidden(self, x: Tensor) -> Tensor:
        """[..., hidden_features]: what ``down`` multiplies."""
        up, gate, gate_up = (self._part(role) for role in ("up", "gate", "gate_up"))
        options = {"feature_major_output": True} if self._is_feature_major(x) else {}
        activation = self._part("activation")
        name = self.activation_name if activation is None or not _is_watched(activation) else None
        if gate_up is not None:
            return self._of_halves(gate_up(x), name)
        if gate is None:
            if name is not None and _is_bare(up):
                return up(x, activation=name, **options)  # type: ignore[no-any-return]
            return self._activated(up(x))
        factor = gate(x, **options)
        if name is None:
            factor, name = self._activated(factor), "none"
        if _is_bare(up):
            return up(x, gate=factor, activation=name, **options)  # type: ignore[no-any-return]
        return combined(up(x), name, None, factor)

    def _of_halves(self, both: Tensor, activation: str | None) -> Tensor:
        if both.shape[-1] != 2 * self._features:
            raise UnsupportedError(
                f"gate_up: {2 * self._features} features expected from it, got {both.shape[-1]}; a layer "
                "that several processes have rows of gives all of them with output_layouts=Replicate()"
            )
        if activation is not None:
            return gated(both, activation=activation)
        gate, factor = both.chunk(2, -1)
        return factor * self._activated(gate)

    def _activated(self, y: Tensor) -> Tensor:
        activation = self._part("activation")
        if activation is not None:
            return activation(y)  # type: ignore[no-any-return]
        return combined(y, self.activation_name or "none", None, None)

    def _part(self, role: str) -> Any:
        return self._modules.get(self._names[role])

    def _is_feature_major(self, x: Tensor) -> bool:
        up, down, gate = (self._part(role) for role in ("up", "down", "gate"))
        if not x.is_cuda or torch.is_grad_enabled() or not all(map(_is_bare, (up, down, gate or up))):
            return False
        bn, bk = down.block_shape
        is_measured = bn >= 64 and bk <= 32 and down.storage == "plain" and down.nm is None
        return is_measured and down.weight.itemsize == 2 and x.numel() > _FEW_TOKENS * x.shape[-1]

    def extra_repr(self) -> str:
        """The activation where it is no module, for ``print(mlp)``."""
        return "" if self._part("activation") is not None else f"activation={self.activation_name!r}"


class _Form(NamedTuple):
    """A known function of a module, and the names of what it calls there."""

    forward: Callable[..., Any]
    names: dict[str, str]  # by role


def is_known(module: nn.Module) -> bool:
    """Whether a module's function is one that `BlockSparseMLP.from_module` knows, whatever its layers."""
    return _form_of(module) is not None


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


def _form_of(module: nn.Module) -> _Form | None:
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
        return isinstance(module, nn.Module) and _name_of(module) is not None
    return isinstance(module, _KINDS.get(role, BlockSparseLinear))


def reason_not_known(module: nn.Module) -> str | None:
    """What keeps a module from becoming a `BlockSparseMLP`; None if nothing does."""
    form = _form_of(module)
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


def _check_layers(up: Any, down: Any, gate: Any, gate_up: Any) -> None:
    for name, layer in (("up", up), ("down", down), ("gate", gate), ("gate_up", gate_up)):
        needed = name == "up" and gate_up is None
        if not isinstance(layer, BlockSparseLinear) and (needed or layer is not None):
            raise InvalidArgumentError(f"{name}: BlockSparseLinear expected, got {type(layer).__name__}")
    if gate_up is not None and (up is not None or gate is not None):
        raise InvalidArgumentError("gate_up: neither up nor gate expected beside it")
    hidden = up.out_features if gate_up is None else gate_up.out_features // 2
    if down is not None and down.in_features != hidden:
        of = "the out_features of up" if gate_up is None else "half the out_features of gate_up"
        raise InvalidArgumentError(f"down: in_features {hidden}, {of}, expected, got {down.in_features}")
    if gate is not None and gate.spec.shape != up.spec.shape:
        raise InvalidArgumentError(f"gate: shape {up.spec.shape} of up expected, got {gate.spec.shape}")


def _checked_names(names: Mapping[str, str] | None) -> dict[str, str]:
    given = dict(names or {})
    unknown = sorted(set(given) - set(_ROLES))
    if unknown:
        raise InvalidArgumentError(f"names: keys from {list(_ROLES)} expected, got {unknown}")
    checked = {role: role for role in _ROLES} | given
    if len(set(checked.values())) < len(_ROLES):
        raise InvalidArgumentError(f"names: different ones expected, got {checked}")
    return checked


def _name_of(activation: Any) -> str | None:
    """The name of the activation that kernels have, if it is one."""
    if isinstance(activation, str):
        if activation not in ACTIVATIONS:
            raise InvalidArgumentError(
                f"activation: one of {list(ACTIVATIONS)} or a module expected, got {activation!r}"
            )
        return activation
    if not isinstance(activation, nn.Module):
        raise InvalidArgumentError(
            f"activation: one of {list(ACTIVATIONS)} or a module expected, got {type(activation).__name__}"
        )
    kind = type(activation)
    if kind in (nn.ReLU, nn.SiLU, nn.Identity):
        return {nn.ReLU: "relu", nn.SiLU: "silu"}.get(kind, "none")
    if kind is nn.GELU:
        return "gelu" if activation.approximate == "none" else None
    of_transformers = kind.__module__ == "transformers.activations"
    if of_transformers and kind.__name__ == "GELUActivation":
        return "gelu" if getattr(activation, "act", None) is nn.functional.gelu else None
    return "silu" if of_transformers and kind.__name__ == "SiLUActivation" else None


def _is_bare(module: Any) -> bool:
    """Whether a layer gives the same if something is fused into it: nobody else looks at its result."""
    return type(module) is BlockSparseLinear and not _is_watched(module)


def _is_watched(module: nn.Module) -> bool:
    hooks = module._forward_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or "forward" in vars(module)

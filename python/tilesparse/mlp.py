"""The two or three linear layers between which a transformer widens its features, as one module.

Gated ones follow Shazeer, "GLU Variants Improve Transformer" (2020).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ._launch import ACTIVATIONS
from .errors import InvalidArgumentError, UnsupportedError
from .functional import combined
from .linear import BlockSparseLinear

_ROLES = ("up", "down", "gate", "activation", "dropout")
_FEW_TOKENS = 1024  # up to which there are kernels that read row-major activations alone


class BlockSparseMLP(nn.Module):
    """y = dropout(down(act(up(x)))), or with a gate y = dropout(down(act(gate(x)) ⊙ up(x))).

    Where no gradient is recorded, activation and gate are fused into the products of ``up``, and a residual
    always into that of ``down``. Layers with hooks on their results, and what adapters put in their places,
    are called as they are. Activations that no kernel has, and dropout, are left to PyTorch.

    What ``up`` gives ``down`` is feature-major where that was measured to be faster (docs/performance.md): on
    CUDA, in 16 bits, for more than 1024 tokens, without gradients, if ``down`` has plain blocks at least 64
    high and at most 32 wide. Otherwise it is row-major.

    Args:
        up: [in_features → hidden_features].
        down: [hidden_features → out_features].
        gate: as ``up``, or None.
        activation: "none", "relu", "gelu" (with erf) or "silu", or a module that works element by element.
        dropout: of the result before the residual, or None.
        names: of the attributes that the layers, and a module as activation, are to have: by any of "up",
            "down", "gate", "activation" and "dropout", which are their names otherwise.

    Attributes:
        gated: whether there is a gate.
        activation_name: "none", "relu", "gelu" or "silu" where kernels have the activation, otherwise None.

    Raises:
        InvalidArgumentError: an argument is of another type, or layers do not fit each other.
    """

    gated: bool
    activation_name: str | None

    def __init__(
        self,
        up: BlockSparseLinear,
        down: BlockSparseLinear,
        gate: BlockSparseLinear | None = None,
        *,
        activation: str | nn.Module = "gelu",
        dropout: nn.Dropout | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        _check_layers(up, down, gate)
        self._names = _checked_names(names)
        self.gated, self.activation_name = gate is not None, _name_of(activation)
        if not isinstance(dropout, nn.Dropout | None):
            raise InvalidArgumentError(f"dropout: torch.nn.Dropout expected, got {type(dropout).__name__}")
        for role, module in zip(_ROLES, (up, down, gate, activation, dropout), strict=True):
            if isinstance(module, nn.Module):
                self.add_module(self._names[role], module)

    @classmethod
    def from_module(cls, module: nn.Module) -> BlockSparseMLP:
        """The same function of the same layers, under the same names.

        Known are modules that compute what ``LlamaMLP``, ``GPT2MLP`` and ``ViTMLP`` of Transformers do, most
        of its others among them: their ``forward`` has to be the same, whatever their class.

        Args:
            module: its linear layers are `BlockSparseLinear`; it keeps them, and so shares them.

        Raises:
            UnsupportedError: it computes something else, or holds what would get lost.
        """
        form = _form_of(module)
        reason = reason_not_known(module)
        if form is None or reason is not None:
            raise UnsupportedError(f"module: {reason}")
        parts = {role: getattr(module, name) for role, name in form.names.items()}
        mlp = cls(**parts, names=form.names)
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
            y [..., out_features].
        """
        hidden, down, dropout = self._hidden(x), self._part("down"), self._part("dropout")
        drops = dropout is not None and dropout.training and dropout.p > 0
        if residual is not None and _is_bare(down) and not drops:
            y: Tensor = down(hidden, residual=residual)
            return y
        y = down(hidden)
        if dropout is not None:
            y = dropout(y)
        return combined(y, "none", residual, None)

    def _hidden(self, x: Tensor) -> Tensor:
        """[..., hidden_features]: what ``down`` multiplies."""
        up, gate = self._part("up"), self._part("gate")
        options = {"feature_major_output": True} if self._is_feature_major(x) else {}
        activation = self._part("activation")
        name = self.activation_name if activation is None or not _is_watched(activation) else None
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


def _llama(self: Any, x: Any) -> Any:
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj


def _gpt2(self: Any, hidden_states: Any) -> Any:
    hidden_states = self.c_fc(hidden_states)
    hidden_states = self.act(hidden_states)
    hidden_states = self.c_proj(hidden_states)
    hidden_states = self.dropout(hidden_states)
    return hidden_states


def _vit(self: Any, hidden_states: Any) -> Any:
    hidden_states = self.fc1(hidden_states)
    hidden_states = self.activation_fn(hidden_states)
    hidden_states = self.fc2(hidden_states)
    return hidden_states


_FORMS = (
    _Form(_llama, {"up": "up_proj", "down": "down_proj", "gate": "gate_proj", "activation": "act_fn"}),
    _Form(_gpt2, {"up": "c_fc", "down": "c_proj", "activation": "act", "dropout": "dropout"}),
    _Form(_vit, {"up": "fc1", "down": "fc2", "activation": "activation_fn"}),
)


def _form_of(module: nn.Module) -> _Form | None:
    """By the instructions of its forward: more than a hundred classes of Transformers have one of them."""
    code = getattr(type(module).forward, "__code__", None)
    for form in _FORMS:
        known = form.forward.__code__
        if code is not None and (code.co_code, code.co_names) == (known.co_code, known.co_names):
            return form
    return None


def reason_not_known(module: nn.Module) -> str | None:
    """What keeps a module from becoming a `BlockSparseMLP`; None if nothing does."""
    form = _form_of(module)
    if form is None:
        return "its forward is none that is known, those of LlamaMLP, GPT2MLP and ViTMLP of Transformers"
    if "forward" in vars(module):
        return "its forward was replaced by another function, which would be lost"
    held = {**module._parameters, **module._buffers, **module._modules}
    unknown = sorted(set(held) - set(form.names.values()))
    if unknown:
        return f"it holds {', '.join(unknown)}, which would be lost"
    for role, name in form.names.items():
        part = held.get(name)
        kind = {"activation": nn.Module, "dropout": nn.Dropout}.get(role, BlockSparseLinear)
        if not isinstance(part, kind):
            return f"its {name} is {type(part).__name__}, not {kind.__name__}"
    return None


def _check_layers(up: Any, down: Any, gate: Any) -> None:
    for name, layer in (("up", up), ("down", down), ("gate", gate)):
        if not isinstance(layer, BlockSparseLinear) and (name != "gate" or layer is not None):
            raise InvalidArgumentError(f"{name}: BlockSparseLinear expected, got {type(layer).__name__}")
    if down.in_features != up.out_features:
        raise InvalidArgumentError(
            f"down: in_features {up.out_features}, the out_features of up, expected, got {down.in_features}"
        )
    if gate is not None and gate._shape != up._shape:
        raise InvalidArgumentError(f"gate: shape {up._shape} of up expected, got {gate._shape}")


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

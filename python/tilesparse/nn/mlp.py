"""The two or three linear layers between which a transformer widens its features, as one module.

Gated ones follow Shazeer, "GLU Variants Improve Transformer" (2020).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from .._arguments import check_types_after, checked
from .._ops.autocast import autocast
from .._ops.linear import combined
from .._ops.quantization import constant
from ..errors import InvalidArgumentError, UnsupportedError
from ..functional import gated
from ..storage.registry import storage_of
from .linear import BlockSparseLinear
from .mlp_activation import name_of_activation
from .mlp_forms import Form, check_same, form_in_call, form_of_sequence, reason_not_fused
from .state import evaluating

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

    The activations between ``up`` and ``down`` are column-major where that was measured to be faster
    (docs/performance.md): on CUDA, in 16 bits, for more than 1024 tokens, without gradients, if ``down`` has
    dense blocks at least 64 high and at most 32 wide. Otherwise they are row-major.

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
        self.activation_name = name_of_activation(activation)
        self._features = 0 if gate_up is None else gate_up.out_features // 2  # of either half
        parts = up, down, gate, gate_up, activation, dropout, hidden_dropout
        for role, part in zip(_ROLES, parts, strict=True):
            if isinstance(part, nn.Module):
                self.add_module(self._names[role], part)

    @classmethod
    @checked
    def from_module(cls, module: nn.Module, x: Tensor | None = None) -> BlockSparseMLP:
        """Return the same function of the same layers, under the same names.

        What a module computes is seen when it is called with ``x``: its parts have to be one to three linear
        layers, an activation, and perhaps dropouts, called as those of an MLP. What the result computes is
        compared with the module on ``x``, in evaluation and in training mode. A ``torch.nn.Sequential`` of a
        linear layer, an activation that kernels have, and another linear layer, with or without
        ``torch.nn.Dropout`` behind the last two, is known without.

        Args:
            module: its linear layers are `BlockSparseLinear`; it keeps them, and so shares them.
            x: an input of the module, [..., in_features], such as a model gives it.

        Raises:
            UnsupportedError: it computes something else, holds what would get lost, or is not known and there
                is no ``x``.
        """
        reason, form = reason_not_fused(module), form_of_sequence(module)
        if reason is None and form is None and x is None:
            reason = "a call shows what it computes: pass x"
        if reason is not None:
            raise UnsupportedError(f"module: {reason}")
        if form is None:
            assert x is not None
            try:
                with evaluating(module):
                    form = seen = form_in_call(module, x.clone())
                    check_same(module, x, lambda one: cls._of_form(one, seen), seen.get("down"))
            except UnsupportedError as error:
                raise UnsupportedError(f"module: {error}") from error
        return cls._of_form(module, form)

    @classmethod
    def _of_form(cls, module: nn.Module, form: Form) -> BlockSparseMLP:
        parts: dict[str, Any] = {role: getattr(module, name) for role, name in form.items()}
        # A part may have the name of a role that is not its own.
        others = {role: f"_{role}" for role in _ROLES if role not in form and role in form.values()}
        mlp = cls(**{"up": None, "down": None} | parts, names=form | others)
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
        except Exception as error:
            check_types_after(error, BlockSparseMLP.forward, locals())
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
        options = {"feature_major_output": True} if self._is_column_major(x) else {}
        activation = self._part("activation")
        name = self.activation_name if activation is None or not _is_watched(activation) else None
        if gate_up is not None:
            return self._of_halves(gate_up(x), name)
        if gate is None:
            if name is not None and _is_bare(up):
                return up(x, activation=name, **options)  # type: ignore[no-any-return]
            return self._activated(up(x))
        if not _quantize_alike(gate, up):
            return self._gated(x, gate, up, name, options)
        (x,) = autocast(x)
        with constant(x):
            return self._gated(x, gate, up, name, options)

    def _gated(self, x: Tensor, gate: Any, up: Any, name: str | None, options: dict[str, bool]) -> Tensor:
        factor = gate(x, **options)
        if name is None:
            factor, name = self._activated(factor), "none"
        if _is_bare(up):
            return up(x, gate=factor, activation=name, **options)  # type: ignore[no-any-return]
        return combined(up(x), name, None, factor)

    def _of_halves(self, both: Tensor, activation: str | None) -> Tensor:
        if both.shape[-1] != 2 * self._features:
            raise UnsupportedError(
                f"gate_up must return {2 * self._features} features, got {both.shape[-1]}; a layer "
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

    def _is_column_major(self, x: Tensor) -> bool:
        up, down, gate = (self._part(role) for role in ("up", "down", "gate"))
        if not x.is_cuda or torch.is_grad_enabled() or not all(map(_is_bare, (up, down, gate or up))):
            return False
        bn, bk = down.block_shape
        is_measured = bn >= 64 and bk <= 32 and storage_of(down.storage).trainable and down.nm is None
        return is_measured and down.weight.itemsize == 2 and x.numel() > _FEW_TOKENS * x.shape[-1]

    def extra_repr(self) -> str:
        """The activation where it is no module, for ``print(mlp)``."""
        return "" if self._part("activation") is not None else f"activation={self.activation_name!r}"


def _check_layers(up: Any, down: Any, gate: Any, gate_up: Any) -> None:
    for name, layer in (("up", up), ("down", down), ("gate", gate), ("gate_up", gate_up)):
        needed = name == "up" and gate_up is None
        if not isinstance(layer, BlockSparseLinear) and (needed or layer is not None):
            raise InvalidArgumentError(f"{name} must be a BlockSparseLinear, got {type(layer).__name__}")
    if gate_up is not None and (up is not None or gate is not None):
        raise InvalidArgumentError("gate_up must be the only one of gate_up, up and gate")
    hidden = up.out_features if gate_up is None else gate_up.out_features // 2
    if down is not None and down.in_features != hidden:
        of = "the out_features of up" if gate_up is None else "half the out_features of gate_up"
        raise InvalidArgumentError(f"down must have {hidden} in_features, {of}, got {down.in_features}")
    if gate is not None and gate.spec.shape != up.spec.shape:
        raise InvalidArgumentError(f"gate must have the shape {up.spec.shape} of up, got {gate.spec.shape}")


def _checked_names(names: Mapping[str, str] | None) -> dict[str, str]:
    given = dict(names or {})
    unknown = sorted(set(given) - set(_ROLES))
    if unknown:
        raise InvalidArgumentError(f"names must have keys from {list(_ROLES)}, got {unknown}")
    checked = {role: role for role in _ROLES} | given
    if len(set(checked.values())) < len(_ROLES):
        raise InvalidArgumentError(f"names must differ from each other, got {checked}")
    return checked


def _is_bare(module: Any) -> bool:
    """Whether a layer gives the same if something is fused into it: nobody else looks at its result."""
    return type(module) is BlockSparseLinear and not _is_watched(module)


def _quantize_alike(gate: Any, up: Any) -> bool:
    """Return True if both quantize x alike in eager mode, and nobody else sees it."""
    if getattr(up, "activations", None) is None or is_compiling():
        return False
    are_bare = _is_bare(gate) and _is_bare(up) and not (gate._forward_pre_hooks or up._forward_pre_hooks)
    return are_bare and gate.activations == up.activations


def _is_watched(module: nn.Module) -> bool:
    hooks = module._forward_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or "forward" in vars(module)

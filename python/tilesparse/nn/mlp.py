"""The two or three linear layers between which a transformer widens its features, as one module.

Gated ones follow Shazeer, "GLU Variants Improve Transformer" (2020).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from .._checks import check_kind, shown
from .._ops.autograd import autocast
from .._ops.epilogue import constant
from .._ops.products import combined
from .._runtime.device import ACTIVATIONS
from .._runtime.torch_private import exact_float32
from ..errors import InvalidArgumentError, UnsupportedError
from ..functional import gated
from ..storage.formats import storage_of
from .linear import BlockSparseLinear, evaluating

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
    are called as they are. Activations that no kernel has, and dropout, are left to PyTorch. What lies
    between ``up`` and ``down`` is column-major where that was measured to be faster (docs/performance.md).

    Args:
        up: [in_features → hidden_features]; None with ``gate_up``.
        down: [hidden_features → out_features], or None.
        gate: as ``up``, or None.
        gate_up: [in_features → 2 hidden_features], in the place of ``gate`` and ``up``, or None.
        activation: "none", "relu", "gelu" (with erf) or "silu", or a module that works element by element.
        dropout: of the result before the residual, or None.
        hidden_dropout: of what ``down`` multiplies, or None.

    Attributes:
        gated: whether there is a gate.
        activation_name: "none", "relu", "gelu" or "silu" where kernels have the activation, otherwise None.
    """

    gated: bool
    activation_name: str | None

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
    ) -> None:
        super().__init__()
        _check_layers(up, down, gate, gate_up)
        self._names = {role: role for role in _ROLES}
        self.gated = gate is not None or gate_up is not None
        self.activation_name = name_of_activation(activation)
        self._features = 0 if gate_up is None else gate_up.out_features // 2  # of either half
        parts = up, down, gate, gate_up, activation, dropout, hidden_dropout
        for role, part in zip(_ROLES, parts, strict=True):
            if "dropout" in role and not (part is None or isinstance(part, nn.Dropout)):
                raise InvalidArgumentError(f"{role} must be a torch.nn.Dropout or None, got {shown(part)}")
            if isinstance(part, nn.Module):
                self.add_module(role, part)

    @classmethod
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
        mlp = cls(**{"up": None, "down": None} | parts)
        mlp._names |= form | others
        # Its mode, and what others may read of it, such as its config.
        vars(mlp).update((name, value) for name, value in vars(module).items() if name not in vars(mlp))
        mlp._modules = dict(module._modules)  # in their order, by which optimizers know parameters
        mlp.training = module.training
        return mlp

    def forward(self, x: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """Return y [..., out_features], or without ``down`` [..., hidden_features]; a residual is added."""
        hidden = self._hidden(x)
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
        """Return what ``down`` multiplies [..., hidden_features]."""
        up, gate, gate_up = (self._part(role) for role in ("up", "gate", "gate_up"))
        options = {"column_major_output": True} if self._is_column_major(x) else {}
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
        return gated_halves(both, activation, self._activated)

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
        """Return the activation where it is no module, for ``print(mlp)``."""
        return "" if self._part("activation") is not None else f"activation={self.activation_name!r}"


def gated_halves(both: Tensor, name: str | None, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Return act(gate) ⊙ factor of (gate, factor) side by side; without a name by the activation itself."""
    if name is not None:
        return gated(both, activation=name)
    gate, factor = both.chunk(2, -1)
    return activation(gate) * factor


def down_of(mlp: BlockSparseMLP) -> Any:
    """Return the layer that multiplies the neurons of an MLP, or None."""
    return mlp._part("down")


def _check_layers(up: Any, down: Any, gate: Any, gate_up: Any) -> None:
    for name, layer in (("up", up), ("down", down), ("gate", gate), ("gate_up", gate_up)):
        if layer is not None or (name == "up" and gate_up is None):
            check_kind(name, layer, BlockSparseLinear)
    if gate_up is not None and (up is not None or gate is not None):
        raise InvalidArgumentError("gate_up must be the only one of gate_up, up and gate")
    hidden = up.out_features if gate_up is None else gate_up.out_features // 2
    if down is not None and down.in_features != hidden:
        of = "the out_features of up" if gate_up is None else "half the out_features of gate_up"
        raise InvalidArgumentError(f"down must have {hidden} in_features, {of}, got {down.in_features}")
    if gate is not None and gate.spec.shape != up.spec.shape:
        raise InvalidArgumentError(f"gate must have the shape {up.spec.shape} of up, got {gate.spec.shape}")


def _is_bare(module: Any) -> bool:
    """Return True if nothing observes the layer's output, so an epilogue can be fused."""
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


def name_of_activation(activation: Any) -> str | None:
    """Return the name of the activation that kernels have, if it is one."""
    if isinstance(activation, str) and activation in ACTIVATIONS:
        return activation
    if not isinstance(activation, nn.Module):
        raise InvalidArgumentError(
            f"activation must be one of {list(ACTIVATIONS)} or a module, got {shown(activation)}"
        )
    kind, name = type(activation), _NAMES.get(type(activation))
    if kind.__module__ == "transformers.activations":
        name = {"GELUActivation": "gelu", "SiLUActivation": "silu"}.get(kind.__name__)
        if name == "gelu" and getattr(activation, "act", None) is not nn.functional.gelu:
            name = None
    return None if kind is nn.GELU and activation.approximate != "none" else name


_NAMES: dict[type, str] = {nn.ReLU: "relu", nn.SiLU: "silu", nn.Identity: "none", nn.GELU: "gelu"}


Form: TypeAlias = dict[str, str]  # names of layers and other parts, by their roles
_PartCall: TypeAlias = tuple[Tensor, Tensor]  # x and y of a part of a module

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


@torch.no_grad()
def form_in_call(module: nn.Module, x: Tensor) -> Form:
    """Call a module, and return the roles of its parts by what each is called with."""
    calls: dict[str, _PartCall] = {}
    with ExitStack() as stack:
        for name, part in module.named_children():

            def note(_: nn.Module, args: Any, kwargs: Any, y: Any, name: str = name) -> None:
                if name in calls or len(args) != 1 or kwargs or not isinstance(y, Tensor):
                    raise UnsupportedError(f"it calls {name} more than once, or with more than one tensor")
                calls[name] = args[0], y

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
    xs, ys = ({name: call[side] for name, call in calls.items()} for side in (0, 1))
    layers = [name for name in calls if isinstance(parts[name], BlockSparseLinear)]
    dropouts = [name for name in calls if isinstance(parts[name], nn.Dropout)]
    (activation,) = calls.keys() - {*layers, *dropouts}
    first = [name for name in layers if _is_same(xs[name], x)]
    rest = [name for name in layers if name not in first]
    gates = [name for name in first if _is_same(xs[activation], ys[name])]
    form: Form = {"activation": activation}
    if len(first) == 2 and len(gates) == 1:
        form |= {"gate": gates[0], "up": next(name for name in first if name not in gates)}
    elif len(first) == 1 and gates:
        form["up"] = first[0]
    elif len(first) == 1 and 2 * xs[activation].numel() == ys[first[0]].numel():
        form["gate_up"] = first[0]
    if len(form) == 1 or len(rest) > 1:
        raise UnsupportedError("its layers take other inputs than those of an MLP")
    if rest:
        form["down"] = rest[0]
    for name in dropouts:
        hidden = bool(rest) and _is_same(ys[name], xs[rest[0]])  # dropout gives what it takes here
        form["hidden_dropout" if hidden else "dropout"] = name
    return form


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.numel() == b.numel()


@torch.no_grad()
def check_same(
    module: nn.Module, x: Tensor, make: Callable[[nn.Module], nn.Module], down: str | None
) -> None:
    """Compare an MLP with what ``make`` makes of it, on x: in float32, in evaluation and in training."""
    layers = [layer for layer in module.children() if isinstance(layer, BlockSparseLinear)]
    tolerance = _COARSE if any(layer.activations is not None for layer in layers) else _TOLERANCE
    if x.dtype in (torch.float16, torch.bfloat16):
        if any(layer._shard is not None or layer.spec.dtype != x.dtype for layer in layers):
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

"""Experts of a mixture (Shazeer et al., "Outrageously Large Neural Networks", ICLR 2017), block-sparse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._arguments import check_types_after, checked
from .._checks import check_block_shape
from ..config import checked_scales
from ..errors import InvalidArgumentError, UnsupportedError
from ..functional import gated
from ..matrix import BlockSparseMatrix
from ..pattern.block_pattern import BlockPattern
from ..pattern.choosing import check_parts_beside
from .convert import best_blocks
from .experts_linear import ExpertsLinear
from .known_experts import NORM, dense_weight_of, projections_of, reason_not_known
from .mlp_activation import name_of_activation
from .routing import combined, gathered, routing_of


class BlockSparseExperts(nn.Module):
    """The experts of a mixture: y = Σ_j w_j down_e(act(gate_e(x)) ⊙ up_e(x)), e the token's j-th expert.

    Without a gate each expert is down_e(act(up_e(x))). Each projection of all experts is one `ExpertsLinear`:
    one pattern, one tensor of values, one product. Tokens are sorted by expert on the device, and the host
    never waits for their numbers: routing may change between replays of a CUDA graph.

    Args:
        up: [hidden → 2 · intermediate] with a gate, whose first half of the features is that of the gate, or
            [hidden → intermediate]; `ExpertsLinear` of as many experts as ``down``.
        down: [intermediate → hidden].
        gated: whether there is a gate.
        activation: "none", "relu", "gelu" (with erf) or "silu", or a module that works element by element.
        apply_gate: in place of both: called with this module and what ``up`` gives [rows, features], it
            returns what ``down`` multiplies, such as a class's function ``_apply_gate`` in Transformers.

    Attributes:
        num_experts: how many.
        up_name: the name of the attribute with ``up``, "gate_up" with a gate, else "up".
        down: as given.

    Raises:
        InvalidArgumentError: an argument is of another type, or layers do not fit each other.
    """

    @checked
    def __init__(
        self,
        up: ExpertsLinear,
        down: ExpertsLinear,
        *,
        gated: bool = True,
        activation: str | nn.Module = "silu",
        apply_gate: Callable[[Any, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        if up.experts != down.experts:
            raise InvalidArgumentError(f"down must have {up.experts} experts, as up has, got {down.experts}")
        features = up.out_features // up.experts
        if apply_gate is None and features != down.in_features * (1 + gated):
            raise InvalidArgumentError(
                f"down must have {features // (1 + gated)} in_features, as up gives, got {down.in_features}"
            )
        self.num_experts = up.experts
        self.up_name = "gate_up" if gated else "up"
        self.activation_name = name_of_activation(activation)
        self._apply_gate = apply_gate
        self._gated, self._transposed = gated, False
        self.add_module(self.up_name, up)
        self.down = down
        if isinstance(activation, nn.Module):
            self.act_fn = activation

    @classmethod
    @checked
    def from_experts(
        cls,
        module: nn.Module,
        density: float = 0.5,
        *,
        block_shape: int | Sequence[int] = (64, 64),
        patterns: Mapping[str, BlockPattern] | None = None,
        parts: tuple[int, int] = (1, 1),
        nm: Sequence[int] | None = None,
        transposable: bool = False,
        storage: str = "plain",
        scales: str = "row",
    ) -> BlockSparseExperts:
        """Return experts with the best blocks of a module of Transformers, and its function.

        The module implements Transformers' experts interface (``use_experts_implementation``): any class with
        3-D parameters ``gate_up_proj`` or ``up_proj``, and ``down_proj``, transposed or not, with biases or
        without. Every expert keeps as many blocks of a projection as the others, those of largest
        Frobenius norm. Its own function between the projections is kept, whatever that is, and so are its
        modules and what others may read of it, such as ``num_experts``. The projections are called "gate_up"
        or "up", and "down".

        Args:
            module: only read; parameters are copied, with their ``requires_grad``.
            density: fraction of the blocks to keep.
            block_shape: (bn, bk), or one number for both.
            patterns: of the projections [experts · out, in], by name; in the place of density and block
                shape.
            parts: (r, c): every expert keeps as many blocks of each of r parts of its block rows and c of its
                block columns; (1, 1) beside patterns.
            nm: (2, 4) or None.
            transposable: whether masks keep two of four weights in columns as well.
            storage: "plain", "compressed", "int8", "float8_e4m3fn" or "int4".
            scales: what has a scale in 8 and 4 bits, a "row" of a block or a "block".

        Raises:
            UnsupportedError: it does not implement the interface, or holds what would get lost.
            InvalidArgumentError: it cannot be cut into these blocks, holds NaN, or is on the meta device and
                there are no patterns.
        """
        found = projections_of(module)
        if found is None:
            raise UnsupportedError(
                f"module must implement Transformers' experts interface, got {type(module).__name__}"
            )
        reason = reason_not_known(module)
        if reason is not None:
            raise UnsupportedError(f"module: {reason}")
        parts, scales = check_parts_beside(patterns, parts), checked_scales("scales", scales, None)
        layers = []
        for name, own in found.layers().items():
            weight = dense_weight_of(module, name)
            pattern = None if patterns is None else patterns[own]
            if pattern is None:
                experts = len(module.get_parameter(name))
                of_all = experts * parts[0], parts[1]
                pattern = best_blocks(weight, None, density, check_block_shape(block_shape), of_all)
            layer = _projection(module, name, weight, pattern)
            if nm is not None:
                layer.set_nm(nm, transposable=transposable)
            layers.append(layer.to_storage(storage, per=scales))
        return experts_like(module, *layers)

    def projections(self) -> dict[str, ExpertsLinear]:
        """Return both projections by their names, ``up`` first.

        Raises:
            UnsupportedError: one has an adapter in its place.
        """
        found: dict[str, Any] = {name: self._modules[name] for name in (self.up_name, "down")}
        for name, layer in found.items():
            if not isinstance(layer, ExpertsLinear):
                raise UnsupportedError(
                    f"{name} must be an ExpertsLinear, got {type(layer).__name__}; merge its adapter"
                )
        return found

    @property
    def halves(self) -> int:
        """Parts that the features of ``up`` have, one after the other: 2 with a gate, unless interleaved."""
        return 2 if self._gated and getattr(self, "is_concatenated", True) else 1

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the function above.

        Args:
            hidden_states: [tokens, hidden].
            top_k_index: [tokens, k] integers: the experts of each token, from 0 to num_experts - 1. All other
                numbers stand for no expert, as num_experts does in Transformers: such a choice adds nothing
                to the result and to any gradient, whatever its weight.
            top_k_weights: [tokens, k]: what their results are multiplied by.

        Returns:
            [tokens, hidden], in the dtype of ``hidden_states``.
        """
        try:
            _check_routing(hidden_states, top_k_index, top_k_weights)
            shard: Any = getattr(self.down, "shard", None)
            x, weights, experts = hidden_states, top_k_weights, self.num_experts
            chosen = top_k_index.clamp(0, experts - 1)
            given = chosen == top_k_index
            weights = torch.where(given, weights, 0)
            if shard is not None:
                x, chosen, weights, experts = shard.entered(x, chosen, weights)
            routing = routing_of(chosen, experts)
            x = gathered(x, routing, given)
            y = self.down(self._between(x, routing.offsets), routing.offsets)
            norm = self._modules.get(NORM)
            if norm is not None:
                y = norm(y)
            y = combined(y, weights, routing).to(hidden_states.dtype)
            return y if shard is None else shard.left(y)
        except Exception as error:
            check_types_after(error, BlockSparseExperts.forward, locals())
            raise

    def _between(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Return what ``down`` multiplies [rows, intermediate]."""
        name, activation = self.activation_name, self._modules.get("act_fn")
        up: Any = self._modules[self.up_name]
        if self._apply_gate is None and not self._gated and name is not None:
            return up(x, offsets, activation=name)  # type: ignore[no-any-return]
        both = up(x, offsets)
        if self._apply_gate is not None:
            return self._apply_gate(self, both)
        if not self._gated:
            assert activation is not None
            return activation(both)  # type: ignore[no-any-return]
        if name is not None:
            return gated(both, activation=name)
        gate, factor = both.chunk(2, -1)
        assert activation is not None
        return activation(gate) * factor  # type: ignore[no-any-return]

    @torch.no_grad()
    def to_dense(self) -> dict[str, Tensor]:
        """Return the parameters of the dense experts by their names, zero where no block is kept.

        They have the shapes of the module that this one was made from: [experts, out, in], or
        [experts, in, out] where that keeps them transposed; and biases [experts, out].
        """
        found = {}
        for own, layer in self.projections().items():
            name = f"{own}_proj"
            dense = BlockSparseMatrix(layer.plain_values(), layer.pattern).to_dense()
            weight = dense.view(self.num_experts, -1, layer.in_features)
            found[name] = weight.mT.contiguous() if self._transposed else weight
            if layer.bias is not None:
                found[f"{name}_bias"] = layer.bias.detach().view(self.num_experts, -1).clone()
        return found

    def extra_repr(self) -> str:
        """The number of experts and, where it is no module, the activation."""
        given = "act_fn" in self._modules or self._apply_gate is not None
        own = "" if given else f", activation={self.activation_name!r}"
        return f"num_experts={self.num_experts}{own}"


def experts_like(module: nn.Module, up: ExpertsLinear, down: ExpertsLinear) -> BlockSparseExperts:
    """Return experts of these projections, with the function of a module that implements the interface."""
    dense: Any = module
    apply_gate: Any = type(dense)._apply_gate
    default = getattr(apply_gate, "__name__", "") == "_default_apply_gate"
    own = default or not dense.has_gate
    made = BlockSparseExperts(
        up,
        down,
        gated=dense.has_gate,
        activation=getattr(module, "act_fn", nn.Identity()) if own else "none",
        apply_gate=None if own else apply_gate,
    )
    known = vars(made)
    known.update((name, value) for name, value in vars(module).items() if name not in known)
    made._transposed = dense.is_transposed
    for name, child in module._modules.items():
        made.add_module(name, child)
    return made.train(module.training)


def _projection(module: nn.Module, name: str, weight: Tensor, pattern: BlockPattern) -> ExpertsLinear:
    """Return the layer of a projection with the kept blocks of its dense weight."""
    dense, bias = module.get_parameter(name), module._parameters.get(f"{name}_bias")
    layer = ExpertsLinear(
        weight.shape[1],
        weight.shape[0],
        bias is not None,
        experts=len(dense),
        pattern=pattern,
        device="meta",
        dtype=weight.dtype,
    ).to_empty(device=weight.device)
    with torch.no_grad():
        layer.pattern = pattern
        layer.weight.copy_(BlockSparseMatrix.from_dense(weight, pattern.to(weight.device)).values)
        layer.weight.requires_grad_(dense.requires_grad)
        if bias is not None and layer.bias is not None:
            layer.bias.copy_(bias.flatten())
            layer.bias.requires_grad_(bias.requires_grad)
    return layer.train(module.training)


def _check_routing(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> None:
    if hidden_states.dim() != 2:
        raise InvalidArgumentError(
            f"hidden_states must be [tokens, hidden], got shape {tuple(hidden_states.shape)}"
        )
    for name, tensor in (("top_k_index", top_k_index), ("top_k_weights", top_k_weights)):
        if tensor.dim() != 2 or tensor.shape[0] != hidden_states.shape[0]:
            raise InvalidArgumentError(
                f"{name} must be [{hidden_states.shape[0]}, k], got shape {tuple(tensor.shape)}"
            )
    if top_k_index.shape != top_k_weights.shape:
        raise InvalidArgumentError(
            f"top_k_weights must have the shape {tuple(top_k_index.shape)} of top_k_index, got "
            f"{tuple(top_k_weights.shape)}"
        )
    if top_k_index.dtype not in (torch.int32, torch.int64):
        raise InvalidArgumentError(f"top_k_index must be int32 or int64, got {top_k_index.dtype}")

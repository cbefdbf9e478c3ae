"""Experts of a mixture (Shazeer et al., "Outrageously Large Neural Networks", ICLR 2017), block-sparse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from .._checks import Operands, check_block_shape, checked_count
from .._ops.autograd import autocast, records_gradient
from .._ops.epilogue import combine, spread, spread_in_8_bits, straight_through
from .._ops.products import linear_on
from .._runtime.select import multiplies_as_decode
from .._runtime.torch_private import is_any_autocast_enabled
from ..config import LayerSpec, check_experts
from ..errors import InvalidArgumentError, UnsupportedError
from ..pattern import BlockPattern, with_blocks
from .linear import BlockSparseLinear, best_blocks, layer_of, layer_of_dense
from .merged import concatenate
from .mlp import gated_halves, name_of_activation
from .weight import dense_blocks, is_sharded, layer_index, stored_of, update_spec


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
    """

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
    def from_experts(
        cls,
        module: nn.Module,
        density: float = 0.5,
        *,
        block_shape: int | Sequence[int] = (64, 64),
        patterns: Mapping[str, BlockPattern] | None = None,
        nm: Sequence[int] | None = None,
        transposable: bool = False,
        storage: str = "plain",
        granularity: str = "row",
        activations: str | None = None,
    ) -> BlockSparseExperts:
        """Return experts with the best blocks of a module of Transformers, and its function.

        The module implements Transformers' experts interface (``use_experts_implementation``): any class with
        3-D parameters ``gate_up_proj`` or ``up_proj``, and ``down_proj``, transposed or not, with biases or
        without. Every expert keeps as many blocks of a projection as the others, those of largest
        Frobenius norm. Its own function between the projections is kept, whatever that is, and so are its
        modules and what others may read of it, such as ``num_experts``. The projections are called "gate_up"
        or "up", and "down".

        The module is only read; parameters are copied, with their ``requires_grad``. ``patterns`` are those
        of the projections [experts · out, in], by name, in place of density and block shape. All else is as
        of `BlockSparseLinear.from_linear`, for each expert, and ``granularity`` as of its `to_storage`.

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
        layers = []
        for name, own in found.layers().items():
            weight, experts = dense_weight_of(module, name), len(module.get_parameter(name))
            pattern = None if patterns is None else patterns[own]
            if pattern is None:
                pattern = best_blocks(weight, None, density, check_block_shape(block_shape), (experts, 1))
            dense: Any = module.get_parameter(name), module._parameters.get(f"{name}_bias")
            two_of_four: Any = {"nm": nm, "transposable": transposable}
            spec = LayerSpec.of(pattern, weight.dtype, experts=experts, **two_of_four)
            spec = spec.with_storage(storage, granularity, activations)
            layer = layer_of_dense(ExpertsLinear, spec, pattern, weight, *dense)
            layers.append(layer.train(module.training))
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
        _check_routing(hidden_states, top_k_index, top_k_weights)
        shard: Any = getattr(self.down, "_shard", None)
        x, weights, experts = hidden_states, top_k_weights, self.num_experts
        chosen = top_k_index.clamp(0, experts - 1)
        given = chosen == top_k_index
        weights = torch.where(given, weights, 0)
        if shard is not None:
            x, chosen, weights, experts = shard.entered(x, chosen, weights)
        offsets, rows = routing_of(chosen, experts)
        # Choices of no expert get zeros: an expert is finite there, and so is zero times it.
        y = self.down(self._between(partial(self._up, x, given, rows, offsets)), offsets)
        norm = self._modules.get(NORM)
        if norm is not None:
            y = norm(y)
        y = combine(y, weights.to(y.dtype), rows).to(hidden_states.dtype)
        return y if shard is None else shard.left(y)

    def _up(
        self, x: Tensor, given: Tensor, rows: Tensor, offsets: Tensor, activation: str = "none"
    ) -> Tensor:
        """Return what ``up`` gives [rows, features]; tokens are quantized before there are more rows."""
        up: Any = self._modules[self.up_name]
        if isinstance(up, ExpertsLinear) and up.activations is not None and up.threshold is None:
            watched = up._forward_pre_hooks or up._forward_hooks or is_any_autocast_enabled()
            like = x.new_empty(1, x.shape[1]).expand(rows.numel(), -1)  # what nothing reads
            if not (watched or records_gradient((x, up.bias)) or multiplies_as_decode(like, layer_index(up))):
                quantized = spread_in_8_bits(x, given, rows, up.weight.dtype)
                if quantized is not None:
                    return up._product_of_experts(like, offsets, None, None, activation, quantized)
        x = spread(x, given.to(x.dtype), rows)
        return up(x, offsets, activation=activation)  # type: ignore[no-any-return]

    def _between(self, up: Callable[..., Tensor]) -> Tensor:
        """Return what ``down`` multiplies [rows, intermediate]."""
        name: str | None = self.activation_name
        activation: Any = self._modules.get("act_fn")
        if self._apply_gate is None and not self._gated and name is not None:
            return up(activation=name)
        both = up()
        if self._apply_gate is not None:
            return self._apply_gate(self, both)
        return gated_halves(both, name, activation) if self._gated else activation(both)

    @torch.no_grad()
    def to_dense(self) -> dict[str, Tensor]:
        """Return the parameters of the dense experts by their names, zero where no block is kept.

        They have the shapes of the module that this one was made from: [experts, out, in], or
        [experts, in, out] where that keeps them transposed; and biases [experts, out].
        """
        found = {}
        for own, layer in self.projections().items():
            name = f"{own}_proj"
            dense = with_blocks(dense_blocks(layer), layer.pattern)
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


def _check_routing(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> None:
    tokens, choices = hidden_states.shape[0], top_k_index.shape
    if hidden_states.dim() != 2 or len(choices) != 2 or choices[0] != tokens:
        raise InvalidArgumentError(
            "hidden_states must be [tokens, hidden] and top_k_index [tokens, k], got shapes "
            f"{tuple(hidden_states.shape)} and {tuple(choices)}"
        )
    if choices != top_k_weights.shape:
        raise InvalidArgumentError(
            f"top_k_weights must have the shape {tuple(choices)} of top_k_index, got "
            f"{tuple(top_k_weights.shape)}"
        )
    if top_k_index.dtype not in (torch.int32, torch.int64):
        raise InvalidArgumentError(f"top_k_index must be int32 or int64, got {top_k_index.dtype}")


class ExpertsLinear(BlockSparseLinear):
    """y[t] = x[t] W_eᵀ + bias_e for the tokens t of each expert e, where only some blocks of W are kept.

    W [experts · out, in_features] has the weights of all experts below each other: one pattern, one tensor of
    values, and one bias [experts · out]. Experts may keep different numbers of blocks.

    It is a `BlockSparseLinear` to all that stores, moves, trains or loads one. What needs one weight for all
    tokens raises UnsupportedError: `from_linear`, `to_linear`, `cut`, and policies other than "sparse".

    Args:
        in_features: size of the last dimension of x.
        out_features: rows of W: those of all experts.
        bias: whether each expert has a bias.
        density: fraction of the blocks to keep of each expert, drawn at random.
        experts: how many.
        options: as of `BlockSparseLinear`.
    """

    _of_experts = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        density: float = 0.5,
        *,
        experts: int,
        block_shape: int | Sequence[int] = (64, 64),
        pattern: BlockPattern | None = None,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> None:
        experts = checked_count("experts", experts)
        if pattern is None:
            out_features = checked_count("out_features", out_features)
            check_experts(experts, out_features, check_block_shape(block_shape)[0])
            shape = out_features, in_features
            drawn: Any = {"block_shape": block_shape, "density": density, "generator": generator}
            pattern = BlockPattern.random(shape, parts=(experts, 1), **drawn)
        super().__init__(in_features, out_features, bias, pattern=pattern, generator=generator, **options)
        update_spec(self, experts=experts)

    @classmethod
    @torch.no_grad()
    def from_layers(cls, layers: Sequence[BlockSparseLinear]) -> ExpertsLinear:
        """Return the projection of experts that are layers of their own, see `concatenate`."""
        shapes = {(layer.spec.shape, layer.bias is not None) for layer in layers}
        if len(shapes) > 1:
            raise InvalidArgumentError(f"layers must have one shape and all or none a bias, got {shapes}")
        whole = stored_of(concatenate(layers), "from_layers")
        stored = whole._replace(spec=replace(whole.spec, experts=len(layers)))
        return layer_of(cls, stored, layers[0].weight, layers[0].bias).train(layers[0].training)

    @property
    def experts(self) -> int:
        """Number of experts."""
        assert self._experts is not None
        return self._experts

    def densities(self) -> Tensor:
        """Return the kept fraction of the blocks of each expert [experts]."""
        rows, columns = self.spec.grid
        ends = self.crow_indices[:: rows // self.experts]
        return ends.diff() / (rows // self.experts * columns)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        offsets: Tensor | None = None,
        *,
        residual: Tensor | None = None,
        gate: Tensor | None = None,
        activation: str = "none",
    ) -> Tensor:
        """Compute the product, with all else as in `functional.grouped_linear`.

        Args:
            x: [tokens, in_features], sorted by expert.
            offsets: int32 [experts + 1]: the tokens of expert e are offsets[e] to offsets[e + 1] - 1.
            residual: [tokens, out], added to the result, or None.
            gate: [tokens, out], by which the result is multiplied in the place of a residual, or None.
            activation: of the result, or of the gate where there is one.

        Returns:
            y [tokens, out].
        """
        return self._product_of_experts(x, offsets, residual, gate, activation, (None, None))

    def _product_of_experts(
        self,
        x: Tensor,
        offsets: Tensor | None,
        residual: Tensor | None,
        gate: Tensor | None,
        activation: str,
        of_x: tuple[Tensor | None, Tensor | None],
    ) -> Tensor:
        """Compute `forward` from x in 8 bits and its scales, where these are there."""
        if offsets is None:
            raise InvalidArgumentError("offsets must say which tokens each expert has, got None")
        shard: Any = self._shard
        experts = self.experts if shard is None else shard.experts
        if offsets.numel() != experts + 1:
            raise InvalidArgumentError(f"offsets must have {experts + 1} entries, got {offsets.numel()}")
        if self._origin.pending:
            self._validate_pattern()
        if getattr(self.weight, "main_grad", None) is not None or self._observe is not None:
            raise UnsupportedError(
                "weight must not have a main_grad, nor a schedule that looks at dense gradients: experts "
                "have neither"
            )
        whole = {**self._stored(), "bias": self.bias}
        tensors: Any = whole if shard is None else shard.tensors(self)
        index = layer_index(self) if shard is None else shard.index(self)
        weight: Tensor = tensors["weight"]
        if tensors["mask"] is not None:
            (weight,) = autocast(weight)
            weight = straight_through(weight, tensors["mask"])
        fast = None if self.activations is None else False
        own: dict[str, Any] = {"offsets": offsets, "x_values": of_x[0], "x_scales": of_x[1], "fast": fast}
        own["threshold"] = self._threshold
        operands = Operands(tensors["metadata"], tensors["scales"], **own)
        added = tensors["bias"], activation, residual
        return linear_on(x, weight, index, *added, operands=operands, gate=gate)

    def to_linear(self, *_: Any, **__: Any) -> NoReturn:
        """Raise UnsupportedError, as `cut` does."""
        raise UnsupportedError(
            "to_linear and cut need one weight for all tokens, got those of experts; use "
            "BlockSparseExperts.from_experts and to_dense"
        )

    cut = to_linear

    @classmethod
    def from_linear(cls, *_: Any, **__: Any) -> NoReturn:
        """Raise UnsupportedError; see `from_layers`."""
        raise UnsupportedError("from_linear makes one linear layer; use BlockSparseExperts.from_experts")

    def extra_repr(self) -> str:
        """Return the number of experts, and what `BlockSparseLinear` says."""
        return f"experts={self.experts}, {super().extra_repr()}"


FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
NORM = "post_expert_norm"


class Projections(NamedTuple):
    """Names of the parameters of experts, which are 3-D: [experts, out, in], or [experts, in, out]."""

    up: str  # of gate and up, where there is a gate
    down: str
    transposed: bool
    bias: bool

    def names(self) -> tuple[str, str]:
        """(up, down)."""
        return self.up, self.down

    def layers(self) -> dict[str, str]:
        """Return the names that sparse projections have in their places, by parameter.

        They differ: Transformers' conversions of checkpoints take names by their beginnings and ends.
        """
        return {name: name.removesuffix("_proj") for name in self.names()}

    def biases(self) -> tuple[str, ...]:
        """Names of the biases [experts, out], if there are any."""
        return tuple(f"{name}_bias" for name in self.names()) if self.bias else ()


def projections_of(module: nn.Module) -> Projections | None:
    """Return the projections of a module of dense experts, None for any other module."""
    if not all(isinstance(vars(module).get(flag), bool) for flag in FLAGS):
        return None
    if not callable(getattr(type(module), "_apply_gate", None)):
        return None
    own: Any = module
    found = Projections(
        "gate_up_proj" if own.has_gate else "up_proj", "down_proj", own.is_transposed, own.has_bias
    )
    weights = [module._parameters.get(name) for name in found.names()]
    if any(weight is None or weight.dim() != 3 for weight in weights):
        return None
    return found


def reason_not_known(module: nn.Module) -> str | None:
    """Say what keeps experts, which `projections_of` knows, from being replaced; None if nothing does."""
    found = projections_of(module)
    assert found is not None
    parameters = module.parameters(recurse=False)
    if getattr(module, "_is_expert_parallel", False) or any(map(is_sharded, parameters)):
        return "its experts are spread over processes; convert the model before they are"
    if "forward" in vars(module) or "_apply_gate" in vars(module):
        return "its forward or _apply_gate was replaced by another function, which would be lost"
    known = {*found.names(), *found.biases()}
    unknown = sorted({*module._parameters, *module._buffers} - known)
    if unknown:
        return f"it holds {', '.join(unknown)}, which would be lost"
    missing = sorted(known - {*module._parameters})
    if missing:
        return f"it lacks {', '.join(missing)}"
    experts = {len(parameter) for parameter in module._parameters.values() if parameter is not None}
    if len(experts) > 1:
        return f"its parameters are of different numbers of experts, {sorted(experts)}"
    return None


def has_norm(module: nn.Module) -> bool:
    """Return True if experts, which `projections_of` knows, have a norm behind each."""
    return bool(vars(module).get("has_post_expert_norm", False))  # Transformers 5.17 knows none


def dense_weight_of(module: nn.Module, name: str) -> Tensor:
    """Return W [experts · out, in] of a projection without gradient; a copy where it lies transposed."""
    dense: Any = module
    weight: Tensor = dense.get_parameter(name).detach()
    return (weight.mT if dense.is_transposed else weight).flatten(0, 1)


def stacked_parameters(module: nn.Module) -> list[str]:
    """Return the names of a module's own floating parameters of three dimensions, as experts have."""
    return [
        name
        for name, parameter in module.named_parameters(recurse=False)
        if not nn.parameter.is_lazy(parameter)
        and parameter.dim() == 3
        and torch.is_floating_point(parameter)
        and not isinstance(module, nn.modules.conv._ConvNd)
    ]


def routing_of(top_k_index: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Sort the choices of tokens [tokens, k], from 0 to experts - 1, by expert.

    Returns offsets, int32 [experts + 1]: the sorted rows of expert e are offsets[e] to offsets[e + 1] - 1;
    and the row of each choice, int64 [tokens, k].
    """
    chosen = top_k_index.reshape(-1).to(torch.int16)  # a quarter of the passes that sorting int64 takes
    chosen, order = chosen.sort(stable=True)
    numbers = torch.arange(experts + 1, device=chosen.device, dtype=chosen.dtype)
    offsets = torch.searchsorted(chosen, numbers, out_int32=True)
    rows = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    return offsets, rows.view(top_k_index.shape)

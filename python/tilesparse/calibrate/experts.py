"""Experts as linear layers, one for each expert and projection, while a model is pruned.

Each expert's inputs are the tokens that are routed to it, which may be few. The second moment of expert e is
therefore drawn towards that of all experts of its layer, with n_e and n tokens and sums S_e and S of XᵀX,

    M_e = (S_e + τ S / n) / (n_e + τ),   τ = in_features,

and likewise its mean: as if it had met τ more tokens like those of all experts. This is the shrinkage towards
the pooled covariance of Friedman, "Regularized Discriminant Analysis" (JASA 1989), with a weight that falls
with n_e. An expert is fitted to its output for the inputs that it has in the pruned model: which tokens it
had in the dense one need not be the same.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import check_block_shape
from ..config import BlockSparseConfig, check_of_experts
from ..errors import InvalidArgumentError, UnsupportedError
from ..model.modules import names_of_modules, set_submodule
from ..nn.experts import (
    NORM,
    ExpertsLinear,
    Projections,
    dense_weight_of,
    experts_like,
    has_norm,
    projections_of,
    reason_not_known,
)
from ..nn.linear import BlockSparseLinear
from ..pattern import BlockPattern
from .moments import Moments

_SAME = ("block_shape", "nm", "storage", "transposable", "granularity", "policy", "activations")


class _Projection(nn.Module):
    """The layers of a projection by their numbers; not a ModuleList, which could be a stack of blocks."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        for number, layer in enumerate(layers):
            self.add_module(str(number), layer)
        self.in_features, self.bias = layers[0].in_features, True if layers[0].bias is not None else None


class LinearExperts(nn.Module):
    """Dense experts as `torch.nn.Linear` of the same memory.

    Attributes:
        dense: the module whose parameters they are parts of.
        tokens: the rows of ``hidden_states`` that the expert at work gets, while the layer runs.
        rows: how many there are.
    """

    dense: Any
    tokens: Tensor | None = None
    rows = 0

    def __init__(self, dense: Any, projections: Projections) -> None:
        super().__init__()
        object.__setattr__(self, "dense", dense)  # not a part of the model
        self.names = tuple(projections.layers().values())
        for name, own in projections.layers().items():
            weight, bias = dense.get_parameter(name), dense._parameters.get(f"{name}_bias")
            whole = dense_weight_of(dense, name)
            parts = whole.view(len(weight), -1, whole.shape[1])
            biases = [None] * len(weight) if bias is None else bias.detach()
            layers = [_linear(*pair, weight.requires_grad) for pair in zip(parts, biases, strict=True)]
            self.add_module(own, _Projection(layers))
        for name, child in dense.named_children():
            self.add_module(name, child)
        self.train(dense.training)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute what the dense experts do, one after the other."""
        result, self.rows = torch.zeros_like(hidden_states), len(hidden_states)
        up, down = (self.get_submodule(name) for name in self.names)
        for number in sorted({*top_k_index.flatten().tolist()}):
            self.tokens, choice = (top_k_index == number).nonzero(as_tuple=True)
            y = up.get_submodule(str(number))(hidden_states[self.tokens])
            y = self.dense._apply_gate(y) if self.dense.has_gate else self.dense.act_fn(y)
            y = down.get_submodule(str(number))(y)
            if has_norm(self.dense):
                y = self.get_submodule(NORM)(y)
            y = y * top_k_weights[self.tokens, choice, None]
            result = result.index_add(0, self.tokens, y.to(result.dtype))
        self.tokens = None
        return result


def _linear(weight: Tensor, bias: Tensor | None, trained: bool) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, trained)
    if bias is not None:
        layer.bias = nn.Parameter(bias, trained)
    return layer


@contextmanager
def expanded(model: nn.Module) -> Iterator[dict[str, LinearExperts]]:
    """Have linear layers in the places of all experts that are known; yield them by name."""
    found: dict[str, LinearExperts] = {}
    places = []
    for module, aliases in names_of_modules(model).items():
        projections = projections_of(module)
        if projections is not None and module is not model and reason_not_known(module) is None:
            found[aliases[0]] = LinearExperts(module, projections)
            places.append((aliases, module, found[aliases[0]]))
    try:
        for aliases, _, layers in places:
            for name in aliases:
                set_submodule(model, name, layers)
        yield found
    finally:
        for aliases, module, _ in places:
            for name in aliases:
                set_submodule(model, name, module)


def projection_of(experts: Container[str], name: str) -> str | None:
    """Return the name of the projection of an expert's layer, which all experts share; None for others."""
    projection = name.rpartition(".")[0]
    return projection if projection.rpartition(".")[0] in experts else None


def refuse_experts(model: nn.Module, names: Iterable[str], argument: str, why: str) -> None:
    """Raise UnsupportedError where one of the layers is an expert of several."""
    with expanded(model) as experts:
        for name in names:
            if projection_of(experts, name) is not None:
                raise UnsupportedError(f"{argument}: {name!r} is one of several experts, {why}")


def tokens_of_projections(experts: Container[str], tokens: Mapping[str, int]) -> dict[str, int]:
    """Return how many tokens layers have met, those of experts together: they share their moments."""
    found: dict[str, int] = {}
    for name, met in tokens.items():
        whole = projection_of(experts, name) or name
        found[whole] = found.get(whole, 0) + met
    return found


def check_configs_of(experts: Container[str], targets: Mapping[str, BlockSparseConfig]) -> None:
    """Raise InvalidArgumentError unless all experts of a projection are to be stored in one way."""
    first: dict[str, tuple[str, BlockSparseConfig]] = {}
    for name, config in targets.items():
        projection = projection_of(experts, name)
        if projection is None:
            continue
        other, wanted = first.setdefault(projection, (name, config))
        for own in _SAME:
            if getattr(config, own) != getattr(wanted, own):
                raise InvalidArgumentError(
                    f"config: {name!r} and {other!r} are experts of one projection and must agree in {own}, "
                    f"got {getattr(config, own)} and {getattr(wanted, own)}"
                )
        try:
            check_of_experts(config.policy, config.activations, config.granularity)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"config: {name!r} is an expert: {error}") from error


def joined(
    experts: Mapping[str, LinearExperts],
    made: Mapping[str, BlockSparseLinear],
    targets: Mapping[str, BlockSparseConfig],
) -> dict[str, Any]:
    """Return layers by name, those of experts as one `BlockSparseExperts` each.

    An expert that is to stay dense keeps all of its blocks, stored as those of the others.
    """
    found: dict[str, Any] = {
        name: layer for name, layer in made.items() if projection_of(experts, name) is None
    }
    for name, layers in experts.items():
        configs = {key: config for key, config in targets.items() if projection_of([name], key) is not None}
        if configs:
            projections = [
                _joined(f"{name}.{one}", layers.get_submodule(one), made, configs) for one in layers.names
            ]
            found[name] = experts_like(layers.dense, *projections)
    return found


def _joined(
    name: str,
    projection: nn.Module,
    made: Mapping[str, BlockSparseLinear],
    configs: Mapping[str, BlockSparseConfig],
) -> ExpertsLinear:
    own = (config for key, config in configs.items() if key.rpartition(".")[0] == name)
    config = next(own, next(iter(configs.values())))
    layers = []
    for number, linear in projection.named_children():
        layer = made.get(f"{name}.{number}")
        layers.append(_whole(linear, config) if layer is None else layer)
    return ExpertsLinear.from_layers(layers)


def _whole(linear: Any, config: BlockSparseConfig) -> BlockSparseLinear:
    """Return a layer with every block of a dense one."""
    shape = linear.out_features, linear.in_features
    pattern = BlockPattern.full(shape, block_shape=check_block_shape(config.block_shape))
    layer = BlockSparseLinear.from_linear(
        linear, pattern=pattern, nm=config.nm, transposable=config.transposable
    )
    return layer.to_storage(config.storage, granularity=config.granularity, activations=config.activations)


class ExpertMoments:
    """Moments of the inputs of all experts of a projection, and of all of them together."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._all: Moments | None = None
        self._own: dict[str, Moments] = {}

    def add(self, name: str, x: Tensor, number: int, keep: Tensor | None) -> None:
        """Add the inputs [tokens, features] of one call of an expert; ``keep``: bools [tokens]."""
        if self._all is None:
            self._all = Moments(x.shape[-1], self._device)
        self._all.add(x, None, number, keep)
        if name not in self._own:
            self._own[name] = Moments(x.shape[-1], self._device, origin=self._all.origin)
        self._own[name].add(x, None, number, keep)

    def of(self, name: str) -> Moments | None:
        """Return the moments of an expert, drawn towards those of all; None without any token."""
        if self._all is None:
            return None
        features = len(self._all.origin)
        own = self._own.get(name)
        if own is None:
            own = Moments(features, self._device, origin=self._all.origin)
        return own.drawn_to(self._all, features)

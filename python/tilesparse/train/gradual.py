"""Patterns that shrink while a model trains: blocks that go, gates that learn which, and a group lasso."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from .._checks import check_choice, checked_count, checked_fraction, checked_number
from ..errors import InvalidArgumentError, UnsupportedError
from ..nn.linear import BlockSparseLinear
from ..nn.weight import has_peers, keep_blocks
from ..storage.formats import storage_of
from ._layers import (
    Hooked,
    Layers,
    Removable,
    check_keys,
    check_optimized,
    check_trainable,
    checked_optimizer,
    gradient_of,
    precision_of,
    rates_of,
    some_sparse_layers,
    sparse_layers,
)
from .patterns import SCORES, Movement, check_states, load_movement, magnitudes, states_by_slot


class Gradual(Removable):
    """Schedule that removes blocks of `BlockSparseLinear` layers in training, down to a density.

    Step it after the optimizer. From ``begin`` to ``end`` the density falls from d₀ to d₁ in a few events,
    as d(t) = d₁ + (d₀ - d₁) (1 - t)³, t from 0 to 1 (Zhu and Gupta, "To prune, or not to prune", 2017). Each
    removes the blocks of lowest score from every layer; of equal scores the later slot goes. The defaults
    follow "The Journey Matters" (2025). Start with density 1 and the policy "auto", which multiplies dense as
    long as that is faster.

    Removed blocks free their memory. Each weight stays the same Parameter, and its gradient and the
    optimizer's states are narrowed with it; a captured CUDA graph has to be captured again, and compiled code
    is compiled anew after each event. One process trains the model.

    Args:
        model: has `BlockSparseLinear` layers in the storage "plain".
        optimizer: has their weights.
        density: at the end, above 0 and at most that of each layer.
        steps: of the whole training, which the attribute ``steps`` counts.
        begin: when blocks begin to go, in fractions of ``steps``.
        end: when the last ones do.
        events: how often blocks are removed.
        score: "magnitude", the L1 norm of a block, or "movement", the sum of -weight · gradient over all
            steps so far (Sanh et al., "Movement Pruning", NeurIPS 2020).

    Raises:
        UnsupportedError: a weight is sharded, parametrized or not stored plain, or other processes train,
            too.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        density: float,
        steps: int,
        begin: float = 0.25,
        end: float = 0.75,
        events: int = 20,
        score: str = "magnitude",
    ) -> None:
        optimizer = checked_optimizer(optimizer)
        total, events = checked_count("steps", steps), checked_count("events", events)
        begin, end = checked_fraction("begin", begin), checked_fraction("end", end)
        if begin >= end:
            raise InvalidArgumentError(f"begin must be less than end={end}, got {begin}")
        check_choice("score", score, SCORES)
        _check_whole(model)
        self._layers = some_sparse_layers(model)
        _check_shrinkable(self._layers)
        check_optimized(self._layers, optimizer)
        density = checked_fraction("density", density)
        self._last = {name: _target(name, layer, density) for name, layer in self._layers.items()}
        self._first = {name: layer.weight.shape[0] for name, layer in self._layers.items()}
        self._model, self._optimizer = model, optimizer
        self._movement = Movement(self._layers, optimizer) if score == "movement" else None
        # The steps after which blocks go, and when that is on the way from begin to end, from 0 to 1.
        self._events: dict[int, float] = {}
        for event in range(1, events + 1):
            time = event / events
            self._events[max(1, round(total * (begin + (end - begin) * time)))] = time
        self.steps = 0

    @torch.no_grad()
    def step(self) -> bool:
        """Count a step of the optimizer, and remove blocks if it is time to; return True if it was.

        After an error, as in the constructor or of an unknown state of the optimizer, nothing has changed.
        """
        self._check_not_removed()
        time = self._events.get(self.steps + 1)
        if time is not None:
            _check_shrinkable(self._layers)
            check_optimized(self._layers, self._optimizer)
            check_states(self._optimizer, {name: layer.weight for name, layer in self._layers.items()})
            _check_whole(self._model)
        self.steps += 1
        if time is None:
            return False
        for name, layer in self._layers.items():
            first, last = self._first[name], self._last[name]
            left = last + round((first - last) * (1 - time) ** 3)
            if left < layer.weight.shape[0]:
                self._remove(name, layer, left)
        return True

    def remove(self) -> None:
        """Remove all hooks; layers stay as they are."""
        self._removed = True
        if self._movement is not None:
            self._movement.remove()

    def state_dict(self) -> dict[str, Any]:
        """Return all that later events depend on, but for the states of model and optimizer."""
        movement = {} if self._movement is None else self._movement.state_dict()
        return {"steps": self.steps, "first": dict(self._first), "movement": movement}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, bit for bit if model and optimizer are loaded, too, before it."""
        self._check_not_removed()
        check_keys("state_dict", state_dict, ("steps", "first", "movement"))
        steps = checked_count("state_dict: steps", state_dict["steps"], 0)
        check_keys("state_dict: first", state_dict["first"], self._layers)
        first = {name: checked_count("state_dict: first", state_dict["first"][name]) for name in self._layers}
        load_movement(self._movement, state_dict["movement"])
        self.steps, self._first = steps, first

    def _remove(self, name: str, layer: BlockSparseLinear, left: int) -> None:
        movement = self._movement
        worth = magnitudes(layer) if movement is None else movement.of(name)
        slots = worth.sort(descending=True, stable=True).indices[:left].sort().values
        if movement is not None:
            movement.keep(name, slots)
        _keep_slots(layer, self._optimizer, slots)


def compact_(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, int]:
    """Remove the blocks whose weights are all zero, as `GroupLasso` and `BlockGates` leave them.

    The model computes the same. Weights stay the same Parameters, and are narrowed with their gradients and
    the states of the optimizer. The host waits for the GPU, once for each layer.

    Args:
        model: whose `BlockSparseLinear` layers in the storage "plain" are looked at, and no others.
        optimizer: of the model, if it is to be used afterwards.

    Returns:
        How many blocks each of these layers has lost, by its name.

    Raises:
        UnsupportedError: a weight is sharded, parametrized or has a ``main_grad``, the optimizer has unknown
            states, or the model is one of DistributedDataParallel. Nothing has changed then.
    """
    check_unwrapped(model)
    layers = {
        name: layer for name, layer in sparse_layers(model).items() if storage_of(layer.storage).trainable
    }
    if not layers:
        raise InvalidArgumentError("model: no BlockSparseLinear in the storage 'plain' in it")
    _check_shrinkable(layers, frozen=True)
    if optimizer is not None:
        optimizer = checked_optimizer(optimizer)
        check_states(optimizer, {name: layer.weight for name, layer in layers.items()})
    removed = {}
    for name, layer in layers.items():
        slots = layer.weight.detach().flatten(1).any(1).nonzero().flatten()
        removed[name] = layer.weight.shape[0] - len(slots)
        if removed[name]:
            _keep_slots(layer, optimizer, slots)
    return removed


def _keep_slots(layer: BlockSparseLinear, optimizer: torch.optim.Optimizer | None, slots: Tensor) -> None:
    """Keep only the blocks at ``slots``, ascending, and their states of the optimizer."""
    if optimizer is not None:
        for name, state in states_by_slot(optimizer, layer.weight):
            optimizer.state[layer.weight][name] = state[slots]
    keep_blocks(layer, slots)


def check_unwrapped(model: nn.Module) -> None:
    """Raise where DistributedDataParallel has buckets for weights that are about to shrink."""
    if isinstance(model, DistributedDataParallel):
        raise UnsupportedError(
            "model must be the module inside; DistributedDataParallel has to be built anew afterwards"
        )


def _check_whole(model: nn.Module) -> None:
    """Raise unless this process alone trains the model."""
    if isinstance(model, DistributedDataParallel) or has_peers():
        raise UnsupportedError(
            "model must be trained by one process; the buckets of DistributedDataParallel and the shards of "
            "fully_shard do not follow weights that shrink"
        )


def _check_shrinkable(layers: Layers, *, frozen: bool = False) -> None:
    """Raise where blocks cannot go, or anything beside a weight has its size."""
    check_trainable(layers, frozen=frozen)
    for name, layer in layers.items():
        if getattr(layer.weight, "main_grad", None) is not None:
            raise UnsupportedError(
                f"model: layer {name!r}: its weight has a main_grad, which does not shrink with it"
            )


def _target(name: str, layer: BlockSparseLinear, density: float) -> int:
    """Return the number of blocks at the end."""
    total = math.prod(layer.spec.grid)
    last = round(density * total)
    if not 0 < last <= layer.weight.shape[0]:
        raise InvalidArgumentError(
            f"density of layer {name!r} must be from {1 / total:.3g} to its own {layer.density:.4g}, got "
            f"{density}"
        )
    return last


# Parameters of the hard concrete distribution, as Louizos et al. chose them.
TEMPERATURE, LOWEST, HIGHEST = 2 / 3, -0.1, 1.1


class Gate(nn.Module):
    """Parametrization that multiplies each block of a weight by an L0 gate from 0 to 1: random in training.

    Attributes:
        log_alpha: Parameter [nnz] float32, the larger the likelier it is that a gate is open.
    """

    def __init__(self, nnz: int, keep: float, device: torch.device) -> None:
        super().__init__()
        start = math.log(keep / (1 - keep)) + TEMPERATURE * math.log(-LOWEST / HIGHEST)
        self.log_alpha = nn.Parameter(torch.full((nnz,), start, dtype=torch.float32, device=device))

    def forward(self, weight: Tensor) -> Tensor:
        """The weight [nnz, bn, bk] times its gates."""
        return weight * self.gates().to(weight.dtype)[:, None, None]

    def gates(self) -> Tensor:
        """[nnz]: a sample in training, otherwise what stands for the distribution."""
        logits: Tensor = self.log_alpha
        if self.training:
            eps = torch.finfo(logits.dtype).eps
            uniform = torch.rand_like(logits).clamp(eps, 1 - eps)
            logits = (logits + uniform.log() - (1 - uniform).log()) / TEMPERATURE
        return (logits.sigmoid() * (HIGHEST - LOWEST) + LOWEST).clamp(0, 1)

    def open(self) -> Tensor:
        """[nnz]: the probability that each gate is not zero."""
        return (self.log_alpha - TEMPERATURE * math.log(-LOWEST / HIGHEST)).sigmoid()


class BlockGates:
    """L0 gates of every block of `BlockSparseLinear` layers; the fraction that is open is a penalty.

    A gate has a hard concrete distribution: in training it is a sample, exactly 0 or 1 with some probability,
    through which gradients pass; in evaluation it is exactly 0 where the distribution leans to it (Louizos,
    Welling and Kingma, "Learning Sparse Neural Networks through L0 Regularization", ICLR 2018; temperature
    2/3, stretched to -0.1 … 1.1).

    Gates are parametrizations of the weights, which stay the same Parameters. Build the optimizer afterwards.
    Gates need a larger learning rate than weights, 0.1 with Adam is a start, and no weight decay.

    Args:
        model: has `BlockSparseLinear` layers in the storage "plain", all of which get gates.
        keep: the probability with which gates are open at the beginning, between 0 and 1.

    Raises:
        UnsupportedError: a weight is sharded, parametrized already or not stored plain.

    Examples:
        >>> gates = BlockGates(model)
        >>> optimizer = torch.optim.AdamW(model.parameters())  # of weights and gates
        >>> ...  # loss(model, batch) + strength * gates.density()
        >>> gates.compact(optimizer)
    """

    def __init__(self, model: nn.Module, *, keep: float = 0.9) -> None:
        if not 0 < checked_fraction("keep", keep) < 1:
            raise InvalidArgumentError(f"keep must be between 0 and 1, got {keep}")
        self._model, self._layers = model, some_sparse_layers(model)
        check_trainable(self._layers)
        self._gates = {}
        for name, layer in self._layers.items():
            gate = Gate(layer.weight.shape[0], keep, layer.weight.device).train(layer.training)
            parametrize.register_parametrization(layer, "weight", gate)
            self._gates[name] = gate

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the gates, for a group of their own."""
        return [gate.log_alpha for gate in self._gates.values()]

    def density(self) -> Tensor:
        """The penalty, differentiable: the expected fraction of these layers' weights with open gates."""
        sizes = {name: math.prod(layer.block_shape) for name, layer in self._layers.items()}
        total = sum(math.prod(layer.spec.shape) for layer in self._layers.values())
        expected = [gate.open().sum() * (sizes[name] / total) for name, gate in self._gates.items()]
        return torch.stack([one.to(expected[0].device) for one in expected]).sum()

    @torch.no_grad()
    def compact(self, optimizer: torch.optim.Optimizer | None = None) -> dict[str, int]:
        """End the gates: multiply weights by them, and remove blocks with closed ones, as `compact_` does.

        The model then computes what it computed in evaluation, and has plain layers again. Moments of what is
        left stay as they were.
        """
        check_unwrapped(self._model)
        if not all(parametrize.is_parametrized(layer, "weight") for layer in self._layers.values()):
            raise InvalidArgumentError("model must have layers with gates, which were ended before")
        if optimizer is not None:
            optimizer = checked_optimizer(optimizer)
            layers: dict[str, Any] = self._layers
            originals = {name: one.parametrizations.weight.original for name, one in layers.items()}
            check_states(optimizer, originals)
        for name, layer in self._layers.items():
            training = self._gates[name].training
            self._gates[name].eval()
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
            self._gates[name].train(training)
        return compact_(self._model, optimizer)


class GroupLasso(Hooked):
    """Group lasso: pulls the norm of every block towards zero after each step of an optimizer.

    It is the proximal step of the penalty strength · √(bn · bk) · ‖W_b‖₂, summed over all blocks b (Yuan and
    Lin, "Model selection and estimation in regression with grouped variables", JRSS B 2006),

        W_b ← W_b · max(0, 1 - lr · strength · √(bn · bk) / ‖W_b‖₂)

    with the learning rate of the weight's group: blocks reach zero exactly, and `compact_` removes them.
    Train in float32, with autocast: in 16 bits changes below the precision are lost. Nothing waits for a GPU.

    Args:
        model: has `BlockSparseLinear` layers in the storage "plain", all of which are pulled at.
        optimizer: has their weights.
        strength: of the penalty.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, strength: float) -> None:
        optimizer = checked_optimizer(optimizer)
        self._strength = checked_number("strength", strength)
        layers = some_sparse_layers(model)
        check_trainable(layers)
        check_optimized(layers, optimizer)
        self._layers = layers
        self._hook = optimizer.register_step_post_hook(self._shrink)

    def remove(self) -> None:
        """Remove the hook."""
        self._hook.remove()

    @torch.no_grad()
    def _shrink(self, optimizer: Any, *_: Any) -> None:
        check_optimized(self._layers, optimizer)  # a weight may have been replaced
        with_gradient = {
            id(layer.weight) for name, layer in self._layers.items() if gradient_of(name, layer) is not None
        }
        for weight, rate in rates_of(optimizer, with_gradient):
            threshold = rate * self._strength * math.prod(weight.shape[1:]) ** 0.5
            precision = precision_of(weight)
            norms = torch.linalg.vector_norm(weight, dim=(1, 2), dtype=precision, keepdim=True)
            left = 1 - threshold / norms.clamp_min(torch.finfo(precision).tiny)
            weight.mul_(left.clamp_min(0))


def learning_rate_factor(density: float) -> float:
    """Return the factor of the learning rate of a weight of this density, above 0, over a dense one.

    It is exp(1.969 s² + 0.2905 s), s = 1 - density: what was best for static random masks of BERT (Dietrich
    et al., "Towards Structured Dynamic Sparse Pre-Training of BERT", 2021).
    """
    if not checked_fraction("density", density) > 0:
        raise InvalidArgumentError(f"density must be above 0, got {density}")
    return math.exp(1.969 * (1 - density) ** 2 + 0.2905 * (1 - density))


def parameter_groups(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    """Return groups of parameters for an optimizer: the sparser a layer, the faster its weight learns.

    All else comes first, then a group for each density of sparse layers. Densities are those at the moment:
    set rates anew by `learning_rate_factor` after events of `Gradual`.

    Args:
        model: any, also without sparse layers.
        lr: the learning rate of dense weights, biases and everything else.

    Examples:
        >>> optimizer = torch.optim.AdamW(parameter_groups(model, lr=3e-4), weight_decay=0.1)
    """
    rate = checked_number("lr", lr)
    densities = {
        id(parameter): layer.density
        for layer in sparse_layers(model).values()
        for parameter in layer.parameters()
        if parameter.dim() == 3 and layer.density > 0  # weights, also those that are parametrized
    }
    groups: dict[float | None, list[nn.Parameter]] = {None: []}
    for parameter in model.parameters():
        groups.setdefault(densities.get(id(parameter)), []).append(parameter)
    return [
        {"params": parameters, "lr": rate if density is None else rate * learning_rate_factor(density)}
        for density, parameters in groups.items()
        if parameters
    ]

"""Patterns that move while a model trains: dynamic sparse training with a constant number of blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._checks import checked_count, checked_fraction, checked_seed
from ..errors import InvalidArgumentError, UnsupportedError, UnsynchronizedPatternError
from ..nn.experts import ExpertsLinear
from ..nn.linear import BlockSparseLinear
from ..nn.weight import declare_shared, has_peers, has_slots, is_shared, observe
from ._layers import (
    Layers,
    Uncopied,
    check_keys,
    check_not_removed,
    check_optimized,
    check_trainable,
    checked_choice,
    checked_optimizer,
    closure_of,
    gradient_of,
    matched_layers,
    precision_of,
    sparse_layers,
)

SCORES = ("magnitude", "movement")
GROWTHS = ("random", "gradient")


class PatternSchedule(Uncopied, torch.optim.Optimizer):
    """Optimizer of patterns: moves blocks of `BlockSparseLinear` layers every few steps.

    Step it after the optimizer. **The "lr" of its parameter groups is the fraction of the blocks that are
    recycled**, so that PyTorch's learning rate schedulers drive it.

    Every rewiring drops int(fraction · nnz) blocks of each layer, those of lowest score, and gives their
    slots places that were free before, with zeros. It happens in place, and no weight moves: captured graphs
    and compiled code go on, and the host does not wait for a GPU. Of equal scores the first slot is dropped,
    and the first place in row order is taken.

    ``drop`` is "magnitude": blocks of least L1 norm, as in SET and RigL; or "movement": blocks whose sum of
    -weight · gradient since the last rewiring is smallest (Sanh et al., "Movement Pruning", NeurIPS 2020).
    ``grow`` is "random": SET (Mocanu et al., Nature Communications 2018); or "gradient": places with the
    largest L1 norm of the dense gradient's block, in the step of the rewiring: RigL (Evci et al., "Rigging
    the Lottery", ICML 2020). Norms are computed in backward passes of steps that need them, with no more
    than 64 MiB, or one block row, of the dense gradient in memory; over several passes or calls they are
    added up. A layer whose norms are missing, all zero or not finite keeps its pattern in that rewiring.

    In several processes all that decides is equal: scores follow from equal weights and gradients, random
    numbers from ``seed`` and the number of the step, and norms are averaged over ``group``. Arguments and
    layers are compared once, in the first step. Sharded weights are refused.

    Args:
        model: has `BlockSparseLinear` layers in the storage "plain".
        optimizer: has their weights. Of each block that moves it forgets its states.
        fraction: of the blocks of a layer that each rewiring recycles, from 0 to 1; or fractions by regular
            expressions on names of layers, matched as in the patcher, of which the first counts. Layers that
            none matches stay as they are. Each different fraction is a parameter group.
        every: rewire after every so many steps.
        drop: "magnitude" or "movement".
        grow: "random" or "gradient".
        seed: of all random numbers.
        group: the processes that train the model together; None is the default group.

    Attributes:
        steps: how many steps were counted.
        moved: by the names of layers, how many blocks the last rewiring has moved: int64 [], on their
            devices. Empty before the first.

    Raises:
        UnsupportedError: a weight is sharded, parametrized or not stored plain, or one of experts where
            gradients decide.

    Examples:
        >>> schedule = PatternSchedule(model, optimizer, fraction=0.3, every=100, grow="gradient")
        >>> fractions = torch.optim.lr_scheduler.CosineAnnealingLR(schedule, T_max=steps)
        >>> loss(model, batch).backward()  # for each batch
        >>> optimizer.step(), schedule.step(), fractions.step(), optimizer.zero_grad()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        fraction: float | Mapping[str, float] = 0.3,
        every: int,
        drop: str = "magnitude",
        grow: str = "random",
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        optimizer = checked_optimizer(optimizer)
        self._every = checked_count("every", every)
        checked_choice("drop", drop, SCORES)
        checked_choice("grow", grow, GROWTHS)
        self._seed = checked_seed(seed)
        groups = matched_layers(model, "fraction", fraction)
        self._layers = {name: layer for layers in groups.values() for name, layer in layers.items()}
        check_trainable(self._layers)
        check_optimized(self._layers, optimizer)
        super().__init__(
            [
                {"params": [layer.weight for layer in layers.values()], "lr": value, "layers": list(layers)}
                for value, layers in groups.items()
            ],
            {"lr": 0.0},
        )
        self._optimizer, self._grow, self._group = optimizer, grow, group
        self._settings = {"every": self._every, "drop": drop, "grow": grow}
        self._norms = _GradientNorms({} if grow == "random" else self._layers, group)
        self._movement = Movement(self._layers, optimizer) if drop == "movement" else None
        self._removed = self._agreed = False
        self.steps = 0
        self.moved: dict[str, Tensor] = {}
        self._observe_next()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Count a step of the optimizer, and rewire if it is time to.

        Raises:
            UnsupportedError: the optimizer has states of which it is not known what belongs to which block.
            UnsynchronizedPatternError: the processes that train the model rewire it differently.
        """
        if closure is not None:
            raise InvalidArgumentError("closure must be None: give it to the optimizer")
        check_not_removed(self._removed)
        rewires = (self.steps + 1) % self._every == 0
        counts = self._checked_counts() if rewires else {}
        if has_peers() and not self._agreed:
            self._check_agreement()
        norms = self._norms.taken()
        self.steps += 1
        if rewires:
            generators: dict[torch.device, torch.Generator] = {}
            self.moved = {
                name: self._rewire(name, counts[name], norms.get(name), generators) for name in self._layers
            }
        self._observe_next()

    def remove(self) -> None:
        """Remove all hooks and end the schedule; patterns and everything else stay as they are."""
        self._removed = True
        if self._movement is not None:
            self._movement.remove()
        self._norms.stop()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse more parameters: only the constructor knows which layers they belong to.

        Raises:
            UnsupportedError: it was called afterwards.
        """
        if hasattr(self, "steps"):
            raise UnsupportedError("param_group must not be added: the constructor takes all fractions")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return all that later rewirings depend on, but for the states of model and optimizer."""
        return {
            "steps": self.steps,
            "seed": self._seed,
            "param_groups": [
                {key: value for key, value in group.items() if key != "params"} for group in self.param_groups
            ],
            "movement": {} if self._movement is None else self._movement.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, bit for bit if model, optimizer and scheduler are loaded, too."""
        check_not_removed(self._removed)
        if isinstance(state_dict, Mapping) and state_dict.get("averages") == {}:  # as earlier versions wrote
            state_dict = {key: value for key, value in state_dict.items() if key != "averages"}
        check_keys("state_dict", state_dict, ("steps", "seed", "param_groups", "movement"))
        steps = checked_count("state_dict: steps", state_dict["steps"], 0)
        groups = state_dict["param_groups"]
        self._check_groups(groups)
        Movement.check_state(self._movement, state_dict["movement"])
        self.steps, self._seed = steps, checked_seed(state_dict["seed"])
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update(saved)
        if self._movement is not None:
            self._movement.load_state_dict(state_dict["movement"])
        self._agreed = False
        self._observe_next()

    def _check_groups(self, groups: Any) -> None:
        mine = [group["layers"] for group in self.param_groups]
        listed = isinstance(groups, list) and all(isinstance(group, Mapping) for group in groups)
        theirs = [group.get("layers") for group in groups] if listed else groups
        if theirs != mine:
            raise InvalidArgumentError(f"state_dict must have groups of the layers {mine}, got {theirs}")
        for group in groups:
            checked_fraction("state_dict: lr", group.get("lr"))

    def _checked_counts(self) -> dict[str, int]:
        """Return how many blocks of each layer to move, after checking all that may be wrong."""
        counts = {}
        for group in self.param_groups:
            fraction = checked_fraction("lr", group["lr"])
            for name in group["layers"]:
                nnz, (rows, cols) = self._layers[name].weight.shape[0], self._layers[name].spec.grid
                counts[name] = min(int(fraction * nnz), rows * cols - nnz)
        check_trainable(self._layers)
        check_optimized(self._layers, self._optimizer)
        check_states(self._optimizer, {name: layer.weight for name, layer in self._layers.items()})
        return counts

    def _check_agreement(self) -> None:
        fractions = [(group["layers"], group["lr"]) for group in self.param_groups]
        mine = {"steps": self.steps, "seed": self._seed, **self._settings, "fraction": fractions}
        everyone: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, mine, self._group)
        if any(theirs != mine for theirs in everyone):
            raise UnsynchronizedPatternError(
                f"seed, fraction and all other arguments must be the same in every process, got {everyone}"
            )
        self._agreed = True

    def _observe_next(self) -> None:
        """Have norms taken in the coming step, if they count in it."""
        if self._grow == "gradient" and (self.steps + 1) % self._every == 0:
            self._norms.start()
        else:
            self._norms.stop()

    def _rewire(
        self, name: str, count: int, norms: Tensor | None, generators: dict[torch.device, torch.Generator]
    ) -> Tensor:
        """Move so many blocks, or none if norms decide and are of no use, and return how many were moved.

        The blocks of least worth go to the free places of most growth, with zeros in their weights, gradients
        and states.
        """
        layer, weight, movement = self._layers[name], self._layers[name].weight, self._movement
        if weight.device not in generators:
            number = random.Random(f"{self._seed} {self.steps}").getrandbits(32)
            generators[weight.device] = torch.Generator(weight.device).manual_seed(number)
        generator = generators[weight.device]
        rows, cols = layer.spec.grid
        useful = torch.ones((), dtype=torch.bool, device=weight.device)
        if self._grow == "random":
            growth = torch.rand(rows, cols, generator=generator, device=weight.device)
        else:
            assert norms is not None
            growth, useful = norms, norms.isfinite().all() & norms.any()
        worth = magnitudes(layer) if movement is None else movement.of(name)
        if movement is not None:
            worth = worth.clone()
            movement.of(name).zero_()
        if not count:
            return useful * count
        at, columns = layer.pattern.block_indices()
        kept = at * cols + columns
        slots = worth.sort(stable=True).indices[:count]
        growth = growth.flatten().index_fill(0, kept, -torch.inf)
        free = growth.sort(descending=True, stable=True).indices[:count]
        places = torch.where(useful, free, kept.index_select(0, slots))
        shared = is_shared(layer)
        layer.pattern.move_blocks_(slots, torch.stack((places // cols, places % cols), 1), check=False)
        if shared:  # and so it is now: schedules of all processes decide alike
            declare_shared(layer)

        gradients = weight.grad, getattr(weight, "main_grad", None)
        states = [state for _, state in states_by_slot(self._optimizer, weight)]
        for tensor in (weight, *(gradient for gradient in gradients if gradient is not None), *states):
            tensor.index_copy_(0, slots, torch.where(useful, 0, tensor.index_select(0, slots)))
        return useful * count


class _GradientNorms:
    """Observers of layers, for a step at a time; norms are averaged over a group of processes."""

    def __init__(self, layers: Mapping[str, BlockSparseLinear], group: dist.ProcessGroup | None) -> None:
        for name, layer in layers.items():
            if isinstance(layer, ExpertsLinear):
                raise UnsupportedError(
                    f"model: layer {name!r}: there are no dense gradients of experts; leave it out, or "
                    "choose blocks by other scores"
                )
        self._layers, self._group = layers, group
        self._probes: dict[str, Tensor] = {}
        self._ends: list[Callable[[], None]] = []

    def start(self) -> None:
        """Take norms in the backward passes from now on."""
        self.stop()
        for name, layer in self._layers.items():
            dtype, device = precision_of(layer.weight), layer.weight.device
            probe = torch.zeros(layer.spec.grid, dtype=dtype, device=device, requires_grad=True)
            self._probes[name] = probe
            self._ends.append(observe(layer, partial(_observe, probe, layer.block_shape)))

    def stop(self) -> None:
        """Take no norms any more."""
        for end in self._ends:
            end()
        self._probes, self._ends = {}, []

    def taken(self) -> dict[str, Tensor]:
        """Return norms [R, C] by layer since `start`: zeros without a call of the layer, {} if stopped."""
        if not self._probes:
            return {}
        if all(probe.grad is None for probe in self._probes.values()):
            raise InvalidArgumentError(
                "grow by gradients needs a backward pass through the layers since the last step; step the "
                "schedule after the backward pass and the optimizer"
            )
        norms = {}
        for name, probe in self._probes.items():
            seen = torch.zeros_like(probe) if probe.grad is None else probe.grad
            weight = self._layers[name].weight  # which may have been moved or converted since
            norms[name] = seen.to(weight.device, precision_of(weight))
        return self._averaged(norms) if has_peers() else norms

    def _averaged(self, norms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Average over the processes, with one call for all layers on a device."""
        together: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
        for name, one in norms.items():
            together.setdefault((one.device, one.dtype), {})[name] = one
        averaged: dict[str, Tensor] = {}
        for ones in together.values():
            flat = torch.cat([one.flatten() for one in ones.values()])
            dist.all_reduce(flat, group=self._group)
            flat /= dist.get_world_size(self._group)
            chunks = torch.split(flat, [one.numel() for one in ones.values()])
            averaged.update((name, own.view_as(ones[name])) for name, own in zip(ones, chunks, strict=True))
        return averaged


@torch.no_grad()
def magnitudes(layer: BlockSparseLinear) -> Tensor:
    """Return the L1 norms [nnz] of the kept blocks."""
    weight = layer.weight.detach()
    norms: Tensor = torch.linalg.vector_norm(weight.flatten(1), 1, dim=1, dtype=precision_of(weight))
    return norms


class Movement(Uncopied):
    """Sums of -w · g over each block and over steps of an optimizer, of w and g before the step.

    A score is positive where gradient descent has moved a block's weights away from zero (Sanh et al.,
    "Movement Pruning: Adaptive Sparsity by Fine-Tuning", NeurIPS 2020). Steps that ``torch.amp.GradScaler``
    leaves out do not count, and gradients that still have its factor are divided by it.
    """

    def __init__(self, layers: Layers, optimizer: torch.optim.Optimizer) -> None:
        self._layers = layers
        self._scores: dict[str, Tensor] = {}
        self._hook = optimizer.register_step_pre_hook(self._add)

    def remove(self) -> None:
        """Stop summing."""
        self._hook.remove()

    def of(self, name: str) -> Tensor:
        """[nnz] scores of a layer: zero before the first step, and where its number of blocks has changed."""
        layer = self._layers[name]
        nnz, device = layer.weight.shape[0], layer.weight.device
        scores = self._scores.get(name)
        if scores is None or scores.shape[0] != nnz:
            scores = torch.zeros(nnz, dtype=precision_of(layer.weight), device=device)
        self._scores[name] = scores = scores.to(device, precision_of(layer.weight))
        return scores

    def keep(self, name: str, slots: Tensor) -> None:
        """Keep only these slots."""
        self._scores[name] = self.of(name)[slots]

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the scores, by names of layers."""
        return {name: self.of(name).clone() for name in self._layers}

    @staticmethod
    def check_state(movement: Movement | None, state: Any) -> None:
        """Raise InvalidArgumentError for a state that `load_state_dict` cannot take; {} is that of None."""
        check_keys("state_dict: movement", state, {} if movement is None else movement._layers)
        for name, scores in state.items():
            assert movement is not None
            nnz = movement._layers[name].weight.shape[0]
            if not isinstance(scores, Tensor) or scores.shape != (nnz,):
                raise InvalidArgumentError(
                    f"state_dict: movement of layer {name!r} must be a tensor [{nnz}]; load the model first"
                )

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a `state_dict`, after `check_state`."""
        for name, scores in state.items():
            weight = self._layers[name].weight
            self._scores[name] = scores.to(weight.device, precision_of(weight), copy=True)

    @torch.no_grad()
    def _add(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if closure_of(args, kwargs) is not None:
            raise UnsupportedError(
                "optimizer must step without a closure, since movement is summed before a step, when "
                "a closure has not computed any gradient yet"
            )
        scale, overflow = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
        for name, layer in self._layers.items():
            weight, gradient = layer.weight, gradient_of(name, layer)
            if gradient is None:
                continue
            moved = (weight.detach().to(precision_of(weight)) * gradient).sum((1, 2))
            if scale is not None:
                moved /= scale.to(moved.device, non_blocking=True)
            if overflow is not None:
                moved = torch.where(overflow.to(moved.device, non_blocking=True) == 0, moved, 0)
            self.of(name).sub_(moved)


def check_states(optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor]) -> None:
    """Raise unless every state of these weights is known to have a block for each slot.

    Weights are given by the names of their layers.

    Understood are tensors of the weight's shape [nnz, bn, bk], which momentum and the moments of Adam are,
    and those of which all dimensions but the first are 1 or missing, as Adafactor's factored moments are.
    Numbers, and tensors of one, such as counts of steps, belong to no block.
    """
    for layer_name, weight in weights.items():
        for name, state in optimizer.state.get(weight, {}).items():
            if not _is_known(state, weight):
                form = f"shape {list(state.shape)}" if type(state) is Tensor else f"a {type(state).__name__}"
                raise UnsupportedError(
                    f"optimizer: {type(optimizer).__name__} keeps a state {name!r} of the weight of layer "
                    f"{layer_name!r}, {form}, of which it is not known what belongs to which block"
                )


def states_by_slot(optimizer: torch.optim.Optimizer, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The states that have one part for each slot, by their names."""
    for name, state in list(optimizer.state.get(weight, {}).items()):
        if isinstance(state, Tensor) and has_slots(state, weight):
            yield name, state


def _is_known(state: object, weight: Tensor) -> bool:
    if isinstance(state, Tensor):
        return type(state) is Tensor and (state.dim() == 0 or has_slots(state, weight) or state.numel() == 1)
    return state is None or isinstance(state, bool | int | float | str)


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """Return where the blocks of every `BlockSparseLinear` are now, by the names of layers.

    Returns:
        Bool masks [R, C], True for kept blocks, which do not follow the pattern; on the devices of the
        layers, and the host does not wait.
    """
    return {name: layer.pattern.to_block_mask() for name, layer in sparse_layers(model).items()}


CHUNK_BYTES = 64 << 20  # of the dense gradient that exist at once, unless one block row takes more


@torch.no_grad()
def gradient_norms(dy: Tensor, x: Tensor, block_shape: tuple[int, int]) -> Tensor:
    """Return L1 norms [R, C] of all blocks of the gradient dyᵀ x of a dense W in y = x Wᵀ, kept or not.

    The gradient is computed as autograd would, in the dtype of dy, but a chunk of block rows at a time. Norms
    are in float32, or float64 for float64. Nothing waits for a GPU.
    """
    bn, bk = block_shape
    with torch.autocast(dy.device.type, enabled=False):
        x = x.reshape(-1, x.shape[-1]).to(dy.dtype)
        columns = dy.reshape(-1, dy.shape[-1]).t()
        rows = max(1, CHUNK_BYTES // (bn * x.shape[1] * dy.itemsize)) * bn
        norms = []
        for chunk in torch.split(columns, rows):
            blocks = (chunk @ x).view(-1, bn, x.shape[1] // bk, bk)
            norms.append(torch.linalg.vector_norm(blocks, 1, dim=(1, 3), dtype=precision_of(dy)))
    return torch.cat(norms)


class _Observed(torch.autograd.Function):
    """y as it is. The norms come as the gradient of ``probe`` [R, C], a tensor of zeros.

    So autograd adds up what comes from several calls and several backward passes, computes nothing where it
    computes no gradients, and recomputes with activation checkpoints; compilers see a function without side
    effects.
    """

    @staticmethod
    def forward(y: Tensor, x: Tensor, probe: Tensor, block_shape: tuple[int, int]) -> Tensor:
        return y.detach()  # not a view for autograd, so that what follows may write to it in place

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, x, probe, ctx.block_shape = inputs
        ctx.save_for_backward(x)
        ctx.device = probe.device

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor, None]:
        (x,) = ctx.saved_tensors
        norms = gradient_norms(grads[0], x, ctx.block_shape)
        return grads[0], None, norms.to(ctx.device), None  # a model may be moved in between


_observed: Callable[..., Tensor] = _Observed.apply


def _observe(probe: Tensor, block_shape: tuple[int, int], y: Tensor, x: Tensor) -> Tensor:
    """Return y as it is; where its gradient is recorded, ``probe.grad`` adds up the norms of the weight's."""
    return _observed(y, x, probe, block_shape) if torch.is_grad_enabled() else y

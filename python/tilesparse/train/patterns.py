"""Patterns that move while a model trains: dynamic sparse training with a constant number of blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._checks import check_choice, checked_count, checked_fraction, checked_seed
from ..errors import InvalidArgumentError, UnsupportedError, UnsynchronizedPatternError
from ..nn.experts import ExpertsLinear
from ..nn.linear import BlockSparseLinear
from ..nn.weight import declare_shared, has_peers, has_slots, is_shared, observe
from ._layers import (
    Hooked,
    Layers,
    check_keys,
    check_optimized,
    check_trainable,
    checked_optimizer,
    gradient_of,
    precision_of,
    refuse_closure,
    some_sparse_layers,
    sparse_layers,
)

SCORES = ("magnitude", "movement")
GROWTHS = ("random", "gradient")


class PatternSchedule(Hooked, torch.optim.Optimizer):
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
        fraction: of the blocks of a layer that each rewiring recycles, from 0 to 1. For layers with another
            fraction, or none, make schedules of parts of the model.
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
        fraction: float = 0.3,
        every: int,
        drop: str = "magnitude",
        grow: str = "random",
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        optimizer = checked_optimizer(optimizer)
        self._every = checked_count("every", every)
        check_choice("drop", drop, SCORES)
        check_choice("grow", grow, GROWTHS)
        self._seed = checked_seed(seed)
        self._layers = some_sparse_layers(model)
        check_trainable(self._layers)
        check_optimized(self._layers, optimizer)
        weights, rate = [one.weight for one in self._layers.values()], checked_fraction("fraction", fraction)
        super().__init__([{"params": weights, "lr": rate, "layers": [*self._layers]}], {})
        self._optimizer, self._grow, self._group = optimizer, grow, group
        self._settings = {"every": self._every, "drop": drop, "grow": grow}
        self._norms = _GradientNorms({} if grow == "random" else self._layers, group)
        self._movement = Movement(self._layers, optimizer) if drop == "movement" else None
        self._agreed = False
        self.steps = 0
        self.moved: dict[str, Tensor] = {}
        self._observe_next()

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Count a step of the optimizer, and rewire if it is time to.

        Raises:
            UnsynchronizedPatternError: the processes that train the model rewire it differently.
        """
        self._check_not_removed()
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
        """Remove all hooks; patterns and everything else stay as they are."""
        self._removed = True
        if self._movement is not None:
            self._movement.remove()
        self._norms.stop()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise UnsupportedError: only the constructor knows which layers parameters belong to."""
        if hasattr(self, "steps"):
            raise UnsupportedError("param_group must not be added: the constructor takes the model")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return all that later rewirings depend on, but for the states of model and optimizer."""
        return {
            "steps": self.steps,
            "seed": self._seed,
            "param_groups": [{key: own for key, own in self.param_groups[0].items() if key != "params"}],
            "movement": {} if self._movement is None else self._movement.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, bit for bit if model, optimizer and scheduler are loaded, too."""
        self._check_not_removed()
        if isinstance(state_dict, Mapping) and state_dict.get("averages") == {}:  # as earlier versions wrote
            state_dict = {key: value for key, value in state_dict.items() if key != "averages"}
        check_keys("state_dict", state_dict, ("steps", "seed", "param_groups", "movement"))
        steps = checked_count("state_dict: steps", state_dict["steps"], 0)
        groups = state_dict["param_groups"]
        listed = isinstance(groups, list) and all(isinstance(group, Mapping) for group in groups)
        names = [*self._layers]
        if not listed or [group.get("layers") for group in groups] != [names]:
            raise InvalidArgumentError(
                f"state_dict must have one group, of the layers {names}, got {groups}; make a schedule of "
                "each part of the model"
            )
        checked_fraction("state_dict: lr", groups[0].get("lr"))
        seed = checked_seed(state_dict["seed"])
        load_movement(self._movement, state_dict["movement"])
        self.steps, self._seed = steps, seed
        self.param_groups[0].update(groups[0])
        self._agreed = False
        self._observe_next()

    def _checked_counts(self) -> dict[str, int]:
        """Return how many blocks of each layer to move, after checking all that may be wrong."""
        fraction, counts = checked_fraction("lr", self.param_groups[0]["lr"]), {}
        for name, layer in self._layers.items():
            nnz, (rows, cols) = layer.weight.shape[0], layer.spec.grid
            counts[name] = min(int(fraction * nnz), rows * cols - nnz)
        check_trainable(self._layers)
        check_optimized(self._layers, self._optimizer)
        check_states(self._optimizer, {name: layer.weight for name, layer in self._layers.items()})
        return counts

    def _check_agreement(self) -> None:
        own = self.param_groups[0]
        mine = {"steps": self.steps, "seed": self._seed, **self._settings, "fraction": own["lr"]}
        mine["layers"] = own["layers"]
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
        """Move so many blocks, or none if norms are of no use, and return how many were moved."""
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
        if has_peers():
            for one in norms.values():
                dist.all_reduce(one, group=self._group)
                one /= dist.get_world_size(self._group)
        return norms


@torch.no_grad()
def magnitudes(layer: BlockSparseLinear) -> Tensor:
    """Return the L1 norms [nnz] of the kept blocks."""
    weight = layer.weight.detach()
    norms: Tensor = torch.linalg.vector_norm(weight.flatten(1), 1, dim=1, dtype=precision_of(weight))
    return norms


class Movement(Hooked):
    """Sums of -w · g over each block and over steps of an optimizer, of w and g before the step.

    (Sanh et al., "Movement Pruning", NeurIPS 2020.) Steps that GradScaler leaves out do not count.
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

    @torch.no_grad()
    def _add(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        refuse_closure(args, kwargs)
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


def load_movement(movement: Movement | None, state: Any) -> None:
    """Load a `Movement.state_dict`, {} where there is no movement; nothing changes after an error."""
    layers: Layers = {} if movement is None else movement._layers
    check_keys("state_dict: movement", state, layers)
    for name, layer in layers.items():
        if not isinstance(state[name], Tensor) or state[name].shape != layer.weight.shape[:1]:
            raise InvalidArgumentError(
                f"state_dict: movement of layer {name!r} must be a tensor of its blocks; load the model first"
            )
    if movement is not None:
        for name, layer in layers.items():
            dtype, device = precision_of(layer.weight), layer.weight.device
            movement._scores[name] = state[name].to(device, dtype, copy=True)


def check_states(optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor]) -> None:
    """Raise unless every state of these weights, by names of layers, is known to have a part for each block.

    These are tensors of the weight's shape or [nnz, 1, …], as of Adam and Adafactor, and numbers, of no
    block.
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
    """Return bool masks [R, C] of the kept blocks of every `BlockSparseLinear` now, by name."""
    return {name: layer.pattern.to_block_mask() for name, layer in sparse_layers(model).items()}


CHUNK_BYTES = 64 << 20  # of the dense gradient that exist at once, unless one block row takes more


@torch.no_grad()
def gradient_norms(dy: Tensor, x: Tensor, block_shape: tuple[int, int]) -> Tensor:
    """Return L1 norms [R, C] of all blocks of the gradient dyᵀ x of a dense W in y = x Wᵀ, kept or not.

    A chunk of block rows at a time, in the dtype of dy; norms in float32, or float64 for float64.
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
    """y as it is; norms come as the gradient of ``probe`` [R, C], so autograd adds up calls and passes."""

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

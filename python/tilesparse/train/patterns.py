"""Patterns that move while a model trains: dynamic sparse training with a constant number of blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._arguments import checked, shown
from .._checks import checked_count, checked_fraction, checked_number, checked_seed
from ..errors import InvalidArgumentError, UnsupportedError, UnsynchronizedPatternError
from ..nn.origin import has_peers
from ._layers import (
    Uncopied,
    check_keys,
    check_not_removed,
    check_optimized,
    check_trainable,
    checked_choice,
    checked_optimizer,
    matched_layers,
    precision_of,
    weights_of,
)
from .gradients import NORMS
from .norms import GradientNorms
from .rewiring import grid_of, move_blocks, renew
from .scores import SCORES, Movement, check_movement, magnitudes
from .states import check_states, states_by_slot

GROWTHS = ("random", "gradient", "momentum")
MOMENTS = ("zero", "keep")


class PatternSchedule(Uncopied, torch.optim.Optimizer):
    """Optimizer of patterns: moves blocks of `BlockSparseLinear` layers every few steps.

    Step it after the optimizer. **The "lr" of its parameter groups is the fraction of the blocks that are
    recycled**, so that PyTorch's learning rate schedulers drive it. `fractions` is its plain name.

    Every rewiring drops int(fraction · nnz) blocks of each layer, those of lowest score, and gives their
    slots places that were free before; fewer if there are fewer such places, none at density 1. All of this
    happens in place, and no weight moves: captured graphs and compiled code go on, the host does not wait for
    a GPU, and optimizers need not be built again. Of equal scores the first slot is dropped, and the first
    place in row order is taken.

    What is dropped (``drop``):

    - "magnitude": blocks of smallest norm, as in SET and RigL. Of the L1, L2 and maximum norm Dietrich et al.
      ("Towards Structured Dynamic Sparse Pre-Training of BERT", 2021) found L1 to be best.
    - "movement": blocks whose sum of -weight · gradient since the last rewiring is smallest (Sanh et al.,
      "Movement Pruning", NeurIPS 2020). It takes a pass over weights and gradients in every step.

    What grows (``grow``):

    - "random": SET (Mocanu et al., "Scalable training of artificial neural networks with adaptive sparse
      connectivity inspired by network science", Nature Communications 2018).
    - "gradient": places with the largest norm of the dense gradient's block, in the step of the rewiring:
      RigL (Evci et al., "Rigging the Lottery", ICML 2020).
    - "momentum": places with the largest exponential average of that norm: SNFS (Dettmers and Zettlemoyer,
      "Sparse Networks from Scratch", 2019), of which the redistribution of blocks among layers is left out.

    The dense gradient's norms are computed in backward passes whose step needs them, by
    `block_gradient_norms`: it takes as long as the weight gradient of a dense layer. They are exact where a
    layer is called once in one backward pass; over several calls, and several backward passes with gradient
    accumulation, the norms are added up, which is at least the norm of the sum. Between processes they are
    averaged. A layer without norms, since it was not called, or whose norms are all zero or not finite, as
    where a scaled loss overflowed, keeps its pattern in that rewiring; averages leave out samples that are
    not finite. Compiled models are compiled a second time for these steps, and not again.

    Between rewirings ``torch.amp.GradScaler`` needs no care: a step that it leaves out counts, as its
    `step` is called. Norms have the factor of the loss; averages of "momentum" lean towards the steps in
    which it was large.

    In several processes all that decides is equal: scores follow from equal weights and gradients, random
    numbers from ``seed`` and the number of the step, and norms are averaged over ``group``. Arguments and
    layers are compared once, in the first step. Sharded weights are refused.

    Args:
        model: has `BlockSparseLinear` layers in the storage "plain".
        optimizer: has their weights. Of each block that moves it forgets moments, see ``moments``.
        fraction: of the blocks of a layer that each rewiring recycles, from 0 to 1; or fractions by regular
            expressions on names of layers, matched as in the patcher, of which the first counts. Layers that
            none matches stay as they are. Each different fraction is a parameter group.
        every: rewire after every so many steps.
        drop: "magnitude" or "movement".
        grow: "random", "gradient" or "momentum".
        norm: of blocks of weights and of gradients: 1, 2 or ``math.inf``.
        momentum: of the average that "momentum" takes: how much of it stays in each sample.
        sample_every: "momentum" takes norms in every so many steps.
        new_scale: new blocks are drawn uniformly with so many times the standard deviation that the layer's
            initialisation has; 0 for zeros.
        moments: "zero" forgets what the optimizer has of blocks that move, "keep" leaves it to the new ones.
        seed: of all random numbers.
        group: the processes that train the model together; None is the default group.

    Attributes:
        steps: how many steps were counted.
        moved: by the names of layers, how many blocks the last rewiring has moved: int64 [], on their
            devices. Empty before the first.

    Raises:
        InvalidArgumentError: there is no such layer, the optimizer has not all their weights, one is frozen
            or shared, or another argument is not allowed.
        UnsupportedError: a weight is sharded, parametrized or not stored plain, or one of experts where
            gradients decide.

    Examples:
        >>> schedule = PatternSchedule(model, optimizer, fraction=0.3, every=100, grow="gradient")
        >>> fractions = torch.optim.lr_scheduler.CosineAnnealingLR(schedule, T_max=steps)
        >>> loss(model, batch).backward()  # for each batch
        >>> optimizer.step(), schedule.step(), fractions.step(), optimizer.zero_grad()
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        fraction: float | Mapping[str, float] = 0.3,
        every: int,
        drop: str = "magnitude",
        grow: str = "random",
        norm: float = 1,
        momentum: float = 0.9,
        sample_every: int = 1,
        new_scale: float = 0.0,
        moments: str = "zero",
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        optimizer = checked_optimizer(optimizer)
        self._every = checked_count("every", every)
        self._sample_every = checked_count("sample_every", sample_every)
        checked_choice("drop", drop, SCORES)
        checked_choice("grow", grow, GROWTHS)
        checked_choice("norm", norm, NORMS)
        checked_choice("moments", moments, MOMENTS)
        self._momentum = checked_fraction("momentum", momentum)
        self._new_scale = checked_number("new_scale", new_scale)
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
        self._optimizer, self._grow, self._norm = optimizer, grow, float(norm)
        self._forgets, self._group = moments == "zero", group
        self._settings = {
            "every": self._every,
            "sample_every": self._sample_every,
            "drop": drop,
            "grow": grow,
        }
        self._settings |= {"norm": self._norm, "momentum": self._momentum}
        self._settings |= {"new_scale": self._new_scale, "moments": moments}
        self._norms = GradientNorms({} if grow == "random" else self._layers, self._norm, group)
        self._movement = Movement(self._layers, optimizer) if drop == "movement" else None
        self._averages: dict[str, Tensor] = {}
        self._removed = False
        self._agreed = False
        self.steps = 0
        self.moved: dict[str, Tensor] = {}
        self._observe_next()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Count a step of the optimizer, and rewire if it is time to.

        Raises:
            InvalidArgumentError: an "lr" is no fraction, a closure is given, `remove` was called, or no
                backward pass has passed the layers since the last step where gradients decide. Nothing has
                changed.
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
        if self._grow == "momentum":
            for name, sample in norms.items():
                average = self._average(name)
                # What is not finite would stay in the average for ever.
                sample = torch.where(sample.isfinite().all(), sample, average)
                average.lerp_(sample, 1 - self._momentum)
            norms = {name: self._average(name) for name in self._layers}
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

    @property
    def fractions(self) -> dict[str, float]:
        """Fraction of its blocks that the next rewiring recycles, by layer: the "lr" of the layers' groups.

        A number that is assigned counts for all layers.
        """
        return {name: group["lr"] for group in self.param_groups for name in group["layers"]}

    @fractions.setter
    def fractions(self, fractions: float) -> None:
        for group in self.param_groups:
            group["lr"] = checked_fraction("fractions", fractions)

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
            "averages": {name: average.clone() for name, average in self._averages.items()},
        }

    @checked
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, bit for bit if model, optimizer and scheduler are loaded, too.

        Raises:
            InvalidArgumentError: it is none of a schedule of these layers, or `remove` was called. Nothing
                has changed then.
        """
        check_not_removed(self._removed)
        check_keys("state_dict", state_dict, ("steps", "seed", "param_groups", "movement", "averages"))
        steps = checked_count("state_dict: steps", state_dict["steps"], 0)
        groups, averages = state_dict["param_groups"], state_dict["averages"]
        self._check_groups(groups)
        check_movement(self._movement, state_dict["movement"])
        if averages != {}:  # there are none before the first sample
            check_keys("state_dict: averages", averages, self._layers if self._grow == "momentum" else ())
            for name, average in averages.items():
                grid = grid_of(self._layers[name])
                if not isinstance(average, Tensor) or average.shape != grid:
                    raise InvalidArgumentError(
                        f"state_dict: averages[{name!r}] must be a tensor {grid}, got {shown(average)}"
                    )
        self.steps, self._seed = steps, checked_seed(state_dict["seed"])
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update(saved)
        if self._movement is not None:
            self._movement.load_state_dict(state_dict["movement"])
        self._averages = {name: average.clone() for name, average in averages.items()}
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
                nnz, (rows, cols) = self._layers[name].weight.shape[0], grid_of(self._layers[name])
                counts[name] = min(int(fraction * nnz), rows * cols - nnz)
        check_trainable(self._layers)
        check_optimized(self._layers, self._optimizer)
        if self._forgets:
            check_states(self._optimizer, weights_of(self._layers))
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
        every = {"random": 0, "gradient": self._every, "momentum": self._sample_every}[self._grow]
        if every and (self.steps + 1) % every == 0:
            self._norms.start()
        else:
            self._norms.stop()

    def _average(self, name: str) -> Tensor:
        average, weight = self._averages.get(name), self._layers[name].weight
        if average is None:
            average = torch.zeros(
                grid_of(self._layers[name]), dtype=precision_of(weight), device=weight.device
            )
        self._averages[name] = average = average.to(weight.device, precision_of(weight))
        return average

    def _rewire(
        self, name: str, count: int, norms: Tensor | None, generators: dict[torch.device, torch.Generator]
    ) -> Tensor:
        """Move so many blocks, or none if norms decide and are of no use, and return how many were moved."""
        layer = self._layers[name]
        device = layer.weight.device
        if device not in generators:
            number = random.Random(f"{self._seed} {self.steps}").getrandbits(32)
            generators[device] = torch.Generator(device).manual_seed(number)
        generator = generators[device]
        useful = torch.ones((), dtype=torch.bool, device=device)
        if self._grow == "random":
            growth = torch.rand(grid_of(layer), generator=generator, device=device)
        else:
            assert norms is not None
            growth, useful = norms, norms.isfinite().all() & norms.any()
        worth = magnitudes(layer, self._norm) if self._movement is None else self._movement.of(name)
        slots = move_blocks(layer, worth, growth, useful, count)
        if count:
            states = states_by_slot(self._optimizer, layer.weight) if self._forgets else ()
            renew(layer, slots, useful, self._new_scale, [state for _, state in states], generator)
        if self._movement is not None:
            self._movement.of(name).zero_()
        return useful * count

"""Orders of features that bring together in blocks what belongs together, kept where pruning errs less."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._arguments import checked
from .._progress import Progress
from .._reports import aligned
from ..calibrate.calibration import (
    Calibration,
    Forward,
    call_model,
    check_model,
    checked_moments,
    collected,
)
from ..calibrate.moments import DAMPING, Moments
from ..calibrate.stream import chosen_device, differences, observing, swapped, tensors_in
from ..config import BlockSparseConfig
from ..errors import InvalidArgumentError
from ..nn.convert import dense_weight
from ..patch.targets import block_shape_of, checked_config, checked_configs, shape_of
from .driver import check_numbers
from .groups import Part, PermutationGroup, find_permutation_groups, parts_of, permute_, reason_against
from .obs import Pruner

ROUNDS = 8  # of a search
DIFFERENCE = {2: 5e-2, 4: 1e-3, 8: 1e-6}  # of outputs that count as equal, relative, by bytes of a number


@dataclass(frozen=True)
class PermutedGroup:
    """A permutation group, the sum of its layers' errors before and after reordering, and if that was taken.

    Both are None where no order was looked for: blocks hold less than two units, or all of a group.
    """

    group: PermutationGroup
    before: float | None
    after: float | None
    taken: bool


@dataclass(frozen=True)
class PermutationReport:
    """Result of `permute_model`; ``str()`` makes a table of it."""

    groups: list[PermutedGroup]

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("consumer", "groups", "units", "error", "reordered", "")]
        for done in self.groups:
            errors = ("" if error is None else f"{error:.4f}" for error in (done.before, done.after))
            sizes = str(done.group.groups), str(done.group.units)
            rows.append((done.group.consumer, *sizes, *errors, "taken" * done.taken))
        taken = sum(done.taken for done in self.groups)
        return "\n".join([*aligned(rows), f"{taken} of {len(self.groups)} groups have another order"])


@checked
def permute_model(
    model: nn.Module,
    batches: Iterable[Any],
    config: BlockSparseConfig,
    *,
    groups: Sequence[PermutationGroup] | None = None,
    damping: float = DAMPING,
    forward: Forward | None = None,
    device: torch.device | str | int | None = None,
) -> PermutationReport:
    """Reorder the permutation groups of a model in place so that it loses less when pruned.

    Units that matter for the same blocks are brought together: by turns the blocks with the highest sums of
    |W| · ‖X‖ (Wanda) are kept, and units go where most of their own lies. That channels may be permuted so as
    to lose less is from Pool and Yu, "Channel Permutations for N:M Sparsity" (NeurIPS 2021). An order stays
    only where it lowers the sum of the relative errors of the group's layers, pruned and refitted by "obs".
    The model's function is the same afterwards, which is checked with all batches. Until then the weights of
    before are kept.

    Args:
        model: dense, on its device.
        batches: calibration data, as of `prune_`.
        config: what the layers are to become.
        groups: None is all that `find_permutation_groups` finds.
        damping: as of `prune_`.
        forward: ``forward(model, batch)`` calls the model, for batches of other kinds.
        device: where matrices are computed; None is that of the model's first parameter.

    Raises:
        InvalidArgumentError: there is no group, one does not fit the model, a layer of one cannot become the
            config or is never run by the data, or outputs change although they should not, because something
            depends on the order. The model is as it was.
    """
    check_model(model)
    check_numbers("obs", damping, True)
    config = checked_config("config", config)
    found = find_permutation_groups(model) if groups is None else list(groups)
    if not found:
        raise InvalidArgumentError("groups must be given: none is known of this model")
    for group in found:
        reason = reason_against(model, group)
        if reason is not None:
            raise InvalidArgumentError(f"groups must fit the model: {reason}")
        for part in parts_of(model, group):
            checked_configs("config", part.name, [config], shape_of(part.layer))
    data, call = collected(batches), forward or call_model
    done: list[PermutedGroup] = []
    with observing(model), torch.no_grad():
        _check_comparable(call(model, data[0]))
        layers = (part.layer for group in found for part in parts_of(model, group))
        parameters = {parameter for layer in layers for parameter in layer.parameters()}
        before = {parameter: parameter.detach().clone() for parameter in parameters}
        try:
            for group, moments in _with_moments(model, data, call, found, chosen_device(model, device)):
                done.append(_improve(model, group, moments, config, damping))
            if any(one.taken for one in done):
                for batch in data:
                    output = call(model, batch)
                    with swapped(model, before):
                        expected = call(model, batch)
                    _check_same(output, expected)
        except BaseException:
            for parameter, values in before.items():
                parameter.copy_(values)
            raise
    return PermutationReport(done)


def _with_moments(
    model: nn.Module,
    data: Sequence[Any],
    call: Forward,
    groups: Sequence[PermutationGroup],
    device: torch.device,
) -> Iterator[tuple[PermutationGroup, dict[str, Moments]]]:
    """Yield groups as soon as the inputs of their layers are known; the caller keeps these in order."""
    waiting = list(groups)
    names = list(dict.fromkeys(name for group in groups for name in group.layers()))
    calibration = Calibration(model, data, call, names, device, compare=False)
    known: dict[str, Moments] = {}
    progress = Progress(len(groups))
    for unit in calibration.units():
        for alike in calibration.groups(unit):
            moments = checked_moments(alike[0], calibration.moments(unit, alike[0], {}))
            known |= dict.fromkeys(alike, moments)
        calibration.advance(unit, {})
        for group in [group for group in waiting if known.keys() >= set(group.layers())]:
            waiting.remove(group)
            yield group, known
            progress.show(len(groups) - len(waiting), f"groups searched, {group.consumer} the last")
        needed = {name for group in waiting for name in group.layers()}
        known = {name: moments for name, moments in known.items() if name in needed}


def _improve(
    model: nn.Module,
    group: PermutationGroup,
    moments: dict[str, Moments],
    config: BlockSparseConfig,
    damping: float,
) -> PermutedGroup:
    """Reorder a group, and the moments of its consumer, if that lowers the error."""
    order = _clustered(parts_of(model, group), group, moments, config)
    if order is None:
        return PermutedGroup(group, None, None, False)
    before = _error(model, group, moments, config, damping)
    consumer = parts_of(model, group)[-1]
    reordered = {**moments, consumer.name: moments[consumer.name].reordered(consumer.places(order))}
    permute_(model, group, order)
    after = _error(model, group, reordered, config, damping)
    if after < before:
        moments.update(reordered)
    else:
        permute_(model, group, order.argsort(1))
    return PermutedGroup(group, before, after, after < before)


def _error(
    model: nn.Module,
    group: PermutationGroup,
    moments: Mapping[str, Moments],
    config: BlockSparseConfig,
    damping: float,
) -> float:
    """Return the sum of the errors of the group's layers once they are pruned."""
    pruners = (Pruner(model.get_submodule(name), moments[name], damping) for name in group.layers())
    return sum(pruner.prune(config, "obs")[0].error for pruner in pruners)


def _clustered(
    parts: Sequence[Part], group: PermutationGroup, moments: Mapping[str, Moments], config: BlockSparseConfig
) -> Tensor | None:
    """Return an order [groups, units] by the blocks for which units matter; None if no order matters."""
    sides = [
        block_shape_of(config)[0 if part.rows else 1]
        * group.groups
        * part.repeats
        * group.units
        // (part.stop - part.start)
        for part in parts
    ]
    cluster = max(sides)  # units that share a block
    if cluster <= 1 or cluster >= group.units:
        return None
    profiles = [_profile(part, group, moments[part.name], config) for part in parts]
    profile = torch.cat([each / each.sum().clamp_min(1e-30) for each in profiles], 2)
    return torch.stack([_order_of(units, cluster, config.density) for units in profile])


def _profile(part: Part, group: PermutationGroup, moments: Moments, config: BlockSparseConfig) -> Tensor:
    """Return [groups, units, blocks]: how much each unit matters to each block column, or block row."""
    norms = moments.second().diagonal().sqrt()
    weight = dense_weight(part.layer).to(norms.device)
    scores = weight.double().abs() * norms
    bn, bk = block_shape_of(config)
    if part.rows:
        ours = scores[part.start : part.stop].reshape(part.stop - part.start, -1, bk).sum(2)
    else:
        ours = scores.reshape(-1, bn, part.stop).sum(1).T
    ours = ours.reshape(group.groups, part.repeats, group.units, -1, ours.shape[1]).sum(3)
    return ours.transpose(1, 2).flatten(2).cpu()


def _order_of(profile: Tensor, cluster: int, density: float) -> Tensor:
    """Return the order of one group's units after a few rounds of keeping blocks and assigning units."""
    starts = range(0, len(profile), cluster)
    order = profile.sum(1).argsort(descending=True, stable=True)
    best, most = order, -1.0
    for _ in range(ROUNDS):
        sums = torch.stack([profile[order[start : start + cluster]].sum(0) for start in starts])
        kept = torch.zeros(sums.numel(), dtype=torch.bool, device=sums.device)
        kept[sums.flatten().argsort(descending=True, stable=True)[: round(density * sums.numel())]] = True
        score = float(sums.flatten()[kept].sum())
        if score <= most:
            break
        best, most = order, score
        order = _assigned(profile @ kept.view(sums.shape).to(profile.dtype).T, cluster)
    return best


def _assigned(gains: Tensor, cluster: int) -> Tensor:
    """Return units by cluster; those choose first that would lose most by their second best."""
    ranked = gains.sort(dim=1, descending=True, stable=True)
    urgency = ranked.values[:, 0] - ranked.values[:, 1]
    ranking = ranked.indices.tolist()
    room = [min(cluster, len(gains) - start) for start in range(0, len(gains), cluster)]
    members: list[list[int]] = [[] for _ in room]
    for unit in urgency.argsort(descending=True, stable=True).tolist():
        home = next(number for number in ranking[unit] if room[number])
        room[home] -= 1
        members[home].append(unit)
    return torch.tensor([unit for home in members for unit in home], device=gains.device)


def _check_comparable(output: Any) -> None:
    if not any(tensor.is_floating_point() for tensor in tensors_in(output)):
        raise InvalidArgumentError(
            f"model must give a floating-point tensor to compare, got {type(output).__name__}; forward can "
            "give one"
        )


def _check_same(output: Any, expected: Any) -> None:
    for dtype, difference in differences(output, expected):
        if not difference <= DIFFERENCE[dtype.itemsize]:
            raise InvalidArgumentError(
                f"groups must leave the outputs equal, got a relative difference of {difference:.2g}: "
                "something in the model depends on an order"
            )

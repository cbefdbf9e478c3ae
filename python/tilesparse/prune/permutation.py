"""Orders of features that bring together in blocks what belongs together, kept where pruning errs less."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import check_kind, items_of, shown
from ..calibrate.calibration import (
    Calibration,
    Forward,
    Improvement,
    Moments,
    check_model,
    collected,
)
from ..calibrate.stream import caller, chosen_device, differences, observing, restoring, swapped
from ..config import BlockSparseConfig
from ..errors import InvalidArgumentError
from ..model.match import (
    block_shape_of,
    checked_config,
    checked_configs,
    names_of_modules,
    owners_of_parameters,
    shape_of,
)
from ..model.report import Report
from ..nn.linear import dense_weight, is_conv1d, is_stored_otherwise
from ..nn.weight import is_sharded
from .driver import Pruner

ROUNDS = 8  # of a search
DIFFERENCE = {2: 5e-2, 4: 1e-3, 8: 1e-6}  # of outputs that count as equal, relative, by bytes of a number


@dataclass(frozen=True)
class PermutationGroup:
    """Hidden features between dense layers, which may change places together.

    Attributes:
        producers: names of layers whose out_features these are.
        consumer: the name of the layer that takes them as its in_features.
    """

    producers: tuple[str, ...]
    consumer: str

    def __post_init__(self) -> None:
        if not isinstance(self.producers, tuple) or not self.producers:
            raise InvalidArgumentError(f"producers must be a tuple of names, got {shown(self.producers)}")

    @torch.no_grad()
    def _reorder(self, model: nn.Module, order: Tensor) -> None:
        """Reorder the features of this group in a dense model; order[i] becomes feature i."""
        for layer, dim in self._layers(model).values():
            weight = dense_weight(layer)
            index = order.to(weight.device)
            weight.copy_(weight.index_select(dim, index))
            if dim == 0 and layer.bias is not None:
                layer.bias.copy_(layer.bias.index_select(0, index))

    def _names(self) -> list[str]:
        return [*dict.fromkeys(self.producers), self.consumer]

    def _layers(self, model: nn.Module) -> dict[str, tuple[Any, int]]:
        """Return the layers by name, and which dimension of their weight the features are."""
        return {name: (model.get_submodule(name), int(name == self.consumer)) for name in self._names()}

    def _reason_against(self, model: nn.Module) -> str | None:
        """Say why a model does not have this group, as far as shapes and owners of weights tell."""
        names = names_of_modules(model)
        owners = owners_of_parameters(names)
        modules = dict(model.named_modules(remove_duplicate=False))
        for name in self._names():
            layer: Any = modules.get(name)
            if not _is_dense(layer) or is_sharded(layer.weight):
                kind = type(layer).__name__
                return f"{name!r} must be a dense linear layer with its own weight, got {kind}"
            if len(names[layer]) > 1 or any(len(owners[own]) > 1 for own in layer.parameters()):
                return f"layer {name!r} has another name as well, or shares a parameter with another layer"
        if self.consumer in self.producers:
            return f"layer {self.consumer!r} is producer and consumer"
        sizes = {dense_weight(layer).shape[dim] for layer, dim in self._layers(model).values()}
        return None if len(sizes) == 1 else f"its layers have {sorted(sizes)} features"


def _is_dense(layer: Any) -> bool:
    """Return True for a dense linear layer whose weight is a plain tensor that no call computes anew."""
    linear = type(layer) is nn.Linear or (isinstance(layer, nn.Module) and is_conv1d(layer))
    return linear and "weight" in layer._parameters and not is_stored_otherwise(layer.weight)


def permute_(
    model: nn.Module,
    config: BlockSparseConfig,
    batches: Iterable[Any],
    *,
    groups: Sequence[PermutationGroup],
    forward: Forward | None = None,
    device: torch.device | str | int | None = None,
) -> Report:
    """Reorder the permutation groups of a model in place so that it loses less when pruned.

    Features that matter for the same blocks are brought together: by turns the blocks with the highest sums
    of |W| · ‖X‖ (Wanda) are kept, and features go where most of their own lies. That channels may be
    permuted so as to lose less is from Pool and Yu, "Channel Permutations for N:M Sparsity" (NeurIPS 2021).
    An order stays only where it lowers the sum of the relative errors of the group's layers, pruned and
    refitted by "obs". The model's function is the same afterwards, which is checked with all batches. Until
    then the weights of before are kept.

    Args:
        model: dense, on its device.
        config: what the layers are to become.
        batches: calibration data, as of `prune_`; so is ``forward``.
        groups: of which each is reordered.
        forward: ``forward(model, batch)`` calls the model, for batches of other kinds.
        device: where matrices are computed; None is that of the model's first parameter.
    """
    check_model(model)
    config = checked_config("config", config)
    groups = items_of("groups", groups, "PermutationGroup")
    for group in groups:
        check_kind("groups", group, PermutationGroup)
        reason = group._reason_against(model)
        if reason is not None:
            raise InvalidArgumentError(f"groups must fit the model: {reason}")
        for name, (layer, _) in group._layers(model).items():
            checked_configs("config", name, [config], shape_of(layer))
    data, call = collected(batches), caller(forward)
    done: list[Improvement] = []
    with observing(model), torch.no_grad():
        layers = (layer for group in groups for layer, _ in group._layers(model).values())
        with restoring(parameter for layer in layers for parameter in layer.parameters()) as before:
            for group, moments in _with_moments(model, data, call, groups, chosen_device(model, device)):
                done.append(_improve(model, group, moments, config))
            for batch in data if any(one.kept for one in done) else ():
                output = call(model, batch)
                with swapped(model, before):
                    expected = call(model, batch)
                for dtype, difference in differences(output, expected):
                    if not difference <= DIFFERENCE[dtype.itemsize]:
                        raise InvalidArgumentError(
                            f"groups must leave the outputs equal, got a relative difference of "
                            f"{difference:.2g}: something in the model depends on an order"
                        )
    kept = sum(one.kept for one in done)
    return Report("permute_", done, [], notes=[f"{kept} of {len(done)} groups have another order"])


def _with_moments(
    model: nn.Module,
    data: Sequence[Any],
    call: Forward,
    groups: Sequence[PermutationGroup],
    device: torch.device,
) -> Iterator[tuple[PermutationGroup, dict[str, Moments]]]:
    """Yield groups as soon as the inputs of their layers are known; the caller keeps these in order."""
    waiting = list(groups)
    names = list(dict.fromkeys(name for group in groups for name in group._names()))
    calibration = Calibration(model, data, call, names, device)
    known: dict[str, Moments] = {}
    for layers in calibration.groups():
        known |= calibration.moments(layers)
        for group in [group for group in waiting if known.keys() >= set(group._names())]:
            waiting.remove(group)
            yield group, known
        needed = {name for group in waiting for name in group._names()}
        known = {name: moments for name, moments in known.items() if name in needed}


def _improve(
    model: nn.Module, group: PermutationGroup, moments: dict[str, Moments], config: BlockSparseConfig
) -> Improvement:
    """Reorder a group, and the moments of its consumer, if that lowers the error."""
    order = _clustered(model, group, moments, config)
    if order is None:
        return Improvement(group.consumer, None, None, False)
    before = _error(model, group, moments, config)
    reordered = {**moments, group.consumer: moments[group.consumer].reordered(order)}
    group._reorder(model, order)
    after = _error(model, group, reordered, config)
    if after < before:
        moments.update(reordered)
    else:
        group._reorder(model, order.argsort())
    return Improvement(group.consumer, before, after, after < before)


def _error(
    model: nn.Module, group: PermutationGroup, moments: Mapping[str, Moments], config: BlockSparseConfig
) -> float:
    """Return the sum of the errors of the group's layers once they are pruned."""
    pruners = (Pruner(model.get_submodule(name), moments[name]) for name in group._names())
    return sum(pruner.prune(config, "obs").error for pruner in pruners)


def _clustered(
    model: nn.Module, group: PermutationGroup, moments: Mapping[str, Moments], config: BlockSparseConfig
) -> Tensor | None:
    """Return an order [features] by the blocks for which they matter; None if no order matters."""
    block_shape, profiles = block_shape_of(config), []
    cluster = max(block_shape)  # features that share a block
    for name, (layer, dim) in group._layers(model).items():
        norms = moments[name].second().diagonal().sqrt()
        scores = dense_weight(layer).to(norms.device).double().abs() * norms
        size = block_shape[1 - dim]
        if cluster >= scores.shape[dim]:
            return None
        rows = scores.T if dim else scores
        profile = rows.reshape(len(rows), -1, size).sum(2).cpu()
        profiles.append(profile / profile.sum().clamp_min(1e-30))
    return _order_of(torch.cat(profiles, 1), cluster, config.density)


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

"""Orders of features that bring together in blocks what belongs together, kept where pruning errs less."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import Progress, shown
from ..calibrate.calibration import DAMPING, Calibration, Forward, Moments, call_model, check_model, collected
from ..calibrate.stream import chosen_device, differences, observing, restoring, swapped, tensors_in
from ..config import BlockSparseConfig
from ..errors import InvalidArgumentError, InvalidTypeError, UnsupportedError
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
from .driver import Pruner

# Names of layers within a feed-forward network: those that give hidden features, and the one that takes them.
_FEED_FORWARD = (
    (("gate_proj", "up_proj"), "down_proj"),  # Llama and its likes
    (("fc1",), "fc2"),  # ViT, CLIP, OPT
    (("c_fc",), "c_proj"),  # GPT-2
    (("intermediate.dense",), "output.dense"),  # BERT, RoBERTa
)
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

    @classmethod
    def find(cls, model: nn.Module) -> list[PermutationGroup]:
        """Find the hidden dimensions of feed-forward networks by the names of a model's layers.

        They are known in models of Transformers whose layers are named as those of Llama, BERT, RoBERTa, ViT,
        CLIP, OPT or GPT-2. Modules are left out that have other parameters or buffers which may belong to
        these features, and layers that share a weight. What else the code of a model does with features is
        not seen; `tilesparse.prune.permute_` compares outputs.
        """
        found: list[PermutationGroup] = []
        for name, module in model.named_modules():
            for producers, consumer in _FEED_FORWARD:
                layers = [_below(module, each) for each in (*producers, consumer)]
                if all(map(_is_dense, layers)) and not _may_have_others(module, layers):
                    own = (f"{name}.{each}".lstrip(".") for each in producers)
                    found.append(cls(tuple(own), f"{name}.{consumer}".lstrip(".")))
        return [group for group in found if group._reason_against(model) is None]

    @torch.no_grad()
    def permute_(self, model: nn.Module, order: Tensor) -> None:
        """Reorder the features of this group in a dense model, in place; its function stays the same.

        Nothing between producers and consumer may depend on the order.

        Args:
            model: has these layers.
            order: [features] of integers: which feature comes where.

        Raises:
            UnsupportedError: a weight is sharded. Nothing has changed after an error.
        """
        self._check_fits(model, "group")
        layers = self._layers(model).values()
        for layer, _ in layers:
            kind = type(layer.weight.detach())
            if kind is not Tensor:
                raise UnsupportedError(f"model must have plain tensors as weights, got {kind.__name__}")
        features = torch.arange(dense_weight(layer).shape[1], device="cpu")  # the consumer comes last
        if not isinstance(order, Tensor) or not torch.equal(order.cpu().sort().values, features):
            raise InvalidArgumentError(f"order must have each of {len(features)} features once, got others")
        for layer, dim in layers:
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

    def _check_fits(self, model: nn.Module, argument: str) -> None:
        reason = self._reason_against(model)
        if reason is not None:
            raise InvalidArgumentError(f"{argument} must fit the model: {reason}")

    def _reason_against(self, model: nn.Module) -> str | None:
        """Say why a model does not have this group, as far as shapes and owners of weights tell."""
        names = names_of_modules(model)
        owners = owners_of_parameters(names)
        for name in self._names():
            layer = _below(model, name)
            if not _is_dense(layer):
                kind = type(layer).__name__
                return f"{name!r} must be a dense linear layer with its own weight, got {kind}"
            if len(names[layer]) > 1:
                return f"layer {name!r} has another name as well"
            if any(len(owners[parameter]) > 1 for parameter in layer.parameters()):
                return f"layer {name!r} shares a parameter with another layer"
        if self.consumer in self.producers:
            return f"layer {self.consumer!r} is producer and consumer"
        sizes = {dense_weight(layer).shape[dim] for layer, dim in self._layers(model).values()}
        return None if len(sizes) == 1 else f"its layers have {sorted(sizes)} features"


def _is_dense(layer: Any) -> bool:
    """Return True for a dense linear layer whose weight is a plain tensor that no call computes anew."""
    linear = type(layer) is nn.Linear or (isinstance(layer, nn.Module) and is_conv1d(layer))
    return linear and "weight" in layer._parameters and not is_stored_otherwise(layer.weight)


def _below(module: nn.Module, name: str) -> Any:
    """Return the module of a name in another, or None."""
    found: nn.Module | None = module
    for part in name.split("."):
        found = None if found is None else found._modules.get(part)
    return found


def _may_have_others(module: nn.Module, layers: Sequence[Any]) -> bool:
    """Return True if a tensor of a module, but for those of these layers, may belong to hidden features."""
    theirs = {id(parameter) for layer in layers for parameter in layer.parameters()}
    features, tensors = dense_weight(layers[-1]).shape[1], (*module.parameters(), *module.buffers())
    return any(features in tensor.shape for tensor in tensors if id(tensor) not in theirs)


@dataclass(frozen=True)
class PermutedGroup:
    """A permutation group, the sum of its layers' errors before and after reordering, and if that was kept.

    Both are None where no order was looked for: a block holds all features of a group.
    """

    group: PermutationGroup
    error_before: float | None
    error: float | None
    kept: bool

    @property
    def name(self) -> str:
        """The group's consumer."""
        return self.group.consumer

    def row(self) -> dict[str, str]:
        """Return the cells of a table, by column."""
        before, after = ("" if error is None else f"{error:.4f}" for error in (self.error_before, self.error))
        kept = "yes" if self.kept else "no" if after else ""
        return {"layer": self.name, "error before": before, "error": after, "kept": kept}


def permute_(
    model: nn.Module,
    config: BlockSparseConfig,
    batches: Iterable[Any],
    *,
    groups: Sequence[PermutationGroup] | None = None,
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
        groups: None is all that `PermutationGroup.find` finds.
        forward: ``forward(model, batch)`` calls the model, for batches of other kinds.
        device: where matrices are computed; None is that of the model's first parameter.
    """
    check_model(model)
    config = checked_config("config", config)
    found = PermutationGroup.find(model) if groups is None else list(groups)
    if not found:
        raise InvalidArgumentError("groups must be given: none is known of this model")
    for group in found:
        if not isinstance(group, PermutationGroup):
            raise InvalidTypeError(f"groups must be PermutationGroup, got {shown(group)}")
        group._check_fits(model, "groups")
        for name, (layer, _) in group._layers(model).items():
            checked_configs("config", name, [config], shape_of(layer))
    data, call = collected(batches), forward or call_model
    done: list[PermutedGroup] = []
    with observing(model), torch.no_grad():
        first = call(model, data[0])
        if not any(tensor.is_floating_point() for tensor in tensors_in(first)):
            raise InvalidArgumentError(
                f"model must give a floating-point tensor to compare, got {type(first).__name__}; forward "
                "can give one"
            )
        layers = (layer for group in found for layer, _ in group._layers(model).values())
        with restoring(parameter for layer in layers for parameter in layer.parameters()) as before:
            for group, moments in _with_moments(model, data, call, found, chosen_device(model, device)):
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
    progress = Progress(len(groups))
    for layers in calibration.groups():
        known |= calibration.moments(layers)
        for group in [group for group in waiting if known.keys() >= set(group._names())]:
            waiting.remove(group)
            yield group, known
            progress.show(len(groups) - len(waiting), f"groups searched, {group.consumer} the last")
        needed = {name for group in waiting for name in group._names()}
        known = {name: moments for name, moments in known.items() if name in needed}


def _improve(
    model: nn.Module, group: PermutationGroup, moments: dict[str, Moments], config: BlockSparseConfig
) -> PermutedGroup:
    """Reorder a group, and the moments of its consumer, if that lowers the error."""
    order = _clustered(model, group, moments, config)
    if order is None:
        return PermutedGroup(group, None, None, False)
    before = _error(model, group, moments, config)
    reordered = {**moments, group.consumer: moments[group.consumer].reordered(order)}
    group.permute_(model, order)
    after = _error(model, group, reordered, config)
    if after < before:
        moments.update(reordered)
    else:
        group.permute_(model, order.argsort())
    return PermutedGroup(group, before, after, after < before)


def _error(
    model: nn.Module, group: PermutationGroup, moments: Mapping[str, Moments], config: BlockSparseConfig
) -> float:
    """Return the sum of the errors of the group's layers once they are pruned."""
    pruners = (Pruner(model.get_submodule(name), moments[name], DAMPING) for name in group._names())
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

"""Orders of features that bring together in blocks what belongs together, kept where pruning errs less."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from .._checks import checked_count, checked_number, shown
from .._reports import Progress
from ..calibrate.calibration import DAMPING, Calibration, Forward, Moments, call_model, check_model, collected
from ..calibrate.stream import chosen_device, differences, observing, restoring, swapped, tensors_in
from ..config import BlockSparseConfig
from ..errors import InvalidArgumentError, UnsupportedError
from ..model.match import block_shape_of, checked_config, checked_configs, shape_of
from ..model.modules import names_of_modules, owners_of_parameters
from ..model.report import Report
from ..nn.dense import dense_weight, is_conv1d, is_stored_otherwise
from .obs import Pruner

# Names of layers within a module: those that give hidden features, and the one that takes them.
_FEED_FORWARD = (
    (("gate_proj", "up_proj"), "down_proj"),  # Llama and its likes
    (("fc1",), "fc2"),  # ViT, CLIP, OPT
    (("c_fc",), "c_proj"),  # GPT-2
    (("intermediate.dense",), "output.dense"),  # BERT, RoBERTa
)
# The layers of q, k and v, the module that computes with them, and the layer that takes the result.
_ATTENTION = (
    (("q_proj", "k_proj", "v_proj"), "", "o_proj"),  # Llama and its likes, ViT
    (("q_proj", "k_proj", "v_proj"), "", "out_proj"),  # CLIP, OPT
    (("self.query", "self.key", "self.value"), "self", "output.dense"),  # BERT, RoBERTa
)
_FUSED_ATTENTION = ("c_attn", "c_proj")  # GPT-2: q, k and v are thirds of one layer


Producer: TypeAlias = str | tuple[str, int, int]  # a layer, or its out_features from start to below stop


@dataclass(frozen=True)
class PermutationGroup:
    """Dimension between layers whose features may change places together.

    The features of each producer are cut into ``groups``, and each group into so many ``units`` of equal
    size, which may change places within their group. Those of the consumer are cut alike, but have every
    group ``repeats`` times in a row, as where several heads of queries share the values of one.

    Attributes:
        producers: names of layers whose out_features these are, or (name, start, stop) for some of them.
        consumer: the name of the layer that takes them as its in_features.
        units: how many may change places in each group.
        groups: how many groups there are.
        repeats: how often the consumer has each group.
    """

    producers: tuple[Producer, ...]
    consumer: str
    units: int
    groups: int = 1
    repeats: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.producers, tuple) or not self.producers:
            raise InvalidArgumentError(
                f"producers must be a tuple of names, or of (name, start, stop), got {shown(self.producers)}"
            )
        for producer in self.producers:
            if not isinstance(producer, str):
                _, start, stop = producer
                checked_count("start", start, 0)
                checked_count("stop", stop)
        for name in ("units", "groups", "repeats"):
            object.__setattr__(self, name, checked_count(name, getattr(self, name)))

    @classmethod
    def find(cls, model: nn.Module) -> list[PermutationGroup]:
        """Find permutation groups by the names of a model's layers.

        These are the hidden dimension of feed-forward networks, the heads of attentions (where queries are
        grouped those of keys and values, and the queries' within each group), and the features of values
        within each head, in models of Transformers whose layers are named as those of Llama, BERT, RoBERTa,
        ViT, CLIP, OPT or GPT-2. Modules are left out that have other parameters or buffers which may belong
        to features or heads, such as a norm over all heads or a bias for each, and layers that share a
        weight. What else the code of a model does with features is not seen; `tilesparse.prune.permute_`
        compares outputs.
        """
        names = names_of_modules(model)
        owners = owners_of_parameters(names)
        found: list[PermutationGroup] = []
        for name, module in model.named_modules():
            prefix = f"{name}." if name else ""
            groups = (*_of_feed_forward(module, prefix), *_of_attention(module, prefix))
            found += [group for group in groups if group._reason_against(model, names, owners) is None]
        return found

    @torch.no_grad()
    def permute_(self, model: nn.Module, order: Tensor) -> None:
        """Reorder the units of this group in a dense model, in place; its function stays the same.

        Nothing between producers and consumer may depend on the order.

        Args:
            model: has these layers.
            order: [groups, units] of integers: which unit of its group comes where. [units] for one group.

        Raises:
            UnsupportedError: a weight is sharded. Nothing has changed after an error.
        """
        self._check_fits(model, "group")
        order = self._checked_order(order)
        parts = self._parts(model)
        for part in parts:
            kind = type(part.layer.weight.detach())
            if kind is not Tensor:
                raise UnsupportedError(f"model must have plain tensors as weights, got {kind.__name__}")
        for part in parts:
            part.permute(order)

    def _layers(self) -> list[str]:
        """Return the names of the producers, each once, and of the consumer."""
        names = [producer if isinstance(producer, str) else producer[0] for producer in self.producers]
        return [*dict.fromkeys(names), self.consumer]

    def _parts(self, model: nn.Module) -> list[_Part]:
        """Return the rows and columns of a model's layers that change places together."""
        parts = []
        for producer in self.producers:
            name = producer if isinstance(producer, str) else producer[0]
            layer = model.get_submodule(name)
            start, stop = (0, len(dense_weight(layer))) if isinstance(producer, str) else producer[1:]
            parts.append(_Part(name, layer, start, stop, 1, True))
        layer = model.get_submodule(self.consumer)
        columns = dense_weight(layer).shape[1]
        return [*parts, _Part(self.consumer, layer, 0, columns, self.repeats, False)]

    def _check_fits(self, model: nn.Module, argument: str) -> None:
        names = names_of_modules(model)
        reason = self._reason_against(model, names, owners_of_parameters(names))
        if reason is not None:
            raise InvalidArgumentError(f"{argument} must fit the model: {reason}")

    def _reason_against(
        self,
        model: nn.Module,
        names: Mapping[nn.Module, Sequence[str]],
        owners: Mapping[nn.Parameter, Sequence[nn.Module]],
    ) -> str | None:
        """Say why a model does not have this group, as far as shapes and owners of weights tell."""
        *producers, consumer = self._layers()
        for name in (*producers, consumer):
            layer = _below(model, name)
            if not _is_dense(layer):
                kind = type(layer).__name__
                return f"{name!r} must be a dense linear layer with its own weight, got {kind}"
            if len(names[layer]) > 1:
                return f"layer {name!r} has another name as well"
            if any(len(owners[parameter]) > 1 for parameter in layer.parameters()):
                return f"layer {name!r} shares a parameter with another layer"
        if consumer in producers:
            return f"layer {consumer!r} is producer and consumer"
        covered: set[tuple[str, int]] = set()
        for part in self._parts(model):
            size, count = len(dense_weight(part.layer)) if part.rows else part.stop, part.stop - part.start
            if not 0 <= part.start < part.stop <= size:
                return f"rows of layer {part.name!r} must be within {size}, got {part.start} to {part.stop}"
            if count % (self.groups * self.units * part.repeats):
                return (
                    f"{count} features of layer {part.name!r} cannot be cut into {self.groups} groups of "
                    f"{self.units} units, {part.repeats} times"
                )
            features = {(part.name, feature) for feature in range(part.start, part.stop) if part.rows}
            if covered & features:
                return f"rows of layer {part.name!r} are given twice"
            covered |= features
        return None

    def _checked_order(self, order: Tensor) -> Tensor:
        """Return an order as [groups, units] on the host."""
        expected = f"order must have each of {self.units} units once, for each of {self.groups} groups"
        if not isinstance(order, Tensor) or order.dtype.is_floating_point or order.dtype == torch.bool:
            raise InvalidArgumentError(f"{expected}, got {type(order).__name__}")
        given = order[None] if order.dim() == 1 else order
        if given.shape != (self.groups, self.units):
            raise InvalidArgumentError(f"{expected}, got shape {tuple(order.shape)}")
        given = given.cpu().long()
        if not torch.equal(given.sort(1).values, torch.arange(self.units, device="cpu").expand_as(given)):
            raise InvalidArgumentError(f"{expected}, got other or repeated numbers")
        return given


class _Part(NamedTuple):
    """Share of one layer in a permutation group: rows of W, and of the bias, or columns of W."""

    name: str
    layer: Any
    start: int
    stop: int
    repeats: int
    rows: bool

    def places(self, order: Tensor) -> Tensor:
        """Return [stop - start]: which of these features comes where, by an order [groups, units]."""
        groups, units = order.shape
        features = torch.arange(self.stop - self.start, device=order.device).view(
            groups, self.repeats, units, -1
        )
        return features.gather(2, order[:, None, :, None].expand_as(features)).flatten()

    def permute(self, order: Tensor) -> None:
        """Reorder weight and bias of the layer in place."""
        weight, bias = dense_weight(self.layer), self.layer.bias
        index = self.places(order).to(weight.device)
        ours = weight[self.start : self.stop] if self.rows else weight[:, self.start : self.stop]
        ours.copy_(ours.index_select(0 if self.rows else 1, index))
        if self.rows and bias is not None:
            bias[self.start : self.stop].copy_(bias[self.start : self.stop].index_select(0, index))


def _is_dense(layer: Any) -> bool:
    """Return True for a dense linear layer whose weight is a plain tensor that no call computes anew."""
    linear = type(layer) is nn.Linear or (isinstance(layer, nn.Module) and is_conv1d(layer))
    return linear and "weight" in layer._parameters and not is_stored_otherwise(layer.weight)


def _dense_below(module: nn.Module, names: Sequence[str]) -> list[Any] | None:
    """Return the dense linear layers of these names, or None if one is missing."""
    layers = [_below(module, name) for name in names]
    return layers if all(map(_is_dense, layers)) else None


def _below(module: nn.Module, name: str) -> Any:
    """Return the module of a name in another, or None."""
    found: nn.Module | None = module
    for part in name.split("."):
        found = None if found is None else found._modules.get(part)
    return found


def _shapes_beside(module: nn.Module, layers: Sequence[nn.Module]) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of all parameters and buffers of a module but for those of some layers in it."""
    theirs = {id(parameter) for layer in layers for parameter in layer.parameters()}
    for tensor in (*module.parameters(), *module.buffers()):
        if id(tensor) not in theirs:
            yield tuple(tensor.shape)


def _of_feed_forward(module: nn.Module, prefix: str) -> Iterator[PermutationGroup]:
    for producers, consumer in _FEED_FORWARD:
        layers = _dense_below(module, (*producers, consumer))
        if layers is None:
            continue
        units = dense_weight(layers[-1]).shape[1]
        fits = all(len(dense_weight(layer)) == units for layer in layers[:-1])
        if fits and not any(units in shape for shape in _shapes_beside(module, layers)):
            yield PermutationGroup(tuple(prefix + name for name in producers), prefix + consumer, units)


def _of_attention(module: nn.Module, prefix: str) -> Iterator[PermutationGroup]:
    for names, core, consumer in _ATTENTION:
        layers = _dense_below(module, (*names, consumer))
        if layers is None:
            continue
        q, k, v = (len(dense_weight(layer)) for layer in layers[:3])
        head = _head_size(module.get_submodule(core), layers)
        if head and q == dense_weight(layers[3]).shape[1] and k == v and not (q % k or k % head):
            q_name, k_name, v_name = (prefix + name for name in names)
            yield from _of_heads(q_name, k_name, v_name, prefix + consumer, k // head, q // k, head)
    layers = _dense_below(module, _FUSED_ATTENTION)
    if layers is not None:
        whole, size = len(dense_weight(layers[0])), dense_weight(layers[1]).shape[1]
        head = _head_size(module, layers)
        if head and whole == 3 * size and size % head == 0:
            fused, consumer = (prefix + name for name in _FUSED_ATTENTION)
            q_rows, k_rows, v_rows = ((fused, size * third, size * (third + 1)) for third in range(3))
            yield from _of_heads(q_rows, k_rows, v_rows, consumer, size // head, 1, head)


def _head_size(core: nn.Module, layers: Sequence[nn.Module]) -> int:
    """Return the size of a head; 0 where a module does not say, or has tensors that may belong to heads."""
    head = getattr(core, "head_dim", getattr(core, "attention_head_size", None))
    if type(head) is not int or head < 1 or any(shape != (head,) for shape in _shapes_beside(core, layers)):
        return 0
    return head


def _of_heads(
    q: Producer, k: Producer, v: Producer, consumer: str, heads: int, queries: int, size: int
) -> Iterator[PermutationGroup]:
    """Yield the groups of heads of keys and values, each of which has some heads of queries."""
    if heads > 1:
        yield PermutationGroup((q, k, v), consumer, heads)
    if queries > 1:
        yield PermutationGroup((q,), consumer, queries, heads)
    if size > 1:
        yield PermutationGroup((v,), consumer, size, heads, queries)


ROUNDS = 8  # of a search
DIFFERENCE = {2: 5e-2, 4: 1e-3, 8: 1e-6}  # of outputs that count as equal, relative, by bytes of a number


@dataclass(frozen=True)
class PermutedGroup:
    """A permutation group, the sum of its layers' errors before and after reordering, and if that was kept.

    Both are None where no order was looked for: blocks hold less than two units, or all of a group.
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
        return {
            "layer": self.name,
            "groups": str(self.group.groups),
            "units": str(self.group.units),
            "error before": before,
            "error": after,
            "kept": "yes" if self.kept else "no" if after else "",
        }


def permute_(
    model: nn.Module,
    config: BlockSparseConfig,
    batches: Iterable[Any],
    *,
    groups: Sequence[PermutationGroup] | None = None,
    damping: float = DAMPING,
    forward: Forward | None = None,
    device: torch.device | str | int | None = None,
) -> Report:
    """Reorder the permutation groups of a model in place so that it loses less when pruned.

    Units that matter for the same blocks are brought together: by turns the blocks with the highest sums of
    |W| · ‖X‖ (Wanda) are kept, and units go where most of their own lies. That channels may be permuted so as
    to lose less is from Pool and Yu, "Channel Permutations for N:M Sparsity" (NeurIPS 2021). An order stays
    only where it lowers the sum of the relative errors of the group's layers, pruned and refitted by "obs".
    The model's function is the same afterwards, which is checked with all batches. Until then the weights of
    before are kept.

    Args:
        model: dense, on its device.
        config: what the layers are to become.
        batches: calibration data, as of `prune_`; so are ``damping`` and ``forward``.
        groups: None is all that `PermutationGroup.find` finds.
        damping: of the second moment of the inputs.
        forward: ``forward(model, batch)`` calls the model, for batches of other kinds.
        device: where matrices are computed; None is that of the model's first parameter.
    """
    check_model(model)
    checked_number("damping", damping)
    config = checked_config("config", config)
    found = PermutationGroup.find(model) if groups is None else list(groups)
    if not found:
        raise InvalidArgumentError("groups must be given: none is known of this model")
    for group in found:
        group._check_fits(model, "groups")
        for part in group._parts(model):
            checked_configs("config", part.name, [config], shape_of(part.layer))
    data, call = collected(batches), forward or call_model
    done: list[PermutedGroup] = []
    with observing(model), torch.no_grad():
        first = call(model, data[0])
        if not any(tensor.is_floating_point() for tensor in tensors_in(first)):
            raise InvalidArgumentError(
                f"model must give a floating-point tensor to compare, got {type(first).__name__}; forward "
                "can give one"
            )
        layers = (part.layer for group in found for part in group._parts(model))
        with restoring(parameter for layer in layers for parameter in layer.parameters()) as before:
            for group, moments in _with_moments(model, data, call, found, chosen_device(model, device)):
                done.append(_improve(model, group, moments, config, damping))
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
    names = list(dict.fromkeys(name for group in groups for name in group._layers()))
    calibration = Calibration(model, data, call, names, device)
    known: dict[str, Moments] = {}
    progress = Progress(len(groups))
    for layers in calibration.groups():
        known |= calibration.moments(layers)
        for group in [group for group in waiting if known.keys() >= set(group._layers())]:
            waiting.remove(group)
            yield group, known
            progress.show(len(groups) - len(waiting), f"groups searched, {group.consumer} the last")
        needed = {name for group in waiting for name in group._layers()}
        known = {name: moments for name, moments in known.items() if name in needed}


def _improve(
    model: nn.Module,
    group: PermutationGroup,
    moments: dict[str, Moments],
    config: BlockSparseConfig,
    damping: float,
) -> PermutedGroup:
    """Reorder a group, and the moments of its consumer, if that lowers the error."""
    parts = group._parts(model)
    order = _clustered(parts, group, moments, config)
    if order is None:
        return PermutedGroup(group, None, None, False)
    before = _error(model, group, moments, config, damping)
    consumer = parts[-1]
    reordered = {**moments, consumer.name: moments[consumer.name].reordered(consumer.places(order))}
    group.permute_(model, order)
    after = _error(model, group, reordered, config, damping)
    if after < before:
        moments.update(reordered)
    else:
        group.permute_(model, order.argsort(1))
    return PermutedGroup(group, before, after, after < before)


def _error(
    model: nn.Module,
    group: PermutationGroup,
    moments: Mapping[str, Moments],
    config: BlockSparseConfig,
    damping: float,
) -> float:
    """Return the sum of the errors of the group's layers once they are pruned."""
    pruners = (Pruner(model.get_submodule(name), moments[name], damping) for name in group._layers())
    return sum(pruner.prune(config, "obs").error for pruner in pruners)


def _clustered(
    parts: Sequence[_Part], group: PermutationGroup, moments: Mapping[str, Moments], config: BlockSparseConfig
) -> Tensor | None:
    """Return an order [groups, units] by the blocks for which units matter; None if no order matters."""
    block_shape, units = block_shape_of(config), group.groups * group.units
    sides = [
        block_shape[0 if part.rows else 1] * part.repeats * units // (part.stop - part.start)
        for part in parts
    ]
    cluster = max(sides)  # units that share a block
    if cluster <= 1 or cluster >= group.units:
        return None
    profiles = [_profile(part, group, moments[part.name], block_shape) for part in parts]
    profile = torch.cat([each / each.sum().clamp_min(1e-30) for each in profiles], 2)
    return torch.stack([_order_of(units, cluster, config.density) for units in profile])


def _profile(part: _Part, group: PermutationGroup, moments: Moments, block_shape: tuple[int, int]) -> Tensor:
    """Return [groups, units, blocks]: how much each unit matters to each block column, or block row."""
    norms, (bn, bk) = moments.second().diagonal().sqrt(), block_shape
    scores = dense_weight(part.layer).to(norms.device).double().abs() * norms
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

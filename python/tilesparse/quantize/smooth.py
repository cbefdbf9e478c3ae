"""The plan for layers with 8-bit activations: smoothed inputs and clipped weights."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..calibrate.calibration import Calibration, check_inputs, exact_products
from ..calibrate.stream import Input, differences
from ..errors import InvalidArgumentError
from ..model.match import names_of_modules, owners_of_parameters
from ..nn.linear import BlockSparseLinear, dense_weight, is_conv1d, is_stored_otherwise
from ..nn.weight import is_sharded
from ..storage.formats import QuantizedStorage, storage_of
from ..storage.quantize import clip_limits
from .plan import Plan, Task, inverse_norms

_PARTS = (1, 2, 3)  # a producer's rows count as a whole, in halves and in thirds, as of fused layers
_BASES = {torch.float16: 4}  # of digits, whose number bounds the powers of two; 16 for other dtypes
_DIFFERENCE = 4  # of outputs that count as equal, relative, over the rounding unit of their dtype


@dataclass(frozen=True)
class ScaleGroup:
    """Layers with the same input, and where its features come from.

    Attributes:
        layers: names of the linear layers with this input, in the order in which they run.
        producer: the name of the module whose rows are the features, or None.
        start: the first of these rows.
        source: [in_features] of integers on the CPU: which row, counted from start, a feature comes from; -1
            where the feature is always 0. None without a producer.
        reason: why there is no producer, or None.
        columns: [in_features] factors of the columns of all weights, powers of two; the producer's rows have
            their inverse. None where nothing is scaled.
    """

    layers: tuple[str, ...]
    producer: str | None = None
    start: int = 0
    source: Tensor | None = None
    reason: str | None = None
    columns: Tensor | None = None


class GroupFinder:
    """Search for the scale groups of the unit at hand of a calibration, which runs on the first batch.

    ``layers`` are names of the linear layers and norms in it; ``against`` says why some cannot be scaled.
    """

    def __init__(
        self,
        model: nn.Module,
        calibration: Calibration,
        layers: Sequence[str],
        against: Mapping[str, str],
    ) -> None:
        self._model, self._calibration, self._against = model, calibration, against
        self._inputs: dict[str, Tensor] = {}  # of the first call, in the order of these
        self._calls: dict[str, list[Input]] = {}
        self._output = calibration.trial(layers, self._note)

    def _note(self, name: str, x: Tensor) -> None:
        if name not in self._inputs:
            self._inputs[name] = x.detach().clone()
        self._calls.setdefault(name, []).append(Input.of(x))

    def groups(self, targets: Container[str]) -> Iterator[ScaleGroup]:
        """Yield the inputs of target layers that run, with modules that may take their scales."""
        alike: dict[object, list[str]] = {}
        for name, calls in self._calls.items():
            if is_linear(self._model.get_submodule(name)):
                alike.setdefault(tuple(call.key for call in calls), []).append(name)
        for layers in alike.values():
            if any(name in targets for name in layers):
                yield self._found(tuple(layers))

    def _found(self, layers: tuple[str, ...]) -> ScaleGroup:
        for name in layers:
            if name in self._against:
                return ScaleGroup(layers, reason=f"{name}: {self._against[name]}")
        seen: list[str] = []
        refused: list[str] = []
        for producer, start, stop in self._candidates(layers[0]):
            if producer in self._against:
                refused.append(producer)
                continue
            source = self._source(producer, start, stop, layers[0])
            if source is None:
                continue
            group = ScaleGroup(layers, producer, start, source)
            if self._keeps_output(group):
                return group
            seen.append(producer)
        reason = "no module before it can take its scales"
        if seen:
            reason = f"something else reads what {seen[0]} gives"
        elif refused:
            reason += f"; {refused[0]} cannot: {self._against[refused[0]]}"
        return ScaleGroup(layers, reason=reason)

    def _candidates(self, layer: str) -> Iterator[tuple[str, int, int]]:
        """Yield modules that run before a layer, the last one first, and which of their rows may count."""
        features = sizes_of(self._model.get_submodule(layer))[1]
        before = list(self._inputs)[: list(self._inputs).index(layer)]
        for name in reversed(before):
            module = self._model.get_submodule(name)
            rows = sizes_of(module)[0]
            for parts in _PARTS if is_linear(module) else _PARTS[:1]:
                size, rest = divmod(rows, parts)
                if not rest and size and features % size == 0 and (parts == 1 or size == features):
                    for part in reversed(range(parts)):
                        yield name, part * size, (part + 1) * size

    def _source(self, producer: str, start: int, stop: int, layer: str) -> Tensor | None:
        """Return the row that each feature of a layer's input comes from, or None if it is not so."""
        x = self._inputs[layer]
        numbers, base = torch.arange(1, stop - start + 1, device="cpu"), _BASES.get(x.dtype, 16)
        found, place = torch.zeros(x.shape[-1], dtype=torch.long, device="cpu"), 1
        while place <= stop - start:
            digits = numbers // place % base  # 0 is that of what comes from elsewhere
            rows = torch.ones(sizes_of(self._model.get_submodule(producer))[0], device="cpu")
            rows[start:stop] = 0.5**digits
            seen = self._digits(layer, scaled_in(self._model, {producer: rows}, {}), base)
            if seen is None:
                return None
            found, place = found + seen * place, place * base
        live = _norms(x).cpu() > 0
        if not bool(live.any()) or not bool(((found > 0) & (found <= stop - start))[live].all()):
            return None
        return torch.where(live, found - 1, -1)

    def _digits(self, layer: str, parameters: Mapping[str, Tensor], base: int) -> Tensor | None:
        """Return by which powers of 1/2 a layer's input is multiplied; None if it changes in another way."""
        inputs: list[Tensor] = []
        self._calibration.trial([layer], lambda _, x: inputs.append(x.detach()), parameters, until=layer)
        before = self._inputs[layer]
        if not inputs or inputs[0].shape != before.shape:
            return None
        norms = _norms(before)
        digits = (norms / _norms(inputs[0])).log2().round().nan_to_num(0).clamp(0, base - 1)
        expected = before * (0.5**digits).to(before.dtype)
        same = _norms(inputs[0] - expected) <= torch.finfo(before.dtype).eps / 2 * norms * 0.5**digits
        return digits.long().cpu() if bool(same.all()) else None

    def _keeps_output(self, group: ScaleGroup) -> bool:
        """Return True if factors of a group leave what the unit gives the same, but for rounding."""
        assert group.source is not None
        generator = torch.Generator().manual_seed(0)
        count = int(group.source.max()) + 1
        factors = 2.0 ** torch.randint(-1, 2, (count,), generator=generator, device="cpu")
        columns = torch.where(group.source >= 0, factors[group.source.clamp(min=0)], 1.0)
        parameters = scaled_in(self._model, *factors_of(self._model, [replace(group, columns=columns)]))
        output = self._calibration.trial([], lambda *_: None, parameters)
        found = differences(output, self._output)
        return all(each <= _DIFFERENCE * torch.finfo(dtype).eps for dtype, each in found)


def _norms(x: Tensor) -> Tensor:
    """Return the norm of each feature [features] of x [..., features], in float64."""
    norms: Tensor = torch.linalg.vector_norm(x.reshape(-1, x.shape[-1]), dim=0, dtype=torch.float64)
    return norms


# Relative differences of outputs that count as equal. Factors are powers of two: only float16 rounds anew.
_LIMITS = {2: 3e-2, 4: 1e-4, 8: 1e-6}  # by bytes of a number


class SmoothPlan(Plan):
    """Scales and limits for layers with 8-bit activations."""

    @torch.no_grad()
    def __init__(self, task: Task) -> None:
        """Find the scales and limits of all layers."""
        super().__init__(task)
        modules = task.model.named_modules()
        names = [name for name, module in modules if is_linear(module) or is_norm(module)]
        self._calibrated = partial(task.calibration, names)
        self._against = _reasons_against_scaling(task, names)
        self._refused: dict[tuple[str, ...], ScaleGroup] = {}  # by their layers
        self._make_all()
        while harmful := self._harmful(self._scaled):
            for group, reason in harmful:
                self._refused[group.layers] = ScaleGroup(group.layers, reason=reason)
            self._make_all()
        self._rows, self._columns = factors_of(task.model, self._scaled)
        del self._calibration  # whose data take memory

    def _make_all(self) -> None:
        self._calibration = self._calibrated()
        self.stack = self._calibration.stack
        self._limits: dict[str, Tensor] = {}
        self._scaled: list[ScaleGroup] = []
        self.layers.clear()
        for layers in self._calibration.units():
            if not self._task.configs.keys().isdisjoint(layers):
                self._make(layers)
        missing = [name for name in self._task.configs if name not in self._limits]
        if missing:
            raise InvalidArgumentError(f"batches must run layer {missing[0]!r}, or layers must leave it out")

    def _make(self, layers: Sequence[str]) -> None:
        finder = GroupFinder(self._task.model, self._calibration, layers, self._against)
        found = finder.groups(self._task.configs)
        groups = [self._refused.get(group.layers, group) for group in found]
        samples = {group.layers[0]: Samples(self._task.device) for group in groups}
        self._calibration.visit(
            list(samples), lambda name, x, number, keep: samples[name].add(x, number, keep)
        )
        for group in groups:
            own = samples[group.layers[0]]
            check_inputs(group.layers[0], own.tokens, own.not_finite())
            self._solve(group, own)

    def _solve(self, group: ScaleGroup, samples: Samples) -> None:
        storages = {name: self._task.storage(name) for name in self._task.configs if name in group.layers}
        weights = {name: self._task.weight(name) for name in group.layers if name in storages}
        found = Search(samples, weights, storages).best(group.source)
        if found.columns is not None:
            self._scaled.append(replace(group, columns=found.columns))
        self._limits |= found.limits
        for name, weight in weights.items():
            scaled = weight if found.columns is None else weight * found.columns
            clipped = found.limits[name] < scaled.abs().amax(-1)
            self._note(
                name,
                found.before[name],
                found.after[name],
                samples.tokens,
                clipped=float(clipped.float().mean()),
                smoothed_by=None if found.columns is None else group.producer,
                alpha=found.alpha,
                reason=group.reason,
            )

    def _harmful(self, groups: Sequence[ScaleGroup]) -> list[tuple[ScaleGroup, str]]:
        """Return the groups whose scales change what the whole model gives for any batch, and why.

        A group was found in one block on one batch: something outside of the block, or a branch that other
        batches take, may read its input, too.
        """
        if not groups or self._keeps_outputs(groups):
            return []
        if not self._keeps_outputs([]):
            reason = "the model's outputs cannot be compared: two runs give different tensors, or none"
            return [(group, reason) for group in groups]
        return [
            (group, f"the model's outputs change where {group.producer} takes its scales")
            for group in self._harmful_of(groups)
        ]

    def _harmful_of(self, groups: Sequence[ScaleGroup]) -> list[ScaleGroup]:
        """Return those of some groups, which change outputs together, that do so alone, or else all."""
        half = len(groups) // 2
        halves = [part for part in (groups[:half], groups[half:]) if part]
        changing = [part for part in halves if len(groups) > 1 and not self._keeps_outputs(part)]
        return [group for part in changing for group in self._harmful_of(part)] or list(groups)

    def _keeps_outputs(self, groups: Sequence[ScaleGroup]) -> bool:
        """Return True if the model gives the same for all batches where these groups are scaled."""
        parameters = scaled_in(self._task.model, *factors_of(self._task.model, groups))
        outputs = zip(self._calibration.outputs(parameters), self._calibration.outputs({}), strict=True)
        found = (differences(output, expected) for output, expected in outputs)
        return all(each <= _LIMITS[dtype.itemsize] for of_batch in found for dtype, each in of_batch)

    def scaled(self) -> dict[str, Tensor]:
        """Return the scaled parameters of norms and of layers that are not quantized."""
        rows, columns = (
            {name: own for name, own in factors.items() if name not in self._task.configs}
            for factors in (self._rows, self._columns)
        )
        return scaled_in(self._task.model, rows, columns)

    def _stored(self, name: str) -> BlockSparseLinear:
        rows, columns, limits = self._rows.get(name), self._columns.get(name), self._limits[name]
        return self._copy(
            name,
            scaled_parameters(self._task.layer(name), rows, columns),
            limits=limits if rows is None else limits * rows.to(limits.device),
        )


ALPHAS = tuple(step / 10 for step in range(10))  # 0 to 0.9
_SPAN = 16  # exponents of factors are within this of the largest


class Found(NamedTuple):
    """The best that was found for the layers of a group that are to be quantized, by their names.

    Errors are those of `QuantizedLayer`, before and after scaling and clipping.
    """

    alpha: float | None  # strength of the migration
    columns: Tensor | None  # as of `ScaleGroup`
    limits: dict[str, Tensor]  # where weights are clipped, [out_features]
    before: dict[str, float]
    after: dict[str, float]


class Search:
    """Search for the scales of one input, by the error of layers in 8 bits on some of its tokens.

    ``weights`` are W [out_features, in_features] in float32 of the layers that are to be quantized, by name.
    """

    def __init__(
        self, samples: Samples, weights: Mapping[str, Tensor], storages: Mapping[str, QuantizedStorage]
    ) -> None:
        assert samples.largest is not None
        self._x, self._largest = samples.rows(), samples.largest
        self._weights, self._storages = weights, storages
        with exact_products(self._x.device):
            self._outputs = {name: self._x @ weight.T for name, weight in weights.items()}
        self._sizes = inverse_norms(torch.cat(list(self._outputs.values()), 1))

    def best(self, source: Tensor | None) -> Found:
        """Return the best of all strengths, and then of all clippings; without a source nothing is scaled."""
        before = self._errors(None)
        alpha, columns, least = None, None, sum(before.values())
        if source is not None:
            for candidate in ALPHAS:
                factors = self.factors(candidate, source)
                error = sum(self._errors(factors).values())
                if error < least:
                    alpha, columns, least = candidate, factors, error
        limits = {name: self._limits(name, columns) for name in self._weights}
        return Found(alpha, columns, limits, before, self._errors(columns, limits))

    def factors(self, alpha: float, source: Tensor) -> Tensor:
        """Return factors of the weights' columns by which activations and weights share their range.

        They are max|x_j|^alpha / max|w_j|^(1 - alpha), as in SmoothQuant (Xiao et al., "SmoothQuant: Accurate
        and Efficient Post-Training Quantization for Large Language Models", arXiv:2211.10438), rounded to
        powers of two: multiplying by these is exact, so the model computes the same before it is quantized.
        """
        source = source.to(self._largest.device)
        of_x, of_w = (_largest_of(each, source) for each in (self._largest, self._largest_weights()))
        live = (of_x > 0) & (of_w > 0)
        if not bool(live.any()):
            return torch.ones_like(of_x)
        exponents = (alpha * of_x.log2() - (1 - alpha) * of_w.log2()).round()
        # Most features stay as they are, unless one would grow beyond the largest there is.
        grown = (of_x.log2() - exponents)[live].amax() - of_x[live].amax().log2()
        shift = torch.maximum(grown.ceil(), -exponents[live].median())
        exponents = torch.where(live, exponents, exponents[live].amax()) + shift
        exponents = exponents.clamp(min=float(exponents.amax()) - _SPAN)
        return 2.0 ** torch.where(source >= 0, exponents, 0)

    def _largest_weights(self) -> Tensor:
        return torch.stack([weight.abs().amax(0) for weight in self._weights.values()]).amax(0)

    def _limits(self, name: str, columns: Tensor | None) -> Tensor:
        weight, storage = self._weight(name, columns), self._storages[name]
        with exact_products(weight.device):
            inputs = self._quantized(columns)[storage] * self._sizes
            return clip_limits(weight, inputs, storage.rounded)

    def _errors(self, columns: Tensor | None, limits: Mapping[str, Tensor] | None = None) -> dict[str, float]:
        inputs, found = self._quantized(columns), {}
        with exact_products(self._x.device):
            for name, storage in self._storages.items():
                scaled = self._weight(name, columns)
                own = scaled.abs().amax(-1) if limits is None else limits[name]
                output, y = self._outputs[name], inputs[storage] @ storage.rounded(scaled, own).T
                size = float((output * self._sizes).square().sum())
                error = float(((output - y) * self._sizes).square().sum())
                found[name] = error / size if size > 0 else 0.0
        return found

    def _weight(self, name: str, columns: Tensor | None) -> Tensor:
        return self._weights[name] if columns is None else self._weights[name] * columns

    def _quantized(self, columns: Tensor | None) -> dict[QuantizedStorage, Tensor]:
        """Return the tokens as products of each storage see them, over the factors of columns."""
        x = self._x if columns is None else self._x / columns
        largest = x.abs().amax(-1)
        return {storage: storage.rounded(x, largest) for storage in {*self._storages.values()}}


def _largest_of(of_features: Tensor, source: Tensor) -> Tensor:
    """Return for each feature the largest number of all that come from the same row."""
    known = source >= 0
    of_rows = of_features.new_zeros(int(source.max()) + 1)
    of_rows.scatter_reduce_(0, source[known], of_features[known], "amax")
    return torch.where(known, of_rows[source.clamp(min=0)], 0)


TOKENS = 512  # that are kept of an input: errors of layers are means over them


class Samples:
    """Random tokens of an input, and the largest magnitude of each feature over all tokens."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generator = torch.Generator().manual_seed(0)
        # Random numbers [tokens], and tokens [tokens, features].
        self._chosen: list[tuple[Tensor, Tensor]] = []
        self.largest: Tensor | None = None
        self._finite: dict[int, Tensor] = {}
        self.tokens = 0

    def add(self, x: Tensor, number: int, keep: Tensor | None = None) -> None:
        """Add the input [..., features] of a call in a batch; see `Moments.add` for the tokens to keep."""
        rows = x.detach().to(self._device, torch.float32).reshape(-1, x.shape[-1])
        if keep is not None and keep.shape == x.shape[:-1]:
            rows = rows[keep.to(self._device).reshape(-1)]
        self.tokens += len(rows)
        largest = rows.abs().amax(0) if len(rows) else rows.new_zeros(x.shape[-1])
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)
        self._finite[number] = self._finite.get(number, True) & rows.isfinite().all()
        order = torch.rand(len(rows), generator=self._generator, device="cpu").to(self._device)
        self._chosen.append((order, rows))
        if sum(len(rows) for _, rows in self._chosen) > 2 * TOKENS:
            self._chosen = [self._least()]

    def rows(self) -> Tensor:
        """Return tokens [at most TOKENS, features] in float32."""
        return self._least()[1]

    def not_finite(self) -> int | None:
        """Return the first batch with NaN or infinities, or None."""
        return next((number for number, finite in self._finite.items() if not bool(finite)), None)

    def _least(self) -> tuple[Tensor, Tensor]:
        order, rows = (torch.cat(parts) for parts in zip(*self._chosen, strict=True))
        chosen = order.argsort()[:TOKENS]
        return order[chosen], rows[chosen].clone()


def is_linear(module: Any) -> bool:
    """Return True for a linear layer whose weight is known, sparse or dense."""
    if type(module) is nn.Linear or is_conv1d(module):
        return not is_stored_otherwise(module.weight)
    return isinstance(module, BlockSparseLinear)


def is_norm(module: nn.Module) -> bool:
    """Return True for a module whose own parameters are a weight [features], and perhaps such a bias."""
    own = dict(module.named_parameters(recurse=False))
    weight = own.get("weight")
    return weight is not None and weight.dim() == 1 and own.keys() <= {"weight", "bias"}


def sizes_of(module: Any) -> tuple[int, int]:
    """Return (out_features, in_features) of a layer; of a norm both are its features."""
    if isinstance(module, BlockSparseLinear):
        return module.spec.shape
    if is_norm(module):
        return len(module.weight), len(module.weight)
    out_features, in_features = dense_weight(module).shape
    return out_features, in_features


def scaled_parameters(
    module: Any, rows: Tensor | None = None, columns: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the parameters of a layer or norm, times factors of its rows and its columns, by their names."""
    weight = module.weight.detach().clone()
    if isinstance(module, BlockSparseLinear):
        block_rows, block_columns = (places.to(weight.device) for places in module.pattern.block_indices())
        (bn, bk), own = module.block_shape, weight.dtype
        if rows is not None:
            weight *= rows.to(weight.device, own).view(-1, bn)[block_rows][:, :, None]
        if columns is not None:
            weight *= columns.to(weight.device, own).view(-1, bk)[block_columns][:, None, :]
    else:
        of_rows = weight.T if is_conv1d(module) else weight
        if rows is not None:
            of_rows *= rows.to(weight.device, weight.dtype).view(-1, *(1,) * (weight.dim() - 1))
        if columns is not None:
            of_rows *= columns.to(weight.device, weight.dtype)
    found = {"weight": weight}
    if rows is not None and getattr(module, "bias", None) is not None:
        found["bias"] = module.bias.detach() * rows.to(module.bias.device, module.bias.dtype)
    return found


def factors_of(model: nn.Module, groups: Sequence[ScaleGroup]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the factors of rows and of columns of modules, by name, where these groups are scaled."""
    rows: dict[str, Tensor] = {}
    columns: dict[str, Tensor] = {}
    for group in groups:
        assert group.producer is not None and group.source is not None and group.columns is not None
        columns |= dict.fromkeys(group.layers, group.columns)
        size = sizes_of(model.get_submodule(group.producer))[0]
        own, known = rows.setdefault(group.producer, torch.ones(size, device="cpu")), group.source >= 0
        inverse = torch.ones(int(group.source.max()) + 1, device="cpu")  # also of rows without features
        inverse[group.source[known]] = 1 / group.columns.cpu()[known]
        own[group.start : group.start + len(inverse)] *= inverse
    return rows, columns


def scaled_in(
    model: nn.Module, rows: Mapping[str, Tensor], columns: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return parameters as `scaled_parameters` does, by their names in the model; factors are by modules."""
    return {
        f"{name}.{own}": tensor
        for name in {**rows, **columns}
        for own, tensor in scaled_parameters(
            model.get_submodule(name), rows.get(name), columns.get(name)
        ).items()
    }


def _reasons_against_scaling(task: Task, names: Sequence[str]) -> dict[str, str]:
    """Say of layers and norms why their parameters cannot be multiplied; those that can be are left out."""
    owners = owners_of_parameters(names_of_modules(task.model))
    reasons = {name: _reason_against(task.layer(name), owners) for name in names}
    reasons |= {name: "its weight alone is quantized" for name in names if name in task.fixed}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _reason_against(module: Any, owners: Mapping[nn.Parameter, Sequence[nn.Module]]) -> str | None:
    if "weight" not in module._parameters or hasattr(module, "parametrizations"):
        return "its weight is computed in every call"
    if isinstance(module, BlockSparseLinear) and not storage_of(module.storage).trainable:
        return f"its weight is stored as {module.storage!r}"
    for parameter in module.parameters(recurse=False):
        if is_sharded(parameter):
            return "its weight is sharded"
        if len(owners[parameter]) > 1:
            return "it shares a parameter with another module"
    return None

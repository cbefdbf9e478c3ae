"""Reports of what was done to the layers of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .._checks import aligned, check_module, empty_of, empty_texts, warn_user, without_numbers
from ..nn.experts import ExpertsLinear
from ..nn.linear import BlockSparseLinear
from ..storage.formats import storage_of
from .match import Replacement, SkippedLayer, Target, by_reason, layers_in


@dataclass(frozen=True)
class Size:
    """Number of parameters, and bytes of parameters and buffers.

    A shared tensor counts once. Uninitialised tensors of lazy layers do not count.
    """

    parameters: int
    bytes: int


@dataclass(frozen=True)
class SparseLayer:
    """One block-sparse layer, or projection of experts.

    `shape` is (out_features, in_features). `policy`, `nm`, `storage` and `activations` are those of the
    `BlockSparseLinear`. `error` is the layer's `storage_error`: how much 8 or 4 bits change the weights that
    are kept, not what pruning removes. `before` and `after` are sizes of the dense layer and of this one;
    `densify_` has them the other way round.
    `empty_rows` and `empty_columns` count block rows and columns without a block; 0 on the meta device.
    """

    name: str
    shape: tuple[int, int]
    block_shape: tuple[int, int]
    density: float
    policy: str
    nm: tuple[int, int] | None
    storage: str
    error: float
    before: Size
    after: Size
    empty_rows: int
    empty_columns: int
    activations: str | None = None

    def row(self) -> dict[str, str]:
        """Return the cells of a table, by column."""
        return {
            "layer": self.name,
            "shape": "{}x{}".format(*self.shape),
            "block": "{}x{}".format(*self.block_shape),
            "density": f"{self.density:.3f}",
            "storage": storage_of(self.storage).describe(self.nm, self.activations),
            "error": f"{self.error:.2g}" if self.error else "",
            "policy": self.policy,
            "parameters": f"{self.before.parameters:,} → {self.after.parameters:,}",
            "bytes": f"{self.before.bytes:,} → {self.after.bytes:,}",
        }


@dataclass(frozen=True)
class DenseParameter:
    """A parameter of two or more dimensions that is not a block-sparse weight.

    `share` is its fraction of all parameters of the dense model.
    """

    name: str
    shape: tuple[int, ...]
    share: float


@dataclass(frozen=True)
class Report:
    """Result of a function that changes the layers of a model; ``str()`` makes a table of it.

    Attributes:
        verb: name of the function.
        layers: a record of each layer, MLP, product or permutation group that was changed, or would be.
            Fields that records share have one meaning: `error_before` and `error` are relative errors of the
            layer's output, `tokens` those of the calibration data that the layer has met, `before` and
            `after` sizes.
        skipped: those that stay as they are, with the reason.
        before: size of the whole model before; 0 where no tensor changes.
        after: the same afterwards.
        dense: all parameters of two or more dimensions that stay dense, including those of other modules.
        notes: what else there is to say, in sentences.
        facts: numbers and names behind the notes, such as the "stack" of blocks that calibration data went
            through block by block.
    """

    verb: str
    layers: list[Any]
    skipped: list[SkippedLayer]
    before: Size = Size(0, 0)
    after: Size = Size(0, 0)
    dense: list[DenseParameter] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = _table(list(_rows(self.layers)))
        before, after = self.before, self.after
        if before.bytes or after.bytes:
            lines.append(
                f"whole model: {before.parameters:,} → {after.parameters:,} parameters, {before.bytes:,} → "
                f"{after.bytes:,} bytes"
            )
        lines += [*self.notes, *(f"skipped {text}" for text in by_reason(self.skipped))]
        return "\n".join([*lines, *empty_texts(self.layers), *dense_lines(self.dense)])

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name; records are dictionaries, too."""
        return asdict(self)


def _rows(layers: Iterable[Any]) -> Iterator[dict[str, str]]:
    """Yield the cells of records; experts of one projection are one row."""
    for _, group in groupby(layers, lambda layer: getattr(layer, "projection", None) or id(layer)):
        first, *others = group
        yield first.row(*others)


def _table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the lines of a table; rows that differ in numbers of names alone share a line."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        name, *cells = row.values()
        groups.setdefault((without_numbers(name), *cells), []).append(name)
    lines = [
        (names[0] if len(names) == 1 else f"{name} ({len(names)})", *cells)
        for (name, *cells), names in groups.items()
    ]
    return [line.rstrip() for line in aligned([tuple(rows[0]), *lines])] if rows else []


def _size(modules: Iterable[nn.Module]) -> Size:
    modules = list(modules)
    parameters = {one for module in modules for one in module.parameters(recurse=False) if not is_lazy(one)}
    buffers = {one for module in modules for one in module.buffers(recurse=False) if not is_lazy(one)}
    tensors: set[torch.Tensor] = parameters | buffers
    return Size(
        sum(one.numel() for one in parameters), sum(one.numel() * one.element_size() for one in tensors)
    )


def patch_report(
    verb: str,
    names: Mapping[nn.Module, list[str]],
    targets: Sequence[Target],
    skipped: list[SkippedLayer],
    notes: Sequence[str] = (),
) -> Report:
    """Return the report of a model with these replacements, put in already or not."""
    replaced = {target.module: target.replacement for target in targets}
    new = [
        one for module in names for one in (replaced[module].modules() if module in replaced else [module])
    ]
    before, after = _size(names), _size(new)
    left = {module: aliases for module, aliases in names.items() if module not in replaced}
    dense = _dense_parameters(left, before.parameters)
    layers = [layer for target in targets for layer in _layers_of(target)]
    return Report(verb, layers, skipped, before, after, dense, [*notes])


def summary(model: nn.Module) -> Report:
    """Return what the block-sparse layers of a model are, and which parameters are dense; it is only read.

    ``before`` is the size of the model with dense layers in the dtypes of the sparse ones.
    """
    check_module(model)
    names = {module: [name] for name, module in model.named_modules()}
    layers = [
        layer
        for module, (name,) in names.items()
        if isinstance(module, Replacement) and not isinstance(module, ExpertsLinear)
        for layer in _layers_of(Target([name], module, module))
    ]
    after = _size(names)
    parameters = sum(one.before.parameters - one.after.parameters for one in layers)
    before = Size(
        after.parameters + parameters, after.bytes + sum(one.before.bytes - one.after.bytes for one in layers)
    )
    return Report("summary", layers, [], before, after, _dense_parameters(names, before.parameters))


def _layers_of(target: Target) -> Iterator[SparseLayer]:
    """Yield the sparse layers that a target gains or loses: of experts their projections."""
    gains = isinstance(target.replacement, Replacement)
    for name, layer in layers_in(target.names[0], target.replacement if gains else target.module).items():
        yield _described(name, layer, gains)


def _described(name: str, layer: BlockSparseLinear, gained: bool) -> SparseLayer:
    experts, dtype = layer.spec.experts or 1, layer.spec.dtype
    rows, columns = layer.pattern.block_indices()
    (height, width), (bn, bk) = layer.spec.shape, layer.block_shape
    # Every expert has inputs of its own.
    columns = columns + rows // (height // bn // experts) * (width // bk)
    empty = empty_of((rows, columns), (height, experts * width), (bn, bk))
    count = height * width + (0 if layer.bias is None else layer.bias.numel())
    dense, sparse = Size(count, count * dtype.itemsize), _size([layer])
    sizes = (dense, sparse) if gained else (sparse, dense)
    stored = layer.policy, layer.nm, layer.storage, layer.storage_error
    return SparseLayer(
        name, (height, width), (bn, bk), layer.density, *stored, *sizes, *empty, layer.activations
    )


def _dense_parameters(names: Mapping[nn.Module, list[str]], whole: int) -> list[DenseParameter]:
    """Return the parameters of modules that are not block-sparse, largest first, shared ones once."""
    found: dict[nn.Parameter, DenseParameter] = {}
    for module, aliases in names.items():
        if isinstance(module, Replacement):
            continue
        for own, parameter in module.named_parameters(recurse=False):
            if not is_lazy(parameter) and parameter.dim() > 1:
                name = f"{aliases[0]}.{own}".removeprefix(".")
                shape, share = tuple(parameter.shape), parameter.numel() / max(1, whole)
                found.setdefault(parameter, DenseParameter(name, shape, share))
    return sorted(found.values(), key=lambda one: -one.share)


def dense_lines(parameters: Sequence[DenseParameter]) -> list[str]:
    """Return a table of parameters that stay dense; names that differ in numbers alone share a line."""
    groups: dict[tuple[str, tuple[int, ...]], list[DenseParameter]] = {}
    for one in parameters:
        groups.setdefault((without_numbers(one.name), one.shape), []).append(one)
    rows: list[tuple[str, ...]] = [("stays dense", "count", "shape", "of the model")]
    for (name, shape), own in sorted(groups.items(), key=lambda group: -sum(one.share for one in group[1])):
        share = f"{sum(one.share for one in own):.1%}"
        rows.append((own[0].name if len(own) == 1 else name, str(len(own)), "x".join(map(str, shape)), share))
    return aligned(rows) if len(rows) > 1 else []


def warn_of_empty(layers: Iterable[Any]) -> None:
    """Warn of layers with outputs that are their bias alone, or inputs that nothing reads."""
    texts = empty_texts(layers)
    if texts:
        warn_user(f"the blocks that were chosen leave {'; '.join(texts)}")

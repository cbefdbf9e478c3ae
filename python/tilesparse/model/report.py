"""Reports and warnings on the modules of a patched model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .._reports import aligned, empty_of, empty_texts, listed, warn_user, without_numbers
from ..nn.experts import BlockSparseExperts
from ..nn.linear import BlockSparseLinear
from ..nn.reference import ReferenceBlockSparseLinear
from ..storage.formats import storage_of
from .modules import Read, Replacement, Target


@dataclass(frozen=True)
class Size:
    """Number of parameters, and bytes of parameters and buffers.

    A shared tensor counts once. Uninitialised tensors of lazy layers do not count.
    """

    parameters: int
    bytes: int


@dataclass(frozen=True)
class PatchedLayer:
    """One replaced layer.

    `shape` is (out_features, in_features). `policy`, `nm`, `storage` and `activations` are those of the
    `BlockSparseLinear`; for a `ReferenceBlockSparseLinear`, whose weight is dense, `policy` is "reference".
    `error` is the layer's `storage_error`: how much 8 or 4 bits change the weights that are kept,
    not what pruning removes.
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


@dataclass(frozen=True)
class SkippedLayer:
    """A module that a pattern matched and that stays as it is: its name, its class and the reason."""

    name: str
    kind: str
    reason: str


@dataclass(frozen=True)
class DenseParameter:
    """A parameter of two or more dimensions that is not a block-sparse weight.

    `share` is its fraction of all parameters of the dense model.
    """

    name: str
    shape: tuple[int, ...]
    share: float


@dataclass(frozen=True)
class PatchReport:
    """Layers that `BlockSparseModelPatcher.patch_model` or `sparsify_` replaced, or would replace.

    ``str()`` makes a table of it.

    Attributes:
        layers: the replaced layers.
        skipped: modules that a pattern matches and that stay as they are, with the reason.
        unmatched: patterns that match no name of the model.
        before: size of the whole model.
        after: its size with the replaced layers.
        dense: all parameters of two or more dimensions that stay dense, including those of other modules.
    """

    layers: list[PatchedLayer]
    skipped: list[SkippedLayer]
    unmatched: list[str]
    before: Size
    after: Size
    dense: list[DenseParameter]

    def __str__(self) -> str:
        columns = ("shape", "block", "density", "storage", "error", "policy")
        rows: list[tuple[str, ...]] = [("layer", *columns, "parameters", "after", "bytes", "after")]
        for layer in self.layers:
            shape, block = (f"{out}x{in_}" for out, in_ in (layer.shape, layer.block_shape))
            error = f"{layer.error:.2g}" if layer.error else ""
            spec = (
                shape,
                block,
                f"{layer.density:.3f}",
                storage_of(layer.storage).describe(layer.nm, layer.activations),
                error,
                layer.policy,
            )
            rows.append((layer.name, *spec, *_sizes(layer.before, layer.after)))
        rows.append(("whole model", *[""] * len(columns), *_sizes(self.before, self.after)))
        lines = aligned(rows)
        lines += [f"skipped {text}" for text in by_reason(self.skipped)]
        lines += [f"no layer matches {regex!r}" for regex in self.unmatched]
        return "\n".join([*lines, *empty_texts(self.layers), *dense_lines(self.dense)])


@dataclass(frozen=True)
class FusedMLP:
    """One MLP that became a `BlockSparseMLP`.

    `activation` is None where PyTorch computes it. `storages` are those of its layers as tables name them:
    "int8 W8A8" with 8-bit activations.
    """

    name: str
    kind: str
    gated: bool
    activation: str | None
    storages: tuple[str, ...] = ()


@dataclass(frozen=True)
class FuseReport:
    """MLPs that `BlockSparseModelPatcher.fuse_mlps_` fused, or would fuse; ``str()`` makes a table of it.

    Attributes:
        mlps: the fused MLPs.
        skipped: modules with "MLP" in the name of their class that stay as they are, with the reason.
    """

    mlps: list[FusedMLP]
    skipped: list[SkippedLayer]

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("MLP", "class", "gated", "activation", "storage")]
        for mlp in self.mlps:
            function = "yes" if mlp.gated else "no", mlp.activation or "of PyTorch"
            rows.append((mlp.name, mlp.kind, *function, ", ".join(mlp.storages)))
        return "\n".join([*aligned(rows), *(f"skipped {text}" for text in by_reason(self.skipped))])


def fused_mlp(target: Target) -> FusedMLP:
    """Return the entry of a report for an MLP that becomes a `BlockSparseMLP`."""
    mlp: Any = target.replacement
    layers = [module for module in mlp.modules() if isinstance(module, BlockSparseLinear)]
    storages = (storage_of(layer.storage).describe(layer.nm, layer.activations) for layer in layers)
    what = type(target.module).__name__, mlp.gated, mlp.activation_name
    return FusedMLP(target.names[0], *what, tuple(dict.fromkeys(storages)))


def _size(modules: Iterable[nn.Module]) -> Size:
    parameters: set[torch.Tensor] = set()
    buffers: set[torch.Tensor] = set()
    for module in modules:
        parameters.update(tensor for tensor in module.parameters(recurse=False) if not is_lazy(tensor))
        buffers.update(tensor for tensor in module.buffers(recurse=False) if not is_lazy(tensor))
    return _size_of(parameters, buffers)


def _size_of(parameters: Collection[torch.Tensor], buffers: Collection[torch.Tensor] = ()) -> Size:
    sizes = (tensor.numel() * tensor.element_size() for tensor in {*parameters, *buffers})
    return Size(sum(parameter.numel() for parameter in parameters), sum(sizes))


def patch_report(
    names: Mapping[nn.Module, list[str]],
    targets: Sequence[Target],
    skipped: list[SkippedLayer],
    unmatched: list[str],
) -> PatchReport:
    """Return the report of a model with these replacements, put in already or not."""
    replaced = {target.module: target.replacement for target in targets}
    layers = [layer for target in targets for layer in _patched(target)]
    new = (
        one for module in names for one in (replaced[module].modules() if module in replaced else [module])
    )
    before, after = _size(names), _size(new)
    left = {module: aliases for module, aliases in names.items() if module not in replaced}
    dense = _dense_parameters(left, before.parameters)
    return PatchReport(layers, skipped, unmatched, before, after, dense)


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


def warn_of_reads(targets: Sequence[Target], reads: Mapping[nn.Module, Read]) -> None:
    """Warn of replaced layers whose weight another module reads in some of its branches."""
    readers: dict[str, list[str]] = {}
    for target in targets:
        if target.module in reads and reads[target.module].reader:
            readers.setdefault(reads[target.module].reader, []).append(target.names[0])
    for reader, layers in readers.items():
        warn_user(
            f"{reader} calls block-sparse layers, but also reads their weight itself in some branches, which "
            f"fail from now on (such as fused kernels for training): {listed(layers)}"
        )


def _patched(target: Target) -> Iterator[PatchedLayer]:
    """Yield the layers of a replacement: of experts their projections."""
    name, module, new = target.names[0], target.module, target.replacement
    assert isinstance(new, Replacement)
    if isinstance(new, BlockSparseExperts):
        for own, layer in new.projections().items():
            dense = [module._parameters.get(each) for each in (f"{own}_proj", f"{own}_proj_bias")]
            before = _size_of([tensor for tensor in dense if tensor is not None])
            yield _patched_layer(f"{name}.{own}", layer, before)
    else:
        yield _patched_layer(name, new, _size([module]))


def _patched_layer(
    name: str, new: BlockSparseLinear | ReferenceBlockSparseLinear, before: Size
) -> PatchedLayer:
    stored: tuple[str, tuple[int, int] | None, str] = "reference", None, "plain"
    shape, experts = (new.out_features, new.in_features), 1
    if isinstance(new, BlockSparseLinear):
        stored, experts = (new.policy, new.nm, new.storage), new.spec.experts or 1
    if isinstance(new, ReferenceBlockSparseLinear):
        rows, columns = new.block_rows, new.block_cols
    else:
        rows, columns = new.pattern.block_indices()
    # Every expert has inputs of its own.
    blocks_high, blocks_wide = shape[0] // new.block_shape[0], shape[1] // new.block_shape[1]
    columns = columns + rows // (blocks_high // experts) * blocks_wide
    empty = empty_of((rows, columns), (shape[0], experts * shape[1]), new.block_shape)
    activations = new.activations if isinstance(new, BlockSparseLinear) else None
    spec = shape, new.block_shape, new.density, *stored, new.storage_error
    return PatchedLayer(name, *spec, before, _size([new]), *empty, activations)


def _sizes(before: Size, after: Size) -> tuple[str, str, str, str]:
    numbers = (before.parameters, after.parameters, before.bytes, after.bytes)
    return tuple(f"{number:,}" for number in numbers)  # type: ignore[return-value]


def by_reason(skipped: Iterable[SkippedLayer]) -> Iterator[str]:
    """Yield a line for each reason: how many layers of which kinds, and why."""
    groups: dict[str, list[SkippedLayer]] = {}
    for layer in skipped:
        groups.setdefault(layer.reason, []).append(layer)
    for reason, group in groups.items():
        first, counts = group[0], Counter(layer.kind for layer in group)
        if len(group) == 1:
            text = f"{first.name or 'the model'} ({first.kind})"
        else:
            text = ", ".join(f"{count} {kind}" for kind, count in counts.items())
            text += f" ({first.name}, …)" if len(counts) == 1 else ""
        yield f"{text}: {reason}"

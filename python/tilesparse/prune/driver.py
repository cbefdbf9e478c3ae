"""Models pruned by calibration data: which blocks of each layer go, and the values of the others.

A layer computes y = W x. Without the blocks that a pattern leaves out, and with damping λ, the best weights Ŵ
minimise

    ‖X (W - Ŵ)ᵀ‖² / tokens + λ ‖W - Ŵ‖² = tr((W - Ŵ) H (W - Ŵ)ᵀ),   H = XᵀX / tokens + λ I.

The bn rows of a block row share their support S, so that one Cholesky factor of H_SS solves for all of them
exactly (`solve`). Which blocks to remove is found greedily (`eliminate`): with C = H⁻¹, removing the block
columns P of a block row costs exactly tr(W_P C_PP⁻¹ W_Pᵀ), and leaves

    W_S ← W_S - W_P C_PP⁻¹ C_PS,   C_SS ← C_SS - C_SP C_PP⁻¹ C_PS,

which is Optimal Brain Surgeon (Hassibi & Stork, "Second Order Derivatives for Network Pruning", NIPS 1992;
layer by layer as in Frantar & Alistarh, "Optimal Brain Compression", NeurIPS 2022) for blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._checks import check_choice, check_flag, check_shapes, empty_of, listed
from .._runtime.pattern_cache import blocks_of
from ..calibrate.calibration import (
    Calibration,
    Damped,
    Forward,
    Moments,
    check_model,
    collected,
    damped,
    exact_products,
    expanded,
    joined,
    projection_of,
    supports,
    tokens_of_projections,
    warn_of_few_tokens,
)
from ..calibrate.stream import caller, chosen_device, observing
from ..config import BlockSparseConfig
from ..errors import InvalidArgumentError
from ..model.match import (
    STAYS_DENSE,
    Filter,
    Target,
    block_shape_of,
    check_can_change,
    checked_config,
    chosen_layers,
    layers_changed,
    names_of_modules,
    naming_layer,
    reasons,
    reasons_against_experts,
    replace_modules,
)
from ..model.report import Report, patch_report, warn_of_empty
from ..nn.linear import BlockSparseLinear, dense_weight, is_conv1d
from ..pattern import BlockPattern, kept_blocks
from ..storage.formats import storage_of
from ..storage.quantize import two_of_four

# The share of the change of its inputs by pruning that a layer makes up for. All of it follows the
# calibration data too closely: on two models half was better than all, and all better than nothing.
CORRECTION = 0.5
METHODS = ("obs", "wanda", "magnitude")
GROUP = 0.12  # of a block row's remaining blocks that one round removes together
_CPU_WORKSPACE = 1 << 29  # bytes; fixed, so that results do not depend on what else runs


class Solution(NamedTuple):
    """Pruned layer, where the dense one is, with its errors and tokens as in `PrunedLayer`."""

    layer: BlockSparseLinear
    error_before: float
    error: float
    tokens: int


class Pruner:
    """Pruning of one layer, by any number of configs, with moments of its inputs on the device that computes.

    Where its inputs X differ from those in the dense model, X₀, the dense weight W₀ is replaced by the W
    that minimises ‖X Wᵀ - X̄ W₀ᵀ‖² / tokens + λ ‖W - W₀‖² with X̄ = X + `CORRECTION` · (X₀ - X), and so
    makes up for part of what was pruned before. Where the layer has a bias the mean input counts
    separately: the bias makes up for what the weight changes of the mean output, exactly.
    """

    def __init__(self, linear: Any, moments: Moments) -> None:
        self._linear, self.tokens = linear, moments.tokens()
        self._second, self._mean = moments.second(), moments.mean()
        self._device = self._second.device
        self._dense = dense_weight(linear).to(self._device)
        self._dense_bias = None if linear.bias is None else linear.bias.detach().to(self._device).double()
        self._weight, self._bias = self._dense.double(), self._dense_bias
        centred = self._bias is not None
        self._moment = damped(moments.second(centred=centred))
        across = moments.across(centred=centred)
        if across is not None:
            across.diagonal().add_(self._moment.added)
            across = torch.lerp(self._moment.matrix, across, CORRECTION)
            dense, self._weight = self._weight, self._weight @ across @ self._moment.inverse
            if self._bias is not None:
                mean = torch.lerp(self._mean, moments.dense_mean(), CORRECTION)
                self._bias = self._bias + dense @ mean - self._weight @ self._mean
        self._norm = float(((self._weight @ self._second) * self._weight).sum())  # ‖X Wᵀ‖² / tokens
        self._eliminations: dict[tuple[int, int], Elimination] = {}

    def prune(self, config: BlockSparseConfig, method: str, *, refit: bool = True) -> Solution:
        """Return the layer's solution."""
        pattern = self._chosen(config, method).to(self._device)
        weight, bias, kept = self._dense.double(), self._dense_bias, pattern.to_mask()
        if refit:
            weight = solve(self._weight, self._moment, pattern)
        if config.nm is not None:
            if refit:
                kept = choose_two_of_four(weight, self._moment, pattern)
                weight = solve_masked(self._weight, self._moment, kept)
            else:
                kept = two_of_four(weight.abs() * self._second.diagonal().sqrt()) & pattern.to_mask()
        weight = torch.where(kept, weight, 0)
        if refit and self._bias is not None:
            bias = self._bias + (self._weight - weight) @ self._mean
        before = self._error(torch.where(kept, self._dense, 0), self._dense_bias)
        layer = built(self._linear, config, pattern, weight, kept, bias)
        stored = layer.to_linear().weight.detach().to(self._device)
        shift = None if layer.bias is None else layer.bias.detach().to(self._device).double()
        return Solution(layer, before, self._error(stored, shift), self.tokens)

    def _chosen(self, config: BlockSparseConfig, method: str) -> BlockPattern:
        block_shape, density = block_shape_of(config), config.density
        if method == "obs":
            if block_shape not in self._eliminations:
                self._eliminations[block_shape] = eliminate(self._weight, self._moment, block_shape)
            elimination = self._eliminations[block_shape]
            return elimination.pattern(round(density * elimination.order.numel()), block_shape)
        norms = self._second.diagonal().sqrt() if method == "wanda" else None
        return BlockPattern.from_scores(
            scores_of(self._dense, block_shape, norms), block_shape=block_shape, density=density
        )

    def _error(self, weight: Tensor, bias: Tensor | None) -> float:
        """‖y - ŷ‖² / ‖X Wᵀ‖² on the calibration data; 0 where all of X Wᵀ is 0."""
        wrong = self._weight - weight.double()
        loss = ((wrong @ self._second) * wrong).sum()
        if self._bias is not None and bias is not None:
            shift = self._bias - bias
            loss += 2 * (shift * (wrong @ self._mean)).sum() + shift.square().sum()
        return max(0.0, float(loss) / self._norm) if self._norm > 0 else 0.0


def scores_of(weight: Tensor, block_shape: tuple[int, int], input_norms: Tensor | None = None) -> Tensor:
    """Return float32 scores [R, C] of blocks: Frobenius norms, or with norms of inputs Wanda's, Σ |W| · ‖X‖.

    (Sun et al., "A Simple and Effective Pruning Approach for Large Language Models", ICLR 2024.)
    """
    weight = weight.float()
    of_weights = weight.square() if input_norms is None else weight.abs() * input_norms.float()
    sums = blocks_of(of_weights, block_shape).sum((2, 3))
    return sums.sqrt() if input_norms is None else sums


@torch.inference_mode(False)  # the layer is trained later, whatever it is pruned in
@torch.no_grad()
def built(
    linear: Any,
    config: BlockSparseConfig,
    pattern: BlockPattern,
    weight: Tensor,
    kept: Tensor,
    bias: Tensor | None,
) -> BlockSparseLinear:
    """Return a layer like a dense one, of a weight [out, in] of which a mask, in the pattern, is kept."""
    place = dense_weight(linear).device
    layer = BlockSparseLinear.from_linear(linear, pattern=pattern.to(place), policy=config.policy)
    layer.weight.copy_(kept_blocks(weight.to(layer.weight.dtype), pattern))
    if layer.bias is not None and bias is not None:
        layer.bias.copy_(bias)
    if not bool(layer.weight.isfinite().all()):
        raise InvalidArgumentError(f"weights that the refit gives are not finite in {layer.weight.dtype}")
    if config.nm is not None:
        layer.set_nm(config.nm, scores=kept_blocks(kept, pattern).to(place, torch.float32))
    return layer.to_storage(config.storage, granularity=config.granularity, activations=config.activations)


class Elimination(NamedTuple):
    """Order in which each block row of a weight loses its blocks, and the cost of each after those before."""

    order: Tensor  # [R, C] int64: block columns
    costs: Tensor  # [R, C] float64, as additions to tr((W - Ŵ) H (W - Ŵ)ᵀ)

    def pattern(self, kept: int, block_shape: tuple[int, int]) -> BlockPattern:
        """Return the blocks that stay when all but so many are removed, where they cost least.

        Rows lose blocks in their order, each at the highest cost so far in its row.
        """
        rows, cols = self.order.shape
        height = self.costs.cummax(1).values.flatten()
        removed = height.sort(stable=True).indices[: rows * cols - kept]
        mask = torch.ones(rows, cols, dtype=torch.bool, device=removed.device)
        row = removed // cols
        mask[row, self.order[row, removed % cols]] = False
        return BlockPattern.from_block_mask(mask, block_shape=block_shape)


def eliminate(weight: Tensor, moment: Damped, block_shape: tuple[int, int]) -> Elimination:
    """Remove all blocks of a weight, those that cost least first; the result is on the host.

    All block rows lose as many blocks in a round, `GROUP` of what they have left. Costs within a round come
    from one factorisation, in float64 where float32 fails, and are exact: those of the first blocks of a row
    sum up to what a refit without them leaves.
    """
    (_, in_features), (bn, bk), (rows, cols) = check_shapes(weight.shape, block_shape)
    block_rows = weight.float().reshape(rows, bn, in_features)
    inverse = moment.inverse.float().contiguous()
    at_a_time = max(1, workspace(weight.device) // (3 * inverse.nbytes))
    with exact_products(weight.device):
        parts = [_eliminate(part, inverse, bk) for part in torch.split(block_rows, at_a_time)]
        for number, (_, costs) in enumerate(parts):
            if not bool(costs.isfinite().all()):
                part = block_rows[number * at_a_time :][:at_a_time]
                pairs = [_eliminate(row.double(), moment.inverse, bk) for row in torch.split(part, 1)]
                parts[number] = torch.cat([o for o, _ in pairs]), torch.cat([c for _, c in pairs])
    order, costs = (torch.cat([part[i].cpu() for part in parts]) for i in (0, 1))
    return Elimination(order.view(rows, cols), costs.double().view(rows, cols))


def _eliminate(weight: Tensor, inverse: Tensor, bk: int) -> tuple[Tensor, Tensor]:
    """Return (order, costs) [r, C] of block rows [r, bn, in_features]; NaN where a factorization fails."""
    rows, bn, in_features = weight.shape
    left = torch.arange(in_features // bk, device=weight.device).expand(rows, -1)
    covariance = inverse.expand(rows, -1, -1)
    order, costs = [], []
    while left.shape[1]:
        cols = left.shape[1]
        count = max(1, int(GROUP * cols))
        own = covariance.view(rows, cols, bk, cols, bk).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
        of_blocks = weight.view(rows, bn, cols, bk).permute(0, 2, 3, 1)  # [r, C, bk, bn]
        ranked = _whitened(own, of_blocks).square().sum((2, 3)).argsort(dim=1, stable=True)
        gone, stay = ranked[:, :count], ranked[:, count:].sort(1).values

        # Rows of C that go, and its columns in the order in which they do: L Lᵀ = C_PP factors them one by
        # one, so that block j of L⁻¹ W_Pᵀ is what the j-th block costs given those before.
        going = _take(covariance, gone, 1, bk)
        together, beside = _take(going, gone, 2, bk), _take(going, stay, 2, bk)
        removed, weight = _take(weight, gone, 2, bk), _take(weight, stay, 2, bk)
        solved = _whitened(together, torch.cat([removed.mT, beside], 2))
        lost, shared = solved[:, :, :bn], solved[:, :, bn:]
        costs.append(lost.reshape(rows, count, bk * bn).square().sum(2))
        order.append(left.gather(1, gone))
        weight = weight.baddbmm_(lost.mT, shared, alpha=-1)
        covariance = _take(_take(covariance, stay, 1, bk), stay, 2, bk).baddbmm_(shared.mT, shared, alpha=-1)
        left = left.gather(1, stay)
    return torch.cat(order, 1), torch.cat(costs, 1)


def _whitened(matrix: Tensor, right: Tensor) -> Tensor:
    """Return L⁻¹ B with L Lᵀ = A; NaN where A has no Cholesky factor. Nothing waits for a GPU."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    factor = factor.masked_fill((info != 0)[..., None, None], torch.nan)
    solved: Tensor = torch.linalg.solve_triangular(factor, right, upper=False)
    return solved


def _take(matrix: Tensor, blocks: Tensor, dim: int, bk: int) -> Tensor:
    """Select from each matrix in [r, m, n] its own blocks [r, c] of bk rows (dim 1) or columns (dim 2)."""
    rows, count = blocks.shape
    _, m, n = matrix.shape
    if dim == 1:
        index = blocks[:, :, None].expand(rows, count, bk * n)
        return matrix.view(rows, m // bk, bk * n).gather(1, index).view(rows, count * bk, n)
    index = blocks[:, None, :, None].expand(rows, m, count, bk)
    return matrix.view(rows, m, n // bk, bk).gather(2, index).view(rows, m, count * bk)


def solve(weight: Tensor, moment: Damped, pattern: BlockPattern) -> Tensor:
    """Return Ŵ [out_features, in_features] in float64, zero outside the pattern."""
    cross = weight.double() @ moment.matrix
    solution = torch.zeros_like(cross)
    for rows, columns, factor in _systems(moment, pattern):
        solution[rows, columns] = torch.cholesky_solve(cross[rows, columns].T, factor).T
    return solution


def choose_two_of_four(weight: Tensor, moment: Damped, pattern: BlockPattern) -> Tensor:
    """Return a mask [out_features, in_features] of 2:4 in the blocks that a weight was solved for.

    Weights are ranked by what the removal of each alone costs, w² / (H_SS⁻¹)_ii: Hassibi & Stork's saliency.
    """
    mask = torch.zeros(weight.shape, dtype=torch.bool, device=weight.device)
    for rows, columns, factor in _systems(moment, pattern):
        variance = torch.cholesky_inverse(factor).diagonal()
        mask[rows, columns] = two_of_four(weight[rows, columns].square() / variance)
    return mask


def solve_masked(weight: Tensor, moment: Damped, mask: Tensor) -> Tensor:
    """Return Ŵ [out_features, in_features] in float64, zero where a mask of elements says so.

    Every row has a factor of its own; rows with equally many weights are solved together.
    """
    cross = weight.double() @ moment.matrix
    solution = torch.zeros_like(cross)
    counts = mask.sum(1)
    for count in sorted(set(counts.tolist())):
        if count == 0:
            continue
        at_a_time = max(1, workspace(weight.device) // (3 * 8 * count * count))
        for rows in torch.split((counts == count).nonzero().flatten(), at_a_time):
            columns = mask[rows].nonzero()[:, 1].view(len(rows), count)
            factor = torch.linalg.cholesky(moment.matrix[columns[:, :, None], columns[:, None, :]])
            right = cross[rows[:, None], columns].unsqueeze(2)
            solution[rows[:, None], columns] = torch.cholesky_solve(right, factor).squeeze(2)
    return solution


def workspace(device: torch.device) -> int:
    """Return how many bytes to compute with at a time."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory) // 4
    return _CPU_WORKSPACE


def _systems(moment: Damped, pattern: BlockPattern) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield rows [r, 1], kept columns and the Cholesky factor of H of these, as `supports` does."""
    for rows, columns in supports(pattern, moment.matrix.device):
        yield rows, columns, torch.linalg.cholesky(moment.matrix[columns][:, columns])


@dataclass(frozen=True)
class PrunedLayer:
    """One pruned layer.

    Attributes:
        name: in the model.
        shape: (out_features, in_features).
        config: how it is stored. Its density is what was asked for.
        density: kept fraction of the blocks.
        error_before: ‖y - ŷ‖² / ‖X Wᵀ‖² of the kept blocks with their dense weights, where X are the
            inputs in the pruned model, and W is the dense weight that comes closest with them to the layer's
            output in the dense model. For the first layer that is its own.
        error: likewise, of the layer as it is now, also stored in 8 or 4 bits.
        tokens: of the calibration data that the layer has met.
        empty_rows: block rows without a block, whose outputs are the bias alone.
        empty_columns: block columns without a block, whose inputs nothing reads.
        projection: of an expert, the name of the projection of all of them, which are one row of the table.
    """

    name: str
    shape: tuple[int, int]
    config: BlockSparseConfig
    density: float
    error_before: float
    error: float
    tokens: int
    empty_rows: int
    empty_columns: int
    projection: str | None = None

    def row(self, *others: PrunedLayer) -> dict[str, str]:
        """Return the cells of a table, by column.

        The experts of a projection share them, as means.
        """
        layers = (self, *others)
        least, most = (function(layer.tokens for layer in layers) for function in (min, max))
        return {
            "layer": f"{self.projection}.* ({len(layers)})" if others else self.name,
            "shape": "{}x{}".format(*self.shape),
            "block": "{}x{}".format(*block_shape_of(self.config)),
            "density": f"{fmean(layer.density for layer in layers):.3f}",
            "storage": storage_of(self.config.storage).describe(self.config.nm, self.config.activations),
            "tokens": f"{least:,} to {most:,}" if others else f"{least:,}",
            "error before": f"{fmean(layer.error_before for layer in layers):.4f}",
            "error": f"{fmean(layer.error for layer in layers):.4f}",
        }


def prune_(
    model: nn.Module,
    config: BlockSparseConfig | Mapping[str, BlockSparseConfig | None],
    batches: Iterable[Any],
    *,
    layers: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    filter_fn: Filter | None = None,
    method: str = "obs",
    refit: bool = True,
    forward: Forward | None = None,
    device: torch.device | str | int | None = None,
) -> Report:
    """Prune the linear layers of a trained model in place, so that their outputs change least.

    Layers are pruned by their inputs on calibration data. A model with a stack of
    blocks, such as the layers of a transformer, is pruned block by block, and the inputs of each block come
    from the pruned blocks before it; only one block is on ``device`` at a time. Layers outside the stack come
    last. The model computes as in evaluation, and is changed only at the very end: after an error or an
    interruption it is as it was. Build optimizers afterwards: the layers have new parameters.

    Args:
        model: any module.
        config: how layers are stored; or a config for each name or regular expression of layers, of which
            the first that matches a layer counts, and None leaves it dense, as `allocate` gives them.
        batches: calibration data, read once and kept in memory. A mapping gives keyword arguments of the
            model, a tuple or list positional ones, anything else is its one argument. Tokens that a
            two-dimensional ``attention_mask`` of a mapping masks do not count.
        layers: names or regular expressions, as of `sparsify_`; None is every linear layer that `sparsify_`
            takes and that fits such blocks, and each expert of a mixture.
        exclude: likewise, of layers that stay dense.
        filter_fn: takes a linear layer and its name, and returns True to prune it.
        method: how blocks are chosen. "obs" by what their removal costs when the others make up for it, one
            after the other; "wanda" by the sum of |W| · ‖X‖; "magnitude" by their norm.
        refit: whether the kept weights make up for the others.
        forward: ``forward(model, batch)`` calls the model, for batches of other kinds.
        device: where blocks of the stack and all matrices are computed; None is that of the model.

    Warns:
        UserWarning: layers have met fewer tokens than they have inputs, or chosen blocks leave block rows or
            columns empty.

    Examples:
        >>> config = tilesparse.BlockSparseConfig(density=0.5, block_shape=64)
        >>> print(tilesparse.prune_(model, config, batches))
    """
    check_choice("method", method, METHODS)
    check_flag("refit", refit)
    check_model(model)
    if isinstance(config, Mapping):
        config = {
            name: None if own is None else checked_config(f"config[{name!r}]", own)
            for name, own in config.items()
        }
    else:
        config = checked_config("config", config)
    refused = reasons_against_experts(model)
    solutions: dict[str, Solution] = {}
    made: dict[str, Any] = {}
    stack = None
    with expanded(model) as experts:
        targets, skipped = chosen_layers(model, config, layers, exclude, filter_fn, refused=refused)
        if targets:
            data = collected(batches)
            check_can_change(model)
            with observing(model):
                calibration = Calibration(
                    model, data, caller(forward), [*targets], chosen_device(model, device), refit
                )

                def changed(names: Sequence[str]) -> dict[str, Tensor]:
                    return _parameters(model, {name: solutions[name].layer for name in names})

                for group in calibration.groups(changed):
                    for name, moments in calibration.moments(group):
                        with naming_layer(name):
                            pruner = Pruner(model.get_submodule(name), moments)
                            solutions[name] = pruner.prune(targets[name], method, refit=refit)
            sparse = {
                name: solution.layer.train(model.get_submodule(name).training)
                for name, solution in solutions.items()
            }
            made, stack = joined(experts, sparse, targets), calibration.stack
        elif not skipped or any(one.reason != STAYS_DENSE for one in skipped):  # not as planned
            raise InvalidArgumentError(f"model: no layer is left to prune; {reasons(skipped)}")
    names = names_of_modules(model)
    modules = {name: model.get_submodule(name) for name in made}
    replaced = [Target(names[modules[name]], modules[name], layer) for name, layer in made.items()]
    sizes = patch_report("prune_", names, replaced, [])
    if made:
        replace_modules(model, replaced)
        layers_changed(model)
    pruned = [
        PrunedLayer(
            name,
            solution.layer.spec.shape,
            targets[name],
            solution.layer.density,
            *solution[1:],
            *empty_of(
                solution.layer.pattern.block_indices(), solution.layer.spec.shape, solution.layer.block_shape
            ),
            projection_of(experts, name),
        )
        for name, solution in solutions.items()
    ]
    if made and (refit or method == "obs"):
        tokens = {layer.name: layer.tokens for layer in pruned}
        warn_of_few_tokens(model, tokens_of_projections(experts, tokens))
    if made:
        warn_of_empty(layer for layer in pruned if layer.projection is None)
    order = "all layers at once" if stack is None else f"block by block of {listed([stack])}"
    return replace(
        sizes,
        layers=pruned,
        skipped=skipped,
        notes=[f"{order}, by {method}"],
        facts={"method": method, "stack": stack},
    )


def _parameters(model: nn.Module, layers: Mapping[str, BlockSparseLinear]) -> dict[str, Tensor]:
    """Return the parameters with which dense layers compute as pruned ones, by their names in the model."""
    found: dict[str, Tensor] = {}
    for name, layer in layers.items():
        weight = layer.to_linear().weight.detach()
        found[f"{name}.weight"] = weight.T if is_conv1d(model.get_submodule(name)) else weight
        if layer.bias is not None:
            found[f"{name}.bias"] = layer.bias.detach()
    return found

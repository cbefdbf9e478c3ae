"""Pruning of one layer by the moments of its inputs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..config import BlockSparseConfig
from ..errors import InvalidArgumentError
from ..matrix import BlockSparseMatrix
from ..nn.convert import dense_weight, is_conv1d
from ..nn.linear import BlockSparseLinear
from ..pattern.block_pattern import BlockPattern
from ..storage.values import two_of_four
from . import scores
from .compensation import Elimination, choose_two_of_four, damped, eliminate, solve, solve_masked
from .configs import block_shape_of
from .moments import Moments

GRADIENT_METHODS = {"taylor": scores.taylor, "movement": scores.movement}
# Of what pruning has changed of a layer's inputs, how much the layer makes up for. All of it follows the
# calibration data too closely: on two models half was better than all, and all better than nothing.
CORRECTION = 0.5
METHODS = ("obs", "wanda", "magnitude", *GRADIENT_METHODS)


class Solution(NamedTuple):
    """Pruned layer: tensors on the host, and the error of its output.

    `error` is that of the layer as it is stored, `error_before_refit` that of the same blocks with the dense
    weights, both relative, see `ErrorProfiles`. `tokens` is how many were counted.
    """

    pattern: BlockPattern
    values: Tensor  # [nnz, bn, bk]
    mask: Tensor | None  # likewise, of 2:4
    bias: Tensor | None
    error_before_refit: float
    error: float
    damping: float
    tokens: int


class Pruner:
    """Pruning of one layer, by any number of configs.

    Where its inputs X differ from those in the dense model, X₀, the dense weight W₀ is replaced by the W that
    minimises ‖X Wᵀ - X̄ W₀ᵀ‖² / tokens + λ ‖W - W₀‖² with X̄ = X + `CORRECTION` · (X₀ - X), and so makes up for
    part of what was pruned before.

    Where the layer has a bias the mean input counts separately: the bias makes up for what the weight changes
    of the mean output, exactly.

    Args:
        linear: the dense layer; only read.
        moments: of its inputs, on the device that computes.
        damping: see `compensation.damped`.
    """

    def __init__(self, linear: Any, moments: Moments, damping: float) -> None:
        self._linear, self.tokens = linear, moments.tokens()
        self._second, self._mean = moments.second(), moments.mean()
        self._device = self._second.device
        self._dense = dense_weight(linear).to(self._device)
        self._dense_bias = None if linear.bias is None else linear.bias.detach().to(self._device).double()
        self._weight, self._bias = self._dense.double(), self._dense_bias
        centred = self._bias is not None
        self._moment = damped(moments.second(centred=centred), damping)
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

    def prune(
        self,
        config: BlockSparseConfig,
        method: str,
        *,
        refit: bool = True,
        pattern: BlockPattern | None = None,
        block_scores: Tensor | None = None,
    ) -> tuple[Solution, BlockSparseLinear]:
        """Prune the layer; return the solution, and the layer itself on the device of the dense one.

        Args:
            config: how it is to be stored.
            method: one of `METHODS`, that chooses blocks.
            refit: whether what is kept makes up for what is not.
            pattern: the blocks, if they are known already.
            block_scores: [R, C] of a method that takes gradients.
        """
        if pattern is None:
            pattern = self._chosen(config, method, block_scores)
        pattern = pattern.to(self._device)
        weight, bias, kept = self._dense.double(), self._dense_bias, pattern.to_mask()
        if refit:
            weight = solve(self._weight, self._moment, pattern)
        if config.nm is not None:
            kept = self._two_of_four(weight, pattern, refit)
            weight = solve_masked(self._weight, self._moment, kept) if refit else weight
        weight = torch.where(kept, weight, 0)
        if refit and self._bias is not None:
            bias = self._bias + (self._weight - weight) @ self._mean
        dtype = self._dense.dtype
        values = BlockSparseMatrix.from_dense(weight.to(dtype), pattern).values
        mask = None
        if config.nm is not None:
            mask = BlockSparseMatrix.from_dense(kept.float(), pattern).values.bool()
        before = self._error(torch.where(kept, self._dense, 0), self._dense_bias)
        solution = Solution(
            pattern.to("cpu"),
            values.cpu(),
            None if mask is None else mask.cpu(),
            None if bias is None else bias.to("cpu", dtype),
            before,
            0.0,
            self._moment.damping,
            self.tokens,
        )
        layer = built(self._linear, solution, config)
        stored = layer.to_linear().weight.detach().to(self._device)
        shift = None if layer.bias is None else layer.bias.detach().to(self._device).double()
        return solution._replace(error=self._error(stored, shift)), layer

    def _chosen(self, config: BlockSparseConfig, method: str, block_scores: Tensor | None) -> BlockPattern:
        block_shape, density = block_shape_of(config), config.density
        if method == "obs":
            if block_shape not in self._eliminations:
                self._eliminations[block_shape] = eliminate(self._weight, self._moment, block_shape)
            elimination = self._eliminations[block_shape]
            return elimination.pattern(round(density * elimination.order.numel()), block_shape)
        if method == "magnitude":
            block_scores = scores.magnitude(self._dense, block_shape)
        elif method == "wanda":
            block_scores = scores.wanda(self._dense, self._second.diagonal().sqrt(), block_shape)
        assert block_scores is not None
        return BlockPattern.from_scores(block_scores, block_shape=block_shape, density=density)

    def _two_of_four(self, weight: Tensor, pattern: BlockPattern, refit: bool) -> Tensor:
        if refit:
            return choose_two_of_four(weight, self._moment, pattern)
        return two_of_four(weight.abs() * self._second.diagonal().sqrt()) & pattern.to_mask()

    def _error(self, weight: Tensor, bias: Tensor | None) -> float:
        """‖y - ŷ‖² / ‖X Wᵀ‖² on the calibration data; 0 where all of X Wᵀ is 0."""
        wrong = self._weight - weight.double()
        loss = ((wrong @ self._second) * wrong).sum()
        if self._bias is not None and bias is not None:
            shift = self._bias - bias
            loss += 2 * (shift * (wrong @ self._mean)).sum() + shift.square().sum()
        return max(0.0, float(loss) / self._norm) if self._norm > 0 else 0.0


@torch.inference_mode(False)  # the layer is trained later, whatever it is pruned in
@torch.no_grad()
def built(linear: nn.Module, solution: Solution, config: BlockSparseConfig) -> BlockSparseLinear:
    """Return the layer that a solution describes, with dtype, device and mode of the dense one."""
    layer = BlockSparseLinear.from_linear(linear, pattern=solution.pattern, policy=config.policy)
    layer.weight.copy_(solution.values)
    if layer.bias is not None and solution.bias is not None:
        layer.bias.copy_(solution.bias)
    if not bool(layer.weight.isfinite().all()):
        raise InvalidArgumentError(f"weights that the refit gives are not finite in {layer.weight.dtype}")
    if solution.mask is not None:
        layer.set_nm(config.nm, scores=solution.mask.to(layer.weight.device, torch.float32))
    return layer.to_storage(config.storage, per=config.scales, activations=config.activations)


def dense_parameters(name: str, linear: nn.Module, layer: BlockSparseLinear) -> dict[str, Tensor]:
    """Return the parameters with which a dense layer computes as the sparse one, by names in the model."""
    weight = layer.to_linear().weight.detach()
    own = {f"{name}.weight": weight.T if is_conv1d(linear) else weight}
    if layer.bias is not None:
        own[f"{name}.bias"] = layer.bias.detach()
    return own

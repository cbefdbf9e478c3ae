"""A config for each layer of a model, within a budget of bytes or milliseconds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from .._checks import aligned, as_number, items_of, shown
from ..calibrate.calibration import (
    Calibration,
    Forward,
    check_model,
    collected,
    expanded,
    tokens_of_projections,
    warn_of_few_tokens,
)
from ..calibrate.stream import caller, chosen_device, observing
from ..config import BlockSparseConfig, LayerSpec, as_nm
from ..errors import InvalidArgumentError, InvalidTypeError
from ..model.match import (
    SkippedLayer,
    block_shape_of,
    checked_config,
    checked_configs,
    chosen_layers,
    described,
    kept_blocks,
    naming_layer,
    reasons,
    shape_of,
)
from ..nn.linear import dense_weight, is_conv1d
from ..storage.formats import forms_of
from ..tuning.advise import AdviceReport
from .driver import Pruner

INDEX_BYTES = 4  # of an entry of a pattern's tensors


@dataclass(frozen=True)
class AllocatedLayer:
    """Config of a layer, or None for dense; its error, and its cost beside that of the dense layer."""

    name: str
    shape: tuple[int, int]
    config: BlockSparseConfig | None
    error: float
    cost: float
    dense_cost: float


class Allocation(dict[str, "BlockSparseConfig | None"]):
    """Result of `allocate`: configs by the names of layers; ``str()`` makes a table of it.

    Attributes:
        layers: a record of each.
        unit: of costs, "bytes" or "ms".
        budget: what costs were to sum up to at most.
        error: the sum of the layers' errors.
        cost: the sum of the layers' costs.
    """

    def __init__(self, layers: list[AllocatedLayer], unit: str, budget: float) -> None:
        super().__init__({layer.name: layer.config for layer in layers})
        self.layers, self.unit, self.budget = layers, unit, budget
        self.error = sum(layer.error for layer in layers)
        self.cost = sum(layer.cost for layer in layers)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("layer", "shape", "density", "block", "storage", "error", self.unit, "dense")
        ]
        for layer in self.layers:
            shape = f"{layer.shape[0]}x{layer.shape[1]}"
            costs = self._number(layer.cost), self._number(layer.dense_cost)
            rows.append((layer.name, shape, *described(layer.config), f"{layer.error:.4g}", *costs))
        dense = self._number(sum(layer.dense_cost for layer in self.layers))
        rows.append(("sum", "", "", "", "", f"{self.error:.4g}", self._number(self.cost), dense))
        return "\n".join([*aligned(rows), f"budget {self._number(self.budget)} {self.unit}"])

    def _number(self, cost: float) -> str:
        return f"{cost:.4f}" if self.unit == "ms" else f"{cost:,.0f}"


def allocate(
    profiles: ErrorProfiles,
    model: nn.Module,
    *,
    bytes: int | None = None,
    milliseconds: float | None = None,
    report: AdviceReport | None = None,
) -> Allocation:
    """Choose a config for every layer, or None for dense, with the least sum of errors within a budget.

    It is a multiple-choice knapsack, solved to a relative gap of 1e-6 by SciPy, which has to be installed.
    Errors of different layers are added up although they are relative ones: that what a layer gets wrong
    matters alike in all layers is an assumption.

    Args:
        profiles: from `measure_errors`: by layer and config. Layers not among them are no part of any sum.
        model: has these layers, dense; shapes and dtypes are read, so that it may be on the meta device.
        bytes: of what the layers may store: weights, masks, metadata, scales and patterns. Biases stay as
            they are and do not count.
        milliseconds: in place of bytes, for one call of each layer, as ``report`` has measured it.
        report: from `tilesparse.advise`, with ``milliseconds``.
    """
    if (bytes is None) == (milliseconds is None):
        raise InvalidArgumentError("exactly one of bytes and milliseconds must be given")
    argument, given = ("bytes", bytes) if milliseconds is None else ("milliseconds", milliseconds)
    if not 0 <= as_number(given) < math.inf:
        raise InvalidArgumentError(f"{argument} must be a number of at least 0, got {given!r}")
    if (report is None) != (milliseconds is None) or not isinstance(report, AdviceReport | None):
        raise InvalidArgumentError(
            f"report must be an AdviceReport with milliseconds, else None, got {type(report).__name__}"
        )
    if not isinstance(profiles, Mapping):
        raise InvalidTypeError(f"profiles must be a mapping, as of measure_errors, got {shown(profiles)}")
    budget = as_number(given)
    with expanded(model):
        modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
    options: list[list[BlockSparseConfig | None]] = []
    costs: list[list[float]] = []
    errors: list[list[float]] = []
    for name, profile in profiles.items():
        layer: Any = modules.get(name)
        if not (isinstance(layer, nn.Linear) or is_conv1d(layer)):
            raise InvalidArgumentError(f"profiles must name dense linear layers, got {name!r}")
        options.append([None, *checked_configs("profiles", name, profile, shape_of(layer))])
        if report is None:
            costs.append([float(_bytes_of(layer, config)) for config in options[-1]])
        else:
            costs.append([report.milliseconds(name, config) for config in options[-1]])
        errors.append([0.0, *map(as_number, profile.values())])
        if not all(0 <= error < math.inf for error in errors[-1]):
            raise InvalidArgumentError(f"profiles: errors of layer {name!r} must be finite and at least 0")
    if not costs:
        raise InvalidArgumentError("profiles must have at least one layer, got none")
    least = sum(map(min, costs))
    if budget < least:
        rounded = math.ceil(least * 1e6) / 1e6
        raise InvalidArgumentError(
            f"{argument} must be at least {rounded:.12g}, the sum of the cheapest configs, got {budget}"
        )
    records = zip(profiles, solve(costs, errors, budget), options, errors, costs, strict=True)
    layers = [
        AllocatedLayer(name, shape_of(modules[name]), configs[item], error[item], cost[item], cost[0])
        for name, item, configs, error, cost in records
    ]
    return Allocation(layers, "bytes" if report is None else "ms", budget)


def _bytes_of(layer: Any, config: BlockSparseConfig | None) -> int:
    """Return how many bytes a layer stores, but for its bias."""
    weight = dense_weight(layer)
    if config is None:
        return weight.nbytes
    kept = kept_blocks(config, shape_of(layer))
    block_shape, nm = block_shape_of(config), as_nm(config.nm)
    spec = LayerSpec(shape=shape_of(layer), block_shape=block_shape, nnz=kept, dtype=weight.dtype, nm=nm)
    forms = forms_of(spec.with_storage(config.storage, config.granularity, config.activations))
    stored = sum(math.prod(shape) * dtype.itemsize for shape, dtype in forms.values())
    return stored + INDEX_BYTES * (weight.shape[0] // block_shape[0] + 1 + 2 * kept)


GAP = 1e-6  # of the error
ROUNDING = 1e-12  # of the budget, for sums of costs in another order


def solve(costs: Sequence[Sequence[float]], errors: Sequence[Sequence[float]], budget: float) -> list[int]:
    """Return the item of each group, with the least sum of errors whose costs sum up to at most the budget.

    Costs and errors are finite and at least 0; the cheapest items fit into the budget.
    """
    try:
        from scipy import optimize, sparse
    except ImportError as missing:
        raise ImportError(f"allocate needs SciPy (pip install scipy): {missing}") from missing
    sizes = [len(of) for of in costs]
    cost, error = (np.concatenate([np.asarray(of, float) for of in parts]) for parts in (costs, errors))
    groups = np.repeat(np.arange(len(sizes)), sizes)
    one_of_each = sparse.csr_matrix((np.ones(len(cost)), (groups, np.arange(len(cost)))))
    starts = np.cumsum([0, *sizes[:-1]])
    limit, shrunk = budget * (1 + ROUNDING), 0.0
    while True:
        found = optimize.milp(
            1e4 * error / (error.max() or 1.0),  # HiGHS also stops at an absolute gap of 1e-6
            integrality=np.ones(len(cost)),
            bounds=optimize.Bounds(0, 1),
            constraints=[
                optimize.LinearConstraint(one_of_each, 1, 1),
                optimize.LinearConstraint(cost[None], -np.inf, limit - shrunk),
            ],
            options={"mip_rel_gap": GAP},
        )
        if found.x is None:  # only the cheapest items fit into what its tolerance leaves of the budget
            return [of.index(min(of)) for of in costs]
        items = [int(part.argmax()) for part in np.split(found.x, starts[1:])]
        excess = float(cost[starts + items].sum()) - limit
        if excess <= 0:  # which its tolerance of constraints leaves open
            return items
        shrunk = max(10 * shrunk, excess)


# By layer and config: ‖X (W - Ŵ)ᵀ‖² / ‖X Wᵀ‖² on the calibration data, in Frobenius norms; 0 is dense.
ErrorProfiles: TypeAlias = Mapping[str, Mapping[BlockSparseConfig, float]]


def measure_errors(
    model: nn.Module,
    batches: Iterable[Any],
    configs: Sequence[BlockSparseConfig],
    *,
    layers: str | Sequence[str] | None = None,
    forward: Forward | None = None,
    device: torch.device | str | int | None = None,
) -> ErrorProfiles:
    """Measure the error of each layer's output by each config, in the dense model; nothing changes.

    Layers are pruned by "obs", by the inputs of the dense model, gathered block by block as in `prune_`. The
    order in which blocks go is found once for each block shape, and serves all densities.

    Args:
        model: dense; only read.
        batches: calibration data, as of `prune_`; so are ``layers``, ``forward`` and ``device``.
        configs: ways to store a layer. A layer that cannot be cut into some blocks, or of which a density
            rounds to no block, has no entries for these.
        layers: names or regular expressions, or None.
        forward: calls the model with a batch.
        device: where blocks of the stack and all matrices are computed.

    Returns:
        The error profile of each layer: by config ‖y - ŷ‖² / ‖X Wᵀ‖², of the layer as it would be stored.
    """
    checked = [checked_config("configs", config) for config in items_of("configs", configs, "configs")]
    if not checked:
        raise InvalidArgumentError("configs must have at least one config, got none")
    check_model(model)
    with expanded(model) as experts:
        fitting: dict[str, list[BlockSparseConfig]] = {}
        others: list[SkippedLayer] = []
        for config in dict.fromkeys(checked):
            targets, skipped = chosen_layers(model, config, layers, strict=False, cut=False)
            others += skipped
            for name in targets:
                fitting.setdefault(name, []).append(config)
        if not fitting:
            raise InvalidArgumentError(f"model: no layer is left to measure; {reasons(others)}")
        order = [name for name, _ in model.named_modules() if name in fitting]
        data, device = collected(batches), chosen_device(model, device)
        profiles: dict[str, dict[BlockSparseConfig, float]] = {}
        tokens: dict[str, int] = {}
        with observing(model):
            calibration = Calibration(model, data, caller(forward), order, device)
            for group in calibration.groups():
                for name, moments in calibration.moments(group):
                    with naming_layer(name):
                        pruner = Pruner(model.get_submodule(name), moments)
                    tokens[name] = pruner.tokens
                    profiles[name] = {config: pruner.prune(config, "obs").error for config in fitting[name]}
        warn_of_few_tokens(model, tokens_of_projections(experts, tokens))
        return profiles

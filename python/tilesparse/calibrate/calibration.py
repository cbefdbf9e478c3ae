"""Calibration data on their way through a model, and the moments of the inputs that its layers meet.

Each expert's inputs are the tokens that are routed to it, which may be few. The second moment of expert e is
therefore drawn towards that of all experts of its layer, with n_e and n tokens and sums S_e and S of XᵀX,

    M_e = (S_e + τ S / n) / (n_e + τ),   τ = in_features,

and likewise its mean: as if it had met τ more tokens like those of all experts. This is the shrinkage towards
the pooled covariance of Friedman, "Regularized Discriminant Analysis" (JASA 1989), with a weight that falls
with n_e. An expert is fitted to its output for the inputs that it has in the pruned model: which tokens it
had in the dense one need not be the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from .._checks import MOST, Progress, check_block_shape, check_module, listed, warn_user
from .._runtime.torch_private import exact_float32
from ..config import BlockSparseConfig
from ..errors import InvalidArgumentError
from ..model.match import names_of_modules, set_submodule
from ..nn.experts import (
    NORM,
    ExpertsLinear,
    Projections,
    dense_weight_of,
    experts_like,
    has_norm,
    projections_of,
    reason_not_known,
)
from ..nn.linear import BlockSparseLinear, dense_weight
from ..pattern import BlockPattern
from .stream import (
    ForwardEnded,
    Input,
    Stream,
    check_batches,
    checked_batch,
    device_of,
    listening,
    mask_of,
    moved,
    stacks,
    swapped,
    visiting,
)

DAMPING = 0.01  # of the mean of the diagonal of XᵀX / tokens
_STRONGER = 10.0  # what damping is multiplied by where it was too weak
_MOST_DAMPING = 1e6


class Moments:
    """Sums over the tokens that a layer has met, in float64, of its inputs X and of X₀ in the dense model.

    Products XᵀX, and with ``compare`` X₀ᵀX, are computed in float32, or float64 for inputs in that, of inputs
    less ``origin`` [features], else their mean in the first call: nothing is lost where these vary little.
    """

    def __init__(
        self, features: int, device: torch.device, compare: bool = False, *, origin: Tensor | None = None
    ) -> None:
        options: Any = {"dtype": torch.float64, "device": device}
        self._products = torch.zeros(features, features, **options)
        self._across = torch.zeros(features, features, **options) if compare else None
        self._sums, self._dense_sums = torch.zeros(2, features, **options)
        self._tokens, self._prior = torch.zeros((), **options), torch.zeros((), **options)
        self.origin = origin  # that is subtracted, once there were any inputs
        self._finite: dict[int, Tensor] = {}

    def add(self, x: Tensor, dense: Tensor | None, number: int, keep: Tensor | None = None) -> None:
        """Add the inputs x [..., features] of one call in a batch; nothing waits for a GPU.

        ``dense`` is what x is in the dense model, and ``keep`` are bools [...], False for tokens that do not
        count; those of other shapes are for other tokens, and are passed over.
        """
        if dense is None or dense.shape != x.shape:
            dense = x
        if keep is None or keep.shape != x.shape[:-1]:
            keep = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
        keep = keep.to(self._sums.device).reshape(-1, 1)
        if self.origin is None:
            rows = self._rows(x, keep, torch.zeros_like(self._sums))
            mean = rows.sum(0, dtype=torch.float64) / keep.sum().clamp(min=1)
            self.origin = mean.to(rows.dtype).double()
        self._tokens += keep.sum()
        x = self._rows(x, keep, self.origin)
        sums = x.sum(0, dtype=torch.float64)
        with exact_products(x.device):
            self._products += x.T @ x
            if self._across is not None:
                dense = self._rows(dense, keep, self.origin)
                self._across += dense.T @ x
                self._dense_sums += dense.sum(0, dtype=torch.float64)
        self._sums += sums
        self._finite[number] = self._finite.get(number, True) & sums.isfinite().all()

    def _rows(self, x: Tensor, keep: Tensor, origin: Tensor) -> Tensor:
        """Return [tokens, features] less the origin; zeros for tokens that do not count."""
        x = x.detach().to(self._sums.device, torch.promote_types(x.dtype, torch.float32))
        return torch.where(keep, x.reshape(-1, x.shape[-1]) - origin.to(x.dtype), 0)

    @property
    def _weight(self) -> Tensor:
        """Number that sums are divided by: tokens, and those that `drawn_to` stands for."""
        return self._tokens + self._prior

    def weight(self) -> float:
        """Return how many tokens moments are of, those of `drawn_to` included; waits for the GPU."""
        return float(self._weight)

    def drawn_to(self, others: Moments, strength: float) -> Moments:
        """Return these moments as if there were ``strength`` more tokens like the others, of one origin."""
        other, share = copy(self), strength / others._tokens.clamp(min=1)
        other._products = self._products + share * others._products
        other._sums = self._sums + share * others._sums
        # As if there were none where all tokens are masked.
        other.origin, other._prior = others.origin, strength * others._tokens.clamp(max=1)
        other._finite = {**others._finite}
        return other

    def tokens(self) -> int:
        """Return how many tokens were counted; waits for the GPU, as `not_finite` does."""
        return int(self._tokens)

    def not_finite(self) -> int | None:
        """Return the first batch with NaN or infinities, or None."""
        if not self._finite:
            return None
        good = torch.stack(list(self._finite.values())).tolist()
        return next((number for number, fine in zip(self._finite, good, strict=True) if not fine), None)

    def second(self, *, centred: bool = False) -> Tensor:
        """Return XᵀX / tokens [features, features], of X less its mean if centred."""
        off = self._sums / self._weight
        found = (self._products / self._weight).addr_(off, off, alpha=-1)
        return found if centred else found.addr_(self.mean(), self.mean())

    def across(self, *, centred: bool = False) -> Tensor | None:
        """Return X₀ᵀX / tokens [features, features], less the means if centred; None where X₀ = X."""
        if self._across is None:
            return None
        dense, off = self._dense_sums / self._weight, self._sums / self._weight
        found = (self._across / self._weight).addr_(dense, off, alpha=-1)
        return found if centred else found.addr_(self.dense_mean(), self.mean())

    def mean(self) -> Tensor:
        """Return the mean of X [features]."""
        off: Tensor = self._sums / self._weight
        return off if self.origin is None else off + self.origin

    def dense_mean(self) -> Tensor:
        """Return the mean of X₀ [features], where there are any."""
        off: Tensor = self._dense_sums / self._weight
        return off if self.origin is None else off + self.origin

    def reordered(self, order: Tensor) -> Moments:
        """Return the moments of the same inputs with features in another order: order[i] becomes i."""
        other, order = copy(self), order.to(self._sums.device)
        other._products, other._sums = self._products[order][:, order], self._sums[order]
        other._across = None if self._across is None else self._across[order][:, order]
        other._dense_sums = self._dense_sums[order]
        other.origin = None if self.origin is None else self.origin[order]
        return other


class Damped(NamedTuple):
    """H = XᵀX / tokens + λ I, which is positive definite."""

    matrix: Tensor  # [in_features, in_features] float64
    inverse: Tensor  # likewise
    added: float  # λ
    damping: float  # λ over the mean of the diagonal


def damped(second_moment: Tensor, damping: float = DAMPING) -> Damped:
    """Return XᵀX / tokens with ``damping`` times the mean of its diagonal added to that, and the inverse.

    Where that is too weak for a Cholesky factor in float64, ten times as much is tried, and so on. If the
    mean is zero nothing is known of the inputs: the matrix becomes the identity.
    """
    moment = second_moment.double()
    mean = float(moment.diagonal().mean())
    if not 0 <= mean < float("inf"):
        raise InvalidArgumentError(
            f"second_moment must be finite with a positive diagonal, got a mean of {mean}"
        )
    if mean == 0:
        mean, damping = 1.0, 1.0
    identity = torch.eye(len(moment), dtype=torch.float64, device=moment.device)
    while True:
        matrix = torch.add(moment, identity, alpha=damping * mean)
        factor, info = torch.linalg.cholesky_ex(matrix)
        if int(info) == 0:
            inverse = torch.cholesky_inverse(factor).contiguous()
            if bool(inverse.isfinite().all()):
                return Damped(matrix, inverse, damping * mean, damping)
        damping = max(damping * _STRONGER, 1e-9)
        if damping > _MOST_DAMPING:
            raise InvalidArgumentError("second_moment must be positive semidefinite")


def supports(pattern: BlockPattern, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows [r, 1] of a weight and the columns [s] that they keep, rows that keep the same together."""
    bn, bk = pattern.block_shape
    masks, own = torch.unique(pattern.to_block_mask().cpu(), dim=0, return_inverse=True)
    for number, kept in enumerate(masks):
        rows = ((own == number).nonzero() * bn + torch.arange(bn, device="cpu")).view(-1, 1)
        columns = (kept.nonzero() * bk + torch.arange(bk, device="cpu")).flatten()
        if len(columns):
            yield rows.to(device), columns.to(device)


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Compute float32 products in full precision, whatever settings and autocast say."""
    with exact_float32(), torch.autocast(device.type, enabled=False):
        yield


class _Projection(nn.Module):
    """The layers of a projection by their numbers; not a ModuleList, which could be a stack of blocks."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        for number, layer in enumerate(layers):
            self.add_module(str(number), layer)
        self.in_features, self.bias = layers[0].in_features, True if layers[0].bias is not None else None


class LinearExperts(nn.Module):
    """Dense experts as `torch.nn.Linear` of the same memory.

    ``tokens`` are the rows of ``hidden_states`` that the expert at work gets, of ``rows``, while the layer
    runs.
    """

    dense: Any
    tokens: Tensor | None = None
    rows = 0

    def __init__(self, dense: Any, projections: Projections) -> None:
        super().__init__()
        object.__setattr__(self, "dense", dense)  # not a part of the model
        self.names = tuple(projections.layers().values())
        for name, own in projections.layers().items():
            weight, bias = dense.get_parameter(name), dense._parameters.get(f"{name}_bias")
            whole = dense_weight_of(dense, name)
            parts = whole.view(len(weight), -1, whole.shape[1])
            biases = [None] * len(weight) if bias is None else bias.detach()
            layers = [_linear(*pair, weight.requires_grad) for pair in zip(parts, biases, strict=True)]
            self.add_module(own, _Projection(layers))
        for name, child in dense.named_children():
            self.add_module(name, child)
        self.train(dense.training)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute what the dense experts do, one after the other."""
        result, self.rows = torch.zeros_like(hidden_states), len(hidden_states)
        up, down = (self.get_submodule(name) for name in self.names)
        for number in sorted({*top_k_index.flatten().tolist()}):
            self.tokens, choice = (top_k_index == number).nonzero(as_tuple=True)
            y = up.get_submodule(str(number))(hidden_states[self.tokens])
            y = self.dense._apply_gate(y) if self.dense.has_gate else self.dense.act_fn(y)
            y = down.get_submodule(str(number))(y)
            if has_norm(self.dense):
                y = self.get_submodule(NORM)(y)
            y = y * top_k_weights[self.tokens, choice, None]
            result = result.index_add(0, self.tokens, y.to(result.dtype))
        self.tokens = None
        return result


def _linear(weight: Tensor, bias: Tensor | None, trained: bool) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, trained)
    if bias is not None:
        layer.bias = nn.Parameter(bias, trained)
    return layer


@contextmanager
def expanded(model: nn.Module) -> Iterator[dict[str, LinearExperts]]:
    """Have linear layers in the places of all experts that are known; yield them by name."""
    found: dict[str, LinearExperts] = {}
    places = []
    for module, aliases in names_of_modules(model).items():
        projections = projections_of(module)
        if projections is not None and module is not model and reason_not_known(module) is None:
            found[aliases[0]] = LinearExperts(module, projections)
            places.append((aliases, module, found[aliases[0]]))
    try:
        for aliases, _, layers in places:
            for name in aliases:
                set_submodule(model, name, layers)
        yield found
    finally:
        for aliases, module, _ in places:
            for name in aliases:
                set_submodule(model, name, module)


def projection_of(experts: Container[str], name: str) -> str | None:
    """Return the name of the projection of an expert's layer, which all experts share; None for others."""
    projection = name.rpartition(".")[0]
    return projection if projection.rpartition(".")[0] in experts else None


def tokens_of_projections(experts: Container[str], tokens: Mapping[str, int]) -> dict[str, int]:
    """Return how many tokens layers have met, those of experts together: they share their moments."""
    found: dict[str, int] = {}
    for name, met in tokens.items():
        whole = projection_of(experts, name) or name
        found[whole] = found.get(whole, 0) + met
    return found


def joined(
    experts: Mapping[str, LinearExperts],
    made: Mapping[str, BlockSparseLinear],
    targets: Mapping[str, BlockSparseConfig],
) -> dict[str, Any]:
    """Return layers by name, those of experts as one `BlockSparseExperts` each.

    An expert that is to stay dense keeps all of its blocks, stored as those of the others.
    """
    found: dict[str, Any] = {
        name: layer for name, layer in made.items() if projection_of(experts, name) is None
    }
    for name, layers in experts.items():
        configs = {key: config for key, config in targets.items() if projection_of([name], key) is not None}
        projections = []
        for own in layers.names if configs else ():
            whole = f"{name}.{own}"
            of_this = (config for key, config in configs.items() if key.rpartition(".")[0] == whole)
            config = next(of_this, next(iter(configs.values())))
            children = layers.get_submodule(own).named_children()
            each = [made.get(f"{whole}.{key}") or _whole(linear, config) for key, linear in children]
            projections.append(ExpertsLinear.from_layers(each))
        if configs:
            found[name] = experts_like(layers.dense, *projections)
    return found


def _whole(linear: Any, config: BlockSparseConfig) -> BlockSparseLinear:
    """Return a layer with every block of a dense one."""
    shape = linear.out_features, linear.in_features
    pattern = BlockPattern.full(shape, block_shape=check_block_shape(config.block_shape))
    layer = BlockSparseLinear.from_linear(
        linear, pattern=pattern, nm=config.nm, transposable=config.transposable
    )
    return layer.to_storage(config.storage, granularity=config.granularity, activations=config.activations)


@dataclass(frozen=True)
class Improvement:
    """A part of a model that was changed, and its relative error before and after; kept if that is less.

    Of `reconstruct_` it is a submodule, with ‖y - t‖² / ‖t‖² of its output and target on held-out batches; of
    `permute_` a group by its consumer, with the sum of its layers' errors, or None where a block holds all
    features, so that no order matters.
    """

    name: str
    error_before: float | None
    error: float | None
    kept: bool

    def row(self) -> dict[str, str]:
        """Return the cells of a table, by column."""
        errors = ("" if error is None else f"{error:.4f}" for error in (self.error_before, self.error))
        cells = self.name, *errors, "yes" if self.kept else "no"
        return dict(zip(("layer", "error before", "error", "kept"), cells, strict=True))


Forward: TypeAlias = Callable[[nn.Module, Any], Any]


class Calibration:
    """Calibration data on their way through a model in evaluation mode, of which nothing changes.

    Where the model has a stack of blocks, the data wait before the first and go on block by block; each is a
    unit. What lies outside is the last unit, and runs with the whole model. `units` and `groups` walk along;
    all other methods run the unit at hand. With ``compare`` the data go through the dense model beside the
    changed one.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        forward: Forward,
        layers: Sequence[str],
        device: torch.device,
        compare: bool = False,
    ) -> None:
        self._model, self._batches, self._forward, self._device = model, batches, forward, device
        self._layers, self._compare = layers, compare
        masks = (mask_of(batch) for batch in batches)  # of padding, [sequences, tokens]
        self._keep = [None if mask is None else moved(mask != 0, device) for mask in masks]
        self.stack: str | None = None
        self._blocks: list[str] = []
        self._block: str | None = None  # the unit at hand; None is the model
        self._parameters: dict[str, Tensor] = {}  # in place of the model's own, by their names
        for stack in stacks(model, layers):
            container = model.get_submodule(stack)
            blocks = [f"{stack}.{key}".lstrip(".") for key, _ in container.named_children()]
            stream = Stream(model, blocks, batches, forward, device, keep=device)
            if stream.is_chain and stream.order == blocks:
                self.stack, self._blocks = stack, blocks
                self._changed, self._dense = stream, stream.fork()
                break

    def units(self) -> Iterator[list[str]]:
        """Yield the layers of one unit after the other; the data move on when the next is asked for."""
        inside: dict[str, list[str]] = {block: [] for block in self._blocks}
        outside: list[str] = []
        homes: dict[nn.Module, list[list[str]]] = {}
        for block, layers in inside.items():
            for module in self._model.get_submodule(block).modules():
                homes.setdefault(module, []).append(layers)
        for name in self._layers:
            own = homes.get(self._model.get_submodule(name), [])
            (own[0] if len(own) == 1 else outside).append(name)
        for block, layers in inside.items():
            self._block, self._parameters = block, {}
            yield layers
            self._changed.advance(block, self._parameters)
            if self._compare:
                self._dense.advance(block)
        self._block, self._parameters = None, {}
        if outside:
            yield outside

    def groups(
        self, changed: Callable[[Sequence[str]], dict[str, Tensor]] = lambda layers: {}
    ) -> Iterator[list[str]]:
        """Yield layers in the order in which they run, those with the same input together.

        What comes later runs with the tensors by name that ``changed`` gives for layers that were yielded
        before.
        """
        done: list[str] = []
        progress = Progress(len(self._layers))
        for layers in self.units():
            groups = self._with_same_input(layers)
            if self._block is None:
                self._parameters = changed(done)
            for group in groups:
                yield group
                self._parameters |= changed(group)
                done += group
                progress.show(len(done), f"layers done, {group[-1]} the last")

    def _with_same_input(self, layers: Sequence[str]) -> list[list[str]]:
        inputs: dict[str, list[Input]] = {}
        self.trial(layers, lambda name, x: inputs.setdefault(name, []).append(Input.of(x)))
        groups: dict[Any, list[str]] = {}
        for name, own in inputs.items():
            groups.setdefault(self._projection(name) or tuple(one.key for one in own), []).append(name)
        for name in layers:
            if name not in inputs:  # which other batches may run
                groups.setdefault(self._projection(name) or name, []).append(name)
        return list(groups.values())

    def _projection(self, name: str) -> str | None:
        """Return the projection of an expert's layer, whose experts are one group, or None."""
        projection = name.rpartition(".")[0]
        experts = self._model.get_submodule(projection.rpartition(".")[0])
        return projection if isinstance(experts, LinearExperts) else None

    def trial(
        self,
        layers: Sequence[str],
        note: Callable[[str, Tensor], None],
        parameters: Mapping[str, Tensor] | None = None,
        *,
        until: str | None = None,
    ) -> Any:
        """Run the unit on the first batch, with some parameters in place of its own; return its output.

        ``note(name, x)`` is called at each call of a layer; the first call of ``until`` ends the run, without
        output.
        """

        def tell(name: str, x: Tensor) -> None:
            note(name, x)
            if name == until:
                raise ForwardEnded

        with self._listening(layers, tell), contextlib.suppress(ForwardEnded):
            return next(self._results(self._block, parameters or {}))

    def visit(self, layers: Sequence[str], note: Callable[[str, Tensor, int, Tensor | None], None]) -> None:
        """Run the unit on all batches; ``note(name, x, number, keep)`` is called at each call of a layer."""
        number = 0
        with self._listening(layers, lambda name, x: note(name, x, number, self._keep[number])):
            for current, _ in enumerate(self._results(self._block, self._parameters), 1):
                number = min(current, len(self._batches) - 1)

    def moments(self, group: Sequence[str]) -> Iterator[tuple[str, Moments]]:
        """Yield the layers of a group, or some of them, each with the moments of its inputs."""
        projection = self._projection(group[0])
        if projection is None:
            moments = self._moments_of(group[0])
            yield from ((name, checked_moments(name, moments)) for name in group)
        else:
            yield from self._moments_of_experts(projection, group)

    def _moments_of_experts(self, projection: str, group: Sequence[str]) -> Iterator[tuple[str, Moments]]:
        """Yield experts with the moments of their inputs, drawn towards those of all of the projection."""
        experts, layers = map(self._model.get_submodule, (projection.rpartition(".")[0], projection))
        assert isinstance(experts, LinearExperts)
        features: int = layers.in_features  # type: ignore[assignment]
        whole, own = Moments(features, self._device), dict[str, Moments]()

        def note(name: str, x: Tensor, number: int, keep: Tensor | None) -> None:
            if keep is not None and keep.numel() == experts.rows:
                keep = keep.reshape(-1)[experts.tokens]
            whole.add(x, None, number, keep)
            if name not in own:
                own[name] = Moments(features, self._device, origin=whole.origin)
            own[name].add(x, None, number, keep)

        self.visit([f"{projection}.{key}" for key, _ in layers.named_children()], note)
        for name in group:
            if name not in own:
                own[name] = Moments(features, self._device, origin=whole.origin)
            yield name, checked_moments(name, own[name].drawn_to(whole, features))

    def _moments_of(self, layer: str) -> Moments | None:
        """Return the moments of the inputs of a layer; None if nothing calls it."""
        found: list[Moments] = []
        dense: list[Tensor] = []
        number, in_dense = 0, False

        def note(name: str, x: Tensor) -> None:
            if in_dense:
                dense.append(x.clone())  # the model may write to it later
                return
            if not found:
                found.append(Moments(x.shape[-1], self._device, self._compare))
            found[0].add(x, dense.pop(0) if dense else None, number, self._keep[number])

        with self._listening([layer], note):
            changed = self._results(self._block, self._parameters)
            beside = self._results(self._block, {}, dense=True) if self._compare else None
            for current in range(len(self._batches)):
                number = current
                if beside is not None:
                    dense.clear()
                    in_dense = True
                    next(beside)
                    in_dense = False
                next(changed)
        return found[0] if found else None

    def outputs(self, parameters: Mapping[str, Tensor]) -> Iterator[Any]:
        """Yield what the whole model gives for each batch."""
        return self._results(None, parameters)

    def _listening(
        self, layers: Sequence[str], note: Callable[[str, Tensor], None]
    ) -> AbstractContextManager[None]:
        """Call `note` with the name and input of a layer at each of its calls."""

        def tell(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            note(name, args[0] if args else next(iter(kwargs.values())))

        return listening({name: self._model.get_submodule(name) for name in layers}, tell)

    @torch.no_grad()
    def _results(
        self, block: str | None, parameters: Mapping[str, Tensor], *, dense: bool = False
    ) -> Iterator[Any]:
        """Yield what a block, or the model, gives for each batch."""
        if block is not None:
            yield from (self._dense if dense else self._changed).results(block, parameters)
            return
        given: dict[Tensor, Tensor] = {
            self._model.get_parameter(name): tensor for name, tensor in parameters.items()
        }
        blocks, home = [self._model.get_submodule(name) for name in self._blocks], device_of(self._model)
        for batch in self._batches:
            with swapped(self._model, given), visiting(blocks, self._device, home):
                output = self._forward(self._model, batch)
            yield output


def check_model(model: nn.Module, name: str = "model") -> None:
    """Raise InvalidArgumentError for what is no module, and where parameters have no data."""
    check_module(model, name)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InvalidArgumentError(f"{name} must not have parameters on the meta device, without weights")


def collected(batches: Iterable[Any]) -> list[Any]:
    """Return the batches as a list, which is not empty."""
    check_batches(batches)
    data = [checked_batch(batch) for batch in batches]
    if not data:
        raise InvalidArgumentError("batches must have at least one batch, got none")
    return data


def checked_moments(name: str, moments: Moments | None) -> Moments:
    """Return the moments of a layer's inputs, which are finite and not of no token."""
    if moments is None:
        raise InvalidArgumentError(f"batches must run layer {name!r}, or layers must leave it out")
    check_inputs(name, moments.weight(), moments.not_finite())
    return moments


def check_inputs(name: str, tokens: float, not_finite: int | None) -> None:
    """Raise InvalidArgumentError unless a layer meets tokens that count, all of them finite."""
    if not tokens:
        raise InvalidArgumentError(
            f"batches must have tokens at every layer, got none for layer {name!r} that attention_mask keeps"
        )
    if not_finite is not None:
        raise InvalidArgumentError(
            f"batches must be finite at every layer: batch {not_finite} (counted from 0) gives layer "
            f"{name!r} inputs with NaN or infinities"
        )


def warn_of_few_tokens(model: nn.Module, tokens: Mapping[str, int]) -> None:
    """Warn of layers whose XᵀX cannot have full rank, with the tokens that they have met and need."""
    short: dict[tuple[int, int], list[str]] = {}
    for name, met in tokens.items():
        layer: Any = model.get_submodule(name)
        in_features = layer.in_features if hasattr(layer, "in_features") else dense_weight(layer).shape[1]
        needed = in_features + (layer.bias is not None)  # the mean takes one
        if met < needed:
            short.setdefault((met, needed), []).append(name)
    if short:
        texts = [f"{met} of {needed} at {listed(names)}" for (met, needed), names in short.items()]
        warn_user(
            "batches must give a layer at least as many tokens as it has inputs, and one more for a bias, or "
            f"its weights fit these tokens alone and its error is too small, got {'; '.join(texts[:MOST])}"
        )

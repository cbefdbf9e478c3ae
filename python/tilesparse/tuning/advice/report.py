"""The report of `advise`: what was measured, estimates for whole models, and the recommendation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..._arguments import checked
from ..._checks import as_integer
from ..._reports import aligned, listed, without_numbers
from ...prune.measured import config_of_json, read_document, time_of_json, write_document
from .contenders import DENSE, Contender, in_own_dtype

VERSION = 1  # of the file
WORTH = 1.1  # times as fast as dense, from which sparse layers are recommended
UNSTEADY = 1.1  # times as long as the call, from which layers were disturbed
HOST_BOUND = 1.25  # times as long as the GPU works, from which a call waits for the host
CAVEATS = (
    "Times of whole models are estimates: the sum of the measured products and of everything else, which is",
    "taken to be constant. Other runtimes were not measured. Quality was not: it depends on the model, on",
    "pruning and on training, in 8 bits as well. docs/pruning.md and docs/recovery.md have what was measured",
    "for some models, and on which texts.",
)


@dataclass(frozen=True)
class MeasuredProduct:
    """Layers of one shape that a call of the model gives as many tokens, and the time of one of their calls.

    Attributes:
        names: names of the layers.
        kind: "linear", or "experts" for all projections of a mixture together.
        shape: (out_features, in_features); of experts (experts, out_features, in_features) of the first
            projection.
        tokens: rows of x.
        calls: how often a call of the model computes it.
        milliseconds: time by contender; without those that the shape does not fit.
    """

    names: tuple[str, ...]
    kind: str
    shape: tuple[int, ...]
    tokens: int
    calls: int
    milliseconds: Mapping[Contender, float]

    @checked
    def time(self, contender: Contender) -> float:
        """Return milliseconds of a call.

        Without a measurement of that contender for this shape it is the time of the same blocks in the
        dtype of the model, or of the dense layer.
        """
        times = self.milliseconds
        return times.get(contender, times.get(in_own_dtype(contender), times[DENSE]))


@dataclass(frozen=True)
class Estimate:
    """Estimated time of a call of the model, all measured layers computed by one contender.

    Attributes:
        contender: how the layers are computed.
        layers: milliseconds in these layers: the sum of what was measured.
        total: milliseconds of the call: ``layers`` and the rest, which is taken to be constant.
    """

    contender: Contender
    layers: float
    total: float


@dataclass(frozen=True)
class AdviceReport:
    """The measurements of `advise`; ``str()`` makes tables of it, with the recommendation.

    Attributes:
        device: its name, also of a CPU.
        dtype: of the model's layers, as "bfloat16".
        versions: of tilesparse and torch, and how many threads the CPU used.
        call: milliseconds of a call of the dense model.
        busy: milliseconds that a GPU works in it; None on the CPU, or where the profiler does not know.
        rest: milliseconds of a call outside the measured layers, of a GPU those that it works.
        products: what the layers compute.
        refused: contenders that nothing here computes, and why.
    """

    device: str
    dtype: str
    versions: Mapping[str, str]
    call: float
    busy: float | None
    rest: float
    products: tuple[MeasuredProduct, ...]
    refused: Mapping[str, str]

    @property
    def contenders(self) -> list[Contender]:
        """The contenders that were measured, dense ones first, then those of the highest density."""
        found = dict.fromkeys(contender for product in self.products for contender in product.milliseconds)
        return sorted(found, key=lambda contender: -(_density(contender) or 2))

    @property
    def densities(self) -> list[float]:
        """The densities that were measured, the highest first."""
        found = {one.config.density for one in self.contenders if one.config is not None}
        return sorted(found, reverse=True)

    def estimates(self) -> list[Estimate]:
        """Return an estimate for each contender, in their order."""
        times = {contender: self._in_layers(contender) for contender in self.contenders}
        return [Estimate(contender, time, time + self.rest) for contender, time in times.items()]

    @property
    def best_dense(self) -> Estimate:
        """The fastest dense contender."""
        return min(self._of_density(None), key=lambda one: one.total)

    @property
    def recommended(self) -> Estimate | None:
        """The fastest contender of the highest density that is worth it; None recommends to stay dense."""
        for density in self.densities:
            best = min(self._of_density(density), key=lambda one: one.total)
            if best.total * WORTH <= self.best_dense.total:
                return best
        return None

    @checked
    def slower_than_dense(self, contender: Contender) -> list[str]:
        """Return the names of layers that are no faster by a contender than by the fastest dense one."""
        return [
            name
            for product in self.products
            if product.time(contender) >= _fastest(product, None)
            for name in product.names
        ]

    @checked
    def save(self, path: str | Path) -> None:
        """Write the report as JSON, which `load` reads on any machine.

        Raises:
            InvalidArgumentError: the file cannot be written.
        """
        products = [
            {
                **{name: getattr(product, name) for name in ("names", "kind", "shape", "tokens", "calls")},
                "times": [
                    {**asdict(contender), "ms": round(time, 6)}
                    for contender, time in product.milliseconds.items()
                ],
            }
            for product in self.products
        ]
        names = "device", "dtype", "versions", "call", "busy", "rest", "refused"
        document = {"version": VERSION, **{name: getattr(self, name) for name in names}, "products": products}
        write_document(path, document)

    @classmethod
    @checked
    def load(cls, path: str | Path) -> AdviceReport:
        """Read what `save` wrote.

        Raises:
            CheckpointNotFoundError: the file cannot be read.
            InvalidArgumentError: it is no such report, or a newer one.
        """
        return read_document(path, VERSION, "report of advise", cls._of_document)

    @classmethod
    def _of_document(cls, document: Any) -> AdviceReport:
        busy = document["busy"]
        return cls(
            str(document["device"]),
            str(document["dtype"]),
            dict(document["versions"]),
            time_of_json(document["call"]),
            None if busy is None else time_of_json(busy),
            time_of_json(document["rest"]),
            tuple(map(_product_of_json, document["products"])),
            dict(document["refused"]),
        )

    def __str__(self) -> str:
        return "\n".join(
            [*self._heading(), "", *self._layers(), "", *self._models(), "", *self._recommendation()]
        )

    def _in_layers(self, contender: Contender) -> float:
        return sum(product.calls * product.time(contender) for product in self.products)

    def _of_density(self, density: float | None) -> list[Estimate]:
        return [one for one in self.estimates() if _density(one.contender) == density]

    def _heading(self) -> Iterator[str]:
        count = self.versions.get("threads")
        threads = "" if count is None else f", {count} thread{'s' * (count != '1')}"
        yield f"{self.device}{threads}, {self.dtype}, PyTorch {self.versions['torch']}"
        calls = sum(product.calls for product in self.products)
        busy = "" if self.busy is None else f", of which the GPU works {self.busy:.4g} ms"
        yield (
            f"a call of the dense model takes {self.call:.4g} ms{busy}; measured apart, {calls} calls of "
            f"layers that can become block-sparse take {self._in_layers(DENSE):.4g} ms, everything else "
            f"{self.rest:.4g} ms"
        )
        if self._in_layers(DENSE) > UNSTEADY * (self.busy or self.call):
            yield (
                "these layers alone took longer than the call they are in: the device may be busy with other "
                "work, measure again"
            )
        if self.busy is not None and self.call > HOST_BOUND * self.busy:
            yield (
                "the GPU waits for the host: what follows holds for a model in a CUDA graph or compiled with "
                'mode="reduce-overhead"'
            )

    def _layers(self) -> list[str]:
        """Return a table of layers, with the fastest contender at each density."""
        dense = [contender for contender in self.contenders if contender.is_dense]
        header = "ms of one call", "shape", "tokens", *map(str, dense)
        rows: list[tuple[str, ...]] = [(*header, *(f"density {density:g}" for density in self.densities))]
        for product in self.products:
            times = [product.milliseconds.get(contender) for contender in dense]
            times += [_fastest(product, density) for density in self.densities]
            cells = "x".join(map(str, product.shape)), str(product.tokens)
            for group, names in _groups(product.names).items():
                name = group + (f" ({len(names)})" if len(names) > 1 else "")
                rows.append((name, *cells, *("" if time is None else f"{time:.4f}" for time in times)))
        return aligned(rows)

    def _models(self) -> list[str]:
        """Return a table of contenders, each in all layers."""
        dense, best = self.estimates()[0].total, self.best_dense.total
        header = "all layers (estimated)", "layers, ms", "model, ms", "over dense", "over the fastest dense"
        rows: list[tuple[str, ...]] = [header]
        for one in self.estimates():
            times = f"{one.layers:.3f}", f"{one.total:.3f}"
            rows.append((str(one.contender), *times, f"{dense / one.total:.2f}x", f"{best / one.total:.2f}x"))
        return [*aligned(rows), *(f"not measured: {name}: {why}" for name, why in self.refused.items())]

    def _recommendation(self) -> Iterator[str]:
        found, best = self.recommended, self.best_dense
        if found is None:
            yield (
                f"recommendation: stay dense ({best.contender}); no density measured makes the model "
                f"{WORTH:g} times as fast as that"
            )
        else:
            yield (
                f"recommendation: {found.contender}: about {best.total / found.total:.2f} times as fast as "
                f"the fastest dense model ({best.contender})"
            )
            slower = self.slower_than_dense(found.contender)
            if slower:
                yield f"leave dense, where that is as fast: {listed(slower)}"
        yield from CAVEATS


def _density(contender: Contender) -> float | None:
    return None if contender.config is None else contender.config.density


def _fastest(product: MeasuredProduct, density: float | None) -> float:
    """Return the least time of the contenders of a density; None is that of the dense ones."""
    times = product.milliseconds
    return min((times[one] for one in times if _density(one) == density), default=times[DENSE])


def _groups(names: tuple[str, ...]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(without_numbers(name), []).append(name)
    return {own[0] if len(own) == 1 else group: own for group, own in groups.items()}


def _product_of_json(entry: Mapping[str, Any]) -> MeasuredProduct:
    times: dict[Contender, float] = {}
    for one in entry["times"]:
        eight = one["eight_bits"]
        contender = Contender(config_of_json(one["config"]), None if eight is None else str(eight))
        times[contender] = time_of_json(one["ms"])
    if DENSE not in times:
        raise ValueError("times must have that of the dense layer")
    return MeasuredProduct(
        tuple(map(str, entry["names"])),
        str(entry["kind"]),
        tuple(map(as_integer, entry["shape"])),
        as_integer(entry["tokens"]),
        as_integer(entry["calls"]),
        times,
    )

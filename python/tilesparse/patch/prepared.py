"""What `prepare_for_inference` has done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .._reports import aligned, listed, without_numbers
from .merging import SharedProduct
from .reports import FuseReport


@dataclass(frozen=True)
class PreparedProduct:
    """One product of a prepared model, and the number of tokens that the batch gave it.

    Attributes:
        names: names of the layers whose product it is, several if they share it.
        shape: (out_features, in_features), of all of them together.
        storage: storage of the layers as tables name it, such as "2:4 int8".
        policy: policy of the layers.
        done: what was done, in words.
        tokens: number of tokens of its x in the batch; None without a batch, or if nothing was measured: the
            batch does not call the layers, they have no blocks, or processes have parts of them.
        kernel: name of the kernel that computes it for so many tokens, "dense" if W is written out and
            multiplied densely; None without tokens.
        microseconds: measured time of the fastest sparse kernel; None without tokens.
        dense_microseconds: measured time of writing W out and multiplying densely; None likewise.
    """

    names: tuple[str, ...]
    shape: tuple[int, int]
    storage: str
    policy: str
    done: tuple[str, ...]
    tokens: int | None = None
    kernel: str | None = None
    microseconds: float | None = None
    dense_microseconds: float | None = None


@dataclass(frozen=True)
class InferenceReport:
    """What `prepare_for_inference` did to each layer, or why not; ``str()`` makes a table of it.

    Attributes:
        products: the products of block-sparse layers, in the order of the model; one that the batch calls
            with several numbers of tokens has an entry for each.
        mlps: MLPs that were fused, and those that were not, with the reason.
        shared: layers that are called with one x: whether they share a product, or why not.
        seconds_before: time of a call of the model with the batch before, in evaluation mode; None without.
        seconds_after: the same afterwards.
        stacked: names of floating parameters of three dimensions, such as those of dense experts, which stay
            as they are.
    """

    products: list[PreparedProduct]
    mlps: FuseReport
    shared: list[SharedProduct]
    seconds_before: float | None
    seconds_after: float | None
    stacked: Sequence[str] = ()

    def __str__(self) -> str:
        columns = "shape", "storage", "policy", "tokens", "kernel", "us", "dense us", "done"
        rows: list[tuple[str, ...]] = [("layers", *columns)]
        for names, product, count in _groups(self.products):
            times = product.microseconds, product.dense_microseconds
            rows.append(
                (
                    names + (f" ({count})" if count > 1 else ""),
                    "x".join(map(str, product.shape)),
                    product.storage,
                    product.policy,
                    "" if product.tokens is None else str(product.tokens),
                    product.kernel or "",
                    *("" if time is None else f"{time:.1f}" for time in times),
                    ", ".join(product.done),
                )
            )
        lines = [*aligned(rows), f"{len(self.mlps.mlps)} MLPs fused"]
        lines += [f"not fused: {line}" for line in str(self.mlps).splitlines()[1 + len(self.mlps.mlps) :]]
        lines += [f"not merged: {', '.join(one.names)}: {one.reason}" for one in self.shared if one.reason]
        if self.seconds_before is None:
            lines.append("pass a batch to merge layers of one x, to fuse more MLPs and to measure")
        if self.stacked:
            lines.append(f"3-D parameters that stay dense: {listed(self.stacked)}")
        if self.seconds_before is not None and self.seconds_after is not None:
            before, after = 1e3 * self.seconds_before, 1e3 * self.seconds_after
            lines.append(f"a call took {before:.2f} ms before, {after:.2f} ms after")
        return "\n".join(lines)


def _groups(products: Sequence[PreparedProduct]) -> list[tuple[str, PreparedProduct, int]]:
    """Return products whose lines differ in numbers of names alone together: names, the first, and how many.

    Measurements are of kinds of products, so those that are alike have the same times.
    """
    found: dict[tuple[object, ...], tuple[str, PreparedProduct, int]] = {}
    for one in products:
        parent = one.names[0].rpartition(".")[0]
        short = [one.names[0], *(name.removeprefix(f"{parent}.") for name in one.names[1:])]
        what = one.shape, one.storage, one.policy, one.done, one.tokens, one.kernel
        key = (without_numbers(", ".join(short)), *what, one.microseconds, one.dense_microseconds)
        name, first, count = found.get(key, (", ".join(short), one, 0))
        found[key] = (key[0] if count else name, first, count + 1)
    return list(found.values())

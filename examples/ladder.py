"""Byte-level language models of several widths, dense and pruned, and what they cost and tell: who is best?

    for width in 512 768 1024 1536; do python examples/ladder.py train --width $width; done
    for density in .5 .25; do python examples/ladder.py prune --width 1536 --density $density; done
    python examples/ladder.py measure --output ladder.json

To try it: ``--device cpu --seconds 5 --layers 1 --context 64 --batch 4 --width 64 --block 16 --megabytes 2``
with every command. Models learn the Python sources of this installation, and are judged by files that none of
them has seen. ``prune`` removes blocks of a trained model by what their removal costs ("obs"), and trains on,
also towards the dense model. ``measure`` gives for every model the loss in nats per byte and the time of a
forward pass of a batch and of one more byte, in bfloat16 and with linear layers in float8; on GPUs compiled
and in CUDA graphs.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
from pathlib import Path
from typing import Any

import torch
from documents import sources
from ladder_models import NextByte, fused, in_float8, milliseconds
from records import Course, environment, write_json
from torch import Tensor, nn
from torch.nn import functional as F

from tilesparse.cli.demo import GPT, Size
from tilesparse.prune import prune_model
from tilesparse.tuning.devices import default_device

HEAD = 64  # features of an attention head
LEARNING_RATE = 6e-4  # at width 768; in proportion to 1 / width elsewhere
WARM_UP = 0.02  # of the time
COMPILED = 64  # variants of blocks in one process; PyTorch stops at 8
CALIBRATION = 8  # batches for pruning
VALIDATION = 16  # batches
LAYERS = r"blocks\."


class Text:
    """Bytes of Python sources on the device, in windows [batch, context + 1] int64."""

    def __init__(self, arguments: argparse.Namespace, seed: int) -> None:
        training, held_out = (text.to(arguments.device) for text in sources(arguments.megabytes << 20))
        self._training, self._arguments = training, arguments
        self._window = torch.arange(arguments.context + 1, device=arguments.device)
        self._generator = torch.Generator(arguments.device).manual_seed(10**6)  # the same for all models
        self.held_out = [self._windows(held_out) for _ in range(VALIDATION)]
        self._generator.manual_seed(seed)

    def batch(self) -> Tensor:
        return self._windows(self._training)

    def _windows(self, text: Tensor) -> Tensor:
        most, device = len(text) - self._arguments.context, text.device
        starts = torch.randint(most, (self._arguments.batch, 1), generator=self._generator, device=device)
        return text[starts + self._window].long()


def train(arguments: argparse.Namespace) -> None:
    torch.manual_seed(arguments.seed)
    model = made(arguments.width, arguments)
    text = Text(arguments, arguments.seed)
    rate = LEARNING_RATE * 768 / arguments.width
    notes = taught(model, text, rate, arguments, arguments.seconds)
    saved(
        model,
        f"dense-{arguments.width}",
        {"width": arguments.width, "density": 1.0, **notes},
        text,
        arguments,
    )


def prune(arguments: argparse.Namespace) -> None:
    course = Course(arguments.seconds)
    dense, _ = loaded(arguments.folder / f"dense-{arguments.width}.pt", arguments)
    model, text = copy.deepcopy(dense), Text(arguments, arguments.seed + 1)
    prune_model(
        model,
        [text.batch()[:, :-1] for _ in range(CALIBRATION)],
        density=arguments.density,
        block_shape=arguments.block,
        layers=LAYERS,
        policy="auto",
    )
    notes = {"pruning_s": round(course.seconds(), 1), "loss_pruned": loss_of(model, text)}
    print(notes, flush=True)
    rate = LEARNING_RATE * 768 / arguments.width
    notes |= taught(model, text, rate, arguments, arguments.seconds - course.seconds(), dense)
    notes |= {"width": arguments.width, "density": arguments.density, "block": arguments.block}
    saved(model, f"sparse-{arguments.width}-{arguments.density:g}", notes, text, arguments)


def made(width: int, arguments: argparse.Namespace) -> GPT:
    heads = max(1, width // HEAD)
    with torch.device(arguments.device):
        return GPT(Size(arguments.layers, width, heads, arguments.context, arguments.batch))


def taught(
    model: GPT,
    text: Text,
    rate: float,
    arguments: argparse.Namespace,
    seconds: float,
    teacher: GPT | None = None,
) -> dict[str, Any]:
    """Train for some seconds, compilation included; half of the loss is the teacher's, if there is one."""
    optimizer = torch.optim.AdamW(
        model.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.1, fused=arguments.device != "cpu"
    )
    for block in (*model.blocks, *(() if teacher is None else teacher.blocks)):
        if arguments.compile:
            block.compile(dynamic=False)
    course, step, losses = Course(seconds), 0, list[tuple[int, float, float]]()
    while (progress := course.progress()) < 1:
        for group in optimizer.param_groups:
            group["lr"] = rate * min(progress / WARM_UP, (1 + math.cos(math.pi * progress)) / 2)
        loss = loss_on(model, text.batch(), teacher)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 10 == 0:  # the host must not run ahead of the clock
            last = loss.item()
            if step % 500 == 0:
                losses.append((step, round(course.seconds(), 1), round(last, 4)))
                print(losses[-1], flush=True)
    for block in model.blocks:
        block._compiled_call_impl = None
    return {"steps": step, "seconds": round(course.seconds(), 1), "history": losses}


def loss_on(model: GPT, batch: Tensor, teacher: GPT | None = None) -> Tensor:
    with torch.autocast(batch.device.type, torch.bfloat16):
        logits = model(batch[:, :-1]).flatten(0, 1)
        with torch.no_grad():
            goal = None if teacher is None else teacher(batch[:, :-1]).flatten(0, 1)
    loss = F.cross_entropy(logits.float(), batch[:, 1:].flatten())
    if goal is None:
        return loss
    logs, goals = (F.log_softmax(one.float(), -1) for one in (logits, goal))
    return (loss + F.kl_div(logs, goals, reduction="batchmean", log_target=True)) / 2


@torch.no_grad()
def loss_of(model: nn.Module, text: Text) -> float:
    """Return the mean loss on held-out files, in nats per byte."""
    losses = []
    mixed = next(model.parameters()).dtype == torch.float32
    for batch in text.held_out:
        with torch.autocast(batch.device.type, torch.bfloat16, enabled=mixed):
            logits = model(batch[:, :-1])
        losses.append(float(F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())))
    return round(statistics.fmean(losses), 5)


def saved(model: GPT, name: str, notes: dict[str, Any], text: Text, arguments: argparse.Namespace) -> None:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    notes = {"name": name, "loss": loss_of(model, text), "parameters": parameters, **notes}
    print({key: value for key, value in notes.items() if key != "history"}, flush=True)
    write_json(arguments.folder / f"{name}.json", notes | {"environment": environment(arguments.commit)})
    torch.save({"model": model, "notes": notes}, arguments.folder / f"{name}.pt")


def loaded(file: Path, arguments: argparse.Namespace) -> tuple[GPT, dict[str, Any]]:
    """Return a model that this program has saved, and what is known of it."""
    found = torch.load(file, map_location=arguments.device, weights_only=False)
    return found["model"], found["notes"]


def measure(arguments: argparse.Namespace) -> None:
    document: dict[str, Any] = {"environment": environment(arguments.commit), "cases": []}
    text = Text(arguments, 0)
    for file in sorted(arguments.folder.glob("*.pt")):
        _, case = loaded(file, arguments)
        case["results"] = []
        document["cases"].append(case)
        for form in ("bfloat16", "float8") if arguments.device != "cpu" else ("bfloat16",):
            case["results"].append(result(file, form, text, arguments))
            print(case["name"], case["results"][-1], flush=True)
            write_json(arguments.output, document)
            torch.compiler.reset()


@torch.no_grad()
def result(file: Path, form: str, text: Text, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the loss and the times of a trained model in one form."""
    model = loaded(file, arguments)[0].to(torch.bfloat16).eval()
    if form == "float8":
        in_float8(model)
    fused(model)
    tokens, step = text.batch()[:, :-1], NextByte(model, arguments.context)
    if arguments.compile:
        for block in step.steps:
            block.compile(dynamic=False)
    found: dict[str, Any] = {"form": form}
    try:
        found["one_byte_ms"] = milliseconds(lambda: step(tokens[:1, :1]), arguments.device)
    except RuntimeError as error:  # PyTorch has no dense product in float8 of so few rows for some widths
        found["one_byte_ms"], found["error"] = None, str(error).splitlines()[0][:200]
    if arguments.compile:
        for block in model.blocks:
            block.compile(dynamic=False)
    found["batch_ms"] = milliseconds(lambda: model(tokens), arguments.device)
    return found | {"loss": loss_of(model, text)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    device = default_device().type
    commands = {"train": train, "prune": prune, "measure": measure}
    parser.add_argument("command", choices=commands)
    parser.add_argument("--folder", type=Path, default=Path("ladder"), help="of the models (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("ladder.json"), help="of measure (%(default)s)")
    parser.add_argument("--width", type=int, default=1024, help="of train and prune (%(default)s)")
    parser.add_argument("--density", type=float, default=0.5, help="of prune (%(default)s)")
    parser.add_argument("--block", type=int, default=128, help="of prune (%(default)s)")
    parser.add_argument("--seconds", type=float, default=480.0, help="of train and prune (%(default)s)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024, help="bytes (%(default)s)")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--megabytes", type=int, default=400, help="of text, at most (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default=device)
    parser.add_argument("--commit", help="of the sources (default: ask git)")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    arguments.compile = arguments.device != "cpu"
    torch._dynamo.config.cache_size_limit = COMPILED
    commands[arguments.command](arguments)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Train a language model from scratch in a given time: dense, and wider but sparse, by every method.

    python benchmarks/train_lm.py --seconds 90 --output train_lm.json
    python benchmarks/train_lm.py --device cpu --seconds 5 --width 64 --dense-width 32 --layers 1 \\
        --context 64 --batch 4 --block 16 --megabytes 2 --no-compile

A byte-level GPT learns the Python sources of this installation. A contender is "dense", or a method and a
density, such as rigl:0.25. Each trains for the same wall-clock time, or for the same number of --steps.
Validation and compilation before the first step do not count. The learning rate follows a cosine over that
time and ends at 0.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from common import rate_of
from documents import sources
from harness import result_parser, run_benchmark, write_json
from torch import Tensor, nn
from torch.nn import functional as F

from tilesparse import BlockPattern, BlockSparseConfig, BlockSparseLinear, sparsify_
from tilesparse.cli.demo import GPT, Size
from tilesparse.train import Gradual, PatternSchedule, learning_rate_factor, parameter_groups

HEAD = 64  # features of an attention head
VALIDATION_BATCHES = 16
STEPS_AT_A_TIME = 10  # limit of how far the host may run ahead
CALIBRATION_STEPS = 20  # to estimate the total number of steps
WARM_UP = 0.02  # fraction of the time
METHODS: dict[str, Any] = {
    "static": None,
    "set": {"grow": "random"},
    "rigl": {"grow": "gradient"},
    "movement": {"grow": "gradient", "drop": "movement"},
    "gradual": None,
}


class Text:
    """Bytes of sources, in windows that all contenders see in the same order."""

    def __init__(self, arguments: argparse.Namespace, seed: int) -> None:
        training, held_out = sources(arguments.megabytes << 20)
        self._arguments, self.bytes = arguments, len(training)
        self._training, held_out = (text.to(arguments.device) for text in (training, held_out))
        self._window = torch.arange(arguments.context + 1, device=arguments.device)
        self._generator = torch.Generator().manual_seed(10**6)  # the same for all seeds
        self.held_out = [self._windows(held_out) for _ in range(VALIDATION_BATCHES)]
        self._generator.manual_seed(seed)

    def batch(self) -> Tensor:
        """Return the next batch, [batch, context + 1] int64."""
        return self._windows(self._training)

    def _windows(self, text: Tensor) -> Tensor:
        shape = self._arguments.batch, 1
        starts = torch.randint(len(text) - self._arguments.context, shape, generator=self._generator)
        if text.is_cuda:
            starts = starts.pin_memory().to(text.device, non_blocking=True)
        return text[starts + self._window].long()


class Contender:
    """A model in training."""

    def __init__(self, name: str, arguments: argparse.Namespace, seed: int) -> None:
        method, _, density = name.partition(":")
        self.method, self._arguments = method, arguments
        self._device = torch.device(arguments.device)
        torch.manual_seed(seed)
        width = arguments.dense_width if method == "dense" else arguments.width
        size = Size(arguments.layers, width, max(1, width // HEAD), arguments.context, arguments.batch)
        with self._device:
            self.model = GPT(size)
        self.density = float(density) if density else 1.0
        if method != "dense":
            self._patch(1.0 if method == "gradual" else self.density)
        groups = parameter_groups(self.model, arguments.lr)
        fused = self._device.type == "cuda"
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)
        self.schedule: PatternSchedule | Gradual | None = None
        self._rates = [group["lr"] for group in self.optimizer.param_groups]

    def _patch(self, density: float) -> None:
        config = BlockSparseConfig(density, self._arguments.block, policy="auto")
        layers = r"blocks\.\d+\.(attention\.(inputs|output)|mlp\.[02])"
        report = sparsify_(self.model, config, layers=layers)
        for layer in self.model.modules():  # blocks at random, for training from scratch
            if isinstance(layer, BlockSparseLinear):
                pattern = layer.pattern
                layer.pattern = BlockPattern.random(
                    pattern.shape, block_shape=pattern.block_shape, nnz=pattern.nnz
                )
                layer.reset_parameters()
        if report.skipped or not report.layers:
            raise SystemExit(f"--block must divide the sides of every layer: {report}")

    def compile(self) -> None:
        """Compile block by block: all blocks share code, which is compiled once per variant."""
        for block in self.model.blocks:
            block.compile(dynamic=False)

    def plan(self, steps: int, seed: int) -> None:
        """Create the schedule of patterns once the number of steps is known."""
        if self.method == "gradual":
            events = self._arguments.events
            self.schedule = Gradual(
                self.model, self.optimizer, density=self.density, steps=steps, events=events
            )
        elif METHODS.get(self.method) is not None:
            every = max(1, round(0.75 * steps / self._arguments.updates))
            self.schedule = PatternSchedule(
                self.model,
                self.optimizer,
                fraction=self._arguments.fraction,
                every=every,
                seed=seed,
                **METHODS[self.method],
            )

    def step(self, batch: Tensor, progress: float) -> None:
        """Take one step without waiting for the device; ``progress`` goes from 0 to 1."""
        self.backward(batch)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * min(progress / WARM_UP, cosine(progress))
        if isinstance(self.schedule, PatternSchedule):
            for group in self.schedule.param_groups:  # as a scheduler does
                group["lr"] = self._arguments.fraction * cosine(progress / 0.75)
        self.optimizer.step()
        if self.schedule is not None and self.schedule.step():  # "gradual" has removed blocks
            density = statistics.fmean(densities(self.model))
            self._rates[-1] = self._arguments.lr * learning_rate_factor(density)
        self.optimizer.zero_grad()

    def backward(self, batch: Tensor) -> None:
        self._loss(batch).backward()

    def prepare(self, batch: Tensor) -> float:
        """Compile all steps, leave the model unchanged, and return the seconds per step."""
        for _ in range(3):
            self.step(batch, 0.0)
        synchronize(self._device)
        start = time.perf_counter()
        for _ in range(CALIBRATION_STEPS):
            self.step(batch, 0.0)  # with a learning rate of 0
        synchronize(self._device)
        self._prepare_observed(batch)
        self.optimizer.state.clear()
        return (time.perf_counter() - start) / CALIBRATION_STEPS

    def _prepare_observed(self, batch: Tensor) -> None:
        """Compile the step that takes norms of dense gradients."""
        method = METHODS.get(self.method)
        if method is not None:
            schedule = PatternSchedule(self.model, self.optimizer, every=1, **method)
            self.backward(batch)
            schedule.remove()
            self.optimizer.zero_grad()

    @torch.no_grad()
    def validate(self, batches: Sequence[Tensor]) -> float:
        """Return the mean loss in nats per byte, computed eagerly."""
        with torch.compiler.set_stance("force_eager"):
            return statistics.fmean(float(loss) for loss in [self._loss(batch) for batch in batches])

    def _loss(self, batch: Tensor) -> Tensor:
        with torch.autocast(self._device.type, torch.bfloat16):
            logits = self.model(batch[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def cosine(progress: float) -> float:
    """Return the cosine schedule, from 1 down to 0."""
    return rate_of(progress, 0.0)


def run(name: str, arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train one contender and return its results."""
    text = Text(arguments, seed)
    contender = Contender(name, arguments, seed)
    if arguments.compile:
        contender.compile()
    start = time.perf_counter()
    seconds_per_step = contender.prepare(text.batch())
    record: dict[str, Any] = {
        "contender": name,
        "seed": seed,
        "preparation_s": round(time.perf_counter() - start, 2),
        "parameters_at_first": sum(p.numel() for p in contender.model.parameters()),
        "results": [],
    }
    contender.plan(arguments.steps or max(1, int(arguments.seconds / seconds_per_step)), seed)
    seconds, step, evaluations, progress = 0.0, 0, 0, 0.0
    while progress < 1:
        start = time.perf_counter()
        for _ in range(STEPS_AT_A_TIME):
            contender.step(text.batch(), min(1.0, progress + 1e-3))
            step += 1
        synchronize(torch.device(arguments.device))
        seconds += time.perf_counter() - start
        progress = step / arguments.steps if arguments.steps else seconds / arguments.seconds
        if progress >= (evaluations + 1) / arguments.evaluations:
            evaluations = int(progress * arguments.evaluations)
            loss = contender.validate(text.held_out)
            record["results"].append({"step": step, "seconds": round(seconds, 2), "loss": round(loss, 5)})
            print(f"{name:16} seed {seed}  {step:6} steps {seconds:7.1f} s  {loss:.4f} nats", flush=True)
    record["parameters"] = sum(p.numel() for p in contender.model.parameters())
    record["densities"] = densities(contender.model)
    record["ms_per_step"] = round(1e3 * seconds / step, 3)
    return record


def check_contender(name: str) -> None:
    """Raise SystemExit unless the name is a contender, before any has trained."""
    method, _, density = name.partition(":")
    try:
        known = name == "dense" or (method in METHODS and 0 < float(density) <= 1)
    except ValueError:
        known = False
    if not known:
        methods = ", ".join(METHODS)
        raise SystemExit(
            f"--contenders must be dense, or one of {methods} and a density (rigl:0.25), got {name!r}"
        )


def densities(model: nn.Module) -> list[float]:
    """Return the densities of sparse layers, above the goal if "gradual" had fewer steps than planned."""
    return sorted({m.density for m in model.modules() if isinstance(m, BlockSparseLinear)})


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    for name in arguments.contenders:
        check_contender(name)
    # Each event of "gradual" and the steps that take dense gradients compile again.
    torch._dynamo.config.cache_size_limit = 8 + 2 * arguments.events
    return run_benchmark(arguments, run_all)


def run_all(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    """Run all contenders with all seeds, and write the results after each."""
    for seed in range(arguments.seeds):
        for contender in arguments.contenders:
            document["cases"].append(run(contender, arguments, seed))
            write_json(arguments.output, document)
            torch.compiler.reset()


def parser() -> argparse.ArgumentParser:
    """Return the parser. Its defaults are for one H200."""
    made = result_parser(__doc__, "train_lm.json", device=True)
    add = made.add_argument
    add(
        "--contenders",
        type=lambda names: names.split(","),
        default=["dense", "static:0.25", "set:0.25", "rigl:0.25", "gradual:0.25"],
        help="dense, or methods and densities, such as rigl:0.25,gradual:0.5 (%(default)s); methods are "
        + ", ".join(METHODS),
    )
    add("--seconds", type=float, default=90.0, help="of training for each (%(default)s)")
    add("--steps", type=int, help="of training for each, in place of --seconds")
    add("--seeds", type=int, default=1, help="how many (%(default)s)")
    add("--width", type=int, default=1536, help="of sparse models (%(default)s)")
    add("--dense-width", type=int, default=768, help="of the dense one (%(default)s)")
    add("--layers", type=int, default=8, help="(%(default)s)")
    add("--context", type=int, default=1024, help="bytes (%(default)s)")
    add("--batch", type=int, default=32, help="(%(default)s)")
    add("--block", type=int, default=128, help="rows and columns of a block (%(default)s)")
    add("--lr", type=float, default=6e-4, help="of dense weights (%(default)s)")
    add("--fraction", type=float, default=0.3, help="of blocks that each update moves (%(default)s)")
    add("--updates", type=int, default=80, help="of patterns, in three quarters of the time (%(default)s)")
    add("--events", type=int, default=8, help="at which gradual removes blocks (%(default)s)")
    add("--evaluations", type=int, default=10, help="validations during training (%(default)s)")
    add("--megabytes", type=int, default=400, help="of text, at most (%(default)s)")
    add("--no-compile", dest="compile", action="store_false", help="train eagerly")
    return made


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    raise SystemExit(main())

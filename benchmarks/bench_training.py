"""Trains a GPT on Python sources: dense, in blocks, and with 2:4 inside the blocks.

    python benchmarks/bench_training.py --output training.json
    python benchmarks/report.py training.json

README.md beside this says what is measured and how.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import parsed, positive, recording, run_benchmark, subset, write_json
from models import make_sparse
from torch import Tensor, nn
from torch.nn import functional as F

from tilesparse import BlockSparseLinear
from tilesparse.cli.demo import GPT, Size, synchronize
from tilesparse.train import MaskSchedule, set_nm

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
from documents import sources

HEAD = 64  # features
LEARNING_RATE = 6e-4
WARM_UP_STEPS = 100  # up to that rate, which is then constant, so that any two steps may be compared
WARM_UP_CALLS = 3  # before the clock runs
DECAY = 2e-4
STEPS_AT_A_TIME = 10  # that the host may be ahead


class Contender(NamedTuple):
    """What the linear layers of a model are: dense of some width, or blocks of some density."""

    width: float = 1.0  # in widths of the dense model
    density: float | None = None
    nm: tuple[int, int] | None = None
    transposable: bool = False


def contenders(density: float) -> dict[str, Contender]:
    """The dense model, blocks, and four ways to multiply half as many weights as these have."""
    return {
        "dense": Contender(),
        "blocks": Contender(density=density),
        "2:4 in blocks": Contender(density=density, nm=(2, 4)),
        "transposable 2:4 in blocks": Contender(density=density, nm=(2, 4), transposable=True),
        "half the blocks": Contender(density=density / 2),
        "narrow dense": Contender(width=math.sqrt(density / 2)),
    }


NAMES = tuple(contenders(1.0))


class Data:
    """Bytes of text and which windows of them each step takes, equal for all contenders."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        training, held_out = sources(arguments.megabytes << 20)
        generator = torch.Generator().manual_seed(arguments.seed)
        shape = arguments.steps, arguments.batch
        starts = torch.randint(len(training) - arguments.context, shape, generator=generator)
        shape = arguments.held_out_batches, arguments.batch
        held_out_starts = torch.randint(len(held_out) - arguments.context, shape, generator=generator)
        self.sizes = len(training), len(held_out)
        on_device = (t.to(arguments.device) for t in (training, held_out, starts, held_out_starts))
        self._training, self._held_out, self._starts, self._held_out_starts = on_device
        self._window = torch.arange(arguments.context + 1, device=arguments.device)

    def batch(self, step: int) -> Tensor:
        """[batch, context + 1] int64."""
        return self._training[self._starts[step, :, None] + self._window].long()

    def held_out(self) -> list[Tensor]:
        """Such batches of other files."""
        return [self._held_out[starts[:, None] + self._window].long() for starts in self._held_out_starts]


class Trainee:
    """A model, its optimizer and, with 2:4, the schedule of its masks."""

    def __init__(self, contender: Contender, arguments: argparse.Namespace) -> None:
        self._device = torch.device(arguments.device)
        self.model = _build(contender, arguments)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self._rates = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: min(1.0, (step + 1) / WARM_UP_STEPS)
        )
        self.masks = None
        if contender.nm is not None:
            self.masks = MaskSchedule(self.model, self._optimizer, every=arguments.every, decay=DECAY)

    def compile(self) -> None:
        """Block by block: all share their code, and it is compiled once."""
        for block in self.model.blocks:
            block.compile(fullgraph=True, dynamic=False)

    def step(self, batch: Tensor) -> None:
        """One step, without waiting for it."""
        self.backward(batch)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._rates.step()
        self._optimizer.zero_grad()

    def backward(self, batch: Tensor) -> None:
        """Leaves gradients alone."""
        self._loss(batch).backward()

    def warm_up(self, batch: Tensor) -> None:
        """Compiles what is to be compiled; the model stays as it is."""
        for _ in range(WARM_UP_CALLS):
            self.backward(batch)
            self._optimizer.zero_grad()
        synchronize(self._device)

    @torch.no_grad()
    def loss(self, batches: Sequence[Tensor]) -> float:
        """Mean in nats per byte, computed eagerly."""
        with torch.compiler.set_stance("force_eager"):
            return statistics.fmean(float(loss) for loss in [self._loss(batch) for batch in batches])

    def _loss(self, batch: Tensor) -> Tensor:
        with torch.autocast(self._device.type, torch.bfloat16):
            logits = self.model(batch[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def _build(contender: Contender, arguments: argparse.Namespace) -> GPT:
    torch.manual_seed(arguments.seed)
    width = round(arguments.width * contender.width / HEAD) * HEAD
    size = Size(arguments.layers, width, width // HEAD, arguments.context, arguments.batch)
    with torch.device(arguments.device):
        model = GPT(size)
    if contender.density is None:
        return model
    make_sparse(model.blocks, contender.density, (arguments.block, arguments.block), arguments.seed)
    set_nm(model, contender.nm, transposable=contender.transposable)
    for module in model.modules():
        if isinstance(module, BlockSparseLinear):
            module.reset_parameters()  # for their smaller fan-in
    return model


def stored_bytes(model: nn.Module) -> int:
    """What the model takes for inference in bfloat16, with 2:4 compressed; its training is over."""
    model.bfloat16()
    for module in model.modules():
        if isinstance(module, BlockSparseLinear) and module.nm is not None:
            module.to_storage("compressed")
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def prepared(
    contender: Contender, data: Data, arguments: argparse.Namespace, record: dict[str, Any]
) -> Trainee:
    """Ready to be timed; eager where compilation fails, which is recorded."""
    start = time.perf_counter()
    trainee = Trainee(contender, arguments)
    if arguments.compile:
        trainee.compile()
    try:
        trainee.warm_up(data.batch(0))
    except Exception as error:
        if not arguments.compile:
            raise
        record["eager_because"] = f"{type(error).__name__}: {error}"
        trainee = Trainee(contender, arguments)
        trainee.warm_up(data.batch(0))
    record["preparation_s"] = round(time.perf_counter() - start, 2)
    return trainee


def train(
    trainee: Trainee, data: Data, arguments: argparse.Namespace, note: Callable[[dict[str, Any]], None]
) -> None:
    """Trains for the given seconds or steps, in which evaluations do not count."""
    device = torch.device(arguments.device)
    held_out = data.held_out()
    seconds, step = 0.0, 0
    while seconds < arguments.seconds and step < arguments.steps:
        start = time.perf_counter()
        for _ in range(min(STEPS_AT_A_TIME, arguments.steps - step)):
            trainee.step(data.batch(step))
            step += 1
        synchronize(device)
        seconds += time.perf_counter() - start
        if step % arguments.evaluate_every == 0 or seconds >= arguments.seconds or step == arguments.steps:
            result = {"step": step, "seconds": round(seconds, 3), "loss": round(trainee.loss(held_out), 5)}
            if trainee.masks is not None:
                result["flip_rate"] = trainee.masks.flip_rate()
            note(result)


def measure(name: str, data: Data, arguments: argparse.Namespace, record: dict[str, Any]) -> None:
    """Fills the record of one contender."""
    contender = contenders(arguments.density)[name]
    gc.collect()
    on_gpu = arguments.device == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
    others = torch.cuda.memory_allocated() if on_gpu else 0
    trainee = prepared(contender, data, arguments, record)
    record["parameters"] = sum(parameter.numel() for parameter in trainee.model.parameters())
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()

    def note(result: dict[str, Any]) -> None:
        record["results"].append(result)
        print(f"  {result['step']:6} steps {result['seconds']:8.2f} s  {result['loss']:.4f} nats", flush=True)

    train(trainee, data, arguments, note)
    last = record["results"][-1]
    record["tokens_per_second"] = last["step"] * arguments.batch * arguments.context / last["seconds"]
    record["peak_bytes"] = torch.cuda.max_memory_allocated() - others if on_gpu else None
    record["stored_bytes"] = stored_bytes(trainee.model)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exit status 1 if the GPU gave up."""
    arguments = parsed(_parser(), argv)
    return run_benchmark(arguments, _run)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=Path("training.json"), help="results as JSON (%(default)s)"
    )
    parser.add_argument("--commit", help="of the sources (default: ask git)")
    parser.add_argument("--contenders", type=subset(NAMES), default=NAMES, help=f"of {','.join(NAMES)} (all)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training (%(default)s)")
    parser.add_argument("--steps", type=positive, default=10_000, help="at most (%(default)s)")
    parser.add_argument("--layers", type=positive, default=8, help="(%(default)s)")
    parser.add_argument("--width", type=positive, default=1536, help="a multiple of 64 (%(default)s)")
    parser.add_argument("--context", type=positive, default=1024, help="tokens (%(default)s)")
    parser.add_argument("--batch", type=positive, default=32, help="(%(default)s)")
    parser.add_argument("--density", type=float, default=0.5, help="of blocks (%(default)s)")
    parser.add_argument("--block", type=positive, default=128, help="rows and columns (%(default)s)")
    parser.add_argument("--every", type=positive, default=10, help="steps between masks (%(default)s)")
    parser.add_argument(
        "--evaluate-every", type=positive, default=50, help="steps, a multiple of 10 (%(default)s)"
    )
    parser.add_argument("--held-out-batches", type=positive, default=8, help="(%(default)s)")
    parser.add_argument("--megabytes", type=positive, default=64, help="of text at most (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, patterns and data (%(default)s)")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="train eagerly")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu only tries the script (%(default)s)"
    )
    return parser


def _run(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    data = Data(arguments)
    document["text_bytes"] = dict(zip(("training", "held_out"), data.sizes, strict=True))
    for name in arguments.contenders:
        print(name, flush=True)
        record: dict[str, Any] = {"contender": name, "results": []}
        document["cases"].append(record)
        with recording(record, name):
            measure(name, data, arguments, record)
        write_json(arguments.output, document)
        torch.compiler.reset()


if __name__ == "__main__":
    raise SystemExit(main())

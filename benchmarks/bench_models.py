"""Times whole models on a GPU, dense and with block-sparse linear layers, in bfloat16 or 8 bits.

    python benchmarks/bench_models.py --output models.json
    python benchmarks/report.py models.json

README.md beside this says what is measured and how.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from harness import (
    WARM_UP_CALLS,
    CapturedCall,
    Timer,
    Unavailable,
    add_names,
    block_list,
    density_list,
    judged,
    parsed,
    positive,
    print_result,
    recording,
    relative_error,
    result_parser,
    run_benchmark,
    steady_times,
    warm_up,
    write_json,
)
from models import MODELS, TASKS, Architecture, make_dense, make_float8, make_sparse
from torch import Tensor, nn
from torch.nn import functional as F

MODES = ("eager", "graph", "compile-graph")
CAPTURED = ("graph", "compile-graph")
DTYPE = torch.bfloat16
TOLERANCE = 5e-2  # relative, Frobenius norm; every layer rounds to bfloat16
LEARNING_RATE = 1e-5  # the targets are noise
COMPILED_MODELS = 256  # in one process; PyTorch stops at 8 of the same code


class Group(NamedTuple):
    """One dense model and the settings it is compared in."""

    name: str
    architecture: Architecture
    task: str
    mode: str

    @property
    def title(self) -> str:
        return f"{self.name} {self.task} {self.mode}"


class Prepared(NamedTuple):
    """A call that runs a model, and the most memory it took, with all that the model holds."""

    call: Callable[[], Tensor]
    peak_bytes: int | None
    parameters: int


class Bench:
    """Prepares models on one device and times them."""

    def __init__(
        self, device: torch.device, repetitions: int, seed: int, activations: str | None = None
    ) -> None:
        self.device, self.repetitions, self.seed = device, repetitions, seed
        self.activations = activations
        self.timer = Timer(device, launch_seconds=None)

    def dense(self, group: Group) -> Prepared:
        """The dense model of a group, in float8 if that is what users would pick instead."""
        if self.activations is not None:
            return self._prepared(group, lambda: make_float8(self._build(group)))
        return self._prepared(group, lambda: self._build(group))

    def sparse(self, group: Group, density: float, block_shape: tuple[int, int]) -> Prepared:
        """The same model with block-sparse layers."""
        return self._prepared(group, lambda: self._sparse(group, density, block_shape))

    def error(
        self, group: Group, density: float, block_shape: tuple[int, int], call: Callable[[], Tensor]
    ) -> float | None:
        """Relative error of the output of inference against the expanded weights."""
        model = make_dense(self._sparse(group, density, block_shape))
        with torch.no_grad():
            return relative_error(call(), model.eval()(self._inputs(group)).float())

    def _sparse(self, group: Group, density: float, block_shape: tuple[int, int]) -> nn.Module:
        x = self._inputs(group)
        return make_sparse(self._build(group), density, block_shape, self.seed, self.activations, x)

    def _build(self, group: Group) -> nn.Module:
        return group.architecture.build(self.device, DTYPE, self.seed)

    def _inputs(self, group: Group) -> Tensor:
        return group.architecture.inputs(self.device, DTYPE, self.seed)

    def _prepared(self, group: Group, build: Callable[[], nn.Module]) -> Prepared:
        """The peak is counted from what others hold, once the model stands."""
        free_memory()
        x, others = self._inputs(group), self._allocated()
        model = build().train(group.task == "training")
        parameters = sum(parameter.numel() for parameter in model.parameters())
        free_memory()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        call = prepare(model, x, group.task, group.mode)
        for _ in range(WARM_UP_CALLS):
            call()
        peak = torch.cuda.max_memory_allocated() - others if self.device.type == "cuda" else None
        return Prepared(call, peak, parameters)

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0


def prepare(model: nn.Module, x: Tensor, task: str, mode: str) -> Callable[[], Tensor]:
    """Return a function that runs a model once: inference gives its output, a step of training the loss."""
    if mode in CAPTURED and not x.is_cuda:
        raise Unavailable("CUDA graphs need a GPU")
    if mode == "compile-graph":
        for block in model.get_submodule("blocks").children():
            block.compile(fullgraph=True, dynamic=False)
    call = training_step(model, x, mode) if task == "training" else torch.no_grad()(lambda: model(x))
    return CapturedCall(call) if mode in CAPTURED else call


def training_step(model: nn.Module, x: Tensor, mode: str) -> Callable[[], Tensor]:
    """Forward, backward and AdamW, towards outputs that are random numbers."""
    target = torch.randn_like(x)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, fused=True, capturable=mode in CAPTURED
    )

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def free_memory() -> None:
    """Gives back what dropped models held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exit status 1 if an output was wrong or the GPU gave up."""
    arguments = parsed(_parser(), argv)
    return run_benchmark(arguments, _run)


def _parser() -> argparse.ArgumentParser:
    parser = result_parser(__doc__, "models.json", 540.0, device=True, repetitions=10, seed=True)
    for option, names in (("--models", MODELS), ("--tasks", TASKS), ("--modes", MODES)):
        add_names(parser, option, names)
    parser.add_argument("--densities", type=density_list, default=(0.5, 0.25, 0.1), help="(.5,.25,.1)")
    parser.add_argument("--blocks", type=block_list, help="as 32 or 128x32 (64,128, for roberta 32 too)")
    parser.add_argument(
        "--activations",
        choices=("int8", "float8_e4m3fn"),
        help="in 8 bits, as all weights; dense layers are in float8 (bfloat16, all)",
    )
    for name in ("layers", "batch", "tokens"):
        parser.add_argument(f"--{name}", type=positive, help="(the model's)")
    return parser


def _run(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    torch._dynamo.config.cache_size_limit = COMPILED_MODELS  # PyTorch 2.6 has no other name for it
    bench = Bench(
        torch.device(arguments.device), arguments.repetitions, arguments.seed, arguments.activations
    )
    if arguments.device == "cuda":
        warm_up()
    deadline = time.monotonic() + arguments.budget
    for group in _groups(arguments):
        if time.monotonic() > deadline:
            document["stopped"] = f"budget of {arguments.budget:g} s spent before {group.title}"
            return
        print(group.title, flush=True)
        record = _description(group)
        document["cases"].append(record)
        with recording(record, "dense"):
            for result in _results(bench, group, record, arguments, deadline):
                record["results"].append(result)
                write_json(arguments.output, document)
        torch.compiler.reset()
        if record.pop("stopped", False):
            document["stopped"] = f"budget of {arguments.budget:g} s spent within {group.title}"
            return


def _results(
    bench: Bench, group: Group, record: dict[str, Any], arguments: argparse.Namespace, deadline: float
) -> Iterator[dict[str, Any]]:
    """Results of all blocks and densities for which there is time, against one dense model."""
    dense = bench.dense(group)
    record |= _held(dense)
    print(f"  dense   {bench.timer.microseconds(dense.call, 3) / 1e3:16.3f} ms", flush=True)
    for block_shape in arguments.blocks or group.architecture.blocks:
        for density in arguments.densities:
            if time.monotonic() > deadline:
                record["stopped"] = True
                return
            yield _result(bench, group, dense, density, block_shape)


def _groups(arguments: argparse.Namespace) -> Iterator[Group]:
    sizes = {name: getattr(arguments, name) for name in ("layers", "batch", "tokens")}
    sizes = {name: size for name, size in sizes.items() if size is not None}
    for name in arguments.models:
        architecture = MODELS[name].with_sizes(**sizes)
        for task in arguments.tasks:
            if task in architecture.tasks:
                for mode in arguments.modes:
                    yield Group(name, architecture, task, mode)


def _description(group: Group) -> dict[str, Any]:
    return {
        "model": group.name,
        "task": group.task,
        "mode": group.mode,
        "size": dataclasses.asdict(group.architecture.size),
        "results": [],
    }


def _held(prepared: Prepared) -> dict[str, Any]:
    return {"parameters": prepared.parameters, "peak_bytes": prepared.peak_bytes}


def _result(
    bench: Bench, group: Group, dense: Prepared, density: float, block_shape: tuple[int, int]
) -> dict[str, Any]:
    result: dict[str, Any] = {"block_shape": list(block_shape), "density": density}
    with recording(result, f"{'x'.join(map(str, block_shape))} {density:g}"):
        sparse = bench.sparse(group, density, block_shape)
        result |= _held(sparse)
        if group.task == "inference":
            error = bench.error(group, density, block_shape, sparse.call)
            result |= judged(error, TOLERANCE)
        times = steady_times(sparse.call, dense.call, bench.timer, bench.repetitions)
        result |= times.record()
        print_result(f"{'x'.join(map(str, block_shape))} {density:g}", result)
    return result


if __name__ == "__main__":
    sys.exit(main())

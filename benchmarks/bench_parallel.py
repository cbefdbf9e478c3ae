"""Trains MLP blocks, dense and sparse, in one process and in several: step time, memory and losses.

    python benchmarks/bench_parallel.py --output parallel.json
    python benchmarks/bench_parallel.py --device cpu --layers 2 --hidden 128 --ffn 256 --block 16 --tokens 64

README.md beside this says what is measured and how.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from harness import add_names, positive, recording, result_parser, run_benchmark, warm_up, write_json
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tilesparse import BlockPattern, BlockSparseLinear
from tilesparse.distributed import ColwiseParallel, RowwiseParallel, synchronize_patterns

CONTENDERS = ("dense", "sparse")
WAYS = ("one", "ddp", "fsdp", "tp")
BATCHES = 2  # that are trained on in turn
WARM_UP_STEPS = 3
GROUPS = 3  # of steps, between which the host waits
LEARNING_RATE = 1e-4
TOLERANCE = 0.01  # of a loss, relative to that of one process
TIMEOUT = datetime.timedelta(seconds=120)


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        normalised = F.layer_norm(x, x.shape[-1:]).to(x.dtype)
        result: Tensor = x + self.down(F.gelu(self.up(normalised)))
        return result


def build(contender: str, arguments: argparse.Namespace, device: torch.device) -> nn.Sequential:
    """The same model in every process."""
    torch.manual_seed(arguments.seed)
    generator = torch.Generator().manual_seed(arguments.seed)
    count = arguments.processes

    def linear(inputs: int, outputs: int, parts: tuple[int, int]) -> nn.Module:
        if contender == "dense":
            return nn.Linear(inputs, outputs, bias=False, device=device)
        pattern = BlockPattern.random(
            (outputs, inputs),
            block_shape=arguments.block,
            density=arguments.density,
            parts=parts,
            generator=generator,
        )
        return BlockSparseLinear(inputs, outputs, bias=False, pattern=pattern, device=device)

    hidden, ffn = arguments.hidden, arguments.ffn
    model = nn.Sequential(
        *(
            Block(linear(hidden, ffn, (count, 1)), linear(ffn, hidden, (1, count)))
            for _ in range(arguments.layers)
        )
    )
    synchronize_patterns(model)
    return model


def share(model: nn.Sequential, way: str, mesh: DeviceMesh) -> nn.Module:
    """The model as one of several processes trains it."""
    if way == "ddp":
        return DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)
    if way == "tp":
        plan = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
        return parallelize_module(model, mesh, plan)
    if way == "fsdp":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


class Trainee:
    """A model with its optimizer, and the data that this process trains it on."""

    def __init__(self, contender: str, way: str, arguments: argparse.Namespace, mesh: DeviceMesh) -> None:
        self._device = torch.device(mesh.device_type)
        self._data_parallel = way in ("ddp", "fsdp")
        self._autocast = way != "fsdp"  # whose parameters are cast before they are sent
        self.model = share(build(contender, arguments, self._device), way, mesh)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        generator = torch.Generator(self._device).manual_seed(arguments.seed)
        shape = arguments.tokens, arguments.hidden
        batches = (
            torch.randn(shape, generator=generator, device=self._device).bfloat16() for _ in range(BATCHES)
        )
        shares, mine = (mesh.size(), mesh.get_local_rank()) if self._data_parallel else (1, 0)
        self._batches = [batch.chunk(shares)[mine].clone() for batch in batches]
        self._steps = 0

    def backward(self) -> Tensor:
        x = self._batches[self._steps % BATCHES]
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
            y = self.model(x)
        loss = F.mse_loss(y.float(), torch.sin(2 * x.float()))
        loss.backward()
        return loss.detach()

    def step(self) -> Tensor:
        loss = self.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._steps += 1
        return loss

    def mean(self, losses: Tensor) -> list[float]:
        """Mean over all processes, whose shares of the data are equal."""
        if self._data_parallel:
            dist.all_reduce(losses)
            losses /= dist.get_world_size()
        numbers: list[float] = losses.tolist()
        return numbers


def measure(contender: str, way: str, arguments: argparse.Namespace, mesh: DeviceMesh) -> dict[str, Any]:
    """Measurements of one process."""
    on_gpu = mesh.device_type == "cuda"
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trainee = Trainee(contender, way, arguments, mesh)
    losses = [trainee.step() for _ in range(WARM_UP_STEPS)]
    times = []
    for _ in range(GROUPS):
        start = now(on_gpu)
        losses += [trainee.step() for _ in range(arguments.steps)]
        times.append((now(on_gpu) - start) / arguments.steps)
    return {
        "step_ms": round(1e3 * statistics.median(times), 3),
        "losses": [round(loss, 6) for loss in trainee.mean(torch.stack(losses))],
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
    }


def now(on_gpu: bool) -> float:
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


def _run(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    mesh = init_device_mesh(arguments.device, (arguments.processes,))
    if arguments.device == "cuda":
        warm_up()
    first = dist.get_rank() == 0
    for contender in arguments.contenders:
        for way in arguments.ways:
            record: dict[str, Any] = {"contender": contender, "way": way, "results": []}
            document["cases"].append(record)
            with recording(record, f"{contender}, {way}"):
                mine = None
                if way != "one" or first:
                    mine = measure(contender, way, arguments, mesh)
                else:
                    build(contender, arguments, torch.device(mesh.device_type))  # agrees on the pattern
                everyone: list[Any] = [None] * arguments.processes
                dist.all_gather_object(everyone, mine)
                record["results"] = [
                    {"process": rank, **theirs} for rank, theirs in enumerate(everyone) if theirs is not None
                ]
                compare(document["cases"], record)
            if first:
                print(contender, way, record["results"], flush=True)
                write_json(arguments.output, document)


def compare(cases: Sequence[dict[str, Any]], record: dict[str, Any]) -> None:
    """Notes how far the losses are from those of one process."""
    expected = next(
        (case for case in cases if (case["contender"], case["way"]) == (record["contender"], "one")), None
    )
    if expected is None or not expected["results"]:
        return
    alone = expected["results"][0]["losses"]
    for result in record["results"]:
        apart = max(abs(a - b) / abs(b) for a, b in zip(result["losses"], alone, strict=True))
        result["loss_difference"] = apart
        result["wrong"] = not apart <= TOLERANCE


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark in this process and those it starts; exit status 1 if losses were wrong."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and torch.cuda.device_count() < arguments.processes:
        parser.error(
            f"{arguments.processes} CUDA devices expected, PyTorch finds {torch.cuda.device_count()}"
        )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    others = spawn(_join, (arguments, port), nprocs=arguments.processes - 1, join=False)
    status = _with_others(0, arguments, port, lambda: run_benchmark(arguments, _run))
    while not others.join():
        pass
    return status


def _join(index: int, arguments: argparse.Namespace, port: int) -> None:
    _with_others(index + 1, arguments, port, lambda: _run(arguments, {"cases": []}))
    # Threads of Gloo may still be letting go of tensors, and abort where they find the interpreter gone.
    os._exit(0)


def _with_others(rank: int, arguments: argparse.Namespace, port: int, call: Callable[[], Any]) -> Any:
    on_gpu = arguments.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // arguments.processes))
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=arguments.processes,
        timeout=TIMEOUT,
        device_id=torch.device("cuda", rank) if on_gpu else None,
    )
    try:
        return call()
    finally:
        dist.destroy_process_group()


def _parser() -> argparse.ArgumentParser:
    parser = result_parser(__doc__, "parallel.json", device=True, seed=True)
    add_names(parser, "--contenders", CONTENDERS)
    add_names(parser, "--ways", WAYS)
    parser.add_argument("--processes", type=positive, default=2, help="with a GPU each (%(default)s)")
    parser.add_argument("--layers", type=positive, default=4, help="(%(default)s)")
    parser.add_argument("--hidden", type=positive, default=4096, help="(%(default)s)")
    parser.add_argument("--ffn", type=positive, default=14336, help="(%(default)s)")
    parser.add_argument("--tokens", type=positive, default=16384, help="of all processes (%(default)s)")
    parser.add_argument("--density", type=float, default=0.25, help="of blocks (%(default)s)")
    parser.add_argument("--block", type=positive, default=128, help="rows and columns (%(default)s)")
    parser.add_argument("--steps", type=positive, default=10, help="between two waits (%(default)s)")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())

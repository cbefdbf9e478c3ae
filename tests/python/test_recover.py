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
from helpers import DEVICES, SIZES, randn, seeded
from test_docs import executed
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    T5Model,
)
from transformers.utils import logging

from tilesparse import BlockSparseConfig, BlockSparseLinear, distill_, prune_, reconstruct_, sparsify_
from tilesparse.errors import InvalidArgumentError, UnsupportedError
from tilesparse.recover import DistillationLoss, reconstruction
from tilesparse.recover import distillation as losses
from tilesparse.train import PatternSchedule

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


LOGITS = torch.zeros(2, 3, 5)


@pytest.mark.parametrize(
    ("term", "student", "teacher", "mask", "message"),
    [
        ("logits", LOGITS, torch.zeros(2, 3, 7), None, "logits of the student's shape"),
        ("logits", outputs(x=1), LOGITS, None, "student must give outputs with 'logits'"),
        ("task", outputs(logits=LOGITS), LOGITS, None, "student must give outputs with 'loss'"),
        (
            "hidden_states",
            outputs(hidden_states=[LOGITS]),
            outputs(hidden_states=()),
            None,
            "must give 1 hidden",
        ),
        ("logits", LOGITS, LOGITS, torch.ones(2, 4), "attention_mask must"),
        ("logits", LOGITS.flatten(0, 1), LOGITS.flatten(0, 1), torch.ones(2, 3), "attention_mask must"),
    ],
)
def test_what_does_not_fit_is_named(
    term: str, student: Any, teacher: Any, mask: Tensor | None, message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        DistillationLoss(**{term: 1.0})(student, teacher, mask)
    with pytest.raises(InvalidArgumentError, match="at least one of task"):
        DistillationLoss()


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
    model, other = (pruned(teacher, r".*attention\.self\.value", density=0.25) for _ in range(2))
    exact = reconstruct_(model, teacher, texts(6), epochs=2, lr=2e-3)
    mixed = reconstruct_(other, teacher, texts(6), epochs=2, lr=2e-3, autocast=torch.bfloat16)
    for one, two in zip(mixed.layers, exact.layers, strict=True):
        assert two.kept and abs(one.error_before / two.error_before - 1) < 0.02
        assert abs(one.error / two.error - 1) < 0.1


def test_layers_outside_of_the_stack_are_reported() -> None:
    teacher = dense("bert")
    model = pruned(teacher, r"encoder\.layer\.1|pooler")
    before = tensors_of(model)
    with pytest.warns(UserWarning, match=r"did not fit pooler\.dense \(outside of the stack"):
        report = reconstruct_(model, teacher, texts(4), epochs=1)
    assert len(report.layers) == 3
    assert [one.name for one in report.skipped] == ["pooler.dense"] and "skipped pooler.dense" in str(report)
    assert torch.equal(model.pooler.dense.weight, before["pooler.dense.weight"])


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
    with pytest.raises(InvalidArgumentError, match="model must have parameters to train"):
        reconstruct_(model.requires_grad_(False), teacher, texts(3))


class TwoTowers(nn.Module):
    """A stack whose blocks have longer ones in them, a stack behind it, and a layer between them."""

    idle = False

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))) for _ in range(2))
        self.between = nn.Linear(64, 64)
        self.second = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.first:
            x = block(x)
        x = torch.tanh(self.between(x))
        for block in () if self.idle else self.second:
            x = block(x)
        return x


def texts_to_text(count: int) -> list[dict[str, Tensor]]:
    return [batch | {"decoder_input_ids": batch["input_ids"].roll(1, 1)} for batch in texts(count)]


T5: dict[str, Any] = {**D64, "d_kv": 32, "d_ff": 128, "num_heads": 2, "num_layers": 2}
ENCODED = [f"encoder.block.{block}.layer.{i}" for block in (0, 1) for i in (0, 1)]
DECODED = [f"decoder.block.{block}.layer.{i}" for block in (0, 1, 2) for i in (0, 1, 2)]
TOWERS = ["first.0", "first.1", "second.0", "second.1"]
# The blocks that data go through, and the submodules fitted on the way. A position bias that a block of T5
# gives to those behind it is computed anew in the model as a whole.
STACKS: dict[str, tuple[Callable[[], Any], Callable[[int], list[Any]], str, list[str], list[str]]] = {
    "t5": (
        lambda: T5Model(T5Config(**T5, num_decoder_layers=3)),
        texts_to_text,
        r".*\.block\.",
        [""],
        ENCODED + DECODED,
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
    if name == "custom":
        model.idle = teacher.idle = True
        with pytest.warns(UserWarning, match=r"second\.\*\.\* \(2\) \(does not run"):
            assert len(reconstruct_(model, teacher, batches(3), epochs=1).layers) == 6


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
    report = reconstruct_(model, teacher, batches, epochs=1)
    with torch.no_grad():
        y, t = model(batches[-1].clone()), teacher(batches[-1].clone())
    expected = float((y - t).square().sum() / t.square().sum())
    torch.testing.assert_close(report.layers[0].error, expected, rtol=1e-4, atol=0)
    history = distill_(copy.deepcopy(teacher), teacher, batches[:1], lr=1e-3)
    assert history.loss[0] == pytest.approx(0, abs=1e-6)  # both had inputs of their own
    assert all(torch.equal(one, two) for one, two in zip(batches, vectors(4), strict=True))


def without_data() -> list[dict[str, Tensor]]:
    return [{name: value.to("meta") for name, value in batch.items()} for batch in texts(2)]


MLP = "model.layers.0.mlp"
# By what changes, made of the model and its teacher: the argument that is named.
REFUSED: dict[str, tuple[str, Callable[[Any, Any], dict[str, Any]]]] = {
    "epochs": ("epochs must", lambda m, t: {"epochs": 0}),
    "lr": ("lr must", lambda m, t: {"lr": 0.0}),
    "autocast": ("autocast must", lambda m, t: {"autocast": torch.float32}),
    "one batch": ("batches must be at least two", lambda m, t: {"batches": texts(1)}),
    "no data": ("batches must have tensors with data", lambda m, t: {"batches": without_data()}),
    "a batch": ("batches must be .* got dict", lambda m, t: {"batches": texts(1)[0]}),
    "a tensor": ("batches must be .* got Tensor", lambda m, t: {"batches": texts(1)[0]["input_ids"]}),
    "device": ("device", lambda m, t: {"device": "abacus"}),
    "no device": ("device must have memory", lambda m, t: {"device": "meta"}),
    "dense": ("model must have a BlockSparseLinear", lambda m, t: {"model": copy.deepcopy(t)}),
    "itself": ("teacher must have parameters of its own", lambda m, t: {"teacher": m}),
    "idle": ("does not run", lambda m, t: {"forward": lambda model, batch: None}),
    "cache": ("past_key_values", lambda m, t: {"batches": [b | {"use_cache": True} for b in texts(2)]}),
    "meta": ("meta device", lambda m, t: {"teacher": copy.deepcopy(t).to("meta")}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_reconstruction_refuses_and_leaves_the_model(name: str) -> None:
    model, teacher = pair("llama")
    message, change = REFUSED[name]
    arguments: dict[str, Any] = {"model": model, "teacher": teacher, "batches": texts(3), "epochs": 1}
    before = tensors_of(model)
    with pytest.raises(InvalidArgumentError, match=message):
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
        reconstruct_(model, teacher, vectors(3))
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


def test_schedules_step_after_the_optimizer_and_runs_resume() -> None:
    teacher = dense("llama")
    batches, loss = texts(8), DistillationLoss(logits=1.0)

    def start() -> tuple[Any, list[Any]]:
        model = pruned(teacher, "llama")
        optimizer = adam(model)
        schedule = PatternSchedule(model, optimizer, fraction=0.4, every=2, grow="gradient")
        fractions = torch.optim.lr_scheduler.ExponentialLR(schedule, 0.7)
        return model, [optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8), schedule, fractions]

    def run(model: Any, states: list[Any], some: list[Any]) -> None:
        optimizer, rates, schedule, fractions = states

        def after(*_: Any) -> None:
            schedule.step()
            fractions.step()

        distill_(model, teacher, some, optimizer, loss=loss, scheduler=rates, callback=after)

    whole, states = start()
    run(whole, states, batches)
    assert states[1].last_epoch == states[3].last_epoch == 8
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


def test_distillation_refuses_and_leaves_the_model() -> None:
    model, teacher = pair("llama")
    before, old = tensors_of(model), adam(teacher)
    partial = torch.optim.AdamW(model.model.embed_tokens.parameters())
    given: dict[str, Any] = {"model": model, "teacher": teacher, "batches": texts(2)}
    given |= {"optimizer": adam(model), "loss": DistillationLoss(logits=1.0, hidden_states=1.0)}
    larger = LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": VOCABULARY + 32}))
    deeper = LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": 3}))
    for change, message in [
        ({"teacher": model}, "teacher must have parameters of its own"),
        ({"teacher": larger}, "logits of the student's shape"),
        ({"teacher": deeper}, "3 hidden_states, as the student does, got 4"),
        ({"optimizer": old}, "optimizer: the weight of layer 'model.layers.0.self_attn.q_proj'"),
        ({"optimizer": partial}, "optimizer: the weight of layer"),
        ({"batches": []}, "batches must have at least one"),
        ({"batches": without_data()}, "batches must have tensors with data"),
        ({"batches": texts(1)[0]}, "batches must be .* got dict"),
        ({"accumulate": 0}, "accumulate must be"),
        ({"clip": -1}, "clip must be"),
        ({"autocast": torch.float32}, "autocast must be torch.bfloat16 or None"),
        ({"graph": True}, "on one CUDA device where graph is True"),
    ]:
        with pytest.raises(InvalidArgumentError, match=message):
            distill_(**(given | change))
        assert same(tensors_of(model), before), message
    with torch.no_grad():  # it is training
        assert len(distill_(**given).loss) == 2 and not same(tensors_of(model), before)


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = executed("recovery.md")
    assert names["history"].loss[-1] < names["history"].loss[0]


def test_what_would_train_nothing_is_refused() -> None:
    student, teacher = pair("llama")
    before, batches = copy.deepcopy(tensors_of(student)), texts(8)
    optimizer = adam(student)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    dense_student = copy.deepcopy(teacher)
    for model, other, schedulers, named in (
        (dense_student, adam(nn.Linear(2, 2)), None, "optimizer must have parameters of the model"),
        (student, optimizer, plateau, r"scheduler must have a step\(\)"),
        (student, optimizer, [plateau], r"scheduler must have a step\(\)"),
    ):
        with pytest.raises(InvalidArgumentError, match=named):
            distill_(model, teacher, batches, other, scheduler=schedulers)
    batches[-1]["attention_mask"][:] = 0
    with pytest.raises(InvalidArgumentError, match="none in the held-out ones"):
        reconstruct_(student, teacher, batches)
    mask, hidden = torch.ones(1, 5), randn(2, 5, 8, dtype=torch.float32)
    given = outputs(last_hidden_state=hidden)
    with pytest.raises(InvalidArgumentError, match="attention_mask must be"):
        DistillationLoss(embeddings=1.0).terms(given, given, mask)
    assert same(before, tensors_of(student))

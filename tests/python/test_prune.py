"""Pruning with compensation: exactness of its linear algebra, and whole models."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import DEVICES, SIZES, seeded
from test_docs import executed
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5Model,
)

from tilesparse import BlockPattern, BlockSparseLinear, cli, prune_
from tilesparse.calibrate.calibration import Damped, Moments, damped
from tilesparse.cli.demo import GPT
from tilesparse.cli.demo import SIZES as DEMO
from tilesparse.config import BlockSparseConfig as Config
from tilesparse.errors import InvalidArgumentError
from tilesparse.prune import driver, measure_errors

B = 16


def inputs(tokens: int, features: int, seed: int = 0) -> Tensor:
    """Correlated inputs with outliers in some features."""
    generator = seeded(seed)
    x = torch.randn(tokens, features, generator=generator, dtype=torch.float64)
    x = x + 2 * torch.randn(tokens, 4, generator=generator, dtype=torch.float64) @ torch.randn(
        4, features, generator=generator, dtype=torch.float64
    )
    x[:, ::7] *= 5
    return x


def layer_problem(rows: int = 3, cols: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """(x, W, XᵀX / tokens)."""
    x = inputs(400, cols * B)
    weight = torch.randn(rows * B, cols * B, generator=seeded(1), dtype=torch.float64)
    return x, weight, x.T @ x / len(x)


def least_squares(weight: Tensor, moment: Damped, mask: Tensor) -> Tensor:
    """Row by row, by a least-squares solver, of the factor of H in place of X."""
    root = torch.linalg.cholesky(moment.matrix).T
    solution = torch.zeros_like(weight)
    for row, kept in enumerate(mask):
        columns = kept.nonzero().flatten()
        right = root @ weight[row]
        solution[row, columns] = torch.linalg.lstsq(root[:, columns], right[:, None]).solution[:, 0]
    return solution


def loss(weight: Tensor, other: Tensor, moment: Damped) -> float:
    wrong = weight.double() - other.double()
    return float(((wrong @ moment.matrix) * wrong).sum())


# Linear algebra.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_refit_is_the_least_squares_solution(device: str, dtype: torch.dtype) -> None:
    _, weight, second = layer_problem()
    pattern = BlockPattern.random(weight.shape, block_shape=B, density=0.5, generator=seeded())
    moment = driver.damped(second.to(device))
    found = driver.solve(weight.to(device, dtype), moment, pattern.to(device)).cpu()
    expected = least_squares(weight.to(dtype).double(), driver.damped(second), pattern.to_mask())
    assert float((found - expected).norm() / expected.norm()) < 1e-5
    assert found[~pattern.to_mask()].count_nonzero() == 0


def test_refit_minimises_the_damped_error_of_the_data_themselves() -> None:
    x, weight, second = layer_problem()
    pattern = BlockPattern.random(weight.shape, block_shape=B, density=0.4, generator=seeded())
    added = driver.damped(second, 0.05).added
    stacked = torch.cat([x / len(x) ** 0.5, added**0.5 * torch.eye(x.shape[1], dtype=torch.float64)])
    found = driver.solve(weight, driver.damped(second, 0.05), pattern)
    for row, kept in enumerate(pattern.to_mask()):
        right = (stacked @ weight[row])[:, None]
        expected = torch.linalg.lstsq(stacked[:, kept], right).solution[:, 0]
        assert float((found[row, kept] - expected).norm()) <= 1e-9 * float(expected.norm())


@pytest.mark.parametrize("cols", [5, 40])
def test_costs_add_up_to_what_the_refit_leaves(cols: int) -> None:
    """With 40 columns several blocks go together in a round."""
    _, weight, second = layer_problem(2, cols)
    moment = driver.damped(second)
    order, costs = driver.eliminate(weight.float(), moment, (B, B))
    assert [sorted(row) for row in order.tolist()] == [list(range(cols))] * 2
    for count in (1, 2, cols // 2, cols - 1, cols):
        mask = torch.ones(2, cols, dtype=torch.bool)
        mask.scatter_(1, order[:, :count], False)
        left = driver.solve(weight, moment, BlockPattern.from_block_mask(mask, block_shape=B))
        assert float(costs[:, :count].sum()) == pytest.approx(loss(weight, left, moment), rel=1e-4)


def test_one_by_one_it_is_greedy_as_solved_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "GROUP", 0.01)
    _, weight, second = layer_problem(1, 6)
    moment = driver.damped(second)
    elimination = driver.eliminate(weight, moment, (B, B))
    order = elimination.order[0].tolist()
    mask = torch.ones(B, 6 * B, dtype=torch.bool)
    for gone in order:
        losses = {}
        for block in range(6):
            trial = mask.clone()
            trial[:, block * B : (block + 1) * B] = False
            if bool((trial != mask).any()):
                losses[block] = loss(weight, least_squares(weight, moment, trial), moment)
        assert gone == min(losses, key=lambda block: losses[block])
        if gone == order[0]:
            assert float(elimination.costs[0, 0]) == pytest.approx(losses[gone], rel=1e-4)
        mask[:, gone * B : (gone + 1) * B] = False


def test_rows_keep_blocks_where_they_cost_most_and_ties_are_cut_alike() -> None:
    order = torch.tensor([[0, 1, 2], [2, 1, 0]])
    costs = torch.tensor([[3.0, 1.0, 9.0], [1.0, 4.0, 8.0]], dtype=torch.float64)
    elimination = driver.Elimination(order, costs)
    masks = {kept: elimination.pattern(kept, (B, B)).to_block_mask().tolist() for kept in range(7)}
    assert masks[5] == [[True, True, True], [True, True, False]]
    assert masks[3] == [[False, False, True], [True, True, False]]  # the cheap block behind the dear one
    assert masks[6] == [[True] * 3] * 2 and masks[0] == [[False] * 3] * 2
    equal = driver.Elimination(order, torch.ones(2, 3, dtype=torch.float64))
    assert equal.pattern(4, (B, B)).to_block_mask().tolist() == [[False, False, True], [True] * 3]


def test_elimination_is_the_same_whatever_the_memory_and_the_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, weight, second = layer_problem(4, 6)
    moment = driver.damped(second)
    plain = driver.eliminate(weight, moment, (B, B))
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            found = driver.eliminate(weight, moment, (B, B))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(found.costs, plain.costs)
    monkeypatch.setattr(driver, "_CPU_WORKSPACE", 1)
    apart = driver.eliminate(weight, moment, (B, B))
    assert torch.equal(plain.order, apart.order)
    torch.testing.assert_close(plain.costs, apart.costs, rtol=1e-4, atol=0)


def test_where_float32_fails_float64_takes_over() -> None:
    _, weight, _ = layer_problem(2, 4)
    x = inputs(30, 64)  # fewer tokens than features: nearly singular
    moment = driver.damped(x.T @ x / 30, 1e-9)
    order, costs = driver.eliminate(weight, moment, (B, B))
    assert bool(costs.isfinite().all()) and sorted(order[0].tolist()) == [0, 1, 2, 3]
    assert float(costs.sum()) == pytest.approx(loss(weight, torch.zeros_like(weight), moment), rel=1e-3)


def test_damping_grows_where_it_is_too_weak() -> None:
    x = inputs(8, 64)
    moment = driver.damped(x.T @ x / 8, 0.0)
    assert moment.damping > 0 and bool(moment.inverse.isfinite().all())
    assert driver.damped(x.T @ x / 8, 0.01).damping == 0.01
    nothing = driver.damped(torch.zeros(32, 32))
    assert torch.equal(nothing.matrix, torch.eye(32, dtype=torch.float64))


@pytest.mark.parametrize(
    "second",
    [torch.full((32, 32), torch.nan), -torch.eye(32)],
    ids=["nan", "sign"],
)
def test_what_is_no_second_moment_is_refused(second: Tensor) -> None:
    with pytest.raises(InvalidArgumentError, match="second_moment"):
        driver.damped(second)


def test_dead_inputs_keep_their_weights_and_cost_nothing() -> None:
    x, weight, _ = layer_problem()
    x[:, : 2 * B] = 0
    moment = driver.damped(x.T @ x / len(x))
    pattern = driver.eliminate(weight, moment, (B, B)).pattern(9, (B, B))
    assert not pattern.to_block_mask()[:, :2].any()
    full = driver.solve(weight, moment, BlockPattern.full(weight.shape, block_shape=B))
    torch.testing.assert_close(full, weight)


def test_masked_rows_are_solved_exactly() -> None:
    _, weight, second = layer_problem(2, 4)
    moment = driver.damped(second)
    mask = torch.rand(weight.shape, generator=seeded(4)) < 0.5
    mask[3] = False
    found = driver.solve_masked(weight, moment, mask)
    torch.testing.assert_close(found, least_squares(weight, moment, mask), rtol=1e-7, atol=1e-9)


def test_two_of_four_are_chosen_in_kept_blocks_only() -> None:
    _, weight, second = layer_problem(2, 4)
    moment = driver.damped(second)
    pattern = BlockPattern.random(weight.shape, block_shape=32, density=0.5, generator=seeded())
    mask = driver.choose_two_of_four(driver.solve(weight, moment, pattern), moment, pattern)
    groups = mask.view(32, -1, 4).sum(2)
    assert torch.equal(groups == 2, pattern.to_mask().view(32, -1, 4).all(2))


def test_scores_by_their_definitions() -> None:
    weight, norms = torch.randn(32, 48), torch.rand(48)
    w = weight[16:, :16]
    assert driver.scores_of(weight, (B, B))[1, 0] == pytest.approx(float(w.norm()), rel=1e-5)
    expected = float((w.abs() * norms[:16]).sum())
    assert driver.scores_of(weight, (B, B), norms)[1, 0] == pytest.approx(expected, rel=1e-5)


# Models.


class Case:
    """A model, data for it, and what of its output counts."""

    def __init__(
        self, make: Callable[[], nn.Module], batches: list[Any], stack: str | None, skipped: int = 0
    ) -> None:
        torch.manual_seed(0)
        self.model = make().eval()
        self.batches, self.stack, self.skipped = batches, stack, skipped

    @torch.no_grad()
    def outputs(self) -> list[Tensor]:
        found = []
        for batch in self.batches:
            y = self.model(**batch) if isinstance(batch, dict) else self.model(batch)
            found.append(y if isinstance(y, Tensor) else y[0])
        return found


def tokens(size: tuple[int, int] = (4, 24)) -> list[dict[str, Tensor]]:
    return [{"input_ids": torch.randint(3, 96, size, generator=seeded(seed))} for seed in range(4)]


SMALL: dict[str, Any] = {key: size for key, size in SIZES.items() if key != "max_position_embeddings"}


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=1, tie_word_embeddings=False))


def bert() -> BertModel:
    return BertModel(BertConfig(**SMALL))


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=2, n_positions=40))


def t5() -> T5Model:
    return T5Model(T5Config(vocab_size=96, d_model=64, d_ff=128, d_kv=32, num_layers=2, num_heads=2))


def mlp() -> Any:
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(inplace=True), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )


class Shared(nn.Module):
    """One layer at two places, and one that is not in the chain."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.again = self.first
        self.last = nn.ModuleDict({"inner": nn.Linear(64, 32, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        return self.last["inner"](torch.tanh(self.again(torch.tanh(self.first(x)))))


def vectors() -> list[Tensor]:
    return [inputs(64, 64, seed).float() / 5 for seed in range(4)]


CASES: dict[str, Callable[[], Case]] = {
    "llama": lambda: Case(llama, tokens(), "model.layers", 1),
    "bert": lambda: Case(bert, tokens(), "encoder.layer"),
    "gpt2": lambda: Case(gpt2, tokens(), "transformer.h", 1),
    "t5": lambda: Case(
        t5, [b | {"decoder_input_ids": b["input_ids"][:, :8]} for b in tokens()], "decoder.block"
    ),
    "gpt": lambda: Case(
        lambda: GPT(DEMO["tiny"]), [b["input_ids"] for b in tokens(size=(2, 32))], "blocks.0.mlp"
    ),
    "mlp": lambda: Case(mlp, vectors(), "", 1),
    "shared": lambda: Case(Shared, vectors(), None),
}


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def unchanged(model: nn.Module, before: dict[str, Tensor]) -> bool:
    now = model.state_dict()
    hooks = any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    return not hooks and now.keys() == before.keys() and all(torch.equal(now[n], before[n]) for n in now)


def difference(after: list[Tensor], before: list[Tensor]) -> float:
    return float(sum((a - b).square().sum() for a, b in zip(after, before, strict=True)))


@pytest.mark.parametrize("name", CASES)
def test_models_are_pruned_and_obs_beats_magnitude(name: str) -> None:
    case = CASES[name]()
    dense = case.outputs()
    errors = {}
    for method, by_refit in (("obs", True), ("magnitude", False)):
        own = CASES[name]()
        report = prune_(own.model, Config(0.5, 16), own.batches, method=method, refit=by_refit)
        assert report.facts["stack"] == case.stack and len(report.skipped) == case.skipped
        sparse = {n for n, m in own.model.named_modules() if isinstance(m, BlockSparseLinear)}
        assert sparse == {layer.name for layer in report.layers} and sparse
        assert all(layer.density == pytest.approx(0.5, abs=0.07) for layer in report.layers)
        assert not any(isinstance(m, nn.Linear) for n, m in own.model.named_modules() if n in sparse)
        errors[method] = difference(own.outputs(), dense)
    assert 0 < errors["obs"] < errors["magnitude"]


def test_everything_kept_changes_nothing() -> None:
    case = CASES["bert"]()
    dense = case.outputs()
    report = prune_(case.model, Config(1, 32), case.batches)
    assert max(layer.error for layer in report.layers) < 1e-9
    for after, before in zip(case.outputs(), dense, strict=True):
        torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-3)


def test_reported_errors_are_those_of_the_layers() -> None:
    """For the first layer, whose inputs are the data themselves; its bias makes up for the mean."""
    case = CASES["mlp"]()
    layer: Any = case.model[0]
    x = torch.cat(case.batches)
    y, scale = layer(x).detach(), (x @ layer.weight.T).detach().square().sum()
    report = prune_(case.model, Config(0.5, 16), case.batches, layers=r"0$")
    after = case.model[0](x).detach()
    (pruned,) = report.layers
    assert pruned.error == pytest.approx(float((after - y).square().sum() / scale), rel=1e-3)
    assert pruned.error < pruned.error_before and pruned.tokens == len(x)
    assert float((after - y).mean(0).norm()) < 1e-4 * float(y.norm(dim=1).mean())
    text = str(report)
    assert "128x64" in text and f"{pruned.error:.4f}" in text and "by obs" in text


def test_later_layers_make_up_for_what_was_pruned_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all of its blocks a layer becomes the best one there is for the inputs in the pruned model, and
    what it is to give: the mean of what it gives there and of what it gives in the dense model.
    """
    case = CASES["mlp"]()
    dense = copy.deepcopy(case.model)
    configs = {"0": Config(0.25, (16, 16)), "2": Config(1.0, (16, 16))}
    monkeypatch.setattr(driver, "damped", lambda second: damped(second, 1e-6))
    prune_(case.model, configs, case.batches)
    data = torch.cat(case.batches)
    x = torch.relu(case.model[0](data)).detach().double()
    in_dense, old = (dense[2](z).detach().double() for z in (torch.relu(dense[0](data)), x.float()))
    wanted = (in_dense + old) / 2
    ones = torch.ones(len(x), 1, dtype=torch.float64)
    best = torch.linalg.lstsq(torch.cat([x, ones], 1), wanted).solution
    found = case.model[2](x.float()).detach().double()
    loss, least = ((y - wanted).square().sum() for y in (found, torch.cat([x, ones], 1) @ best))
    assert float(loss) == pytest.approx(float(least), rel=1e-2)
    assert float((found - in_dense).square().sum()) < 0.9 * float((old - in_dense).square().sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", DEVICES)
def test_half_precision(dtype: torch.dtype, device: str) -> None:
    case = CASES["llama"]()
    case.model.to(device, dtype)
    report = prune_(case.model, Config(0.5, 32), case.batches)
    layer = case.model.model.layers[0].mlp.up_proj
    assert isinstance(layer, BlockSparseLinear) and layer.weight.dtype == dtype
    assert layer.weight.device.type == device
    assert all(layer.error < layer.error_before < 1 for layer in report.layers)


@pytest.mark.gpu
def test_blocks_compute_on_another_device_than_the_model() -> None:
    case, own = CASES["llama"](), CASES["llama"]()
    prune_(case.model, Config(0.5, 16), case.batches, device="cuda")
    prune_(own.model, Config(0.5, 16), own.batches)
    assert all(parameter.device.type == "cpu" for parameter in case.model.parameters())
    for after, before in zip(case.outputs(), own.outputs(), strict=True):
        torch.testing.assert_close(after, before, rtol=0.1, atol=0.1)


def test_generators_and_other_batches() -> None:
    case, own = CASES["bert"](), CASES["bert"]()
    first = prune_(case.model, Config(0.5, 32), iter(case.batches))
    second = prune_(
        own.model,
        Config(0.5, 32),
        [("text", batch) for batch in own.batches],
        forward=lambda model, batch: model(**batch[1]),
    )
    assert first == second


def test_padding_does_not_count() -> None:
    case, own = CASES["bert"](), CASES["bert"]()
    mask = torch.ones(4, 24, dtype=torch.int64)
    mask[:, 20:] = 0
    padded = [{**batch, "attention_mask": mask} for batch in case.batches]
    short = [{"input_ids": batch["input_ids"][:, :20]} for batch in case.batches]
    first = prune_(case.model, Config(0.5, 32), padded, layers="encoder")
    second = prune_(own.model, Config(0.5, 32), short, layers="encoder")
    for a, b in zip(first.layers, second.layers, strict=True):
        assert a.tokens == b.tokens == 4 * 4 * 20
        assert a.error == pytest.approx(b.error, rel=1e-2)


def test_modes_and_gradients_are_as_before() -> None:
    case = CASES["bert"]()
    case.model.train()
    case.model.encoder.layer[0].eval()
    frozen = case.model.encoder.layer[1].output.dense
    frozen.weight.requires_grad_(False)
    before = {name: module.training for name, module in case.model.named_modules()}
    prune_(case.model, Config(0.5, 32), case.batches, method="wanda", layers="encoder")
    assert {name: module.training for name, module in case.model.named_modules()} == before
    assert not case.model.encoder.layer[1].output.dense.weight.requires_grad
    assert case.model.encoder.layer[0].output.dense.weight.requires_grad
    assert all(parameter.grad is None for parameter in case.model.parameters())


def test_choices_for_each_layer() -> None:
    case = CASES["llama"]()
    up, down = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
    own = Config(0.25, (32, 64), (2, 4), "int8", granularity="block", policy="auto")
    configs = {down: own, up: Config(0.5, (16, 16)), "model.layers.1.mlp.up_proj": None}
    report = prune_(case.model, configs, case.batches)
    assert [(layer.name, layer.config) for layer in report.layers] == [(up, configs[up]), (down, own)]
    assert [layer.reason for layer in report.skipped] == ["its config is None"]
    spec: Any = case.model.get_submodule(down).spec
    changed = replace(
        spec, storage="int8", granularity="block", policy="auto", nm=(2, 4), block_shape=(32, 64)
    )
    assert spec == changed and spec.density == 0.25
    assert "2:4 int8" in str(report)


def test_two_of_four_with_refit() -> None:
    errors, config = {}, Config(0.5, 32, nm=(2, 4), storage="compressed")
    for by_refit in (True, False):
        case = CASES["mlp"]()
        report = prune_(case.model, config, case.batches, refit=by_refit)
        assert case.model[2].storage == "compressed"
        errors[by_refit] = sum(layer.error for layer in report.layers)
    assert errors[True] < 0.7 * errors[False]


def test_measured_errors_are_those_of_pruning() -> None:
    case = CASES["mlp"]()
    before = state(case.model)
    configs = [Config(d, (16, 16)) for d in (0.25, 0.5, 1.0)] + [Config(0.5, (32, 32), (2, 4))]
    profiles = measure_errors(case.model, case.batches, configs)
    assert unchanged(case.model, before) and list(profiles) == ["0", "2"]
    for profile in profiles.values():
        quarter, half, full, masked = (profile[config] for config in configs)
        assert quarter > half > full and masked > full and full < 1e-9
    report = prune_(case.model, Config(0.5, 16), case.batches, layers="0$")
    assert report.layers[0].error == pytest.approx(profiles["0"][configs[1]], rel=1e-6)


def saved_with_tokenizer(folder: Path, make: Callable[[], Any] = llama) -> Any:
    """A model whose tokens are words."""
    words = {f"w{number}": number for number in range(96)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    torch.manual_seed(0)
    model = make()
    model.save_pretrained(folder)
    return model


def test_the_command_prunes_and_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output, text = tmp_path / "dense", tmp_path / "sparse", tmp_path / "text"
    saved_with_tokenizer(source)
    text.write_text(" ".join(f"w{int(t)}" for t in torch.randint(1, 96, (2000,), generator=seeded())))
    command = ["prune", str(source), str(output), "--text", str(text), "--device", "cpu", "--length", "32"]
    options = ["--density", "0.25", "--block", "16x32", "--layers", "model.*proj", "--samples", "6"]
    options += ["--method", "wanda"]
    assert cli.main([*command, *options]) == 0
    assert "by wanda" in capsys.readouterr().out
    pruned = LlamaForCausalLM.from_pretrained(output)
    layer = pruned.model.layers[1].mlp.down_proj
    assert isinstance(layer, BlockSparseLinear) and (layer.block_shape, layer.density) == ((16, 32), 0.25)
    assert type(pruned.lm_head) is nn.Linear
    assert cli.main([*command, *options]) == 2 and "output" in capsys.readouterr().err
    command[2] = str(tmp_path / "other")
    assert cli.main([*command, *options, "--text", str(tmp_path / "none")]) == 2
    assert "--text" in capsys.readouterr().err
    assert cli.main([*command, "--method", "magnitude", "--block", "16"]) == 0
    assert LlamaForCausalLM.from_pretrained(command[2]).model.layers[1].mlp.down_proj.density == 0.5
    converted = ["convert", str(source), str(tmp_path / "converted"), "--prune", str(text)]
    assert cli.main([*converted, "--device", "cpu"]) == 0
    assert LlamaForCausalLM.from_pretrained(converted[2]).model.layers[1].mlp.down_proj.density == 0.5
    assert cli.main(["convert", str(source), "--prune", str(text)]) == 2


def test_the_page_runs() -> None:
    names = executed("pruning.md")
    report = names["report"]
    assert {layer.density for layer in report.layers} == {0.5}
    assert all(0 < layer.error < 1 for layer in report.layers)
    assert {config.density for config in names["densest"].values()} == {0.75}


class Chain(nn.Module):
    """Blocks; the first may have another name."""

    def __init__(self, alias: bool = False) -> None:
        super().__init__()
        blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3))
        if alias:
            self.first = blocks[0]
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def errors_of(model: nn.Module, batches: list[Any]) -> list[float]:
    report = prune_(model, Config(0.5, 16), batches)
    assert report.facts["stack"] == "blocks"
    return [layer.error for layer in report.layers]


def test_blocks_behind_one_with_two_names_see_it_pruned() -> None:
    torch.manual_seed(0)
    plain, aliased = Chain(), Chain(alias=True)
    aliased.load_state_dict(plain.state_dict(), strict=False)
    assert errors_of(aliased, vectors()) == errors_of(plain, vectors())


def test_inputs_may_vary_little_about_a_large_mean() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Flatten()), inputs(512, 64).float()
    x = x.round().clamp(-100, 100) / 64 + 10000  # exact in float32
    moments = Moments(64, torch.device("cpu"), compare=True)
    for number, part in enumerate(x.split(128)):
        moments.add(part, part - 5000, number)
    expected = x.double().T.cov(correction=0)
    torch.testing.assert_close(moments.second(centred=True), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(moments.second(), x.double().T @ x.double() / 512, rtol=1e-12, atol=0)
    torch.testing.assert_close(moments.mean(), x.double().mean(0), rtol=1e-12, atol=0)
    order = torch.randperm(64, generator=seeded())
    torch.testing.assert_close(moments.reordered(order).second(), moments.second()[order][:, order])
    (layer,) = prune_(model, Config(0.5, 16), list(x.split(128))).layers
    assert layer.error < 1e-6


def test_layers_pruned_in_inference_mode_train() -> None:
    model = mlp()
    with torch.inference_mode():
        prune_(model, Config(0.5, 16), vectors())
    model(vectors()[0]).sum().backward()
    assert model[0].weight.grad is not None and not model[0].col_indices.is_inference()


# Failures.


class Idle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.used(x)
        return y


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no batches": ({"batches": []}, "batches must have at least one"),
    "one batch": ({"batches": torch.randn(4, 64)}, "batches must be an iterable of batches"),
    "batches of None": ({"batches": None}, "batches must be an iterable of batches"),
    "batches on meta": (
        {"batches": [torch.ones(4, 64, device="meta")]},
        "batches must have tensors with data",
    ),
    "other batches": ({"batches": [torch.randn(4, 32)]}, "mat1"),
    "method": ({"method": "best"}, "method must be one of"),
    "density": ({"config": Config(0, 16)}, "config: density must be"),
    "transposable": ({"config": Config(0.5, 64, (2, 4), transposable=True)}, "config: transposable must be"),
    "no config": ({"config": 0.5}, "config must be"),
    "configs in a list": ({"config": [Config(0.5, (16, 16))]}, "config must be"),
    "no block": ({"config": Config(0.001, 16)}, "rounds to none"),
    "refit": ({"refit": 1}, "refit"),
    "does not fit": ({"layers": "4"}, "layer '4'"),
    "device": ({"device": "cuda:99"}, "device"),
    "meta device": ({"device": "meta"}, "device must have memory"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_leaves_the_model_as_it_was(name: str) -> None:
    model = mlp().train()
    before = state(model)
    options, text = BAD[name]
    expected: Any = RuntimeError if name == "other batches" else InvalidArgumentError
    with pytest.raises(expected, match=text):
        prune_(model, **{"config": Config(0.5, 16), "batches": vectors(), **options})
    assert unchanged(model, before) and all(module.training for module in model.modules())


class Listed(nn.Module):
    """A layer that has a second name, in a model without a stack that may be interrupted midway."""

    def __init__(self, layers: Any, error: type[BaseException] | None = None) -> None:
        super().__init__()
        self.first, self.last = layers
        self.again, self.error, self.calls = nn.ModuleList([self.first]), error, 0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.again[0](self.first(x).relu()).relu())
        self.calls += self.error is not None
        if self.error is not None and self.calls == 14:  # with the first layer pruned
            raise self.error
        return y


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_interruption_leaves_modules_with_two_names(error: type[BaseException]) -> None:
    model = Listed((nn.Linear(64, 64), nn.Linear(64, 64)), error)
    weight, before = model.first.weight, state(model)
    with pytest.raises(error):
        prune_(model, Config(0.5, 16), vectors())
    assert model.first.weight is weight and unchanged(model, before)


@pytest.mark.parametrize("whole", [True, False])
def test_compiled_models_are_pruned_as_others(whole: bool) -> None:
    """Compiled code does not call hooks that are set afterwards."""
    made = nn.ModuleList([nn.Sequential(nn.Linear(64, 64)) for _ in range(2)])
    model, expected = Listed(made), Listed(copy.deepcopy(made))
    if whole:
        model.compile(backend="aot_eager")
    else:
        model.first.compile(backend="aot_eager")
        model.last.compile(backend="aot_eager")
    model(vectors()[0])
    report = prune_(model, Config(0.5, 16), vectors())
    assert report.layers == prune_(expected, Config(0.5, 16), vectors()).layers
    torch.testing.assert_close(model(vectors()[0]), expected(vectors()[0]))
    compiled = mlp()
    compiled[0].compile(backend="aot_eager")
    report = prune_(compiled, Config(0.5, 16), vectors())
    assert "compiled by itself" in {one.name: one.reason for one in report.skipped}["0"]


def test_layers_that_never_run_are_named() -> None:
    model = Idle()
    before = state(model)
    with pytest.raises(InvalidArgumentError, match="must run layer 'unused'"):
        prune_(model, Config(0.5, 16), vectors())
    assert unchanged(model, before)
    assert [layer.name for layer in prune_(model, Config(0.5, 16), vectors(), layers="used").layers] == [
        "used"
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_activations_that_are_not_finite_are_named(value: float) -> None:
    model, batches = mlp(), vectors()
    before = state(model)
    batches[2][5, 7] = value
    with pytest.raises(InvalidArgumentError, match=r"batch 2 .* layer '0'"):
        prune_(model, Config(0.5, 16), batches)
    assert unchanged(model, before)
    with pytest.raises(InvalidArgumentError, match="NaN"):
        broken = mlp()
        broken[0].weight.data[0, 0] = torch.nan
        prune_(broken, Config(0.5, 16), vectors(), layers="0")


def test_models_without_weights_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="meta"):
        prune_(mlp().to("meta"), Config(0.5, 16), vectors())


# Messages about what was left dense, and about too few data.


def mixtral() -> MixtralForCausalLM:
    return MixtralForCausalLM(MixtralConfig(**SMALL, num_key_value_heads=1, num_local_experts=24))


def messages(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    assert all(one.filename == __file__ for one in caught if issubclass(one.category, UserWarning))
    return result, [str(one.message) for one in caught]


def test_experts_that_stay_dense_are_named() -> None:
    case = Case(mixtral, tokens(), "model.layers")
    for layer in case.model.model.layers:
        layer.mlp.experts.extra = nn.Parameter(torch.zeros(1))  # that nothing knows, and that would get lost
    whole = sum(parameter.numel() for parameter in case.model.parameters())
    experts = sum(p.numel() for name, p in case.model.named_parameters() if ".experts." in name)
    assert experts > 0.9 * whole
    report = prune_(case.model, Config(0.5, 16), case.batches)
    assert all("self_attn" in layer.name for layer in report.layers)
    assert ["it holds extra" in one.reason for one in report.skipped if ".experts" in one.name] == [True] * 2
    found = sum(one.share for one in report.dense if ".experts." in one.name)
    assert found == pytest.approx(experts / whole, rel=1e-4)
    assert "model.layers.*.mlp.experts.gate_up_proj" in str(report)
    known = Case(mixtral, tokens(), "model.layers")
    report = prune_(known.model, Config(0.5, 32), known.batches, method="magnitude", refit=False)
    assert "model.layers.0.mlp.experts.gate_up.* (24)  256x64" in str(report)


def test_layers_that_cannot_be_cut_are_skipped_unless_named() -> None:
    model = nn.ModuleDict({"body": nn.Linear(64, 64), "classifier": nn.Linear(64, 2)})
    options: dict[str, Any] = {"forward": lambda m, x: m["classifier"](m["body"](x))}
    for layers in (None, ".*"):
        report = prune_(copy.deepcopy(model), Config(0.5, 16), vectors(), layers=layers, **options)
        assert [layer.name for layer in report.layers] == ["body"]
        assert [layer.name for layer in report.skipped] == ["classifier"]
        assert "out_features is 2, no multiple of 16" in report.skipped[0].reason
    with pytest.raises(InvalidArgumentError, match="layer 'classifier': block_shape must divide"):
        prune_(model, Config(0.5, 16), vectors(), layers="body|classifier", **options)


@pytest.mark.parametrize("bias", [False, True])
def test_too_few_tokens_are_named_with_those_that_are_needed(bias: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 64, bias=bias), nn.Tanh(), nn.Linear(64, 64, bias=bias))
    for met, short in ((3, True), (511 + bias, True), (512 + bias, False)):
        batches = [inputs(met, 512).float()]

        def said_of(call: Any, *args: Any, batches: Any = batches, **options: Any) -> tuple[Any, list[str]]:
            result, said = messages(lambda: call(copy.deepcopy(model), *args, **options))
            return result, [one for one in said if one.startswith("batches must give a layer at least")]

        report, said = said_of(prune_, Config(0.5, 16), batches)
        assert bool(said) == short
        if short:
            assert f"{met} of {512 + bias} at 0" in said[0]
            assert (f"{met} of {64 + bias} at 2" in said[0]) == (met == 3)
        if met == 3:
            assert report.layers[0].error < 1e-4  # which is what the warning is about
            _, said = said_of(measure_errors, batches, [Config(0.5, (16, 16))])
            assert f"3 of {512 + bias} at 0" in said[0]
            # magnitude asks nothing of the data
            assert not said_of(prune_, Config(0.5, 16), batches, method="magnitude", refit=False)[1]


def test_empty_block_rows_and_columns_are_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64))
    with torch.no_grad():
        model[0].weight[:16] += 10
    report, said = messages(lambda: prune_(model, Config(0.25, 16), vectors()))
    (layer,) = report.layers
    mask = model[0].pattern.to_block_mask()
    assert layer.empty_rows == int((~mask.any(1)).sum()) == 3
    assert layer.empty_columns == int((~mask.any(0)).sum()) == 0
    assert "empty block rows, whose outputs are the bias alone: 3 in 0" in said[0] and said[0][-5:] in str(
        report
    )


class Between(nn.Module):
    """Gives its second layer another x than its first one: the same tensor, written to, or a new one."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.first, self.second, self.in_place = nn.Linear(64, 64), nn.Linear(64, 64), in_place

    def forward(self, x: Tensor) -> Tensor:
        factors = torch.linspace(0, 9, 64)
        x = x.clone()
        y = self.first(x)
        x = x.mul_(factors) if self.in_place else x * factors
        return y + self.second(x)


def test_an_input_that_is_written_to_between_layers_is_another_one() -> None:
    models = [Between(in_place) for in_place in (True, False)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        prune_(model, Config(0.5, (16, 16)), vectors())
    for name, tensor in models[0].state_dict().items():
        assert torch.equal(tensor, models[1].state_dict()[name]), name

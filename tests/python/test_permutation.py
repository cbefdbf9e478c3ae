"""Folds keep a model's function, and an order is taken only where it lowers the error."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from helpers import DEVICES, seeded
from torch import Tensor, nn
from torch.nn.utils.prune import l1_unstructured

from tilesparse.config import BlockSparseConfig as Config
from tilesparse.errors import InvalidArgumentError
from tilesparse.prune import (
    PermutationGroup,
    Rows,
    find_permutation_groups,
    measure_errors,
    permutation,
    permute_,
    permute_model,
)

COMMON: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS = {**COMMON, "num_attention_heads": 4}


def llama(**options: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        **HEADS, num_key_value_heads=2, vocab_size=50, attention_bias=True, mlp_bias=True, **options
    )
    return transformers.LlamaForCausalLM(config)


def qwen3() -> nn.Module:
    config = transformers.Qwen3Config(**HEADS, num_key_value_heads=2, vocab_size=50, head_dim=16)
    return transformers.Qwen3ForCausalLM(config)


def olmo2() -> nn.Module:
    return transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**HEADS, vocab_size=50))


def bert() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**HEADS, vocab_size=50))


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_inner=96, vocab_size=50)
    )


def vit() -> nn.Module:
    return transformers.ViTModel(transformers.ViTConfig(**HEADS, image_size=16, patch_size=8))


def randomised(make: Any) -> nn.Module:
    """Biases and norms differ as well, so that nothing that is forgotten stays unseen."""
    torch.manual_seed(0)
    model: nn.Module = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


def output(model: nn.Module) -> Tensor:
    if isinstance(model, transformers.ViTModel):
        result = model(torch.randn(2, 3, 16, 16, generator=seeded()))
    else:
        result = model(torch.randint(50, (2, 12), generator=seeded()))
    found: Tensor = result[0].detach()
    return found


def random_order(group: PermutationGroup) -> Tensor:
    """Another one in each group; of two units the only one there is."""
    generator = seeded()
    orders = [torch.randperm(group.units, generator=generator) for _ in range(group.groups)]
    same = torch.arange(group.units)
    return torch.stack([same.flip(0) if torch.equal(order, same) else order for order in orders])


# How many groups a layer of each model has: hidden features, heads, queries of a group, values.
FOLDS = {llama: 4, qwen3: 4, bert: 3, gpt2: 3, vit: 3, olmo2: 1}


@pytest.mark.parametrize("make", FOLDS, ids=lambda make: make.__name__)
def test_orders_change_nothing_but_the_weights(make: Any) -> None:
    model = randomised(make)
    groups = find_permutation_groups(model)
    assert len(groups) == 2 * FOLDS[make]
    before = output(model)
    for group in groups:
        weight: Any = model.get_submodule(group.consumer).weight
        old = weight.detach().clone()
        permute_(model, group, random_order(group))
        assert not torch.equal(weight, old)
        torch.testing.assert_close(output(model), before, atol=1e-5, rtol=1e-5)
    assert model.get_submodule(groups[0].consumer).weight.requires_grad


def test_the_inverse_order_leads_back() -> None:
    model = randomised(gpt2)
    before = copy.deepcopy(model.state_dict())
    for group in find_permutation_groups(model):
        order = random_order(group)
        permute_(model, group, order)
        permute_(model, group, order.argsort(1))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class Doubled(nn.Module):
    """Its second layer takes the product of the two halves of what the first one gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.first(x).chunk(2, -1)
        y: Tensor = self.second(left.sigmoid() * right)
        return y


def test_a_fold_of_ones_own() -> None:
    torch.manual_seed(0)
    model, x = Doubled(), torch.randn(5, 32)
    before = model(x)
    group = PermutationGroup((Rows("first", 0, 32), Rows("first", 32, 64)), "second", 32)
    permute_(model, group, torch.arange(31, -1, -1))
    torch.testing.assert_close(model(x), before)


WRONG = {
    "no layer": PermutationGroup(("nothing",), "second", 32),
    "a module": PermutationGroup(("",), "second", 32),
    "sizes": PermutationGroup(("first",), "second", 5),
    "rows": PermutationGroup((Rows("first", 40, 72),), "second", 32),
    "rows twice": PermutationGroup((Rows("first", 0, 32), Rows("first", 16, 48)), "second", 32),
    "itself": PermutationGroup(("second",), "second", 32),
}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((("first",), "second", 0), "units must be an integer of at least 1"),
        (((Rows("first", 0.0, 32.0),), "second", 32), "start must be an integer of at least 0, got 0.0"),  # type: ignore[arg-type]
        (((), "second", 32), "producers must be names of layers or Rows"),
        (("first", "second", 32), "producers must be a tuple, got 'first'"),
    ],
)
def test_folds_that_are_none_are_refused_where_they_are_made(arguments: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        PermutationGroup(*arguments)


@pytest.mark.parametrize("name", WRONG)
def test_folds_that_do_not_fit_change_nothing(name: str) -> None:
    model = Doubled()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InvalidArgumentError, match="group must fit the model: "):
        permute_(model, WRONG[name], torch.arange(32))
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    "order",
    [torch.arange(31), torch.zeros(32, dtype=torch.long), torch.rand(32), torch.arange(64).view(2, 32)],
)
def test_orders_that_are_none(order: Tensor) -> None:
    group = PermutationGroup((Rows("first", 0, 32), Rows("first", 32, 64)), "second", 32)
    with pytest.raises(InvalidArgumentError, match="order must have"):
        permute_(Doubled(), group, order)


def test_shared_weights_have_no_fold() -> None:
    model = randomised(llama)
    first, second = (layer.mlp for layer in model.model.layers)
    second.down_proj.weight = first.down_proj.weight
    hidden = [group for group in find_permutation_groups(model) if "down_proj" in group.consumer]
    assert hidden == []
    with pytest.raises(InvalidArgumentError, match="shares a parameter"):
        names = ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj")
        permute_(model, PermutationGroup(names, "model.layers.0.mlp.down_proj", 96), torch.arange(96))


def test_weights_that_calls_compute_have_no_fold() -> None:
    """Another order of such a weight would be gone with the next call, or be one of half of the layers."""
    model = Doubled()
    l1_unstructured(model.second, "weight", 0.5)
    with pytest.raises(InvalidArgumentError, match="'second' must be a dense linear layer with"):
        permute_(
            model,
            PermutationGroup((Rows("first", 0, 32), Rows("first", 32, 64)), "second", 32),
            torch.arange(32),
        )


def test_orders_where_tensors_are_made_elsewhere() -> None:
    model, order = Doubled(), torch.arange(31, -1, -1)
    weight = model.second.weight.detach().clone()
    with torch.device("meta"):
        permute_(model, PermutationGroup((Rows("first", 0, 32), Rows("first", 32, 64)), "second", 32), order)
    assert torch.equal(model.second.weight, weight.flip(1))


def test_no_models() -> None:
    for call in (find_permutation_groups, lambda model: permute_(model, MIXED, torch.arange(128))):
        with pytest.raises(InvalidArgumentError, match=r"model must be a torch.nn.Module, got 3"):
            call(3)  # type: ignore[arg-type]


def test_what_lies_between_is_seen() -> None:
    """A learned activation has a parameter for each hidden feature."""
    model = randomised(llama)
    model.model.layers[0].mlp.act_fn = nn.PReLU(96)
    hidden = [group.consumer for group in find_permutation_groups(model) if "mlp" in group.consumer]
    assert hidden == ["model.layers.1.mlp.down_proj"]


# Orders that are searched


def mixed(generator_seed: int = 0) -> nn.Sequential:
    """Hidden features of two kinds, one of which matters, in turns: blocks of 16 have both."""
    generator = seeded(generator_seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        model[0].weight[::2] *= 0.01
        model[0].bias[::2] = 0
        model[2].weight[:, ::2] *= 0.01
    return model


MIXED = PermutationGroup(("0",), "2", 128)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_matters_for_the_same_blocks_comes_together(device: str, dtype: torch.dtype) -> None:
    model = mixed().to(device, dtype)
    batches = [torch.randn(64, 64, generator=seeded(i)).to(device, dtype) for i in range(4)]
    before, config = model(batches[0]), Config(0.5, (16, 16))
    alone = measure_errors(model, batches, [config])
    report = permute_model(model, batches, config, groups=[MIXED])
    (done,) = report.groups
    assert done.taken and done.before is not None and done.after is not None
    assert done.before == pytest.approx(alone["0"][config] + alone["2"][config])
    assert done.after < 0.05 * done.before
    after = measure_errors(model, batches, [config])
    assert done.after == pytest.approx(after["0"][config] + after["2"][config], rel=0.05, abs=1e-3)
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(model(batches[0]), before, atol=tolerance * 100, rtol=tolerance)
    assert "taken" in str(report) and "1 of 1 groups" in str(report)


class Branching(nn.Sequential):
    """A model that reads its hidden features itself: for long batches, or for a second output."""

    def __init__(self, long: bool) -> None:
        super().__init__(*mixed())
        self.long = long

    def forward(self, x: Tensor) -> Any:
        hidden = self[1](self[0](x))
        y = self[2](hidden)
        return (y + hidden[:, :64] if len(x) > 64 else y) if self.long else {"y": y, "hidden": hidden}


@pytest.mark.parametrize("long", [True, False])
def test_all_outputs_of_all_batches_are_compared(long: bool) -> None:
    model = Branching(long).eval()
    before = copy.deepcopy(model.state_dict())
    batches = [torch.randn(size, 64, generator=seeded(size)) for size in (64, 128)]
    with pytest.raises(InvalidArgumentError, match="groups must leave the outputs equal"):
        permute_model(model, batches, Config(0.5, (16, 16)), groups=[MIXED])
    assert all(torch.equal(after, before[name]) for name, after in model.state_dict().items())


@pytest.mark.parametrize("end", [None, KeyboardInterrupt, RuntimeError])
def test_orders_that_do_not_help_and_what_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, end: type[BaseException] | None
) -> None:
    """The first group gets another order, the second would lose by it, or is never done."""
    errors = iter([2.0, 1.0, 2.0, 3.0])

    def error(*_: Any) -> float:
        found = next(errors)
        if found == 3.0 and end is not None:
            raise end
        return found

    monkeypatch.setattr(permutation, "_error", error)
    model = nn.Sequential(mixed(0), mixed(1)).eval()
    before = copy.deepcopy(model.state_dict())
    groups = [PermutationGroup(("0.0",), "0.2", 128), PermutationGroup(("1.0",), "1.2", 128)]
    arguments: dict[str, Any] = {
        "batches": [torch.randn(64, 64)],
        "config": Config(0.5, (16, 16)),
        "groups": groups,
    }
    if end is not None:
        with pytest.raises(end):
            permute_model(model, **arguments)
        changed = []
    else:
        report = permute_model(model, **arguments)
        assert [(done.before, done.after, done.taken) for done in report.groups] == [
            (2, 1, True),
            (2, 3, False),
        ]
        changed = ["0.0.weight", "0.0.bias", "0.2.weight"]
    after = model.state_dict()
    assert [name for name in before if not torch.equal(after[name], before[name])] == changed


@pytest.mark.parametrize("make", [llama, gpt2], ids=lambda make: make.__name__)
def test_whole_models_keep_their_function(make: Any) -> None:
    model = randomised(make).train()
    batches = [{"input_ids": torch.randint(50, (4, 12), generator=seeded(i))} for i in range(3)]
    before = output(model.eval())
    model.train()
    report = permute_model(model, batches, Config(0.5, (16, 16)))
    assert model.training and len(report.groups) == len(find_permutation_groups(model))
    # A head of 16 features fills blocks of 16: its order means nothing to them.
    searched = [done.group.consumer for done in report.groups if done.before is not None]
    assert len(searched) == 2 and all("mlp" in consumer for consumer in searched)
    torch.testing.assert_close(output(model.eval()), before, atol=1e-5, rtol=1e-5)


class Ordered(nn.Module):
    """Something between its layers depends on the order, which no name tells."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mixed()
        self.layers[1] = nn.Softplus()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers[0](x)
        y: Tensor = self.layers[2](hidden * torch.linspace(0, 1, 128))
        return y


def test_a_fold_that_is_none_is_noticed_and_undone() -> None:
    model = Ordered()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InvalidArgumentError, match="groups must leave the outputs equal"):
        permute_model(
            model,
            [torch.randn(256, 64, generator=seeded())],
            Config(0.5, (16, 16)),
            groups=[PermutationGroup(("layers.0",), "layers.2", 128)],
        )
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_outputs_are_compared_where_a_loss_comes_first() -> None:
    """One that all outputs leave as it is."""

    class Losing(Ordered):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return {"loss": 0 * y.sum(), "y": [y]}

    with pytest.raises(InvalidArgumentError, match="groups must leave the outputs equal"):
        permute_model(
            Losing(),
            [torch.randn(256, 64, generator=seeded())],
            Config(0.5, (16, 16)),
            groups=[PermutationGroup(("layers.0",), "layers.2", 128)],
        )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"groups": []}, "groups must be given"),
        ({"groups": MIXED}, "groups must be a sequence or None, got PermutationGroup"),
        ({"damping": -1.0}, "damping must be "),
        ({"damping": "much"}, "damping must be "),
        ({"groups": ["0"]}, r"groups\[0\] must be a PermutationGroup, got '0'"),
        ({"groups": [PermutationGroup(("0",), "2", 100)]}, "groups must fit the model: 128 features"),
        ({"config": Config(0.5, (128, 16))}, "config: layer '2': out_features"),
        ({"batches": []}, "batches must have at least one"),
        ({"batches": [torch.full((4, 64), torch.nan)]}, "batches must be finite.* batch 0.*layer '0'"),
    ],
)
def test_what_permute_model_refuses(options: dict[str, Any], text: str) -> None:
    model = mixed()
    before = copy.deepcopy(model.state_dict())
    given = {
        "batches": [torch.randn(8, 64)],
        "config": Config(0.5, (16, 16)),
        "groups": [MIXED],
        **options,
    }
    with pytest.raises(InvalidArgumentError, match=text):
        permute_model(model, **given)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

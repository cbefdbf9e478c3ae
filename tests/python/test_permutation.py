"""Permutation groups keep a model's function, and an order is taken only where it lowers the error."""

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
from tilesparse.prune import PermutationGroup, measure_errors, permutation, permute_

TEXT: Any = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 50,
}
# Models, and how the layers of their feed-forward networks are named.
MODELS: dict[str, tuple[Any, Any, str, tuple[str, ...]]] = {
    "llama": (
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig(**TEXT, num_key_value_heads=2, attention_bias=True, mlp_bias=True),
        "model.layers.{}.mlp.{}",
        ("gate_proj", "up_proj", "down_proj"),
    ),
    "bert": (
        transformers.BertModel,
        transformers.BertConfig(**TEXT),
        "encoder.layer.{}.{}.dense",
        ("intermediate", "output"),
    ),
    "gpt2": (
        transformers.GPT2LMHeadModel,
        transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_inner=96, vocab_size=50),
        "transformer.h.{}.mlp.{}",
        ("c_fc", "c_proj"),
    ),
}


def groups_of(name: str) -> list[PermutationGroup]:
    *_, form, layers = MODELS[name]
    names = [tuple(form.format(number, layer) for layer in layers) for number in (0, 1)]
    return [PermutationGroup(own[:-1], own[-1]) for own in names]


def randomised(name: str) -> Any:
    """Biases and norms differ as well, so that nothing that is forgotten stays unseen."""
    torch.manual_seed(0)
    cls, config, *_ = MODELS[name]
    model = cls(copy.deepcopy(config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


def output(model: nn.Module) -> Tensor:
    found: Tensor = model(torch.randint(50, (2, 12), generator=seeded()))[0].detach()
    return found


def unchanged(model: nn.Module, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def random_order() -> Tensor:
    return torch.randperm(96, generator=seeded())


@pytest.mark.parametrize("name", MODELS)
def test_orders_change_nothing_but_the_weights(name: str) -> None:
    model = randomised(name)
    groups = groups_of(name)
    start, before = copy.deepcopy(model.state_dict()), output(model)
    orders = [random_order() for _ in groups]
    for group, order in zip(groups, orders, strict=True):
        weight: Any = model.get_submodule(group.consumer).weight
        old = weight.detach().clone()
        group._reorder(model, order)
        assert not torch.equal(weight, old)
        torch.testing.assert_close(output(model), before, atol=1e-5, rtol=1e-5)
    assert model.get_submodule(groups[0].consumer).weight.requires_grad
    for group, order in zip(groups[::-1], orders[::-1], strict=True):
        group._reorder(model, order.argsort())
    assert unchanged(model, start)


class Gated(nn.Module):
    """Its last layer takes the product of what two others give."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.second = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.gate(x).sigmoid() * self.first(x))
        return y


GATED = PermutationGroup(("first", "gate"), "second")


def test_a_group_of_ones_own() -> None:
    torch.manual_seed(0)
    model, x = Gated(), torch.randn(5, 32)
    before, weight = model(x), model.second.weight.detach().clone()
    with torch.device("meta"):  # where others make tensors
        GATED._reorder(model, torch.arange(47, -1, -1, device="cpu"))
    torch.testing.assert_close(model(x), before)
    assert torch.equal(model.second.weight, weight.flip(1))


def masked() -> nn.Module:
    """Another order of a weight that calls compute would be gone with the next one."""
    model = Gated()
    l1_unstructured(model.second, "weight", 0.5)
    return model


@pytest.mark.parametrize(
    ("group", "text"),
    [
        ("first", "groups must be a PermutationGroup, got 'first'"),
        (PermutationGroup(("nothing",), "second"), "groups must fit the model: 'nothing'"),
        (PermutationGroup(("",), "second"), "groups must fit the model: ''"),
        (PermutationGroup(("first",), "gate"), r"groups must fit the model: .* \[32, 48\] features"),
        (PermutationGroup(("second",), "second"), "producer and consumer"),
        (PermutationGroup(("first",), "second"), "'second' must be a dense linear layer with"),
    ],
)
def test_groups_that_do_not_fit_change_nothing(group: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="producers must be"):
        PermutationGroup("first", "second")  # type: ignore[arg-type]
    model = masked() if group == PermutationGroup(("first",), "second") else Gated()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InvalidArgumentError, match=text):
        permute_(model, Config(0.5, 16), [torch.randn(5, 32)], groups=[group])
    assert unchanged(model, before)


def test_shared_weights_are_seen() -> None:
    model = randomised("llama")
    first, second = (layer.mlp for layer in model.model.layers)
    second.down_proj.weight = first.down_proj.weight
    with pytest.raises(InvalidArgumentError, match="shares a parameter"):
        permute_(model, Config(0.5, 16), [torch.zeros(1, 1)], groups=groups_of("llama")[1:])


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


MIXED = PermutationGroup(("0",), "2")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_matters_for_the_same_blocks_comes_together(device: str, dtype: torch.dtype) -> None:
    model = mixed().to(device, dtype)
    batches = [torch.randn(64, 64, generator=seeded(i)).to(device, dtype) for i in range(4)]
    before, config = model(batches[0]), Config(0.5, (16, 16))
    alone = measure_errors(model, batches, [config])
    report = permute_(model, config, batches, groups=[MIXED])
    (done,) = report.layers
    assert done.kept and done.error_before is not None and done.error is not None
    assert done.error_before == pytest.approx(alone["0"][config] + alone["2"][config])
    assert done.error < 0.05 * done.error_before
    after = measure_errors(model, batches, [config])
    assert done.error == pytest.approx(after["0"][config] + after["2"][config], rel=0.05)
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(model(batches[0]), before, atol=tolerance * 100, rtol=tolerance)
    assert "kept" in str(report) and "1 of 1 groups" in str(report)


class Branching(nn.Sequential):
    """A model that reads its hidden features itself: for long batches, for a second output, or for both."""

    def __init__(self, kind: str) -> None:
        super().__init__(*mixed())
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        hidden = self[1](self[0](x))
        y = self[2](hidden)
        if self.kind == "second output":
            return {"y": y, "hidden": hidden}
        if self.kind == "order":  # which no name tells
            return self[2](hidden * torch.linspace(0, 1, 128))
        if self.kind == "behind a loss":  # that every order leaves as it is
            return {"loss": 0 * y.sum(), "y": [self[2](hidden * torch.linspace(0, 1, 128))]}
        return y + hidden[:, :64] if len(x) > 64 else y


@pytest.mark.parametrize("kind", ["long batches", "second output", "order", "behind a loss"])
def test_all_outputs_of_all_batches_are_compared(kind: str) -> None:
    model = Branching(kind).eval()
    before = copy.deepcopy(model.state_dict())
    batches = [torch.randn(size, 64, generator=seeded(size)) for size in (64, 128)]
    with pytest.raises(InvalidArgumentError, match="groups must leave the outputs equal"):
        permute_(model, Config(0.5, (16, 16)), batches, groups=[MIXED])
    assert unchanged(model, before)


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
    groups = [PermutationGroup(("0.0",), "0.2"), PermutationGroup(("1.0",), "1.2")]
    arguments: Any = (model, Config(0.5, (16, 16)), [torch.randn(64, 64)])
    if end is not None:
        with pytest.raises(end):
            permute_(*arguments, groups=groups)
        changed = []
    else:
        report = permute_(*arguments, groups=groups)
        found = [(done.error_before, done.error, done.kept) for done in report.layers]
        assert found == [(2, 1, True), (2, 3, False)]
        changed = ["0.0.weight", "0.0.bias", "0.2.weight"]
    after = model.state_dict()
    assert [name for name in before if not torch.equal(after[name], before[name])] == changed


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"groups": [PermutationGroup(("2",), "2")]}, "groups must fit the model: .* producer and consumer"),
        ({"config": Config(0.5, (128, 16))}, "config: layer '2': out_features"),
        ({"batches": []}, "batches must have at least one"),
        ({"batches": [torch.full((4, 64), torch.nan)]}, "batches must be finite.* batch 0.*layer '0'"),
    ],
)
def test_what_permute_refuses(options: dict[str, Any], text: str) -> None:
    model = mixed()
    before = copy.deepcopy(model.state_dict())
    given: Any = {"batches": [torch.randn(8, 64)], "config": Config(0.5, (16, 16)), "groups": [MIXED]}
    with pytest.raises(InvalidArgumentError, match=text):
        permute_(model, **given | options)
    assert unchanged(model, before)

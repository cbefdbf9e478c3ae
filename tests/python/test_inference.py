"""A model that was prepared for inference computes the same, by the ways that are fastest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import DEVICES, randn
from torch import nn

import tilesparse
from tilesparse import (
    BlockSparseConfig,
    BlockSparseLinear,
    BlockSparseMLP,
    InvalidArgumentError,
    prepare_for_inference,
)
from tilesparse.tuning import document


def sparse(**options: Any) -> nn.Module:
    mlp = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), mlp)
    tilesparse.sparsify_(model, BlockSparseConfig(0.5, 16, **options))
    return model


def layers(model: nn.Module) -> list[BlockSparseLinear]:
    return [module for module in model.modules() if isinstance(module, BlockSparseLinear)]


@pytest.mark.parametrize("storage", ["plain", "int8"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_prepared_model_computes_the_same(device: str, storage: str) -> None:
    model: Any = sparse(storage=storage).to(device)
    x = randn(7, 64, dtype=torch.float32, device=device)
    expected, names = model.eval()(x), list(model.state_dict())
    model.train()
    assert prepare_for_inference(model) is model
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())
    assert [layer.policy for layer in layers(model)] == ["auto"] * 3
    assert isinstance(model[2], BlockSparseMLP)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    assert list(model.state_dict()) == names


def test_a_policy_that_was_chosen_stays() -> None:
    model = sparse(policy="dense")
    prepare_for_inference(model)
    assert {layer.policy for layer in layers(model)} == {"dense"}


def test_every_layer_is_measured_for_given_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILESPARSE_TUNE_FILE", str(tmp_path / "tune.json"))
    prepare_for_inference(sparse(), tokens=[1, 32])
    found = {
        (one.product.in_features, one.product.out_features, one.product.tokens)
        for one in document.measurements(tmp_path / "tune.json")[0]
    }
    assert found == {(i, o, t) for i, o in ((64, 64), (64, 128), (128, 64)) for t in (1, 32)}


def test_nothing_is_changed_by_what_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="model must have a block-sparse layer"):
        prepare_for_inference(nn.Linear(3, 3))
    model = sparse()
    with pytest.raises(InvalidArgumentError, match="tokens"):
        prepare_for_inference(model, tokens=[0])
    assert model.training and layers(model)[0].policy == "sparse"

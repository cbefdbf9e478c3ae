"""The examples that prune a mixture of experts and split dense layers into experts, at small sizes."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import mixture
import prune_experts
import pytest
import split_ffn
import torch
from helpers import seeded
from mixture import Mixture, mixtures, without_experts
from torch import Tensor, nn

import tilesparse as ts
from tilesparse.cli.demo import Size

SIZE = Size(layers=2, width=32, heads=2, context=16, batch=2)


def small_mixture(experts: int = 4, top_k: int = 2) -> Mixture:
    torch.manual_seed(0)
    return Mixture(32, experts, 48, top_k).eval().requires_grad_(False)


def tokens(count: int = 64, width: int = 32) -> Tensor:
    return torch.randn(count, width, generator=seeded())


def test_all_blocks_of_experts_compute_what_dense_experts_do() -> None:
    dense = small_mixture()
    sparse = copy.deepcopy(dense)
    sparse.experts = ts.BlockSparseExperts.from_experts(dense.experts, 1.0, block_shape=16)
    torch.testing.assert_close(sparse(tokens()), dense(tokens()))
    shares = dense.router(tokens()).softmax(-1)
    expected = torch.zeros(64, 32)
    experts: Any = dense.experts
    for token, (x, own) in enumerate(zip(tokens(), shares, strict=True)):
        best = own.topk(2)
        for share, number in zip(best.values / best.values.sum(), best.indices, strict=True):
            gate, up = (experts.gate_up_proj[number] @ x).chunk(2)
            y = experts.down_proj[number] @ (nn.functional.silu(gate) * up)
            expected[token] += share * y
    torch.testing.assert_close(dense(tokens()), expected, rtol=1e-4, atol=1e-5)


def test_dropped_experts_are_never_chosen() -> None:
    torch.manual_seed(0)
    model = mixture.language_model(SIZE, 4, 48, 2).eval()
    whole = mixtures(model)
    kept = {name: [1, 3] if number else [0, 2, 3] for number, name in enumerate(whole)}
    smaller = without_experts(model, kept)
    for name, own in mixtures(smaller).items():
        masked = copy.deepcopy(whole[name])
        gone = sorted({0, 1, 2, 3} - {*kept[name]})
        hook = masked.router.register_forward_hook(
            lambda *args, gone=gone: args[2].index_fill(1, torch.tensor(gone), -torch.inf)
        )
        torch.testing.assert_close(own(tokens()), masked(tokens()))
        hook.remove()
        assert not torch.allclose(own(tokens()), masked(tokens()))
    assert [len(one.experts.get_parameter("down_proj")) for one in mixtures(model).values()] == [4, 4]
    one = without_experts(model, {name: [2] for name in whole})
    assert [own.top_k for own in mixtures(one).values()] == [1, 1]
    assert one(torch.zeros(1, 16, dtype=torch.long)).isfinite().all()


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_best_experts_have_the_least_error_of_all_choices(keep: int) -> None:
    dense = small_mixture(5)
    x, y = tokens(), dense(tokens())
    errors = {}
    for chosen in itertools.combinations(range(5), keep):
        smaller: Any = without_experts(nn.Sequential(dense), {"0": chosen})
        errors[chosen] = float((smaller(x) - y).square().sum())
    found = tuple(prune_experts.best_experts(dense, x, keep))
    assert errors[found] <= 1.05 * min(errors.values())  # outputs are in bfloat16
    assert dense.top_k == 2


def test_text_of_packages_that_are_held_out_is_not_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixture, "HELD_OUT", ("json", "wave"))
    (training, held_out), sizes = mixture.load_packages(200_000)
    assert {*sizes["held_out"]} == {"json", "wave"} and all(sizes["held_out"].values())
    assert sum(map(len, held_out)) == sum(sizes["held_out"].values())
    assert sum(map(len, training)) == sizes["training"] > 200_000
    for module in (json, json.decoder):
        text = Path(str(module.__file__)).read_bytes()
        assert text in held_out and text not in training


def test_the_mixture_is_trained_pruned_and_recovered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"def f(x):\n    return x + 1\n\n\n" * 200
    sizes = {"training": len(text), "held_out": {}}
    monkeypatch.setattr(mixture, "load_packages", lambda most: (([text], [text]), sizes))
    output = tmp_path / "experts.json"
    small = "--width 32 --intermediate 64 --layers 2 --experts 4 --context 32 --batch 4 --held-out 4"
    times = "--calibration 8 --train 0.5 --recover 0.2 --blocks 16,32 --densities .5"
    arguments = f"--device cpu {small} {times} --commit x --output {output}"
    with pytest.warns(UserWarning, match="empty block"):
        assert prune_experts.main(arguments.split()) == 0
    cases = json.loads(output.read_text())["cases"]
    assert [(case["way"], case["block"]) for case in cases] == [
        ("dense", 0),
        *((way, 16) for way in prune_experts.WAYS),
        ("blocks", 32),
    ]
    dense, *others = cases
    for case in others:
        stages = [result["stage"] for result in case["results"]]
        middle = ["reconstructed"] if case["way"] == "reconstructed" else []
        assert stages[:-4] == ["pruned", *middle, "recovered"] and stages[-4:] == ["time"] * 4
        # Block-sparse experts have patterns beside as many values.
        assert 0.5 <= case["expert_bytes"] / dense["expert_bytes"] < 0.53
        assert all(result["bits_per_byte"] < 9 for result in case["results"] if "bits_per_byte" in result)
    assert not any("unavailable" in result for case in cases for result in (case, *case["results"]))


class Bert(nn.Module):
    """What the example reads of a BERT: blocks without attention."""

    class Block(nn.Module):
        def __init__(self, width: int, features: int) -> None:
            super().__init__()
            self.intermediate, self.output = nn.Module(), nn.Module()
            self.intermediate = nn.Sequential()
            self.intermediate.add_module("dense", nn.Linear(width, features))
            self.intermediate.add_module("act", nn.GELU())
            self.output = nn.Sequential()
            self.output.add_module("dense", nn.Linear(features, width))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.layer_norm(x + self.output(self.intermediate(x)), x.shape[-1:])

    def __init__(self, blocks: int = 2, width: int = 32, features: int = 128) -> None:
        super().__init__()
        self.encoder = nn.Module()
        self.encoder.layer = nn.ModuleList(self.Block(width, features) for _ in range(blocks))

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        for block in self.encoder.layer:
            x = block(x)
        return x


def bert() -> tuple[Bert, list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    model = Bert().eval()
    mask = torch.arange(16).expand(8, 16) < 12
    batches = [
        {"x": torch.randn(8, 16, 32, generator=seeded(number)), "attention_mask": mask} for number in range(4)
    ]
    return model, batches


def error(clusters: str, top_k: int, **options: Any) -> float:
    dense, batches = bert()
    model = copy.deepcopy(dense)
    split_ffn.split_(model, batches, clusters, 8, top_k, 16, **options)
    inputs = [split_ffn.inputs_of(dense, number, batches) for number in range(2)]
    assert [len(x) for x in inputs] == [4 * 8 * 12] * 2  # without padding
    assert not any(isinstance(module, nn.GELU) for module in model.modules())
    return split_ffn.error_of(model, dense, inputs)


@pytest.mark.parametrize("clusters", split_ffn.CLUSTERS)
def test_all_experts_together_are_the_dense_layer(clusters: str) -> None:
    assert error(clusters, 8) < 1e-10


def test_routers_and_refits_lower_the_error() -> None:
    best, routed = (error("activations", 4, router=router) for router in ("oracle", "linear"))
    fitted = error("activations", 4, refit=True)
    assert 0 < best < routed < 1
    assert fitted < routed


def test_clusters_are_of_one_size_and_find_directions() -> None:
    centres = torch.eye(4, 16)
    rows = centres.repeat_interleave(8, 0) + 0.05 * torch.randn(32, 16, generator=seeded())
    order = torch.randperm(32, generator=seeded())
    found = split_ffn.balanced_clusters(rows[order], 4, seed=1)
    assert sorted(found.flatten().tolist()) == list(range(32))
    assert found.shape == (4, 8)
    assert all(len({*(order[group] // 8).tolist()}) == 1 for group in found)


def test_times_are_of_the_layer_in_the_middle() -> None:
    dense, batches = bert()
    inputs = [split_ffn.inputs_of(dense, number, batches) for number in range(2)]
    model = copy.deepcopy(dense)
    ts.prune.prune_model(model, batches, density=0.5, block_shape=16, layers=split_ffn.FFN)
    assert {type(module) for module in model.modules() if hasattr(module, "in_features")} == {
        ts.BlockSparseLinear
    }
    x = inputs[1][:8]
    torch.testing.assert_close(
        split_ffn.of_layer(split_ffn.places(model)[1])(x),
        model.encoder.layer[1].output(model.encoder.layer[1].intermediate(x)),
    )

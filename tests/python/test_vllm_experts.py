"""Block-sparse experts served by vLLM: against Transformers, in several processes, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from test_vllm import assert_same, change_tensors, generated, greedy, make_model, served, served_by_two
from test_vllm_method import STORED
from torch import nn

from tilesparse import BlockSparseExperts
from tilesparse.errors import CheckpointError, UnsupportedError
from tilesparse.integrations.vllm.method import TileSparseConfig
from tilesparse.nn.experts import ExpertsLinear

pytestmark = pytest.mark.vllm
EXPERTS = r".*\.experts"
SMALL = {"num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 64}
MLA = {"q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**SMALL, "num_experts": 8, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 64},
    "qwen2_moe": {**SMALL, "num_experts": 8, "shared_expert_intermediate_size": 256},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 128},
}


def mixture(kind: str, pattern: str = EXPERTS, **options: Any) -> Any:
    return make_model(kind, pattern, config=MIXTURES[kind], **options)


def experts_of(llm: Any) -> list[BlockSparseExperts]:
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    return [module for module in model.modules() if isinstance(module, BlockSparseExperts)]


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{kind: ({"kind": kind}, {}) for kind in MIXTURES},
    "everything": ({"kind": "qwen3_moe", "pattern": rf"{EXPERTS}|.*self_attn\..*_proj|lm_head"}, {}),
    "compiled": ({"kind": "qwen3_moe", "block_shape": (16, 64)}, {"enforce_eager": False}),
    "int8": ({"kind": "mixtral", "storage": "int8"}, {}),
    "2:4": ({"kind": "mixtral", "nm": (2, 4), "storage": "compressed"}, {}),
    "4 bits": ({"kind": "qwen3_moe", "storage": "int4"}, {}),
    "int8 W8A8": ({"kind": "mixtral", "storage": "int8", "activations": "int8"}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_served_mixtures_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    options, how = CASES[case]
    model = mixture(**options)
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    expected = greedy(model)

    def look(llm: Any) -> Any:
        found = experts_of(llm)
        assert len(found) == 2
        layers = [layer for each in found for layer in each.projections().values()]
        # Kernels of the CPU read no others with x in its own dtype.
        assert {layer.storage for layer in layers} == {
            options["storage"] if "activations" in options else "plain"
        }
        assert {layer.spec.density for layer in layers} == {0.5}
        return generated(llm)

    assert_same(served(tmp_path, look, **how), expected, 1e-5)


def test_experts_may_stay_dense(tmp_path: Path) -> None:
    model = mixture("qwen3_moe", r".*self_attn\..*_proj")
    model.save_pretrained(tmp_path)

    def look(llm: Any) -> Any:
        assert not experts_of(llm)
        return generated(llm)

    assert_same(served(tmp_path, look), greedy(model), 1e-5)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_tensor_parallelism_of_experts(kind: str, tmp_path: Path) -> None:
    model = mixture(kind, block_shape=(64, 128))
    model.save_pretrained(tmp_path / "model")
    assert_same(served_by_two(tmp_path), greedy(model), 1e-4)


HIDDEN, FEATURES, NUMBER = 128, 256, 3


def layer_of(rank: int = 0, ranks: int = 1, **changes: Any) -> Any:
    """Return a stand-in of vLLM's layer of experts, with all that the method asks for."""
    parallel = SimpleNamespace(
        tp_rank=rank,
        tp_size=ranks,
        use_ep=changes.pop("use_ep", False),
        dp_size=1,
        is_sequence_parallel=False,
    )
    own = {"swiglu_limit": None, "is_lora_enabled": False, "has_bias": False}
    layer: Any = nn.Module()
    layer.activation = SimpleNamespace(value=changes.pop("activation", "silu"))
    layer.apply_router_weight_on_input = changes.pop("apply_router_weight_on_input", False)
    layer.moe_config = SimpleNamespace(moe_parallel_config=parallel, **{**own, **changes})
    return layer


def projections(name: str, bias: bool = False, seed: int = 0) -> dict[str, ExpertsLinear]:
    generator = torch.Generator().manual_seed(seed)
    options: Any = {"block_shape": (64, 32), "generator": generator, **STORED[name]}
    return {
        "gate_up": ExpertsLinear(HIDDEN, NUMBER * 2 * FEATURES, bias, experts=NUMBER, **options),
        "down": ExpertsLinear(FEATURES, NUMBER * HIDDEN, bias, experts=NUMBER, **options),
    }


def loaded(layers: dict[str, ExpertsLinear], layer: Any, **sizes: Any) -> Any:
    """Load experts into a layer as vLLM does, and make it ready."""
    from tilesparse.integrations.vllm.method import TileSparseExpertsMethod

    specs = {name: each.spec for name, each in layers.items()}
    config = TileSparseConfig({})
    method = TileSparseExpertsMethod(layer, specs, "mlp.experts", config)
    own = FEATURES // layer.moe_config.moe_parallel_config.tp_size
    given = {"num_experts": NUMBER, "hidden_size": HIDDEN, "intermediate_size_per_partition": own, **sizes}
    method.create_weights(layer, **given, params_dtype=torch.float32)
    tensors = {
        f"routed_experts.{name}.{key}": value
        for name, each in layers.items()
        for key, value in each.state_dict().items()
    }
    found = set(layer.load_weights(tensors.items()))
    assert found == {name.removeprefix("routed_experts.") for name in tensors}
    method.process_weights_after_loading(layer)
    method.process_weights_after_loading(layer)
    return method


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("bias", [False, True])
def test_results_of_processes_add_up(name: str, bias: bool) -> None:
    layers = projections(name, bias)
    x, ids = torch.randn(7, HIDDEN), torch.randint(NUMBER, (7, 2))
    weights = torch.rand(7, 2)
    expected = BlockSparseExperts(layers["gate_up"], layers["down"])(x, ids, weights)
    for ranks in (1, 2, 4):
        total = torch.zeros(7, HIDDEN)
        for rank in range(ranks):
            layer = layer_of(rank, ranks, has_bias=bias)
            method = loaded(layers, layer)
            total += method.apply(layer, x, weights, ids, None, None)
        # Each process quantizes its own features of what down multiplies.
        tolerance = 1e-2 if name == "int8 W8A8" and ranks > 1 else 1e-4
        torch.testing.assert_close(total, expected.detach(), rtol=tolerance, atol=tolerance)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "activation": ({"activation": "situ"}, "the activation 'situ' of its experts is not known"),
    "limit": ({"swiglu_limit": 7.0}, "a limit of 7.0"),
    "inputs": ({"apply_router_weight_on_input": True}, "multiplies the inputs of experts"),
    "expert parallelism": ({"use_ep": True}, "expert parallelism is not supported"),
    "LoRA": ({"is_lora_enabled": True}, "LoRA for experts"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_right_is_refused(case: str) -> None:
    changes, text = REFUSED[case]
    with pytest.raises(UnsupportedError, match=f"mlp.experts: .*{text}"):
        loaded(projections("plain"), layer_of(**changes))


def test_sizes_of_another_model_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"mlp\.experts\.gate_up: must be 4 experts"):
        loaded(projections("plain"), layer_of(), num_experts=4)


def test_cuts_that_no_block_allows_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"mlp\.experts\.gate_up: it cannot be cut"):
        loaded(projections("plain"), layer_of(1, 32))


def drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.1.mlp.experts.down.slot"]


def add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.experts.down.metadata"] = torch.zeros(1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (drop, r"model\.layers\.1\.mlp\.experts\.down: slot must be in the checkpoint"),
        (add, r"model\.layers\.0\.mlp\.experts\.down\.metadata: must not be there"),
    ],
)
def test_broken_experts_are_refused(
    change: Callable[[dict[str, torch.Tensor]], None], text: str, tmp_path: Path
) -> None:
    mixture("qwen3_moe").save_pretrained(tmp_path)
    change_tensors(tmp_path, change)
    with pytest.raises(CheckpointError, match=text):
        served(tmp_path)

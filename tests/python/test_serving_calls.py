"""The plugin's method for vLLM, called as a server calls it, in CUDA graphs where vLLM itself cannot be.

Modules with the few names that the method imports stand for it; `test_vllm.py` runs the real one on a CPU.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from helpers import assert_within, randn, seeded
from torch import Tensor, nn

from tilesparse import BlockSparseLinear

BF16 = torch.bfloat16
FEATURES, PREFIX = 512, "model.layers.0.mlp.gate_up_proj"
SHARDS = [PREFIX.replace("gate_up_proj", own) for own in ("gate_proj", "up_proj")]
METHOD = "tilesparse.integrations.vllm.method"


class Base:
    """Stands for vLLM's base classes of methods and configs."""

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {}


class Linear(nn.Module):
    """Stands for a layer of vLLM in one process."""

    tp_rank, tp_size = 0, 1


@pytest.fixture
def method(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module with the plugin's method, imported beside stand-ins."""
    served = SimpleNamespace(
        model_config=SimpleNamespace(architecture="LlamaForCausalLM"),
        load_config=SimpleNamespace(load_format="auto"),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
    )
    layers = "model_executor.layers"
    names: dict[str, dict[str, Any]] = {
        "config": {"get_current_vllm_config": lambda: served},
        "logger": {"init_logger": logging.getLogger},
        f"{layers}.fused_moe": {"RoutedExperts": type("RoutedExperts", (Linear,), {})},
        f"{layers}.fused_moe.config": {"FUSED_MOE_UNQUANTIZED_CONFIG": None, "FusedMoEQuantConfig": Base},
        f"{layers}.fused_moe.fused_moe_method_base": {"FusedMoEMethodBase": Base},
        f"{layers}.linear": {
            "LinearMethodBase": Base,
            "LinearBase": Linear,
            "UnquantizedLinearMethod": Base,
        },
        f"{layers}.quantization.base_config": {"QuantizationConfig": Base, "QuantizeMethodBase": Base},
        f"{layers}.vocab_parallel_embedding": {"ParallelLMHead": type("ParallelLMHead", (Linear,), {})},
        "model_executor.models.utils": {"WeightsMapper": Base},
    }
    for name, members in names.items():
        full = f"vllm.{name}"
        while full not in sys.modules:
            monkeypatch.setitem(sys.modules, full, ModuleType(full))
            full = full.rpartition(".")[0] or full
        for own, member in members.items():
            monkeypatch.setattr(sys.modules[f"vllm.{name}"], own, member, raising=False)
    monkeypatch.delitem(sys.modules, METHOD, raising=False)
    yield importlib.import_module(METHOD)
    sys.modules.pop(METHOD, None)


def served(method: Any, shards: list[BlockSparseLinear]) -> Any:
    """A layer of the server with both shards, and its method, loaded as a server loads them."""
    config = method.TileSparseConfig({name: shard.spec for name, shard in zip(SHARDS, shards, strict=True)})
    layer: Any = Linear()
    own = config.get_quant_method(layer, PREFIX)
    layer.output_sizes = rows = [shard.out_features for shard in shards]
    with torch.device(shards[0].weight.device):
        own.create_weights(layer, FEATURES, rows, FEATURES, sum(rows), BF16)
    for place, shard in enumerate(shards):
        for name, tensor in shard.state_dict().items():
            parameter = getattr(layer, name)
            parameter.weight_loader(parameter, tensor, place)
    own.process_weights_after_loading(layer)
    return lambda x: own.apply(layer, x)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "blocks": ({}, {}),
    "2:4": ({"density": 1.0, "nm": (2, 4)}, {"storage": "compressed"}),
    "2:4 float8": (
        {"density": 1.0, "nm": (2, 4)},
        {"storage": "float8_e4m3fn", "activations": "float8_e4m3fn"},
    ),
    "int8": ({}, {"storage": "int8", "activations": "int8"}),
    "int4": ({}, {"storage": "int4"}),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS)
def test_a_server_gets_what_the_layers_give(method: Any, form: str, device: str) -> None:
    made, stored = FORMS[form]
    options: dict[str, Any] = {"block_shape": 64, "density": 0.5, "bias": False, "dtype": BF16, **made}
    shards = [
        BlockSparseLinear(FEATURES, rows, device=device, generator=seeded(rows), **options)
        for rows in (256, 384)
    ]
    if stored:
        shards = [shard.to_storage(**stored) for shard in shards]
    apply = served(method, shards)
    for tokens in (1, 16, 512):
        x = randn(tokens, FEATURES, dtype=BF16, device=device, seed=tokens)
        with torch.no_grad():
            replay = captured(apply, x) if device == "cuda" else lambda x=x: apply(x)
            for seed in range(2):
                x.copy_(randn(tokens, FEATURES, dtype=BF16, device=device, seed=seed))
                expected = torch.cat([shard(x) for shard in shards], -1)
                assert_within(replay(), expected.cpu().double(), 2e-2 * expected.cpu().double().abs().amax())


def captured(apply: Any, x: Tensor) -> Any:
    """The call in a CUDA graph, as a server captures it for each number of tokens."""
    graph = torch.cuda.CUDAGraph()
    stream: Any = torch.cuda.Stream(x.device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        apply(x)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        y = apply(x)

    def replay() -> Tensor:
        graph.replay()
        result: Tensor = y
        return result

    return replay

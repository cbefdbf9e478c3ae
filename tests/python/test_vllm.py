"""Served by vLLM on the CPU, block-sparse checkpoints give the tokens and log probabilities of Transformers.

Everything runs in this process but tensor parallelism. A vLLM for the CPU is needed, see docs/vllm.md.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

from safetensors.torch import load_file, save_file
from test_vllm_method import STORED
from transformers import AutoConfig, AutoModelForCausalLM

import tilesparse
import tilesparse_vllm
from tilesparse import BlockPattern, BlockSparseLinear
from tilesparse.errors import UnsupportedError

pytestmark = pytest.mark.vllm
PROMPTS = [[5, 6, 7, 8, 9], list(range(2, 40)), [300]]
EVERY = r"model\.layers\.\d+\..*_proj"
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 256,
    "kv_cache_memory_bytes": 1 << 26,
    "max_num_seqs": 4,
    "seed": 0,
    "enforce_eager": True,
    "dtype": "float32",
}

Q, KV, HIDDEN = 256, 128, 256  # rows of q, rows of k and v, columns
Maker = Callable[..., Any]


def sparse(rows: int, name: str = "plain", block_shape: Any = (64, 32), seed: int = 0) -> BlockSparseLinear:
    generator = torch.Generator().manual_seed(seed)
    options: Any = {"block_shape": block_shape, "generator": generator, **STORED[name]}
    return BlockSparseLinear(HIDDEN, rows, bias=False, **options)


@pytest.fixture
def make_layer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Maker]:
    """Makes layers of vLLM as one of several processes has them, and loads shards into them."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import linear

    from tilesparse.integrations.vllm import method

    def make(kind: str, shards: dict[str, Any], rank: int = 0, ranks: int = 1, **sizes: Any) -> Any:
        monkeypatch.setattr(linear, "get_tensor_model_parallel_rank", lambda: rank)
        monkeypatch.setattr(linear, "get_tensor_model_parallel_world_size", lambda: ranks)
        specs = {name: each.spec for name, each in shards.items() if isinstance(each, BlockSparseLinear)}
        own = method.TileSparseConfig(specs)
        names = {"QKVParallelLinear": "qkv_proj", "MergedColumnParallelLinear": "gate_up_proj"}
        name = names.get(kind, "layer")
        options = {"bias": False, "quant_config": own, "prefix": name, "return_bias": False}
        layer: Any = getattr(linear, kind)(**options, **sizes, params_dtype=torch.float32)
        for shard, (key, given) in enumerate(shards.items()):
            at = (key[0] if kind == "QKVParallelLinear" else shard,) if len(shards) > 1 else ()
            for tensor, value in given.state_dict().items():
                parameter = layer.get_parameter(tensor)
                parameter.weight_loader(parameter, value, *at)
        layer.quant_method.process_weights_after_loading(layer)
        return layer

    monkeypatch.setattr(method, "architecture", lambda: "Phi3ForCausalLM")
    with set_current_vllm_config(VllmConfig()):
        yield make


QKV = {"hidden_size": HIDDEN, "head_size": 64, "total_num_heads": 4, "total_num_kv_heads": 2}


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_processes_hold_their_heads(make_layer: Maker, name: str, ranks: int) -> None:
    """With four processes two of them have the same head of k and v."""
    shards = {
        "q_proj": sparse(Q, name),
        "k_proj": sparse(KV, name, seed=1),
        "v_proj": sparse(KV, name, seed=2),
    }
    x = torch.randn(3, HIDDEN)
    for rank in range(ranks):
        layer = make_layer("QKVParallelLinear", shards, rank, ranks, **QKV)
        assert len(layer.parts) == 1
        expected = []
        for each, total in zip(shards.values(), (4, 2, 2), strict=True):
            heads = max(1, total // ranks)
            begin = rank * total // ranks * 64
            expected.append(each(x)[:, begin : begin + heads * 64])
        torch.testing.assert_close(layer(x), torch.cat(expected, -1))


@pytest.mark.parametrize("name", STORED)
def test_fused_layers_are_cut_by_their_parts(make_layer: Maker, name: str) -> None:
    shards = {"gate_up_proj": sparse(512, name, (128, 32))}
    x = torch.randn(3, HIDDEN)
    expected = shards["gate_up_proj"](x)
    for rank, ranks in ((0, 1), (0, 2), (1, 2), (3, 4)):
        sizes = {"input_size": HIDDEN, "output_sizes": [192, 320]}
        layer = make_layer("MergedColumnParallelLinear", shards, rank, ranks, **sizes)
        rows = [range(rank * 192 // ranks, (rank + 1) * 192 // ranks)]
        rows += [range(192 + rank * 320 // ranks, 192 + (rank + 1) * 320 // ranks)]
        torch.testing.assert_close(layer(x), expected[:, [row for span in rows for row in span]])


@pytest.mark.parametrize("name", STORED)
def test_parts_along_columns_add_up(make_layer: Maker, name: str) -> None:
    whole, x = sparse(KV, name, (16, 128)), torch.randn(3, HIDDEN)
    options: Any = {"input_size": HIDDEN, "output_size": KV, "reduce_results": False}
    layers = [make_layer("RowParallelLinear", {"layer": whole}, rank, 4, **options) for rank in range(4)]
    if name == "int8 W8A8":  # each process quantizes its own features of x
        assert [layer.parts[0].activations for layer in layers] == ["int8"] * 4
        tolerance: Any = {"atol": 0.05, "rtol": 0.05}
    else:
        tolerance = {}
    results = [layer(x[:, 64 * rank : 64 * (rank + 1)]) for rank, layer in enumerate(layers)]
    torch.testing.assert_close(torch.stack(results).sum(0), whole(x), **tolerance)


def test_shards_that_differ_are_products_of_their_own(make_layer: Maker) -> None:
    dense, x = torch.nn.Linear(HIDDEN, KV, bias=False), torch.randn(3, HIDDEN)
    quantized, small = sparse(KV, "int8 W8A8"), sparse(KV, block_shape=32)
    for others in ((dense, sparse(KV)), (quantized, dense), (small, sparse(KV))):
        shards = dict(zip(("q_proj", "k_proj", "v_proj"), (sparse(Q), *others), strict=True))
        layer = make_layer("QKVParallelLinear", shards, **QKV)
        assert len(layer.parts) == 3
        torch.testing.assert_close(layer(x), torch.cat([each(x) for each in shards.values()], -1))


def test_rows_whose_order_is_not_known_are_refused(
    make_layer: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilesparse.integrations.vllm import method

    make_layer("QKVParallelLinear", {"qkv_proj": sparse(512)}, **QKV)
    monkeypatch.setattr(method, "architecture", lambda: "FalconForCausalLM")
    with pytest.raises(UnsupportedError, match="qkv_proj: the order of its fused rows"):
        make_layer("QKVParallelLinear", {"qkv_proj": sparse(512)}, **QKV)


def test_cuts_that_no_block_allows_are_refused(make_layer: Maker) -> None:
    shards = {"gate_proj": sparse(192, "masked"), "up_proj": sparse(192, "masked")}
    sizes = {"input_size": HIDDEN, "output_sizes": [192, 192]}
    make_layer("MergedColumnParallelLinear", shards, 1, 4, **sizes)
    with pytest.raises(UnsupportedError, match="gate_proj: it cannot be cut so for tensor parallelism"):
        make_layer("MergedColumnParallelLinear", shards, 1, 8, **sizes)
    options: Any = {"input_size": HIDDEN, "output_size": KV, "reduce_results": False}
    with pytest.raises(UnsupportedError, match="layer: it cannot be cut"):
        make_layer("RowParallelLinear", {"layer": sparse(KV, "masked")}, 1, 16, **options)


def make_model(kind: str = "llama", pattern: str = EVERY, seed: int = 0, **options: Any) -> Any:
    """A random model of Transformers with block-sparse layers; with biases that are not zero."""
    torch.manual_seed(seed)
    of_config = options.pop("config", {})
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **of_config}))
    model = model.float().eval()
    config = tilesparse.BlockSparseConfig(**{"density": 0.5, "block_shape": 32, **options})
    tilesparse.sparsify_(model, config, layers=pattern)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def serve(folder: Path, **options: Any) -> Any:
    from vllm import LLM

    return LLM(str(folder), **{**OPTIONS, **options})


def served(folder: Path, use: Callable[[Any], Any] | None = None, **options: Any) -> Any:
    """Return what a function finds in a server, by default what it generates.

    The server is gone afterwards: the end of one would take the process groups of the next.
    """
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm = None
    try:
        llm = serve(folder, **options)
        return (use or generated)(llm)
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def generated(llm: Any, **options: Any) -> list[tuple[list[int], list[int], list[float]]]:
    """(prompt, greedy tokens, their log probabilities) of each prompt."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=12, logprobs=1, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    found = []
    for output in llm.generate(prompts, sampling, use_tqdm=False, **options):
        (given,) = output.outputs
        tokens = list(given.token_ids)
        logprobs = [step[token].logprob for step, token in zip(given.logprobs, tokens, strict=True)]
        found.append((list(output.prompt_token_ids), tokens, logprobs))
    return found


@torch.no_grad()
def greedy(model: Any) -> list[tuple[list[int], list[int], list[float]]]:
    """The same of a model of Transformers; vLLM changes classes of some, which then do not run any more."""
    found = []
    for prompt in PROMPTS:
        tokens: list[int] = []
        logprobs = []
        for _ in range(12):
            highest = model(torch.tensor([prompt + tokens])).logits[0, -1].float().log_softmax(-1).max(-1)
            tokens.append(int(highest.indices))
            logprobs.append(float(highest.values))
        found.append((prompt, tokens, logprobs))
    return found


def assert_same(outputs: Any, expected: Any, tolerance: float) -> None:
    assert [tokens for _, tokens, _ in outputs] == [tokens for _, tokens, _ in expected]
    for (*_, logprobs), (*_, wanted) in zip(outputs, expected, strict=True):
        torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(wanted), atol=tolerance, rtol=0)


def parts_of(llm: Any) -> dict[str, list[Any]]:
    """The modules that serve each layer of vLLM's model."""
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    return {name: list(module.parts) for name, module in model.named_modules() if hasattr(module, "parts")}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "merged": ({}, {}, 1),
    "compiled": ({"kind": "qwen2", "block_shape": (16, 64)}, {"enforce_eager": False}, 1),
    "mixed": ({"pattern": r".*\.(mlp\.(gate|down)|self_attn\.(q|v))_proj", "storage": "int8"}, {}, 3),
    "fused on disk": ({"kind": "phi3", "nm": (2, 4), "storage": "compressed"}, {}, 1),
    "masked": ({"nm": (2, 4), "config": {"tie_word_embeddings": True}}, {}, 1),
    "4 bits": ({"storage": "int4"}, {}, 1),
    "head": ({"pattern": r"lm_head|.*mlp\..*_proj", "storage": "float8_e4m3fn"}, {}, 1),
    "gate and up on disk": ({"kind": "glm4", "config": {"head_dim": 64}}, {}, 1),
    "8-bit activations": ({"storage": "int8", "activations": "int8"}, {"enforce_eager": False}, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_served_models_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    options, how, most = CASES[case]
    model = make_model(**options)
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    expected = greedy(model)

    def look(llm: Any) -> Any:
        parts = parts_of(llm)
        assert max(map(len, parts.values())) == most
        sparse = [part for own in parts.values() for part in own if isinstance(part, BlockSparseLinear)]
        kept = "activations" in options or options.get("storage") == "int4"
        assert {part.storage for part in sparse} == {options["storage"] if kept else "plain"}
        return generated(llm)

    assert_same(served(tmp_path, look, **how), expected, 1e-5)


def foreign(folder: Path, kind: str) -> None:
    """A checkpoint as compressed-tensors has it: 2:4, W8A8 of 2:4, or W4A16 in groups of 64."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES)).float()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        layer, weight = name.removesuffix(".weight"), tensor
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        if kind != "W4A16":
            groups = weight.view(-1, 4)
            kept = torch.zeros_like(groups).scatter_(1, groups.abs().topk(2, 1).indices, 1)
            weight = (groups * kept).view_as(weight)
        if kind == "2:4":
            tensors[name] = weight
        elif kind == "W8A8":
            scale = weight.abs().amax(1, keepdim=True) / 127
            tensors |= {name: (weight / scale).round().to(torch.int8), f"{layer}.weight_scale": scale}
        else:
            groups = weight.view(len(weight), -1, 64)
            scale = groups.abs().amax(2) / 7
            codes = ((groups / scale[..., None]).round() + 8).to(torch.int32).flatten(1)
            shifts = torch.arange(0, 32, 4, dtype=torch.int32)
            packed = (codes.view(len(weight), -1, 8) << shifts).sum(2, dtype=torch.int32)
            tensors |= {f"{layer}.weight_packed": packed, f"{layer}.weight_scale": scale}
            tensors[f"{layer}.weight_shape"] = torch.tensor(weight.shape)
    folder.mkdir()
    config = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    x = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"} if kind == "W8A8" else None
    group = {"weights": {"num_bits": 4 if kind == "W4A16" else 8}, "input_activations": x}
    if kind != "2:4":
        config["quantization_config"] = {"quant_method": "compressed-tensors", "config_groups": {"0": group}}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("kind", ["2:4", "W8A8", "W4A16"])
def test_converted_checkpoints_are_served(kind: str, tmp_path: Path) -> None:
    foreign(tmp_path / "source", kind)
    report = tilesparse.convert(tmp_path / "source", tmp_path / "new")
    assert sum(layer.spec is not None for layer in report.layers) == 14
    expected = greedy(AutoModelForCausalLM.from_pretrained(tmp_path / "new").eval())
    assert_same(served(tmp_path / "new"), expected, 1e-5)


def test_bfloat16(tmp_path: Path) -> None:
    model = make_model()
    model.save_pretrained(tmp_path)

    def look(llm: Any) -> Any:
        assert {part.weight.dtype for own in parts_of(llm).values() for part in own} == {torch.bfloat16}
        return generated(llm)

    outputs = served(tmp_path, look, dtype="bfloat16")
    for prompt, tokens, logprobs in outputs:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=0.1, rtol=0)


def test_other_patterns_in_a_folder_are_followed_by_compiled_models(tmp_path: Path) -> None:
    """vLLM keeps what it has compiled for a folder, also for the next server."""
    for seed, density in ((0, 0.5), (1, 0.5), (2, 0.25)):
        model = make_model(seed=seed, density=density)
        model.save_pretrained(tmp_path)
        assert_same(served(tmp_path, enforce_eager=False), greedy(model), 1e-5)


def test_lora(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from vllm.lora.request import LoRARequest

    model = make_model()
    model.save_pretrained(tmp_path / "base")
    names = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    config = LoraConfig(target_modules=names, r=8, lora_alpha=32, init_lora_weights=False)
    adapted = get_peft_model(model, config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    request = LoRARequest("adapter", 1, str(tmp_path / "adapter"))

    def look(llm: Any) -> Any:
        return generated(llm, lora_request=request), generated(llm)

    outputs, without = served(tmp_path / "base", look, enable_lora=True, max_lora_rank=8)
    assert_same(outputs, greedy(adapted), 1e-4)
    with adapted.disable_adapter():
        assert_same(without, greedy(adapted), 1e-4)


PARALLEL = """
import json, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_vllm
if __name__ == "__main__":
    llm = test_vllm.serve(Path(sys.argv[1]), tensor_parallel_size=2, distributed_executor_backend="mp")
    Path(sys.argv[2]).write_text(json.dumps(test_vllm.generated(llm)))
"""


def served_by_two(folder: Path) -> Any:
    """Return what two processes generate with the model in ``folder / "model"``."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("vLLM binds each process to a core of its own")
    script, result = folder / "serve.py", folder / "outputs.json"
    script.write_text(PARALLEL.format(tests=str(Path(__file__).parent)))
    cores = sorted(os.sched_getaffinity(0))[:2]
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[1]}"}
    command = [sys.executable, str(script), str(folder / "model"), str(result)]
    ran = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(result.read_text())


@pytest.mark.parametrize("case", ["merged", "fused on disk"])
def test_tensor_parallelism(case: str, tmp_path: Path) -> None:
    """With patterns that differ in the processes' parts, and cuts within blocks of 128."""
    model = make_model(**{**CASES[case][0], "block_shape": (128, 64)})
    for layer in (each for each in model.modules() if isinstance(each, BlockSparseLinear)):
        blocks = torch.ones(layer.pattern.grid, dtype=torch.bool)
        free = blocks.flatten().nonzero().flatten()[: layer.pattern.nnz]  # all of the first rows
        columns = layer.pattern.grid[1]
        places = torch.stack((free // columns, free % columns), 1)
        shape = layer.pattern.shape
        layer.pattern = BlockPattern.from_blocks(places, shape=shape, block_shape=layer.block_shape)
    model.save_pretrained(tmp_path / "model")
    assert_same(served_by_two(tmp_path), greedy(model), 1e-4)


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def change_section(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


def drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.1.self_attn.k_proj.slot"]


def add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.down_proj.metadata"] = torch.zeros(1, dtype=torch.int32)


def truncate(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.1.mlp.down_proj.col_indices"
    tensors[name] = tensors[name][:-1].clone()


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing tensor": (
        lambda folder: change_tensors(folder, drop),
        r"model\.layers\.1\.self_attn\.k_proj: slot must be in the checkpoint",
    ),
    "foreign tensor": (lambda folder: change_tensors(folder, add), "metadata"),
    "truncated pattern": (
        lambda folder: change_tensors(folder, truncate),
        r"model\.layers\.1\.mlp\.down_proj: slot must have",
    ),
    "layer that is missing in the section": (
        lambda folder: change_section(folder, lambda own: own["layers"].pop("model.layers.0.mlp.down_proj")),
        r"no module or parameter named 'layers\.0\.mlp\.down_proj",
    ),
    "layer that vLLM has not": (
        lambda folder: change_section(
            folder,
            lambda own: own["layers"].update({"model.other": own["layers"]["model.layers.0.mlp.down_proj"]}),
        ),
        r"model\.other.* not linear layers or experts of vLLM's model",
    ),
    "newer version": (
        lambda folder: change_section(folder, lambda own: own.update(version=4)),
        "version must be at most 3",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_checkpoints_are_refused(kind: str, tmp_path: Path) -> None:
    change, text = BROKEN[kind]
    make_model().save_pretrained(tmp_path)
    change(tmp_path)
    with pytest.raises(Exception, match=text):
        served(tmp_path)


@pytest.mark.parametrize(
    ("model", "options", "text"),
    [
        ({}, {"load_format": "dummy"}, r"qkv_proj: load_format must be one of"),
        (
            {"kind": "gpt2", "pattern": r".*c_fc", "config": {"n_embd": 256, "n_layer": 1, "n_head": 4}},
            {},
            r"c_fc: vLLM's GPT2LMHeadModel rewrites weights",
        ),
        (
            {"kind": "bloom", "pattern": r".*dense_h_to_4h", "config": {"n_layer": 1, "n_head": 4}},
            {},
            r"dense_h_to_4h: vLLM's BloomForCausalLM rewrites weights",
        ),
    ],
)
def test_what_cannot_be_right_is_refused(
    model: dict[str, Any], options: dict[str, Any], text: str, tmp_path: Path
) -> None:
    make_model(**model).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=text):
        served(tmp_path, **options)


def test_pipeline_parallelism_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilesparse.integrations.vllm import method

    config = SimpleNamespace(
        model_config=SimpleNamespace(architecture="LlamaForCausalLM"),
        load_config=SimpleNamespace(load_format="auto"),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
    )
    monkeypatch.setattr(method, "get_current_vllm_config", lambda: config)
    method.check_can_be_served("layer")
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(UnsupportedError, match="layer: pipeline parallelism was not tried"):
        method.check_can_be_served("layer")


def test_registration_may_be_repeated() -> None:
    from vllm.model_executor.layers.quantization import get_quantization_config

    tilesparse_vllm.register()
    tilesparse_vllm.register()
    section = make_model().config.quantization_config
    config = get_quantization_config("tilesparse").from_config(section.to_dict())
    assert config.get_name() == tilesparse_vllm.METHOD and "model.layers.0.mlp.up_proj" in config.layers


def test_dense_models_do_not_wait_for_this_package() -> None:
    """As vLLM does it in each process."""
    code = """
import sys
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
assert "tilesparse" in QUANTIZATION_METHODS
assert "tilesparse" not in sys.modules, "imported"
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-2000:]

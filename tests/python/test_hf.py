"""Hugging Face's Transformers: saving, loading and training models with block-sparse layers."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator, dispatch_model, init_empty_weights, load_checkpoint_and_dispatch
from helpers import SIZES, run_anew
from huggingface_hub import PyTorchModelHubMixin
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    CLIPConfig,
    CLIPModel,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    pipeline,
)
from transformers.utils import logging

import tilesparse
from tilesparse import BlockSparseConfig, BlockSparseLinear, densify_, sparsify_
from tilesparse.errors import CheckpointError, InvalidArgumentError, UnsupportedError
from tilesparse.integrations.transformers import TileSparseConfig, follow
from tilesparse.nn.weight import dense_blocks

logging.set_verbosity_error()
logging.disable_progress_bar()

TOKENS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
IMAGES = {"image_size": 16, "patch_size": 8}
STORAGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "2:4": {"nm": (2, 4)},
    "compressed": {"nm": (2, 4), "storage": "compressed"},
    "int8": {"storage": "int8"},
    "int4": {"storage": "int4"},
    "2:4 float8": {"nm": (2, 4), "storage": "float8_e4m3fn"},
}


def gpt2(**options: Any) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=96,
        n_embd=64,
        n_layer=2,
        n_head=2,
        n_positions=40,
        bos_token_id=0,
        eos_token_id=1,
        **options,
    )
    return GPT2LMHeadModel(config).eval()


def llama(**options: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES, **TOKENS, num_key_value_heads=1, **options)).eval()


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "roberta": (lambda: RobertaForMaskedLM(RobertaConfig(**SIZES, **TOKENS)).eval(), r"roberta\.encoder"),
    "gpt2": (gpt2, r"transformer\.h"),
    "llama": (llama, r"model\.layers"),
    "vit": (lambda: ViTForImageClassification(ViTConfig(**SIZES | IMAGES)).eval(), r"vit\.(layers|encoder)"),
}
CASTS_RIGHT = hasattr(transformers.quantizers.HfQuantizer, "get_new_dtype")  # as later than 5.17
LAYERS = {"roberta": 12, "gpt2": 8, "llama": 14, "vit": 12}


def patch(model: nn.Module, regex: str, **options: Any) -> None:
    config = BlockSparseConfig(**{"density": 0.5, "block_shape": (16, 32), **options})
    assert sparsify_(model, config, layers=regex).layers


def patched(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    make, regex = MODELS[kind]
    model = make()
    patch(model, regex, **options)
    return model


def inputs(kind: str = "llama") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    if kind == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    return {"input_ids": torch.randint(3, 96, (2, 9), generator=generator)}


@torch.no_grad()
def logits(model: Any, kind: str = "llama") -> torch.Tensor:
    given = {name: tensor.to(model.device) for name, tensor in inputs(kind).items()}
    result: torch.Tensor = model(**given).logits
    return result.cpu()


def sparse_layers(model: nn.Module) -> list[BlockSparseLinear]:
    return [module for module in model.modules() if isinstance(module, BlockSparseLinear)]


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    """Bit for bit, in all tensors and in what the layers are."""
    mine, theirs = model.state_dict(), expected.state_dict()
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert tensor.dtype == theirs[name].dtype, name
        both = (state[name].cpu().reshape(-1).view(torch.uint8) for state in (mine, theirs))
        assert torch.equal(*both), name
    assert tilesparse.io.manifest.section(model) == tilesparse.io.manifest.section(expected)


def written(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("kind", MODELS)
def test_models_are_saved_and_loaded_bit_for_bit(tmp_path: Path, kind: str, storage: str) -> None:
    model = patched(kind, **STORAGES[storage])
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert len(written(tmp_path)["quantization_config"]["layers"]) == LAYERS[kind]
    loaded = type(model).from_pretrained(tmp_path)
    assert_same(loaded, model)
    assert torch.equal(logits(loaded, kind), logits(model, kind))
    for layer, original in zip(sparse_layers(loaded), sparse_layers(model), strict=True):
        assert layer.weight.requires_grad == original.weight.requires_grad


@pytest.mark.parametrize("storage", ["2:4", "2:4 float8"])
@pytest.mark.parametrize("kind", MODELS)
def test_models_are_loaded_in_another_dtype_and_with_another_head(
    tmp_path: Path, kind: str, storage: str
) -> None:
    model = patched(kind, **STORAGES[storage])
    model.save_pretrained(tmp_path / "whole")
    base = AutoModel.from_pretrained(tmp_path / "whole", dtype=torch.bfloat16)
    assert len(sparse_layers(base)) == LAYERS[kind]
    for name, tensor in base.state_dict().items():
        if tensor.is_floating_point() and not name.endswith("scales") and tensor.element_size() > 1:
            assert tensor.dtype == torch.bfloat16, name
    for layer, original in zip(sparse_layers(base), sparse_layers(model), strict=True):
        assert torch.equal(dense_blocks(layer), dense_blocks(original).bfloat16())
        assert layer.pattern == original.pattern and layer.pattern.col_indices.dtype == torch.int32
    base.save_pretrained(tmp_path / "base")
    again = type(model).from_pretrained(tmp_path / "base", dtype=torch.float32)
    before = base if storage == "2:4" else model  # 8 bits and scales are the same in every dtype
    for layer, original in zip(sparse_layers(again), sparse_layers(before), strict=True):
        assert torch.equal(dense_blocks(layer), dense_blocks(original).float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("storage", STORAGES)
def test_layers_that_a_model_keeps_in_float32(tmp_path: Path, storage: str, dtype: torch.dtype) -> None:
    config = T5Config(
        vocab_size=96, d_model=64, d_kv=32, d_ff=128, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    model = T5ForConditionalGeneration(config).eval()
    patch(model, r".*(wo|wi|SelfAttention)", **STORAGES[storage])
    model.save_pretrained(tmp_path)
    if "metadata" in sparse_layers(model)[0].state_dict() and dtype == torch.float16 and not CASTS_RIGHT:
        with pytest.raises(UnsupportedError, match=r"wo\.metadata: rounded by Transformers"):
            T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=dtype)
        return
    loaded = T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=dtype)
    kept = loaded.encoder.block[0].layer[1].DenseReluDense.wo
    if "float8" not in storage and storage not in ("int8", "int4"):
        assert kept.weight.dtype == (torch.float32 if dtype == torch.float16 else dtype)
    for layer, original in zip(sparse_layers(loaded), sparse_layers(model), strict=True):
        assert layer.pattern == original.pattern
        assert torch.equal(dense_blocks(layer).float(), dense_blocks(original).to(layer.spec.dtype).float())


TILESPARSE_FIRST = """
import sys
import tilesparse
assert "transformers" not in sys.modules
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
torch.save(model(torch.load(sys.argv[2])["input_ids"]).logits, sys.argv[3])
"""


def test_importing_tilesparse_first_suffices_in_a_fresh_process(tmp_path: Path) -> None:
    model = patched("gpt2", nm=(2, 4), storage="int8")
    model.save_pretrained(tmp_path)
    torch.save(inputs(), tmp_path / "inputs")
    run_anew(TILESPARSE_FIRST, tmp_path, tmp_path / "inputs", tmp_path / "logits")
    assert torch.equal(torch.load(tmp_path / "logits"), logits(model))


WITHOUT_TILESPARSE = """
import sys
from transformers import AutoModel, AutoModelForCausalLM, LlamaForCausalLM, pipeline
attempts = [
    lambda: LlamaForCausalLM.from_pretrained(sys.argv[1]),
    lambda: AutoModelForCausalLM.from_pretrained(sys.argv[1]),
    lambda: AutoModel.from_pretrained(sys.argv[1]),
    lambda: pipeline("text-generation", model=sys.argv[1]),
]
for attempt in attempts:
    try:
        attempt()
    except (RuntimeError, ValueError) as error:
        print(type(error).__name__)
assert "tilesparse" not in sys.modules
import tilesparse
model = attempts[0]()
print(sum(isinstance(layer, tilesparse.BlockSparseLinear) for layer in model.modules()))
"""


def test_without_tilesparse_loading_is_refused(tmp_path: Path) -> None:
    patched("llama", storage="int8").save_pretrained(tmp_path)
    done = run_anew(WITHOUT_TILESPARSE, tmp_path)
    assert done.stdout.split() == [*["RuntimeError"] * 3, "ValueError", str(LAYERS["llama"])]
    assert "Unknown quantization type, got tilesparse" in done.stderr


def test_what_is_written_follows_the_layers(tmp_path: Path) -> None:
    model = patched("llama")
    layer = model.model.layers[0].mlp.up_proj
    layer.to_storage("int8", granularity="block")
    layer.policy = "auto"
    model.model.layers[1].mlp.up_proj.set_nm((2, 4))
    model.model.layers[1].mlp.down_proj = BlockSparseLinear(128, 64, bias=False, density=0.25, block_shape=32)
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert_same(loaded, model)
    loaded.model.layers[0].mlp.up_proj.to_storage("plain")
    loaded.save_pretrained(tmp_path)
    assert_same(LlamaForCausalLM.from_pretrained(tmp_path), loaded)


def test_copies_of_a_model_have_configurations_of_their_own(tmp_path: Path) -> None:
    model = patched("llama")
    copied = copy.deepcopy(model)
    copied.model.layers[0].mlp.up_proj.to_storage("int8")
    copied.save_pretrained(tmp_path / "copied")
    model.save_pretrained(tmp_path / "model")
    assert_same(LlamaForCausalLM.from_pretrained(tmp_path / "copied"), copied)
    assert_same(LlamaForCausalLM.from_pretrained(tmp_path / "model"), model)


def test_t5_reads_the_weight_of_layers_with_adapters() -> None:
    model = T5ForConditionalGeneration(T5Config(vocab_size=32, d_model=64, d_kv=16, d_ff=128, num_layers=1))
    patch(model, r".*(wi|wo)$")
    get_peft_model(model, LoraConfig(target_modules=["wi", "wo"]))
    ids = torch.arange(6)[None]
    assert model(input_ids=ids, decoder_input_ids=ids).logits.shape == (1, 6, 32)


def bart() -> BartForConditionalGeneration:
    sizes: dict[str, Any] = {"vocab_size": 96, "d_model": 64, "max_position_embeddings": 40}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 1, f"{part}_attention_heads": 2, f"{part}_ffn_dim": 64}
    return BartForConditionalGeneration(BartConfig(**sizes)).eval()


TIED: dict[str, tuple[Callable[[], Any], str]] = {
    "llama": (lambda: llama(tie_word_embeddings=True), "lm_head"),
    "roberta": (MODELS["roberta"][0], r"lm_head\.decoder"),
    "bart": (bart, "lm_head"),  # whose other embeddings keep their values
}


@pytest.mark.parametrize("kind", TIED)
def test_sparse_output_embeddings_are_not_tied(tmp_path: Path, kind: str) -> None:
    """Nor once they are dense again: they have a weight of their own then."""
    torch.manual_seed(0)
    make, name = TIED[kind]
    model = make()
    head: Any = model.get_submodule(name.replace("\\", ""))
    for own, parameter in list(head.named_parameters()):
        setattr(head, own, nn.Parameter(parameter.detach().clone()))
    patch(model, name)
    sparse = logits(model)
    for _ in range(2):
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path)
        assert len(sparse_layers(loaded)) == 1 and torch.equal(logits(loaded), sparse)
        loaded.save_pretrained(tmp_path)
    densify_(model)
    model.tie_weights()
    assert not model.config.tie_word_embeddings
    torch.testing.assert_close(logits(model), sparse)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(type(model).from_pretrained(tmp_path)), logits(model))


def test_falcon_is_converted_layer_by_layer(tmp_path: Path) -> None:
    """Its linear layers are of a class of its own."""

    def build() -> FalconForCausalLM:
        sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 96}
        return FalconForCausalLM(FalconConfig(**sizes, **TOKENS)).eval()

    model = build()
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name != "lm_head":
            model.set_submodule(name, BlockSparseLinear.from_linear(layer, block_shape=(16, 32)))
    expected = logits(model)
    model.save_pretrained(tmp_path)
    loaded: Any
    for loaded in (FalconForCausalLM.from_pretrained(tmp_path), tilesparse.load(build, tmp_path)):
        assert_same(loaded, model)
        assert torch.equal(logits(loaded), expected)
    densify_(loaded)
    assert type(loaded.transformer.h[0].mlp.dense_h_to_4h) is type(build().transformer.h[0].mlp.dense_h_to_4h)
    torch.testing.assert_close(logits(loaded), expected)
    assert_saved(loaded, tmp_path / "dense")


def assert_saved(model: Any, folder: Path) -> None:
    """The files say what the model is, dense or sparse."""
    model.save_pretrained(folder)
    assert ("quantization_config" in written(folder)) == bool(sparse_layers(model))
    assert_same(type(model).from_pretrained(folder), model)


@pytest.mark.parametrize("order", ["dense first", "sparse first", "of the sparse one"])
def test_models_of_one_configuration_object_stay_apart(order: str, tmp_path: Path) -> None:
    config = llama().config
    teacher = None if order == "of the sparse one" else LlamaForCausalLM(config)
    student: Any = LlamaForCausalLM(config)
    patch(student, r"model\.layers", storage="int8")
    teacher = LlamaForCausalLM(student.config) if teacher is None else teacher
    both = [("teacher", teacher), ("student", student)]
    for name, model in both[:: -1 if order == "sparse first" else 1]:
        assert_saved(model, tmp_path / name)
    patch(teacher, r"model\.layers\.0")
    assert_saved(teacher, tmp_path / "patched")
    densify_(student)
    for name, model in both:
        assert_saved(model, tmp_path / f"{name} dense")


def test_models_of_one_configuration_object_in_one_module(tmp_path: Path) -> None:
    config = llama().config
    pair: Any = nn.ModuleList([LlamaForCausalLM(config), LlamaForCausalLM(config)])
    patch(pair, r"0\.model\.layers")
    for number in (0, 1):
        assert_saved(pair[number], tmp_path / str(number))
    patch(pair, r"1\.model\.layers\.1")
    for number in (0, 1):
        assert_saved(pair[number], tmp_path / str(number))


@pytest.mark.parametrize("described", [True, False])
def test_a_model_of_which_a_part_was_patched(described: bool, tmp_path: Path) -> None:
    model = llama()
    patch(model.model, r"layers")
    if described:
        follow(model)
    follow(model.model)
    assert_saved(model, tmp_path / "whole")
    assert_saved(model.model, tmp_path / "part")


def _by_hand(folder: Path) -> Any:
    model = llama()
    mlp = model.model.layers[0].mlp
    mlp.up_proj = BlockSparseLinear.from_linear(mlp.up_proj, block_shape=16)
    return model


def _inside_another(folder: Path) -> Any:
    wrapper: Any = nn.ModuleDict({"encoder": llama(), "head": nn.Linear(96, 32)})
    patch(wrapper, r".*(layers|head)")
    return wrapper.encoder


def _unpickled(folder: Path) -> Any:
    model = pickle.loads(pickle.dumps(patched("llama")))
    assert_saved(model, folder / "before")
    model.model.layers[0].mlp.up_proj.to_storage("int8")
    return model


def _of_a_sparse_configuration(folder: Path) -> Any:
    patched("llama").save_pretrained(folder / "sparse")
    return LlamaForCausalLM(transformers.AutoConfig.from_pretrained(folder / "sparse"))


@pytest.mark.parametrize("make", [_by_hand, _inside_another, _unpickled, _of_a_sparse_configuration])
def test_models_are_described_however_they_were_made(make: Callable[[Path], Any], tmp_path: Path) -> None:
    assert_saved(make(tmp_path), tmp_path / "saved")


def test_modules_have_their_part_of_the_configuration(tmp_path: Path) -> None:
    """The parts for text and images in CLIP have configurations within that of the model."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPConfig(text_config={**sizes, "vocab_size": 96}, vision_config={**sizes, **IMAGES})
    sparse, dense = CLIPModel(config), CLIPModel(config)
    patch(sparse, r".*mlp")
    for name, model in (("sparse", sparse), ("dense", dense)):
        assert_saved(model, tmp_path / name)


@pytest.mark.parametrize("storage", [None, "plain", "int8"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_from_pretrained_loads_what_tilesparse_saves(name: str, storage: str | None, tmp_path: Path) -> None:
    """Without the type of the model it would make one of 7 billion parameters."""
    make = MODELS[name][0]
    model = make() if storage is None else patched(name, storage=storage)
    if model.can_generate():
        model.generation_config.max_new_tokens = 7
    model.bfloat16().save_pretrained(tmp_path / "theirs")
    tilesparse.save(model, tmp_path / "ours")
    ours, theirs = (
        [
            json.loads((tmp_path / folder / file).read_text())
            for file in ("config.json", "generation_config.json")
        ]
        for folder in ("ours", "theirs")
    )
    ours[0].pop("tilesparse", None)
    assert (storage is not None) == ("files" in ours[0].get("quantization_config", {}))
    for key in ("files", "ties"):  # of Transformers' checkpoints the model has the ties
        ours[0].get("quantization_config", {}).pop(key, None)
    assert ours == theirs
    for load in (type(model).from_pretrained, AutoModelForCausalLM.from_pretrained):
        assert_same(load(tmp_path / "ours"), model)
    for folder in ("ours", "theirs") if storage is not None else ("ours",):
        assert_same(tilesparse.load(make, tmp_path / folder), model)


@pytest.mark.parametrize("storage", ["plain", "int8"])
def test_files_whose_tensors_lie_at_odd_addresses(storage: str, tmp_path: Path) -> None:
    """safetensors maps files, and headers may have any length."""
    model = patched("llama", storage=storage)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    file.write_bytes((length + 1).to_bytes(8, "little") + header + b" " + data)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    tokens = inputs("llama")
    assert torch.equal(loaded(**tokens).logits, model(**tokens).logits)
    other = patched("llama", storage=storage)
    other.load_state_dict(load_file(file), assign=True, strict=False)
    assert torch.equal(other(**tokens).logits, model(**tokens).logits)


def test_a_save_that_was_cut_off_is_refused_by_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which would read the new configuration and the old weights. `tilesparse.load` finds the new ones."""

    def fail(folder: Path) -> None:
        if folder == tmp_path:
            raise OSError(28, "No space left on device")

    old, new = patched("llama"), patched("llama")
    new.model.layers[0].mlp.up_proj.reset_parameters()
    old.save_pretrained(tmp_path)
    tilesparse.save(old, tmp_path)
    assert_same(LlamaForCausalLM.from_pretrained(tmp_path), old)
    with monkeypatch.context() as patching:
        patching.setattr(tilesparse.io.manifest, "_sync", fail)
        with pytest.raises(OSError, match="No space left"):
            tilesparse.save(new, tmp_path)
    with pytest.raises(CheckpointError, match=r"^model\.safetensors does not belong to .* cut off"):
        LlamaForCausalLM.from_pretrained(tmp_path)
    tilesparse.save(tilesparse.load(llama, tmp_path), tmp_path)
    assert_same(LlamaForCausalLM.from_pretrained(tmp_path), new)


def _load(folder: Path, kind: Any = LlamaForCausalLM, **options: Any) -> Any:
    return kind.from_pretrained(folder, **options)


def _with_a_plan(folder: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder / "sparse")
    config.distributed_config = {"tp_plan": "auto"}
    return _load(folder / "sparse", config=config)


def _newer(folder: Path) -> Any:
    config = written(folder / "sparse")
    config["quantization_config"]["version"] = 5
    (folder / "sparse/config.json").write_text(json.dumps(config))
    return _load(folder / "sparse")


def _of_another_method(folder: Path) -> None:
    model = llama()
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    try:
        patch(model, r"model\.layers")
    finally:
        assert not sparse_layers(model)


REFUSED: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "a section for a dense checkpoint": (
        lambda folder: _load(folder / "dense", quantization_config=TileSparseConfig(version=1, layers={})),
        InvalidArgumentError,
        "quantization_config must not be given for a dense",
    ),
    "another method": (_of_another_method, UnsupportedError, "quantised by gptq"),
    "tensor parallel plans": (_with_a_plan, UnsupportedError, "cannot split block-sparse layers"),
    "another model": (
        lambda folder: _load(folder / "sparse", transformers.ViTModel),
        InvalidArgumentError,
        "none of them is in ViTModel",
    ),
    "a newer version": (_newer, InvalidArgumentError, "version must be .*newer tilesparse"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_loaded_is_refused(tmp_path: Path, name: str) -> None:
    llama().save_pretrained(tmp_path / "dense")
    patched("llama").save_pretrained(tmp_path / "sparse")
    call, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        call(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, name: tensors.pop(f"{name}.weight"), r"up_proj\.weight: missing"),
        (lambda tensors, name: tensors.pop(f"{name}.slot"), r"up_proj\.slot: missing"),
        (
            lambda tensors, name: tensors.update({f"{name}.scales": torch.ones(4)}),
            r"scales: not in the form",
        ),
        (
            lambda tensors, name: tensors.update({f"{name}.weight": tensors[f"{name}.weight"][1:].clone()}),
            r"up_proj\.weight' must have shape \(8, 16, 32\) .*got \(7, 16, 32\)",
        ),
        (
            lambda tensors, name: tensors.update(
                {f"{name}.weight": tensors[f"{name}.weight"].to(torch.int8)}
            ),
            r"up_proj\.weight' must have .*torch\.float32.*torch\.int8",
        ),
        (lambda tensors, name: tensors[f"{name}.crow_indices"].zero_(), r"layer '.*up_proj': crow_indices"),
    ],
    ids=["no weight", "no slot", "other storage", "other shape", "other dtype", "wrong pattern"],
)
def test_files_that_are_not_what_the_configuration_says_are_refused(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor], str], object], message: str
) -> None:
    patched("llama").save_pretrained(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj"
    tensors = {key: tensor.clone() for key, tensor in load_file(file).items()}
    change(tensors, name)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_state_dicts_without_a_weight_are_refused(tmp_path: Path) -> None:
    model = patched("llama")
    state, config = model.state_dict(), copy.deepcopy(model.config)
    assert_same(LlamaForCausalLM.from_pretrained(None, config=config, state_dict=dict(state)), model)
    del state["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj\.weight: missing"):
        LlamaForCausalLM.from_pretrained(None, config=config, state_dict=dict(state))


def test_checkpoints_with_an_adapter_inside_are_refused(tmp_path: Path) -> None:
    model = patched("llama")
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "adapted")
    for kind in (AutoModelForCausalLM, AutoModel):
        with pytest.raises(CheckpointError, match=r"q_proj.base_layer' lies inside .*, which is a Linear"):
            kind.from_pretrained(tmp_path / "adapted")
    patch(adapted.unload(), "lm_head", block_shape=16)
    model.save_pretrained(tmp_path / "plain")
    for kind in (AutoModel, LlamaForSequenceClassification):  # without the head, which is not asked for
        assert len(sparse_layers(kind.from_pretrained(tmp_path / "plain"))) == LAYERS["llama"]


def test_heads_of_other_sizes_are_not_loaded_silently(tmp_path: Path) -> None:
    model = LlamaForSequenceClassification(llama().config)
    patch(model, r"model\.layers")
    model.save_pretrained(tmp_path)
    with pytest.raises((CheckpointError, RuntimeError), match=r"score\.weight|ignore_mismatched_sizes"):
        LlamaForSequenceClassification.from_pretrained(tmp_path, num_labels=5)


PLACES = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("storage", ["2:4", "2:4 float8"])
def test_layers_are_offloaded_to_disk(tmp_path: Path, storage: str, offload_buffers: bool) -> None:
    model = patched("llama", **STORAGES[storage])
    model.save_pretrained(tmp_path / "saved")
    loaded = LlamaForCausalLM.from_pretrained(
        tmp_path / "saved",
        device_map={**PLACES, "model.layers.0": "cpu", "model.layers.1": "disk"},
        offload_folder=tmp_path / "offload",
        offload_buffers=offload_buffers,
    )
    assert loaded.model.layers[1].mlp.up_proj.weight.is_meta
    for _ in range(2):
        assert torch.equal(logits(loaded), logits(model))
    with pytest.raises(UnsupportedError, match="offloaded"):
        densify_(loaded)
    with pytest.raises(UnsupportedError, match="to_storage cannot convert an offloaded weight"):
        loaded.model.layers[1].mlp.up_proj.to_storage("plain" if "float8" in storage else "int8")
    loaded.save_pretrained(tmp_path / "again")
    assert_same(LlamaForCausalLM.from_pretrained(tmp_path / "again"), model)


def test_accelerate_refuses_block_sparse_checkpoints(tmp_path: Path) -> None:
    model = patched("llama")
    model.save_pretrained(tmp_path)
    with init_empty_weights():
        empty = llama()
    with pytest.raises(ValueError, match="shape"):
        load_checkpoint_and_dispatch(empty, tmp_path, "auto")
    loaded = dispatch_model(tilesparse.load(llama, tmp_path), {"": "cpu"})
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.gpu
@pytest.mark.parametrize("storage", STORAGES)
def test_models_are_loaded_onto_a_gpu(tmp_path: Path, storage: str) -> None:
    model = patched("llama", **STORAGES[storage])
    model.save_pretrained(tmp_path)
    for device_map in ("cuda", "auto"):
        loaded = LlamaForCausalLM.from_pretrained(tmp_path, device_map=device_map)
        assert all(tensor.is_cuda for tensor in loaded.state_dict().values())
        assert_same(loaded, model)
        torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-3, atol=1e-3)
    places = dict.fromkeys(PLACES, 0) | {"model.layers.0": 0, "model.layers.1": "cpu"}
    mixed = LlamaForCausalLM.from_pretrained(tmp_path, device_map=places)
    assert mixed.model.layers[1].mlp.up_proj.weight.is_meta
    torch.testing.assert_close(logits(mixed), logits(loaded), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_generation_with_a_static_cache_compiles_on_a_gpu(tmp_path: Path) -> None:
    patched("llama").save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path, device_map="cuda")
    given = {"inputs": inputs()["input_ids"].cuda(), "max_new_tokens": 6, "do_sample": False}
    eager = model.generate(**given, disable_compile=True)
    assert torch.equal(model.generate(**given, cache_implementation="static"), eager)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_generation_is_that_of_the_dense_model(tmp_path: Path, kind: str) -> None:
    patched(kind).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    given = {"inputs": inputs()["input_ids"], "max_new_tokens": 6, "do_sample": False}
    tokens = model.generate(**given)
    assert torch.equal(model.generate(**given, cache_implementation="static", disable_compile=True), tokens)
    assert tokens.shape == (2, 15)
    densify_(model)
    assert torch.equal(model.generate(**given), tokens)


@pytest.mark.parametrize("storage", ["plain", "int8"])
@pytest.mark.parametrize("kind", MODELS)
def test_models_become_dense_again(tmp_path: Path, kind: str, storage: str) -> None:
    model = patched(kind, **STORAGES[storage])
    sparse = logits(model, kind)
    assert model.is_quantized == (storage != "plain")
    if storage == "plain":
        densify_(model)
    else:
        assert model.dequantize() is model
    assert not sparse_layers(model) and not model.is_quantized
    assert getattr(model, "hf_quantizer", None) is None
    torch.testing.assert_close(logits(model, kind), sparse)
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in written(tmp_path)
    assert_same(type(model).from_pretrained(tmp_path), model)


@pytest.mark.parametrize("storage", STORAGES)
def test_layers_that_become_dense_can_be_trained(storage: str) -> None:
    model = patched("gpt2", **STORAGES[storage])
    densify_(model)
    assert all(parameter.requires_grad for parameter in model.parameters())
    model = patched("gpt2")
    model.transformer.h[0].mlp.c_fc.weight.requires_grad_(False)
    densify_(model)
    assert not model.transformer.h[0].mlp.c_fc.weight.requires_grad


def test_shared_layers_and_those_put_in_by_hand_become_dense() -> None:
    model = patched("llama")
    first, second = model.model.layers[0].mlp, model.model.layers[1].mlp
    second.up_proj = first.up_proj
    first.extra = BlockSparseLinear(64, 64, density=0.5, block_shape=32)
    follow(model)
    sparse = logits(model)
    densify_(model)
    assert not sparse_layers(model)
    assert first.up_proj is second.up_proj and isinstance(first.extra, nn.Linear)
    torch.testing.assert_close(logits(model), sparse)


def test_pipelines(tmp_path: Path) -> None:
    patched("gpt2").save_pretrained(tmp_path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w1").save_pretrained(tmp_path)
    generate = pipeline("text-generation", model=str(tmp_path), device="cpu")
    assert len(sparse_layers(generate.model)) == LAYERS["gpt2"]
    (made,) = generate("w5 w6 w7", max_new_tokens=4, do_sample=False)
    assert made["generated_text"].startswith("w5 w6 w7w")


# Training.


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(3, 96, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def trainer(model: Any, folder: Path, **options: Any) -> Trainer:
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "save_steps": 2,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_strategy": "no",
    }
    return Trainer(model, TrainingArguments(str(folder), **arguments | options), train_dataset=Tokens())


@pytest.mark.parametrize("source", ["patched", "loaded"])
@pytest.mark.parametrize("nm", [None, (2, 4)])
def test_the_trainer_fine_tunes_and_resumes(tmp_path: Path, nm: tuple[int, int] | None, source: str) -> None:
    def start() -> Any:
        if source == "patched":
            return patched("roberta", nm=nm)
        return RobertaForMaskedLM.from_pretrained(tmp_path / "start")

    patched("roberta", nm=nm).save_pretrained(tmp_path / "start")
    model = start()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer(model, tmp_path / "run").train()
    for name, layer in model.named_modules():
        if isinstance(layer, BlockSparseLinear):
            assert not torch.equal(layer.weight, before[f"{name}.weight"]), name
    for step in (2, 4):
        saved = RobertaForMaskedLM.from_pretrained(tmp_path / f"run/checkpoint-{step}")
        assert len(sparse_layers(saved)) == LAYERS["roberta"]
    assert_same(saved, model)
    resumed = start()
    trainer(resumed, tmp_path / "run").train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-2"))
    assert_same(resumed, model)


@pytest.mark.parametrize("source", ["patched", "loaded"])
def test_the_trainer_wants_adapters_where_layers_are_not_plain(tmp_path: Path, source: str) -> None:
    model = patched("roberta", storage="int8")
    if source == "loaded":
        model.save_pretrained(tmp_path / "saved")
        model = RobertaForMaskedLM.from_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match="adapters"):
        trainer(model, tmp_path)
    for layer in sparse_layers(model):
        layer.to_storage("plain")
    follow(model)
    trainer(model, tmp_path, max_steps=1, save_strategy="no").train()


def test_compiled_models_compute_the_same(tmp_path: Path) -> None:
    patched("llama").save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        result = compiled(**inputs()).logits
    torch.testing.assert_close(result, logits(model))
    compiled.save_pretrained(tmp_path / "compiled")
    assert_same(LlamaForCausalLM.from_pretrained(tmp_path / "compiled"), model)


def test_accelerate_prepares_models(tmp_path: Path) -> None:
    patched("llama").save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    before = sparse_layers(model)[0].weight.detach().clone()
    accelerator.backward(prepared(**inputs(), labels=inputs()["input_ids"]).loss)
    optimizer.step()
    unwrapped = accelerator.unwrap_model(prepared)
    state = accelerator.get_state_dict(prepared)
    unwrapped.save_pretrained(tmp_path / "trained", state_dict=state)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "trained")
    assert_same(loaded, unwrapped)
    assert not torch.equal(sparse_layers(loaded)[0].weight, before)


# Layers that are more than one torch.nn.Linear.


def masked(model: Any, sparse: Any, transposed: bool) -> Any:
    """A dense model with zeros where the sparse one has no blocks."""
    for name, layer in sparse.named_modules():
        if isinstance(layer, BlockSparseLinear):
            mask = layer.pattern.to_mask()
            model.get_submodule(name).weight.data *= mask.T if transposed else mask
    return model


def test_conv1d_keeps_its_meaning() -> None:
    torch.manual_seed(0)
    dense = gpt2()
    full, half, whole = copy.deepcopy(dense), copy.deepcopy(dense), logits(dense)
    patch(full, r"transformer\.h", density=1.0)
    torch.testing.assert_close(logits(full), whole)
    patch(half, r"transformer\.h")
    fused = half.transformer.h[0].attn.c_attn
    assert (fused.in_features, fused.out_features) == (64, 192)
    assert fused.weight.requires_grad and fused.bias.requires_grad
    torch.testing.assert_close(logits(half), logits(masked(copy.deepcopy(dense), half, transposed=True)))
    # q, k and v are where they were: the first block of k is one of those of the dense weight.
    kept = fused.pattern.to_block_mask()[4:8].nonzero()[0]
    row, col = 64 + 16 * int(kept[0]), 32 * int(kept[1])
    original = dense.transformer.h[0].attn.c_attn.weight.T[row : row + 16, col : col + 32]
    assert any(torch.equal(block, original) for block in fused.weight)


# The Hub.


class Net(nn.Module, PyTorchModelHubMixin):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        made = BlockSparseLinear(64, 64, block_shape=16) if sparse else nn.Linear(64, 64)
        self.stack = nn.Sequential(made, nn.ReLU(), nn.Linear(64, 2))


def test_hub_mixin_saves_layers_that_modules_make_and_refuses_patched_ones(tmp_path: Path) -> None:
    net = Net(sparse=True)
    net.save_pretrained(tmp_path)
    assert_same(Net.from_pretrained(tmp_path), net)
    net = Net(sparse=False)
    patch(net, r"stack\.0")
    net.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=r"stack\.0\.weight"):
        Net.from_pretrained(tmp_path)
    tilesparse.save(net, tmp_path)
    assert_same(tilesparse.load(Net(sparse=False), tmp_path), net)

"""Write the checkpoints of tests/data/compressed-tensors with the release that still had the sparse formats.

    pip install --no-deps --target /tmp/old compressed-tensors==0.10.2
    PYTHONPATH=/tmp/old python tests/data/write_compressed_tensors.py

Each is a Llama of one tiny layer with random weights (torch.manual_seed(0)), pruned and quantized here.
"""

from pathlib import Path

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.config import BitmaskConfig, Sparse24BitMaskConfig
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).parent / "compressed-tensors"
SPARSE = {"sparse-bitmask": BitmaskConfig, "sparse-24-bitmask": Sparse24BitMaskConfig}
BITS = {"int8": (8, "int"), "float8": (8, "float"), "int4": (4, "int"), "int4-asymmetric": (4, "int")}
NAMES = {"int8": "int-quantized", "float8": "float-quantized"}
CASES = (
    ("sparse-24-bitmask", None),
    ("sparse-bitmask", None),
    (None, "int8"),
    (None, "float8"),
    (None, "int4"),
    (None, "int4-asymmetric"),
    ("sparse-24-bitmask", "int8"),
    ("sparse-24-bitmask", "float8"),
    ("sparse-bitmask", "int8"),
)


def prune(model: nn.Module, form: str) -> None:
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear) or name == "lm_head":
            continue
        weight = layer.weight.data
        if form == "sparse-24-bitmask":
            groups = weight.view(-1, 4)
            kept = torch.zeros_like(groups).scatter_(1, groups.abs().topk(2, 1).indices, 1).view_as(weight)
        else:
            rows, columns = (size // 16 for size in weight.shape)
            kept = (torch.rand(rows, columns) < 0.4).repeat_interleave(16, 0).repeat_interleave(16, 1)
        layer.weight.data = torch.where(kept.bool(), weight, 0)


def quantize(model: nn.Module, kind: str) -> QuantizationConfig:
    bits, dtype = BITS[kind]
    grouped = {"strategy": "group", "group_size": 32} if bits == 4 else {"strategy": "channel"}
    weights = QuantizationArgs(num_bits=bits, type=dtype, symmetric=kind != "int4-asymmetric", **grouped)
    x = None
    if bits == 8:
        x = QuantizationArgs(num_bits=8, type=dtype, strategy="token", dynamic=True, symmetric=True)
    config = QuantizationConfig(
        config_groups={"all": QuantizationScheme(targets=["Linear"], weights=weights, input_activations=x)},
        ignore=["lm_head"],
        format=NAMES.get(kind, "pack-quantized"),
        quantization_status=QuantizationStatus.FROZEN,
    )
    apply_quantization_config(model, config)
    for layer in model.modules():
        if hasattr(layer, "weight_scale"):
            groups = layer.weight.data.float().view(
                len(layer.weight), -1, weights.group_size or layer.in_features
            )
            scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), weights)
            layer.weight_scale.data = scale.to(layer.weight_scale.dtype).view_as(layer.weight_scale)
            if hasattr(layer, "weight_zero_point"):
                layer.weight_zero_point.data = zero.to(layer.weight_zero_point.dtype)
    return config


for form, kind in CASES:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=16, num_hidden_layers=1, tie_word_embeddings=False, **sizes)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    sparsity = None
    if form is not None:
        prune(model, form)
        structure = "2:4" if "24" in form else "unstructured"
        options = {"global_sparsity": 0.5, "sparsity_structure": structure, "targets": ["Linear"]}
        sparsity = SPARSE[form](format=form, ignore=["lm_head"], **options)
    quantization = None if kind is None else quantize(model, kind)
    compressor = ModelCompressor(sparsity_config=sparsity, quantization_config=quantization)
    tensors = compressor.compress(model)
    folder = FOLDER / "+".join(filter(None, (form, kind)))
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    named = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    compressor.update_config(folder)

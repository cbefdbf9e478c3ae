#!/usr/bin/env bash
# A LoRA that diffusers saves is loaded at another strength if it is named by its file.
#
# Package:   diffusers 0.42.1 with peft 0.21.2 and torch 2.13.0: save_lora_adapter and load_lora_adapter of a model
# Guess:     the file has the whole LoraConfig in its metadata, so however it is loaded, the adapter is what it was.
# Behaviour: the metadata is read if folder and weight_name are given. If the path of the very same file is given, or
#            its tensors as a state dict, it is not: lora_alpha becomes the rank, and the adapter has rank / lora_alpha
#            of its strength. Nothing warns. With lora_alpha equal to the rank nobody notices.
# Seen:      folder and weight_name: lora_alpha 16, error 0.0%
#            path of the file: lora_alpha 4, error 75.0%
#            state dict: lora_alpha 4, error 75.0%
# Matters:   a LoRA often recovers what pruning a transformer to sparse blocks has cost. Loaded so, most of that is gone
#            without a word, and evaluation blames the sparsity. Give folder and weight_name, and compare lora_alpha.
#
# Exits with 0 while this is so.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 diffusers==0.42.1 peft==0.21.2 transformers==5.24.0

HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder" <<'PYTHON'
import copy
import sys

import diffusers
import torch
from peft import LoraConfig
from safetensors.torch import load_file

print("guess: every way loads the same adapter. diffusers", diffusers.__version__)
torch.manual_seed(0)
model = diffusers.FluxTransformer2DModel(
    in_channels=4,
    num_layers=1,
    num_single_layers=0,
    attention_head_dim=16,
    num_attention_heads=2,
    joint_attention_dim=32,
    pooled_projection_dim=32,
    axes_dims_rope=(4, 4, 8),
).eval()
inputs = dict(
    hidden_states=torch.randn(1, 16, 4),
    encoder_hidden_states=torch.randn(1, 7, 32),
    pooled_projections=torch.randn(1, 32),
    timestep=torch.tensor([0.3]),
    img_ids=torch.zeros(16, 3),
    txt_ids=torch.zeros(7, 3),
)
NAMES = ["to_q", "to_k", "to_v"]


def change(of):
    """The change of one layer's weight by its adapter, as it is applied."""
    return of.transformer_blocks[0].attn.to_q.get_delta_weight(next(iter(of.peft_config)))


adapted = copy.deepcopy(model)
adapted.add_adapter(LoraConfig(r=4, lora_alpha=16, target_modules=NAMES, init_lora_weights=False))
adapted.save_lora_adapter(sys.argv[1], weight_name="lora.safetensors")
file = f"{sys.argv[1]}/lora.safetensors"
ways = {
    "folder and weight_name": ((sys.argv[1],), {"weight_name": "lora.safetensors"}),
    "path of the file": ((file,), {}),
    "state dict": ((load_file(file),), {}),
}
seen = {}
for name, (arguments, options) in ways.items():
    loaded = copy.deepcopy(model)
    loaded.load_lora_adapter(*arguments, prefix=None, **options)
    (config,) = loaded.peft_config.values()
    error = (change(loaded) - change(adapted)).norm() / change(adapted).norm()
    with torch.no_grad():
        same = torch.equal(loaded(**inputs).sample, adapted(**inputs).sample)
    seen[name] = f"lora_alpha {config.lora_alpha}, error {error:.1%}"
    print(f"{name}: {seen[name]}, the same output: {same}")
    assert same == (name == "folder and weight_name"), "this has changed"
assert list(seen.values()) == ["lora_alpha 16, error 0.0%", *["lora_alpha 4, error 75.0%"] * 2], "this has changed"
print("as stated: the same file is another adapter, depending on how it is named")
PYTHON

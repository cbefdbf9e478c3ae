"""Make the experts of a mixture of Transformers block-sparse, and prune them on data."""

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import tilesparse as ts

torch.manual_seed(0)
config = Qwen3MoeConfig(
    vocab_size=256,
    hidden_size=64,
    moe_intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
)
model = Qwen3MoeForCausalLM(config).eval()  # your trained mixture
batches = [{"input_ids": torch.randint(256, (8, 32))} for _ in range(8)]
dense = model(**batches[0]).logits
print(ts.prune_(model, ts.BlockSparseConfig(density=0.5, block_shape=16), batches, layers=".*experts"))
print(model.model.layers[0].mlp.experts)  # each projection of all experts is one block-sparse layer
error = (model(**batches[0]).logits - dense).norm() / dense.norm()
print(f"error of logits: {error.item():.3f}")

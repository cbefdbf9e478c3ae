"""Prune a trained model of Transformers to a quarter of its blocks, and distil the dense one into it.

The model is a small Llama that learns Python's documentation byte by byte for a moment. For a model of your
own, replace `dense`, `batches` and `loss_of`.
"""

import copy
import pydoc_data.topics

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tilesparse as ts

torch.manual_seed(0)
text = "\n".join(pydoc_data.topics.topics.values()).encode()
tokens = torch.tensor(list(text[:400_000]))
held_out = tokens[-64 * 48 :].view(64, 48)


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    starts = torch.randint(360_000, (count, 16, 1))
    return [{"input_ids": tokens[start + torch.arange(48)]} for start in starts]


@torch.no_grad()
def loss_of(model: LlamaForCausalLM) -> float:
    return float(model(input_ids=held_out, labels=held_out).loss)


config = LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
)
dense = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(dense.parameters(), lr=5e-3)
for batch in batches(60):
    dense(**batch, labels=batch["input_ids"]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

sparse = copy.deepcopy(dense).eval()
print(ts.prune_(sparse, ts.BlockSparseConfig(density=0.25, block_shape=32), batches(16)))
print(f"dense {loss_of(dense):.2f}, pruned {loss_of(sparse):.2f} nats per byte")
ts.distill_(sparse, dense, batches(30), lr=1e-3)
print(f"distilled {loss_of(sparse):.2f} nats per byte")
sparse.save_pretrained("sparse-model")  # from_pretrained reads it wherever tilesparse is imported

"""Make the feed-forward layers of a model block-sparse, keep their strongest blocks, and undo it."""

import torch
from torch import nn

from tilesparse.model import BlockSparseModelPatcher

model = nn.Sequential(
    nn.Embedding(256, 512),
    nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)),
    nn.Linear(512, 256),
)
patcher = BlockSparseModelPatcher()
patcher.add_pattern(r"1\.\d", {"density": 0.25, "block_shape": (32, 32)})
print(patcher.patch_model(model, dry_run=True))  # reports without changing the model
patcher.patch_model(model, keep_dense=True)  # keeps the dense layers, and their memory, for undo
optimizer = torch.optim.AdamW(model.parameters())  # after patching: the parameters are new
model(torch.randint(256, (4, 32))).logsumexp(-1).mean().backward()
optimizer.step()
patcher.undo(model)  # restores the dense layers

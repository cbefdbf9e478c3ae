"""Every feed-forward layer of a trained model made block-sparse, keeping its strongest blocks."""

import torch
from torch import nn

from tilesparse import BlockSparseModelPatcher

model = nn.Sequential(
    nn.Embedding(256, 512),
    nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)),
    nn.Linear(512, 256),
)
patcher = BlockSparseModelPatcher()
patcher.add_pattern(r"1\.\d", {"density": 0.25, "block_shape": (32, 32)})
print(patcher.patch_model(model, dry_run=True))  # shows what would happen
patcher.patch_model(model, keep_dense=True)  # keeps the dense layers, and so their memory, for undo
optimizer = torch.optim.AdamW(model.parameters())  # after patching: the parameters are new
model(torch.randint(256, (4, 32))).logsumexp(-1).mean().backward()
optimizer.step()
patcher.undo(model)  # and the dense layers are back, as they were

"""Make the feed-forward layers of a model block-sparse, keep their strongest blocks, and go back."""

import torch
from torch import nn

import tilesparse as ts

model = nn.Sequential(
    nn.Embedding(256, 512),
    nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)),
    nn.Linear(512, 256),
)
config = ts.BlockSparseConfig(density=0.25, block_shape=32)
print(ts.sparsify_(model, config, layers=r"1\.\d", dry_run=True))  # reports without changing the model
ts.sparsify_(model, config, layers=r"1\.\d")
optimizer = torch.optim.AdamW(model.parameters())  # afterwards: the parameters are new
model(torch.randint(256, (4, 32))).logsumexp(-1).mean().backward()
optimizer.step()
print(ts.summary(model))  # what is block-sparse now
ts.densify_(model)  # zero where no block was kept

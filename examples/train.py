"""Train a block-sparse network from scratch, with blocks that move to where gradients are large (RigL)."""

import torch
from torch import nn
from torch.nn import functional as F

import tilesparse as ts
from tilesparse.train import PatternSchedule

STEPS = 200
torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 32))
model = nn.Sequential(
    ts.BlockSparseLinear(64, 256, density=0.25, block_shape=16),
    nn.GELU(),
    ts.BlockSparseLinear(256, 32, density=0.25, block_shape=16),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = PatternSchedule(model, optimizer, fraction=0.1, every=20, grow="gradient")
for step in range(STEPS):
    x = torch.randn(128, 64)
    with torch.no_grad():
        y = teacher(x)
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    if step < 0.75 * STEPS:
        schedule.step()  # moves a tenth of the blocks every 20 steps
    optimizer.zero_grad()
    if step % 50 == 49:
        print(f"step {step + 1}: loss {loss.item():.4f}")

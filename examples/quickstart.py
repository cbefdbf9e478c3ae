"""Replace one dense layer by a block-sparse one."""

import torch

from tilesparse import BlockSparseLinear

layer = BlockSparseLinear(1024, 4096, density=0.25)  # keeps a quarter of the 64 x 64 blocks
y = layer(torch.randn(8, 1024))
y.square().mean().backward()  # layer.weight.grad has a value for each kept weight only
print(layer, y.shape, layer.weight.shape)

"""One block-sparse layer in place of a dense one."""

import torch

from tilesparse import BlockSparseLinear

layer = BlockSparseLinear(1024, 4096, density=0.25)  # keeps a quarter of the 64 x 64 blocks
y = layer(torch.randn(8, 1024))
y.square().mean().backward()  # layer.weight.grad has a value for every kept weight, and no other
print(layer, y.shape, layer.weight.shape)

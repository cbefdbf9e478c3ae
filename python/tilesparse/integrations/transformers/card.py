"""Model cards for the Hub."""

from __future__ import annotations

from typing import Any

from ..._checks import check_module, check_text
from ...errors import InvalidArgumentError
from ...nn.linear import BlockSparseLinear
from .following import TAGS, sparse_layers
from .quantizer import tensors_of


def model_card(model: Any, repository: str = "path/or/repository") -> str:
    """Return a README.md for the Hub: how to load the model, a check that it is sparse then, and its layers.

    Args:
        model: a ``PreTrainedModel`` with block-sparse layers.
        repository: from where the card says to load.

    Raises:
        InvalidArgumentError: no layer is block-sparse.
    """
    check_module(model)
    check_text("repository", repository)
    layers = dict(sparse_layers(model))
    if not layers:
        raise InvalidArgumentError("model must have block-sparse layers, got none")
    rows = [_row(name, layer) for name, layer in layers.items()]
    total = sum(tensor.nbytes for _, tensor in tensors_of(model))
    return _CARD.format(
        tags="".join(f"\n- {tag}" for tag in TAGS),
        name=type(model).__name__,
        repository=repository,
        layers=len(layers),
        bytes=f"{total:,}",
        rows="\n".join(rows),
    )


_CARD = """---
library_name: transformers
tags:{tags}
---

# {name} with block-sparse layers

{layers} linear layers of this model keep some of their blocks alone. TileSparse multiplies by those
and skips the others.

```bash
pip install tilesparse transformers
```

```python
import tilesparse  # without it from_pretrained cannot load the layers
from transformers import {name}

model = {name}.from_pretrained("{repository}")
sparse = [layer for layer in model.modules() if isinstance(layer, tilesparse.BlockSparseLinear)]
if len(sparse) != {layers}:
    raise RuntimeError(f"{{len(sparse)}} block-sparse layers in place of {layers}: not this model")
```

Without `import tilesparse` Transformers warns of an "Unknown quantization type, got tilesparse" and refuses,
because the weights have other shapes than dense ones. Do not answer with `ignore_mismatched_sizes=True`: it
leaves these layers dense, with random weights.

The model takes {bytes} bytes.

| layer | shape | block | density | storage | bytes | dense |
|---|---|---|---|---|---|---|
{rows}
"""


def _row(name: str, layer: BlockSparseLinear) -> str:
    (bn, bk), shape = layer.block_shape, f"{layer.out_features}x{layer.in_features}"
    storage = layer.storage if layer.activations is None else f"{layer.storage} W8A8"
    storage = storage if layer.nm is None else f"2:4 {storage}"
    held = sum(tensor.nbytes for _, tensor in tensors_of(layer))
    bias = 0 if layer.bias is None else layer.bias.nbytes
    dense = layer.out_features * layer.in_features * layer.spec.dtype.itemsize + bias
    cells = (name, shape, f"{bn}x{bk}", f"{layer.density:.3f}", storage, f"{held:,}", f"{dense:,}")
    return f"| {' | '.join(cells)} |"

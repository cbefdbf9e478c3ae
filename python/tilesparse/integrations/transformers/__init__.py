"""Hugging Face's Transformers: `save_pretrained` and `from_pretrained` of models with block-sparse layers.

`import tilesparse` suffices: once Transformers is imported as well, before or after, its `from_pretrained`
knows the method "tilesparse" of a ``quantization_config``. The patcher and `from_pretrained` give a model a
configuration that follows its layers, so that `save_pretrained` writes what they are at that moment.
docs/huggingface.md says more.
"""

from __future__ import annotations

try:
    import transformers
except ImportError as error:
    raise ImportError("tilesparse needs Transformers 5.17 or newer, got none") from error
if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 17):
    raise ImportError(f"tilesparse needs Transformers 5.17 or newer, got {transformers.__version__}")
from ..._listeners import Listener, add_listener
from .following import check_can_follow, follow
from .quantizer import TileSparseConfig as TileSparseConfig  # in pickles of configurations

__all__ = ["follow"]

add_listener(Listener(check_can_follow, follow))

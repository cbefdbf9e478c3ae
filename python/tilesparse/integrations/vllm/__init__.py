"""vLLM's quantization method for block-sparse layers, which serves what ``save_pretrained`` has written.

vLLM calls `register` in each of its processes, by an entry point of the group ``vllm.general_plugins``.
Nothing of vLLM is replaced. A layer of vLLM holds one or more layers of the checkpoint, which are called its
shards here: q, k and v, or gate and up.
"""

from __future__ import annotations


def register() -> None:
    """Tell vLLM of the quantization method "tilesparse"; it may be called again.

    What computes is imported once a model has block-sparse layers.
    """
    from . import config  # noqa: F401

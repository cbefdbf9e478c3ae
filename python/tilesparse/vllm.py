"""Block-sparse checkpoints in vLLM, whose plugin this is: `register` is called by vLLM itself."""

from tilesparse_vllm import register

__all__ = ["register"]

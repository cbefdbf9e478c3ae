"""vLLM's quantization method for block-sparse layers, which serves what ``save_pretrained`` has written.

`tilesparse_vllm` registers it, by an entry point of the group ``vllm.general_plugins``. Nothing of vLLM is
replaced. A layer of vLLM holds one or more layers of the checkpoint, which are called its shards here: q, k
and v, or gate and up.
"""

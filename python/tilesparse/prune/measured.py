"""What measurements of layers share: layers with random blocks, versions, and their entries in JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from .. import _C
from .._checks import as_integer, as_number
from ..config import BlockSparseConfig
from ..nn.linear import BlockSparseLinear
from ._checks import checked_config


def random_layer(
    shape: tuple[int, int], config: BlockSparseConfig, device: torch.device, dtype: torch.dtype
) -> BlockSparseLinear:
    """Return a layer without a bias, with random values and the same random blocks in every run."""
    return (
        BlockSparseLinear(
            shape[1],
            shape[0],
            bias=False,
            density=config.density,
            block_shape=config.block_shape,
            nm=config.nm,
            policy=config.policy,
            device=device,
            dtype=dtype,
            generator=torch.Generator().manual_seed(0),
        )
        .to_storage(config.storage, per=config.scales, activations=config.activations)
        .eval()
    )


def versions_of(device: torch.device) -> dict[str, str]:
    """Return the versions that times depend on, and the number of threads of a CPU."""
    found = {"tilesparse": _C.version(), "torch": torch.__version__}
    return found | ({"threads": str(torch.get_num_threads())} if device.type == "cpu" else {})


def config_of_json(entry: Mapping[str, Any] | None) -> BlockSparseConfig | None:
    """Return the config that `dataclasses.asdict` made an entry of; None for a dense layer."""
    if entry is None:
        return None
    bn, bk = map(as_integer, entry["block_shape"])
    nm = None if entry["nm"] is None else (as_integer(entry["nm"][0]), as_integer(entry["nm"][1]))
    others = {name: entry[name] for name in ("scales", "policy", "activations") if name in entry}
    config = BlockSparseConfig(entry["density"], (bn, bk), nm, entry["storage"], **others)
    return checked_config("config", config)


def time_of_json(number: object) -> float:
    """Return milliseconds that were read from a file."""
    milliseconds = as_number(number)
    if not 0 <= milliseconds < math.inf:
        raise ValueError(f"ms must be milliseconds, got {number!r}")
    return milliseconds

"""Checks of the arguments of pruning."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from .._arguments import shown
from .._checks import checked_number
from .._replay.batches import check_batches, checked_batch
from ..config import BlockSparseConfig, check_flag
from ..errors import InvalidArgumentError
from .layer import METHODS
from .moments import Moments


def check_numbers(method: str, damping: float, refit: bool) -> None:
    """Raise InvalidArgumentError for a method, damping or refit that is not allowed."""
    if method not in METHODS:
        raise InvalidArgumentError(f"method must be one of {list(METHODS)}, got {shown(method)}")
    checked_number("damping", damping)
    check_flag("refit", refit)


def checked_path(folder: object) -> Path:
    """Return a folder's path; it need not exist."""
    if not isinstance(folder, str | os.PathLike):
        raise InvalidArgumentError(f"folder must be a path, got {shown(folder)}")
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise InvalidArgumentError(f"folder must be a folder, got the file {str(path)!r}")
    return path


def checked_config(where: str, config: object) -> BlockSparseConfig:
    """Return a config that keeps some blocks; `where` names the argument in messages."""
    if not isinstance(config, BlockSparseConfig):
        raise InvalidArgumentError(f"{where} must be a BlockSparseConfig, got {shown(config)}")
    if not config.density:
        raise InvalidArgumentError(f"{where}: density must be a number above 0 and at most 1, got 0")
    if config.transposable:
        raise InvalidArgumentError(
            f"{where}: transposable must be False: pruning chooses two of four weights in rows alone"
        )
    return config


def check_model(model: nn.Module) -> None:
    """Raise InvalidArgumentError where parameters have no data."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InvalidArgumentError("model must not have parameters on the meta device: they have no weights")


def collected(batches: Iterable[Any]) -> list[Any]:
    """Return the batches as a list, which is not empty."""
    check_batches(batches)
    data = [checked_batch(batch) for batch in batches]
    if not data:
        raise InvalidArgumentError("batches must have at least one batch, got none")
    return data


def checked_moments(name: str, moments: Moments | None) -> Moments:
    """Return the moments of a layer's inputs, which are finite and not of no token."""
    if moments is None:
        raise InvalidArgumentError(f"batches must run layer {name!r}, or layers must leave it out")
    check_inputs(name, moments.weight(), moments.not_finite())
    return moments


def check_inputs(name: str, tokens: float, not_finite: int | None) -> None:
    """Raise InvalidArgumentError unless a layer meets tokens that count, all of them finite."""
    if not tokens:
        raise InvalidArgumentError(
            f"batches must have tokens at every layer, got none for layer {name!r} that attention_mask keeps"
        )
    if not_finite is not None:
        raise InvalidArgumentError(
            f"batches must be finite at every layer: batch {not_finite} (counted from 0) gives layer "
            f"{name!r} inputs with NaN or infinities"
        )

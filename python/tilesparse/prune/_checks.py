"""What arguments of pruning must be."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from .._checks import check_policy, checked_number
from .._replay.batches import check_batches
from ..errors import InvalidArgumentError
from .choice import Choice
from .layer import METHODS
from .moments import Moments


def check_numbers(method: str, damping: float, refit: bool, policy: str) -> None:
    if method not in METHODS:
        raise InvalidArgumentError(f"method: one of {list(METHODS)} expected, got {method!r}")
    checked_number("damping", damping)
    if not isinstance(refit, bool):
        raise InvalidArgumentError(f"refit: True or False expected, got {refit!r}")
    check_policy(policy)


def checked_path(folder: object) -> Path:
    if not isinstance(folder, str | os.PathLike):
        raise InvalidArgumentError(f"folder: a path expected, got {folder!r}")
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise InvalidArgumentError(f"folder: a folder expected, got the file {str(path)!r}")
    return path


def checked_choice(choice: object, where: str) -> Choice:
    if not isinstance(choice, Choice):
        raise InvalidArgumentError(f"{where}a Choice expected, got {choice!r}")
    return choice


def check_model(model: nn.Module) -> None:
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InvalidArgumentError("model: has parameters on the meta device, so there is nothing to prune")


def collected(batches: Iterable[Any]) -> list[Any]:
    check_batches(batches)
    data = list(batches)
    if not data:
        raise InvalidArgumentError("batches: at least one batch expected, got none")
    return data


def checked_moments(name: str, moments: Moments | None) -> Moments:
    if moments is None or moments.tokens() == 0:
        raise InvalidArgumentError(
            f"batches: they never run layer {name!r}; leave it out, or give batches that do"
        )
    number = moments.not_finite()
    if number is not None:
        raise InvalidArgumentError(
            f"batches: batch {number} (counted from 0) gives layer {name!r} inputs with NaN or infinities"
        )
    return moments

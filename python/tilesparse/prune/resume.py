"""Progress of a long pruning, in a folder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._files import replacing
from .._runtime.tensor_files import checksum, read_header, read_json, read_tensor, write_json, write_tensors
from ..errors import CheckpointError, InvalidArgumentError
from ..nn.tensors import INDEX_NAMES
from ..pattern.block_pattern import BlockPattern
from .obs import Solution

VERSION = 1
_FILE = "pruning.json"
_NUMBERS = ("error_before_refit", "error", "damping", "tokens")


class Progress:
    """Solutions of layers in files, one for each; a folder belongs to one model, data and arguments.

    Args:
        folder: made if it is not there.
        model: whose weights are compared by their checksums.
        batches: likewise, of all tensors in them.
        arguments: what else decides results.

    Raises:
        InvalidArgumentError: the folder belongs to something else; or batches hold what cannot be compared.
    """

    def __init__(
        self, folder: Path, model: nn.Module, batches: Sequence[Any], arguments: Mapping[str, Any]
    ) -> None:
        self._folder = folder
        marks = {
            "version": VERSION,
            "torch": torch.__version__,
            "model": _hash("model", dict(model.state_dict())),
            "batches": _hash("batches", list(batches)),
            **{name: repr(value) for name, value in arguments.items()},
        }
        file = folder / _FILE
        if file.exists():
            known, _ = read_json(file)
            for name in marks:
                if known.get(name) != marks[name]:
                    raise InvalidArgumentError(
                        f"folder: {str(folder)!r} holds the progress of a pruning with another {name}; "
                        "give another folder"
                    )
            return
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(file) as partial:
            write_json(partial, marks)

    def load(self, name: str, block_shape: tuple[int, int], shape: tuple[int, int]) -> Solution | None:
        """Return the saved solution of a layer, or None.

        Raises:
            CheckpointError: its file is damaged.
        """
        file = self._file(name)
        if not file.exists():
            return None
        stored = {own: read_tensor(tensor) for own, tensor in read_header(file)[0].items()}
        try:
            crow, col, slot = (stored[own] for own in INDEX_NAMES)
            pattern = BlockPattern(crow, col, shape=shape, block_shape=block_shape, slot=slot)
            numbers = dict(zip(_NUMBERS, stored["numbers"].tolist(), strict=True))
            values = stored["values"]
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"{file.name}: no saved layer, or of another shape: {error}") from error
        numbers["tokens"] = int(numbers["tokens"])
        return Solution(pattern, values, stored.get("mask"), stored.get("bias"), **numbers)

    def save(self, name: str, solution: Solution) -> None:
        """Write a layer's solution; if that is interrupted it counts as not written."""
        tensors = {own: getattr(solution.pattern, own) for own in INDEX_NAMES}
        numbers = [float(getattr(solution, own)) for own in _NUMBERS]
        tensors |= {
            "values": solution.values,
            "numbers": torch.tensor(numbers, dtype=torch.float64, device="cpu"),
        }
        tensors |= {own: tensor for own in ("mask", "bias") if (tensor := getattr(solution, own)) is not None}
        with replacing(self._file(name)) as partial:
            write_tensors(partial, tensors)

    def _file(self, name: str) -> Path:
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.safetensors"


def _hash(argument: str, value: Any) -> str:
    digest = hashlib.sha256()
    for text in _described(argument, value):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()


def _described(argument: str, value: Any) -> Iterator[str]:
    if isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)} {checksum(value)}"
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield repr(key)
            yield from _described(argument, item)
    elif isinstance(value, tuple | list):
        yield f"{type(value).__name__} of {len(value)}"
        for item in value:
            yield from _described(argument, item)
    elif value is None or isinstance(value, str | int | float | bool):
        yield repr(value)
    else:
        raise InvalidArgumentError(
            f"{argument} must be tensors, numbers and texts in tuples, lists and mappings beside folder, "
            f"which is for the same {argument} only, got {type(value).__name__}"
        )

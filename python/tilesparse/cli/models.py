"""Models of Transformers that commands take, and inputs for them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InvalidArgumentError, UnsupportedError

_WEIGHTS = ("*.safetensors", "*.bin", "*.index.json")


def load_model(name: str, command: str) -> Any:
    """Return a model of the class that its config names.

    Args:
        name: a folder that from_pretrained loads, or a name on the Hub.
        command: for the message if there is no Transformers.

    Raises:
        UnsupportedError: Transformers is not installed.
        InvalidArgumentError: it cannot be loaded.
    """
    kind, _ = _class_and_config(name, command)
    with _reported():
        return kind.from_pretrained(name, dtype="auto")


def load_tokenizer(name: str, command: str) -> Any:
    """Return the tokenizer of a model, see `load_model`."""
    transformers = _transformers(command)
    with _reported():
        return transformers.AutoTokenizer.from_pretrained(name)


def load_or_make_model(
    name: str, command: str, device: torch.device, dtype: torch.dtype | None
) -> tuple[nn.Module, bool]:
    """Return a model in evaluation mode on a device, and True if its weights are random.

    They are where the folder has a config alone, or the name is that of the config's file.

    Raises:
        UnsupportedError: Transformers is not installed.
        InvalidArgumentError: it can neither be loaded nor made.
    """
    kind, config = _class_and_config(name, command)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # which would keep what each call adds to it
    path = Path(name)
    alone = path.is_file() or (path.is_dir() and not any(any(path.glob(text)) for text in _WEIGHTS))
    if not alone:
        with _reported():
            model = kind.from_pretrained(name, config=config, dtype="auto" if dtype is None else dtype)
        return model.to(device).eval(), False
    with _reported(), device, _default(dtype or getattr(config, "dtype", None) or torch.float32):
        model = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
    return model.to(device).eval(), True


def random_batch(model: Any, batch: int, tokens: int, device: torch.device) -> dict[str, Tensor]:
    """Return random tokens, or images where the model takes these.

    Args:
        model: of Transformers.
        batch: number of sequences or images.
        tokens: tokens of a sequence.
        device: where they are.

    Raises:
        InvalidArgumentError: the model has no positions for so many tokens.
        UnsupportedError: it takes something else.
    """
    config, name = model.config, model.main_input_name
    if name == "pixel_values":
        size, channels = config.image_size, getattr(config, "num_channels", 3)
        height, width = (size, size) if isinstance(size, int) else size
        return {name: torch.randn(batch, channels, height, width, device=device, dtype=model.dtype)}
    if name != "input_ids":
        raise UnsupportedError(
            f"model must take tokens or images, got one that takes {name}: call tilesparse.advise in Python, "
            "with a batch of yours"
        )
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if positions is not None and tokens > positions:
        raise InvalidArgumentError(f"--tokens must be at most {positions}, the positions of the model")
    ids = torch.randint(text.vocab_size, (batch, tokens), device=device)
    found = {name: ids, "attention_mask": torch.ones_like(ids)}
    return found | ({"decoder_input_ids": ids} if config.is_encoder_decoder else {})


def _class_and_config(name: str, command: str) -> tuple[Any, Any]:
    transformers = _transformers(command)
    with _reported():
        config = transformers.AutoConfig.from_pretrained(name)
    architecture = (config.architectures or ["AutoModel"])[0]
    return getattr(transformers, architecture, transformers.AutoModel), config


def _transformers(command: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise UnsupportedError(
            f"tilesparse {command} needs Transformers: pip install transformers"
        ) from error


@contextmanager
def _reported() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"model cannot be loaded: {error}") from error


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)

"""What several examples share: models of installed packages, and a course of learning rates."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def packaged(package: str, file: str) -> Path:
    """A file or folder of an installed package."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"--model: a path expected, as the package {package} is not installed")
    return Path(spec.origin).parent / file


def language_model(file: Path) -> tuple[Any, Any]:
    """(model, tokenizer) of a GGUF file, in float32."""
    of_file: dict[str, Any] = {"gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **of_file)
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **of_file).eval()
    model.hf_quantizer.remove_quantization_config(model)  # its layers are dense again
    return model, tokenizer


def rate_of(progress: float, warm_up: float) -> float:
    """Of the highest learning rate: a rise in this part of the training, then a cosine down to 0."""
    if progress < warm_up:
        return progress / warm_up
    fall = (progress - warm_up) / (1 - warm_up)
    return (1 + math.cos(math.pi * min(1.0, fall))) / 2

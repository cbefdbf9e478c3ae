"""Shared set-up: GPU tests need a GPU, and property tests are repeatable."""

from __future__ import annotations

import os

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("tilesparse", deadline=None, derandomize=True)
hypothesis.settings.load_profile("tilesparse")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` where there is no GPU; TILESPARSE_REQUIRE_GPU=1 refuses to run instead."""
    if torch.cuda.is_available():
        return
    if os.environ.get("TILESPARSE_REQUIRE_GPU") == "1":
        raise pytest.UsageError("TILESPARSE_REQUIRE_GPU=1 is set, but PyTorch finds no CUDA device")
    skip = pytest.mark.skip(reason="PyTorch finds no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)

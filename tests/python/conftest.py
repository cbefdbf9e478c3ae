"""Shared set-up: GPU tests need a GPU, and property tests are repeatable."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ["TILESPARSE_TUNE_FILE"] = ""  # what somebody has measured here must not decide what is tested
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):  # processes that share the cores
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // int(workers))))

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("tilesparse", deadline=None, derandomize=True)
hypothesis.settings.load_profile("tilesparse")

if not torch.cuda.is_available():
    collect_ignore = ["test_kernels.py"]  # ten thousand tests, which all need a GPU and take long to collect


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Products this small only wait for a second thread, long where the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def threads() -> Iterator[None]:
    """Restores PyTorch's number of threads, which the kernels use too."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def pytest_report_header() -> str:
    selected = "selected" if torch.cuda.is_available() else "deselected, PyTorch finds no CUDA device"
    return f"GPU tests: {selected}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects tests marked `gpu` where there is no GPU; TILESPARSE_REQUIRE_GPU=1 refuses to run instead."""
    if torch.cuda.is_available():
        return
    if os.environ.get("TILESPARSE_REQUIRE_GPU") == "1":
        raise pytest.UsageError("TILESPARSE_REQUIRE_GPU=1 is set, but PyTorch finds no CUDA device")
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=gpu_items)
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]

"""Callbacks for the import of other libraries."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tilesparse._hooks import when_imported


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """On the path of imports, which forget afterwards what came from there."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_module_that_is_there_is_called_back_at_once() -> None:
    seen: list[ModuleType] = []
    when_imported("json", seen.append)
    assert seen == [sys.modules["json"]]


def test_callbacks_come_once_after_the_import(folder: Path) -> None:
    (folder / "later.py").write_text("value = 1")
    seen: list[int] = []
    when_imported("later", lambda module: seen.append(module.value))
    when_imported("later", lambda module: seen.append(module.value + 1))
    assert importlib.util.find_spec("later") is not None and seen == []
    module = importlib.import_module("later")
    assert seen == [1, 2]
    importlib.reload(module)
    assert seen == [1, 2] and "exec_module" not in vars(module.__loader__)


def test_an_import_that_fails_is_awaited_again(folder: Path) -> None:
    seen: list[ModuleType] = []
    when_imported("broken_at_first", seen.append)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("broken_at_first")
    importlib.invalidate_caches()
    (folder / "broken_at_first.py").write_text("raise OSError")
    with pytest.raises(OSError):
        importlib.import_module("broken_at_first")
    (folder / "broken_at_first.py").write_text("value = 'whole'")
    module = importlib.import_module("broken_at_first")
    assert seen == [module]


def test_modules_of_one_loader_are_told_apart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(folder / "packed.zip", "w") as archive:
        archive.writestr("packed_first.py", "")
        archive.writestr("packed_second.py", "import sys; sys.modules[__name__] = sys")
    monkeypatch.syspath_prepend(str(folder / "packed.zip"))
    seen: list[ModuleType] = []
    when_imported("packed_second", seen.append)
    assert importlib.util.find_spec("packed_second") is not None
    importlib.import_module("packed_first")
    assert seen == []
    importlib.import_module("packed_second")
    assert seen == [sys]


def test_what_takes_long_is_imported_by_who_needs_it() -> None:
    """Above all PyTorch's compiler, as long as PyTorch itself."""
    code = """
import sys, tilesparse
late = {"torch._dynamo", "torch.distributed.tensor", "transformers", "peft", "accelerate"} & set(sys.modules)
assert not late, late
from tilesparse.parallel import ColwiseParallel
"""
    subprocess.run([sys.executable, "-c", code], check=True)

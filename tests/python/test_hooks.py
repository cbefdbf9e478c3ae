"""Callbacks for the import of other libraries."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn

from tilesparse import BlockSparseLinear
from tilesparse._hooks import adapt, when_imported
from tilesparse.errors import UnsupportedError
from tilesparse.integrations import hooks


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
    when_imported("json", seen.append, "nothing")
    assert seen == [sys.modules["json"]]


def test_callbacks_come_once_after_the_import(folder: Path) -> None:
    (folder / "later.py").write_text("value = 1")
    seen: list[int] = []
    when_imported("later", lambda module: seen.append(module.value), "nothing")
    when_imported("later", lambda module: seen.append(module.value + 1), "nothing")
    assert importlib.util.find_spec("later") is not None and seen == []
    module = importlib.import_module("later")
    assert seen == [1, 2]
    importlib.reload(module)
    assert seen == [1, 2] and "exec_module" not in vars(module.__loader__)


def test_an_import_that_fails_is_awaited_again(folder: Path) -> None:
    seen: list[ModuleType] = []
    when_imported("broken_at_first", seen.append, "nothing")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("broken_at_first")
    importlib.invalidate_caches()
    (folder / "broken_at_first.py").write_text("raise OSError")
    with pytest.raises(OSError):
        importlib.import_module("broken_at_first")
    (folder / "broken_at_first.py").write_text("value = 'whole'")
    module = importlib.import_module("broken_at_first")
    assert seen == [module]


def test_errors_of_callbacks_are_warnings(folder: Path) -> None:
    (folder / "renamed.py").write_text("")
    seen: list[ModuleType] = []
    when_imported("renamed", lambda module: module.old_name, "this is missing")
    when_imported("renamed", seen.append, "nothing")
    with pytest.warns(UserWarning, match=r"renamed: this is missing \(.*no attribute 'old_name'") as caught:
        module = importlib.import_module("renamed")
    assert seen == [module] and len(caught) == 1
    with pytest.warns(UserWarning, match="this is missing"):
        when_imported("renamed", lambda module: module.old_name, "this is missing")


def test_methods_are_adapted_where_they_are_inherited_or_static() -> None:
    class Base:
        def inherited(self) -> str:
            return "theirs"

    class Model(Base):
        @staticmethod
        def fixed() -> str:
            return "theirs"

    for name in ("inherited", "fixed"):
        adapt(Model, name, lambda function, *arguments: "ours, " + function(*arguments))
        assert getattr(Model(), name)() == "ours, theirs"
    assert Base().inherited() == "theirs"
    with pytest.raises(AttributeError):
        adapt(Model, "missing", lambda function: function())


def test_what_takes_long_is_imported_by_who_needs_it() -> None:
    """PyTorch itself, and above all its compiler, which takes as long."""
    code = """
import sys, tilesparse
assert "torch" not in sys.modules
import tilesparse._checks  # which the operators need, too
assert sys.modules["torch"].ops.tilesparse.dds_nt
late = {"torch._dynamo", "torch.distributed.tensor", "transformers", "peft", "accelerate"} & set(sys.modules)
assert not late, late
from tilesparse.distributed import ColwiseParallel
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_save_pretrained_of_diffusers_refuses_block_sparse_layers() -> None:
    class ModelMixin(nn.Module):
        """As `diffusers.ModelMixin`, whose files have no place for the patterns."""

        def save_pretrained(self, folder: str) -> str:
            return folder

    class Model(ModelMixin):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

    adapt(ModelMixin, "save_pretrained", hooks._refuse_to_save)
    assert Model(nn.Linear(64, 64)).save_pretrained("folder") == "folder"
    with pytest.raises(UnsupportedError, match=r"block-sparse layer 'layer'; call tilesparse\.save"):
        Model(BlockSparseLinear(64, 64, block_shape=32)).save_pretrained("folder")

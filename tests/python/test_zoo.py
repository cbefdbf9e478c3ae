"""The cheap steps of `run_zoo.py`, which has all, with every architecture of the zoo."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_zoo import applies, check_loaded, loaded_elsewhere, save_for_loading, take
from transformers.utils import logging
from zoo import ZOO

logging.set_verbosity_error()
logging.disable_progress_bar()

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

STEPS = ["patch", "listed", "forward", "fuse", "generate", "train", "lora", "distil", "reconstruct"]
CASES = [(name, step) for name, kind in ZOO.items() for step in STEPS if applies(step, kind)]


@pytest.mark.parametrize(("name", "step"), CASES, ids=["-".join(case) for case in CASES])
def test_takes_a_step(name: str, step: str) -> None:
    """It is right, or refused as the zoo says."""
    take(step, ZOO[name])


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Return what one new process says of all models, since starting it takes longer than all the rest."""
    folders: dict[str, Path] = {}
    for name, kind in ZOO.items():
        try:
            save_for_loading(kind, folder := tmp_path_factory.mktemp(name))
        except Exception:  # a test below says so, and the others go on
            continue
        folders[name] = folder
    found = loaded_elsewhere(list(folders.values()), [ZOO[name] for name in folders])
    return dict(zip(folders, found, strict=True))


@pytest.mark.parametrize("name", ZOO)
def test_a_new_process_loads_the_same(name: str, loaded: dict[str, dict[str, str]]) -> None:
    assert name in loaded, "could not be saved"
    check_loaded(loaded[name])

"""The notebooks run from their first cell to their last, at small sizes, and their outputs are committed.

Their cells assert what they show. They are executed in this process, as a script would be, without a kernel.
"""

from __future__ import annotations

import ast
import json
import pydoc_data.topics
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast
from transformers.utils import logging

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
# What takes the place of the cell tagged "parameters".
SMALL: dict[str, dict[str, Any]] = {
    "01_train_from_scratch": {"STEPS": 25, "BATCH": 4, "HIDDEN": 128, "LAYERS": 1, "EVALUATED": 16},
    "02_prune_pretrained": {
        "FOLDER": None,  # a tiny BERT
        "DENSITY": 0.5,
        "BLOCK": 16,
        "CALIBRATION": 64,
        "STEPS": 20,
        "HELD_OUT": 32,
    },
    "03_network_as_one_matrix": {"STEPS": 40, "BATCH": 64, "AT_LEAST": 0.15},
}


def cells_of(name: str) -> list[dict[str, Any]]:
    return [
        cell
        for cell in json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
        if cell["cell_type"] == "code"
    ]


def is_parameters(cell: dict[str, Any]) -> bool:
    return "parameters" in cell["metadata"].get("tags", [])


@pytest.fixture
def tiny_bert(tmp_path: Path) -> Path:
    """A BERT with random weights, and a tokenizer of the most frequent words."""
    words = re.findall(r"\w+|[^\w\s]", " ".join(pydoc_data.topics.topics.values()).lower())
    vocabulary = ["[PAD]", "[UNK]", *(word for word, _ in Counter(words).most_common(500))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    torch.manual_seed(0)
    model = BertModel(
        BertConfig(
            vocab_size=len(vocabulary),
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=128,
            initializer_range=0.3,  # so that layers matter
        )
    )
    model.save_pretrained(tmp_path / "bert")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(
        tmp_path / "bert"
    )
    return tmp_path / "bert"


@pytest.fixture
def as_before() -> Iterator[None]:
    """Undoes what notebooks switch for the whole process."""
    backend = matplotlib.get_backend()
    matplotlib.use("agg")
    yield
    matplotlib.pyplot.close("all")
    matplotlib.use(backend)
    logging.enable_progress_bar()


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_run(name: str, tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parameters = {key: value if key != "FOLDER" else tiny_bert for key, value in SMALL[name].items()}
    names: dict[str, Any] = {"__name__": name}
    for cell in cells_of(name):
        if is_parameters(cell):
            names |= parameters
        else:
            exec(compile("".join(cell["source"]), f"{name}: {cell['id']}", "exec"), names)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_small_sizes_are_those_that_a_notebook_has(name: str) -> None:
    (cell,) = filter(is_parameters, cells_of(name))
    tree = ast.parse("".join(cell["source"]))
    assigned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    imported = {
        alias.asname for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert assigned | imported == set(SMALL[name])


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_outputs_are_committed_and_clean(name: str) -> None:
    assert (FOLDER / f"{name}.ipynb").stat().st_size < 300_000
    cells = cells_of(name)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [
        output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"
    ]
    assert not re.search(r"site-packages|/home/|/root/|/tmp/", json.dumps(outputs))

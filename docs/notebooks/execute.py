"""Executes the notebooks beside this file, and writes their outputs into them. Needs nbclient and ipykernel.

    python docs/notebooks/execute.py [01_train_from_scratch.ipynb ...]

A warning or an error stops it, as does a path of this machine in an output, and nothing is written then.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
PROGRESS = re.compile(r"\d+/\d+ .*\n?")  # how far a long task is


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("notebooks", nargs="*", type=Path, help="(all)")
    os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"  # of tqdm, which would like widgets
    for path in parser.parse_args().notebooks or sorted(FOLDER.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory() as folder:
            resources = {"metadata": {"path": folder}}
            client = NotebookClient(
                notebook, timeout=None, kernel_name="python3", record_timing=False, resources=resources
            )
            client.execute()
        clean(notebook)
        nbformat.write(notebook, path)
        print(f"wrote {path}, {path.stat().st_size >> 10} KiB")
    return 0


def clean(notebook: nbformat.NotebookNode) -> None:
    """Leaves what a reader wants to see."""
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        kept: list[nbformat.NotebookNode] = []
        for output in cell.get("outputs", []):
            if output.output_type == "stream" and output.name == "stderr":
                output.text = PROGRESS.sub("", output.text)
                if output.text.strip():
                    raise SystemExit(f"{cell.id}: {output.text}")
                continue
            for place in (sys.prefix, tempfile.gettempdir(), str(FOLDER.resolve().parents[1])):
                if place in str(output):
                    raise SystemExit(f"{cell.id}: the path {place} in its output")
            if kept and output.output_type == kept[-1].output_type == "stream":
                kept[-1].text += output.text
            else:
                kept.append(output)
        if cell.cell_type == "code":
            cell.outputs = kept


if __name__ == "__main__":
    raise SystemExit(main())

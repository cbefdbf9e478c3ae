"""Parts of CUDA kernels, compiled for the host."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_packaging import ROOT, run


@pytest.mark.parametrize("name", ["test_token_groups", "test_sdd_schedule"])
def test_work_is_shared_out_once(name: str, tmp_path: Path) -> None:
    """Tokens of a group stay in it and in the matrix; those of a gradient of W are all summed up."""
    program = tmp_path / name
    source = ROOT / "tests" / "cpp" / f"{name}.cpp"
    run("c++", "-std=c++17", "-O1", "-Wall", "-Wextra", f"-I{ROOT / 'cuda'}", source, "-o", program)
    assert run(program) == "ok\n"

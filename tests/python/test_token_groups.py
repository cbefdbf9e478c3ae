"""How CUDA kernels find the tokens of a group, compiled for the host."""

from __future__ import annotations

from pathlib import Path

from test_packaging import ROOT, run


def test_tiles_of_tokens_stay_in_their_group_and_in_the_matrix(tmp_path: Path) -> None:
    program = tmp_path / "test_token_groups"
    source = ROOT / "tests" / "cpp" / "test_token_groups.cpp"
    run("c++", "-std=c++17", "-O1", "-Wall", "-Wextra", f"-I{ROOT / 'cuda'}", source, "-o", program)
    assert run(program) == "ok\n"

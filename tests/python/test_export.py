"""Programs that leave this process compute with the pattern they are given there, or raise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import randn, seeded
from torch import Tensor, nn

from tilesparse import BlockSparseLinear

IN, OUT = 96, 64
FORWARD = """
import sys, torch
{imported}
BlockSparse = {decoys}
program, inputs = {load}, torch.load(sys.argv[2])
results = [program(inputs["x"])]
if {loads}:
    target = program if isinstance(program, torch.nn.Module) else None
    target.load_state_dict(inputs["state"])
    results.append(program(inputs["x"]))
torch.save(results, sys.argv[3])
"""
# Patterns that take the numbers which any of the exporting process had.
DECOYS = "[tilesparse.BlockSparseLinear(96, 64, density=0.5, block_shape=16) for _ in range(50)]"


def model(seed: int) -> nn.Module:
    layers = (
        BlockSparseLinear(IN, OUT, density=0.5, block_shape=16, generator=seeded(seed)),
        nn.ReLU(),
        BlockSparseLinear(OUT, IN, density=0.25, block_shape=(16, 32), generator=seeded(seed + 10)),
    )
    return nn.Sequential(*layers).eval()


def in_a_new_process(
    tmp_path: Path,
    load: str,
    state: dict[str, Tensor],
    x: Tensor,
    *,
    imported: bool = True,
    loads: bool = True,
) -> list[Tensor]:
    torch.save({"x": x, "state": state}, tmp_path / "inputs.pt")
    script = FORWARD.format(
        imported="import tilesparse" if imported else "",
        decoys=DECOYS if imported else "None",
        load=load,
        loads=loads,
    )
    arguments = [str(tmp_path / name) for name in ("program", "inputs.pt", "results.pt")]
    subprocess.run([sys.executable, "-c", script, *arguments], check=True, capture_output=True, text=True)
    results: list[Tensor] = torch.load(tmp_path / "results.pt")
    return results


def test_an_exported_program_is_right_in_a_new_process_and_follows_what_it_loads(tmp_path: Path) -> None:
    exported, other = model(1), model(2)
    x = randn(5, IN, dtype=torch.float32)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(exported, (x,), dynamic_shapes=({0: batch},))
    torch.export.save(program, str(tmp_path / "program"))
    fewer = x[:3]
    results = in_a_new_process(tmp_path, "torch.export.load(sys.argv[1]).module()", other.state_dict(), fewer)
    torch.testing.assert_close(results, [exported(fewer), other(fewer)])


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_traced_program_is_right_in_a_new_process_and_follows_what_it_loads(tmp_path: Path) -> None:
    exported, other = model(1), model(2)
    x = randn(5, IN, dtype=torch.float32)
    with torch.no_grad():
        torch.jit.trace(exported, x).save(str(tmp_path / "program"))
    results = in_a_new_process(tmp_path, "torch.jit.load(sys.argv[1])", other.state_dict(), x[:3])
    torch.testing.assert_close(results, [exported(x[:3]), other(x[:3])])


@pytest.mark.parametrize("load", ["torch.export.load(sys.argv[1]).module()", "torch.jit.load(sys.argv[1])"])
def test_a_process_without_the_package_raises(tmp_path: Path, load: str) -> None:
    exported, x = model(1), randn(5, IN, dtype=torch.float32)
    if "export" in load:
        torch.export.save(torch.export.export(exported, (x,)), str(tmp_path / "program"))
    else:
        torch.jit.trace(exported, x).save(str(tmp_path / "program"))
    with pytest.raises(subprocess.CalledProcessError) as error:
        in_a_new_process(tmp_path, load, exported.state_dict(), x, imported=False)
    assert "tilesparse" in error.value.stderr


def test_a_layer_is_not_scripted_wrongly() -> None:
    with pytest.raises((RuntimeError, ValueError)):  # errors of PyTorch: the source is not TorchScript
        torch.jit.script(model(1))

"""Programs that leave this process compute with the pattern they are given there, or raise."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import DEVICES, randn, run_anew, seeded
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from tilesparse import BlockSparseConfig, BlockSparseLinear, sparsify_

IN, OUT = 96, 64
FORWARD = """
import sys, torch
torch.set_num_threads(1)
{imported}
BlockSparse = {decoys}
inputs = torch.load(sys.argv[2])  # first: PyTorch loads packages for GPUs only once CUDA is in use
program = {load}
results = [program(inputs["x"])]
if {loads}:
    if isinstance(program, torch.nn.Module):
        program.load_state_dict(inputs["state"])
    else:
        program.load_constants(inputs["state"], check_full_update=True)
    results.append(program(inputs["x"]))
torch.save(results, sys.argv[3])
"""
LOAD_EXPORTED = "torch.export.load(sys.argv[1]).module()"
LOAD_TRACED = "torch.jit.load(sys.argv[1])"
LOAD_PACKAGE = "torch._inductor.aoti_load_package(sys.argv[1])"
KEEP = {"always_keep_tensor_constants": True}
# Patterns that take the numbers which any of the exporting process had.
DECOYS = "[tilesparse.BlockSparseLinear(96, 64, density=0.5, block_shape=16) for _ in range(50)]"


def model(seed: int) -> nn.Module:
    layers = (
        BlockSparseLinear(IN, OUT, density=0.5, block_shape=16, generator=seeded(seed)),
        nn.ReLU(),
        BlockSparseLinear(OUT, IN, density=0.25, block_shape=(16, 32), generator=seeded(seed + 10)),
    )
    return nn.Sequential(*layers).eval()


def of_all_kinds(seed: int, device: str = "cpu") -> nn.Module:
    """Layers in every storage and with every policy."""
    options: list[dict[str, Any]] = [
        {},
        {"policy": "auto"},
        {"policy": "dense"},
        {"nm": (2, 4)},
        {"nm": (2, 4), "storage": "compressed"},
        {"storage": "int8"},
        {"storage": "int4"},
        {"nm": (2, 4), "storage": "float8_e4m3fn"},
        {"nm": (2, 4), "storage": "int8", "policy": "dense"},
    ]
    layers = (
        BlockSparseLinear(OUT, OUT, block_shape=32, density=0.5, generator=seeded(seed + i), **option)
        for i, option in enumerate(options)
    )
    return nn.Sequential(*layers).eval().to(device, torch.float32 if device == "cpu" else torch.bfloat16)


def exported_for_any_batch(module: nn.Module, x: Tensor) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1, max=64)
    with torch.no_grad():
        return torch.export.export(module, (x,), dynamic_shapes=({0: batch},))


def assert_close(results: list[Tensor], expected: list[Tensor]) -> None:
    tolerance = 1e-5 if results[0].dtype == torch.float32 else 2e-2
    torch.testing.assert_close(results, [y.detach() for y in expected], rtol=tolerance, atol=tolerance)


def aoti_compile(
    program: torch.export.ExportedProgram, tmp_path: Path, configs: dict[str, Any] | None
) -> None:
    package = str(tmp_path / "program.pt2")  # PyTorch 2.6 loads no package of another ending
    torch._inductor.aoti_compile_and_package(program, package_path=package, inductor_configs=configs)


def loads_packages_for_gpus(tmp_path: Path) -> bool:
    """Return True if PyTorch loads one without this library; 2.11 for CUDA 13.0 crashed on an H200."""
    x = torch.ones(3, 64, device="cuda")
    aoti_compile(exported_for_any_batch(nn.Linear(64, 64, device="cuda"), x), tmp_path, None)
    script = "import sys, torch; torch.ones(1, device='cuda'); torch._inductor.aoti_load_package(sys.argv[1])"
    return run_anew(script, tmp_path / "program.pt2", check=False).returncode == 0


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
    arguments = [str(tmp_path / name) for name in ("program.pt2", "inputs.pt", "results.pt")]
    done = run_anew(script, *arguments, check=False)
    if done.returncode == -signal.SIGSEGV and x.is_cuda and not loads_packages_for_gpus(tmp_path):
        pytest.skip(
            f"PyTorch {torch.__version__} crashes here when it loads a package of nn.Linear for a GPU"
        )
    print(done.stderr)  # pytest shows it where a test fails
    done.check_returncode()
    results: list[Tensor] = torch.load(tmp_path / "results.pt")
    return results


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("load", [LOAD_EXPORTED, LOAD_TRACED])
def test_a_program_in_a_new_process_follows_what_it_loads_and_needs_the_package(
    tmp_path: Path, load: str
) -> None:
    exported, other = model(1), model(2)
    x = randn(5, IN, dtype=torch.float32)
    if load == LOAD_EXPORTED:
        shapes = ({0: torch.export.Dim("batch", min=1, max=64)},)
        program = torch.export.export(exported, (x,), dynamic_shapes=shapes)  # also for gradients
        torch.export.save(program, str(tmp_path / "program.pt2"))
    else:
        with torch.no_grad():
            torch.jit.trace(exported, x).save(str(tmp_path / "program.pt2"))
    results = in_a_new_process(tmp_path, load, other.state_dict(), x[:3])
    torch.testing.assert_close(results, [exported(x[:3]), other(x[:3])])
    with pytest.raises(subprocess.CalledProcessError) as error:
        in_a_new_process(tmp_path, load, exported.state_dict(), x, imported=False)
    assert "tilesparse" in error.value.stderr


@pytest.mark.parametrize("device", DEVICES)
def test_every_storage_and_policy_is_exported(tmp_path: Path, device: str) -> None:
    exported, other = of_all_kinds(1, device), of_all_kinds(11, device)
    x = randn(5, OUT, dtype=exported[0].weight.dtype, device=device)
    torch.export.save(exported_for_any_batch(exported, x), str(tmp_path / "program.pt2"))
    results = in_a_new_process(tmp_path, LOAD_EXPORTED, other.state_dict(), x[:3])
    assert_close(results, [exported(x[:3]), other(x[:3])])


class Logits(nn.Module):
    """A patched Llama, whose result is a tensor."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        torch.manual_seed(seed)
        self.model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False)).eval()
        report = sparsify_(self.model, BlockSparseConfig(0.5, 32), layers=r".*_proj$")
        assert len(report.layers) == 14

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(ids).logits
        return logits


def test_a_model_of_transformers_is_exported(tmp_path: Path) -> None:
    exported, other = Logits(1), Logits(2)
    ids = torch.arange(12).view(2, 6)
    torch.export.save(exported_for_any_batch(exported, ids), str(tmp_path / "program.pt2"))
    more = torch.arange(30).view(5, 6)
    results = in_a_new_process(tmp_path, LOAD_EXPORTED, other.state_dict(), more)
    assert_close(results, [exported(more), other(more)])


@pytest.mark.parametrize("device", DEVICES)
def test_a_package_is_right_in_a_new_process_and_follows_the_constants_it_loads(
    tmp_path: Path, device: str
) -> None:
    exported, other = of_all_kinds(1, device), of_all_kinds(11, device)
    x = randn(5, OUT, dtype=exported[0].weight.dtype, device=device)
    aoti_compile(exported_for_any_batch(exported, x), tmp_path, KEEP)
    results = in_a_new_process(tmp_path, LOAD_PACKAGE, other.state_dict(), x[:3])
    assert_close(results, [exported(x[:3]), other(x[:3])])

    no_patterns = {name: tensor for name, tensor in other.state_dict().items() if "indices" not in name}
    with pytest.raises(subprocess.CalledProcessError) as error:
        in_a_new_process(tmp_path, LOAD_PACKAGE, no_patterns, x)
    assert "indices" in error.value.stderr
    with pytest.raises(subprocess.CalledProcessError) as error:
        in_a_new_process(tmp_path, LOAD_PACKAGE, {}, x, imported=False)
    assert "tilesparse::dds_nt" in error.value.stderr


@pytest.mark.parametrize(
    ("configs", "said"),
    [
        (None, r"\[5, 12, 12\].*always_keep_tensor_constants"),
        (
            {"aot_inductor.use_runtime_constant_folding": True, **KEEP},
            "use_runtime_constant_folding must be False",
        ),
    ],
)
def test_a_package_that_would_go_wrong_is_refused(
    tmp_path: Path, configs: dict[str, Any] | None, said: str
) -> None:
    """Patterns would be literals, and folding calls other operators of PyTorch."""
    program = exported_for_any_batch(model(1), randn(5, IN, dtype=torch.float32))
    with pytest.raises(Exception, match=said):  # an UnsupportedError, within one of Inductor or not
        aoti_compile(program, tmp_path, configs)


def test_a_layer_is_not_scripted_wrongly() -> None:
    with pytest.raises((RuntimeError, ValueError)):  # errors of PyTorch: the source is not TorchScript
        torch.jit.script(model(1))

"""The programs in examples/cpp compute what the layers of a checkpoint do, and survive what is none."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import randn, seeded, shuffled
from torch import Tensor, nn

import tilesparse
from tilesparse import _C, BlockPattern, BlockSparseLinear

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(_C.__file__).parent
IN, OUT = 128, 64
FLAGS = "-Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror -g1 -fsanitize=address,undefined"
FOUND = {  # by a sanitizer; beside a GPU's driver, which takes addresses for itself
    "ASAN_OPTIONS": "exitcode=99:protect_shadow_gap=0",
    "UBSAN_OPTIONS": "halt_on_error=1:exitcode=99",
}
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "narrow": {"block_shape": (32, 16)},
    "of bfloat16": {"dtype": torch.bfloat16},
    "masked": {"nm": (2, 4), "dtype": torch.bfloat16},
    "compressed": {"nm": (2, 4), "storage": "compressed"},
    "int8": {"storage": "int8", "dtype": torch.bfloat16},
    "int4": {"storage": "int4", "dtype": torch.bfloat16},
    "float8 of 2:4": {"nm": (2, 4), "storage": "float8_e4m3fn"},
    "größe 😀": {"bias": False},
    "empty": {"density": 0},
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with all of them; `graph` is there where there is a CUDA toolkit."""
    build = tmp_path_factory.mktemp("build")
    options = [f"-DCMAKE_PREFIX_PATH={PACKAGE}", f"-DCMAKE_CXX_FLAGS={FLAGS}", f"-DCMAKE_C_FLAGS={FLAGS}"]
    options.append("-DCMAKE_BUILD_TYPE=Debug")  # which compiles sooner
    for command in (
        ["cmake", "-G", "Ninja", "-S", ROOT / "examples/cpp", "-B", build, *options],
        ["cmake", "--build", build],
    ):
        result = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
    return build


@pytest.fixture(scope="module")
def program(programs: Path) -> Path:
    return programs / "checkpoint"


def run(program: Path, folder: Path, x: Tensor, *layers: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [program, folder, *layers],
        input=x.contiguous().view(torch.uint8).numpy().tobytes(),
        capture_output=True,
        env={**os.environ, **FOUND},
        check=False,
    )


def outcome(program: Path, folder: Path, x: Tensor, *layers: str) -> Tensor:
    result = run(program, folder, x, *layers)
    assert result.returncode == 0, result.stderr.decode()
    return torch.frombuffer(bytearray(result.stdout), dtype=x.dtype).view(len(x), -1)


def model() -> Any:
    layers = {}
    for seed, (name, given) in enumerate(LAYERS.items()):
        options: dict[str, Any] = {"density": 0.5, "block_shape": (16, 32), **given}
        density, block_shape = options.pop("density"), options.pop("block_shape")
        pattern = BlockPattern.random(
            (OUT, IN), block_shape=block_shape, density=density, generator=seeded(seed)
        )
        layers[name] = BlockSparseLinear(IN, OUT, pattern=shuffled(pattern), **options)
    layers["int8"].to_storage("int8", granularity="block")
    return nn.ModuleDict(layers)


def save_as_others_do(module: nn.Module, folder: Path) -> None:
    """Without checksums, as programs do that know nothing of this package."""
    from safetensors.torch import save_file

    folder.mkdir()
    save_file(module.state_dict(), folder / "model.safetensors")
    section = {"quant_method": "tilesparse", **tilesparse.io.manifest.section(module)}
    (folder / "config.json").write_text(json.dumps({"quantization_config": section}))


@pytest.mark.parametrize("files", ["one file", "shards", "without checksums"])
def test_layers_of_every_storage(program: Path, tmp_path: Path, files: str) -> None:
    module, folder = model(), tmp_path / "model"
    if files == "without checksums":
        save_as_others_do(module, folder)
    else:
        tilesparse.save(module, folder, max_shard_size=20_000 if files == "shards" else "1GB")
    assert len(list(folder.glob("*.safetensors"))) > 1 or files != "shards"
    for name, layer in module.items():
        x = randn(5, IN, dtype=layer.spec.dtype)
        torch.testing.assert_close(outcome(program, folder, x, name), layer(x).detach())


def test_layers_after_each_other(program: Path, tmp_path: Path) -> None:
    module = nn.Sequential(
        BlockSparseLinear(IN, OUT, generator=seeded(1), block_shape=32),
        nn.ReLU(),
        BlockSparseLinear(OUT, IN, generator=seeded(2), block_shape=32),
    )
    tilesparse.save(module, tmp_path / "model")
    x = randn(7, IN, dtype=torch.float32)
    torch.testing.assert_close(outcome(program, tmp_path / "model", x, "0", "2"), module(x).detach())


def test_tied_tensors(program: Path, tmp_path: Path) -> None:
    first, second = (BlockSparseLinear(IN, OUT, generator=seeded(seed), block_shape=32) for seed in (1, 2))
    second.bias = first.bias
    tilesparse.save(nn.ModuleList([first, second]), tmp_path / "model")
    x = randn(3, IN, dtype=torch.float32)
    torch.testing.assert_close(outcome(program, tmp_path / "model", x, "1"), second(x).detach())


def replaced(file: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / file).read_bytes()
        assert text.count(old.encode()) > 0
        (folder / file).write_bytes(text.replace(old.encode(), new.encode(), 1))

    return change


def configured(**own: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["tilesparse"].update(own)
        (folder / "config.json").write_text(json.dumps(config))

    return change


def index_a_tensor_that_is_not_there(folder: Path) -> None:
    configured(files=None)(folder)
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    places = {"layer.weight": "one.safetensors", "layer.lost": "one.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


DAMAGED: list[tuple[Callable[[Path], object], str | None, str | None]] = [  # what either program says of it
    (replaced("config.json", '"version": 1', '"version": 2'), "version must be 1", "version must be 1"),
    (configured(ties={"layer.other": "gone"}), "ties: layer.other must be another name for a stored", None),
    (configured(ties={"layer.other": 5}), "config.json: ties must be texts", None),
    (configured(files=["model.safetensors"]), "config.json: files: ", None),
    (configured(files={"other.safetensors": "0"}), "safetensors: does not belong to config.json", None),
    (index_a_tensor_that_is_not_there, "index.json: layer.lost: in none of the files", None),
    (replaced("config.json", '"nnz": 4', '"nnz": 5'), "have the dtype and shape", "have the dtype and shape"),
    (replaced("config.json", '"nnz": 4', '"nnz": 4.5'), None, "nnz must be an integer from 0 to"),
    (replaced("config.json", "{", "["), "config.json: no JSON", "tilesparse: missing"),
    (replaced("config.json", '"plain"', '"plan"'), "storage: plan is not known here", None),
    (replaced("model.safetensors", '"shape":[4', '"shape":[3'), "model.safetensors: damaged", None),
    (replaced("model.safetensors", '"shape":[4,', '"shape":[4.'), None, "shape must be at most 4 integers"),
    (replaced("model.safetensors", '"shape":[4', '"shape":[9'), None, "more elements than the layer"),
    (replaced("model.safetensors", '"layer.slot', '"layer.slut'), None, "layer.slot: missing"),
    (lambda folder: (folder / "config.json").unlink(), "config.json: ", "config.json: cannot be read"),
    (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors.index.json: ", None),
    (
        lambda folder: os.truncate(folder / "model.safetensors", 200),
        "header must not be longer",
        "header is longer than the file",
    ),
    (
        lambda folder: os.truncate(folder / "model.safetensors", 3000),
        "must be a range within the file",
        "must be a range within the file",
    ),
]


@pytest.mark.parametrize(("change", "checkpoint", "layer_c"), DAMAGED)
def test_a_damaged_checkpoint_is_refused_with_a_sentence(
    programs: Path,
    tmp_path: Path,
    change: Callable[[Path], None],
    checkpoint: str | None,
    layer_c: str | None,
) -> None:
    tilesparse.save(nn.ModuleDict({"layer": BlockSparseLinear(IN, OUT, block_shape=(32, 32))}), tmp_path)
    change(tmp_path)
    if checkpoint is not None:
        result = run(programs / "checkpoint", tmp_path, randn(5, IN, dtype=torch.float32), "layer")
        assert (result.returncode, result.stdout) == (1, b"") and checkpoint in result.stderr.decode()
    if layer_c is not None:
        said = measured(programs / "layer_c", tmp_path, "layer")
        assert (said.returncode, said.stdout) == (1, "") and layer_c in said.stderr
        assert said.stderr.count("\n") in (1, 2)  # the other is about the GPU


def test_wrong_arguments_are_refused_with_a_sentence(program: Path, tmp_path: Path) -> None:
    tilesparse.save(BlockSparseLinear(IN, OUT, block_shape=32), tmp_path)
    x = randn(5, IN, dtype=torch.float32)
    for given, layer, said in (
        (x, "other", "layer 'other': config.json"),
        (x.view(-1)[:100], "", "x must be rows of 512 bytes"),
    ):
        result = run(program, tmp_path, given, layer)
        assert result.returncode == 1 and said in result.stderr.decode()


def test_mutilated_files_never_crash(program: Path, tmp_path: Path) -> None:
    """Bytes are changed, dropped and inserted where no checksum tells; sanitizers watch."""
    chance = random.Random(14)
    x = randn(2, IN, dtype=torch.float32)
    layers = {name: model()[name] for name in ("masked", "float8 of 2:4")}
    save_as_others_do(nn.ModuleDict(layers), tmp_path / "whole")
    refused = 0
    for number in range(150):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", folder)
        file = folder / chance.choice(["config.json", "model.safetensors"])
        content = bytearray(file.read_bytes())
        text = len(content) if file.suffix == ".json" else 8 + int.from_bytes(content[:8], "little")
        for _ in range(chance.randint(1, 3)):
            at = chance.choice([chance.randrange(8), chance.randrange(text), chance.randrange(len(content))])
            new = bytes([chance.choice([*b'0179-{}[],:"ex\\ ', chance.randrange(256)])])
            content[at : at + chance.randint(0, 2)] = new * chance.choice([0, 1, 1, 1, 8])
        if chance.random() < 0.2:
            del content[chance.randrange(len(content)) :]
        file.write_bytes(content)
        result = run(program, folder, x, chance.choice(list(layers)))
        said = result.stderr.decode(errors="replace")
        assert result.returncode in (0, 1), said
        assert (result.returncode == 0) == (said == "") and said.count("\n") <= 1, said
        refused += result.returncode
    assert refused > 100


def test_the_shortest_program(programs: Path) -> None:
    result = subprocess.run([programs / "product"], capture_output=True, text=True, check=False)
    assert result.returncode == 0 and "12 and 0, expected 12 and 0" in result.stdout


def measured(program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program that compares a layer with a reference of its own."""
    environment = {**os.environ, **FOUND, "ASAN_OPTIONS": FOUND["ASAN_OPTIONS"] + ":detect_leaks=0"}
    command = [str(part) for part in (program, *arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def assert_is_measured(program: Path, *arguments: object) -> None:
    """Within what its dtype allows, and on the GPU where there is one and it was built for that."""
    result = measured(program, *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    with_gpu = torch.cuda.is_available() and (program.parent / "graph").exists()
    said = r"(cpu|cuda) \(.+\), (\w+): \d+\.\d{4} ms, error 0\.\d{3} of what is allowed\n"
    words = re.fullmatch(said, result.stdout)
    assert words is not None, result.stdout
    assert words[1] == ("cuda" if with_gpu else "cpu") and words[2].startswith("sm" if with_gpu else "cpu")


def test_every_storage_is_measured_in_cpp(programs: Path, tmp_path: Path) -> None:
    tilesparse.save(model(), tmp_path / "model", max_shard_size=20_000)
    for name in LAYERS:
        assert_is_measured(programs / "layer", tmp_path / "model", name, 33)


def test_plain_layers_are_measured_in_c(programs: Path, tmp_path: Path) -> None:
    module = model()
    for name, dtype in (("wide", torch.float64), ("short", torch.float16)):
        module[name] = BlockSparseLinear(IN, OUT, block_shape=(32, 16), dtype=dtype, generator=seeded(3))
    tilesparse.save(module, tmp_path / "model")
    for name in ("plain", "narrow", "of bfloat16", "empty", "wide", "short"):
        # float64 is for the CPU alone.
        if not (torch.cuda.is_available() and name == "wide"):
            assert_is_measured(programs / "layer_c", tmp_path / "model", name, 33)
    for name in ("masked", "compressed", "int8"):
        result = measured(programs / "layer_c", tmp_path / "model", name)
        assert (result.returncode, result.stdout) == (1, "")
        assert f"{name} must be stored as dense blocks" in result.stderr


def test_the_program_in_c_refuses_a_bias_that_is_stored_elsewhere(programs: Path, tmp_path: Path) -> None:
    """It would otherwise compute without one."""
    first, second = (BlockSparseLinear(IN, OUT, generator=seeded(seed), block_shape=32) for seed in (1, 2))
    second.bias = first.bias
    tilesparse.save(nn.ModuleList([first, second]), tmp_path / "model")
    results = [measured(programs / "layer_c", tmp_path / "model", layer) for layer in ("0", "1")]
    assert sorted(result.returncode for result in results) == [0, 1]
    assert "bias: shared with another layer" in results[0].stderr + results[1].stderr


@pytest.mark.parametrize("name", ["layer", "layer_c"])
def test_a_layer_without_inputs_is_measured(programs: Path, tmp_path: Path, name: str) -> None:
    """tilesparse.save writes none, but a file may have one."""
    from safetensors.torch import save_file

    indices = {key: torch.zeros(0, dtype=torch.int32) for key in ("col_indices", "slot")}
    starts = torch.zeros(OUT // 16 + 1, dtype=torch.int32)
    tensors = {"weight": torch.zeros(0, 16, 16), "bias": torch.ones(OUT), "crow_indices": starts, **indices}
    save_file(tensors, tmp_path / "model.safetensors")
    layer = {"shape": [OUT, 0], "block_shape": [16, 16], "nnz": 0, "dtype": "float32", "storage": "plain"}
    (tmp_path / "config.json").write_text(json.dumps({"tilesparse": {"version": 1, "layers": {"": layer}}}))
    assert_is_measured(programs / name, tmp_path, "", 3)
    result = measured(programs / name, tmp_path, "", "3x")
    assert (result.returncode, result.stdout) == (1, "") and "got 3x" in result.stderr


@pytest.mark.parametrize("name", ["layer", "layer_c"])
def test_the_configuration_of_another_method_is_not_taken(programs: Path, tmp_path: Path, name: str) -> None:
    tilesparse.save(BlockSparseLinear(IN, OUT, block_shape=32), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "other", "version": 9}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_is_measured(programs / name, tmp_path, "", 3)


def test_a_wrong_result_is_noticed(programs: Path, tmp_path: Path) -> None:
    """The reference is not the library's: weights that are not finite have no result that is near."""
    layer = BlockSparseLinear(IN, OUT, generator=seeded(5), block_shape=32)
    with torch.no_grad():
        layer.weight[0, 0, 0] = float("inf")
    tilesparse.save(layer, tmp_path / "model")
    for program in ("layer", "layer_c"):
        result = measured(programs / program, tmp_path / "model", "")
        assert result.returncode == 1 and "error inf of what is allowed" in result.stdout, result.stdout


def test_the_graph_runs_or_says_what_it_needs(programs: Path) -> None:
    if (programs / "graph").exists():
        result = measured(programs / "graph")
        if torch.cuda.is_available():
            assert result.returncode == 0 and "3 replays are right" in result.stdout, result.stderr
        else:
            assert result.returncode == 77 and "needs a GPU" in result.stderr

"""Checkpoints of other libraries: converted without rounding, reported, or refused by name.

tests/data/compressed-tensors was written by compressed-tensors 0.10.2, see write_compressed_tensors.py there;
what its tensors mean is read here with NumPy, value by value.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import scipy.sparse
import torch
from helpers import run_anew, seeded
from mutilations import FIRST, SECOND
from mutilations import damaged as damaged_at_random
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.sparse import SparseSemiStructuredTensorCUTLASS
from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

import tilesparse as ts
from tilesparse import BlockPattern
from tilesparse.cli import main
from tilesparse.errors import CheckpointError, CheckpointNotFoundError, InvalidArgumentError, UnsupportedError
from tilesparse.io.conversion import _structure, convert
from tilesparse.io.manifest import INDEX
from tilesparse.nn.weight import dense_blocks

DATA = Path(__file__).parents[1] / "data/compressed-tensors"
KINDS = sorted(folder.name for folder in DATA.iterdir())
LAYER = "model.layers.0.mlp.up_proj"


def bits_of(packed: np.ndarray[Any, Any], columns: int) -> np.ndarray[Any, Any]:
    return np.unpackbits(packed, axis=1, bitorder="little")[:, :columns].astype(bool)


def codes_of(words: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
    """Codes of 4 bits, eight to a word along rows."""
    shifted = words.astype(np.uint32)[:, :, None] >> np.arange(0, 32, 4, dtype=np.uint32)
    return (shifted & 15).reshape(len(words), -1)[:, :count].astype(np.int64) - 8


def dense_of(tensors: dict[str, Tensor], layer: str) -> Tensor:
    """A weight [out_features, in_features] in bfloat16."""
    own = {name.removeprefix(f"{layer}."): value for name, value in tensors.items() if name.startswith(layer)}
    scale = own.get("weight_scale")
    if "weight_packed" in own:
        rows, columns = own["weight_shape"].tolist()
        codes = codes_of(own["weight_packed"].numpy(), columns)
        if "weight_zero_point" in own:
            points = codes_of(own["weight_zero_point"].numpy().T, rows).T
            codes = codes - points.repeat(32, 1)
        values = torch.from_numpy(codes)
    elif "bitmask" in own:
        rows, columns = own["shape"].flatten().tolist()
        kept = bits_of(own["bitmask"].numpy(), columns)
        values = torch.zeros(rows, columns, dtype=torch.float64)
        values[torch.from_numpy(kept)] = own["compressed"].flatten().double()
    else:
        values = own["weight"]
    if scale is None:
        return values.bfloat16()
    return (values.double() * scale.double().repeat_interleave(columns_of(values, scale), 1)).bfloat16()


def columns_of(values: Tensor, scale: Tensor) -> int:
    return values.shape[1] // scale.shape[1]


def reference(folder: Path) -> nn.Module:
    """The dense model that a checkpoint of tests/data describes."""
    tensors = load_file(folder / "model.safetensors")
    config = AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    state = {
        name: tensors[name] if name in tensors and tensors[name].dtype == torch.bfloat16 else None
        for name in model.state_dict()
    }
    for name, value in state.items():
        if value is None:
            state[name] = dense_of(tensors, name.removesuffix(".weight"))
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_file(kind: str, tmp_path: Path) -> None:
    report = convert(DATA / kind, tmp_path / "new")
    wanted = reference(DATA / kind)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "new").eval()
    sparse = {name: layer for name, layer in model.named_modules() if isinstance(layer, ts.BlockSparseLinear)}
    assert (not sparse) == (kind == "int4-asymmetric")
    for layer in report.layers:
        assert (layer.storage == "dense") == (layer.name not in sparse) == bool(layer.reason)
    for name, layer in model.named_modules():
        weight: Any = wanted.get_submodule(name).weight if hasattr(layer, "weight") else None
        if isinstance(layer, ts.BlockSparseLinear):
            blocks = dense_blocks(layer)
            assert torch.equal(ts.BlockSparseMatrix(blocks, layer.pattern).to_dense(), weight), name
            assert layer.activations == (layer.storage if kind[-4:] in ("int8", "oat8") else None)
            assert layer.nm == ((2, 4) if "24" in kind else None)
        elif weight is not None:
            own: Any = layer.weight
            assert torch.equal(own, weight), name
    ids = torch.arange(16).view(2, 8)
    difference = (model(ids).logits - wanted(ids).logits).abs().max()
    assert difference <= (0.03 if "8" in kind else 0.004)  # x has 8 bits, too; or another order of sums
    assert LAYER in str(report) and report.layers[0].structure.nm == ("2:4" if "24" in kind else "")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(
    ("empty", "stored"), [(0.0, (2, 4)), (0.5, (2, 4)), (0.99, None)], ids=["full", "half", "one"]
)
def test_zeros_in_slots(
    empty: float, stored: tuple[int, int] | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Slots without a value count as zeros in the report, and are kept where 2:4 is."""
    values = torch.rand(128, 64, generator=seeded(0)) + 1
    values[torch.rand(values.shape, generator=seeded(1)) < empty / 2] = -0.0
    values.view(8, 16, 8, 8)[
        torch.rand(8, 8, generator=seeded(2)).le(empty)[:, None, :, None].expand(8, 16, 8, 8)
    ] = 0
    values = values.to(dtype)
    bits = torch.tensor([3, 5, 9, 6, 10, 12])[torch.randint(6, (128, 32), generator=seeded(3))]
    slots = (bits[:, ::2] | bits[:, 1::2] << 4).to(torch.uint8)
    parts = {"compressed": values, "bitmask": slots, "shape": torch.tensor([128, 128])}
    if dtype == torch.float8_e4m3fn:
        parts["weight_scale"] = torch.ones(128, 1)
    save_file({f"a.{end}": part.contiguous() for end, part in parts.items()}, tmp_path / "x.safetensors")
    (layer,) = convert(tmp_path / "x.safetensors", tmp_path / "new").layers
    mask = torch.from_numpy(bits_of(slots.numpy(), 128).copy())
    dense = torch.zeros(128, 128)
    dense[mask] = values.float().flatten()
    assert layer.structure == _structure(dense != 0)
    assert layer.spec is not None and layer.spec.nm == stored
    new = load_file(tmp_path / "new" / "model.safetensors")
    pattern = BlockPattern(
        new["a.crow_indices"], new["a.col_indices"], shape=(128, 128), block_shape=layer.spec.block_shape
    )
    if stored:
        rows, columns = pattern.block_indices()
        (height, width), integers = layer.spec.block_shape, new["a.weight"].dtype.itemsize == 1
        values, mask = (
            matrix.view(128 // height, height, 128 // width, width).transpose(1, 2)[rows, columns]
            for matrix in (dense.to(dtype).view(torch.uint8) if integers else dense.to(dtype), mask)
        )
        weight, metadata = ts.storage.compress(values.contiguous().view(dtype), mask.contiguous())
        assert torch.equal(new["a.weight"].view(torch.uint8), weight.view(torch.uint8))
        assert torch.equal(new["a.metadata"], metadata)
    else:
        assert torch.equal(ts.BlockSparseMatrix(new["a.weight"].float(), pattern).to_dense(), dense)


def linear_state(weight: Tensor, **others: Tensor) -> dict[str, Tensor]:
    return {"layer.weight": weight, "layer.bias": torch.ones(len(weight)), **others}


def blocks(size: int = 64, density: float = 0.25, seed: int = 0) -> Tensor:
    """A weight [256, 384] with empty blocks, in which pruned values are -0.0."""
    weight = torch.randn(256, 384, generator=seeded(seed))
    kept = torch.rand(256 // size, 384 // size, generator=seeded(seed)) < density
    return weight * kept.repeat_interleave(size, 0).repeat_interleave(size, 1)


def of_2_4(seed: int = 0) -> Tensor:
    weight = torch.randn(256, 384, generator=seeded(seed)).view(-1, 4)
    kept = torch.zeros_like(weight).scatter_(1, weight.abs().topk(2, 1).indices, 1)
    return (weight * kept).view(256, 384)


def stored(path: Path, tensors: dict[str, Any]) -> Path:
    """A file of tensors, as its suffix says."""
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path)
    return path


def hugging_face(weight: Tensor) -> dict[str, Tensor]:
    """The state of a layer of pytorch_block_sparse, whose blocks lie in another order than their columns."""
    tiles = weight.view(8, 32, 12, 32).transpose(1, 2)
    mask = tiles.flatten(2).any(-1)
    nnz = int(mask.sum())
    order = torch.randperm(nnz, generator=seeded(3))
    data = torch.empty(nnz, 32, 32)
    data[order] = tiles[mask].mT
    starts = torch.cat([torch.zeros(1), mask.sum(1).cumsum(0)]).int()
    return {
        "layer.weight.data": data.view(-1, 32),
        "layer.weight.block_mask": mask,
        "layer.weight.cols_a": torch.stack([mask.nonzero()[:, 1], order], 1).int(),
        "layer.weight.row_start_ends_a": starts,
    }


def semi_structured(weight: Tensor) -> Tensor:
    """Make on the CPU what `to_sparse_semi_structured` makes on a GPU."""
    packed, meta = sparse_semi_structured_from_dense_cutlass(weight.half())
    return SparseSemiStructuredTensorCUTLASS(weight.shape, packed, meta, None, None, None)


W, W24 = blocks(), of_2_4()
HALF = (torch.rand(256, 384, generator=seeded(9)) < 0.5).float()
FILES: dict[str, tuple[str, Callable[[], dict[str, Any]], Tensor, str]] = {
    "blocks": (".safetensors", lambda: linear_state(W), W, "plain"),
    "blocks of 16": (".pt", lambda: linear_state(blocks(16, 0.1)), blocks(16, 0.1), "plain"),
    "2:4": (".pth", lambda: linear_state(W24), W24, "2:4 compressed"),
    "both": (".bin", lambda: linear_state(W24 * (W != 0)), W24 * (W != 0), "2:4 compressed"),
    "unstructured": (".pt", lambda: linear_state(HALF), HALF, "dense"),
    "prune": (
        ".pt",
        lambda: {
            "layer.weight_orig": W24 + 1,
            "layer.weight_mask": (W24 != 0).float(),
            "layer.bias_orig": torch.full((256,), 2.0),
            "layer.bias_mask": torch.arange(256) % 2.0,
        },
        (W24 + 1) * (W24 != 0),
        "2:4 compressed",
    ),
    "modelopt": (
        ".pt",
        lambda: {"model_state_dict": linear_state(W24 + 1, **{"layer._weight_mask": W24 != 0})},
        (W24 + 1) * (W24 != 0),
        "2:4 compressed",
    ),
    "2:4 of torch": (".pt", lambda: linear_state(semi_structured(W24)), W24.half(), "2:4 compressed"),
    "pytorch_block_sparse": (".pt", lambda: hugging_face(W) | {"layer.bias": torch.ones(256)}, W, "plain"),
    "BSR": (".pt", lambda: linear_state(W.to_sparse_bsr((64, 64))), W, "plain"),
    "float8 blocks": (
        ".safetensors",
        lambda: linear_state(
            blocks(128).to(torch.float8_e4m3fn), **{"layer.weight_scale_inv": torch.full((2, 3), 0.5)}
        ),
        (blocks(128).to(torch.float8_e4m3fn).float() * 0.5).bfloat16(),
        "float8_e4m3fn W8A8",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_state_dicts(name: str, tmp_path: Path) -> None:
    suffix, tensors, wanted, storage = FILES[name]
    report = convert(stored(tmp_path / f"model{suffix}", tensors()), tmp_path / "new")
    (layer,) = report.layers
    assert layer.storage == storage and layer.structure.zeros == pytest.approx(
        float((wanted == 0).float().mean())
    )
    model = nn.ModuleDict({"layer": nn.Linear(384, 256, dtype=wanted.dtype)})
    ts.load(model, tmp_path / "new")
    own: Any = model["layer"]
    if storage == "dense":
        dense = own.weight
    else:
        dense = ts.BlockSparseMatrix(dense_blocks(own), own.pattern).to_dense()
    assert torch.equal(dense, wanted) and dense.dtype == wanted.dtype
    bias = torch.arange(256) % 2.0 * 2 if name == "prune" else torch.ones(256)
    assert torch.equal(own.bias.float(), bias)


@pytest.mark.parametrize("suffix", [".npz", ".mtx"])
@pytest.mark.parametrize("weight", [W, W24], ids=["blocks", "2:4"])
def test_single_matrices(weight: Tensor, suffix: str, tmp_path: Path) -> None:
    path, matrix = tmp_path / f"matrix{suffix}", scipy.sparse.coo_array(weight.double().numpy())
    scipy.sparse.save_npz(path, matrix.tobsr()) if suffix == ".npz" else scipy.io.mmwrite(path, matrix)
    (found,) = convert(path, tmp_path / "new").layers
    spec = found.spec
    assert spec is not None and found.storage == ("2:4 compressed" if weight is W24 else "plain")
    made = ts.load(lambda: ts.BlockSparseLinear.from_spec(spec, bias=False), tmp_path / "new")
    assert torch.equal(ts.BlockSparseMatrix(dense_blocks(made), made.pattern).to_dense(), weight.double())


def dense_matrix(path: Path) -> np.ndarray[Any, Any]:
    """The values that a conversion stores of a small matrix, which stays dense."""
    convert(path, path.parent / "new")
    return load_file(path.parent / "new/model.safetensors")["weight"].numpy()


COORDINATES = "2 2 {}\n1 1 1\n2 1 -2.5\n"
MATRICES: dict[str, tuple[str, str, list[list[float]]]] = {
    "real": (
        "coordinate real general",
        "% c\n\n 2 2 3\n1 1 1.5\n\n%c\n2\t2 -1e-3 \n1 2 +.5",
        [[1.5, 0.5], [0, -0.001]],
    ),
    "CRLF": ("coordinate real general", "% c\r\n2 2 1\r\n2 1 3.\r\n", [[0, 0], [3, 0]]),
    "duplicates": ("coordinate real general", "2 2 4\n2 1 1\n1 2 4\n2 1 2\n2 1 -3", [[0, 4], [0, 0]]),
    "symmetric": ("coordinate double symmetric", COORDINATES.format(2), [[1, -2.5], [-2.5, 0]]),
    "upper triangle": ("coordinate real symmetric", "2 2 2\n1 2 3\n1 2 1\n", [[0, 4], [4, 0]]),
    "hermitian": ("coordinate real hermitian", COORDINATES.format(2), [[1, -2.5], [-2.5, 0]]),
    "skew": ("coordinate integer skew-symmetric", "2 2 1\n2 1 7\n", [[0, -7], [7, 0]]),
    "pattern": ("coordinate pattern general", "2 3 2\n1 3\n2 1\n", [[0, 0, 1], [1, 0, 0]]),
    "symmetric pattern": ("coordinate pattern symmetric", "2 2 1\n2 1\n", [[0, 1], [1, 0]]),
    "integer": ("coordinate unsigned-integer general", "1 2 1\n1 2 9007199254740991\n", [[0, 2**53 - 1]]),
    "array": ("array real general", "2 3\n1\n2\n3\n4\n5\n6\n", [[1, 3, 5], [2, 4, 6]]),
    "symmetric array": ("array integer symmetric", "2 2\n1\n2\n3\n", [[1, 2], [2, 3]]),
    "skew array": ("array real skew-symmetric", "3 3\n1\n2\n3\n", [[0, -1, -2], [1, 0, -3], [2, 3, 0]]),
    "nothing": ("coordinate real general", "1 2 0\n", [[0, 0]]),
}


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("suffix", [".mtx", ".mtx.gz"])
def test_matrix_market(name: str, suffix: str, tmp_path: Path) -> None:
    kind, text, wanted = MATRICES[name]
    path = tmp_path / f"m{suffix}"
    data = f"%%MatrixMarket matrix {kind}\n{text}".encode()
    path.write_bytes(gzip.compress(data) if suffix.endswith(".gz") else data)
    np.testing.assert_array_equal(dense_matrix(path), np.array(wanted, np.float64))


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("coordinate complex general", "1 1 1\n1 1 1 1", "line 1 must have real or double .*complex"),
        ("coordinate real", "1 1 1\n1 1 1", "line 1 must have"),
        ("array pattern general", "1 1\n1", "must be coordinate"),
        ("coordinate pattern skew-symmetric", "1 1 1\n1", "must be coordinate"),
        ("coordinate real general", "", "its sizes must be"),
        ("coordinate real general", "%\n1 1 1 1\n1 1 1", "its sizes must be"),
        ("coordinate real general", "-1 1 1\n1 1 1", "its sizes must be"),
        ("coordinate real general", "0 1 0\n", "a matrix with rows and columns"),
        ("coordinate real symmetric", "1 2 1\n1 2 1", "as many rows as columns"),
        ("coordinate real general", "2 2 2\n1 1 1\n", "2 entries as its sizes say, got 1"),
        ("coordinate real general", "2 2 1000000000000\n1 1 1\n", "cannot be read"),
        ("coordinate real general", "2 2 1\n1 1 1\n\n1 2 1", "1 entries as its sizes say"),
        ("coordinate real general", "2 2 1\n3 1 1", "rows must be 1 to 2"),
        ("coordinate real general", "2 2 1\n1 0 1", "rows must be 1 to 2"),
        *(
            ("coordinate real general", f"2 2 1\n{line}", "cannot be read")
            for line in ("1 1", "1 1 1 1", "1 1 1x", "1 1.0 1", "1 1 \xff")
        ),
        ("coordinate real general", "2 2 1\n1 2 1e400", "values must be finite"),
        ("coordinate integer general", "2 2 1\n1 1 1.5", "cannot be read"),
        ("coordinate integer general", "2 2 1\n1 1 9007199254740992", "integers must be below 2\\^53"),
        ("coordinate pattern general", "2 2 1\n1 1 1", "cannot be read"),
        ("coordinate real symmetric", "2 2 2\n1 2 1\n2 1 1", "entries must be of one triangle"),
        ("coordinate real skew-symmetric", "2 2 1\n1 1 0", "entries must be of one triangle"),
        ("array real general", "2 1\n1\n", "2 entries as its sizes say"),
        ("coordinate real general", "16385 16384 1\n1 1 1\n", "at most 268435456 elements"),
    ],
)
def test_wrong_texts_are_refused(kind: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "m.mtx"
    path.write_bytes(f"%%MatrixMarket matrix {kind}\n{text}".encode("latin-1"))
    with pytest.raises((CheckpointError, UnsupportedError), match=f"m.mtx: .*{message}"):
        convert(path, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def arrays_of(**others: Any) -> dict[str, Any]:
    """The content of a file of scipy: two blocks of 1 x 2 in two rows, in reverse order in the first."""
    bsr = {"format": b"bsr", "shape": np.array([2, 4]), "_is_array": np.array(True)}
    bsr |= {"indptr": np.array([0, 2, 3]), "indices": np.array([1, 0, 1])}
    return {**bsr, "data": np.arange(1.0, 7).reshape(3, 1, 2), **others}


@pytest.mark.parametrize(
    ("others", "wanted"),
    [
        ({}, [[3, 4, 1, 2], [0, 0, 5, 6]]),
        ({"indices": np.array([1, 1, 1])}, [[0, 0, 4, 6], [0, 0, 5, 6]]),
        (
            {"data": np.full((3, 1, 2), 200, np.uint8), "indices": np.array([1, 1, 0])},
            [[0, 0, 400, 400], [200, 200, 0, 0]],
        ),
        ({"data": np.ones((3, 1, 2), bool), "indices": np.array([1, 1, 0])}, [[0, 0, 1, 1], [1, 1, 0, 0]]),
        ({"format": b"csr", "data": np.array([1.5, -0.0, 2], ">f4")}, [[0, 1.5, 0, 0], [0, 2, 0, 0]]),
        ({"format": b"csc", "shape": np.array([4, 2]), "data": np.ones(3)}, [[1, 0], [1, 1], [0, 0], [0, 0]]),
        (
            {"format": b"coo", "row": np.array([1, 1, 0]), "col": np.array([3, 3, 0]), "data": np.arange(3)},
            [[2, 0, 0, 0], [0, 0, 0, 1]],
        ),
        (
            {"format": b"dia", "data": np.array([[1, 2.0]]), "offsets": np.array([1])},
            [[0, 2, 0, 0], [0, 0, 0, 0]],
        ),
    ],
)
def test_files_of_scipy(others: dict[str, Any], wanted: list[list[float]], tmp_path: Path) -> None:
    np.savez(tmp_path / "m.npz", **arrays_of(**others))
    found = dense_matrix(tmp_path / "m.npz")
    assert found.dtype == (np.float32 if others.get("format") == b"csr" else np.float64)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    "others",
    [
        {"indices": np.array([1, 2, 1])},
        {"indices": np.array([1, -1, 1])},
        {"indices": np.array([1, 0, 2**40])},
        {"indices": np.array([0.5, 0, 1])},
        {"shape": np.array([2.5, 4])},
        {"indptr": np.array([0, 3, 2])},
        {"indptr": np.array([0, 2, 2**40])},
        {"indptr": np.array([0, -1, 3])},
        {"shape": np.array([2])},
        {"shape": np.array([3, 4])},
        {"shape": np.array([-2, 4])},
        {"format": b"other"},
        {"format": b"dia", "offsets": np.array([0])},
        {"format": b"coo", "row": np.array([0, 1, 2]), "col": np.zeros(3, int), "data": np.ones(3)},
        {"data": np.zeros((3, 1, 2), object)},
        {"data": np.zeros((3, 1, 2), "U1")},
        {"data": np.full((3, 1, 2), 2**60)},
        {"data": np.zeros((3, 1, 2), np.longdouble)},
        {"data": np.full((3, 1, 2), np.inf)},
        {"data": np.ones((3, 1, 2), complex)},
    ],
)
def test_wrong_files_of_scipy_are_refused(others: dict[str, Any], tmp_path: Path) -> None:
    np.savez(tmp_path / "m.npz", **arrays_of(**others))
    with pytest.raises(CheckpointError, match=r"m\.npz: cannot be read: "):
        convert(tmp_path / "m.npz", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def damaged(change: Callable[[dict[str, Tensor]], object], kind: str, tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    shutil.copytree(DATA / kind, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def put(name: str, value: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({f"{LAYER}.{name}": value(tensors[f"{LAYER}.{name}"]).contiguous()})


def with_bit(tensor: Tensor) -> Tensor:
    return tensor | 1 << int(torch.randint(8, ()))


DAMAGES: dict[str, tuple[str, Callable[[dict[str, Tensor]], object], str]] = {
    "three of four": ("sparse-24-bitmask", put("bitmask", lambda t: t.clone().fill_(0x77)), "two bits"),
    "too few values": ("sparse-bitmask", put("compressed", lambda t: t[:-1]), "a value for each"),
    "mask of another size": ("sparse-bitmask", put("bitmask", lambda t: t[:, :-1]), "bitmask"),
    "rows elsewhere": ("sparse-bitmask", put("row_offsets", lambda t: t + 1), "row_offsets"),
    "another shape": ("sparse-24-bitmask", put("shape", lambda t: t * 2), "bitmask"),
    "negative shape": ("sparse-24-bitmask", put("shape", lambda t: -t), "bitmask"),
    "no shape": ("sparse-24-bitmask", lambda t: t.pop(f"{LAYER}.shape"), "missing"),
    "no codes": ("int4", lambda t: t.pop(f"{LAYER}.weight_packed"), "missing beside weight_scale"),
    "no values": ("int8", lambda t: t.pop(f"{LAYER}.weight"), "missing beside weight_scale"),
    "no scale": ("int8", lambda t: t.pop(f"{LAYER}.weight_scale"), "weight_scale"),
    "scales of other rows": ("int8", put("weight_scale", lambda t: t[:-1]), "weight_scale"),
    "infinite scales": ("float8", put("weight_scale", lambda t: t * torch.inf), "finite"),
    "packed elsewhere": ("int4", put("weight_packed", lambda t: t[:, :-1]), "weight_packed"),
    "zero points elsewhere": ("int4-asymmetric", put("weight_zero_point", lambda t: t[:-1]), "zero_point"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_tensors_that_contradict_each_other_are_refused(name: str, tmp_path: Path) -> None:
    kind, change, text = DAMAGES[name]
    source = damaged(change, kind, tmp_path)
    with pytest.raises(CheckpointError, match=text) as caught:
        convert(source, tmp_path / "new")
    assert LAYER in str(caught.value) and not (tmp_path / "new").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=text):
        convert(source, tmp_path / "empty")
    assert not [*(tmp_path / "empty").iterdir()]


UNREADABLE = {
    "marlin-24": {f"l.{name}": torch.zeros(2) for name in ("weight_packed", "meta", "scale_packed")},
    "nn_pruning": {"l.weight": W, "l.mask_module.context_modules.0.mask_scores": torch.zeros(8, 12)},
    "torch.ao.pruning": {"l.parametrizations.weight.original": W},
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_formats_that_no_other_program_reads_are_named(name: str, tmp_path: Path) -> None:
    source = stored(tmp_path / "model.pt", {key: value.clone() for key, value in UNREADABLE[name].items()})
    with pytest.raises(UnsupportedError, match=rf"l: {name}"):
        convert(source, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_what_is_no_matrix_or_no_mask_stays_as_it_is(tmp_path: Path) -> None:
    conv, kept = torch.randn(4, 3, 2, 2, generator=seeded()), torch.arange(48).view(4, 3, 2, 2) % 2.0
    state = {"conv.weight_orig": conv, "conv.weight_mask": kept, "attention.bias_mask": kept}
    convert(stored(tmp_path / "model.pt", state), tmp_path / "new")
    found = load_file(tmp_path / "new/model.safetensors")
    assert found.keys() == {"conv.weight", "attention.bias_mask"}
    assert torch.equal(found["conv.weight"], conv * kept)
    assert torch.equal(found["attention.bias_mask"], kept)


def test_dequantized_weights_with_zeros_have_the_dtype_of_the_model(tmp_path: Path) -> None:
    """Codes at their zero points in three of four blocks."""
    codes = torch.full((64, 64), 9)
    codes[:32, :32] = torch.arange(1024).view(32, 32) % 16
    shifts = torch.arange(0, 32, 4)
    packed = (codes.view(64, 8, 8) << shifts).sum(2).to(torch.int32)
    points = (torch.full((8, 2, 8), 9) << shifts).sum(2).to(torch.int32)
    parts = {"weight_packed": packed, "weight_scale": torch.ones(64, 2), "weight_zero_point": points}
    parts["weight_shape"] = torch.tensor([64, 64])
    source = stored(tmp_path / "m.pt", {f"l.{name}": value for name, value in parts.items()})
    (layer,) = convert(source, tmp_path / "new").layers
    assert layer.spec is not None and layer.spec.dtype == torch.bfloat16 and not layer.reason
    made: Any = ts.load(nn.ModuleDict({"l": nn.Linear(64, 64, bias=False)}), tmp_path / "new")["l"]
    dense = ts.BlockSparseMatrix(dense_blocks(made), made.pattern).to_dense()
    assert torch.equal(dense, (codes - 9).bfloat16())


def test_masks_have_only_zeros_and_ones(tmp_path: Path) -> None:
    source = stored(tmp_path / "m.pt", {"l.weight_orig": W, "l.weight_mask": torch.full_like(W, 0.5)})
    with pytest.raises(CheckpointError, match="weight_mask must have a 0 or 1"):
        convert(source, tmp_path / "new")


def test_files_are_not_executed(tmp_path: Path) -> None:
    torch.save({"l.weight": nn.Linear(2, 2)}, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match=r"m\.pt: cannot be read as tensors alone"):
        convert(tmp_path / "m.pt", tmp_path / "new")


def test_arguments_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("")
    for error, text, arguments in (
        (CheckpointNotFoundError, "source must", {"source": tmp_path / "none"}),
        (InvalidArgumentError, "source must", {"source": tmp_path / "full/file"}),
        (CheckpointNotFoundError, "source must", {"source": tmp_path / "full"}),
        (InvalidArgumentError, "source must", {"source": 3}),
        (InvalidArgumentError, "folder must be empty", {"folder": tmp_path / "full"}),
        (InvalidArgumentError, "dtype must", {"dtype": torch.int8}),
        (InvalidArgumentError, "max_shard_size must", {"max_shard_size": 0}),
    ):
        with pytest.raises(error, match=text):
            convert(**{"source": DATA / "int8", "folder": tmp_path / "new", **arguments})  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()


def source_kinds(folder: Path) -> dict[str, Path]:
    """A small source of each kind."""
    weight = torch.randn(64, 64, generator=seeded()).bfloat16().double()
    weight[:32], weight[32:, 16:] = 0, 0
    matrix = scipy.sparse.coo_array(weight.numpy())
    scipy.io.mmwrite(folder / "m.mtx", matrix, precision=6)
    (folder / "m.mtx.gz").write_bytes(gzip.compress((folder / "m.mtx").read_bytes()))
    scipy.sparse.save_npz(folder / "m.npz", matrix.tobsr(blocksize=(16, 16)))
    scipy.sparse.save_npz(folder / "plain.npz", matrix, compressed=False)
    stored(folder / "m.pt", {"a.weight": weight.float(), "b.weight": weight.to_sparse_bsr((32, 32))})
    two = folder / "two"
    two.mkdir()
    save_file({"a.weight": weight.float()}, two / FIRST)
    save_file({"b.weight": weight.half()}, two / SECOND)
    (two / INDEX).write_text(json.dumps({"weight_map": {"a.weight": FIRST, "b.weight": SECOND}}))
    for kind in ("sparse-24-bitmask", "sparse-bitmask+int8", "int4"):
        tensors = load_file(DATA / kind / "model.safetensors")
        own = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{LAYER}.")}
        (folder / kind).mkdir()
        save_file(own, folder / kind / "model.safetensors")
        shutil.copyfile(DATA / kind / "config.json", folder / kind / "config.json")
    return {path.name: path for path in sorted(folder.iterdir())}


def exact(path: Path) -> dict[str, Tensor]:
    """The matrices of a source, read value by value and without mercy, each of which has a weight's name."""
    if path.name.endswith((".mtx", ".mtx.gz")):
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        head, *rest = (line.lower().split() for line in data.decode("ascii").splitlines())
        (rows, cols, count), *entries = (words for words in rest if words and not words[0].startswith("%"))
        dense = torch.zeros(int(rows), int(cols), dtype=torch.float64)
        assert head == ["%%matrixmarket", "matrix", "coordinate", head[3], head[4]] and len(entries) == int(
            count
        )
        for i, j, *value in entries:
            number = float(int(value[0]) if "integer" in head[3] else value[0]) if value else 1.0
            assert head[3] != "pattern" or not value
            assert int(i) > 0 and int(j) > 0
            dense[int(i) - 1, int(j) - 1] += number
            if head[4] != "general" and i != j:
                dense[int(j) - 1, int(i) - 1] += -number if head[4].startswith("skew") else number
        return {"weight": dense}
    if path.suffix == ".npz":
        return {"weight": torch.from_numpy(scipy.sparse.load_npz(path).toarray())}
    if path.suffix == ".pt":
        return {name: value.to_dense() for name, value in torch.load(path, weights_only=True).items()}
    tensors = {name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}
    layers = {name.rpartition(".")[0] for name in tensors}
    return (
        {f"{layer}.weight": dense_of(tensors, layer) for layer in layers}
        if "+" in path.name or "24" in path.name or path.name == "int4"
        else tensors
    )


def test_damaged_sources(tmp_path: Path) -> None:
    """Bytes of every kind of source, changed at random: a sentence, or the values that the file has then.

    TILESPARSE_DAMAGED is the number of files.
    """
    (tmp_path / "sources").mkdir()
    kinds, generator = source_kinds(tmp_path / "sources"), random.Random(0)
    document = (Path(__file__).parents[2] / "docs/checkpoints.md").read_text()
    reader: dict[str, Any] = {}
    exec(
        next(code for code in re.findall(r"```python\n(.*?)```", document, re.S) if "def dense" in code),
        reader,
    )
    wrong, refused = [], 0
    count = int(os.environ.get("TILESPARSE_DAMAGED", "300"))
    new = tmp_path / "new"
    for number in range(count):
        kind = [*kinds][number % len(kinds)]
        path = tmp_path / kind
        (shutil.copytree if kinds[kind].is_dir() else shutil.copyfile)(kinds[kind], path)
        text = damaged_at_random(generator.choice([*path.iterdir()]) if path.is_dir() else path, generator)
        before = {file.name for file in tmp_path.iterdir()}
        try:
            report = convert(path, new)
        except (CheckpointError, UnsupportedError, InvalidArgumentError) as error:
            refused += 1
            if "\n" in str(error) or not 10 < len(str(error)) < 500:
                wrong.append(f"{kind}, {text}: no sentence: {error}")
        else:
            others = load_file(new / "model.safetensors")
            config = json.loads((new / "config.json").read_text())
            config.setdefault("tilesparse", config.get("quantization_config"))  # as the reader wants it
            (new / "config.json").write_text(json.dumps(config))
            found = {
                layer.name: reader["dense"](str(new), layer.name)
                if layer.spec
                else others[f"{layer.name}.weight".lstrip(".")]
                for layer in report.layers
            }
            try:
                wanted = exact(path)
            except Exception as error:
                wrong.append(f"{kind}, {text}: converted, but {error!r}")
                wanted = {}
            for name, value in found.items():
                right = wanted.get(f"{name}.weight".lstrip("."))
                if right is None or not np.allclose(
                    value.double(), right.double(), rtol=0.01, atol=1e-30, equal_nan=True
                ):
                    wrong.append(f"{kind}, {text}: {name} has other values")
            shutil.rmtree(new)
        assert {file.name for file in tmp_path.iterdir()} == before
        (shutil.rmtree if path.is_dir() else Path.unlink)(path)
    assert not wrong, "\n".join(wrong)
    assert refused > count / 3


def test_large_checkpoints_have_several_files(tmp_path: Path) -> None:
    tensors = {f"{number}.weight": blocks(seed=number) for number in range(6)}
    source = stored(tmp_path / "model.safetensors", tensors)
    report = convert(source, tmp_path / "new", max_shard_size=200_000)
    index = json.loads((tmp_path / "new/model.safetensors.index.json").read_text())
    assert len({*index["weight_map"].values()}) > 2 and len(report.layers) == 6
    model = nn.ModuleDict({str(number): nn.Linear(384, 256, bias=False) for number in range(6)})
    ts.load(model, tmp_path / "new")
    for number in range(6):
        layer: Any = model[str(number)]
        dense = ts.BlockSparseMatrix(dense_blocks(layer), layer.pattern).to_dense()
        assert torch.equal(dense, blocks(seed=number))


def test_transformers_names_the_way() -> None:
    kinds = "sparse-24-bitmask", "sparse-bitmask+int8"
    code = """
import sys, tilesparse, transformers
for path in sys.argv[1:]:
    try:
        transformers.AutoModelForCausalLM.from_pretrained(path)
    except Exception as error:
        print(error)
"""
    done = run_anew(code, *(DATA / kind for kind in kinds))
    assert done.stdout.count("tilesparse convert") == len(kinds)
    assert all(kind.split("+")[0] in done.stdout for kind in kinds)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(DATA / "sparse-24-bitmask"), str(tmp_path / "new"), "--tokens", "64"]) == 0
    text = capsys.readouterr().out
    assert "2:4 compressed" in text and LAYER in text and "dense us" in text
    assert (tmp_path / "new/model.safetensors").exists()
    assert main(["convert", str(DATA / "int8")]) == 0
    assert "int8 W8A8" in capsys.readouterr().out

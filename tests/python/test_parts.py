"""Layers of stored tensors, parts of layers, and several layers as one: exact in every storage."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from helpers import DEVICES, seeded
from torch import Tensor, nn

from tilesparse import BlockPattern, BlockSparseLinear
from tilesparse.errors import InvalidArgumentError, InvalidPatternError, InvalidTypeError, UnsupportedError
from tilesparse.nn import concatenate

OUT, IN = 384, 256
NM = (2, 4)
STORED: dict[str, dict[str, Any]] = {
    "plain": {},
    "masked": {"nm": NM},
    "transposable": {"nm": NM, "transposable": True},
    "compressed": {"nm": NM, "storage": "compressed"},
    "int8": {"storage": "int8"},
    "int4": {"storage": "int4"},
    "float8": {"storage": "float8_e4m3fn"},
    "2:4 int8": {"nm": NM, "storage": "int8"},
    "2:4 float8": {"nm": NM, "storage": "float8_e4m3fn"},
    "int8 W8A8": {"storage": "int8", "activations": "int8"},
    "float8 W8A8": {"storage": "float8_e4m3fn", "activations": "float8_e4m3fn"},
}
every_storage = pytest.mark.parametrize("name", STORED)
SIDES = (16, 32, 64, 128)


def make(name: str = "plain", block_shape: Any = 64, bias: bool = True, **options: Any) -> BlockSparseLinear:
    options = {"density": 0.4, "generator": seeded(0), **STORED[name], **options}
    return BlockSparseLinear(IN, OUT, bias, block_shape=block_shape, **options)


def weight(layer: BlockSparseLinear) -> Tensor:
    return layer.to_linear().weight.detach()


def block_shapes(name: str) -> list[tuple[int, int]]:
    least_rows, least_columns = 32 * ("transposable" in STORED[name]), 32 * ("nm" in STORED[name])
    return [(bn, bk) for bn, bk in product(SIDES, SIDES) if bn >= least_rows and bk >= least_columns]


@every_storage
def test_parts_have_the_weights_of_the_whole(name: str) -> None:
    for block_shape in block_shapes(name):
        layer = make(name, block_shape)
        whole = weight(layer)
        for rows, columns in (((128, 384), (0, 128)), ((32, 96), (64, 256)), ((64, 320), (32, 160))):
            part = layer.cut(rows, columns)
            assert torch.equal(weight(part), whole[slice(*rows), slice(*columns)])
            assert (part.bias is None) == (columns[0] > 0)
            assert part.storage == layer.storage and part.activations == layer.activations
        assert torch.equal(weight(layer), whole)


@every_storage
def test_parts_of_rows_are_one_layer_again(name: str) -> None:
    layer = make(name, (64, 32))
    parts = [layer.cut(rows) for rows in ((0, 64), (64, 96), (96, 384))]
    assert [part.block_shape[0] for part in parts] == [64, 32, 32]
    joined = concatenate(parts)
    x = torch.randn(3, IN, generator=seeded(1))
    assert torch.equal(weight(joined), weight(layer)) and joined.bias is not None
    torch.testing.assert_close(joined(x), layer(x))
    torch.testing.assert_close(torch.cat([part(x) for part in parts], -1), layer(x))


def test_parts_along_columns_add_up() -> None:
    layer, x = make("compressed"), torch.randn(3, IN, generator=seeded(1))
    parts = [layer.cut(columns=columns) for columns in ((0, 96), (96, 256))]
    torch.testing.assert_close(parts[0](x[:, :96]) + parts[1](x[:, 96:]), layer(x))


@pytest.mark.parametrize("granularity", ["row", "block"])
def test_scales_are_those_of_the_larger_blocks(granularity: str) -> None:
    layer = make().to_storage("int8", granularity=granularity)
    part = layer.cut((16, 176), (16, 48))
    assert part.block_shape == (16, 16) and part.spec.granularity == granularity
    assert torch.equal(weight(part), weight(layer)[16:176, 16:48])


def test_a_part_without_blocks_is_its_bias() -> None:
    pattern = BlockPattern.from_blocks([(0, 0)], shape=(OUT, IN), block_shape=64)
    part = BlockSparseLinear(IN, OUT, pattern=pattern).cut((64, 128))
    assert part.pattern.nnz == 0 and part.bias is not None
    assert torch.equal(part(torch.ones(2, IN)), part.bias.expand(2, -1))


def test_parts_train_as_the_whole_does() -> None:
    layer = make("masked").eval()
    layer.weight.requires_grad_(False)
    for part in (layer.cut((0, 64)), concatenate([layer, layer])):
        assert not part.weight.requires_grad and not part.training
        assert part.bias is not None and part.bias.requires_grad
    part = make().cut((0, 64))
    part(torch.ones(2, IN)).sum().backward()
    assert part.weight.grad is not None
    part.load_state_dict(copy.deepcopy(part).state_dict())


@pytest.mark.parametrize("device", DEVICES)
def test_parts_are_on_the_device_of_the_whole(device: str) -> None:
    layer = make(device=device)
    joined = concatenate([layer.cut((0, 96)), layer.cut((96, 384))])
    assert joined.weight.device == joined.slot.device == layer.weight.device
    assert torch.equal(weight(joined), weight(layer))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"rows": (0, 8)}, "rows must begin and end at multiples of 16"),
        ({"columns": (16, 128), "name": "masked"}, "columns must begin and end at multiples of 32"),
        ({"rows": (16, 64), "name": "transposable"}, "rows must begin and end at multiples of 32"),
        ({"rows": (64, 64)}, "rows must be \\(begin, end\\) from 0 to 384"),
        ({"columns": (0, 512)}, "columns must be \\(begin, end\\) from 0 to 256"),
    ],
)
def test_spans_are_checked(arguments: dict[str, Any], text: str) -> None:
    layer = make(arguments.pop("name", "plain"))
    with pytest.raises(InvalidArgumentError, match=text):
        layer.cut(**arguments)


def test_a_part_needs_the_whole_weight() -> None:
    layer = make()
    nn.utils.parametrizations.spectral_norm(layer)
    with pytest.raises(UnsupportedError, match="remove what parametrizes it"):
        layer.cut((0, 64))


@every_storage
def test_layers_are_made_of_their_state(name: str) -> None:
    layer = make(name)
    made = BlockSparseLinear.from_state(layer.spec, layer.state_dict())
    x = torch.randn(3, IN, generator=seeded(1))
    assert made.spec == layer.spec and torch.equal(made(x), layer(x))
    assert made.weight.data_ptr() == layer.weight.data_ptr() and made.slot.data_ptr() != layer.slot.data_ptr()
    half = BlockSparseLinear.from_state(layer.spec, layer.state_dict(), torch.bfloat16)
    assert half.spec == replace(layer.spec, dtype=torch.bfloat16)
    assert half.weight.dtype in (torch.bfloat16, layer.weight.dtype)
    torch.testing.assert_close(half(x.bfloat16()).float(), layer(x), atol=0.1, rtol=0.1)
    assert made.to_storage("plain").weight.requires_grad


def test_states_are_checked() -> None:
    layer = make("int8")
    spec, state = layer.spec, layer.state_dict()
    wrong: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
        "foreign": ({"mask": state["weight"]}, InvalidArgumentError, "differ in mask"),
        "missing": ({"slot": None}, InvalidArgumentError, "differ in slot"),
        "shape": ({"scales": state["scales"][1:]}, InvalidArgumentError, "scales must be"),
        "dtype": ({"weight": state["weight"].float()}, InvalidArgumentError, "weight must be"),
        "bias": ({"bias": state["bias"][1:]}, InvalidArgumentError, "bias must be"),
        "pattern": ({"slot": state["slot"] * 0}, InvalidPatternError, "slot"),
        "type": ({"slot": [0]}, InvalidTypeError, "slot"),
    }
    for changes, kind, text in wrong.values():
        tensors = {name: value for name, value in {**state, **changes}.items() if value is not None}
        with pytest.raises(kind, match=text):
            BlockSparseLinear.from_state(spec, tensors)
    with pytest.raises(InvalidArgumentError, match=r"blocks, as spec\.nnz says"):
        BlockSparseLinear.from_state(replace(spec, nnz=spec.nnz - 1), state)


def test_only_layers_that_agree_are_joined() -> None:
    first = make()
    others: dict[str, BlockSparseLinear] = {
        "in_features": BlockSparseLinear(64, 64, block_shape=16),
        "dtype": make(dtype=torch.bfloat16),
        "storage": make("int8"),
        "nm": make("masked"),
        "policy": make(policy="dense"),
    }
    for name, other in others.items():
        with pytest.raises(InvalidArgumentError, match=f"agree in {name}"):
            concatenate([first, other])
    with pytest.raises(InvalidArgumentError, match="at least one"):
        concatenate([])
    joined = concatenate([make(bias=False), first])
    assert joined.bias is not None and first.bias is not None
    assert torch.equal(joined.bias, torch.cat([torch.zeros(OUT), first.bias]))

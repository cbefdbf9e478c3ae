"""8 bits of both factors with 2:4 inside the blocks: results are those of the same values in dense blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import DEVICES, PATTERNS, assert_within, make_pattern, randn, random_mask, random_values, seeded
from torch import Tensor, nn

import tilesparse
from tilesparse import BlockPattern, BlockSparseConfig, BlockSparseLinear, functional, sparsify_, storage
from tilesparse.errors import InvalidArgumentError
from tilesparse.tuning import Product

EIGHT = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}
NM = (2, 4)
IN, OUT = 256, 384
both = pytest.mark.parametrize("name", EIGHT)
on_every_device = pytest.mark.parametrize("device", DEVICES)


def stored(pattern: BlockPattern, name: str, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(compressed, metadata, scales, the same values as dense blocks)."""
    values = random_values(pattern, dtype=torch.float32)
    mask = random_mask(tuple(values.shape))
    quantized, scales = storage.quantize_weights(
        values * mask, EIGHT[name], granularity="feature", pattern=pattern
    )
    compressed, metadata = storage.compress(quantized, mask)
    tensors = compressed, metadata, scales, quantized
    return tuple(each.to(device) for each in tensors)  # type: ignore[return-value]


def tolerance_of(y: Tensor, name: str) -> Tensor:
    """Tensor cores add float8 in another order and fewer bits; sums of int8 are equal bit by bit.

    Kernels for 8.0 and 9.0, of which each product has one, multiply these by scales, add parts and compute
    activations in float32, each in an order of its own, and round what comes out.
    """
    if not y.is_cuda:
        return torch.zeros_like(y)
    if name != "int8":
        return 2**-7 * y.abs() + 2**-7 * y.abs().max()
    largest = y.abs().max().float()
    return torch.finfo(y.dtype).eps * y.abs().float() + 4 * torch.finfo(torch.float32).eps * largest


@both
@pytest.mark.parametrize("block_shape", [(16, 32), (32, 64), (64, 64), (128, 32), (64, 128), (128, 128)])
@on_every_device
def test_products_are_those_of_dense_blocks(device: str, block_shape: tuple[int, int], name: str) -> None:
    grid = OUT // block_shape[0], IN // block_shape[1]
    for index, kind in enumerate(PATTERNS):
        pattern = make_pattern(kind, grid, block_shape)
        compressed, metadata, scales, dense = stored(pattern, name, device)
        tokens, dtype = (1, 17, 130)[index % 3], (torch.float32, torch.bfloat16, torch.float16)[index % 3]
        bias, x = randn(OUT, dtype=dtype, device=device), randn(tokens, IN, dtype=dtype, device=device)
        for options in ({}, {"bias": bias, "activation": "gelu"}, {"use_fast_accum": False}):
            y = functional.quantized_linear(x, compressed, pattern, scales, metadata=metadata, **options)
            wanted = functional.quantized_linear(x, dense, pattern, scales, **options)
            tolerance = tolerance_of(wanted, name)
            assert_within(y, wanted.double().cpu(), tolerance.double().cpu())


@both
@on_every_device
def test_layers_have_the_gradient_of_their_dequantized_weight(device: str, name: str) -> None:
    layer = BlockSparseLinear(
        IN, OUT, block_shape=64, nm=NM, storage=name, activations=name, device=device, generator=seeded()
    )
    x = randn(100, IN, dtype=torch.float32, device=device).requires_grad_()
    grad = randn(100, OUT, dtype=torch.float32, device=device)
    layer(x).backward(grad)
    weight = layer.to_linear().weight
    assert x.grad is not None
    torch.testing.assert_close(x.grad, grad @ weight, rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        y, wanted = layer(x), layer.to_linear()(x)
        assert (y - wanted).norm() < 0.05 * wanted.norm()
        assert torch.equal(layer.prepack()(x), y)
        layer.policy = "dense"
        torch.testing.assert_close(layer(x), wanted, rtol=1e-3, atol=1e-3)


@both
def test_models_are_patched_saved_and_loaded(tmp_path: Path, name: str) -> None:
    model = nn.Sequential(nn.Linear(IN, OUT), nn.ReLU(), nn.Linear(OUT, IN))
    config = BlockSparseConfig(density=0.5, block_shape=32, nm=NM, storage=name, activations=name)
    report = sparsify_(model, config)
    assert f"2:4 {name} W8A8" in str(report)
    layer: Any = model[0]
    assert (layer.nm, layer.storage, layer.activations) == (NM, name, name)
    x = torch.randn(9, IN, generator=seeded())
    tilesparse.save(model, tmp_path / "model")
    again = nn.Sequential(nn.Linear(IN, OUT), nn.ReLU(), nn.Linear(OUT, IN))
    again = tilesparse.load(again, tmp_path / "model")
    assert torch.equal(again(x), model(x))
    copied = BlockSparseLinear.from_spec(layer.spec)
    copied.load_state_dict(layer.state_dict())
    assert torch.equal(copied(x), layer(x))
    product = Product.of(layer, tokens=100)
    assert (product.nm, product.activations) == (NM, name)


@both
def test_compiled_code_computes_the_same(name: str) -> None:
    layer = BlockSparseLinear(IN, OUT, block_shape=64, nm=NM, storage=name, activations=name)
    x = torch.randn(20, IN, generator=seeded())
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), layer(x))


def test_metadata_is_checked() -> None:
    pattern = make_pattern("random 50%", (6, 4), (64, 64))
    compressed, metadata, scales, dense = stored(pattern, "int8", "cpu")
    x = torch.randn(8, IN, generator=seeded())
    for values, words, message in (
        (compressed, None, r"values must be .* \[nnz, bn, bk\]"),
        (dense, metadata, r"values must be .* \[nnz, bn, bk / 2\]"),
        (compressed, metadata[:1], "metadata must be a contiguous"),
        (compressed, metadata.float(), "metadata must be a contiguous"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            functional.quantized_linear(x, values, pattern, scales, metadata=words)
    flat = make_pattern("full", (6, 4), (64, 16))
    with pytest.raises(InvalidArgumentError, match="2:4 is for bk of 32, 64 or 128"):
        functional.quantized_linear(x[:, :64], compressed, flat, scales, metadata=metadata)

"""Which kernel is chosen, as a function of the problem and the device alone: no GPU is needed.

A library without CUDA kernels has nothing to choose from.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tilesparse import _C, BlockPattern, UnsupportedError
from tilesparse._checks import DTYPES
from tilesparse._launch import DDS_NN, DDS_NT, SDD_TN, prepared

KERNELS = _C.kernels()
CUDA = 1
A100 = _C.DeviceInfo(CUDA, 80, 108, 166912)
H200 = _C.DeviceInfo(CUDA, 90, 132, 232448)
RTX4090 = _C.DeviceInfo(CUDA, 89, 128, 101376)
B200 = _C.DeviceInfo(CUDA, 100, 148, 232448)

HAVE_SM90 = any(kernel.min_compute_capability == 90 for kernel in KERNELS)
needs_cuda = pytest.mark.skipif(
    not any(kernel.device == CUDA for kernel in KERNELS), reason="this library has no CUDA kernels"
)
needs_sm90 = pytest.mark.skipif(
    not HAVE_SM90, reason="this library has no kernels for compute capability 9.0"
)


def chosen(
    device: _C.DeviceInfo,
    block_shape: tuple[int, int],
    *,
    tokens: int = 8192,
    shape: tuple[int, int] = (14336, 4096),
    op: int = DDS_NT,
    dtype: torch.dtype = torch.bfloat16,
    x_layout: int = 0,
    y_layout: int = 0,
    density: float = 0.25,
) -> str:
    pattern = BlockPattern.random(shape, block_shape=block_shape, density=density)
    descriptor = prepared(pattern.index_on(torch.device("cpu"))).descriptor
    product = _C.Product(descriptor, op, DTYPES[dtype], CUDA, tokens, x_layout=x_layout, y_layout=y_layout)
    return KERNELS[product.select(device)[0]].name


@needs_sm90
@pytest.mark.parametrize("op", [DDS_NT, DDS_NN, SDD_TN])
@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hopper_takes_its_own_kernels(op: int, block: int, dtype: torch.dtype) -> None:
    for shape in ((14336, 4096), (4096, 14336), (5120, 1280), (3072, 768)):
        assert chosen(H200, (block, block), op=op, dtype=dtype, shape=shape).startswith("sm90_")


@needs_cuda
@pytest.mark.parametrize("device", [A100, RTX4090, B200], ids=["8.0", "8.9", "10.0"])
def test_other_devices_take_kernels_of_an_older_architecture(device: _C.DeviceInfo) -> None:
    for op in (DDS_NT, DDS_NN, SDD_TN):
        kernel = chosen(device, (64, 64), op=op)
        capability = next(k.min_compute_capability for k in KERNELS if k.name == kernel)
        assert capability <= device.compute_capability
        assert kernel.startswith("sm80_")


@needs_sm90
def test_wide_blocks_share_the_weight_and_narrow_ones_the_activations() -> None:
    for shape in ((14336, 4096), (4096, 14336), (5120, 1280), (3072, 768)):
        assert chosen(H200, (128, 128), shape=shape).endswith("_512x128")
        assert chosen(H200, (64, 64), shape=shape, op=DDS_NN).endswith("_512x128")
    assert chosen(H200, (64, 32)).endswith("_256x256")
    assert chosen(H200, (32, 64), op=DDS_NN).endswith("_256x256")


@needs_sm90
@pytest.mark.parametrize(("density", "name"), [(0.1, "_128"), (0.25, "_128"), (0.5, "_64")])
def test_small_square_blocks_take_the_steps_that_suit_their_density(density: float, name: str) -> None:
    for shape, block, op in product(((14336, 4096), (4096, 14336), (5120, 1280)), (16, 32), (DDS_NT, DDS_NN)):
        kernel = chosen(H200, (block, block), shape=shape, op=op, density=density)
        assert kernel == "sm90_narrow_bf16" + name


@needs_sm90
@pytest.mark.parametrize("op", [DDS_NT, DDS_NN])
def test_few_tokens_take_kernels_made_for_them(op: int) -> None:
    def takes_them(block: int, tokens: int, features: int, k: int, density: float = 0.25) -> bool:
        shape = (features, k) if op == DDS_NT else (k, features)
        kernel = chosen(H200, (block, block), tokens=tokens, shape=shape, op=op, density=density)
        return kernel == "sm80_decode_bf16"

    assert takes_them(64, 64, 14336, 4096)
    assert not takes_them(64, 65, 14336, 4096)
    assert takes_them(64, 65, 512, 512)
    assert takes_them(32, 256, 4096, 4096)
    assert not takes_them(32, 512, 4096, 4096)
    assert takes_them(32, 128, 4096, 14336)
    assert not takes_them(64, 256, 4096, 14336)
    assert not takes_them(16, 256, 4096, 4096)
    assert takes_them(16, 256, 4096, 4096, density=0.1)


@needs_sm90
def test_few_feature_major_tokens_take_small_tiles() -> None:
    assert chosen(H200, (64, 64), tokens=16, x_layout=1) == "sm80_dds_nt_bf16_32x128"
    assert chosen(H200, (64, 64), tokens=4096, x_layout=1).startswith("sm90_dds")


@needs_sm90
def test_few_tiles_are_halved() -> None:
    for op in (DDS_NT, DDS_NN):
        assert chosen(H200, (128, 128), tokens=512, shape=(3072, 3072), op=op).endswith("_128x256")
        assert chosen(H200, (128, 128), tokens=512, shape=(4096, 4096), op=op).endswith("_128x256")
        assert chosen(H200, (128, 128), tokens=4096, shape=(4096, 4096), op=op).endswith("_512x128")
        assert chosen(H200, (32, 32), tokens=512, shape=(3072, 3072), op=op).endswith("_128x256")
        assert chosen(H200, (16, 16), tokens=512, shape=(3072, 3072), op=op).startswith("sm90_narrow")


@needs_sm90
def test_ragged_feature_major_results_take_kernels_that_store_single_elements() -> None:
    for layouts in ({"y_layout": 1}, {"x_layout": 1, "y_layout": 1}):
        assert chosen(H200, (64, 64), tokens=4096, **layouts).startswith("sm90_")
        assert chosen(H200, (64, 64), tokens=4097, **layouts).startswith("sm80_")


@needs_cuda
def test_float64_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedError, match="float64"):
        chosen(H200, (64, 64), dtype=torch.float64)


@needs_cuda
def test_float32_takes_kernels_of_its_precision() -> None:
    assert "tf32x3" in chosen(H200, (64, 64), dtype=torch.float32)


@needs_sm90
def test_more_work_than_a_schedule_counts_takes_other_kernels() -> None:
    assert chosen(H200, (64, 64), tokens=2**24).startswith("sm90_")
    assert chosen(H200, (64, 64), tokens=2**31 - 1).startswith("sm80_")

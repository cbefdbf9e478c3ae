"""Which kernel is chosen, as a function of the problem and the device alone: no GPU is needed.

A library without CUDA kernels has nothing to choose from.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from functools import partial
from itertools import product
from pathlib import Path

import check_estimates
import pytest
import stored
import torch

from tilesparse import _C, BlockPattern
from tilesparse._checks import DTYPES
from tilesparse._runtime.device import DDS_NN, DDS_NT, SDD_TN
from tilesparse._runtime.pattern_cache import prepared
from tilesparse._runtime.torch_private import tf32_allowed
from tilesparse.errors import InvalidArgumentError, UnsupportedError

KERNELS = _C.kernels()
CUDA = 1
A100 = _C.DeviceInfo(CUDA, 80, 108, 166912)
H200 = _C.DeviceInfo(CUDA, 90, 132, 232448, "NVIDIA H200")
RTX4090 = _C.DeviceInfo(CUDA, 89, 128, 101376)
B200 = _C.DeviceInfo(CUDA, 100, 148, 232448)

CPU = _C.device_info(0)
SPARSE, AUTO, DENSE = range(3)  # ts_matmul_desc.policy
RUN_DENSE = -1  # TS_RUN_DENSE
RESULTS = Path(check_estimates.__file__).parent / "results"

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
    for shape in ((14336, 4096), (4096, 14336)):
        assert chosen(H200, (128, 128), shape=shape).endswith("_512x128")
        assert chosen(H200, (64, 64), shape=shape, op=DDS_NN).endswith("_512x128")
    assert chosen(H200, (64, 32)).endswith("_256x256")
    assert chosen(H200, (32, 64), op=DDS_NN).endswith("_256x256")


@needs_sm90
@pytest.mark.parametrize("density", [0.1, 0.25, 0.5])
@pytest.mark.parametrize("block", [16, 32])
def test_small_square_blocks_take_tiles_that_features_fill(block: int, density: float) -> None:
    def tile(tokens: int, features: int, k: int) -> str:
        return chosen(H200, (block, block), tokens=tokens, shape=(features, k), density=density)

    assert tile(3000, 1152, 4608) == "sm90_narrow_bf16_256x256"
    assert tile(16384, 1280, 5120) == "sm90_narrow_bf16_256x256"
    assert tile(8192, 14336, 4096).startswith("sm90_narrow_bf16_")  # both are filled
    if density > 0.1 or block == 16:  # otherwise blocks one by one take less
        assert tile(16384, 5120, 1280) == "sm90_narrow_bf16_128x512"


@needs_sm90
def test_long_blocks_take_the_kernels_of_square_ones() -> None:
    for block in ((32, 16), (64, 16), (128, 16)):
        for density in (0.1, 0.25, 0.5):
            assert chosen(H200, block, op=DDS_NN, density=density).startswith("sm90_narrow_bf16_")


@needs_sm90
@pytest.mark.parametrize("op", [DDS_NT, DDS_NN])
def test_few_tokens_take_kernels_made_for_them(op: int) -> None:
    def takes_them(block: int, tokens: int, features: int, k: int, density: float = 0.25) -> bool:
        shape = (features, k) if op == DDS_NT else (k, features)
        kernel = chosen(H200, (block, block), tokens=tokens, shape=shape, op=op, density=density)
        return kernel == "sm80_decode_bf16"

    assert takes_them(64, 32, 14336, 4096)
    assert not takes_them(64, 65, 14336, 4096)
    assert takes_them(32, 256, 4096, 4096)
    assert not takes_them(32, 1024, 4096, 4096)
    assert takes_them(32, 128, 4096, 14336)
    assert not takes_them(64, 256, 4096, 14336)
    assert not takes_them(16, 256, 4096, 4096)
    assert takes_them(16, 128, 4096, 4096, density=0.1)


@needs_sm90
def test_few_column_major_tokens_take_small_tiles() -> None:
    assert chosen(H200, (64, 64), tokens=16, x_layout=1).endswith(("_64x256", "_32x128"))
    assert chosen(H200, (64, 64), tokens=4096, x_layout=1).startswith("sm90_dds")


@needs_sm90
def test_few_tiles_are_halved() -> None:
    for op in (DDS_NT, DDS_NN):
        assert chosen(H200, (128, 128), tokens=512, shape=(3072, 3072), op=op).endswith("_64x256")
        assert chosen(H200, (128, 128), tokens=512, shape=(4096, 4096), op=op).endswith("_64x256")
        assert chosen(H200, (128, 128), tokens=4096, shape=(4096, 4096), op=op).endswith("_512x128")
        assert chosen(H200, (128, 128), tokens=256, shape=(4096, 4096), op=op).endswith("_64x256")
        assert chosen(H200, (16, 16), tokens=512, shape=(3072, 3072), op=op).startswith("sm90_narrow")


@needs_sm90
def test_estimates_know_which_weights_are_packed_in_a_call() -> None:
    """With few tokens blocks are read where they are unless transposed; a packed weight saves that, too."""

    def estimated(op: int, tokens: int, *, packed: bool = False) -> float:
        pattern = _C.Pattern(32, 32, 8192, 8192, 16384, 0, 0, 0)
        kernel = 1 + [kernel.name for kernel in KERNELS].index("sm90_narrow_bf16_128x512")
        product = _C.Product(pattern, op, DTYPES[torch.bfloat16], CUDA, tokens, kernel=kernel)
        if packed:
            product.use_prepacked(256, 1 << 30, 0)
        found = re.search(r"estimated ([0-9.]+) us", product.select(H200)[1])
        assert found is not None
        return float(found[1])

    for op, tokens in product((DDS_NT, DDS_NN), (128, 512, 1024)):
        assert estimated(op, tokens, packed=True) < estimated(op, tokens)
    assert estimated(DDS_NT, 128) < estimated(DDS_NN, 128)


@needs_sm90
def test_ragged_column_major_results_take_kernels_that_store_single_elements() -> None:
    for x_layout in (0, 1):
        of_tokens = partial(chosen, H200, (64, 64), x_layout=x_layout, y_layout=1)
        assert of_tokens(tokens=4096).startswith("sm90_")
        assert of_tokens(tokens=4097).startswith("sm80_")


@needs_cuda
@pytest.mark.parametrize("op", [DDS_NT, DDS_NN, SDD_TN])
def test_float64_has_one_kernel(op: int) -> None:
    kernels = {chosen(device, (64, 64), op=op, dtype=torch.float64) for device in (A100, H200, B200)}
    assert kernels == {"sm80_plain_f64"}


@needs_cuda
@pytest.mark.parametrize("device", [A100, H200], ids=["A100", "H200"])
def test_gradients_in_float32_have_the_kernels_of_those_in_16_bits(device: _C.DeviceInfo) -> None:
    """Where they are asked for; the other products refuse."""
    for dtype, block, tokens in product((torch.bfloat16, torch.float16), (16, 64, 128), (128, 8192)):
        names = [
            KERNELS[
                selection(device, op=SDD_TN, dtype=dtype, block=block, tokens=tokens, result=result)[0]
            ].name
            for result in (dtype, torch.float32)
        ]
        assert names[0] == names[1] and "_sdd_" in names[0]
    with pytest.raises(UnsupportedError, match="its results have another dtype"):
        selection(device, result=torch.float32)


@needs_cuda
def test_float32_takes_kernels_of_its_precision() -> None:
    assert "tf32x3" in chosen(H200, (64, 64), dtype=torch.float32)


MOST = 2**31 - 2**16  # tokens or features on a CUDA device


@needs_sm90
@pytest.mark.parametrize("tokens", [2**20, 2**24, MOST])
@pytest.mark.parametrize("op", [DDS_NT, DDS_NN])
def test_no_number_of_tokens_is_too_large_for_hopper(op: int, tokens: int) -> None:
    """More than a launch can count are several launches."""
    assert chosen(H200, (64, 64), tokens=tokens, op=op).startswith("sm90_dds")
    for block in (16, 32):
        kernel = chosen(H200, (block, block), tokens=tokens, op=op, shape=(28672, 8192))
        assert kernel.startswith("sm90_narrow")


@needs_cuda
def test_what_no_kernel_can_number_is_refused_with_a_sentence() -> None:
    for tokens, shape in ((MOST + 1, (64, 64)), (1, (64, 2**31 - 64))):
        with pytest.raises(InvalidArgumentError, match="must be 0 to 2147418112 on a CUDA device"):
            chosen(A100, (64, 64), tokens=tokens, shape=shape, density=0)
    with pytest.raises(UnsupportedError, match="activations of 2 GiB for a token are out of its reach"):
        chosen(A100, (64, 64), tokens=2048, shape=(64, 2**30), density=0)
    assert chosen(A100, (64, 64), tokens=2048, shape=(64, 2**30 - 64), density=0).startswith("sm80_dds")
    with pytest.raises(UnsupportedError, match="so much work is out of its reach"):
        chosen(A100, (64, 64), tokens=2**24, shape=(2**22, 64), density=0)


@needs_sm90
def test_tokens_that_a_schedule_of_gradients_cannot_count_take_other_kernels() -> None:
    kernel = [kernel.name for kernel in KERNELS].index("sm90_sdd_tn_bf16_128x256")
    asked = partial(selection, H200, (64, 64), density=1, op=SDD_TN, kernel=kernel + 1)
    assert asked(tokens=2**28)[0] == kernel
    with pytest.raises(UnsupportedError, match="out of its reach"):
        asked(tokens=2**30)
    assert chosen(H200, (64, 64), tokens=2**30, op=SDD_TN, shape=(64, 64), density=1).startswith("sm80_sdd")


def selection(
    device: _C.DeviceInfo,
    shape: tuple[int, int] = (14336, 4096),
    block: int = 64,
    density: float = 0.25,
    *,
    op: int = DDS_NT,
    dtype: torch.dtype = torch.bfloat16,
    tokens: int = 8192,
    policy: int = SPARSE,
    kernel: int = 0,
    result: torch.dtype | None = None,
) -> tuple[int, str]:
    """What is chosen for a pattern of that density, and why; no array of a pattern is looked at."""
    grid = shape[0] // block * (shape[1] // block)
    pattern = _C.Pattern(block, block, *shape, round(density * grid), 0, 0, 0)
    product = _C.Product(
        pattern,
        op,
        DTYPES[dtype],
        device.device,
        tokens,
        policy=policy,
        kernel=kernel,
        result_dtype=0 if result is None else DTYPES[result],
    )
    return product.select(device)


def times(reason: str) -> tuple[float, float]:
    """The estimates, of a kernel and of dense, in a reason."""
    found = re.search(r"estimated ([0-9.]+) us.*, dense ([0-9.]+) us", reason)
    assert found is not None, reason
    return float(found[1]), float(found[2])


@needs_sm90
@pytest.mark.parametrize("op", [DDS_NT, DDS_NN, SDD_TN])
@pytest.mark.parametrize(("block", "density"), [(64, 0.1), (64, 0.5), (16, 0.25), (16, 0.75), (128, 1.0)])
def test_auto_takes_what_is_estimated_to_be_faster(op: int, block: int, density: float) -> None:
    best, reason = selection(H200, block=block, density=density, op=op)
    sparse, dense = times(reason)
    index, reason = selection(H200, block=block, density=density, op=op, policy=AUTO)
    assert index == (RUN_DENSE if dense < sparse else best)
    assert times(reason) == (sparse, dense)
    if dense < sparse:
        assert reason.startswith("dense is estimated to be faster;")
        assert f"by {KERNELS[best].name}" in reason


@needs_sm90
def test_estimates_cross_where_measurements_do() -> None:
    """Far from where dense, with writing W out, is faster on an H200; test_estimates.py has many more."""
    assert selection(H200, (896, 4864), block=16, density=1, policy=AUTO)[0] == RUN_DENSE
    assert selection(H200, block=16, density=0.25, op=SDD_TN, policy=AUTO)[0] != RUN_DENSE
    assert selection(H200, block=16, density=0.3, policy=AUTO)[0] != RUN_DENSE
    assert selection(H200, block=64, density=0.7, policy=AUTO)[0] != RUN_DENSE


@needs_cuda
@pytest.mark.parametrize("device", [A100, RTX4090, B200], ids=["8.0", "8.9", "10.0"])
def test_dense_is_estimated_where_nothing_was_measured(device: _C.DeviceInfo) -> None:
    """By what the GPU is capable of: all of small blocks take longer, a tenth of large ones does not."""
    assert selection(device, block=16, density=1.0, policy=AUTO)[0] == RUN_DENSE
    index, reason = selection(device, block=128, density=0.1, policy=AUTO)
    sparse, dense = times(reason)
    assert index != RUN_DENSE and sparse < dense


def test_auto_stays_sparse_on_the_cpu() -> None:
    assert selection(CPU, density=1.0, dtype=torch.float32, policy=AUTO) == selection(
        CPU, density=1.0, dtype=torch.float32
    )


def test_dense_is_always_dense() -> None:
    index, reason = selection(CPU, dtype=torch.float32, policy=DENSE)
    assert (index, reason) == (RUN_DENSE, "the caller asks for dense")


@needs_sm90
def test_dense_gives_both_estimates() -> None:
    index, reason = selection(H200, density=0.1, policy=DENSE)
    assert index == RUN_DENSE
    sparse, dense = times(reason)
    assert sparse < dense


@needs_cuda
@pytest.mark.parametrize("policy", [AUTO, DENSE])
def test_products_without_a_kernel_run_dense_where_that_is_allowed(policy: int) -> None:
    index, _ = selection(_C.DeviceInfo(CUDA, 75, 40, 65536), policy=policy)
    assert index == RUN_DENSE


@needs_cuda
def test_auto_stays_sparse_where_nothing_was_measured() -> None:
    """Of float64."""
    index, _ = selection(H200, dtype=torch.float64, density=1.0, policy=AUTO)
    assert KERNELS[index].name == "sm80_plain_f64"


@needs_cuda
@pytest.mark.parametrize("policy", [AUTO, DENSE])
def test_a_named_kernel_comes_before_the_policy(policy: int) -> None:
    best, _ = selection(H200, block=16, density=1.0)
    assert selection(H200, block=16, density=1.0, policy=policy, kernel=best + 1)[0] == best


@needs_cuda
@pytest.mark.parametrize("shape", [(0, 0), (64, 64), (2**31 - 2**16, 2**31 - 2**16)])
@pytest.mark.parametrize("tokens", [0, 1, 2**31 - 2**16])
def test_estimates_are_finite(shape: tuple[int, int], tokens: int) -> None:
    small = _C.DeviceInfo(CUDA, 90, 1, 232448)
    tokens = min(tokens, 2**47 // max(*shape, 1))  # a matrix has at most so many elements
    for device, op, density in product((small, H200), (DDS_NT, DDS_NN, SDD_TN), (0.0, 1e-7)):
        _, reason = selection(device, shape, 64, density, op=op, tokens=tokens, policy=AUTO)
        estimates = re.findall(r"(\S+) us", reason)
        assert estimates and all(0 < float(time) < float("inf") for time in estimates)


@needs_sm90
@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_estimates_are_close_to_what_was_measured(gpu: str) -> None:
    """Kernels that are nearly the best; `benchmarks/check_estimates.py` prints all."""
    families: dict[str, list[float]] = defaultdict(list)
    runs = stored.documents(RESULTS / f"{gpu}_fit.json.gz")
    for run in (run for name, run in runs.items() if name.startswith("kernels")):
        pairs = list(check_estimates.pairs_of([run]))
        best = {pair.case: pair.measured for pair in sorted(pairs, key=lambda pair: -pair.measured)}
        for pair in pairs:
            if pair.measured < 1.1 * best[pair.case]:
                families[pair.family].append(abs(pair.error))
    for family in ("sm80_decode", "sm90_dds_nt", "sm90_dds_nn", "sm90_narrow", "sm90_sdd_tn"):
        assert len(families[family]) > 200
        assert statistics.median(families[family]) < 0.09
        assert statistics.quantiles(families[family], n=10)[-1] < 0.27


def test_estimates_are_printed_by_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_estimates.main([str(RESULTS / "h200_untuned.json"), "--worst", "1"]) == 0
    assert capsys.readouterr().out.startswith("family")


@needs_sm90
def test_choices_are_close_to_the_best_that_was_measured() -> None:
    pairs = list(check_estimates.pairs_of([stored.document(RESULTS / "h200_fit.json.gz#kernels")]))
    losses = [choice.loss for choice in check_estimates.choices_of(pairs)]
    assert len(losses) > 800
    assert statistics.mean(losses) < 0.02
    assert statistics.quantiles(losses, n=20)[-1] < 0.1 and max(losses) < 0.3


@needs_sm90
def test_choices_are_compared_with_the_best_kernels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where all kernels of a case were measured; the fastest here is one that nothing would choose."""
    document = stored.document(RESULTS / "h200_untuned.json")
    case = next(case for case in document["cases"] if case["op"] == "dds_nt")
    times = {"sm90_dds_nt_bf16_512x128": 100.0, "sm80_dds_nt_bf16_32x128": 50.0}
    case["results"] = [
        {"contender": "tilesparse", "kernel": kernel, "t_us": time} for kernel, time in times.items()
    ]
    path = tmp_path / "kernels.json"
    path.write_text(json.dumps(document | {"cases": [case]}))
    assert check_estimates.main([str(path), "--worst", "1"]) == 0
    out = capsys.readouterr().out
    assert "of 1 cases the chosen kernel takes 100.0% longer than the best in the mean" in out
    assert "+100%  sm90_dds_nt_bf16_512x128 100.0 us, sm80_dds_nt_bf16_32x128 50.0 us" in out


SELECT = f"""
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("tilesparse._C", {_C.__file__!r})  # without PyTorch
_C = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_C)

def select(device, **options):
    pattern = _C.Pattern(64, 64, 1024, 1024, 64, 0, 0, 0)
    index, reason = _C.Product(pattern, 0, 2, device.device, 64, **options).select(device)
    return ("dense" if index < 0 else _C.kernels()[index].name) + ": " + reason

cpu = _C.device_info(0)
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, for the environment is read once."""
    return subprocess.run(
        [sys.executable, "-c", SELECT + code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_kernel_that_does_not_exist_is_refused() -> None:
    done = run("print(select(cpu))", TILESPARSE_KERNEL="sm70_")
    sentence = "TILESPARSE_KERNEL must be the beginning of a kernel's name, got sm70_; kernels are"
    assert f"InvalidArgumentError: {sentence} {KERNELS[0].name}" in done.stderr
    assert all(kernel.name in done.stderr for kernel in KERNELS)


def test_a_kernel_is_named_by_the_environment_once() -> None:
    slowest = next(
        kernel.name for kernel in reversed(KERNELS) if kernel.device == 0 and not kernel.max_tokens
    )
    done = run(
        "print(select(cpu)); os.environ['TILESPARSE_KERNEL'] = 'none'; print(select(cpu))",
        TILESPARSE_KERNEL=slowest,
    )
    assert done.stdout.splitlines() == [f"{slowest}: TILESPARSE_KERNEL names it"] * 2, done.stderr


@needs_sm90
def test_the_environment_comes_before_estimates() -> None:
    code = "print(select(_C.DeviceInfo(1, 90, 132, 232448), policy=1))"
    done = run(code, TILESPARSE_KERNEL="sm80_dds_nt_tf32x3_128")
    assert done.stdout.startswith("sm80_dds_nt_tf32x3_128x128: TILESPARSE_KERNEL names it;"), done.stderr


def test_choices_are_logged_once_for_a_shape() -> None:
    pattern = _C.Pattern(64, 64, 1024, 1024, 64, 0, 0, 0)
    best = _C.Product(pattern, DDS_NT, DTYPES[torch.float32], 0, 64).select(CPU)[0]
    code = f"for _ in range(3): select(cpu, policy=2); select(cpu); select(cpu, kernel={best + 1})"
    assert run(code).stderr == ""
    product = "tilesparse: dds_nt float32 tokens=64 out=1024 in=1024 block=64x64"
    dense, sparse = run(code, TILESPARSE_LOG="1").stderr.splitlines()
    assert dense == f"{product}: dense (the caller asks for dense)"
    # Not that the caller names it: who names what was chosen has been told why.
    name = KERNELS[best].name
    assert sparse == f"{product}: {name} (the best instruction set of this processor for the dtype)"


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ("storage=1", "values=2:4"),
        ("values_dtype=5, granularity=1", "values=int8"),
        ("values_dtype=6, granularity=1", "values=float8_e4m3fn"),
        ("storage=1, values_dtype=5, granularity=2", "values=2:4,int8"),
    ],
)
def test_the_log_says_how_values_are_stored_and_that_they_are_expanded(options: str, values: str) -> None:
    """The kernels of the CPU read plain values alone."""
    plain, stored = run(f"select(cpu); select(cpu, {options})", TILESPARSE_LOG="1").stderr.splitlines()
    assert " values=" not in plain and "expanded" not in plain
    start = f"tilesparse: dds_nt float32 {values} tokens=64 out=1024 in=1024 block=64x64: cpu_"
    assert stored.startswith(start) and stored.endswith("; it is given dense blocks)")


def test_compiled_code_that_chooses_by_precision_is_traced_whole() -> None:
    def add(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if tf32_allowed() else x - 1

    compiled = torch.compile(add, fullgraph=True, backend="eager")
    x, before = torch.zeros(3), torch.backends.cuda.matmul.allow_tf32
    try:
        for allowed in (False, True):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            assert torch.equal(compiled(x), add(x))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before

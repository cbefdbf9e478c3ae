"""Which kernel is chosen, as a function of the product and the device alone, and what estimates rest on.

No GPU is needed; a library without CUDA kernels has less to choose from.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import fit_estimates
import pytest
import stored
import torch
from kernel_cases import product_of
from report import rows_of

import tilesparse
from tilesparse import _C, BlockSparseLinear
from tilesparse._checks import DTYPES
from tilesparse._runtime.device import DDS_NN, DDS_NT, SDD_TN
from tilesparse.errors import InvalidArgumentError, NoDeviceError, UnsupportedError
from tilesparse.tuning import Device, Product, choose, prefer
from tilesparse.tuning import product as devices
from tilesparse.tuning.product import OPS, kernels

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
# Made anew, after a change that is meant to be one, by: python tests/python/test_selection.py
TABLE = Path(__file__).with_name("selection.json")

KERNELS = _C.kernels()
CUDA = 1
A100 = _C.DeviceInfo(CUDA, 80, 108, 166912)
H200 = _C.DeviceInfo(CUDA, 90, 132, 232448, "NVIDIA H200")
RTX4090 = _C.DeviceInfo(CUDA, 89, 128, 101376)
B200 = _C.DeviceInfo(CUDA, 100, 148, 232448)
CPU = _C.device_info(0)
SPARSE, AUTO, DENSE = range(3)  # ts_matmul_desc.policy
RUN_DENSE = -1  # TS_RUN_DENSE
BF16 = torch.bfloat16
UP, DOWN = (14336, 4096), (4096, 14336)  # out_features and in_features
MOST = 2**31 - 2**16  # tokens or features on a CUDA device

built = set(_C.architectures().split(","))
needs_cuda = pytest.mark.skipif(built == {"cpu"}, reason="this library has no CUDA kernels")
needs_sm90 = pytest.mark.skipif("sm_90" not in built, reason="this library has no kernels for 9.0")
needs_all = pytest.mark.skipif(
    not {"sm_80", "sm_90"} <= built, reason="this library was built for some architectures alone"
)
of_each_op = pytest.mark.parametrize("op", [DDS_NT, DDS_NN, SDD_TN])
on_others = pytest.mark.parametrize("device", [A100, RTX4090, B200], ids=["8.0", "8.9", "10.0"])


def asked(
    device: _C.DeviceInfo,
    shape: tuple[int, int] = UP,
    block: int | tuple[int, int] = 64,
    density: float = 0.25,
    *,
    op: int = DDS_NT,
    dtype: torch.dtype = BF16,
    tokens: int = 8192,
    result: torch.dtype | None = None,
    **options: Any,
) -> _C.Product:
    """A product by a pattern of that density, none of whose arrays is looked at."""
    bn, bk = (block, block) if isinstance(block, int) else block
    nnz = round(density * (shape[0] // bn) * (shape[1] // bk))
    return _C.Product(
        _C.Pattern(bn, bk, *shape, nnz, 0, 0, 0),
        op,
        DTYPES[dtype],
        device.device,
        tokens,
        result_dtype=0 if result is None else DTYPES[result],
        **options,
    )


def selection(device: _C.DeviceInfo, *args: Any, **options: Any) -> tuple[int, str]:
    """Number of the chosen kernel, and the reason."""
    return asked(device, *args, **options).select(device)


def chosen(device: _C.DeviceInfo, *args: Any, **options: Any) -> str:
    return KERNELS[selection(device, *args, **options)[0]].name


def times(reason: str) -> tuple[float, float]:
    """The estimates, of a kernel and of dense, in a reason."""
    found = re.search(r"estimated ([0-9.]+) us.*, dense ([0-9.]+) us", reason)
    assert found is not None, reason
    return float(found[1]), float(found[2])


# ---- choices on devices ----


@needs_cuda
@on_others
def test_other_devices_take_kernels_of_an_older_architecture(device: _C.DeviceInfo) -> None:
    for op in (DDS_NT, DDS_NN, SDD_TN):
        kernel = chosen(device, op=op)
        capability = next(k.min_compute_capability for k in KERNELS if k.name == kernel)
        assert capability <= device.compute_capability
        assert kernel.startswith("sm80_")


@needs_cuda
@pytest.mark.parametrize("device", [A100, H200], ids=["A100", "H200"])
def test_gradients_in_float32_have_the_kernels_of_those_in_16_bits(device: _C.DeviceInfo) -> None:
    """If they are asked for; the other products refuse."""
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
def test_what_no_kernel_can_number_is_refused_with_a_sentence() -> None:
    for tokens, shape in ((MOST + 1, (64, 64)), (1, (64, 2**31 - 64))):
        with pytest.raises(InvalidArgumentError, match="must be 0 to 2147418112 on a CUDA device"):
            chosen(A100, tokens=tokens, shape=shape, density=0)
    with pytest.raises(UnsupportedError, match="activations of 2 GiB for a token are out of its reach"):
        chosen(A100, tokens=2048, shape=(64, 2**30), density=0)
    assert chosen(A100, tokens=2048, shape=(64, 2**30 - 64), density=0).startswith("sm80_dds")
    with pytest.raises(UnsupportedError, match="so much work is out of its reach"):
        chosen(A100, tokens=2**24, shape=(2**22, 64), density=0)


@needs_sm90
def test_tokens_that_a_schedule_of_gradients_cannot_count_take_other_kernels() -> None:
    kernel = [kernel.name for kernel in KERNELS].index("sm90_sdd_tn_bf16_128x256")
    of_tokens = partial(selection, H200, (64, 64), density=1, op=SDD_TN, kernel=kernel + 1)
    assert of_tokens(tokens=2**28)[0] == kernel
    with pytest.raises(UnsupportedError, match="out of its reach"):
        of_tokens(tokens=2**30)
    assert chosen(H200, tokens=2**30, op=SDD_TN, shape=(64, 64), density=1).startswith("sm80_sdd")


@needs_sm90
@of_each_op
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


@needs_cuda
@on_others
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
    """Kernels that are nearly the best."""
    families: dict[str, list[float]] = defaultdict(list)
    runs = stored.documents(RESULTS / f"{gpu}_fit.json.gz")
    for run in (run for name, run in runs.items() if name.startswith("kernels")):
        pairs = list(fit_estimates.pairs_of([run]))
        best = {pair.case: pair.measured for pair in sorted(pairs, key=lambda pair: -pair.measured)}
        for pair in pairs:
            if pair.measured < 1.1 * best[pair.case]:
                families[pair.family].append(abs(pair.error))
    for family in ("sm80_decode", "sm90_dds_nt", "sm90_dds_nn", "sm90_narrow", "sm90_sdd_tn"):
        assert len(families[family]) > 200
        assert statistics.median(families[family]) < 0.09
        assert statistics.quantiles(families[family], n=10)[-1] < 0.27


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


# ---- the table, and `choose` ----

DEVICES = ("7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1")
SHAPES = ((4096, 14336), (768, 768))
TOKENS = (1, 64, 512, 8192)
STORED: tuple[tuple[str, tuple[int, int] | None], ...] = (
    ("plain", None),
    ("compressed", (2, 4)),
    ("int8", None),
    ("int4", None),
)


def problems() -> Iterator[Product]:
    for op, shape, block, tokens, density in product(OPS, SHAPES, (16, 32, 64, 128), TOKENS, (0.1, 0.5)):
        yield Product(*shape, tokens, density, block, BF16, op)
    for op, block, tokens, tf32 in product(OPS, (32, 128), (64, 8192), (False, True)):
        yield Product(*SHAPES[0], tokens, 0.25, block, torch.float32, op, tf32=tf32)
    for (storage, nm), block, tokens in product(STORED, (32, 128), TOKENS):
        yield Product(*SHAPES[0], tokens, 0.25, block, torch.float16, "forward", storage, nm)
    for op, tokens in product(OPS, (1000, 1001, 4096)):
        yield Product(*SHAPES[0], tokens, 0.25, 64, BF16, op, column_major=True)
    yield Product(*SHAPES[0], 512, 0.25, 64, torch.float64)


def choice_of(problem: Product, device: str) -> str:
    try:
        return choose(problem, device).kernel or "dense"
    except UnsupportedError:
        return "none"


def table() -> dict[str, dict[str, str]]:
    """By product and kernel the compute capabilities on which it is chosen; "none" where there is none."""
    choices = {}
    for problem in problems():
        row = choices[str(problem)] = {}
        for device in DEVICES:
            kernel = choice_of(problem, device)
            row[kernel] = f"{row[kernel]} {device}" if kernel in row else device
    return choices


def as_text(choices: dict[str, dict[str, str]]) -> str:
    """A line for each product."""
    lines = (f"{json.dumps(problem)}: {json.dumps(row)}" for problem, row in choices.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


@needs_all
def test_choices_are_those_of_the_table() -> None:
    expected, found = json.loads(TABLE.read_text()), table()
    changed = [
        f"{problem}: {expected.get(problem)} is now {row}"
        for problem, row in found.items()
        if expected.get(problem) != row
    ]
    assert not changed, "\n".join(changed[:20])
    assert list(expected) == list(found)


@needs_all
def test_no_gpu_is_given_a_kernel_that_is_not_for_it() -> None:
    """Older than 8.0 none; code for 9.0 runs there alone; all else is served by what is for 8.0."""
    families: dict[str, set[str]] = {device: set() for device in DEVICES}
    for row in json.loads(TABLE.read_text()).values():
        for kernel, served in row.items():
            for device in served.split():
                families[device].add(kernel.partition("_")[0])
    for device, found in families.items():
        old, hopper = device in ("7.0", "7.5"), {"sm90"} if device == "9.0" else set()
        assert found == ({"none"} if old else {"sm80", *hopper})


@needs_all
def test_kernels_fit_into_the_shared_memory_there_is() -> None:
    """8.6, 8.9 and 12.0 have 99 KiB, less than some kernels take elsewhere."""
    wide = Product(4096, 14336, 8192, 0.25, 64, BF16)
    assert choose(wide, "8.0").kernel == "sm80_dds_nt_bf16_256x128"
    for device in ("8.6", "8.9", "12.0"):
        answer = choose(wide, device)
        assert "sm80_dds_nt_bf16_256x128" not in answer.candidates
    hopper = Device.find("9.0")
    before = {kernel.name for kernel in kernels()}
    for kibibytes in range(227, 0, -1):  # with less and less, ever fewer kernels
        less = replace(hopper, shared_memory=kibibytes << 10)
        try:
            now = {*choose(wide, less).candidates}
        except UnsupportedError as error:
            assert "the device has too little shared memory" in str(error)
            now = set()
        assert now <= before
        before = now
    assert not before


@needs_cuda
@pytest.mark.parametrize("device", ["7.0", "7.5", "V100", "T4"])
def test_gpus_that_are_too_old_are_told_so(device: str) -> None:
    major, minor = Device.find(device).compute_capability or (0, 0)
    sentence = (
        rf"this CUDA device has compute capability {major}\.{minor}, and the kernels of this library need "
        r"\d\.0 or newer; compute on the CPU, or densely"
    )
    for op in OPS:
        with pytest.raises(UnsupportedError, match=sentence):
            choose(Product(1024, 1024, 64, op=op, block_shape=32), device)
    answer = choose(Product(1024, 1024, 64, block_shape=32), device, policy="auto")
    assert (answer.kernel, answer.candidates) == (None, {})


@needs_all
@pytest.mark.parametrize("device", ["8.0", "8.6", "9.0", "12.0"])
def test_a_choice_says_what_is_next(device: str) -> None:
    for problem in list(problems())[::37]:
        try:
            answer = choose(problem, device)
        except UnsupportedError:
            continue
        times = [time for time in answer.candidates.values() if time is not None]
        assert answer.kernel == next(iter(answer.candidates)) and answer.microseconds == times[0]
        assert times == sorted(times) and len(times) == len(answer.candidates)
        assert answer.dense_microseconds is not None
        assert str(problem) in str(answer) and f"{answer.kernel}: {answer.reason}" in str(answer)


def test_the_cpu_has_no_estimates() -> None:
    answer = choose(Product(64, 64, 4, block_shape=32), "cpu")
    assert answer.kernel is not None and answer.kernel.startswith("cpu_")
    assert answer.microseconds is None and answer.dense_microseconds is None
    assert [*answer.candidates][-1].startswith("cpu_portable")


def test_devices_are_found_by_their_names() -> None:
    assert Device.find("8.9") == Device.find((8, 9)) == Device.find("L40S")
    assert Device.find("RTX 5090").compute_capability == (12, 0)
    assert Device.find("A100").shared_memory == 163 << 10
    cpu = Device.find(torch.device("cpu"))
    assert cpu == Device.find("cpu") and cpu.compute_capability is None
    assert Device.find(cpu) is cpu
    with pytest.raises(InvalidArgumentError, match=r"device must be .*'A100', .*got 'A1000'"):
        Device.find("A1000")
    with pytest.raises(InvalidArgumentError, match=r"device must be .*got 'cuda:9999999999'"):
        Device.find("cuda:9999999999")
    with pytest.raises(InvalidArgumentError, match="name must be at most 63 bytes"):
        choose(Product(64, 64, 4, block_shape=32), replace(cpu, name="x" * 64))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_missed() -> None:
    with pytest.raises(NoDeviceError, match=r"no usable CUDA device|without CUDA"):
        choose(Product(64, 64, 4, block_shape=32), "cuda")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"in_features": 0}, "in_features"),
        ({"tokens": 1.5}, "tokens"),
        ({"tokens": 1 << 31}, "tokens must be an integer from 1 to 2147483647"),
        ({"tokens": 10**30}, "tokens must be an integer from 1 to 2147483647"),
        ({"dtype": [1]}, "dtype"),
        ({"column_major": "x"}, "column_major must be True or False"),
        ({"tf32": "x"}, "tf32 must be True, False or None"),
        ({"use_fast_accum": 1}, "use_fast_accum must be True or False"),
        ({"density": 2}, "density"),
        ({"block_shape": 129}, "block_shape"),
        ({"dtype": torch.int8}, "dtype"),
        ({"op": "backward"}, "op must be one of"),
        ({"storage": "int2"}, "storage"),
        ({"storage": "compressed"}, "storage"),
        ({"nm": (2, 4)}, "nm must be None with storage 'plain'"),
        ({"nm": (2, 4), "storage": "int8", "block_shape": 16}, "nm"),
        ({"storage": "int8", "op": "wgrad"}, "storage must be 'plain' for wgrad"),
    ],
)
def test_products_are_checked(options: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        Product(**{"block_shape": 32, "in_features": 64, "out_features": 64, "tokens": 4, **options})  # type: ignore[arg-type]


def test_a_device_knows_the_clusters_that_fit() -> None:
    """Slices of a GPU may have no room for the clusters of 9.0, which decides what is chosen there."""
    known, slice_of = (_C.DeviceInfo(1, 90, 132, 227 << 10, "GPU", clusters) for clusters in (2, 1))
    device = Device.of(slice_of)
    assert device.max_cluster == device.info().max_cluster == 1
    assert device == Device.of(known)  # what one of them measured counts for the other
    if "sm_90" in _C.architectures():
        problem = Product(4096, 4096, 4096, 0.25, 64, BF16)
        assert str(choose(problem, Device.of(known)).kernel).startswith("sm90_")
        assert str(choose(problem, device).kernel).startswith("sm80_")


def test_a_product_is_that_of_a_layer() -> None:
    layer = BlockSparseLinear(64, 128, density=0.3, block_shape=(32, 16), dtype=BF16)
    problem = Product.of(layer, tokens=7)
    assert problem == Product(64, 128, 7, layer.pattern.density, (32, 16), BF16)
    assert problem.nnz == layer.pattern.nnz
    masked = BlockSparseLinear(64, 128, density=0.5, nm=(2, 4), block_shape=32)
    assert Product.of(masked, tokens=1).storage == "compressed"
    assert Product.of(masked, tokens=1, op="wgrad").storage == "plain"
    masked.to_storage("int8")
    assert (Product.of(masked, tokens=1).storage, Product.of(masked, tokens=1).nm) == ("int8", (2, 4))


# ---- preferences ----


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of kernels that products were resolved to, as they are."""
    names: list[str] = []
    call = tilesparse._runtime.pattern_cache.Prepared.call

    def recording(self: object, key: object, product: _C.Product, *rest: object) -> object:
        names.append(_C.kernels()[product.resolve()[0]].name)
        return call(self, key, product, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(tilesparse._runtime.pattern_cache.Prepared, "call", recording)
    return names


def test_preferred_kernels_run(ran: list[str]) -> None:
    layer, x = BlockSparseLinear(64, 64, bias=False, block_shape=32), torch.randn(8, 64, requires_grad=True)
    expected = layer(x)
    best = ran.pop()
    with prefer("cpu_portable"):
        y = layer(x)
        y.sum().backward()
        assert ran == ["cpu_portable"] * 3
        assert choose(Product.of(layer, tokens=8), "cpu").reason == "the caller prefers it"
        ran.clear()
        layer(x)
        assert not ran  # what was resolved is kept
        with prefer("cpu_"):  # the inner one counts
            layer(x)
        assert ran == [best]
    torch.testing.assert_close(y, expected)
    ran.clear()
    layer(x)
    assert not ran


def test_backward_passes_follow_what_is_preferred_when_they_run(ran: list[str]) -> None:
    layer, x = BlockSparseLinear(64, 64, bias=False, block_shape=32), torch.randn(8, 64, requires_grad=True)
    y = layer(x)
    ran.clear()
    done = threading.Thread(target=lambda: y.sum().backward())  # PyTorch's for a GPU is one of its own, too
    with prefer("cpu_portable"):
        done.start()
        done.join()
    assert ran == ["cpu_portable"] * 2


def test_preferences_that_overlap_leave_nothing_behind(ran: list[str]) -> None:
    """As those of two threads do, where the first one to enter is the first to leave."""
    layer, x = BlockSparseLinear(64, 64, bias=False, block_shape=32), torch.randn(8, 64)
    layer(x)
    best = ran.pop()
    first, second = prefer("cpu_"), prefer("cpu_portable")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    layer(x)
    second.__exit__(None, None, None)
    assert ran == ["cpu_portable"]
    assert choose(Product.of(layer, tokens=8), "cpu").kernel == best
    assert "prefers" not in choose(Product.of(layer, tokens=8), "cpu").reason


@pytest.mark.parametrize("kernel", ["sm70_", "", 3])
def test_a_kernel_that_does_not_exist_is_not_preferred(kernel: str) -> None:
    expected = pytest.raises(InvalidArgumentError, match="kernel must be the name of a kernel")
    with expected as caught, prefer(kernel):
        pytest.fail("it was entered")
    assert all(known.name in str(caught.value) for known in kernels())


def test_compiled_code_follows_what_is_preferred_around_it(ran: list[str]) -> None:
    layer, x = BlockSparseLinear(64, 64, block_shape=32), torch.randn(8, 64)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        compiled(x)
        ran.clear()
        with prefer("cpu_portable"):
            compiled(x)
    assert ran == ["cpu_portable"]


def test_within_code_that_is_compiled_a_preference_is_refused(ran: list[str]) -> None:
    layer, x = BlockSparseLinear(64, 64, block_shape=32), torch.randn(8, 64)

    def function(x: torch.Tensor) -> torch.Tensor:
        with prefer("cpu_portable"):
            y: torch.Tensor = layer(x)
        return y

    with pytest.raises(Exception, match="prefer has no effect within code that is compiled"):
        torch.compile(function, backend="eager", fullgraph=True)(x)
    ran.clear()
    with torch.no_grad():
        torch.compile(function, backend="eager")(x)  # leaves it to Python
    assert ran == ["cpu_portable"]


# ---- estimates ----


def on_five(test: Any) -> Any:
    return needs_sm90(pytest.mark.parametrize("name", ["H100", "H200", "A100", "L40S", "B200"])(test))


LAYERS = ((768, 3072), (4096, 4096), (4096, 14336))
# GB of memory in a second and TFLOP/s of tensor cores in 16 bits with sums in float32, as published.
LIMITS = {
    "A100": (2039, 312),
    "A40": (696, 150),
    "L40S": (864, 362),
    "L4": (300, 121),
    "RTX 4090": (1008, 165),
    "H100": (3350, 989),
    "H200": (4800, 989),
    "B200": (8000, 2250),
    "RTX 5090": (1792, 210),
    "GB10": (273, 125),
}


def described(
    layer: tuple[int, int], tokens: int, *, block: int = 64, density: float = 0.25, op: int = DDS_NT
) -> _C.Product:
    """A product in bfloat16; layers are out_features and in_features."""
    blocks = max(1, round(density * (layer[0] // block) * (layer[1] // block)))
    pattern = _C.Pattern(block, block, *layer, blocks, 0, 0, 0)
    return _C.Product(pattern, op, DTYPES[torch.bfloat16], CUDA, tokens)


def estimates(problem: _C.Product, device: Device) -> dict[str, float]:
    """Return the time of each kernel that computes the product there."""
    found = {}
    for number, kernel in enumerate(KERNELS):
        try:
            time = problem.estimate(device.info(), number)
        except UnsupportedError:
            continue
        if time > 0:
            found[kernel.name] = time
    return found


def all_products() -> Iterator[tuple[tuple[int, int], int, int, float, int]]:
    yield from product(
        LAYERS, (16, 32, 64, 128), (DDS_NT, DDS_NN, SDD_TN), (0.05, 0.25, 0.75), (1, 64, 1024, 8192)
    )


@needs_sm90
@pytest.mark.parametrize("name", LIMITS)
def test_nothing_is_faster_than_the_limits_of_the_gpu(name: str) -> None:
    """Neither more products in a second than tensor cores have, nor more bytes than memory has."""
    device = Device.find(name)
    bandwidth, tensor = LIMITS[name]
    for layer, block, op, density, tokens in all_products():
        problem = described(layer, tokens, block=block, density=density, op=op)
        products = 2e-6 * layer[0] * layer[1] * tokens
        activations, values = 2 * tokens * sum(layer), 2 * density * layer[0] * layer[1]
        for kernel, time in estimates(problem, device).items():
            assert time >= 0.99 * density * products / tensor, kernel
            assert time >= 0.98e-3 * (activations + values) / bandwidth, kernel
        dense = problem.estimate(device.info(), RUN_DENSE)
        assert dense >= 0.99 * products / tensor
        assert dense >= 0.99e-3 * activations / bandwidth


@on_five
def test_more_tokens_take_more_time(name: str) -> None:
    """By the kernel that is chosen. Those that cut sums into parts may take less where they no longer do."""
    device = Device.find(name)
    tokens = [1, 2, 8, 16, 17, 32, 63, 64, 65, 96, 128, 129, 192, 256, 257, 400, 512, 513, 768, 1023, 1024]
    tokens += [1025, 1500, 2048, 2049, 3000, 4096, 4097, 6144, 6145, 8192, 8193, 16384]
    for layer, block, op in product(LAYERS, (16, 32, 64, 128), (DDS_NT, DDS_NN, SDD_TN)):
        problems = [described(layer, count, block=block, op=op) for count in tokens]
        times = [min(estimates(problem, device).values()) for problem in problems]
        assert all(after >= 0.97 * before for before, after in pairwise(times)), (layer, block, op)


@needs_sm90
@pytest.mark.parametrize(
    "run", ["h100_fit.json.gz#kernels", "h100_fit.json.gz#kernels_second", "h200_fit.json.gz#kernels_all"]
)
def test_chosen_kernels_are_close_to_the_best(run: str) -> None:
    """Products that coefficients were fitted to; a kernel that takes over twice as long counts as twice.

    Some took much longer as something interrupted a kernel (`fit_estimates.py` leaves them out).
    """
    pairs = list(fit_estimates.pairs_of([stored.document(RESULTS / run)]))
    losses = [min(loss, 1.0) for loss in fit_estimates.costs_of(pairs)]
    assert len(losses) > 2500
    assert statistics.mean(losses) < 0.015
    assert sum(loss > 0.1 for loss in losses) < 0.04 * len(losses)


@needs_sm90
def test_choices_for_less_shared_memory_are_close_to_the_best() -> None:
    """Nothing was fitted to these: an H100 with the 99 KiB of a GPU of compute capability 8.9."""
    pairs = list(fit_estimates.pairs_of([stored.document(RESULTS / "h100_99kib.json.gz")]))
    losses = fit_estimates.costs_of(pairs)
    assert len(losses) > 1200
    assert statistics.mean(losses) < 0.035


@needs_sm90
@pytest.mark.parametrize(("gpu", "run"), [("H100", "kernels_second"), ("H200", "kernels_all")])
def test_auto_takes_the_faster_of_sparse_and_dense(gpu: str, run: str) -> None:
    """Measured times are apart by a quarter; dense is with writing W out, or copying its blocks."""
    document = stored.document(RESULTS / f"{gpu.lower()}_fit.json.gz#{run}")
    device = Device.find(gpu).info()
    numbers = {kernel.name: number for number, kernel in enumerate(KERNELS)}
    clear, wrong = 0, 0
    for case, result in rows_of([document]):
        times = {name: time for name, time in result.get("kernels_us", {}).items() if name in numbers}
        if not times or not result.get("expanded_us") or case.get("storage", "plain") != "plain":
            continue
        ratio = result["expanded_us"] / min(times.values())
        if 0.8 < ratio < 1.25:
            continue
        problem = product_of(case)
        sparse = min(problem.estimate(device, numbers[name]) for name in times)
        clear += 1
        wrong += (problem.estimate(device, RUN_DENSE) < sparse) != (ratio < 1)
    assert clear > 1500
    assert wrong < 0.01 * clear


def test_what_estimates_rest_on_is_what_was_fitted() -> None:
    text = (ROOT / "cuda/common/coefficients.inc").read_text()
    assert tuple(sorted(set(re.findall(r'^\{"([^"]+)"', text, re.M)))) == devices.MEASURED
    order = re.search(r"kMeasured\[\] = {(.*)}", (ROOT / "cuda/common/estimate.cpp").read_text())
    assert order is not None and tuple(re.findall(r'"([^"]+)"', order[1])) == devices.MEASURED


if __name__ == "__main__":
    TABLE.write_text(as_text(table()))

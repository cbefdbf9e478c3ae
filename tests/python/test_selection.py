"""Which kernels serve which GPUs: a table of what is chosen, and what `choose` says of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import tilesparse
from tilesparse import _C, BlockSparseLinear
from tilesparse._runtime.launch import use_kernel
from tilesparse.errors import InvalidArgumentError, NoDeviceError, UnsupportedError
from tilesparse.tuning import Device, Product
from tilesparse.tuning.product import OPS

# Made anew, after a change that is meant to be one, by: python tests/python/test_selection.py
TABLE = Path(__file__).with_name("selection.json")

DEVICES = ("7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1")
SHAPES = ((4096, 14336), (768, 768))
TOKENS = (1, 64, 512, 8192)
STORED: tuple[tuple[str, tuple[int, int] | None], ...] = (
    ("plain", None),
    ("compressed", (2, 4)),
    ("int8", None),
    ("int4", None),
)

have_all = {"sm_80", "sm_90"} <= set(_C.architectures().split(","))
needs_all = pytest.mark.skipif(not have_all, reason="this library was built for some architectures alone")
needs_cuda = pytest.mark.skipif("sm_" not in _C.architectures(), reason="this library has no CUDA kernels")


def problems() -> Iterator[Product]:
    for op, shape, block, tokens, density in product(OPS, SHAPES, (16, 32, 64, 128), TOKENS, (0.1, 0.5)):
        yield Product(*shape, tokens, density, block, torch.bfloat16, op)
    for op, block, tokens, tf32 in product(OPS, (32, 128), (64, 8192), (False, True)):
        yield Product(*SHAPES[0], tokens, 0.25, block, torch.float32, op, tf32=tf32)
    for (storage, nm), block, tokens in product(STORED, (32, 128), TOKENS):
        yield Product(*SHAPES[0], tokens, 0.25, block, torch.float16, "forward", storage, nm)
    for op, tokens in product(OPS, (1000, 1001, 4096)):
        yield Product(*SHAPES[0], tokens, 0.25, 64, torch.bfloat16, op, column_major=True)
    yield Product(*SHAPES[0], 512, 0.25, 64, torch.float64)


def chosen(problem: Product, device: str) -> str:
    try:
        return tilesparse.tuning.choose(problem, device).kernel or "dense"
    except UnsupportedError:
        return "none"


def table() -> dict[str, dict[str, str]]:
    """By product and kernel the compute capabilities on which it is chosen; "none" where there is none."""
    choices = {}
    for problem in problems():
        row = choices[str(problem)] = {}
        for device in DEVICES:
            kernel = chosen(problem, device)
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
        for kernel, devices in row.items():
            for device in devices.split():
                families[device].add(kernel.partition("_")[0])
    for device, found in families.items():
        old, hopper = device in ("7.0", "7.5"), {"sm90"} if device == "9.0" else set()
        assert found == ({"none"} if old else {"sm80", *hopper})


@needs_all
def test_kernels_fit_into_the_shared_memory_there_is() -> None:
    """What 8.6, 8.9 and 12.0 have, 99 KiB, is less than some kernels take elsewhere."""
    wide = Product(4096, 14336, 8192, 0.25, 64, torch.bfloat16)
    assert tilesparse.tuning.choose(wide, "8.0").kernel == "sm80_dds_nt_bf16_256x128"
    for device in ("8.6", "8.9", "12.0"):
        answer = tilesparse.tuning.choose(wide, device)
        assert answer.refused["sm80_dds_nt_bf16_256x128"] == "the device has too little shared memory"
        assert "sm80_dds_nt_bf16_256x128" not in [candidate.kernel for candidate in answer.candidates]
    hopper = Device.find("9.0")
    before = {kernel.name for kernel in tilesparse.tuning.kernels()}
    for kibibytes in range(227, 0, -1):  # with less and less, ever fewer kernels
        less = replace(hopper, shared_memory=kibibytes << 10)
        try:
            now = {each.kernel for each in tilesparse.tuning.choose(wide, less).candidates}
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
            tilesparse.tuning.choose(Product(1024, 1024, 64, op=op, block_shape=32), device)
    answer = tilesparse.tuning.choose(Product(1024, 1024, 64, block_shape=32), device, policy="auto")
    assert (answer.kernel, answer.candidates, answer.runner_up) == (None, (), None)


@needs_all
@pytest.mark.parametrize("device", ["8.0", "8.6", "9.0", "12.0"])
def test_a_choice_says_what_is_next(device: str) -> None:
    for problem in list(problems())[::37]:
        try:
            answer = tilesparse.tuning.choose(problem, device)
        except UnsupportedError:
            continue
        times = [each.microseconds for each in answer.candidates if each.microseconds is not None]
        assert answer.kernel == answer.candidates[0].kernel and answer.microseconds == times[0]
        assert times == sorted(times) and len(times) == len(answer.candidates)
        assert answer.runner_up == (answer.candidates[1] if len(times) > 1 else None)
        assert (answer.dense_microseconds is not None) == (problem.dtype != torch.float64)
        names = {kernel.name for kernel in tilesparse.tuning.kernels() if kernel.device == "cuda"}
        assert {each.kernel for each in answer.candidates} | set(answer.refused) == names
        assert str(problem) in str(answer) and f"{answer.kernel}: {answer.reason}" in str(answer)


@needs_all
def test_dense_is_an_answer() -> None:
    thick = Product(4096, 4096, 8192, 0.9, 16, torch.float32, tf32=True)
    answer = tilesparse.tuning.choose(thick, "H100", policy="auto")
    assert answer.kernel is None and answer.reason.startswith("dense is estimated to be faster")
    assert answer.runner_up == answer.candidates[0]
    assert answer.microseconds == answer.dense_microseconds
    assert answer.runner_up.microseconds is not None and answer.microseconds is not None
    assert answer.microseconds < answer.runner_up.microseconds
    assert "\n  dense: " in str(answer)


@pytest.mark.parametrize(
    ("device", "read"),
    [
        ("cpu", {"plain", "int8 W8A8", "float8_e4m3fn W8A8"}),
        pytest.param("H100", {"plain", "2:4", "int8", "float8_e4m3fn", "int8 W8A8"}, marks=needs_cuda),
    ],
)
def test_a_choice_says_whether_values_are_expanded(device: str, read: set[str]) -> None:
    nm = (2, 4)
    products: dict[str, dict[str, Any]] = {
        "plain": {},
        "2:4": {"storage": "compressed", "nm": nm},
        **{storage: {"storage": storage} for storage in ("int8", "float8_e4m3fn")},
        **{f"{s} W8A8": {"storage": s, "activations": s} for s in ("int8", "float8_e4m3fn")},
    }
    for name, options in products.items():
        product = Product(4096, 4096, 4, dtype=torch.bfloat16, **options)
        if device == "cpu" or name in read:
            assert tilesparse.tuning.choose(product, device).dequantizes == (name not in read), name


def test_the_cpu_has_no_estimates() -> None:
    answer = tilesparse.tuning.choose(Product(64, 64, 4, block_shape=32), "cpu")
    assert answer.kernel is not None and answer.kernel.startswith("cpu_")
    assert answer.microseconds is None and answer.dense_microseconds is None
    assert answer.candidates[-1].kernel == "cpu_portable" and "no estimate" in str(answer)


def test_kernels_are_those_of_the_library() -> None:
    assert [kernel.name for kernel in tilesparse.tuning.kernels()] == [kernel.name for kernel in _C.kernels()]
    portable = next(kernel for kernel in tilesparse.tuning.kernels() if kernel.name == "cpu_portable")
    assert portable.device == "cpu" and portable.compute_capability is None
    assert portable.ops == OPS and torch.float64 in portable.dtypes
    assert portable.storages == ("plain",) and portable.values_dtypes == ()
    assert str(portable).startswith("cpu_portable: cpu; forward, dgrad, wgrad; float64")


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
        tilesparse.tuning.choose(Product(64, 64, 4, block_shape=32), replace(cpu, name="x" * 64))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_missed() -> None:
    with pytest.raises(NoDeviceError, match=r"no usable CUDA device|without CUDA"):
        tilesparse.tuning.choose(Product(64, 64, 4, block_shape=32), "cuda")


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
        ({"density": 2}, "density"),
        ({"block_shape": 24}, "block_shape"),
        ({"in_features": 40}, "multiple"),
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


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"name": 3}, "name must be a string, got 3"),
        ({"name": "\ud800"}, "name must be at most 63 bytes of printable text"),
        ({"name": "a\0b"}, "name must be at most 63 bytes of printable text"),
        ({"compute_capability": "8.6"}, r"compute_capability must be \(major, minor\) or None"),
        ({"compute_capability": (8,)}, r"compute_capability must be \(major, minor\) or None"),
        ({"compute_capability": (8, 10)}, "minor of compute_capability must be"),  # which would pass for 9.0
        ({"compute_capability": (100, 0)}, "major of compute_capability must be"),
        ({"multiprocessors": 0}, "multiprocessors must be an integer from 1 to 65536"),
        ({"multiprocessors": 10**12}, "multiprocessors"),
        ({"shared_memory": -1}, "shared_memory must be an integer from 0 to 16777216"),
    ],
)
def test_devices_are_checked(options: dict[str, Any], text: str) -> None:
    device = {"name": "GPU", "compute_capability": (8, 6), "multiprocessors": 30, "shared_memory": 99 << 10}
    with pytest.raises(InvalidArgumentError, match=text):
        Device(**{**device, **options}).info()


def test_a_device_knows_the_clusters_that_fit() -> None:
    """Slices of a GPU may have no room for the clusters of 9.0, which decides what is chosen there."""
    known, slice_of = (_C.DeviceInfo(1, 90, 132, 227 << 10, "GPU", clusters) for clusters in (2, 1))
    device = Device.of(slice_of)
    assert device.max_cluster == device.info().max_cluster == 1
    assert device == Device.of(known)  # what one of them measured counts for the other
    if "sm_90" in _C.architectures():
        problem = Product(4096, 4096, 4096, 0.25, 64, torch.bfloat16)
        assert str(tilesparse.tuning.choose(problem, Device.of(known)).kernel).startswith("sm90_")
        assert str(tilesparse.tuning.choose(problem, device).kernel).startswith("sm80_")


def test_equal_products_are_equal_however_they_are_written() -> None:
    assert Product(64, 64, 4, nm=[2, 4], storage="int8") == Product(64, 64, 4, nm=(2, 4), storage="int8")  # type: ignore[arg-type]
    assert len({Product(64, 64, 4, nm=[2, 4], storage="int8")}) == 1  # type: ignore[arg-type]
    assert Product(64, 64, 4, dtype=torch.bfloat16, tf32=True, block_shape=32) == Product(
        64, 64, 4, dtype=torch.bfloat16, block_shape=32
    )
    assert Product(64, 64, 4, tf32=True, block_shape=32) != Product(64, 64, 4, tf32=False, block_shape=32)


def test_a_product_is_that_of_a_layer() -> None:
    layer = BlockSparseLinear(64, 128, density=0.3, block_shape=(32, 16), dtype=torch.bfloat16)
    problem = Product.of(layer, tokens=7)
    assert problem == Product(64, 128, 7, layer.pattern.density, (32, 16), torch.bfloat16)
    assert problem.nnz == layer.pattern.nnz
    masked = BlockSparseLinear(64, 128, density=0.5, nm=(2, 4), block_shape=32)
    assert Product.of(masked, tokens=1).storage == "compressed"
    assert Product.of(masked, tokens=1, op="wgrad").storage == "plain"
    masked.to_storage("int8")
    assert (Product.of(masked, tokens=1).storage, Product.of(masked, tokens=1).nm) == ("int8", (2, 4))
    with pytest.raises(InvalidArgumentError, match=r"layer must be a BlockSparseLinear, got torch.nn.Linear"):
        Product.of(torch.nn.Linear(16, 16), tokens=1)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"product must be a Product, got BlockSparseLinear"):
        tilesparse.tuning.choose(layer)  # type: ignore[arg-type]


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
    with tilesparse.tuning.prefer("cpu_portable"):
        y = layer(x)
        y.sum().backward()
        assert ran == ["cpu_portable"] * 3
        assert tilesparse.tuning.choose(Product.of(layer, tokens=8), "cpu").reason == "the caller prefers it"
        ran.clear()
        layer(x)
        assert not ran  # what was resolved is kept
        with tilesparse.tuning.prefer("cpu_"):  # the inner one counts
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
    with tilesparse.tuning.prefer("cpu_portable"):
        done.start()
        done.join()
    assert ran == ["cpu_portable"] * 2


def test_preferences_that_overlap_leave_nothing_behind(ran: list[str]) -> None:
    """As those of two threads do, where the first one to enter is the first to leave."""
    layer, x = BlockSparseLinear(64, 64, bias=False, block_shape=32), torch.randn(8, 64)
    layer(x)
    best = ran.pop()
    first, second = tilesparse.tuning.prefer("cpu_"), tilesparse.tuning.prefer("cpu_portable")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    layer(x)
    second.__exit__(None, None, None)
    assert ran == ["cpu_portable"]
    assert tilesparse.tuning.choose(Product.of(layer, tokens=8), "cpu").kernel == best
    assert "prefers" not in tilesparse.tuning.choose(Product.of(layer, tokens=8), "cpu").reason


def test_what_is_preferred_for_another_device_is_no_matter(ran: list[str]) -> None:
    layer, x = BlockSparseLinear(64, 64, block_shape=32), torch.randn(8, 64)
    layer(x)
    if "sm_80" in _C.architectures():
        with tilesparse.tuning.prefer("sm80_"):
            layer(x)
        assert ran[0] == ran[1]
    with tilesparse.tuning.prefer("cpu_portable"), use_kernel(ran[0]):  # which insists
        layer(x)
    assert set(ran) == {ran[0]}


@pytest.mark.parametrize("kernel", ["sm70_", "", 3])
def test_a_kernel_that_does_not_exist_is_not_preferred(kernel: str) -> None:
    expected = pytest.raises(InvalidArgumentError, match="kernel must be the name of a kernel")
    with expected as caught, tilesparse.tuning.prefer(kernel):
        pytest.fail("it was entered")
    assert all(known.name in str(caught.value) for known in tilesparse.tuning.kernels())


def test_compiled_code_follows_what_is_preferred_around_it(ran: list[str]) -> None:
    layer, x = BlockSparseLinear(64, 64, block_shape=32), torch.randn(8, 64)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        compiled(x)
        ran.clear()
        with tilesparse.tuning.prefer("cpu_portable"):
            compiled(x)
    assert ran == ["cpu_portable"]


def test_within_code_that_is_compiled_a_preference_is_refused(ran: list[str]) -> None:
    layer, x = BlockSparseLinear(64, 64, block_shape=32), torch.randn(8, 64)

    def function(x: torch.Tensor) -> torch.Tensor:
        with tilesparse.tuning.prefer("cpu_portable"):
            y: torch.Tensor = layer(x)
        return y

    with pytest.raises(Exception, match=r"tilesparse\.prefer has no effect within code that is compiled"):
        torch.compile(function, backend="eager", fullgraph=True)(x)
    ran.clear()
    with torch.no_grad():
        torch.compile(function, backend="eager")(x)  # leaves it to Python
    assert ran == ["cpu_portable"]


if __name__ == "__main__":
    TABLE.write_text(as_text(table()))

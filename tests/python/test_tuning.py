"""Measured kernels: what is kept, what of it counts, and files that cannot be used."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tilesparse
from tilesparse import _C, BlockSparseLinear, tuning
from tilesparse._files import VARIABLE, tune_file
from tilesparse.cli import command
from tilesparse.errors import InvalidArgumentError, TuneFileError, UnsupportedError
from tilesparse.tuning import Device, Product, store
from tilesparse.tuning.measure import products_of
from tilesparse.tuning.product import OPS
from tilesparse.tuning.store import Measurement

PRODUCT = Product(64, 128, 10, 0.5, block_shape=32)
PRODUCT_FIELDS = {"in_features": 64, "out_features": 128, "tokens": 10, "dtype": "float32"}
CPU = Device.find("cpu")


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of this test's own; afterwards nothing counts."""
    found = tmp_path / "folder" / "tune.json"
    monkeypatch.setenv(VARIABLE, str(found))
    yield found
    monkeypatch.setenv(VARIABLE, "")
    tuning.load()


class Clock:
    """Gives out made-up times, after it has let every call run once."""

    def __init__(self, *milliseconds: float) -> None:
        self.milliseconds, self.results = milliseconds, [torch.empty(0)]

    def __call__(self, calls: Sequence[Any], device: torch.device, repetitions: int) -> list[float]:
        self.results = [call() for call in calls]
        assert device.type == "cpu" and repetitions == 21
        return [*self.milliseconds[: len(calls) - 1], self.milliseconds[-1]]


def tune(products: list[Product], device: str, *, timer: Clock, **options: Any) -> list[Measurement]:
    """Tune by made-up times."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tilesparse.tuning.measure.milliseconds", timer)
        return tuning.tune(products, device, **options)


def names(product: Product = PRODUCT) -> list[str]:
    return [*tuning.choose(product, "cpu").candidates]


def last_is_fastest(dense: float = 9.0) -> Clock:
    """Times of two kernels."""
    return Clock(2.0, 1.0, dense)


def tune_two(*products: Product, dense: float = 9.0) -> list[Measurement]:
    return tune([*products] or [PRODUCT], "cpu", candidates=2, timer=last_is_fastest(dense))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("form", ["plain", "column_major", "compressed", "int8", "2:4 int8"])
def test_every_product_is_measured_as_it_is_computed(op: str, form: str) -> None:
    forms: dict[str, dict[str, Any]] = {
        "plain": {},
        "column_major": {"column_major": True},
        "compressed": {"storage": "compressed", "nm": (2, 4)},
        "int8": {"storage": "int8"},
        "2:4 int8": {"storage": "int8", "nm": (2, 4)},
    }
    options = forms[form]
    if op == "wgrad" and "storage" in options:
        options = {}
    product, clock = Product(64, 128, 10, 0.5, op=op, **{"block_shape": 32, **options}), last_is_fastest()
    (measured,) = tune([product, product], "cpu", candidates=2, timer=clock)
    *sparse, dense = clock.results
    assert len(sparse) == 2
    for result in sparse:  # those of kernels and of dense, of the same random operands
        torch.testing.assert_close(result, dense, rtol=1e-4, atol=1e-4)
    assert list(measured.microseconds.items()) == [(names()[1], 1000), (names()[0], 2000)]
    assert measured.dense_microseconds == 9000 and measured.kernel == names()[1]
    assert str(product) in str(measured) and "dense" in str(measured)


def test_what_was_measured_is_chosen_here_and_in_later_programs(path: Path) -> None:
    first, second = names()[:2]
    assert tuning.choose(PRODUCT, "cpu").kernel == first
    tune_two()
    answer = tuning.choose(PRODUCT, "cpu")
    assert answer.kernel == second and first in answer.candidates
    assert answer.reason == "the fastest when measured on this device; measured 1000 us, dense 9000 us"
    code = """
import sys, torch, tilesparse
assert "tilesparse.tuning.store" in sys.modules and "tilesparse.tuning.measure" not in sys.modules
layer = tilesparse.BlockSparseLinear(64, 128, density=0.5, bias=False, block_shape=32)
layer(torch.randn(10, 64))
print(tilesparse.tuning.choose(tilesparse.tuning.Product.of(layer, tokens=16), "cpu").kernel)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=os.environ | {"TILESPARSE_LOG": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{second}\n"
    assert f": {second} (the fastest when measured on this device; measured 1000 us" in done.stderr
    assert path.exists() and os.listdir(path.parent) == ["tune.json"]


def test_kept_calls_choose_anew_once_something_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = BlockSparseLinear(64, 128, density=0.5, bias=False, block_shape=32), torch.randn(10, 64)
    layer(x)
    tune_two()
    resolved = []
    call = tilesparse._runtime.pattern_cache.Prepared.call

    def recording(self: Any, key: Any, product: _C.Product, *rest: Any) -> Any:
        resolved.append(_C.kernels()[product.resolve()[0]].name)
        return call(self, key, product, *rest)

    monkeypatch.setattr(tilesparse._runtime.pattern_cache.Prepared, "call", recording)
    layer(x)
    assert resolved == [names()[1]]


def test_auto_compares_what_was_measured_also_on_the_cpu() -> None:
    layer, x = BlockSparseLinear(64, 128, density=0.5, policy="auto", block_shape=32), torch.randn(10, 64)
    for dense, is_dense in ((0.5, True), (5.0, False)):
        tune_two(dense=dense)
        assert (tuning.choose(PRODUCT, "cpu", policy="auto").kernel is None) == is_dense
        with torch.profiler.profile() as profile:
            layer(x)
        assert ("tilesparse::expand" in {event.key for event in profile.key_averages()}) == is_dense
    assert tuning.choose(PRODUCT, "cpu").kernel == names()[1]
    with tuning.prefer(names()[0]):  # comes before
        assert tuning.choose(PRODUCT, "cpu", policy="auto").kernel == names()[0]


def test_measuring_again_replaces_and_other_products_stay(path: Path) -> None:
    other = Product(64, 64, 10, 0.5, block_shape=32)
    tune_two(PRODUCT, other)
    tune([PRODUCT], "cpu", candidates=2, timer=Clock(1.0, 2.0, 3.0))
    found, others = tuning.load()
    assert others == 0
    assert {each.product: each.kernel for each in found} == {other: names()[1], PRODUCT: names()[0]}
    assert tuning.choose(PRODUCT, "cpu").kernel == names()[0]
    assert "2 products that count" in store.status() and str(path) in store.status()


@pytest.mark.parametrize("change", ["library", "cpu", "processors"])
def test_what_other_machines_and_versions_have_measured_is_kept_and_does_not_count(
    path: Path, change: str
) -> None:
    tune_two()
    document = json.loads(path.read_text())
    (section,) = document["sections"]
    if change == "library":
        section["versions"]["tilesparse"] = "0.0.9"
    elif change == "cpu":
        section["device"]["name"] = "another"
    else:
        section["device"]["multiprocessors"] += 1
    path.write_text(json.dumps(document))
    assert tuning.load() == ([], 1)
    assert tuning.choose(PRODUCT, "cpu").kernel == names()[0]
    assert "0 products that count; 1 of other CPUs or versions of the library do not count" in store.status()
    tune_two()
    assert section in json.loads(path.read_text())["sections"]


@pytest.mark.skipif("sm_80" not in _C.architectures(), reason="this library has no kernels for 8.0")
def test_what_a_gpu_has_measured_counts_for_those_of_its_name(path: Path) -> None:
    """Without a GPU: as if the file came from a machine with one."""
    tune_two()
    document, gpu = json.loads(path.read_text()), Device("NVIDIA X", (8, 6), 30, 99 << 10)
    (section,) = document["sections"]
    section["device"] = {"name": gpu.name, "compute_capability": [8, 6], "multiprocessors": 30}
    section["device"]["shared_memory"] = gpu.shared_memory
    product = Product(4096, 4096, 4096, 0.25, 64, torch.bfloat16)
    best, second = [*tuning.choose(product, gpu).candidates][:2]
    fields = {"in_features": 4096, "out_features": 4096, "tokens": 4096, "block_shape": [64, 64]}
    entry = section["products"][0]
    entry["product"] |= {**fields, "density": 0.25, "dtype": "bfloat16"}
    entry["microseconds"] = {best: 30.0, second: 20.0}
    entry["dense_microseconds"] = 10.0
    path.write_text(json.dumps(document))
    ((measured,), _) = tuning.load()
    assert measured.product == product and measured.device == gpu
    assert tuning.choose(product, gpu).kernel == second
    assert tuning.choose(product, gpu, policy="auto").kernel is None
    assert tuning.choose(product, "8.6").kernel == tuning.choose(product, "A10").kernel == best


@pytest.mark.skipif("sm_80" not in _C.architectures(), reason="this library has no kernels for 8.0")
def test_fast_sums_of_float8_are_measured_apart() -> None:
    """Without a GPU: kernels that carry sums over or add them up apart take longer than those that do not."""
    layer = BlockSparseLinear(4096, 4096, storage="float8_e4m3fn", block_shape=64, dtype=torch.bfloat16)
    layer = layer.to_storage("float8_e4m3fn", activations="float8_e4m3fn")
    gpu, usual = Device.find("H100"), Product.of(layer, tokens=4096)
    layer.use_fast_accum = True
    fast = Product.of(layer, tokens=4096)
    best, second = [*tuning.choose(fast, gpu).candidates][:2]
    store.count_measurement(Measurement(fast, gpu, {second: 20.0, best: 30.0}, 40.0))
    assert tuning.choose(fast, gpu).kernel == second and "measured" in tuning.choose(fast, gpu).reason
    assert "measured" not in tuning.choose(usual, gpu).reason
    assert not Product.of(layer, tokens=4096, op="dgrad").use_fast_accum and "fast sums" in str(fast)


@pytest.mark.skipif("sm_90" not in _C.architectures(), reason="this library has no kernels for 9.0")
@pytest.mark.parametrize(
    ("tokens", "block", "out_features", "in_features", "density", "usual", "fast"),
    [
        (8192, 128, 4096, 14336, 0.5, "bf16_pingpong_256x128", "bf16_pingpong_256x128"),  # fast 335, 346 us
        (8192, 128, 14336, 4096, 0.5, "bf16_pingpong_256x128", "fast_bf16_pingpong_384x128"),  # 344, 341 us
        (8192, 128, 14336, 4096, 0.25, "bf16_pingpong_256x128", "fast_bf16_pingpong_384x128"),
        (8192, 128, 3072, 768, 0.25, "bf16_pingpong_256x128", "fast_bf16_pingpong_384x128"),  # fast 25, 21 us
        (8192, 64, 14336, 4096, 0.25, "bf16_pingpong_512x64", "bf16_256x256"),  # fast 324 and 306 us
        (8192, 64, 14336, 4096, 0.1, "bf16_pingpong_512x64", "bf16_pingpong_512x64"),  # fast 182 and 195 us
        (128, 64, 14336, 4096, 0.5, "bf16_128x128", "bf16_128x128"),  # 256x256 1.8 times as long
        (128, 64, 14336, 4096, 0.25, "bf16_128x128", "bf16_64x128"),  # 19 and 18 us, 256x256 30
        (128, 64, 14336, 4096, 0.1, "bf16_128x128", "bf16_64x128"),
    ],
)
def test_kernels_of_float8(
    tokens: int, block: int, out_features: int, in_features: int, density: float, usual: str, fast: str
) -> None:
    """Fast sums make kernels faster whose warpgroups stop to carry sums over, and have a larger tile.

    For 128 tokens, tiles of one thread block are faster than those of clusters.
    """
    layer = Product(
        in_features,
        out_features,
        tokens,
        density,
        block,
        torch.bfloat16,
        storage="float8_e4m3fn",
        activations="float8_e4m3fn",
    )
    chosen = (tuning.choose(replace(layer, use_fast_accum=sums), "H200").kernel for sums in (False, True))
    assert list(chosen) == [f"sm90_dds_nt_float8_{kernel}" for kernel in (usual, fast)]


def test_a_checkpoint_is_measured_layer_by_layer(path: Path, tmp_path: Path) -> None:
    model: Any = torch.nn.Sequential(
        BlockSparseLinear(64, 128, density=0.5, block_shape=32),
        BlockSparseLinear(64, 128, density=0.5, block_shape=32),
        BlockSparseLinear(128, 64, density=0.25, nm=(2, 4), block_shape=32),
        BlockSparseLinear(64, 64, density=0.5, block_shape=32).to_storage("int8"),
    )
    tilesparse.save(model, tmp_path / "model")
    found = products_of(tmp_path / "model", [1, 8])
    expected = [
        Product.of(layer, tokens=tokens, op=op)
        for layer, ops in (
            (model[0], OPS),
            (model[2], OPS),
            (model[3], ("forward", "dgrad")),  # whose weight has no gradient
        )
        for op in ops
        for tokens in (1, 8)
    ]
    assert found == expected
    tilesparse.save(BlockSparseLinear(64, 128, storage="int8", block_shape=32), tmp_path / "stored")
    assert [each.op for each in products_of(tmp_path / "stored", [1])] == ["forward", "dgrad"]
    with pytest.raises(tilesparse.errors.CheckpointError):
        products_of(tmp_path, [1])


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_kernels_of_a_gpu_are_measured(op: str) -> None:
    product = Product(1024, 1024, 256, 0.25, 64, torch.bfloat16, op)
    (measured,) = tuning.tune([product], "cuda", candidates=4, repetitions=5)
    expected = [*tuning.choose(product, "cuda").candidates][:4]
    assert sorted(measured.microseconds) == sorted(expected)
    assert all(0 < time < 1e4 for time in (*measured.microseconds.values(), measured.dense_microseconds))
    answer = tuning.choose(product, "cuda", policy="auto")
    assert "measured" in answer.reason
    fastest = measured.microseconds[measured.kernel]
    assert answer.kernel == (None if measured.dense_microseconds < fastest else measured.kernel)
    assert tuning.load() == ([measured], 0)


# ---- bad input ----


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"a": 1}', "format"),
        ('{"format": "another", "version": 1, "sections": []}', "format must be 'tilesparse measurements'"),
        ('{"format": "tilesparse measurements", "version": 2, "sections": []}', "version must be 1, got 2"),
        ('{"format": "tilesparse measurements", "version": 1, "sections": [{}]}', "versions"),
        ('{"format": "tilesparse measurements", "version": 1, "sections": 7}', "not iterable"),
        (b"\xff\xfe", "cannot be read"),
        pytest.param("[" * 100_000, "RecursionError", id="deep"),
    ],
)
def test_a_file_that_is_none_is_reported_and_not_overwritten(
    path: Path, content: str | bytes, text: str
) -> None:
    path.parent.mkdir()
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    before, clock = path.read_bytes(), last_is_fastest()
    advice = "delete it, name another file in TILESPARSE_TUNE_FILE"
    with pytest.raises(TuneFileError, match=rf"tune\.json.*{text}.*{advice}"):
        tune([PRODUCT], "cpu", timer=clock)
    assert len(clock.results) == 1 and path.read_bytes() == before  # nothing was measured
    assert "none count" in store.status() and text in store.status()
    with pytest.warns(RuntimeWarning, match="what tilesparse tune has measured does not count: .*tune.json"):
        store.load_on_import()


GPU = {"name": "GPU", "compute_capability": [8, 6], "multiprocessors": 30, "shared_memory": 99 << 10}


@pytest.mark.parametrize(
    ("of_device", "change"),
    [
        (False, {"microseconds": {}}),
        (False, {"microseconds": {"cpu_abacus": 1.0}}),
        (False, {"microseconds": {"cpu_portable": -1.0}}),
        (False, {"microseconds": {"cpu_portable": 0.0}}),
        (False, {"microseconds": {"cpu_portable": "fast"}}),
        (False, {"microseconds": {"cpu_amx_bf16": 1.0}}),  # of another dtype
        (False, {"dense_microseconds": None}),
        (False, {"product": {}}),
        (False, {"product": 3}),
        (False, {"product": PRODUCT_FIELDS | {"tokens": 10**30}}),
        (False, {"product": PRODUCT_FIELDS | {"column_major": "x"}}),
        (True, GPU | {"name": 7}),
        (True, GPU | {"compute_capability": ["a", 6]}),
        (True, GPU | {"compute_capability": [8]}),
        (True, GPU | {"multiprocessors": 10**12}),
        (True, GPU | {"more": 1}),
    ],
)
def test_of_a_damaged_file_nothing_counts(path: Path, of_device: bool, change: dict[str, Any]) -> None:
    tune_two(Product(64, 64, 10, block_shape=32), PRODUCT)
    document = json.loads(path.read_text())
    (section,) = document["sections"]
    (section["device"] if of_device else section["products"][1]).update(change)
    path.write_text(json.dumps(document))
    with pytest.raises(TuneFileError, match="damaged"):
        tuning.load()
    with pytest.warns(RuntimeWarning, match="does not count: .*damaged"):
        store.load_on_import()
    assert tuning.choose(Product(64, 64, 10, block_shape=32), "cpu").kernel == names()[0]
    clock = last_is_fastest()
    with pytest.raises(TuneFileError, match="damaged"):  # and it is not written to
        tune([PRODUCT], "cpu", timer=clock)
    assert len(clock.results) == 1 and json.loads(path.read_text()) == document


def test_processors_may_have_long_names(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilesparse.tuning.product.name_of_cpu", lambda: "x" * 99)
    found = tune_two()
    assert tuning.load() == (found, 0)


def test_a_link_stays_one_and_others_may_read(path: Path, tmp_path: Path) -> None:
    path.parent.mkdir()
    path.symlink_to(tmp_path / "elsewhere" / "kept.json")
    tune_two()
    kept = tmp_path / "elsewhere" / "kept.json"
    assert path.is_symlink() and os.listdir(kept.parent) == ["kept.json"]
    (tmp_path / "plain").touch()
    assert kept.stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert len(tuning.load()[0]) == 1


def test_threads_and_programs_that_measure_at_once_lose_nothing(path: Path) -> None:
    products = [Product(64, 64, 1 << power, block_shape=32) for power in range(12)]
    measured = tune(products, "cpu", candidates=1, timer=Clock(1.0, 2.0))
    path.unlink()

    def add(measurement: Measurement) -> None:
        store.add_to_file(path, measurement)

    with ThreadPoolExecutor(4) as executor:
        list(executor.map(add, measured))
    assert {each.product for each in tuning.load()[0]} == set(products)


def test_densities_that_round_are_measured(path: Path) -> None:
    (found,) = tune_two(Product(64, 64, 4, 1e-9, block_shape=32))
    assert found.product.nnz == 0 and tuning.load() == ([found], 0)


def test_a_folder_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/proc/tilesparse/tune.json")
    clock = last_is_fastest()
    with pytest.raises(TuneFileError, match=r"tune\.json: cannot be written: .*name another file"):
        tune([PRODUCT], "cpu", timer=clock)
    assert len(clock.results) == 1


@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_full_or_read_only_disk_leaves_the_old_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, function: str, code: int
) -> None:
    tune_two()
    before = path.read_text()

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, function, fail)
        with pytest.raises(TuneFileError, match=rf"cannot be written: {os.strerror(code)}"):
            tune([PRODUCT], "cpu", candidates=2, timer=Clock(1.0, 2.0, 3.0))
    assert path.read_text() == before and os.listdir(path.parent) == ["tune.json"]


def test_the_file_is_in_the_cache_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    assert tune_file() is None and "is empty" in store.status()
    tune_two()  # counts, and is not kept
    assert tuning.choose(PRODUCT, "cpu").kernel == names()[1]
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert tune_file() == Path("/somewhere/tilesparse/tune.json")
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which its standard has ignored
    assert tune_file() == Path("/home/me/.cache/tilesparse/tune.json")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert tune_file() == Path("/home/me/.cache/tilesparse/tune.json")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user without one
    assert tune_file() is None and tuning.load() == ([], 0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"products": [3]}, "products must be a Product, got 3"),
        (
            {"products": [Product(64, 64, 1, storage="int8", column_major=True, block_shape=32)]},
            "must be stored 'plain'",
        ),
        ({"candidates": 0}, "candidates"),
        ({"repetitions": 1.5}, "repetitions"),
        ({"device": "meta"}, "device must have memory"),
    ],
)
def test_arguments_are_checked_before_anything_is_measured(
    path: Path, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        tuning.tune(**{"products": [PRODUCT], "device": "cpu", **options})
    assert not path.exists()


# ---- the command ----


def test_the_command_measures_and_says_where_it_is_kept(
    path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    layer = ["--in-features", "64", "--out-features", "128", "--op", "forward"]
    assert command.main(["tune", *layer, "--tokens", "1", "8", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("2 products, on CPU") and text.count("  dense ") == 2
    assert all(text.count(f"  {name} ") == 2 for name in names()[:2])
    assert text.splitlines()[-1] == f"measured kernels: 2 products that count; {path}"
    tilesparse.save(BlockSparseLinear(64, 128, block_shape=32), tmp_path / "model")
    model = ["--model", str(tmp_path / "model"), "--op", "dgrad"]
    assert command.main(["tune", *model, "--tokens", "4", "--device", "cpu"]) == 0
    assert "1 products, on CPU" in capsys.readouterr().out
    assert len(tuning.load()[0]) == 3
    tilesparse.save(torch.nn.Linear(4, 4), tmp_path / "dense")
    assert command.main(["tune", "--model", str(tmp_path / "dense"), "--device", "cpu"]) == 2
    assert "no block-sparse layer has such a product" in capsys.readouterr().err
    path.write_text("{")
    assert command.main(["tune", *layer, "--device", "cpu"]) == 2
    assert "delete it, name another file" in capsys.readouterr().err


def test_info_tells_of_other_gpus_and_of_what_was_measured(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        command.main(["info", "--gpu", "A100", "--gpu", "7.5", "--dtype", "bfloat16", "--op", "wgrad"]) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert f"measured kernels: 0 products that count; {path}" in lines
    rows = {line.split()[0]: line for line in lines if line.split()[1:2] == ["wgrad"]}
    if "sm_80" in _C.architectures():
        assert "sm80_sdd_tn_bf16" in rows["A100"]
        assert "this CUDA device has compute capability 7.5" in rows["T4"]
    assert command.main(["info", "--gpu", "A1000"]) == 2
    assert "got 'A1000'" in capsys.readouterr().err


def test_a_product_that_no_kernel_computes_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = Device("old", (7, 0), 80, 96 << 10)
    monkeypatch.setattr(Device, "find", classmethod(lambda cls, what=None: old))
    with pytest.raises(UnsupportedError):
        tune([PRODUCT], "cpu", timer=last_is_fastest())
    assert not path.exists()

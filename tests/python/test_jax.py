"""tilesparse.jax against float64 dense references: products, derivatives, transformations, errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the GPU is PyTorch's, too

import numpy as np
import pytest
import torch
import torch.utils.dlpack

jax = pytest.importorskip("jax", reason="tilesparse.jax needs JAX")
jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp  # noqa: E402
import scipy.sparse  # noqa: E402
from jax.test_util import check_grads  # noqa: E402

import tilesparse  # noqa: E402
import tilesparse.jax as tsj  # noqa: E402
from tilesparse.errors import InvalidArgumentError, InvalidPatternError, InvalidTypeError  # noqa: E402

ROWS, COLS, BLOCK = 96, 256, (16, 32)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def platform(request: pytest.FixtureRequest) -> Any:
    try:
        devices = jax.local_devices(backend=request.param)
    except RuntimeError:
        pytest.skip("this JAX has no CUDA")
    with jax.default_device(devices[0]):
        yield request.param


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def dense_matrix(
    rng: np.random.Generator, shape: tuple[int, int] = (ROWS, COLS), block: tuple[int, int] = BLOCK
) -> np.ndarray:
    """A matrix with empty block rows and columns, and rows of unequal length."""
    kept = rng.random((-(-shape[0] // block[0]), -(-shape[1] // block[1]))) < 0.4
    kept[1], kept[:, 2], kept[0] = False, False, True
    kept[0, 2] = False
    return np.kron(kept, np.ones(block))[: shape[0], : shape[1]] * rng.standard_normal(shape)


def traced(pattern: tsj.Pattern) -> tsj.Pattern:
    arrays = jnp.asarray(pattern.indptr), jnp.asarray(pattern.indices)
    return tsj.Pattern(*arrays, shape=pattern.shape, block_shape=pattern.block_shape)


def kinds(dense: np.ndarray, block: tuple[int, int] = BLOCK) -> list[tsj.BlockSparse]:
    """The matrix with a static pattern, and with a traced one."""
    matrix = tsj.BlockSparse.from_dense(dense, tsj.Pattern.from_mask(dense, block_shape=block))
    return [matrix, tsj.BlockSparse(matrix.values, traced(matrix.pattern))]


def with_values(matrix: tsj.BlockSparse, values: Any) -> tsj.BlockSparse:
    return tsj.BlockSparse(values, matrix.pattern)


def close(result: Any, expected: Any, error: float = 1e-13) -> None:
    result, expected = np.asarray(result, np.float64), np.asarray(expected, np.float64)
    assert result.shape == expected.shape
    assert np.abs(result - expected).max(initial=0) <= error * max(1, np.abs(expected).max(initial=0))


@pytest.mark.parametrize(
    ("dtype", "block", "error"),
    [
        ("float64", (16, 16), 1e-13),
        ("float64", (3, 3), 1e-13),
        ("float32", (32, 64), 1e-5),
        ("float32", (7, 100), 1e-5),  # which reach out of the matrix
        ("bfloat16", (128, 32), 2**-7),
        ("float16", (64, 64), 2**-10),
    ],
)
def test_products(
    platform: str, rng: np.random.Generator, dtype: str, block: tuple[int, int], error: float
) -> None:
    def products(matrix: tsj.BlockSparse, x: Any, b: Any) -> Any:
        of_matrix = x @ matrix, x[1, 2] @ matrix, matrix.T @ x.swapaxes(1, 2), matrix @ b, matrix @ b[:, :3]
        return *of_matrix, matrix @ b[:, 0], b.T @ matrix.T, tsj.sddmm(x[0].T, b[:, :5].T, matrix.pattern)

    def rounded(*arrays: Any) -> list[Any]:
        return [np.asarray(jnp.asarray(array, dtype)).astype(np.float64) for array in arrays]

    dense = dense_matrix(rng, (384, 512), block)
    operands = rng.standard_normal((2, 5, 384)), rng.standard_normal((512, 40))
    W, x, b = rounded(dense, *operands)
    sampled = np.where(dense != 0, x[0].T @ b[:, :5].T, 0)
    exact = x @ W, x[1, 2] @ W, W.T @ x.swapaxes(1, 2), W @ b, W @ b[:, :3], W @ b[:, 0], b.T @ W.T, sampled
    for matrix in kinds(dense, block):
        matrix = with_values(matrix, matrix.values.astype(dtype))
        with jax.default_matmul_precision("highest"):
            found = jax.jit(products)(matrix, *(jnp.asarray(operand, dtype) for operand in operands))
        for result, expected in zip(found, exact, strict=True):
            result = result.to_dense() if isinstance(result, tsj.BlockSparse) else result
            assert result.dtype == dtype
            close(result.astype(np.float64), expected, error)
    close(operands[0] @ kinds(dense, block)[0], operands[0] @ dense)  # without jit


def test_int8(platform: str, rng: np.random.Generator) -> None:
    """Sums are exact, and rounded once; a JAX program multiplies them by scales."""

    def product(matrix: tsj.BlockSparse, x: Any, dtype: str) -> Any:
        return tsj.matmul(x, matrix.T, preferred_element_type=dtype)

    def equal(found: Any, exact: np.ndarray) -> None:
        np.testing.assert_array_equal(np.asarray(found), np.asarray(jnp.asarray(exact, found.dtype)))

    dense = dense_matrix(rng, (384, 512), (32, 64)).round().astype(np.int8)
    x = rng.integers(-128, 128, (3, 5, 512)).astype(np.int8)
    exact = x.astype(np.float64) @ dense.astype(np.float64).T
    for matrix in kinds(dense, (32, 64)):
        assert matrix.dtype == jnp.int8
        for dtype in ("float32", "bfloat16", "float16"):
            found = jax.jit(product, static_argnums=2)(matrix, x, dtype)
            assert found.dtype == dtype
            equal(found, exact)
        equal(jax.vmap(product, in_axes=(None, 0, None))(matrix, x, "float32"), exact)
        equal(tsj.matmul(matrix, x[0].T, preferred_element_type="float32"), exact[0].T)
        batch = jnp.stack((matrix.values, -matrix.values))
        found = jax.vmap(lambda values, m: product(with_values(m, values), x[0], "float32"), (0, None))(
            batch, matrix
        )
        equal(found, np.stack((exact[0], -exact[0])))
        equal(x[0].astype(np.float32) @ matrix.T, exact[0])  # of values in float32


@pytest.mark.parametrize(
    ("block", "product", "message"),
    [
        (
            32,
            lambda m, x: m @ x,
            r"preferred_element_type must be one of \['float32', 'float16', 'bfloat16'\] for int8",
        ),
        (32, lambda m, x: tsj.matmul(m, x, preferred_element_type="int32"), "for int8, got int32"),
        (32, lambda m, x: tsj.matmul(x.T, m, preferred_element_type="float32"), "W @ x or x @ W.T, got"),
        (8, lambda m, x: tsj.matmul(m, x, preferred_element_type="float32"), "sides of 16, 32, 64 or 128"),
        (
            32,
            lambda m, x: tsj.matmul(m, x.astype(np.float32), preferred_element_type="float64"),
            "for float32, got",
        ),
        (32, lambda m, x: m @ x.astype(np.int32), "a and b must have a dtype of .*'int8'.*, got int32"),
        (32, lambda m, x: tsj.sddmm(x, x.T, m.pattern), "a and b must have a dtype of .*, got int8"),
    ],
)
def test_int8_has_some_products(block: int, product: Any, message: str) -> None:
    matrix = kinds(np.ones((64, 64), np.int8), (block, block))[0]
    with pytest.raises(InvalidArgumentError, match=message):
        product(matrix, np.ones((64, 64), np.int8))


def test_tf32_is_that_of_jax(rng: np.random.Generator) -> None:
    assert [tsj._in_tf32(one) for one in (None, "highest", jax.lax.Precision.DEFAULT, "tensorfloat32")] == [
        True, False, True, True,
    ]  # fmt: skip
    with jax.default_matmul_precision("float32"):
        assert not tsj._in_tf32(None)
    with pytest.raises(InvalidArgumentError, match="precision must be one of"):
        tsj.matmul(np.ones((1, ROWS)), kinds(dense_matrix(rng))[0], precision="best")


@pytest.mark.gpu
def test_precision_decides_on_gpus(rng: np.random.Generator) -> None:
    dense = dense_matrix(rng, (512, 512), (64, 64)).astype(np.float32)
    matrix, x = kinds(dense, (64, 64))[0], rng.standard_normal((64, 512)).astype(np.float32)
    errors = {}
    for precision in ("highest", "default"):
        y = np.asarray(tsj.matmul(x, matrix, precision=precision), np.float64)
        errors[precision] = np.abs(y - x.astype(np.float64) @ dense.astype(np.float64)).max()
    assert errors["highest"] < 1e-4 < errors["default"] < 1e-1


@pytest.mark.parametrize(("kind", "block"), [("static", BLOCK), ("traced", BLOCK), ("static", (5, 7))])
def test_derivatives_of_both_orders_in_both_modes(
    platform: str, rng: np.random.Generator, kind: str, block: tuple[int, int]
) -> None:
    shape = (ROWS, COLS) if block == BLOCK else (12, 24)  # of blocks that reach out of it
    matrix = kinds(dense_matrix(rng, shape, block), block)[kind == "traced"]
    x, columns = rng.standard_normal((3, shape[0])), rng.standard_normal((shape[1], 4))
    for function, operands in (
        (lambda v, x: x @ with_values(matrix, v), (matrix.values, x)),
        (lambda v, x: with_values(matrix, v) @ x, (matrix.values, columns)),
        (lambda v, x: with_values(matrix, v).T @ x, (matrix.values, x.T)),
        (lambda v, x: with_values(matrix, v) @ x, (matrix.values, columns[:, 0])),
        (lambda a, b: tsj.sddmm(a, b, matrix.pattern).values, (x.T, columns[:, :3].T)),
        (lambda a, b: tsj.sddmm(a, b, matrix.pattern).values, (x[:2].T, columns[:, :2].T)),
    ):
        check_grads(function, operands, order=2, modes=["fwd", "rev"])


def test_gradients_of_a_matrix_are_a_matrix(platform: str, rng: np.random.Generator) -> None:
    dense = dense_matrix(rng)
    matrix, x = kinds(dense)[0], rng.standard_normal((3, ROWS))
    gradient = jax.jit(jax.grad(lambda matrix: ((x @ matrix) ** 2).sum()))(matrix)
    assert isinstance(gradient, tsj.BlockSparse) and gradient.pattern == matrix.pattern
    close(gradient.to_dense(), np.where(dense != 0, 2 * x.T @ (x @ dense), 0))


@pytest.mark.parametrize("kind", ["static", "traced"])
def test_vmap(platform: str, rng: np.random.Generator, kind: str) -> None:
    dense = dense_matrix(rng)
    matrix = kinds(dense)[kind == "traced"]
    x, columns = rng.standard_normal((3, 5, ROWS)), rng.standard_normal((COLS, 4, 3))
    values = rng.standard_normal((3, *matrix.values.shape))
    each = [np.asarray(with_values(matrix, one).to_dense()) for one in values]

    def product(v: Any, x: Any) -> Any:
        return x @ with_values(matrix, v)

    def mapped(x: Any, columns: Any, values: Any) -> Any:
        first = x[:, :4].swapaxes(1, 2), columns.transpose(2, 1, 0)
        return (
            jax.vmap(lambda x: x @ matrix)(x),
            jax.vmap(lambda x: matrix @ x, 2, 2)(columns),
            jax.vmap(lambda x: matrix @ x, 1)(columns[:, 0]),
            jax.vmap(product, (0, None))(values, x[0]),
            jax.vmap(product)(values, x),
            jax.vmap(jax.vmap(product, (0, None)), (None, 0))(values, x),
            jax.vmap(jax.vmap(product, (None, 0)), (0, None))(values, x),
            jax.vmap(lambda a, b: tsj.sddmm(a, b, matrix.pattern).to_dense())(*first),
        )

    exact = (
        x @ dense,
        np.einsum("nk,ktb->ntb", dense, columns),
        (dense @ columns[:, 0]).T,
        np.stack([x[0] @ one for one in each]),
        np.stack([one @ own for one, own in zip(x, each, strict=True)]),
        np.stack([np.stack([one @ own for own in each]) for one in x]),
        np.stack([x @ own for own in each]),
        np.where(dense != 0, x[:, :4].swapaxes(1, 2) @ columns.transpose(2, 1, 0), 0),
    )
    for result, expected in zip(jax.jit(mapped)(x, columns, values), exact, strict=True):
        close(result, expected)
    check_grads(jax.vmap(product, (0, None)), (values, x[0]), order=2, modes=["fwd", "rev"])
    check_grads(jax.vmap(product, (None, 0)), (matrix.values, x), order=2, modes=["fwd", "rev"])


def test_a_traced_pattern_changes_without_compilation(platform: str, rng: np.random.Generator) -> None:
    dense = dense_matrix(rng)
    x, counted = rng.standard_normal((5, ROWS)), list[int]()

    def counting(matrix: tsj.BlockSparse, x: Any) -> Any:
        counted.append(1)
        return x @ matrix

    product = jax.jit(counting)

    others = dense, np.roll(dense, BLOCK[1], 1), np.roll(dense, BLOCK[0], 0)
    for other in others:
        close(product(kinds(other)[1], x), x @ other)
    assert len(counted) == 1
    parts = [kinds(other)[1] for other in others]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
    close(jax.vmap(lambda matrix: x @ matrix)(stacked), np.stack([x @ other for other in others]))
    for other in others[:2]:  # of static ones each has a program
        close(product(kinds(other)[0], x), x @ other)
    assert len(counted) == 3


def test_what_is_empty(platform: str, rng: np.random.Generator) -> None:
    for matrix in kinds(np.zeros((ROWS, COLS))):
        close(np.ones((3, ROWS)) @ matrix, np.zeros((3, COLS)))
        close(jax.grad(lambda x, matrix=matrix: (matrix @ x).sum())(np.ones(COLS)), np.zeros(COLS))
    for matrix in kinds(dense_matrix(rng)):
        assert (np.ones((0, ROWS)) @ matrix).shape == (0, COLS)
        close(
            tsj.sddmm(np.ones((ROWS, 0)), np.ones((0, COLS)), matrix.pattern).to_dense(),
            np.zeros((ROWS, COLS)),
        )


def test_conjugate_gradients(platform: str, rng: np.random.Generator) -> None:
    root = dense_matrix(rng, (96, 96), (16, 16))
    dense = root @ root.T + 96 * np.eye(96)
    matrix = kinds(dense, (16, 16))[0]
    b = rng.standard_normal(96)
    solve = jax.jit(lambda matrix, b: jax.scipy.sparse.linalg.cg(lambda x: matrix @ x, b, tol=1e-12)[0])
    close(solve(matrix, b), np.linalg.solve(dense, b), 1e-9)
    of_b = jax.grad(lambda b: solve(matrix, b).sum())(b)  # through linear_transpose of the product
    close(of_b, np.linalg.solve(dense.T, np.ones(96)), 1e-9)


def test_scipy_matrices_are_sorted_and_summed(rng: np.random.Generator) -> None:
    data = rng.integers(-9, 9, (4, 2, 16, 16)).astype(np.float64).reshape(8, 16, 16)
    given = scipy.sparse.bsr_array((data, [3, 0, 3, 1, 2, 2, 1, 0], [0, 4, 4, 8]), shape=(48, 64))
    matrix = tsj.BlockSparse.from_scipy(given)
    np.testing.assert_array_equal(matrix.to_dense(), given.toarray())
    assert matrix.pattern.nnz == 6
    np.testing.assert_array_equal(
        tsj.BlockSparse.from_scipy(given.tocsr(), block_shape=16).to_dense(), given.toarray()
    )


def test_arrays_of_pytorch_come_and_go_without_copies(rng: np.random.Generator) -> None:
    pattern = tilesparse.BlockPattern.random((64, 64), block_shape=16, density=0.5)
    values = torch.randn(pattern.nnz, 16, 16, dtype=torch.float64)
    own = tsj.Pattern(pattern.crow_indices, pattern.col_indices, shape=(64, 64), block_shape=16)
    matrix = tsj.BlockSparse(values, own)
    assert matrix.values.unsafe_buffer_pointer() == values.data_ptr()
    x = torch.randn(3, 64, dtype=torch.float64)
    expected = tilesparse.functional.dds(x, values, pattern, transpose=False)
    torch.testing.assert_close(torch.utils.dlpack.from_dlpack(tsj.matmul(x, matrix)), expected)
    back = tilesparse.BlockSparseMatrix(matrix.values, pattern)
    assert back.values.data_ptr() == values.data_ptr()
    torch.testing.assert_close(jnp.from_dlpack(x) @ back, expected)


def test_the_benchmark_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import bench_jax

    monkeypatch.setattr(bench_jax, "SIZES", {"cpu": (32, 128, 128)})
    monkeypatch.setattr(bench_jax, "FILL", 1e-3)
    path, precision = tmp_path / "jax.json", torch.get_float32_matmul_precision()
    assert bench_jax.main(["--device", "cpu", "--rounds", "2", "--output", str(path)]) == 0
    torch.set_float32_matmul_precision(precision)
    for case in json.loads(path.read_text())["cases"]:
        assert all(result["us"] > 0 for result in case["results"])


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda W: np.ones((3, 95)) @ W, InvalidArgumentError, "a must have 96 elements on axis -1"),
        (lambda W: W @ np.ones((3, 5)), InvalidArgumentError, "b must have 256 elements on axis -2"),
        (lambda W: W @ np.float64(2), InvalidArgumentError, "b must have 256 elements"),
        (lambda W: W @ W, InvalidTypeError, "exactly one of a and b"),
        (lambda W: W @ np.ones(COLS, np.complex64), InvalidArgumentError, "must have a dtype of .* complex"),
        (lambda W: W @ "x", InvalidTypeError, "b must be an array, got str"),
        (lambda W: with_values(W, W.values[1:]), InvalidArgumentError, "values must have shape"),
        (
            lambda W: tsj.BlockSparse(W.values, cast(Any, None)),
            InvalidTypeError,
            "pattern must be a tilesparse.jax",
        ),
        (lambda W: tsj.sddmm(np.ones((96, 3)), W.values[0], W.pattern), InvalidArgumentError, "a and b must"),
        (lambda W: tsj.Pattern.from_mask(np.ones(32), block_shape=16), InvalidArgumentError, "mask must"),
        (lambda W: hash(traced(W.pattern)), InvalidTypeError, "traced pattern cannot be hashed"),
        (lambda W: tsj.BlockSparse.from_scipy(W.values), InvalidTypeError, "scipy.sparse"),
    ],
)
def test_errors(rng: np.random.Generator, call: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        call(kinds(dense_matrix(rng))[0])


@pytest.mark.parametrize(
    ("indptr", "indices", "shape", "block", "error", "text"),
    [
        ([0, 1], [0], (16, -1), 16, InvalidArgumentError, "in_features"),
        ([0, 1], [0], (16, 16), 1, InvalidArgumentError, "block_rows"),
        ([0, 1], [0], "ab", 16, InvalidArgumentError, "shape must be two"),
        ([0], [], (16, 16), 16, InvalidPatternError, "2 entries, got 1"),
        ([0, 1], [1], (16, 16), 16, InvalidPatternError, "col_idx"),
        ([0, 2], [1, 0], (16, 32), 16, InvalidPatternError, "col_idx"),
        ([0, 1], [0.5], (16, 16), 16, InvalidPatternError, "integers"),
        ([0, 1], [-1], (16, 16), 16, InvalidPatternError, "entries from 0"),
    ],
)
def test_errors_of_patterns(indptr: Any, indices: Any, shape: Any, block: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        tsj.Pattern(indptr, indices, shape=shape, block_shape=block)


def test_arrays_of_a_traced_pattern_that_lead_out_are_an_error_on_cpus(rng: np.random.Generator) -> None:
    matrix = kinds(dense_matrix(rng))[0]
    indptr = jnp.asarray(matrix.pattern.indptr)[::-1]
    wrong = tsj.Pattern(indptr, jnp.asarray(matrix.pattern.indices), shape=(ROWS, COLS), block_shape=BLOCK)
    with (
        jax.default_device(jax.devices("cpu")[0]),
        pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="row_ptr"),
    ):
        jax.block_until_ready(tsj.BlockSparse(matrix.values, wrong) @ np.ones(COLS))


_ALONE = """
import sys
sys.modules["torch"] = None
import numpy as np
import tilesparse.jax as tsj
dense = np.eye(32, dtype=np.float32)
matrix = tsj.BlockSparse.from_dense(dense, tsj.Pattern.from_mask(dense, block_shape=16))
assert (np.asarray(matrix @ np.arange(32, dtype=np.float32)) == np.arange(32)).all()
"""
_SHARDED = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax
import numpy as np
import tilesparse.jax as tsj
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_enable_x64", True)
rng = np.random.default_rng(0)
dense = np.kron(rng.random((6, 8)) < 0.4, np.ones((16, 32))) * rng.standard_normal((96, 256))
pattern = tsj.Pattern.from_mask(dense, block_shape=(16, 32))
matrix, x = tsj.BlockSparse.from_dense(dense, pattern), rng.standard_normal((8, 96))
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
P = jax.sharding.PartitionSpec
x = jax.device_put(x, jax.sharding.NamedSharding(mesh, P("data")))
values = jax.device_put(matrix.values, jax.sharding.NamedSharding(mesh, P()))
for check in (True, False):
    product = jax.jit(jax.shard_map(
        lambda v, x: x @ tsj.BlockSparse(v, pattern), mesh=mesh, check_vma=check,
        in_specs=(P(), P("data")), out_specs=P("data"),
    ))
    np.testing.assert_allclose(product(values, x), np.asarray(x) @ dense)
    gradient = jax.grad(lambda v: (product(v, x) ** 2).sum())(values)
    expected = np.where(dense != 0, 2 * np.asarray(x).T @ (np.asarray(x) @ dense), 0)
    np.testing.assert_allclose(tsj.BlockSparse(gradient, pattern).to_dense(), expected)
"""


@pytest.mark.parametrize("program", [_ALONE, _SHARDED], ids=["without torch", "shard_map"])
def test_in_a_process_of_its_own(program: str) -> None:
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr

"""Products of small blocks: BlockSparseMatrix against scipy on the CPU, and against cuSPARSE (CuPy) on a GPU.

    python benchmarks/bench_small_blocks.py --device cpu --output small_blocks.json
    python benchmarks/bench_small_blocks.py --output small_blocks.json

The matrix is that of a grid of three dimensions whose points are coupled with their 26 neighbours and
themselves: 27 blocks a row. On a GPU times are medians with a cold L2 cache, and the others are cuSPARSE's
CSR and BSR. On the CPU they are the least of some calls.
"""

from __future__ import annotations

import argparse
import operator
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import scipy.sparse
import torch
from harness import Timer, Unavailable, parsed, positive, recording, result_parser, run_benchmark, warm_up
from torch import Tensor

from tilesparse import BlockPattern, BlockSparseMatrix

DTYPES = {"float64": torch.float64, "float32": torch.float32}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exit status 1 if a result was wrong or the GPU gave up."""
    parser = result_parser(__doc__, "small_blocks.json", device=True, repetitions=5)
    parser.add_argument("--rows", type=positive, default=1 << 20, help="of the matrix, about (%(default)s)")
    parser.add_argument("--blocks", type=positive, nargs="+", default=(3, 4, 6, 8), help="(%(default)s)")
    parser.add_argument("--columns", type=positive, nargs="+", default=(1, 8, 64), help="(%(default)s)")
    return run_benchmark(parsed(parser, argv), _run)


def _run(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    if arguments.device == "cuda":
        warm_up()
    for block in arguments.blocks:
        pattern = neighbours(arguments.rows, block)
        for name, dtype in DTYPES.items():
            seeded = torch.Generator().manual_seed(0)
            matrix = BlockSparseMatrix.randn(pattern, dtype=dtype, generator=seeded)
            if arguments.device == "cuda":
                matrix = BlockSparseMatrix(matrix.values.cuda(), pattern.to("cuda"))
            others = _of_scipy(matrix) if arguments.device == "cpu" else _of_cusparse(matrix)
            for columns in arguments.columns:
                case: dict[str, Any] = {"block": block, "rows": pattern.shape[0], "blocks": pattern.nnz}
                case |= {"dtype": name, "columns": columns, "device": arguments.device, "results": []}
                document["cases"].append(case)
                with recording(case, f"{block} {name} {columns}"):
                    _measure(case, matrix, others, columns, arguments)


def neighbours(rows: int, block: int) -> BlockPattern:
    """Return the pattern of a periodic grid with about so many rows, coupled with all neighbours."""
    side = round((rows / block) ** (1 / 3))
    places = torch.arange(side**3)
    x, y, z = places % side, places // side % side, places // side**2
    steps = torch.cartesian_prod(*[torch.arange(-1, 2)] * 3)
    columns = [
        (x + i) % side + (y + j) % side * side + (z + k) % side * side**2 for k, j, i in steps.tolist()
    ]
    found = torch.stack(columns, 1).sort(1).values
    crow = torch.arange(side**3 + 1) * len(steps)
    return BlockPattern(crow, found.flatten(), shape=(side**3 * block,) * 2, block_shape=block)


Product = Callable[[Tensor], Callable[[], Any]]


def _of_scipy(matrix: BlockSparseMatrix) -> dict[str, Product]:
    pattern = matrix.pattern
    arrays = matrix.values.numpy(), pattern.col_indices.numpy(), pattern.crow_indices.numpy()
    bsr = scipy.sparse.bsr_array(arrays, shape=matrix.shape)
    csr = scipy.sparse.csr_array(bsr)
    return {
        "scipy BSR": lambda x: partial(operator.matmul, bsr, x.numpy()),
        "scipy CSR": lambda x: partial(operator.matmul, csr, x.numpy()),
    }


def _of_cusparse(matrix: BlockSparseMatrix) -> dict[str, Product]:
    import cupy
    import cupyx.cusparse
    import cupyx.scipy.sparse

    csr = cupyx.scipy.sparse.csr_matrix(
        tuple(map(cupy.from_dlpack, elements_by_row(matrix))), shape=matrix.shape
    )

    def of_csr(x: Tensor) -> Callable[[], Any]:
        dense = cupy.asfortranarray(cupy.from_dlpack(x)) if x.dim() == 2 else cupy.from_dlpack(x)
        result = cupyx.cusparse.spmm if x.dim() == 2 else cupyx.cusparse.spmv
        return lambda: torch.utils.dlpack.from_dlpack(result(csr, dense))

    def of_bsr(x: Tensor) -> Callable[[], Any]:
        weight = matrix.to_bsr()
        dense = x[:, None] if x.dim() == 1 else x
        if x.dtype not in (torch.float32, torch.float64):
            raise Unavailable("PyTorch's BSR has no other dtypes")
        return lambda: weight @ dense

    return {"cuSPARSE CSR (CuPy)": of_csr, "cuSPARSE BSR (PyTorch)": of_bsr}


def elements_by_row(matrix: BlockSparseMatrix) -> tuple[Tensor, Tensor, Tensor]:
    """Return the arrays of CSR, of a pattern with equal rows whose values lie in their order."""
    (bn, bk), rows = matrix.block_shape, matrix.pattern.grid[0]
    each = matrix.pattern.nnz // rows
    within = torch.arange(bk, dtype=torch.int32, device=matrix.device)
    columns = matrix.pattern.col_indices.view(rows, 1, each, 1) * bk + within
    values = matrix.values.view(rows, each, bn, bk).transpose(1, 2)
    starts = torch.arange(rows * bn + 1, dtype=torch.int32, device=matrix.device) * (each * bk)
    return values.reshape(-1), columns.expand(rows, bn, each, bk).reshape(-1), starts


def _measure(
    case: dict[str, Any],
    matrix: BlockSparseMatrix,
    others: dict[str, Product],
    columns: int,
    arguments: argparse.Namespace,
) -> None:
    size = (matrix.shape[1],) if columns == 1 else (matrix.shape[1], columns)
    x = torch.randn(size, dtype=matrix.dtype, generator=torch.Generator().manual_seed(1)).to(matrix.device)
    expected = None
    for name, product in (*others.items(), ("tilesparse", lambda x: lambda: matrix @ x)):
        result: dict[str, Any] = {"contender": name}
        case["results"].append(result)
        with recording(result, name):
            call = product(x)
            given = torch.as_tensor(call()).to(x.device).reshape(matrix.shape[0], -1)
            if expected is None:
                expected = given.double()
            error = float((given - expected).abs().max() / expected.abs().max())
            result |= {
                "t_us": round(Timer(arguments.device).microseconds(call, arguments.repetitions), 2),
                "error": error,
            }
            result["wrong"] = error > (1e-12 if x.dtype == torch.float64 else 1e-4)
            what = f"{case['block']} {case['dtype']} {columns:3} {name:24}"
            print(f"  {what} {result['t_us']:12.1f} us", flush=True)


if __name__ == "__main__":
    sys.exit(main())

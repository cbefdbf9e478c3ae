"""Shared by the tests: adversarial patterns, dense references and error bounds."""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import tilesparse
from tilesparse import BlockPattern, storage
from tilesparse._checks import PACKED
from tilesparse._runtime import launch
from tilesparse._runtime.device import ACTIVATIONS, DDS_NN, DDS_NT, SDD_TN
from tilesparse._runtime.launch import write_sdd
from tilesparse._runtime.pattern_cache import prepared

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
DEVICE_DTYPES = [
    *(pytest.param("cpu", dtype, id=f"cpu-{dtype}".replace("torch.", "")) for dtype in DTYPES),
    *(
        pytest.param("cuda", dtype, marks=pytest.mark.gpu, id=f"cuda-{dtype}".replace("torch.", ""))
        for dtype in DTYPES
    ),
]

LAYOUTS = list(product((0, 1), (0, 1)))  # of x and y: row-major and column-major
# The operand that each product writes.
OUTPUTS = {DDS_NT: "y", DDS_NN: "x", SDD_TN: "values"}
# Options of each product besides multiplying.
OPTIONS: dict[int, list[dict[str, Any]]] = {
    DDS_NT: [
        {"bias": bias, "activation": name, "residual": residual, "gated": gated}
        for bias, name, (residual, gated) in product(
            (False, True), ACTIVATIONS, ((False, False), (True, True), (True, False))
        )
    ],
    DDS_NN: [{}],
    SDD_TN: [
        {"accumulate": False},
        {"accumulate": True},
        {"accumulate": False, "of_bias": "stored"},
        {"accumulate": True, "of_bias": "added in float32"},
    ],
}
FUNCTIONS = {
    "none": lambda t: t,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
}

PATTERNS = {
    "empty": lambda r, c: torch.zeros(r.shape[0], c.shape[1], dtype=torch.bool),
    "full": lambda r, c: (r >= 0) & (c >= 0),
    "first block": lambda r, c: (r == 0) & (c == 0),
    "last block": lambda r, c: (r == r.max()) & (c == c.max()),
    "empty rows and columns": lambda r, c: (r % 2 == 1) & (c % 3 == 1),
    "one full row": lambda r, c: (r == r.max() // 2) & (c >= 0),
    "one full column": lambda r, c: (r >= 0) & (c == c.max() // 2),
    "diagonal": lambda r, c: r % c.shape[1] == c,
    "banded": lambda r, c: (r - c).abs() <= 1,
    "power-law rows": lambda r, c: c < torch.div(c.shape[1] * 2, r + 1, rounding_mode="floor"),
    "random 10%": lambda r, c: _uniform(r, c) < 0.1,
    "random 50%": lambda r, c: _uniform(r, c) < 0.5,
}

# Sizes of a small model of Transformers.
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 40,
}


def _uniform(r: Tensor, c: Tensor) -> Tensor:
    return torch.rand(r.shape[0], c.shape[1], generator=seeded(3))


class Recorder(TorchDispatchMode):
    """Notes the operators of this package that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "tilesparse":
            names = (argument.name for argument in func._schema.arguments)
            given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            in_8_bits = " in 8 bits" if given.get("fast") is not None else ""
            self.seen.add(func.overloadpacket.__name__ + in_8_bits)
        return func(*args, **(kwargs or {}))


def seeded(seed: int = 0) -> torch.Generator:
    """A CPU generator with a fixed seed."""
    return torch.Generator().manual_seed(seed)


def make_pattern(name: str, grid: tuple[int, int], block_shape: tuple[int, int]) -> BlockPattern:
    """One of PATTERNS over a grid of blocks, its slots shuffled."""
    mask = PATTERNS[name](torch.arange(grid[0])[:, None], torch.arange(grid[1])[None])
    return shuffled(BlockPattern.from_block_mask(mask, block_shape=block_shape))


def shuffled(pattern: BlockPattern, seed: int = 1) -> BlockPattern:
    """The same blocks in random slots."""
    slot = torch.randperm(pattern.nnz, generator=seeded(seed))
    return BlockPattern(
        pattern.crow_indices,
        pattern.col_indices,
        shape=pattern.shape,
        block_shape=pattern.block_shape,
        slot=slot,
    )


def randn(*size: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Tensor:
    """Repeatable normal numbers, the same on every device."""
    return torch.randn(size, generator=seeded(seed), dtype=torch.float64).to(device, dtype)


def random_values(pattern: BlockPattern, *, dtype: torch.dtype, device: str = "cpu", seed: int = 7) -> Tensor:
    """Values [nnz, bn, bk] for a pattern."""
    return randn(pattern.nnz, *pattern.block_shape, dtype=dtype, device=device, seed=seed)


class Storage(NamedTuple):
    """How values are stored that are not plain."""

    compressed: bool
    quantized: torch.dtype | None = None
    row_scales: bool = False


STORAGES = {
    "2:4": Storage(True),
    "int8 by row": Storage(False, torch.int8, True),
    "int8 by block": Storage(False, torch.int8),
    "float8 by row": Storage(False, torch.float8_e4m3fn, True),
    "float8 by block": Storage(False, torch.float8_e4m3fn),
    "int4 by row": Storage(False, PACKED, True),
    "int4 by block": Storage(False, PACKED),
    "2:4 int8 by row": Storage(True, torch.int8, True),
    "2:4 float8 by block": Storage(True, torch.float8_e4m3fn),
}
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a number


class Stored(NamedTuple):
    """Values, what their storage has besides, and what products multiply by."""

    values: Tensor
    metadata: Tensor | None
    scales: Tensor | None
    plain: Tensor

    @property
    def extras(self) -> dict[str, Any]:
        return {"metadata": self.metadata, "scales": self.scales}

    def map(self, function: Callable[[Tensor], Tensor]) -> Stored:
        """The same with what a function makes of each tensor."""
        return Stored(*(None if tensor is None else function(tensor) for tensor in self))  # type: ignore[arg-type]


def bytes_of(size: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """The bits, as int8, of random numbers of 8 bits, or two of 4: all but NaN."""
    values = torch.randint(-128, 128, size, generator=seeded(seed), dtype=torch.int8)
    if dtype == torch.float8_e4m3fn:
        values[values.bitwise_and(127) == 127] = 0  # NaN
    return values


def stored_values(
    pattern: BlockPattern, form: Storage, *, dtype: torch.dtype, device: str = "cpu", seed: int = 7
) -> Stored:
    """Random values in a storage: all of 8 bits but NaN, and of 2:4 also groups with fewer than two."""
    size = (pattern.nnz, *pattern.block_shape)
    values, metadata, scales = random_values(pattern, dtype=dtype, device=device, seed=seed), None, None
    if form.quantized is not None:
        columns = size[2] // 2 if form.quantized == PACKED else size[2]
        values = bytes_of((*size[:2], columns), form.quantized, seed).view(form.quantized).to(device)
        scales = torch.rand(size[: 1 + form.row_scales], generator=seeded(seed + 1)) / 64 - 1 / 128
        if form.quantized == PACKED:  # weights that 16 bits have exactly: kernels do not round them
            scales = (scales * 1024).round() / 1024
        else:  # likewise some kernels
            scales = scales.sign() * scales.abs().log2().floor().clamp(-10).exp2()
        scales = scales.to(device)
    if form.compressed:
        values, metadata = storage.compress(values, random_mask(size, seed + 2).to(device))
    return Stored(values, metadata, scales, expanded_by_definition(values, metadata, scales, dtype))


def random_mask(size: tuple[int, ...], seed: int = 9) -> Tensor:
    """A mask of 2:4, also with groups of fewer than two."""
    scores = torch.rand(size, generator=seeded(seed))
    return storage.two_of_four(scores) & (scores > 0.2)


def expanded_by_definition(
    values: Tensor, metadata: Tensor | None, scales: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Plain values [nnz, bn, bk] as tilesparse.h describes the storages."""
    if metadata is not None:
        bits = values.view(INTEGERS[values.itemsize])
        nnz, bn, half = values.shape
        plain = torch.zeros(nnz, bn, 2 * half, dtype=bits.dtype, device=bits.device)
        values = plain.scatter_(2, kept_columns(metadata, bn), bits).view(values.dtype)
    if scales is None:
        return values
    if values.dtype == PACKED:
        both = torch.stack((values & 15, values >> 4), -1).flatten(2).to(torch.int8)
        values = torch.where(both < 8, both, both - 16)
    return (values.float() * scales.view(*scales.shape, *(1,) * (3 - scales.dim()))).to(dtype)


def kept_columns(metadata: Tensor, rows: int) -> Tensor:
    """[nnz, rows, columns / 2]: where in its row of a block each value was that 2:4 has kept."""
    words = metadata.view(*metadata.shape[:2], rows // 16, 8, 2).long() & 0xFFFFFFFF
    row = torch.arange(rows, device=metadata.device)[:, None]
    kept = torch.arange(16 * words.shape[1], device=metadata.device)[None]
    group = kept // 2 * 4  # its first column
    halves = words[:, group // 32, row // 16, row % 8, group % 32 // 16] >> (row % 16 // 8 * 16)
    return group + (halves >> (group % 16 + kept % 2 * 2) & 3)


def dense_weight(values: Tensor, pattern: BlockPattern) -> Tensor:
    """W [out_features, in_features] in float64 on the host, block by block from the definition of BSR."""
    bn, bk = pattern.block_shape
    weight = torch.zeros(pattern.shape, dtype=torch.float64)
    row_ptr, col_idx, slot = (
        pattern.crow_indices.tolist(),
        pattern.col_indices.tolist(),
        pattern.slot.tolist(),
    )
    for row in range(len(row_ptr) - 1):
        for entry in range(row_ptr[row], row_ptr[row + 1]):
            col = col_idx[entry]
            weight[row * bn : (row + 1) * bn, col * bk : (col + 1) * bk] = values[slot[entry]].detach().cpu()
    return weight


def blocks_of_dense(dense: Tensor, pattern: BlockPattern) -> Tensor:
    """[nnz, bn, bk] the pattern's blocks of a dense host matrix, in slot order."""
    bn, bk = pattern.block_shape
    blocks = dense.new_zeros(pattern.nnz, bn, bk)
    for slot, (row, col) in enumerate(zip(*map(Tensor.tolist, pattern.block_indices()), strict=True)):
        blocks[slot] = dense[row * bn : (row + 1) * bn, col * bk : (col + 1) * bk]
    return blocks


def rounding_unit(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to a dtype."""
    return torch.finfo(dtype).eps / 2


def sums_unit(dtype: torch.dtype) -> float:
    """That of the dtype in which products of a dtype are summed."""
    return rounding_unit(torch.float64 if dtype == torch.float64 else torch.float32)


def product_with_bound(
    left: Tensor, right: Tensor, dtype: torch.dtype, added: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(expected, tolerance) of left @ right (+ added) as a correct implementation gives it in a dtype.

    A sum of K products accumulated in any order in float32 (float64 for float64) errs by at most
    K u Σ|l r|, u being that dtype's rounding unit (Higham, "Accuracy and Stability of Numerical
    Algorithms", 3.1); the result is then rounded to its own dtype. K + 12 covers the added term and
    a float32 product in three TF32 terms: 2 u for each split, 4 u for the term left out, 3 u for
    cutting off what is added.

    Args:
        left, right, added: operands as given to the product; the reference is float64 on the host.
    """
    left, right = left.detach().cpu().double(), right.detach().cpu().double()
    expected, magnitude = left @ right, left.abs() @ right.abs()
    if added is not None:
        added = added.detach().cpu().double()
        expected, magnitude = expected + added, magnitude + added.abs()
    tolerance = (left.shape[-1] + 12) * sums_unit(dtype) * magnitude
    return expected, rounded(expected, tolerance, dtype)


def rounded(expected: Tensor, tolerance: Tensor, dtype: torch.dtype) -> Tensor:
    """The tolerance after the result has been rounded to a dtype, subnormal numbers included."""
    info = torch.finfo(dtype)
    return tolerance + rounding_unit(dtype) * (expected.abs() + tolerance + info.smallest_normal)


def reference_of_bias(
    dtype: torch.dtype, y: Tensor, before: Tensor | None, result: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The sums over tokens of y and what was there before, in float64, and how far off they may be."""
    terms = y.double() if before is None else torch.cat([y.double(), before.double()])
    error = (len(terms) + 4) * sums_unit(dtype) * terms.abs().sum(0)
    return terms.sum(0), rounded(terms.sum(0), error, result)


def assert_within(actual: Tensor, expected: Tensor, tolerance: Tensor) -> None:
    """Asserts |actual - expected| <= tolerance, elementwise."""
    assert actual.shape == expected.shape
    error = (actual.detach().cpu().double() - expected).abs()
    assert not error.isnan().any(), "the result holds NaN"
    excess = (error - tolerance).amax() if error.numel() else torch.zeros(())
    assert excess <= 0, f"the error exceeds its bound by {excess:.3g}; largest error {error.amax():.3g}"


def assert_product_close(actual: Tensor, left: Tensor, right: Tensor, added: Tensor | None = None) -> None:
    """Asserts actual = left @ right (+ added) within the bound of `product_with_bound`."""
    assert_within(actual, *product_with_bound(left, right, actual.dtype, added))


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All that training has left behind."""
    states = [state for of_one in optimizer.state.values() for state in of_one.values()]
    return [*model.state_dict().values(), *(state for state in states if isinstance(state, Tensor))]


def same(these: list[Tensor], those: list[Tensor]) -> bool:
    return len(these) == len(those) and all(map(torch.equal, these, those))


def here() -> str:
    """The device of this process, among several."""
    return "cpu" if dist.get_backend() == "gloo" else f"cuda:{dist.get_rank()}"


def whole(tensor: Tensor) -> Tensor:
    """A tensor without gradient, put together where it is sharded."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def common_folder() -> Path:
    """A folder that all processes know."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    return Path(str(folder[0]))


def spawn(function: Callable[..., None], arguments: tuple[Any, ...], processes: int) -> None:
    """Run function(rank, *arguments) in several processes, forked from one that has imported PyTorch."""
    imported = ["fsdp", "tensor.parallel", "checkpoint.state_dict"]
    multiprocessing.set_forkserver_preload(
        ["tilesparse", "pytest", *(f"torch.distributed.{m}" for m in imported)]
    )
    torch.multiprocessing.start_processes(function, arguments, processes, start_method="forkserver")


_FORKS = """
import __main__, json, os, sys, torch
for line in sys.stdin:
    program, arguments, folder = json.loads(line)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    for number in range(3):
        os.dup2(os.open(f"{folder}/{number}", os.O_RDWR | os.O_CREAT), number)
    sys.argv[1:] = arguments
    exec(program, vars(__main__))
    sys.exit()
"""


@cache
def _process_that_forks() -> subprocess.Popen[str]:
    """With PyTorch imported, which takes longer than what most programs do with it."""
    folders = Path(tilesparse.__file__).parents[1], Path(__file__).parent, os.environ.get("PYTHONPATH", "")
    env, pipe = os.environ | {"PYTHONPATH": ":".join(map(str, folders))}, subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", _FORKS], stdin=pipe, stdout=pipe, env=env, text=True)


def run_anew(program: str, *arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a program in a new process, which has imported nothing but PyTorch and finds the tests' modules."""
    process = _process_that_forks()
    assert process.stdin is not None and process.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        process.stdin.write(json.dumps([program, [str(each) for each in arguments], folder]) + "\n")
        process.stdin.flush()
        status = int(process.stdout.readline())
        output, errors = (Path(folder, number).read_text() for number in "12")
    done = subprocess.CompletedProcess([program], status, output, errors)
    if check and status:
        print(errors)  # pytest shows it where a test fails
        done.check_returncode()
    return done


# Backends and numbers of processes; starting them takes longer than most scenes, so that all are in one test.
TWO = [("gloo", 2), pytest.param("nccl", 2, marks=pytest.mark.gpu)]
FOUR = [("gloo", 4), pytest.param("nccl", 4, marks=pytest.mark.gpu)]
Scenes = Iterable[Callable[[int], None]]


def play(scenes: Scenes, backend: str, size: int, folder: Path) -> None:
    """Run scenes in several processes, one after the other; each is given its rank."""
    if backend == "nccl" and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    spawn(_play, (tuple(scenes), size, backend, f"{folder}/rendezvous"), size)


def _play(rank: int, scenes: Scenes, size: int, backend: str, rendezvous: str) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=120)
    dist.init_process_group(backend, f"file://{rendezvous}", timeout, world_size=size, rank=rank)
    if backend != "gloo":
        torch.cuda.set_device(rank)
    try:
        for scene in scenes:
            try:
                scene(rank)
            except Exception as error:
                raise AssertionError(f"{scene.__name__}, rank {rank}: {error!r}") from error
            dist.barrier()
    finally:
        dist.destroy_process_group()
    # Threads of Gloo may still be letting go of tensors, and abort where they find the interpreter gone.
    os._exit(0)


def written_sdd(y: Tensor, x: Tensor, pattern: BlockPattern, out: Tensor, accumulate: bool = False) -> Tensor:
    """Write or add yᵀ x on a pattern to ``out``, as gradients of ``main_grad`` are."""
    write_sdd(y, x, out, prepared(pattern.index_on(x.device)), accumulate)
    return out


def use_kernel(name: str) -> AbstractContextManager[None]:
    """Run every product in this context on the named kernel, or raise."""
    return launch.ask_for([kernel.name for kernel in launch.known_kernels()].index(name) + 1)

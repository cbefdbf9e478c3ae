"""Cache of a pattern: plans, copies, resolved calls; and writes that PyTorch does not count."""

from __future__ import annotations

import ctypes
import math
import weakref
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from itertools import chain, pairwise
from time import monotonic, sleep
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _C
from .._checks import Index, check_index, grid_of
from ..errors import InvalidPatternError, PatternChangedError
from .device import KNOWN, TENSORS, Run, allocate, exclusive, on, refuse_capture, run_on, scratch
from .layout import Form, allocation
from .torch_private import version


class Prepacked:
    """A prepacked copy of values, in the order in which a kernel multiplies them."""

    def __init__(self, product: _C.Product, memory: Tensor, plan_key: int) -> None:
        self.product, self.memory, self.plan_key = product, memory, plan_key
        self._of: tuple[int, ...] = ()
        self._values: Callable[[], Tensor | None] = lambda: None

    def follow(self, values: Tensor, generation: int, stream: int) -> None:
        """Pack these values, unless they were prepacked last and have not changed since."""
        if not values.is_inference():  # where changes are counted
            of = id(values), values.data_ptr(), values._version, generation
            if self._of == of and self._values() is values:
                return
            self._of, self._values = of, weakref.ref(values)
        self.product.prepack(values.data_ptr(), self.memory.data_ptr(), self.memory.numel(), stream)


class Turned:
    """Values as products read them that skip neurons, see ``TS_SKIP_INPUTS``: those of a neuron together.

    They are written again in the same memory, which graphs read, on a change.
    """

    def __init__(self) -> None:
        self._of: tuple[int, ...] = ()
        self._values: Callable[[], Tensor | None] = lambda: None
        self._made: Tensor | None = None

    def get(self, values: Tensor) -> Tensor | None:
        """Return what was made of these values, unless they have changed."""
        if self._values() is values and self._of == (values.data_ptr(), values._version):
            return self._made
        return None

    def follow(self, values: Tensor, columns: Sequence[Tensor], streams: Streams) -> Tensor:
        """Return those of values whose changes PyTorch counts, of blocks by ``columns``."""
        kept = self.get(values)
        if kept is not None:
            return kept
        of = values.data_ptr(), values._version
        with torch.inference_mode(False):
            made = (
                values.detach().transpose(1, 2).contiguous() if values.is_cuda else _lines(values, *columns)
            )
        if values.is_cuda and torch.cuda.is_current_stream_capturing():
            return made  # which belongs to the graph
        before = self._made
        if values.is_cuda and before is not None and (before.shape, before.dtype) == (made.shape, made.dtype):
            streams.wait_to_write()
            made = before.copy_(made)
        streams.record()
        self._made, self._of, self._values = made, of, weakref.ref(values)
        return made


@torch.no_grad()
def _lines(values: Tensor, col_ptr: Tensor, row_idx: Tensor, col_slot: Tensor) -> Tensor:
    """Return values of the shape [nnz, bk, bn], in which each column of blocks is [bk, blocks, bn]."""
    made = values.new_empty(values.mT.shape)
    rows, columns = values.shape[1:]
    for start, end in pairwise(col_ptr.tolist()):
        blocks = values[col_slot[start:end].long()].permute(2, 0, 1)
        made[start:end].view(columns, end - start, rows).copy_(blocks)
    return made


class Derived:
    """A tensor made from others, as dense blocks from stored values; made anew once these have changed."""

    def __init__(self) -> None:
        self._kept: tuple[Hashable, list[weakref.ref[Tensor]], Tensor] | None = None

    def follow(self, make: Callable[..., Tensor], *sources: Any) -> Tensor:
        """Return ``make(*sources)``, kept from the last call if no tensor among the sources has changed."""
        tensors = [source for source in sources if isinstance(source, Tensor)]
        if any(tensor.is_inference() for tensor in tensors):  # whose changes are not counted
            return make(*sources)
        state = tuple(
            (source.data_ptr(), source._version) if isinstance(source, Tensor) else source
            for source in sources
        )
        kept = self._kept
        if kept is not None and kept[0] == state and [id(one()) for one in kept[1]] == list(map(id, tensors)):
            return kept[2]
        with torch.inference_mode(False):  # autograd may keep it
            made = make(*sources)
        self._kept = state, [weakref.ref(tensor) for tensor in tensors], made
        return made


class Call(NamedTuple):
    """A resolved product whose operands were checked."""

    run: Run
    workspace: int  # elements
    form: Form  # of the result
    prepacked: Prepacked | None = None


def validate(index: Index) -> None:
    """Raise InvalidPatternError unless the tensors hold a pattern; the host waits for tensors on a GPU."""
    host = [tensor.cpu() for tensor in index[:3]]
    addresses = (tensor.data_ptr() for tensor in host)
    try:
        _C.pattern_validate(_C.Pattern(*index.block_shape, *index.shape, len(host[1]), *addresses))
    except InvalidPatternError as error:
        text = str(error).replace("row_ptr", "crow_indices").replace("col_idx", "col_indices")
        raise InvalidPatternError(text) from None


def block_indices(index: Index) -> tuple[Tensor, Tensor]:
    """Return (rows, cols), each [nnz] int64: the block row and column of every slot."""
    crow, col, slot = index[:3]
    nnz, rows = col.shape[0], crow.shape[0] - 1
    every_row = torch.arange(rows, device=crow.device)
    by_entry = torch.repeat_interleave(every_row, crow.diff(), output_size=nnz)
    places = slot.long()
    found = torch.empty(2, nnz, dtype=torch.int64, device=crow.device)
    found[0, places], found[1, places] = by_entry, col.long()
    return found[0], found[1]


def blocks_of(matrix: Tensor, block_shape: tuple[int, int]) -> Tensor:
    """View [out, in] as [R, C, bn, bk]; a copy with zeros where blocks reach out of the matrix."""
    (bn, bk), (rows, cols) = block_shape, matrix.shape
    if rows % bn or cols % bk:
        matrix = torch.nn.functional.pad(matrix, (0, -cols % bk, 0, -rows % bn))
    return matrix.reshape(-(-rows // bn), bn, -(-cols // bk), bk).transpose(1, 2)


def placed(
    values: Tensor, places: tuple[Tensor, Tensor], shape: tuple[int, int], block_shape: tuple[int, int]
) -> Tensor:
    """Return the dense matrix with blocks [nnz, bn, bk] at these places, and zeros elsewhere."""
    (rows, cols), (bn, bk) = shape, block_shape
    dense = values.new_zeros(rows + -rows % bn, cols + -cols % bk)
    # Written through a view: building the blocks and then transposing them takes twice as long.
    blocks_of(dense, block_shape)[places] = values
    return dense[:rows, :cols].contiguous()


class Streams:
    """The order of writes to what is kept on a CUDA device, and of the streams that read it.

    On the CPU nothing is recorded, so there is nothing to wait for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._readers: dict[int, torch.cuda.Stream] = {}
        self._arrivals: list[torch.cuda.Event] = []  # of all that is written

    def record(self) -> None:
        """Note that the current stream was asked to write something."""
        if self._device.type == "cuda":
            self._arrivals.append(torch.cuda.current_stream(self._device).record_event())

    def record_all(self) -> None:
        """Note that the current stream was asked to write everything anew."""
        self._arrivals.clear()
        self.record()

    def wait(self) -> None:
        """Have the current stream wait for all that was written.

        A graph cannot wait for work outside of it, but that was asked for before its capture began, and so
        before any replay.
        """
        if self._arrivals and not torch.cuda.is_current_stream_capturing():
            for event in self._arrivals:
                torch.cuda.current_stream(self._device).wait_event(event)

    def read(self, tensors: Iterator[Tensor]) -> None:
        """Make tensors safe to read on the current stream, also after their owner is gone."""
        if self._device.type == "cpu":
            return
        stream = torch.cuda.current_stream(self._device)
        self.wait()
        self._readers[stream.cuda_stream] = stream
        for tensor in tensors:
            tensor.record_stream(stream)

    def others_read(self) -> bool:
        """Return True if another stream than the current one reads."""
        return bool(self._readers.keys() - {torch.cuda.current_stream(self._device).cuda_stream})

    def wait_to_write(self) -> None:
        """Have the current stream wait until no other stream writes or reads any more."""
        self.wait()
        current = torch.cuda.current_stream(self._device)
        for stream in self._readers.values():
            if stream != current:
                current.wait_stream(stream)


class Plan(NamedTuple):
    memory: Tensor
    kernel: int  # one of the kernels that walk it


class Plans:
    """The plans that were asked for so far."""

    def __init__(self, descriptor: _C.Pattern, device: torch.device, streams: Streams) -> None:
        self._descriptor, self._device, self._streams = descriptor, device, streams
        self._plans: dict[tuple[int, int], Plan] = {}

    @torch.inference_mode(False)
    def get(self, op: int, kernel: int, plan_id: int) -> Tensor:
        """Return the plan of kernels with that `plan` in the C interface, on the current device."""
        plan = self._plans.get((op, plan_id))
        if plan is None:
            (memory,) = allocate(_C.plan_device_size(self._descriptor, kernel, op)[:1], self._device)
            plan = Plan(memory, kernel)
            self._streams.wait()
            self._build(op, plan)
            self._streams.record()
            self._plans[op, plan_id] = plan
        return plan.memory

    def rebuild(self) -> None:
        """Write all plans anew in the same memory."""
        for (op, _), plan in self._plans.items():
            self._build(op, plan)

    def memory(self) -> Iterator[Tensor]:
        return (plan.memory for plan in self._plans.values())

    def _build(self, op: int, plan: Plan) -> None:
        workspace = scratch(_C.plan_device_size(self._descriptor, plan.kernel, op)[1], self._device)
        _C.plan_device_build(
            self._descriptor,
            plan.kernel,
            op,
            plan.memory.data_ptr(),
            plan.memory.numel(),
            workspace.data_ptr(),
            workspace.numel(),
            torch.cuda.current_stream(self._device).cuda_stream,
        )


INTERVAL = 0.1  # seconds between comparisons
PAUSE = 1e-3  # seconds between questions for the answer of one, each of which takes as long as several calls
ROW = 4  # 64-bit integers of a ts_array_pair


class Comparison:
    """Comparisons on a CUDA device, one at a time, on a stream of their own.

    The GPU says in memory of the host that one has ended: to ask CUDA would spoil a graph that another thread
    captures. Rows are copied for each comparison, so that they may change meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Among those of high priority, of which programs have few: streams of a pool have several users.
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._asked = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._memory = self._compared = _pinned(64)
        self._rows = 0
        # A pair that always differs, and its numbers. It is compared behind all others.
        self._end = _pinned(2)
        numbers = self._end.data_ptr() + 8 * ROW
        self._end_rows = (ctypes.c_int64 * (2 * ROW)).from_address(self._end.data_ptr())
        self._end_rows[:] = [numbers, numbers + 8, 1, 0, 0, 1, 0, 0]

    def reads(self, tensors: Iterable[Tensor]) -> None:
        """Have the memory of tensors outlast comparisons that were begun."""
        for tensor in tensors:
            tensor.record_stream(self._stream)

    def reserve(self, rows: int) -> None:
        """Take so many rows from the next comparison on."""
        if rows > len(self._memory):
            self._memory = _pinned(2 * rows)

    def begin(self, pairs: array[int], entries: Iterable[Any]) -> bool:
        """Compare pairs, behind what the current stream was asked for and what entries have yet to write.

        Return False if it is impossible now.
        """
        torch.cuda.current_stream(self._device).record_event(self._asked)
        with torch.cuda.stream(self._stream):
            if torch.cuda.is_current_stream_capturing():  # for another user of this stream
                return False
            self._stream.wait_event(self._asked)
            for entry in entries:
                entry._streams.wait()  # for what another stream has yet to write
            self._compared, self._rows = self._memory, len(pairs) // ROW
            content = pairs.tobytes()  # at once, for rows may be removed at any time
            ctypes.memmove(self._compared.data_ptr(), content, len(content))
            self._end_rows[3] = 0
            for memory, rows in ((self._compared, self._rows), (self._end, 1)):
                _C.arrays_compare(memory.data_ptr(), rows, 1, self._stream.cuda_stream)
        return True

    def answer(self) -> list[int] | None:
        """Return the rows that differ; None before the comparison has ended."""
        if not _C.arrays_differ(self._end.data_ptr(), 1):
            return None
        address = self._compared.data_ptr()
        if not _C.arrays_differ(address, self._rows):
            return []
        numbers = (ctypes.c_int64 * (ROW * self._rows)).from_address(address)
        return [row for row, mark in enumerate(numbers[ROW - 1 :: ROW]) if mark]


class Watch:
    """The patterns of one device that are compared with their copies.

    Attributes:
        clock: says when to look next.
    """

    def __init__(self, comparison: Comparison) -> None:
        self.clock = _C.Clock()
        self._comparison = comparison
        self._pairs = array("q")
        self._free: list[int] = []
        self._watched: dict[int, weakref.ref[Any]] = {}  # by the first of three rows
        self._under_way = False
        # When the last comparison began, and the one before, which found what was unchanged until then.
        self._begun = self._begun_before = -math.inf

    def add(self, entry: Any) -> int:
        """Watch what is kept of a pattern, once it was pointed to; return its place."""
        place = self._free.pop() if self._free else 3 * len(self._watched)
        if ROW * place == len(self._pairs):
            self._pairs.extend([0] * (3 * ROW))
            self._comparison.reserve(place + 3)
        self._watched[place] = weakref.ref(entry)
        return place

    def point(self, place: int, tensors: Index, copies: Index) -> None:
        """Compare these at a place, both of which the caller keeps."""
        both = list(zip(tensors[:3], copies[:3], strict=True))
        self._comparison.reads(tensor for pair in both for tensor in pair)
        rows = [(tensor.data_ptr(), copy.data_ptr(), tensor.shape[0], 0) for tensor, copy in both]
        self._pairs[ROW * place : ROW * (place + 3)] = array("q", [number for row in rows for number in row])

    def rest(self, place: int) -> None:
        """Compare nothing at a place until something is pointed to there."""
        self._pairs[ROW * place : ROW * (place + 3)] = array("q", [0] * (3 * ROW))

    def remove(self, place: int) -> None:
        """Give a place to others. The garbage collector may call it anywhere."""
        self.rest(place)
        self._watched.pop(place, None)
        self._free.append(place)

    def use(self, entry: Any) -> None:
        """Note that a product uses a pattern, and look for writes if it is time to.

        Raises:
            PatternChangedError: products may have read a former pattern since a write, which is followed now.
        """
        now = monotonic()
        if now >= self.clock.due:
            self._look(now)
        entry._use.last = now

    def _look(self, now: float) -> None:
        if self._under_way:
            differing = self._comparison.answer()
            if differing is None:
                self.clock.due = now + PAUSE
                return
            self._under_way = False
            self.clock.due = self._begun + INTERVAL
            since, self._begun_before = self._begun_before, self._begun
            self._follow(differing, since, now)
        if now >= self._begun + INTERVAL:
            self._begin(now)

    def _begin(self, now: float) -> None:
        entries = [entry for reference in list(self._watched.values()) if (entry := reference()) is not None]
        recent = (entry for entry in entries if entry._noted >= self._begun)
        self._under_way = self._comparison.begin(self._pairs, recent)
        self.clock.due = now + PAUSE
        if self._under_way:
            self._begun = now

    def _follow(self, differing: list[int], since: float, now: float) -> None:
        """Follow writes that a comparison has found; the one before began at ``since``."""
        late, invalid = [], None
        for place in dict.fromkeys(row - row % 3 for row in differing):
            entry = self._watched.get(place, lambda: None)()
            if entry is None or entry._noted >= self._begun:
                continue  # what is known of was written while it was compared
            unchanged = max(since, entry._noted)
            try:
                found = entry._follow_writes()
            except InvalidPatternError as error:
                found, invalid = True, error
                entry._distrust()
            if found and entry._use.last > unchanged:
                late.append(unchanged)
        if late:
            first, last = (f"{1e3 * (now - at):.0f}" for at in (min(late), self._begun))
            raise PatternChangedError(
                f"pattern was written to between {first} and {last} ms ago in a way that PyTorch does not "
                "count, such as tensor.data or a collective, and products may have read the former one "
                "since; from now on they read the new one. BlockPattern.update_ is followed at once"
            ) from invalid


@cache
def watch(device: torch.device) -> Watch:
    """Return the watch of a device."""
    return Watch(Comparison(device))


@torch.inference_mode(False)
def _pinned(count: int) -> Tensor:
    """Allocate rows of ts_array_pair, four 64-bit integers each, in pinned memory that the GPU reads."""
    return torch.zeros(count, ROW, dtype=torch.int64, device="cpu", pin_memory=True)


SETTLING = 0.01  # seconds that a thread may need between a write and its count
MAX_CALLS = 1024  # a program whose token counts never repeat must not grow without bound

State = tuple[int, ...]


def state_of(index: Index) -> State:
    """Return addresses and versions, which change when tensors on a CUDA device are written to or moved.

    Tensors made in inference mode have no versions: only `BlockPattern.update_` is noticed there.
    """
    crow, col, slot, _, _ = index
    return (crow.data_ptr(), col.data_ptr(), slot.data_ptr(), version(crow), version(col), version(slot))


class Prepared:
    """A pattern in every form that was asked for so far: copies of its tensors, transpose, plans, calls.

    Attributes:
        generation: number of changes of its contents; 0 on the CPU, where each content has its own object.
        kept: products that have run before.
        find: returns the call that was kept under a key, or None.
        on_cpu: True for a pattern on the CPU.
        prepacks: True if values are kept prepacked from call to call; see `BlockSparseLinear.prepack`.
        plain: dense blocks that are kept on the CPU.
        scales: scales of the rows of blocks, made from those of output features.
    """

    @torch.inference_mode(False)  # tensors made in it could not be written outside of it
    def __init__(self, index: Index, watched: bool = True, groups: int = 1) -> None:
        check_index(index)
        shape, (bn, bk), nnz = index.shape, index.block_shape, index.col_indices.shape[0]
        self.shape, self.block_shape, self.values_shape = shape, (bn, bk), (nnz, bn, bk)
        self._device = index.col_indices.device
        self.on_cpu = self._device.type == "cpu"
        self.generation = 0
        self.prepacks = False
        self.plain, self.scales = Derived(), Derived()
        self._turned = Turned()
        self._prepacked: dict[tuple[int, int, int], Prepacked] = {}
        self._state: State = ()
        self._tensors = tuple(weakref.ref(tensor) for tensor in index[:3])
        rows, cols = grid_of(shape, (bn, bk))
        sizes = rows + 1, nnz, nnz, groups * cols + 1, nnz, nnz
        memory = [area.view(torch.int32) for area in allocate((4 * size for size in sizes), self._device)]
        self._snapshot, self._columns = memory[:3], memory[3:]
        row_ptr, col_idx, row_slot, *columns = (tensor.data_ptr() for tensor in memory)
        col_ptr, row_idx, col_slot = columns
        self.descriptor = _C.Pattern(
            bn, bk, *shape, nnz, row_ptr, col_idx, row_slot, col_ptr, row_idx, col_slot, groups
        )
        self._streams = Streams(self._device)
        self._plans = Plans(self.descriptor, self._device, self._streams)
        self._places: Tensor | None = None
        self._transposed: Prepared | None = None
        self._grouped: dict[int, Prepared] = {}
        self._calls: dict[Hashable, Call] = {}
        self.find: Callable[[Hashable], Call | None] = self._calls.get
        self.kept = _C.Calls(TENSORS)
        # When the copies were last known to be those of the tensors, on the clock ``time.monotonic``.
        self._noted = 0.0
        # Finds writes that PyTorch does not count; and what products that look for them note of their use.
        self._watch = watch(self._device) if self._device.type == "cuda" and watched else None
        self._use = None if self._watch is None else _C.Use(self._watch.clock)
        self._place = -1 if self._watch is None else self._watch.add(self)
        self._memory: list[torch.UntypedStorage] = []  # kept alive while it is watched
        self._write(index)

    def _is_of(self, index: Index) -> bool:
        """Return True if it was made of these tensors as they are; on CUDA, of tensors of this size."""
        if index.col_indices.device != self._device or index.col_indices.shape[0] != self.values_shape[0]:
            return False
        return not self.on_cpu or _C.pattern_holds(
            self.descriptor, *(tensor.data_ptr() for tensor in index[:3])
        )

    def _copies_at(self) -> tuple[int, int, int] | None:
        """Return the addresses of the copies on the CPU, None on a CUDA device."""
        crow, col, slot = (tensor.data_ptr() for tensor in self._snapshot)
        return (crow, col, slot) if self.on_cpu else None

    def launching(self) -> AbstractContextManager[object]:
        """Return the lock to hold from resolving a product until its launch."""
        return nullcontext() if self.on_cpu else exclusive()

    def index(self) -> Index:
        """Return the pattern as kernels read it: copies of the tensors it was made from."""
        crow, col, slot = self._snapshot
        return Index(crow, col, slot, self.shape, self.block_shape)

    def columns(self) -> list[Tensor]:
        """Return [col_ptr [C + 1], row_idx [nnz], col_slot [nnz]], int32: the same blocks by column."""
        self._streams.wait()
        return self._columns

    def transposed(self) -> Prepared:
        """Return the pattern of the transposed weight, whose values have the same slots."""
        with exclusive():
            if self._transposed is None:
                self._transposed = Prepared(self._transposed_index(), watched=False)
            return self._transposed

    def grouped(self, groups: int) -> Prepared:
        """Return the pattern as that of weights of equal shape below each other, see `ts_pattern.groups`."""
        found = self._grouped.get(groups)
        if found is None:
            with exclusive():
                self._streams.wait()
                found = self._grouped.get(groups) or Prepared(self.index(), watched=False, groups=groups)
                self._grouped[groups] = found
        return found

    def _others(self) -> Iterator[Prepared]:
        """Yield what was made of this pattern and follows it."""
        yield from self._grouped.values()
        if self._transposed is not None:
            yield self._transposed

    def _transposed_index(self) -> Index:
        col_ptr, row_idx, col_slot = self.columns()
        return Index(col_ptr, row_idx, col_slot, self.shape[::-1], self.block_shape[::-1])

    @torch.inference_mode(False)
    def block_indices(self) -> tuple[Tensor, Tensor]:
        """Return (rows, cols), each [nnz] int64: the block row and column of every slot."""
        with exclusive():
            if self._places is None:
                (memory,) = allocate((16 * self._snapshot[1].shape[0],), self._device)
                self._streams.wait()
                places = memory.view(torch.int64).view(2, -1)
                self._write_places(places)
                self._places = places
                self._streams.record()
            else:
                self._streams.read(iter((self._places,)))
            return self._places[0], self._places[1]

    @torch.inference_mode(False)
    def _rewrite(self, index: Index) -> None:
        """Follow changed contents on a CUDA device: write everything derived anew, in the same memory."""
        self.generation += 1
        self._forget_calls()
        self._wait_to_write()
        self._write(index)
        for grouped in self._grouped.values():
            grouped._rewrite(self.index())
        if self._transposed is not None:
            self._transposed._rewrite(self._transposed_index())

    def _wait_to_write(self) -> None:
        """Have the current stream wait until no other uses the pattern, what follows it, or their plans."""
        self._streams.wait_to_write()
        for other in self._others():
            other._wait_to_write()

    def call(
        self, key: Hashable, product: _C.Product, op: int, itemsize: int, form: Form, skips: bool = False
    ) -> Call:
        """Resolve a product on the current device and stream, and keep it under the key.

        ``skips``: it skips weights, for which there is nothing to choose.
        """
        with exclusive(), on(self._device):
            kernel, plan_id = (0, 0) if skips else product.resolve()
            plan_key = 0 if skips else _C.plan_key(self.descriptor, kernel, op)
            if plan_id:
                memory = self._plans.get(op, kernel, plan_id)
                product.use_plan(memory.data_ptr(), memory.numel(), plan_key)
            packs = self.prepacks and not (skips or self.on_cpu)
            prepacked = self._prepack(product, op, plan_id, plan_key) if packs else None
            workspace_bytes = product.workspace_size()
            self._streams.read(chain(self._snapshot, self._columns, self._plans.memory()))
        if len(self._calls) >= MAX_CALLS:
            self._forget_calls()
        here = self.on_cpu or self._device.index == torch.cuda.current_device()
        run = product.run if here else run_on(self._device, product.run)
        self._calls[key] = call = Call(run, -(-workspace_bytes // itemsize), form, prepacked)
        return call

    def keep_prepacked(self, keep: bool) -> None:
        """Keep values prepacked from call to call, or not; drop the prepacked copies in either case."""
        self.prepacks = keep
        self._forget_calls()
        self._prepacked.clear()
        self.plain, self.scales = Derived(), Derived()

    def keeps_calls(self) -> bool:
        """Return True unless calls may pack: on a GPU, but not in a graph that is being captured."""
        return not self.prepacks or self.on_cpu

    def _forget_calls(self) -> None:
        """Resolve every product anew, also one that another thread has found but not launched."""
        self._calls.clear()
        self.kept.clear()
        for other in self._others():
            other._forget_calls()

    def _follow_writes(self) -> bool:
        """Follow tensors on a CUDA device that were written to; return True if PyTorch has not counted it.

        What it has counted the next product of this pattern follows. The host waits for the tensors.
        """
        index = self._held()
        if index is None or state_of(index) != self._state:
            return False
        self._streams.wait()  # what a thread wrote on another stream is no write that was missed
        if all(map(torch.equal, index[:3], self._snapshot)):
            return False
        # PyTorch counts a write after it has enqueued it, and another thread may be between the two.
        sleep(SETTLING)
        if state_of(index) != self._state:
            return False
        self._adopt(index)
        return True

    def _adopt(self, index: Index) -> None:
        """Follow tensors on a CUDA device, whose contents are checked in a copy: others may write to them."""
        state = state_of(index)
        crow, col, slot = (tensor.clone() for tensor in index[:3])
        copy = Index(crow, col, slot, self.shape, self.block_shape)
        validate(copy)
        self._rewrite(copy)
        self._note(index, state)

    def _distrust(self) -> None:
        """Have the next call validate the tensors, which hold no pattern."""
        self._state = ()
        crow, col, slot = (reference() for reference in self._tensors)
        KNOWN.forget((crow, col, slot, self.shape, self.block_shape))
        if self._watch is not None:
            self._watch.rest(self._place)

    def _forget(self) -> None:
        """Stop watching the tensors: they are gone, or have another owner."""
        if self._watch is not None:
            self._watch.remove(self._place)

    def _held(self) -> Index | None:
        """Return the tensors this was made from, if they still exist with the same size."""
        crow, col, slot = (reference() for reference in self._tensors)
        if crow is None or col is None or slot is None:
            return None
        index = Index(crow, col, slot, self.shape, self.block_shape)
        return index if self._is_of(index) else None

    def _written(self) -> tuple[Index, State] | None:
        """Return the tensors this was made from and their state, if they may have other contents by now."""
        index = self._held()
        if index is None:
            return None
        state = state_of(index)
        return None if state == self._state else (index, state)

    def _write(self, index: Index) -> None:
        """Write copies, the transpose and all plans on the current stream."""
        col_ptr, row_idx, col_slot = self._columns
        columns = col_ptr.data_ptr(), row_idx.data_ptr(), col_slot.data_ptr()
        if not self.on_cpu:
            refuse_capture()
        with on(self._device):
            for snapshot, tensor in zip(self._snapshot, index[:3], strict=True):
                snapshot.copy_(tensor)
            if self.on_cpu:
                validate(self.index())  # the copy: others may write to the tensors at any time
                _C.pattern_transpose(self.descriptor, *columns)
            else:
                workspace = scratch(_C.pattern_device_transpose_size(self.descriptor), self._device)
                stream = torch.cuda.current_stream(self._device).cuda_stream
                _C.pattern_device_transpose(
                    self.descriptor, *columns, workspace.data_ptr(), workspace.numel(), stream
                )
                self._plans.rebuild()
                if self._places is not None:
                    self._write_places(self._places)
                self._streams.record_all()
        self._note(index, state_of(index))

    def _note(self, index: Index, state: State) -> None:
        """Note that these tensors, in a state from before they were read, have the copied contents."""
        before, self._state = self._state, state
        if self._watch is not None:
            self._noted = monotonic()
            if self._state[:3] != before[:3]:  # the addresses
                memory = [tensor.untyped_storage() for tensor in index[:3]]
                self._watch.point(self._place, index, self.index())
                self._memory = memory

    def _write_places(self, places: Tensor) -> None:
        for place, indices in zip(places, block_indices(self.index()), strict=True):
            place.copy_(indices)

    def _prepack(self, product: _C.Product, op: int, plan_id: int, plan_key: int) -> Prepacked | None:
        """Have the product read prepacked values, if its kernel wants them.

        Not while a graph is captured: its replays would not see the values change.
        """
        size = product.prepacked_size()
        if size == 0 or torch.cuda.is_current_stream_capturing():
            return None
        stream = torch.cuda.current_stream(self._device)
        key = op, plan_id, stream.cuda_stream  # what one stream packs another may not have to wait for
        prepacked = self._prepacked.get(key)
        if prepacked is None:
            (memory,) = allocate((size,), self._device)
            memory.record_stream(stream)
            prepacked = self._prepacked[key] = Prepacked(product, memory, plan_key)
        product.use_prepacked(prepacked.memory.data_ptr(), size, prepacked.plan_key)
        return prepacked


def kept_turned(pattern: Prepared, values: Tensor) -> Tensor | None:
    """Return what `turned` does, if it is kept and values have not changed."""
    return pattern._turned.get(values)


def turned(pattern: Prepared, values: Tensor) -> Tensor:
    """Return the values with those of a neuron together, kept until they change."""
    with exclusive():
        made = pattern._turned.follow(values, pattern.columns(), pattern._streams)
        pattern._streams.read(iter((made,)))
        return made


def allocations(call: Call) -> tuple[Any, Any]:
    """Return how result and workspace are allocated."""
    workspace = (Tensor.new_empty, (call.workspace,)) if call.workspace else None
    return allocation(call.form), workspace


_Key = tuple[int, int, int, tuple[int, int], tuple[int, int]]
entries: dict[_Key, Prepared] = {}


def prepared(index: Index, looking: bool = False) -> Prepared:
    """Return the prepared pattern, as its tensors are now.

    ``looking``: also find writes on CUDA devices that PyTorch does not count, see `Watch`. Forward products
    do; gradients belong to the pattern that these have read.
    """
    entry: Prepared | None = KNOWN.find(index, looking)
    return _looked_up(index, looking) if entry is None else entry


def content_of(index: Index) -> tuple[object, int]:
    """Return an object and a number that stay the same until the contents of the pattern change."""
    entry = prepared(index)
    return entry, entry.generation


def _looked_up(index: Index, looking: bool) -> Prepared:
    check_index(index)
    with exclusive():
        entry = entries.get(_key(index))
        if entry is None or not entry._is_of(index):
            entry = _prepare(index, entry)
        elif entry._device.type == "cuda":
            watch = entry._watch if looking and entry._state == state_of(index) else None
            if watch is not None and not torch.cuda.is_current_stream_capturing():
                watch.use(entry)
            if entry._state != state_of(index):
                _follow(entry)
        KNOWN.keep(index, entry, entry._copies_at(), entry._use)
        return entry


def _prepare(index: Index, before: Prepared | None) -> Prepared:
    key, entry = _key(index), Prepared(index)
    if before is None:
        for tensor in index[:3]:
            weakref.finalize(tensor, _forget, key).atexit = False
    else:
        entry.prepacks = before.prepacks
        before._forget()
    entries[key] = entry
    return entry


def _follow(entry: Prepared) -> None:
    """Rewrite an entry on a CUDA device if its tensors were written to and have other contents.

    DistributedDataParallel writes all buffers of a model before most forward passes, usually with the same
    contents. So all patterns of the device are compared together, and the host waits once. What other streams
    use may have yet to be written there, and waits for its own call.
    """
    refuse_capture()
    written = [
        (other, *found)
        for other in list(entries.values())
        if other._device == entry._device
        and (other is entry or not other._streams.others_read())  # which may write the tensors
        and (found := other._written()) is not None
    ]
    for other, _, _ in written:
        other._streams.wait()
    same = torch.equal(
        torch.cat([tensor for _, index, _ in written for tensor in index[:3]]),
        torch.cat([tensor for other, _, _ in written for tensor in other.index()[:3]]),
    )
    for other, index, state in written:
        if same or all(map(torch.equal, index[:3], other.index()[:3])):
            other._note(index, state)
        elif other is entry:
            entry._adopt(index)


def _key(index: Index) -> _Key:
    crow, col, slot, shape, block_shape = index
    return id(crow), id(col), id(slot), shape, block_shape


def _forget(key: _Key) -> None:
    entry = entries.pop(key, None)
    if entry is not None:
        entry._forget()
    KNOWN.forget(key)


def forget_calls() -> None:
    """Resolve every product anew."""
    for entry in list(entries.values()):
        entry._forget_calls()


@contextmanager
def update_of(index: Index) -> Iterator[None]:
    """Allow writes to a pattern in this context, and rewrite what is derived from it at the end."""
    with exclusive():
        key = _key(index)
        entry = entries.get(key)
        if entry is None or entry._device.type == "cpu" or not entry._is_of(index):
            yield  # calls compare the tensors themselves
            return
        refuse_capture()
        KNOWN.forget(key)  # so that calls of other threads wait for the lock
        entry._forget_calls()  # for the same reason; nothing that kernels read is written before `rewrite`
        entry._streams.wait()  # the tensors may still be copied, on the stream of the update before
        yield
        entry._rewrite(index)

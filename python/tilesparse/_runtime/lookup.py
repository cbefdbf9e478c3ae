"""The table of prepared patterns, by the identity of their index tensors."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .._checks import Index, check_index
from .device import refuse_capture
from .lock import exclusive
from .native import KNOWN
from .prepared import Prepared, state_of

_Key = tuple[int, int, int, tuple[int, int], tuple[int, int]]
entries: dict[_Key, Prepared] = {}


def prepared(index: Index, looking: bool = False) -> Prepared:
    """Return the prepared pattern, as its tensors are now.

    Args:
        index: the pattern.
        looking: also find writes on CUDA devices that PyTorch does not count, see `writes`. Forward products
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
        if entry is None or not entry.is_of(index):
            entry = _prepare(index, entry)
        elif entry.device.type == "cuda":
            known = entry.state == state_of(index)
            if known and looking and entry.watch is not None and not torch.cuda.is_current_stream_capturing():
                entry.watch.use(entry)
            if entry.state != state_of(index):
                _follow(entry)
        KNOWN.keep(index, entry, entry.snapshot(), entry.use)
        return entry


def _prepare(index: Index, before: Prepared | None) -> Prepared:
    key, entry = _key(index), Prepared(index)
    if before is None:
        for tensor in index[:3]:
            weakref.finalize(tensor, _forget, key).atexit = False
    else:
        entry.packs = before.packs
        before.forget()
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
        if other.device == entry.device
        and (other is entry or not other.is_read_elsewhere())
        and (found := other.written()) is not None
    ]
    for other, _, _ in written:
        other.wait()
    same = torch.equal(
        torch.cat([tensor for _, index, _ in written for tensor in index[:3]]),
        torch.cat([tensor for other, _, _ in written for tensor in other.index()[:3]]),
    )
    for other, index, state in written:
        if same or all(map(torch.equal, index[:3], other.index()[:3])):
            other.note(index, state)
        elif other is entry:
            entry.adopt(index)


def _key(index: Index) -> _Key:
    crow, col, slot, shape, block_shape = index
    return id(crow), id(col), id(slot), shape, block_shape


def _forget(key: _Key) -> None:
    entry = entries.pop(key, None)
    if entry is not None:
        entry.forget()
    KNOWN.forget(key)


def forget_calls() -> None:
    """Resolve every product anew."""
    for entry in list(entries.values()):
        entry.forget_calls()


@contextmanager
def update_of(index: Index) -> Iterator[None]:
    """Allow writes to a pattern in this context, and rewrite what is derived from it at the end."""
    with exclusive():
        key = _key(index)
        entry = entries.get(key)
        if entry is None or entry.device.type == "cpu" or not entry.is_of(index):
            yield  # calls compare the tensors themselves
            return
        refuse_capture()
        KNOWN.forget(key)  # so that calls of other threads wait for the lock
        entry.forget_calls()  # for the same reason; nothing that kernels read is written before `rewrite`
        entry.wait()  # the tensors may still be copied, on the stream of the update before
        yield
        entry.rewrite(index)

"""Processes that train one model with seeds of their own have one pattern, or an error in time."""

from __future__ import annotations

import copy
import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import TWO, here, play, randn, seeded
from test_train_patterns import SCENES as MOVING
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tilesparse import BlockSparseLinear
from tilesparse._runtime import pattern_cache
from tilesparse.distributed import synchronize_patterns
from tilesparse.errors import UnsupportedError, UnsynchronizedPatternError
from tilesparse.nn import weight as origin
from tilesparse.nn.weight import layer_index
from tilesparse.train import MaskSchedule

IN, OUT = 96, 64
WORLD = 2


def make(seed: int, **options: Any) -> Any:
    options = {"density": 0.5, "block_shape": 16, "generator": seeded(seed), "device": here(), **options}
    return nn.Sequential(
        BlockSparseLinear(IN, OUT, **{"block_shape": 32, **options}),
        nn.Tanh(),
        BlockSparseLinear(OUT, IN, **{"block_shape": 32, **options}),
    )


def sparse_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, BlockSparseLinear)]


def fingerprint(model: nn.Module) -> list[list[int]]:
    return [tensor.tolist() for layer in sparse_layers(model) for tensor in layer_index(layer)[:3]]


def patterns_agree(model: nn.Module) -> bool:
    everyone: list[Any] = [None] * WORLD
    dist.all_gather_object(everyone, fingerprint(model))
    return all(theirs == everyone[0] for theirs in everyone)


def masks_agree(model: nn.Module) -> bool:
    for layer in sparse_layers(model):
        everyone = [torch.empty_like(layer.mask) for _ in range(WORLD)]
        dist.all_gather(everyone, layer.mask)
        if any(not torch.equal(theirs, layer.mask) for theirs in everyone):
            return False
    return True


def train(wrapped: nn.Module, steps: int = 3, optimizer: torch.optim.Optimizer | None = None) -> list[float]:
    """Losses on data that differ from process to process."""
    optimizer = optimizer or torch.optim.SGD(wrapped.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        x = randn(8, IN, dtype=torch.float32, device=here(), seed=10 * step + dist.get_rank())
        loss = (wrapped(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# ---- what each of the processes does ----


def by_default(rank: int) -> None:
    model = make(rank)
    assert not patterns_agree(model)
    wrapped = DistributedDataParallel(model)
    train(wrapped)
    assert patterns_agree(model)
    twin = make(0)  # what the first process began with, trained on both processes' data at once
    twin.load_state_dict(make(0).state_dict())
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for other in range(WORLD):
            x = randn(8, IN, dtype=torch.float32, device=here(), seed=10 * step + other)
            ((twin(x) - x).square().mean() / WORLD).backward()
        optimizer.step()
    for name, tensor in twin.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor)
    entries = [pattern_cache.prepared(layer_index(layer)) for layer in sparse_layers(model)]
    train(wrapped)
    assert [pattern_cache.prepared(layer_index(layer)) for layer in sparse_layers(model)] == entries
    # The first process broadcasts what it has: what was prepared elsewhere changed at most once, before.
    assert all(entry.generation <= 1 for entry in entries)


def changed_by_hand(rank: int) -> None:
    """DistributedDataParallel broadcasts no buffers in the pass after one without gradients or sync."""
    model = make(rank)
    wrapped = DistributedDataParallel(model)
    x = randn(8, IN, dtype=torch.float32, device=here())

    def evaluate() -> None:
        with torch.no_grad():
            wrapped(x)

    def accumulate() -> None:
        with wrapped.no_sync():
            wrapped(x).sum().backward()

    train(wrapped)
    for before in (evaluate, accumulate):
        train(wrapped, 1)
        before()
        model[0].pattern.update_(make(20)[0].pattern)
        train(wrapped, 2)
        assert fingerprint(model)[:3] == fingerprint(make(20))[:3] and patterns_agree(model)
        before()
        model[0].pattern.update_(make(rank + 10)[0].pattern)
        with pytest.raises(UnsynchronizedPatternError, match=rf"processes \[{1 - rank}\] have another one"):
            train(wrapped, 1)
        synchronize_patterns(model)
        train(wrapped, 1)
        model[0].pattern.update_(make(rank + 10)[0].pattern)
        train(wrapped, 1)  # broadcasts
        assert fingerprint(model)[:3] == fingerprint(make(10))[:3] and patterns_agree(model)


def without_broadcasts(rank: int) -> None:
    model = make(rank)
    wrapped = DistributedDataParallel(model, broadcast_buffers=False)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UnsynchronizedPatternError, match="synchronize_patterns"):
        train(wrapped)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    model[0].pattern.update_(make(rank + 5)[0].pattern)  # what a process writes by itself is no agreement
    with pytest.raises(UnsynchronizedPatternError):
        train(wrapped)
    wrapped.eval()
    wrapped(randn(8, IN, dtype=torch.float32, device=here()))  # inference is nobody else's matter


def without_broadcasts_synchronized(rank: int) -> None:
    model = make(rank)
    weights = [layer.weight.detach().clone() for layer in sparse_layers(model)]
    synchronize_patterns(model)
    assert patterns_agree(model) and fingerprint(model) == fingerprint(make(0))
    for layer, weight in zip(sparse_layers(model), weights, strict=True):
        assert torch.equal(layer.weight, weight)
    train(DistributedDataParallel(model, broadcast_buffers=False))
    assert patterns_agree(model)


def loaded(rank: int) -> None:
    model = make(rank)
    model.load_state_dict(make(7).state_dict())
    train(DistributedDataParallel(model, broadcast_buffers=False))
    assert patterns_agree(model)


def broadcast_by_hand(rank: int) -> None:
    for frozen in (False, True):
        model = make(rank)
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, 0)
        if frozen:
            model[0].requires_grad_(False)
        train(model)  # by itself: what is compared are patterns
    model = make(0)
    if rank == 0:  # the only one to read the file
        model.load_state_dict(make(7).state_dict())
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, 0)
    train(model)
    for first in (0, 1):  # one array alone
        model = make(rank)
        for layer in sparse_layers(model)[first:]:
            for name in ("crow_indices", "col_indices", "slot"):
                dist.broadcast(layer.state_dict()[name], 0)
        if first == 0:
            train(model)
        else:
            with pytest.raises(
                UnsynchronizedPatternError, match=rf"processes \[{1 - rank}\] have another one"
            ):
                train(model)


def of_a_silent_process(rank: int) -> None:
    if rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(origin, "PATIENCE", datetime.timedelta(seconds=0.5))
            with pytest.raises(UnsynchronizedPatternError, match=r"processes \[1\] have not said"):
                train(make(rank))
    dist.barrier()


def of_other_sizes(rank: int) -> None:
    with pytest.raises(UnsynchronizedPatternError, match="the same layers"):
        synchronize_patterns(make(0, density=(0.5, 0.25)[rank]))


def from_meta(rank: int) -> None:
    model = make(rank, device="meta").to_empty(device=here())
    for layer in sparse_layers(model):
        layer.reset_parameters(seeded(rank))
    with pytest.raises(UnsynchronizedPatternError):
        train(DistributedDataParallel(model, broadcast_buffers=False))
    empty = make(rank, device="meta").to_empty(device=here()) if rank else make(0)
    for layer in sparse_layers(empty):
        nn.init.ones_(layer.bias)
    train(DistributedDataParallel(empty))
    assert patterns_agree(empty)


def flattened(rank: int) -> None:
    device = torch.device(here())
    unsynchronized = FullyShardedDataParallel(make(rank), device_id=device)
    with pytest.raises(UnsynchronizedPatternError):
        train(unsynchronized)
    for original in (False, True):
        model = make(rank)
        on_gpu = device.type == "cuda"  # where FSDP can broadcast by itself
        if not on_gpu:
            synchronize_patterns(model)
        wrapped = FullyShardedDataParallel(
            model, sync_module_states=on_gpu, use_orig_params=original, device_id=device
        )
        train(wrapped)
        assert patterns_agree(wrapped)


def masked(rank: int) -> None:
    options: dict[str, Any] = {"block_shape": 32, "nm": (2, 4), "transposable": True}
    model = make(rank, **options)
    synchronize_patterns(model)
    wrapped = DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1)
    schedule = MaskSchedule(wrapped, optimizer, every=2, decay=0.1)
    assert not masks_agree(model)
    schedule.refresh()
    assert masks_agree(model)
    train(wrapped, 2, optimizer)
    assert masks_agree(model) and schedule.flip_rate() > 0

    sharded = fully_shard(make(rank, **options), mesh=init_device_mesh(torch.device(here()).type, (WORLD,)))
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match="layer '0': the weight must be a plain tensor, got DTensor"):
        MaskSchedule(sharded, optimizer, every=1, decay=0)


SCENES = (
    *(by_default, changed_by_hand, without_broadcasts, without_broadcasts_synchronized, loaded),
    *(broadcast_by_hand, of_other_sizes, from_meta, flattened, masked, *MOVING),
    of_a_silent_process,  # the last one: the others are a layer behind from here on
)


@pytest.mark.parametrize(("backend", "size"), TWO)
def test_every_way_to_train_together(backend: str, size: int, tmp_path: Path) -> None:
    play(SCENES, backend, size, tmp_path)


def test_one_process_alone_needs_no_agreement() -> None:
    layer = BlockSparseLinear(IN, OUT, block_shape=16)
    layer(randn(8, IN, dtype=torch.float32)).sum().backward()
    assert layer.weight.grad is not None

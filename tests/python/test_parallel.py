"""Models whose layers several processes share: fully_shard, tensor parallelism and their checkpoints."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import FOUR, TWO, common_folder, here, play, randn, seeded, whole
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as of_torch
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tilesparse import BlockPattern, BlockSparseLinear
from tilesparse.distributed import ColwiseParallel, RowwiseParallel, synchronize_patterns
from tilesparse.distributed import parallel as _shards
from tilesparse.errors import (
    InvalidArgumentError,
    InvalidPatternError,
    UnsupportedError,
    UnsynchronizedPatternError,
)
from tilesparse.io.manifest import section
from tilesparse.io.reader import prepare
from tilesparse.nn.weight import layer_index
from tilesparse.pattern import moved_index

WIDTH, HIDDEN = 128, 256
BATCH = 8  # sequences of all processes together
PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def world() -> int:
    return dist.get_world_size()


def mesh() -> DeviceMesh:
    return init_device_mesh(torch.device(here()).type, (world(),))


def make(seed: int = 0, *, parts: int = 4, density: float = 0.5, block: int = 32, **options: Any) -> Any:
    """Two layers whose patterns can be cut for up to so many processes."""
    options = {"generator": seeded(seed), "device": here() if dist.is_initialized() else "cpu", **options}
    up, down = (
        BlockPattern.random(shape, block_shape=block, density=density, parts=cut, generator=seeded(seed))
        for shape, cut in (((HIDDEN, WIDTH), (parts, 1)), ((WIDTH, HIDDEN), (1, parts)))
    )
    return nn.Sequential(
        BlockSparseLinear(WIDTH, HIDDEN, pattern=up, **options),
        nn.Tanh(),
        BlockSparseLinear(HIDDEN, WIDTH, pattern=down, **options),
    )


def known(model: Any) -> Any:
    """The same model, as all processes have loaded it."""
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    return model


def sharded(model: Any, at: DeviceMesh | None = None, **options: Any) -> Any:
    at = mesh() if at is None else at
    for layer in layers_of(model):
        fully_shard(layer, mesh=at, **options)
    return fully_shard(model, mesh=at, **options)


def layers_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, BlockSparseLinear)]


def unsharded(model: nn.Module, **options: Any) -> Any:
    """One process's model with what a shared one has learned."""
    alone = make(9, **options)
    alone.load_state_dict({name: whole(tensor) for name, tensor in model.state_dict().items()})
    return alone


def same(theirs: nn.Module, mine: nn.Module) -> None:
    """Bit for bit, whatever is sharded."""
    expected = mine.state_dict()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(whole(tensor), whole(expected[name])), name


def close_to(model: nn.Module, trained: nn.Module) -> None:
    """But for the order in which processes have added up gradients."""
    expected = trained.state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(whole(tensor), expected[name], rtol=1e-3, atol=1e-4)


def steps_of(
    model: nn.Module,
    share: int = 0,
    shares: int = 1,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int = 3,
    first: int = 0,
    forward: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Losses and norms of gradients, of steps with two batches each that are clipped and given to AdamW."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    results = []
    for step in range(first, first + steps):
        loss = torch.zeros((), device=here())
        for half in range(2):
            x = randn(BATCH, 4, WIDTH, dtype=torch.float32, device=here(), seed=2 * step + half)
            x = x.chunk(shares)[share]
            part = ((forward or model)(x).float() - x).square().mean() / 2
            part.backward()
            loss += part.detach()
        norm = whole(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
        results += [loss, norm]
    return torch.stack(results)


def of_all(results: Tensor) -> Tensor:
    """Means over processes with equal shares of the data."""
    dist.all_reduce(results)
    return results / world()


def close(results: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    """But for the order of sums, or less precision."""
    tolerance = tolerance or (1e-5 if here() == "cpu" else 1e-4)
    torch.testing.assert_close(results, expected, rtol=tolerance, atol=0)


def alike(actual: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def forms(model: nn.Module) -> list[Any]:
    """The patterns of a model's layers, which steps have to leave alone."""
    return [[buffer.tolist() for buffer in layer_index(layer)[:3]] for layer in layers_of(model)]


# ---- what each of the processes does ----


def fsdp(rank: int) -> None:
    expected = steps_of(known(make()))
    close(of_all(steps_of(DistributedDataParallel(known(make())), rank, world())), expected)
    for density in (0.5, 0.125, 0.0):  # 16, 4 and no blocks
        alone, model = known(make(density=density)), known(make(density=density))
        for layer in layers_of(model):
            layer.weight.requires_grad_(density > 0)  # PyTorch reduces no gradient that is empty
        expected = steps_of(alone)
        model = sharded(model)
        before = forms(model)
        close(of_all(steps_of(model, rank, world())), expected)
        assert forms(model) == before and isinstance(model[0].weight, DTensor)
    # 3 blocks do not fit on 2 or 4 processes evenly, and are fewer than 4.
    pattern = BlockPattern.random((WIDTH, WIDTH), block_shape=32, nnz=3, generator=seeded())
    options: dict[str, Any] = {"pattern": pattern, "device": here()}
    for name in ("foreach", "fused"):
        fused: dict[str, Any] = {name: True}
        alone, model = (
            known(
                nn.Sequential(
                    BlockSparseLinear(WIDTH, WIDTH, generator=seeded(), **{"block_shape": 32, **options})
                )
            )
            for _ in "ab"
        )
        optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01, **fused)
        expected = steps_of(alone, optimizer=optimizer)
        model = sharded(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **fused)
        close(of_all(steps_of(model, rank, world(), optimizer=optimizer)), expected)


def fsdp_in_less_precision(rank: int) -> None:
    expected = steps_of(known(make()))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(known(make()), mp_policy=policy)
    before = forms(model)
    close(of_all(steps_of(model, rank, world())), expected, 0.01)
    assert forms(model) == before and model[0].weight.dtype == torch.float32


def fsdp_with_checkpoints(rank: int) -> None:
    expected = steps_of(known(make()))
    model = sharded(known(make()))
    close(
        of_all(steps_of(model, rank, world(), forward=lambda x: checkpoint(model, x, use_reentrant=False))),
        expected,
    )


def fsdp_of_2_4(rank: int) -> None:
    options: dict[str, Any] = {"nm": (2, 4)}
    alone, model = known(make(**options)), sharded(known(make(**options)))
    masks = [layer.mask.clone() for layer in layers_of(alone)]
    close(of_all(steps_of(model, rank, world())), steps_of(alone))
    assert all(torch.equal(layer.mask, mask) for layer, mask in zip(layers_of(model), masks, strict=True))
    for refused in (
        lambda layer: layer.update_mask_(),
        lambda layer: layer.set_nm(None),
        lambda layer: layer.to_storage("int8"),
        lambda layer: layer.to_linear(),
    ):
        with pytest.raises(UnsupportedError, match="before fully_shard"):
            refused(model[0])


def fsdp_in_fewer_bits(rank: int) -> None:
    x = randn(4, WIDTH, dtype=torch.float32, device=here())
    for storage, activations in (*product(("int8", "float8_e4m3fn"), (False, True)), ("int4", False)):
        model = known(make(storage=storage, activations=storage if activations else None))
        expected = model(x)
        try:
            y = sharded(model)(x)
        except RuntimeError as error:  # of releases that make all parameters with a gradient first
            assert storage.startswith("int") and "floating point dtype" in str(error), error
            assert torch.__version__ < "2.13", error
            continue
        alike(y, expected)


def moved(rank: int) -> None:
    """Models that have computed on the CPU, and go to the devices of the mesh."""
    x = randn(4, WIDTH, dtype=torch.float32, device=here())
    expected = make().eval()(x)
    for share in (sharded, lambda model: parallelize_module(model, mesh(), PLAN)):
        model = known(make(device="cpu")).eval()
        model(x.cpu())
        alike(share(model)(x), expected)


def without_agreement(rank: int) -> None:
    with pytest.raises(UnsynchronizedPatternError):
        steps_of(sharded(make(rank)), rank, world())
    empty = make(device="meta").to_empty(device=here())
    with pytest.raises(InvalidPatternError, match=r"process 0, but \['0', '2'\] left the meta"):
        synchronize_patterns(empty)
    model = make() if rank == 0 else empty
    synchronize_patterns(model)
    assert forms(model) == forms(make())


def from_meta(rank: int) -> None:
    torch.manual_seed(rank)
    for nm in (None, (2, 4)):
        options: dict[str, Any] = {"nm": nm}
        model = sharded(make(device="meta", **options)).to_empty(device=here())
        for layer in layers_of(model):
            layer.reset_parameters()
        alone = unsharded(model, **options)
        close(of_all(steps_of(model, rank, world())), steps_of(alone))  # with one pattern, and masks that fit
    weight = whole(sharded_layer(seed=rank).weight)
    fan_in = 512 * 0.5
    assert weight.abs().max() <= (0.5 * fan_in) ** -0.5 and weight.unique().numel() > 0.9 * weight.numel()
    assert abs(float(weight.std()) * (3 * fan_in) ** 0.5 - 1) < 0.1
    everyone = [torch.empty_like(weight) for _ in range(world())]
    dist.all_gather(everyone, weight)
    assert all(torch.equal(theirs, weight) for theirs in everyone)


def sharded_layer(seed: int) -> BlockSparseLinear:
    layer = BlockSparseLinear(512, 512, density=0.5, device="meta", block_shape=32)
    layer = fully_shard(layer, mesh=mesh()).to_empty(device=here())
    layer.reset_parameters(seeded(seed))
    return layer


def tensor_parallel(rank: int) -> None:
    expected = steps_of(known(make()))
    model = parallelize_module(make(rank), mesh(), PLAN)  # weights and patterns of the first process count
    before = forms(model)
    close(steps_of(model), expected)
    assert forms(model) == before
    assert model[0].weight.to_local().shape[0] == model[0].pattern.nnz // world()
    alone = unsharded(model)  # what it has learned is an ordinary state dict of whole layers
    close(steps_of(model, first=3), steps_of(alone, first=3))


def layouts(rank: int) -> None:
    """Inputs and outputs that all have, or of which each has some rows or tokens (sequence parallelism)."""
    for layout in (Replicate(), Shard(0), Shard(1)):
        plan = {"0": ColwiseParallel(input_layouts=layout), "2": RowwiseParallel(output_layouts=layout)}
        model, alone = parallelize_module(make(), mesh(), plan).eval(), make().eval()
        x = randn(4, 8, WIDTH, dtype=torch.float32, device=here()).requires_grad_()
        y = alone(x)
        y.square().sum().backward()
        mine = part_of(x.detach(), layout, rank).clone().requires_grad_()
        part = model(mine)
        alike(part, part_of(y, layout, rank))
        part.square().sum().backward()
        assert mine.grad is not None and x.grad is not None
        alike(mine.grad, part_of(x.grad, layout, rank))
        for layer, other in zip(layers_of(model), layers_of(alone), strict=True):
            alike(whole(layer.bias.grad), other.bias.grad)


def part_of(tensor: Tensor, layout: Replicate | Shard, rank: int) -> Tensor:
    return tensor if isinstance(layout, Replicate) else tensor.chunk(world(), layout.dim)[rank]


def beside_dense_layers(rank: int) -> None:
    """One plan serves both, and layouts can be asked for."""
    torch.manual_seed(0)
    model = nn.Sequential(make()[0], nn.Tanh(), nn.Linear(HIDDEN, WIDTH, device=here())).eval()
    x = randn(4, WIDTH, dtype=torch.float32, device=here())
    expected = model(x)
    alike(parallelize_module(model, mesh(), PLAN)(x), expected)
    layer = make()[0].eval()
    residual = randn(4, HIDDEN, dtype=torch.float32, device=here(), seed=1)
    expected = layer(x, residual=residual)
    layer = parallelize_module(layer, mesh(), ColwiseParallel(output_layouts=Replicate()))
    alike(layer(x, residual=residual), expected)
    given = DTensor.from_local(x.chunk(world(), 1)[rank], mesh(), [Shard(1)])
    alike(layer(given, residual=residual), expected)
    with torch.autocast(torch.device(here()).type, torch.bfloat16):
        y = layer(x, residual=residual)
    assert y.dtype == torch.bfloat16
    alike(y.float(), expected, 0.02)
    everywhere = DTensor.from_local(residual, mesh(), [Replicate()])
    with pytest.raises(InvalidArgumentError, match="residual must be a plain tensor"):
        layer(x, residual=everywhere)
    style = ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
    layer = parallelize_module(make()[0].eval(), mesh(), style)
    alike(layer(x, residual=everywhere).to_local(), expected)
    with pytest.raises(InvalidArgumentError, match="residual must be a DTensor"):
        layer(x, residual=residual)


def tensor_parallel_storages(rank: int) -> None:
    x = randn(8, WIDTH, dtype=torch.float32, device=here())
    for options in (
        {"nm": (2, 4)},
        {"nm": (2, 4), "transposable": True},
        {"nm": (2, 4), "storage": "compressed"},
        {"storage": "int8"},
        {"storage": "int4"},
        {"storage": "float8_e4m3fn"},
        {"storage": "int8", "activations": "int8", "policy": "dense"},
        {"policy": "dense"},
        {"bias": False},
    ):
        alone, model = make(**options).eval(), parallelize_module(make(rank, **options).eval(), mesh(), PLAN)
        alike(model(x), alone(x))
    assert model[0].prepack()(x).shape == (8, HIDDEN // world())
    with torch.autocast(torch.device(here()).type, torch.bfloat16):
        alike(model(x), alone(x), 0.02)
    for density, granularity in ((0.5, "block"), (0.0, "row")):
        alone, model = make(density=density).eval(), make(density=density).eval()
        for layer in (*layers_of(alone), *layers_of(model)):
            layer.to_storage("int8", granularity=granularity)
        alike(parallelize_module(model, mesh(), PLAN)(x), alone(x))
    for mine, theirs in (("row", "block"), ("block", "row")):
        model, other = make().eval(), make(5).eval()
        for cut, granularity in ((model, mine), (other, theirs)):
            for layer in layers_of(cut):
                layer.to_storage("int8", granularity=granularity)
            parallelize_module(cut, mesh(), PLAN)
        model.load_state_dict(other.state_dict())
        alike(model(x), other(x))
    for share in (sharded, lambda model: parallelize_module(model, mesh(), PLAN)):
        alone, model = (make(storage="float8_e4m3fn").eval() for _ in "ab")
        share(model).to(torch.bfloat16)
        assert model[0].weight.dtype == torch.float8_e4m3fn
        y = alone.to(torch.bfloat16)(x.bfloat16())
        alike(model(x.bfloat16()), y, 0.02)


def tensor_parallel_activations(rank: int) -> None:
    """In 8 bits: scales of W are those of its rows, and every process quantizes the features that it has."""
    x = randn(8, WIDTH, dtype=torch.float32, device=here())
    for name in ("int8", "float8_e4m3fn"):
        options: Any = {"storage": name, "activations": name}
        alone, model = make(**options).eval(), parallelize_module(make(rank, **options).eval(), mesh(), PLAN)
        up, down = layers_of(model)
        assert up.scales.placements == (Shard(0),) and down.scales.placements == (Replicate(),)
        for layer, own in zip((up, down), layers_of(alone), strict=True):
            assert layer.spec == own.spec and layer.scales.shape == own.scales.shape
            assert torch.equal(whole(layer.scales), own.scales)
        alike(whole(DTensor.from_local(model[0](x), mesh(), [Shard(1)])), alone[0](x))
        alike(model(x), alone(x), 0.05)
        other = parallelize_module(make(5, **options).eval(), mesh(), PLAN)
        other.load_state_dict(model.state_dict())
        alike(other(x), model(x))
        given = x.clone().requires_grad_()
        model(given).sum().backward()
        assert bool(given.grad.isfinite().all()) and bool(given.grad.abs().sum() > 0)
        empty = parallelize_module(make(device="meta", **options), mesh(), PLAN).to_empty(device=here())
        empty.load_state_dict(model.state_dict())
        alike(empty(x), model(x))
        model.to(torch.bfloat16)
        assert model[0].weight.to_local().element_size() == 1 and model[0].scales.dtype == torch.float32
        assert model(x.bfloat16()).dtype == torch.bfloat16


def tensor_parallel_from_meta(rank: int) -> None:
    torch.manual_seed(rank)
    model = parallelize_module(make(device="meta"), mesh(), PLAN).to_empty(device=here())
    with pytest.raises(InvalidPatternError, match="missing"):
        model(randn(4, WIDTH, dtype=torch.float32, device=here()))
    for layer in layers_of(model):
        layer.reset_parameters()
    alone = unsharded(model)
    close(steps_of(model), steps_of(alone))


def moved_blocks(rank: int) -> None:
    model = parallelize_module(make(), mesh(), PLAN)
    alone = unsharded(model)
    x = randn(8, WIDTH, dtype=torch.float32, device=here())
    for layer in (model[2], alone[2]):
        mask = layer.pattern.to_block_mask()
        row = int((~mask[:, 0]).nonzero()[0])
        layer.pattern.move_blocks_([0], [(row, 0)])  # slot 0 belongs to the first column
    alike(model(x), alone(x))
    last = len(model[2].weight) - 1
    taken = model[2].pattern.to_block_mask()[:, 0]
    model[2].pattern.move_blocks_([last], [(int((~taken).nonzero()[0]), 0)])
    with pytest.raises(InvalidPatternError, match="slots in the order"):
        model(x)


def compiled(rank: int) -> None:
    x = randn(8, WIDTH, dtype=torch.float32, device=here())
    for model in (sharded(known(make())), parallelize_module(make(), mesh(), PLAN)):
        call = torch.compile(model, backend="aot_eager")
        alike(call(x), model(x))
    for _ in range(2):  # of the one that is parallelized
        move_first(model[2])
        alike(call(x), unsharded(model)(x))


def move_first(layer: BlockSparseLinear) -> None:
    """The block of slot 0 to another place of its column."""
    _, cols = layer.pattern.block_indices()
    free = (~layer.pattern.to_block_mask()[:, cols[0]]).nonzero()
    layer.pattern.move_blocks_([0], [(int(free[0]), int(cols[0]))])


def in_inference_mode(rank: int) -> None:
    """Writes to tensors that were made in it are not counted."""
    x = randn(8, WIDTH, dtype=torch.float32, device=here())
    with torch.inference_mode():
        model, other = (parallelize_module(make(seed).eval(), mesh(), PLAN) for seed in (0, 5))
        model(x)
        move_first(model[2])
        alike(model(x), unsharded(model).eval()(x))
        model.load_state_dict(other.state_dict())
        alike(model(x), other(x))
    model = parallelize_module(make(), mesh(), PLAN)
    with torch.inference_mode(), mock.patch.object(_shards, "moved_index", partial(moved_index, copy=True)):
        model(x)  # its index is a copy, as on a GPU
    torch.compile(model, backend="aot_eager")(x).sum().backward()


def without_a_source(rank: int) -> None:
    """Every process has the same already, and nothing is sent; training finds out that patterns agree."""
    model, x = make().eval(), randn(4, WIDTH, dtype=torch.float32, device=here())
    expected = model(x)
    parallelize_module(model, mesh(), PLAN, src_data_rank=None)
    alike(model(x), expected)
    close(steps_of(model.train()), steps_of(known(make())))


def refusals(rank: int) -> None:
    at = mesh()
    options: dict[str, Any] = {"device": here(), "generator": seeded()}
    for style in (of_torch.ColwiseParallel(), of_torch.RowwiseParallel()):
        with pytest.raises(NotImplementedError):
            parallelize_module(make()[0], at, style)
    odd = 16 * (world() + 1)
    for sizes, style, name in (((32, odd), ColwiseParallel(), "out"), ((odd, 32), RowwiseParallel(), "in")):
        layer = BlockSparseLinear(*sizes, density=1, block_shape=16, **options)
        with pytest.raises(
            InvalidArgumentError, match=f"{name}_features must be a multiple of {world()} x 16"
        ):
            parallelize_module(layer, at, style)
    corner = BlockPattern.from_blocks([(0, i) for i in range(4)], shape=(64, 64), block_shape=16)
    layer = BlockSparseLinear(64, 64, pattern=corner, **options)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(InvalidPatternError, match=rf"got \[4, 0.*parts=\({world()}, 1\)"):
        parallelize_module(layer, at, ColwiseParallel())
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())
    single = BlockPattern.from_blocks([(0, 0)], shape=(64, 64), block_shape=16)
    for device, message in ((here(), r"got \[1, 0"), ("meta", f"multiple of {world()}")):
        layer = BlockSparseLinear(64, 64, pattern=single, device=device)
        with pytest.raises(InvalidPatternError, match=message):
            parallelize_module(layer, at, ColwiseParallel())
    layer = BlockSparseLinear(64, 64, pattern=single if rank else corner, **options)  # 1 block, and 4
    with pytest.raises(UnsynchronizedPatternError, match="numbers of blocks in every process"):
        parallelize_module(layer, at, ColwiseParallel())
    assert type(layer.weight) is nn.Parameter
    model = parallelize_module(make(), at, PLAN)
    with pytest.raises(UnsupportedError, match="plain parameter"):
        parallelize_module(model[0], at, ColwiseParallel())
    with pytest.raises(UnsupportedError, match="before fully_shard or parallelize_module"):
        model[0].to_storage("int8")
    before = {name: whole(tensor).clone() for name, tensor in model.state_dict().items()}
    for state, message in (
        (before, "weight must be a DTensor"),
        (make(1).state_dict(), "slots in the order"),
    ):
        with pytest.raises(RuntimeError, match=message):
            model.load_state_dict(state)
    assert all(torch.equal(whole(tensor), before[name]) for name, tensor in model.state_dict().items())
    # A sharded layer that is not called as a module of fully_shard is no plain one.
    loose = fully_shard(known(make())[0], mesh=at)
    x = randn(4, WIDTH, dtype=torch.float32, device=here())
    with pytest.raises(Exception, match="DTensor"):
        BlockSparseLinear.forward(loose, x)


def two_dimensional(rank: int) -> None:
    """fully_shard of what is cut for tensor parallelism, over 2 x 2 processes."""
    at = two_by_two()
    share = at["data"].get_local_rank(), 2
    model = sharded(parallelize_module(known(make()), at["tensor"], PLAN), at["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    close(of_all(steps_of(model, *share, optimizer=optimizer)), steps_of(known(make())))
    alone, folder = unsharded(model), common_folder()
    save(folder, model, optimizer, at)
    expected = of_all(steps_of(model, *share, optimizer=optimizer, first=3))
    model, optimizer = loaded(folder, sharded(make(7), mesh()), mesh())
    same(model, alone)
    close(of_all(steps_of(model, rank, 4, optimizer=optimizer, first=3)), expected)
    model = sharded(parallelize_module(make(7), at["tensor"], PLAN), at["data"])
    model, optimizer = loaded(folder, model, at)
    same(model, alone)
    close(of_all(steps_of(model, *share, optimizer=optimizer, first=3)), expected)
    torch.manual_seed(rank)
    for layer in layers_of(model):
        layer.reset_parameters()
    assert whole(model[0].weight).unique().numel() > 0.9 * model[0].weight.numel()
    alone = unsharded(model)
    close(of_all(steps_of(model, *share, first=6)), steps_of(alone, first=6))
    steps_of(parallelize_module(make(), at["tensor"], PLAN))
    with pytest.raises(UnsynchronizedPatternError):
        steps_of(parallelize_module(make(rank // 2), at["tensor"], PLAN))  # the other pair has another one
    model = parallelize_module(make(device="meta"), at["tensor"], PLAN).to_empty(device=here())
    for layer in layers_of(model):
        layer.reset_parameters()
    model = sharded(model, at["data"])
    with pytest.raises(UnsynchronizedPatternError):
        steps_of(model, *share)
    synchronize_patterns(model)
    alone = unsharded(model)
    close(of_all(steps_of(model, *share)), steps_of(alone))


def two_dimensional_and_uneven(rank: int) -> None:
    """3 blocks of each of the two parts, for two processes."""
    at = two_by_two()
    pattern = BlockPattern.random((128, 128), block_shape=32, nnz=6, parts=(2, 1), generator=seeded())
    plan: dict[str, Any] = {"0": ColwiseParallel(output_layouts=Replicate())}

    def make(seed: int) -> Any:
        return nn.Sequential(
            BlockSparseLinear(128, 128, pattern=pattern, generator=seeded(seed), device=here())
        )

    alone, model = known(make(0)), known(make(0))
    model = sharded(parallelize_module(model, at["tensor"], plan), at["data"])
    close(of_all(steps_of(model, at["data"].get_local_rank(), 2)), steps_of(alone))
    folder, other = common_folder(), make(1)
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state)
    same(model, other)
    close_to(model, alone)


def replicated_and_sharded(rank: int) -> None:
    torch.manual_seed(rank)
    model = sharded(make(device="meta"), two_by_two()).to_empty(device=here())
    for layer in layers_of(model):
        layer.reset_parameters()
    alone = unsharded(model)
    close(of_all(steps_of(model, rank, 4)), steps_of(alone))


def two_by_two() -> DeviceMesh:
    return init_device_mesh(torch.device(here()).type, (2, 2), mesh_dim_names=("data", "tensor"))


def checkpoints(rank: int) -> None:
    """Saved by so many processes, loaded by others."""
    folder = common_folder()
    alone = known(make())
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01)
    steps_of(alone, optimizer=optimizer)
    trained = copy.deepcopy(alone)
    expected = steps_of(alone, optimizer=optimizer, first=3)
    pair, four = DeviceMesh(torch.device(here()).type, [0, 1]), mesh()

    if rank < 2:
        model = sharded(known(make()), pair)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        steps_of(model, rank, 2, optimizer=optimizer)
        save(folder / "two", model, optimizer, pair)
    dist.barrier()

    model, optimizer = loaded(folder / "two", sharded(make(7), four), four)
    close_to(model, trained)
    save(folder / "four", model, optimizer, four)
    close(of_all(steps_of(model, rank, 4, optimizer=optimizer, first=3)), expected)

    if rank < 2:
        close_to(loaded(folder / "four", sharded(make(8), pair), pair)[0], trained)
    if rank == 0:
        model, optimizer = loaded(folder / "four", make(8), None)
        close(steps_of(model, optimizer=optimizer, first=3), expected)
        model, optimizer = loaded(folder / "four", make(8), None)
        save(folder / "one", model, optimizer, None)
    dist.barrier()
    model, optimizer = loaded(folder / "one", sharded(make(7), four), four)
    close(of_all(steps_of(model, rank, 4, optimizer=optimizer, first=3)), expected)


def checkpoints_of_other_forms(rank: int) -> None:
    """A dense model becomes what was saved, without its weights."""
    folder = common_folder()
    saved = sharded(known(make(density=0.25, block=16)))
    dcp.save(get_model_state_dict(saved), checkpoint_id=folder)
    if rank == 0:
        (folder / "tilesparse.json").write_text(json.dumps(section(saved)))
    dist.barrier()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH))
    prepare(model, json.loads((folder / "tilesparse.json").read_text()))
    alone = copy.deepcopy(model).to_empty(device=here())
    for layer in layers_of(alone):
        layer.reset_parameters()
    sharded(model).to_empty(device=here())
    for one in (alone, model):
        state = get_model_state_dict(one)
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(one, state)
        same(one, saved)
    in_place = sharded(make(9 + rank, density=0.25, block=16))  # with patterns that nobody has agreed on
    dcp.load(get_model_state_dict(in_place), checkpoint_id=folder)
    expected = of_all(steps_of(saved, rank, world()))
    close(of_all(steps_of(model, rank, world())), expected)
    close(of_all(steps_of(in_place, rank, world())), expected)
    other = sharded(known(make(density=0.5)))
    before = forms(other)
    with pytest.raises(dcp.CheckpointException, match="Size mismatch"):
        dcp.load(get_model_state_dict(other), checkpoint_id=folder)
    assert forms(other) == before


def checkpoints_of_whole_layers(rank: int) -> None:
    """One process has read a file; the others get what is theirs."""
    state = make(3).state_dict() if rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    model = sharded(make(rank))
    set_model_state_dict(model, state, options=options)
    same(model, make(3))
    steps_of(model, rank, world())
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    alone = unsharded(model)
    if rank == 0:
        torch.testing.assert_close(full, dict(alone.state_dict()), rtol=0, atol=0, check_device=False)


def checkpoints_of_tensor_parallel(rank: int) -> None:
    folder = common_folder()
    pair, four = DeviceMesh(torch.device(here()).type, [0, 1]), mesh()
    model = parallelize_module(make(), four, PLAN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    steps_of(model, optimizer=optimizer)
    trained = unsharded(model)
    save(folder / "four", model, optimizer, four)
    expected = steps_of(model, optimizer=optimizer, first=3)
    if rank < 2:
        model, optimizer = loaded(folder / "four", parallelize_module(make(5), pair, PLAN), pair)
        close(steps_of(model, optimizer=optimizer, first=3), expected)
    dist.barrier()
    model, optimizer = loaded(folder / "four", sharded(make(7), four), four)
    same(model, trained)
    close(of_all(steps_of(model, rank, 4, optimizer=optimizer, first=3)), expected)
    if rank == 0:
        model, optimizer = loaded(folder / "four", make(8), None)
        close(steps_of(model, optimizer=optimizer, first=3), expected)
    dist.barrier()
    # The blocks of one process are not in the order of the parts.
    dcp.save(get_model_state_dict(sharded(known(make()))), checkpoint_id=folder / "rows")
    model = parallelize_module(make(5), four, PLAN)
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=folder / "rows")
    with pytest.raises(RuntimeError, match=r"2\.pattern must have its slots in the order"):
        set_model_state_dict(model, state)
    with pytest.raises(InvalidPatternError, match="slots in the order"):
        steps_of(model)


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, at: DeviceMesh | None) -> None:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save(
        {"model": of_model, "optimizer": of_optimizer},
        checkpoint_id=folder,
        process_group=None if at is None or at.ndim > 1 else at.get_group(),
        no_dist=at is None,
    )


def loaded(folder: Path, model: nn.Module, at: DeviceMesh | None) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(
        state,
        checkpoint_id=folder,
        process_group=None if at is None or at.ndim > 1 else at.get_group(),
        no_dist=at is None,
    )
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return model, optimizer


SCENES: dict[int, tuple[Callable[[int], None], ...]] = {
    2: (
        *(fsdp, fsdp_in_less_precision, fsdp_with_checkpoints, fsdp_of_2_4, fsdp_in_fewer_bits, moved),
        *(without_agreement, from_meta, tensor_parallel, layouts, beside_dense_layers),
        *(tensor_parallel_storages, tensor_parallel_activations, tensor_parallel_from_meta, moved_blocks),
        *(compiled, in_inference_mode, without_a_source, refusals),
    ),
    4: (
        *(fsdp, replicated_and_sharded, tensor_parallel, two_dimensional, two_dimensional_and_uneven),
        *(refusals, checkpoints, checkpoints_of_other_forms, checkpoints_of_whole_layers),
        checkpoints_of_tensor_parallel,
    ),
}


@pytest.mark.parametrize(("backend", "size"), [*TWO, *FOUR])
def test_every_way_to_share_a_model(backend: str, size: int, tmp_path: Path) -> None:
    play(SCENES[size], backend, size, tmp_path)

"""Experts on several processes, some for each, against one process."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import TWO, common_folder, here, play, seeded, whole
from test_experts import BLOCK, calibration, close, dense_experts, routed
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from zoo import ZOO

import tilesparse as ts
from tilesparse.distributed import ColwiseParallel, ExpertParallel
from tilesparse.errors import InvalidArgumentError, InvalidPatternError, UnsupportedError
from tilesparse.io.manifest import section
from tilesparse.io.reader import prepare

KINDS = ["mixtral", "gpt_oss", "nemotron_h"]
if find_spec("transformers.models.muse_spark") is not None:  # not every version of Transformers 5 has it
    KINDS.append("muse_spark")


def mesh() -> DeviceMesh:
    return init_device_mesh(torch.device(here()).type, (dist.get_world_size(),))


def wide(kind: str) -> Any:
    """Return dense experts whose features can be divided by 4 processes on boundaries of blocks."""
    dense = dense_experts(kind)
    torch.manual_seed(3)
    for name, parameter in list(dense.named_parameters(recurse=False)):
        sizes = [
            size * 4 if size in (32, 64) and dim == between(dense, name) else size
            for dim, size in enumerate(parameter.shape)
        ]
        dense.register_parameter(name, nn.Parameter(0.1 * torch.randn(sizes)))
    return dense


def between(dense: Any, name: str) -> int:
    """Return the dimension of a parameter that lies between the projections; -1 of the bias of down."""
    if name.endswith("bias"):
        return -1 if name.startswith("down") else 1
    return 2 if name.startswith("down") != dense.is_transposed else 1


def make(kind: str, **options: Any) -> Any:
    """Return experts of uneven patterns, one of which keeps a single block."""
    dense = wide(kind)
    sparse = ts.BlockSparseExperts.from_experts(dense, 0.5, block_shape=options.get("block_shape", BLOCK))
    patterns = {}
    for own, layer in sparse.projections().items():
        mask = torch.rand(layer.pattern.grid, generator=seeded(5)) < 0.4
        rows = layer.pattern.grid[0] // layer.experts
        mask[rows : 2 * rows] = False
        mask[rows, 1] = True
        patterns[own] = ts.BlockPattern.from_block_mask(mask, block_shape=layer.block_shape)
    options.pop("block_shape", None)
    names = {"up": "up", "gate_up": "gate_up", "down": "down"}
    patterns = {names[own]: pattern for own, pattern in patterns.items()}
    return ts.BlockSparseExperts.from_experts(dense, patterns=patterns, **options).to(here())


def shared(experts: nn.Module) -> Any:
    return parallelize_module(experts, mesh(), ExpertParallel())


def unshared(experts: Any, kind: str) -> Any:
    """Return one process's experts of the weights that several have."""
    alone = make(kind)
    alone.load_state_dict({name: whole(tensor) for name, tensor in experts.state_dict().items()})
    return alone


def in_blocks(layer: Any, values: Tensor) -> Tensor:
    """Return [blocks of the grid, bn, bk], zeros where none is kept."""
    rows, columns = (one.to(values.device) for one in layer.pattern.block_indices())
    grid = values.new_zeros(*layer.pattern.grid, *values.shape[1:])
    grid[rows, columns] = values
    return grid


def inputs_of(kind: str, only: int | None = None) -> tuple[Tensor, ...]:
    x, index, weights = routed(dense_experts(kind), torch.float32, only=only)
    index[::5, 0] = 4  # no expert
    return tuple(one.to(here()) for one in (x, index, weights))


# ---- what each of the processes does ----


def results_and_gradients(rank: int) -> None:
    for kind in KINDS if dist.get_world_size() == 2 else KINDS[:2]:
        alone, model = make(kind), shared(make(kind))
        for layer in model.projections().values():
            assert layer.weight.to_local().shape[0] * dist.get_world_size() == layer.pattern.nnz
        for only in (None, 1):
            x, index, weights = inputs_of(kind, only)
            x, weights = x.requires_grad_(), weights.requires_grad_()
            y, expected = model(x, index, weights), alone(x, index, weights)
            close(y, expected)
            slope = torch.randn(y.shape, generator=seeded(3)).to(y)
            for one, other in zip(
                torch.autograd.grad(y, [x, weights], slope, retain_graph=True),
                torch.autograd.grad(expected, [x, weights], slope, retain_graph=True),
                strict=True,
            ):
                close(one, other)
            y.backward(slope)
            expected.backward(slope)
            for own, layer in alone.projections().items():
                mine = model.projections()[own]
                kept = layer.pattern.to_block_mask()
                gradient = in_blocks(mine, whole(mine.weight.grad))
                close(gradient[kept], in_blocks(layer, layer.weight.grad)[kept])
                if layer.bias is not None:
                    close(whole(mine.bias.grad), layer.bias.grad)
            for experts in (model, alone):
                experts.zero_grad()


def state_dicts_are_those_of_whole_layers(rank: int) -> None:
    for kind in ("mixtral", "gpt_oss"):
        model = shared(make(kind))
        alone = unshared(model, kind)
        for name, tensor in make(kind).to_dense().items():
            assert torch.equal(alone.to_dense()[name], tensor), name
        inputs = inputs_of(kind)
        close(model(*inputs), alone(*inputs))


def storages(rank: int) -> None:
    for options in (
        {"storage": "int8"},
        {"storage": "float8_e4m3fn"},
        {"storage": "int4", "block_shape": 32},
        {"storage": "int8", "activations": "int8"},
        {"nm": (2, 4), "block_shape": 32},
        {"nm": (2, 4), "storage": "compressed", "block_shape": 32},
    ):
        inputs = inputs_of("mixtral")
        expected = make("mixtral", **options)(*inputs)
        model = shared(make("mixtral", **options))
        close(model(*inputs), expected)


def models_train_as_one(rank: int) -> None:
    (batch,) = calibration("qwen3_moe", 1)
    batch = {name: tensor.to(here()) for name, tensor in batch.items()}
    models = []
    for _ in range(2):
        model = ZOO["qwen3_moe"].make().to(here())
        ts.sparsify_(model, {"experts": ts.BlockSparseConfig(0.5, BLOCK)})
        models.append(model)
    alone, model = models
    parallelize_module(model, mesh(), {"model.layers.*.mlp.experts": ExpertParallel()})
    # Blocks of zeros are trained as others are: the one process gets them, too.
    alone.load_state_dict({name: whole(tensor) for name, tensor in model.state_dict().items()})
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-3, foreach=False) for one in (model, alone)]
    for _ in range(3):
        losses = []
        for one, optimizer in zip((model, alone), optimizers, strict=True):
            loss = one(**batch, labels=batch["input_ids"]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)


def checkpoints(rank: int) -> None:
    """Saved by two processes; loaded by them, from the meta device, and by one."""
    folder = common_folder()
    model = shared(make("mixtral"))
    inputs = inputs_of("mixtral")
    expected = model(*inputs)
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    holder = nn.ModuleDict({"experts": model})
    about = [json.dumps(section(holder)) if rank == 0 else None]
    dist.broadcast_object_list(about)
    again = unshared(model, "mixtral")
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.normal_()
    again = shared(again)
    state = get_model_state_dict(again)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(again, state)
    assert torch.equal(again(*inputs), expected)
    dense = nn.ModuleDict({"experts": wide("mixtral").to("meta")})
    prepare(dense, json.loads(str(about[0])))
    fresh: Any = shared(dense["experts"]).to_empty(device=here())
    for layer in fresh.projections().values():
        layer.reset_parameters()
        counts = layer._shard.padded(layer.pattern)[1]
        assert int(counts.min()) >= 0  # equally many in each shard
    state = get_model_state_dict(fresh)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(fresh, state)
    assert torch.equal(fresh(*inputs), expected)
    alone = unshared(model, "mixtral")
    state = get_model_state_dict(alone)
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    set_model_state_dict(alone, state)
    close(alone(*inputs), expected)


def refusals(rank: int) -> None:
    three = ts.BlockSparseExperts(
        ts.nn.ExpertsLinear(32, 3 * 32, experts=3, block_shape=16),
        ts.nn.ExpertsLinear(16, 3 * 32, experts=3, block_shape=16),
    )
    with pytest.raises(InvalidArgumentError, match="multiple of 2 experts, got 3"):
        shared(three)
    with pytest.raises(InvalidArgumentError, match="must be given BlockSparseExperts, got Linear"):
        shared(nn.Linear(2, 2))
    with pytest.raises(UnsupportedError, match="ExpertParallel"):
        parallelize_module(make("mixtral").down, mesh(), ColwiseParallel())
    model = shared(make("mixtral"))
    with pytest.raises(UnsupportedError, match="plain parameter"):
        shared(model)
    with pytest.raises(UnsupportedError, match="sharded"):
        model.down.to_storage("int8")
    odd = ts.BlockSparseExperts(
        *(
            ts.nn.ExpertsLinear(
                16 * k,
                2 * 16 * n,
                experts=2,
                device="meta",
                pattern=ts.BlockPattern.random((2 * 16 * n, 16 * k), block_shape=16, nnz=3),
            )
            for n, k in ((2, 2), (2, 1))
        )
    )
    with pytest.raises(InvalidPatternError, match="multiple of 2, the number of processes, got 3"):
        shared(odd)


EVERYTHING = (
    results_and_gradients,
    state_dicts_are_those_of_whole_layers,
    storages,
    models_train_as_one,
    checkpoints,
    refusals,
)


@pytest.mark.parametrize(("backend", "size"), [*TWO, ("gloo", 4)])
def test_experts_of_several_processes(backend: str, size: int, tmp_path: Path) -> None:
    play(EVERYTHING if size == 2 else (results_and_gradients, checkpoints), backend, size, tmp_path)

"""Every public function and class, called once under another default device.

Public is what the pages of the reference in docs/api list. Required arguments are found by their names in
`VALUES`; a function whose arguments have other meanings, or that needs more, has a line in `CASES`.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import SIZES
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import tilesparse
from tilesparse import (
    BlockPattern,
    BlockSparseExperts,
    BlockSparseLinear,
    BlockSparseMatrix,
    BlockSparseMLP,
    prune,
    recover,
    sparsify_,
    storage,
    train,
)
from tilesparse.config import BlockSparseConfig
from tilesparse.nn import ExpertsLinear, ReferenceBlockSparseLinear
from tilesparse.tuning import AdviceReport, Device, Product
from tilesparse.tuning.advise import MeasuredLayers

API = Path(__file__).resolve().parents[2] / "docs/api"

# What only this package makes, or others call: Transformers' Trainer, the patcher, optimizers, the native
# module; what always raises, or takes the arguments of `torch.Tensor.to`.
NOT_CALLED = {
    f"{module}.{name}"
    for module, names in {
        "BlockPattern": "from_index",
        "BlockSparseMatrix": "to",
        "nn.ExpertsLinear": "cut from_linear",
        "recover.trainer.DistillationTrainer": "compute_loss",
        "recover.trainer.PatternCallback": "on_optimizer_step on_save on_train_begin",
        "train.PatternSchedule": "add_param_group",
        "tuning": "AdviceReport",
        "tuning.Device": "of",
        "tuning.Product": "descriptor",
        "tuning.advise": "Estimate MeasuredLayers",
        "tuning.product": "Candidate KernelChoice KernelInfo",
        "tuning.store": "Measurement",
    }.items()
    for name in names.split()
}
BLOCK = (32, 32)
CONFIG = BlockSparseConfig(0.5, BLOCK)
CPU = Device("CPU", None, 1)
DATA = API.parents[1] / "tests/data/compressed-tensors"


@cache
def public() -> dict[str, Any]:
    """Functions, classes and the public methods of these that the reference lists, by name.

    Those of tilesparse.jax have nothing of PyTorch.
    """
    found = {}
    pages = "\n".join(page.read_text() for page in sorted(API.glob("*.md")))
    for name, options in re.findall(r"^::: tilesparse\.(?!jax\b)([\w.]+)\n((?:    .*\n)*)", pages, re.M):
        for full, value in _listed(name, re.search(r"members: \[(.*)\]", options)):
            found[full] = value
            if inspect.isclass(value) and not issubclass(value, Exception):
                classes = value.__mro__[::-1] if "inherited_members: true" in options else [value]
                own = [cls for cls in classes if cls.__module__.startswith("tilesparse")]
                found |= {f"{full}.{key}": method for cls in own for key, method in _methods(cls, value)}
    return found


def _listed(name: str, members: re.Match[str] | None) -> Iterator[tuple[str, Any]]:
    try:
        value: Any = importlib.import_module(f"tilesparse.{name}")
    except ImportError:
        module, _, attribute = f"tilesparse.{name}".rpartition(".")
        yield name, getattr(importlib.import_module(module), attribute)
        return
    names = members[1].split(", ") if members else getattr(value, "__all__", [])
    for member in names:
        if not isinstance(getattr(value, member), ModuleType):
            yield f"{name}.{member}", getattr(value, member)


def _methods(cls: type, value: type) -> Iterator[tuple[str, Any]]:
    for key, method in vars(cls).items():
        if inspect.isfunction(method) or isinstance(method, classmethod | staticmethod):
            if not key.startswith("_") and takes_any(getattr(value, key)):
                yield key, getattr(value, key)
        elif isinstance(method, property) and method.fset is not None:
            yield f"{key} =", method


def takes_any(function: Any) -> bool:
    return bool({*inspect.signature(function).parameters} - {"self"})


def _named(function: Any) -> list[inspect.Parameter]:
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    own = inspect.signature(function).parameters.values()
    return [one for one in own if one.name != "self" and one.kind not in kinds]


# ---- arguments ----


def pattern() -> BlockPattern:
    return BlockPattern.full((32, 64), block_shape=BLOCK)


def gappy() -> BlockPattern:
    return BlockPattern.from_blocks([(0, 0)], shape=(32, 64), block_shape=BLOCK)


def values() -> torch.Tensor:
    return torch.ones(2, *BLOCK)


def matrix() -> BlockSparseMatrix:
    return BlockSparseMatrix(values(), pattern())


def layer(**options: Any) -> BlockSparseLinear:
    return BlockSparseLinear(64, 32, pattern=pattern(), **options)


def narrow() -> BlockSparseLinear:
    return BlockSparseLinear(64, 32, block_shape=32)


def wide() -> BlockSparseLinear:
    return BlockSparseLinear(32, 64, block_shape=32)


def layered(**options: Any) -> nn.Module:
    """With a pattern that is not drawn."""
    return nn.Sequential(layer(**options))


def sparse() -> nn.Module:
    return nn.Sequential(BlockSparseLinear(64, 64, block_shape=32), nn.ReLU(), narrow())


def dense() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))


def tokens(features: int = 64) -> torch.Tensor:
    return torch.ones(3, features)


def offsets() -> torch.Tensor:
    return torch.tensor([0, 3], dtype=torch.int32)


def batches() -> list[torch.Tensor]:
    return [torch.randn(80, 64)]


def projection(rows: int, columns: int) -> ExpertsLinear:
    return ExpertsLinear(columns, 2 * rows, experts=2, block_shape=BLOCK)


def experts() -> BlockSparseExperts:
    return BlockSparseExperts(projection(64, 64), projection(64, 32))


def dense_experts() -> nn.Module:
    made: nn.Module = MixtralExperts(MixtralConfig(hidden_size=64, intermediate_size=64, num_local_experts=2))
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


def choices() -> torch.Tensor:
    return torch.zeros(len(tokens()), 1, dtype=torch.long)


def snapshots() -> list[tuple[int, dict[str, torch.Tensor]]]:
    return [(step, {"a": torch.eye(2, dtype=torch.bool)}) for step in (0, 1)]


def saved() -> str:
    if not Path("saved").exists():
        tilesparse.save(layered(), "saved")
    return "saved"


def advised() -> AdviceReport:
    measured = MeasuredLayers((64, 64), 80, "float32", {None: 1.0}, ("0",))
    return AdviceReport(CPU, {"torch": "2"}, (measured,), 2.0, None, 1.0, {})


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def schedule(kind: Any = train.PatternSchedule, model: nn.Module | None = None, **options: Any) -> Any:
    model = model or sparse()
    return kind(model, optimizer(model), **(options or {"every": 2}))


def masked() -> Any:
    return schedule(train.MaskSchedule, layered(nm=(2, 4)), every=2, decay=0.1)


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": 1}))


def sparse_llama() -> Any:
    model = llama()
    sparsify_(model, BlockSparseConfig(0.5, BLOCK), layers=".*up_proj")
    return model


def loss() -> recover.DistillationLoss:
    return recover.DistillationLoss(logits=1.0)


def group() -> prune.PermutationGroup:
    return prune.PermutationGroup(("0",), "2")


# By the name of an argument, in every function that requires it and has no other in `CASES`.
VALUES: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(("a", "x", "input"), tokens),
    **dict.fromkeys(("y", "dy"), lambda: tokens(32)),
    **dict.fromkeys(("dense", "mask", "weight"), lambda: torch.ones(32, 64)),
    "b": lambda: tokens().t(),
    "batches": batches,
    "block_shape": lambda: BLOCK,
    "blocks": lambda: [(0, 1)],
    "config": lambda: CONFIG,
    "configs": lambda: {"0": [CONFIG]},
    "contender": lambda: None,
    "density": lambda: 0.5,
    "device": lambda: "cpu",
    "dtype": lambda: torch.float32,
    "factor": lambda: 2.0,
    "folder": saved,
    "fractions": lambda: 0.5,
    "in_features": lambda: 64,
    "layer": layer,
    "layers": lambda: [layer(), layer()],
    "linear": lambda: nn.Linear(64, 32),
    "matrix": lambda: torch.ones(32, 64).to_sparse_bsr(BLOCK),
    "model": sparse,
    "nm": lambda: (2, 4),
    "nnz": lambda: 2,
    "offsets": offsets,
    "other": pattern,
    "out_features": lambda: 32,
    "path": lambda: "new",
    "pattern": pattern,
    "policy": lambda: "sparse",
    "threshold": lambda: 0.5,
    "regex": lambda: ".*",
    "schedule": schedule,
    "scores": values,
    "shape": lambda: (32, 64),
    "slots": lambda: [0],
    "snapshots": snapshots,
    "source": sparse,
    "spec": lambda: layer().spec,
    "storage": lambda: "int8",
    "teacher": dense,
    "tokens": lambda: 8,
    "values": values,
}

# What a method is called on, by its class.
OWNERS: dict[str, Callable[[], Any]] = {
    "BlockPattern": pattern,
    "BlockSparseExperts": experts,
    "BlockSparseLinear": layer,
    "BlockSparseMLP": lambda: BlockSparseMLP(wide(), narrow()),
    "BlockSparseMatrix": matrix,
    "config.LayerSpec": lambda: layer().spec,
    "nn.ExpertsLinear": lambda: projection(64, 64),
    "nn.ReferenceBlockSparseLinear": lambda: ReferenceBlockSparseLinear(layer()),
    "recover.DistillationLoss": loss,
    "train.AveragedModel": lambda: train.AveragedModel(layered()),
    "train.BlockGates": lambda: train.BlockGates(sparse()),
    "train.Gradual": lambda: schedule(train.Gradual, density=0.5, steps=10),
    "train.MaskSchedule": masked,
    "train.PatternSchedule": schedule,
    "tuning.AdviceReport": advised,
    "tuning.advise.MeasuredLayers": lambda: advised().layers[0],
}

# By name: other arguments, or more; "self" is what a method is called on.
CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "load": lambda: {"model_or_class": layered(), "path": saved()},
    "functional.gated": lambda: {"y": tokens()},
    "functional.quantized_linear": lambda: {
        "values": values().to(torch.int8),
        "scales": torch.ones(32),
    },
    "integrations.transformers.follow": lambda: {"model": llama()},
    "BlockSparseLinear": lambda: {"block_shape": BLOCK},
    "BlockSparseLinear.from_state": lambda: {"tensors": layer().state_dict()},
    "BlockSparseLinear.cut": lambda: {"rows": (0, 16)},
    "BlockSparseLinear.from_linear": lambda: {"block_shape": BLOCK},
    "BlockSparseLinear.update_mask_": lambda: {"self": layer(nm=(2, 4))},
    "BlockSparseMLP": lambda: {"up": wide(), "down": narrow()},
    "BlockSparseMLP.from_module": lambda: {"module": nn.Sequential(wide(), nn.GELU(), narrow())},
    "BlockSparseMLP.forward": lambda: {"x": tokens(32)},
    "BlockSparseExperts": lambda: {"up": projection(64, 64), "down": projection(64, 32)},
    "BlockSparseExperts.from_experts": lambda: {"module": dense_experts(), "block_shape": BLOCK},
    "BlockSparseExperts.forward": lambda: {
        "hidden_states": tokens(),
        "top_k_index": choices(),
        "top_k_weights": torch.rand(choices().shape),
    },
    "nn.ExpertsLinear": lambda: {"out_features": 64, "experts": 2, "block_shape": BLOCK},
    "nn.ExpertsLinear.forward": lambda: {"offsets": torch.tensor([0, 3, len(tokens())], dtype=torch.int32)},
    "distributed.synchronize_patterns": lambda: {"model": nn.Sequential()},
    "config.LayerSpec.from_json": lambda: {"entry": layer().spec.to_json()},
    "sparsify_": lambda: {"model": dense()},
    "convert": lambda: {"source": DATA / "int8", "folder": "new"},
    "quantize_": lambda: {"config": BlockSparseConfig.w8a16()},
    "BlockPattern": lambda: {"crow_indices": [0, 2], "col_indices": [0, 1]},
    "BlockPattern.random": lambda: {"block_shape": BLOCK, "density": 0.5},
    "BlockPattern.from_block_mask": lambda: {"mask": torch.ones(1, 2)},
    "BlockPattern.from_scores": lambda: {"scores": torch.ones(1, 2), "nnz": 1},
    "BlockPattern.from_dense": lambda: {"nnz": 1},
    "BlockPattern.refined": lambda: {"block_shape": (16, 32)},
    "BlockPattern.index_on": lambda: {"device": torch.device("cpu")},
    "BlockPattern.move_blocks_": lambda: {"self": gappy()},
    "prune.PermutationGroup": lambda: {"producers": ("0",), "consumer": "2"},
    "prune.allocate": lambda: {
        "profiles": {"0": {CONFIG: 0.1}},
        "model": dense(),
        "parameters": 10**6,
    },
    "prune.measure_errors": lambda: {"model": dense(), "configs": [CONFIG], "layers": "0"},
    "prune.permute_": lambda: {"model": dense(), "groups": [group()]},
    "prune.PermutationGroup.permute_": lambda: {"self": group(), "model": dense(), "order": torch.arange(64)},
    "prune_": lambda: {"model": dense(), "layers": "0"},
    "distill_": lambda: {"loss": loss(), "steps": 1, "lr": 0.1},
    "reconstruct_": lambda: {"batches": [*batches(), *batches()], "submodules": ["0"], "epochs": 1},
    "recover.DistillationLoss": lambda: {"logits": 1.0},
    "recover.DistillationLoss.terms": lambda: {"student": tokens(), "teacher": tokens()},
    "recover.DistillationLoss.total": lambda: {"terms": {"logits": torch.ones(())}},
    "recover.trainer.DistillationTrainer": lambda: {"loss": loss(), "model": sparse()},
    "storage.compress": lambda: {"mask": storage.two_of_four(values())},
    "storage.quantize_weights": lambda: {"dtype": torch.int8},
    "storage.row_scales": lambda: {"scales": torch.ones(32)},
    "train.AveragedModel": lambda: {"model": layered()},
    "train.AveragedModel.update_parameters": lambda: {"model": layered()},
    "train.Gradual": lambda: {"steps": 10},
    "train.GroupLasso": lambda: {"strength": 0.1},
    "train.MaskSchedule": lambda: {"model": layered(nm=(2, 4)), "every": 2, "decay": 0.1},
    "train.PatternSchedule": lambda: {"every": 2},
    "train.parameter_groups": lambda: {"lr": 0.1},
    "advise": lambda: {
        "model": nn.Sequential(BlockSparseLinear(64, 64, block_shape=32), nn.Linear(64, 64)),
        "batch": batches()[0],
        "densities": [0.5],
        "block_shapes": [32],
    },
    "tuning.Device": lambda: {"name": "a", "compute_capability": (9, 0), "multiprocessors": 8},
    "tuning.Device.find": lambda: {"what": "cpu"},
    "tuning.Product": lambda: {"out_features": 64},
    "tuning.choose": lambda: {"product": Product(64, 64, 8, block_shape=32)},
    "tuning.prefer": lambda: {"kernel": "cpu"},
    "tuning.AdviceReport.milliseconds": lambda: {"name": "0", "config": None},
    "tuning.advise.MeasuredLayers.time": lambda: {"way": None},
    "tuning.tune": lambda: {
        "products": [Product(64, 64, 8, block_shape=32)],
        "candidates": 1,
        "repetitions": 1,
    },
}


def call_of(name: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return what has this name, and the arguments it requires; of a property, its setter."""
    value, given = public()[name], CASES.get(name, dict)()
    place, _, method = name.rpartition(".")
    owner = given.pop("self", None)
    if owner is None and place in OWNERS and (isinstance(value, property) or inspect.isfunction(value)):
        owner = OWNERS[place]()
    if isinstance(value, property):
        attribute = method.removesuffix(" =")
        return partial(setattr, owner, attribute), {"_": VALUES[attribute]()}
    function = value if owner is None else getattr(owner, method)
    required = [one.name for one in _named(function) if one.default is one.empty]
    if method == "load_state_dict":
        given[required[0]] = owner.state_dict()
    given |= {name: VALUES[name]() for name in required if name not in {*given, "optimizer"}}
    if "optimizer" in required:
        given["optimizer"] = optimizer(given["model"])
    return function, given


def takes_arguments(value: Any) -> bool:
    return isinstance(value, type | property) or bool(_named(value))


def is_record(value: Any) -> bool:
    """Return True for what functions give back, which nobody else makes."""
    return inspect.isclass(value) and (dataclasses.is_dataclass(value) or issubclass(value, tuple))


CALLED = sorted(
    name
    for name, value in public().items()
    if name not in NOT_CALLED and takes_arguments(value) and (name in CASES or not is_record(value))
)


def test_the_tables_name_what_is_public() -> None:
    assert public().keys() >= NOT_CALLED and {*CALLED} >= CASES.keys()


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLED)
def test_the_default_device_is_for_new_tensors_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    if name.startswith("distributed."):
        request.getfixturevalue("group_of_one")
    function, arguments = call_of(name)
    with torch.device("meta"):  # whose tensors have no contents, for whoever takes them for others
        result = function(*arguments.values()) if name.endswith(" =") else function(**arguments)
        if name == "tuning.prefer":
            with result:
                pass

"""Every public function and class, called once under another default device.

Public is what the pages of the reference in docs/api list. A function that is not in `CASES` fails the test.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import scipy.sparse
import torch
import torch.distributed as dist
from torch import nn

import tilesparse
from tilesparse import (
    BlockPattern,
    BlockSparseExperts,
    BlockSparseLinear,
    BlockSparseMatrix,
    BlockSparseMLP,
    prune,
    recover,
    storage,
    train,
)
from tilesparse.config import BlockSparseConfig
from tilesparse.model import BlockSparseModelPatcher
from tilesparse.nn import ExpertsLinear, ReferenceBlockSparseLinear
from tilesparse.tuning import AdviceReport, Device, LatencyTable, MeasuredLayers, Product, prefer

API = Path(__file__).resolve().parents[2] / "docs/api"


@cache
def public() -> dict[str, Any]:
    """What the reference lists, by name: functions, classes and the public methods of these."""
    found = {}
    pages = "\n".join(page.read_text() for page in sorted(API.glob("*.md")))
    for name, options in re.findall(r"^::: tilesparse\.([\w.]+)\n((?:    .*\n)*)", pages, re.M):
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
            function = getattr(value, key)
            own = [name for name in inspect.signature(function).parameters if name != "self"]
            if not key.startswith("_") and own:
                yield key, function
        elif isinstance(method, property) and method.fset is not None:
            yield f"{key} =", method


# What only this package makes, or others call: Transformers' Trainer, the patcher, optimizers, the native
# module; what takes the arguments of `torch.Tensor.to`; and a tuple that `PermutationGroup` checks.
NOT_CALLED = {
    "model.PatchReport",
    "model.FuseReport",
    "model.FusedMLP",
    "model.PatchedLayer",
    "model.SkippedLayer",
    "tuning.AdviceReport",
    "tuning.Candidate",
    "tuning.Estimate",
    "tuning.LatencyTable",
    "tuning.MeasuredLayers",
    "model.inference.InferenceReport",
    "model.inference.PreparedProduct",
    "model.inference.SharedProduct",
    "model.Size",
    "nn.ExpertsLinear.cut",  # which always raise
    "nn.ExpertsLinear.from_linear",
    "prune.AllocatedLayer",
    "prune.Allocation",
    "prune.ErrorProfiles",
    "prune.PermutationReport",
    "prune.PermutedGroup",
    "prune.PruneReport",
    "prune.PrunedLayer",
    "quantize.QuantizeReport",
    "quantize.QuantizedLayer",
    "recover.DistillationHistory",
    "recover.FittedSubmodule",
    "recover.ReconstructionReport",
    "recover.SkippedSubmodule",
    "recover.trainer.DistillationTrainer.compute_loss",
    "recover.trainer.PatternCallback.on_optimizer_step",
    "recover.trainer.PatternCallback.on_save",
    "recover.trainer.PatternCallback.on_train_begin",
    "tuning.KernelChoice",
    "tuning.KernelInfo",
    "tuning.Measurement",
    "BlockPattern.from_index",
    "BlockSparseLinear.allocate",
    "BlockSparseLinear.assign",
    "BlockSparseLinear.register_parameter",  # of nn.Module
    "BlockSparseLinear.take_over",
    "BlockSparseLinear.update_spec",
    "tuning.Device.of",
    "tuning.Product.descriptor",
    "BlockSparseMatrix.to",
    "model.BlockSparseModelPatcher.new_child_module",
    "train.PatternSchedule.add_param_group",
    "prune.Rows",
    "model.DenseParameter",
}
BLOCK = (32, 32)


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


def sparse() -> nn.Module:
    return nn.Sequential(
        BlockSparseLinear(64, 64, block_shape=32), nn.ReLU(), BlockSparseLinear(64, 32, block_shape=32)
    )


def dense() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))


class Lossy(nn.Sequential):
    def forward(self, x: Any) -> SimpleNamespace:
        for module in self:
            x = module(x)
        return SimpleNamespace(loss=x.sum())


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def trained(model: nn.Module, **more: Any) -> dict[str, Any]:
    return {"model": model, "optimizer": optimizer(model), **more}


def of_two_of_four() -> nn.Module:
    return nn.Sequential(layer(nm=(2, 4)))


def pruned() -> dict[str, Any]:
    config = BlockSparseConfig(0.5, BLOCK)
    return {"model": dense(), "config": config, "batches": batches(), "layers": "0"}


def distilled() -> dict[str, Any]:
    loss = recover.DistillationLoss(logits=1.0)
    return trained(sparse(), teacher=dense(), batches=batches(), loss=loss, steps=1)


def batches() -> list[torch.Tensor]:
    return [torch.randn(80, 64)]


def mlp() -> BlockSparseMLP:
    return BlockSparseMLP(
        BlockSparseLinear(32, 64, block_shape=32), BlockSparseLinear(64, 32, block_shape=32)
    )


def projection(rows: int, columns: int) -> ExpertsLinear:
    return ExpertsLinear(columns, 2 * rows, experts=2, block_shape=BLOCK)


def dense_experts() -> nn.Module:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = MixtralConfig(hidden_size=64, intermediate_size=64, num_local_experts=2)
    experts: nn.Module = MixtralExperts(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    return experts


def choices() -> torch.Tensor:
    return torch.zeros(len(tokens()), 1, dtype=torch.long)


def snapshots() -> list[tuple[int, dict[str, torch.Tensor]]]:
    return [(step, {"a": torch.eye(2, dtype=torch.bool)}) for step in (0, 1)]


def saved() -> str:
    if not Path("saved").exists():
        tilesparse.save(layered(), "saved")
    return "saved"


def layered() -> nn.Module:
    """With a pattern that is not drawn."""
    return nn.Sequential(layer())


CPU = Device("CPU", None, 1)


def table() -> LatencyTable:
    config = BlockSparseConfig(0.5, BLOCK)
    return LatencyTable(CPU, 8, "float32", {}, {(64, 64): {None: 1.0, config: 0.5}})


def table_file() -> str:
    table().save("table.json")
    return "table.json"


def advised() -> AdviceReport:
    measured = MeasuredLayers((64, 64), 80, "float32", {None: 1.0}, ("0",))
    return AdviceReport(CPU, {"torch": "2"}, (measured,), 2.0, None, 1.0, {})


def advice_file() -> str:
    advised().save("advice.json")
    return "advice.json"


def profiles() -> dict[str, dict[BlockSparseConfig, float]]:
    return {"0": {BlockSparseConfig(0.5, BLOCK): 0.1}}


def schedule(make: Callable[..., Any], model: nn.Module | None = None, **options: Any) -> Any:
    made = make(**trained(model or sparse(), **options))
    name = next(iter(inspect.signature(made.load_state_dict).parameters))
    return made.load_state_dict, {name: made.state_dict()}


def callback() -> dict[str, Any]:
    model = sparse()
    return {"schedule": train.PatternSchedule(model, optimizer(model), every=2)}


def llama() -> Any:
    import transformers
    from helpers import SIZES

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 1}))


def sparse_llama() -> Any:
    model = llama()
    made = BlockSparseModelPatcher()
    made.add_pattern(".*up_proj", {"density": 0.5, "block_shape": BLOCK})
    made.patch_model(model)
    return model


def patcher() -> BlockSparseModelPatcher:
    made = BlockSparseModelPatcher()
    made.add_pattern(".*", {"density": 0.5, "block_shape": BLOCK})
    return made


def patched() -> tuple[Callable[..., Any], dict[str, Any]]:
    made, model = patcher(), dense()
    made.patch_model(model, keep_dense=True)
    return made.undo, {"model": model}


def of_schedule(name: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    made = callback()["schedule"]
    return getattr(made, name), {}


def fractioned() -> tuple[Callable[..., Any], dict[str, Any]]:
    made = callback()["schedule"]
    return lambda fractions: setattr(made, "fractions", fractions), {"fractions": 0.5}


def assigned(name: str, make: Callable[[], Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    owner = layer()
    return lambda **given: setattr(owner, name, given[name]), {name: make()}


def tokens(features: int = 64) -> torch.Tensor:
    return torch.ones(3, features)


SCORES = {"weight": lambda: torch.ones(64, 64), "block_shape": lambda: BLOCK}
LAYER = {"in_features": 64, "out_features": 64}

# By name: valid arguments, or of methods the bound one and its arguments.
CASES: dict[str, Callable[[], Any]] = {
    "save": lambda: {"model": sparse(), "path": "new"},
    "load": lambda: {"model_or_class": layered(), "path": saved()},
    "functional.linear": lambda: {"x": tokens(), "values": values(), "pattern": pattern()},
    "functional.grouped_linear": lambda: {
        "x": tokens(),
        "values": values(),
        "pattern": pattern(),
        "offsets": torch.tensor([0, 3], dtype=torch.int32),
    },
    "functional.gated": lambda: {"y": tokens()},
    "functional.quantize": lambda: {"x": tokens()},
    "functional.quantized_linear": lambda: {
        "x": tokens(),
        "values": values().to(torch.int8),
        "pattern": pattern(),
        "scales": torch.ones(32),
    },
    "functional.dds": lambda: {"a": tokens(), "values": values(), "pattern": pattern()},
    "functional.dsd": lambda: {"values": values(), "pattern": pattern(), "b": tokens().t()},
    "functional.sdd": lambda: {"y": tokens(32), "x": tokens(), "pattern": pattern()},
    "integrations.transformers.follow": lambda: {"model": llama()},
    "integrations.transformers.to_dense": lambda: {"model": llama()},
    "integrations.transformers.model_card": lambda: {"model": sparse_llama()},
    "integrations.peft.merge_loss": lambda: {"model": sparse()},
    "BlockSparseLinear": lambda: {**LAYER, "block_shape": BLOCK},
    "BlockSparseLinear.from_spec": lambda: {"spec": layer().spec},
    "BlockSparseLinear.from_state": lambda: {"spec": layer().spec, "tensors": layer().state_dict()},
    "BlockSparseLinear.cut": lambda: (layer().cut, {"rows": (0, 16)}),
    "nn.concatenate": lambda: {"layers": [layer(), layer()]},
    "BlockSparseLinear.from_linear": lambda: {"linear": nn.Linear(64, 32), "block_shape": BLOCK},
    "BlockSparseLinear.set_nm": lambda: (layer().set_nm, {"nm": (2, 4)}),
    "BlockSparseLinear.update_mask_": lambda: (layer(nm=(2, 4)).update_mask_, {}),
    "BlockSparseLinear.to_storage": lambda: (layer().to_storage, {"storage": "int8"}),
    "BlockSparseLinear.pattern =": lambda: assigned("pattern", pattern),
    "BlockSparseLinear.policy =": lambda: assigned("policy", lambda: "sparse"),
    "BlockSparseLinear.in_features =": lambda: assigned("in_features", lambda: 64),
    "BlockSparseLinear.out_features =": lambda: assigned("out_features", lambda: 32),
    "BlockSparseLinear.reset_parameters": lambda: (layer().reset_parameters, {}),
    "BlockSparseLinear.forward": lambda: (layer(), {"input": tokens()}),
    "BlockSparseLinear.prepack": lambda: (layer().prepack, {}),
    "BlockSparseMLP": lambda: {
        "up": BlockSparseLinear(32, 64, block_shape=32),
        "down": BlockSparseLinear(64, 32, block_shape=32),
    },
    "BlockSparseMLP.from_module": lambda: {
        "module": nn.Sequential(
            BlockSparseLinear(32, 64, block_shape=32), nn.GELU(), BlockSparseLinear(64, 32, block_shape=32)
        )
    },
    "BlockSparseMLP.forward": lambda: (mlp(), {"x": tokens(32)}),
    "BlockSparseExperts": lambda: {"up": projection(64, 64), "down": projection(64, 32)},
    "BlockSparseExperts.from_experts": lambda: {"module": dense_experts(), "block_shape": BLOCK},
    "BlockSparseExperts.forward": lambda: (
        BlockSparseExperts(projection(64, 64), projection(64, 32)),
        {"hidden_states": tokens(), "top_k_index": choices(), "top_k_weights": torch.rand(choices().shape)},
    ),
    "nn.from_block_scales": lambda: {
        "weight": torch.zeros(128, 256).to(torch.float8_e4m3fn),
        "weight_scale_inv": torch.ones(1, 2),
    },
    "nn.ExpertsLinear": lambda: {"in_features": 64, "out_features": 64, "experts": 2, "block_shape": BLOCK},
    "nn.ExpertsLinear.from_layers": lambda: {"layers": [layer(), layer()]},
    "nn.ExpertsLinear.forward": lambda: (
        projection(64, 64),
        {"x": tokens(), "offsets": torch.tensor([0, 3, len(tokens())], dtype=torch.int32)},
    ),
    "nn.ReferenceBlockSparseLinear": lambda: {"layer": layer()},
    "nn.ReferenceBlockSparseLinear.forward": lambda: (
        ReferenceBlockSparseLinear(layer()),
        {"input": tokens()},
    ),
    "distributed.ColwiseParallel": dict,
    "distributed.ExpertParallel": dict,
    "distributed.ExpertTensorParallel": dict,
    "distributed.RowwiseParallel": dict,
    "distributed.synchronize_patterns": lambda: {"model": nn.Sequential()},
    "BlockSparseConfig": dict,
    "config.LayerSpec": lambda: {"shape": (32, 64), "block_shape": BLOCK, "nnz": 2, "dtype": torch.float32},
    "config.LayerSpec.with_storage": lambda: (layer().spec.with_storage, {"storage": "int8"}),
    "config.LayerSpec.from_json": lambda: {"entry": layer().spec.to_json()},
    "sparsify_": lambda: {"model": dense(), "config": BlockSparseConfig(0.5, BLOCK)},
    "prepare_for_inference_": lambda: {"model": sparse()},
    "model.BlockSparseModelPatcher": dict,
    "model.BlockSparseModelPatcher.add_pattern": lambda: (patcher().add_pattern, {"regex": ".*"}),
    "model.BlockSparseModelPatcher.is_patchable": lambda: (
        patcher().is_patchable,
        {"name": "a", "module": nn.Linear(64, 32)},
    ),
    "model.BlockSparseModelPatcher.get_patchable_layers": lambda: (
        patcher().get_patchable_layers,
        {"model": dense()},
    ),
    "model.BlockSparseModelPatcher.patch_model": lambda: (patcher().patch_model, {"model": dense()}),
    "model.BlockSparseModelPatcher.fuse_mlps_": lambda: (patcher().fuse_mlps_, {"model": mlp()}),
    "model.BlockSparseModelPatcher.undo": patched,
    "BlockPattern": lambda: {
        "crow_indices": [0, 2],
        "col_indices": [0, 1],
        "shape": (32, 64),
        "block_shape": BLOCK,
    },
    "BlockPattern.random": lambda: {"shape": (32, 64), "block_shape": BLOCK, "density": 0.5},
    "BlockPattern.full": lambda: {"shape": (32, 64), "block_shape": BLOCK},
    "BlockPattern.from_blocks": lambda: {"blocks": [(0, 0)], "shape": (32, 64), "block_shape": BLOCK},
    "BlockPattern.from_block_mask": lambda: {"mask": torch.ones(1, 2), "block_shape": BLOCK},
    "BlockPattern.from_mask": lambda: {"mask": torch.ones(32, 64), "block_shape": BLOCK},
    "BlockPattern.from_bsr": lambda: {"matrix": torch.ones(32, 64).to_sparse_bsr(BLOCK)},
    "BlockPattern.from_scipy": lambda: {"matrix": scipy.sparse.eye_array(64), "block_shape": BLOCK},
    "BlockPattern.from_scores": lambda: {"scores": torch.ones(1, 2), "block_shape": BLOCK, "nnz": 1},
    "BlockPattern.from_dense": lambda: {"dense": torch.ones(32, 64), "block_shape": BLOCK, "nnz": 1},
    "BlockPattern.refined": lambda: (pattern().refined, {"block_shape": (16, 32)}),
    "BlockPattern.to": lambda: (pattern().to, {"device": "cpu"}),
    "BlockPattern.index_on": lambda: (pattern().index_on, {"device": torch.device("cpu")}),
    "BlockPattern.update_": lambda: (pattern().update_, {"other": pattern()}),
    "BlockPattern.move_blocks_": lambda: (gappy().move_blocks_, {"slots": [0], "blocks": [(0, 1)]}),
    "BlockSparseMatrix": lambda: {"values": values(), "pattern": pattern()},
    "BlockSparseMatrix.zeros": lambda: {"pattern": pattern()},
    "BlockSparseMatrix.randn": lambda: {"pattern": pattern()},
    "BlockSparseMatrix.from_blocks": lambda: {
        "blocks": [(0, 0), (0, 1)],
        "values": values(),
        "shape": (32, 64),
    },
    "BlockSparseMatrix.from_dense": lambda: {"dense": torch.ones(32, 64), "block_shape": BLOCK},
    "BlockSparseMatrix.from_bsr": lambda: {"matrix": torch.ones(32, 64).to_sparse_bsr(BLOCK)},
    "BlockSparseMatrix.from_scipy": lambda: {"matrix": scipy.sparse.eye_array(64), "block_shape": BLOCK},
    "BlockSparseMatrix.equal": lambda: (matrix().equal, {"other": matrix()}),
    "plot.evolution": lambda: {"snapshots": snapshots()},
    "plot.patterns": lambda: {"source": sparse()},
    "prune.PermutationGroup": lambda: {"producers": ("0",), "consumer": "2", "units": 64},
    "tuning.LatencyTable.milliseconds": lambda: (
        table().milliseconds,
        {"shape": (64, 64), "config": BlockSparseConfig(0.5, BLOCK)},
    ),
    "tuning.LatencyTable.total": lambda: (table().total, {"model": dense(), "configs": {"0": None}}),
    "tuning.LatencyTable.save": lambda: (table().save, {"path": "new.json"}),
    "tuning.LatencyTable.load": lambda: {"path": table_file()},
    "prune.allocate": lambda: {"profiles": profiles(), "model": dense(), "parameters": 10**6},
    "prune.erk": lambda: {"model": dense(), "layers": ["0"], "density": 0.5, "block_shape": 32},
    "prune.find_permutation_groups": lambda: {"model": dense()},
    "prune.measure_errors": lambda: {
        "model": dense(),
        "batches": batches(),
        "configs": [BlockSparseConfig(0.5, BLOCK)],
        "layers": "0",
    },
    "tuning.measure_latency": lambda: {
        "model": dense(),
        "configs": {"0": [BlockSparseConfig(0.5, BLOCK)]},
        "tokens": 8,
        "repetitions": 1,
    },
    "prune.permute_": lambda: {
        "model": dense(),
        "group": prune.PermutationGroup(("0",), "2", 64),
        "order": torch.arange(64),
    },
    "prune.permute_model": lambda: {
        "model": dense(),
        "batches": batches(),
        "config": BlockSparseConfig(0.5, BLOCK),
        "groups": [prune.PermutationGroup(("0",), "2", 64)],
    },
    "advise": lambda: {
        "model": nn.Sequential(BlockSparseLinear(64, 64, block_shape=32), nn.Linear(64, 64)),
        "batch": batches()[0],
        "densities": [0.5],
        "block_shapes": [32],
    },
    "tuning.AdviceReport.load": lambda: {"path": advice_file()},
    "tuning.AdviceReport.save": lambda: (advised().save, {"path": "new.json"}),
    "tuning.AdviceReport.slower_than_dense": lambda: (
        advised().slower_than_dense,
        {"contender": None},
    ),
    "tuning.MeasuredLayers.time": lambda: (advised().layers[0].time, {"way": None}),
    "quantize_": lambda: {"model": sparse(), "batches": batches()},
    "prune_": pruned,
    "prune.prune_": pruned,
    "prune.refit": lambda: {
        "weight": torch.ones(32, 64),
        "second_moment": torch.eye(64),
        "pattern": pattern(),
    },
    "tuning.time_layers": lambda: {"model": dense(), "layers": ["0"], "tokens": 8, "repetitions": 1},
    "prune.uniform": lambda: {"model": dense(), "layers": ["0"], "density": 1.0},
    "recover.DistillationLoss": lambda: {"logits": 1.0},
    "recover.DistillationLoss.terms": lambda: (
        recover.DistillationLoss(logits=1.0).terms,
        {"student": tokens(), "teacher": tokens()},
    ),
    "recover.DistillationLoss.total": lambda: (
        recover.DistillationLoss(logits=1.0).total,
        {"terms": {"logits": torch.ones(())}},
    ),
    "distill_": distilled,
    "recover.distill_": distilled,
    "recover.reconstruct_": lambda: {
        "model": sparse(),
        "teacher": dense(),
        "batches": [*batches(), *batches()],
        "submodules": ["0"],
        "epochs": 1,
    },
    "recover.trainer.DistillationTrainer": lambda: {
        "teacher": dense(),
        "loss": recover.DistillationLoss(logits=1.0),
        "model": sparse(),
    },
    "recover.trainer.PatternCallback": callback,
    "tuning.choose": lambda: {"product": Product(64, 64, 8, block_shape=32)},
    "tuning.Product": lambda: {**LAYER, "tokens": 8},
    "tuning.Product.of": lambda: {"layer": layer(), "tokens": 8},
    "tuning.Device": lambda: {"name": "a", "compute_capability": (9, 0), "multiprocessors": 8},
    "tuning.Device.find": lambda: {"what": "cpu"},
    "tuning.prefer": lambda: (lambda kernel: prefer(kernel).__enter__(), {"kernel": "cpu"}),
    "tuning.tune": lambda: {
        "products": [Product(64, 64, 8, block_shape=32)],
        "candidates": 1,
        "repetitions": 1,
    },
    "tuning.products_of": lambda: {"folder": saved(), "tokens": [8]},
    "tuning.load": dict,
    "storage.two_of_four": lambda: {"scores": values()},
    "storage.compress": lambda: {"values": values(), "mask": storage.two_of_four(values())},
    "storage.dequantize": lambda: {"values": values()},
    "storage.quantize": lambda: {"values": values(), "dtype": torch.int8},
    "storage.quantize_int4": lambda: {"values": values()},
    "storage.row_scales": lambda: {"scales": torch.ones(32), "pattern": pattern()},
    "train.AveragedModel": lambda: {"model": layered()},
    "train.AveragedModel.update_parameters": lambda: (
        train.AveragedModel(layered()).update_parameters,
        {"model": layered()},
    ),
    "train.BlockGates": lambda: {"model": sparse()},
    "train.BlockGates.compact": lambda: (train.BlockGates(sparse()).compact, {}),
    "train.Gradual": lambda: trained(sparse(), density=0.5, steps=10),
    "train.Gradual.load_state_dict": lambda: schedule(train.Gradual, density=0.5, steps=10),
    "train.GroupLasso": lambda: trained(sparse(), strength=0.1),
    "train.MaskSchedule": lambda: trained(of_two_of_four(), every=2, decay=0.1),
    "train.MaskSchedule.load_state_dict": lambda: schedule(
        train.MaskSchedule, of_two_of_four(), every=2, decay=0.1
    ),
    "train.PatternSchedule": lambda: trained(sparse(), every=2),
    "train.PatternSchedule.fractions =": fractioned,
    "train.PatternSchedule.step": lambda: of_schedule("step"),
    "train.PatternSchedule.load_state_dict": lambda: schedule(train.PatternSchedule, every=2),
    "train.block_gradient_norms": lambda: {"dy": tokens(32), "x": tokens(), "block_shape": BLOCK},
    "train.compact": lambda: {"model": sparse()},
    "train.learning_rate_factor": lambda: {"density": 0.5},
    "train.parameter_groups": lambda: {"model": sparse(), "lr": 0.1},
    "train.set_nm": lambda: {"model": sparse(), "nm": (2, 4)},
    "train.snapshot": lambda: {"model": sparse()},
}


def call_of(name: str, value: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    case = CASES[name]()
    return case if isinstance(case, tuple) else (value, case)


def takes_arguments(value: Any) -> bool:
    if isinstance(value, type | property):
        return True
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    own = inspect.signature(value).parameters.values()
    return any(parameter.name != "self" and parameter.kind not in kinds for parameter in own)


def test_every_public_function_has_a_case() -> None:
    public_names = {
        name for name, value in public().items() if name not in NOT_CALLED and takes_arguments(value)
    }
    assert public_names == CASES.keys()
    assert public().keys() >= NOT_CALLED


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """Of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*CASES])
def test_the_default_device_is_for_new_tensors_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    if name.startswith("distributed."):
        request.getfixturevalue("group")
    function, arguments = call_of(name, public()[name])
    with torch.device("meta"):  # whose tensors have no contents, for whoever takes them for others
        function(**arguments)

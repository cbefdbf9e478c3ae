"""Takes the architectures of `zoo.py` through all that a user does with a model, and prints a table.

    python tests/python/run_zoo.py                     # some minutes
    python tests/python/run_zoo.py llama t5 --steps patch,lora

Each architecture runs in a process of its own, so that one that crashes does not take others with it. A step
is right, or it is refused where the zoo says so, by a sentence that names the reason. Anything
else is a defect, and the exit status is 1 then. `test_zoo.py` has the cheap steps.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from helpers import blocks_of_dense, run_anew
from helpers import dense_weight as dense_of_blocks
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging
from zoo import BLOCK, ZOO, Kind, linear_layers

import tilesparse
from tilesparse import BlockSparseConfig, BlockSparseLinear, TileSparseError, distill_, prune_, reconstruct_
from tilesparse.integrations.peft import merge_loss
from tilesparse.model import Report, fuse_mlps_
from tilesparse.nn.experts import projections_of
from tilesparse.recover import DistillationLoss

OPTIONS: dict[str, Any] = {"density": 0.5, "block_shape": BLOCK}


# Models and what is compared.


PATCHED: dict[int, Any] = {}  # by `id` of what was patched; copies take a seventh of the time


def patched(kind: Kind) -> Any:
    if id(kind) not in PATCHED:
        PATCHED[id(kind)] = kind.make()
        sparsified(kind, PATCHED[id(kind)])
    return copy.deepcopy(PATCHED[id(kind)])


def sparsified(kind: Kind, model: nn.Module) -> Report:
    """Make layers block-sparse, subclasses of `torch.nn.Linear` one by one as documented."""
    for name, layer in list(model.named_modules()) if kind.subclasses else ():
        if isinstance(layer, nn.Linear) and type(layer) is not nn.Linear:
            model.set_submodule(name, BlockSparseLinear.from_linear(layer, **OPTIONS))
    config = BlockSparseConfig(**OPTIONS)
    return tilesparse.sparsify_(model, config, batch=kind.batch(0), strict=not kind.subclasses)


def sparse_layers(model: nn.Module) -> dict[str, BlockSparseLinear]:
    return {name: one for name, one in model.named_modules() if isinstance(one, BlockSparseLinear)}


def stacked(dense: nn.Module) -> dict[str, tuple[str, bool]]:
    """The parameters of experts, by the names of those that replace them, and whether they lie transposed."""
    found = {}
    for prefix, module in dense.named_modules():
        projections = projections_of(module)
        for name, own in projections.layers().items() if projections is not None else ():
            found[f"{prefix}.{own}.weight"] = f"{prefix}.{name}", projections.transposed
            if projections.bias:
                found[f"{prefix}.{own}.bias"] = f"{prefix}.{name}_bias", False
    return found


def flat(tensor: Tensor, transposed: bool) -> Tensor:
    """Weights or biases of experts below each other."""
    return (tensor.mT if transposed else tensor).flatten(0, 1)


def densified(kind: Kind, sparse: nn.Module) -> Any:
    """The dense model with zeros where there are no blocks, by the definition of the pattern."""
    model, state = kind.make(), sparse.state_dict()
    layers = sparse_layers(sparse)
    with torch.no_grad():
        of_experts = stacked(model)
        for name, (own, transposed) in of_experts.items():
            one, tensor = layers[name.rpartition(".")[0]], model.get_parameter(own)
            whole = state[name] if name.endswith("bias") else dense_of_blocks(one.weight, one.pattern)
            whole = whole.unflatten(0, (len(tensor), -1))
            tensor.copy_(whole.mT if transposed else whole)
        for name, tensor in model.state_dict().items():
            if name in dict(of_experts.values()):
                continue
            layer = layers.get(name.removesuffix(".weight"))
            if layer is None or not name.endswith(".weight"):
                tensor.copy_(state[name])
            else:
                weight = dense_of_blocks(layer.weight, layer.pattern)
                owner = model.get_submodule(name.removesuffix(".weight"))
                tensor.copy_(weight.T if isinstance(owner, Conv1D) else weight)
    return model


def outputs(kind: Kind, model: Any, seed: int = 0) -> Tensor:
    result: Tensor = getattr(model(**kind.batch(seed)), kind.output)
    return result


def check(condition: object, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def assert_close(actual: Tensor, expected: Tensor, what: str = "outputs", tolerance: float = 1e-4) -> None:
    """Check to a part of the largest number expected; sums have other orders, and models many layers."""
    check(actual.shape == expected.shape, f"{what}: {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    error = (actual.double() - expected.double()).abs().max()
    bound = tolerance * expected.abs().max()
    check(error <= bound, f"{what}: error {error:.3g}, bound {bound:.3g}")  # false of NaN


def check_dense(kind: Kind, model: nn.Module, skipped: Sequence[Any]) -> None:
    """That linear layers are block-sparse, or dense as the zoo says, with that reason in the report."""
    reasons = {layer.name: layer.reason for layer in skipped}
    found = set()
    for name in linear_layers(model):
        expected = next((regex for regex in kind.dense if re.fullmatch(regex, name)), None)
        check(expected is not None, f"{name} is dense: {reasons.get(name, 'the report does not say so')}")
        check(name in reasons, f"{name} is dense, and the report does not say so")
        check(
            re.search(kind.dense[expected], reasons[name]),
            f"{name} is dense as {reasons[name]!r}, expected {kind.dense[expected]!r}",
        )
        found.add(expected)
    missing = kind.dense.keys() - found
    check(not missing, f"expected to stay dense, and do not: {sorted(missing)}")


def check_listed(model: nn.Module, report: Any) -> None:
    """That a report names every weight that stays dense, with its share of the model."""
    sparse = sparse_layers(model)
    dense = {
        name: parameter.numel() / report.before.parameters
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1 and name.removesuffix(".weight") not in sparse
    }
    named = {one.name: one.share for one in report.dense}
    check(
        named.keys() == dense.keys(), f"dense, and not in the report: {sorted(dense.keys() ^ named.keys())}"
    )
    wrong = [name for name, share in dense.items() if abs(named[name] - share) > 1e-9]
    check(not wrong, f"other shares than the report says: {wrong}")


# The steps. Each raises where something is wrong.


def patch(kind: Kind) -> None:
    model = kind.make()
    dense = copy.deepcopy(model)
    report = sparsified(kind, model)
    check_dense(kind, model, report.skipped)
    layers = sparse_layers(model)
    check(kind.subclasses or [layer.name for layer in report.layers] == list(layers), "the report has others")
    of_experts = stacked(dense)
    for name, layer in layers.items():
        if f"{name}.weight" in of_experts:
            own, transposed = of_experts[f"{name}.weight"]
            weight = flat(dense.get_parameter(own), transposed)
        else:
            weight = dense.get_submodule(name).weight
            weight = weight.T if isinstance(dense.get_submodule(name), Conv1D) else weight
        check(
            torch.equal(layer.weight, blocks_of_dense(weight, layer.pattern)), f"{name}: blocks have changed"
        )
        blocks = layer.pattern.to_block_mask().numel()
        check(abs(layer.pattern.nnz - OPTIONS["density"] * blocks) <= 0.5, f"{name}: density {layer.density}")


def listed(kind: Kind) -> None:
    model = kind.make()
    check_listed(model, sparsified(kind, model))


def forward(kind: Kind) -> None:
    model = patched(kind)
    twin = densified(kind, model)
    with torch.no_grad():
        assert_close(outputs(kind, model), outputs(kind, twin))
        check(not torch.allclose(outputs(kind, model), outputs(kind, kind.make()), rtol=0.01), "as if dense")
    assert_close(outputs(kind, model), outputs(kind, twin), "outputs with gradients")


def prune(kind: Kind) -> None:
    teacher, batches = kind.make(), [kind.batch(seed) for seed in range(8)]
    model = copy.deepcopy(teacher)
    report = prune_(model, BlockSparseConfig(**OPTIONS), batches, exclude=kind.uncalled)
    check_dense(kind, model, report.skipped)
    check({layer.name for layer in report.layers} == sparse_layers(model).keys(), "the report has others")
    check(sparse_layers(model).keys() == sparse_layers(patched(kind)).keys(), "sparsify_ takes others")
    for layer in report.layers:
        check(layer.error <= layer.error_before + 1e-6, f"{layer.name}: the refit makes it worse")
    with torch.no_grad():
        assert_close(outputs(kind, model), outputs(kind, densified(kind, model)))
        target, by_norm = outputs(kind, teacher), outputs(kind, patched(kind))
        errors = [(output - target).norm() / target.norm() for output in (outputs(kind, model), by_norm)]
    check(errors[0] < errors[1], f"errors {errors[0]:.3f}, and {errors[1]:.3f} with the largest norms")
    check_listed(model, report)


def reload(kind: Kind) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_for_loading(kind, Path(folder))
        check_loaded(loaded_elsewhere([Path(folder)], [kind])[0])


def save_for_loading(kind: Kind, folder: Path) -> None:
    model = patched(kind)
    model.save_pretrained(folder / "pretrained")
    tilesparse.save(model, folder / "saved")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the process that loads: sums depend on it
    try:
        with torch.no_grad():
            torch.save(outputs(kind, model), folder / "outputs.pt")
    finally:
        torch.set_num_threads(threads)


def loaded_elsewhere(folders: Sequence[Path], kinds: Sequence[Kind]) -> list[dict[str, str]]:
    """Return what a new process says of the saved models, by the way in which they are loaded."""
    names = {id(kind): name for name, kind in ZOO.items()}
    pairs = [[names[id(kind)], str(folder)] for kind, folder in zip(kinds, folders, strict=True)]
    program = "import json, sys, run_zoo; print(json.dumps(run_zoo.load_all(json.loads(sys.argv[1]))))"
    found: list[dict[str, str]] = json.loads(run_anew(program, json.dumps(pairs)).stdout.splitlines()[-1])
    return found


def load_all(pairs: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    """In the new process: "" where outputs are the same bit for bit, or what is wrong."""
    torch.set_num_threads(1)
    return [_load_one(ZOO[name], Path(folder)) for name, folder in pairs]


def _load_one(kind: Kind, folder: Path) -> dict[str, str]:
    cls = type(kind.skeleton())
    ways: dict[str, Callable[[], Any]] = {
        "from_pretrained": lambda: cls.from_pretrained(folder / "pretrained"),
        "tilesparse.load of a class": lambda: tilesparse.load(kind.skeleton, folder / "saved"),
        "tilesparse.load of a model": lambda: tilesparse.load(kind.skeleton(), folder / "saved"),
    }
    found = {}
    for way, load in ways.items():
        try:
            with torch.no_grad():
                same = torch.equal(outputs(kind, load().eval()), torch.load(folder / "outputs.pt"))
            found[way] = "" if same else "other outputs"
        except Exception as error:
            found[way] = f"{type(error).__name__}: {error}"
    return found


def check_loaded(found: dict[str, str]) -> None:
    wrong = [f"{way}: {what}" for way, what in found.items() if what]
    check(not wrong, "; ".join(wrong))


def fuse(kind: Kind) -> None:
    model = patched(kind)
    expected, keys = outputs(kind, model), list(model.state_dict())
    report = fuse_mlps_(model, kind.batch(0))
    check(len(report.layers) == kind.fused, f"{len(report.layers)} MLPs fused, expected {kind.fused}")
    check(all(one.reason for one in report.skipped), "skipped without a reason")
    check(list(model.state_dict()) == keys, "names have changed")
    assert_close(outputs(kind, model), expected, "outputs with gradients")
    with torch.no_grad():
        assert_close(outputs(kind, model), expected)


def generate(kind: Kind) -> None:
    model = patched(kind)
    twin = densified(kind, model)
    fuse_mlps_(model, kind.batch(0))
    batch = {name: one for name, one in kind.batch(0).items() if not name.startswith("decoder")}
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    texts = [one.generate(**batch, **options) for one in (model, twin)]
    check(torch.equal(*texts), f"other tokens: {texts[0].tolist()}, expected {texts[1].tolist()}")


def train(kind: Kind) -> None:
    """A step with gradient checkpointing, and the same of the dense twin without."""
    model = patched(kind)
    twin = densified(kind, model)
    calls: list[str] = []
    for name, layer in sparse_layers(model).items():
        layer.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable()
    for one in (model, twin):
        one.train()
        outputs(kind, one).square().mean().backward()
    if model.supports_gradient_checkpointing:
        check(len(calls) > len(set(calls)), "nothing was computed again")
    check_gradients(model, twin)
    for one in (model, twin):
        torch.optim.SGD(one.parameters(), lr=0.1).step()
        one.eval()
    with torch.no_grad():
        masked = densified(kind, model)
        assert_close(outputs(kind, model), outputs(kind, masked), "outputs after a step")


def check_gradients(model: nn.Module, twin: nn.Module) -> None:
    layers, theirs = sparse_layers(model), dict(twin.named_parameters())
    of_experts = stacked(twin)
    for name, parameter in model.named_parameters():
        own, transposed = of_experts.get(name, (name, False))
        expected, owner = theirs[own].grad, name.removesuffix(".weight")
        if expected is not None and name in of_experts:
            expected = flat(expected, transposed)
        if expected is None or parameter.grad is None:
            check(expected is parameter.grad, f"gradient of {name}: {parameter.grad}, expected {expected}")
            continue
        if owner in layers and name != owner:
            conv1d = own == name and isinstance(twin.get_submodule(owner), Conv1D)
            expected = blocks_of_dense(expected.T if conv1d else expected, layers[owner].pattern)
        scale = max(1e-4, float(expected.abs().max()))  # of keys' biases it is 0 but for rounding
        error = float((parameter.grad - expected).abs().max())
        check(error <= 1e-3 * scale, f"gradient of {name}: error {error:.3g} of {scale:.3g}")


def compiled(kind: Kind) -> None:
    model = patched(kind)
    with torch.no_grad():
        assert_close(outputs(kind, torch.compile(model)), outputs(kind, model))
    torch._dynamo.reset()
    outputs(kind, torch.compile(model)).square().mean().backward()
    check_gradients_of_twin(kind, model)


def check_gradients_of_twin(kind: Kind, model: nn.Module) -> None:
    twin = densified(kind, model)
    outputs(kind, twin).square().mean().backward()
    check_gradients(model, twin)


def lora(kind: Kind) -> None:
    """Trained as on the dense twin, loaded to the same bits, and merged into the blocks that are there."""
    model = patched(kind)
    twin = densified(kind, model)
    config = peft.LoraConfig(target_modules=kind.adapted, r=4, init_lora_weights=False)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(copy.deepcopy(model), config)
    of_twin = peft.get_peft_model(twin, copy.deepcopy(config))
    state = peft.get_peft_model_state_dict(adapted)
    check(state.keys() == peft.get_peft_model_state_dict(of_twin).keys(), "other layers have adapters")
    peft.set_peft_model_state_dict(of_twin, state)
    for one in (adapted, of_twin):
        optimizer = torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.1)
        outputs(kind, one).square().mean().backward()
        optimizer.step()
    adapted.eval(), of_twin.eval()
    with torch.no_grad():
        expected = outputs(kind, adapted)
        assert_close(expected, outputs(kind, of_twin), "outputs after a step", 1e-3)
        with tempfile.TemporaryDirectory() as folder:
            adapted.save_pretrained(folder)
            loaded = peft.PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()
            again = loaded.state_dict()
            wrong = [name for name, one in adapted.state_dict().items() if not torch.equal(one, again[name])]
            check(not wrong, f"the loaded adapter has other {wrong}")
            # Not bit for bit: PyTorch's sums depend on where in memory the tensors of a file begin.
            assert_close(outputs(kind, loaded), expected, "outputs with the loaded adapter", 1e-6)
        _check_merge(kind, model, adapted)


def _check_merge(kind: Kind, model: nn.Module, adapted: Any) -> None:
    layers = sparse_layers(model)
    base = adapted.get_base_model()
    deltas = {
        name: base.get_submodule(name).get_delta_weight("default")
        for name in layers
        if hasattr(base.get_submodule(name), "get_delta_weight")
    }
    losses = merge_loss(adapted)
    check(len(losses) == len(deltas), "losses of other layers")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        merged = adapted.merge_and_unload()
    said = " ".join(str(one.message) for one in caught)
    for name, layer in sparse_layers(merged).items():
        if name in deltas:
            change = blocks_of_dense(deltas[name], layer.pattern)
            assert_close(layer.weight, layers[name].weight + change, f"merged {name}")
            check(name in said, f"{name} has lost some of its adapter, and nothing says so")
    assert_close(outputs(kind, merged), outputs(kind, densified(kind, merged)), "outputs of the merged")


def recover(kind: Kind) -> None:
    """Distillation: the loss at first is its formula, with the dense twin as the student, and falls."""
    teacher, model = kind.make(), patched(kind)
    twin = densified(kind, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    patterns = {name: layer.pattern.to_block_mask() for name, layer in sparse_layers(model).items()}
    batches = [kind.batch(0)] * 6
    options: dict[str, Any] = {}
    if kind.output != "logits":
        options["forward"] = lambda one, batch: getattr(one(**batch), kind.output)
    history = distill_(model, teacher, batches, optimizer, loss=DistillationLoss(logits=1.0), **options)
    with torch.no_grad():
        student, target = (outputs(kind, one).log_softmax(-1) for one in (twin, teacher))
    rows = student.shape[:-1].numel()
    expected = F.kl_div(student, target, log_target=True, reduction="sum") / rows
    if kind.output == "logits" and "attention_mask" not in kind.batch(0):
        assert_close(torch.tensor(history.loss[0]), expected, "the first loss", 1e-3)
    check(history.loss[-1] < history.loss[0], f"the loss does not fall: {history.loss}")
    for name, layer in sparse_layers(model).items():
        check(torch.equal(layer.pattern.to_block_mask(), patterns[name]), f"{name}: another pattern")
    model.eval()
    with torch.no_grad():
        assert_close(outputs(kind, model), outputs(kind, densified(kind, model)))


def reconstruction(kind: Kind) -> None:
    """Every layer is fitted, or a warning names it; only what has come closer has changed."""
    teacher, model = kind.make(), patched(kind)
    before = copy.deepcopy(model.state_dict())
    batches = [kind.batch(seed) for seed in range(4)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = reconstruct_(model, teacher, batches, epochs=3, lr=1e-3)
    kept = {one.name: one.kept for one in report.layers}
    said = " ".join(str(one.message) for one in caught)
    for one in report.layers:
        check(one.kept == (one.error < one.error_before), f"{one}")
    check(any(kept.values()), "no submodule has come closer")
    for name, layer in sparse_layers(model).items():
        inside = [one for one in kept if not one or name == one or name.startswith(f"{one}.")]
        check(inside or name in said, f"{name} is not fitted, and no warning says so")
        changed = not torch.equal(layer.weight, before[f"{name}.weight"])
        check(changed == any(kept[one] for one in inside), f"{name}: changed is {changed}, kept {inside}")
    with torch.no_grad():
        assert_close(outputs(kind, model), outputs(kind, densified(kind, model)))


STEPS: dict[str, Callable[[Kind], None]] = {
    "patch": patch,
    "listed": listed,
    "forward": forward,
    "prune": prune,
    "reload": reload,
    "fuse": fuse,
    "generate": generate,
    "train": train,
    "compile": compiled,
    "lora": lora,
    "distil": recover,
    "reconstruct": reconstruction,
}


def applies(name: str, kind: Kind) -> bool:
    if name == "compile":
        return kind.compiled
    return name != "generate" or bool(kind.skeleton().can_generate())


def take(name: str, kind: Kind) -> str:
    """Runs a step: "right", or the sentence by which it is refused as the zoo says. Raises otherwise."""
    regex = kind.refused.get(name)
    try:
        STEPS[name](kind)
    except (TileSparseError, ValueError) as error:
        if regex is None or not re.search(regex, str(error)):
            raise
        return f"refused: {error}"
    check(regex is None, f"expected to be refused with {regex!r}, and is not")
    return "right"


# The command.


def take_all(name: str, steps: Sequence[str]) -> bool:
    """Print what becomes of each step; return whether there is no defect."""
    right = True
    for step in steps:
        start = time.perf_counter()
        try:
            found = take(step, ZOO[name]) if applies(step, ZOO[name]) else "-"
        except Exception:
            found, right = f"DEFECT {traceback.format_exc()}", False
        print(f"{name:14}{step:14}{time.perf_counter() - start:6.1f} s  {found}", flush=True)
    return right


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", metavar="architecture", help=f"some of {', '.join(ZOO)}; all")
    parser.add_argument("--steps", default=",".join(STEPS), help="all")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    kinds, steps = arguments.kinds or list(ZOO), arguments.steps.split(",")
    if not ZOO.keys() >= set(kinds) or not STEPS.keys() >= set(steps):
        parser.error(f"architectures of {', '.join(ZOO)} and steps of {', '.join(STEPS)} expected")
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if arguments.here:
        return 0 if take_all(kinds[0], steps) else 1
    wrong = []
    for name in kinds:
        command = [sys.executable, __file__, name, "--steps", arguments.steps, "--here"]
        if subprocess.run(command, env={"OMP_NUM_THREADS": "1"} | os.environ, check=False).returncode:
            wrong.append(name)  # a step is wrong, or the process has crashed
    print(f"defects: {', '.join(wrong) or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

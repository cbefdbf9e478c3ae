"""Checkpoints: what is saved is loaded bit for bit, and what is damaged or does not fit is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import DEVICES, run_anew, seeded, shuffled
from mutilations import FIRST, SECOND, Bases, mutilations
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import tilesparse
from tilesparse import BlockPattern, BlockSparseConfig, BlockSparseLinear, sparsify_
from tilesparse.errors import CheckpointError, InvalidArgumentError
from tilesparse.io.manifest import CONFIG, INDEX, WEIGHTS, section

# nm, storage and what has a scale.
FORMS = {
    "plain": (None, "plain", "row"),
    "2:4": ((2, 4), "plain", "row"),
    "2:4 compressed": ((2, 4), "compressed", "row"),
    "int8 by row": (None, "int8", "row"),
    "int8 by block": (None, "int8", "block"),
    "float8 by row": (None, "float8_e4m3fn", "row"),
    "2:4 int8 by row": ((2, 4), "int8", "row"),
    "int4 by row": (None, "int4", "row"),
    "int4 by block": (None, "int4", "block"),
    "2:4 float8 by block": ((2, 4), "float8_e4m3fn", "block"),
    "int8 W8A8": (None, "int8", "feature"),
    "float8 W8A8": (None, "float8_e4m3fn", "feature"),
}
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


class Net(nn.Module):
    """An architecture whose linear layers may be sparse; the two embeddings are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 64)
        self.sparse: nn.Module = nn.Linear(64, 64)
        self.norm = nn.BatchNorm1d(64)
        self.stored: nn.Module = nn.Linear(64, 64, bias=False)
        self.masked: nn.Module = nn.Linear(64, 64)
        self.output = nn.Linear(64, 8, bias=False)
        self.output.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(0.125))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.sparse(self.embedding(tokens)))
        return self.output(self.masked(self.stored(x).relu())) * self.scale


def sparse_layer(
    form: str = "plain", dtype: torch.dtype = torch.float32, **options: Any
) -> BlockSparseLinear:
    """64 by 64, with two blocks in its first block row, and blocks at other slots than entries."""
    nm, storage, granularity = FORMS[form]
    block_shape = options.pop("block_shape", (32, 32))
    mask = torch.rand(64 // block_shape[0], 64 // block_shape[1], generator=seeded(1)) < 0.4
    mask[0, :2] = True
    pattern = shuffled(BlockPattern.from_block_mask(mask, block_shape=block_shape))
    layer = BlockSparseLinear(64, 64, pattern=pattern, nm=nm, dtype=dtype, **options)
    return layer.to_storage(
        storage, granularity=granularity, activations=storage if granularity == "feature" else None
    )


def sparse_net(form: str = "int8 by row", dtype: torch.dtype = torch.float32, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    net = Net().to(dtype)
    net.sparse = sparse_layer(dtype=dtype, block_shape=(16, 32))
    net.stored = sparse_layer(form, dtype, bias=False)
    net.masked = sparse_layer("2:4", dtype, policy="dense")
    net.norm.running_mean.normal_()
    net.norm.num_batches_tracked.add_(3)
    return net


def assert_same(model: nn.Module, other: nn.Module) -> None:
    """Bit for bit, and of the same form."""
    assert section(model) == section(other)
    ours, theirs = model.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and tensor.shape == theirs[name].shape, name
        assert bits(tensor) == bits(theirs[name]), name


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def section_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / CONFIG).read_text())["tilesparse"]


@pytest.mark.parametrize(
    ("form", "dtype", "size"),
    [(*case, size) for case, size in zip(product(FORMS, DTYPES), cycle(["5GB", "4KB", 1]), strict=False)],
)
def test_what_is_saved_is_loaded(form: str, dtype: torch.dtype, size: str | int, tmp_path: Path) -> None:
    saved = sparse_net(form, dtype)
    tilesparse.save(saved, tmp_path, max_shard_size=size)
    loaded = tilesparse.load(Net, tmp_path)
    assert_same(loaded, saved)
    assert loaded.output.weight is loaded.embedding.weight
    tokens = torch.arange(8)
    if "W8A8" not in form or dtype != torch.float64:  # which no such product has
        assert torch.equal(loaded.eval()(tokens), saved.eval()(tokens))
    assert (tmp_path / WEIGHTS).exists() == (size == "5GB")


def test_files_are_alike_in_a_fresh_process(tmp_path: Path) -> None:
    """Models that another process loads and saves again have the same bytes."""
    for name, size in (("one", "5GB"), ("several", "20KB")):
        tilesparse.save(sparse_net(), tmp_path / name, max_shard_size=size)
    code = (
        "import sys, tilesparse, torch; torch.set_num_threads(1); from test_checkpoint import Net\n"
        "for name, size in (('one', '5GB'), ('several', '20KB')):\n"
        "    model = tilesparse.load(Net, f'{sys.argv[1]}/{name}')\n"
        "    tilesparse.save(model, f'{sys.argv[1]}/{name} again', max_shard_size=size)\n"
    )
    run_anew(code, tmp_path)
    for name in ("one", "several"):
        assert contents(tmp_path / name) == contents(tmp_path / f"{name} again")


@pytest.mark.parametrize("device", DEVICES)
def test_devices(device: str, tmp_path: Path) -> None:
    saved = sparse_net().to(device)
    tilesparse.save(saved, tmp_path)
    for model, there in ((Net, device), (Net().to(device), None), (sparse_net(seed=1).to(device), None)):
        loaded = tilesparse.load(model, tmp_path, device=there)
        assert {tensor.device.type for tensor in loaded.state_dict().values()} == {device}
        assert_same(loaded, saved)
        tokens = torch.arange(8, device=device)
        assert torch.equal(loaded.eval()(tokens), saved.eval()(tokens))
    assert tilesparse.load(Net, tmp_path).sparse.weight.device.type == "cpu"


@pytest.mark.parametrize("meta", [False, True])
def test_form_of_the_file_wins(meta: bool, tmp_path: Path) -> None:
    """Whatever density, block shape, storage and dtype the model had."""
    saved = sparse_net("2:4 float8 by block", torch.bfloat16)
    tilesparse.save(saved, tmp_path)
    with torch.device("meta" if meta else "cpu"):
        model = Net()
        model.sparse = BlockSparseLinear(64, 64, density=1, block_shape=64, nm=(2, 4), storage="int8")
        model.stored = BlockSparseLinear(64, 64, bias=False, density=0, policy="auto", block_shape=32)
    sparse = model.sparse
    assert_same(tilesparse.load(model, tmp_path), saved)
    assert model.sparse is sparse and sparse.nm is None


def test_moved_and_empty_patterns(tmp_path: Path) -> None:
    net = Net()
    net.sparse = BlockSparseLinear(64, 64, density=0, block_shape=32)
    net.stored = sparse_layer(bias=False)
    free = (~net.stored.pattern.to_block_mask()).nonzero()
    net.stored.pattern.move_blocks_([1], free[:1])
    tilesparse.save(net, tmp_path)
    loaded = tilesparse.load(Net, tmp_path)
    assert_same(loaded, net)
    assert loaded.stored.pattern == net.stored.pattern
    loaded.stored.pattern.move_blocks_([1], (~loaded.stored.pattern.to_block_mask()).nonzero()[:1])


def test_layers_alone(tmp_path: Path) -> None:
    saved = sparse_layer("int8 by row")
    tilesparse.save(saved, tmp_path)
    loaded = tilesparse.load(lambda: BlockSparseLinear(64, 64, density=1, block_shape=32), tmp_path)
    assert_same(loaded, saved)
    x = torch.randn(3, 64)
    assert torch.equal(loaded(x), saved(x))


def test_what_is_tied_stays_tied(tmp_path: Path) -> None:
    """Also layers under two names, tied weights of sparse layers, and what only the file knows to be tied."""
    layer, twin, saved = sparse_layer(), sparse_layer(), nn.ModuleDict()
    twin.weight = layer.weight
    saved.update({"a": layer, "b": layer, "c": twin, "d": nn.Linear(4, 4), "e": nn.Linear(4, 4)})
    saved["e"].weight = saved["d"].weight
    tilesparse.save(saved, tmp_path)
    stored = load_file(tmp_path / WEIGHTS)
    assert section_of(tmp_path)["ties"].items() >= {"b.weight": "a.weight", "c.weight": "a.weight"}.items()
    assert not {"b.weight", "c.weight", "e.weight", "b.slot"} & stored.keys() and "c.slot" in stored

    def build() -> nn.ModuleDict:
        one = nn.Linear(64, 64)
        others = {"c": nn.Linear(64, 64), "d": nn.Linear(4, 4), "e": nn.Linear(4, 4)}
        return nn.ModuleDict({"a": one, "b": one, **others})

    loaded = tilesparse.load(build, tmp_path)
    assert loaded["b"] is loaded["a"] and loaded["c"].weight is loaded["a"].weight
    assert loaded["c"].slot is not loaded["a"].slot
    assert loaded["e"].weight is loaded["d"].weight and loaded["e"].bias is not loaded["d"].bias
    assert_same(loaded, saved)


def test_two_tensors_for_one_of_the_model(tmp_path: Path) -> None:
    """Alike they are one; otherwise none of them could be chosen."""
    state = {name: tensor.clone() for name, tensor in sparse_net().state_dict().items()}
    config = {"tilesparse": section(sparse_net())}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    save_file(state, tmp_path / WEIGHTS)
    assert tilesparse.load(Net, tmp_path).output.weight.equal(state["output.weight"])
    state["output.weight"][0, 0] += 1
    save_file(state, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"'output.weight' is another tensor than 'embedding.weight'"):
        tilesparse.load(Net, tmp_path)


def test_model_keeps_what_the_file_does_not_say(tmp_path: Path) -> None:
    tilesparse.save(sparse_net("plain"), tmp_path)
    model = Net().eval()
    model.masked.requires_grad_(False)
    model.masked.bias.requires_grad_(True)
    model.embedding.weight.requires_grad_(False)
    seen: list[nn.Module] = []
    handle = model.stored.register_forward_hook(lambda module, *_: seen.append(module))
    tilesparse.load(model, tmp_path)
    assert not model.masked.weight.requires_grad and model.masked.bias.requires_grad
    assert not model.output.weight.requires_grad and model.sparse.weight.requires_grad
    assert not any(module.training for module in model.modules())
    model(torch.arange(8)).sum().backward()
    assert seen == [model.stored] and model.stored.weight.grad is not None
    handle.remove()
    model(torch.arange(8))
    assert len(seen) == 1


def test_files_are_those_of_safetensors_and_transformers(tmp_path: Path) -> None:
    net = sparse_net()
    tilesparse.save(net, tmp_path / "one")
    tilesparse.save(net, tmp_path / "several", max_shard_size="20KB")
    whole = load_file(tmp_path / "one" / WEIGHTS)
    index = json.loads((tmp_path / "several" / INDEX).read_text())
    parts = {name: load_file(tmp_path / "several" / file) for name, file in index["weight_map"].items()}
    assert whole.keys() == parts.keys() == net.state_dict().keys() - {"output.weight"}
    for name, tensor in whole.items():
        assert bits(tensor) == bits(parts[name][name]) == bits(net.state_dict()[name])
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in whole.values())}
    assert sorted(set(index["weight_map"].values())) == [FIRST, SECOND]


def test_files_of_others_load(tmp_path: Path) -> None:
    """As Transformers writes them: another place for the section, no checksums, index arrays of 64 bits."""
    net = sparse_net()
    state = {name: tensor for name, tensor in net.state_dict().items() if name != "output.weight"}
    wide = {name: state[name].long() for name in ("sparse.slot", "sparse.col_indices")}
    save_file({**state, **wide}, tmp_path / WEIGHTS, {"format": "pt"})
    quantization = {"quant_method": "tilesparse", **section(net)}
    (tmp_path / CONFIG).write_text(json.dumps({"hidden": 64, "quantization_config": quantization}))
    assert_same(tilesparse.load(Net, tmp_path), net)
    tilesparse.save(net, tmp_path)
    assert json.loads((tmp_path / CONFIG).read_text()).keys() == {"hidden", "quantization_config"}
    assert_same(tilesparse.load(Net, tmp_path), net)


def test_patched_models(tmp_path: Path) -> None:
    """Also of layers in a Transformer of PyTorch's."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:

        def build() -> nn.Module:
            return nn.TransformerEncoderLayer(64, 2, 128, batch_first=True)

        model = build().eval()
        assert len(sparsify_(model, BlockSparseConfig(0.5, 32), layers=r"linear\d").layers) == 2
        tilesparse.save(model, tmp_path)
        x = torch.randn(1, 4, 64)
        assert torch.equal(tilesparse.load(build, tmp_path).eval()(x), model(x))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    with pytest.raises(CheckpointError, match=r"'linear1': nn.TransformerEncoderLayer reads its weight"):
        tilesparse.load(build, tmp_path)


def test_a_folder_is_replaced(tmp_path: Path) -> None:
    """Shards of former saves go, other files and keys of the configuration stay."""
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / CONFIG).write_text('{"hidden": 64}')
    (tmp_path / ".saving-killed").mkdir()
    sizes: list[int | str] = ["10KB", "5GB", "20KB", 1, "20KB"]
    for seed, size in enumerate(sizes):
        net = sparse_net(seed=seed)
        tilesparse.save(net, tmp_path, max_shard_size=size)
        assert_same(tilesparse.load(Net, tmp_path), net)
    assert contents(tmp_path).keys() == {"tokenizer.json", CONFIG, INDEX, FIRST, SECOND}
    assert (tmp_path / ".saving-killed").is_dir()
    assert json.loads((tmp_path / CONFIG).read_text()).keys() == {"hidden", "tilesparse"}


def test_layers_of_other_kinds(tmp_path: Path) -> None:
    """Transformers' Conv1D, whose weight is transposed, and modules that know their parameters twice."""
    from transformers.pytorch_utils import Conv1D

    saved: Any = nn.ModuleList([BlockSparseLinear(64, 128, block_shape=32), nn.LSTM(8, 8)])
    tilesparse.save(saved, tmp_path)
    loaded = tilesparse.load(lambda: nn.ModuleList([Conv1D(128, 64), nn.LSTM(8, 8)]), tmp_path)
    assert_same(loaded, saved)
    for layer, other, features in zip(loaded, saved, (64, 8), strict=True):
        x = torch.randn(2, 3, features)
        torch.testing.assert_close(layer(x), other(x), rtol=0, atol=0)
    with pytest.raises(CheckpointError, match=r"'0': shape \(128, 64\), but \(64, 128\) in the model"):
        tilesparse.load(nn.ModuleList([Conv1D(64, 128), nn.LSTM(8, 8)]), tmp_path)


CALLS = [
    *((Path, name) for name in ("open", "rename", "replace", "unlink", "write_bytes", "chmod")),
    *((os, name) for name in ("fsync", "rename", "replace")),
    (shutil, "rmtree"),
]


@pytest.mark.parametrize(
    ("again", "size"), [(True, "20KB"), (False, "5GB")], ids=["all fail from then on", "one fails"]
)
def test_saves_that_fail(again: bool, size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a save ends, what is there is the old checkpoint or the new one, and what the user has."""
    old, new = sparse_net(seed=1), sparse_net(seed=2)
    outcomes: list[str] = []
    for steps in range(200):
        folder = tmp_path / str(steps)
        folder.mkdir()
        (folder / CONFIG).write_text('{"hidden": 64}')
        tilesparse.save(old, folder, max_shard_size="20KB")
        left = [steps]
        with monkeypatch.context() as patch:
            for owner, name in CALLS:
                patch.setattr(owner, name, _failing(getattr(owner, name), left, again))
            try:
                tilesparse.save(new, folder, max_shard_size=size)
            except (OSError, CheckpointError):
                ended = "early"
            else:
                ended = "well"
        outcomes.append(f"{ended}: {_which(folder, old, new)}")
        if left[0] >= 0:
            break
        tilesparse.save(new, folder, max_shard_size=size)
        assert _which(folder, old, new) == "new"
        assert not list(folder.glob(".saved-*")) and (again or not list(folder.glob(".saving-*")))
    assert list(dict.fromkeys(outcomes)) == ["early: old", "early: new", "well: new"]


def _failing(function: Callable[..., Any], left: list[int], again: bool) -> Callable[..., Any]:
    """Raises as on a full disk when so many calls have been made: then, or from then on."""

    def call(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] < 0 and (again or left[0] == -1):
            raise OSError(28, "No space left on device")
        return function(*args, **kwargs)

    return call


def _which(folder: Path, old: Net, new: Net) -> str:
    """Which of two a folder loads, bit for bit; the user's own key is there in either case."""
    assert json.loads((folder / CONFIG).read_text())["hidden"] == 64
    loaded: Any = tilesparse.load(Net, folder)
    is_new = torch.equal(*(net.get_parameter("sparse.weight") for net in (loaded, new)))
    assert_same(loaded, new if is_new else old)
    return "new" if is_new else "old"


def constant(value: float) -> nn.Module:
    """A model of one number, whose checkpoint has two shards of 10 KB."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), BlockSparseLinear(64, 64, False, 1, block_shape=64))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def constant_in(folder: Path) -> float:
    parameters = tilesparse.load(lambda: constant(0), folder).parameters()
    (value,) = {float(value) for tensor in parameters for value in tensor.detach().unique()}
    return value


KILLED = """
import os, signal, sys, tilesparse
from test_checkpoint import constant
folder, size = sys.argv[1:]
model = constant(2)
for step in range(1000):
    def traced(event, arguments, left=[step]):
        if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree", "os.chmod"):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        sys.addaudithook(traced)
        tilesparse.save(model, f"{folder}/{step}", max_shard_size=size)
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        print(step)
        break
"""
SAVING = """
import os, sys, tilesparse
from test_checkpoint import constant
children = []
for value, size in ((1, "5GB"), (2, "10KB")):
    children.append(os.fork())
    if children[-1] == 0:
        for _ in range(10):
            tilesparse.save(constant(value), sys.argv[1], max_shard_size=size)
        os._exit(0)
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
"""


@pytest.mark.parametrize("size", ["10KB", "5GB"])
def test_saves_that_are_killed(size: str, tmp_path: Path) -> None:
    """At every file that is opened, renamed or removed."""
    tilesparse.save(constant(1), tmp_path / "old", max_shard_size="10KB" if size == "5GB" else "5GB")
    for step in range(100):
        shutil.copytree(tmp_path / "old", tmp_path / str(step))
    steps = int(run_anew(KILLED, tmp_path, size).stdout)
    found = [constant_in(tmp_path / str(step)) for step in range(steps + 1)]
    assert found == sorted(found) and set(found) == {1.0, 2.0} and steps > 10
    tilesparse.save(constant(3), tmp_path / str(steps - 1))
    assert {WEIGHTS, CONFIG} <= contents(tmp_path / str(steps - 1)).keys()


def test_saves_at_the_same_time(tmp_path: Path) -> None:
    """The processes are no ranks of each other: one save is loaded, whole, meanwhile and afterwards."""
    seen = set()
    with ThreadPoolExecutor() as pool:
        saving = pool.submit(run_anew, SAVING, tmp_path)
        while not saving.done():
            if (tmp_path / CONFIG).exists():
                seen.add(constant_in(tmp_path))
        saving.result()
    assert seen <= {1.0, 2.0} and constant_in(tmp_path) in seen
    assert all(path.is_file() and not path.name.startswith(".") for path in tmp_path.iterdir())


def test_a_save_over_one_that_was_cut_off_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where others have written it, who do not know of the files that were not moved."""
    first, second, third = (sparse_net(seed=seed) for seed in (1, 2, 3))
    tilesparse.save(first, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(
            tilesparse.io.manifest,
            "_sync",
            _failing(tilesparse.io.manifest._sync, [1], True),
        )
        with pytest.raises(OSError, match="No space left"):
            tilesparse.save(second, tmp_path)
    assert_same(tilesparse.load(Net, tmp_path), second)
    state = {name: tensor.clone() for name, tensor in third.state_dict().items()}
    save_file(state, tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_text(json.dumps({"tilesparse": section(third)}))
    assert_same(tilesparse.load(Net, tmp_path), third)


def _with_extra_state() -> nn.Module:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"steps": 1}

    return nn.Sequential(Extra(2, 2))


def _parametrized() -> nn.Module:
    model = nn.Sequential(sparse_layer())
    torch.nn.utils.parametrizations.weight_norm(model[0])
    return model


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: nn.Linear(2, 2, device="meta"), "'weight' must be .* not on the meta device"),
        (
            lambda: nn.Sequential(BlockSparseLinear(64, 64, device="meta", block_shape=32)),
            "'0.weight' must .* meta",
        ),
        (lambda: nn.Sequential(nn.LazyLinear(2)), "'0.weight' must .* UninitializedParameter"),
        (_with_extra_state, "no extra states; they differ in '0._extra_state'"),
        (_parametrized, "'0': parametrized; remove"),
        (lambda: nn.Linear(2, 2, dtype=torch.complex128), "'weight' must .* of torch.complex128"),
    ],
)
def test_what_cannot_be_saved(build: Callable[[], nn.Module], text: str, tmp_path: Path) -> None:
    tilesparse.save(sparse_net(), tmp_path)
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=text):
        tilesparse.save(build(), tmp_path)
    assert contents(tmp_path) == before


def test_dtype_of_a_weight_that_was_assigned(tmp_path: Path) -> None:
    net = sparse_net("2:4 compressed")
    for parameter in net.parameters():
        parameter.data = parameter.data.bfloat16()
    tilesparse.save(net, tmp_path)
    loaded = tilesparse.load(Net, tmp_path)
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in net.state_dict().items())


def test_of_two_sections_that_of_transformers_counts(tmp_path: Path) -> None:
    """The other is of a checkpoint that Transformers has read its configuration from."""
    former, net = sparse_net(), sparse_net("2:4")
    tilesparse.save(net, tmp_path)
    own = json.loads((tmp_path / CONFIG).read_text())["tilesparse"]
    both = {
        "tilesparse": section(former),
        "quantization_config": {"quant_method": "tilesparse", **own},
    }
    (tmp_path / CONFIG).write_text(json.dumps(both))
    assert_same(tilesparse.load(Net, tmp_path), net)
    tilesparse.save(net, tmp_path)
    assert json.loads((tmp_path / CONFIG).read_text()).keys() == {"quantization_config"}


def test_a_folder_in_the_way_loses_nothing(tmp_path: Path) -> None:
    net = sparse_net()
    tilesparse.save(net, tmp_path)
    (tmp_path / INDEX).mkdir()
    with pytest.raises(IsADirectoryError, match=INDEX):
        tilesparse.save(sparse_net("2:4"), tmp_path)
    assert_same(tilesparse.load(Net, tmp_path), net)


def test_hooks_of_parameters_are_not_lost(tmp_path: Path) -> None:
    net = sparse_net("plain")
    tilesparse.save(sparse_net("plain", seed=1), tmp_path)
    called: list[Tensor] = []
    for layer in (net.norm, net.masked):
        next(layer.parameters()).register_post_accumulate_grad_hook(called.append)
    tilesparse.load(net, tmp_path)
    net(torch.arange(8)).sum().backward()
    assert {id(parameter) for parameter in called} == {id(net.norm.weight), id(net.masked.weight)}


class Referring(nn.Module):
    """With plain references to its parameters, which no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        weight = nn.Parameter(torch.ones(4))
        self.sparse: nn.Module = nn.Linear(64, 64)
        self.dense = nn.Linear(64, 64)
        self.weight = weight
        self.tied: Any = [self.dense.weight, {"weight": (weight,)}]
        self.closure = lambda: weight


def test_references_to_parameters_stay(tmp_path: Path) -> None:
    """Parameters of a class, an instance, one of another dtype, and one on the meta device."""
    saved = Referring()
    saved.sparse = sparse_layer()
    for parameter in saved.parameters():
        nn.init.normal_(parameter)
    tilesparse.save(saved, tmp_path)
    with torch.device("meta"):
        nowhere = Referring()
    for given in (Referring, Referring(), Referring().double(), nowhere):
        loaded = tilesparse.load(given, tmp_path)
        assert_same(loaded, saved)
        assert loaded.tied[0] is loaded.dense.weight
        assert loaded.tied[1]["weight"][0] is loaded.closure() is loaded.weight


@pytest.mark.parametrize("form", ["plain", "int8 by row"])
def test_parameters_stay_the_same_objects(form: str, tmp_path: Path) -> None:
    """Also those of sparse layers with another storage or number of blocks, so optimizers go on."""
    saved = nn.Sequential(sparse_layer(form), nn.Linear(64, 2))
    tilesparse.save(saved, tmp_path)
    model = nn.Sequential(BlockSparseLinear(64, 64, block_shape=32, density=1), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    view = model[1].weight[0]
    tilesparse.load(model, tmp_path)
    assert_same(model, saved)
    assert torch.equal(view, saved[1].weight[0])
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model[1].bias, saved[1].bias - 0.5)
    assert (model[0].weight.grad is None) == (form != "plain")


@pytest.mark.parametrize(
    ("refer", "text"),
    [
        (lambda model: {model.sparse}, "'other' refers to 'sparse', which load replaces"),
        (lambda model: {"w": model.sparse.weight}, "\"other['w']\" refers to 'sparse.weight', which load"),
        (lambda model: model.dense.weight.T, "'other' is on the meta device"),
        (lambda model: [nn.Linear(2, 2)], "'other[0]' is on the meta device"),
        (lambda model: model.to("cpu"), "model_or_class must not move or read parameters"),
        (lambda model: model.weight.norm().item(), "model_or_class must not move or read parameters"),
    ],
)
def test_references_that_loading_would_leave_behind(
    refer: Callable[[Referring], Any], text: str, tmp_path: Path
) -> None:
    saved = Referring()
    saved.sparse = sparse_layer()
    tilesparse.save(saved, tmp_path)

    def build() -> Referring:
        model = Referring()
        model.other = refer(model)
        return model

    with pytest.raises(CheckpointError, match=re.escape(text)):
        tilesparse.load(build, tmp_path)


def test_a_buffer_that_only_one_module_saves_stays_one(tmp_path: Path) -> None:
    def build() -> Any:
        net: Any = sparse_net()
        net.norm.register_buffer("same", net.scale, persistent=False)
        return net

    tilesparse.save(build(), tmp_path)
    net = build()
    net.scale.fill_(7)
    tilesparse.load(net, tmp_path)
    assert net.norm.same is net.scale and float(net.scale) == 0.125


def test_given_state_dicts(tmp_path: Path) -> None:
    net = sparse_net()
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    tilesparse.save(net.to("meta"), tmp_path, state_dict=state)
    loaded = tilesparse.load(Net, tmp_path)
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())
    with pytest.raises(CheckpointError, match=r"state_dict must .*they differ in 'sparse.slot'"):
        tilesparse.save(net, tmp_path, state_dict={n: t for n, t in state.items() if n != "sparse.slot"})
    with pytest.raises(InvalidArgumentError, match="state_dict must be a mapping or None, got list"):
        tilesparse.save(net, tmp_path, state_dict=[state])  # type: ignore[arg-type]
    with pytest.raises(
        CheckpointError, match=r"state_dict: 'sparse.bias' must have shape \(64,\) of torch.float32"
    ):
        tilesparse.save(net, tmp_path, state_dict={**state, "sparse.bias": torch.zeros(3)})


def test_sharded_models(tmp_path: Path) -> None:
    """A process alone does not save its part; what gathers the whole does."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    model = sparse_net("plain")
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        fully_shard(model, mesh=mesh)
        with pytest.raises(CheckpointError, match=r"a part of a sharded tensor; call .*get_model_state_dict"):
            tilesparse.save(model, tmp_path)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        tilesparse.save(model, tmp_path, state_dict=get_model_state_dict(model, options=options))
        with pytest.raises(
            CheckpointError, match=r"its weight is no plain parameter; .* shard a model after it is loaded"
        ):
            tilesparse.load(model, tmp_path)
    finally:
        dist.destroy_process_group()
    loaded = tilesparse.load(Net, tmp_path).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.items())


@pytest.mark.parametrize(
    "others", [("plain", "int8 by row", "float8 by row"), ("2:4 compressed", "int4 by row")]
)
def test_distributed_checkpoints_keep_the_storage(others: tuple[str, ...], tmp_path: Path) -> None:
    """torch.distributed.checkpoint casts, and values of all these have one shape."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    for saved in others:
        net = sparse_net(saved)
        dcp.save({"model": net.state_dict()}, checkpoint_id=tmp_path / saved)
        for form in others:
            model = sparse_net(form, seed=1)
            state = {"model": model.state_dict()}
            before = {name: tensor.clone() for name, tensor in state["model"].items()}
            if form == saved:
                dcp.load(state, checkpoint_id=tmp_path / saved)
                assert_same(model, net)
                continue
            with pytest.raises(
                CheckpointException, match=r"model\.stored\.weight must be torch\..*to_storage"
            ):
                dcp.load(state, checkpoint_id=tmp_path / saved)
            assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
            with pytest.raises(RuntimeError, match="stored"):
                model.load_state_dict(net.state_dict())


class Rotary(Net):
    """With a buffer that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(4.0), persistent=False)


def _with(**layers: nn.Module) -> Net:
    net = Net()
    for name, layer in layers.items():
        setattr(net, name, layer)
    return net


class Gated(BlockSparseLinear):
    """With a parameter of its own."""

    def __init__(self) -> None:
        super().__init__(64, 64, block_shape=32)
        self.gate = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: _with(sparse=Gated()), "'sparse': it holds gate besides weight and bias"),
        (lambda: _with(sparse=nn.Linear(64, 128)), r"'sparse': shape \(64, 64\), but \(128, 64\) in the"),
        (lambda: _with(sparse=nn.Conv1d(64, 64, 1)), "'sparse': it must be a linear layer, got Conv1d"),
        (lambda: _with(sparse=nn.Sequential()), "'sparse': it must be a linear layer, got Sequential"),
        (
            lambda: _with(more=BlockSparseLinear(64, 64, block_shape=32)),
            "'more': missing, but block-sparse in the model",
        ),
        (lambda: _with(more=nn.Linear(2, 2)), "tensors: 'more.bias', 'more.weight': missing"),
        (lambda: _with(norm=nn.Identity()), "tensors: 'norm.bias', .* and 2 more: not in the model"),
        (lambda: _with(norm=nn.BatchNorm1d(32)), r"'norm.weight' must have shape \(32,\) of .*, got \(64,\)"),
        (lambda: _with(sparse=nn.Linear(64, 64, bias=False)), "tensors: 'sparse.bias': not in the model"),
        (lambda: _with(sparse=nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))), "a linear layer"),
    ],
)
def test_models_that_do_not_fit(build: Callable[[], Net], text: str, tmp_path: Path) -> None:
    tilesparse.save(sparse_net(), tmp_path)
    model = build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modules = list(model.named_modules())
    with pytest.raises(CheckpointError, match=text):
        tilesparse.load(model, tmp_path)
    assert list(model.named_modules()) == modules
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_buffers_of_no_file(tmp_path: Path) -> None:
    from accelerate import init_empty_weights

    model, saved = Rotary(), sparse_net()
    tilesparse.save(saved, tmp_path)
    with torch.device("meta"):
        nowhere = Rotary()
    with pytest.raises(CheckpointError, match=r"'angles': buffers without contents.*give load what makes"):
        tilesparse.load(nowhere, tmp_path)
    with init_empty_weights():
        empty = Rotary()
        empty.masked = BlockSparseLinear(64, 64, density=1, block_shape=32)
    assert empty.state_dict()["masked.weight"].is_meta  # but not its pattern
    for given in (model, empty, Rotary):
        loaded: Any = tilesparse.load(given, tmp_path)
        assert torch.equal(loaded.angles, torch.arange(4.0))
        assert_same(loaded, saved)


class Made(nn.Module):
    """With tensors of all kinds that are made in ``__init__``."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        shared = nn.Parameter(torch.ones(4))
        self.first, self.second = nn.Linear(4, 64), nn.Linear(4, 64)
        self.first.weight = self.second.weight
        self.scales = nn.ParameterList([shared, nn.Parameter(torch.zeros(2))])
        self.shared = shared
        self.steps = [value.item() for value in torch.linspace(0, 1, 3)]
        self.table = torch.arange(3.0)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("angles", self.table.cos(), persistent=False)
        self.attention = nn.MultiheadAttention(64, 2)
        self.memory = nn.LSTM(4, 8)
        self.sparse: nn.Module = BlockSparseLinear(64, 64, block_shape=32)
        seen += [name for name, parameter in self.named_parameters() if not parameter.is_meta]
        seen += [name for name, buffer in self.named_buffers() if buffer.is_meta]


@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_only_parameters_are_made_on_the_meta_device(default: str, tmp_path: Path) -> None:
    """In the thread that loads; and what was one parameter stays one."""
    saved = Made([])
    for parameter in saved.parameters():
        nn.init.normal_(parameter)
    tilesparse.save(saved, tmp_path)
    others: list[nn.Linear] = []
    wrong: list[str] = []

    def build() -> Made:
        thread = threading.Thread(target=lambda: others.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
        return Made(wrong)

    with torch.device(default):
        loaded = tilesparse.load(build, tmp_path)
    assert wrong == [] and not others[0].weight.is_meta and not nn.Linear(2, 2).weight.is_meta
    assert_same(loaded, saved)
    assert loaded.first.weight is loaded.second.weight and loaded.scales[0] is loaded.shared
    assert loaded.steps == [0, 0.5, 1] and torch.equal(loaded.table, saved.table)
    assert torch.equal(loaded.get_buffer("angles"), saved.get_buffer("angles"))
    x = torch.randn(3, 4)
    for kind, output in zip(("memory", "first"), (loaded.memory(x)[0], loaded.first(x)), strict=True):
        found = getattr(saved, kind)(x)
        torch.testing.assert_close(output, found[0] if kind == "memory" else found, rtol=0, atol=0)


SAVING_WRONG: list[tuple[dict[str, Any], str]] = [
    *(({"path": path}, "path must be the path") for path in ("file", None, 5, b"folder", ["a"])),
    *(({"model": model}, r"model must be a torch\.nn\.Module") for model in ("folder", {}, None, Net)),
    *(
        ({"max_shard_size": size}, "max_shard_size must")
        for size in (0, -1, True, 1.5, "5 PB", "0GB", "GB", None)
    ),
]
LOADING_WRONG: list[tuple[dict[str, Any], str]] = [
    *(({"path": path}, "path must be the path") for path in ("file", None, 5, b"folder", ["a"])),
    ({"path": "nothing"}, "path must be a folder"),
    ({"path": "empty"}, f"{CONFIG}: missing in"),
    ({"path": "pipe"}, f"{CONFIG}: cannot be read: a pipe, no file"),
    ({"device": "meta"}, "device must have memory"),
    ({"device": "no such"}, "device(: | must )"),
    *(({"model_or_class": model}, "model_or_class.* must be a torch.nn.Module") for model in (5, dict)),
]


@pytest.mark.parametrize(
    ("call", "arguments", "text"),
    [
        *((tilesparse.save, *case) for case in SAVING_WRONG),
        *((tilesparse.load, *case) for case in LOADING_WRONG),
    ],
)
def test_wrong_arguments(
    call: Callable[..., Any],
    arguments: dict[str, Any],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    for name in ("empty", "pipe"):
        Path(name).mkdir()
    os.mkfifo(Path("pipe", CONFIG))
    tilesparse.save(sparse_net(), "folder", max_shard_size="100000")
    defaults = {"model": sparse_net()} if call is tilesparse.save else {"model_or_class": Net}
    before = sorted(Path().glob("**/*"))
    with pytest.raises(InvalidArgumentError, match=text) as caught:
        call(**{**defaults, "path": "new" if call is tilesparse.save else "folder", **arguments})
    assert isinstance(caught.value, FileNotFoundError) == (arguments.get("path") in ("nothing", "empty"))
    assert sorted(Path().glob("**/*")) == before and Path("file").read_text() == "mine"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    root = tmp_path_factory.mktemp("valid")
    net = sparse_net("2:4 int8 by row")
    tilesparse.save(net, root / "single")
    tilesparse.save(net, root / "sharded", max_shard_size="20KB")
    tilesparse.save(sparse_net("2:4 int8 by row", seed=1), root / "other", max_shard_size="20KB")
    (root / "bare").mkdir()
    state = {name: tensor for name, tensor in net.state_dict().items() if name != "output.weight"}
    save_file(state, root / "bare" / WEIGHTS)
    (root / "bare" / CONFIG).write_text(json.dumps({"tilesparse": section(net)}))
    bases = Bases(*(root / name for name in Bases._fields))
    for base in bases:
        tilesparse.load(Net, base)
    return bases


def test_mutilated_checkpoints(bases: Bases, tmp_path: Path) -> None:
    """Each gives one sentence, and leaves the model as it was."""
    model = Net()
    model.stored = sparse_layer(bias=False)
    modules, before = list(model.named_modules()), model.state_dict(keep_vars=True)
    copies = {name: bits(tensor) for name, tensor in before.items()}
    wrong, count = [], 0
    for mutilation in mutilations(bases):
        count += 1
        folder = tmp_path / str(count)
        shutil.copytree(getattr(bases, mutilation.base), folder)
        mutilation.apply(folder)
        try:
            tilesparse.load(model, folder)
            wrong.append(f"{mutilation.text} of {mutilation.base}: loaded")
            break
        except CheckpointError as error:
            if "\n" in str(error) or not 10 < len(str(error)) < 400:
                wrong.append(f"{mutilation.text} of {mutilation.base}: no sentence: {error}")
        shutil.rmtree(folder, ignore_errors=True)
        after = model.state_dict(keep_vars=True)
        assert after.keys() == before.keys() and all(after[name] is before[name] for name in after)
    assert not wrong, wrong
    assert count >= 500
    assert list(model.named_modules()) == modules
    assert {name: bits(tensor) for name, tensor in before.items()} == copies


@pytest.mark.parametrize("size", ["100MB", "10MB"])
def test_peak_of_memory(size: str, tmp_path: Path) -> None:
    """Loading onto the meta device takes the bytes of the file once, in a process of its own."""
    large = nn.Sequential(*(_large_layer(seed) for seed in range(2)))
    tilesparse.save(large, tmp_path, max_shard_size=size)
    held = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert held > 30e6
    code = (
        "import sys, torch, tilesparse; torch.set_num_threads(1); from torch import nn\n"
        "def build(): return nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(2)))\n"
        "def peak(): return int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]) * 1024\n"
        "tilesparse.load(lambda: nn.Linear(2, 2), sys.argv[2])\n"  # imports what is imported late
        "before = peak(); tilesparse.load(build, sys.argv[1]); print(peak() - before)"
    )
    tilesparse.save(nn.Linear(2, 2), tmp_path / "small")
    grown = int(run_anew(code, tmp_path, tmp_path / "small").stdout)
    assert held * 0.9 < grown < held * 1.1 + 2e6


def _large_layer(seed: int) -> BlockSparseLinear:
    return BlockSparseLinear(
        4096, 4096, False, 0.25, block_shape=64, dtype=torch.float32, generator=seeded(seed)
    )


def test_documented_reader(tmp_path: Path) -> None:
    """The reader in docs/checkpoints.md needs PyTorch and safetensors alone, and reads every storage."""
    document = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", document, re.S) if "def dense" in block)
    assert "tilesparse" not in re.sub(r'"tilesparse"', "", code)
    names: dict[str, Any] = {}
    exec(code, names)
    for form in FORMS:
        net = sparse_net(form, torch.bfloat16)
        empty = BlockSparseLinear(64, 64, density=0, bias=False, block_shape=32).to_storage("int8")
        for stored in (net.stored, empty):
            net.stored = stored
            tilesparse.save(net, tmp_path)
            for name in ("sparse", "stored", "masked"):
                weight = names["dense"](str(tmp_path), name)
                assert torch.equal(weight, getattr(net, name).to_linear().weight), (form, name)

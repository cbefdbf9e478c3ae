"""BlockSparseLinear with 2:4 inside its blocks, and with its weight in fewer bytes."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from helpers import DEVICES, DTYPES, Recorder, blocks_of_dense, seeded
from torch import Tensor, func, nn

from tilesparse import BlockPattern, BlockSparseLinear, functional
from tilesparse._runtime.select import DECODE_TOKENS
from tilesparse.config import LayerSpec
from tilesparse.errors import InvalidArgumentError, InvalidPatternError, UnsupportedError
from tilesparse.nn import ReferenceBlockSparseLinear
from tilesparse.nn.weight import dense_blocks, kept_mask
from tilesparse.storage import STORAGES, two_of_four

IN, OUT = 128, 96
NM = (2, 4)
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "masked": {"nm": NM},
    "transposable": {"nm": NM, "transposable": True},
    "compressed": {"nm": NM, "storage": "compressed"},
    "int8": {"storage": "int8"},
    "float8": {"storage": "float8_e4m3fn"},
    "int4": {"storage": "int4"},
    "2:4 int8": {"nm": NM, "storage": "int8"},
    "2:4 float8": {"nm": NM, "transposable": True, "storage": "float8_e4m3fn"},
    "int8 W8A8": {"storage": "int8", "activations": "int8"},
    "float8 W8A8": {"storage": "float8_e4m3fn", "activations": "float8_e4m3fn"},
    "2:4 int8 W8A8": {"nm": NM, "storage": "int8", "activations": "int8"},
    "2:4 float8 W8A8": {"nm": NM, "storage": "float8_e4m3fn", "activations": "float8_e4m3fn"},
}
MASKED = ["masked", "transposable"]
STORED = [name for name in LAYERS if name != "plain" and name not in MASKED]
every_layer = pytest.mark.parametrize("name", LAYERS)
on_every_device = pytest.mark.parametrize("device", DEVICES)
# Masked layers also as where a kernel reads compressed values: the fixture `compressed` changes no others.
in_every_way = pytest.mark.parametrize(
    ("name", "compressed"), [*product(LAYERS, [False]), *product(MASKED, [True])], indirect=["compressed"]
)


def make(name: str, seed: int = 0, **options: Any) -> Any:
    return BlockSparseLinear(
        IN, OUT, generator=seeded(seed), **{"block_shape": 32, **LAYERS[name], **options}
    )


def randn(*shape: int, **options: Any) -> Tensor:
    return torch.randn(shape, generator=seeded(1)).to(**options)


def states(layer: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in layer.state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        a.dtype == b.dtype and a.shape == b.shape and a.requires_grad == b.requires_grad and torch.equal(a, b)
        for a, b in zip(first.values(), second.values(), strict=True)
    )


def tolerance_of(layer: Any, device: str) -> float:
    """Tensor cores add float8 with fewer bits."""
    if device == "cpu" or layer.activations is None:
        return 1e-5
    return 2e-3 if layer.activations == "float8_e4m3fn" else 1e-4


def rounded(layer: Any, x: Tensor) -> Tensor:
    """The activations that a layer multiplies: x, or what 8 bits hold of it, with the gradient of x."""
    few = x.is_cuda and x.numel() // x.shape[-1] <= DECODE_TOKENS
    if layer.activations is None or layer.policy == "dense" or few:
        return x
    values, scales = functional.quantize_activations(x, getattr(torch, layer.activations))
    return x + ((values.float() * scales[..., None]).to(x.dtype) - x).detach()


def assert_multiplies(layer: Any, values: Tensor, tolerance: float = 1e-4) -> None:
    """Check that a layer computes, and differentiates by x, as a dense one with these values."""
    dense = nn.Linear(IN, OUT, device=layer.weight.device, dtype=values.dtype)
    blocks = torch.zeros(*layer.pattern.grid, *layer.block_shape, dtype=values.dtype, device=values.device)
    blocks[layer.pattern.block_indices()] = values
    dense.weight = nn.Parameter(blocks.transpose(1, 2).reshape(OUT, IN))
    dense.bias = layer.bias
    x = randn(5, IN, dtype=values.dtype, device=values.device).requires_grad_()
    results = [(y, *torch.autograd.grad(y.square().sum(), x)) for y in (layer(x), dense(rounded(layer, x)))]
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)


@every_layer
@on_every_device
def test_computes_with_its_plain_values(device: str, name: str) -> None:
    layer = make(name, device=device)
    assert_multiplies(layer, dense_blocks(layer))
    many = 2, DECODE_TOKENS  # tokens, which are quantized on every device
    x, residual = randn(*many, IN, device=device), randn(*many, OUT, device=device)
    tolerance = tolerance_of(layer, device)
    assert_close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    dense, twin = layer.to_linear(), ReferenceBlockSparseLinear(layer)
    for other in (dense(rounded(layer, x)) + residual, twin(x, residual=residual)):
        assert_close(layer(x, residual=residual), other)
    for policy in ("dense", "auto"):
        layer.policy = policy
        assert_close(layer(x), dense(rounded(layer, x)))
    assert torch.equal(twin.weight, dense_blocks(layer))


@every_layer
@pytest.mark.parametrize("dtype", DTYPES)
def test_from_linear_keeps_the_best(dtype: torch.dtype, name: str) -> None:
    linear = nn.Linear(IN, OUT, dtype=dtype).eval()
    options = LAYERS[name]
    layer: Any = BlockSparseLinear.from_linear(linear, 0.5, **{"block_shape": 32, **options})
    assert layer.nm == options.get("nm") and layer.storage == options.get("storage", "plain")
    assert layer.transposable == options.get("transposable", False)
    assert not layer.training and torch.equal(layer.bias, linear.bias)
    assert layer.weight.requires_grad == (layer.storage == "plain")
    kept = blocks_of_dense(linear.weight.detach(), layer.pattern)
    if layer.nm is not None:
        kept = kept * two_of_four(kept.abs(), transposable=layer.transposable)
    plain = dense_blocks(layer)
    assert plain.dtype == dtype
    if layer.storage in ("plain", "compressed"):
        assert torch.equal(plain, kept) and layer.storage_error == 0
    else:
        error = float(
            torch.linalg.vector_norm(plain.double() - kept.double()) / torch.linalg.vector_norm(kept.double())
        )
        assert layer.storage_error == pytest.approx(error, rel=1e-6) and 0 < error < (
            0.08 if layer.storage == "int4" else 0.04
        )


@pytest.mark.parametrize("storage", [storage for storage in STORAGES if storage != "int4"])
def test_from_linear_chooses_by_scores(storage: str) -> None:
    linear = nn.Linear(IN, OUT)
    scores = torch.rand(OUT, IN, generator=seeded(3))
    layer: Any = BlockSparseLinear.from_linear(
        linear, 0.5, scores=scores, nm=NM, storage=storage, block_shape=32
    )
    mask = two_of_four(blocks_of_dense(scores, layer.pattern))
    kept: Any = kept_mask(layer)
    assert torch.equal(kept, mask)
    by_block: Any = BlockSparseLinear.from_linear(
        linear, 0.5, scores=torch.rand(3, 4), nm=NM, storage=storage, block_shape=32
    )
    magnitudes = blocks_of_dense(linear.weight.detach().abs(), by_block.pattern)
    kept = kept_mask(by_block)
    assert torch.equal(kept, two_of_four(magnitudes))


@every_layer
def test_what_a_layer_holds(name: str) -> None:
    layer, options = make(name), LAYERS[name]
    nnz, (bn, bk) = layer.pattern.nnz, layer.block_shape
    halved = layer.storage == "int4" or (layer.nm is not None and layer.storage != "plain")
    scaled = layer.storage not in ("plain", "compressed")
    assert layer.weight.shape == (nnz, bn, bk // 2 if halved else bk)
    found = {key for key in ("mask", "metadata", "scales") if getattr(layer, key) is not None}
    wanted = {"mask"} if name in MASKED else {"metadata"} if halved and layer.nm else set()
    assert found == wanted | ({"scales"} if scaled else set())
    assert set(layer.state_dict()) == {"weight", "bias", "crow_indices", "col_indices", "slot", *found}
    assert ("nm=(2, 4)" in repr(layer)) == (layer.nm is not None)
    assert ("transposable=True" in repr(layer)) == layer.transposable
    assert (f"storage={layer.storage!r}" in repr(layer)) == ("storage" in options)
    if layer.nm is not None:
        kept = (dense_blocks(layer) != 0).unflatten(2, (-1, 4)).sum(-1)
        assert int(kept.max()) <= 2 and float(kept.float().mean()) > 1.8
    if layer.transposable:
        kept = (dense_blocks(layer) != 0).unflatten(1, (-1, 4)).sum(2)
        assert int(kept.max()) <= 2


@every_layer
def test_no_blocks_at_all(name: str) -> None:
    layer = make(name, density=0)
    assert torch.equal(layer(randn(3, IN)), layer.bias.expand(3, OUT))
    layer.reset_parameters()
    loaded = make(name)
    loaded.load_state_dict(layer.state_dict())
    assert same(states(loaded), states(layer))


@every_layer
def test_reset_parameters_draws_anew_in_the_same_storage(name: str) -> None:
    layer, other = make(name, seed=1), make(name, seed=2)
    other.pattern = layer.pattern
    for each in (layer, other):
        each.reset_parameters(seeded(9))
    assert layer.storage == LAYERS[name].get("storage", "plain")
    assert same(states(layer), states(other))
    assert layer.weight.requires_grad == (layer.storage == "plain")
    bound = dense_blocks(layer).abs().max()
    fan_in = layer.crow_indices.diff().min() * 32 // (1 if layer.nm is None else 2)
    assert 0 < float(bound) <= float(fan_in.rsqrt()) * 1.06


# ---- 2:4 in training ----


@pytest.fixture(params=[False, True], ids=["expanded", "compressed"])
def compressed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """True where masked layers multiply compressed values, as where a kernel reads them."""
    if request.param:
        monkeypatch.setattr("tilesparse.nn.linear.multiplies_compressed", lambda x, index: True)
    return bool(request.param)


@pytest.mark.parametrize("name", MASKED)
def test_masked_layers_multiply_what_kernels_read(name: str, compressed: bool) -> None:
    layer = make(name)
    x = randn(6, IN).requires_grad_()
    operators = {
        "training": (lambda: layer(x).sum().backward(), {"compress", "dds_nt", "dds_nn", "sdd_tn"}),
        "no gradient": (torch.no_grad()(lambda: layer(x)), {"compress", "dds_nt"}),
    }
    for run, wanted in operators.values():
        with Recorder() as recorder:
            run()
        assert ("compress" in recorder.seen) == compressed
        assert not compressed or recorder.seen == wanted
    layer.policy = "dense"
    with Recorder() as recorder:
        layer(x)
    assert recorder.seen == {"expand"}


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("policy", ["sparse", "dense"])
@on_every_device
@pytest.mark.usefixtures("compressed")
def test_the_gradient_passes_straight_through_the_mask(device: str, policy: str, name: str) -> None:
    """Against autograd through a dense weight that is masked already, as Zhou et al. have it."""
    layer = make(name, policy=policy, device=device)
    x = randn(6, IN, device=device).requires_grad_()
    weight = layer.to_linear().weight.detach().requires_grad_()
    layer(x).square().sum().backward()
    other = x.detach().clone().requires_grad_()
    nn.functional.linear(other, weight, layer.bias).square().sum().backward()
    wanted = blocks_of_dense(weight.grad.cpu(), layer.pattern)
    torch.testing.assert_close(layer.weight.grad.cpu(), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-4, atol=1e-4)
    assert bool((layer.weight.grad[~layer.mask] != 0).any()), "what is masked has a gradient, too"


@pytest.mark.parametrize("name", MASKED)
@on_every_device
@pytest.mark.usefixtures("compressed")
def test_masks_stay_until_they_are_chosen_anew(device: str, name: str) -> None:
    layer = make(name, device=device)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    before = layer.mask.clone()
    for _ in range(3):
        optimizer.zero_grad()
        layer(randn(8, IN, device=device)).square().mean().backward()
        optimizer.step()
    mask = layer.mask
    assert torch.equal(mask, before)
    assert layer.update_mask_() is layer and layer.mask is mask
    assert not torch.equal(mask, before)
    assert torch.equal(mask, two_of_four(layer.weight.detach().abs(), transposable=layer.transposable))
    chosen = mask.clone()
    with torch.autocast(device, torch.bfloat16):
        assert torch.equal(layer.update_mask_().mask, chosen)
    assert_multiplies(layer, layer.weight.detach() * mask)
    scores = torch.rand(mask.shape, generator=seeded(5)).to(device)
    layer.update_mask_(scores)
    assert torch.equal(layer.mask, two_of_four(scores, transposable=layer.transposable))
    assert_multiplies(layer, layer.weight.detach() * layer.mask)


@on_every_device
def test_set_nm_begins_and_ends_2_4(device: str) -> None:
    layer = make("plain", device=device)
    weight, values = layer.weight, layer.weight.detach().clone()
    assert layer.set_nm(NM) is layer and layer.nm == NM and not layer.transposable
    assert_multiplies(layer, values * two_of_four(values.abs()))
    layer.set_nm([2, 4], transposable=True)
    assert layer.nm == NM and layer.transposable
    assert_multiplies(layer, values * two_of_four(values.abs(), transposable=True))
    scores = torch.rand(values.shape, generator=seeded(2)).to(device)
    layer.set_nm(NM, scores=scores)
    assert torch.equal(layer.mask, two_of_four(scores)) and not layer.transposable
    layer.set_nm(None)
    assert layer.nm is None and layer.mask is None and "mask" not in layer.state_dict()
    assert_multiplies(layer, values)
    assert layer.weight is weight and torch.equal(weight, values)


def test_set_nm_that_is_refused_changes_nothing() -> None:
    narrow = make("plain", block_shape=(32, 16))
    with pytest.raises(InvalidArgumentError, match=r"nm: 2:4 is for bk of 32, 64 or 128, got .*\(32, 16\)"):
        narrow.set_nm(NM)
    flat = make("plain", block_shape=(16, 32))
    with pytest.raises(
        InvalidArgumentError, match=r"transposable: 2:4 is for bn of 32, 64 or 128.*\(16, 32\)"
    ):
        flat.set_nm(NM, transposable=True)
    for layer in (narrow, flat):
        assert layer.nm is None and layer.mask is None and not layer.transposable
    for name in STORED:
        layer = make(name)
        before = states(layer)
        for call in (lambda: layer.set_nm(None), layer.update_mask_):  # noqa: B023
            with pytest.raises(UnsupportedError, match=r"storage 'plain', got.*to_storage\('plain'\)"):
                call()
        assert same(states(layer), before)
    with pytest.raises(UnsupportedError, match=r"update_mask_ needs a layer with nm=\(2, 4\), got None"):
        make("plain").update_mask_()
    with pytest.raises(InvalidArgumentError, match=r"scores must have shape \(6, 32, 32\), got \(32, 32\)"):
        make("masked").update_mask_(torch.ones(32, 32))


# ---- from one storage to another ----


@pytest.mark.parametrize(
    ("nm", "source", "target"),
    [
        (nm, *storages)
        for nm, storages in product((None, NM), product(STORAGES, STORAGES))
        if ("int4" if nm else "compressed") not in storages
    ],
)
def test_to_storage(nm: tuple[int, int] | None, source: str, target: str) -> None:
    layer = make("plain", nm=nm, dtype=torch.bfloat16, storage=source)
    mask: Any = kept_mask(layer)
    before, bias = dense_blocks(layer), layer.bias
    assert layer.to_storage(target) is layer and layer.storage == target
    after = dense_blocks(layer)
    assert after.dtype == torch.bfloat16 and layer.bias is bias
    if target in ("plain", "compressed") or source == target:
        assert torch.equal(after, before)
    assert layer.storage_error <= (0.08 if target == "int4" else 0.04)
    assert_multiplies(layer, after, 2e-2)
    kept: Any = kept_mask(layer)
    assert layer.nm == nm and (nm is None or torch.equal(kept, mask))
    assert layer.weight.requires_grad == (target == "plain")
    if target == "plain":  # trains again
        layer(randn(3, IN, dtype=torch.bfloat16)).sum().backward()
        assert layer.weight.grad is not None


@pytest.mark.parametrize("storage", ["int8", "float8_e4m3fn"])
def test_scales_of_rows_and_of_blocks(storage: str) -> None:
    layer = make("masked")
    plain = dense_blocks(layer)
    layer.to_storage(storage)
    rows, error = layer.scales, layer.storage_error
    assert rows.shape == (6, 32)
    layer.to_storage(storage, granularity="block")
    assert layer.scales.shape == (6,), "other scales are made of what there is"
    assert float((dense_blocks(layer) - plain).norm() / plain.norm()) < 0.06
    layer.to_storage(storage, granularity="row")
    assert layer.scales.shape == (6, 32)
    by_block = make("masked").to_storage(storage, granularity="block")
    assert by_block.scales.shape == (6,) and by_block.storage_error > 0 < error
    loaded = make("2:4 int8" if storage == "int8" else "2:4 float8")
    loaded.load_state_dict(by_block.state_dict())
    assert same(states(loaded), states(by_block))
    assert_multiplies(loaded, dense_blocks(by_block))
    with pytest.raises(InvalidArgumentError, match="granularity must be 'row' or 'block', got 'tensor'"):
        layer.to_storage(storage, granularity="tensor")


def test_to_storage_clips_at_limits() -> None:
    layer = make("plain")
    values, limits = (
        dense_blocks(layer),
        torch.full((layer.col_indices.shape[0], layer.block_shape[0]), 0.05),
    )
    with pytest.raises(InvalidArgumentError, match="limits must be None with storage 'plain'"):
        layer.to_storage("plain", limits=limits)
    with pytest.raises(InvalidArgumentError, match="limits must be"):
        layer.to_storage("int8", limits=limits[:1])
    assert layer.storage == "plain" and torch.equal(dense_blocks(layer), values)
    layer.to_storage("int8", limits=limits)
    assert float(dense_blocks(layer).abs().max()) <= 0.0501 < float(values.abs().max())
    assert layer.storage_error > 0.05


def test_to_storage_that_is_refused_changes_nothing() -> None:
    layer = make("plain")
    layer.weight.data[0, 0, 0] = torch.nan
    before = {name: tensor.nan_to_num() for name, tensor in states(layer).items()}
    for storage, named in (
        ("int8", "values must be finite"),
        ("compressed", r"storage must not be 'compressed' without"),
        ("int4", "values must be finite: 4-bit storage"),
        ("int2", r"storage must be one of \['plain', .*\], got 'int2'"),
    ):
        with pytest.raises(InvalidArgumentError, match=named):
            layer.to_storage(storage)
    assert layer.storage == "plain" and layer.weight.requires_grad
    assert same({name: tensor.nan_to_num() for name, tensor in states(layer).items()}, before)


def test_four_bits_are_combined_neither_with_two_of_four_nor_with_activations() -> None:
    for layer, activations, named in (
        (make("masked"), None, r"nm must be None with storage 'int4', whose blocks are dense, got \(2, 4\)"),
        (make("plain"), "int8", "activations must be None, or the dtype .* got 'int8' with storage 'int4'"),
        (make("plain"), "int4", "activations must be None, or the dtype .* got 'int4' with storage 'int4'"),
    ):
        with pytest.raises(InvalidArgumentError, match=named):
            layer.to_storage("int4", activations=activations)
        assert layer.storage == "plain"
        with pytest.raises(InvalidArgumentError, match=named):
            make("int4", nm=layer.nm, activations=activations)
    with pytest.raises(UnsupportedError, match="storage"):
        make("int4").set_nm(NM)


@pytest.mark.parametrize("name", STORED)
def test_stored_weights_are_not_trained(name: str) -> None:
    layer = make(name)
    layer(randn(3, IN)).sum().backward()
    assert layer.weight.grad is None and layer.bias.grad is not None
    if layer.weight.is_floating_point() and name == "compressed":
        layer.weight.requires_grad_()
        with pytest.raises(UnsupportedError, match="values must be dense blocks to have a gradient"):
            layer(randn(3, IN))


@pytest.mark.parametrize("name", STORED)
@on_every_device
def test_an_adapter_trains_beside_a_stored_layer(device: str, name: str) -> None:
    """Through which the gradient reaches one before it, too."""
    layer = make(name, device=device).requires_grad_(False)
    before = states(layer)
    generator = torch.Generator(device).manual_seed(0)
    down, up, first = (
        nn.Parameter(torch.randn(*shape, device=device, generator=generator) / 10)
        for shape in ((4, IN), (OUT, 4), (IN, IN))
    )
    x = randn(16, IN, device=device)
    target = randn(16, OUT, device=device)

    def loss(product: Callable[[Tensor], Tensor]) -> Tensor:
        hidden = x @ first.t()
        return (product(hidden) + hidden @ down.t() @ up.t() - target).square().mean()

    dense = layer.to_linear()
    products = layer, lambda hidden: dense(rounded(layer, hidden))
    results = [torch.autograd.grad(loss(product), (down, up, first)) for product in products]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    optimizer = torch.optim.Adam((down, up, first), lr=1e-2)
    before_training = loss(layer).detach()
    for _ in range(20):
        optimizer.zero_grad()
        loss(layer).backward()
        optimizer.step()
    assert bool(loss(layer) < 0.8 * before_training)
    assert same(states(layer), before)


# ---- saved, loaded, copied and moved ----


@pytest.mark.parametrize(("saved", "loading"), list(product(LAYERS, LAYERS)))
@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_is_loaded_as_it_was_stored_or_refused(saved: str, loading: str, assign: bool) -> None:
    source, model = make(saved, seed=5, density=0.25), nn.Sequential(make(loading))
    before = states(model)
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    state = {f"0.{name}": tensor for name, tensor in torch.load(file, weights_only=True).items()}
    if {saved, loading} <= {*MASKED} or saved == loading:
        model.load_state_dict(state, assign=assign)
        assert same(states(model[0]), states(source))
        assert torch.equal(model(randn(3, IN)), source(randn(3, IN)))
        return
    with pytest.raises(RuntimeError, match=r"(mask|metadata|scales|weight) .*(there|missing|must be)"):
        model.load_state_dict(state, assign=assign)
    assert same(states(model), before)
    assert model(randn(3, IN)).shape == (3, OUT)


@every_layer
@pytest.mark.parametrize("other", [{"density": 0.25}, {"density": 0.75, "block_shape": (32, 64)}])
def test_a_state_dict_brings_another_number_and_shape_of_blocks(name: str, other: dict[str, Any]) -> None:
    source, layer = make(name, seed=5, **other), make(name)
    weight = layer.weight
    layer.load_state_dict(source.state_dict())
    assert same(states(layer), states(source)) and layer.weight is weight
    assert layer.block_shape == source.block_shape
    assert torch.equal(layer(randn(3, IN)), source(randn(3, IN)))
    assert_multiplies(layer, dense_blocks(source))


@pytest.mark.parametrize(
    ("name", "shorten"),
    [
        *product(("masked", "compressed", "2:4 int8"), ("weight", "bias")),
        ("masked", "mask"),
        ("compressed", "metadata"),
        ("2:4 int8", "metadata"),
        ("2:4 int8", "scales"),
    ],
)
def test_a_broken_state_dict_changes_nothing(name: str, shorten: str) -> None:
    layer = make(name)
    state = make(name, seed=3).state_dict()
    before = states(layer)
    state[shorten] = state[shorten][1:]
    with pytest.raises(RuntimeError, match=rf"{shorten} must have shape .*, got|{shorten}.*\["):
        layer.load_state_dict(state)
    assert same(states(layer), before)


@every_layer
def test_copies_are_equal_and_independent(name: str) -> None:
    layer = make(name)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    copies = [copy.deepcopy(layer), torch.load(file, weights_only=False)]
    if layer.weight.dtype != torch.float8_e4m3fn:  # which PyTorch does not unpickle
        copies.append(pickle.loads(pickle.dumps(layer)))
    before = states(layer)
    x = randn(3, IN)
    for other in copies:
        assert same(states(other), before) and repr(other) == repr(layer)
        assert torch.equal(other(x), layer(x))
        assert other.storage_error == layer.storage_error
        for tensor in (*other.parameters(), *other.buffers()):
            if tensor.dtype != torch.int32:
                tensor.data.view(torch.uint8).zero_()
    assert same(states(layer), before)


@every_layer
@on_every_device
def test_a_layer_is_made_from_its_spec(device: str, name: str) -> None:
    saved = make(name, device=device).to_storage(LAYERS[name].get("storage", "plain"), granularity="block")
    spec = saved.spec
    assert LayerSpec.from_json(spec.to_json()) == spec
    assert spec.nnz == len(saved.weight) and spec.shape == (OUT, IN) and spec.storage == saved.storage
    layer = BlockSparseLinear.from_spec(spec, device=device)
    assert layer.spec == spec and repr(layer) == repr(saved)
    with pytest.raises(InvalidPatternError, match="pattern is missing"):
        layer(randn(1, IN, device=device))
    layer.load_state_dict(saved.state_dict())
    assert same(states(layer), states(saved)) and layer.spec == spec
    assert torch.equal(layer(randn(3, IN, device=device)), saved(randn(3, IN, device=device)))
    drawn = BlockSparseLinear.from_spec(saved.to(torch.float64).spec, bias=False, device=device)
    assert drawn.bias is None and drawn.spec.dtype == torch.float64
    drawn.reset_parameters()
    assert drawn.pattern.nnz == spec.nnz and dense_blocks(drawn).dtype == torch.float64


@every_layer
@on_every_device
def test_leaves_the_meta_device(device: str, name: str) -> None:
    with torch.device("meta"):
        empty = make(name)
    assert {tensor.device.type for tensor in empty.state_dict().values()} == {"meta"}
    saved = make(name, seed=4, device=device)
    for assign in (False, True):
        layer = copy.deepcopy(empty)
        layer = layer if assign else layer.to_empty(device=device)
        if not assign:
            with pytest.raises(InvalidPatternError, match="pattern is missing"):
                layer(randn(1, IN, device=device))
        layer.load_state_dict(saved.state_dict(), assign=assign)
        assert same(states(layer), states(saved))
        assert torch.equal(layer(randn(3, IN, device=device)), saved(randn(3, IN, device=device)))
    drawn = copy.deepcopy(empty).to_empty(device=device)
    drawn.reset_parameters()
    assert drawn(randn(3, IN, device=device)).isfinite().all()
    assert_multiplies(drawn, dense_blocks(drawn))


@pytest.mark.parametrize("storage", STORAGES)
def test_storages_on_the_meta_device_are_sizes(storage: str) -> None:
    name, nm = ("plain", None) if storage == "int4" else ("masked", NM)
    with torch.device("meta"):
        layer = make(name).to_storage(storage)
    saved = make(name, seed=2).to_storage(storage)
    assert {name: (t.shape, t.dtype) for name, t in layer.state_dict().items()} == {
        name: (t.shape, t.dtype) for name, t in saved.state_dict().items()
    }
    pattern = saved.pattern
    linear = nn.Linear(IN, OUT, device="meta")
    layer = BlockSparseLinear.from_linear(linear, pattern=pattern, nm=nm, storage=storage)
    layer.load_state_dict(saved.state_dict(), assign=True)
    assert same(states(layer), states(saved))


CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "half": lambda layer: layer.half(),
    "bfloat16": lambda layer: layer.to(torch.bfloat16),
    "double": lambda layer: layer.double(),
    "type": lambda layer: layer.type(torch.float16),
}


@every_layer
@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_conversions_change_the_dtype_of_activations_alone(name: str, conversion: str) -> None:
    layer = make(name)
    before = states(layer)
    assert CONVERSIONS[conversion](layer) is layer
    dtype = layer.bias.dtype
    assert dtype != torch.float32
    for key in ("mask", "metadata", "scales", "crow_indices", "col_indices", "slot"):
        if key in before:
            assert same({"": getattr(layer, key)}, {"": before[key]}), key
    if layer.scales is not None:
        assert same({"": layer.weight.detach()}, {"": before["weight"]})
    else:
        assert layer.weight.dtype == dtype
    stored: Any = layer
    plain = dense_blocks(stored)
    if layer.activations is not None and dtype == torch.float64:
        with pytest.raises(InvalidArgumentError, match="x must be float32, float16 or bfloat16"):
            layer(randn(3, IN, dtype=dtype))
        return
    assert plain.dtype == dtype and layer(randn(3, IN, dtype=dtype)).dtype == dtype
    assert_multiplies(layer, plain, 1e-9 if dtype == torch.float64 else 3e-2)
    assert layer.to_storage("plain").weight.dtype == dtype


@pytest.mark.gpu
@every_layer
def test_moves_to_another_device_and_back(name: str) -> None:
    """With more tokens than are multiplied without being quantized on CUDA devices."""
    layer = make(name)
    before, x = states(layer), randn(DECODE_TOKENS + 3, IN)
    expected = layer(x)
    allowed = max(1e-4, tolerance_of(layer, "cuda"))
    torch.testing.assert_close(layer.cuda()(x.cuda()).cpu(), expected, rtol=allowed, atol=allowed)
    assert same(states(layer.cpu()), before)
    assert torch.equal(layer(x), expected)


@in_every_way
@pytest.mark.parametrize("policy", ["sparse", "dense"])
@on_every_device
@pytest.mark.usefixtures("compressed")
def test_autocast(device: str, policy: str, name: str) -> None:
    layer = make(name, policy=policy, device=device)
    x = randn(4, IN, device=device).requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    of_x = rounded(layer, x.bfloat16()).float()  # which is rounded first
    torch.testing.assert_close(y.float(), layer.to_linear()(of_x), rtol=3e-2, atol=3e-2)
    y.float().sum().backward()
    assert x.grad.dtype == torch.float32
    if layer.weight.requires_grad:
        assert layer.weight.grad.dtype == torch.float32


# ---- compiled, exported and transformed ----


@in_every_way
@on_every_device
@pytest.mark.usefixtures("compressed")
def test_compiles_without_graph_breaks_and_follows_what_is_loaded(device: str, name: str) -> None:
    torch.compiler.reset()
    layer = make(name, device=device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = randn(4, IN, device=device).requires_grad_()
    leaves = [x, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
    for seed in (1, 2):
        results = [torch.autograd.grad(module(x).square().sum(), leaves) for module in (layer, compiled)]
        torch.testing.assert_close(*results)
        layer.load_state_dict(make(name, seed=seed, device=device).state_dict())


@every_layer
def test_exports(name: str) -> None:
    layer, other = make(name).eval(), make(name, seed=3).eval()
    x = randn(4, IN)
    batch = torch.export.Dim("batch", min=1, max=64)
    module = torch.export.export(layer, (x,), dynamic_shapes=({0: batch},)).module()
    torch.testing.assert_close(module(x[:3]), layer(x[:3]))
    module.load_state_dict(other.state_dict())
    torch.testing.assert_close(module(x), other(x))


@in_every_way
@pytest.mark.usefixtures("compressed")
def test_transforms(name: str) -> None:
    dtype = torch.float32 if "W8A8" in name else torch.float64
    layer = make(name, dtype=dtype)
    dense = nn.Sequential(layer.to_linear())
    dense.register_forward_pre_hook(lambda _, args: rounded(layer, *args))
    x = randn(4, IN, dtype=dtype)
    for transform in (func.grad, lambda f: func.vmap(func.grad(f))):
        results = [transform(lambda t, m=module: m(t).square().sum())(x) for module in (layer, dense)]
        torch.testing.assert_close(*results)
    if name in ("plain", *MASKED):

        def loss(weight: Tensor) -> Tensor:
            return func.functional_call(layer, {"weight": weight}, (x,)).square().sum()

        layer(x).square().sum().backward()
        torch.testing.assert_close(func.grad(loss)(layer.weight.detach()), layer.weight.grad)


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.usefixtures("compressed")
def test_second_derivatives_of_masked_layers(name: str) -> None:
    """With respect to x they are those of the product; by the weight, as if there were no mask."""
    layer = BlockSparseLinear(32, 32, density=1, block_shape=32, dtype=torch.float64, **LAYERS[name])
    x = randn(2, 32, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda t: layer(t).tanh(), (x,), fast_mode=True)
    (grad,) = torch.autograd.grad(layer(x).tanh().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), layer.weight)
    weight = layer.to_linear().weight.detach().requires_grad_()
    product = nn.functional.linear(x, weight, layer.bias).tanh().sum()
    (grad,) = torch.autograd.grad(product, x, create_graph=True)
    (wanted,) = torch.autograd.grad(grad.square().sum(), weight)
    torch.testing.assert_close(second, blocks_of_dense(wanted, layer.pattern))


# ---- what refuses ----


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"nm": (1, 4)}, r"nm must be \(2, 4\) or None, got \(1, 4\)"),
        ({"nm": "2:4"}, r"nm must be \(2, 4\) or None, got '2:4'"),
        (
            {"nm": NM, "block_shape": (32, 16)},
            r"nm: 2:4 is for bk of 32, 64 or 128, got blocks of \(32, 16\)",
        ),
        ({"nm": NM, "transposable": True, "block_shape": (16, 32)}, "transposable: 2:4 is for bn of 32"),
        ({"transposable": True}, r"transposable must be False without nm=\(2, 4\)"),
        ({"storage": "compressed"}, r"storage must not be 'compressed' without"),
        ({"storage": "int2"}, r"storage must be one of .*got 'int2'"),
        ({"storage": None}, r"storage must be one of .*got None"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        BlockSparseLinear(IN, OUT, **{"block_shape": 32, **arguments})
    with pytest.raises(InvalidArgumentError, match=named):
        BlockSparseLinear.from_linear(nn.Linear(IN, OUT), **{"block_shape": 32, **arguments})


def test_a_pattern_can_be_changed_beneath_stored_values() -> None:
    for name in LAYERS:
        layer = make(name)
        layer(randn(1, IN))
        layer.pattern = BlockPattern.random(
            (OUT, IN), block_shape=32, nnz=layer.pattern.nnz, generator=seeded(8)
        )
        assert_multiplies(layer, dense_blocks(layer))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("trained", [True, False])
def test_a_frozen_weight_stays_frozen_through_other_storages(device: str, trained: bool) -> None:
    layer = BlockSparseLinear(64, 64, nm=(2, 4), device=device, block_shape=32).requires_grad_(trained)
    layer.to_storage("compressed").to_storage("int8")
    assert not layer.weight.requires_grad
    layer = copy.deepcopy(layer)
    layer.reset_parameters()
    assert layer.to_storage("plain").weight.requires_grad is trained
    stored = BlockSparseLinear(64, 64, storage="int8", device=device, block_shape=32)
    assert stored.to_storage("plain").weight.requires_grad
    linear = nn.Linear(IN, OUT).requires_grad_(trained)
    assert BlockSparseLinear.from_linear(linear, nm=NM, block_shape=32).weight.requires_grad is trained


# ---- the plain weight that `prepack` keeps on the CPU ----


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name, dtype in product(MASKED + STORED, (torch.float32, torch.bfloat16, torch.float64))
        if dtype != torch.float64 or "W8A8" not in name  # whose products have no such results
    ],
)
def test_a_packed_layer_gives_the_same_and_follows_changes(name: str, dtype: torch.dtype) -> None:
    layer = BlockSparseLinear(
        256, 128, dtype=dtype, generator=seeded(), **{"block_shape": 32, **LAYERS[name]}
    )
    twin = copy.deepcopy(layer).prepack()
    other = BlockSparseLinear(
        256, 128, dtype=dtype, generator=seeded(5), **{"block_shape": 32, **LAYERS[name]}
    )
    # A kernel for int4 reads few tokens as they are, and does not round the weight.
    x = torch.randn(16 if name == "int4" else 5, 256, dtype=dtype, generator=seeded(1))

    def negate_(layer: BlockSparseLinear) -> None:
        layer.weight.copy_(-layer.weight.float())

    def choose_others_(layer: BlockSparseLinear) -> None:
        if layer.mask is not None:
            layer.mask.logical_not_()
        elif layer.metadata is not None and other.metadata is not None:
            layer.metadata.copy_(other.metadata)
        elif layer.scales is not None:
            layer.scales.mul_(2)

    changes: list[Callable[[BlockSparseLinear], Any]] = [
        lambda layer: None,
        negate_,
        choose_others_,
        lambda layer: layer.pattern.update_(other.pattern),
        lambda layer: layer.load_state_dict(other.state_dict()),
        lambda layer: setattr(
            layer.weight, "data", torch.cat((layer.weight.detach()[1:], layer.weight.detach()[:1]))
        ),
        lambda layer: layer.to_storage("plain"),
    ]
    with torch.no_grad():
        for change in changes:
            for each in (layer, twin):
                change(each)
            for _ in range(2):
                assert torch.equal(layer(x), twin(x))
    x.requires_grad_()
    gradients = [torch.autograd.grad(each(x).square().sum(), x)[0] for each in (layer, twin)]
    assert torch.equal(*gradients)


def test_a_packed_layer_trains_and_is_followed() -> None:
    layer = BlockSparseLinear(256, 128, nm=(2, 4), generator=seeded(), block_shape=32)
    twin, x = copy.deepcopy(layer).prepack(), torch.randn(5, 256, generator=seeded(1))
    for _ in range(3):
        for each in (layer, twin):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            each(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            assert torch.equal(layer(x), twin(x))
    assert torch.equal(layer.weight, twin.weight)

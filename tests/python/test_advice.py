"""`advise`: what it measures, what it makes of the times, what it refuses; no test depends on a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import tilesparse as ts
from tilesparse import BlockSparseConfig, advise
from tilesparse.cli import command
from tilesparse.errors import InvalidArgumentError, InvalidTypeError
from tilesparse.tuning import AdviceReport, Device
from tilesparse.tuning import advise as advising
from tilesparse.tuning.advise import Estimate, MeasuredLayers, call_of, contenders_for, left_out

DENSE, INT8 = None, torch.int8
CPU = torch.device("cpu")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = transformers.LlamaConfig(
    **SIZES, num_key_value_heads=1, vocab_size=96, architectures=["LlamaForCausalLM"], dtype="bfloat16"
)


def sparse(density: float, **options: Any) -> BlockSparseConfig:
    return BlockSparseConfig(density, (32, 32), **options)


def w8a8(density: float) -> BlockSparseConfig:
    return sparse(density, storage="int8", activations="int8")


@pytest.fixture
def known_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every contender takes 1 ms more than the one before it, and the call of the model 100 ms."""
    monkeypatch.setattr(advising, "_milliseconds", lambda calls, *_: [1.0 + i for i in range(len(calls))])
    of_calls = iter([(100.0, None), (40.0, None)] * 3)  # without the layers, too
    monkeypatch.setattr(advising, "milliseconds_of_call", lambda *_: next(of_calls))


def model() -> nn.Module:
    layers = [nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Linear(64, 128), nn.Linear(128, 10)]
    return nn.Sequential(*layers)


def report(
    *layers: MeasuredLayers, call: float = 10.0, busy: float | None = None, rest: float = 0.0
) -> AdviceReport:
    versions = {"torch": "2", "threads": "1"}
    return AdviceReport(Device("a device", None, 1), versions, layers, call, busy, rest, {})


def layers(times: dict[Any, float], calls: int = 1, names: tuple[str, ...] = ("a",)) -> MeasuredLayers:
    return MeasuredLayers((64, 64), 16, "float32", times, names, calls)


def test_layers_of_one_shape_are_measured_once_and_counted(known_times: None) -> None:
    found = ts.advise(model(), torch.randn(2, 8, 64), densities=[0.05, 0.25, 0.5])
    assert [(one.names, one.shape, one.tokens, one.calls) for one in found.layers] == [
        (("0", "3"), (128, 64), 16, 2),
        (("2",), (64, 128), 16, 1),
    ]  # the last layer fits no block
    assert found.contenders[:2] == [DENSE, INT8]
    assert found.contenders[2:] == [make(d) for d in (0.5, 0.25) for make in (sparse, w8a8)]
    assert found.densities == [0.5, 0.25]  # .05 of eight blocks rounds to none
    assert (found.call, found.rest) == (100, 40)


def test_layers_that_are_left_out_compute_nothing_and_come_back() -> None:
    own = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 32))
    x, replaced = torch.randn(2, 3, 64), torch.ones(2, 3, 128)
    expected = own(x)
    own[0].forward = lambda _: replaced  # as hooks of other libraries do
    with left_out(own, ["0", "1"]):
        y = own(x)
        assert y.shape == (2, 3, 32) and not y.any() and own(x) is y
    assert own[0](x) is replaced and "forward" not in vars(own[1])
    del own[0].forward
    assert torch.equal(own(x), expected)


def test_weights_in_four_bits_are_for_few_tokens() -> None:
    for tokens, has in ((8, True), (9, False)):
        found = contenders_for(CPU, torch.float32, [0.5], [(32, 32)], tokens)
        assert (sparse(0.5, storage="int4") in found) == has
    assert contenders_for(CPU, torch.float64, [0.5], [(32, 32)], 1)[:2] == [
        DENSE,
        sparse(0.5),
    ]  # nothing multiplies float64 in 8 bits


@pytest.mark.parametrize("tokens", [4, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_contenders_compute_the_layers(tokens: int, dtype: torch.dtype) -> None:
    x = torch.randn(tokens, 64, dtype=dtype)
    for contender, tolerance in ((DENSE, 1e-2), (INT8, 3e-2)):
        torch.manual_seed(1)
        y = call_of(contender, (96, 64), x)()
        torch.manual_seed(1)
        expected = x @ torch.randn(96, 64, dtype=dtype).t()
        assert y.dtype == dtype and y.shape == expected.shape
        assert (y - expected).norm() < tolerance * expected.norm()


def test_sparse_contenders_are_stored_as_they_say() -> None:
    x = torch.randn(4, 128)
    for contender in (sparse(0.5), w8a8(0.25), sparse(0.5, storage="int4")):
        call: Any = call_of(contender, (64, 128), x)
        layer = call.func
        assert layer.density == contender.density and layer.bias is None
        assert (layer.storage, layer.activations) == (contender.storage, contender.activations)
        assert call().shape == (4, 64)
    with pytest.raises(ts.errors.UnsupportedError, match="no kernel reads"):
        call_of(sparse(0.5, storage="int4"), (64, 128), torch.randn(64, 128))


@pytest.mark.gpu
def test_dense_float8_computes_the_layers() -> None:
    x = torch.randn(32, 128, device="cuda", dtype=torch.bfloat16)
    torch.manual_seed(1)
    y = call_of(torch.float8_e4m3fn, (96, 128), x)()
    torch.manual_seed(1)
    expected = x @ torch.randn(96, 128, device="cuda", dtype=torch.bfloat16).t()
    assert (y - expected).norm() < 0.1 * expected.norm()


@pytest.mark.gpu
def test_a_gpu_is_asked_how_long_it_works() -> None:
    found = ts.advise(model().cuda().bfloat16(), torch.randn(64, 64, device="cuda", dtype=torch.bfloat16))
    assert found.busy is not None and found.busy > 0
    assert torch.float8_e4m3fn in found.contenders


def test_the_model_stays_as_it_was(known_times: None) -> None:
    own = model().train()
    before = {name: tensor.clone() for name, tensor in own.state_dict().items()}
    state = torch.get_rng_state()
    ts.advise(own, torch.randn(16, 64, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(state, torch.get_rng_state()) and own.training
    assert not any(module._forward_pre_hooks for module in own.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in own.state_dict().items())


def test_sums_are_those_of_the_layers_and_grow_with_them() -> None:
    times = {DENSE: 2.0, INT8: 1.5, sparse(0.5): 1.0}
    first, second = layers(times, calls=3), layers({DENSE: 0.5, INT8: 0.25, sparse(0.5): 0.75}, calls=2)
    found = report(first, second, rest=3.0)
    assert found.estimates() == [
        Estimate(DENSE, 7.0, 10.0),
        Estimate(INT8, 5.0, 8.0),
        Estimate(sparse(0.5), 4.5, 7.5),
    ]
    for contender in (INT8, sparse(0.5)):
        slower = replace(first, milliseconds={**times, contender: times[contender] + 1})
        grown = {one.contender: one for one in report(slower, second, rest=3.0).estimates()}
        for one in found.estimates():
            more = 3.0 if one.contender == contender else 0.0
            assert grown[one.contender] == Estimate(one.contender, one.layers + more, one.total + more)
    assert "measure again" in str(report(first, call=1.0)) and "measure again" not in str(found)


def test_layers_that_a_contender_does_not_compute_take_the_next_best_way() -> None:
    only_plain = layers({DENSE: 4.0, INT8: 3.0, sparse(0.5): 2.0})
    only_dense = layers({DENSE: 4.0, INT8: 3.0})
    assert only_plain.time(w8a8(0.5)) == 2.0 and only_dense.time(w8a8(0.5)) == 4.0
    both = report(only_plain, layers({DENSE: 1.0, w8a8(0.5): 0.5}))
    assert {one.contender: one.layers for one in both.estimates()}[w8a8(0.5)] == 2.5


def test_the_highest_density_that_is_worth_it_is_recommended() -> None:
    times = {DENSE: 10.0, INT8: 6.0, sparse(0.5): 5.8, sparse(0.25): 5.0, w8a8(0.25): 4.0, sparse(0.1): 1.0}
    found = report(layers(times))
    assert found.best_dense == Estimate(INT8, 6.0, 6.0)
    assert found.recommended == Estimate(w8a8(0.25), 4.0, 4.0)
    assert "recommendation: density 0.25, 32x32, int8 W8A8: about 1.50 times as fast" in str(found)


@pytest.mark.parametrize(("faster", "rest"), [(5.5, 0.0), (1.0, 1000.0)])  # by too little, of too little
def test_staying_dense_is_recommended_where_nothing_is_worth_it(faster: float, rest: float) -> None:
    found = report(layers({DENSE: 10.0, INT8: 6.0, sparse(0.5): faster}), rest=rest)
    assert found.recommended is None
    assert "recommendation: stay dense (dense int8)" in str(found)


def test_a_gpu_that_waits_for_the_host_is_named() -> None:
    times = {DENSE: 2.0, sparse(0.5): 1.0}
    found = report(layers(times), call=10.0, busy=4.0)
    assert "the GPU waits for the host" in str(found)
    assert "the GPU waits" not in str(report(layers(times), call=4.5, busy=4.0))


def test_tables_name_layers_contenders_and_what_is_not_known(known_times: None) -> None:
    text = str(ts.advise(model(), torch.randn(16, 64), densities=[0.5], block_shapes=[(32, 64), 16]))
    for part in ("128x64", "dense int8", "density 0.5, 32x64", "density 0.5, 16x16, int8 W8A8", "Quality"):
        assert part in text
    assert (Path(__file__).parents[2] / "docs/recovery.md").exists() and "docs/recovery.md" in text


def test_encoders_are_measured_as_one_operator() -> None:
    bert = transformers.BertModel(transformers.BertConfig(**SIZES, vocab_size=96)).eval()
    found = ts.advise(bert, {"input_ids": torch.randint(96, (2, 8))}, densities=[0.5], layers="encoder")
    (name,) = found.fused
    assert name == "density 0.5, 32x32, int8 W8A8" and f"{name}, the encoder fused" in str(found)
    (total,) = (one.total for one in found.estimates() if one.contender == w8a8(0.5))
    assert total == found.fused[name]
    assert type(bert.encoder.layer) is nn.ModuleList


def test_encoders_that_are_no_operator_are_named() -> None:
    bert = transformers.BertModel(
        transformers.BertConfig(**SIZES, vocab_size=96, hidden_act="gelu_new")
    ).eval()
    found = ts.advise(bert, {"input_ids": torch.randint(96, (2, 8))}, densities=[0.5], layers="encoder")
    name = "density 0.5, 32x32, int8 W8A8, the encoder fused"
    assert not found.fused and found.refused[name].startswith(
        "encoder.layer: kernels do not have its activation"
    )
    assert f"not measured: {name}: encoder.layer" in str(found)


class Idle(nn.Module):
    """Has a layer that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_models_without_such_layers_are_refused() -> None:
    x = torch.randn(4, 64)
    for refused in (nn.Sequential(nn.ReLU()), nn.Sequential(nn.Linear(64, 10)), nn.Linear(64, 64)):
        with pytest.raises(InvalidArgumentError, match="model must have a linear layer"):
            advise(refused, x)
    with pytest.raises(InvalidArgumentError, match="meta"):
        advise(model().to("meta"), x)
    unused = nn.Sequential(Idle())
    with pytest.raises(InvalidArgumentError, match=r"batch must call .* 0.beside"):
        advise(unused, x)


def test_arguments_are_refused_by_name() -> None:
    x = torch.randn(4, 64)
    cases: tuple[tuple[str, dict[str, Any]], ...] = (
        ("densities", {"densities": []}),
        ("densities", {"densities": [0.0]}),
        ("densities", {"densities": [1.5]}),
        ("block_shapes", {"block_shapes": []}),
        ("block_shape", {"block_shapes": [7]}),
        ("layers", {"layers": "("}),
    )
    for name, arguments in cases:
        with pytest.raises(InvalidArgumentError, match=name):
            advise(model(), x, **arguments)
    with pytest.raises(InvalidTypeError, match="batch must be a tensor"):
        advise(model(), "a text")


def test_experts_are_one_product_of_all_their_projections(known_times: None) -> None:
    config = transformers.MixtralConfig(**SIZES, num_key_value_heads=1, vocab_size=96, num_local_experts=4)
    mixture = transformers.MixtralForCausalLM(config).eval()
    ids = torch.randint(96, (1, 16))
    found = ts.advise(mixture, {"input_ids": ids, "use_cache": False}, densities=[0.5], block_shapes=[32])
    (experts,) = [one for one in found.layers if one.is_experts]
    assert experts.names == tuple(f"model.layers.{number}.mlp.experts" for number in range(2))
    assert (experts.shape, experts.tokens, experts.calls) == ((4, 256, 64), 16, 2)
    assert [*experts.milliseconds] == [DENSE, sparse(0.5), w8a8(0.5)]  # none are dense in 8 bits
    only = ts.advise(mixture, {"input_ids": ids, "use_cache": False}, layers="experts", block_shapes=[32])
    assert all(one.is_experts for one in only.layers)


def test_the_command_takes_saved_models(
    known_times: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "llama")
    transformers.LlamaForCausalLM(LLAMA).save_pretrained(folder)
    asked = ["advise", folder, "--tokens", "16", "--device", "cpu", "--density", "0.5", "--block", "32"]
    assert command.main(asked) == 0
    out = capsys.readouterr().out
    assert "input_ids 1x16, on cpu" in out and "recommendation" in out
    assert "model.layers.*.mlp.up_proj" in out and "self_attn" in out
    assert command.main([*asked, "--dtype", "float64", "--layers", "mlp"]) == 0
    out = capsys.readouterr().out
    assert "float64" in out and "self_attn" not in out
    for arguments, said in (
        ([str(tmp_path / "none")], "model cannot be loaded"),
        ([folder, "--tokens", "4096"], "--tokens must be at most 2048"),
        ([folder, "--layers", "nothing", "--tokens", "8"], "model must have a linear layer"),
    ):
        assert command.main(["advise", *arguments, "--device", "cpu"]) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith(f"tilesparse advise: {said}")

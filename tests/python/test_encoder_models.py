"""Encoders of Transformers, prepared for inference on a CPU, compute what their layers compute."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import seeded
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn

import tilesparse
from tilesparse import BlockSparseConfig, BlockSparseLinear, prepare_for_inference_
from tilesparse.nn.encoder import BlockSparseEncoder

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

Batch = dict[str, Tensor]
INT8: dict[str, Any] = {"storage": "int8", "activations": "int8"}
# A large range, or a layer's x outweighs what it adds.
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "initializer_range": 0.2,
}
TEXT = SIZES | {"vocab_size": 96, "max_position_embeddings": 600, "pad_token_id": 1}
OF_DISTILBERT = {"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 128}
OF_MODERNBERT = {"local_attention": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
OF_MODERNBERT |= dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 2)
IMAGE = SIZES | {"image_size": 32, "patch_size": 8}
MAKERS: dict[str, Callable[[], nn.Module]] = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**TEXT)),
    "roberta": lambda: transformers.RobertaModel(transformers.RobertaConfig(**TEXT)),
    "xlm_roberta": lambda: transformers.XLMRobertaModel(transformers.XLMRobertaConfig(**TEXT)),
    "mpnet": lambda: transformers.MPNetModel(transformers.MPNetConfig(**TEXT)),
    "distilbert": lambda: transformers.DistilBertModel(transformers.DistilBertConfig(**TEXT | OF_DISTILBERT)),
    "modernbert": lambda: transformers.ModernBertModel(transformers.ModernBertConfig(**TEXT | OF_MODERNBERT)),
    "nomic_bert": lambda: transformers.NomicBertModel(
        transformers.NomicBertConfig(**TEXT | {"num_attention_heads": 2, "initializer_range": 0.1})
    ),
    "jina": lambda: transformers.JinaEmbeddingsV3Model(
        transformers.JinaEmbeddingsV3Config(**TEXT | {"num_attention_heads": 2})
    ),
    "vit": lambda: transformers.ViTModel(transformers.ViTConfig(**IMAGE)),
    "dinov2": lambda: _with_factors(
        transformers.Dinov2Model(transformers.Dinov2Config(**IMAGE, mlp_ratio=2))
    ),
    "clip": lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**IMAGE, hidden_act="gelu")),
}
POSITIONAL = {"mpnet", "modernbert", "nomic_bert", "jina"}
IMAGES = {"vit", "dinov2", "clip"}
LENGTHS: dict[str, list[int]] = {
    "whole": [24, 24],
    "unequal": [40, 7, 1, 33, 64],
    "single tokens": [1, 1],
    "512": [512, 130],
    "an empty text": [0, 20],
}


def _with_factors(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        if name.endswith("lambda1"):
            parameter.data.normal_()
    return model


def text(lengths: list[int], seed: int = 0) -> Batch:
    size = len(lengths), max(lengths)
    mask = (torch.arange(size[1]) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(3, 96, size, generator=seeded(seed))
    return {"input_ids": ids.where(mask == 1, 1), "attention_mask": mask}


def batch_of(name: str, lengths: list[int] = LENGTHS["unequal"]) -> Batch:
    if name in IMAGES:
        return {"pixel_values": torch.randn(len(lengths), 3, 32, 32, generator=seeded(1))}
    return text(lengths)


def made(name: str, density: float = 0.5, **options: Any) -> Any:
    torch.manual_seed(0)
    model = MAKERS[name]().eval().requires_grad_(False)
    config = BlockSparseConfig(density, 16, **INT8 | options)
    tilesparse.sparsify_(model, {r"(.*\.)?(layer|layers)\.\d+\..*": config})
    return model


def prepared(name: str) -> tuple[Any, Any, BlockSparseEncoder]:
    """Copies of a model, of the same one prepared, and of its encoder."""
    return copy.deepcopy(original(name))


@cache
def original(name: str) -> tuple[Any, Any, BlockSparseEncoder]:
    model = made(name)
    twin = copy.deepcopy(model)
    report = prepare_for_inference_(twin, batch_of(name))
    assert len(report.facts["encoders"]) == 1, str(report)
    (encoder,) = (module for module in twin.modules() if isinstance(module, BlockSparseEncoder))
    return model, twin, encoder


@pytest.fixture(scope="module", params=MAKERS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[str, Any, Any, BlockSparseEncoder]]:
    yield (request.param, *original(request.param))


@torch.no_grad()
def hidden(model: Any, batch: Batch) -> Tensor:
    found: Tensor = model(**batch).last_hidden_state
    return found


def in_float32(model: nn.Module) -> nn.Module:
    """The same weights, as they are rounded, without rounding x."""
    twin = copy.deepcopy(model)
    for name, module in list(twin.named_modules()):
        if isinstance(module, BlockSparseLinear):
            parent, _, own = name.rpartition(".")
            setattr(twin.get_submodule(parent), own, module.to_linear())
    return twin


def assert_alike(actual: Tensor, expected: Tensor, kept: Tensor | None, least: float = 0.997) -> None:
    """Kept tokens have such a cosine in the mean, and nearly so each; the others are zeros."""
    if kept is not None:
        assert not actual[~kept].any()
        if not kept.any():
            return
        actual, expected = actual[kept], expected[kept]
    cosines = nn.functional.cosine_similarity(actual.float(), expected.float(), -1)
    assert actual.isfinite().all() and float(cosines.mean()) >= least
    assert float(cosines.min()) >= 1 - 4 * (1 - least)
    assert float((actual - expected).norm() / expected.norm()) <= 2 * (1 - least) ** 0.5


def final_norm(name: str, model: Any) -> Any:
    return {"modernbert": lambda: model.final_norm, "vit": lambda: model.layernorm}.get(name, lambda: None)()


@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_prepared_encoder_computes_the_same(
    pair: tuple[str, Any, Any, BlockSparseEncoder], lengths: str
) -> None:
    name, model, twin, encoder = pair
    batch, count = batch_of(name, LENGTHS[lengths]), encoder.count
    kept = batch["attention_mask"].bool() if "attention_mask" in batch else None
    found = hidden(twin, batch)
    assert encoder.count == count + 1
    if kept is not None and (norm := final_norm(name, model)) is not None:
        found = found.where(kept[..., None], 0)  # the norm after the encoder has seen zeros
        assert norm is not None
    for other in (model, in_float32(model)):
        assert_alike(found, hidden(other, batch), kept)


def masks() -> dict[str, Tensor]:
    whole = torch.ones(2, 9, dtype=torch.long)
    left, gaps = whole.clone(), whole.clone()
    left[1, :4] = 0
    gaps[0, 3:5] = 0
    return {"padded on the left": left, "with gaps": gaps, "without any token": 0 * whole}


@pytest.mark.parametrize("kind", masks())
@pytest.mark.parametrize("pair", [name for name in MAKERS if name not in IMAGES], indirect=True)
def test_masks_that_are_no_lengths_are_right(
    pair: tuple[str, Any, Any, BlockSparseEncoder], kind: str
) -> None:
    name, model, twin, encoder = pair
    mask = masks()[kind]
    batch, count = text([9, 9]) | {"attention_mask": mask}, encoder.count
    found = hidden(twin, batch).where(mask.bool()[..., None], 0)
    assert_alike(found, hidden(model, batch), mask.bool())
    alone = kind == "with gaps" and name in POSITIONAL
    assert encoder.count == count + (not alone)


BERT: dict[str, Any] = {"input_ids": text([5, 5])["input_ids"]}
APART: dict[str, tuple[str, dict[str, Any]]] = {
    "hidden states": ("bert", BERT | {"output_hidden_states": True}),
    "hidden states of mpnet": ("mpnet", BERT | {"output_hidden_states": True}),
    "attention": ("bert", BERT | {"output_attentions": True}),
    "queries with masks of their own": (
        "bert",
        BERT | {"attention_mask": torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()},
    ),
    "positions of one's own": ("modernbert", BERT | {"position_ids": torch.arange(5)[None] * 2}),
    "masks for kinds of layers": (
        "modernbert",
        BERT | {"attention_mask": {"full_attention": None, "sliding_attention": None}},
    ),
}


@pytest.mark.parametrize("case", APART)
def test_what_the_operator_does_not_compute_the_layers_do(case: str) -> None:
    name, arguments = APART[case]
    model, twin, encoder = prepared(name)
    if case == "attention":
        model.set_attn_implementation("eager")
        twin.set_attn_implementation("eager")
    count = encoder.count
    with torch.no_grad():
        expected, found = model(**arguments), twin(**arguments)
    assert encoder.count == count
    for key in ("last_hidden_state", "hidden_states", "attentions"):
        for mine, theirs in zip(_all(found.get(key)), _all(expected.get(key)), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    hidden(twin, text([5, 5]))
    assert encoder.count == count + 1  # it was for that call alone


def _all(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else () if value is None else (value,)


def test_hooks_training_and_gradients_have_the_layers_compute() -> None:
    _, twin, encoder = prepared("bert")
    batch, seen = text([5, 3]), []
    count = encoder.count
    hook = twin.encoder.layer[1].output.register_forward_hook(lambda *_: seen.append(1))
    hidden(twin, batch)
    hook.remove()
    twin.train()
    hidden(twin, batch)
    twin.eval()
    x = torch.randn(2, 5, 64, requires_grad=True)
    twin(inputs_embeds=x).last_hidden_state.sum().backward()
    assert seen and x.grad is not None and encoder.count == count
    assert isinstance(encoder[:2], nn.ModuleList) and len(list(encoder)) == len(encoder) == 3
    norm = twin.encoder.layer[1].output.LayerNorm.weight.requires_grad_(True)
    twin(**batch).last_hidden_state.sum().backward()
    assert norm.grad is not None and encoder.count == count
    hidden(twin, batch)
    assert encoder.count == count + 1


LEFT_ALONE: dict[str, tuple[Callable[[], Any], str]] = {
    "another activation": (lambda: _with({"hidden_act": "gelu_new"}), "its activation NewGELU"),
    "a decoder": (lambda: _with({"is_decoder": True}), "a layer of a decoder"),
    "rotary embeddings of small heads": (
        lambda: _sparse(
            transformers.ModernBertModel(
                transformers.ModernBertConfig(**TEXT | OF_MODERNBERT | {"num_attention_heads": 4})
            ),
            {r"layers\..*": INT8},
        ),
        "where rotary is given",
    ),
    "other parts": (
        lambda: _sparse(
            transformers.DebertaV2Model(transformers.DebertaV2Config(**TEXT)), {r"encoder\.layer\..*": INT8}
        ),
        "other parts than those that are known",
    ),
    "groups of layers": (
        lambda: _sparse(
            transformers.AlbertModel(transformers.AlbertConfig(**TEXT | {"embedding_size": 64})),
            {r"encoder\.albert.*": INT8},
        ),
        "other parts than those that are known",
    ),
    "attention of its own": (
        lambda: _sparse(
            transformers.YosoModel(transformers.YosoConfig(**TEXT)), {r"encoder\.layer\..*": INT8}
        ),
        "its attention, YosoSelfAttention, is not known",
    ),
    "dense layers": (
        lambda: _made_of({r"encoder\.layer\.\d+\.attention\..*": INT8}),
        "its intermediate.dense is Linear",
    ),
    "x in float32": (
        lambda: _made_of({r"encoder\..*": {"storage": "int8"}}),
        "does not multiply in int8",
    ),
}


def _with(changes: dict[str, Any]) -> nn.Module:
    return _sparse(transformers.BertModel(transformers.BertConfig(**TEXT | changes)), {r"encoder\..*": INT8})


def _made_of(layers: dict[str, dict[str, Any]]) -> nn.Module:
    return _sparse(MAKERS["bert"](), layers)


def _sparse(model: nn.Module, layers: dict[str, dict[str, Any]]) -> nn.Module:
    configs = {name: BlockSparseConfig(0.5, 16, **options) for name, options in layers.items()}
    tilesparse.sparsify_(model.eval(), configs)
    return model


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_the_report_names_what_is_left_alone(case: str) -> None:
    make, reason = LEFT_ALONE[case]
    model = make()
    batch = text([5, 3])
    expected = hidden(model, batch)
    report = prepare_for_inference_(model, batch)
    found = [one for one in report.skipped if reason in one.reason]
    assert len(found) == 1 and not report.facts["encoders"] and reason in str(report)
    torch.testing.assert_close(hidden(model, batch), expected, rtol=1e-3, atol=1e-3)


class Loop(nn.Module):
    """A model of layers that does more than to call one after the other."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, made("bert").encoder.layer

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        seen = []
        for layer, _ in zip(self.layer, range(3), strict=self.kind == "counts"):
            x = layer(x, mask[:, None, None])
            seen.append(x)
            if self.kind == "between":
                x = x * 1.001
        if self.kind == "collects":
            return torch.stack(seen)
        return x.mean(1) if self.kind == "masked" else x


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("between", "its model changes what a layer gives to the next"),
        ("collects", "its model gives other tensors"),
        ("counts", "its model cannot call all layers as one: ValueError"),
        ("masked", "its model reads hidden states of masked tokens"),
        ("plain", None),
    ],
)
def test_a_model_that_does_more_than_call_its_layers_is_left_alone(kind: str, reason: str | None) -> None:
    model = Loop(kind).eval()
    batch = torch.randn(2, 9, 64), torch.arange(9) < torch.tensor([[9], [4]])
    expected = model(*batch)
    report = prepare_for_inference_(model, batch)
    assert report.facts["encoders"] == ([] if reason else ["layer"])
    if reason is not None:
        assert reason in str(report)
        assert (model(*batch) - expected).norm() < 0.01 * expected.norm()


def test_the_scale_of_scores_is_that_of_the_model() -> None:
    model = made("bert")
    for layer in model.encoder.layer:
        layer.attention.self.scaling = 0.6
    twin, batch = copy.deepcopy(model), text([9, 4])
    assert len(prepare_for_inference_(twin, batch).facts["encoders"]) == 1
    assert_alike(hidden(twin, batch), hidden(model, batch), batch["attention_mask"].bool())


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_sentence_transformers_encode_texts_of_all_lengths(name: str, tmp_path: Path) -> None:
    """In the order of their lengths, padded batch by batch."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    letters = "abcdefghijklmnopqrstuvwxyz"
    vocabulary = {word: number for number, word in enumerate(["[UNK]", "[PAD]", *letters])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    torch.manual_seed(0)
    MAKERS[name]().save_pretrained(tmp_path)
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "model_max_length": 512}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(tmp_path)
    model = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")
    tilesparse.sparsify_(model, {r".*\.layers?\.\d+\..*": BlockSparseConfig(0.5, 16, **INT8)})
    twin = copy.deepcopy(model)
    texts = [" ".join((length * letters)[length : 2 * length]) for length in range(1, 300, 9)]
    texts = [*texts[::2], "", *texts[1::2], texts[3]]
    report = prepare_for_inference_(twin, (twin.preprocess(texts[:4]),))
    assert len(report.facts["encoders"]) == 1, str(report)
    (encoder,) = (module for module in twin.modules() if isinstance(module, BlockSparseEncoder))
    count = encoder.count
    found = twin.encode(texts, batch_size=8, convert_to_tensor=True)
    assert encoder.count == count + -(-len(texts) // 8)
    some = torch.tensor([bool(text) for text in texts])
    assert_alike(found, model.encode(texts, batch_size=8, convert_to_tensor=True), some)
    alone = torch.stack([twin.encode(text, convert_to_tensor=True) for text in texts if text])
    torch.testing.assert_close(found[some], alone, rtol=1e-5, atol=1e-5)  # whatever they are padded to


def test_changed_weights_count() -> None:
    """In place, loaded, and in a layer that an adapter would put there."""
    _, twin, encoder = prepared("bert")
    batch, layer = text([5, 3]), twin.encoder.layer[0]
    before, state = hidden(twin, batch), copy.deepcopy(twin.state_dict())
    with torch.no_grad():
        for part in (layer.attention.self.query, layer.output.dense):
            part.scales.mul_(2)
    changed = hidden(twin, batch)
    fresh = made("bert")
    fresh.load_state_dict(twin.state_dict())
    assert not torch.allclose(changed, before)
    assert_alike(changed, hidden(fresh, batch), batch["attention_mask"].bool())
    twin.load_state_dict(state)
    torch.testing.assert_close(hidden(twin, batch), before, rtol=0, atol=0)
    count = encoder.count
    layer.attention.self.query = layer.attention.self.query.to_linear()
    assert hidden(twin, batch).isfinite().all() and encoder.count == count


def test_copies_and_checkpoints_are_those_of_the_layers(tmp_path: Path) -> None:
    model, twin, _ = prepared("bert")
    batch = text([5, 3])
    expected = hidden(twin, batch)
    assert list(twin.state_dict()) == list(model.state_dict())
    assert len(prepare_for_inference_(twin, batch).facts["encoders"]) == 1
    tilesparse.save(twin, tmp_path / "model.safetensors")
    loaded = tilesparse.load(made("bert"), tmp_path / "model.safetensors")
    prepare_for_inference_(loaded, batch)
    for other in (loaded, copy.deepcopy(twin), pickle.loads(pickle.dumps(twin))):
        (encoder,) = (module for module in other.modules() if isinstance(module, BlockSparseEncoder))
        count = encoder.count
        torch.testing.assert_close(hidden(other, batch), expected, rtol=0, atol=0)
        assert encoder.count == count + 1


def test_threads_compute_the_same_bits(threads: None) -> None:
    _, twin, encoder = prepared("bert")
    batches = [text([9, 4], seed) for seed in range(4)]
    expected = [hidden(twin, batch) for batch in batches]
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        for batch, y in zip(batches, expected, strict=True):
            torch.testing.assert_close(hidden(twin, batch), y, rtol=0, atol=0)
    found: dict[int, Tensor] = {}
    before = encoder.count

    def call(number: int) -> None:
        for _ in range(5):
            found[number] = hidden(twin, batches[number])

    workers = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for number, y in enumerate(expected):
        torch.testing.assert_close(found[number], y, rtol=0, atol=0)
    assert encoder.count > before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("density", [1.0, 0.25])
def test_densities_and_dtypes(density: float, dtype: torch.dtype) -> None:
    model = made("bert", density).to(dtype)
    twin, batch = copy.deepcopy(model), text([9, 4])
    report = prepare_for_inference_(twin, batch)
    assert len(report.facts["encoders"]) == 1
    kept = batch["attention_mask"].bool()
    found = hidden(twin, batch)
    assert found.dtype == dtype
    assert_alike(found, hidden(model, batch), kept)


def test_compiled_and_exported_models_have_the_layers_compute() -> None:
    model, twin, encoder = prepared("bert")
    batch, count = text([9, 4]), encoder.count
    expected = hidden(model, batch)
    for other in (
        torch.compile(twin, backend="eager", fullgraph=True),
        torch.export.export(twin, (), batch).module(),
    ):
        torch.testing.assert_close(hidden(other, batch), expected, rtol=1e-3, atol=1e-3)
    assert encoder.count == count


def test_a_model_that_cannot_be_prepared_gets_its_layers_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("bert")
    layers, hooks = model.encoder.layer, len(model.encoder._forward_hooks)

    def fail(steps: Any) -> Any:
        assert isinstance(model.encoder.layer, BlockSparseEncoder)
        raise RuntimeError("no measurements")

    monkeypatch.setattr("tilesparse.model.inference._measured", fail)
    with pytest.raises(RuntimeError, match="no measurements"):
        prepare_for_inference_(model, text([5, 3]))
    assert model.encoder.layer is layers and len(model.encoder._forward_hooks) == hooks

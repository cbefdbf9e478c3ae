"""Encoders of Transformers in one operator: inference on a CPU, with weights and x in int8.

Tokens are packed: what a mask leaves out is not computed, in no layer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from inspect import signature, unwrap
from itertools import chain
from operator import attrgetter
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from .._ops.autograd import records_gradient
from .._ops.encoder import Encoder, EncoderLayer, EncoderNorm, EncoderWeight
from .._runtime.torch_private import is_exporting, transforms_active
from ..errors import TileSparseError, UnsupportedError
from .linear import BlockSparseLinear
from .merged import MergedProduct, concatenate, product_of
from .mlp import name_of_activation


class _Form(NamedTuple):
    """Names of the parts of a layer of Transformers: q, k and v or all in one, and so on."""

    qkv: tuple[str, ...]
    out: str
    norms: tuple[str, str]
    up: tuple[str, ...]
    activation: str
    down: str
    norm_first: bool = False
    factors: tuple[str, ...] = ()

    def linears(self) -> list[str]:
        return [*self.qkv, self.out, *self.up, self.down]


_BERT = ("intermediate.dense",), "intermediate.intermediate_act_fn", "output.dense"
_MLP = ("mlp.fc1",), "mlp.activation_fn", "mlp.fc2"
_QKV = "attention.q_proj", "attention.k_proj", "attention.v_proj"
_SELF_QKV = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
_NORMS_BEHIND = "post_attention_layernorm", "post_mlp_layernorm"
_FORMS = (
    _Form(  # BERT, RoBERTa, XLM-RoBERTa
        ("attention.self.query", "attention.self.key", "attention.self.value"),
        "attention.output.dense",
        ("attention.output.LayerNorm", "output.LayerNorm"),
        *_BERT,
    ),
    _Form(  # MPNet
        ("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        "attention.attn.o",
        ("attention.LayerNorm", "output.LayerNorm"),
        *_BERT,
    ),
    _Form(  # DistilBERT
        ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        "attention.out_lin",
        ("sa_layer_norm", "output_layer_norm"),
        *(("ffn.lin1",), "ffn.activation", "ffn.lin2"),
    ),
    _Form(  # ViT
        _QKV, "attention.o_proj", ("layernorm_before", "layernorm_after"), *_MLP, norm_first=True
    ),
    _Form(  # DINOv2
        _QKV,
        "attention.o_proj",
        ("norm1", "norm2"),
        *_MLP,
        norm_first=True,
        factors=("layer_scale1.lambda1", "layer_scale2.lambda1"),
    ),
    _Form(  # CLIP, SigLIP
        _SELF_QKV, "self_attn.out_proj", ("layer_norm1", "layer_norm2"), *_MLP, norm_first=True
    ),
    _Form(  # NomicBERT, GTE
        _SELF_QKV,
        "self_attn.o_proj",
        _NORMS_BEHIND,
        *(("mlp.gate_proj", "mlp.up_proj"), "mlp.act_fn", "mlp.down_proj"),
    ),
    _Form(_SELF_QKV, "self_attn.o_proj", _NORMS_BEHIND, *_MLP),  # Jina embeddings v3
    _Form(  # ModernBERT
        ("attn.Wqkv",),
        "attn.Wo",
        ("attn_norm", "mlp_norm"),
        *(("mlp.Wi",), "mlp.act", "mlp.Wo"),
        norm_first=True,
    ),
)


def form_of(layer: nn.Module) -> _Form | None:
    """Return the form whose parts a layer has, or None."""
    for form in _FORMS:
        try:
            attrgetter(*form.linears(), *form.norms, form.activation, *form.factors)(layer)
        except AttributeError:
            continue
        return form
    return None


def operator_of(layer: nn.Module) -> EncoderLayer:
    """Return a layer as the operator takes it; weights of one x that are not one product are copied."""
    form = form_of(layer)
    if form is None:
        raise UnsupportedError("its layers have other parts than those that are known")
    attention = layer.get_submodule(form.qkv[0].rpartition(".")[0])
    if any(getattr(module, name, False) for module in (layer, attention) for name in _OF_DECODERS):
        raise UnsupportedError("it is a layer of a decoder")
    if not _is_plain(attention):
        raise UnsupportedError(f"its attention, {type(attention).__name__}, is not known")
    names = form.linears()
    linears: list[Any] = [layer.get_submodule(name) for name in names]
    for name, linear in zip(names, linears, strict=True):
        reason = _reason_not_computed(linear)
        if reason is not None:
            raise UnsupportedError(f"its {name} {reason}")
    norms = [layer.get_submodule(name) for name in form.norms]
    factors = [attrgetter(name)(layer) for name in form.factors]
    known = {parameter for part in (*linears, *norms) for parameter in part.parameters()} | {*factors}
    others = [name for name, parameter in layer.named_parameters() if parameter not in known]
    if others:
        raise UnsupportedError(f"the operator has no {', '.join(others)}")
    module = attrgetter(form.activation)(layer)
    activation = name_of_activation(module) if isinstance(module, nn.Module) else None
    if activation is None:
        raise UnsupportedError(f"kernels do not have its activation {type(module).__name__}")
    owners = attention, getattr(attention, "config", None)
    heads = (getattr(owner, name, None) for owner in owners for name in ("num_attention_heads", "n_heads"))
    scales_of = (getattr(attention, name, None) for name in ("scaling", "scale"))
    first, last = len(form.qkv), len(linears) - 1
    added = [EncoderWeight.of(linears[number]) for number in (first, last)]
    for number, factor in enumerate(factors):
        bias, scales = added[number].bias, added[number].scales * factor
        added[number] = added[number]._replace(scales=scales, bias=None if bias is None else bias * factor)
    up = _one_product(linears[first + 1 : last])
    return EncoderLayer(
        next(filter(None, heads)),
        EncoderWeight.of(_one_product(linears[:first])),
        added[0],
        EncoderWeight.of(up),
        added[1],
        _norm(norms[0]),
        _norm(norms[1]),
        norm_first=form.norm_first,
        activation=activation,
        gated=up.out_features == 2 * linears[last].in_features,
        scale=next((one for one in scales_of if isinstance(one, float)), None),
        window=(getattr(attention, "sliding_window", None) or 1) - 1,  # Transformers counts the token itself
    )


_OF_DECODERS = "is_decoder", "is_causal", "add_cross_attention"
_PLAIN = {"MPNetSelfAttention", "RemBertSelfAttention", "VisualBertSelfAttention"}


def _is_plain(attention: nn.Module) -> bool:
    """Return True for attention that is Transformers' own function of q, k and v, or does the same."""
    kind = type(attention)
    if kind.__module__.startswith("transformers.") and kind.__name__ in _PLAIN:
        return True
    forward: Any = unwrap(kind.forward)
    return "ALL_ATTENTION_FUNCTIONS" in forward.__code__.co_names


def _reason_not_computed(layer: nn.Module) -> str | None:
    if type(layer) is not BlockSparseLinear or "forward" in vars(layer):
        return f"is {type(layer).__name__}, not BlockSparseLinear"
    if layer.storage != "int8" or layer.activations != "int8" or layer.nm is not None:
        return "does not multiply in int8: quantize weight and activations"
    if layer.threshold is not None:
        return "has a threshold of activations"
    return None if layer.weight.is_cpu and layer._shard is None else "has no weight on the CPU"


def _norm(module: nn.Module) -> EncoderNorm:
    if type(module) is nn.Identity:
        return EncoderNorm(None, None, 1.0)
    if type(module) is not nn.LayerNorm:
        raise UnsupportedError(f"its norm is {type(module).__name__}, not LayerNorm")
    return EncoderNorm(module.weight, module.bias, module.eps)


def _one_product(layers: Sequence[BlockSparseLinear]) -> BlockSparseLinear:
    if len(layers) == 1:
        return layers[0]
    merged = product_of(layers[0])
    if merged is not None and merged.layers == tuple(layers):
        return merged.whole
    return concatenate(layers)


class Call(NamedTuple):
    """Arguments of the layers of an encoder, packed.

    Attributes:
        operator: of all layers.
        x: [tokens, features].
        offsets: int32 [texts + 1].
        rows: of the tokens in the padded batch, or None for all of them.
        shape: of the padded batch.
    """

    operator: Encoder
    x: Tensor
    offsets: Tensor
    rows: Tensor | None
    shape: torch.Size

    def pack(self, padded: Tensor) -> Tensor:
        """Return the tokens of a padded batch."""
        flat = padded.reshape(-1, padded.shape[-1])
        return flat if self.rows is None else flat.index_select(0, self.rows)

    def unpack(self, tokens: Tensor, masked: float = 0.0) -> Tensor:
        """Return the padded batch, with such a number in place of what is masked."""
        if self.rows is None:
            return tokens.view(self.shape)
        padded = tokens.new_full(self.shape, masked)
        padded.view(-1, padded.shape[-1]).index_copy_(0, self.rows, tokens)
        return padded


_jit: Any = torch.jit
_TAKEN = {"hidden_states", "attention_mask", "position_bias", "position_embeddings", "position_ids"}
_TAKEN |= {"use_cache"}  # without a cache
_OUTPUTS = "output_hidden_states", "output_attentions"


class BlockSparseEncoder(nn.ModuleList):
    """The layers of an encoder, which compute all in one go where their parent calls one after the other.

    It takes the place of a `torch.nn.ModuleList` and holds its layers under their names. While the parent's
    forward runs, iterating over it gives one function that does what all layers do: it packs the tokens that
    the mask keeps, computes all layers by one operator, and returns them at their places, with zeros for the
    others.

    The layers compute by themselves in all other cases: in training mode, where gradients are recorded,
    with hooks on modules inside, where hidden states or attention of each layer are asked for, when compiled
    or exported, with masks that are not the same for all queries of a text, and with gaps in masks if
    attention knows positions. Weights that were changed count from the next call on.

    Args:
        layers: those of BERT, ViT or another model whose layers have the parts of one of them.
        parent: the module whose attribute it becomes.
        in_tuple: whether layers return a tuple.

    Raises:
        UnsupportedError: the operator does not compute one of the layers.
    """

    def __init__(self, layers: Sequence[nn.Module], parent: nn.Module, *, in_tuple: bool = False) -> None:
        super().__init__(layers)
        self.in_tuple = in_tuple
        self.count = 0  # calls that were computed in one go
        self.masked = 0.0  # what masked tokens get; another number shows who reads them
        self._parent = (parent,)  # not a child
        self._built: _Built | None = _Built(self)

    def __iter__(self) -> Iterator[Any]:
        if is_compiling() or not self._is_looped_over(sys._getframe(1)) or not self._can_fuse():
            return super().__iter__()
        return self._steps()

    def _is_looped_over(self, frame: FrameType) -> bool:
        """Return True in the parent's forward, unless it is to give more than the last hidden states."""
        code, given = frame.f_code, frame.f_locals
        if code.co_name != "forward" or given.get(code.co_varnames[0]) is not self._parent[0]:
            return False
        if any(given.get(name) for name in _OUTPUTS):
            return False
        return not isinstance(given.get("attention_mask"), Mapping)  # of masks for kinds of layers

    def _steps(self) -> Iterator[Any]:
        step = _AllLayers(self)
        yield step
        if not step.done:
            yield from list(self._modules.values())[1:]

    def __getitem__(self, index: Any) -> Any:
        modules = list(self._modules.values())
        if not isinstance(index, slice):
            return super().__getitem__(index)
        return self if modules[index] == modules else nn.ModuleList(modules[index])

    def _can_fuse(self) -> bool:
        if self.training or is_exporting() or _jit.is_tracing() or transforms_active():
            return False
        if torch.is_autocast_enabled("cpu") or _outputs_are_captured():
            return False
        built = self._built
        if built is None or built.state != built.state_now():
            try:
                built = _Built(self)
            except TileSparseError:
                built = None
            self._built = built
        return built is not None and not built.is_watched()

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | str:
        """Return what a call of the first layer gives to all, or why they have to be called one by one."""
        built = self._built
        if built is None:
            return "its layers have changed"
        given = dict(zip(built.names, args, strict=False)) | dict(kwargs)
        x, mask = given.get("hidden_states"), given.get("attention_mask")
        others = [name for name in given.keys() - _TAKEN if not (given[name] is None or given[name] is False)]
        if others:
            return f"its layers are called with {', '.join(sorted(others))}"
        if type(x) is not Tensor or x.dim() != 3 or not x.numel() or not x.is_cpu:
            return "its layers are not called with x [texts, tokens, features] on the CPU"
        if records_gradient((x, *built.counted)):
            return "a gradient is recorded"
        texts, tokens, _ = x.shape
        flat = x.reshape(-1, x.shape[-1])
        try:
            is_positional = built.prepare_positions(self._parent[0], given, tokens)
            kept = _kept(mask, texts, tokens)
        except TileSparseError as error:
            return str(error)
        if kept is None:
            offsets = torch.arange(0, texts * tokens + 1, tokens, dtype=torch.int32)
            return Call(built.operator, flat, offsets, None, x.shape)
        if is_positional and _has_gaps(kept):
            return "a mask has gaps, and attention knows positions"
        rows = kept.reshape(-1).nonzero().squeeze(1)
        offsets = torch.zeros(texts + 1, dtype=torch.int32)
        torch.cumsum(kept.sum(1), 0, out=offsets[1:])
        return Call(built.operator, flat.index_select(0, rows), offsets, rows, x.shape)

    def run(self, call: Call) -> Tensor:
        """Return what the last layer returns, [texts, tokens, features]."""
        self.count += 1
        return call.unpack(call.operator(call.x, call.offsets), self.masked)

    def operators(self) -> list[Encoder]:
        """Return an operator for each layer."""
        return [] if self._built is None else [Encoder([layer]) for layer in self._built.layers]

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._built = None  # parameters stay what they are, with other data
        return super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_built": None}


class _AllLayers:
    """Takes the place of the first layer in a loop over all, and computes them all if it can."""

    def __init__(self, encoder: BlockSparseEncoder) -> None:
        self.encoder, self.done = encoder, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.encoder.call(args, kwargs)
        if isinstance(call, str):
            return self.encoder[0](*args, **kwargs)
        self.done = True
        y = self.encoder.run(call)
        return (y,) if self.encoder.in_tuple else y

    def __getattr__(self, name: str) -> Any:
        return getattr(self.encoder[0], name)  # such as the kind of its attention


class _Built:
    """The operator of an encoder, and what it was made of."""

    def __init__(self, encoder: BlockSparseEncoder) -> None:
        own: list[Any] = list(encoder._modules.values())
        with torch.inference_mode(False), torch.no_grad():
            self.layers = [operator_of(layer) for layer in own]
            self.operator = Encoder(self.layers)
        self._kinds = [getattr(layer, "attention_type", None) for layer in own]  # of rotary embeddings
        self._places = 0
        parts = [module for layer in own for module in layer.modules()]
        self._held = [
            held for part in parts for held in (part._parameters, part._buffers, part._modules) if held
        ]
        self._hooks = [hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        tensors = (one for held in self._held for one in held.values() if isinstance(one, Tensor))
        self.counted = [tensor for tensor in tensors if not tensor.is_inference()]
        self.names = list(signature(own[0].forward).parameters)
        self.state = self.state_now()

    def prepare_positions(self, parent: Any, given: Mapping[str, Any], tokens: int) -> bool:
        """Have attention know positions as in a call of the first layer; return False if it knows none."""
        rotary: Any = given.get("position_embeddings")
        bias: Any = given.get("position_bias")
        if rotary is None and bias is None:
            return any(layer.window for layer in self.layers)
        if tokens > self._places:
            places = max(_PLACES, 1 << (tokens - 1).bit_length())
            own: list[dict[str, Any]]
            with torch.inference_mode(False), torch.no_grad():
                if rotary is not None:
                    tables = {kind: _rotary_table(parent, places, kind) for kind in set(self._kinds)}
                    own = [{"rotary": tables[kind]} for kind in self._kinds]
                else:
                    own = [{"position_bias": _bias_table(parent, places)}] * len(self.layers)
                layers = zip(self.layers, own, strict=True)
                made = [layer._replace(**table) for layer, table in layers]
                self.layers, self.operator = made, Encoder(made)
            self._places = places
        table: Any = self.layers[0]
        if rotary is not None:
            table = table.rotary[:tokens]
            half = table.shape[1] // 2
            pairs = zip(rotary, table.split(half, 1), strict=True)
            known = all(
                len(one) == 1 and torch.equal(one[0, :, :half], own.to(one.dtype)) for one, own in pairs
            )
        else:
            table = table.position_bias
            ends = bias[0, :, :, 0].flip(1), bias[0, :, 0]
            middle = table.shape[1] // 2
            ours = table[:, middle - tokens + 1 : middle + 1], table[:, middle : middle + tokens]
            known = all(torch.equal(one.float(), own) for one, own in zip(ends, ours, strict=True))
        if not known:
            raise UnsupportedError("positions are not 0, 1, 2 and so on")
        return True

    def state_now(self) -> tuple[object, ...]:
        """Return what differs once a part or tensor is another one, or a tensor was written to."""
        held = chain.from_iterable(map(dict.values, self._held))
        return tuple(map(id, held)), tuple(map(_VERSION, self.counted))

    def is_watched(self) -> bool:
        """Return True if somebody wants to see what a part computes."""
        return any(not _is_silent(hook) for hooks in filter(None, self._hooks) for hook in hooks.values())


_PLACES = 512  # for which tables of positions are made at first


def _rotary_table(parent: Any, places: int, kind: str | None) -> Tensor:
    """Return cosines and sines of the angles at each place, [places, head features]."""
    if not hasattr(parent, "rotary_emb"):
        raise UnsupportedError("its embeddings of positions are not known")
    kinds = () if kind is None else (kind,)
    tables = parent.rotary_emb(torch.zeros(()), torch.arange(places)[None], *kinds)
    halves = [table[0].chunk(2, -1) for table in tables]
    if not all(torch.equal(*own) for own in halves):
        raise UnsupportedError("its embeddings of positions are not known")
    return torch.cat([first for first, _ in halves], 1)


def _bias_table(parent: Any, places: int) -> Tensor:
    """Return what is added to scores for each distance, [heads, 2 places - 1]."""
    if not hasattr(parent, "compute_position_bias"):
        raise UnsupportedError("what is added to its scores is not known")
    bias = parent.compute_position_bias(torch.empty(1, places, 0))[0].float()
    return torch.cat([bias[:, 1:, 0].flip(1), bias[:, 0]], 1)


_VERSION = attrgetter("_version")
_CAPTURING = "transformers.utils.output_capturing"


def _is_silent(hook: Any) -> bool:
    """Return True for hooks of merged products, and for those that Transformers leaves in models."""
    return (
        isinstance(getattr(hook, "__self__", None), MergedProduct)
        or getattr(hook, "__module__", None) == _CAPTURING
    )


def _outputs_are_captured() -> bool:
    """Return True if Transformers collects what layers return, which its hooks on them do."""
    collector = getattr(sys.modules.get(_CAPTURING), "_active_collector", None)
    return collector is not None and bool(collector.get())


def _kept(mask: Tensor | None, texts: int, tokens: int) -> Tensor | None:
    """Return the tokens that take part, bool [texts, tokens], or None for all."""
    if mask is None:
        return None
    if mask.dim() == 2:
        kept = mask != 0
    elif mask.dim() != 4 or mask.shape[1] != 1:
        raise UnsupportedError(f"a mask has the shape {tuple(mask.shape)}")
    else:
        row = mask[:, 0, :1]
        if mask.shape[2] > 1 and mask.stride(2) and not bool((mask[:, 0] == row).all()):
            raise UnsupportedError("a mask differs among the queries of a text")
        row = row[:, 0]
        kept = row if row.dtype == torch.bool else row == 0
        least = torch.finfo(row.dtype).min / 2 if row.is_floating_point() else 0
        if row.dtype != torch.bool and not bool((kept | (row < least)).all()):
            raise UnsupportedError("a mask is more than a choice of tokens")
    if kept.shape[1] != tokens:
        raise UnsupportedError(f"a mask has the shape {tuple(mask.shape)}")
    kept = kept.expand(texts, tokens)
    return None if bool(kept.all()) else kept


def _has_gaps(kept: Tensor) -> bool:
    begins = kept[:, 1:] & ~kept[:, :-1]
    return bool((begins.sum(1) + kept[:, 0] > 1).any())

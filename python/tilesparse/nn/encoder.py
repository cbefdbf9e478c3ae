"""Encoder layers of transformers as one operator each: inference on a CPU, with weights and x in int8.

Tokens are packed: what a mask leaves out is not computed, in no layer.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from .._arguments import checked
from .._ops.autograd import records_gradient
from .._runtime.torch_private import is_exporting, transforms_active
from ..errors import InvalidArgumentError, UnsupportedError
from .linear import BlockSparseLinear
from .merged import MergedProduct, concatenate
from .mlp import name_of_activation


class Positions(NamedTuple):
    """What attention knows of the places of tokens in their text.

    Attributes:
        cos: of a rotary embedding, [places, head features / 2], or None.
        sin: likewise.
        bias: added to the scores of a query at i and a key at j, [heads, 2 places - 1] at j - i + places - 1,
            or None.
    """

    cos: Tensor | None = None
    sin: Tensor | None = None
    bias: Tensor | None = None


class BlockSparseEncoderLayer(nn.Module):
    """One layer of an encoder as one operator, for inference on a CPU.

    After the norms, as in BERT: h = norm1(x + out(attention(qkv(x)))), y = norm2(h + down(act(up(h)))).
    Before them, as in ViT: h = x + out(attention(qkv(norm1(x)))), y = h + down(act(up(norm2(h)))).
    With twice the rows in ``up``, the first half of its results passes the activation and multiplies the
    other half.

    Args:
        qkv: [features → 3 features], the rows of q, then those of k and v; all layers are stored in int8 and
            quantize their activations to int8.
        out: [features → features].
        up: [features → hidden features], or twice as many.
        down: [hidden features → features].
        norms: the first and the second; None for a first one that is not there.
        heads: number of heads, of equally many features.
        activation: "relu", "gelu" (with erf) or "silu".
        pre_norm: norms come before the products.
        window: tokens attend to those at most so many places away; 0 for all.

    Raises:
        InvalidArgumentError: the parts do not fit each other.
        UnsupportedError: the operator does not compute it.
    """

    @checked
    def __init__(
        self,
        qkv: BlockSparseLinear,
        out: BlockSparseLinear,
        up: BlockSparseLinear,
        down: BlockSparseLinear,
        norms: tuple[nn.LayerNorm | None, nn.LayerNorm],
        *,
        heads: int,
        activation: str = "gelu",
        pre_norm: bool = False,
        window: int = 0,
    ) -> None:
        super().__init__()
        self.qkv, self.out, self.up, self.down = qkv, out, up, down
        self.norm1, self.norm2 = norms
        self.heads, self.activation, self.pre_norm, self.window = heads, activation, pre_norm, window
        self._check()
        self.eval()

    def _check(self) -> None:
        features = self.out.in_features
        hidden = self.down.in_features
        shapes = {
            "qkv": [(3 * features, features)],
            "out": [(features, features)],
            "up": [(hidden, features), (2 * hidden, features)],
            "down": [(features, hidden)],
        }
        for name, allowed in shapes.items():
            layer = getattr(self, name)
            if layer.spec.shape not in allowed:
                text = " or ".join(map(str, allowed))
                raise InvalidArgumentError(f"{name} must have the shape {text}, got {layer.spec.shape}")
            reason = reason_not_computed(layer)
            if reason is not None:
                raise UnsupportedError(f"{name}: {reason}")
        name_of_activation(self.activation)
        if features % self.heads:
            raise InvalidArgumentError(f"heads must divide {features}, the features, got {self.heads}")

    def forward(self, x: Tensor, offsets: Tensor, positions: Positions = Positions()) -> Tensor:
        """Compute the layer for packed texts.

        Args:
            x: [tokens, features], those of all texts one after the other.
            offsets: int32 [texts + 1], where they begin.
            positions: of attention.

        Returns:
            y [tokens, features].

        Raises:
            UnsupportedError: in training mode, or where a gradient has to be recorded.
        """
        if self.training or records_gradient((x, *self.parameters())):
            raise UnsupportedError(
                "BlockSparseEncoderLayer must be called in evaluation mode and without gradients: call eval() "
                "and use torch.no_grad(), or train the layers that it was made of"
            )
        return _reference(self, x, offsets, positions)


def _reference(layer: BlockSparseEncoderLayer, x: Tensor, offsets: Tensor, positions: Positions) -> Tensor:
    h = x if not layer.pre_norm or layer.norm1 is None else layer.norm1(x)
    q, k, v = layer.qkv(h).float().view(len(x), 3, layer.heads, -1).unbind(1)
    if positions.cos is not None:
        def rot(t, begin, end):
            c, s = (p[: end - begin, None] for p in (positions.cos, positions.sin))
            a, b = t.chunk(2, -1)
            return torch.cat([a * c - b * s, b * c + a * s], -1)
    found = torch.empty(len(x), layer.heads, q.shape[-1])
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist()):
        a, b, c = q[begin:end], k[begin:end], v[begin:end]
        if positions.cos is not None:
            a, b = rot(a, begin, end), rot(b, begin, end)
        scores = torch.einsum("ihd,jhd->hij", a, b) / math.sqrt(q.shape[-1])
        i = torch.arange(end - begin)
        delta = i[None] - i[:, None]
        if positions.bias is not None:
            scores = scores + positions.bias[:, delta + positions.bias.shape[1] // 2]
        if layer.window:
            scores = scores.masked_fill(delta.abs() > layer.window, -torch.inf)
        found[begin:end] = torch.einsum("hij,jhd->ihd", scores.softmax(-1), c)
    h = x + layer.out(found.view(len(x), -1).to(x.dtype))
    if not layer.pre_norm:
        h = layer.norm1(h)
    m = layer.up(h if not layer.pre_norm else layer.norm2(h))
    act = {"gelu": nn.functional.gelu, "relu": torch.relu, "silu": nn.functional.silu}[layer.activation]
    if layer.up.out_features != layer.down.in_features:
        a, b = m.chunk(2, -1)
        m = act(a) * b
    else:
        m = act(m)
    y = h + layer.down(m)
    return y if layer.pre_norm else layer.norm2(y)


def reason_not_computed(layer: nn.Module) -> str | None:
    """Say why the operator does not compute products of a layer, or return None."""
    if type(layer) is not BlockSparseLinear or "forward" in vars(layer):
        return f"it is {type(layer).__name__}, not BlockSparseLinear"
    if layer.storage != "int8" or layer.activations != "int8" or layer.nm is not None:
        return "it does not multiply in int8: quantize weight and activations"
    if not layer.weight.is_cpu or layer.shard is not None:
        return "its weight is not on the CPU as a whole"
    return None


class _Form(NamedTuple):
    """Names of the parts of a layer of Transformers: q, k and v or all in one, and so on."""

    qkv: tuple[str, ...]
    out: str
    norms: tuple[str, str]
    up: str
    activation: str
    down: str
    pre_norm: bool = False


_BERT = "intermediate.dense", "intermediate.intermediate_act_fn", "output.dense"
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
        *("ffn.lin1", "ffn.activation", "ffn.lin2"),
    ),
    _Form(  # ViT
        ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        "attention.o_proj",
        ("layernorm_before", "layernorm_after"),
        *("mlp.fc1", "mlp.activation_fn", "mlp.fc2"),
        pre_norm=True,
    ),
    _Form(  # ModernBERT
        ("attn.Wqkv",), "attn.Wo", ("attn_norm", "mlp_norm"), "mlp.Wi", "mlp.act", "mlp.Wo", pre_norm=True
    ),
)


def form_of(layer: nn.Module) -> _Form | None:
    """Return the form whose parts a layer has, or None."""
    for form in _FORMS:
        try:
            attrgetter(*form.qkv, form.out, *form.norms, form.up, form.activation, form.down)(layer)
        except AttributeError:
            continue
        return form
    return None


def fused_layer(layer: nn.Module) -> BlockSparseEncoderLayer:
    """Return the same function as one operator; layers of one x that share no product are copied.

    Raises:
        UnsupportedError: the operator does not compute it.
    """
    form = form_of(layer)
    if form is None:
        raise UnsupportedError(f"{type(layer).__name__} has other parts than the encoder layers that are known")
    attention = layer.get_submodule(form.qkv[0].rpartition(".")[0])
    if any(getattr(module, name, False) for module in (layer, attention) for name in _OF_DECODERS):
        raise UnsupportedError("it is a layer of a decoder")
    names = [*form.qkv, form.out, form.up, form.down]
    linears: list[Any] = [layer.get_submodule(name) for name in names]
    for name, linear in zip(names, linears, strict=True):
        reason = reason_not_computed(linear)
        if reason is not None:
            raise UnsupportedError(f"its {name}: {reason}")
    norms = [layer.get_submodule(name) for name in form.norms]
    if form.pre_norm and isinstance(norms[0], nn.Identity):
        norms[0] = None  # type: ignore[call-overload]
    if any(type(norm) is not nn.LayerNorm or norm.weight is None for norm in norms if norm is not None):
        raise UnsupportedError("its norms are not torch.nn.LayerNorm")
    known = {parameter for part in (*linears, *norms) if part is not None for parameter in part.parameters()}
    others = [name for name, parameter in layer.named_parameters() if parameter not in known]
    if others:
        raise UnsupportedError(f"the operator has no {', '.join(others)}")
    module = attrgetter(form.activation)(layer)
    activation = name_of_activation(module) if isinstance(module, nn.Module) else None
    if activation is None:
        raise UnsupportedError(f"kernels do not have its activation {type(module).__name__}")
    owners = attention, getattr(attention, "config", None)
    heads = [getattr(owner, name, None) for owner in owners for name in ("num_attention_heads", "n_heads")]
    return BlockSparseEncoderLayer(
        _one_product(linears[:-3]),
        *linears[-3:],
        tuple(norms),
        heads=next(filter(None, heads)),
        activation=activation,
        pre_norm=form.pre_norm,
        window=(getattr(attention, "sliding_window", None) or 1) - 1,  # which Transformers counts from 1
    )


_OF_DECODERS = "is_decoder", "is_causal", "add_cross_attention"


def _one_product(layers: Sequence[BlockSparseLinear]) -> BlockSparseLinear:
    if len(layers) == 1:
        return layers[0]
    merged = layers[0].merged
    if merged is not None and merged[0].layers == tuple(layers):
        return merged[0].whole  # type: ignore[no-any-return]
    return concatenate(layers)


class Call(NamedTuple):
    """What the layers of an encoder are called with, packed.

    Attributes:
        x: [tokens, features].
        offsets: int32 [texts + 1].
        rows: of the tokens in the padded batch, or None for all of them.
        shape: of the padded batch.
        arguments: those of the first layer, by name.
    """

    x: Tensor
    offsets: Tensor
    rows: Tensor | None
    shape: torch.Size
    arguments: dict[str, Any]

    def pack(self, padded: Tensor) -> Tensor:
        """Return the tokens of a padded batch."""
        flat = padded.reshape(-1, padded.shape[-1])
        return flat if self.rows is None else flat.index_select(0, self.rows)

    def unpack(self, tokens: Tensor) -> Tensor:
        """Return the padded batch, with zeros in place of what is masked."""
        if self.rows is None:
            return tokens.view(self.shape)
        padded = tokens.new_zeros(self.shape)
        padded.view(-1, padded.shape[-1]).index_copy_(0, self.rows, tokens)
        return padded


_calls = threading.local()
_TAKEN = {"hidden_states", "attention_mask", "position_bias", "position_embeddings", "position_ids"}
_OUTPUTS = "output_hidden_states", "output_attentions"


def _open() -> set[nn.Module]:
    """Return the encoders whose parents are called in this thread."""
    return vars(_calls).setdefault("open", set())  # type: ignore[no-any-return]


class BlockSparseEncoder(nn.ModuleList):
    """The layers of an encoder, which compute all in one go where their parent calls one after the other.

    It takes the place of a `torch.nn.ModuleList` and holds its layers under their names. While the parent's
    forward runs, iterating over it gives one function that does what all layers do: it packs the tokens that
    the mask keeps, computes each layer by one operator (`BlockSparseEncoderLayer`), and returns them at their
    places, with zeros for the others.

    The layers compute by themselves in all other cases: in training mode, where gradients are recorded,
    with hooks on modules inside, where hidden states or attention of each layer are asked for, when compiled
    or exported, with masks that are not the same for all queries of a text, and with gaps in masks if
    attention knows positions. When a weight is changed the operator's are made anew.

    Args:
        layers: those of BERT, RoBERTa, XLM-RoBERTa, MPNet, DistilBERT, ViT or ModernBERT.
        parent: the module whose attribute it becomes.
        in_tuple: layers return a tuple.

    Raises:
        UnsupportedError: the operator does not compute one of the layers.
    """

    def __init__(self, layers: Sequence[nn.Module], parent: nn.Module, *, in_tuple: bool = False) -> None:
        super().__init__(layers)
        self.in_tuple = in_tuple
        self.count = 0  # calls that were computed in one go
        self._built: _Built | None = _Built(self)
        # Not its children: the parent has it.
        self._rotary = (getattr(parent, "rotary_emb", None),)
        self._hooks = [
            parent.register_forward_pre_hook(self.begin, with_kwargs=True),
            parent.register_forward_hook(self.finish, always_call=True),
        ]

    def begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Begin a call of the parent."""
        if is_compiling() or any(kwargs.get(name) for name in _OUTPUTS) or True in map(_is_true, args):
            return
        if not isinstance(kwargs.get("attention_mask"), Mapping):  # of masks for kinds of layers
            _open().add(self)

    def finish(self, *_: object) -> None:
        """End a call of the parent."""
        if not is_compiling():
            _open().discard(self)

    def end(self) -> None:
        """Have the layers compute by themselves from now on."""
        for hook in self._hooks:
            hook.remove()

    def __iter__(self) -> Iterator[Any]:
        if is_compiling() or self not in _open() or not self._can_fuse():
            return super().__iter__()
        return self._steps()

    def _steps(self) -> Iterator[Any]:
        step = _AllLayers(self)
        yield step
        if not step.done:
            yield from list(self._modules.values())[1:]

    def __getitem__(self, index: Any) -> Any:
        modules = list(self._modules.values())
        return nn.ModuleList(modules[index]) if isinstance(index, slice) else super().__getitem__(index)

    def _can_fuse(self) -> bool:
        if self.training or is_exporting() or torch.jit.is_tracing() or transforms_active():
            return False
        if torch.is_autocast_enabled("cpu") or _outputs_are_captured():
            return False
        if self._built is None or self._built.state != self._built.state_now():
            self._built = None
            try:
                self._built = _Built(self)
            except UnsupportedError:
                return False
        return not self._built.is_watched()

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | str:
        """Return what a call of the first layer gives to all, or why they have to be called one by one."""
        built = self._built
        assert built is not None
        given = dict(zip(built.names, args, strict=False)) | dict(kwargs)
        x, mask = given.get("hidden_states"), given.get("attention_mask")
        others = [name for name in given.keys() - _TAKEN if not (given[name] is None or given[name] is False)]
        if others:
            return f"its layers are called with {', '.join(sorted(others))}"
        if type(x) is not Tensor or x.dim() != 3 or not x.numel() or not x.is_cpu:
            return "its layers are not called with x [texts, tokens, features] on the CPU"
        if records_gradient((x,)):
            return "a gradient is recorded"
        texts, tokens, _ = x.shape
        try:
            kept = _kept(mask, texts, tokens)
            arguments = given if kept is None else given | {"kept": kept}
            if kept is None:
                steps = torch.arange(0, texts * tokens + 1, tokens, dtype=torch.int32)
                return Call(x.reshape(-1, x.shape[-1]), steps, None, x.shape, arguments)
            if (built.is_positional(given)) and _has_gaps(kept):
                return "a mask has gaps, and attention knows positions"
        except UnsupportedError as error:
            return str(error)
        rows = kept.reshape(-1).nonzero().squeeze(1)
        offsets = torch.zeros(texts + 1, dtype=torch.int32)
        torch.cumsum(kept.sum(1), 0, out=offsets[1:])
        return Call(x.reshape(-1, x.shape[-1]).index_select(0, rows), offsets, rows, x.shape, arguments)

    def positions(self, call: Call) -> list[Positions] | str:
        """Return what attention of each layer knows of positions, or why that is not known."""
        given, tokens = call.arguments, call.shape[1]
        if given.get("position_bias") is not None:
            bias = given["position_bias"][0]  # of each text the same
            table = torch.cat([bias[:, 1:, 0].flip(1), bias[:, 0]], 1)
            return [Positions(bias=table.float())] * len(self)
        if given.get("position_embeddings") is None:
            return [Positions()] * len(self)
        (rotary,) = self._rotary
        kinds = [getattr(layer, "attention_type", None) for layer in self._modules.values()]
        if rotary is None or None in kinds:
            return "it has a rotary embedding that is not known"
        assert self._built is not None
        tables = self._built.tables
        if not tables or tables[kinds[0]][0].shape[0] < tokens:
            places = torch.arange(max(tokens, 64))[None]
            x = torch.zeros((), dtype=torch.float32)
            tables = {kind: tuple(one[0] for one in rotary(x, places, kind)) for kind in set(kinds)}
            self._built.tables = tables
        for own, theirs in zip(tables[kinds[0]], given["position_embeddings"], strict=True):
            if theirs.shape[0] != 1 or not torch.equal(theirs[0], own[:tokens].to(theirs.dtype)):
                return "positions are not 0, 1, 2 and so on"
        half = call.shape[2] // self.operators()[0].heads // 2
        return [Positions(*(one[:tokens, :half].contiguous() for one in tables[kind])) for kind in kinds]

    def operators(self) -> list[BlockSparseEncoderLayer]:
        """Return the operators of the layers."""
        assert self._built is not None
        return self._built.layers

    def run(self, call: Call, positions: Sequence[Positions]) -> Tensor:
        """Return what the last layer returns, [texts, tokens, features]."""
        x = call.x
        for layer, places in zip(self.operators(), positions, strict=True):
            x = layer(x, call.offsets, places)
        self.count += 1
        return call.unpack(x)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._built = None  # parameters stay what they are, with other data
        return super()._apply(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_built": None}


class _AllLayers:
    """Takes the place of the first layer in a loop over all, and computes them all if it can."""

    def __init__(self, encoder: BlockSparseEncoder) -> None:
        self.encoder, self.done = encoder, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.encoder.call(args, kwargs)
        positions = call if isinstance(call, str) else self.encoder.positions(call)
        if isinstance(call, str) or isinstance(positions, str):
            return self.encoder[0](*args, **kwargs)
        self.done = True
        y = self.encoder.run(call, positions)
        return (y,) if self.encoder.in_tuple else y

    def __getattr__(self, name: str) -> Any:
        return getattr(self.encoder[0], name)  # such as the kind of its attention


class _Built:
    """The operators of an encoder, and what they were made of."""

    def __init__(self, encoder: BlockSparseEncoder) -> None:
        own = list(encoder._modules.values())
        with torch.inference_mode(False), torch.no_grad():
            self.layers = [fused_layer(layer) for layer in own]  # type: ignore[arg-type]
        parts = [module for layer in own for module in layer.modules()]  # type: ignore[union-attr]
        self._held = [held for part in parts for held in (part._parameters, part._buffers, part._modules) if held]
        self._hooks = [hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        tensors = (one for held in self._held for one in held.values() if isinstance(one, Tensor))
        self._counted = [tensor for tensor in tensors if not tensor.is_inference()]
        self.names = list(signature(own[0].forward).parameters)  # type: ignore[union-attr]
        self.tables: dict[Any, Any] = {}
        self.state = self.state_now()

    def state_now(self) -> tuple[object, ...]:
        """Return what differs once a part or tensor is another one, or a tensor was written to."""
        held = chain.from_iterable(map(dict.values, self._held))
        return tuple(map(id, held)), tuple(map(_VERSION, self._counted))

    def is_watched(self) -> bool:
        """Return True if somebody wants to see what a part computes."""
        return any(not _is_silent(hook) for hooks in filter(None, self._hooks) for hook in hooks.values())

    def is_positional(self, given: Mapping[str, Any]) -> bool:
        """Return True if attention knows the positions of tokens."""
        named = any(given.get(name) is not None for name in ("position_bias", "position_embeddings"))
        return named or any(layer.window for layer in self.layers)


_VERSION = attrgetter("_version")
_CAPTURING = "transformers.utils.output_capturing"


def _is_silent(hook: Any) -> bool:
    """Return True for hooks of merged products, and for those that Transformers leaves in models."""
    return isinstance(getattr(hook, "__self__", None), MergedProduct) or hook.__module__ == _CAPTURING


def _outputs_are_captured() -> bool:
    """Return True if Transformers collects what layers return, which its hooks on them do."""
    collector = getattr(sys.modules.get(_CAPTURING), "_active_collector", None)
    return collector is not None and bool(collector.get())


def _is_true(value: object) -> bool:
    return value is True


def _kept(mask: Tensor | None, texts: int, tokens: int) -> Tensor | None:
    """Return the tokens that take part, bool [texts, tokens], or None for all.

    Args:
        mask: as layers are called with it: bool, numbers to add to scores, or one number for each token.
        texts: of the batch.
        tokens: of each.

    Raises:
        UnsupportedError: queries of one text have different masks.
    """
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

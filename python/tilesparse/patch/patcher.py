"""Make the linear layers of whole models block-sparse, chosen by regular expressions on their names."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from .._arguments import checked
from .._checks import DTYPES, check_block_shape, check_policy, check_text
from .._progress import Progress
from .._reports import aligned, empty_of, empty_texts, listed, without_numbers
from ..config import QUANTIZED_BY_NAME, check_nm, check_nm_blocks, check_storage
from ..errors import InvalidArgumentError, TileSparseError
from ..integrations.transformers_hooks import check_can_follow, follow
from ..nn.linear import BlockSparseLinear, best_blocks, dense_weight, is_conv1d
from ..nn.mlp import BlockSparseMLP, is_known, reason_not_known
from ..nn.reference import PseudoBlockSparseLinear
from ..pattern.block_pattern import BlockPattern, check_parts_beside
from .weight_reads import Read, weight_reads

DEFAULT_OPTIONS: Mapping[str, Any] = {
    "density": 0.5,
    "block_shape": (32, 32),
    "pattern": None,
    "parts": (1, 1),
    "policy": "sparse",
    "nm": None,
    "transposable": False,
    "storage": "plain",
    "pseudo_linear": False,
    "untie": False,
}

_Replacement: TypeAlias = BlockSparseLinear | PseudoBlockSparseLinear

# What `torch.nn.Module` keeps of the hooks of a call. A new layer shares the containers, so that the
# handles that were given out still remove their hooks.
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_is_full_backward_hook",
)
_STATE_HOOKS = (
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


@dataclass(frozen=True)
class Size:
    """Numbers of parameters and of bytes (of parameters and buffers).

    A shared tensor counts once, and what is not initialised yet (in lazy layers) does not count.
    """

    parameters: int
    bytes: int


@dataclass(frozen=True)
class PatchedLayer:
    """One replaced layer.

    `shape` is (out_features, in_features). `policy`, `nm` and `storage` are those of the `BlockSparseLinear`;
    for a `PseudoBlockSparseLinear`, whose weight is plain, `policy` is "pseudo". `error` is the layer's
    `storage_error`: what 8 bits have changed of the weights that are kept, and not what was left out.
    `empty_rows` and `empty_columns` count block rows and columns without a block, but on the meta device.
    """

    name: str
    shape: tuple[int, int]
    block_shape: tuple[int, int]
    density: float
    policy: str
    nm: tuple[int, int] | None
    storage: str
    error: float
    before: Size
    after: Size
    empty_rows: int
    empty_columns: int


@dataclass(frozen=True)
class SkippedLayer:
    """A module that a pattern matched and that was left alone, the name of its class, and why."""

    name: str
    kind: str
    reason: str


@dataclass(frozen=True)
class DenseParameter:
    """A parameter of two dimensions or more that is no block-sparse weight.

    `share` is its fraction of all parameters that the model had before.
    """

    name: str
    shape: tuple[int, ...]
    share: float


@dataclass(frozen=True)
class PatchReport:
    """What `BlockSparseModelPatcher.patch_model` did, or would do; ``str()`` makes a table of it.

    Attributes:
        layers: those that are replaced.
        skipped: those that a regular expression names and that stay as they are, with the reason.
        unmatched: the regular expressions that no name of the model matches.
        before: the size of the whole model.
        after: its size with the replaced layers.
        dense: all parameters of two dimensions or more that stay dense, also those of other modules.
    """

    layers: list[PatchedLayer]
    skipped: list[SkippedLayer]
    unmatched: list[str]
    before: Size
    after: Size
    dense: list[DenseParameter]

    def __str__(self) -> str:
        choices = ("shape", "block", "density", "storage", "error", "policy")
        rows: list[tuple[str, ...]] = [("layer", *choices, "parameters", "after", "bytes", "after")]
        for layer in self.layers:
            shape, block = (f"{out}x{in_}" for out, in_ in (layer.shape, layer.block_shape))
            error = f"{layer.error:.2g}" if layer.error else ""
            choices = (shape, block, f"{layer.density:.3f}", _storage(layer), error, layer.policy)
            rows.append((layer.name, *choices, *_sizes(layer.before, layer.after)))
        rows.append(("whole model", *[""] * len(choices), *_sizes(self.before, self.after)))
        lines = aligned(rows)
        lines += [f"skipped {text}" for text in by_reason(self.skipped)]
        lines += [f"no layer matches {regex!r}" for regex in self.unmatched]
        return "\n".join([*lines, *empty_texts(self.layers), *dense_lines(self.dense)])


@dataclass(frozen=True)
class FusedMLP:
    """One MLP that became a `BlockSparseMLP`; `activation` is None where PyTorch computes it."""

    name: str
    kind: str
    gated: bool
    activation: str | None


@dataclass(frozen=True)
class FuseReport:
    """What `BlockSparseModelPatcher.fuse_mlps` did, or would do; ``str()`` makes a table of it.

    Attributes:
        mlps: those that became a `BlockSparseMLP`.
        skipped: modules with "MLP" in the name of their class, or whose function is known, that stay as they
            are, with the reason.
    """

    mlps: list[FusedMLP]
    skipped: list[SkippedLayer]

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("MLP", "class", "gated", "activation")]
        for mlp in self.mlps:
            rows.append((mlp.name, mlp.kind, "yes" if mlp.gated else "no", mlp.activation or "of PyTorch"))
        return "\n".join([*aligned(rows), *(f"skipped {text}" for text in by_reason(self.skipped))])


@dataclass(frozen=True)
class _Rule:
    """One pattern of the user, with a value for every option."""

    regex: re.Pattern[str]
    fullmatch: bool
    options: dict[str, Any]

    def matches(self, names: Iterable[str]) -> bool:
        match = self.regex.fullmatch if self.fullmatch else self.regex.match
        return any(match(name) for name in names)

    def spells(self, names: Iterable[str]) -> bool:
        """Whether the last part of a name is written out, rather than met by a wildcard."""
        text = re.sub(r"\\[A-Za-z]", " ", self.regex.pattern)
        return any(re.search(rf"(?<!\w){re.escape(name.rpartition('.')[2])}(?!\w)", text) for name in names)


@dataclass(frozen=True)
class _Target:
    """A module to replace, all its names, its replacement, and whether blocks were chosen for that."""

    names: list[str]
    module: nn.Module
    replacement: nn.Module
    chosen: bool = False


class _Match(NamedTuple):
    """A layer to replace, all its names, the options for it, and whether a pattern writes its name out."""

    module: nn.Module
    names: list[str]
    options: dict[str, Any]
    named: bool


class CannotBeCutError(InvalidArgumentError):
    """A weight's shape is no multiple of the block shape."""


class BlockSparseModelPatcher:
    r"""Replaces `torch.nn.Linear` layers of a model by `BlockSparseLinear`, in place.

    The blocks of largest Frobenius norm are kept, with their values. To train from scratch, call
    `reset_parameters` on the new layers, which scales their weights to the smaller fan-in. Build
    the optimizer after patching: the layers have new parameters.

    Replaced are `torch.nn.Linear` itself and Transformers' ``Conv1D``, which stores the transposed weight.
    Subclasses are reported as skipped; override `is_patchable` and `new_child_module` to handle them. So are
    layers whose weight another module reads itself instead of calling them, as Mamba does, and those that
    cannot be cut into blocks; where a pattern writes out the last part of their name that is an error. Where
    one layer computes several things, such as q, k and v, their features stay in their places; blocks are
    ranked among all of them together, so that one may keep fewer than another, unless a ``pattern`` says
    otherwise. Skipped are also layers of which something would get lost: parametrizations, parameters or
    buffers besides weight and bias, hooks of parameters or of the state dict, and a ``forward`` of their own.
    Hooks of the module's calls move to the new layer, and their handles go on to work.

    The output embedding of a language model decides every token, so it is patched only where a
    pattern writes out the last part of its name: ``lm_head`` does, ``.*`` does not. Output embeddings
    are what a ``get_output_embeddings()`` in the model returns, and layers named ``lm_head``.

    Where patching takes long, lines on stderr say how far it is.

    The patcher keeps the modules it replaces, and so their memory, until `undo` or until it is
    dropped itself.

    Examples:
        >>> patcher = BlockSparseModelPatcher()
        >>> patcher.add_pattern(r"encoder\.layer\.\d+\.intermediate", {"density": 0.25})
        >>> report = patcher.patch_model(model)
        >>> print(report)
    """

    def __init__(self) -> None:
        self._rules: list[_Rule] = []
        self._originals: MutableMapping[nn.Module, dict[str, _Target]] = WeakKeyDictionary()

    @checked
    def add_pattern(
        self, regex: str, options: Mapping[str, Any] | None = None, *, fullmatch: bool = False
    ) -> None:
        """Says how layers whose qualified name matches `regex` are patched; the first match wins.

        Args:
            regex: matched against the start of the names of ``model.named_modules()`` (`re.match`).
            options: any of

                - ``density``: kept fraction; 0.5. Layers of which it would keep no block are skipped,
                  except for 0 itself.
                - ``block_shape``: (bn, bk); (32, 32).
                - ``pattern``: the `BlockPattern` to use, which says density and block shape, too. Layers
                  on the meta device need one, as there is nothing to choose blocks by.
                - ``parts``: (r, c): keep as many blocks of each of r parts of the block rows and c of the
                  block columns, for tensor parallelism over so many processes; (1, 1), as beside ``pattern``.
                - ``policy``: how the layer computes, "sparse", "auto" or "dense"; "sparse".
                - ``nm``: (2, 4) for 2:4 inside the blocks, whose bk is then 32, 64 or 128; None.
                - ``transposable``: whether masks are chosen so that two of four are kept in columns as well,
                  where bn is 32, 64 or 128, too; False.
                - ``storage``: "plain", "compressed" (of 2:4 alone), "int8" or "float8_e4m3fn"; "plain". Only
                  plain weights can be trained, see `BlockSparseLinear.to_storage`.
                - ``pseudo_linear``: use `PseudoBlockSparseLinear`; False.
                - ``untie``: patch a layer even if it shares a parameter with another module, which then
                  keeps the dense one; False.
            fullmatch: the whole name has to match (`re.fullmatch`).

        Raises:
            InvalidArgumentError: `regex` is no regular expression, or an option is unknown or wrong.
        """
        compiled = compiled_pattern(regex)
        self._rules.append(_Rule(compiled, fullmatch, _checked_options({} if options is None else options)))

    @checked
    def is_patchable(self, name: str, module: nn.Module) -> bool:
        """Whether `new_child_module` can replace a module of this kind. Override to change it.

        Args:
            name: its qualified name in the model.
            module: the module.
        """
        check_text("name", name)
        return _is_linear(module)

    @checked
    def new_child_module(self, name: str, module: nn.Module, options: Mapping[str, Any]) -> _Replacement:
        """Makes the replacement of one layer. Override to change it.

        Args:
            name: its qualified name in the model.
            module: the dense layer, which stays as it is.
            options: those of `add_pattern`, with a value for every one.
        """
        pattern, parts = options["pattern"], options["parts"]
        if isinstance(module, nn.Linear) or is_conv1d(module):
            if pattern is None:  # chosen here, as the report names what that leaves empty
                check_blocks_can_be_chosen(module, options["block_shape"])
                weight = dense_weight(module)
                pattern = best_blocks(weight, None, options["density"], options["block_shape"], parts)
                parts = (1, 1)
            _check_can_be_stored(module, options["storage"])
        layer = BlockSparseLinear.from_linear(
            module,
            options["density"],
            block_shape=options["block_shape"],
            pattern=pattern,
            parts=parts,
            policy=options["policy"],
            nm=options["nm"],
            transposable=options["transposable"],
            storage=options["storage"],
        )
        return PseudoBlockSparseLinear(layer) if options["pseudo_linear"] else layer

    @checked
    def get_patchable_layers(self, model: nn.Module) -> dict[str, nn.Module]:
        """The layers of `model` that patterns can apply to, by qualified name."""
        return {name: module for name, module in model.named_modules() if self.is_patchable(name, module)}

    @checked
    def patch_model(self, model: nn.Module, *, dry_run: bool = False, strict: bool = True) -> PatchReport:
        """Replaces every layer that a pattern matches; on an error, none.

        A module registered under several names is replaced by one module under all of them. A warning names
        layers of which blocks were chosen so that block rows or columns are empty, and those that another
        module also reads the weight of, in some of its branches.

        Args:
            model: changed in place.
            dry_run: only report what would be done.
            strict: raise where there is no pattern, or where one makes no layer block-sparse; layers that are
                block-sparse already count. False leaves that to the report.

        Raises:
            InvalidArgumentError: see ``strict``; or a layer that a pattern names cannot be cut into blocks of
                its ``block_shape``; or a matched one does not have the shape of its ``pattern``, has NaN in
                its weight, or infinities where that is to be stored in 8 bits, or is on the meta device
                without a ``pattern``.
        """
        names = names_of_modules(model)
        reads = weight_reads(model)
        targets, skipped = self._plan(model, names, reads)
        if strict:
            self._check_rules(names, {target.module for target in targets}, skipped)
        unmatched = [rule.regex.pattern for rule in self._rules if not any(map(rule.matches, names.values()))]
        report = _report(names, targets, skipped, unmatched)
        if not dry_run:
            check_can_follow(model)
            self._replace(model, targets)
            follow(model)
        _warn_of_reads(targets, reads)
        chosen = {target.names[0] for target in targets if target.chosen}
        warn_of_empty(layer for layer in report.layers if layer.name in chosen and layer.density)
        return report

    @checked
    def fuse_mlps(self, model: nn.Module, *, dry_run: bool = False) -> FuseReport:
        """Puts a `BlockSparseMLP` in the place of every MLP that it knows, see `BlockSparseMLP.from_module`.

        Call it when the layers are block-sparse: patched, pruned or loaded. They stay the same under the same
        names, so state dicts, checkpoints and optimizers do not change, and a checkpoint loads into the model
        with or without them; a model that is made anew has to be fused anew. Hooks of its calls move.

        Args:
            model: changed in place.
            dry_run: only report what would be done.
        """
        targets, skipped = [], []
        for module, aliases in names_of_modules(model).items():
            named = "mlp" in type(module).__name__.lower()
            if isinstance(module, BlockSparseMLP) or not (named or is_known(module)):
                continue
            reason = _reason_not_fused(model, module)
            if reason is None:
                targets.append(_Target(aliases, module, BlockSparseMLP.from_module(module)))
            else:
                skipped.append(SkippedLayer(aliases[0], type(module).__name__, reason))
        if not dry_run:
            self._replace(model, targets)
        return FuseReport([_fused(target) for target in targets], skipped)

    @checked
    def undo(self, model: nn.Module) -> None:
        """Puts back the very modules that this patcher has replaced in `model`, with all hooks.

        Raises:
            InvalidArgumentError: this patcher has not patched `model`; a copy of a patched model is
                another model. Or another module stands where it has put one, such as an adapter around it.
                The model is as it was.
        """
        if model not in self._originals:
            raise InvalidArgumentError("model: not patched by this patcher, or already undone")
        modules = dict(model.named_modules(remove_duplicate=False))
        for name, target in self._originals[model].items():
            if modules.get(name) is not target.replacement:
                kind = type(modules[name]).__name__ if name in modules else "nothing"
                raise InvalidArgumentError(
                    f"model: the layer that this patcher has put there expected as {name!r}, got {kind}; "
                    "merge or remove adapters first"
                )
        for name, target in reversed(self._originals.pop(model).items()):
            share_hooks(target.replacement, target.module)
            if isinstance(target.replacement, BlockSparseMLP):  # adapters may have come since
                target.module._modules.update(target.replacement._modules)
            set_submodule(model, name, target.module)
        follow(model)

    def _plan(
        self, model: nn.Module, names: Mapping[nn.Module, list[str]], reads: Mapping[nn.Module, Read]
    ) -> tuple[list[_Target], list[SkippedLayer]]:
        """Everything that can fail; the model is only read."""
        matched, skipped = self._match(model, names, reads)
        progress, targets = Progress(len(matched)), []
        for done, (module, aliases, options, named) in enumerate(matched, 1):
            try:
                replacement = self._build(aliases[0], module, options)
            except CannotBeCutError as error:
                if named:
                    raise InvalidArgumentError(f"layer {aliases[0]!r}: {error}") from error
                skipped.append(SkippedLayer(aliases[0], type(module).__name__, str(error)))
            else:
                targets.append(_Target(aliases, module, replacement, options["pattern"] is None))
            progress.show(done, f"layers made block-sparse, {aliases[0]} the last")
        return targets, skipped

    def _match(
        self,
        model: nn.Module,
        names: Mapping[nn.Module, list[str]],
        reads: Mapping[nn.Module, Read],
    ) -> tuple[list[_Match], list[SkippedLayer]]:
        """Which layers are replaced, with their names and options, and which are not."""
        owners, outputs = owners_of_parameters(names), _output_embeddings(names)
        matched: list[_Match] = []
        skipped: list[SkippedLayer] = []
        for module, aliases in names.items():
            rules = [rule for rule in self._rules if rule.matches(aliases)]
            naming = [rule for rule in rules if rule.spells(aliases)] if module in outputs else rules
            if not rules:
                continue
            rule = (naming or rules)[0]
            reason = self._reason_to_skip(model, module, aliases, rule.options)
            if reason is None and not naming:
                reason = "output embedding; a pattern that names it patches it"
            if reason is None and not rule.options["untie"]:
                reason = _tie(module, names, owners)
            read = reads.get(module)
            if read is not None and not read.called and isinstance(module, nn.Linear):
                reason = f"{read.reader} reads its weight itself and never calls it"
            if reason is None:
                matched.append(_Match(module, aliases, rule.options, rule.spells(aliases)))
            else:
                skipped.append(SkippedLayer(aliases[0], type(module).__name__, reason))
        return matched, skipped

    def _check_rules(
        self,
        names: Mapping[nn.Module, list[str]],
        converted: Container[nn.Module],
        skipped: Iterable[SkippedLayer],
    ) -> None:
        """Raises for patterns by which no layer is block-sparse."""
        if not self._rules:
            raise InvalidArgumentError("patterns must be added before a model is patched, got none")
        sparse = [
            aliases
            for module, aliases in names.items()
            if module in converted or isinstance(module, _Replacement)
        ]
        for rule in self._rules:
            if any(map(rule.matches, sparse)):
                continue
            own = [layer for layer in skipped if rule.matches([layer.name])]
            own = [layer for layer in own if layer.reason != _NOT_LINEAR] or own
            why = "; ".join([*by_reason(own)][:3]) or "it matches no name"
            raise InvalidArgumentError(
                f"patterns must each make a layer block-sparse, got {rule.regex.pattern!r} ({why}); "
                "strict=False goes on without"
            )

    def _reason_to_skip(
        self, model: nn.Module, module: nn.Module, aliases: list[str], options: Mapping[str, Any]
    ) -> str | None:
        if isinstance(module, _Replacement):
            return "already block-sparse"
        if not self.is_patchable(aliases[0], module):
            return _reason_not_patchable(module)
        if module is model:
            return "the model itself cannot be replaced in place"
        reason = reason_from_parents(model, aliases) or what_would_be_lost(module)
        if reason is None and _is_linear(module):
            reason = _reason_not_sparse(module, options)
        return reason

    def _build(self, name: str, module: nn.Module, options: Mapping[str, Any]) -> _Replacement:
        try:
            return self.new_child_module(name, module, options)
        except CannotBeCutError:
            raise
        except TileSparseError as error:
            raise type(error)(f"layer {name!r}: {error}") from error

    def _replace(self, model: nn.Module, targets: Sequence[_Target]) -> None:
        originals = self._originals.setdefault(model, {})
        for target in targets:
            share_hooks(target.module, target.replacement)
            for name in target.names:
                set_submodule(model, name, target.replacement)
                originals[name] = target


def _reason_not_fused(model: nn.Module, module: nn.Module) -> str | None:
    if module is model:
        return "the model itself cannot be replaced in place"
    return what_would_be_lost(module) or reason_not_known(module)


def _fused(target: _Target) -> FusedMLP:
    mlp: Any = target.replacement
    return FusedMLP(target.names[0], type(target.module).__name__, mlp.gated, mlp.activation_name)


def compiled_pattern(regex: str) -> re.Pattern[str]:
    """Compile a regular expression, or raise InvalidArgumentError."""
    try:
        return re.compile(regex)
    except (re.error, TypeError) as error:
        raise InvalidArgumentError(f"regex: a regular expression expected, got {regex!r}: {error}") from error


def _checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(options, Mapping):
        raise InvalidArgumentError(
            f"options: a mapping such as {{'density': 0.25}} expected, got {options!r}"
        )
    unknown = sorted(set(options) - set(DEFAULT_OPTIONS))
    if unknown:
        raise InvalidArgumentError(f"options: names from {sorted(DEFAULT_OPTIONS)} expected, got {unknown}")
    checked = {**DEFAULT_OPTIONS, **options}
    density, block_shape = checked["density"], checked["block_shape"]
    if not isinstance(density, Real) or not 0 <= float(density) <= 1:
        raise InvalidArgumentError(f"density: a number from 0 to 1 expected, got {density!r}")
    checked["block_shape"] = check_block_shape(block_shape)
    if not isinstance(checked["pattern"], BlockPattern | None):
        raise InvalidArgumentError(
            f"pattern: a BlockPattern expected, got {type(checked['pattern']).__name__}"
        )
    checked["parts"] = check_parts_beside(checked["pattern"], checked["parts"])
    check_policy(checked["policy"])
    for name in ("transposable", "pseudo_linear", "untie"):
        if not isinstance(checked[name], bool):
            raise InvalidArgumentError(f"{name}: True or False expected, got {checked[name]!r}")
    _check_storage_options(checked)
    return checked


def _check_storage_options(options: Mapping[str, Any]) -> None:
    nm, transposable, pattern = options["nm"], options["transposable"], options["pattern"]
    check_nm(nm, transposable)
    check_storage(options["storage"], nm)
    check_nm_blocks(nm, transposable, options["block_shape"] if pattern is None else pattern.block_shape)


def names_of_modules(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Map each module of a model to all of its names."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def owners_of_parameters(modules: Iterable[nn.Module]) -> dict[nn.Parameter, list[nn.Module]]:
    """Map each parameter to the modules that hold it directly."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in modules:
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)
    return owners


def _output_embeddings(names: Mapping[nn.Module, list[str]]) -> set[nn.Module]:
    """Layers named lm_head, and those that Transformers' models say are theirs."""
    found = {
        module
        for module, aliases in names.items()
        if any(alias.rpartition(".")[2] == "lm_head" for alias in aliases)
    }
    for module in names:
        get = getattr(module, "get_output_embeddings", None)
        try:
            output = get() if callable(get) else None
        except NotImplementedError:  # a model without any
            continue
        if isinstance(output, nn.Module):
            found.add(output)
    return found


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or is_conv1d(module)


_NOT_LINEAR = "not nn.Linear"


def _reason_not_patchable(module: nn.Module) -> str:
    if _is_linear(module):
        return "is_patchable refuses it"
    if isinstance(module, nn.LazyLinear):
        return "not initialised yet; pass a batch through the model first"
    if isinstance(module, nn.Linear) and parametrize.is_parametrized(module):
        return "parametrized; call torch.nn.utils.parametrize.remove_parametrizations first"
    if isinstance(module, nn.Linear):
        return "a subclass of nn.Linear, which may compute something else; override is_patchable to patch it"
    return _NOT_LINEAR


def reason_from_parents(model: nn.Module, aliases: Iterable[str]) -> str | None:
    """What in the modules around a layer keeps it from being another one."""
    parents = (model.get_submodule(name.rpartition(".")[0]) for name in aliases)
    if torch.backends.mha.get_fastpath_enabled() and any(
        isinstance(parent, nn.TransformerEncoderLayer) for parent in parents
    ):
        return (
            "nn.TransformerEncoderLayer reads its weight directly in inference; call "
            "torch.backends.mha.set_fastpath_enabled(False) first"
        )
    return None


def what_would_be_lost(module: nn.Module) -> str | None:
    """What belongs to the module and could not be kept in another one."""
    parameters = module.parameters(recurse=False)
    if any(parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in parameters):
        return "a hook on a parameter cannot move to the new one; remove it first"
    if any(getattr(module, attribute) for attribute in _STATE_HOOKS):
        return "a hook of its state dict cannot move to a sparse layer; remove it first"
    if module._backward_hooks and not module._is_full_backward_hook:
        return "a hook of register_backward_hook cannot move; use register_full_backward_hook"
    if "forward" in vars(module):
        return "its forward was replaced by another function, which would be lost"
    return None


def _reason_not_sparse(module: Any, options: Mapping[str, Any]) -> str | None:
    """What keeps a dense layer with these options from becoming a sparse one that is of use."""
    own = sorted({*module._parameters, *module._buffers, *module._modules})
    if own != ["bias", "weight"]:
        return f"it holds {', '.join(own)} in place of weight and bias (remove weight_norm, pruning, … first)"
    if module.weight.dtype not in DTYPES:
        return f"its weight is {module.weight.dtype}, for which there are no sparse layers"
    if module.weight.numel() == 0:
        return "its weight is empty"
    (bn, bk), density = options["block_shape"], options["density"]
    out_features, in_features = dense_weight(module).shape
    fits = out_features % bn == 0 and in_features % bk == 0  # another reason otherwise, which comes later
    blocks = (out_features // bn) * (in_features // bk)
    if options["pattern"] is None and fits and density > 0 and round(density * blocks) == 0:
        return f"density {density:g} of its {blocks} blocks in {bn}x{bk} rounds to none"
    return None


def check_blocks_can_be_chosen(module: Any, block_shape: Sequence[int]) -> None:
    """Raise CannotBeCutError unless the blocks of a dense layer can be ranked."""
    sizes = zip(("out_features", "in_features"), dense_weight(module).shape, strict=True)
    for (name, size), block in zip(sizes, block_shape, strict=True):
        if size % block:
            raise CannotBeCutError(
                f"block_shape: {tuple(block_shape)} does not fit, {name} is {size}, no multiple of {block}"
            )
    if module.weight.is_meta:
        raise InvalidArgumentError(
            "pattern: expected, because on the meta device there are no weights to choose blocks by"
        )
    if bool(module.weight.isnan().any()):
        raise InvalidArgumentError("its weight has NaN, so its blocks cannot be ranked")


def _check_can_be_stored(module: Any, storage: str) -> None:
    weight = module.weight
    if storage in QUANTIZED_BY_NAME and not weight.is_meta and not bool(weight.isfinite().all()):
        raise InvalidArgumentError(
            f"storage: {storage!r} is for finite weights, and its weight is not finite"
        )


def _tie(
    module: nn.Module,
    names: Mapping[nn.Module, list[str]],
    owners: Mapping[nn.Parameter, list[nn.Module]],
) -> str | None:
    for name, parameter in module.named_parameters(recurse=False):
        others = [names[owner][0] for owner in owners[parameter] if owner is not module]
        if others:
            return f"{name} is shared with {', '.join(others)}; the option untie patches it all the same"
    return None


def share_hooks(source: nn.Module, receiver: nn.Module) -> None:
    """Let `receiver` have the very hooks of `source`."""
    for attribute in _HOOKS:
        setattr(receiver, attribute, getattr(source, attribute))


def set_submodule(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in the place of the one with this name."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _size(modules: Iterable[nn.Module]) -> Size:
    parameters: set[torch.Tensor] = set()
    buffers: set[torch.Tensor] = set()
    for module in modules:
        parameters.update(tensor for tensor in module.parameters(recurse=False) if not is_lazy(tensor))
        buffers.update(tensor for tensor in module.buffers(recurse=False) if not is_lazy(tensor))
    return Size(
        sum(parameter.numel() for parameter in parameters),
        sum(tensor.nbytes for tensor in parameters | buffers),
    )


def _report(
    names: Mapping[nn.Module, list[str]],
    targets: Sequence[_Target],
    skipped: list[SkippedLayer],
    unmatched: list[str],
) -> PatchReport:
    replaced = {target.module: target.replacement for target in targets}
    layers = [_patched(target) for target in targets]
    before, after = _size(names), _size(replaced.get(module, module) for module in names)
    left = {module: aliases for module, aliases in names.items() if module not in replaced}
    dense = _dense_parameters(left, before.parameters)
    return PatchReport(layers, skipped, unmatched, before, after, dense)


def _dense_parameters(names: Mapping[nn.Module, list[str]], whole: int) -> list[DenseParameter]:
    """Those of modules that are not block-sparse, the largest share first; a shared one is there once."""
    found: dict[nn.Parameter, DenseParameter] = {}
    for module, aliases in names.items():
        if isinstance(module, _Replacement):
            continue
        for own, parameter in module.named_parameters(recurse=False):
            if not is_lazy(parameter) and parameter.dim() > 1:
                name = f"{aliases[0]}.{own}".removeprefix(".")
                shape, share = tuple(parameter.shape), parameter.numel() / max(1, whole)
                found.setdefault(parameter, DenseParameter(name, shape, share))
    return sorted(found.values(), key=lambda one: -one.share)


def dense_lines(parameters: Sequence[DenseParameter]) -> list[str]:
    """A table of parameters that stay dense, in which those that differ in numbers of their names are one."""
    groups: dict[tuple[str, tuple[int, ...]], list[DenseParameter]] = {}
    for one in parameters:
        groups.setdefault((without_numbers(one.name), one.shape), []).append(one)
    rows: list[tuple[str, ...]] = [("stays dense", "count", "shape", "of the model")]
    for (name, shape), own in sorted(groups.items(), key=lambda group: -sum(one.share for one in group[1])):
        share = f"{sum(one.share for one in own):.1%}"
        rows.append((own[0].name if len(own) == 1 else name, str(len(own)), "x".join(map(str, shape)), share))
    return aligned(rows) if len(rows) > 1 else []


def warn_of_empty(layers: Iterable[Any]) -> None:
    """Says which layers have outputs that are their bias alone, or inputs that nothing reads."""
    texts = empty_texts(layers)
    if texts:
        warnings.warn(f"the blocks that were chosen leave {'; '.join(texts)}", stacklevel=4)


def _warn_of_reads(targets: Sequence[_Target], reads: Mapping[nn.Module, Read]) -> None:
    readers: dict[str, list[str]] = {}
    for target in targets:
        if target.module in reads:
            readers.setdefault(reads[target.module].reader, []).append(target.names[0])
    for reader, layers in readers.items():
        warnings.warn(
            f"{reader} calls block-sparse layers, but also reads their weight itself in some branches, which "
            f"fail from now on (such as fused kernels for training): {listed(layers)}",
            stacklevel=4,
        )


def _patched(target: _Target) -> PatchedLayer:
    name, module, new = target.names[0], target.module, target.replacement
    assert isinstance(new, _Replacement)
    choices: tuple[str, tuple[int, int] | None, str] = "pseudo", None, "plain"
    if isinstance(new, BlockSparseLinear):
        choices = new.policy, new.nm, new.storage
    sizes = _size([module]), _size([new])
    shape = new.out_features, new.in_features
    if isinstance(new, PseudoBlockSparseLinear):
        places = new.block_rows, new.block_cols
    else:
        places = new.pattern.block_indices()
    empty = empty_of(places, shape, new.block_shape)
    return PatchedLayer(
        name, shape, new.block_shape, new.density, *choices, new.storage_error, *sizes, *empty
    )


def _storage(layer: PatchedLayer) -> str:
    """As "plain", "2:4", which is plain with a mask, "2:4 compressed", "int8" or "2:4 int8"."""
    if layer.nm is None:
        return layer.storage
    return "2:4" if layer.storage == "plain" else f"2:4 {layer.storage}"


def _sizes(before: Size, after: Size) -> tuple[str, str, str, str]:
    numbers = (before.parameters, after.parameters, before.bytes, after.bytes)
    return tuple(f"{number:,}" for number in numbers)  # type: ignore[return-value]


def by_reason(skipped: Iterable[SkippedLayer]) -> Iterator[str]:
    """A line for each reason: how many layers of which kinds, and why."""
    groups: dict[str, list[SkippedLayer]] = {}
    for layer in skipped:
        groups.setdefault(layer.reason, []).append(layer)
    for reason, group in groups.items():
        first, counts = group[0], Counter(layer.kind for layer in group)
        if len(group) == 1:
            text = f"{first.name or 'the model'} ({first.kind})"
        else:
            text = ", ".join(f"{count} {kind}" for kind, count in counts.items())
            text += f" ({first.name}, …)" if len(counts) == 1 else ""
        yield f"{text}: {reason}"

"""Make the linear layers of whole models block-sparse, chosen by regular expressions on their names."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, MutableMapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from .._arguments import checked
from .._checks import check_text
from .._progress import Progress
from ..errors import InvalidArgumentError, TileSparseError
from ..integrations.transformers_hooks import check_can_follow, follow
from ..nn.convert import best_blocks, dense_weight, is_conv1d
from ..nn.linear import BlockSparseLinear
from ..nn.mlp import BlockSparseMLP, is_known, reason_not_known
from ..nn.reference import PseudoBlockSparseLinear
from .matching import (
    NOT_LINEAR,
    CannotBeCutError,
    Match,
    check_blocks_can_be_chosen,
    check_can_be_stored,
    reason_not_patchable,
    reason_not_sparse,
)
from .modules import (
    Replacement,
    Target,
    is_linear,
    names_of_modules,
    output_embeddings,
    owners_of_parameters,
    reason_from_parents,
    set_submodule,
    share_hooks,
    tie_of,
    what_would_be_lost,
)
from .reports import (
    FuseReport,
    PatchReport,
    SkippedLayer,
    by_reason,
    fused_mlp,
    patch_report,
    warn_of_empty,
    warn_of_reads,
)
from .rules import Rule, checked_options, compiled_pattern
from .weight_reads import Read, weight_reads


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
        self._rules: list[Rule] = []
        self._originals: MutableMapping[nn.Module, dict[str, Target]] = WeakKeyDictionary()

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
        self._rules.append(Rule(compiled, fullmatch, checked_options({} if options is None else options)))

    @checked
    def is_patchable(self, name: str, module: nn.Module) -> bool:
        """Whether `new_child_module` can replace a module of this kind. Override to change it.

        Args:
            name: its qualified name in the model.
            module: the module.
        """
        check_text("name", name)
        return is_linear(module)

    @checked
    def new_child_module(self, name: str, module: nn.Module, options: Mapping[str, Any]) -> Replacement:
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
            check_can_be_stored(module, options["storage"])
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
        report = patch_report(names, targets, skipped, unmatched)
        if not dry_run:
            check_can_follow(model)
            self._replace(model, targets)
            follow(model)
        warn_of_reads(targets, reads)
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
                targets.append(Target(aliases, module, BlockSparseMLP.from_module(module)))
            else:
                skipped.append(SkippedLayer(aliases[0], type(module).__name__, reason))
        if not dry_run:
            self._replace(model, targets)
        return FuseReport([fused_mlp(target) for target in targets], skipped)

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
    ) -> tuple[list[Target], list[SkippedLayer]]:
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
                targets.append(Target(aliases, module, replacement, options["pattern"] is None))
            progress.show(done, f"layers made block-sparse, {aliases[0]} the last")
        return targets, skipped

    def _match(
        self,
        model: nn.Module,
        names: Mapping[nn.Module, list[str]],
        reads: Mapping[nn.Module, Read],
    ) -> tuple[list[Match], list[SkippedLayer]]:
        """Which layers are replaced, with their names and options, and which are not."""
        owners, outputs = owners_of_parameters(names), output_embeddings(names)
        matched: list[Match] = []
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
                reason = tie_of(module, names, owners)
            read = reads.get(module)
            if read is not None and not read.called and isinstance(module, nn.Linear):
                reason = f"{read.reader} reads its weight itself and never calls it"
            if reason is None:
                matched.append(Match(module, aliases, rule.options, rule.spells(aliases)))
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
            if module in converted or isinstance(module, Replacement)
        ]
        for rule in self._rules:
            if any(map(rule.matches, sparse)):
                continue
            own = [layer for layer in skipped if rule.matches([layer.name])]
            own = [layer for layer in own if layer.reason != NOT_LINEAR] or own
            why = "; ".join([*by_reason(own)][:3]) or "it matches no name"
            raise InvalidArgumentError(
                f"patterns must each make a layer block-sparse, got {rule.regex.pattern!r} ({why}); "
                "strict=False goes on without"
            )

    def _reason_to_skip(
        self, model: nn.Module, module: nn.Module, aliases: list[str], options: Mapping[str, Any]
    ) -> str | None:
        if isinstance(module, Replacement):
            return "already block-sparse"
        if not self.is_patchable(aliases[0], module):
            return reason_not_patchable(module)
        if module is model:
            return "the model itself cannot be replaced in place"
        reason = reason_from_parents(model, aliases) or what_would_be_lost(module)
        if reason is None and is_linear(module):
            reason = reason_not_sparse(module, options)
        return reason

    def _build(self, name: str, module: nn.Module, options: Mapping[str, Any]) -> Replacement:
        try:
            return self.new_child_module(name, module, options)
        except CannotBeCutError:
            raise
        except TileSparseError as error:
            raise type(error)(f"layer {name!r}: {error}") from error

    def _replace(self, model: nn.Module, targets: Sequence[Target]) -> None:
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

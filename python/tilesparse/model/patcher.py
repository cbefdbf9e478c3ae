"""Make the linear layers of whole models block-sparse, chosen by their names."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from .._checks import check_text, shown
from .._listeners import layers_changed
from ..config import BlockSparseConfig
from ..errors import InvalidArgumentError, InvalidTypeError
from ..nn.experts import projections_of
from ..nn.mlp import BlockSparseMLP
from .fuse import mlps_to_fuse
from .match import LayerOptions, Rule, reason_not_patchable
from .modules import NamePattern, Replacement, Target, follow, is_linear, set_submodule, share_hooks
from .replace import patch, replace_modules, sparse_layer
from .report import FuseReport, PatchReport, fused_mlp


class BlockSparseModelPatcher:
    r"""Replaces `torch.nn.Linear` layers of a model by `BlockSparseLinear`, in place.

    The blocks of largest Frobenius norm are kept, with their values. To train from scratch, call
    `reset_parameters` on the new layers, which scales their weights to the smaller fan-in. Build
    the optimizer after patching: the layers have new parameters.

    `torch.nn.Linear` itself is replaced, and Transformers' ``Conv1D``, which stores the transposed weight.
    So are experts of Transformers, which `BlockSparseExperts` replaces, whatever their class is called; the
    router stays. A pattern matches the module that holds all of them, not single projections or experts.

    The report lists as skipped:

    - subclasses, which an override of `is_patchable` and `new_child_module` can handle;
    - layers whose weight another module reads itself instead of calling them, as Mamba does;
    - layers that cannot be cut into blocks; if a pattern writes out the last part of their name, that is an
      error;
    - layers that would lose something: parametrizations, parameters or buffers besides weight and bias, hooks
      of parameters or of the state dict, and a ``forward`` of their own. Hooks of the module's calls move to
      the new layer, and their handles keep working.
    - output embeddings, which decide every token, unless a pattern writes out the last part of their name:
      ``lm_head`` does, ``.*`` does not. Output embeddings are what a ``get_output_embeddings()`` in the model
      returns, and layers named ``lm_head``.

    A layer that computes several things, such as q, k and v, keeps their features in place. Its blocks are
    ranked together, so one of them may keep fewer than another unless a ``pattern`` says otherwise.

    Lines on stderr show progress when patching takes long.

    Examples:
        >>> patcher = BlockSparseModelPatcher()
        >>> patcher.add_pattern(r"encoder\.layer\.\d+\.intermediate", {"density": 0.25})
        >>> report = patcher.patch_model(model)
        >>> print(report)
    """

    def __init__(self) -> None:
        self._rules: list[Rule] = []
        # What undo puts back, by name; None for models that were patched without keep_dense.
        self._originals: MutableMapping[nn.Module, dict[str, Target] | None] = WeakKeyDictionary()

    def add_pattern(
        self,
        regex: str,
        options: Mapping[str, Any] | BlockSparseConfig | None = None,
        *,
        fullmatch: bool = False,
    ) -> None:
        """Set how the layers are patched whose qualified name matches `regex`; the first match wins.

        Args:
            regex: a name or a regular expression. A name, such as "q_proj" or "mlp.up_proj", matches modules
                whose last components equal it, and everything inside them: "l1" does not match "l10". A
                regular expression, which has other special characters than dots, is matched against the start
                of the names of ``model.named_modules()`` (`re.match`).
            options: a `BlockSparseConfig`, or a mapping with any of its fields (``density``, ``block_shape``,
                ``nm``, ``storage``, ``transposable``, ``granularity``, ``policy``) and of

                - ``pattern``: the `BlockPattern` to use, which also sets density and block shape. Layers
                  on the meta device need one, as there is nothing to choose blocks by.
                - ``parts``: (r, c): keep as many blocks of each of r parts of the block rows and c of the
                  block columns, for tensor parallelism over so many processes; (1, 1), as beside ``pattern``.
                - ``reference_layers``: use `ReferenceBlockSparseLinear`; False.
                - ``untie``: patch a layer even if it shares a parameter with another module, which then
                  keeps the dense one; False.

                Layers of which the density would keep no block are skipped, except for density 0 itself.
            fullmatch: the whole name has to match.

        Raises:
            InvalidArgumentError: `regex` is no regular expression, or an option is unknown or wrong.
        """
        self._rules.append(Rule(NamePattern.parse(regex, fullmatch=fullmatch), LayerOptions.parse(options)))

    def is_patchable(self, name: str, module: nn.Module) -> bool:
        """Return True if `new_child_module` can replace a module of this kind. Override to change it.

        Args:
            name: its qualified name in the model.
            module: the module.
        """
        check_text("name", name)
        return is_linear(module) or projections_of(module) is not None

    def new_child_module(self, name: str, module: nn.Module, options: Mapping[str, Any]) -> Replacement:
        """Make the replacement of one layer. Override to change it.

        An override returns a layer of one of these classes or their subclasses; `is_patchable` leaves layers
        out.

        Args:
            name: its qualified name in the model.
            module: the dense layer, which stays as it is.
            options: those of `add_pattern`, with a value for every one.
        """
        return sparse_layer(module, LayerOptions.parse(options))

    def get_patchable_layers(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the layers of `model` that patterns can apply to, by qualified name."""
        return {name: module for name, module in model.named_modules() if self.is_patchable(name, module)}

    def patch_model(
        self, model: nn.Module, *, dry_run: bool = False, strict: bool = True, keep_dense: bool = False
    ) -> PatchReport:
        """Replace every layer that a pattern matches; on an error, none.

        A module registered under several names is replaced by one module under all of them. A warning names
        layers whose chosen blocks leave block rows or columns empty, and layers whose weight another module
        also reads, in some of its branches.

        Args:
            model: changed in place.
            dry_run: only report what would be done.
            strict: raise if there is no pattern, or if one makes no layer block-sparse; layers that are
                block-sparse already count. False leaves that to the report.
            keep_dense: keep the dense layers, and so their memory, for `undo`.

        Raises:
            InvalidArgumentError: see ``strict``; or a layer that a pattern names cannot be cut into blocks of
                its ``block_shape``; or a matched one does not have the shape of its ``pattern``, has NaN in
                its weight, or infinities where that is to be stored in 8 or 4 bits, or is on the meta device
                without a ``pattern``.
        """

        def refusal(name: str, module: nn.Module) -> str | None:
            if self.is_patchable(name, module):
                return None
            return reason_not_patchable(module) or "is_patchable refuses it"

        def make(name: str, module: nn.Module, options: LayerOptions) -> Replacement:
            made: object = self.new_child_module(name, module, options.to_mapping())
            if not isinstance(made, Replacement):
                raise InvalidTypeError(
                    "new_child_module must return a BlockSparseLinear, ReferenceBlockSparseLinear or "
                    f"BlockSparseExperts, got {shown(made)}; is_patchable leaves layers out"
                )
            return made

        report, targets = patch(model, self._rules, refusal, make, dry_run=dry_run, strict=strict)
        if targets and not dry_run:
            self._remember(model, targets if keep_dense else None)
        return report

    def fuse_mlps_(self, model: nn.Module, batch: Any = None, *, dry_run: bool = False) -> FuseReport:
        """Replace every MLP that a call shows to be one by a `BlockSparseMLP`, see its `from_module`.

        Call it when the layers are block-sparse: patched, pruned or loaded. They stay the same under the same
        names, so state dicts, checkpoints and optimizers do not change, and a checkpoint loads into the model
        with or without them; a model that is made anew has to be fused anew. Hooks of its calls move.

        Args:
            model: changed in place.
            batch: what the model is called with: a mapping of keywords, a tuple or list of arguments, or one
                tensor. None fuses only what is known without a call, a `torch.nn.Sequential`.
            dry_run: only report what would be done.
        """
        targets, skipped = mlps_to_fuse(model, batch)
        if targets and not dry_run:
            replace_modules(model, targets)
            self._remember(model, targets)
        return FuseReport([fused_mlp(target) for target in targets], skipped)

    def undo(self, model: nn.Module) -> None:
        """Put back the very modules that this patcher has replaced in `model`, with all hooks.

        Raises:
            InvalidArgumentError: `model` was patched without ``keep_dense=True``, or not by this patcher; a
                copy of a patched model is another model. Or another module stands where this patcher has put
                one, such as an adapter around it. The model is as it was.
        """
        if model not in self._originals:
            raise InvalidArgumentError("model must be patched by this patcher, and not undone since")
        originals = self._originals[model]
        if originals is None:
            raise InvalidArgumentError(
                "model must be patched by patch_model(model, keep_dense=True) to be undone: without it the "
                "dense layers are not kept"
            )
        modules = dict(model.named_modules(remove_duplicate=False))
        for name, target in originals.items():
            if modules.get(name) is not target.replacement:
                kind = type(modules[name]).__name__ if name in modules else "nothing"
                raise InvalidArgumentError(
                    f"model must have the layer that this patcher has put there as {name!r}, got {kind}; "
                    "merge or remove adapters first"
                )
        del self._originals[model]
        for name, target in reversed(originals.items()):
            share_hooks(target.replacement, target.module)
            if isinstance(target.replacement, BlockSparseMLP):  # adapters may have come since
                target.module._modules.update(target.replacement._modules)
            set_submodule(model, name, target.module)
        follow(model, {target.replacement: target.module for target in originals.values()})
        layers_changed(model)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_originals"}

    def __setstate__(self, own: dict[str, Any]) -> None:
        vars(self).update(own, _originals=WeakKeyDictionary())  # a copy has patched no model

    def _remember(self, model: nn.Module, targets: list[Target] | None) -> None:
        """Keep what `undo` puts back; None: nothing, from now on."""
        originals = self._originals.setdefault(model, {})
        if targets is None:
            self._originals[model] = None
        elif originals is not None:
            originals.update({name: target for target in targets for name in target.names})

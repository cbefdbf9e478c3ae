"""Make the linear layers of whole models block-sparse, chosen by their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from .._checks import check_text, shown
from ..config import BlockSparseConfig
from ..errors import InvalidTypeError
from ..nn.experts import projections_of
from .match import LayerOptions, Rule, reason_not_patchable
from .modules import NamePattern, Replacement, is_linear
from .replace import patch, sparse_layer
from .report import Report


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
    - layers whose weight another module reads itself in a call with ``batch``, as Mamba does;
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
        self, model: nn.Module, *, batch: Any = None, dry_run: bool = False, strict: bool = True
    ) -> Report:
        """Replace every layer that a pattern matches; on an error, none.

        A module registered under several names is replaced by one module under all of them. A warning names
        layers whose chosen blocks leave block rows or columns empty.

        Args:
            model: changed in place.
            batch: as of `sparsify_`.
            dry_run: only report what would be done.
            strict: raise if there is no pattern, or if one makes no layer block-sparse; layers that are
                block-sparse already count. False leaves that to the report.

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

        return patch(model, self._rules, refusal, make, batch=batch, dry_run=dry_run, strict=strict)

"""Make the linear layers of a model block-sparse in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from .._arguments import checked
from .._names import names_of_modules
from ..config import BlockSparseConfig
from .building import sparse_layer
from .matching import reason_not_patchable, refusal_of
from .modules import Replacement
from .patching import patch
from .reports import PatchReport
from .rules import LayerOptions, rules_of


@checked
def sparsify_(
    model: nn.Module,
    config: BlockSparseConfig | Mapping[str, BlockSparseConfig | None],
    *,
    layers: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    dry_run: bool = False,
    strict: bool = True,
) -> PatchReport:
    """Make the linear layers and the experts of a model block-sparse, in place; on an error, none.

    They become `BlockSparseLinear` and `BlockSparseExperts`. The blocks of largest Frobenius norm are kept,
    with their values. `BlockSparseModelPatcher` does the same, says which layers stay dense, and can undo it.
    Build the optimizer afterwards: the layers have new parameters.

    Args:
        model: changed in place.
        config: how layers are stored; or a config for each name or regular expression of layers, of which
            the first that matches a layer counts, and None leaves it dense.
        layers: names or regular expressions. A name such as "q_proj" matches modules whose last components
            equal it, and the full name of a module that module alone, with everything inside: see
            `BlockSparseModelPatcher.add_pattern`. None is all layers, or those that a mapping names.
        exclude: likewise, of layers that stay dense.
        filter_fn: takes a linear layer, or experts, and its qualified name, and returns True to make it
            block-sparse. None takes every `torch.nn.Linear`, Transformers' ``Conv1D`` and its experts, but
            not output embeddings (what ``get_output_embeddings()`` returns, and layers named ``lm_head``),
            which take a config of their name.
        dry_run: only report what would be done.
        strict: raise if a config makes no layer block-sparse. False leaves that to the report.

    Returns:
        The replaced layers, and the skipped ones with the reason, such as a shape that cannot be cut into
        blocks.

    Raises:
        InvalidArgumentError: see ``strict``; or `exclude` has what matches nothing; or a layer that a name in
            `config` spells out cannot be cut into blocks; or a weight has NaN, has infinities and is to be
            stored in 8 or 4 bits, or is on the meta device.

    Examples:
        >>> report = sparsify_(model, BlockSparseConfig(density=0.5), filter_fn=lambda _, name: "mlp" in name)
        >>> print(report)
    """
    rules = rules_of(config, layers)
    refusal = refusal_of(names_of_modules(model), reason_not_patchable, exclude, filter_fn)

    def make(name: str, module: nn.Module, options: LayerOptions) -> Replacement:
        return sparse_layer(module, options)

    report, _ = patch(
        model, rules, refusal, make, dry_run=dry_run, strict=strict, spare_outputs=filter_fn is None
    )
    return report

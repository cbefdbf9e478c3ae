"""Models patched by rules: everything that can fail comes before the first change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import nn

from .._listeners import check_can_change, layers_changed
from .._names import matching, names_of_modules, set_submodule
from .._progress import Progress
from ..errors import InvalidArgumentError, TileSparseError
from .building import CannotBeCutError
from .matching import Match, Refusal, check_rules, match_modules
from .modules import Replacement, Target, hand_over, hidden_attribute
from .references import follow
from .reports import PatchReport, SkippedLayer, patch_report, warn_of_empty, warn_of_reads
from .rules import LayerOptions, Rule
from .weight_reads import weight_reads


def patch(
    model: nn.Module,
    rules: Sequence[Rule],
    refusal: Refusal,
    make: Callable[[str, nn.Module, LayerOptions], Replacement],
    *,
    dry_run: bool,
    strict: bool,
    spare_outputs: bool = True,
) -> tuple[PatchReport, list[Target]]:
    """Replace the layers that rules match; on an error, none.

    Args:
        model: changed in place.
        rules: see `match_modules`.
        refusal: see `match_modules`.
        make: returns the replacement of a module, from its name, itself and its options.
        dry_run: only report what would be done.
        strict: raise for rules by which no layer is block-sparse.
        spare_outputs: see `match_modules`.
    """
    names, reads = names_of_modules(model), weight_reads(model)
    matched, skipped = match_modules(model, names, rules, reads, refusal, spare_outputs=spare_outputs)
    targets, uncut = _made(matched, make)
    skipped += uncut
    if strict:
        check_rules(rules, names, {target.module for target in targets}, skipped)
    used = {place for own in matching([rule.layers for rule in rules], names).values() for place in own}
    unmatched = [rule.layers.text for place, rule in enumerate(rules) if place not in used]
    report = patch_report(names, targets, skipped, unmatched)
    if not dry_run:
        check_can_change(model)
        replace_modules(model, targets)
        layers_changed(model)
    warn_of_reads(targets, reads)
    chosen = {target.names[0] for target in targets if target.chosen}
    of_chosen = [
        one for one in report.layers if not chosen.isdisjoint((one.name, one.name.rpartition(".")[0]))
    ]
    warn_of_empty(layer for layer in of_chosen if layer.density)
    return report, targets


def replace_modules(model: nn.Module, targets: Iterable[Target]) -> None:
    """Put replacements into a model, wherever it holds the modules they replace, with all that these have."""
    new = {}
    for target in targets:
        new[target.module] = target.replacement
        hand_over(target.module, target.replacement)
        for name in target.names:
            set_submodule(model, name, target.replacement)
    follow(model, new)


def _made(
    matched: Sequence[Match], make: Callable[[str, nn.Module, LayerOptions], Replacement]
) -> tuple[list[Target], list[SkippedLayer]]:
    """Make all replacements; layers that cannot be cut are skipped unless a rule writes their name out."""
    progress = Progress(len(matched))
    targets: list[Target] = []
    skipped: list[SkippedLayer] = []
    for done, (module, names, options, named) in enumerate(matched, 1):
        name = names[0]
        try:
            made = make(name, module, options)
            reason = hidden_attribute(module, made)
            if reason is not None:
                skipped.append(SkippedLayer(name, type(module).__name__, reason))
                continue
            targets.append(Target(names, module, made, options.pattern is None))
        except TileSparseError as error:
            if named or not isinstance(error, CannotBeCutError):
                kind = InvalidArgumentError if isinstance(error, CannotBeCutError) else type(error)
                raise kind(f"layer {name!r}: {error}") from error
            skipped.append(SkippedLayer(name, type(module).__name__, str(error)))
        progress.show(done, f"layers made block-sparse, {name} the last")
    return targets, skipped

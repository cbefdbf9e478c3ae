"""A pass of the calibration data through a model, with each layer's solution."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from .. import _progress
from ..nn.convert import dense_weight
from ._checks import checked_moments
from .calibration import Calibration, Unit
from .layer import Pruner, Solution, built, dense_parameters
from .resume import Progress
from .targets import naming_layer


class Run:
    """Pass of the calibration data through a model, on which its layers are pruned."""

    def __init__(
        self,
        model: nn.Module,
        calibration: Calibration,
        targets: Mapping[str, Any],
        damping: float,
        progress: Progress | None = None,
    ) -> None:
        self._model, self._calibration, self._targets = model, calibration, targets
        self._damping, self._progress = damping, progress
        self._said = _progress.Progress(len(targets))
        self._done = 0

    @property
    def stack(self) -> str | None:
        """The stack of blocks that the data go through block by block, or None."""
        return self._calibration.stack

    def layer(self, name: str) -> Any:
        """Return the dense layer of this name."""
        return self._model.get_submodule(name)

    def pruners(self) -> Iterator[tuple[str, Pruner]]:
        """Yield all layers with a pruner each, by their inputs in the dense model."""
        for unit in self._calibration.units():
            for group in self._calibration.groups(unit):
                yield from self._of(unit, group, {})
            self._calibration.advance(unit, {})

    def solutions(self, solve: Callable[[str, Pruner], Solution]) -> dict[str, Solution]:
        """Return the solutions of all layers, by their inputs behind pruned blocks."""
        solutions: dict[str, Solution] = {}
        for unit in self._calibration.units():
            solutions |= self._saved(unit)
            # Layers outside the stack come last, and run with everything before them pruned.
            before = (
                [] if unit.number is not None else [name for name in solutions if name not in unit.layers]
            )
            parameters = self._parameters(before, solutions)
            for group in self._calibration.groups(unit):
                missing = [name for name in group if name not in solutions]
                for name, pruner in self._of(unit, missing, parameters):
                    with naming_layer(name):
                        solutions[name] = solve(name, pruner)
                    if self._progress is not None:
                        self._progress.save(name, solutions[name])
                parameters |= self._parameters(group, solutions)
            self._calibration.advance(unit, parameters)
        return solutions

    def _saved(self, unit: Unit) -> dict[str, Solution]:
        if self._progress is None:
            return {}
        found = {}
        for name in unit.layers:
            shape = dense_weight(self.layer(name)).shape
            solution = self._progress.load(name, self._targets[name].block_shape, (shape[0], shape[1]))
            if solution is not None:
                found[name] = solution
        self._done += len(found)
        self._said.skip(len(found))
        return found

    def _of(
        self, unit: Unit, names: list[str], parameters: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Pruner]]:
        """Yield layers that have the same input, with a pruner each."""
        if not names:
            return
        of_experts = self._calibration.moments_of_experts(unit, names[0], parameters)
        moments = None if of_experts else self._calibration.moments(unit, names[0], parameters)
        for name in names:
            own = checked_moments(name, of_experts.of(name) if of_experts else moments)
            with naming_layer(name):
                pruner = Pruner(self.layer(name), own, self._damping)
            yield name, pruner
            self._done += 1
            self._said.show(self._done, f"layers pruned, {name} the last")

    def _parameters(self, names: Iterable[str], solutions: Mapping[str, Solution]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name in names:
            layer = built(self.layer(name), solutions[name], self._targets[name])
            found |= dense_parameters(name, self.layer(name), layer)
        return found

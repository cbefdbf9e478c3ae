"""Gates that learn which blocks are needed: L0 regularisation with hard concrete distributions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .._arguments import checked
from .._checks import checked_fraction
from ..errors import InvalidArgumentError
from ._layers import check_trainable, checked_optimizer, some_sparse_layers
from .gradual import check_unwrapped, compact
from .states import check_states

# Of the hard concrete distribution, as Louizos et al. chose them.
TEMPERATURE, LOWEST, HIGHEST = 2 / 3, -0.1, 1.1


class Gate(nn.Module):
    """Parametrization that multiplies each block of a weight by an L0 gate from 0 to 1: random in training.

    Attributes:
        log_alpha: Parameter [nnz] float32, the larger the likelier it is that a gate is open.
    """

    def __init__(self, nnz: int, keep: float, device: torch.device) -> None:
        super().__init__()
        start = math.log(keep / (1 - keep)) + TEMPERATURE * math.log(-LOWEST / HIGHEST)
        self.log_alpha = nn.Parameter(torch.full((nnz,), start, dtype=torch.float32, device=device))

    def forward(self, weight: Tensor) -> Tensor:
        """The weight [nnz, bn, bk] times its gates."""
        return weight * self.gates().to(weight.dtype)[:, None, None]

    def gates(self) -> Tensor:
        """[nnz]: a sample in training, otherwise what stands for the distribution."""
        logits: Tensor = self.log_alpha
        if self.training:
            eps = torch.finfo(logits.dtype).eps
            uniform = torch.rand_like(logits).clamp(eps, 1 - eps)
            logits = (logits + uniform.log() - (1 - uniform).log()) / TEMPERATURE
        return (logits.sigmoid() * (HIGHEST - LOWEST) + LOWEST).clamp(0, 1)

    def open(self) -> Tensor:
        """[nnz]: the probability that each gate is not zero."""
        return (self.log_alpha - TEMPERATURE * math.log(-LOWEST / HIGHEST)).sigmoid()


class BlockGates:
    """L0 gates of every block of `BlockSparseLinear` layers; the fraction that is open is a penalty.

    A gate has a hard concrete distribution: in training it is a sample, exactly 0 or 1 with some probability,
    through which gradients pass; in evaluation it is exactly 0 where the distribution leans to it (Louizos,
    Welling and Kingma, "Learning Sparse Neural Networks through L0 Regularization", ICLR 2018; temperature
    2/3, stretched to -0.1 … 1.1).

    Gates are parametrizations of the weights (``torch.nn.utils.parametrize``): their parameters
    ``log_alpha`` are parameters of the model, in its ``state_dict()`` as well, and the weights stay the same
    Parameters. Build the optimizer afterwards. Gates need a larger learning rate than weights, 0.1 with Adam
    is a start, and no weight decay.

    Args:
        model: has `BlockSparseLinear` layers in the storage "plain", all of which get gates.
        keep: the probability with which gates are open at the beginning, between 0 and 1.

    Raises:
        InvalidArgumentError: there is no such layer, a weight is frozen or shared, or ``keep`` is not between
            0 and 1.
        UnsupportedError: a weight is sharded, parametrized already or not stored plain.

    Examples:
        >>> gates = BlockGates(model)
        >>> optimizer = torch.optim.AdamW(model.parameters())  # of weights and gates
        >>> ...  # loss(model, batch) + strength * gates.density()
        >>> gates.compact(optimizer)
    """

    @checked
    def __init__(self, model: nn.Module, *, keep: float = 0.9) -> None:
        if not 0 < checked_fraction("keep", keep) < 1:
            raise InvalidArgumentError(f"keep must be between 0 and 1, got {keep}")
        self._model, self._layers = model, some_sparse_layers(model)
        check_trainable(self._layers)
        self._gates = {}
        for name, layer in self._layers.items():
            gate = Gate(layer.weight.shape[0], keep, layer.weight.device).train(layer.training)
            parametrize.register_parametrization(layer, "weight", gate)
            self._gates[name] = gate

    def parameters(self) -> list[nn.Parameter]:
        """Those of the gates, for a group of their own."""
        return [gate.log_alpha for gate in self._gates.values()]

    def density(self) -> Tensor:
        """The penalty, differentiable: the expected fraction of these layers' weights with open gates."""
        sizes = {name: math.prod(layer.block_shape) for name, layer in self._layers.items()}
        total = sum(math.prod(layer.spec.shape) for layer in self._layers.values())
        expected = [gate.open().sum() * (sizes[name] / total) for name, gate in self._gates.items()]
        return torch.stack([one.to(expected[0].device) for one in expected]).sum()

    def _original(self, name: str) -> Tensor:
        """The Parameter that gates multiply."""
        parametrizations: Any = self._layers[name].parametrizations
        original: Tensor = parametrizations.weight.original
        return original

    @checked
    @torch.no_grad()
    def compact(self, optimizer: torch.optim.Optimizer | None = None) -> dict[str, int]:
        """End the gates: multiply weights by them, and remove blocks whose gate is closed.

        The model then computes what it computed in evaluation, and has plain layers again. Moments of what is
        left stay as they were; the parameters of gates have no further use in the optimizer.

        Returns:
            How many blocks each layer has lost, by its name, see `tilesparse.train.compact`.

        Raises:
            InvalidArgumentError: the gates were ended before, or ``optimizer`` is none.
            UnsupportedError: the model is one of DistributedDataParallel, or the optimizer has states of
                which it is not known what belongs to which block. Nothing has changed then.
        """
        check_unwrapped(self._model)
        if not all(parametrize.is_parametrized(layer, "weight") for layer in self._layers.values()):
            raise InvalidArgumentError("model must have layers with gates, which were ended before")
        if optimizer is not None:
            optimizer = checked_optimizer(optimizer)
            check_states(optimizer, {name: self._original(name) for name in self._layers})
        for name, layer in self._layers.items():
            training = self._gates[name].training
            self._gates[name].eval()
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
            self._gates[name].train(training)
        return compact(self._model, optimizer)

"""Training in 16 bits with weights and gradients in float32 beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._arguments import checked
from ..errors import InvalidArgumentError, UnsupportedError
from ..nn.origin import has_peers
from ._layers import (
    Uncopied,
    check_keys,
    check_plain_weight,
    checked_optimizer,
    closure_of,
    sparse_layers,
)

_HALVES = (torch.float16, torch.bfloat16)


class MasterWeights(Uncopied):
    """Float32 copies of a model's parameters in 16 bits, which an optimizer trains in their place.

    The optimizer's parameters of float16 and bfloat16 that are not frozen are replaced by these copies, the
    masters, and its states are in float32. Before a step the gradients of any number of backward passes are
    added up in float32, in the order in which they come: those of `BlockSparseLinear` inside the kernel that
    computes them, so that each is rounded once, others by a kernel of their own, so that they are rounded to
    16 bits before. After a step the model's parameters are the masters, rounded. Gradients are in
    ``master.grad``, and ``parameter.grad`` of the model is None: clip those of `parameters`. The loop stays
    as it was.

    What else writes to the model's parameters between two steps, such as ``load_state_dict``, counts: before
    the next step masters take over every weight that is no longer what they round to. Compiled code gives
    its gradients in 16 bits, unless its graph may break at the layers.

    Args:
        model: whose parameters they are.
        optimizer: has not made a step yet.

    Raises:
        InvalidArgumentError: the optimizer has no such parameters, one that is not the model's, or
            states of one; or a parameter has a ``main_grad`` already.
        UnsupportedError: several processes train together, or a parameter is sharded, or the weight of
            experts.

    Example:
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        >>> masters = MasterWeights(model, optimizer)
        >>> for x, y in batches:
        ...     for part, target in zip(x.chunk(4), y.chunk(4)):
        ...         loss(model(part), target).backward()
        ...     torch.nn.utils.clip_grad_norm_(masters.parameters(), 1.0)
        ...     optimizer.step(), optimizer.zero_grad()
    """

    @checked
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        from .._ops.main_grad import GradientOf  # and with it PyTorch's compiler, which takes long to import

        if has_peers():
            raise UnsupportedError(
                "model must be trained by one process; gradients of masters are not averaged"
            )
        self._model, self._optimizer = model, checked_optimizer(optimizer)
        self._of = self._checked()
        self._masters: dict[str, nn.Parameter] = {}
        self._versions: dict[str, int] = {}
        for name, parameter in self._of.items():
            master = self._masters[name] = nn.Parameter(parameter.detach().float())
            _collect(master, parameter)
            register: Any = parameter.register_post_accumulate_grad_hook
            register(partial(_collect, master))
            self._versions[name] = parameter._version
        by_id = {id(parameter): self._masters[name] for name, parameter in self._of.items()}
        for group in self._optimizer.param_groups:
            group["params"][:] = [by_id.get(id(parameter), parameter) for parameter in group["params"]]
        for layer in sparse_layers(model).values():
            for kind in ("weight", "bias"):
                own: Any = layer._parameters.get(kind)
                if id(own) in by_id:
                    own.main_grad = GradientOf(by_id[id(own)])
        self._optimizer.register_step_pre_hook(self._follow)
        self._optimizer.register_step_post_hook(self._round)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that the optimizer trains: masters, and those that are not in 16 bits."""
        for group in self._optimizer.param_groups:
            yield from group["params"]

    def state_dict(self) -> dict[str, Tensor]:
        """The masters by the names of parameters, beside the state dicts of model and optimizer."""
        return {name: master.detach() for name, master in self._masters.items()}

    @checked
    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a `state_dict`; the model's parameters become the masters, rounded.

        Raises:
            InvalidArgumentError: names or shapes are others. Nothing has changed then.
        """
        check_keys("state", state, self._masters)
        for name, master in self._masters.items():
            if state[name].shape != master.shape:
                raise InvalidArgumentError(
                    f"state[{name!r}] must have shape {list(master.shape)}, got {list(state[name].shape)}"
                )
        for name, master in self._masters.items():
            master.copy_(state[name])
        self._round()

    def _checked(self) -> dict[str, nn.Parameter]:
        """The optimizer's parameters of 16 bits by their names."""
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        chosen: dict[str, nn.Parameter] = {}
        for parameter in self.parameters():
            if parameter.dtype not in _HALVES or not parameter.requires_grad:
                continue
            if id(parameter) not in names:
                raise InvalidArgumentError(
                    f"optimizer: a parameter {list(parameter.shape)} of {parameter.dtype} is not the model's"
                )
            name = names[id(parameter)]
            check_plain_weight(name, parameter, "make masters before parameters are sharded")
            if self._optimizer.state.get(parameter):
                raise InvalidArgumentError(
                    f"optimizer must not have made a step, but it has states of {name!r}"
                )
            if getattr(parameter, "main_grad", None) is not None:
                raise InvalidArgumentError(f"model: {name!r} has a main_grad already")
            chosen[name] = parameter
        if not chosen:
            raise InvalidArgumentError("optimizer must have parameters of float16 or bfloat16")
        taken = {id(parameter) for parameter in chosen.values()}
        for name, layer in sparse_layers(self._model).items():
            if layer.of_experts and id(layer._parameters.get("weight")) in taken:
                raise UnsupportedError(
                    f"model: layer {name!r}: there are no float32 gradients of experts; give their weights "
                    "to another optimizer"
                )
        return chosen

    @torch.no_grad()
    def _follow(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a step: takes over what others have written to the model's parameters."""
        if closure_of(args, kwargs) is not None:
            raise UnsupportedError(
                "optimizer must step without a closure; parameters become the masters, rounded, only "
                "after a step"
            )
        known = {id(parameter) for parameter in self._model.parameters()}
        for name, parameter in self._of.items():
            master = self._masters[name]
            if id(parameter) not in known or parameter.shape != master.shape:
                raise InvalidArgumentError(
                    f"model: {name!r} is another parameter than the optimizer's master is of, or has another "
                    "shape; make optimizer and MasterWeights anew"
                )
        for name, parameter in self._of.items():
            if parameter._version != self._versions[name]:
                master = self._masters[name]
                changed = master.to(parameter.dtype) != parameter
                master.copy_(torch.where(changed, parameter, master))

    @torch.no_grad()
    def _round(self, *_: Any) -> None:
        """After a step: the model's parameters become the masters, rounded."""
        for name, parameter in self._of.items():
            parameter.copy_(self._masters[name])
            self._versions[name] = parameter._version


@torch.no_grad()
def _collect(master: nn.Parameter, parameter: Tensor) -> None:
    """Add a gradient that autograd has left with the parameter."""
    if parameter.grad is None:
        return
    if master.grad is None:
        master.grad = parameter.grad.to(master.dtype)
    else:
        master.grad.add_(parameter.grad)
    parameter.grad = None

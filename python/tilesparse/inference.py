"""Everything that makes a loaded model faster in inference, in one call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from torch import nn

from ._arguments import checked
from ._checks import checked_count
from .errors import InvalidArgumentError
from .nn.linear import BlockSparseLinear
from .patch.patcher import BlockSparseModelPatcher
from .tuning.measuring import tune
from .tuning.products import Product

_Model = TypeVar("_Model", bound=nn.Module)


@checked
def prepare_for_inference(model: _Model, *, tokens: Iterable[int] = ()) -> _Model:
    """Prepare a model with block-sparse layers for inference, in place, once it is on its device.

    The model is put into evaluation mode and its parameters record no gradients. MLPs are fused (see
    `BlockSparseModelPatcher.fuse_mlps`), layers keep prepacked copies of their weights where kernels read
    them so (see `BlockSparseLinear.pack`), and layers with the policy "sparse" get the policy "auto": each
    call takes the sparse or the dense product, whichever is faster for its tokens. Where numbers of tokens
    are given, both are measured for every layer on the device where its weight lies, see `tune`. Experts
    have one product and one form, and nothing to choose.

    State dicts and checkpoints do not change. A model that is made anew has to be prepared anew.

    Args:
        model: changed in place.
        tokens: numbers of tokens in a call to measure kernels for, such as 1 and 512; by default nothing is
            measured, and choices rest on estimates.

    Returns:
        The model.

    Raises:
        InvalidArgumentError: the model has no block-sparse layer, or a number of tokens is not positive.
        UnsupportedError: no kernel computes a product on the device of a layer.
        TuneFileError: the file of measurements is damaged or cannot be written.

    Examples:
        >>> model = prepare_for_inference(AutoModelForCausalLM.from_pretrained("pruned").cuda())
    """
    counts = [checked_count("tokens", count) for count in tokens]
    layers = [module for module in model.modules() if isinstance(module, BlockSparseLinear)]
    if not layers:
        raise InvalidArgumentError("model must have a block-sparse layer, got none")
    layers = [layer for layer in layers if not layer.of_experts]
    for device in dict.fromkeys(layer.weight.device for layer in layers) if counts else ():
        here = [layer for layer in layers if layer.weight.device == device]
        tune([Product.of(layer, tokens=count) for layer in here for count in counts], device)
    model.eval().requires_grad_(False)
    BlockSparseModelPatcher().fuse_mlps(model)
    for layer in layers:
        layer.policy = "auto" if layer.policy == "sparse" else layer.policy
        layer.pack()
    return model

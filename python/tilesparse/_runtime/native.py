"""The native library's numbers for products and activations, and how it reads tensors."""

import torch
from torch import Tensor

from .. import _C
from .private import current_device, tf32_allowed

DDS_NT, DDS_NN, SDD_TN = range(3)
ACTIVATIONS = {"none": 0, "relu": 1, "gelu": 2, "silu": 3}

# How tensors are read natively, and the patterns that are found so. PyTorch before 2.10 offers no way to
# read them: then these find nothing, and all that asks them has a way of its own.
TENSORS = _C.Tensors(
    getattr(Tensor, "__dlpack_c_exchange_api__", None),
    Tensor,
    torch.nn.Parameter,
    current_device,
    tf32_allowed,
)
KNOWN = _C.Known(TENSORS)

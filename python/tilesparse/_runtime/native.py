"""The native library's numbers for products and activations, and how it reads tensors."""

import torch
from torch import Tensor

from .. import _C
from .private import current_device, tf32_allowed

DDS_NT, DDS_NN, SDD_TN = range(3)
SCALES_PER_BLOCK, SCALES_PER_ROW, SCALES_PER_FEATURE = range(1, 4)  # granularities of scales; 0: no scales
ACTIVATIONS = {"none": 0, "relu": 1, "gelu": 2, "silu": 3}

# The native reader of tensors, the patterns that it finds, and activations that it quantizes. PyTorch before
# 2.10 offers no way to read tensors natively: these find nothing then, and callers do the same in Python.
TENSORS = _C.Tensors(
    getattr(Tensor, "__dlpack_c_exchange_api__", None),
    Tensor,
    torch.nn.Parameter,
    current_device,
    tf32_allowed,
)
KNOWN = _C.Known(TENSORS)
QUANTIZER = _C.Quantizer(TENSORS)

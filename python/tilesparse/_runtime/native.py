"""The native library's numbers for products and activations, and how it reads tensors."""

import torch
from torch import Tensor

from .. import _C
from .private import current_device, tf32_allowed

DDS_NT, DDS_NN, SDD_TN = range(3)
SCALES_PER_FEATURE = 2  # of ts_matmul_desc.row_scales; 1 is one for each row of a block, 0 for each block
ACTIVATIONS = {"none": 0, "relu": 1, "gelu": 2, "silu": 3}

# The native reader of tensors, and the patterns that it finds. PyTorch before 2.10 offers no way to read
# tensors natively: then these find nothing, and their callers do the same in Python.
TENSORS = _C.Tensors(
    getattr(Tensor, "__dlpack_c_exchange_api__", None),
    Tensor,
    torch.nn.Parameter,
    current_device,
    tf32_allowed,
)
KNOWN = _C.Known(TENSORS)

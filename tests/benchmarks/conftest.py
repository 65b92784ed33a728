"""Without a GPU the Triton kernels run in Triton's interpreter. This must be set before kernels are defined, so before any
import.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

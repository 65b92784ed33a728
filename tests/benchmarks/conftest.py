"""Without a GPU the Triton kernels run in Triton's interpreter. That is decided when a kernel is defined, so before any import."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

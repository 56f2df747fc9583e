"""Kernels run through Triton's interpreter where there is no GPU."""

import os

import torch

# read when a kernel is decorated, so before any kernel module is imported
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

"""Calls each function of MKL's VML that the CPU path uses once, from one thread.

PyTorch's `exp`, `log` and `tanh` of float32 and float64 are VML's where PyTorch is built with MKL (its wheels for
x86-64). VML looks for the code of a function for this CPU and accuracy when it is first called, and not safely: where
several threads make that first call at once, one of them may run the code of the lowest accuracy for its share, once
(pytorch#188792, open). With torch 2.11 and 2.14 a process's first `exp` then erred by 1.5e-4, where 6e-8 is right, in 1
of 60 to 5,000 processes on two busy cores, and in none of 23,000 after a call like these.
"""

import torch

FUNCTIONS = (torch.exp, torch.log, torch.tanh)  # `logsumexp` is of the first two
DTYPES = (torch.float32, torch.float64)

for _dtype in DTYPES:
    _one = torch.ones(1, dtype=_dtype, device="cpu")
    for _function in FUNCTIONS:
        _function(_one)

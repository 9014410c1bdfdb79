"""Autograd of the operators.

`flash_cute::fwd` is the differentiable operator. There is no backward kernel yet, so backward() raises
on every device instead of returning a gradient that is wrong. `flash_cute::_fwd` is the same computation
with no autograd at all: its outputs never require grad, and a call is 12 us cheaper (torch 2.11).
"""

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

NO_BACKWARD = (
    "flash_cute.fwd has no backward yet: gradients cannot be taken through it. Call it under torch.no_grad() or on "
    "tensors that do not require grad, or use torch.nn.functional.scaled_dot_product_attention where you train."
)


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> NoReturn:
    raise NotImplementedError(NO_BACKWARD)


def refuse_tangents(*tensors: Tensor) -> None:
    """Raise where a tensor carries a forward-mode tangent, which would be lost without a word."""
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise NotImplementedError("flash_cute.fwd has no forward-mode derivative: it takes no dual tensors.")


def register(library: torch.library.Library) -> None:
    """Attach autograd to the operators of `library`."""
    torch.library.register_autograd("flash_cute::fwd", _backward, lib=library)
    # Without a kernel of its own, PyTorch's fallback would let backward() pass with a warning and no gradients.
    library.impl("_fwd", torch.library.fallthrough_kernel, "Autograd")

"""What flash_cute uses of PyTorch that is not public, each with a public, slower stand-in where a version lacks it."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

try:
    from torch._C import _are_functorch_transforms_active as functorch_is_active
except ImportError:

    def functorch_is_active() -> bool:
        """Whether a torch.func transform may be active: what is done for them serves every call."""
        return True


try:
    from torch._C import _is_any_autocast_enabled as autocast_is_enabled
except ImportError:

    def autocast_is_enabled() -> bool:
        """Whether torch.autocast is active for a device that we cast for."""
        return torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")


try:
    from torch._C import _len_torch_dispatch_stack as dispatch_modes
except ImportError:

    def dispatch_modes() -> int:
        """How many TorchDispatchModes may be active: what is done for them serves every call."""
        return 1


try:
    from torch._C import _is_tracing as jit_is_tracing
except ImportError:
    jit_is_tracing = torch.jit.is_tracing

try:
    from torch._C import _get_flash_sdp_enabled as flash_sdp_is_enabled
except ImportError:
    flash_sdp_is_enabled = torch.backends.cuda.flash_sdp_enabled


# Whether `forward_ad._current_level` says that no forward-mode derivative is under way; else each tensor is asked.
HAS_DUAL_LEVEL = hasattr(forward_ad, "_current_level")

try:
    from torch.utils._python_dispatch import _disable_current_modes
except ImportError:
    without_modes: Callable[[], contextlib.AbstractContextManager[Any]] | None = None  # fakes then check nothing
else:
    without_modes = _disable_current_modes


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether it is a tensor of torch.compile's or FakeTensorMode's, without data."""
    return type(tensor).__name__ == "FakeTensor"


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without what it does for torch.func, 1.6 us per call."""
    base = super(torch.autograd.Function, function)
    apply: Callable[..., Any] = getattr(base, "apply", function.apply)
    return apply


def direct_call(operator: Callable[..., Any]) -> Callable[..., Any]:
    """An operator's call without the Python function around it, which hands on its arguments in 0.2 us.

    Not to be traced by torch.compile, which knows the operator alone.
    """
    call: Callable[..., Any] = getattr(operator, "_op", operator)
    return call

"""What every provider is made of."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from bench.figures import DETERMINISTIC
from bench.workloads import Inputs, Workload
from flash_cute._timing import first_line

Function = Callable[..., Any]


class Unavailable(Exception):
    """The provider is not installed, or does not take this problem; the text says which."""


@dataclass(frozen=True)
class Backend:
    """A provider, ready for one workload.

    Attributes:
        call: takes what `arrange` returned; returns out, or dq, dk and dv, and possibly more behind them.
        context: entered around `arrange`, and around a batch of calls.
        arrange: from a workload's inputs to what `call` takes; done before anything is timed.
        restore: from a tensor that `call` returned to the layout of the workload's inputs.
    """

    name: str
    call: Function
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    arrange: Callable[[Inputs], tuple[Any, ...]] = lambda inputs: inputs
    restore: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor


def is_deterministic(name: str) -> bool:
    return name.endswith(DETERMINISTIC)


def module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise Unavailable(f"import {name}: {first_line(error)}") from error


def first(returned: Any) -> torch.Tensor:
    """out, of a forward that returns it alone or with the LSE behind it."""
    out: torch.Tensor = returned[0] if isinstance(returned, tuple) else returned
    return out


def refuse(workload: Workload, who: str, *options: str) -> None:
    """Raise `Unavailable` if the workload has one of the options, which are names of its fields."""
    words = {"Dv": "head dim of v's own", "window": "window", "softcap": "softcap", "sinks": "sinks", "alibi": "ALiBi"}
    words["lengths"] = "packed batches"
    lacking = [words[option] for option in options if getattr(workload, option)]
    if lacking:
        raise Unavailable(f"{who} has no {' and no '.join(lacking)}")


def refuse_float8(workload: Workload, who: str) -> None:
    if workload.is_float8:
        raise Unavailable(f"{who} takes no float8")


def require_bottom_right(workload: Workload, who: str) -> None:
    """Raise `Unavailable` for a mask that a package which aligns masks to the bottom right does not have."""
    if workload.causal == "top_left" and workload.N != workload.M:
        raise Unavailable(f"{who} aligns its causal mask to the bottom right: another problem when N and M differ")


def window_limits(workload: Workload) -> tuple[int, int]:
    """(left, right) as the packages of FlashAttention take them: -1 is no limit."""
    left, right = (-1 if side is None else side for side in workload.window or (None, None))
    return left, 0 if workload.is_causal else right


def heads_after_length(inputs: Inputs) -> Inputs:
    """(B, H, N, D) to (B, N, H, D), contiguous; packed tensors have that order already."""
    return tuple(tensor.transpose(1, 2).contiguous() if tensor.ndim == 4 else tensor for tensor in inputs)


def heads_before_length(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2) if tensor.ndim == 4 else tensor


def through_autograd(forward: Backend) -> Backend:
    """Forward and backward as a training step calls them."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(first(forward.call(q, k, v)), (q, k, v), dout)

    def arrange(inputs: Inputs) -> tuple[Any, ...]:
        *leaves, dout = forward.arrange(inputs)
        return *(leaf.detach().requires_grad_() for leaf in leaves), dout

    return replace(forward, call=call, arrange=arrange)


def backward_by_autograd(forward: Backend) -> Backend:
    """The backward alone of a provider that has no function for it: autograd's host time comes with it."""

    def arrange(inputs: Inputs) -> tuple[Any, ...]:
        *leaves, dout = forward.arrange(inputs)
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        return first(forward.call(*leaves)), leaves, dout

    return replace(forward, call=functools.partial(torch.autograd.grad, retain_graph=True), arrange=arrange)

"""Counts what never reaches `scaled_dot_product_attention`: the fast path of `torch.nn.MultiheadAttention`."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ._tally import tally

OPERATOR = "_native_multi_head_attention"  # TransformerEncoderLayer's fast path calls it too
REASON = (
    "fast path: expected scaled_dot_product_attention, got torch.nn.MultiheadAttention's or TransformerEncoderLayer's "
    "own kernel, which torch.backends.mha.set_fastpath_enabled(False) turns off"
)
_MASK, _NEED_WEIGHTS = 9, 10  # where these arguments stand


def counters(device: str, strict: bool) -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """(operator, dispatch key, kernel) of what is counted on a device type. A kernel takes the dispatch keys first."""
    for key in (device.upper(), f"NestedTensor{device.upper()}"):
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{OPERATOR}", key):
            original = torch.library.get_kernel(f"aten::{OPERATOR}", key).call_boxed
            yield OPERATOR, key, make_counter(original, strict)


def make_counter(original: Callable[..., Any], strict: bool) -> Callable[..., Any]:
    """`original`, counted as passed on to PyTorch where it does not call `scaled_dot_product_attention`."""

    def kernel(keys: Any, *args: Any) -> Any:
        # On CUDA it calls it, unless it is given a mask or asked for the weights (which the dispatcher leaves out where
        # it is).
        mask = args[_MASK] if len(args) > _MASK else None
        needs_weights = len(args) <= _NEED_WEIGHTS or args[_NEED_WEIGHTS]
        if args[0].device.type != "cuda" or mask is not None or needs_weights:
            tally.pass_on(REASON)
            if strict:
                raise ValueError(f"flash_cute: {REASON}")
        return original(keys, *args)

    return kernel

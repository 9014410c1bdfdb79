"""PyTorch's own attention: SDPA and its backends, and FlashAttention-2 by the operator that has windows and more."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.providers.base import (
    Backend,
    Function,
    Unavailable,
    heads_after_length,
    heads_before_length,
    refuse,
    refuse_float8,
    require_bottom_right,
    window_limits,
)
from bench.workloads import Inputs, Workload

# What `scaled_dot_product_attention` is made to run; "sdpa" is its own choice, and all that the CPU has beside "math".
SDPA = {
    "sdpa": None,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
aten = torch.ops.aten


def sdpa(name: str, workload: Workload, device: torch.device) -> Backend:
    refuse_float8(workload, "SDPA")
    refuse(workload, "SDPA", "window", "softcap", "sinks", "alibi", "lengths")
    if workload.causal == "bottom_right" and workload.N != workload.M:
        raise Unavailable("SDPA aligns its causal mask to the top left: another problem when N and M differ")
    if device.type == "cpu" and name not in ("sdpa", "math"):
        raise Unavailable("a CUDA kernel; on the CPU, scaled_dot_product_attention is measured as sdpa")
    if name == "math":
        _require_memory_for_scores(workload, device)
    options: dict[str, bool] = {"is_causal": workload.is_causal}
    if workload.Hkv != workload.H:
        options["enable_gqa"] = True
    call = functools.partial(F.scaled_dot_product_attention, **options)
    kernel = SDPA[name]
    return Backend(name, call) if kernel is None else Backend(name, call, functools.partial(sdpa_kernel, kernel))


def _require_memory_for_scores(workload: Workload, device: torch.device) -> None:
    """The unfused computation keeps N x M scores per head: in float32, with softmax and mask, and their gradients."""
    copies = 3 if workload.direction == "fwd" else 6
    needed = copies * 4 * workload.B * workload.H * workload.N * workload.M
    limit = 4 << 30
    if device.type == "cuda":
        limit = torch.cuda.mem_get_info(device)[0] * 2 // 3
    if needed > limit:
        raise Unavailable(f"N x M scores need about {needed / 2**30:.0f} GiB")


def sdpa_backward(name: str, workload: Workload) -> Backend:
    """The backward that autograd would call behind SDPA, called directly with what its forward saved."""
    refuse(workload, "SDPA", "window", "softcap", "sinks", "alibi", "lengths")
    if workload.is_causal and workload.N != workload.M:
        raise Unavailable("SDPA aligns its causal mask to the top left: another problem when N and M differ")
    if name == "efficient" and workload.Hkv != workload.H:
        raise Unavailable("PyTorch's memory-efficient attention takes no grouped heads")
    saved, backward = SDPA_BACKWARD[name]

    def arrange(inputs: Inputs) -> tuple[Any, ...]:
        q, k, v, dout = inputs
        return saved(q, k, v, dout, workload.is_causal)

    return Backend(name, backward, arrange=arrange)


def _cudnn_saved(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, causal: bool
) -> tuple[Any, ...]:
    out, lse, lengths_q, lengths_k, most_q, most_k, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal
    )
    saved = (_laid_out_like(dout, out), q, k, v, out, lse, seed, offset, None)
    return *saved, lengths_q, lengths_k, most_q, most_k, 0.0, causal


def _flash_saved(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, causal: bool
) -> tuple[Any, ...]:
    out, lse, *lengths, seed, offset, _ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return _laid_out_like(dout, out), q, k, v, out, lse, *lengths, 0.0, causal, seed, offset


def _efficient_saved(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, causal: bool
) -> tuple[Any, ...]:
    out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
    wanted = [True, True, True, False]  # gradients of q, k and v, none of a bias
    return _laid_out_like(dout, out), q, k, v, None, out, lse, seed, offset, 0.0, wanted, causal


def _laid_out_like(dout: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """dout with out's strides: with others, cuDNN's backward would copy it in each call."""
    return torch.empty_like(out).copy_(dout)


# What the backward of each of SDPA's backends takes, and that backward.
SDPA_BACKWARD: dict[str, tuple[Callable[..., tuple[Any, ...]], Function]] = {
    "cudnn": (_cudnn_saved, aten._scaled_dot_product_cudnn_attention_backward.default),
    "flash": (_flash_saved, aten._scaled_dot_product_flash_attention_backward.default),
    "efficient": (_efficient_saved, aten._scaled_dot_product_efficient_attention_backward.default),
}


def needs_flash_operator(name: str, workload: Workload) -> bool:
    """Whether PyTorch's FlashAttention-2 has the problem, and SDPA does not."""
    return name == "flash" and bool(workload.window or workload.alibi or workload.lengths)


def flash_operator(workload: Workload, device: torch.device) -> Backend:
    """FlashAttention-2 with a window, ALiBi or packed sequences: what `torch.nn.attention.varlen.varlen_attn` calls."""
    compute = _flash_forward(workload, device)
    return Backend("flash", compute, arrange=heads_after_length, restore=heads_before_length)


def flash_operator_backward(workload: Workload, device: torch.device) -> Backend:
    refuse(workload, "the backward of PyTorch's FlashAttention-2", "alibi")
    compute = _flash_forward(workload, device)
    *lengths, longest_q, longest_k = _flash_lengths(workload, device)
    left, right = window_limits(workload)

    def arrange(inputs: Inputs) -> tuple[Any, ...]:
        q, k, v, dout = heads_after_length(inputs)
        out, lse, state, unused, _ = compute(q, k, v)
        rest = (*lengths, longest_q, longest_k, 0.0, workload.is_causal, state, unused)
        return dout, q, k, v, out, lse, *rest

    call = functools.partial(aten._flash_attention_backward.default, window_size_left=left, window_size_right=right)
    return Backend("flash", call, arrange=arrange, restore=heads_before_length)


def _flash_lengths(workload: Workload, device: torch.device) -> tuple[Any, ...]:
    """cum_seq_q, cum_seq_k, max_q and max_k, as the operators take them."""
    if not workload.lengths:
        return None, None, workload.N, workload.M
    offsets = workload.make_offsets(device)
    return offsets, offsets, workload.N, workload.M


def _flash_forward(workload: Workload, device: torch.device) -> Function:
    """From q, k and v, (B, N, H, D) or packed, to out, lse, the generator's state, an unused tensor and a mask."""
    refuse(workload, "PyTorch's FlashAttention-2", "softcap", "sinks")
    refuse_float8(workload, "PyTorch's FlashAttention-2")
    require_bottom_right(workload, "FlashAttention-2")
    left, right = window_limits(workload)
    options: dict[str, Any] = {"window_size_left": left, "window_size_right": right}
    if workload.alibi:
        options["alibi_slopes"] = workload.make_slopes(device)
    rest = (*_flash_lengths(workload, device), 0.0, workload.is_causal, False)
    return lambda q, k, v: aten._flash_attention_forward.default(q, k, v, *rest, **options)

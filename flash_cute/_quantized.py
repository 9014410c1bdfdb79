"""Attention of 16-bit tensors that are quantised to float8 first: `attention(..., quantize="fp8")`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _fp8
from .quantize import quantize_fp8

__all__ = ["attend"]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[Any, ...],
    fp8: tuple[Any, ...],
    quantize: Any,
    causal: Any,
    scale: Any,
    window: Any,
    softcap: Any,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    return_lse: Any,
    deterministic: Any,
    backend: Any,
    accumulate: Any,
) -> Any:
    """As `_fp8.attend`, of tensors that are not float8; out has q's dtype unless the call names another."""
    if quantize != "fp8":
        raise ValueError(f"flash_cute: quantize: expected None or 'fp8', got {quantize!r}")
    descale_q, descale_k, descale_v, out_dtype, descale_out = fp8
    named = {"descale_q": descale_q, "descale_k": descale_k, "descale_v": descale_v}
    for name, value in named.items():
        if value is not None:
            raise ValueError(f"flash_cute: {name}: expected None with quantize='fp8', which finds it, got one")
    if torch.is_grad_enabled():
        _fp8.refuse_gradients(q, k, v, sinks, alibi_slopes, descale_out)
    smooth_k = softcap is None and sinks is None  # else the result would change, see quantize_fp8
    offsets = {}
    if lengths:
        offsets = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), lengths, strict=False))
    q8, k8, v8, descales = quantize_fp8(q, k, v, smooth_k=smooth_k, **offsets)
    options = (descales.q, descales.k, descales.v, q.dtype if out_dtype is None else out_dtype, descale_out)
    score = (causal, scale, window, softcap, sinks, alibi_slopes)
    result = _fp8.attend(q8, k8, v8, lengths, options, *score, return_lse, deterministic, backend, accumulate)
    if not return_lse or descales.lse_shift is None:
        return result
    out, lse = result
    return out, lse.add(descales.lse_shift, alpha=q.shape[-1] ** -0.5 if scale is None else scale)

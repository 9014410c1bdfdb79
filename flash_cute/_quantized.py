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
    offsets: dict[str, Any] = {}
    splits = bool(lengths) and _has_used_lengths(*lengths[:4])
    if splits:  # what a sequence does not use must not count for its factors and its mean
        offsets = {"cu_seqlens_q": _split(lengths[0], lengths[2], q), "cu_seqlens_k": _split(lengths[1], lengths[3], k)}
    elif lengths:
        offsets = {"cu_seqlens_q": lengths[0], "cu_seqlens_k": lengths[1]}
    q8, k8, v8, descales = quantize_fp8(q, k, v, smooth_k=smooth_k, **offsets)
    if splits:
        descales = descales._replace(q=descales.q[::2], k=descales.k[::2], v=descales.v[::2])
    options = (descales.q, descales.k, descales.v, q.dtype if out_dtype is None else out_dtype, descale_out)
    score = (causal, scale, window, softcap, sinks, alibi_slopes)
    result = _fp8.attend(q8, k8, v8, lengths, options, *score, return_lse, deterministic, backend, accumulate)
    if not return_lse or descales.lse_shift is None:
        return result
    out, lse = result
    shifted = lse.add(descales.lse_shift, alpha=q.shape[-1] ** -0.5 if scale is None else scale)
    return out, torch.where(lse == -torch.inf, lse, shifted) if splits else shifted  # an unused row may be NaN


def _has_used_lengths(cu_seqlens_q: Any, cu_seqlens_k: Any, seqused_q: Any, seqused_k: Any) -> bool:
    """Whether there are any, well formed; else the operator refuses them."""
    given = [(cu_seqlens_q, 0), (cu_seqlens_k, 0), (seqused_q, 1), (seqused_k, 1)]
    tensors = [(x, less) for x, less in given if less == 0 or x is not None]
    if len(tensors) == 2 or not all(isinstance(x, Tensor) and x.dtype == torch.int32 for x, _ in tensors):
        return False
    size = cu_seqlens_q.numel()
    return all(x.shape == (size - less,) and x.device == cu_seqlens_q.device for x, less in tensors)


def _split(cu_seqlens: Tensor, seqused: Tensor | None, x: Tensor) -> Tensor:
    """Offsets of twice as many sequences: what each one uses, and the rest. Clamped as `varlen_attention` does."""
    ascending = cu_seqlens.clamp(0, x.shape[0]).cummax(0).values
    lengths = ascending.diff()
    used = lengths if seqused is None else seqused.clamp(min=0).minimum(lengths)
    begins = torch.stack((ascending[:-1], ascending[:-1] + used), 1).flatten()
    return torch.cat((begins, ascending[-1:])).int()

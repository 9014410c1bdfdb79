"""Quantisation of q, k and v to float8, with the descales that attention takes."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from . import _ops
from ._refusals import check_flag, check_longest, check_seed, raise_refusal

__all__ = ["Fp8Descales", "quantize_fp8"]


class Fp8Descales(NamedTuple):
    """What float8 values are to be multiplied by, float32, and what k's mean did to the LSE.

    `attention(q8, k8, v8, descale_q=d.q, descale_k=d.k, descale_v=d.v)` takes the first three. Its LSE is that of k
    less its mean: that of k is `lse + scale * d.lse_shift`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    lse_shift: Tensor | None


def quantize_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    per: Literal["head", "block"] = "head",
    smooth_k: bool = True,
    rotate: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Fp8Descales]:
    """q, k and v as float8, each value rounded to the nearest of `x / descale`, ties to even.

    A descale is the largest |x| that it serves over the dtype's largest finite value (448, e5m2: 57344); 1 where all x
    are 0, and at least 2^-126. So no finite value saturates. Infinities saturate and NaN stays NaN; neither counts for
    a descale, and for a mean they count as 0. The descales stay on the device: nothing waits for it, the same inputs
    give the same bits, and a CUDA graph may be replayed with other values and lengths.

    Args:
        q: `(B, Hq, Nq, D)` float16, bfloat16 or float32, any strides; D a multiple of 16, at most 256. What cannot be
            read as 16-byte vectors is copied once.
        k: `(B, Hkv, Nk, D)`, Hkv divides Hq.
        v: `(B, Hkv, Nk, Dv)`.
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.
        per: what has a descale of its own. `"head"`: the heads of a KV head, as FlashAttention-3 has it. `"block"`: 128
            rows of a head of q and k, and a channel of v, which err less where rows differ in size.
        smooth_k: subtract from k its mean over the keys, for each KV head and channel. It does not change the softmax,
            and k errs less where channels have an offset, as they do in trained models. The LSE changes by
            `scale * lse_shift`. With a softcap, or with sinks, which are compared to the scores, it does change the
            result: pass False there.
        rotate: multiply q and k by the same random orthogonal matrix along D, which leaves their products as they are
            and spreads outliers over the channels: random signs, then a Hadamard transform. Where D is no power of two,
            its parts of the largest power of two that divides it are rotated apart: 3 of 32 for 96, 3 of 64 for 192.
            A value that is not finite makes its part of the row so.
        cu_seqlens_q, cu_seqlens_k: `(B + 1,)` int32: packed sequences, as `varlen_attention` takes them. q is
            `(Tq, Hq, D)` then, k `(Tk, Hkv, D)` and v `(Tk, Hkv, Dv)`; means, descales and blocks are those of a
            sequence, and rows in none become 0.
        max_seqlen_q, max_seqlen_k: the longest sequence's length, with `per="block"`: the number of blocks that there
            are descales for follows it. Rows past it become NaN. `None`: that of all rows.
        seed: of the random signs.

    Returns:
        `(q8, k8, v8, descales)`: float8 of the shapes of q, k and v, laid out like `empty_like` of each if its rows are
        contiguous, else contiguous; and an `Fp8Descales`:
        q: `(B, Hkv)`, or per block `(B, Hq, ceil(Nq / 128))`; packed, Nq is `max_seqlen_q`, or Tq.
        k: `(B, Hkv)`, or per block `(B, Hkv, ceil(Nk / 128))`.
        v: `(B, Hkv)`, or per block `(B, Hkv, Dv)`, by channel.
        lse_shift: `(B, Hq, Nq)`, packed `(Hq, Tq)`: the product of each row of q with the mean of k. `None` without
        smooth_k.

    Raises:
        ValueError: an argument cannot be served, or requires grad: rounding has no gradient.

    Example:
        >>> q, k, v = (torch.randn(2, 4, 300, 64) for _ in range(3))
        >>> q8, k8, v8, descales = quantize_fp8(q, k, v)
        >>> q8.dtype, descales.q.shape, descales.lse_shift.shape
        (torch.float8_e4m3fn, torch.Size([2, 4]), torch.Size([2, 4, 300]))
        >>> bool((q8.float() * descales.q[..., None, None] - q).abs().max() < 0.2)
        True
    """
    _check_arguments(q, k, v, dtype, per, seed)
    smooth_k, rotate = check_flag("smooth_k", smooth_k), check_flag("rotate", rotate)
    check_longest("max_seqlen_q", max_seqlen_q)
    check_longest("max_seqlen_k", max_seqlen_k)
    _check_shapes(q, k, v, cu_seqlens_q, cu_seqlens_k)
    name = str(dtype).removeprefix("torch.")
    of_v = "channel" if per == "block" else per
    heads_kv = k.shape[1]
    signs = seed if rotate else None
    lengths_q, lengths_k = (cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k)
    try:
        k8, of_keys, mean, _ = _ops.quantize_fp8(k, "k", name, per, heads_kv, smooth_k, signs, None, *lengths_k)
        key_mean = mean if smooth_k else None
        q8, of_rows, _, shift = _ops.quantize_fp8(q, "q", name, per, heads_kv, False, signs, key_mean, *lengths_q)
        v8, of_values, _, _ = _ops.quantize_fp8(v, "v", name, of_v, heads_kv, False, None, None, *lengths_k)
    except (RuntimeError, TypeError, ValueError) as error:
        raise_refusal(error, {}, None, None, None, None)
        raise
    return q8, k8, v8, Fp8Descales(of_rows, of_keys, of_values, shift if smooth_k else None)


def _check_arguments(q: Any, k: Any, v: Any, dtype: Any, per: Any, seed: Any) -> None:
    tensors = {"q": q, "k": k, "v": v}
    raise_refusal(ValueError(), tensors, None, None, None, None)  # for what is no strided tensor
    for name, x in tensors.items():
        if torch.is_grad_enabled() and x.requires_grad:
            raise ValueError(
                f"flash_cute: {name}: expected a tensor that does not require grad, since rounding has no gradient "
                f"({name}.detach() does not), got one that does"
            )
    if dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise ValueError(f"flash_cute: dtype: expected torch.float8_e4m3fn or torch.float8_e5m2, got {dtype}")
    if per not in ("head", "block"):
        raise ValueError(f"flash_cute: per: expected 'head' or 'block', got {per!r}")
    check_seed(seed)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> None:
    """What the tensors' operators, which see one of them each, cannot tell; in the words of csrc/api/checks.h."""
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        given, missing = ("q", "k") if cu_seqlens_k is None else ("k", "q")
        raise ValueError(f"flash_cute: cu_seqlens_{missing}: expected offsets beside cu_seqlens_{given}, got None")
    packed = cu_seqlens_q is not None
    if packed:
        offsets = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        raise_refusal(ValueError(), offsets, None, None, None, None)  # for what is no tensor
    dims = 3 if packed else 4
    words = "(rows, heads, head_dim)" if packed else "(batch, heads, length, head_dim)"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != dims:
            raise ValueError(f"flash_cute: {name}: expected {dims} dims {words}, got {x.dim()}: {tuple(x.shape)}")
        if x.device != q.device:
            raise ValueError(f"flash_cute: {name}: expected q's device {q.device}, got {x.device}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"flash_cute: k: expected q's head dim {q.shape[-1]}, got {k.shape[-1]}")
    for name, x in (("k", k), ("v", v)):
        if not packed and x.shape[0] != q.shape[0]:
            raise ValueError(f"flash_cute: {name}: expected q's batch size {q.shape[0]}, got {x.shape[0]}")
    if v.shape[1] != k.shape[1]:
        raise ValueError(f"flash_cute: v: expected as many heads as k, {k.shape[1]}, got {v.shape[1]}")
    of_rows = 0 if packed else 2
    if v.shape[of_rows] != k.shape[of_rows]:
        raise ValueError(f"flash_cute: v: expected k's length {k.shape[of_rows]}, got {v.shape[of_rows]}")
    if cu_seqlens_q is not None and cu_seqlens_k is not None and cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"flash_cute: cu_seqlens_k: expected cu_seqlens_q's shape {tuple(cu_seqlens_q.shape)}, got "
            f"{tuple(cu_seqlens_k.shape)}"
        )

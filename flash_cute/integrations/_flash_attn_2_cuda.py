"""flash-attn's compiled module `flash_attn_2_cuda`, served by flash_cute: what its Python functions are written on.

Its functions have no autograd, take every argument by position, and return lists. xformers finds the module as
`flash_attn.flash_attn_interface.flash_attn_gpu`, other packages import it by its name.

* q `(B, N, Hq, D)`, k `(B, Nk, Hkv, D)`, v `(B, Nk, Hkv, Dv)`, read in place; packed `(Tq, Hq, D)` and likewise.
* A forward returns `[out, softmax_lse, p, rng_state]`: softmax_lse `(B, Hq, N)`, packed `(Hq, Tq)`, float32, natural
  log; p `(0,)` and rng_state `(2,)` int64, which only dropout fills. Where `out` is given the result is written there.
* A backward returns `[dq, dk, dv, softmax_d]`: where dq, dk or dv is given the gradient is written there. softmax_d is
  the float32 sum of `dout * out` over each row, `(B, Hq, N)` with N rounded up to 128; packed `(Hq, Tq + 128 * batch)`,
  sequence b's rows beginning at `cu_seqlens_q[b] + 128 * b`; 0 elsewhere.
* `softmax_scale=None` is `1 / sqrt(D)`; windows, softcap and ALiBi as in `flash_cute.integrations.flash_attn`.
* `gen` and `rng_state` are dropout's. `zero_tensors` asks for zeros in rows of no sequence, which are 0 always.
* `block_table` makes k and v pages, `(pages, page, Hkv, D)`, in `varlen_fwd` and `fwd_kvcache`.
* ValueError, in flash_cute's words, for dropout, `return_softmax`, `leftpad_k` of `varlen_fwd`, and for buffers whose
  shape or dtype is not the result's.
"""

from typing import Any

import torch
from torch import Tensor

from .. import bwd as attention_bwd
from .. import varlen_bwd as attention_varlen_bwd
from . import _flash_cache, _flash_options
from ._flash_options import UNLIMITED

__all__ = ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]

_ROWS = 128  # softmax_d's rows are a multiple of them


# The argument lists are flash-attn's, in its order.
def fwd(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, alibi_slopes: Tensor | None,
    p_dropout: float, softmax_scale: float | None, is_causal: bool, window_size_left: int, window_size_right: int,
    softcap: float, return_softmax: bool, gen: Any,
) -> list[Tensor]:  # fmt: skip
    """`[out, softmax_lse, p, rng_state]` of `(B, N, H, D)` tensors: see the module."""
    _refuse_dropout(p_dropout, return_softmax)
    window = UNLIMITED if window_size_left == window_size_right == -1 else (window_size_left, window_size_right)
    score = (softmax_scale, is_causal, window, softcap, alibi_slopes, False)
    result, lse = _flash_options.dense(q, k, v, score, True)
    return _forward_results(result, lse, out)


def varlen_fwd(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor | None,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, seqused_k: Tensor | None, leftpad_k: Tensor | None,
    block_table: Tensor | None, alibi_slopes: Tensor | None, max_seqlen_q: int, max_seqlen_k: int,
    p_dropout: float, softmax_scale: float | None, zero_tensors: bool, is_causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, return_softmax: bool, gen: Any,
) -> list[Tensor]:  # fmt: skip
    """`[out, softmax_lse, p, rng_state]` of packed sequences: see the module."""
    _refuse_dropout(p_dropout, return_softmax)
    if leftpad_k is not None:
        _flash_options.refuse(leftpad_k=leftpad_k)
    window = UNLIMITED if window_size_left == window_size_right == -1 else (window_size_left, window_size_right)
    score = (softmax_scale, is_causal, window, softcap, alibi_slopes, False)
    if block_table is None:
        lengths = (cu_seqlens_q, cu_seqlens_k, None, seqused_k, max_seqlen_q, max_seqlen_k)
        result, lse = _flash_options.packed(q, k, v, lengths, score, True)
    else:
        used = _flash_cache.lengths_of(cu_seqlens_k) if seqused_k is None else seqused_k
        result, lse = _flash_cache.attend(q, k, v, None, None, used, block_table, cu_seqlens_q, score, True)
    return _forward_results(result, lse, out)


def bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, alibi_slopes: Tensor | None,
    p_dropout: float, softmax_scale: float | None, is_causal: bool, window_size_left: int, window_size_right: int,
    softcap: float, deterministic: bool, gen: Any, rng_state: Any,
) -> list[Tensor]:  # fmt: skip
    """`[dq, dk, dv, softmax_d]` of `(B, N, H, D)` tensors: see the module."""
    _refuse_dropout(p_dropout, False)
    _check_dims({"dout": dout, "q": q, "k": k, "v": v, "out": out}, 4, "(B, N, H, D)")
    _check_buffers((dq, dk, dv), (q, k, v))
    window = (window_size_left, window_size_right)
    score = _score(softmax_scale, window, softcap, alibi_slopes, deterministic)
    dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    gradients = attention_bwd(dout, q, k, v, out, softmax_lse, is_causal, **score)
    results = _into((dq, dk, dv), tuple(x.transpose(1, 2) for x in gradients))
    sums = _row_sums(dout, out)  # (B, Hq, N)
    return [*results, torch.nn.functional.pad(sums, (0, -sums.shape[2] % _ROWS))]


def varlen_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, alibi_slopes: Tensor | None, max_seqlen_q: int, max_seqlen_k: int,
    p_dropout: float, softmax_scale: float | None, zero_tensors: bool, is_causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, deterministic: bool, gen: Any, rng_state: Any,
) -> list[Tensor]:  # fmt: skip
    """`[dq, dk, dv, softmax_d]` of packed sequences: see the module. Rows and keys of no sequence have gradients 0."""
    _refuse_dropout(p_dropout, False)
    _check_dims({"dout": dout, "q": q, "k": k, "v": v, "out": out}, 3, "(T, H, D)")
    _check_buffers((dq, dk, dv), (q, k, v))
    window = (window_size_left, window_size_right)
    score = _score(softmax_scale, window, softcap, alibi_slopes, deterministic)
    given = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    longest = {name: _flash_options.hint(name, x) for name, x in given.items()}
    gradients = attention_varlen_bwd(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, is_causal, **longest, **score
    )
    results = _into((dq, dk, dv), gradients)
    sums = _row_sums(dout, out)  # (Tq, Hq)
    rows = torch.arange(sums.shape[0], device=q.device, dtype=torch.int32)
    sequence = torch.searchsorted(cu_seqlens_q, rows, right=True) - 1
    batch = cu_seqlens_q.shape[0] - 1
    softmax_d = sums.new_zeros(sums.shape[0] + _ROWS * batch, sums.shape[1])
    # Rows of no sequence have no place of their own: they add the 0 that they are multiplied to.
    used = (sequence >= 0) & (sequence < batch)
    softmax_d.index_add_(0, rows + _ROWS * sequence.clamp(0, max(batch - 1, 0)), torch.where(used[:, None], sums, 0))
    return [*results, softmax_d.transpose(0, 1)]


def fwd_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None, seqlens_k: Tensor | None,
    rotary_cos: Tensor | None, rotary_sin: Tensor | None, cache_batch_idx: Tensor | None, leftpad_k: Tensor | None,
    block_table: Tensor | None, alibi_slopes: Tensor | None, out: Tensor | None, softmax_scale: float | None,
    is_causal: bool, window_size_left: int, window_size_right: int, softcap: float, is_rotary_interleaved: bool,
    num_splits: int,
) -> list[Tensor]:  # fmt: skip
    """`[out, softmax_lse]` of a KV cache: see `flash_cute.integrations.flash_attn.flash_attn_with_kvcache`."""
    window = UNLIMITED if window_size_left == window_size_right == -1 else (window_size_left, window_size_right)
    score = (softmax_scale, is_causal, window, softcap, alibi_slopes, False)
    place = _flash_cache.Place(seqlens_k, block_table, cache_batch_idx, leftpad_k)
    rotary = _flash_cache.Rotary(rotary_cos, rotary_sin, is_rotary_interleaved)
    keys = _flash_cache.Keys(k_cache, v_cache, k, v)
    result, lse = _flash_cache.with_kvcache(q, keys, place, rotary, score, True)
    return _forward_results(result, lse, out)[:2]


def _score(
    softmax_scale: float | None, window: Any, softcap: float, alibi_slopes: Tensor | None, deterministic: bool
) -> dict[str, Any]:
    """As flash_cute's backwards take them."""
    score = {"scale": softmax_scale, "window": _flash_options.window(window), "softcap": _flash_options.cap_of(softcap)}
    return {**score, "alibi_slopes": alibi_slopes, "deterministic": deterministic or None}


def _refuse_dropout(p_dropout: float, return_softmax: bool) -> None:
    if p_dropout != 0 or return_softmax:
        _flash_options.refuse(dropout_p=p_dropout, return_softmax=return_softmax)


def _forward_results(result: Tensor, lse: Tensor | None, out: Tensor | None) -> list[Tensor]:
    assert lse is not None  # it was asked for
    if out is not None:
        _check_buffer("out", out, result.shape, result.dtype)
        result = out.copy_(result)
    rng_state = torch.empty(2, dtype=torch.int64, device=result.device)
    return [result, lse, result.new_empty(0), rng_state]


def _check_dims(tensors: dict[str, Tensor], dims: int, form: str) -> None:
    for name, x in tensors.items():
        if not isinstance(x, Tensor) or x.dim() != dims:
            given = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"flash_cute: {name}: expected {dims} dims, {form}, got {given}")


def _check_buffers(buffers: tuple[Tensor | None, ...], tensors: tuple[Tensor, ...]) -> None:
    for name, buffer, x in zip(("dq", "dk", "dv"), buffers, tensors, strict=True):
        if buffer is not None:
            _check_buffer(name, buffer, x.shape, x.dtype)


def _check_buffer(name: str, buffer: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    """A result is copied to a buffer, and copying would broadcast and cast."""
    if not isinstance(buffer, Tensor) or buffer.shape != shape or buffer.dtype != dtype:
        given = f"{tuple(buffer.shape)} {buffer.dtype}" if isinstance(buffer, Tensor) else type(buffer).__name__
        raise ValueError(f"flash_cute: {name}: expected a tensor {tuple(shape)} {dtype} to write to, got {given}")


def _into(buffers: tuple[Tensor | None, ...], gradients: tuple[Tensor, ...]) -> list[Tensor]:
    """The gradients, in the buffers that are given."""
    return [x if buffer is None else buffer.copy_(x) for buffer, x in zip(buffers, gradients, strict=True)]


def _row_sums(dout: Tensor, out: Tensor) -> Tensor:
    """The sum of `dout * out` over the last dim, float32 (float64 for float64 inputs)."""
    wide = torch.promote_types(dout.dtype, torch.float32)
    return (dout.to(wide) * out).sum(-1)

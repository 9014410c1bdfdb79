"""FlashAttention-3's functions (its module `flash_attn_interface`), served by flash_cute.

    from flash_cute.integrations.flash_attn_interface import flash_attn_func

They are those of `flash_cute.integrations.flash_attn`, which says what they have in common, with FlashAttention-3's
arguments: no dropout and no ALiBi, and with `return_attn_probs=True` they return `(out, softmax_lse)`.

* `num_splits`, `pack_gqa`, `scheduler_metadata` and the longest lengths choose how FlashAttention-3 computes, not what:
  they are accepted, and flash_cute chooses by itself (`flash_cute.explain` says what).
* `qv`, `q_descale`, `k_descale`, `v_descale`, `attention_chunk` and `sm_margin` other than their defaults raise
  ValueError: flash_cute does not have them. `flash_attn_with_kvcache` takes `qv` of MLA's caches, and the descales of
  float8 caches.
"""

from typing import Any, TypeAlias

from torch import Tensor

from . import _flash_cache, _flash_options
from ._flash_options import UNLIMITED

__all__ = ["flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

Results: TypeAlias = Tensor | tuple[Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = UNLIMITED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Results:
    """Attention of `(B, N, H, D)` tensors.

    Args:
        q, k, v: `(B, N, Hq, D)`, `(B, Nk, Hkv, D)` and `(B, Nk, Hkv, Dv)`, of one dtype and device.
        the others: see the module.

    Returns:
        out `(B, N, Hq, Dv)`, or `(out, softmax_lse)`, softmax_lse `(B, Hq, N)` float32.

    Raises:
        ValueError, NotImplementedError: as `flash_cute.attention`; also for what flash_cute does not have.

    Example:
        >>> q = torch.randn(2, 16, 8, 192)
        >>> k, v = torch.randn(2, 16, 8, 192), torch.randn(2, 16, 8, 128)
        >>> out, lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        >>> out.shape, lse.shape
        (torch.Size([2, 16, 8, 128]), torch.Size([2, 8, 16]))
    """
    _refuse(qv, q_descale, k_descale, v_descale, attention_chunk, sm_margin)
    score = (softmax_scale, causal, window_size, softcap, None, deterministic)
    out, lse = _flash_options.dense(q, k, v, score, return_attn_probs)
    return out if lse is None else (out, lse)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = UNLIMITED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Results:
    """`flash_attn_func` of q, k and v in one tensor, which is read in place.

    Args:
        qkv: `(B, N, 3, H, D)`, or, with `num_heads_q`, `(B, N, Hq + 2 * Hkv, D)`: q's heads, k's, then v's.
        num_heads_q: Hq, of the second form.
        the others: see the module.

    Returns, raises: as `flash_attn_func`.

    Example:
        >>> flash_attn_qkvpacked_func(torch.randn(2, 16, 8 + 2 + 2, 64), num_heads_q=8).shape
        torch.Size([2, 16, 8, 64])
    """
    _refuse(None, q_descale, k_descale, v_descale, attention_chunk, sm_margin)
    if not isinstance(qkv, Tensor) or qkv.dim() != 4:
        num_heads_q = None  # of the second form alone
    elif not num_heads_q:
        heads = qkv.shape[2]
        raise ValueError(
            f"flash_cute: num_heads_q: expected Hq of the Hq + 2 * Hkv = {heads} heads of qkv, got {num_heads_q}"
        )
    score = (softmax_scale, causal, window_size, softcap, None, deterministic)
    out, lse = _flash_options.dense_stacked(None, qkv, num_heads_q, score, return_attn_probs)
    return out if lse is None else (out, lse)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = UNLIMITED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Results:
    """Attention of sequences packed into one tensor, each to itself alone.

    Args:
        q, k, v: `(Tq, Hq, D)`, `(Tk, Hkv, D)` and `(Tk, Hkv, Dv)`, the rows of all sequences.
        cu_seqlens_q, cu_seqlens_k: `(batch + 1,)` int32, on q's device: where each sequence begins and the last ends.
        max_seqlen_q, max_seqlen_k: the longest sequences: hints, of which a wrong one costs speed alone.
        seqused_q, seqused_k: `(batch,)` int32: how many of each sequence's rows and keys are used. None: all.
        the others: see the module.

    Returns:
        out `(Tq, Hq, Dv)`, or `(out, softmax_lse)`, softmax_lse `(Hq, Tq)` float32.

    Raises:
        ValueError, NotImplementedError: as `flash_cute.varlen_attention`; also for what flash_cute does not have.

    Example:
        >>> q, k, v = (torch.randn(10, 4, 64) for _ in range(3))
        >>> offsets = torch.tensor([0, 3, 10], dtype=torch.int32)
        >>> flash_attn_varlen_func(q, k, v, offsets, offsets, 7, 7, causal=True).shape
        torch.Size([10, 4, 64])
    """
    _refuse(qv, q_descale, k_descale, v_descale, attention_chunk, sm_margin)
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    score = (softmax_scale, causal, window_size, softcap, None, deterministic)
    out, lse = _flash_options.packed(q, k, v, lengths, score, return_attn_probs)
    return out if lse is None else (out, lse)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNLIMITED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Results:
    """Attention to a KV cache, to which k and v are appended first.

    Args:
        q: `(B, N, Hq, D)`; with `cu_seqlens_q` `(B + 1,)` int32 `(Tq, Hq, D)`, the rows of all sequences.
        k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, rotary_cos, rotary_sin, rotary_interleaved: see
            `flash_cute.integrations.flash_attn.flash_attn_with_kvcache`, whose `block_table` is `page_table` here.
        k, v: `(B, new, Hkv, D)` and `(B, new, Hkv, Dv)`; with `cu_seqlens_k_new` `(B + 1,)` int32 `(T, Hkv, D)` and
            `(T, Hkv, Dv)`, the new keys of all sequences.
        qv: `(B, N, Hq, Dv)` or `(Tq, Hq, Dv)`: a score gains `qv . v`. k_cache and v_cache have to be neighbours in the
            rows of one tensor, as MLA's caches are.
        rotary_seqlens: `(B,)` int32, the position of the first new key, if it is not `cache_seqlens`.
        k_descale, v_descale: `(B, Hkv)` float32, of float8 caches, beside q in 16 bits. What is appended is divided by
            them.
        the others: see the module.

    Returns:
        out `(B, N, Hq, Dv)` or `(Tq, Hq, Dv)`, or with `return_softmax_lse` `(out, softmax_lse)`, softmax_lse
        `(B, Hq, N)` or `(Hq, Tq)` float32.

    Raises:
        ValueError, NotImplementedError: as there; also for `q_descale`, `attention_chunk`, `sm_margin`, and a `qv` of
            other caches.

    Example:
        >>> pages = torch.zeros(6, 16, 1, 64 + 32)  # MLA's: 64 dims of the latent, 32 of positions
        >>> q, qv, new = torch.randn(1, 1, 4, 32), torch.randn(1, 1, 4, 64), torch.randn(1, 1, 1, 96)
        >>> table, used = torch.tensor([[5, 2]], dtype=torch.int32), torch.tensor([17], dtype=torch.int32)
        >>> cache, new = (pages[..., 64:], pages[..., :64]), (new[..., 64:], new[..., :64])
        >>> flash_attn_with_kvcache(q, *cache, *new, qv, cache_seqlens=used, page_table=table, causal=True).shape
        torch.Size([1, 1, 4, 64])
    """
    if q_descale is not None or attention_chunk != 0 or sm_margin != 0:
        _flash_options.refuse(q_descale=q_descale, attention_chunk=attention_chunk, sm_margin=sm_margin)
    score = (softmax_scale, causal, window_size, softcap, None, False)
    simple = rotary_cos is None and rotary_sin is None and cache_batch_idx is None and cache_leftpad is None
    if simple and qv is None and (k is None or cu_seqlens_k_new is cu_seqlens_q):
        out, lse = _flash_cache.attend(
            q, k_cache, v_cache, k, v, cache_seqlens, page_table, cu_seqlens_q, score, return_softmax_lse, k_descale,
            v_descale,
        )  # fmt: skip
    else:
        place = _flash_cache.Place(
            cache_seqlens, page_table, cache_batch_idx, cache_leftpad, cu_seqlens_q, cu_seqlens_k_new
        )
        rotary = _flash_cache.Rotary(rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens)
        keys = _flash_cache.Keys(k_cache, v_cache, k, v)
        descales = (k_descale, v_descale)
        out, lse = _flash_cache.with_kvcache(q, keys, place, rotary, score, return_softmax_lse, qv, descales)
    return out if lse is None else (out, lse)


def _refuse(qv: Any, q_descale: Any, k_descale: Any, v_descale: Any, attention_chunk: Any, sm_margin: Any) -> None:
    given = qv is not None or q_descale is not None or k_descale is not None or v_descale is not None
    if not given and attention_chunk == 0 and sm_margin == 0:
        return
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    _flash_options.refuse(qv=qv, **descales, attention_chunk=attention_chunk, sm_margin=sm_margin)

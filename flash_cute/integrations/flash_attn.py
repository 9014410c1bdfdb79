"""flash-attn's functions, served by flash_cute: signatures, layouts, defaults and return values of flash-attn 2.8.

    from flash_cute.integrations.flash_attn import flash_attn_func

in place of `from flash_attn import flash_attn_func`; or, once per process and before the code that wants flash-attn,

    import flash_cute.integrations.flash_attn
    flash_cute.integrations.flash_attn.install()

after which `import flash_attn` and `import flash_attn_interface` (FlashAttention-3's module) find flash_cute; so do
what other packages import of flash-attn: `flash_attn.flash_attn_interface._flash_attn_forward` and its siblings,
`flash_attn.bert_padding`, `flash_attn.layers.rotary`. The method and what it promises are those of
`flash_cute.attention` (FlashAttention-2, arXiv 2307.08691).

What all functions have in common:

* q `(B, N, Hq, D)`, k `(B, Nk, Hkv, D)`, v `(B, Nk, Hkv, Dv)`, read in place; packed q `(Tq, Hq, D)`, k and v likewise,
  with `cu_seqlens` `(batch + 1,)` int32. float16 or bfloat16, on the CPU also float32 and float64. Hkv divides Hq.
* `causal` is aligned to the bottom right: row i sees the keys j <= i + Nk - Nq. `window_size=(left, right)`: from
  i + Nk - Nq - left to i + Nk - Nq + right, -1 is no limit; UNLIMITED is (-1, -1). Rows that see no key are 0.
* `softmax_scale=None` is `1 / sqrt(D)`; `softcap=0.0` is none; `alibi_slopes` `(Hq,)` or `(B, Hq)`, float32, subtracts
  `slope * |i + Nk - Nq - j|`.
* They return out, laid out as q is, or with `return_attn_probs=True` `(out, softmax_lse, None)`: `(B, Hq, N)`, packed
  `(Hq, Tq)`, float32, natural log, -inf for a row that sees no key. Gradients flow through it, as they do not in
  flash-attn. In place of the third, flash-attn's S_dmask, which only dropout fills, is None.
* They raise ValueError, in flash_cute's words, for `dropout_p` other than 0 and whatever else cannot be served.
* `flash_attn_with_kvcache` and `block_table` are for inference: `flash_cute.attention_with_kvcache`, no gradients.
"""

from typing import TypeAlias

from torch import Tensor

from . import _flash_cache, _flash_options
from ._flash_attn_modules import install, uninstall
from ._flash_options import UNLIMITED

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
    "uninstall",
]

Results: TypeAlias = Tensor | tuple[Tensor, Tensor, None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """Attention of `(B, N, H, D)` tensors.

    Args:
        q, k, v: `(B, N, Hq, D)`, `(B, Nk, Hkv, D)` and `(B, Nk, Hkv, Dv)`, of one dtype and device.
        deterministic: whether the backward must give the same bits in every run.
        the others: see the module.

    Returns:
        out `(B, N, Hq, Dv)`, or `(out, softmax_lse, None)`.

    Raises:
        ValueError, NotImplementedError: as `flash_cute.attention`; also for dropout.

    Example:
        >>> q = torch.randn(2, 128, 8, 64)
        >>> k, v = torch.randn(2, 128, 2, 64), torch.randn(2, 128, 2, 64)
        >>> out, lse, _ = flash_attn_func(q, k, v, causal=True, window_size=(31, 0), return_attn_probs=True)
        >>> out.shape, lse.shape
        (torch.Size([2, 128, 8, 64]), torch.Size([2, 8, 128]))
    """
    if dropout_p != 0:
        _flash_options.refuse(dropout_p=dropout_p)
    score = (softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    out, lse = _flash_options.dense(q, k, v, score, return_attn_probs)
    return out if lse is None else (out, lse, None)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """`flash_attn_func` of k and v in one tensor, kv `(B, Nk, 2, Hkv, D)`, which is read in place.

    Returns, raises: as `flash_attn_func`. autograd stacks the gradients of k and v into kv's.

    Example:
        >>> q, kv = torch.randn(2, 16, 8, 64), torch.randn(2, 32, 2, 2, 64)
        >>> flash_attn_kvpacked_func(q, kv).shape
        torch.Size([2, 16, 8, 64])
    """
    if dropout_p != 0:
        _flash_options.refuse(dropout_p=dropout_p)
    score = (softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    out, lse = _flash_options.dense_stacked(q, kv, None, score, return_attn_probs)
    return out if lse is None else (out, lse, None)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """`flash_attn_func` of q, k and v in one tensor, qkv `(B, N, 3, H, D)`, which is read in place.

    Returns, raises: as `flash_attn_func`. autograd stacks the three gradients into qkv's.

    Example:
        >>> flash_attn_qkvpacked_func(torch.randn(2, 16, 3, 8, 64), causal=True).shape
        torch.Size([2, 16, 8, 64])
    """
    if dropout_p != 0:
        _flash_options.refuse(dropout_p=dropout_p)
    score = (softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    out, lse = _flash_options.dense_stacked(None, qkv, None, score, return_attn_probs)
    return out if lse is None else (out, lse, None)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Results:
    """Attention of sequences packed into one tensor, each to itself alone.

    Args:
        q, k, v: `(Tq, Hq, D)`, `(Tk, Hkv, D)` and `(Tk, Hkv, Dv)`, the rows of all sequences.
        cu_seqlens_q, cu_seqlens_k: `(batch + 1,)` int32, on q's device: where each sequence begins and the last ends.
        max_seqlen_q, max_seqlen_k: the longest sequences: hints, of which a wrong one costs speed alone.
        block_table: None; or `(batch, pages of a sequence)` int32: k and v are pages then, `(pages, page, Hkv, D)` and
            `(pages, page, Hkv, Dv)`, of any page size, and `cu_seqlens_k` says only how long sequences are. There
            are no gradients then: a tensor that requires one raises.
        the others: see the module.

    Returns:
        out `(Tq, Hq, Dv)`, or `(out, softmax_lse, None)`, softmax_lse `(Hq, Tq)`.

    Raises:
        ValueError, NotImplementedError: as `flash_cute.varlen_attention`, or with a block table as
            `flash_cute.attention_with_kvcache`; also for dropout.

    Example:
        >>> q, k, v = (torch.randn(10, 4, 64) for _ in range(3))
        >>> offsets = torch.tensor([0, 3, 10], dtype=torch.int32)  # two sequences, of 3 and 7 rows
        >>> flash_attn_varlen_func(q, k, v, offsets, offsets, 7, 7, causal=True).shape
        torch.Size([10, 4, 64])
    """
    if dropout_p != 0:
        _flash_options.refuse(dropout_p=dropout_p)
    score = (softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    if block_table is None:
        lengths = (cu_seqlens_q, cu_seqlens_k, None, None, max_seqlen_q, max_seqlen_k)
        out, lse = _flash_options.packed(q, k, v, lengths, score, return_attn_probs)
    else:
        used = _flash_cache.lengths_of(cu_seqlens_k)
        out, lse = _flash_cache.attend(q, k, v, None, None, used, block_table, cu_seqlens_q, score, return_attn_probs)
    return out if lse is None else (out, lse, None)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """`flash_attn_varlen_func` of k and v in one tensor, kv `(Tk, 2, Hkv, D)`, which is read in place.

    Returns, raises: as `flash_attn_varlen_func`.

    Example:
        >>> q, kv = torch.randn(10, 4, 64), torch.randn(10, 2, 2, 64)
        >>> offsets = torch.tensor([0, 3, 10], dtype=torch.int32)
        >>> flash_attn_varlen_kvpacked_func(q, kv, offsets, offsets, 7, 7).shape
        torch.Size([10, 4, 64])
    """
    if dropout_p != 0:
        _flash_options.refuse(dropout_p=dropout_p)
    lengths = (cu_seqlens_q, cu_seqlens_k, None, None, max_seqlen_q, max_seqlen_k)
    score = (softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    out, lse = _flash_options.packed_stacked(q, kv, lengths, score, return_attn_probs)
    return out if lse is None else (out, lse, None)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """`flash_attn_varlen_func` of q, k and v in one tensor, qkv `(T, 3, H, D)`, which is read in place.

    Returns, raises: as `flash_attn_varlen_func`.

    Example:
        >>> offsets = torch.tensor([0, 3, 10], dtype=torch.int32)
        >>> flash_attn_varlen_qkvpacked_func(torch.randn(10, 3, 4, 64), offsets, 7).shape
        torch.Size([10, 4, 64])
    """
    if dropout_p != 0:
        _flash_options.refuse(dropout_p=dropout_p)
    lengths = (cu_seqlens, cu_seqlens, None, None, max_seqlen, max_seqlen)
    score = (softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    out, lse = _flash_options.packed_stacked(None, qkv, lengths, score, return_attn_probs)
    return out if lse is None else (out, lse, None)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNLIMITED,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention to a KV cache, to which k and v are appended first.

    Args:
        q: `(B, N, Hq, D)`.
        k_cache, v_cache: `(B, Nk, Hkv, D)` and `(B, Nk, Hkv, Dv)`; with `cache_batch_idx` of more batch items; with
            `block_table` pages, `(pages, page, Hkv, D)` and `(pages, page, Hkv, Dv)`. They are never copied.
        k, v: `(B, new, Hkv, D)` and `(B, new, Hkv, Dv)`, written to the cache from `cache_seqlens` on, if given.
        rotary_cos, rotary_sin: `(positions, R / 2)`, positions for the whole cache: k is rotated as it is appended, by
            the angles of its places `cache_seqlens + i`; so is q's row i, and without `causal` and a window every row
            of q by that of `cache_seqlens`. Several small kernels of PyTorch do it.
        rotary_interleaved: whether pairs of dims that are rotated are neighbours, or the halves of the first R dims.
        cache_seqlens: how many keys each sequence has before the new ones: an int, or `(B,)` int32 on q's device.
            None: the whole cache. A sequence of a negative length pads a batch: its out is 0.
        cache_batch_idx: `(B,)` int32, the batch item of the cache of each sequence.
        cache_leftpad: `(B,)` int32, how many keys at the beginning are none. It makes a table of all rows in each call.
        block_table: `(B, pages of a sequence)` int32.
        num_splits: a hint for flash-attn's kernels; accepted.
        the others: see the module.

    Returns:
        out `(B, N, Hq, Dv)`, or with `return_softmax_lse` `(out, softmax_lse)`, softmax_lse `(B, Hq, N)` float32.

    Raises:
        ValueError, NotImplementedError: as `flash_cute.attention_with_kvcache`; also for a batch index beside a block
            table, rotary embeddings without new keys, and their tables if they are shorter than the cache.

    Example:
        >>> k_cache, v_cache = torch.zeros(2, 64, 2, 32), torch.zeros(2, 64, 2, 32)
        >>> q, k, v = torch.randn(2, 1, 8, 32), torch.randn(2, 1, 2, 32), torch.randn(2, 1, 2, 32)
        >>> used = torch.tensor([5, 0], dtype=torch.int32)  # the second sequence begins here
        >>> out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=used, causal=True)
        >>> torch.equal(k_cache[0, 5], k[0, 0]), torch.allclose(out[1, 0, :4], v[1, 0, :1].expand(4, -1))
        (True, True)
    """
    score = (softmax_scale, causal, window_size, softcap, alibi_slopes, False)
    if rotary_cos is None and rotary_sin is None and cache_batch_idx is None and cache_leftpad is None:
        out, lse = _flash_cache.attend(
            q, k_cache, v_cache, k, v, cache_seqlens, block_table, None, score, return_softmax_lse
        )
    else:
        place = _flash_cache.Place(cache_seqlens, block_table, cache_batch_idx, cache_leftpad)
        rotary = _flash_cache.Rotary(rotary_cos, rotary_sin, rotary_interleaved)
        keys = _flash_cache.Keys(k_cache, v_cache, k, v)
        out, lse = _flash_cache.with_kvcache(q, keys, place, rotary, score, return_softmax_lse)
    return out if lse is None else (out, lse)

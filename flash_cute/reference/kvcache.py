"""The oracle of caches of keys and values: that of dense calls, one sequence after the other."""

from typing import Any

import torch
from torch import Tensor

from .oracle import attention
from .packed import ranges


def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    causal: bool | str = True,
    alibi_slopes: Tensor | None = None,
    descale_k: Tensor | None = None,
    descale_v: Tensor | None = None,
    kv_layout: str = "NHD",
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The oracle: what `flash_cute.attention_with_kvcache` should return, in float64, one sequence after the other.

    Args:
        q, k_cache, v_cache, k, v, cache_seqlens, page_table, cu_seqlens_q, causal, alibi_slopes, descale_k, descale_v,
        kv_layout: as in `flash_cute.attention_with_kvcache`; k and v are appended to the caches.
        options: further arguments of `attention`, by keyword.

    Returns:
        `(out, lse)`: `(B, Nq, Hq, Dv)` and `(B, Hq, Nq)`, or `(Tq, Hq, Dv)` and `(Hq, Tq)`, both float64.

    Example:
        >>> q, k, v = torch.randn(1, 2, 4, 8), torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 8)
        >>> out, lse = attention_with_kvcache(q, k, v, cache_seqlens=torch.tensor([7]))
        >>> q, k, v = (x.transpose(1, 2) for x in (q, k[:, :7], v[:, :7]))
        >>> torch.allclose(out.transpose(1, 2), attention(q, k, v, causal=True)[0])
        True
    """
    new_keys = 0
    if k is not None and v is not None and cache_seqlens is not None:
        places = {"cache_seqlens": cache_seqlens, "page_table": page_table, "cu_seqlens": cu_seqlens_q}
        descales = {"descale_k": descale_k, "descale_v": descale_v}
        append_kvcache(k_cache, v_cache, k, v, **places, **descales, kv_layout=kv_layout)
        new_keys = -1 if cu_seqlens_q is not None else k.shape[1]
    packed = cu_seqlens_q is not None
    heads = q.shape[-2]
    out = q.new_zeros((*q.shape[:-1], v_cache.shape[3]), dtype=torch.float64)
    rows_shape = (heads, q.shape[0]) if packed else (q.shape[0], heads, q.shape[1])
    lse = q.new_full(rows_shape, -torch.inf, dtype=torch.float64)
    for b, rows in enumerate(rows_of(q, cu_seqlens_q)):
        new = rows.stop - rows.start if new_keys < 0 else new_keys
        keys = [
            cached(x, b, cache_seqlens, page_table, new, kv_layout, descale)  # (1, Hkv, Nk, D or Dv)
            for x, descale in ((k_cache, descale_k), (v_cache, descale_v))
        ]
        alone = (q[rows] if packed else q[b]).transpose(0, 1).unsqueeze(0)
        slopes = alibi_slopes if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes[b]
        part_out, part_lse = attention(alone, keys[0], keys[1], causal, alibi_slopes=slopes, **options)
        (out[rows] if packed else out[b]).copy_(part_out[0].transpose(0, 1))
        (lse[:, rows] if packed else lse[b]).copy_(part_lse[0])
    return out, lse


def append_kvcache(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    descale_k: Tensor | None = None,
    descale_v: Tensor | None = None,
    kv_layout: str = "NHD",
) -> None:
    """The oracle of `flash_cute.append_kvcache`, one key after the other; arguments as there.

    Example:
        >>> k_cache, v_cache = torch.zeros(1, 4, 1, 2), torch.zeros(1, 4, 1, 2)
        >>> append_kvcache(k_cache, v_cache, torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2),
        ...     cache_seqlens=torch.tensor([3]))
        >>> k_cache[0, :, 0, 0]
        tensor([0., 0., 0., 1.])
    """
    for cache, new, descale in ((k_cache, k, descale_k), (v_cache, v, descale_v)):
        x = cache if kv_layout == "NHD" else cache.transpose(1, 2)  # (entries, keys, Hkv, D)
        for b, rows in enumerate(rows_of(new, cu_seqlens)):
            length = int(cache_seqlens[b])
            table = None if page_table is None else page_table[b].tolist()
            for i in range(rows.stop - rows.start if length >= 0 else 0):
                place = place_of(x.shape[0], x.shape[1], b, length + i, table)
                if place is None:
                    continue
                row = new[rows.start + i] if cu_seqlens is not None else new[b, i]  # (Hkv, D)
                if cache.dtype.itemsize == 1:
                    most = torch.finfo(cache.dtype).max
                    row = row.float() if descale is None else row.float() / _of_heads(descale, b)
                    row = row.clamp(-most, most)
                x[place[0], place[1]] = row.to(x.dtype)


def cached(
    cache: Tensor,
    b: int,
    cache_seqlens: Tensor | None,
    page_table: Tensor | None,
    new_keys: int,
    kv_layout: str,
    descale: Tensor | None = None,
) -> Tensor:
    """The keys (or values) that sequence b has, `(1, Hkv, Nk, D)` in float64; zeros where there is no such page."""
    x = cache if kv_layout == "NHD" else cache.transpose(1, 2)  # (entries, keys, Hkv, D)
    capacity = x.shape[1] if page_table is None else x.shape[1] * page_table.shape[1]
    length = capacity if cache_seqlens is None else int(cache_seqlens[b])
    length = 0 if length < 0 else min(length + new_keys, capacity)
    table = None if page_table is None else page_table[b].tolist()
    keys = torch.zeros((length, *x.shape[2:]), dtype=torch.float64, device=x.device)
    numbers, entries, rows = [], [], []
    for key in range(length):
        place = place_of(x.shape[0], x.shape[1], b, key, table)
        if place is not None:
            numbers.append(key)
            entries.append(place[0])
            rows.append(place[1])
    if numbers:
        keys[numbers] = x[entries, rows].double()
    if descale is not None:
        keys = keys * _of_heads(descale, b).double()
    return keys.transpose(0, 1).unsqueeze(0)


def place_of(entries: int, page: int, b: int, key: int, table: list[int] | None) -> tuple[int, int] | None:
    """The entry of a cache and the row there that key number `key` of sequence b has; None: it has none."""
    if table is None:
        return (b, key) if key < page else None
    if key // page >= len(table):
        return None
    number = table[key // page]
    return (number, key % page) if 0 <= number < entries else None


def rows_of(x: Tensor, cu_seqlens: Tensor | None) -> list[slice]:
    """Each sequence's rows: of packed tensors where they are, else all of its own."""
    if cu_seqlens is None:
        return [slice(0, x.shape[1])] * x.shape[0]
    return ranges(cu_seqlens, None, x.shape[0])


def _of_heads(descale: Tensor, b: int) -> Tensor:
    """A sequence's factors, so that they broadcast to (n, Hkv, D)."""
    return descale.reshape(()) if descale.numel() == 1 else descale[b].unsqueeze(-1)

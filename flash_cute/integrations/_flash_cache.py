"""flash-attn's `flash_attn_with_kvcache`, of versions 2 and 3, by `flash_cute.attention_with_kvcache`.

What flash_cute's function does not have is here: rotary embeddings, left padding, a cache whose batch items are picked
by an index, and new keys whose lengths are not those of the queries. No speed is asked of it, but neither the cache nor
a part of it is ever copied: an index becomes a page table whose pages are batch items, left padding one whose pages are
single rows.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import append_kvcache, attention_with_kvcache
from . import _flash_options
from ._rotary import apply_rotary

# `(out, lse or None)`: `(B, N, Hq, Dv)` and `(B, Hq, N)`; with cu_seqlens_q `(Tq, Hq, Dv)` and `(Hq, Tq)`.
Results = tuple[Tensor, Tensor | None]


class Place(NamedTuple):
    """Where the keys of a sequence are, as flash-attn says it."""

    seqlens: Any = None  # an int or (B,) int32, the keys before the new ones
    table: Tensor | None = None  # (B, pages) int32
    batch_idx: Tensor | None = None  # (B,) int32, the batch items of the cache
    leftpad: Tensor | None = None  # (B,) int32, the first key
    cu_seqlens_q: Tensor | None = None  # (B + 1,) int32
    cu_seqlens_new: Tensor | None = None  # (B + 1,) int32, of the new keys


class Rotary(NamedTuple):
    """The table of the angles, and the position of a sequence's first new key."""

    cos: Tensor | None  # (positions, R / 2)
    sin: Tensor | None
    interleaved: bool
    seqlens: Tensor | None = None  # (B,) int32; None: the keys before the new ones


class Keys(NamedTuple):
    """The cache, and what is appended to it first."""

    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None
    v: Tensor | None


def with_kvcache(
    q: Tensor,
    keys: Keys,
    place: Place,
    rotary: Rotary,
    score: _flash_options.Score,
    return_lse: bool,
    qv: Tensor | None = None,
    descales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Results:
    """The attention of q `(B, N, Hq, D)`, or `(Tq, Hq, D)`, to a cache."""
    given: dict[str, Any] = {"q": q, "page_table": place.table, "qv": qv, **keys._asdict()}
    for name, x in {**given, "rotary_cos": rotary.cos, "rotary_sin": rotary.sin}.items():
        if not isinstance(x, Tensor) and (x is not None or name in ("q", "k_cache", "v_cache")):
            raise ValueError(f"flash_cute: {name}: expected a torch.Tensor, got {type(x).__name__}")
        dims = {"k_cache": 4, "v_cache": 4, "page_table": 2}.get(name)
        if x is not None and dims is not None and x.dim() != dims:
            raise ValueError(f"flash_cute: {name}: expected {dims} dims, got {tuple(x.shape)}")
    if type(place.seqlens) is int:
        place = place._replace(seqlens=_filled(place.seqlens, q, place.cu_seqlens_q))
    if place.batch_idx is not None:
        place = _by_index(place, keys)
    if rotary.cos is not None or rotary.sin is not None:
        q, keys = _rotated(q, keys, place, rotary, bool(score[1]) or _flash_options.window(score[2]) is not None)
    # As many new keys as the sequence has rows are appended by the call itself.
    apart = place.leftpad is not None or qv is not None or place.cu_seqlens_new is not place.cu_seqlens_q
    appends = keys.k is not None and apart
    new = keys, place
    if appends:
        keys, place = _after_append(keys, place)
    if qv is not None:
        q, keys = _with_values(q, qv, keys, descales)
    if place.leftpad is not None:
        keys, place = _without_padding(keys, place)
    if appends:  # once all that this layer refuses is behind it
        _append(*new, descales)
    return attend(q, *keys, place.seqlens, place.table, place.cu_seqlens_q, score, return_lse, *descales)


def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None,
    seqlens: Any, table: Tensor | None, cu_seqlens_q: Tensor | None, score: _flash_options.Score, return_lse: bool,
    descale_k: Tensor | None = None, descale_v: Tensor | None = None,
) -> Results:  # fmt: skip
    """The same of what flash_cute's function has itself: the way of most calls."""
    scale, causal, window_size, softcap, slopes, _ = score
    if type(seqlens) is int:
        seqlens = _filled(seqlens, q, cu_seqlens_q)
    result: Any = attention_with_kvcache(
        q, k_cache, v_cache, k=k, v=v, cache_seqlens=seqlens, page_table=table, cu_seqlens_q=cu_seqlens_q,
        causal=causal, window=_flash_options.window(window_size), softcap=_flash_options.cap_of(softcap),
        alibi_slopes=slopes, scale=scale, descale_k=descale_k, descale_v=descale_v, return_lse=return_lse,
    )  # fmt: skip
    return result if return_lse else (result, None)


def lengths_of(cu_seqlens_k: Tensor) -> Tensor:
    """`(B,)` int32, the lengths of sequences with these offsets."""
    _check_int32("cu_seqlens_k", cu_seqlens_k)
    return cu_seqlens_k.diff()


def _filled(seqlens: int, q: Tensor, cu_seqlens_q: Tensor | None) -> Tensor:
    """`(B,)`: as many keys in each sequence."""
    if seqlens < 0:
        raise ValueError(f"flash_cute: cache_seqlens: expected a number of keys or a tensor (B,) int32, got {seqlens}")
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    return torch.full((batch,), seqlens, dtype=torch.int32, device=q.device)


def _by_index(place: Place, keys: Keys) -> Place:
    """A cache `(batch items, N, Hkv, D)` of which an index picks: its items are pages of N rows, one a sequence."""
    if place.table is not None:
        raise ValueError("flash_cute: cache_batch_idx: expected None beside a table of pages, got Tensor")
    _check_int32("cache_batch_idx", place.batch_idx)
    assert place.batch_idx is not None
    return place._replace(table=place.batch_idx[:, None], batch_idx=None)


def _check_int32(name: str, x: Any) -> None:
    if not isinstance(x, Tensor) or x.dim() != 1 or x.dtype != torch.int32:
        given = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"flash_cute: {name}: expected a tensor of one dim, int32, got {given}")


def _capacity(keys: Keys, table: Tensor | None) -> int:
    """How many keys a sequence has room for."""
    rows: int = keys.k_cache.shape[1]
    return rows if table is None else rows * int(table.shape[1])


def _new_lengths(keys: Keys, place: Place) -> int | Tensor:
    """How many new keys each sequence has."""
    if place.cu_seqlens_new is not None:
        return place.cu_seqlens_new.diff()
    assert keys.k is not None
    count: int = keys.k.shape[1]
    return count


def _after_append(keys: Keys, place: Place) -> tuple[Keys, Place]:
    """The cache with the new keys in it. A sequence that pads a graph (length below 0) stays one."""
    seqlens = place.seqlens
    if not isinstance(seqlens, Tensor):
        raise ValueError(
            f"flash_cute: cache_seqlens: expected a tensor (B,) int32 beside new keys, got {type(seqlens).__name__}"
        )
    if place.cu_seqlens_new is not None:
        _check_int32("cu_seqlens_k_new", place.cu_seqlens_new)
    lengths = torch.where(seqlens < 0, seqlens, seqlens + _new_lengths(keys, place)).to(seqlens.dtype)
    return keys._replace(k=None, v=None), place._replace(seqlens=lengths, cu_seqlens_new=None)


def _append(keys: Keys, place: Place, descales: tuple[Tensor | None, Tensor | None]) -> None:
    k_cache, v_cache, k, v = keys
    assert k is not None
    assert place.seqlens is not None
    if v is None:
        raise ValueError("flash_cute: v: expected a tensor beside k, got None")
    append_kvcache(
        k_cache, v_cache, k, v, cache_seqlens=place.seqlens, page_table=place.table, cu_seqlens=place.cu_seqlens_new,
        descale_k=descales[0], descale_v=descales[1],
    )  # fmt: skip


def _rotated(q: Tensor, keys: Keys, place: Place, rotary: Rotary, by_row: bool) -> tuple[Tensor, Keys]:
    """q and the new keys, rotated by their positions, from the length of the cache on.

    `by_row`: row i of q has its own position, as the mask has it; else all have that of the first new key.
    """
    cos, sin, interleaved, first = rotary
    if cos is None or sin is None:
        name = "rotary_sin" if sin is None else "rotary_cos"
        raise ValueError(f"flash_cute: {name}: expected a tensor beside the other of the two, got None")
    if keys.k is None:
        raise ValueError("flash_cute: rotary_cos: expected new keys k and v beside it, got None for k")
    capacity = _capacity(keys, place.table)
    if first is None:
        first = place.seqlens
        if first is None:
            raise ValueError("flash_cute: cache_seqlens: expected a tensor (B,) int32 beside rotary_cos, got None")
        if cos.shape[0] < capacity:
            raise ValueError(
                f"flash_cute: rotary_cos: expected a position for each of the {capacity} keys that a sequence has room "
                f"for, got {cos.shape[0]}"
            )
    k = _rotate(keys.k, cos, sin, first, place.cu_seqlens_new, interleaved)
    if by_row:
        q = _rotate(q, cos, sin, first, place.cu_seqlens_q, interleaved)
    elif place.cu_seqlens_q is None:
        heads = q.flatten(1, 2)[:, None]  # (B, 1, N * Hq, D): one row, one position
        q = _rotate(heads, cos, sin, first, None, interleaved).view(q.shape)
    else:
        rows = torch.arange(q.shape[0], dtype=torch.int32, device=q.device)
        sequence = torch.searchsorted(place.cu_seqlens_q, rows, right=True) - 1
        q = _rotate(q[:, None], cos, sin, first[sequence.clamp(0, first.shape[0] - 1)], None, interleaved)[:, 0]
    return q, keys._replace(k=k)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, first: Tensor, offsets: Tensor | None, interleaved: bool) -> Tensor:
    return apply_rotary(x, cos, sin, first, offsets, interleaved=interleaved)


def _with_values(
    q: Tensor, qv: Tensor, keys: Keys, descales: tuple[Tensor | None, Tensor | None]
) -> tuple[Tensor, Keys]:
    """FlashAttention-3's `qv`: a score is `q . k + qv . v`. It is `(q, qv) . (k, v)` where k and v are one row."""
    k_cache, v_cache = keys.k_cache, keys.v_cache
    if qv.shape != (*q.shape[:-1], v_cache.shape[-1]) or qv.dtype != q.dtype:
        expected = (*q.shape[:-1], v_cache.shape[-1])
        raise ValueError(f"flash_cute: qv: expected {expected} {q.dtype}, got {tuple(qv.shape)} {qv.dtype}")
    if descales != (None, None):
        raise ValueError("flash_cute: k_descale, v_descale: expected None beside qv, got Tensor")
    strides = [(x, y) for x, y, size in zip(k_cache.stride(), v_cache.stride(), k_cache.shape, strict=True) if size > 1]
    one_buffer = (
        k_cache.dtype == v_cache.dtype
        and k_cache.shape[:-1] == v_cache.shape[:-1]
        and k_cache.untyped_storage().data_ptr() == v_cache.untyped_storage().data_ptr()
        and all(x == y for x, y in strides)
        and k_cache.stride(-1) == v_cache.stride(-1) == 1
    )
    for first, second, pair in ((v_cache, k_cache, (qv, q)), (k_cache, v_cache, (q, qv))):
        if one_buffer and first.storage_offset() + first.shape[-1] == second.storage_offset():
            shape = (*first.shape[:-1], first.shape[-1] + second.shape[-1])
            return torch.cat(pair, -1), keys._replace(k_cache=first.as_strided(shape, first.stride()))
    raise ValueError(
        "flash_cute: qv: expected k_cache and v_cache that are neighbours in the rows of one tensor, as MLA's caches "
        "are, got others"
    )


def _without_padding(keys: Keys, place: Place) -> tuple[Keys, Place]:
    """The cache from each sequence's first key on, without a copy: pages of one row, and a table of all rows."""
    _check_int32("cache_leftpad", place.leftpad)
    assert place.leftpad is not None
    pages, rows = keys.k_cache.shape[:2]
    batch = place.leftpad.shape[0]
    table = place.table
    if table is None:
        if batch != pages:
            raise ValueError(f"flash_cute: cache_leftpad: expected ({pages},), got ({batch},)")
        table = torch.arange(pages, dtype=torch.int32, device=keys.k_cache.device)[:, None]
    elif table.shape[0] != batch:
        raise ValueError(f"flash_cute: cache_leftpad: expected ({table.shape[0]},), got ({batch},)")
    room = rows * table.shape[1]
    seqlens = place.seqlens
    seqlens = torch.full((batch,), room, dtype=torch.int32, device=table.device) if seqlens is None else seqlens
    k_cache, apart = _as_rows("k_cache", keys.k_cache)
    v_cache, apart_v = _as_rows("v_cache", keys.v_cache)
    if apart != apart_v:
        raise ValueError(
            "flash_cute: cache_leftpad: expected k_cache and v_cache whose batch items or pages are as many rows "
            f"apart, got {apart} and {apart_v}"
        )
    leftpad = place.leftpad.clamp(0, room)
    row = leftpad[:, None] + torch.arange(room, device=table.device)  # (B, room) int64, at the end past the room
    page = table.gather(1, (row // rows).clamp(max=table.shape[1] - 1)).long() if room else row
    number = page * apart + row % max(rows, 1)
    number = torch.where((row < room) & (page >= 0) & (page < pages), number, -1)  # -1: no row
    used = torch.where(seqlens < 0, seqlens, (seqlens.clamp(max=room) - leftpad).clamp(min=0))
    # New keys have been appended before; should there be a v without a k, it is not to get lost.
    keys = keys._replace(k_cache=k_cache, v_cache=v_cache)
    return keys, place._replace(seqlens=used.int(), table=number.int(), leftpad=None)


def _as_rows(name: str, cache: Tensor) -> tuple[Tensor, int]:
    """A cache `(pages, page, H, D)` as pages of one row, `(rows, 1, H, D)`, and how many of them a page is apart."""
    pages, rows, heads, dim = cache.shape
    if pages == 0 or rows == 0:
        return cache.reshape(0, 1, heads, dim), 0
    of_pages, of_rows = cache.stride()[:2]
    if rows == 1:
        of_rows = of_pages
    if pages == 1:
        of_pages = rows * of_rows
    if of_rows == 0 or of_pages % of_rows:
        raise ValueError(
            f"flash_cute: {name}: expected batch items or pages that are a whole number of rows apart beside "
            f"cache_leftpad, got strides {cache.stride()}"
        )
    apart = of_pages // of_rows
    shape = ((pages - 1) * apart + rows, 1, heads, dim)
    if shape[0] >= 2**31:
        raise ValueError(f"flash_cute: {name}: expected below 2**31 rows beside cache_leftpad, got {shape[0]}")
    return cache.as_strided(shape, (of_rows, of_rows, *cache.stride()[2:])), apart

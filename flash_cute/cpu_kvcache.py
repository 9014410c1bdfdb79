"""Caches of keys and values on the CPU: the dense forward, one sequence after the other.

A sequence's keys are gathered into memory of their own: those alone that its rows may see, by the entries of its table
that name their pages. So nothing else is read, and the bits of a sequence do not depend on where its keys are, nor on
what else is in the batch.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import cpu
from ._call_options import CacheOptions, CallOptions, KvCacheOptions, split_cache
from .band import seen_keys
from .cpu_fp8 import check_factors
from .cpu_quantize import LARGEST
from .cpu_varlen import spans

REASONS = [
    "The dense forward for the CPU does the arithmetic, one sequence after the other.",
    "How many keys a sequence has is read when the call runs: what its rows may see of them is gathered.",
]


def copies(q: Tensor) -> dict[str, str | None]:
    """Why each argument is copied; what `explain` says."""
    gathered = "the keys that the rows may see are gathered"
    wide = q.dtype in (torch.float32, torch.float64)
    of_q = "its heads are put before its rows" if wide else "computed in float32"
    return {"q": of_q, "k_cache": gathered, "v_cache": gathered}


class Cache(NamedTuple):
    """k and v `(sequences or pages, keys, Hkv, D or Dv)`, whatever the layout, and where a sequence has its keys."""

    k: Tensor
    v: Tensor
    page_table: Tensor | None  # (B, max_pages)

    @property
    def capacity(self) -> int:
        """The keys that a sequence may have."""
        return self.k.shape[1] if self.page_table is None else self.page_table.shape[1] * self.k.shape[1]

    def places(self, b: int, keys: range) -> tuple[Tensor, Tensor, Tensor]:
        """Of the keys of a sequence: entry, row there, and whether there is such a page; `(n,)` each."""
        positions = torch.arange(keys.start, keys.stop)
        if self.page_table is None:
            return torch.full_like(positions, b), positions, torch.ones_like(positions, dtype=torch.bool)
        page = self.k.shape[1]
        first, last = keys.start // page, -(-keys.stop // page)
        numbers = self.page_table[b, first:last].long()[positions // page - first]
        return numbers, positions % page, (numbers >= 0) & (numbers < self.k.shape[0])

    def read(self, b: int, keys: range, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """k and v of a sequence's keys, `(n, Hkv, D or Dv)` in memory of their own; 0 where there is no such page."""
        entries, rows, real = self.places(b, keys)
        k, v = (
            x.new_zeros((len(keys), *x.shape[2:]), dtype=dtype).index_put_(
                (real,), _bytes(x)[entries[real], rows[real]].view(x.dtype).to(dtype)
            )
            for x in (self.k, self.v)
        )
        return k, v

    def write(self, b: int, keys: range, k: Tensor, v: Tensor) -> None:
        """The same of k and v `(n, Hkv, D or Dv)` in the cache's dtype; nothing where there is no such page."""
        entries, rows, real = self.places(b, keys)
        for x, new in ((self.k, k), (self.v, v)):
            _bytes(x)[entries[real], rows[real]] = _bytes(new[real])


def fwd(q: Tensor, k_cache: Tensor, v_cache: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """The kernel of `flash_cute::kvcache_fwd` for CPU tensors; the library checks the arguments.

    `given`: the values of a CacheOptions, of a CallOptions and of a KvCacheOptions.
    """
    torch.ops.flash_cute.check_kvcache_fwd(q, k_cache, v_cache, *given)
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows = (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
    out, lse = q.new_empty((*q.shape[:-1], v_cache.shape[3])), q.new_empty(rows, dtype=compute)
    with torch.no_grad():
        _attend(q, k_cache, v_cache, *split_cache(given)[:3], out, lse)
    return out, lse


def fwd_out(q: Tensor, k_cache: Tensor, v_cache: Tensor, *given: Any) -> None:
    """The kernel of `flash_cute::kvcache_fwd_out`; out and lse come last."""
    *call, out, lse = given
    torch.ops.flash_cute.check_kvcache_fwd(q, k_cache, v_cache, *call, out=out, lse=lse)
    with torch.no_grad():
        _attend(q, k_cache, v_cache, *split_cache(call)[:3], out, lse)


def append(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    page_table: Tensor | None,
    cu_seqlens: Tensor | None,
    kv_layout: str,
    descale_k: Tensor | None,
    descale_v: Tensor | None,
) -> None:
    """The kernel of `flash_cute::kvcache_append` for CPU tensors; the library checks the arguments."""
    options = (cache_seqlens, page_table, cu_seqlens, kv_layout, descale_k, descale_v)
    torch.ops.flash_cute.check_kvcache_append(k_cache, v_cache, k, v, *options)
    check_factors("descale_k", descale_k)
    check_factors("descale_v", descale_v)
    with torch.no_grad():
        cache = _cache(k_cache, v_cache, page_table, kv_layout)
        for b, (length, rows) in enumerate(zip(cache_seqlens.tolist(), _rows(k, cu_seqlens), strict=True)):
            keys = range(length, min(length + rows.stop - rows.start, cache.capacity))
            if length < 0 or len(keys) == 0:
                continue
            some = slice(rows.start, rows.start + len(keys))
            new_k, new_v = ((x[some] if cu_seqlens is not None else x[b, some]) for x in (k, v))
            cache.write(
                b,
                keys,
                _quantised(new_k, _factor(descale_k, b), k_cache.dtype),
                _quantised(new_v, _factor(descale_v, b), v_cache.dtype),
            )


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    given: CacheOptions,
    options: CallOptions,
    own: KvCacheOptions,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attention of each sequence's rows over its keys, into out and lse; other rows see nothing."""
    check_factors("descale_k", own.descale_k)
    check_factors("descale_v", own.descale_v)
    cache = _cache(k_cache, v_cache, given.page_table, given.kv_layout)
    packed = given.cu_seqlens_q is not None
    if options.sinks is not None:
        options = options._replace(sinks=options.sinks.to(lse.dtype))
    out.zero_()
    lse.fill_(-torch.inf)
    for b, rows in enumerate(_rows(q, given.cu_seqlens_q)):
        len_q = rows.stop - rows.start
        len_k = _length(given, b, len_q, cache.capacity)
        keys = seen_keys(options.causal, options.window_left, len_q, len_k)
        if len_q == 0 or len(keys) == 0 or out.numel() == 0:
            continue
        k, v = cache.read(b, keys, lse.dtype)
        k, v = _scaled(k, _factor(own.descale_k, b)), _scaled(v, _factor(own.descale_v, b))
        part = (q[rows] if packed else q[b]).to(lse.dtype)
        tensors = (x.transpose(0, 1).contiguous().unsqueeze(0) for x in (part, k, v))  # (1, H, N, D)
        slopes = options.alibi_slopes
        of_b = options if slopes is None or slopes.dim() == 1 else options._replace(alibi_slopes=slopes[b])
        part_out, part_lse = cpu.fwd(*tensors, *of_b, "cpu")
        (out[rows] if packed else out[b]).copy_(part_out[0].transpose(0, 1))
        (lse[:, rows] if packed else lse[b]).copy_(part_lse[0])


def _cache(k_cache: Tensor, v_cache: Tensor, page_table: Tensor | None, kv_layout: str) -> Cache:
    k, v = (x.transpose(1, 2) if kv_layout == "HND" else x for x in (k_cache, v_cache))
    return Cache(k, v, page_table)


def _rows(x: Tensor, cu_seqlens: Tensor | None) -> list[slice]:
    """Each sequence's rows of x: where they are among all of them, or all of its own."""
    if cu_seqlens is None:
        return [slice(0, x.shape[1])] * x.shape[0]
    start, length = (part.tolist() for part in spans(cu_seqlens, None, x.shape[0]))
    return [slice(first, first + count) for first, count in zip(start, length, strict=True)]


def _length(given: CacheOptions, b: int, len_q: int, capacity: int) -> int:
    """How many keys a sequence has."""
    if given.cache_seqlens is None:
        return capacity
    before = int(given.cache_seqlens[b])
    new = len_q if given.new_keys < 0 else given.new_keys
    return 0 if before < 0 else min(before + new, capacity)


def _bytes(x: Tensor) -> Tensor:
    """x; of float8 its bytes, which every version of PyTorch gathers."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _factor(descale: Tensor | None, b: int) -> Tensor | None:
    """What a sequence's values are to be multiplied by, so that it broadcasts to `(n, Hkv, D)`."""
    if descale is None:
        return None
    return descale.reshape(()) if descale.numel() == 1 else descale[b].unsqueeze(-1)


def _scaled(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor


def _quantised(x: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x in the cache's dtype; to float8 each value is rounded to the nearest of `x / factor`, or saturates."""
    if dtype not in LARGEST:
        return x
    values = x.float() if factor is None else x.float() / factor
    return values.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)

"""The operators on meta and fake tensors: what a call would return, and what it would raise.

The checks stand once, in csrc/api/checks.h, and read real tensors. So the tensors of a fake call are checked by
stand-ins on the meta device, of the sizes that the fakes have; a symbolic size counts as its hint, which adds no guard.
"""

from typing import Any

import torch
from torch import Tensor

from ._call_options import split_cache, split_dense, split_fp8, split_mask, split_packed
from ._fp8_types import DTYPES
from ._layout import empty_out, empty_quantized
from ._torch import without_modes


def fwd(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    options, (backend, *_) = split_dense(given)
    _check(torch.ops.flash_cute.check_fwd.default, q, k, v, *options, backend)
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return empty_out(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=lse_dtype)


def bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    *given: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(torch.ops.flash_cute.check_bwd.default, dout, q, k, v, out, lse, dlse, *given)
    return _gradients(q, k, v, split_dense(given)[0].sinks)


def varlen_fwd(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    dims = (_PACKED, _PACKED, _PACKED, *_LENGTHS, *_SCORE, ())
    _check(torch.ops.flash_cute.check_varlen_fwd.default, q, k, v, *options[: len(dims) - 3], dims=dims)
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return empty_out(q, v.shape[2]), q.new_empty((q.shape[1], q.shape[0]), dtype=lse_dtype)


def varlen_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, *given: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dims = (*(_PACKED,) * 5, _PACKED_LSE, _PACKED_LSE, *_LENGTHS, *_SCORE, (), ())
    _check(torch.ops.flash_cute.check_varlen_bwd.default, dout, q, k, v, out, lse, dlse, *given, dims=dims)
    return _gradients(q, k, v, split_packed(given)[1].sinks)


def masked_fwd(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    mask, rest = split_mask(given)
    options, (backend, *_) = split_dense(rest)
    dims = (*(_DENSE,) * 3, *_MASK, *_SCORE, ())
    _check(torch.ops.flash_cute.check_masked_fwd.default, q, k, v, *mask, *options, backend, dims=dims)
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return empty_out(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=lse_dtype)


def masked_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, *given: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dims = (*(_DENSE,) * 5, *((BATCH, HEADS, ROWS),) * 2, *_MASK, *_SCORE, (), ())
    _check(torch.ops.flash_cute.check_masked_bwd.default, dout, q, k, v, out, lse, dlse, *given, dims=dims)
    return _gradients(q, k, v, split_dense(split_mask(given)[1])[0].sinks)


def masked_varlen_fwd(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    dims = (_PACKED, _PACKED, _PACKED, *_MASK, *_LENGTHS, *_SCORE, ())
    _check(torch.ops.flash_cute.check_masked_varlen_fwd.default, q, k, v, *given[: len(dims) - 3], dims=dims)
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return empty_out(q, v.shape[2]), q.new_empty((q.shape[1], q.shape[0]), dtype=lse_dtype)


def masked_varlen_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, *given: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dims = (*(_PACKED,) * 5, _PACKED_LSE, _PACKED_LSE, *_MASK, *_LENGTHS, *_SCORE, (), ())
    _check(torch.ops.flash_cute.check_masked_varlen_bwd.default, dout, q, k, v, out, lse, dlse, *given, dims=dims)
    return _gradients(q, k, v, split_packed(split_mask(given)[1])[1].sinks)


def _gradients(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsinks = q.new_empty(0, dtype=torch.float32) if sinks is None else torch.empty_like(sinks)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dsinks


def fp8_fwd(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    dims = (*(_DENSE,) * 3, *_DESCALES, *_SCORE, ())
    _check(torch.ops.flash_cute.check_fp8_fwd.default, q, k, v, *given, dims=dims)
    dtype = DTYPES[split_fp8(given)[0].out_dtype]
    return empty_out(q, v.shape[3], dtype), q.new_empty(q.shape[:3], dtype=torch.float32)


def fp8_varlen_fwd(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    dims = (_PACKED, _PACKED, _PACKED, *_DESCALES, *_LENGTHS, *_SCORE, ())
    _check(torch.ops.flash_cute.check_fp8_varlen_fwd.default, q, k, v, *given, dims=dims)
    dtype = DTYPES[split_fp8(given)[0].out_dtype]
    return empty_out(q, v.shape[2], dtype), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def quantize_fp8(
    x: Tensor,
    name: str,
    dtype: str,
    per: str,
    heads_kv: Any,
    center: bool,
    seed: int | None,
    key_mean: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    arguments = (x, name, dtype, per, heads_kv, center, seed, key_mean, cu_seqlens, max_seqlen)
    of_x = (BATCH, HEADS, ROWS, COLUMNS) if cu_seqlens is None else _PACKED
    dims = (of_x, *((),) * 6, (BATCH, HEADS, COLUMNS), (OFFSETS,))
    _check(torch.ops.flash_cute.check_quantize_fp8.default, *arguments, dims=dims)
    rows, heads = (x.shape[2], x.shape[1]) if cu_seqlens is None else (x.shape[0], x.shape[1])
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    blocks = ((rows if max_seqlen is None else max_seqlen) + 127) // 128
    of_entry = {"head": (heads_kv,), "block": (heads, blocks), "channel": (heads_kv, x.shape[-1])}[per]
    floats = [
        (batch, *of_entry),
        (batch, heads_kv, x.shape[-1]) if center else (0,),
        (0,) if key_mean is None else (batch, heads, rows) if cu_seqlens is None else (heads, rows),
    ]
    out = empty_quantized(x, getattr(torch, dtype))
    descale, mean, shift = (x.new_empty(shape, dtype=torch.float32) for shape in floats)
    return out, descale, mean, shift


def kvcache_fwd(q: Tensor, k_cache: Tensor, v_cache: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    _check_kvcache(q, k_cache, v_cache, given, ())
    shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:-1], v_cache.shape[3])), q.new_empty(shape, dtype=lse_dtype)


def kvcache_fwd_out(q: Tensor, k_cache: Tensor, v_cache: Tensor, *given: Any) -> None:
    *call, out, lse = given
    _check_kvcache(q, k_cache, v_cache, call, (out, lse))


def kvcache_append(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, *given: Any) -> None:
    _, page_table, cu_seqlens, kv_layout, *_ = given
    of_cache, of_rows = _cache_dims(page_table, kv_layout), _row_dims(cu_seqlens)
    dims = (of_cache, of_cache, of_rows, of_rows, (BATCH,), (BATCH, WIDTH), (OFFSETS,), (), *((BATCH, HEADS),) * 2)
    _check(torch.ops.flash_cute.check_kvcache_append.default, k_cache, v_cache, k, v, *given, dims=dims)


def _check_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, given: Any, results: tuple[Tensor, ...]) -> None:
    cache, *_ = split_cache(given)
    of_cache, of_rows = _cache_dims(cache.page_table, cache.kv_layout), _row_dims(cache.cu_seqlens_q)
    of_lse = (BATCH, HEADS, ROWS) if cache.cu_seqlens_q is None else _PACKED_LSE
    of_lengths = ((BATCH,), (BATCH, WIDTH), (OFFSETS,), (), ())
    of_call = (*_SCORE, *((BATCH, HEADS),) * 2, (BYTES,), ())
    dims = (of_rows, of_cache, of_cache, *of_lengths, *of_call)
    check = torch.ops.flash_cute.check_kvcache_fwd.default
    of_results = (of_rows, of_lse) if results else ()
    _check(check, q, k_cache, v_cache, *given, dims=dims, results=results, of_results=of_results)


def _row_dims(offsets: Tensor | None) -> tuple[int, ...]:
    return (BATCH, ROWS, HEADS, COLUMNS) if offsets is None else _PACKED


def _cache_dims(page_table: Tensor | None, kv_layout: str) -> tuple[int, ...]:
    entries = BATCH if page_table is None else PAGES
    return (entries, HEADS, KEYS, COLUMNS) if kv_layout == "HND" else (entries, KEYS, HEADS, COLUMNS)


# What the sizes of an argument are, by dim: those with one number are equal in a good call, OFFSETS is BATCH + 1.
BATCH, HEADS, ROWS, COLUMNS, OFFSETS, PAGES, KEYS, WIDTH, BYTES = range(9)
_DENSE = (BATCH, HEADS, ROWS, COLUMNS)
# Of the arguments of a packed call.
_PACKED, _PACKED_LSE = (ROWS, HEADS, COLUMNS), (HEADS, ROWS)
_LENGTHS = ((OFFSETS,), (OFFSETS,), (BATCH,), (BATCH,), (), ())
_DESCALES = ((BATCH, HEADS, ROWS), (BATCH, HEADS, ROWS), (BATCH, HEADS, COLUMNS), (BATCH, HEADS), ())
_MASK = (*((BATCH, HEADS, ROWS),) * 4, *((BATCH, HEADS, ROWS, ROWS),) * 2)
_SCORE = ((), (), (), (), (HEADS,), (BATCH, HEADS), ())


def _check(
    check: Any,
    *arguments: Any,
    dims: tuple[tuple[int, ...], ...] | None = None,
    results: tuple[Tensor, ...] = (),
    of_results: tuple[tuple[int, ...], ...] = (),
) -> None:
    """Call `check` with stand-ins for the tensors. `dims`: of each argument; by default those of a dense call.

    `results`: what `check` takes behind the devices, and their dims.
    """
    if without_modes is None:
        return
    places = range(len(arguments)) if dims is None else range(len(dims))
    known = [(arguments[i], None if dims is None else dims[i]) for i in places if isinstance(arguments[i], Tensor)]
    known += zip(results, of_results, strict=True)
    tensors = [x for x, _ in known]
    sizes = [[_hint(size) for size in x.shape] for x in tensors]
    names = [_dims_of(x, of_packed) for x, of_packed in known]
    # A size without a hint comes from data: it is not checked, and neither are those that should equal it; the call
    # itself does it.
    unknown = {name for x, y in zip(sizes, names, strict=True) for i, name in enumerate(y[: len(x)]) if x[i] is None}
    if unknown & {BATCH, OFFSETS}:
        unknown |= {BATCH, OFFSETS}
    for x, y in zip(sizes, names, strict=True):
        for i, name in enumerate(y[: len(x)]):
            if name in unknown:
                x[i] = 2 if name == OFFSETS else 1
    devices = " ".join(str(x.device) for x in tensors)
    with without_modes():
        stand_ins = iter([_stand_in(x, size) for x, size in zip(tensors, sizes, strict=True)])
        given = [next(stand_ins) if isinstance(x, Tensor) else _hint(x) for x in arguments]
        check(*given, devices, *stand_ins)


def _dims_of(x: Tensor, of_packed: tuple[int, ...] | None) -> tuple[int, ...]:
    if of_packed is None:
        return (HEADS,) if x.dim() == 1 else (BATCH, HEADS, ROWS, COLUMNS)
    return of_packed[-x.dim() :] if of_packed == (BATCH, HEADS) else of_packed


def _stand_in(x: Tensor, sizes: list[Any]) -> Tensor:
    sizes = [1 if size is None else size for size in sizes]
    options: dict[str, Any] = {"dtype": x.dtype, "device": "meta"}
    strides = [_hint(stride) for stride in x.stride()] if x.layout == torch.strided else [None]
    if None in strides:
        return torch.empty(sizes, layout=x.layout, **options)
    return torch.empty_strided(sizes, strides, **options)  # of offsets and caches they are checked


def _hint(value: Any) -> Any:
    """`value`, or what a symbolic number was in the example that is traced; None where nobody knows."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return getattr(value.node, "hint", None)
    return value

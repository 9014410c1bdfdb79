"""Attention over caches of keys and values, contiguous or in pages: decoding, verification, chunked prefill.

Past 400 lines, since half of them are the arguments and docstrings of three public functions.
"""

import json
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.overrides import has_torch_function

from . import _check_lengths, _ops
from ._call import record
from ._refusals import (
    Window,
    check_deterministic,
    check_flag,
    check_number,
    mask_name,
    raise_refusal,
    shown,
    window_sides,
    with_batch_dependence,
    with_row_invariance,
)
from ._torch import HAS_DUAL_LEVEL, dispatch_modes, functorch_is_active, jit_is_tracing
from .autograd import refuse_tangents

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._options import KvCacheOptions

__all__ = ["append_kvcache", "attention_with_kvcache", "kvcache_workspace_bytes"]


@overload
def attention_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *,
    return_lse: Literal[False] = False, **options: "Unpack[KvCacheOptions]",
) -> Tensor: ...  # fmt: skip


@overload
def attention_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *,
    return_lse: Literal[True], **options: "Unpack[KvCacheOptions]",
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def attention_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *,
    return_lse: bool, **options: "Unpack[KvCacheOptions]",
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


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
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    scale: float | None = None,
    descale_k: Tensor | None = None,
    descale_v: Tensor | None = None,
    kv_layout: str = "NHD",
    return_lse: bool = False,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    backend: str | None = None,
    row_invariant: bool = False,
    batch_invariant: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of B sequences' new rows over the keys that their caches have: `softmax(q @ k^T) @ v` of each.

    Row i of a sequence's Nq rows has position `p = i + Nk - Nq` among its Nk keys, so that new rows are the last ones:
    one row decodes, a few verify a draft, many are a chunk of a prompt. Lengths and tables are read on the device:
    nothing waits for the GPU, no longest length is asked for, and a CUDA graph may be replayed with other lengths and
    pages. Inference only.

    Args:
        q: `(B, Nq, Hq, D)`, or with `cu_seqlens_q` `(Tq, Hq, D)`, the rows of all sequences; dtypes as in `attention`.
        k_cache: `(B, N, Hkv, D)`, or with `page_table` `(pages, page, Hkv, D)`, where a page has any number of keys. In
            q's dtype, or float8_e4m3fn or float8_e5m2. Any strides, but the last dim contiguous, since it is never
            copied: on CUDA D is a multiple of 8 (of float8 caches 16), and rows begin at 16-byte boundaries. Hkv
            divides Hq: query head h reads key head `h // (Hq // Hkv)`.
        v_cache: the same with Dv. It may be a view of k_cache (MLA: `k_cache[..., :512]`), or the other half of its
            rows.
        k, v: `(B, Nnew, Hkv, D)` and `(B, Nnew, Hkv, Dv)`, or with `cu_seqlens_q` `(Tq, Hkv, D)`, as many as the
            sequence has rows: new keys, which are appended first, see `append_kvcache`. Nk counts them. What cannot be
            served raises before anything is appended.
        cache_seqlens: `(B,)` int32 on q's device: the keys that each sequence has, without new ones. A number below 0
            stands for no sequence, a row that pads a graph: nothing is read or appended. `None`: all of the cache.
        page_table: `(B, max_pages)` int32 on q's device, columns contiguous: which page has the keys `n * page` to
            `(n + 1) * page` of a sequence. Sequences may share pages. Only the entries of keys that rows see are read.
            The number of no page stands for keys and values of 0.
        cu_seqlens_q: `(B + 1,)` int32, contiguous, on q's device: where each sequence's rows begin, and where the last
            one's end; any number of rows each, none too. As in `varlen_attention`.
        causal: `True`: row i sees columns j <= p; `False`: all; `"top_left"`: row i has position i, and sees j <= i.
        window: `(left, right)`, as in `attention`. Keys to the left of all windows are not read.
        softcap, sinks, scale: as in `attention`.
        alibi_slopes: `(Hq,)` or `(B, Hq)`, as in `attention`.
        descale_k, descale_v: of float8 caches: what their values are to be multiplied by, float32 on q's device, one
            number or `(B, Hkv)`. `None`: 1.
        kv_layout: `"NHD"`, or `"HND"` for caches of `(B, Hkv, N, D)` and `(pages, Hkv, page, D)`.
        return_lse: return the logsumexp of each row too.
        out: where the result goes, of its shape and q's dtype; not in the memory of another argument. `None`: a new
            tensor.
        workspace: a uint8 tensor of `kvcache_workspace_bytes` bytes or more on q's device, for calls that are captured
            in graphs for several streams, each of which needs its own. `None`: the call allocates it.
        backend: as in `attention`.
        row_invariant: `True`: the bits of a row are those of the row in `attention(row_invariant=True)` too, and in any
            chunk of the prompt; its limits are as there, and the caches are not float8 (docs/row_invariance.md).
        batch_invariant: `False`: the bits of a sequence may depend on the others of the batch and on the number of
            multiprocessors, which makes latent attention (MLA) on Hopper faster, and nothing else today
            (docs/decode.md). Equal calls still give equal bits.

    Returns:
        out: `(B, Nq, Hq, Dv)` or `(Tq, Hq, Dv)` in q's dtype, contiguous unless `out` is given; or, with `return_lse`,
        `(out, lse)`: lse `(B, Hq, Nq)` or `(Hq, Tq)` float32 (float64 for float64 q), the natural log of the sum of
        `exp(score)` over the keys that the row sees, without sinks.

        A row that sees no key, and a row of no sequence, has out 0 and lse -inf. Nk is `cache_seqlens[b]` and the new
        keys, at most N or `max_pages * page`. What lies in the caches beside these keys never reaches a result, NaN
        included. The bits of a sequence depend on its own rows, keys and options: not on the batch, the pages' numbers
        and size, or the strides (but see `batch_invariant`).

    Raises:
        ValueError: the call cannot be served; the sentence names the argument, what was expected and what was given.
        NotImplementedError: for an argument that requires grad while gradients are recorded, or has a forward-mode
            tangent, and under `torch.vmap`.

    Example:
        >>> k_pages, v_pages = torch.randn(16, 4, 2, 64), torch.randn(16, 4, 2, 64)  # 16 pages of 4 keys, 2 heads
        >>> table = torch.tensor([[3, 7, 1], [0, 5, 2]], dtype=torch.int32)
        >>> lengths = torch.tensor([9, 4], dtype=torch.int32)
        >>> q, k, v = torch.randn(2, 1, 8, 64), torch.randn(2, 1, 2, 64), torch.randn(2, 1, 2, 64)
        >>> out = attention_with_kvcache(q, k_pages, v_pages, k=k, v=v, cache_seqlens=lengths, page_table=table)
        >>> out.shape, torch.equal(k_pages[1, 1], k[0, 0])  # key 9 of the first sequence: row 1 of its page 9 // 4
        (torch.Size([2, 1, 8, 64]), True)
    """
    if not isinstance(q, Tensor) and has_torch_function((q, k_cache, v_cache)):  # torch.fx.symbolic_trace's proxies
        return record(attention_with_kvcache, locals())
    try:
        if row_invariant is not False:
            backend = with_row_invariance(backend, row_invariant)
        if batch_invariant is not True:
            backend = with_batch_dependence(backend, batch_invariant, row_invariant)
        if causal is True:
            causal = "bottom_right"
        elif not isinstance(causal, str):
            causal = mask_name(causal)
        if return_lse is not False and return_lse is not True:
            return_lse = check_flag("return_lse", return_lse)
        left = right = None
        if window is not None:
            left, right = window_sides(window)
        if scale is not None and type(scale) is not float:
            check_number("scale", scale)
        if softcap is not None and type(softcap) is not float:
            check_number("softcap", softcap)
        if backend is None:
            backend = "auto"
        new_keys = 0
        if k is not None or v is not None:
            if k is None or v is None:
                _refuse_half(k)
            new_keys = -1 if cu_seqlens_q is not None else k.shape[1] if k.dim() == 4 else 0
        tensors = (q, k_cache, v_cache, k, v, sinks, alibi_slopes, descale_k, descale_v, out)
        if is_grad_enabled():
            for x in tensors:
                if x is not None and x.requires_grad:
                    _refuse_gradients(tensors)
        if not HAS_DUAL_LEVEL or forward_ad._current_level >= 0:
            refuse_tangents(*tensors, scale, softcap)
        if _check_lengths.ENABLED:
            mask = (causal, left)
            _check_lengths.check_cache(q, k_cache, cache_seqlens, page_table, cu_seqlens_q, new_keys, kv_layout, mask)
        call = (
            q, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q, new_keys, kv_layout, causal, left, right,
            softcap, sinks, alibi_slopes, scale, descale_k, descale_v, workspace, backend,
        )  # fmt: skip
        if k is None and out is None:
            both = _ops.kvcache_fwd_without_autograd(*call)
        else:
            both = _append_and_attend(call, k, v, out)
        return both if return_lse else both[0]
    except Exception as error:
        optional = {"k": k, "v": v, "cache_seqlens": cache_seqlens, "page_table": page_table}
        optional |= {"cu_seqlens_q": cu_seqlens_q, "sinks": sinks, "alibi_slopes": alibi_slopes, "out": out}
        optional |= {"descale_k": descale_k, "descale_v": descale_v, "workspace": workspace}
        given = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
        _raise_refusal(error, given, optional, kv_layout, scale, window, softcap, backend)
        raise


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
    """Write new keys and values behind those that the caches have, as `attention_with_kvcache(k=, v=)` does first.

    Key i of sequence b becomes its key `cache_seqlens[b] + i`; `cache_seqlens` itself is not changed. What is past the
    end of the cache, or of the sequence's row of the table, is dropped, and so is what belongs into a page that does
    not exist. Two sequences that write the same key of a shared page leave one of the two there.

    Args:
        k_cache, v_cache, cache_seqlens, page_table, kv_layout: as in `attention_with_kvcache`. Nothing is appended to a
            sequence whose `cache_seqlens` is below 0.
        k, v: `(B, Nnew, Hkv, D)` and `(B, Nnew, Hkv, Dv)`, or with `cu_seqlens` packed `(T, Hkv, D)` and
            `(T, Hkv, Dv)`; in the caches' dtype. For float8 caches float16 or bfloat16 (on the CPU float32 and float64
            too): each value becomes the nearest to `x / descale`, ties to even, and saturates at the dtype's largest
            number; NaN stays.
        cu_seqlens: `(B + 1,)` int32, contiguous, on k's device: where each sequence's new keys begin and end.
        descale_k, descale_v: of float8 caches: one number or `(B, Hkv)`, float32. `None`: 1.

    Raises:
        ValueError, NotImplementedError: as `attention_with_kvcache`.

    Example:
        >>> k_cache, v_cache = torch.zeros(2, 16, 2, 64), torch.zeros(2, 16, 2, 64)
        >>> k, v = torch.ones(2, 3, 2, 64), torch.ones(2, 3, 2, 64)
        >>> append_kvcache(k_cache, v_cache, k, v, cache_seqlens=torch.tensor([0, 14], dtype=torch.int32))
        >>> k_cache[:, :, 0, 0].sum(1)  # the third key of the second sequence has no room
        tensor([3., 2.])
    """
    if not isinstance(k_cache, Tensor) and has_torch_function((k_cache, v_cache, k, v)):
        record(append_kvcache, locals())
        return
    try:
        tensors = (None, k_cache, v_cache, k, v, None, None, descale_k, descale_v, None)
        if is_grad_enabled():
            _refuse_gradients(tensors)
        if not HAS_DUAL_LEVEL or forward_ad._current_level >= 0:
            refuse_tangents(*tensors)
        if _check_lengths.ENABLED:
            _check_lengths.check_cache(k, k_cache, cache_seqlens, page_table, cu_seqlens, -1, kv_layout, None)
        _ops.kvcache_append_without_autograd(
            k_cache, v_cache, k, v, cache_seqlens, page_table, cu_seqlens, kv_layout, descale_k, descale_v
        )
    except Exception as error:
        given = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v}
        optional = {"cache_seqlens": cache_seqlens, "page_table": page_table, "cu_seqlens": cu_seqlens}
        optional |= {"descale_k": descale_k, "descale_v": descale_v}
        _raise_refusal(error, given, optional, kv_layout, None, None, None, None)
        raise


def kvcache_workspace_bytes(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    new_keys: int = 0,
    causal: bool | str = True,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    scale: float | None = None,
    descale_k: Tensor | None = None,
    descale_v: Tensor | None = None,
    kv_layout: str = "NHD",
    backend: str | None = None,
    row_invariant: bool = False,
    batch_invariant: bool = True,
) -> int:
    """How many bytes of `workspace` a call of `attention_with_kvcache` takes: what follows from shapes and options.

    Args:
        new_keys: how many keys each sequence gets appended; -1: as many as it has rows, as with `cu_seqlens_q`.
        Others: as in `attention_with_kvcache`.

    Returns:
        A number of bytes, which no values of the tensors change; 0 on the CPU.

    Raises:
        ValueError: as `attention_with_kvcache`.

    Example:
        >>> kvcache_workspace_bytes(torch.randn(2, 1, 8, 64), torch.randn(2, 99, 2, 64), torch.randn(2, 99, 2, 64))
        0
    """
    if row_invariant is not False:
        backend = with_row_invariance(backend, row_invariant)
    if batch_invariant is not True:
        backend = with_batch_dependence(backend, batch_invariant, row_invariant)
    places = (cache_seqlens, page_table, cu_seqlens_q, new_keys, kv_layout)
    score = (softcap, sinks, alibi_slopes, scale)
    found = plan(q, k_cache, v_cache, places, causal, window, score, descale_k, descale_v, backend, 0)
    return int(found["workspace_bytes"])


def plan(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    places: tuple[Any, ...],
    causal: Any,
    window: Any,
    score: tuple[Any, ...],
    descale_k: Tensor | None,
    descale_v: Tensor | None,
    backend: Any,
    capability: int,
) -> dict[str, Any]:
    """The plan of a call. `places`: the values of a CacheOptions; `score`: of CallOptions from softcap to scale."""
    softcap, sinks, alibi_slopes, scale = score
    try:
        left, right = (None, None) if window is None else window_sides(window)
        mask = (mask_name(causal), left, right)
        check_number("scale", scale)
        check_number("softcap", softcap)
        own = (descale_k, descale_v, None, "auto" if backend is None else backend)
        found: dict[str, Any] = json.loads(
            _ops.kvcache_plan(q, k_cache, v_cache, *places, *mask, *score, *own, capability)
        )
    except Exception as error:
        given = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
        optional = dict(zip(("cache_seqlens", "page_table", "cu_seqlens_q"), places, strict=False))
        optional |= {"sinks": sinks, "alibi_slopes": alibi_slopes, "descale_k": descale_k, "descale_v": descale_v}
        _raise_refusal(error, given, optional, places[-1], scale, window, softcap, backend)
        raise
    return found


def attend_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[Any, ...],
    page_table: Any,
    causal: Any,
    scale: Any,
    window: Any,
    softcap: Any,
    sinks: Any,
    alibi_slopes: Any,
    return_lse: bool,
    deterministic: Any,
    backend: Any,
    accumulate: Any,
    fp8: tuple[Any, ...],
    quantize: Any = None,
) -> Any:
    """`varlen_attention` with a page table; `lengths`: its values of Lengths, `fp8`: descale_q to descale_out."""
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, _, _ = lengths
    descale_q, descale_k, descale_v, out_dtype, descale_out = fp8
    refused = {"cu_seqlens_k": cu_seqlens_k, "seqused_q": seqused_q, "accumulate": accumulate}
    refused |= {"descale_q": descale_q, "out_dtype": out_dtype, "descale_out": descale_out, "quantize": quantize}
    refuse(refused, "beside a page_table")
    for name, x in (("seqused_k", seqused_k), ("page_table", page_table), ("cu_seqlens_q", cu_seqlens_q)):
        if not isinstance(x, Tensor):
            raise ValueError(f"flash_cute: {name}: expected a torch.Tensor beside a page_table, got {shown(x)}")
    if deterministic is not None:  # of the backward, which there is not
        check_deterministic(deterministic)
    return attention_with_kvcache(
        q, k, v, cache_seqlens=seqused_k, page_table=page_table, cu_seqlens_q=cu_seqlens_q, causal=causal,
        window=window, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes, scale=scale, descale_k=descale_k,
        descale_v=descale_v, return_lse=return_lse, backend=backend,
    )  # fmt: skip


def refuse(given: dict[str, Any], where: str) -> None:
    """Raise for an argument that such a call does not have."""
    for name, x in given.items():
        if x is not None and not (name == "accumulate" and x == "float32"):
            raise ValueError(f"flash_cute: {name}: expected None {where}, got {shown(x)}")


def _append_and_attend(call: tuple[Any, ...], k: Tensor | None, v: Tensor | None, out: Tensor | None) -> Any:
    """The call with new keys or a result of its own: `(out, lse)`."""
    q, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q, _, kv_layout, *_, descale_k, descale_v, _, _ = call
    lse = None
    if out is not None:
        rows = (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else q.shape[:2][::-1]
        lse = q.new_empty(rows, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    if k is not None:
        if not (is_compiling() or functorch_is_active() or dispatch_modes() or jit_is_tracing()):
            _ops.check_kvcache_fwd(*call, "", out, lse)  # so that a call that cannot be served appends nothing
        _ops.kvcache_append_without_autograd(
            k_cache, v_cache, k, v, cache_seqlens, page_table, cu_seqlens_q, kv_layout, descale_k, descale_v
        )
    if out is None:
        return _ops.kvcache_fwd_without_autograd(*call)
    _ops.kvcache_fwd_out_without_autograd(*call, out, lse)
    return out, lse


_TENSORS = ("q", "k_cache", "v_cache", "k", "v", "sinks", "alibi_slopes", "descale_k", "descale_v", "out")


def _refuse_gradients(tensors: tuple[Tensor | None, ...]) -> None:
    for name, x in zip(_TENSORS, tensors, strict=True):
        if x is not None and x.requires_grad:
            raise NotImplementedError(
                f"{_ops.NO_CACHE_GRADIENT}, and {name} requires grad; torch.no_grad() says that no gradient is needed."
            )


def _refuse_half(k: Tensor | None) -> NoReturn:
    given, missing = ("v", "k") if k is None else ("k", "v")
    raise ValueError(f"flash_cute: {missing}: expected a torch.Tensor beside {given}, got None")


def _raise_refusal(
    error: Exception,
    given: dict[str, Any],
    optional: dict[str, Any],
    kv_layout: Any,
    scale: Any,
    window: Any,
    softcap: Any,
    backend: Any,
) -> None:
    """`raise_refusal`, where `optional` need not be given."""
    given |= {name: x for name, x in optional.items() if x is not None}
    raise_refusal(error, given, scale, window, softcap, backend)
    if not isinstance(kv_layout, str):
        raise ValueError(f"flash_cute: kv_layout: expected 'NHD' or 'HND', got {shown(kv_layout)}") from None

"""Attention over caches of keys and values, contiguous or in pages: decoding, verification, chunked prefill."""

import json
from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.overrides import has_torch_function

from . import _ops
from ._call import record
from ._refusals import Window, check_flag, check_number, mask_name, raise_refusal, window_sides
from ._torch import HAS_DUAL_LEVEL, below_autograd, dispatch_modes, functorch_is_active, jit_is_tracing
from .autograd import refuse_tangents

__all__ = ["append_kvcache", "attention_with_kvcache", "kvcache_workspace_bytes"]


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
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of new rows over the keys that a cache has."""
    if not isinstance(q, Tensor) and has_torch_function((q, k_cache, v_cache)):  # torch.fx.symbolic_trace's proxies
        return record(attention_with_kvcache, locals())
    try:
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
            new_keys = k.shape[1] if cu_seqlens_q is None else -1
        score = (softcap, sinks, alibi_slopes, scale)
        own = (descale_k, descale_v, workspace, backend)
        places = (cache_seqlens, page_table, cu_seqlens_q)
        call = (q, k_cache, v_cache, *places, new_keys, kv_layout, causal, left, right, *score, *own)
        if not HAS_DUAL_LEVEL or forward_ad._current_level >= 0:
            refuse_tangents(*call, k, v, out)
        traced = is_compiling() or functorch_is_active() or dispatch_modes() or jit_is_tracing()
        if torch.is_grad_enabled():
            _refuse_gradients(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, sinks=sinks, out=out)
            _refuse_gradients(alibi_slopes=alibi_slopes, descale_k=descale_k, descale_v=descale_v)
        if traced:
            return _run(call, k, v, out, return_lse, False)
        with below_autograd():
            return _run(call, k, v, out, return_lse, k is not None)
    except Exception as error:
        optional = {"k": k, "v": v, "cache_seqlens": cache_seqlens, "page_table": page_table}
        optional |= {"cu_seqlens_q": cu_seqlens_q, "sinks": sinks, "alibi_slopes": alibi_slopes, "out": out}
        optional |= {"descale_k": descale_k, "descale_v": descale_v, "workspace": workspace}
        given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, **_without_none(optional)}
        _check_layout(kv_layout)
        raise_refusal(error, given, scale, window, softcap, backend)
        raise


def _run(
    call: tuple[Any, ...], k: Tensor | None, v: Tensor | None, out: Tensor | None, return_lse: bool, checked: bool
) -> Any:
    """The append, if any, and the attention. `checked`: nothing is appended for a call that cannot be served."""
    q, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q, _, kv_layout, *_ = call
    descale_k, descale_v = call[-4:-2]
    lse = None
    if out is not None:
        rows = (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])
        lse = q.new_empty(rows, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    if k is not None:
        if checked:
            _ops.check_kvcache_fwd(*call, "", out, lse)
        places = (cache_seqlens, page_table, cu_seqlens_q)
        _ops.kvcache_append(k_cache, v_cache, k, v, *places, kv_layout, descale_k, descale_v)
    if out is None:
        both = _ops.kvcache_fwd(*call)
        return both if return_lse else both[0]
    _ops.kvcache_fwd_out(*call, out, lse)
    return (out, lse) if return_lse else out


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
    """Write new keys and values behind those that a cache has."""
    if torch.is_grad_enabled():
        _refuse_gradients(k_cache=k_cache, v_cache=v_cache, k=k, v=v, descale_k=descale_k, descale_v=descale_v)
    places = (cache_seqlens, page_table, cu_seqlens)
    try:
        _ops.kvcache_append(k_cache, v_cache, k, v, *places, kv_layout, descale_k, descale_v)
    except Exception as error:
        optional = {"page_table": page_table, "cu_seqlens": cu_seqlens, "descale_k": descale_k, "descale_v": descale_v}
        given = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "cache_seqlens": cache_seqlens}
        given |= _without_none(optional)
        _check_layout(kv_layout)
        raise_refusal(error, given, None, None, None, None)
        raise


def kvcache_workspace_bytes(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
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
    backend: str | None = None,
) -> int:
    """The bytes of `workspace` that `attention_with_kvcache` takes for tensors of these shapes."""
    left, right = (None, None) if window is None else window_sides(window)
    plan = json.loads(
        _ops.kvcache_plan(
            q, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q, 0, kv_layout, mask_name(causal), left, right,
            softcap, sinks, alibi_slopes, scale, descale_k, descale_v, None, backend or "auto", 0,
        )  # fmt: skip
    )
    return int(plan["workspace_bytes"])


def _refuse_gradients(**given: Tensor | None) -> None:
    for name, x in given.items():
        if x is not None and x.requires_grad:
            raise NotImplementedError(
                f"{_ops.NO_CACHE_GRADIENT}, and {name} requires grad; torch.no_grad() says that no gradient is needed."
            )


def _refuse_half(k: Tensor | None) -> NoReturn:
    given, missing = ("k", "v") if k is not None else ("v", "k")
    raise ValueError(f"flash_cute: {missing}: expected a tensor beside {given}, got None")


def _without_none(given: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in given.items() if x is not None}


def _check_layout(kv_layout: Any) -> None:
    if not isinstance(kv_layout, str):
        raise ValueError(f"flash_cute: kv_layout: expected 'NHD' or 'HND', got {kv_layout!r}") from None

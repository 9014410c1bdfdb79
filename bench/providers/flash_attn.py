"""The packages of FlashAttention: flash-attn (FlashAttention-2) and FlashAttention-3, which has a forward in float8."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from bench.figures import DETERMINISTIC
from bench.providers.base import (
    Backend,
    Function,
    Unavailable,
    heads_after_length,
    heads_before_length,
    is_deterministic,
    module,
    refuse,
    refuse_float8,
    require_bottom_right,
    window_limits,
)
from bench.workloads import Inputs, Workload

FLASH_ATTENTION_3 = ("fa3", f"fa3{DETERMINISTIC}")


def flash_attn(workload: Workload, device: torch.device) -> Backend:
    refuse(workload, "flash-attn", "sinks")
    refuse_float8(workload, "FlashAttention-2")
    options = _options(workload)
    if workload.alibi:
        options["alibi_slopes"] = workload.make_slopes(device)
    return _backend("flash-attn", module("flash_attn"), workload, device, options)


def flash_attn_3(name: str, workload: Workload, device: torch.device) -> Backend:
    refuse(workload, "FlashAttention-3", "sinks", "alibi")
    options = _options(workload) | {"deterministic": is_deterministic(name)}
    if workload.direction == "fwd" and workload.N < workload.M:
        options["num_splits"] = 0  # as many as it finds best; by default it divides no row's keys among CTAs
    backend = _backend(name, module("flash_attn_interface"), workload, device, options)
    return _with_factors(backend, workload) if workload.is_float8 else backend


def _with_factors(backend: Backend, workload: Workload) -> Backend:
    """For float8 inputs: their factors are (B, Hkv), q's too, and out is bfloat16."""
    if workload.lengths:
        raise Unavailable("packed batches in float8 are not measured")

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *factors: torch.Tensor) -> Any:
        of_q, of_k, of_v = factors
        return backend.call(q, k, v, q_descale=of_q, k_descale=of_k, v_descale=of_v)

    return replace(backend, call=call)


def _options(workload: Workload) -> dict[str, Any]:
    """What both packages take by the same names; only what is asked for."""
    require_bottom_right(workload, "flash-attn")
    options: dict[str, Any] = {"causal": workload.is_causal}
    if workload.window is not None:
        options["window_size"] = window_limits(workload)
    if workload.softcap:
        options["softcap"] = workload.softcap
    return options


def _backend(name: str, package: Any, workload: Workload, device: torch.device, options: dict[str, Any]) -> Backend:
    """The package's function of dense or of packed sequences."""
    function: Function = package.flash_attn_varlen_func if workload.lengths else package.flash_attn_func
    call = functools.partial(function, **options, **_lengths(workload, device))
    return Backend(name, call, arrange=heads_after_length, restore=heads_before_length)


def _lengths(workload: Workload, device: torch.device) -> dict[str, Any]:
    if not workload.lengths:
        return {}
    offsets = workload.make_offsets(device)
    longest = {"max_seqlen_q": workload.N, "max_seqlen_k": workload.M}
    return {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, **longest}


def flash_attn_3_backward(name: str, workload: Workload, device: torch.device) -> Backend:
    """Its backward's operator, called with what its forward saved, writing to new dq, dk and dv."""
    forward = flash_attn_3(name, workload, device)
    operator = torch.ops.flash_attn_3.bwd.default
    options = {"is_causal": workload.is_causal, "deterministic": is_deterministic(name), **_lengths(workload, device)}
    if workload.window is not None:
        options["window_size_left"], options["window_size_right"] = window_limits(workload)
    if workload.softcap:
        options["softcap"] = workload.softcap

    def arrange(inputs: Inputs) -> tuple[Any, ...]:
        q, k, v, dout = forward.arrange(inputs)
        out, lse = forward.call(q, k, v, return_attn_probs=True)
        return dout, q, k, v, out, lse

    def call(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *saved: torch.Tensor) -> Inputs:
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        operator(dout, q, k, v, *saved, dq=dq, dk=dk, dv=dv, **options)
        return dq, dk, dv

    return replace(forward, call=call, arrange=arrange)

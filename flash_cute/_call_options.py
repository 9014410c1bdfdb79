"""What the operators take after their tensors, as records. All but the schemas and the hot path pass these on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

__all__ = [
    "CacheOptions",
    "CallOptions",
    "Fp8Options",
    "KvCacheOptions",
    "Lengths",
    "MaskTensors",
    "split_cache",
    "split_dense",
    "split_fp8",
    "split_mask",
    "split_packed",
]


class Lengths(NamedTuple):
    """Of a packed call; in the order of the schemas (csrc/api/ops_varlen.cpp)."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None


class CallOptions(NamedTuple):
    """Mask and score of a call; in the order of the schemas (csrc/api/ops.cpp)."""

    causal: str
    window_left: int | None
    window_right: int | None
    softcap: float | None
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    scale: float | None


class MaskTensors(NamedTuple):
    """Of a call with a mask; in the order of the schemas (csrc/api/ops_masked.cpp)."""

    first_row: Tensor
    row_limit: Tensor
    first_row_2: Tensor | None
    row_limit_2: Tensor | None
    matrix: Tensor | None
    blocks: Tensor | None


class Fp8Options(NamedTuple):
    """Of a call of float8 tensors; in the order of the schemas (csrc/api/ops_fp8.cpp)."""

    descale_q: Tensor | None
    descale_k: Tensor | None
    descale_v: Tensor | None
    descale_out: Tensor | None
    out_dtype: str
    exact_lse: bool  # else the LSE is of the rounded numerators, and the kernel faster


class CacheOptions(NamedTuple):
    """Where the keys of a cache are, and how many; in the order of the schemas (csrc/api/ops_kvcache.cpp)."""

    cache_seqlens: Tensor | None
    page_table: Tensor | None
    cu_seqlens_q: Tensor | None
    new_keys: int  # appended just before to each sequence; -1: as many as it has rows
    kv_layout: str


class KvCacheOptions(NamedTuple):
    """What a call over a cache has behind its CallOptions."""

    descale_k: Tensor | None
    descale_v: Tensor | None
    workspace: Tensor | None
    backend: str


def split_fp8(given: Sequence[Any]) -> tuple[Fp8Options, Sequence[Any]]:
    """What follows the tensors of a float8 operator: its own options, and what a 16-bit operator has there."""
    count = len(Fp8Options._fields)
    return Fp8Options(*given[:count]), given[count:]


def split_mask(given: Sequence[Any]) -> tuple[MaskTensors, Sequence[Any]]:
    """What follows the tensors of a masked operator: its mask, and what an operator without one has there."""
    count = len(MaskTensors._fields)
    return MaskTensors(*given[:count]), given[count:]


def split_dense(given: Sequence[Any]) -> tuple[CallOptions, Sequence[Any]]:
    """What follows a dense operator's tensors: its options, and the rest."""
    count = len(CallOptions._fields)
    return CallOptions(*given[:count]), given[count:]


def split_packed(given: Sequence[Any]) -> tuple[Lengths, CallOptions, Sequence[Any]]:
    """What follows a packed operator's tensors: its lengths, its options, and the rest."""
    count = len(Lengths._fields)
    return Lengths(*given[:count]), *split_dense(given[count:])


def split_cache(given: Sequence[Any]) -> tuple[CacheOptions, CallOptions, KvCacheOptions, Sequence[Any]]:
    """What follows the tensors of a call over a cache: its options, and the rest."""
    count = len(CacheOptions._fields)
    options, rest = split_dense(given[count:])
    own = len(KvCacheOptions._fields)
    return CacheOptions(*given[:count]), options, KvCacheOptions(*rest[:own]), rest[own:]

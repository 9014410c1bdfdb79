"""The options of the public functions for type checkers, where the result's type depends on one of the others."""

from typing import TypedDict

import torch
from torch import Tensor

from ._refusals import Window
from .mask import Mask


class Options(TypedDict, total=False):
    """`attention`'s keyword arguments beside `return_lse`."""

    scale: float | None
    window: Window | None
    softcap: float | None
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    mask: Mask | None
    deterministic: bool | None
    backend: str | None
    accumulate: str | None
    row_invariant: bool
    descale_q: Tensor | None
    descale_k: Tensor | None
    descale_v: Tensor | None
    out_dtype: torch.dtype | None
    descale_out: Tensor | None
    quantize: str | None


class VarlenOptions(Options, total=False):
    """`varlen_attention`'s."""

    max_seqlen_q: int | None
    max_seqlen_k: int | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    page_table: Tensor | None


class KvCacheOptions(TypedDict, total=False):
    """`attention_with_kvcache`'s."""

    k: Tensor | None
    v: Tensor | None
    cache_seqlens: Tensor | None
    page_table: Tensor | None
    cu_seqlens_q: Tensor | None
    causal: bool | str
    window: Window | None
    softcap: float | None
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    scale: float | None
    descale_k: Tensor | None
    descale_v: Tensor | None
    kv_layout: str
    out: Tensor | None
    workspace: Tensor | None
    backend: str | None
    row_invariant: bool
    batch_invariant: bool

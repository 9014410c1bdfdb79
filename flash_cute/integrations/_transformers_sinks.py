"""A decoding step over a padded cache, of a model with sinks (gpt-oss)."""

from typing import Any

import torch
from torch import Tensor

from .. import varlen_attention
from ._transformers_lengths import Lengths


def row_with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    by_heads: Lengths,
    is_causal: bool,
    sinks: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """One row of q over keys that stand by heads, of which nothing is copied: `(B, 1, Hq, Dv)`.

    A sequence is one KV head of one batch item, so that sinks, which are per query head, cannot be given to the call.
    They are applied to its result: a sink adds `exp(sink)` to a denominator that is `exp(lse)`.

    Args:
        query: `(B, Hq, 1, D)`; key, value: `(B, Hkv, N, D)` and `(B, Hkv, N, Dv)`, contiguous.
        by_heads: the lengths of a sequence per KV head.
        sinks: `(Hq,)`.
        options: `window`, `softcap` and `scale` of `flash_cute.varlen_attention`.
    """
    batch, heads_kv = key.shape[:2]
    q = query.reshape(batch * heads_kv, -1, query.shape[3])
    k, v = (x.view(-1, 1, x.shape[3]) for x in (key, value))
    cu_q, cu_k, used_q, used_k, longest_q, longest_k = by_heads
    lengths: dict[str, Any] = {"seqused_q": used_q, "seqused_k": used_k}
    lengths |= {"max_seqlen_q": longest_q, "max_seqlen_k": longest_k}
    out, lse = varlen_attention(q, k, v, cu_q, cu_k, is_causal, return_lse=True, **lengths, **options)
    # (Hq / Hkv, B * Hkv) -> (B, Hkv, Hq / Hkv)
    lse = lse.t().view(batch, heads_kv, -1)
    share = torch.sigmoid(lse - sinks.to(lse.dtype).view(heads_kv, -1))
    result: Tensor = (out.view(*lse.shape, -1) * share[..., None]).to(out.dtype)
    return result.view(batch, 1, query.shape[1], -1)

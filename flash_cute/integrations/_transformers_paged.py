"""The pages of continuous batching's cache (`generate_batch`), as Transformers gives them to an attention function.

A batch is one row of tokens of many sequences. Where each sequence has one token, and the implementation's name says
that it can, Transformers passes the pages of the cache on: new keys are appended to them and all are read in place, by
`flash_cute.attention_with_kvcache`. A sequence that pads a graph has no token: its length is -1 then, and it is neither
read nor written. Every other batch is a packed call over keys that Transformers has gathered.

In 5.24 the cache's `update` has been called before, and the attention function finds pages among its keywords. In 5.17
an implementation "paged|NAME" is given the cache and calls `update` itself.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import attention_with_kvcache
from ._transformers_given import refuse_unsaid_window
from ._transformers_keywords import HARMLESS, refuse


class Score(NamedTuple):
    """What a layer says of its scores."""

    scaling: float | None
    sliding_window: int | None
    softcap: float | None
    s_aux: Tensor | None
    row_invariant: bool


def decode(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cu_seq_lens_k: Tensor | None,
    score: Score,
    *,
    block_table: Tensor,
    k_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """One token of each of B sequences, appended to the cache: `(1, B, Hq, Dv)`.

    Args:
        query, key, value: `(1, H, B, D)`, the new tokens.
        attention_mask: None.
        cu_seq_lens_k: `(at least B + 1,)` int32, offsets of the keys, the new ones included.
        block_table: `(B, pages of a sequence)` int32; k_cache, v_cache: `(pages, page, Hkv, D)`, which are written to.

    Raises:
        ValueError: something of it is missing, or not so; and whatever `attention_with_kvcache` refuses.
    """
    for name in kwargs:
        if name not in HARMLESS and kwargs[name] is not None and kwargs[name] is not False:
            refuse(kwargs)
    if k_cache is None or v_cache is None or cu_seq_lens_k is None:
        given = {"k_cache": k_cache, "v_cache": v_cache, "cu_seq_lens_k": cu_seq_lens_k}
        missing = next(name for name, x in given.items() if x is None)
        raise ValueError(f"flash_cute: {missing}: expected a tensor beside block_table, got None")
    if attention_mask is not None:
        raise ValueError("flash_cute: attention_mask: expected None beside block_table, got Tensor")
    if query.shape[0] != 1 or query.shape[2] != block_table.shape[0]:
        raise ValueError(
            f"flash_cute: query: expected (1, Hq, {block_table.shape[0]}, D), a token of each sequence of block_table, "
            f"got {tuple(query.shape)}"
        )
    if score.sliding_window is None:
        refuse_unsaid_window(module, None)
    # (1, H, B, D) -> (B, 1, H, D)
    q, k, v = (x.permute(2, 0, 1, 3) for x in (query, key, value))
    out: Any = attention_with_kvcache(
        q,
        k_cache,
        v_cache,
        k=k,
        v=v,
        cache_seqlens=(cu_seq_lens_k.diff()[: q.shape[0]] - 1).int(),
        page_table=block_table,
        causal=True,
        window=None if score.sliding_window is None else (score.sliding_window - 1, 0),
        softcap=score.softcap,
        sinks=score.s_aux,
        scale=score.scaling,
        row_invariant=score.row_invariant,
    )
    result: Tensor = out.transpose(0, 1)
    return result


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    *,
    cache: Any = None,
    cu_seq_lens_k: Tensor | dict[str, Tensor] | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | dict[str, int] | None = None,
    read_index: list[Tensor] | None = None,
    write_index: list[Tensor] | None = None,
    block_table: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What a layer of Transformers 5.17 calls where the implementation is "paged|flash_cute": see the module.

    Args:
        module: the layer, whose `layer_idx` the cache knows.
        cache: Transformers' `PagedAttentionCache`.
        cu_seq_lens_k, max_seqlen_k: of all layers, or by the kind of a layer.
        read_index, write_index: of each group of layers, where the cache reads and writes.
        block_table: `(groups, B, pages of a sequence)` int32, or None: the cache gathers keys.
        the others: as `flash_cute.integrations.transformers.attention` has them.

    Raises:
        ValueError: there is no cache; and whatever `attention` and `decode` refuse.
    """
    from .transformers import attention

    if cache is None:
        raise ValueError(
            "flash_cute: cache: expected continuous batching's (generate_batch) for 'paged|flash_cute', got None: "
            "attn_implementation='flash_cute' serves other calls"
        )
    layer: Any = module.layer_idx
    window: int = cache.sliding_windows[layer]  # 1: none
    kind = "full_attention" if window == 1 else "sliding_attention"
    if sliding_window is None and window != 1:  # one that only a mask would say
        sliding_window = window
    offsets_k = cu_seq_lens_k[kind] if isinstance(cu_seq_lens_k, dict) else cu_seq_lens_k
    longest_k = max_seqlen_k[kind] if isinstance(max_seqlen_k, dict) else max_seqlen_k
    if block_table is not None:
        group, index = cache.layer_index_to_group_indices[layer]
        pages = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
        kwargs |= {"k_cache": cache.key_cache[index].view(pages), "v_cache": cache.value_cache[index].view(pages)}
        kwargs["block_table"] = block_table[group]
    else:
        # (1, Hkv, new, D) -> (keys, Hkv, D)
        key, value = cache.update(key, value, layer, read_index, write_index)
        key, value = (x.transpose(0, 1)[None] for x in (key, value))
    kwargs |= {"cu_seq_lens_k": offsets_k, "max_length_q": max_seqlen_q, "max_length_k": longest_k}
    score = (dropout, scaling, sliding_window, softcap, True, s_aux)
    return attention(module, query, key, value, attention_mask, *score, **kwargs)

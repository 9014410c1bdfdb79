"""flash_cute as an attention implementation of Hugging Face's Transformers.

    import flash_cute.integrations.transformers
    from transformers import AutoModelForCausalLM

    flash_cute.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="flash_cute", dtype="bfloat16")

Transformers calls two functions by that name: a mask function, once per forward and kind of layer, and the attention
function, in each layer. The mask function decides what the layers have to do and passes it on in place of a mask:

* None: every row sees all keys that causality and window leave it. The layers call `flash_cute.attention`.
* Sequences, a small int32 tensor of offsets: a padded batch, a batch that a StaticCache has room for, or sequences
  packed into one row. The layers call `flash_cute.varlen_attention`, on views of what they have, without unpadding.

The rest (window, softcap, sinks, scale, causal) is passed to the attention function by the model. What cannot be
served raises a ValueError; docs/integrations.md has the table.

Past 400 lines, and one file: what the mask function returns is private to it and to the attention function, which
reads it.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import flash_cute

NAME = "flash_cute"

# What models pass to an attention function that changes its result and has no counterpart here.
_UNSERVED = {
    "output_attentions": "the attention weights are never in memory",
    "position_bias": "a bias added to the scores is not served",
    "cache": "the paged cache of continuous batching is not served",
    "block_table": "paged KV caches are not served",
    "indices": "sparse attention is not served",
    "block_indices": "sparse attention is not served",
    "head_mask": "weights cannot be multiplied by a mask of heads",
}


def register() -> None:
    """Make `attn_implementation="flash_cute"` known to Transformers, whose version is at least 5.

    To be called once, before a model is loaded or `model.set_attn_implementation("flash_cute")`; again does no harm.

    Raises:
        ImportError: Transformers is not installed, too old, or lacks what this needs.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM  # doctest: +SKIP
        >>> register()  # doctest: +SKIP
        >>> model = LlamaForCausalLM._from_config(LlamaConfig(), attn_implementation="flash_cute")  # doctest: +SKIP
    """
    import transformers

    version = transformers.__version__
    if int(version.split(".")[0]) < 5:
        raise ImportError(f"flash_cute: transformers: expected version 5 or newer, got {version}")
    model_class = transformers.PreTrainedModel
    check = getattr(model_class, "_check_and_adjust_attn_implementation", None)
    if check is None:
        raise ImportError(
            f"flash_cute: transformers: version {version} chooses an attention implementation in a way that this "
            "version of flash_cute does not know"
        )
    transformers.AttentionInterface.register(NAME, attention)
    transformers.AttentionMaskInterface.register(NAME, mask)
    if not hasattr(check, "accepts_flash_cute"):
        model_class._check_and_adjust_attn_implementation = _accept_name(check)


def _accept_name(check: Callable[..., str]) -> Callable[..., str]:
    """PreTrainedModel's choice of an implementation, which takes our name as it is.

    By "flash" in a name Transformers knows implementations that are given padding as a 2-D mask and packed sequences as
    offsets, as we want. It then also tries to load flash-attn or a kernel of that name from the hub, and replaces the
    name where a model lists the flash-attention implementations that it works with (gpt-oss: those that have sinks).
    """

    @functools.wraps(check)
    def accepting(self: Any, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        if attn_implementation != NAME:
            return check(self, attn_implementation, *args, **kwargs)
        if not (self._supports_flash_attn or getattr(self, "_supports_attention_backend", False)):
            # Such a model would compute its own attention whatever the name.
            raise ValueError(
                f"flash_cute: attn_implementation: expected a model that uses Transformers' attention interface, got "
                f"{type(self).__name__}"
            )
        return NAME

    accepting.accepts_flash_cute = True  # type: ignore[attr-defined]
    return accepting


def attention(
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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function: what a model's layer calls.

    Args:
        module: the layer; its `is_causal` counts where the argument is None.
        query: `(B, Hq, Nq, D)`; key: `(B, Hkv, Nk, D)`; value: `(B, Hkv, Nk, Dv)`; dtypes as `flash_cute.attention`.
        attention_mask: what `mask` returned; or a padding mask `(B, up to Nk)`, nonzero where there is a token, whose
            last Nq columns are the queries'. Keys behind its last column are not seen.
        dropout: 0.
        scaling, softcap: as `scale` and `softcap` of `flash_cute.attention`.
        sliding_window: how many keys a row sees, its own included; not causal: that many on each side.
        s_aux: sinks, `(Hq,)`.
        kwargs: `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and `max_length_k` of sequences packed into the rows of
            the batch; `position_ids`, `(1, Nq)`, which begin again with each of them; `deterministic`.

    Returns:
        `(B, Nq, Hq, Dv)`, and None for the weights. Rows of padding are 0.

    Raises:
        ValueError: the call cannot be served: a custom 4-D mask, dropout, weights, a bias, a paged cache, sparse keys;
            and whatever `flash_cute.attention` refuses.

    Example:
        >>> q, k, v = torch.randn(1, 8, 128, 64), torch.randn(1, 2, 128, 64), torch.randn(1, 2, 128, 64)
        >>> out, _ = attention(torch.nn.Module(), q, k, v, None, sliding_window=32, is_causal=True)
        >>> out.shape
        torch.Size([1, 128, 8, 64])
    """
    if dropout:
        raise ValueError(f"flash_cute: dropout: expected 0 (set the model's attention dropout to 0), got {dropout}")
    for name in _UNSERVED.keys() & kwargs.keys():
        if kwargs[name] is not None and kwargs[name] is not False:
            raise ValueError(f"flash_cute: {name}: expected None, since {_UNSERVED[name]}")
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    window = None
    if sliding_window is not None:
        window = (sliding_window - 1, 0 if is_causal else sliding_window - 1)
    options: dict[str, Any] = {
        "scale": scaling,
        "window": window,
        "softcap": softcap,
        "sinks": s_aux,
        # False is a model's default, and must not override torch.use_deterministic_algorithms.
        "deterministic": kwargs.get("deterministic") or None,
    }
    if attention_mask is not None or kwargs.get("cu_seq_lens_q") is not None or _may_be_packed(query, key, kwargs):
        lengths = _lengths(query, key, is_causal, attention_mask, kwargs)
        if lengths is not None:
            # (B, H, N, D) -> (B * N, H, D): a view of projections, a copy of what a cache holds.
            q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
            out: Any = flash_cute.varlen_attention(q, k, v, causal=is_causal, **lengths, **options)
            return out.unflatten(0, (query.shape[0], query.shape[2])), None
    out = flash_cute.attention(query, key, value, is_causal, **options)
    return out.transpose(1, 2), None


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """Transformers' mask function: what the layers have to know beyond causality and window.

    Query row i has the position `q_offset + i`, key j the position `kv_offset + j`. Reads the padding mask once, which
    waits for the GPU, as Transformers' own mask functions do.

    Args:
        batch_size, q_length, kv_length: B, Nq, Nk.
        q_offset: positions before the first query; a tensor where a StaticCache counts them.
        mask_function: which key a row sees, as a function of indices of batch, head, row and key.
        attention_mask: padding, `(B, positions)` bool, False where there is no token. `None`: no padding.
        allow_is_causal_skip, allow_is_bidirectional_skip: whether `mask_function` is causality or a window alone, of a
            causal and of a bidirectional model; neither: packed sequences, or something of the model's own.
        use_vmap: whether a model or a user has added a function of its own.

    Returns:
        None, or `(offsets, Nk, 1, columns)` int32, which Transformers hands on as it hands on 4-D masks, and whose dim
        1 has stride 0: with one column the offsets of packed sequences; with four, of a padded batch, offsets of
        queries, of keys, used queries and used keys (the last of each counts nothing).

    Raises:
        ValueError: a mask function of the model's or the user's own; a padding mask whose tokens are not in one block.

    Example:
        >>> padding = torch.tensor([[False, False, True, True], [True, True, True, True]])
        >>> mask(2, 4, 4, attention_mask=padding)[:, 0, 0, 0]
        tensor([2, 4, 4, 8], dtype=torch.int32)
    """
    if use_vmap:
        raise ValueError(
            "flash_cute: mask_function: expected causality, a window, padding or packed sequences, got one that the "
            "model or its caller has combined with another (or_mask_function, and_mask_function); "
            "attn_implementation='sdpa' serves it"
        )
    bidirectional = allow_is_bidirectional_skip
    if mask_function is not None and not (allow_is_causal_skip or bidirectional or q_length == 1):
        bidirectional, starts = _probe(mask_function, batch_size, q_length, q_offset, kv_offset, device)
        if starts is not None:
            end = torch.tensor([starts.numel()], device=device)
            offsets = torch.cat((starts.flatten().nonzero()[:, 0], end)).int()
            return offsets[:, None, None, None].expand(-1, kv_length, 1, 1)
    seen = kv_length if bidirectional else q_offset + q_length - kv_offset
    if attention_mask is None:
        if isinstance(seen, int) and seen == kv_length:
            return None
        attention_mask = torch.ones((batch_size, kv_length), dtype=torch.bool, device=device)
    else:
        attention_mask = attention_mask[:, kv_offset : kv_offset + kv_length]
    # Of cross-attention the mask is the keys', and all queries count.
    own = not bidirectional or q_length == kv_length
    return _padded(attention_mask, q_length, kv_length, seen, seen - q_length if own else None)


def _probe(
    mask_function: Callable[..., Tensor],
    batch_size: int,
    q_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    device: torch.device | str,
) -> tuple[bool, Tensor | None]:
    """Whether a mask function is bidirectional, and, `(B, Nq)`, where packed sequences begin (None: nowhere).

    A row that does not see the key before its own begins a sequence. Some rows that see the key behind them, and some
    that do not, are neither causal nor bidirectional: blocks of an image within text.
    """
    batch = torch.arange(batch_size, device=device)[:, None]
    rows = torch.arange(1, q_length, device=device)[None] + q_offset
    head = torch.zeros((1, 1), dtype=torch.long, device=device)
    shape = (batch_size, q_length - 1)
    sees_previous = mask_function(batch, head, rows, rows - 1).expand(shape)
    sees_next = mask_function(batch, head, rows - 1, rows).expand(shape)
    all_previous, any_next, same = torch.stack(
        (sees_previous.all(), sees_next.any(), (sees_next == sees_previous).all())
    ).tolist()
    if any_next and not same:
        raise ValueError(
            "flash_cute: mask_function: expected a causal or a bidirectional one, got one that is causal in part "
            "(block_sequence_ids); attn_implementation='sdpa' serves it"
        )
    if all_previous:
        return any_next, None
    return any_next, torch.nn.functional.pad(~sees_previous, (1, 0), value=True)


def _padded(
    tokens: Tensor, q_length: int, kv_length: int, seen: int | Tensor, first_row: int | Tensor | None
) -> Tensor | None:
    """What `mask` returns of a padding mask.

    tokens: `(B, columns)`, of the keys; seen: how many keys there are, the rest being a cache's room for later ones;
    first_row: the column of the first query, None where queries are not among the keys.

    The batch is read as 2B - 1 sequences in one tensor of B * Nk rows: in turn the tokens of a batch item, and the gap
    up to those of the next one, of which nothing is used. So padding costs no copy, and neither side of it matters.
    """
    batch_size, columns = tokens.shape
    tokens = tokens.bool()
    column = torch.arange(columns, device=tokens.device)
    begin = torch.where(tokens, column, columns).amin(1)  # (B,)
    end = torch.where(tokens, column + 1, 0).amax(1)  # (B,)
    count = tokens.sum(1)
    holes = (count != (end - begin).clamp(min=0)).any()
    shortest, holes_found = torch.stack((count.amin(), holes)).tolist()
    if holes_found:
        raise ValueError(
            "flash_cute: attention_mask: expected the tokens of each batch item in one block (padding before it, "
            "behind it or both), got padding between tokens"
        )
    if shortest == kv_length and isinstance(seen, int) and seen == kv_length:
        return None
    end = end.clamp(max=seen)
    begin = torch.minimum(begin, end)
    if first_row is None:
        first_query, last_query = torch.zeros_like(begin), torch.full_like(end, q_length)
    else:
        first_query, last_query = ((x - first_row).clamp(0, q_length) for x in (begin, end))
    item = torch.arange(batch_size, device=tokens.device)

    def offsets(first: Tensor, last: Tensor, length: int) -> Tensor:
        return torch.stack((item * length + first, item * length + last), 1).flatten()

    def used(first: Tensor, last: Tensor) -> Tensor:
        return torch.stack((last - first, torch.zeros_like(first)), 1).flatten()

    rows = (
        offsets(first_query, last_query, q_length),
        offsets(begin, end, kv_length),
        used(first_query, last_query),
        used(begin, end),
    )
    # In memory each of the four is contiguous, as `varlen_attention` wants them.
    return torch.stack(rows).int().t()[:, None, None].expand(-1, kv_length, 1, 4)


def _lengths(
    query: Tensor, key: Tensor, is_causal: bool, attention_mask: Tensor | None, kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """The arguments of `varlen_attention` for this call; None: it is not needed."""
    batch_size, q_length, kv_length = query.shape[0], query.shape[2], key.shape[2]
    if attention_mask is not None and attention_mask.dim() == 2:
        seen = attention_mask.shape[1]
        if attention_mask.shape[0] != batch_size or seen > kv_length:
            raise ValueError(
                f"flash_cute: attention_mask: expected ({batch_size}, at most {kv_length}), "
                f"got {tuple(attention_mask.shape)}"
            )
        own = is_causal or q_length == kv_length
        attention_mask = _padded(attention_mask, q_length, kv_length, seen, seen - q_length if own else None)
    columns = 0
    if attention_mask is not None:
        columns = _columns(attention_mask, batch_size, kv_length)
    if kwargs.get("cu_seq_lens_q") is not None:
        if columns == 4:
            raise ValueError("flash_cute: attention_mask: expected no padding beside cu_seq_lens_q, got some")
        if kwargs.get("cu_seq_lens_k") is None:
            raise ValueError("flash_cute: cu_seq_lens_k: expected offsets beside those of cu_seq_lens_q, got None")
        longest = (kwargs.get("max_length_q"), kwargs.get("max_length_k"))
        return {
            "cu_seqlens_q": kwargs["cu_seq_lens_q"].int(),
            "cu_seqlens_k": kwargs["cu_seq_lens_k"].int(),
            # They are hints. A tensor's value would have to be waited for.
            "max_seqlen_q": longest[0] if isinstance(longest[0], int) else None,
            "max_seqlen_k": longest[1] if isinstance(longest[1], int) else None,
        }
    if attention_mask is None:
        offsets = _offsets_of_positions(kwargs["position_ids"]) if _may_be_packed(query, key, kwargs) else None
        return None if offsets is None else {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    lists = [x.contiguous() for x in attention_mask[:, 0, 0].unbind(1)]
    if columns == 1:
        return {"cu_seqlens_q": lists[0], "cu_seqlens_k": lists[0]}
    return {
        "cu_seqlens_q": lists[0],
        "cu_seqlens_k": lists[1],
        "seqused_q": lists[2][:-1],
        "seqused_k": lists[3][:-1],
        "max_seqlen_q": q_length,
        "max_seqlen_k": kv_length,
    }


def _columns(attention_mask: Tensor, batch_size: int, kv_length: int) -> int:
    """How many columns the offsets that `mask` returned have, which distinguishes padding from packing."""
    shape = tuple(attention_mask.shape)
    if attention_mask.dtype != torch.int32 or len(shape) != 4 or shape[2] != 1 or shape[3] not in (1, 4):
        raise ValueError(
            "flash_cute: attention_mask: expected None or a padding mask (batch, positions), got "
            f"{attention_mask.dtype} {shape}; custom masks need attn_implementation='sdpa' or 'eager'"
        )
    if shape[1] != kv_length or (shape[3] == 4 and shape[0] != 2 * batch_size):
        raise ValueError(
            f"flash_cute: attention_mask: expected one made for {batch_size} batch items of {kv_length} keys, "
            f"got {shape}"
        )
    return shape[3]


def _may_be_packed(query: Tensor, key: Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether position_ids have to be read: without padding, with no keys before the queries', in a batch of one.

    The mask function sees packed sequences where a model has no KV cache. By default it has one in a forward without
    gradients, also where sequences are packed.
    """
    length = query.shape[2]
    if query.shape[0] != 1 or length == 1 or key.shape[2] != length:
        return False
    positions = kwargs.get("position_ids")
    return positions is not None and positions.dim() == 2 and positions.shape[1] == length


def _offsets_of_positions(positions: Tensor) -> Tensor | None:
    """`(sequences + 1,)` int32: where positions begin again; None: there is one sequence. Read once per forward."""
    if torch.compiler.is_compiling() or positions.is_inference():  # neither has a version to tell what is outdated
        return _read_positions(positions)
    known = getattr(positions, "_flash_cute_offsets", None)
    if known is None or known[0] != positions._version:
        known = (positions._version, _read_positions(positions))
        positions._flash_cute_offsets = known  # type: ignore[attr-defined]
    offsets: Tensor | None = known[1]
    return offsets


def _read_positions(positions: Tensor) -> Tensor | None:
    starts = (positions[0] == positions[0, 0]).nonzero()[:, 0]
    if starts.numel() == 1:
        return None
    return torch.cat((starts, starts.new_tensor([positions.shape[1]]))).int()

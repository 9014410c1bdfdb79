"""Transformers' mask function for flash_cute: what the layers have to know of padding and of packed sequences.

What it returns is read by the attention function alone (`flash_cute.integrations.transformers`).
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

# cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q and max_seqlen_k of `varlen_attention`.
Lengths: TypeAlias = tuple[Tensor, Tensor, Tensor | None, Tensor | None, int | None, int | None]


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
            lengths = (offsets, offsets, None, None, None, None)
            packed = offsets[:, None, None, None].expand(-1, kv_length, 1, 1)
            return _with_lengths(packed, lengths, batch_size, q_length, kv_length)
    seen = kv_length if bidirectional else q_offset + q_length - kv_offset
    if attention_mask is None:
        if isinstance(seen, int) and seen == kv_length:
            return None
        attention_mask = torch.ones((batch_size, kv_length), dtype=torch.bool, device=device)
    else:
        attention_mask = attention_mask[:, kv_offset : kv_offset + kv_length]
    # Of cross-attention the mask is the keys', and all queries count.
    own = not bidirectional or q_length == kv_length
    return padded(attention_mask, q_length, kv_length, seen, seen - q_length if own else None)


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


def padded(
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
    stacked = torch.stack(rows).int()
    result = stacked.t()[:, None, None].expand(-1, kv_length, 1, 4)
    return _with_lengths(result, _of_padding(stacked.unbind(0), q_length, kv_length), batch_size, q_length, kv_length)


def _of_padding(rows: Sequence[Tensor], q_length: int, kv_length: int) -> Lengths:
    return rows[0], rows[1], rows[2][:-1], rows[3][:-1], q_length, kv_length


def _with_lengths(result: Tensor, lengths: Lengths, batch_size: int, q_length: int, kv_length: int) -> Tensor:
    """`result` with the lengths that every layer would otherwise make of it again, which costs it 10 us.

    They are views of what `result` is a view of, and not of itself: no cycle keeps them in memory.
    """
    if not torch.compiler.is_compiling():
        result._flash_cute_mask = (batch_size, q_length, kv_length, lengths)  # type: ignore[attr-defined]
        if q_length == 1:  # the tensor that `kept_by_heads` asks
            result._flash_cute_one_row = lengths[2]  # type: ignore[attr-defined]
    return result


def attached_lengths(attention_mask: Tensor, batch_size: int, q_length: int, kv_length: int) -> Lengths | None:
    """The lengths that `_with_lengths` has left with a mask of these sizes, if it has."""
    known: Any = getattr(attention_mask, "_flash_cute_mask", None)
    if known is None:
        return None
    batch_size_then, q_length_then, kv_length_then, lengths = known
    if kv_length_then == kv_length and q_length_then == q_length and batch_size_then == batch_size:
        found: Lengths = lengths
        return found
    return None


def lengths_of(attention_mask: Tensor, batch_size: int, q_length: int, kv_length: int) -> Lengths:
    """The lengths in what `mask` returned."""
    lengths = attached_lengths(attention_mask, batch_size, q_length, kv_length)
    if lengths is not None:
        return lengths
    columns = columns_of(attention_mask, batch_size, kv_length)
    rows = [x.contiguous() for x in attention_mask[:, 0, 0].unbind(1)]
    return (rows[0], rows[0], None, None, None, None) if columns == 1 else _of_padding(rows, q_length, kv_length)


def by_heads_lengths(lengths: Lengths, key: Tensor, value: Tensor) -> Lengths | None:
    """The lengths of a padded batch with one row of q, as those of a sequence per KV head.

    They are for k and v that stand head by head, as in a cache, `(B, H, N, D)`: as packed rows of one head they need no
    copy. None where k and v do not, or nothing would be copied. Computed once per forward and shape of k, and left with
    the lengths.
    """
    used_q = lengths[2]
    if used_q is None:
        return None
    found = kept_by_heads(used_q, key, value)
    if found is not None:
        return found
    batch_size, heads_kv = key.shape[:2]
    if batch_size == 1 or heads_kv == 1 or not (key.is_contiguous() and value.is_contiguous()):
        return None
    if used_q.numel() != 2 * batch_size - 1:  # k has another batch size than q and the mask
        return None
    result = _by_heads(lengths, heads_kv)
    if not torch.compiler.is_compiling() and not _is_capturing(key):
        version = None if used_q.is_inference() else used_q._version
        known: Any = getattr(used_q, "_flash_cute_by_heads", None)
        of_shapes = known[1] if known is not None and known[0] == version else {}
        used_q._flash_cute_by_heads = (version, {**of_shapes, key.shape: result})  # type: ignore[attr-defined]
    return result


def kept_by_heads(used_q: Tensor, key: Tensor, value: Tensor) -> Lengths | None:
    """What `by_heads_lengths` has computed for such k and v and left with the lengths, if it still holds.

    It is made of copies, which a mask that is overwritten makes obsolete: that gives it another version, but for one of
    inference mode. A graph reads what is in the mask when it is replayed, so that a capture keeps nothing and takes
    nothing that was kept.
    """
    known: Any = getattr(used_q, "_flash_cute_by_heads", None)
    if known is None:
        return None
    version, of_shapes = known
    found: Lengths | None = of_shapes.get(key.shape)
    if (
        found is not None
        and key.is_contiguous()
        and value.is_contiguous()
        and (version is None or version == used_q._version)
        and not _is_capturing(key)
    ):
        return found
    return None


def _is_capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _by_heads(lengths: Lengths, heads_kv: int) -> Lengths:
    """Sequence `b * heads_kv + h` is head h of batch item b: a row of q, and those of its Nk keys that are tokens.

    Unlike `padded` it makes no sequences of the gaps, which `seqused_k` leaves out. So there are Nk keys per sequence,
    as max_seqlen_k says, and a kernel is chosen for equal lengths; else it would be chosen for one sequence of all.
    """
    _, offsets_k, used_q, used_k, _, kv_length = lengths
    assert used_q is not None and used_k is not None and kv_length is not None
    batch_size = offsets_k.shape[0] // 2
    cu_q = torch.arange(batch_size * heads_kv + 1, dtype=torch.int32, device=offsets_k.device)
    sequence = cu_q[:-1].view(batch_size, heads_kv)
    # What batch item b began at b * Nk begins with head h at (b * heads_kv + h) * Nk.
    later = sequence - sequence // heads_kv
    begins = (offsets_k[::2, None] + later * kv_length).flatten()
    cu_k = torch.nn.functional.pad(begins, (0, 1), value=begins.numel() * kv_length)
    of_queries, of_keys = torch.stack((used_q[::2], used_k[::2])).repeat_interleave(heads_kv, 1).unbind()
    return cu_q, cu_k, of_queries, of_keys, 1, kv_length


def columns_of(attention_mask: Tensor, batch_size: int, kv_length: int) -> int:
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

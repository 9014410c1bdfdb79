"""What Transformers' layers have to know of padding and packed sequences, as a tensor that a mask function may return.

Transformers hands it on as it hands on 4-D masks: `(rows, Nk, code, columns)` int32. All of it but its data and sizes
may get lost on the way. How it is read does not depend on more; what is left with it saves the layers doing so again.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ..mask import Mask
from ._transformers_band import Options, code_of, is_code, options_of

# cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q and max_seqlen_k of `varlen_attention`.
Lengths: TypeAlias = tuple[Tensor, Tensor, Tensor | None, Tensor | None, int | None, int | None]

# By the number of columns: the band alone; offsets of packed sequences; intervals of rows by key; the order of rows;
# offsets of a padded batch.
_BAND, _PACKED, _INTERVALS, _ORDER, _PADDED = 0, 1, 2, 3, 4


class Order(NamedTuple):
    """Rows of `(B * N, H, D)`, int32, by which the tokens of each batch item come first, and padding behind them."""

    queries: Tensor | None  # None: q as it is
    keys: Tensor
    back: Tensor | None  # of out: to where q's rows came from


class Known(NamedTuple):
    """What a mask says. Without lengths all keys count; without options causality and window are the layer's."""

    lengths: Lengths | None = None
    order: Order | None = None
    options: Options | None = None
    # Of the last row alone, of batch items where it is padding behind the tokens, which is what it sees; else it is 0,
    # as other rows of padding are. From it `generate` goes on where prompts are padded on the right.
    last_row: Lengths | None = None
    mask: Mask | None = None  # beside which there is no band


class PaddingBetweenTokensError(ValueError):
    """Of a batch with a window, which offsets cannot say then."""


def band_alone(sizes: tuple[int, int, int], code: int, device: torch.device | str) -> Tensor:
    """`(1, Nk, code, 0)`: nothing but the band."""
    result = torch.empty((1, sizes[2], code, _BAND), dtype=torch.int32, device=device)
    return with_known(result, Known(None, None, options_of(code)), sizes)


def packed(starts: Tensor, sizes: tuple[int, int, int], code: int) -> Tensor | None:
    """`(sequences + 1, Nk, code, 1)`: offsets of sequences in the rows of all batch items; None: one in each.

    starts: (B, N) bool, where a sequence begins. Waits for the GPU.
    """
    begins = starts.flatten().nonzero()[:, 0]
    if begins.numel() == sizes[0]:
        return None
    offsets = torch.cat((begins, begins.new_tensor([starts.numel()]))).int()
    result = offsets[:, None, None, None].expand(-1, sizes[2], code, _PACKED)
    return with_known(result, Known(_of_packing(offsets), None, options_of(code)), sizes)


def padded(
    tokens: Tensor,
    sizes: tuple[int, int, int],
    seen: int | Tensor,
    first_row: int | Tensor | None,
    code: int,
    waits: bool = True,
    has_window: bool = False,
) -> Tensor | None:
    """What a padding mask says; None: that all keys count.

    tokens: `(B, columns)`, of the keys; seen: how many keys there are, the rest being a cache's room for later ones;
    first_row: the column of the first query, None where queries are not among the keys; waits: whether the mask may be
    read, which waits for the GPU; has_window: whether rows do not see all keys before them.
    """
    tokens = tokens.bool()
    column = torch.arange(tokens.shape[1], device=tokens.device)
    begin = torch.where(tokens, column, tokens.shape[1]).amin(1)  # (B,)
    end = torch.where(tokens, column + 1, 0).amax(1)  # (B,)
    count = tokens.sum(1)
    has_holes = (count != (end - begin).clamp(min=0)).any()
    if waits:
        ends_early = ((end < seen) & (end > 0)).any()
        shortest, holes_found, may_be_last = torch.stack((count.amin(), has_holes, ends_early)).tolist()
        if shortest == sizes[2] and isinstance(seen, int) and seen == sizes[2]:
            return None
        if not holes_found:
            return _in_blocks(begin, end, sizes, seen, first_row, code, bool(may_be_last))
        if has_window:
            raise PaddingBetweenTokensError(_HOLES)
    elif has_window:
        torch._assert_async(~has_holes, _HOLES)
        return _in_blocks(begin, end, sizes, seen, first_row, code)
    return _in_order(tokens, sizes, seen, first_row, code)


_HOLES = (
    "flash_cute: attention_mask: expected the tokens of each batch item in one block where there is a window (padding "
    "before it, behind it or both), got padding between tokens"
)


def _in_blocks(
    begin: Tensor,
    end: Tensor,
    sizes: tuple[int, int, int],
    seen: int | Tensor,
    first_row: int | Tensor | None,
    code: int,
    ends_early: bool = True,
) -> Tensor:
    """`(2B, Nk, code, 4)`, of batch items whose tokens are the keys from `begin` to `end`, (B,).

    ends_early: whether some may end before the last row.

    The batch is read as 2B - 1 sequences in one tensor of B * Nk rows: in turn the tokens of a batch item, and the gap
    up to those of the next one, of which nothing is used. So padding costs no copy, and neither side of it matters.
    """
    batch_size, q_length, kv_length = sizes
    end = end.clamp(max=seen)
    begin = torch.minimum(begin, end)
    if first_row is None:
        first_query, last_query = torch.zeros_like(begin), torch.full_like(end, q_length)
    else:
        first_query, last_query = ((x - first_row).clamp(0, q_length) for x in (begin, end))
    item = torch.arange(batch_size, device=begin.device)

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
    result = stacked.t()[:, None, None].expand(-1, kv_length, code, _PADDED)
    known = _of_padding(stacked.unbind(0), sizes, options_of(code))
    return with_known(result, known if ends_early else known._replace(last_row=None), sizes)


def _in_order(
    tokens: Tensor, sizes: tuple[int, int, int], seen: int | Tensor, first_row: int | Tensor | None, code: int
) -> Tensor:
    """`(B, size, code, 3)`, of tokens anywhere: per batch item an order of its keys in which tokens come first.

    Size 1 + Nk: how many are tokens, and the order; where queries are among the keys, 2 + Nk + 2Nq: how many queries
    are tokens, their order, and the order that undoes it.
    """
    _, q_length, kv_length = sizes
    tokens = torch.nn.functional.pad(tokens, (0, kv_length - tokens.shape[1]))
    tokens = tokens & (torch.arange(kv_length, device=tokens.device) < seen)
    parts = [tokens.sum(1, keepdim=True), _tokens_first(tokens)]
    if first_row is not None:
        row = torch.arange(q_length, device=tokens.device) + first_row
        # A row before the first key is one of padding whose keys a sliding cache has dropped.
        queries = tokens.gather(1, row.clamp(0, kv_length - 1).expand(tokens.shape[0], -1)) & (row >= 0)
        order = _tokens_first(queries)
        parts += [queries.sum(1, keepdim=True), order, order.argsort(1)]
    data = torch.cat(parts, 1).int()
    result = data[:, :, None, None].expand(-1, -1, code, _ORDER)
    return with_known(result, _ordered(data, sizes, options_of(code)), sizes)


def _tokens_first(tokens: Tensor) -> Tensor:
    return (~tokens).to(torch.uint8).argsort(stable=True, dim=1)


def _ordered(data: Tensor, sizes: tuple[int, int, int], options: Options | None) -> Known:
    batch_size, q_length, kv_length = sizes
    item = torch.arange(batch_size + 1, dtype=torch.int32, device=data.device)
    used_k, keys = data[:, 0].contiguous(), (data[:, 1 : kv_length + 1] + item[:-1, None] * kv_length).flatten()
    used_q, order, last_row = None, Order(None, keys, None), None
    if data.shape[1] > kv_length + 1:
        used_q, *queries = data[:, kv_length + 1 :].split((1, q_length, q_length), 1)
        used_q = used_q.flatten().contiguous()
        there, back = ((x + item[:-1, None] * q_length).flatten() for x in queries)
        order = Order(there, keys, back)
        is_padding = (queries[1][:, -1] >= used_q).int()
        last_row = (item, item * kv_length, is_padding, used_k, 1, kv_length)
    return Known((item * q_length, item * kv_length, used_q, used_k, q_length, kv_length), order, options, last_row)


def _of_packing(offsets: Tensor) -> Lengths:
    return offsets, offsets, None, None, None, None


def _of_padding(rows: Sequence[Tensor], sizes: tuple[int, int, int], options: Options) -> Known:
    batch_size, q_length, kv_length = sizes
    lengths = rows[0], rows[1], rows[2][:-1], rows[3][:-1], q_length, kv_length
    if q_length == 1 or not options.is_causal:
        return Known(lengths, None, options)
    item = torch.arange(batch_size, dtype=torch.int32, device=rows[0].device)
    begin, end, end_of_rows = rows[1][::2], rows[1][1::2], rows[0][1::2] - item * q_length
    if options.sliding_window is not None:
        begin = torch.maximum(begin, end + (q_length - end_of_rows - options.sliding_window)).minimum(end)
    is_padding = ((end_of_rows < q_length) & (end > begin)).int()
    zero = torch.zeros_like(item)
    last_row = (
        torch.stack((item, item + is_padding), 1).flatten(),
        torch.stack((begin, end), 1).flatten(),
        torch.stack((is_padding, zero), 1).flatten()[:-1],
        torch.stack((end - begin, zero), 1).flatten()[:-1],
    )
    return Known(lengths, None, options, (*last_row, 1, kv_length))


def with_known(result: Tensor, known: Known, sizes: tuple[int, int, int]) -> Tensor:
    """`result` with what every layer would otherwise read in it again, which costs it 10 us.

    They are views of what `result` is a view of, and not of itself: no cycle keeps them in memory.
    """
    if not torch.compiler.is_compiling():
        result._flash_cute_mask = (*sizes, known)  # type: ignore[attr-defined]
        if sizes[1] == 1 and known.order is None and known.lengths is not None and known.options is not None:
            used_q = known.lengths[2]
            if used_q is not None and known.options.is_simple:  # what `kept_by_heads` is asked of
                score = known.options.is_causal, known.options.sliding_window
                result._flash_cute_one_row = (used_q, *score)  # type: ignore[attr-defined]
    return result


def kept(attention_mask: Tensor, batch_size: int, q_length: int, kv_length: int) -> Known | None:
    """What `with_known` has left with a mask of these sizes, if it has."""
    known: Any = None if is_dynamo_compiling() else getattr(attention_mask, "_flash_cute_mask", None)
    if known is None:
        return None
    batch_size_then, q_length_then, kv_length_then, found = known
    if kv_length_then == kv_length and q_length_then == q_length and batch_size_then == batch_size:
        result: Known = found
        return result
    return None


def read(attention_mask: Tensor, batch_size: int, q_length: int, kv_length: int) -> Known:
    """What is in a tensor that the mask function returned."""
    known = kept(attention_mask, batch_size, q_length, kv_length)
    if known is not None:
        return known
    sizes = (batch_size, q_length, kv_length)
    options = _check(attention_mask, sizes)
    columns = attention_mask.shape[3]
    if columns == _BAND:
        return Known(None, None, options)
    if columns == _INTERVALS:
        return Known(None, None, options, None, of_intervals(attention_mask[:, :, 0], batch_size))
    if columns == _ORDER:
        return _ordered(attention_mask[:, :, 0, 0], sizes, options)
    rows = [x.contiguous() for x in attention_mask[:, 0, 0].unbind(1)]
    return Known(_of_packing(rows[0]), None, options) if columns == _PACKED else _of_padding(rows, sizes, options)


def of_intervals(data: Tensor, batch_size: int) -> Mask:
    """The mask in `(intervals * B, Nk, 2)`."""
    intervals = data.unflatten(0, (-1, batch_size)).unbind(0)
    return Mask(*(x[:, None, :, side] for x in intervals for side in (0, 1)))


def narrowed(attention_mask: Tensor, left: int | None) -> Tensor:
    """What the mask function returned, with causality, and a window if any, that a layer has beside its mask."""
    if attention_mask.dtype == torch.bool or attention_mask.shape[-1] == _INTERVALS:
        raise ValueError("flash_cute: attention_mask: expected a band beside a layer's own causality, got another mask")
    if attention_mask.shape[-1] == _ORDER and left is not None:
        raise ValueError(_HOLES)
    return attention_mask[:, :, :1].expand(-1, -1, code_of(left, 0), -1)


def _check(attention_mask: Tensor, sizes: tuple[int, int, int]) -> Options:
    batch_size, q_length, kv_length = sizes
    shape = tuple(attention_mask.shape)
    is_ours = attention_mask.dtype == torch.int32 and len(shape) == 4 and is_code(int(shape[2]))
    if not is_ours or shape[3] not in (_BAND, _PACKED, _INTERVALS, _ORDER, _PADDED):
        raise ValueError(
            "flash_cute: attention_mask: expected None or a padding mask (batch, positions), got "
            f"{attention_mask.dtype} {shape}; custom masks are boolean, or need attn_implementation='sdpa' or 'eager'"
        )
    fits = {
        _BAND: shape[1] == kv_length,
        _PACKED: shape[1] == kv_length,
        _INTERVALS: shape[1] == kv_length and shape[0] in (batch_size, 2 * batch_size),
        _ORDER: shape[0] == batch_size and shape[1] in (1 + kv_length, 2 + kv_length + 2 * q_length),
        _PADDED: shape[1] == kv_length and shape[0] == 2 * batch_size,
    }
    if not fits[int(shape[3])]:
        raise ValueError(
            f"flash_cute: attention_mask: expected one made for {batch_size} batch items of {kv_length} keys, "
            f"got {shape}"
        )
    return options_of(int(shape[2]))


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

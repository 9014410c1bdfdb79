"""Packed sequences on the CPU: the dense forward and backward, a batch of sequences of equal lengths at a time.

A batch of one sequence is read in place; the rows of several are gathered into (b, H, N, D), so that a call costs a few
operations per pair of lengths and not per sequence. Only the rows and keys in use are read. Rows in no sequence keep
what the results are filled with first: out 0, lse -inf, gradients 0.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import cpu, cpu_bwd
from ._call_options import CallOptions, Lengths, MaskTensors, split_mask, split_packed
from ._layout import empty_out
from .given_mask import GivenMask, Squares, intervals_of, without_idle_parts
from .masks.checks import BLOCK

# Elements of a gathered batch's q or k: 16 MiB in float32.
GATHERED = 1 << 22


class Spans(NamedTuple):
    """Where the rows in use of each sequence are: (B,) int64 each."""

    start: Tensor
    length: Tensor


class Batch(NamedTuple):
    """Sequences that have as many rows and as many keys as each other: their numbers, and where these are."""

    numbers: Tensor  # (b,) int64
    rows: slice | Tensor  # of q: of one sequence a slice, of several their (b * Nq,) row numbers
    keys: slice | Tensor  # of k and v


def fwd(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """The kernel of `flash_cute::varlen_fwd` and `_varlen_fwd` for CPU tensors; the library checks the arguments.

    `given`: the values of Lengths and of a CallOptions, backend, and perhaps deterministic.
    """
    lengths, options, (backend, *_) = split_packed(given)
    factor = torch.ops.flash_cute.check_varlen_fwd(q, k, v, *lengths, *options, backend)
    return _fwd(q, k, v, lengths, options, factor, None)


def masked_fwd(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """The kernel of `flash_cute::masked_varlen_fwd` and its twin. `given`: a MaskTensors' values, and as above."""
    mask, rest = split_mask(given)
    lengths, options, (backend, *_) = split_packed(rest)
    factor = torch.ops.flash_cute.check_masked_varlen_fwd(q, k, v, *mask, *lengths, *options, backend)
    return _fwd(q, k, v, lengths, options, factor, mask)


def _fwd(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, options: CallOptions, factor: float, mask: MaskTensors | None
) -> tuple[Tensor, Tensor]:
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    with torch.no_grad():
        out = empty_out(q, v.shape[2]).zero_()  # (Tq, Hq, Dv)
        lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=compute)  # (Hq, Tq)
        for batch in _batches(q, k, lengths):
            tensors = (_take(q, batch.rows, batch), _take(k, batch.keys, batch), _take(v, batch.keys, batch))
            part_mask = _mask_of(mask, batch, tensors[0].shape[2])
            part_out, part_lse = cpu.checked_fwd(*tensors, _options_of(options, batch), factor, part_mask)
            _put(out, batch.rows, part_out)
            lse[:, batch.rows] = part_lse.transpose(0, 1).flatten(1)
    return out, lse


def bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    *given: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kernel of `flash_cute::varlen_bwd` and `_varlen_bwd` for CPU tensors; the library checks the arguments.

    `given`: the values of Lengths and of a CallOptions, deterministic, which it is in any case, and backend.
    """
    lengths, options, _ = split_packed(given)
    factor = torch.ops.flash_cute.check_varlen_bwd(dout, q, k, v, out, lse, dlse, *given)
    return _bwd((dout, q, k, v, out), lse, dlse, lengths, options, factor, None)


def masked_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    *given: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kernel of `flash_cute::masked_varlen_bwd` and its twin. `given`: a MaskTensors' values, and as above."""
    mask, rest = split_mask(given)
    lengths, options, _ = split_packed(rest)
    factor = torch.ops.flash_cute.check_masked_varlen_bwd(dout, q, k, v, out, lse, dlse, *given)
    return _bwd((dout, q, k, v, out), lse, dlse, lengths, options, factor, mask)


def _bwd(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    lse: Tensor,
    dlse: Tensor | None,
    lengths: Lengths,
    options: CallOptions,
    factor: float,
    mask: MaskTensors | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`tensors`: dout, q, k, v and out."""
    dout, q, k, v, out = tensors
    sinks = options.sinks
    with torch.no_grad():
        dq, dk, dv = (empty_out(x, x.shape[2]).zero_() for x in (q, k, v))
        # In float32 or float64, since the batches' parts are summed.
        wide = options._replace(sinks=None if sinks is None else sinks.to(lse.dtype))
        dsinks = torch.zeros(0) if wide.sinks is None else torch.zeros_like(wide.sinks)
        for batch in _batches(q, k, lengths):
            for part in _alike(batch, lse, q.dtype):
                of_part = (
                    _take(dout, part.rows, part),
                    _take(q, part.rows, part),
                    _take(k, part.keys, part),
                    _take(v, part.keys, part),
                    _take(out, part.rows, part),
                    _take_lse(lse, part),
                    None if dlse is None else _take_lse(dlse, part),
                )
                given = (_options_of(wide, part), factor, _mask_of(mask, part, of_part[0].shape[2]))
                part_dq, part_dk, part_dv, part_dsinks = cpu_bwd.checked_bwd(*of_part, *given)
                _put(dq, part.rows, part_dq)
                _put(dk, part.keys, part_dk)
                _put(dv, part.keys, part_dv)
                dsinks += part_dsinks
    return dq, dk, dv, dsinks if sinks is None else dsinks.to(sinks.dtype)


def spans(cu_seqlens: Tensor, seqused: Tensor | None, total: int) -> Spans:
    """What is in use of each sequence, whatever the offsets hold: never before row 0 nor past row `total`.

    Offsets count as ascending: one that is smaller than an offset before it counts as that one.
    start = the largest clamp(cu[a], 0, total), a <= b; end = the start of b + 1; length = clamp(seqused[b], 0, end -
    start).
    """
    bounds = cu_seqlens.long().clamp(0, total).cummax(0)[0]
    start = bounds[:-1]
    length = bounds[1:] - start
    if seqused is not None:
        length = torch.minimum(length, seqused.long().clamp(min=0))
    return Spans(start, length)


def _batches(q: Tensor, k: Tensor, lengths: Lengths) -> Iterator[Batch]:
    """The sequences that have a row and a key; those of equal lengths together."""
    of_q = spans(lengths.cu_seqlens_q, lengths.seqused_q, q.shape[0])
    of_k = spans(lengths.cu_seqlens_k, lengths.seqused_k, k.shape[0])
    live = ((of_q.length > 0) & (of_k.length > 0)).nonzero().squeeze(-1)
    if live.numel() == 0 or q.shape[1] == 0:
        return
    pair, order = (of_q.length * (k.shape[0] + 1) + of_k.length)[live].sort(stable=True)
    for group in live[order].split(pair.unique_consecutive(return_counts=True)[1].tolist()):
        first = int(group[0])
        rows, keys = int(of_q.length[first]), int(of_k.length[first])
        most = max(1, GATHERED // max(rows * q[0].numel(), keys * k[0].numel()))
        for numbers in group.split(most):
            yield Batch(numbers, _where(of_q, numbers, rows), _where(of_k, numbers, keys))


def _where(of: Spans, numbers: Tensor, length: int) -> slice | Tensor:
    if numbers.numel() == 1:
        start = int(of.start[numbers])
        return slice(start, start + length)
    return (of.start[numbers].unsqueeze(-1) + torch.arange(length)).flatten()


def _take(x: Tensor, rows: slice | Tensor, batch: Batch) -> Tensor:
    """Rows of (T, H, D) as (b, H, N, D)."""
    taken = x[rows] if isinstance(rows, slice) else x.index_select(0, rows)
    return taken.unflatten(0, (batch.numbers.numel(), -1)).transpose(1, 2)


def _take_lse(x: Tensor, batch: Batch) -> Tensor:
    """The rows' (Hq, T) as (b, Hq, N)."""
    taken = x[:, batch.rows] if isinstance(batch.rows, slice) else x.index_select(1, batch.rows)
    return taken.unflatten(1, (batch.numbers.numel(), -1)).transpose(0, 1)


def _put(x: Tensor, rows: slice | Tensor, part: Tensor) -> None:
    """Write (b, H, N, D) to rows of (T, H, D)."""
    part = part.transpose(1, 2).flatten(0, 1)
    if isinstance(rows, slice):
        x[rows] = part
    else:
        x.index_copy_(0, rows, part)


def _mask_of(mask: MaskTensors | None, batch: Batch, len_q: int) -> GivenMask | None:
    """The packed tensors' mask as the sequences' own, (b, Hkv or 1, ...), of rows and keys counted from their first."""
    if mask is None:
        return None
    count = batch.numbers.numel()
    row, key = (
        torch.tensor([part.start]) if isinstance(part, slice) else part.view(count, -1)[:, 0]
        for part in (batch.rows, batch.keys)
    )

    def taken(x: Tensor) -> Tensor:
        keys = x[..., batch.keys] if isinstance(batch.keys, slice) else x.index_select(2, batch.keys)
        of_sequences = keys[0].unflatten(1, (count, -1)).transpose(0, 1)
        # In 64 bits: a limit of any value less a row may be below 32 bits' least.
        return (of_sequences.long() - row.view(-1, 1, 1)).clamp(0, torch.iinfo(torch.int32).max).int()

    intervals = tuple((taken(first), taken(limit)) for first, limit in intervals_of(mask))
    squares = []
    if mask.matrix is not None:
        alone = isinstance(batch.rows, slice) and isinstance(batch.keys, slice)
        squares.append(
            Squares(_part_of(_part_of(mask.matrix, 2, batch.rows), 3, batch.keys), 1)
            if alone
            else Squares(mask.matrix, 1, (row, key))
        )
    if mask.blocks is not None:
        squares.append(Squares(mask.blocks, BLOCK, (row, key)))
    return without_idle_parts(GivenMask(intervals, tuple(squares)), len_q)


def _part_of(matrix: Tensor, dim: int, part: slice | Tensor) -> Tensor:
    """A matrix's elements of a sequence's rows or keys, or its one for all."""
    assert isinstance(part, slice)
    return matrix if matrix.shape[dim] == 1 else matrix.narrow(dim, part.start, part.stop - part.start)


def _options_of(options: CallOptions, batch: Batch) -> CallOptions:
    slopes = options.alibi_slopes
    return options if slopes is None or slopes.dim() == 1 else options._replace(alibi_slopes=slopes[batch.numbers])


def _alike(batch: Batch, lse: Tensor, dtype: torch.dtype) -> list[Batch]:
    """The batch in two where some sequences have an LSE that is not finite: they are computed otherwise.

    Else the same sequence would have other roundings beside such a one. Not in float32: see cpu_bwd.py.
    """
    count = batch.numbers.numel()
    if count == 1 or dtype == torch.float32:
        return [batch]
    rows = _take_lse(lse, batch)  # (b, Hq, N)
    plain = rows.masked_fill(rows == -torch.inf, 0).isfinite().flatten(1).all(1)  # (b,)
    if plain.all() or not plain.any():
        return [batch]
    assert isinstance(batch.rows, Tensor) and isinstance(batch.keys, Tensor)
    parts: list[Batch] = []
    for some in (plain, ~plain):
        of_q, of_k = (x.view(count, -1)[some].flatten() for x in (batch.rows, batch.keys))
        parts.append(Batch(batch.numbers[some], of_q, of_k))
    return parts


def copies(q: Tensor, k: Tensor, v: Tensor, backward: bool) -> dict[str, str | None]:
    """Why each argument is copied; what `explain` says."""
    dense = (cpu_bwd if backward else cpu).copies(q, k, v)
    return {name: why or "rows of several sequences of equal lengths are gathered" for name, why in dense.items()}


def reasons(backward: bool) -> list[str]:
    """How a call is computed, in sentences; what `explain` says."""
    return [
        f"The dense {'backward' if backward else 'forward'} for the CPU does the arithmetic.",
        "The lengths are read when the call runs: sequences with as many rows and as many keys as each other are "
        f"computed together, up to {GATHERED} elements of q or k at once.",
    ]

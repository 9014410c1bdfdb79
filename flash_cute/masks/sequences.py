"""Masks of sequences in parts: documents, padding, chunks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import mask as _mask
from .intervals import NO_LIMIT, check_count, check_integers, make, runs, spans


def documents(ids: Tensor | None = None, *, cu_seqlens: Tensor | None = None, length: int | None = None) -> _mask.Mask:
    """Several documents in one sequence, each of which sees itself alone.

    Pass `causal=True` with it where a token sees only what comes before it in its document, `causal=False` where it
    sees the whole document. A `window` counts within the document too.

    Args:
        ids: `(N,)` or `(B, N)`, int32 or int64: tokens beside each other with equal ids are a document. Tokens with a
            negative id are padding: no row sees them, and they see nothing.
        cu_seqlens: instead of ids: `(n + 1,)`, int32 or int64, where each document begins and the last one ends. Tokens
            before the first and behind the last are padding. Offsets are clamped and count as ascending, as in
            `varlen_attention`.
        length: with cu_seqlens: N.

    Returns:
        A mask of one interval, for N rows and N keys.

    Raises:
        ValueError: both or neither of `ids` and `cu_seqlens`; another dtype or shape.

    Example:
        >>> print(Mask.documents(torch.tensor([0, 0, 1, 1, 1, 2])).draw(6, causal=True))
        #.....
        ##....
        ..#...
        ..##..
        ..###.
        .....#
        >>> print(Mask.documents(cu_seqlens=torch.tensor([0, 2, 3]), length=4).draw(4))
        ##..
        ##..
        ..#.
        ....
    """
    if (ids is None) == (cu_seqlens is None):
        given = "neither" if ids is None else "both"
        raise ValueError(f"flash_cute: ids: expected either ids or cu_seqlens, got {given}")
    if ids is not None:
        if length is not None:
            raise ValueError("flash_cute: length: expected None beside ids, which tell it, got one")
        ids = check_integers("ids", ids, ("(N,)", "(B, N)"))
        begin, end = runs(ids)
        return make(begin, end.where(ids >= 0, 0))
    cu_seqlens = check_integers("cu_seqlens", cu_seqlens, ("(n + 1,)",))
    length = check_count("length", length)
    bounds = cu_seqlens.long().clamp(0, length).cummax(0).values
    inside, begin, end = spans(bounds[:-1], bounds[1:], length)
    return make(begin, end.where(inside, 0))


def padding(keys: Tensor, length: int | None = None) -> _mask.Mask:
    """Keys that are no tokens, at the end, at the beginning or between: no row sees them.

    The rows of such tokens are computed like others: what they see they see. Pass the `causal` that the model has.

    Args:
        keys: bool `(B, Nk)` or `(Nk,)`: True where there is a token, as Transformers' `attention_mask` has it. Or the
            number of tokens of each sequence, which come first: `(B,)`, int32 or int64.
        length: with numbers: Nk.

    Returns:
        A mask of one interval, for any number of rows.

    Raises:
        ValueError: another dtype or shape.

    Example:
        >>> print(Mask.padding(torch.tensor([3]), 5).draw(2))
        ###..
        ###..
        >>> print(Mask.padding(torch.tensor([[False, True, True, False, True]])).draw(2))
        .##.#
        .##.#
    """
    if isinstance(keys, Tensor) and keys.dtype == torch.bool:
        if keys.dim() not in (1, 2):
            raise ValueError(f"flash_cute: keys: expected the shape (Nk,) or (B, Nk), got {tuple(keys.shape)}")
        if length is not None:
            raise ValueError("flash_cute: length: expected None beside a bool tensor, which tells it, got one")
        seen = keys
    else:
        numbers = check_integers("keys", keys, ("(B,)",))
        seen = torch.arange(check_count("length", length), device=keys.device) < numbers.unsqueeze(-1)
    limit = torch.full(seen.shape, NO_LIMIT, dtype=torch.int32, device=seen.device).where(seen, 0)
    return make(torch.zeros_like(limit), limit)


def chunks(
    chunks: int | Tensor, length: int | None = None, *, left: int | None = None, device: Any = None
) -> _mask.Mask:
    """Block-causal attention: a token sees its whole chunk and those before it, as the frames of a video.

    Pass `causal=False` with it.

    Args:
        chunks: the tokens of a chunk; or the chunk of each token, `(N,)` or `(B, N)`, int32 or int64: tokens beside
            each other with equal numbers are a chunk.
        length: with a number: N.
        left: with a number: how many chunks before its own a token sees; `None`: all.
        device: with a number: where the mask is to be.

    Returns:
        A mask of one interval, for N rows and N keys.

    Raises:
        ValueError: another dtype or shape; `length`, `left` or `device` beside a tensor.

    Example:
        >>> print(Mask.chunks(2, 6).draw(6))
        ##....
        ##....
        ####..
        ####..
        ######
        ######
        >>> print(Mask.chunks(2, 6, left=1).draw(6))
        ##....
        ##....
        ####..
        ####..
        ..####
        ..####
    """
    if isinstance(chunks, Tensor):
        for name, x in (("length", length), ("left", left), ("device", device)):
            if x is not None:
                raise ValueError(f"flash_cute: {name}: expected None beside a tensor of chunks, got one")
        begin, _ = runs(check_integers("chunks", chunks, ("(N,)", "(B, N)")))
        return make(begin, torch.full_like(begin, NO_LIMIT))
    size = check_count("chunks", chunks, 1)
    begin = torch.arange(check_count("length", length), device=device) // size * size
    if left is None:
        return make(begin, torch.full_like(begin, NO_LIMIT))
    return make(begin, (begin + (check_count("left", left) + 1) * size).clamp(max=NO_LIMIT))

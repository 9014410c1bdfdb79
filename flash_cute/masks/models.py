"""Masks that models are trained with: a prefix, images among text, global tokens beside a window."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import mask as _mask
from .._refusals import Window, window_sides
from .intervals import NO_LIMIT, check_count, check_integers, make, per_item, runs, spans


def prefix_lm(prefix: int | Tensor, length: int, *, device: Any = None) -> _mask.Mask:
    """A prefix whose tokens see each other, and causal text behind it, as in T5, UniLM and PaliGemma.

    Pass `causal=False` with it: the mask has the text's causality.

    Args:
        prefix: the tokens of the prefix; or of each sequence, `(B,)`, int32 or int64.
        length: N, the tokens of prefix and text.
        device: with a number: where the mask is to be.

    Returns:
        A mask of one interval, for N rows and N keys.

    Raises:
        ValueError: another dtype or shape.

    Example:
        >>> print(Mask.prefix_lm(3, 6).draw(6))
        ###...
        ###...
        ###...
        ####..
        #####.
        ######
    """
    device = prefix.device if isinstance(prefix, Tensor) else device
    index = torch.arange(check_count("length", length), device=device)
    return make(index.where(index >= per_item("prefix", prefix, device), 0), torch.full_like(index, NO_LIMIT))


def images(
    ids: Tensor | None = None,
    *,
    begin: Tensor | None = None,
    end: Tensor | None = None,
    length: int | None = None,
    left: int | None = None,
) -> _mask.Mask:
    """Images among causal text: a token sees those before it, and an image's tokens see all of their image.

    As in Gemma 3 and 4 and PaliGemma. Pass `causal=False` with it, and no window: the mask has the text's causality and
    its window.

    Args:
        ids: `(N,)` or `(B, N)`, int32 or int64: the image of each token, negative for text. Tokens beside each other
            with equal ids are an image.
        begin, end: instead of ids: where images begin, ascending, and end, `(n,)` or `(B, n)`; an image may be empty.
        length: with begin and end: N.
        left: how many tokens before it a token sees, as in `window=(left, 0)`; `None`: all. An image's tokens see all
            of their image in any case.

    Returns:
        A mask of one interval, for N rows and N keys.

    Raises:
        ValueError: both or neither of ids and begin, begin without end; another dtype or shape.

    Example:
        >>> print(Mask.images(torch.tensor([-1, 0, 0, 0, -1, -1])).draw(6))
        #.....
        ####..
        ####..
        ####..
        #####.
        ######
    """
    if (ids is None) == (begin is None) or (begin is None) != (end is None):
        raise ValueError("flash_cute: ids: expected either ids, or begin and end, got neither or more")
    if ids is not None:
        if length is not None:
            raise ValueError("flash_cute: length: expected None beside ids, which tell it, got one")
        ids = check_integers("ids", ids, ("(N,)", "(B, N)"))
        first, limit = runs(ids)
        inside = ids >= 0
    else:
        begin, end = check_integers("begin", begin, ("(n,)", "(B, n)")), check_integers("end", end, ("(n,)", "(B, n)"))
        if begin.shape != end.shape:
            raise ValueError(f"flash_cute: end: expected begin's shape {tuple(begin.shape)}, got {tuple(end.shape)}")
        inside, first, limit = spans(begin, end, check_count("length", length))
    index = torch.arange(first.shape[-1], device=first.device)
    reach = torch.full_like(index, NO_LIMIT)
    if left is not None:
        reach = (index + check_count("left", left) + 1).clamp(max=NO_LIMIT)
    # Both the image and the rows that text sees a key from hold the key's own row: together they are one interval.
    return make(first.where(inside, index), torch.maximum(limit.where(inside, 0), reach))


def global_tokens(count: int | Tensor, length: int, window: Window = (None, None), *, device: Any = None) -> _mask.Mask:
    """A window, and global tokens at the beginning that every token sees and that see every token.

    As in Longformer and BigBird; with `causal=True` the first tokens of StreamingLLM. Pass `causal=True` or False with
    it, as the model has it, and no window: the mask has it.

    Args:
        count: how many tokens are global; or of each sequence, `(B,)`, int32 or int64.
        length: N.
        window: `(left, right)`: a token i sees i - left <= j <= i + right; `None` for a side is no limit.
        device: with a number: where the mask is to be.

    Returns:
        A mask of two intervals, for N rows and N keys.

    Raises:
        ValueError: another dtype or shape.

    Example:
        >>> print(Mask.global_tokens(1, 6, (1, 1)).draw(6))
        ######
        ###...
        ####..
        #.###.
        #..###
        #...##
    """
    device = count.device if isinstance(count, Tensor) else device
    number = per_item("count", count, device)
    left, right = (None if side is None else check_count("window", side) for side in window_sides(window))
    index = torch.arange(check_count("length", length), device=device)
    first = torch.zeros_like(index) if right is None else (index - right).clamp(min=0)
    limit = torch.full_like(index, NO_LIMIT) if left is None else (index + left + 1).clamp(max=NO_LIMIT)
    everything = torch.full_like(index, NO_LIMIT)
    zero = torch.zeros_like(index)
    return make(first, limit, zero, everything.where(index < number, number))

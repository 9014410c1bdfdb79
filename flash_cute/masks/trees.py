"""Masks of tokens that share what comes before them: answers to one prompt, trees of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import mask as _mask
from .._refusals import shown
from .intervals import check_count, check_integers, make, per_item, spans


def shared_prefix(
    prefix: int | Tensor, answers: Tensor | Sequence[int], length: int | None = None, *, device: Any = None
) -> _mask.Mask:
    """A prompt and several answers to it behind each other: an answer sees the prompt and itself, not its neighbours.

    As in GRPO and DPO, where the prompt would else be computed once for each answer. Pass `causal=True` with it.
    Positions (RoPE) are the caller's: every answer begins at position `prefix`.

    Args:
        prefix: the tokens of the prompt; or of each sequence's, `(B,)`, int32 or int64.
        answers: the tokens of each answer: a list of numbers, or `(n,)` or `(B, n)`, int32 or int64. An answer may have
            none.
        length: N, the tokens of prompt and answers; more are padding, which no row sees and which see nothing. `None`:
            as many as they have, where the numbers are on the host.
        device: with numbers: where the mask is to be.

    Returns:
        A mask of one interval, for N rows and N keys.

    Raises:
        ValueError: another dtype or shape; no `length` where only the device knows it.

    Example:
        >>> print(Mask.shared_prefix(3, [2, 2]).draw(7, causal=True))
        #......
        ##.....
        ###....
        ####...
        #####..
        ###..#.
        ###..##
    """
    tensors = [x for x in (prefix, answers) if isinstance(x, Tensor)]
    device = tensors[0].device if tensors else device
    if not isinstance(answers, Tensor):
        answers = torch.tensor([check_count("answers", x) for x in answers], dtype=torch.long, device=device)
    answers = check_integers("answers", answers, ("(n,)", "(B, n)"))
    begin_of_answers = per_item("prefix", prefix, device)
    ends = begin_of_answers + answers.clamp(min=0).cumsum(-1)  # (n,) or (B, n)
    begins = torch.cat((begin_of_answers.expand(*ends.shape[:-1], 1), ends), -1)
    total = begins[..., -1:]
    if length is None:
        if any(x.device.type != "cpu" for x in tensors):
            raise ValueError(
                "flash_cute: length: expected the number of tokens where prefix or answers is on the device, whose "
                f"values are not waited for, got {shown(length)}"
            )
        length = int(total.max()) if total.numel() else 0
    inside, first, limit = spans(begins[..., :-1], begins[..., 1:], check_count("length", length))
    index = torch.arange(length, device=begins.device)
    in_prompt = index < begin_of_answers
    return make(first.where(inside, 0), total.where(in_prompt, limit.where(inside, 0)))


def tree(tin: Tensor, tout: Tensor) -> _mask.Mask:
    """A tree of tokens in depth-first order: a token sees its ancestors and itself.

    As of speculative drafts, or of answers that branch. Token j is seen by the rows of its subtree, `tin[j]` to
    `tout[j]`. Pass `causal=False` with it, where each token is a node of its own, or `causal=True`, where nodes are
    runs of tokens: then all tokens of a node have its `tin` and `tout`.

    Args:
        tin, tout: `(N,)` or `(B, N)`, int32 or int64: the first row of the token's (or its node's) subtree, and the
            first row behind it.

    Returns:
        A mask of one interval, for N rows and N keys.

    Raises:
        ValueError: another dtype or shape.

    Example:
        >>> tin, tout = torch.tensor([0, 1, 2, 3, 4]), torch.tensor([5, 4, 3, 4, 5])  # 0 -> (1 -> (2, 3), 4)
        >>> print(Mask.tree(tin, tout).draw(5))
        #....
        ##...
        ###..
        ##.#.
        #...#
    """
    tin, tout = (check_integers(name, x, ("(N,)", "(B, N)")) for name, x in (("tin", tin), ("tout", tout)))
    if tin.shape != tout.shape:
        raise ValueError(f"flash_cute: tout: expected tin's shape {tuple(tin.shape)}, got {tuple(tout.shape)}")
    return make(tin, tout)

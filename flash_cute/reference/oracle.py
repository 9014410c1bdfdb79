"""The oracle of dense calls, and the same formula in the input dtype.

A few heads at a time, of long sequences one: memory is the (Nq, Nk) scores of one head, or 8 MB. Differentiable by
autograd.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .._descale import dequantised, of_columns, of_rows
from .._refusals import Window
from ..mask import Mask

_MOST_SCORES = 1 << 20  # of the heads that are computed together, unless it is one


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool | str = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    mask: Mask | None = None,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
    descale_v: Tensor | None = None,
    descale_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The oracle: what `flash_cute.fwd` should return, computed in float64 on the tensors' own device.

    Args:
        q: `(B, Hq, Nq, D)`, any floating dtype.
        k: `(B, Hkv, Nk, D)`, Hkv divides Hq.
        v: `(B, Hkv, Nk, Dv)`.
        causal: `False`, `True` (= `"bottom_right"`) or `"top_left"`, as in `flash_cute.fwd`.
        scale: `None`: `1 / sqrt(D)`.
        window: `(left, right)`: row i, which stands at position p = i + Nk - Nq (p = i where causal is "top_left"),
            sees columns p - left <= j <= p + right; `None` for a side is no limit. With `causal` right is 0.
        softcap: a score s becomes `softcap * tanh(s / softcap)`.
        sinks: `(Hq,)`: `exp(sinks[h])` is added to the denominator of head h's out, and nothing to its LSE.
        alibi_slopes: `(Hq,)` or `(B, Hq)`: `slope * |p - j|` is subtracted from the (capped) score.
        mask: as in `flash_cute.fwd`: what the band shows a row, the mask shows it too.
        descale_q, descale_k, descale_v: as in `flash_cute.fwd`: the tensors, of any dtype, are multiplied by them.
        descale_out: as in `flash_cute.fwd`: out is divided by it, and neither rounded nor limited.

    Returns:
        `(out, lse)`: `(B, Hq, Nq, Dv)` and `(B, Hq, Nq)`, both float64, lse a natural log.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
        >>> out, lse = attention(q, k, v, causal=True)
        >>> torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).double(),
        ...     atol=1e-5)
        True
    """
    call = _make_call(q, causal, scale, window, softcap)
    sinks = None if sinks is None else sinks.double()
    wide_q = dequantised(q, of_rows(descale_q, q), torch.float64)
    wide_k = dequantised(k, of_rows(descale_k, k), torch.float64)
    wide_v = dequantised(v, of_columns(descale_v, v.shape[1]), torch.float64)
    results = [_attend(heads, call) for heads in _heads(wide_q, wide_k, wide_v, sinks, alibi_slopes, mask)]
    out = _unheads([out for out, _ in results], wide_q, v.shape[-1])
    of_out = of_columns(descale_out, q.shape[1])
    return out if of_out is None else out / of_out.double(), _unheads([lse for _, lse in results], wide_q)


def gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool | str = False,
    scale: float | None = None,
    dlse: Tensor | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    mask: Mask | None = None,
) -> tuple[Tensor, ...]:
    """The oracle of the backward: what `flash_cute.bwd` should return, in float64 by autograd through `attention`.

    Args:
        dout: `(B, Hq, Nq, Dv)`, the gradient of out.
        q, k, v, causal, scale, window, softcap, sinks, alibi_slopes, mask: as in `attention`.
        dlse: `(B, Hq, Nq)`, the gradient of the LSE; `None`: 0.

    Returns:
        `(dq, dk, dv)`, shaped like q, k and v, float64; with `sinks` `(dq, dk, dv, dsinks)`.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
        >>> dq, dk, dv = gradients(torch.ones(1, 2, 16, 8), q, k, v)
        >>> torch.allclose(dv.sum(2), torch.full((1, 2, 8), 16.0).double())  # every row's weights sum to 1
        True
    """
    call = _make_call(q, causal, scale, window, softcap)
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    totals = [torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v)]
    if sinks is not None:
        totals.append(torch.zeros_like(sinks, dtype=torch.float64))
    for heads in _heads(q, k, v, sinks, alibi_slopes, mask):
        leaves = [x.detach().double().requires_grad_() for x in (heads.q, heads.k, heads.v)]
        sink = None if heads.sink is None else heads.sink.detach().double().requires_grad_()
        with torch.enable_grad():
            results = _attend(
                _Heads(heads.places, leaves[0], leaves[1], leaves[2], sink, heads.slope, heads.shown), call
            )
        flow = [torch.stack([dout[place] for place in heads.places]).double(), torch.zeros_like(results[1])]
        if dlse is not None:
            flow[1] = torch.stack([dlse[place] for place in heads.places]).double()
        parts = torch.autograd.grad(results, leaves if sink is None else [*leaves, sink], flow)
        for number, (b, h) in enumerate(heads.places):
            places = ((b, h), (b, h // group), (b, h // group), (h,))
            for total, place, part in zip(totals, places, parts, strict=False):
                total[place] += part[number].view_as(total[place])
    return tuple(totals)


def unfused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool | str = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    mask: Mask | None = None,
) -> Tensor:
    """The same formula, every step in the input dtype, as PyTorch without a fused kernel computes it.

    Arguments as `attention`; returns out, `(B, Hq, Nq, Dv)` in q's dtype. Its error is the yardstick of
    `compare`.
    """
    call = _make_call(q, causal, scale, window, softcap)
    return _unheads([_attend(heads, call)[0] for heads in _heads(q, k, v, sinks, alibi_slopes, mask)], q, v.shape[-1])


@dataclass(frozen=True)
class _Call:
    """What all heads have in common."""

    causal: bool | str
    scale: float
    window: Window
    softcap: float | None


def _make_call(
    q: Tensor, causal: bool | str, scale: float | None, window: Window | None, softcap: float | None
) -> _Call:
    if causal not in (False, True, "none", "bottom_right", "top_left"):
        raise ValueError(
            f"flash_cute: causal: expected False or 'none', True or 'bottom_right', or 'top_left', got {causal!r}"
        )
    return _Call(causal, 1 / math.sqrt(q.shape[-1]) if scale is None else scale, window or (None, None), softcap)


@dataclass(frozen=True)
class _Heads:
    """Some heads, one after the other in the first dim, each with the k and v that it reads."""

    places: list[tuple[int, int]]  # (batch, query head)
    q: Tensor  # (heads, Nq, D)
    k: Tensor  # (heads, Nk, D)
    v: Tensor  # (heads, Nk, Dv)
    sink: Tensor | None  # (heads, 1, 1)
    slope: Tensor | None  # (heads, 1, 1)
    shown: Tensor | None  # (heads, Nq, Nk) bool: by a mask


def _attend(heads: _Heads, call: _Call) -> tuple[Tensor, Tensor]:
    """out (heads, Nq, Dv) and lse (heads, Nq), every step in q's dtype."""
    scores = (heads.q @ heads.k.mT) * call.scale  # (heads, Nq, Nk)
    if call.softcap is not None:
        scores = call.softcap * (scores / call.softcap).tanh()
    distance = _distance(heads.q.shape[1], heads.k.shape[1], call.causal, heads.q.device)
    if heads.slope is not None:
        scores = scores - (heads.slope.double() * distance.abs()).to(scores.dtype)
    seen = _seen(distance, call)
    if heads.shown is not None:
        seen = seen & heads.shown
    blind = ~seen.any(-1, keepdim=True)  # (Nq, 1), with a mask (heads, Nq, 1)
    scores = scores.masked_fill(~seen, -torch.inf)
    if heads.sink is None:
        weights = scores.softmax(-1)
    else:
        column = heads.sink.to(scores.dtype).expand(-1, *blind.shape[-2:]).masked_fill(blind, -torch.inf)
        weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    # 0 for the rows that see no key, where softmax gives NaN: before the product for the gradients' sake, after it for
    # NaN in v.
    return (weights.masked_fill(blind, 0) @ heads.v).masked_fill(blind, 0), scores.logsumexp(-1)


def _heads(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, slopes: Tensor | None, mask: Mask | None
) -> Iterator[_Heads]:
    """All heads, by batch item and query head, a few at a time."""
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    if slopes is not None and slopes.dim() == 1:
        slopes = slopes.expand(q.shape[:2])
    together = max(1, _MOST_SCORES // max(1, q.shape[2] * k.shape[2]))
    every = list(itertools.product(range(q.shape[0]), range(q.shape[1])))
    for first in range(0, len(every), together):
        places = every[first : first + together]
        yield _Heads(
            places,
            torch.stack([q[place] for place in places]),
            torch.stack([k[b, h // group] for b, h in places]),
            torch.stack([v[b, h // group] for b, h in places]),
            None if sinks is None else torch.stack([sinks[h] for _, h in places]).view(-1, 1, 1),
            None if slopes is None else torch.stack([slopes[place] for place in places]).view(-1, 1, 1),
            None if mask is None else torch.stack([_shown(mask, b, h // group, q.shape[2]) for b, h in places]),
        )


def _unheads(parts: list[Tensor], q: Tensor, *last: int) -> Tensor:
    shape = (*q.shape[:3], *last)
    if not parts:
        return q.new_zeros(shape)
    return torch.cat(parts).view(shape)


def _shown(mask: Mask, b: int, head: int, len_q: int) -> Tensor:
    """(Nq, Nk) bool: whether the mask shows row i of a batch item and KV head the column j, by its definition."""
    tensors = [None if x is None else x[b % x.shape[0], head % x.shape[1]] for x in mask.tensors]
    *intervals, matrix, blocks = tensors
    rows = torch.arange(len_q, device=mask.first_row.device).unsqueeze(-1)
    keys = torch.arange(mask.first_row.shape[2], device=rows.device)
    seen = torch.zeros(len_q, keys.shape[0], dtype=torch.bool, device=rows.device)
    for first, limit in (intervals[:2], intervals[2:]):
        if first is not None and limit is not None:
            seen |= (first <= rows) & (rows < limit)
    if matrix is not None:
        seen &= matrix
    return seen if blocks is None else seen & blocks[rows // 64, keys // 64]


def _distance(len_q: int, len_k: int, causal: bool | str, device: torch.device) -> Tensor:
    """(Nq, Nk): how far column j is behind the position of row i; negative where it is before it."""
    position = torch.arange(len_q, device=device) + (0 if causal == "top_left" else len_k - len_q)
    return torch.arange(len_k, device=device) - position.unsqueeze(-1)


def _seen(distance: Tensor, call: _Call) -> Tensor:
    """(Nq, Nk) bool: whether row i sees column j."""
    left, right = call.window
    if call.causal not in (False, "none"):
        right = 0
    seen = torch.ones_like(distance, dtype=torch.bool)
    if right is not None:
        seen &= distance <= right
    return seen if left is None else seen & (distance >= -left)

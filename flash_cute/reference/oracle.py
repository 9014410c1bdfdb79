"""The oracle of dense calls, and the same formula in the input dtype.

One head at a time, so that memory is the (Nq, Nk) scores of one head. Differentiable by autograd.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .._descale import dequantised, of_columns, of_rows
from .._refusals import Window


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
    results = [_head(*head, call) for head in _heads(wide_q, wide_k, wide_v, sinks, alibi_slopes)]
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
) -> tuple[Tensor, ...]:
    """The oracle of the backward: what `flash_cute.bwd` should return, in float64 by autograd through `attention`.

    Args:
        dout: `(B, Hq, Nq, Dv)`, the gradient of out.
        q, k, v, causal, scale, window, softcap, sinks, alibi_slopes: as in `attention`.
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
    for (b, h), head in zip(_places(q), _heads(q, k, v, sinks, alibi_slopes), strict=True):
        head_q, head_k, head_v, sink, slope = head
        given = [x for x in (head_q, head_k, head_v, sink) if x is not None]
        leaves = [x.detach().double().requires_grad_() for x in given]
        with torch.enable_grad():
            results = _head(leaves[0], leaves[1], leaves[2], leaves[3] if sink is not None else None, slope, call)
        flow = [dout[b, h].double(), torch.zeros_like(results[1]) if dlse is None else dlse[b, h].double()]
        parts = torch.autograd.grad(results, leaves, flow)
        places = ((b, h), (b, h // group), (b, h // group), (h,))
        for total, place, part in zip(totals, places, parts, strict=False):
            total[place] += part
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
) -> Tensor:
    """The same formula, every step in the input dtype, as PyTorch without a fused kernel computes it.

    Arguments as `attention`; returns out, `(B, Hq, Nq, Dv)` in q's dtype. Its error is the yardstick of
    `compare`.
    """
    call = _make_call(q, causal, scale, window, softcap)
    return _unheads([_head(*head, call)[0] for head in _heads(q, k, v, sinks, alibi_slopes)], q, v.shape[-1])


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


def _head(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, slope: Tensor | None, call: _Call
) -> tuple[Tensor, Tensor]:
    """(out, lse) of one head, every step in q's dtype: q (Nq, D), k (Nk, D), v (Nk, Dv), sink and slope scalars."""
    scores = (q @ k.mT) * call.scale  # (Nq, Nk)
    if call.softcap is not None:
        scores = call.softcap * (scores / call.softcap).tanh()
    distance = _distance(q.shape[0], k.shape[0], call.causal, q.device)
    if slope is not None:
        scores = scores - (slope.double() * distance.abs()).to(scores.dtype)
    seen = _seen(distance, call)
    blind = ~seen.any(-1, keepdim=True)  # (Nq, 1)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sink is None:
        weights = scores.softmax(-1)
    else:
        column = sink.to(scores.dtype).expand(blind.shape).masked_fill(blind, -torch.inf)
        weights = torch.cat((scores, column), -1).softmax(-1)[:, :-1]
    # 0 for the rows that see no key, where softmax gives NaN: before the product for the gradients' sake, after it for
    # NaN in v.
    return (weights.masked_fill(blind, 0) @ v).masked_fill(blind, 0), scores.logsumexp(-1)


def _heads(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, slopes: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]]:
    """q, k, v, sink and slope of each head."""
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    if slopes is not None and slopes.dim() == 1:
        slopes = slopes.expand(q.shape[:2])
    for b, h in _places(q):
        sink, slope = (None if sinks is None else sinks[h]), (None if slopes is None else slopes[b, h])
        yield q[b, h], k[b, h // group], v[b, h // group], sink, slope


def _places(q: Tensor) -> Iterator[tuple[int, int]]:
    """(batch, query head), in the order of `_heads`."""
    return itertools.product(range(q.shape[0]), range(q.shape[1]))


def _unheads(heads: list[Tensor], q: Tensor, *last: int) -> Tensor:
    shape = (*q.shape[:3], *last)
    if not heads:
        return q.new_zeros(shape)
    return torch.stack(heads).view(shape)


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

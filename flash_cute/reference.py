"""Attention written down plainly: the float64 oracle, and the yardstick for how exact is exact enough.

One head at a time, so that memory is the (Nq, Nk) scores of one head. Differentiable by autograd.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# (left, right): how many keys before its position and how many after it a row sees; None: no limit.
Window = tuple[int | None, int | None]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool | str = False,
    scale: float | None = None,
    window: Window = (None, None),
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

    Returns:
        `(out, lse)`: `(B, Hq, Nq, Dv)` and `(B, Hq, Nq)`, both float64, lse a natural log.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
        >>> out, lse = attention(q, k, v, causal=True)
        >>> torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).double(),
        ...     atol=1e-5)
        True
    """
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1])
    outs, lses = [], []
    for head_q, head_k, head_v in _heads(q.double(), k.double(), v.double()):
        scores = _mask(scale * (head_q @ head_k.mT), causal, window)  # (Nq, Nk)
        # Before the product for the gradients' sake, after it for NaN in v.
        weights = _mask_blind_rows(scores.softmax(-1), causal, window, len_k=head_k.shape[0])
        outs.append(_mask_blind_rows(weights @ head_v, causal, window, len_k=head_k.shape[0]))  # (Nq, Dv)
        lses.append(scores.logsumexp(-1))  # (Nq,)
    return _unheads(outs, q, v.shape[-1]), _unheads(lses, q)


def gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool | str = False,
    scale: float | None = None,
    dlse: Tensor | None = None,
    window: Window = (None, None),
) -> tuple[Tensor, Tensor, Tensor]:
    """The oracle of the backward: what `flash_cute.bwd` should return, in float64 by autograd through `attention`.

    Args:
        dout: `(B, Hq, Nq, Dv)`, the gradient of out.
        q, k, v, causal, scale, window: as in `attention`.
        dlse: `(B, Hq, Nq)`, the gradient of the LSE; `None`: 0.

    Returns:
        `(dq, dk, dv)`, shaped like q, k and v, float64.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
        >>> dq, dk, dv = gradients(torch.ones(1, 2, 16, 8), q, k, v)
        >>> torch.allclose(dv.sum(2), torch.full((1, 2, 8), 16.0).double())  # every row's weights sum to 1
        True
    """
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1])
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v))
    for b, h in itertools.product(range(q.shape[0]), range(q.shape[1])):
        key = h // group
        head = [x.detach().double().requires_grad_() for x in (q[b, h], k[b, key], v[b, key])]
        with torch.enable_grad():
            results = attention(head[0][None, None], head[1][None, None], head[2][None, None], causal, scale, window)
        flow = [dout[b, h].double()[None, None], torch.zeros_like(results[1])]
        if dlse is not None:
            flow[1] += dlse[b, h]
        parts = torch.autograd.grad(results, head, flow)
        for total, part in zip((dq[b, h], dk[b, key], dv[b, key]), parts, strict=True):
            total += part
    return dq, dk, dv


def unfused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool | str = False,
    scale: float | None = None,
    window: Window = (None, None),
) -> Tensor:
    """The same formula, every step in the input dtype, as PyTorch without a fused kernel computes it.

    Arguments as `attention`; returns out, `(B, Hq, Nq, Dv)` in q's dtype. Its error is the yardstick of
    `compare`.
    """
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1])
    outs = []
    for head_q, head_k, head_v in _heads(q, k, v):
        scores = _mask((head_q @ head_k.mT) * scale, causal, window)
        weights = _mask_blind_rows(scores.softmax(-1), causal, window, len_k=head_k.shape[0])
        outs.append(_mask_blind_rows(weights @ head_v, causal, window, len_k=head_k.shape[0]))
    return _unheads(outs, q, v.shape[-1])


@dataclass(frozen=True)
class Comparison:
    """Largest absolute errors against the oracle, and what the contract allows."""

    out_error: float
    out_allowed: float  # 2x the unfused error + eps(dtype) * max|reference| + 1e-5
    lse_error: float  # relative to max(1, |lse|)
    lse_allowed: float = 1e-4

    @property
    def ok(self) -> bool:
        return self.out_error <= self.out_allowed and self.lse_error <= self.lse_allowed


def compare(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool | str = False,
    scale: float | None = None,
    window: Window = (None, None),
) -> Comparison:
    """How far `(out, lse)` of `flash_cute.fwd(q, k, v, causal, scale=scale)` are from the oracle.

    Arguments as `attention`. For finite inputs: where the oracle is NaN, any difference counts as an infinite error.
    """
    exact_out, exact_lse = attention(q, k, v, causal, scale, window)
    allowed = _allowed(unfused(q, k, v, causal, scale, window), exact_out)
    blind = exact_lse == -torch.inf
    lse_error = ((lse.double() - exact_lse) / exact_lse.abs().clamp(min=1)).masked_fill(blind & (lse == -torch.inf), 0)
    return Comparison(_largest(out.double() - exact_out), allowed, _largest(lse_error))


@dataclass(frozen=True)
class GradientComparison:
    """Largest absolute errors of dq, dk and dv against the oracle, and what the contract allows each: as for out."""

    errors: tuple[float, float, float]
    allowed: tuple[float, float, float]

    @property
    def ok(self) -> bool:
        return all(error <= allowed for error, allowed in zip(self.errors, self.allowed, strict=True))


def compare_gradients(
    given: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool | str = False,
    scale: float | None = None,
    window: Window = (None, None),
) -> GradientComparison:
    """How far `(dq, dk, dv)` of an attention's backward for dout are from the oracle; for finite inputs."""
    exact = gradients(dout, q, k, v, causal, scale, window=window)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        plain = torch.autograd.grad(unfused(leaves[0], leaves[1], leaves[2], causal, scale, window), leaves, dout)
    errors = [_largest(x.double() - y) for x, y in zip(given, exact, strict=True)]
    allowed = [_allowed(x, y) for x, y in zip(plain, exact, strict=True)]
    return GradientComparison((errors[0], errors[1], errors[2]), (allowed[0], allowed[1], allowed[2]))


def _allowed(plain: Tensor, exact: Tensor) -> float:
    """The contract's bound: 2x the error of the unfused computation, a rounding of the result, and 1e-5."""
    peak = exact.abs().max().item() if exact.numel() else 0.0
    return 2 * _largest(plain.double() - exact) + torch.finfo(plain.dtype).eps * peak + 1e-5


def _largest(difference: Tensor) -> float:
    if difference.numel() == 0:
        return 0.0
    return difference.abs().nan_to_num(nan=torch.inf).max().item()


def _heads(q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    for batch in range(q.shape[0]):
        for head in range(q.shape[1]):
            yield q[batch, head], k[batch, head // group], v[batch, head // group]


def _unheads(heads: list[Tensor], q: Tensor, *last: int) -> Tensor:
    shape = (*q.shape[:3], *last)
    if not heads:
        return q.new_zeros(shape)
    return torch.stack(heads).view(shape)


def _seen(len_q: int, len_k: int, causal: bool | str, window: Window, device: torch.device) -> Tensor:
    """(Nq, Nk) bool: whether row i sees column j."""
    if causal not in (False, True, "none", "bottom_right", "top_left"):
        raise ValueError(f'causal: expected False, True, "bottom_right" or "top_left", got {causal!r}')
    left, right = window
    if causal not in (False, "none"):
        right = 0
    position = 0 if causal == "top_left" else len_k - len_q  # of row 0
    seen = torch.ones(len_q, len_k, dtype=torch.bool, device=device)
    if right is not None:
        seen = seen.tril(position + right)
    return seen if left is None else seen.triu(position - left)


def _mask(scores: Tensor, causal: bool | str, window: Window) -> Tensor:
    len_q, len_k = scores.shape
    return scores.masked_fill(~_seen(len_q, len_k, causal, window, scores.device), -torch.inf)


def _mask_blind_rows(out: Tensor, causal: bool | str, window: Window, len_k: int) -> Tensor:
    """0 for the rows that see no key, where softmax gives NaN."""
    blind = ~_seen(out.shape[0], len_k, causal, window, out.device).any(-1)
    return out.masked_fill(blind.unsqueeze(-1), 0)

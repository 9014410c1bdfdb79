"""How far results are from the oracle, and how far the contract lets them be."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._refusals import Window
from ..mask import Mask
from .oracle import attention, gradients, unfused


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


def compare(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Comparison:
    """How far `(out, lse)` of `flash_cute.fwd(q, k, v, ...)` are from the oracle.

    Further arguments as in `attention`. For finite inputs: where the oracle is NaN, any difference counts as an
    infinite error. Raises ValueError for an out or lse of another shape.
    """
    _check_shapes(("out", out, (*q.shape[:3], v.shape[3])), ("lse", lse, q.shape[:3]))
    exact_out, exact_lse = attention(q, k, v, *args, **options)
    allowed = _allowed(unfused(q, k, v, *args, **options), exact_out)
    blind = exact_lse == -torch.inf
    lse_error = ((lse.double() - exact_lse) / exact_lse.abs().clamp(min=1)).masked_fill(blind & (lse == -torch.inf), 0)
    return Comparison(_largest(out.double() - exact_out), allowed, _largest(lse_error))


@dataclass(frozen=True)
class GradientComparison:
    """Largest absolute errors of dq, dk, dv (and dsinks) against the oracle, and what the contract allows each."""

    errors: tuple[float, ...]
    allowed: tuple[float, ...]

    @property
    def ok(self) -> bool:
        return all(error <= allowed for error, allowed in zip(self.errors, self.allowed, strict=True))


def compare_gradients(
    given: tuple[Tensor, ...],
    dout: Tensor,
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
) -> GradientComparison:
    """How far `(dq, dk, dv)` of an attention's backward for dout are from the oracle; with sinks also dsinks.

    Arguments as in `attention`; for finite inputs. Raises ValueError for a tensor of another shape.
    """
    names = ("dq", "dk", "dv") if sinks is None else ("dq", "dk", "dv", "dsinks")
    like = (q, k, v) if sinks is None else (q, k, v, sinks)
    if len(given) != len(names):
        raise ValueError(f"flash_cute: given: expected {', '.join(names)}, got {len(given)} tensors")
    of_dout = ("dout", dout, (*q.shape[:3], v.shape[3]))
    _check_shapes(of_dout, *((name, x, y.shape) for name, x, y in zip(names, given, like, strict=True)))
    exact = gradients(dout, q, k, v, causal, scale, None, window, softcap, sinks, alibi_slopes, mask)
    leaves = [x.detach().requires_grad_() for x in (q, k, v, sinks) if x is not None]
    with torch.enable_grad():
        options = (window, softcap, leaves[3] if sinks is not None else None, alibi_slopes, mask)
        plain_out = unfused(leaves[0], leaves[1], leaves[2], causal, scale, *options)
    plain = torch.autograd.grad(plain_out, leaves, dout)
    errors = tuple(_largest(x.double() - y) for x, y in zip(given, exact, strict=True))
    return GradientComparison(errors, tuple(_allowed(x, y) for x, y in zip(plain, exact, strict=True)))


def _check_shapes(*expected: tuple[str, Tensor, tuple[int, ...]]) -> None:
    """Raise where a tensor has another shape: arithmetic would broadcast it."""
    for name, x, shape in expected:
        if tuple(x.shape) != tuple(shape):
            raise ValueError(f"flash_cute: {name}: expected the shape {tuple(shape)}, got {tuple(x.shape)}")


def _allowed(plain: Tensor, exact: Tensor) -> float:
    """The contract's bound: 2x the error of the unfused computation, a rounding of the result, and 1e-5."""
    peak = exact.abs().max().item() if exact.numel() else 0.0
    return 2 * _largest(plain.double() - exact) + torch.finfo(plain.dtype).eps * peak + 1e-5


def _largest(difference: Tensor) -> float:
    if difference.numel() == 0:
        return 0.0
    return difference.abs().nan_to_num(nan=torch.inf).max().item()

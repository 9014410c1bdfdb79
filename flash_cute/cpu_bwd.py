"""The backward on the CPU: the formulas, a tile of query rows at a time.

    P  = exp(scale * Q K^T - lse)        dV = P^T dO
    dS = P * (dO V^T - delta)            dQ = scale * dS K
    delta = rowsum(dO * O) - dLSE        dK = scale * dS^T Q

16-bit inputs are computed in float32, as in the forward. All query heads of a key head stand in one matrix, so that
k and v are not copied for them. Over rows the products sum a head at a time: one sum over all heads would err by as
many times more as there are heads.
"""

import torch
from torch import Tensor

from .band import Band, make_band, tile_rows


def bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    causal: str,
    window_left: int | None,
    window_right: int | None,
    scale: float | None,
    deterministic: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel of `flash_cute::bwd` and `flash_cute::_bwd` for CPU tensors; the library checks the arguments.

    It is deterministic whatever `deterministic` says.
    """
    options = (causal, window_left, window_right, scale, deterministic, backend)
    factor: float = torch.ops.flash_cute.check_bwd(dout, q, k, v, out, lse, dlse, *options)
    with torch.no_grad():
        band = make_band(causal, window_left, window_right, q.shape[2], k.shape[2])
        return _bwd(dout, q, k, v, out, lse, dlse, band, factor)


def copies(q: Tensor) -> dict[str, str | None]:
    """Why each argument is copied; what `explain` says."""
    why = "computed in float32" if q.dtype in (torch.float16, torch.bfloat16) else None
    return dict.fromkeys(("q", "k", "v", "out", "dout"), why)


def reasons(q: Tensor, k: Tensor, causal: str) -> list[str]:
    """How a call is computed, in sentences; what `explain` says."""
    rows = tile_rows(q, k, make_band(causal, None, None, q.shape[2], k.shape[2]))
    return [f"PyTorch's matrix products do the arithmetic, {rows} query rows at a time."]


def _bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    band: Band,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    (batch, heads_q, len_q, head_dim), (_, heads_kv, len_k, _) = q.shape, k.shape
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    if 0 in (batch, heads_q, len_q, len_k):
        return dq.zero_(), dk.zero_(), dv.zero_()

    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    keys, values = k.to(compute), v.to(compute)  # (B, Hkv, Nk, D)
    dk_sum, dv_sum = (torch.zeros(k.shape, dtype=compute) for _ in range(2))
    group = heads_q // heads_kv

    def grouped(x: Tensor) -> Tensor:
        """(B, Hq, rows, ...) as (B, Hkv, group * rows, ...): the query heads of a key head under each other."""
        return x.to(compute).unflatten(1, (heads_kv, group)).flatten(2, 3)

    def sum_over_rows(weights: Tensor, x: Tensor) -> Tensor:
        """weights^T x of grouped tensors: (B, Hkv, keys, D)."""
        return (weights.unflatten(2, (group, -1)).mT @ x.unflatten(2, (group, -1))).sum(2)

    step = tile_rows(q, k, band)
    for start in range(0, len_q, step):
        rows = slice(start, min(start + step, len_q))
        count = rows.stop - start
        seen = band.keys(rows)
        tile_q, tile_dout = grouped(q[:, :, rows]), grouped(dout[:, :, rows])  # (B, Hkv, group * rows, D)
        tile_lse = lse[:, :, rows]  # (B, Hq, rows)
        blind = tile_lse == -torch.inf  # P is exp(-inf) for them
        delta = (dout[:, :, rows].to(compute) * out[:, :, rows].to(compute)).sum(-1)  # (B, Hq, rows)
        if dlse is not None:
            delta -= dlse[:, :, rows]
        tile_lse, delta = tile_lse.masked_fill(blind, torch.inf), delta.masked_fill(blind, 0)

        tile_k, tile_v = keys[:, :, seen], values[:, :, seen]
        p = (tile_q @ tile_k.mT).mul_(scale).sub_(grouped(tile_lse).unsqueeze(-1))  # (B, Hkv, group * rows, seen)
        hidden = band.hidden(rows, seen)
        if hidden is not None:
            p.unflatten(2, (group, -1)).masked_fill_(hidden, -torch.inf)
        p.exp_()
        dv_sum[:, :, seen] += sum_over_rows(p, tile_dout)
        ds = (tile_dout @ tile_v.mT).sub_(grouped(delta).unsqueeze(-1)).mul_(p)
        dk_sum[:, :, seen] += sum_over_rows(ds, tile_q)
        dq[:, :, rows] = (ds @ tile_k).mul_(scale).view(batch, heads_q, count, head_dim)
    return dq, dk.copy_(dk_sum.mul_(scale)), dv.copy_(dv_sum)

"""Float8 calls for the tests: inputs, descales of every kind, and how far a kernel may stand from the truth.

The truth is float64, of the dequantised inputs. A kernel's errors beside it, to first order:

* P is rounded to e4m3 by a relative e_j of at most 2^-4, its small numbers by at most 2^-18 of the row's largest one,
  which is 2^8 where e4m3 ends at 2^-10. Out is divided by the sum of the rounded P, so that it errs by
  sum_j w_j e_j (v_j - out). That is at most 2^-4 sum_j w_j |v_j - out|; and where the roundings are independent, by
  Hoeffding's inequality hardly ever more than 4 * 2^-4 sqrt(sum_j w_j^2 (v_j - out)^2).
* With a sink, whose part of the denominator is not rounded, what all e_j have in common counts for its share of out.
* The tensor cores keep about 14 bits of a float8 product's sums: a score errs by 2^-9 of scale * sum_d |q_d k_d|, out
  by 2^-11 of sum_j w_j |v_j|. The bits that are cut off add up where addends are alike. So both are 2^-7 where all
  columns of q and k are one, or all rows of v: a sum of 33 addends then loses half a bit of 13 by each.
* Out is rounded to its dtype. The LSE is that of the unrounded P, and errs by the scores' errors and by 1e-3.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from cases import Causal, Window
from numerics import SOFTCAP_RELATIVE, distances, visible
from packed import Packed

import flash_cute

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FLOAT8 = (E4M3, E5M2)
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, E4M3, E5M2)
KINDS = ("none", "number", "one_element", "head", "fine")  # of a descale; fine: by block of rows, of v by channel
BLOCK = 128

ROUNDING_OF_P = 2.0**-4
SMALLEST_P = 2.0**-18
HOEFFDING = 4.0
ROUNDING_OF_SCORES = 2.0**-9
ROUNDING_OF_SUMS = 2.0**-11
ROUNDING_OF_ALIKE = 2.0**-7
LSE_ABSOLUTE = 1e-3
# Largest relative rounding of an out, and half of the least difference of two numbers.
ROUNDING_OF_OUT = {
    torch.float16: (2.0**-11, 2.0**-25),
    torch.bfloat16: (2.0**-8, 0.0),
    torch.float32: (2.0**-24, 0.0),
    E4M3: (2.0**-4, 2.0**-10),
    E5M2: (2.0**-3, 2.0**-17),
}

Tensors = dict[str, torch.Tensor]


def quantised(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)


def blocks_of(length: int) -> int:
    return (length + BLOCK - 1) // BLOCK


def descale(kind: str, rng: torch.Generator, *fine: int, coarse: tuple[int, int], device: str) -> torch.Tensor | None:
    """Factors from 1/2 to 2, of the shape that `kind` says."""
    shapes: dict[str, tuple[int, ...]] = {"number": (), "one_element": (1,), "head": coarse, "fine": fine}
    if kind == "none":
        return None
    return (2.0 ** (2 * torch.rand(shapes[kind], generator=rng) - 1)).to(device)


def dequantised(x: torch.Tensor, factors: torch.Tensor | None, by_column: bool = False) -> torch.Tensor:
    """(B, H, N, D) in float64, by the definition: one row, or column, after the other."""
    wide = x.double()
    if factors is None:
        return wide
    factors = factors.double()
    if factors.numel() == 1:
        return wide * factors.flatten()[0]
    result = torch.empty_like(wide)
    for h in range(x.shape[1]):
        if factors.dim() == 2:
            of_head = factors[:, h * factors.shape[1] // x.shape[1]]
            result[:, h] = wide[:, h] * of_head[:, None, None]
        elif by_column:
            result[:, h] = wide[:, h] * factors[:, h][:, None, :]
        else:
            for begin in range(0, x.shape[2], BLOCK):
                rows = slice(begin, begin + BLOCK)
                result[:, h, rows] = wide[:, h, rows] * factors[:, h, begin // BLOCK][:, None, None]
    return result


@dataclass
class Call:
    """A dense call's tensors and options, as `flash_cute.fwd` takes them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    causal: Causal = False
    window: Window | None = None
    softcap: float | None = None
    scale: float | None = None
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None
    descales: dict[str, torch.Tensor | None] = field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        names = ("window", "softcap", "scale", "sinks", "alibi_slopes", "out_dtype")
        return {**{x: getattr(self, x) for x in names}, **self.descales}

    def run(self, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return flash_cute.fwd(self.q, self.k, self.v, self.causal, **self.options(), **more)

    def wide(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v in float64."""
        given = self.descales.get
        return (
            dequantised(self.q, given("descale_q")),
            dequantised(self.k, given("descale_k")),
            dequantised(self.v, given("descale_v"), by_column=True),
        )

    def __str__(self) -> str:
        tensors = [f"{x} {y.dtype} {tuple(y.shape)} {y.stride()}" for x, y in zip("qkv", self.tensors, strict=True)]
        descales = [f"{x} {tuple(y.shape)} {y.stride()}" for x, y in self.descales.items() if y is not None]
        options = {x: getattr(self, x) for x in ("causal", "window", "softcap", "scale", "out_dtype")}
        given = [x for x in ("sinks", "alibi_slopes") if getattr(self, x) is not None]
        return ", ".join([*tensors, *descales, str(options), *given])

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q, self.k, self.v


def make(
    rng: torch.Generator,
    device: str,
    *,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    len_q: int = 150,
    len_k: int = 300,
    batch: int = 2,
    heads_q: int = 4,
    heads_kv: int = 2,
    dtypes: tuple[torch.dtype, ...] = (E4M3, E4M3, E4M3),
    kinds: tuple[str, ...] = ("none", "none", "none", "none"),
    sinks: bool = False,
    alibi: bool = False,
    **options: Any,
) -> Call:
    """Standard normal inputs before they are quantised."""
    dv = head_dim_v or head_dim
    shapes = ((batch, heads_q, len_q, head_dim), (batch, heads_kv, len_k, head_dim), (batch, heads_kv, len_k, dv))
    q, k, v = (quantised(torch.randn(x, generator=rng), y).to(device) for x, y in zip(shapes, dtypes, strict=True))
    coarse = (batch, heads_kv)
    fine = ((batch, heads_q, blocks_of(len_q)), (batch, heads_kv, blocks_of(len_k)), (batch, heads_kv, dv))
    names = ("descale_q", "descale_k", "descale_v")
    descales = {
        name: descale(kind, rng, *shape, coarse=coarse, device=device)
        for name, kind, shape in zip(names, kinds, fine, strict=False)
    }
    if kinds[3] != "none":
        of_heads = (batch, heads_q)
        descales["descale_out"] = descale(
            "head" if kinds[3] == "fine" else kinds[3], rng, coarse=of_heads, device=device
        )
    if sinks:
        options["sinks"] = torch.randn(heads_q, generator=rng).to(device)
    if alibi:
        options["alibi_slopes"] = (torch.rand(heads_q, generator=rng) / 8).to(device)
    return Call(q, k, v, descales=descales, **options)


def assert_close(out: torch.Tensor, lse: torch.Tensor, call: Call) -> None:
    """Raise where a finite call's results are further from the truth than the roundings allow."""
    problems = mismatches(out, lse, call)
    assert not problems, f"{'; '.join(problems)} in {call}"


def _alike(x: torch.Tensor, dim: int) -> bool:
    return x.shape[dim] > 1 and x.stride(dim) == 0


def mismatches(out: torch.Tensor, lse: torch.Tensor, call: Call) -> list[str]:
    q, k, v = call.wide()
    group = max(1, q.shape[1] // max(1, k.shape[1]))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
    scores = scale * (q @ k.mT)
    by_sums = ROUNDING_OF_ALIKE if _alike(call.q, -1) and _alike(call.k, -1) else ROUNDING_OF_SCORES
    of_scores = by_sums * scale * (q.abs() @ k.abs().mT)  # (B, Hq, Nq, Nk): what they may err by
    if call.softcap is not None:
        scores = call.softcap * (scores / call.softcap).tanh()
        of_scores += SOFTCAP_RELATIVE * call.softcap
    if call.alibi_slopes is not None:
        slopes = call.alibi_slopes.double().expand(q.shape[:2])[..., None, None]
        bias = slopes * distances(q.shape[2], k.shape[2], call.causal, q.device)
        scores, of_scores = scores - bias, of_scores + 1e-6 * bias
    seen = visible(q.shape[2], k.shape[2], call.causal, q.device, call.window)
    scores = scores.masked_fill(~seen, -torch.inf)
    true_lse = scores.logsumexp(-1)
    total = true_lse
    if call.sinks is not None:
        total = torch.logaddexp(true_lse, call.sinks.double()[:, None])
    blind = true_lse == -torch.inf
    w = (scores - total[..., None]).exp().masked_fill(blind[..., None], 0)
    share = w.sum(-1, keepdim=True)
    truth = w @ v
    mean = truth / share.clamp(min=1e-300)  # of the values, which is out but for the sink's share

    def spread(weights: torch.Tensor) -> torch.Tensor:
        """Sum of weights * (v - mean)^2 by row and column."""
        sums = weights @ v**2 - 2 * mean * (weights @ v) + mean**2 * weights.sum(-1, keepdim=True)
        return sums.clamp(min=0)

    largest = w.amax(-1, keepdim=True) if w.shape[-1] else share
    keys = seen.double().expand(w.shape)
    by_p = torch.minimum((share * spread(w)).sqrt(), HOEFFDING * spread(w**2).sqrt()) * ROUNDING_OF_P
    by_p += SMALLEST_P * largest * (keys.sum(-1, keepdim=True) * spread(keys)).sqrt()
    of_lse = (w / share.clamp(min=1e-300) * of_scores).sum(-1)
    by_scores = ((w * of_scores**2).sum(-1, keepdim=True) * spread(w)).sqrt()
    by_share = truth.abs() * (1 - share).clamp(min=0) * (ROUNDING_OF_P + of_lse[..., None])
    allowed = 1.1 * (by_p + by_share) + by_scores + 1e-5
    allowed += (ROUNDING_OF_ALIKE if _alike(call.v, 2) else ROUNDING_OF_SUMS) * (w @ v.abs())

    dtype = torch.bfloat16 if call.out_dtype is None else call.out_dtype
    factor = call.descales.get("descale_out")
    if factor is not None:
        factor = factor.double() if factor.dim() < 2 else factor.double()[..., None, None]
        truth, allowed = truth / factor, allowed / factor
    relative, least = ROUNDING_OF_OUT[dtype]
    allowed = allowed + relative * (truth.abs() + allowed) + least
    most = torch.finfo(dtype).max
    problems = []
    if out.dtype != dtype or out.shape != truth.shape or lse.dtype != torch.float32 or lse.shape != true_lse.shape:
        return [f"out {out.dtype} {tuple(out.shape)}, lse {lse.dtype} {tuple(lse.shape)}"]
    if not out.numel():
        return []
    error = (out.double() - truth.clamp(-most, most)).abs()
    excess = (error / allowed).nan_to_num(nan=torch.inf)
    if (excess > 1).any():
        where = tuple(int(x) for x in (excess == excess.max()).nonzero()[0])
        problems.append(f"out errs by {error[where]:.3g} at {where}, {excess[where]:.3g} times what it may")
    if blind.any() and (out.double()[blind] != 0).any():
        problems.append("rows that see no key are not 0")
    if not torch.equal(lse == -torch.inf, blind):
        problems.append("lse is not -inf where no key is seen, and there alone")
    lse_error = (lse.double() - true_lse).masked_fill(blind, 0).abs()
    lse_excess = (lse_error / (LSE_ABSOLUTE + of_lse.masked_fill(blind, 0))).nan_to_num(nan=torch.inf)
    if (lse_excess > 1).any():
        problems.append(f"lse errs by {lse_error.max():.3g}, {lse_excess.max():.3g} times what it may")
    return problems


def alone(
    packed: Packed, call: Call, out: torch.Tensor, lse: torch.Tensor
) -> list[tuple[Call, torch.Tensor, torch.Tensor]]:
    """Of a packed call, whose options `call` has, each sequence as a dense one with its results."""
    found = []
    for b, (rows, keys) in enumerate(packed.sequences()):
        descales = {name: x if x is None or x.numel() == 1 else x[b : b + 1] for name, x in call.descales.items()}
        slopes = call.alibi_slopes
        one = Call(
            *(x[y].transpose(0, 1)[None] for x, y in zip(packed.tensors, (rows, keys, keys), strict=True)),
            causal=call.causal, window=call.window, softcap=call.softcap, scale=call.scale, sinks=call.sinks,
            alibi_slopes=slopes if slopes is None or slopes.dim() == 1 else slopes[b],
            out_dtype=call.out_dtype, descales=descales,
        )  # fmt: skip
        found.append((one, out[rows].transpose(0, 1)[None], lse[None, :, rows]))
    return found


def pick_kinds(draw: random.Random, out_dtype: torch.dtype | None) -> tuple[str, ...]:
    kinds = [draw.choice(KINDS) for _ in range(4)]
    if out_dtype not in FLOAT8:
        kinds[3] = "none"
    return tuple(kinds)

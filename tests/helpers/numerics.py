"""How far a result may stand from the truth. Past 400 lines: all of it is one rule and its parts.

The truth is float64. A result may err at most twice as much as PyTorch's unfused computation in the
inputs' own dtype, plus one rounding of the output, plus 1e-5; the LSE by 1e-4 * max(1, |lse|), with a
softcap also by what the approximation of tanh makes of the largest score, which may be larger than the LSE. The
rule is applied to every block of rows on its own, because under a causal mask the first rows are so
much larger than the last that one maximum over all of them would hide an error in the others.

Gradients are held to the rule of the output, each by its own, and what the rounding of out makes counts
as an error of the unfused computation: the backward is given out in the inputs' dtype, and where a row's
weights are all but one 0, dO V^T and rowsum(dO * O) cancel down to that rounding. The unfused backward
never sees out. What the float32 roundings of these two sums make counts likewise; and where a mask shows hardly
anything, so that out's roundings are few samples, twice their deviation. See `_rounding_of_delta`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from cases import Causal, Window, mask_name

import flash_cute
import flash_cute.reference

ROWS = 64  # a block of the comparison
ABSOLUTE = 1e-5
LSE_RELATIVE = 1e-4
SCORES_OF_ONE_GRAPH = 1 << 22  # 32 MiB in float64, a few times
SOFTCAP_RELATIVE = 2.5e-5  # of a capped score: the approximation of tanh, see csrc/core/score.cuh

# Where the float64 reference is computed: None is the inputs' own device. Under compute-sanitizer the
# CPU is faster, and keeps every kernel but ours out of the log (pytest --oracle cpu).
oracle_device: str | None = None


def visible(
    len_q: int,
    len_k: int,
    causal: Causal,
    device: torch.device | str = "cpu",
    window: Window | None = None,
) -> torch.Tensor:
    """(len_q, len_k) bool: which key each row sees."""
    row = torch.arange(len_q, device=device)[:, None]
    column = torch.arange(len_k, device=device)[None, :]
    position = row if causal == "top_left" else row + len_k - len_q
    left, right = window or (None, None)
    seen = torch.ones(len_q, len_k, dtype=torch.bool, device=device)
    if left is not None:
        seen &= column >= position - left
    if right is not None:
        seen &= column <= position + right
    match mask_name(causal):
        case "none":
            return seen
        case "top_left" | "bottom_right":
            return seen & (column <= position)
        case other:
            raise ValueError(f"no mask is named {other!r}")


def distances(len_q: int, len_k: int, causal: Causal, device: torch.device | str = "cpu") -> torch.Tensor:
    """(len_q, len_k): the distance between each row's position and each key."""
    row = torch.arange(len_q, device=device)[:, None]
    position = row if causal == "top_left" else row + len_k - len_q
    return (torch.arange(len_k, device=device)[None, :] - position).abs()


def unfused(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: Causal = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    mask: flash_cute.Mask | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention as PyTorch operations, each rounded to the dtype of the inputs: out and lse."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    group = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group, dim=1)
    v = v.repeat_interleave(group, dim=1)
    scores = (q @ k.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if alibi_slopes is not None:
        slopes = alibi_slopes.double().expand(q.shape[:2])[..., None, None]
        scores = scores + (-slopes * distances(q.shape[2], k.shape[2], causal, q.device)).to(q.dtype)
    seen = visible(q.shape[2], k.shape[2], causal, q.device, window) & _shown(mask, q)
    scores = scores.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(scores.to(torch.promote_types(q.dtype, torch.float32)), dim=-1)
    blind = ~seen.any(-1, keepdim=True)
    if sinks is not None:  # one more column, whose weight goes nowhere
        column = sinks.to(q.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column.masked_fill(blind, -math.inf)), dim=-1)
    weights = torch.softmax(scores, dim=-1).masked_fill(blind, 0)
    return weights[..., : k.shape[2]] @ v, lse


def _shown(mask: flash_cute.Mask | None, q: torch.Tensor) -> torch.Tensor:
    """Broadcastable to (B, Hq, Nq, Nk) bool: what the mask shows each row."""
    if mask is None:
        return torch.ones((), dtype=torch.bool, device=q.device)
    seen = mask.dense(q.shape[2])
    return seen if seen.shape[1] == 1 else seen.repeat_interleave(q.shape[1] // seen.shape[1], 1)


def mismatches(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: Causal = False,
    scale: float | None = None,
    window: Window | None = None,
    **options: Any,
) -> list[str]:
    """What is wrong with (out, lse), one sentence each; empty when the contract is met. `options`: as in `unfused`."""
    problems = _form_problems(out, lse, q, v)
    if problems or out.numel() == 0:
        return problems
    eps = torch.finfo(q.dtype).eps
    # Where v has one column, or all of them are one, a row of the unfused computation is a single sample, which may
    # happen to be nearly exact. What the rounding of P may do bounds it then.
    one_column = v.shape[-1] == 1 or v.stride(-1) == 0
    rounding = (eps / 4 * v.double().abs().amax()).expand(out.shape) if one_column and v.numel() else None
    q, k, v, out, lse = (_at_oracle(x, q) for x in (q, k, v, out, lse))
    options = {"window": window, **{name: _at_oracle(x, q) for name, x in options.items()}}
    plain, _ = unfused(q, k, v, causal, scale, **options)
    true_out, true_lse = flash_cute.reference.attention(q, k, v, causal, scale, **options)
    cap = options.get("softcap")
    limits = (causal, window, options.get("mask"))
    by_cap = 0.0 if cap is None else SOFTCAP_RELATIVE * _largest_capped(q, k, scale, cap, *limits)
    rounding = None if rounding is None else _at_oracle(rounding, q)
    return _out_problems(out, plain, true_out, eps, rounding=rounding) + _lse_problems(lse, true_lse, by_cap)


def _largest_capped(
    q: torch.Tensor,
    k: torch.Tensor,
    scale: float | None,
    cap: float,
    causal: Causal,
    window: Window | None,
    mask: flash_cute.Mask | None,
) -> torch.Tensor:
    """The largest magnitude of the capped scores that a row sees (B, Hq, Nq), before ALiBi."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    if k.shape[2] == 0:
        return torch.zeros(q.shape[:3], dtype=torch.float64, device=q.device)
    raw = q.double() @ k.double().transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    seen = visible(q.shape[2], k.shape[2], causal, q.device, window) & _shown(mask, q)
    return cap * torch.tanh(raw.abs() / cap).nan_to_num(nan=0.0).masked_fill(~seen, 0).amax(-1)


def assert_matches(out: torch.Tensor, lse: torch.Tensor, *inputs: Any, **options: Any) -> None:
    """Fails unless (out, lse) is attention of q, k and v, within the contract's bounds; arguments as `mismatches`."""
    problems = mismatches(out, lse, *inputs, **options)
    assert not problems, "; ".join(problems)


def gradient_mismatches(
    gradients: tuple[torch.Tensor, ...],
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: Causal = False,
    scale: float | None = None,
    dlse: torch.Tensor | None = None,
    window: Window | None = None,
    sinks: torch.Tensor | None = None,
    **options: Any,
) -> list[str]:
    """What is wrong with the gradients of q, k, v and sinks, one sentence each; empty when the contract is met."""
    problems = []
    leaves = [x for x in (q, k, v, sinks) if x is not None]
    names = ("dq", "dk", "dv", "dsinks")[: len(leaves)]
    for name, given, x in zip(names, gradients, leaves, strict=True):
        for what in ("shape", "dtype", "device"):
            if getattr(given, what) != getattr(x, what):
                problems.append(f"{name}'s {what} is {getattr(given, what)}, expected {getattr(x, what)}")
    if problems:
        return problems
    dout, dlse, *leaves = (_at_oracle(x, q) for x in (dout, dlse, *leaves))
    options = {"window": window, **{name: _at_oracle(x, q) for name, x in options.items()}}
    plain = _unfused_gradients(dout, dlse, leaves, causal, scale, options)
    truth, rounding = _truth_and_rounding(dout, dlse, leaves, causal, scale, options)
    eps = torch.finfo(q.dtype).eps
    results = zip(names, gradients, plain, truth, rounding, strict=True)
    for name, given, plain_one, true_one, rounding_one in results:
        if given.numel():
            compared = (_at_oracle(given, q), plain_one, true_one, rounding_one)
            if name == "dsinks":
                compared = tuple(x.view(1, -1, 1, 1) for x in compared)
            given, plain_one, true_one, rounding_one = compared
            found = _out_problems(given, plain_one, true_one, eps, name, rounding_one)
            if found and name in ("dq", "dk"):  # seldom: so it is computed for few
                rounding_one = rounding_one.abs() + _rounding_of_delta(name, dout, leaves, causal, scale, options)
                found = _out_problems(given, plain_one, true_one, eps, name, rounding_one)
            problems += found
    return problems


def assert_gradients_match(gradients: tuple[torch.Tensor, ...], *inputs: Any, **options: Any) -> None:
    """Fails unless the gradients are those of attention of q, k and v for dout and dlse, within the bounds.

    Arguments as `gradient_mismatches`.
    """
    problems = gradient_mismatches(gradients, *inputs, **options)
    assert not problems, "; ".join(problems)


def _at_oracle(x: Any, q: torch.Tensor) -> Any:
    """A tensor without its history or a mask, where the reference is computed; what is neither as it is."""
    if isinstance(x, flash_cute.Mask):
        return x.to(oracle_device or q.device)
    return x.detach().to(oracle_device or q.device) if isinstance(x, torch.Tensor) else x


def _unfused_gradients(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    tensors: list[torch.Tensor],
    causal: Causal,
    scale: float | None,
    options: dict[str, Any],
) -> tuple[torch.Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    with torch.enable_grad():
        sinks = leaves[3] if len(leaves) > 3 else None
        out, lse = unfused(leaves[0], leaves[1], leaves[2], causal, scale, sinks=sinks, **options)
    return torch.autograd.grad((out, lse), leaves, (dout, torch.zeros_like(lse) if dlse is None else dlse))


def _truth_and_rounding(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    tensors: list[torch.Tensor],
    causal: Causal,
    scale: float | None,
    options: dict[str, Any],
) -> tuple[tuple[torch.Tensor, ...], ...]:
    """The gradients, and what out's rounding to q's dtype adds to them, in float64: it is one more gradient of the LSE.

    The LSE of the keys and the sink together, of which the keys have the share `kept`. What the sink's share makes of
    the roundings of all rows adds up like a random walk: two standard deviations of it.
    """
    q, k, v, *sinks = tensors
    sink = sinks[0] if sinks else None
    # Of few scores both are computed from one forward; of more its graph would take too much memory.
    together = 0 < q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] <= SCORES_OF_ONE_GRAPH
    leaves = [x.double().requires_grad_(together) for x in (x.detach() for x in tensors)]
    with torch.set_grad_enabled(together):
        wide_sink = leaves[3] if sinks else None
        results = flash_cute.reference.attention(*leaves[:3], causal, scale, sinks=wide_sink, **options)
    out, lse = (x.detach() for x in results)

    def gradients(flow: torch.Tensor, of_lse: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        if not together:
            return flash_cute.reference.gradients(flow, q, k, v, causal, scale, of_lse, sinks=sink, **options)
        flows = (flow.double(), torch.zeros_like(lse) if of_lse is None else of_lse.double())
        return torch.autograd.grad(results, leaves, flows, retain_graph=True)

    truth = gradients(dout, dlse)
    if q.dtype == torch.float64:
        return truth, tuple(torch.zeros_like(x) for x in truth)
    change = (dout.double() * (out - out.to(q.dtype).double())).sum(-1)
    kept = torch.ones_like(lse) if sink is None else torch.sigmoid(lse - sink.double()[:, None]).nan_to_num()
    parts = gradients(torch.zeros_like(dout), change * kept)[:3]
    return truth, parts if sink is None else (*parts, 2 * (change * (1 - kept)).square().sum((0, 2)).sqrt())


def _rounding_of_delta(
    name: str,
    dout: torch.Tensor,
    tensors: list[torch.Tensor],
    causal: Causal,
    scale: float | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """What the roundings of dP = dO V^T and delta = rowsum(dO * O) add to dq or dk, in float64.

    dS = P * (dP - delta) is the difference of two sums of products, which kernels add up in different orders. Each
    errs by up to a spacing of float32 (of float64 for float64 inputs) at the sum of the products' magnitudes. With one
    key per row the two are equal, and the difference is nothing but these errors, where the unfused computation, which
    makes dS of dP alone, has an exact 0.

    What the roundings of P and out to the inputs' dtype make of delta is an error that all scores of a row share. Out's
    was measured, but is one sample for a row, and a kernel's out has another one, since it is made of rounded weights:
    two standard deviations. The numerator of a row's largest weight is 1, which has no rounding, nor has the value of a
    row's only key.
    """
    q, k, v, *sinks = (x.double() for x in tensors)
    dout, heads_kv = dout.double(), k.shape[1]
    one_per_key = torch.eye(k.shape[2], dtype=torch.float64, device=q.device).expand(*k.shape[:2], -1, -1)
    sink = sinks[0] if sinks else None
    weights, _ = unfused(q, k, one_per_key, causal, scale, sinks=sink, **options)  # (B, Hq, Nq, Nk): P
    k, v = (x.repeat_interleave(q.shape[1] // heads_kv, dim=1) for x in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale

    of_dp = dout.abs() @ v.abs().mT
    of_delta = (weights * of_dp).sum(-1, keepdim=True)
    spacing = torch.finfo(torch.promote_types(tensors[0].dtype, torch.float32)).eps
    of_sums = scale * spacing * weights * (of_dp + of_delta)

    largest = weights.amax(-1, keepdim=True) if k.shape[2] else weights.sum(-1, keepdim=True)
    of_p = (weights.masked_fill(weights == largest, 0) * (dout @ v.mT)).norm(dim=-1, keepdim=True)
    of_o = (dout * (weights @ v)).norm(dim=-1, keepdim=True).masked_fill(largest == 1, 0)
    deviations = torch.finfo(tensors[0].dtype).eps / math.sqrt(3)
    of_out = scale * deviations * torch.hypot(of_p, of_o) * weights
    if options.get("softcap") is not None:
        of_out *= 1 - torch.tanh(q @ k.mT * (scale / options["softcap"])).square()

    if name == "dq":
        return of_sums @ k.abs() + (of_out @ k).abs()
    of_sums = (of_sums.mT @ q.abs()).unflatten(1, (heads_kv, -1)).sum(2)
    return of_sums + (of_out.square().mT @ q.square()).unflatten(1, (heads_kv, -1)).sum(2).sqrt()


def _form_problems(out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, v: torch.Tensor) -> list[str]:
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    expected = {
        "out's shape": (tuple(out.shape), (*q.shape[:3], v.shape[3])),
        "lse's shape": (tuple(lse.shape), tuple(q.shape[:3])),
        "out's dtype": (out.dtype, q.dtype),
        "lse's dtype": (lse.dtype, lse_dtype),
        "out's device": (out.device, q.device),
        "lse's device": (lse.device, q.device),
    }
    return [f"{name} is {given}, expected {wanted}" for name, (given, wanted) in expected.items() if given != wanted]


def _block_max(x: torch.Tensor) -> torch.Tensor:
    """(B, H, N, D) -> (blocks of ROWS rows,): the largest magnitude in each; NaN counts as infinite."""
    rows = x.double().abs().nan_to_num(nan=math.inf, posinf=math.inf).amax(dim=(0, 1, 3))
    padding = -rows.shape[0] % ROWS
    return torch.nn.functional.pad(rows, (0, padding)).view(-1, ROWS).amax(dim=1)


def _out_problems(
    out: torch.Tensor,
    plain: torch.Tensor,
    truth: torch.Tensor,
    eps: float,
    name: str = "out",
    rounding: torch.Tensor | None = None,
) -> list[str]:
    error = _block_max(out.double() - truth)
    # Where the unfused computation overflows it is no yardstick: only the other terms count.
    plain_error = _block_max(plain.double() - truth)
    if rounding is not None:
        plain_error += _block_max(rounding)
    plain_error = torch.where(plain_error.isfinite(), plain_error, 0.0)
    bound = 2 * plain_error + eps * _block_max(truth) + ABSOLUTE
    bad = (error > bound).nonzero().flatten().tolist()
    return [
        f"rows {ROWS * block} to {min(ROWS * (block + 1), out.shape[2]) - 1} of {name} err by "
        f"{error[block]:.3g}, allowed {bound[block]:.3g} (unfused errs by {plain_error[block]:.3g})"
        for block in bad[:3]
    ]


def _lse_problems(lse: torch.Tensor, truth: torch.Tensor, by_cap: torch.Tensor | float) -> list[str]:
    lse, truth = lse.double(), truth.double()
    empty = truth == -math.inf
    if not torch.equal(lse == -math.inf, empty):
        count = int(((lse == -math.inf) ^ empty).sum())
        return [f"lse is -inf in other rows than those that see no key: {count} rows differ"]
    error = (lse - truth).masked_fill(empty, 0).abs().nan_to_num(nan=math.inf)
    excess = error - (LSE_RELATIVE * truth.abs().clamp(min=1) + by_cap).masked_fill(empty, 0)
    if not (excess > 0).any():
        return []
    at = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
    return [
        f"lse errs most at (b, h, i) = {at}: {lse[at]:.7g} where {truth[at]:.7g} is right; "
        f"{int((excess > 0).sum())} rows err"
    ]


def bits(x: torch.Tensor) -> torch.Tensor:
    """x as integers, so that equal NaNs compare equal and 0 differs from -0."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.detach().contiguous().view(integer)


def same_bits(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    """Whether two results are the same to the bit."""
    return len(a) == len(b) and all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


@contextlib.contextmanager
def nan_in_new_memory(q: torch.Tensor) -> Iterator[None]:
    """Within it every tensor made by `empty` starts as NaN: outputs and workspaces of an attention of q too.

    PyTorch's deterministic mode fills what goes through `empty`; for a way of allocating that it does
    not know, the blocks that the caching allocator would hand out next are filled as well.
    """
    if q.is_cuda:
        for _ in range(2):
            out = torch.full_like(q, math.nan)
            lse = torch.full(q.shape[:3], math.nan, device=q.device)
        del out, lse
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)

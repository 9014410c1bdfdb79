"""float16 accumulation: what takes it and what refuses it, and errors within a bound that comes from the roundings.

A sum of float16 products is rounded after each step of 16 products, perhaps of 8, by at most u = 2^-11 of the sum so
far. Such roundings are independent, with a root mean square of at most u / sqrt(3): the variances below. The largest
error of a block may be the contract's bound, which has room for five times what float32 accumulation errs by, and two
standard deviations of what the roundings make of it; the largest of thousands are at about four. A row's log-sum-exp is
compared by itself, with four.
"""

from __future__ import annotations

import importlib
import math
import sys
from types import ModuleType
from typing import Any

import numerics
import pytest
import torch
from cases import INSTANCE_HEAD_DIMS, Case, Causal, Window, score
from numerics import nan_in_new_memory, visible
from repository import ROOT

import flash_cute
from flash_cute.explain import kernel_matches
from flash_cute.report import built_architectures

MODES = ("float16_qk", "float16_pv", "float16")
SERVED = [(d, mode) for d in (*INSTANCE_HEAD_DIMS, 40, 100) for mode in MODES if d <= 192 or mode != "float16_pv"]
ROUNDING = 2**-11 / math.sqrt(3)
STEP = 8
COLUMNS = 32  # of Q and K per sum
SIGMAS = 2
SIGMAS_OF_A_ROW = 4

needs_sm80 = pytest.mark.skipif("sm80" not in built_architectures(), reason="this build has no sm80 kernels")


def variances(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: Causal, window: Window | None, mode: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of out (B, H, Nq, Dv) and of lse (B, H, Nq), in float64, by the roundings of the float16 sums."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.double() for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    scale = q.shape[-1] ** -0.5
    tile = 64 if q.shape[-1] <= 64 else 32  # csrc/sm80/forward/rows/float16_tile.h
    scores = q @ k.mT * scale
    of_scores = torch.zeros_like(scores)
    for begin in range(0, q.shape[-1], COLUMNS):
        sums = torch.zeros_like(scores)
        for d in range(begin, min(begin + COLUMNS, q.shape[-1]), STEP):
            sums += q[..., d : d + STEP] @ k[..., d : d + STEP].mT * scale
            of_scores += (ROUNDING * sums) ** 2
    hidden = ~visible(q.shape[2], k.shape[2], causal, q.device, window)
    weights = torch.softmax(scores.masked_fill(hidden, -math.inf), -1).nan_to_num()
    out = weights @ v
    of_out, of_lse = torch.zeros_like(out), torch.zeros_like(out[..., 0])
    if mode != "float16_pv":
        spread = weights**2 * of_scores
        of_lse = spread.sum(-1)
        of_out += spread @ v**2 - 2 * out * (spread @ v) + out**2 * of_lse[..., None]
    if mode != "float16_qk":
        for begin in range(0, k.shape[2], tile):
            part = torch.zeros_like(out)
            for j in range(begin, min(begin + tile, k.shape[2]), STEP):
                end = min(j + STEP, begin + tile)
                part += weights[..., j:end] @ v[:, :, j:end]
                of_out += (ROUNDING * part) ** 2
    return of_out.clamp(min=0), of_lse


def assert_within_bound(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mode: str,
    causal: Causal = False,
    window: Window | None = None,
) -> None:
    plain, _ = numerics.unfused(q, k, v, causal, window=window)
    true_out, true_lse = flash_cute.reference.attention(q, k, v, causal, window=window)
    of_out, of_lse = variances(q, k, v, causal, window, mode)
    block_max = numerics._block_max
    allowed = 2 * block_max(plain.double() - true_out) + torch.finfo(q.dtype).eps * block_max(true_out) + 1e-5
    error = block_max(out.double() - true_out)
    assert (error <= allowed + SIGMAS * block_max(of_out.sqrt())).all(), (error, allowed)
    empty = true_lse == -math.inf
    assert torch.equal(lse.double() == -math.inf, empty)
    lse_error = (lse.double() - true_lse).masked_fill(empty, 0).abs()
    assert (lse_error <= 1e-4 * true_lse.abs().clamp(1).masked_fill(empty, 1) + SIGMAS_OF_A_ROW * of_lse.sqrt()).all()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """bench/accumulate.py. The folder comes last on the path: it must not hide the installed package."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    return importlib.import_module("bench.accumulate")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_bound_holds_for_a_simulation(head_dim: int, mode: str, bench: ModuleType, rng: torch.Generator) -> None:
    q, k, v = Case(head_dim, 128, 256, heads_q=1, heads_kv=1).inputs("cpu", rng)
    q *= 2
    lse = flash_cute.reference.attention(q, k, v)[1]
    assert_within_bound(bench.simulate(q, k, v, False, mode), lse, q, k, v, mode)


@pytest.mark.parametrize("mode", MODES)
def test_the_bound_is_near_the_errors(mode: str, bench: ModuleType, rng: torch.Generator) -> None:
    """Sums with three bits less are outside of it. Of this many rows the largest error is at least 1.3 times it."""
    q, k, v = Case(64, 512, 256, heads_q=4, heads_kv=4).inputs("cpu", rng)
    q *= 2
    lse = flash_cute.reference.attention(q, k, v)[1]
    with pytest.raises(AssertionError):
        assert_within_bound(bench.simulate(q, k, v, False, mode, torch.bfloat16), lse, q, k, v, mode)


def test_float32_is_the_default(rng: torch.Generator) -> None:
    q, k, v = Case(64, 8, 8).inputs("cpu", rng)
    assert torch.equal(flash_cute.attention(q, k, v, accumulate="float32"), flash_cute.attention(q, k, v))
    leaf = q.clone().requires_grad_()
    flash_cute.attention(leaf, k, v, accumulate="float32").sum().backward()
    assert leaf.grad is not None


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 120])
@needs_sm80
def test_what_runs(capability: int) -> None:
    for head_dim, mode in SERVED:
        q = torch.empty(1, 4, 1000, head_dim, dtype=torch.float16, device="meta")
        made = flash_cute.explain(q, q, q, True, accumulate=mode, capability=capability)
        assert (made.data["backend"], made.data["accumulate"], made.data["variant"]) == ("sm80", mode, "packed")
        assert made.data["smem_bytes"] <= 99 << 10
        assert f"accumulate {mode}" in str(made) and "accumulates in float16, as was asked for" in str(made)
        plain = flash_cute.explain(q, q, q, True, capability=capability)
        assert plain.data["accumulate"] == "float32"


NAME = (
    "void flash_cute::sm80::forward::rows::fwd_kernel<"
    "flash_cute::sm80::forward::rows::Float16Traits<cutlass::half_t, 128, "
    "flash_cute::sm80::forward::rows::TileConfig{128, 32, 4, 1, false, 2}, flash_cute::Variant{true, false}, "
    "(flash_cute::AccumulateIn)2> >(flash_cute::FwdParams)"
)


@needs_sm80
def test_the_kernels_name_is_understood() -> None:
    q = torch.empty(1, 4, 1000, 128, dtype=torch.float16, device="meta")
    plans = {mode: flash_cute.explain(q, q, q, accumulate=mode, capability=90).data for mode in ("float32", *MODES)}
    assert [mode for mode, plan in plans.items() if kernel_matches(plan, NAME)] == ["float16_pv"]
    names = ("family", "tile", "block_m", "block_n", "threads", "stages", "ctas_per_sm", "variant")
    packed = plans["float32"] | {x: plans["float16"][x] for x in names}
    plain = NAME.replace("Float16Traits", "Traits").replace(", (flash_cute::AccumulateIn)2", "")
    assert kernel_matches(packed, plain) and not kernel_matches(packed, NAME)


@needs_sm80
def test_packed_calls_take_it() -> None:
    q = torch.empty(500, 4, 64, dtype=torch.float16, device="meta")
    offsets = torch.empty(3, dtype=torch.int32, device="meta")
    made = flash_cute.explain(q, q, q, cu_seqlens_q=offsets, cu_seqlens_k=offsets, accumulate="float16", capability=90)
    assert made.data["accumulate"] == "float16" and made.data["packed"]


def refusal(*tensors: torch.Tensor, **options: Any) -> str:
    with pytest.raises(ValueError) as error:
        flash_cute.explain(*tensors, **options)
    return str(error.value).removeprefix("flash_cute: accumulate: expected ")


def test_what_is_refused() -> None:
    q = torch.empty(1, 2, 8, 64, dtype=torch.float16, device="meta")
    call: dict[str, Any] = {"accumulate": "float16_pv", "capability": 90}
    assert refusal(q, q, q, **{**call, "accumulate": "half"}) == (
        "'float32', 'float16', 'float16_qk' or 'float16_pv', got 'half'"
    )
    assert refusal(q, q, q, **{**call, "accumulate": 3}).endswith("got 3")
    x = q.bfloat16()
    assert refusal(x, x, x, **call).startswith("'float32' for bfloat16 tensors, got 'float16_pv'")
    assert refusal(q, q, q, **call, backend="sm90").startswith("'float32' for backend 'sm90', got 'float16_pv'")
    assert refusal(q, q, q, **call, softcap=3.0).startswith("'float32' with softcap or alibi_slopes")
    if "sm80" in built_architectures():
        assert refusal(q, q, q, **call, backward=True).startswith("'float32' where gradients are needed")
    for mode, head_dim in (("float16_pv", 200), ("float16", 264)):
        x = torch.empty(1, 2, 8, head_dim, dtype=torch.float16, device="meta")
        most = 192 if mode == "float16_pv" else 256
        assert refusal(x, x, x, accumulate=mode, capability=90).startswith(f"'float32' for head dims above {most}")
    x = torch.randn(1, 2, 8, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match="accumulate: expected 'float32' for CPU tensors, got 'float16'"):
        flash_cute.attention(x, x, x, accumulate="float16")
    leaf = x.clone().requires_grad_()
    with pytest.raises(ValueError, match="accumulate: expected None or 'float32' where gradients are needed"):
        flash_cute.attention(leaf, x, x, accumulate="float16")


MASKS: tuple[tuple[Causal, Window | None], ...] = ((False, None), (True, None), ("top_left", (70, 20)))


@pytest.mark.cuda
@pytest.mark.sanitizer
@pytest.mark.parametrize(("causal", "window"), MASKS, ids=["full", "causal", "window"])
@pytest.mark.parametrize(("head_dim", "mode"), SERVED)
def test_errors(head_dim: int, causal: Causal, window: Window | None, mode: str, rng: torch.Generator) -> None:
    q, k, v = Case(head_dim, 413, 603, causal, torch.float16, 1, 4, 2).inputs("cuda", rng)
    with nan_in_new_memory(q):
        out, lse = flash_cute.fwd(q, k, v, causal, window=window, accumulate=mode)
    assert_within_bound(out, lse, q, k, v, mode, causal, window)


@pytest.mark.cuda
@pytest.mark.parametrize("mode", MODES)
def test_packed(mode: str, rng: torch.Generator) -> None:
    lengths = [100, 1, 0, 333]
    q, k, v = (torch.randn(sum(lengths), h, 128, generator=rng).to("cuda", torch.float16) for h in (4, 2, 2))
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    offsets = ends.to("cuda")
    with nan_in_new_memory(q):
        out, lse = flash_cute.varlen_fwd(q, k, v, offsets, offsets, True, accumulate=mode)
    for begin, end in zip(ends.tolist(), ends.tolist()[1:], strict=False):
        if end > begin:
            one = [x[begin:end].transpose(0, 1)[None] for x in (q, k, v)]
            given = out[begin:end].transpose(0, 1)[None], lse[:, begin:end][None]
            assert_within_bound(*given, *one, mode, True)


@pytest.mark.cuda
@pytest.mark.parametrize(("head_dim", "mode"), SERVED)
def test_finite_inputs_give_no_nan(head_dim: int, mode: str, rng: torch.Generator) -> None:
    """Scores that saturate on either side, also in whole rows, and values of 1000.

    Scores summed in float32 do not saturate: their differences are exact up to 2^24.
    """
    q, k, _ = Case(head_dim, 200, 300, False, torch.float16, 1, 2, 2).inputs("cuda", rng)
    v = torch.full_like(k, 1000)
    saturating = ((60000.0, 60000.0), (60000.0, -60000.0)) if mode != "float16_pv" else ()
    for large_q, large_k in (*saturating, (300.0, 300.0), (1e-6, 60000.0)):
        for x, y in ((torch.full_like(q, large_q), torch.full_like(k, large_k)), (q * 100, k * large_k / 10)):
            y = y.clamp(-60000, 60000)
            out, lse = flash_cute.fwd(x, y, v, accumulate=mode)
            assert out.isfinite().all() and lse.isfinite().all()
            torch.testing.assert_close(out.float(), torch.full_like(out, 1000, dtype=torch.float32), rtol=4e-3, atol=0)


@pytest.mark.cuda
def test_nan_is_kept(rng: torch.Generator) -> None:
    q, k, v = Case(64, 64, 128, False, torch.float16, 1, 1, 1).inputs("cuda", rng)
    k[:, :, 70, 3] = math.nan
    out, lse = flash_cute.fwd(q, k, v, accumulate="float16")
    assert out.isnan().all() and lse.isnan().all()


@pytest.mark.cuda
def test_compiled_and_captured(rng: torch.Generator) -> None:
    q, k, v = Case(128, 128, 128, False, torch.float16, 1, 2, 2).inputs("cuda", rng)
    expected = flash_cute.attention(q, k, v, True, accumulate="float16")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_cute.attention(q, k, v, True, accumulate="float16")
    graph.replay()
    assert torch.equal(out, expected)
    compiled = torch.compile(lambda *x: flash_cute.attention(*x, True, accumulate="float16"), fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(q, k, v), expected)


@pytest.mark.cuda
def test_the_operators_backward_refuses(rng: torch.Generator) -> None:
    q, k, v = Case(64, 64, 64, False, torch.float16, 1, 1, 1).inputs("cuda", rng)
    out, lse = torch.ops.flash_cute.fwd(q.requires_grad_(), k, v, *score(), "auto+float16")
    with pytest.raises((ValueError, RuntimeError), match="accumulate: expected 'float32' where gradients are needed"):
        out.sum().backward()
    assert lse.isfinite().all()

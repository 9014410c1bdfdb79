"""Windows: each row sees so many keys before its position and so many after it."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from cases import CAUSAL, Backward, Case, Causal, Forward, Window, mask_name, score
from numerics import assert_gradients_match, assert_matches, same_bits, visible

import flash_cute
from flash_cute.band import make_band

pytestmark = pytest.mark.kernel

SIDES = (None, 0, 1, 17, 64, 130, 500)
LENGTHS = ((1, 1), (1, 200), (200, 1), (63, 65), (64, 64), (65, 129), (129, 65), (113, 200), (200, 113))
# Both sides, one, none; with rows that see nothing where len_q > len_k, before the keys or behind them.
WINDOWS: tuple[Window, ...] = (
    (0, 0),
    (1, 0),
    (0, 17),
    (17, 5),
    (64, 64),
    (130, None),
    (None, 3),
    (0, None),
    (300, 300),
)


def _window_id(window: Window) -> str:
    return "-".join(str(side) for side in window)


@pytest.mark.parametrize("causal", CAUSAL, ids=mask_name)
@pytest.mark.parametrize("window", WINDOWS, ids=_window_id)
@pytest.mark.parametrize(("len_q", "len_k"), LENGTHS)
def test_exact(
    device: str,
    len_q: int,
    len_k: int,
    window: Window,
    causal: Causal,
    fwd: Forward,
    bwd: Backward,
    rng: torch.Generator,
) -> None:
    dtype = torch.float16 if device == "cuda" else torch.float32
    q, k, v = Case(32, len_q, len_k, dtype=dtype, heads_q=4).inputs(device, rng)
    out, lse = fwd(q, k, v, causal, window=window)
    assert_matches(out, lse, q, k, v, causal, window=window)
    seeing = visible(len_q, len_k, causal, device, window).any(-1)
    assert (out[:, :, ~seeing] == 0).all() and (lse[:, :, ~seeing] == -torch.inf).all()
    dout = torch.randn(q.shape, generator=rng).to(q)
    dlse = torch.randn(q.shape[:3], generator=rng).to(lse)
    gradients = bwd(dout, q, k, v, causal, dlse=dlse, window=window)
    assert_gradients_match(gradients, dout, q, k, v, causal, None, dlse, window)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("number", range(12))
def test_random_on_the_cpu(number: int, dtype: torch.dtype, seed: int, rng: torch.Generator) -> None:
    draw = random.Random(seed)
    len_q, len_k = draw.randint(1, 200), draw.randint(2, 200)  # a single key: see test_random.py
    window, causal = (draw.choice(SIDES), draw.choice(SIDES)), draw.choice(CAUSAL)
    case = Case(draw.choice((8, 33, 64)), len_q, len_k, causal, dtype, heads_q=6)
    print(case, window)
    q, k, v = case.inputs("cpu", rng)
    options = score(causal, window, scale=0.3)
    out, lse = torch.ops.flash_cute.fwd(q, k, v, *options, "auto")
    assert_matches(out, lse, q, k, v, causal, 0.3, window)
    dout = torch.randn(q.shape, generator=rng, dtype=torch.float32).to(q)
    gradients = torch.ops.flash_cute.bwd(dout, q, k, v, out, lse, None, *options, True, "auto")[:3]
    assert_gradients_match(gradients, dout, q, k, v, causal, 0.3, window=window)


def test_tiles_of_the_cpu(rng: torch.Generator) -> None:
    """Rows and keys past one tile of the CPU path, windows narrower and wider than a tile."""
    q, k, v = Case(16, 700, 900, dtype=torch.float32, batch=4, heads_q=8, heads_kv=8).inputs("cpu", rng)
    dout = torch.randn(q.shape, generator=rng)
    for window in ((40, 30), (300, 0), (5, None)):
        options = score("none", window)
        out, lse = torch.ops.flash_cute.fwd(q, k, v, *options, "auto")
        gradients = torch.ops.flash_cute.bwd(dout, q, k, v, out, lse, None, *options, True, "auto")[:3]
        for b in (0, 3):  # the reference takes one head at a time
            one = [x[b : b + 1, 6:] for x in (q, k, v)]
            assert_matches(out[b : b + 1, 6:], lse[b : b + 1, 6:], *one, window=window)
            parts = [x[b : b + 1, 6:] for x in gradients]
            assert_gradients_match((parts[0], parts[1], parts[2]), dout[b : b + 1, 6:], *one, window=window)


@pytest.mark.parametrize(("len_q", "len_k"), [(65, 129), (129, 65), (100, 100)])
def test_windows_that_are_other_masks(
    device: str, len_q: int, len_k: int, fwd: Forward, bwd: Backward, rng: torch.Generator
) -> None:
    """As wide as the lengths: no window. No keys to the right: causal."""
    q, k, v = Case(64, len_q, len_k).inputs(device, rng)
    huge = 2**62
    for causal, window, same in (
        (False, (huge, huge), False),
        (False, (None, 0), True),
        (False, (huge, 0), "bottom_right"),
        ("bottom_right", (huge, huge), "bottom_right"),
        ("top_left", (huge, 5), "top_left"),
    ):
        assert same_bits(fwd(q, k, v, causal, window=window), fwd(q, k, v, same))
        given = bwd(q, q, k, v, causal, window=window, deterministic=True)
        assert same_bits(given, bwd(q, q, k, v, same, deterministic=True))


def test_autograd_of_the_operator(device: str, rng: torch.Generator) -> None:
    leaves = [x.requires_grad_() for x in Case(64, 65, 129).inputs(device, rng)]
    options = score("none", (9, 3), scale=0.2)
    out, lse = torch.ops.flash_cute.fwd(*leaves, *options, "auto", True)
    given = torch.autograd.grad((out, lse), leaves, (out.detach(), lse.detach()))
    tensors = [x.detach() for x in (out, *leaves, out, lse, lse)]
    assert same_bits(given, torch.ops.flash_cute.bwd(*tensors, *options, True, "auto")[:3])


def test_every_public_function_takes_it(device: str, rng: torch.Generator) -> None:
    """As a tuple or a list; what they return is the operators' to the bit. No window is no limit on either side."""
    leaves = [x.requires_grad_() for x in Case(64, 65, 129).inputs(device, rng)]
    expected = torch.ops.flash_cute.fwd(*leaves, *score("none", (9, 3)), "auto", True)
    flow = expected[0].detach()
    gradients = torch.autograd.grad(expected[0], leaves, flow)
    for window in ((9, 3), [9, 3]):
        out = flash_cute.attention(*leaves, window=window, deterministic=True)
        assert same_bits((out,), expected[:1])
        assert same_bits(torch.autograd.grad(out, leaves, flow), gradients)
        assert same_bits(flash_cute.fwd(*leaves, window=window), expected)
        tensors = [x.detach() for x in (flow, *leaves, *expected)]
        assert same_bits(flash_cute.bwd(*tensors, window=window, deterministic=True), gradients)
        explained = flash_cute.explain(*leaves, window=window).data
        assert (explained["window"], explained["mask"]) == ([9, 3], "window")
    plain = flash_cute.fwd(*leaves, True)
    assert same_bits(flash_cute.fwd(*leaves, True, window=None), plain)
    assert same_bits(flash_cute.fwd(*leaves, True, window=(None, None)), plain)


def test_numpy_ints(rng: torch.Generator) -> None:
    np = pytest.importorskip("numpy")
    q, k, v = Case(16, 9, 11).inputs("cpu", rng)
    window = (np.int64(3), np.int32(2))
    assert same_bits(flash_cute.fwd(q, k, v, window=window), flash_cute.fwd(q, k, v, window=(3, 2)))


def test_band_is_the_mask() -> None:
    """make_band against the mask written down, for every small problem."""
    sides = (None, 0, 1, 2, 5, 9)
    for len_q, len_k, causal in itertools.product(range(1, 6), range(0, 6), CAUSAL):
        for window in itertools.product(sides, sides):
            band = make_band(mask_name(causal), *window, len_q, len_k)
            seen = visible(len_q, len_k, causal, window=window)
            row, column = torch.arange(len_q)[:, None], torch.arange(len_k)
            assert torch.equal((row + band.lower <= column) & (column <= row + band.upper), seen)
            rows = band.rows()
            assert [*range(len_q)[rows]] == seen.any(1).nonzero().flatten().tolist()
            if not band.limits_left and not band.limits_right:
                assert seen.all()
            for start, stop in itertools.combinations(range(rows.start, rows.stop + 1), 2):
                tile = slice(start, stop)
                keys = band.keys(tile)
                assert [*range(len_k)[keys]] == seen[tile].any(0).nonzero().flatten().tolist()
                scores = band.hide(torch.zeros(2, stop - start, keys.stop - keys.start), tile, keys)
                assert torch.equal(scores == 0, seen[tile, keys].expand_as(scores))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("operator", ["fwd", "_fwd", "fwd_plan", "check_fwd", "bwd", "_bwd", "bwd_plan", "check_bwd"])
def test_negative_is_refused(operator: str, side: str) -> None:
    q = torch.zeros(1, 1, 4, 8)
    window = (-3, None) if side == "left" else (None, -3)
    tensors = (q, q, q, q, q, q[..., 0], None) if operator in ("bwd", "_bwd", "check_bwd") else (q, q, q)
    flags = {"bwd": (False,), "_bwd": (False,), "check_bwd": (False,)}.get(operator, ())
    last = {"fwd_plan": (0,), "bwd_plan": (False, 0)}.get(operator, ())
    sentence = rf"^flash_cute: window_{side}: expected None \(no limit\) or a number of at least 0, got -3"
    with pytest.raises((ValueError, RuntimeError), match=sentence):
        getattr(torch.ops.flash_cute, operator)(*tensors, *score("none", window), *flags, "auto", *last)


def test_reference_agrees_with_itself() -> None:
    """The oracle's window is the one that is written down, and compare and compare_gradients take it."""
    q, k, v = (torch.randn(1, 2, 24, 8, generator=torch.Generator().manual_seed(x)) for x in range(3))
    window = (3, 2)
    scores = (q.double() @ k.double().mT / 8**0.5).masked_fill(~visible(24, 24, False, window=window), -torch.inf)
    out, lse = flash_cute.reference.attention(q, k, v, window=window)
    torch.testing.assert_close(out, scores.softmax(-1) @ v.double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=0, atol=1e-12)
    given = torch.ops.flash_cute.fwd(q, k, v, *score("none", window), "auto")
    assert flash_cute.reference.compare(*given, q, k, v, window=window).ok
    assert not flash_cute.reference.compare(*given, q, k, v, window=(3, 1)).ok
    gradients = flash_cute.reference.gradients(q, q, k, v, window=window)
    assert flash_cute.reference.compare_gradients(gradients, q, q, k, v, window=window).ok
    assert not flash_cute.reference.compare_gradients(gradients, q, q, k, v, window=(3, 1)).ok

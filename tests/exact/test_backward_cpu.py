"""The backward's CPU path: float64 against differences, float32 where scores are large, and its tiles of rows."""

from __future__ import annotations

import pytest
import torch
from cases import CAUSAL, Case, Causal, mask_name, score
from numerics import assert_gradients_match, unfused

import flash_cute


@pytest.mark.parametrize("causal", CAUSAL, ids=mask_name)
@pytest.mark.parametrize(("len_q", "len_k"), [(5, 9), (9, 5), (7, 7)])
def test_gradcheck(causal: Causal, len_q: int, len_k: int, rng: torch.Generator) -> None:
    """Against differences of the forward itself, through out and lse together."""
    blind = max(0, len_q - len_k) if mask_name(causal) == "bottom_right" else 0  # -inf has no differences
    q, k, v = Case(6, len_q, len_k, dtype=torch.float64, heads_q=4).inputs("cpu", rng)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def attend(*x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = flash_cute.fwd(*x, causal, scale=0.7)
        return out, lse[:, :, blind:]

    assert torch.autograd.gradcheck(attend, leaves)
    raw = (*score(causal, scale=0.7), "cpu")
    assert torch.autograd.gradcheck(lambda *x: torch.ops.flash_cute.fwd(*x, *raw)[0], leaves)


def test_float64_stays_float64(rng: torch.Generator) -> None:
    case = Case(64, 113, 203, dtype=torch.float64, heads_q=4)
    q, k, v = case.inputs("cpu", rng)
    dout, dlse = case.flow("cpu", rng)
    for causal in CAUSAL:
        given = flash_cute.bwd(dout, q, k, v, *flash_cute.fwd(q, k, v, causal), causal, dlse=dlse)
        expected = flash_cute.reference.gradients(dout, q, k, v, causal, None, dlse)
        for x, y in zip(given, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def test_tiles_of_the_cpu(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that do not fit one tile of scores, with a ragged last tile."""
    monkeypatch.setattr(flash_cute.band, "SCORES", 2 * 4 * 77 * 40)
    case = Case(16, 130, 77, dtype=torch.float64, heads_q=4)
    for causal in CAUSAL:
        q, k, v = case.inputs("cpu", rng)
        dout, dlse = case.flow("cpu", rng)
        given = flash_cute.bwd(dout, q, k, v, *flash_cute.fwd(q, k, v, causal), causal, dlse=dlse)
        assert_gradients_match(given, dout, q, k, v, causal, dlse=dlse)


@pytest.mark.parametrize("causal", CAUSAL, ids=mask_name)
@pytest.mark.parametrize("size", [2, 4, 6, 10, 50])
def test_large_scores_in_float32(size: int, causal: Causal, rng: torch.Generator) -> None:
    """Rows with almost all weight on one key, and an LSE whose rounding P = exp(s - lse) would show."""
    for same in (False, True):
        q, k, v = Case(64, 128, 128, dtype=torch.float32).inputs("cpu", rng)
        q, k = size * q, size * (q if same else k)
        out, lse = flash_cute.fwd(q, k, v, causal)
        dout = torch.randn(out.shape, generator=rng)
        given = flash_cute.bwd(dout, q, k, v, out, lse, causal)
        assert_gradients_match(given, dout, q, k, v, causal)
        # Parts of the keys with the LSE of all give the same, where the parts' own sums are no longer 1.
        if causal is False:
            parts = [flash_cute.bwd(dout, q, k[:, :, x], v[:, :, x], out, lse) for x in (slice(0, 50), slice(50, 128))]
            halves = zip(parts[0], parts[1], strict=True)
            dq, dk, dv = (torch.cat(x, 2) if i else x[0] + x[1] for i, x in enumerate(halves))
            for x, y in zip((dq, dk, dv), flash_cute.reference.gradients(dout, q, k, v), strict=True):
                share = 2**-22 * float(lse.abs().max())  # of P: the LSE's rounding, and the scores'
                torch.testing.assert_close(x.double(), y, rtol=2 * share, atol=(1e-4 + 64 * share) * size)


@pytest.mark.parametrize("len_k", [1, 3])
def test_heads_of_a_key_head_are_summed_apart(len_k: int, rng: torch.Generator) -> None:
    """Few keys: one sum over the rows of all 32 heads errs by several times as much as unfused attention."""
    case = Case(32, 200, len_k, dtype=torch.float32, heads_q=32, heads_kv=1)
    q, k, v = case.inputs("cpu", rng)
    dout, _ = case.flow("cpu", rng)
    given = flash_cute.bwd(dout, q, k, v, *flash_cute.fwd(q, k, v))
    assert_gradients_match(given, dout, q, k, v)


@pytest.mark.parametrize(("len_q", "len_k", "causal"), [(29, 14, False), (300, 100, True), (300, 14, False)])
def test_float32_is_as_exact_as_unfused(len_q: int, len_k: int, causal: Causal, rng: torch.Generator) -> None:
    """Root mean square errors like the unfused computation's; the exp of PyTorch's flash attention has 1.2 times dq's.

    Its largest errors are 3 to 7 times as large, but those of two exact computations differ by 3 as well, in one draw
    of 30.
    """
    case, scale = Case(187, len_q, len_k, dtype=torch.float32, heads_q=6, heads_kv=3), 2 / 187**0.5
    errors, plain_errors = torch.zeros(2, 3, dtype=torch.float64)  # the squares' sums of dq, dk and dv
    for _ in range(4):
        q, k, v = case.inputs("cpu", rng)
        dout, _ = case.flow("cpu", rng)
        given = flash_cute.bwd(dout, q, k, v, *flash_cute.fwd(q, k, v, causal, scale=scale), causal, scale=scale)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        plain = torch.autograd.grad(unfused(*leaves, causal, scale)[0], leaves, dout)
        truth = flash_cute.reference.gradients(dout, q, k, v, causal, scale)
        for squares, gradients in ((errors, given), (plain_errors, plain)):
            for i, (x, y) in enumerate(zip(gradients, truth, strict=True)):
                squares[i] += (x.double() - y).square().sum()
    ratios = (errors / plain_errors).sqrt()
    assert (ratios < 1.1).all(), ratios

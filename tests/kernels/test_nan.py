"""NaN outside the valid lengths never matters; NaN and inf inside them reach the rows that see them."""

from __future__ import annotations

import math

import pytest
import torch
from cases import INSTANCE_HEAD_DIMS, Case, Causal, Forward, plan
from layouts import surrounded
from numerics import assert_matches, bits, same_bits, visible

import flash_cute

pytestmark = pytest.mark.kernel

LENGTHS = ((1, 1), (63, 65), (64, 127), (65, 63), (113, 203), (127, 129), (129, 31))
CUDA_ONLY = [pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("len_q", "len_k"), LENGTHS)
@pytest.mark.parametrize("head_dim", INSTANCE_HEAD_DIMS)
def test_nan_round_every_input(
    device: str,
    head_dim: int,
    len_q: int,
    len_k: int,
    causal: Causal,
    fwd: Forward,
    rng: torch.Generator,
) -> None:
    q, k, v = Case(head_dim, len_q, len_k).inputs(device, rng)
    result = fwd(surrounded(q), surrounded(k), surrounded(v), causal)
    assert_matches(*result, q, k, v, causal)
    if device == "cuda":
        assert same_bits(result, fwd(q, k, v, causal))


@pytest.mark.parametrize("head_dim", [8, 24, 40, 72, 104, 136, 200, 33, 100])
def test_nan_beside_the_columns(device: str, head_dim: int, fwd: Forward, rng: torch.Generator) -> None:
    """Head dims narrower than their kernel's: its last columns lie on NaN."""
    q, k, v = Case(head_dim, 65, 77).inputs(device, rng)
    assert_matches(*fwd(surrounded(q), surrounded(k), surrounded(v)), q, k, v)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("causal", [False, True, "top_left"], ids=str)
@pytest.mark.parametrize("column", [0, 64, 100, 202])
def test_seen_key_gives_what_pytorch_gives(
    device: str,
    column: int,
    causal: Causal,
    which: str,
    number: float,
    fwd: Forward,
    rng: torch.Generator,
) -> None:
    q, k, v = Case(64, 113, 203, dtype=torch.bfloat16).inputs(device, rng)
    (k if which == "k" else v)[0, 1, column, 7] = number
    out, lse = fwd(q, k, v, causal)
    # In float64: on some CPUs PyTorch's bfloat16 products spread the NaN to other rows.
    plain_out, plain_lse = flash_cute.reference.attention(q, k, v, causal)

    # A row of which every score is -inf is left to the test below: PyTorch itself has two answers.
    seeing = visible(113, 203, causal, device)[:, column] & (plain_lse[0, 1] != -math.inf)
    given, expected = out[0, 1, seeing].double(), plain_out[0, 1, seeing]
    assert torch.equal(given.isnan(), expected.isnan())
    assert torch.equal(given.isinf(), expected.isinf())
    torch.testing.assert_close(given, expected, rtol=0.1, atol=0.05, equal_nan=True)
    lse_given, lse_expected = lse[0, 1, seeing].double(), plain_lse[0, 1, seeing]
    # A score of +inf: the sum of exponentials is infinite, the weights are NaN; either is a fair LSE.
    finite = lse_expected.isfinite()
    assert torch.equal(lse_given.isfinite(), finite)
    torch.testing.assert_close(lse_given[finite], lse_expected[finite], rtol=0.02, atol=0.02)

    others = torch.ones(2, 2, dtype=torch.bool)
    others[0, 1] = False
    assert out[others].isfinite().all(), "another head was touched"
    assert lse[others].isfinite().all(), "another head's lse was touched"


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("column", [130, 300, 511, 900])
def test_rows_of_other_tiles_are_untouched(
    device: str,
    column: int,
    which: str,
    fwd: Forward,
    backend: str | None,
    rng: torch.Generator,
) -> None:
    q, k, v = Case(64, 1024, 1024).inputs(device, rng)
    clean = fwd(q, k, v, True)
    (k if which == "k" else v)[:, :, column] = math.nan
    out, lse = fwd(q, k, v, True)

    made = plan(q, k, v, True, backend=backend)
    block_m, block_n = made.get("block_m", 256), made.get("block_n", 512)  # PyTorch's kernel for the CPU
    # A tile of rows reads keys up to the end of the block of keys that holds its last row's last one.
    tile_end = (torch.arange(1024, device=device) // block_m + 1) * block_m
    reads_up_to = (tile_end + block_n - 1) // block_n * block_n
    untouched = reads_up_to <= column
    assert untouched.any() or column < 512, "nothing is tested"
    assert torch.equal(bits(out[:, :, untouched]), bits(clean[0][:, :, untouched]))
    assert torch.equal(bits(lse[:, :, untouched]), bits(clean[1][:, :, untouched]))
    assert out[:, :, column:].isnan().all()


def test_a_row_of_q_touches_no_other(device: str, fwd: Forward, rng: torch.Generator) -> None:
    q, k, v = Case(64, 130, 203).inputs(device, rng)
    bad = q.clone()
    bad[:, :, 70] = math.nan
    out, lse = fwd(bad, k, v)
    assert out[:, :, 70].isnan().all()
    assert lse[:, :, 70].isnan().all()
    for rows in (slice(0, 70), slice(71, 130)):
        assert_matches(out[:, :, rows], lse[:, :, rows], q[:, :, rows], k, v)


def test_all_scores_minus_infinity(device: str, fwd: Forward, rng: torch.Generator) -> None:
    """Rows that see keys, none of which has any weight: softmax divides 0 by 0, and the sum of weights is 0."""
    q, k, v = Case(64, 65, 77).inputs(device, rng)
    q = q.abs() + 0.1
    k[..., 0] = -math.inf
    out, lse = fwd(q, k, v)
    assert (lse == -math.inf).all()
    assert out.isnan().all()


@pytest.mark.sanitizer
@pytest.mark.parametrize("device", CUDA_ONLY)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_small(device: str, head_dim: int, fwd: Forward, rng: torch.Generator) -> None:
    q, k, v = Case(head_dim, 65, 77).inputs(device, rng)
    assert_matches(*fwd(surrounded(q), surrounded(k), surrounded(v), True), q, k, v, True)

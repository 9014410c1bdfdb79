"""The online softmax holds for any course of the scores: rising, falling, huge, tiny, all equal."""

from __future__ import annotations

import math

import pytest
import torch
from cases import CUDA_DTYPES, Case, Causal, Forward
from numerics import assert_matches, visible

import flash_cute.reference

pytestmark = pytest.mark.kernel

LEN_Q, LEN_K = 130, 515


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
@pytest.mark.parametrize("course", ["rising", "falling", "zigzag", "one_peak"])
def test_running_maximum(
    device: str,
    course: str,
    dtype: torch.dtype,
    causal: Causal,
    fwd: Forward,
    rng: torch.Generator,
) -> None:
    """Scores from -40 to 40 over the keys, beside the noise of random ones."""
    q, k, v = Case(64, LEN_Q, LEN_K, dtype=dtype).inputs(device, rng)
    along = torch.arange(LEN_K, device=device)
    height = {
        "rising": torch.linspace(-1, 1, LEN_K, device=device),
        "falling": torch.linspace(1, -1, LEN_K, device=device),
        "zigzag": 1 - 2.0 * (along // 64 % 2),
        "one_peak": (along == 77).float() * 2 - 1,
    }[course]
    q[..., 0] = 16.0
    k[..., 0] = (20 * height).to(dtype)
    assert_matches(*fwd(q, k, v, causal), q, k, v, causal)


@pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative"])
def test_large_scores(device: str, sign: int, fwd: Forward, rng: torch.Generator) -> None:
    """All scores far from 0 on one side: exp of them would overflow, or all vanish."""
    q, k, v = Case(128, LEN_Q, LEN_K, dtype=torch.bfloat16).inputs(device, rng)
    q[..., 3] = 100.0
    k[..., 3] = sign * 100.0
    out, lse = fwd(q, k, v, True)
    assert (lse * sign > 500).all()
    assert_matches(out, lse, q, k, v, True)


@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
def test_peaked(device: str, dtype: torch.dtype, fwd: Forward, rng: torch.Generator) -> None:
    q, k, v = Case(64, LEN_Q, LEN_K, dtype=dtype).inputs(device, rng)
    q *= 8
    assert_matches(*fwd(q, k, v, True), q, k, v, True)


def test_equal_scores_average(device: str, fwd: Forward, rng: torch.Generator) -> None:
    q, k, v = Case(64, LEN_Q, LEN_K).inputs(device, rng)
    out, lse = fwd(torch.zeros_like(q), k, v)
    mean = v.double().mean(2, keepdim=True).expand_as(out)
    torch.testing.assert_close(out.double(), mean, rtol=2e-3, atol=1e-4)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(LEN_K)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_common_part_of_values(
    device: str, head_dim: int, dtype: torch.dtype, fwd: Forward, rng: torch.Generator
) -> None:
    """What all values have in common errs no more than with 16-bit weights whose largest is 1 exactly.

    The backward's rowsum(dO * O) carries this error to every key.
    """
    q, k, v = Case(head_dim, 512, 1024, dtype=dtype).inputs(device, rng)
    q, v = q * 4, v + 3
    true_out, _ = flash_cute.reference.attention(q, k, v, True)
    scores = (q.double() @ k.double().mT / math.sqrt(head_dim)).masked_fill(
        ~visible(512, 1024, True, device), -math.inf
    )
    numerators = torch.exp(scores - scores.amax(-1, keepdim=True))
    plain = (numerators.to(dtype).double() @ v.double() / numerators.sum(-1, keepdim=True)).to(dtype)

    def error(out: torch.Tensor) -> float:
        return (out.double() - true_out).sum(-1).square().mean().sqrt().item()

    assert error(fwd(q, k, v, True)[0]) < 1.15 * error(plain)


def test_one_key(device: str, fwd: Forward, rng: torch.Generator) -> None:
    q, k, v = Case(64, LEN_Q, 1).inputs(device, rng)
    out, lse = fwd(q, k, v)
    assert torch.equal(out, v.expand_as(out))
    scores = (q.double() @ k.double().mT).squeeze(-1) / 8
    torch.testing.assert_close(lse.double(), scores, rtol=1e-5, atol=1e-5)


def test_large_values(device: str, fwd: Forward, rng: torch.Generator) -> None:
    q, k, v = Case(64, LEN_Q, LEN_K).inputs(device, rng)
    v *= 8000
    assert_matches(*fwd(q, k, v), q, k, v)


def test_tiny_values(device: str, fwd: Forward, rng: torch.Generator) -> None:
    """Subnormal float16 values are not flushed: weights of 1 return them as they are."""
    q, k, v = Case(64, LEN_Q, 1).inputs(device, rng)
    v = torch.full_like(v, 3e-7)
    out, _ = fwd(q, k, v)
    assert torch.equal(out, v.expand_as(out))

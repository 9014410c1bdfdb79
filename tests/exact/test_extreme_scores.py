"""Scores far beyond a trained model's, at the ends of float32, and one key that has all of the weight.

The scores of these inputs are exact in float32: columns hold the same power of two times a small whole number. So
float64 and the kernels rank the keys alike.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import Causal, Forward
from checks import EVERY_FAMILY, head_dims
from numerics import assert_matches, visible

import flash_cute

pytestmark = pytest.mark.kernel

DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


def exact_inputs(
    device: str, head_dim: int, exponents: tuple[int, int], rng: torch.Generator, len_q: int = 150, len_k: int = 600
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q and k of whole numbers from -3 to 3 times 2^exponent of q and of k; the rows of q also times 1 to 2^-30."""
    low, high = exponents
    of_rows = torch.randint(-3, 4, (1, 2, len_q, 1), generator=rng)
    scales = 2.0 ** (low - torch.randint(0, 31, (1, 2, len_q, 1), generator=rng))
    of_keys = torch.randint(-3, 4, (1, 2, len_k, 1), generator=rng) * 2.0**high
    v = torch.randn(1, 2, len_k, head_dim, generator=rng)
    ones = torch.ones(head_dim)
    return tuple(x.to(device, DTYPES[device]) for x in (of_rows * scales * ones, of_keys * ones, v))  # type: ignore[return-value]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("exponents", [(8, 8), (14, 8), (20, 8), (24, 10), (40, 40)], ids=str)
@EVERY_FAMILY
def test_scores_to_1e30(
    device: str,
    head_dim: int,
    exponents: tuple[int, int],
    causal: Causal,
    fwd: Forward,
    rng: torch.Generator,
) -> None:
    """Rows of large and of small scores side by side; keys with the same score share the weight."""
    inputs = exact_inputs(device, head_dim, exponents, rng)
    out, lse = fwd(*inputs, causal)
    true_out, true_lse = flash_cute.reference.attention(*inputs, causal)
    torch.testing.assert_close(out.double(), true_out, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.double(), true_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("order", [1, -1], ids=["growing", "falling"])
@EVERY_FAMILY
def test_a_maximum_that_grows_at_every_tile(
    device: str, head_dim: int, order: int, fwd: Forward, rng: torch.Generator
) -> None:
    """From scores that one FFMA serves to those that it does not."""
    q, k, v = exact_inputs(device, head_dim, (20, 0), rng)
    q = q.abs().clamp(min=2.0**-12)
    sizes = 2.0 ** (torch.arange(600) // 40)[:: order if order > 0 else 1]
    k = (sizes if order > 0 else sizes.flip(0))[None, None, :, None].expand(k.shape).to(k)
    out, lse = fwd(q, k, v)
    true_out, true_lse = flash_cute.reference.attention(q, k, v)
    torch.testing.assert_close(out.double(), true_out, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.double(), true_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [133120.0, 1e15, -1e15, 1e17], ids=str)
@pytest.mark.parametrize(("len_q", "len_k"), [(1, 1), (1, 600), (70, 1), (200, 333)])
@EVERY_FAMILY
def test_all_equal(
    device: str, head_dim: int, len_q: int, len_k: int, value: float, fwd: Forward, rng: torch.Generator
) -> None:
    """Every key has the same weight, whatever the score: out is the mean of v, of one key v itself."""
    q = torch.full((1, 2, len_q, head_dim), value)
    k = torch.full((1, 2, len_k, head_dim), abs(value))
    v = torch.randn(1, 2, len_k, head_dim, generator=rng)
    q, k, v = (x.to(device, DTYPES[device]) for x in (q, k, v))
    out, lse = fwd(q, k, v)
    mean = v.double().mean(2, keepdim=True).expand(out.shape)
    torch.testing.assert_close(out.double(), mean, rtol=1e-2, atol=2e-3)
    if len_k == 1:
        assert torch.equal(out, v.expand(out.shape))
    true_lse = flash_cute.reference.attention(q, k, v)[1]
    torch.testing.assert_close(lse.double(), true_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 1e-18},
        {"scale": 1e18},
        {"scale": 1e-9, "softcap": 1e-18},
        {"scale": 1e-10, "softcap": 1e7},
        {"scale": 1.0, "softcap": 1e-18},
        {"scale": 1e18, "softcap": 1.0},
        {"softcap": 1e7},
    ],
    ids=str,
)
@EVERY_FAMILY
def test_scale_and_softcap_at_their_ends(
    device: str, head_dim: int, options: dict[str, Any], fwd: Forward, rng: torch.Generator
) -> None:
    q, k, v = exact_inputs(device, head_dim, (0, 0), rng)
    out, lse = fwd(q, k, v, **options)
    true_out, true_lse = flash_cute.reference.attention(q, k, v, **options)
    torch.testing.assert_close(out.double(), true_out, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.double(), true_lse, rtol=1e-4, atol=1e-4 + 3e-5 * (options.get("softcap") or 0))


REFUSED: list[tuple[dict[str, float], str]] = [
    ({"scale": 1e-19}, "scale: expected a number from 1e-18 to 1e18 on CUDA, got 1e-19"),
    ({"scale": 1e30}, "scale: expected a number from 1e-18 to 1e18 on CUDA, got 1e[+]30"),
    ({"softcap": 1e8}, "softcap: expected None or a number from 1e-18 to 1e7 on CUDA, got 1e[+]08"),
    ({"softcap": 1e-30}, "softcap: expected None or a number from 1e-18 to 1e7 on CUDA, got 1e-30"),
    ({"scale": 1e-15, "softcap": 1e5}, "softcap: expected from 1e-18 to 1e18 times the scale 1e-15 on CUDA, got 1000"),
]


@pytest.mark.cuda
@pytest.mark.parametrize(("options", "sentence"), REFUSED)
@pytest.mark.parametrize("device", ["cuda"])
def test_what_float32_cannot_hold_is_refused(device: str, options: dict[str, float], sentence: str) -> None:
    q = torch.zeros(1, 1, 8, 64, dtype=torch.float16, device=device)
    with pytest.raises(ValueError, match=sentence):
        flash_cute.fwd(q, q, q, **options)
    with pytest.raises(ValueError, match=sentence):
        flash_cute.explain(q, q, q, backward=True, **options)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("slope", [1e3, 1e10, 1e28, -1e10], ids=str)
@head_dims(64, 128, 256, 512, 1024)
def test_steep_slopes(
    device: str, head_dim: int, slope: float, causal: Causal, fwd: Forward, rng: torch.Generator
) -> None:
    """The key nearest to the row's position has all of the weight, with a negative slope the farthest one."""
    q, k, v = (torch.randn(1, 2, n, head_dim, generator=rng).to(device, DTYPES[device]) for n in (90, 500, 500))
    slopes = torch.tensor([slope, slope / 2], device=device)
    out, lse = fwd(q, k, v, causal, alibi_slopes=slopes)
    assert_matches(out, lse, q, k, v, causal, alibi_slopes=slopes)


@pytest.mark.parametrize("causal", [False, "top_left"], ids=str)
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("which", ["q", "k", "v"])
@head_dims(64, 256, 512, 1024)
def test_other_rows_stay_right(
    device: str, head_dim: int, which: str, number: float, causal: Causal, fwd: Forward, rng: torch.Generator
) -> None:
    """NaN and inf of one row of q, or of the last key, which only the last rows see, stay with those rows."""
    q, k, v = (torch.randn(1, 2, 300, head_dim, generator=rng).to(device, DTYPES[device]) for _ in range(3))
    poisoned = {"q": q, "k": k, "v": v}[which]
    sane = [x.clone() for x in (q, k, v)]
    poisoned[:, :, 299] = number
    out, lse = fwd(q, k, v, causal)
    touched = torch.ones(300, dtype=torch.bool)
    touched[:299] = (visible(300, 300, causal)[:299, 299]) & (which != "q")
    true_out, true_lse = flash_cute.reference.attention(*sane, causal)
    same = (~touched).to(device)
    # Rows of the last tile may be touched by a key inside of the lengths; none before it.
    if which != "q":
        same[192:] = False  # a row tile has up to 192 rows
    if device == "cpu" and which == "v":  # whose tiles are those of PyTorch's own kernel
        same[:] = False
    torch.testing.assert_close(out[:, :, same].double(), true_out[:, :, same], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse[:, :, same].double(), true_lse[:, :, same], rtol=1e-3, atol=1e-3)
    if which == "q" or number != number:
        assert out[:, :, 299].isnan().all()

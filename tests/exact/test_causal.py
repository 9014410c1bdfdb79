"""Both causal alignments: what each row sees, to the key."""

from __future__ import annotations

import pytest
import torch
from cases import CAUSAL, INSTANCE_HEAD_DIMS, Case, Causal, Forward, mask_name
from numerics import assert_matches, same_bits, visible

import flash_cute

pytestmark = pytest.mark.kernel

LENGTHS = ((5, 5), (64, 64), (127, 129), (129, 127), (1, 130), (130, 1), (200, 65), (65, 333))


@pytest.mark.parametrize(("len_q", "len_k"), LENGTHS)
def test_true_is_bottom_right(device: str, len_q: int, len_k: int, fwd: Forward, rng: torch.Generator) -> None:
    q, k, v = Case(64, len_q, len_k).inputs(device, rng)
    assert same_bits(fwd(q, k, v, True), fwd(q, k, v, "bottom_right"))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_alignments_agree_on_a_square(device: str, length: int, fwd: Forward, rng: torch.Generator) -> None:
    q, k, v = Case(64, length, length).inputs(device, rng)
    assert same_bits(fwd(q, k, v, "top_left"), fwd(q, k, v, "bottom_right"))


@pytest.mark.parametrize(("len_q", "len_k"), LENGTHS)
@pytest.mark.parametrize("causal", CAUSAL[1:], ids=mask_name)
def test_the_last_key_seen_decides(
    device: str, causal: Causal, len_q: int, len_k: int, fwd: Forward, rng: torch.Generator
) -> None:
    """Each key weighs e^20 times the one before it, so that a row's out is the last value it sees."""
    q = torch.zeros(2, 2, len_q, 64, device=device, dtype=torch.float16)
    k = torch.zeros(2, 2, len_k, 64, device=device, dtype=torch.float16)
    v = torch.randn(2, 2, len_k, 64, generator=rng).to(device, torch.float16)
    q[..., 5] = 1
    k[..., 5] = torch.arange(len_k, device=device).half()
    out, lse = fwd(q, k, v, causal, scale=20.0)
    assert_matches(out, lse, q, k, v, causal, 20.0)
    last = visible(len_q, len_k, causal, device).sum(1) - 1
    seeing = last >= 0
    torch.testing.assert_close(out[:, :, seeing], v[:, :, last[seeing]], rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize(("len_q", "len_k"), [(130, 1), (200, 65), (300, 17), (129, 128)])
@pytest.mark.parametrize("head_dim", INSTANCE_HEAD_DIMS)
def test_rows_that_see_nothing(
    device: str, head_dim: int, len_q: int, len_k: int, fwd: Forward, rng: torch.Generator
) -> None:
    q, k, v = Case(head_dim, len_q, len_k).inputs(device, rng)
    out, lse = fwd(q, k, v, "bottom_right")
    blind = len_q - len_k
    assert (out[:, :, :blind] == 0).all()
    assert (lse[:, :, :blind] == -torch.inf).all()
    assert lse[:, :, blind:].isfinite().all()
    assert_matches(out, lse, q, k, v, "bottom_right")


def test_a_key_value_cache_decodes_as_the_whole_sequence_did(device: str, fwd: Forward, rng: torch.Generator) -> None:
    q, k, v = Case(64, 150, 150).inputs(device, rng)
    whole_out, whole_lse = fwd(q, k, v, True)
    for start in (1, 64, 100, 149):
        out, lse = fwd(q[:, :, start:], k, v, True)
        torch.testing.assert_close(out, whole_out[:, :, start:], rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(lse, whole_lse[:, :, start:], rtol=1e-4, atol=1e-4)


def test_top_left_is_what_sdpa_calls_causal(device: str, rng: torch.Generator) -> None:
    q, k, v = Case(64, 100, 170).inputs(device, rng)
    out, _ = flash_cute.fwd(q, k, v, "top_left")
    expected = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
    torch.testing.assert_close(out.float(), expected, rtol=4e-3, atol=4e-3)

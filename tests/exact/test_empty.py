"""Sizes of zero: no keys, no rows, no heads, no batch."""

from __future__ import annotations

import pytest
import torch
from cases import CAUSAL, Causal, Forward, mask_name

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize("causal", CAUSAL, ids=mask_name)
@pytest.mark.parametrize("head_dim", [33, 64, 256])
def test_no_keys(device: str, causal: Causal, head_dim: int, fwd: Forward) -> None:
    q = torch.randn(2, 4, 130, head_dim, dtype=torch.float16, device=device)
    k = torch.empty(2, 2, 0, head_dim, dtype=torch.float16, device=device)
    out, lse = fwd(q, k, k, causal)
    assert out.shape == q.shape
    assert (out == 0).all()
    assert lse.shape == (2, 4, 130)
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("causal", CAUSAL, ids=mask_name)
@pytest.mark.parametrize(
    ("q_shape", "k_shape"),
    [
        ((0, 2, 5, 64), (0, 2, 7, 64)),
        ((2, 0, 5, 64), (2, 0, 7, 64)),
        ((2, 0, 5, 64), (2, 2, 7, 64)),
        ((2, 2, 0, 64), (2, 2, 7, 64)),
        ((2, 2, 0, 64), (2, 2, 0, 64)),
        ((0, 0, 0, 64), (0, 0, 0, 64)),
        ((2, 2, 0, 33), (2, 2, 7, 33)),
    ],
    ids=str,
)
def test_nothing_to_compute(
    device: str,
    causal: Causal,
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    fwd: Forward,
) -> None:
    q = torch.randn(q_shape, device=device).half()
    k = torch.randn(k_shape, device=device).half()
    out, lse = fwd(q, k, k, causal)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
    if device == "cuda":
        torch.cuda.synchronize()

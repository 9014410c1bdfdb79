"""The same inputs give the same bits, every time."""

from __future__ import annotations

import pytest
import torch
from cases import INSTANCE_HEAD_DIMS, Case, Causal
from numerics import bits, same_bits

import flash_cute

pytestmark = pytest.mark.kernel

SHAPES = (
    Case(64, 113, 203, True),
    Case(128, 1024, 1024, True, torch.bfloat16, 2, 8, 2),
    Case(128, 333, 2000, False, torch.float16, 1, 16, 16),
    Case(64, 2048, 2048, "top_left", torch.bfloat16, 1, 4, 4),
    Case(32, 64, 4096, False, torch.float16, 1, 2, 2),
    Case(256, 700, 900, True, torch.bfloat16, 1, 4, 2),
    # sm90 splits tiles by keys: all of them, those of the last wave
    Case(128, 64, 3000, True, torch.bfloat16, 1, 8, 2),
    Case(128, 2048, 2048, False, torch.bfloat16, 1, 20, 20),
)


@pytest.mark.cuda
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_a_thousand_calls(device: str, case: Case, backend: str | None, rng: torch.Generator) -> None:
    """Compared on the GPU, so that calls follow each other closely and meet in the caches."""
    q, k, v = case.inputs(device, rng)
    out, lse = flash_cute.fwd(q, k, v, case.causal, backend=backend)
    first_out, first_lse = bits(out), bits(lse)
    different = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(1000):
        out, lse = flash_cute.fwd(q, k, v, case.causal, backend=backend)
        different += (bits(out) != first_out).any() | (bits(lse) != first_lse).any()
    assert int(different) == 0


@pytest.mark.cuda
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
@pytest.mark.parametrize(
    "case",
    [
        *SHAPES,
        Case(96, 500, 700, True),
        Case(192, 700, 500, False),
        Case(192, 700, 900, True, torch.bfloat16, 2, 8, 4, head_dim_v=128),
        # sm80, where it is deterministic, takes key tiles from the last to the first
        Case(128, 512, 640, True, torch.bfloat16, 11, 20, 20),
        # sm90 splits the last wave's key tiles by rows
        Case(64, 2048, 1536, False, torch.bfloat16, 1, 58, 58),
        Case(128, 2000, 1500, False, torch.float16, 1, 57, 57),
    ],
    ids=str,
)
def test_a_thousand_backwards(
    device: str, case: Case, deterministic: bool, backend: str | None, rng: torch.Generator
) -> None:
    """dk and dv in both modes, dq in the deterministic one."""
    q, k, v = case.inputs(device, rng)
    out, lse = flash_cute.fwd(q, k, v, case.causal, backend=backend)
    dout = torch.randn(out.shape, generator=rng).to(q)
    options = {"dlse": lse.nan_to_num(neginf=0), "deterministic": deterministic, "backend": backend}

    def gradients() -> list[torch.Tensor]:
        dq, dk, dv = flash_cute.bwd(dout, q, k, v, out, lse, case.causal, **options)
        return [bits(x) for x in ((dq, dk, dv) if deterministic else (dk, dv))]

    first = gradients()
    different = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(1000):
        for x, y in zip(gradients(), first, strict=True):
            different += (x != y).any()
    assert int(different) == 0


@pytest.mark.parametrize("head_dim", INSTANCE_HEAD_DIMS)
def test_ten_backwards(device: str, head_dim: int, backend: str | None, rng: torch.Generator) -> None:
    leaves = [x.requires_grad_() for x in Case(head_dim, 200, 300, heads_q=4).inputs(device, rng)]

    def gradients() -> tuple[torch.Tensor, ...]:
        out = flash_cute.attention(*leaves, True, deterministic=True, backend=backend)
        return torch.autograd.grad(out.float().square().sum(), leaves)

    first = gradients()
    for _ in range(10):
        assert same_bits(gradients(), first)


@pytest.mark.parametrize("head_dim", INSTANCE_HEAD_DIMS)
def test_ten_calls(device: str, head_dim: int, backend: str | None, rng: torch.Generator) -> None:
    q, k, v = Case(head_dim, 200, 300).inputs(device, rng)
    first = flash_cute.fwd(q, k, v, True, backend=backend)
    for _ in range(10):
        assert same_bits(flash_cute.fwd(q, k, v, True, backend=backend), first)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_equal_heads_give_equal_bits(device: str, causal: Causal, backend: str | None, rng: torch.Generator) -> None:
    """Whichever multiprocessor took them, and whatever ran beside them."""
    q, k, v = Case(64, 200, 300, batch=1, heads_q=1, heads_kv=1).inputs(device, rng)
    q, k, v = (x.expand(40, 20, -1, -1) for x in (q, k, v))
    out, lse = flash_cute.fwd(q, k, v, causal, backend=backend)
    assert same_bits((out, lse), (out[:1, :1].expand_as(out), lse[:1, :1].expand_as(lse)))

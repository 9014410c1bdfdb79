"""Sizes past what 32 bits or a launch grid's dims hold."""

from __future__ import annotations

import pytest
import torch
from cases import Backward, Case, Causal, Forward
from numerics import assert_gradients_match, assert_matches
from packed import Packed, alone, offsets

import flash_cute

pytestmark = pytest.mark.kernel

ON_CUDA = [pytest.param("cuda", marks=pytest.mark.cuda)]
GIB = 1 << 30


@pytest.fixture
def room(device: str) -> None:
    """Skips where the GPU has less than 40 GiB free; leaves no cached blocks behind."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 40 * GIB:
        pytest.skip("needs 40 GiB of free GPU memory")


@pytest.fixture
def cuda_rng(seed: int) -> torch.Generator:
    return torch.Generator(device="cuda").manual_seed(seed)


def _normal(*shape: int, rng: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=rng, device=rng.device, dtype=torch.bfloat16)


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("device", ON_CUDA)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_more_than_2_to_31_elements(
    device: str, causal: Causal, backend: str | None, cuda_rng: torch.Generator
) -> None:
    """q, k, v and out of 2^31 + 2^20 elements each; heads on both sides of the 2^31st are checked."""
    batch, heads, length, head_dim = 8196 // 4, 8, 1024, 128
    q, k, v = (_normal(batch, heads, length, head_dim, rng=cuda_rng) for _ in range(3))
    assert q.numel() > 2**31
    out, lse = flash_cute.fwd(q, k, v, causal, backend=backend)
    past = 2**31 // (heads * length * head_dim)
    for some in (slice(0, 1), slice(past - 1, past + 1), slice(batch - 1, batch)):
        assert_matches(out[some], lse[some], q[some], k[some], v[some], causal)
    assert torch.isfinite(out.view(-1, head_dim)[:, 0]).all()


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("device", ON_CUDA)
@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
def test_gradients_of_more_than_2_to_31_elements(
    device: str, deterministic: bool, backend: str | None, cuda_rng: torch.Generator
) -> None:
    """dq and its sums have 2^31 + 2^20 elements each, q is its own dout."""
    batch, heads, length, head_dim = 8196 // 4, 8, 1024, 128
    q = _normal(batch, heads, length, head_dim, rng=cuda_rng)
    k, v = (_normal(batch, 1, 300, head_dim, rng=cuda_rng) for _ in range(2))
    out, lse = flash_cute.fwd(q, k, v, True, backend=backend)
    gradients = flash_cute.bwd(q, q, k, v, out, lse, True, deterministic=deterministic, backend=backend)
    past = 2**31 // (heads * length * head_dim)
    for some in (slice(0, 1), slice(past - 1, past + 1), slice(batch - 1, batch)):
        dq, dk, dv = (x[some] for x in gradients)
        assert_gradients_match((dq, dk, dv), q[some], q[some], k[some], v[some], True)


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("device", ON_CUDA)
def test_strides_past_2_to_31(device: str, backend: str | None, cuda_rng: torch.Generator) -> None:
    """Two batches, and two heads, further apart than 32 bits reach; most of the memory is never touched."""
    far = 2**31 + 2**10
    memory = torch.empty(far + 2**20, dtype=torch.bfloat16, device=device)
    small = torch.Generator().manual_seed(cuda_rng.initial_seed())
    # For 2 batches of 2 heads of 65 rows of 64: each puts the last element past the 2^31st.
    far_batches, far_heads = (far, 130 * 64, 64, 1), (130 * 64, far, 64, 1)
    far_rows = (64, 128, far // 64 // 8 * 8, 1)
    for strides in (far_batches, far_heads, far_rows):
        inputs = []
        for i, x in enumerate(Case(64, 65, 65, dtype=torch.bfloat16).inputs(device, small)):
            inputs.append(memory.as_strided(x.shape, strides, i * 2**16).copy_(x))
        out, lse = flash_cute.fwd(*inputs, True, backend=backend)
        assert_matches(out, lse, *(x.contiguous() for x in inputs), True)
        q, k, v = inputs
        assert_gradients_match(flash_cute.bwd(q, q, k, v, out, lse, True, backend=backend), q, q, k, v, True)


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("device", ON_CUDA)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_packed_sequences_of_more_than_2_to_31_elements(
    device: str, causal: Causal, backend: str | None, cuda_rng: torch.Generator
) -> None:
    """Rows on both sides of the 2^31st element of q, out, k and v, forward and backward; q is its own dout."""
    heads, head_dim = 8, 128
    rows = 2**31 // (heads * head_dim) + 1024
    q, k, v = (_normal(rows, heads, head_dim, rng=cuda_rng) for _ in range(3))
    assert q.numel() > 2**31
    lengths = [0, 1, 700, 1023] * (rows // 1724)
    of = offsets([*lengths, rows - sum(lengths)], device)
    packed = Packed(q, k, v, of, of)
    out, lse = flash_cute.varlen_fwd(*packed.call, causal, backend=backend)
    gradients = flash_cute.varlen_bwd(q, q, k, v, out, lse, of, of, causal, backend=backend)
    past = 2**31 // (heads * head_dim)
    sequences = packed.sequences()
    at = next(b for b, (row, _) in enumerate(sequences) if row.stop > past)
    for b in (1, 2, 3, at - 1, at, at + 1, len(sequences) - 1):
        row, _ = sequences[b]
        if row.start == row.stop:
            continue
        one = [alone(x, row) for x in (q, k, v)]
        assert_matches(alone(out, row), lse[None, :, row], *one, causal)
        assert_gradients_match(tuple(alone(x, row) for x in gradients), one[0], *one, causal)


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("device", ON_CUDA)
def test_one_head_of_more_than_2_to_31_elements(device: str, backend: str | None, cuda_rng: torch.Generator) -> None:
    """2^24 + 77 keys: those that matter, for each row another, lie past the 2^31st element."""
    rows, head_dim, keys = 64, 128, 2**24 + 77
    k = torch.empty(1, 1, keys, head_dim, dtype=torch.bfloat16, device=device)
    k.normal_(generator=cuda_rng)
    v = k.flip(3)
    q = k[:, :, -rows:].clone()
    out, lse = flash_cute.fwd(q, k, v, scale=1.0, backend=backend)
    # |k|^2 is 128 +- 16, another key's product 0 +- 11: the row's own key has practically all the weight.
    own = (q.double() * q.double()).sum(-1)
    torch.testing.assert_close(out, v[:, :, -rows:], rtol=0.02, atol=0.02)
    torch.testing.assert_close(lse.double(), own, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("device", ON_CUDA)
@pytest.mark.parametrize(("batch", "heads"), [(65_537, 1), (1, 65_537), (300, 300)])
def test_more_heads_than_a_grid_dim_holds(
    device: str, batch: int, heads: int, fwd: Forward, cuda_rng: torch.Generator
) -> None:
    q, k, v = (_normal(batch, heads, 5, 32, rng=cuda_rng) for _ in range(3))
    out, lse = fwd(q, k, v, True)
    flat = [x.reshape(1, batch * heads, *x.shape[2:]) for x in (out, lse, q, k, v)]
    for some in (slice(0, 50), slice(65_400, 65_537), slice(batch * heads - 50, None)):
        assert_matches(*(x[:, some] for x in flat), True)
    scores = (q.float().unsqueeze(3) * k.float().unsqueeze(2)).sum(-1) * 32**-0.5
    scores = scores.masked_fill(~torch.ones(5, 5, dtype=torch.bool, device=device).tril(), -1e30)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", ON_CUDA)
def test_gradients_of_more_heads_than_a_grid_dim_holds(device: str, bwd: Backward, cuda_rng: torch.Generator) -> None:
    q, k, v = (_normal(1, 65_537, 5, 32, rng=cuda_rng) for _ in range(3))
    gradients = bwd(q, q, k, v, True, deterministic=True)
    for some in (slice(0, 5), slice(65_530, 65_537)):
        dq, dk, dv = (x[:, some] for x in gradients)
        assert_gradients_match((dq, dk, dv), q[:, some], q[:, some], k[:, some], v[:, some], True)


@pytest.mark.parametrize("device", ON_CUDA)
def test_more_row_tiles_than_a_grid_dim_holds(device: str, fwd: Forward, cuda_rng: torch.Generator) -> None:
    """2^22 + 2^17 rows of a few keys: over 65,535 tiles even at 64 rows each."""
    rows = 2**22 + 2**17
    q = _normal(1, 1, rows, 32, rng=cuda_rng)
    k, v = (_normal(1, 1, 9, 32, rng=cuda_rng) for _ in range(2))
    out, lse = fwd(q, k, v)
    for some in (slice(0, 200), slice(2**22 - 200, 2**22 + 200), slice(rows - 200, rows)):
        assert_matches(out[:, :, some], lse[:, :, some], q[:, :, some], k, v)
    expected = ((q.float() @ k.float().mT) * 32**-0.5).logsumexp(-1)
    torch.testing.assert_close(lse, expected, rtol=1e-4, atol=1e-4)


def test_many_heads_on_the_cpu() -> None:
    q = torch.randn(40_000, 2, 3, 8)
    out, lse = flash_cute.fwd(q, q, q, True)
    assert_matches(out[-50:], lse[-50:], q[-50:], q[-50:], q[-50:], True)

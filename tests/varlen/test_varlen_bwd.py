"""The gradients of packed sequences: each sequence's own, and 0 where no sequence is."""

from __future__ import annotations

import itertools
import math

import numerics
import pytest
import torch
from bad_offsets import BAD_OFFSETS
from cases import CAUSAL, CPU_DTYPES, CUDA_DTYPES, HEADS, INSTANCE_HEAD_DIMS, PADDED_HEAD_DIMS, Causal, mask_name
from numerics import same_bits
from packed import (
    EMPTY,
    ONE,
    SELF,
    UNEVEN,
    USED_K,
    USED_Q,
    Packed,
    VarlenBackward,
    alone,
    assert_packed_gradients,
    flow,
    make_backward,
    pack,
)

import flash_cute

pytestmark = pytest.mark.kernel

LENGTHS = pytest.mark.parametrize("lengths", [UNEVEN, SELF, ONE, EMPTY], ids=["uneven", "self", "one", "empty"])
MASKS = pytest.mark.parametrize("causal", CAUSAL, ids=mask_name)
BOTH = pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])


@pytest.fixture
def bwd(backend: str | None) -> VarlenBackward:
    return make_backward(backend)


@BOTH
@MASKS
@LENGTHS
@pytest.mark.parametrize(
    ("device", "dtype"),
    [*itertools.product(["cpu"], CPU_DTYPES), *(pytest.param("cuda", x, marks=pytest.mark.cuda) for x in CUDA_DTYPES)],
    ids=str,
)
def test_exact(
    device: str,
    dtype: torch.dtype,
    lengths: tuple[tuple[int, int], ...],
    causal: Causal,
    deterministic: bool,
    bwd: VarlenBackward,
    rng: torch.Generator,
) -> None:
    if device == "cpu" and not deterministic:
        pytest.skip("the CPU has one mode")
    packed = pack(lengths, device, rng, dtype=dtype, around=2)
    dout, dlse = flow(packed, rng)
    given = bwd(dout, packed, causal, dlse=dlse, deterministic=deterministic)
    assert_packed_gradients(given, dout, packed, causal, dlse=dlse)


@MASKS
def test_no_gradient_of_the_lse(device: str, causal: Causal, bwd: VarlenBackward, rng: torch.Generator) -> None:
    packed = pack(UNEVEN, device, rng)
    dout, _ = flow(packed, rng)
    assert_packed_gradients(bwd(dout, packed, causal), dout, packed, causal)


@MASKS
@LENGTHS
def test_agrees_with_the_oracle(lengths: tuple[tuple[int, int], ...], causal: Causal, rng: torch.Generator) -> None:
    """reference.varlen_gradients is what the sequences alone give, too."""
    packed = pack(lengths, "cpu", rng, dtype=torch.float64, around=3, head_dim=16)
    dout, dlse = flow(packed, rng)
    truth = flash_cute.reference.varlen_gradients(dout, *packed.call, causal, dlse=dlse)
    for x, y in zip(make_backward(None)(dout, packed, causal, dlse=dlse), truth, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("heads_q", "heads_kv"), HEADS)
def test_grouped_heads(device: str, heads_q: int, heads_kv: int, bwd: VarlenBackward, rng: torch.Generator) -> None:
    packed = pack(((17, 33), (65, 65), (9, 2)), device, rng, heads_q=heads_q, heads_kv=heads_kv, head_dim=32)
    dout, dlse = flow(packed, rng)
    assert_packed_gradients(bwd(dout, packed, True, dlse=dlse), dout, packed, True, dlse=dlse)


@pytest.mark.parametrize("head_dim", [*INSTANCE_HEAD_DIMS, 8, 40, 136, *PADDED_HEAD_DIMS])
def test_head_dims(device: str, head_dim: int, bwd: VarlenBackward, rng: torch.Generator) -> None:
    packed = pack(((65, 77), (0, 3), (9, 30)), device, rng, head_dim=head_dim)
    dout, dlse = flow(packed, rng)
    assert_packed_gradients(bwd(dout, packed, True, dlse=dlse), dout, packed, True, dlse=dlse)


@MASKS
@pytest.mark.parametrize("window", [(0, 0), (17, 5), (64, None), (None, 3)], ids=str)
def test_windows(
    device: str, window: tuple[int | None, int | None], causal: Causal, bwd: VarlenBackward, rng: torch.Generator
) -> None:
    packed = pack(UNEVEN, device, rng, head_dim=32)
    dout, dlse = flow(packed, rng)
    given = bwd(dout, packed, causal, dlse=dlse, window=window)
    assert_packed_gradients(given, dout, packed, causal, dlse=dlse, window=window)


def _used(packed: Packed) -> Packed:
    used_q, used_k = (torch.tensor(x, dtype=torch.int32, device=packed.q.device) for x in (USED_Q, USED_K))
    return packed.replace(seqused_q=used_q, seqused_k=used_k)


@BOTH
@MASKS
def test_used(device: str, causal: Causal, deterministic: bool, bwd: VarlenBackward, rng: torch.Generator) -> None:
    packed = _used(pack(UNEVEN, device, rng, around=2))
    dout, dlse = flow(packed, rng)
    given = bwd(dout, packed, causal, dlse=dlse, deterministic=deterministic)
    assert_packed_gradients(given, dout, packed, causal, dlse=dlse)


@pytest.mark.parametrize("number", [math.nan, math.inf], ids=str)
@MASKS
def test_unused_rows_and_keys_do_not_matter(
    device: str, causal: Causal, number: float, bwd: VarlenBackward, rng: torch.Generator
) -> None:
    """Whatever is there in q, k and v, and whatever flows back into those rows."""
    packed = _used(pack(UNEVEN, device, rng, around=40))
    dout, dlse = flow(packed, rng)
    clean = bwd(dout, packed, causal, dlse=dlse, deterministic=True)
    rows, keys = packed.unused()
    q, k, v = (x.clone() for x in packed.tensors)
    q[rows], k[keys], v[keys], dout[rows], dlse[:, rows] = (number,) * 5
    given = bwd(dout, packed.replace(q=q, k=k, v=v), causal, dlse=dlse, deterministic=True)
    assert same_bits(given, clean)


@pytest.mark.parametrize("lengths", [UNEVEN, ((65, 65),) * 6], ids=["uneven", "even"])
@pytest.mark.parametrize("with_dlse", [False, True])
@MASKS
def test_neighbours_do_not_matter(
    device: str,
    causal: Causal,
    with_dlse: bool,
    lengths: tuple[tuple[int, int], ...],
    bwd: VarlenBackward,
    rng: torch.Generator,
) -> None:
    """NaN in every other sequence's q, k, v and dout."""
    packed = pack(lengths, device, rng)
    dout, dlse = flow(packed, rng)
    options = {"dlse": dlse if with_dlse else None, "deterministic": True}
    clean = bwd(dout, packed, causal, **options)
    q, k, v = (x.clone() for x in packed.tensors)
    sequences = packed.sequences()
    for row, key in sequences[1::2]:
        q[row], k[key], v[key], dout[row], dlse[:, row] = (math.nan,) * 5
    given = bwd(dout, packed.replace(q=q, k=k, v=v), causal, **options)
    for row, key in sequences[::2]:
        for x, y, where in zip(given, clean, (row, key, key), strict=True):
            assert same_bits((x[where],), (y[where],))


@pytest.mark.parametrize("side", ["q", "k", "both"])
@MASKS
@pytest.mark.parametrize("name", BAD_OFFSETS)
def test_bad_offsets_are_clamped(
    device: str, name: str, causal: Causal, side: str, bwd: VarlenBackward, rng: torch.Generator
) -> None:
    """Nothing outside of the tensors is read or written."""
    bad = BAD_OFFSETS[name]
    even = tuple(20 * i // (len(bad) - 1) for i in range(len(bad)))
    dtype = torch.float16 if device == "cuda" else torch.float32
    q, k, v = (
        torch.full((60, heads, 32), math.nan)[20:40].copy_(torch.randn(20, heads, 32, generator=rng)).to(device, dtype)
        for heads in (4, 2, 2)
    )
    of_q, of_k = (
        torch.tensor(bad if side in (x, "both") else even, dtype=torch.int32, device=device) for x in ("q", "k")
    )
    packed = Packed(q, k, v, of_q, of_k)
    dout, dlse = flow(packed, rng)
    given = bwd(dout, packed, causal, dlse=dlse)
    assert_packed_gradients(given, dout, packed, causal, dlse=dlse)
    unused = packed.unused()
    for gradient, where in zip(given, (unused[0], unused[1], unused[1]), strict=True):
        assert (gradient[where] == 0).all()


@pytest.mark.parametrize("size", [6, 50])
def test_large_scores_in_float32(size: int, rng: torch.Generator) -> None:
    """Some sequences of a batch of equal ones have an LSE that float32 rounds coarsely; the others keep their bits."""
    packed = pack(((48, 48),) * 6, "cpu", rng)
    bwd = make_backward(None)
    dout, _ = flow(packed, rng)
    calm = bwd(dout, packed, True)
    q, k = packed.q.clone(), packed.k.clone()
    for row, key in packed.sequences()[::2]:
        q[row] *= size
        k[key] *= size
    steep = packed.replace(q=q, k=k)
    given = bwd(dout, steep, True)
    assert_packed_gradients(given, dout, steep, True)
    for row, key in packed.sequences()[1::2]:
        for x, y, where in zip(given, calm, (row, key, key), strict=True):
            assert same_bits((x[where],), (y[where],))


def test_100_000_sequences(device: str, bwd: VarlenBackward, rng: torch.Generator) -> None:
    """The errors of 60 sequences are compared together: of a few numbers the unfused computation errs by little now and
    then, and 1 of 1,500 such sequences is outside of the bound with roundings to 16 bits alone."""
    lengths = torch.randint(0, 6, (100_000, 2), generator=rng)
    packed = pack([(int(a), int(b)) for a, b in lengths.tolist()], device, rng, head_dim=16, heads_q=2, heads_kv=1)
    dout, _ = flow(packed, rng)
    gradients = bwd(dout, packed, True)
    sequences = packed.sequences()
    errors, allowed = torch.zeros(3, dtype=torch.float64), torch.full((3,), numerics.ABSOLUTE, dtype=torch.float64)
    for row, key in (sequences[b] for b in (*range(30), *range(99_970, 100_000))):
        if row.start == row.stop or key.start == key.stop:
            continue
        leaves = [alone(x, where) for x, where in zip(packed.tensors, (row, key, key), strict=True)]
        plain = numerics._unfused_gradients(alone(dout, row), None, leaves, True, None, {})
        truth = flash_cute.reference.gradients(alone(dout, row), *leaves, True)
        for i, where in enumerate((row, key, key)):
            errors[i] = max(errors[i], (alone(gradients[i], where) - truth[i]).abs().max())
            bound = 2 * (plain[i] - truth[i]).abs().max() + torch.finfo(packed.q.dtype).eps * truth[i].abs().max()
            allowed[i] = max(allowed[i], bound)
    assert (errors <= allowed).all(), (errors, allowed)
    assert all(x.isfinite().all() for x in gradients)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_thousand_equal_runs(device: str, head_dim: int, bwd: VarlenBackward, rng: torch.Generator) -> None:
    lengths = [(int(x), int(x)) for x in torch.randint(0, 400, (24,), generator=rng)]
    packed = pack(lengths, device, rng, head_dim=head_dim, heads_q=4, heads_kv=2)
    dout, dlse = flow(packed, rng)
    first = bwd(dout, packed, True, dlse=dlse, deterministic=True)
    assert_packed_gradients(first, dout, packed, True, dlse=dlse)
    for _ in range(1000):
        assert same_bits(bwd(dout, packed, True, dlse=dlse, deterministic=True), first)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.cuda)])
def test_dk_and_dv_are_always_reproducible(device: str, bwd: VarlenBackward, rng: torch.Generator) -> None:
    packed = pack(UNEVEN * 4, device, rng)
    dout, dlse = flow(packed, rng)
    _, *first = bwd(dout, packed, True, dlse=dlse)
    for _ in range(50):
        assert same_bits(tuple(bwd(dout, packed, True, dlse=dlse)[1:]), tuple(first))

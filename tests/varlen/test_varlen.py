"""Packed sequences: each is attended as if it were alone, whatever lies between, before and behind them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from bad_offsets import BAD_OFFSETS
from cases import CAUSAL, CPU_DTYPES, CUDA_DTYPES, HEADS, INSTANCE_HEAD_DIMS, PADDED_HEAD_DIMS, Causal, mask_name
from numerics import assert_matches, same_bits
from packed import (
    EMPTY,
    ONE,
    SELF,
    UNEVEN,
    USED_K,
    USED_Q,
    Packed,
    VarlenForward,
    alone,
    assert_packed_matches,
    make_forward,
    offsets,
    pack,
)

import flash_cute

pytestmark = pytest.mark.kernel

CUDA = pytest.param("cuda", marks=pytest.mark.cuda)
LENGTHS = pytest.mark.parametrize("lengths", [UNEVEN, SELF, ONE, EMPTY], ids=["uneven", "self", "one", "empty"])
MASKS = pytest.mark.parametrize("causal", CAUSAL, ids=mask_name)


@pytest.fixture
def fwd(backend: str | None) -> VarlenForward:
    return make_forward(backend)


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
    fwd: VarlenForward,
    rng: torch.Generator,
) -> None:
    packed = pack(lengths, device, rng, dtype=dtype)
    assert_packed_matches(*fwd(packed, causal), packed, causal)


@MASKS
@LENGTHS
def test_agrees_with_the_oracle(
    device: str, lengths: tuple[tuple[int, int], ...], causal: Causal, fwd: VarlenForward, rng: torch.Generator
) -> None:
    """reference.varlen_attention is what the sequences alone give, too."""
    packed = pack(lengths, device, rng, around=3)
    out, lse = flash_cute.reference.varlen_attention(*packed.call, causal)
    narrow = 1e-3 if device == "cuda" else 1e-5
    given_out, given_lse = fwd(packed, causal)
    torch.testing.assert_close(given_out.double(), out, rtol=10 * narrow, atol=narrow)
    torch.testing.assert_close(given_lse.double(), lse, rtol=narrow, atol=narrow)
    assert_packed_matches(given_out, given_lse, packed, causal)


@pytest.mark.parametrize("device", ["cpu"])
@MASKS
@LENGTHS
def test_the_bits_of_each_alone(
    device: str, lengths: tuple[tuple[int, int], ...], causal: Causal, fwd: VarlenForward, rng: torch.Generator
) -> None:
    """On the CPU, where the dense path computes them."""
    packed = pack(lengths, device, rng)
    out, lse = fwd(packed, causal)
    for row, key in packed.sequences():
        tensors = [alone(x, where) for x, where in zip(packed.tensors, (row, key, key), strict=True)]
        assert same_bits((alone(out, row), lse[None, :, row]), flash_cute.fwd(*tensors, causal))


@pytest.mark.parametrize(("heads_q", "heads_kv"), HEADS)
def test_grouped_heads(device: str, heads_q: int, heads_kv: int, fwd: VarlenForward, rng: torch.Generator) -> None:
    packed = pack(UNEVEN, device, rng, heads_q=heads_q, heads_kv=heads_kv, head_dim=32)
    assert_packed_matches(*fwd(packed, True), packed, True)


@pytest.mark.parametrize("head_dim", [*INSTANCE_HEAD_DIMS, 8, 40, 72, 136, 248, *PADDED_HEAD_DIMS])
def test_head_dims(device: str, head_dim: int, fwd: VarlenForward, rng: torch.Generator) -> None:
    packed = pack(((65, 77), (0, 3), (9, 130)), device, rng, head_dim=head_dim)
    assert_packed_matches(*fwd(packed, True), packed, True)


@pytest.mark.parametrize("scale", [1e-3, 0.5])
def test_scale(device: str, scale: float, fwd: VarlenForward, rng: torch.Generator) -> None:
    packed = pack(UNEVEN, device, rng)
    assert_packed_matches(*fwd(packed, True, scale=scale), packed, True, scale=scale)


@MASKS
@pytest.mark.parametrize("window", [(0, 0), (17, 5), (64, None), (None, 3), (500, 500)], ids=str)
def test_windows(
    device: str, window: tuple[int | None, int | None], causal: Causal, fwd: VarlenForward, rng: torch.Generator
) -> None:
    packed = pack(UNEVEN, device, rng, head_dim=32)
    assert_packed_matches(*fwd(packed, causal, window=window), packed, causal, window=window)


@MASKS
@pytest.mark.parametrize("which", ["q", "k", "both"])
def test_used(device: str, which: str, causal: Causal, fwd: VarlenForward, rng: torch.Generator) -> None:
    packed = pack(UNEVEN, device, rng, around=2)
    used_q, used_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in (USED_Q, USED_K))
    packed = packed.replace(seqused_q=used_q if which != "k" else None, seqused_k=used_k if which != "q" else None)
    assert_packed_matches(*fwd(packed, causal), packed, causal)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf], ids=str)
@MASKS
def test_unused_rows_and_keys_do_not_matter(
    device: str, causal: Causal, number: float, fwd: VarlenForward, rng: torch.Generator
) -> None:
    """Before the first sequence, behind the last, and behind what a sequence uses."""
    packed = pack(UNEVEN, device, rng, around=40)
    used_q, used_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in (USED_Q, USED_K))
    packed = packed.replace(seqused_q=used_q, seqused_k=used_k)
    clean = fwd(packed, causal)
    rows, keys = packed.unused()
    assert rows.any() and keys.any()
    q, k, v = (x.clone() for x in packed.tensors)
    q[rows], k[keys], v[keys] = number, number, number
    assert same_bits(fwd(packed.replace(q=q, k=k, v=v), causal), clean)


@pytest.mark.parametrize("lengths", [UNEVEN, ((65, 65),) * 6], ids=["uneven", "even"])
@pytest.mark.parametrize("number", [math.nan, math.inf], ids=str)
@MASKS
def test_neighbours_do_not_matter(
    device: str,
    causal: Causal,
    number: float,
    lengths: tuple[tuple[int, int], ...],
    fwd: VarlenForward,
    rng: torch.Generator,
) -> None:
    """NaN and inf in every other sequence's q, k and v."""
    packed = pack(lengths, device, rng)
    clean = fwd(packed, causal)
    q, k, v = (x.clone() for x in packed.tensors)
    sequences = packed.sequences()
    for row, key in sequences[1::2]:
        q[row], k[key], v[key] = number, number, number
    out, lse = fwd(packed.replace(q=q, k=k, v=v), causal)
    for row, _ in sequences[::2]:
        assert same_bits((out[row], lse[:, row]), (clean[0][row], clean[1][:, row]))


def test_a_key_that_a_row_sees(device: str, fwd: VarlenForward, rng: torch.Generator) -> None:
    """NaN within a sequence reaches the rows that see it, and no other."""
    packed = pack(((64, 64), (100, 100), (65, 65)), device, rng)
    packed.v[64 + 70] = math.nan
    out, lse = fwd(packed, True)
    assert out[64 + 70 : 164].isnan().all()
    others = [slice(0, 64), slice(164, 229)]
    assert all(out[x].isfinite().all() and lse[:, x].isfinite().all() for x in others)


@pytest.mark.parametrize("side", ["q", "k", "both"])
@MASKS
@pytest.mark.parametrize("name", BAD_OFFSETS)
def test_bad_offsets_are_clamped(
    device: str, name: str, causal: Causal, side: str, fwd: VarlenForward, rng: torch.Generator
) -> None:
    """Nothing outside of the tensors is read or written; NaN lies around them."""
    check_offsets(device, BAD_OFFSETS[name], causal, side, fwd, rng)


@pytest.mark.parametrize("name", BAD_OFFSETS)
def test_many_bad_offsets_are_clamped(device: str, name: str, fwd: VarlenForward, rng: torch.Generator) -> None:
    """Of so many sequences that a kernel counts their tiles first."""
    check_offsets(device, 100 * BAD_OFFSETS[name], True, "both", fwd, rng)


def check_offsets(
    device: str,
    bad: tuple[int, ...],
    causal: Causal,
    side: str,
    fwd: VarlenForward,
    rng: torch.Generator,
) -> None:
    even = tuple(20 * i // (len(bad) - 1) for i in range(len(bad)))
    q, k, v = (torch.randn(20, heads, 32, generator=rng) for heads in (4, 2, 2))
    surrounded = [torch.full((60, *x.shape[1:]), math.nan)[20:40].copy_(x) for x in (q, k, v)]
    inputs = [x.to(device, torch.float16 if device == "cuda" else torch.float32) for x in surrounded]
    of_q, of_k = (
        torch.tensor(bad if side in (x, "both") else even, dtype=torch.int32, device=device) for x in ("q", "k")
    )
    packed = Packed(inputs[0], inputs[1], inputs[2], of_q, of_k)
    out, lse = fwd(packed, causal)
    assert_packed_matches(out, lse, packed, causal)


@pytest.mark.parametrize("hint", [(None, 7), (0, 0), (1, 10**6), (2**62, None)], ids=str)
def test_hints_change_nothing(
    device: str, hint: tuple[int | None, int | None], fwd: VarlenForward, rng: torch.Generator
) -> None:
    """A wrong hint may choose another kernel on CUDA; the result is within the same bounds."""
    packed = pack(UNEVEN, device, rng)
    given = fwd(packed, True, max_seqlen_q=hint[0], max_seqlen_k=hint[1])
    assert_packed_matches(*given, packed, True)
    if device == "cpu":
        assert same_bits(given, fwd(packed, True))


@pytest.mark.parametrize("form", ["qkv", "heads", "head_major", "columns", "odd_rows", "expanded"])
@MASKS
def test_strides(device: str, form: str, causal: Causal, fwd: VarlenForward, rng: torch.Generator) -> None:
    """Views of a packed projection and others are read as they stand, or copied, never misread."""
    rows, heads = 200, 4
    if form == "qkv":
        q, k, v = torch.randn(rows, 3, heads, 64, generator=rng).unbind(1)
    elif form == "heads":
        q, k, v = torch.randn(rows, 8, 64, generator=rng).split([4, 2, 2], dim=1)
    elif form == "head_major":
        q, k, v = (torch.randn(heads, rows, 64, generator=rng).transpose(0, 1) for _ in range(3))
    elif form == "columns":
        q, k, v = (torch.randn(rows, heads, 128, generator=rng)[..., ::2] for _ in range(3))
    elif form == "odd_rows":
        q, k, v = (torch.randn(rows, heads * 64 + 1, generator=rng)[:, :-1].unflatten(1, (heads, 64)) for _ in range(3))
    else:
        q, k, v = (torch.randn(rows, 1, 64, generator=rng).expand(rows, heads, 64) for _ in range(3))
    of = offsets((33, 0, 100, 67), device)
    packed = Packed(*(_moved(x, device) for x in (q, k, v)), of, of)
    out, lse = fwd(packed, causal)
    assert_packed_matches(out, lse, packed, causal)
    assert out.stride() == torch.empty_like(packed.q).stride()


def _moved(x: torch.Tensor, device: str) -> torch.Tensor:
    """On the device, in a dtype that it takes, and with the same strides."""
    storage = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    storage = storage.to(device, torch.float16 if device == "cuda" else torch.float32)
    return storage.as_strided(x.shape, x.stride(), x.storage_offset())


def test_100_000_sequences(device: str, fwd: VarlenForward, rng: torch.Generator) -> None:
    lengths = torch.randint(0, 6, (100_000, 2), generator=rng)
    packed = pack([(int(a), int(b)) for a, b in lengths.tolist()], device, rng, head_dim=16, heads_q=2, heads_kv=1)
    out, lse = fwd(packed, True)
    sequences = packed.sequences()
    for some in (range(40), range(50_000, 50_040), range(99_960, 100_000)):
        for row, key in (sequences[b] for b in some):
            tensors = (alone(x, where) for x, where in zip(packed.tensors, (row, key, key), strict=True))
            assert_matches(alone(out, row), lse[None, :, row], *tensors, True)
    assert out.isfinite().all()


@pytest.mark.parametrize("number", [31, 253, 254, 255, 300])
def test_number_of_sequences(device: str, number: int, fwd: VarlenForward, rng: torch.Generator) -> None:
    """Few sequences are found in the offsets, many in prefix sums; rows before the first and behind the last are used
    by nobody."""
    lengths = torch.randint(0, 150, (number, 2), generator=rng)
    pairs = [(int(a), int(b)) for a, b in lengths.tolist()]
    packed = pack(pairs, device, rng, head_dim=32, heads_q=2, heads_kv=1, around=140)
    assert_packed_matches(*fwd(packed, True), packed, True)


def test_one_long_beside_many_short(device: str, fwd: VarlenForward, rng: torch.Generator) -> None:
    lengths = [(3, 3)] * 60 + [(1500, 1500)] + [(2, 2)] * 60
    packed = pack(lengths, device, rng, head_dim=32, heads_q=2, heads_kv=1)
    assert_packed_matches(*fwd(packed, True), packed, True)


def test_no_sequences(device: str, fwd: VarlenForward, rng: torch.Generator) -> None:
    packed = pack(((5, 5),), device, rng)
    none = torch.zeros(1, dtype=torch.int32, device=device)
    out, lse = fwd(packed.replace(cu_seqlens_q=none, cu_seqlens_k=none))
    assert (out == 0).all() and (lse == -torch.inf).all()
    nothing = packed.replace(**{x: getattr(packed, x)[:0] for x in ("q", "k", "v")})
    out, lse = fwd(nothing)
    assert (out.shape, lse.shape) == ((0, 4, 64), (4, 0))
    for length, empty in ((5, packed), (0, nothing)):  # hints that are the totals
        hints = {"max_seqlen_q": length, "max_seqlen_k": length}
        out, lse = fwd(empty.replace(cu_seqlens_q=none, cu_seqlens_k=none), **hints)
        assert (out == 0).all() and (lse == -torch.inf).all() and out.shape[0] == length


def test_no_heads(device: str, fwd: VarlenForward, rng: torch.Generator) -> None:
    packed = pack(((5, 5),), device, rng, heads_q=0, heads_kv=2)
    out, lse = fwd(packed)
    assert (out.shape, lse.shape) == ((5, 0, 64), (0, 5))


@pytest.mark.parametrize("device", ["cpu"])
def test_the_result_does_not_depend_on_the_batches_of_the_cpu(
    device: str, fwd: VarlenForward, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = pack(((9, 9),) * 20 + UNEVEN, device, rng)
    whole = fwd(packed, True)
    monkeypatch.setattr(flash_cute.cpu_varlen, "GATHERED", 2 * packed.q[:9].numel())
    assert same_bits(fwd(packed, True), whole)

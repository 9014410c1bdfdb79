"""Attention of float8 tensors on the CPU: that of the float32 tensors that they stand for, whatever the descales."""

from __future__ import annotations

import itertools
import random
from typing import Any

import fp8
import pytest
import torch
from cases import CAUSAL, Causal
from fp8 import E4M3, E5M2, FLOAT8, KINDS, OUT_DTYPES, Call, alone, make, pick_kinds
from numerics import assert_matches, same_bits
from packed import UNEVEN, USED_K, USED_Q, Packed, offsets
from random_layouts import layout, places
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_cute


def rounded(out: torch.Tensor, call: Call) -> torch.Tensor:
    """A float64 out as the call's dtype has it: divided by its factors, not above the largest number, rounded."""
    factors = call.descales.get("descale_out")
    if factors is not None:
        out = out / (factors.double() if factors.dim() < 2 else factors.double()[..., None, None])
    dtype = call.out_dtype or torch.bfloat16
    return fp8.quantised(out.float(), dtype) if dtype in FLOAT8 else out.to(dtype)


def check(call: Call) -> None:
    """A float32 out meets the contract's bound of float32 tensors, any other is that one rounded."""
    out, lse = call.run()
    wide = Call(**{**call.__dict__, "out_dtype": torch.float32, "descales": {**call.descales, "descale_out": None}})
    out32, lse32 = wide.run()
    options = {"window": call.window, "softcap": call.softcap, "sinks": call.sinks, "alibi_slopes": call.alibi_slopes}
    float32 = [x.float() for x in call.wide()]
    assert_matches(out32, lse32, *float32, call.causal, call.scale, **options)
    assert same_bits((lse,), (lse32,))
    assert out.dtype == (call.out_dtype or torch.bfloat16) and places(out) == _places(call)
    expected = rounded(out32.double(), call)
    difference = (out.double() - expected.double()).abs()
    step = fp8.ROUNDING_OF_OUT[out.dtype][0] * 2 * expected.double().abs() + 2 * fp8.ROUNDING_OF_OUT[out.dtype][1]
    assert (difference <= step).all()  # float32 and float64 quotients may round apart
    assert (difference == 0).double().mean() > 0.999


def _places(call: Call) -> tuple[int, ...]:
    """Where out is, as the fake says of 16-bit tensors."""
    with FakeTensorMode():
        q, k, v = (torch.empty_strided(x.shape, x.stride(), dtype=torch.float16) for x in call.tensors)
        return places(flash_cute.fwd(q, k, v)[0])


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("kind", KINDS)
def test_descales(kind: str, causal: Causal, rng: torch.Generator) -> None:
    for out_dtype in (torch.float32, E4M3):
        kinds = (kind, kind, kind, kind if out_dtype == E4M3 else "none")
        check(make(rng, "cpu", head_dim=40, len_q=140, len_k=270, kinds=kinds, causal=causal, out_dtype=out_dtype))


@pytest.mark.parametrize("dtypes", list(itertools.product(FLOAT8, repeat=3)), ids=str)
def test_dtypes(dtypes: tuple[torch.dtype, ...], rng: torch.Generator) -> None:
    for out_dtype in (None, *OUT_DTYPES):
        check(make(rng, "cpu", head_dim=16, len_q=20, len_k=30, dtypes=dtypes, out_dtype=out_dtype))


def test_random_calls(seed: int, rng: torch.Generator) -> None:
    draw = random.Random(seed)
    for _ in range(150):
        heads_kv, d, out_dtype = draw.randint(1, 3), draw.randint(1, 80), draw.choice((None, *OUT_DTYPES))
        call = make(
            rng, "cpu", head_dim=d, head_dim_v=draw.choice((d, draw.randint(1, 80))), len_q=draw.randint(1, 200),
            len_k=draw.randint(1, 300), batch=draw.randint(1, 3), heads_q=heads_kv * draw.randint(1, 3),
            heads_kv=heads_kv, dtypes=tuple(draw.choice(FLOAT8) for _ in range(3)), kinds=pick_kinds(draw, out_dtype),
            sinks=draw.random() < 0.3, alibi=draw.random() < 0.2, softcap=draw.choice((None, None, 5.0)),
            window=draw.choice((None, None, (30, 7))), causal=draw.choice(CAUSAL), out_dtype=out_dtype,
        )  # fmt: skip
        if draw.random() < 0.5:
            call.q, call.k, call.v = (layout(x, draw) for x in call.tensors)
        print(call)
        check(call)


def _pack(rng: torch.Generator, kind: str, **options: Any) -> tuple[Packed, Call]:
    total_q, total_k = (sum(x) + 6 for x in zip(*UNEVEN, strict=True))
    shapes = ((total_q, 4, 24), (total_k, 2, 24), (total_k, 2, 16))
    q, k, v = (fp8.quantised(torch.randn(x, generator=rng), E4M3) for x in shapes)
    of_q, of_k = (offsets(x, first=3) for x in zip(*UNEVEN, strict=True))
    batch = len(UNEVEN)
    descales = {
        name: fp8.descale(kind, rng, *fine, coarse=(batch, 2), device="cpu")
        for name, fine in (
            ("descale_q", (batch, 4, 2)),
            ("descale_k", (batch, 2, 2)),
            ("descale_v", (batch, 2, 16)),
        )
    }
    return Packed(q, k, v, of_q, of_k), Call(q, k, v, descales=descales, **options)


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", CAUSAL)
def test_packed(causal: Causal, kind: str, used: bool, rng: torch.Generator) -> None:
    """Each sequence is computed as if alone; a block of 128 rows begins where it does."""
    packed, call = _pack(rng, kind, causal=causal, out_dtype=torch.float32)
    if used:
        counts = {"seqused_q": USED_Q, "seqused_k": USED_K}
        packed = packed.replace(**{x: torch.tensor(y, dtype=torch.int32) for x, y in counts.items()})
    out, lse = flash_cute.varlen_fwd(*packed.call, causal, **packed.used, **call.options())
    for one, part_out, part_lse in alone(packed, call, out, lse):
        true_out, true_lse = flash_cute.reference.attention(*one.wide(), causal)
        torch.testing.assert_close(part_out.double(), true_out, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(part_lse.double(), true_lse, atol=1e-5, rtol=1e-5)
    unused, _ = packed.unused()
    assert (out[unused] == 0).all() and (lse[:, unused] == -torch.inf).all()


def test_packed_float8_out(rng: torch.Generator) -> None:
    packed, call = _pack(rng, "fine", out_dtype=E5M2)
    exact, _ = flash_cute.varlen_fwd(*packed.call, **{**call.options(), "out_dtype": torch.float32})
    call.descales["descale_out"] = 2.0 ** torch.randn(len(UNEVEN), 4, generator=rng)
    out, _ = flash_cute.varlen_fwd(*packed.call, **call.options())
    for b, (rows, _) in enumerate(packed.sequences()):
        expected = exact[rows] / call.descales["descale_out"][b, :, None]
        assert same_bits((out[rows],), (fp8.quantised(expected, E5M2),))


@pytest.mark.parametrize("packed", [False, True])
def test_reference(packed: bool, rng: torch.Generator) -> None:
    """The oracle takes the descales too, and means the same by them."""
    if packed:
        sequences, call = _pack(rng, "fine")
        call.descales["descale_out"] = 0.5 + torch.rand(len(UNEVEN), 4, generator=rng)
        out, lse = flash_cute.reference.varlen_attention(*sequences.call, True, **call.descales)
        parts = alone(sequences, call, out, lse)
    else:
        call = make(rng, "cpu", len_q=140, len_k=270, kinds=("fine",) * 4)
        parts = [(call, *flash_cute.reference.attention(*call.tensors, True, **call.descales))]
    for one, out, lse in parts:
        true_out, true_lse = flash_cute.reference.attention(*one.wide(), True)
        factors = one.descales["descale_out"]
        assert factors is not None
        torch.testing.assert_close(out, true_out / factors.double()[..., None, None])
        torch.testing.assert_close(lse, true_lse)


def test_blind_rows_nan_and_saturation(rng: torch.Generator) -> None:
    call = make(rng, "cpu", len_q=9, len_k=4, causal=True, out_dtype=E4M3, dtypes=(E4M3, E4M3, E5M2))
    call.descales = {"descale_v": torch.tensor(1e6)}
    out, lse = call.run()
    assert (out[:, :, :5].float() == 0).all() and (lse[:, :, :5] == -torch.inf).all()
    saturated = out[:, :, 5:].float().abs()
    assert (saturated == 448).double().mean() > 0.95 and saturated.max() == 448
    call.v[:, :, 0] = torch.nan
    out, _ = call.run()
    assert out[:, :, 5:].isnan().all()
    call.v = torch.full_like(call.v, torch.inf)
    call.out_dtype = torch.float32
    assert (call.run()[0][:, :, 8] == torch.inf).all()


def test_autocast_changes_nothing(rng: torch.Generator) -> None:
    call = make(rng, "cpu", sinks=True)
    expected = call.run()
    with torch.autocast("cpu", dtype=torch.float16):
        assert same_bits(call.run(), expected)

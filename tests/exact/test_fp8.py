"""Attention of float8 tensors on the GPU against float64 of what they stand for; helpers/fp8.py has the bound.

Longer than 400 lines: its tests share the helpers at their top, and each promise is one test.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from typing import Any

import pytest
import torch
from cases import CAUSAL
from fp8 import (
    E4M3,
    E5M2,
    FLOAT8,
    KINDS,
    OUT_DTYPES,
    Call,
    alone,
    assert_close,
    blocks_of,
    make,
    mismatches,
    pick_kinds,
)
from fp8 import descale as make_descale
from fp8 import quantised as to_float8
from layouts import LAYOUTS
from numerics import nan_in_new_memory, same_bits
from packed import UNEVEN, USED_K, USED_Q, Packed, offsets
from random_layouts import layout

import flash_cute

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not flash_cute.backends()["sm90"], reason="float8 needs a GPU of compute capability 9.0"),
]

HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128))
OTHER_HEAD_DIMS = ((16, 16), (40, 40), (80, 80), (8, 64), (100, 72), (1, 3), (136, 136), (250, 33), (64, 256))
LENGTHS = ((1, 1), (1, 700), (127, 129), (128, 128), (130, 257), (300, 511), (513, 130), (1024, 1024))
DRAWS, SECONDS = 5000, 150


def run(call: Call, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of a call, in memory that holds NaN before."""
    with nan_in_new_memory(call.q):
        return call.run(**more)


def check(call: Call) -> None:
    assert_close(*run(call), call)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (70, 0)}, {"softcap": 5.0}], ids=str)
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_out_without_lse(head_dims: tuple[int, int], options: dict[str, Any], rng: torch.Generator) -> None:
    """A call that does not use the LSE has a kernel of its own, whose out has the same bits."""
    call = make(rng, "cuda", head_dim=head_dims[0], head_dim_v=head_dims[1], len_q=500, len_k=700, **options)
    out, _ = run(call)
    keywords = {name: getattr(call, name) for name in ("causal", "window", "softcap")}
    assert same_bits((flash_cute.attention(*call.tensors, **keywords, **call.descales),), (out,))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_shapes(head_dims: tuple[int, int], causal: bool | str, lengths: tuple[int, int], rng: torch.Generator) -> None:
    (d, dv), (len_q, len_k) = head_dims, lengths
    check(make(rng, "cuda", head_dim=d, head_dim_v=dv, len_q=len_q, len_k=len_k, causal=causal))


@pytest.mark.parametrize("head_dims", OTHER_HEAD_DIMS, ids=str)
def test_padded_head_dims(head_dims: tuple[int, int], rng: torch.Generator) -> None:
    """What is no multiple of 16 is copied; factors by channel end where v's own columns do."""
    d, dv = head_dims
    for out_dtype in (None, E4M3, torch.float32):
        call = make(rng, "cuda", head_dim=d, head_dim_v=dv, causal=True, kinds=("fine",) * 3 + ("none",))
        call.out_dtype = out_dtype
        check(call)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtypes", list(itertools.product(FLOAT8, repeat=3)), ids=str)
def test_dtypes(dtypes: tuple[torch.dtype, ...], head_dim: int, rng: torch.Generator) -> None:
    check(make(rng, "cuda", head_dim=head_dim, dtypes=dtypes, causal=True))


@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_descales(kind: str, out_dtype: torch.dtype, head_dims: tuple[int, int], rng: torch.Generator) -> None:
    of_out = kind if out_dtype in FLOAT8 else "none"
    check(
        make(
            rng, "cuda", head_dim=head_dims[0], head_dim_v=head_dims[1], len_q=300, len_k=700, heads_q=6, heads_kv=2,
            kinds=(kind, kind, kind, of_out), out_dtype=out_dtype,
        )
    )  # fmt: skip


@pytest.mark.parametrize("which", range(4))
def test_a_descale_alone(which: int, rng: torch.Generator) -> None:
    for kind in KINDS[1:]:
        kinds = ["none"] * 4
        kinds[which] = kind
        check(make(rng, "cuda", len_k=700, kinds=tuple(kinds), out_dtype=E4M3))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "options",
    [
        {"window": (100, 30)},
        {"window": (64, 0), "causal": True},
        {"window": (None, 20)},
        {"window": (0, 0)},
        {"softcap": 5.0},
        {"softcap": 30.0, "causal": True},
        {"sinks": True},
        {"sinks": True, "causal": "top_left", "window": (40, None)},
        {"alibi": True, "causal": True},
        {"alibi": True, "softcap": 20.0, "sinks": True},
        {"scale": 1.0},
        {"scale": 0.02},
        {"heads_q": 8, "heads_kv": 1},
        {"heads_q": 12, "heads_kv": 3, "causal": True},
        {"heads_q": 3, "heads_kv": 3, "batch": 5},
    ],
    ids=str,
)
def test_options(options: dict[str, Any], head_dim: int, rng: torch.Generator) -> None:
    for lengths in ((300, 520), (520, 300)):
        sizes = {"len_q": lengths[0], "len_k": lengths[1], "head_dim": head_dim}
        check(make(rng, "cuda", kinds=("head", "fine", "fine", "none"), **sizes, **options))


@pytest.mark.parametrize("stored", LAYOUTS, ids=str)
def test_strides(stored: Any, rng: torch.Generator) -> None:
    """Any strides give the bits of contiguous tensors, and out lies where `empty_like(q)` does."""
    for head_dim in (64, 128):
        plain = make(rng, "cuda", head_dim=head_dim, len_q=200, len_k=200, heads_q=2, causal=True)
        call = Call(*(stored.make(x) for x in plain.tensors), causal=True)
        results = run(call)
        assert_close(*results, call)
        copied = Call(*(x.contiguous() for x in call.tensors), causal=True)
        assert same_bits(results, run(copied))
        assert results[0].stride() == torch.empty_like(call.q).stride()


def test_rows_between_heads(rng: torch.Generator) -> None:
    """(B, N, H, D) tensors as views, k and v of one fused tensor, and expanded ones."""
    q = to_float8(torch.randn(2, 300, 4, 128, generator=rng), E4M3).cuda().transpose(1, 2)
    kv = to_float8(torch.randn(2, 500, 2, 2, 128, generator=rng), E4M3).cuda()
    k, v = (kv[:, :, i].transpose(1, 2) for i in range(2))
    check(Call(q, k, v, causal=True))
    check(Call(q[:, :1].expand(-1, 4, -1, -1), k[:1].expand(2, -1, -1, -1), v[:, :1].expand(-1, 2, -1, -1)))


def test_strides_of_descales(rng: torch.Generator) -> None:
    """Expanded, transposed and sliced factors are read in place."""
    call = make(rng, "cuda", len_q=300, len_k=500, kinds=("fine",) * 4, out_dtype=E5M2)
    expected = run(call)
    every_second = {}
    for name, x in call.descales.items():
        assert x is not None
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan, device="cuda")
        wide[..., ::2] = x
        every_second[name] = wide[..., ::2]
    call.descales = every_second
    assert same_bits(run(call), expected)
    number = torch.tensor(1.5, device="cuda")
    call.descales = {"descale_q": number.expand(2, 4, 3), "descale_k": number.expand(2, 2), "descale_v": number[None]}
    broadcast = run(call)
    call.descales = dict.fromkeys(("descale_q", "descale_k", "descale_v"), number)
    assert same_bits(run(call), broadcast)


def pack(
    rng: torch.Generator, lengths: Any, head_dim: int, kinds: tuple[str, ...], **options: Any
) -> tuple[Packed, Call]:
    """A packed call, whose options the second has; the descales' blocks reach the end of the longest sequence."""
    total_q, total_k = (sum(x) + 10 for x in zip(*lengths, strict=True))
    shapes = ((total_q, 4, head_dim), (total_k, 2, head_dim), (total_k, 2, head_dim))
    q, k, v = (to_float8(torch.randn(x, generator=rng), E4M3).cuda() for x in shapes)
    of_q, of_k = (offsets(x, "cuda", 5) for x in zip(*lengths, strict=True))
    batch, blocks = len(lengths), [blocks_of(max(1, *x)) for x in zip(*lengths, strict=True)]
    names = ("descale_q", "descale_k", "descale_v")
    fine = ((batch, 4, blocks[0]), (batch, 2, blocks[1]), (batch, 2, head_dim))
    descales = {
        name: make_descale(kind, rng, *shape, coarse=(batch, 2), device="cuda")
        for name, kind, shape in zip(names, kinds, fine, strict=False)
    }
    if kinds[3] != "none":
        of_out = "head" if kinds[3] == "fine" else kinds[3]
        descales["descale_out"] = make_descale(of_out, rng, coarse=(batch, 4), device="cuda")
    return Packed(q, k, v, of_q, of_k), Call(q, k, v, descales=descales, **options)


def run_packed(packed: Packed, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    with nan_in_new_memory(packed.q.unsqueeze(0)):
        return flash_cute.varlen_fwd(*packed.call, call.causal, **packed.used, **call.options())


def check_packed(packed: Packed, call: Call) -> None:
    out, lse = run_packed(packed, call)
    for one, part_out, part_lse in alone(packed, call, out, lse):
        assert_close(part_out, part_lse, one)
    unused, _ = packed.unused()
    assert (out[unused].float() == 0).all() and (lse[:, unused] == -torch.inf).all()


@pytest.mark.parametrize("head_dim", [40, 64, 128, 192, 256])
@pytest.mark.parametrize("kind", ["none", "number", "head", "fine"])
@pytest.mark.parametrize("causal", CAUSAL)
def test_packed(causal: bool | str, kind: str, head_dim: int, rng: torch.Generator) -> None:
    packed, call = pack(rng, (*UNEVEN, (400, 700)), head_dim, (kind, kind, kind, "none"), causal=causal)
    check_packed(packed, call)


@pytest.mark.parametrize("options", [{"window": (50, 10)}, {"softcap": 8.0}, {"out_dtype": E4M3}], ids=str)
def test_packed_options(options: dict[str, Any], rng: torch.Generator) -> None:
    of_out = "head" if options.get("out_dtype") in FLOAT8 else "none"
    packed, call = pack(rng, UNEVEN, 128, ("fine", "fine", "fine", of_out), **options)
    call.sinks = torch.randn(4, generator=rng).cuda()
    used = {"seqused_q": USED_Q, "seqused_k": USED_K}
    packed = packed.replace(**{x: torch.tensor(y, dtype=torch.int32, device="cuda") for x, y in used.items()})
    check_packed(packed, call)


def test_unused_rows_and_factors_do_not_matter(rng: torch.Generator) -> None:
    """NaN outside of the sequences, in the blocks behind their ends, and in the factors of empty ones."""
    packed, call = pack(rng, ((200, 130), (0, 0), (10, 400)), 64, ("fine", "fine", "fine", "none"), causal=True)
    expected = run_packed(packed, call)
    rows, keys = packed.unused()
    for x, unused in ((packed.q, rows), (packed.k, keys), (packed.v, keys)):
        x.view(torch.uint8)[unused] = 0x7F
    of_q, of_k, of_v = (call.descales[x] for x in ("descale_q", "descale_k", "descale_v"))
    assert of_q is not None and of_k is not None and of_v is not None
    of_q[1] = of_k[1] = of_v[1] = torch.nan
    of_q[2, :, 1:] = torch.nan
    of_k[0, :, 2:] = torch.nan
    assert same_bits(run_packed(packed, call), expected)


def random_call(draw: random.Random, rng: torch.Generator) -> Call:
    heads_kv = draw.randint(1, 3)
    out_dtype = draw.choice((None, *OUT_DTYPES))
    d = draw.choice((64, 128, 96, 192, 256, 16 * draw.randint(1, 16), draw.randint(1, 256)))
    len_q, len_k = (draw.choice((1, 64, 128, draw.randint(1, 140), draw.randint(1, 600))) for _ in range(2))
    causal = draw.choice(CAUSAL)
    call = make(
        rng, "cuda", head_dim=d, head_dim_v=draw.choice((d, d, d, 128, draw.randint(1, 256))),
        len_q=len_q, len_k=draw.choice((len_q, len_k, 0 if draw.random() < 0.05 else len_k)), batch=draw.randint(1, 3),
        heads_q=heads_kv * draw.choice((1, 1, 2, 4)), heads_kv=heads_kv, causal=causal,
        dtypes=tuple(draw.choice((E4M3, E4M3, E5M2)) for _ in range(3)), kinds=pick_kinds(draw, out_dtype),
        sinks=draw.random() < 0.2, alibi=draw.random() < 0.15, softcap=draw.choice((None,) * 5 + (3.0, 30.0)),
        window=draw.choice((None, None, (draw.randint(0, 300), draw.choice((None, 0, draw.randint(0, 300)))))),
        scale=draw.choice((None, None, 2 * draw.random() / d**0.5 + 1e-3)), out_dtype=out_dtype,
    )  # fmt: skip
    if draw.random() < 0.5:
        call.q, call.k, call.v = (layout(x, draw) for x in call.tensors)
    return call


def test_random_calls(seed: int, rng: torch.Generator) -> None:
    """Shapes, layouts, masks, options, dtypes and factors of every kind at once."""
    draw, bad, start = random.Random(seed), [], time.monotonic()
    done = 0
    while done < DRAWS and time.monotonic() - start < SECONDS:
        if done % 4 == 3:
            lengths = tuple((draw.randint(0, 300), draw.randint(0, 300)) for _ in range(draw.randint(1, 5)))
            out_dtype = draw.choice((None, *OUT_DTYPES))
            packed, call = pack(
                rng, lengths, draw.choice((40, 64, 128, 256)), pick_kinds(draw, out_dtype), out_dtype=out_dtype,
                causal=draw.choice(CAUSAL), window=draw.choice((None, (70, 10))), softcap=draw.choice((None, 9.0)),
            )  # fmt: skip
            parts = alone(packed, call, *run_packed(packed, call))
        else:
            call = random_call(draw, rng)
            parts = [(call, *run(call))]
        bad += [f"{done}: {problem} in {one}" for one, out, lse in parts for problem in mismatches(out, lse, one)]
        done += 1
    print(f"{done} calls in {time.monotonic() - start:.0f} s, {len(bad)} bad")
    assert not bad, "\n".join(bad[:20])
    assert done >= min(DRAWS, 500)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["k", "v"])
def test_nan_and_inf(which: str, value: float, head_dim: int, rng: torch.Generator) -> None:
    """A key or value that is not finite reaches the rows that see it, as in float64; the others stay as they were."""
    call = make(rng, "cuda", head_dim=head_dim, dtypes=(E5M2,) * 3, len_q=600, len_k=600, causal=True)
    expected, _ = run(call)
    getattr(call, which)[0, 1, 500, 5] = value  # read by the query heads 2 and 3
    out, lse = run(call)
    true_out, true_lse = flash_cute.reference.attention(*call.tensors, True)
    for head, rows in ((0, slice(None)), (1, slice(None)), (2, slice(0, 192)), (3, slice(0, 192))):
        assert same_bits((out[0, head, rows],), (expected[0, head, rows],))
    assert same_bits((out[1],), (expected[1],))
    seeing = out[0, 2:, 500:].double()
    assert torch.equal(seeing.isnan(), true_out[0, 2:, 500:].isnan())
    infinite = true_out[0, 2:, 500:].isinf()
    assert torch.equal(seeing[infinite], true_out[0, 2:, 500:][infinite])
    assert torch.equal(lse[0, 2:, 500:].isfinite(), true_lse[0, 2:, 500:].isfinite())


def test_nan_in_e4m3(rng: torch.Generator) -> None:
    call = make(rng, "cuda", len_q=600, len_k=600, causal=True)
    call.v.view(torch.uint8)[:, :, 599] = 0x7F
    out, _ = run(call)
    assert out[:, :, 599].isnan().all() and out[:, :, :192].isfinite().all()


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_float8_out_saturates(dtype: torch.dtype, rng: torch.Generator) -> None:
    call = make(rng, "cuda", len_k=5, out_dtype=dtype)
    call.descales = {"descale_v": torch.tensor(1e6, device="cuda"), "descale_out": torch.tensor(1e-3, device="cuda")}
    out, _ = run(call)
    most = torch.finfo(dtype).max
    assert (out.float().abs() == most).float().mean() > 0.95 and out.float().abs().max() == most
    assert_close(*run(call), call)


def test_rows_that_see_no_key(rng: torch.Generator) -> None:
    for options in ({"causal": True}, {"causal": True, "sinks": True}, {"out_dtype": E4M3, "causal": True}):
        call = make(rng, "cuda", len_q=400, len_k=130, **options)
        out, lse = run(call)
        assert (out[:, :, :270].float() == 0).all() and (lse[:, :, :270] == -torch.inf).all()
        assert_close(out, lse, call)
        call.k, call.v = call.k[:, :, :0], call.v[:, :, :0]
        out, lse = run(call)
        assert (out.float() == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize("empty", [{"batch": 0}, {"len_q": 0}, {"heads_q": 0, "heads_kv": 0}], ids=str)
def test_empty(empty: dict[str, int], rng: torch.Generator) -> None:
    call = make(rng, "cuda", kinds=("fine", "fine", "fine", "none"), **empty)
    out, lse = run(call)
    assert out.shape == call.q.shape and lse.shape == call.q.shape[:3]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_determinism(head_dim: int, rng: torch.Generator) -> None:
    call = make(rng, "cuda", head_dim=head_dim, len_q=2000, len_k=3000, causal=True, kinds=("fine",) * 3 + ("none",))
    first = run(call)
    for _ in range(10):
        assert same_bits(run(call), first)


def test_graph(rng: torch.Generator) -> None:
    """A captured call computes what its inputs, and its factors, hold when it is replayed."""
    call = make(rng, "cuda", len_q=300, len_k=300, kinds=("fine",) * 3 + ("none",))
    run(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call.run()
    other = make(rng, "cuda", len_q=300, len_k=300, kinds=("fine",) * 3 + ("none",))
    for x, y in zip(call.tensors, other.tensors, strict=True):
        x.copy_(y)
    for name, x in call.descales.items():
        if x is not None:
            x.copy_(other.descales[name])
    graph.replay()
    assert same_bits(results, run(other))


def test_compiled(rng: torch.Generator) -> None:
    call = make(rng, "cuda", len_q=300, len_k=300, kinds=("fine",) * 3 + ("none",), causal=True)
    compiled = torch.compile(lambda *x: flash_cute.fwd(*x, call.causal, **call.options()), fullgraph=True)
    assert same_bits(compiled(*call.tensors), run(call))


def _error(call: Call, rows: int) -> float:
    """The root mean square of the relative error of `rows` rows of out, in float32."""
    out, _ = run(call)
    q, k, v = call.wide()
    weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
    truth = weights @ v
    return float(((out.double() - truth)[:, :, :rows].square().mean() / truth[:, :, :rows].square().mean()).sqrt())


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_values_of_mean_1_at_any_length(head_dim: int, rng: torch.Generator) -> None:
    """Sums of many keys lose nothing: at 131,072 of them the error is at most 1.2 times that at 4,096."""
    errors = {}
    for len_k in (4096, 131072):
        shape = {"head_dim": head_dim, "len_q": 128, "len_k": len_k, "batch": 1, "heads_q": 1, "heads_kv": 1}
        call = make(rng, "cuda", **shape, out_dtype=torch.float32)
        call.v = to_float8(torch.randn(call.v.shape, generator=rng) + 1, E4M3).cuda()
        errors[len_k] = _error(call, 128)
    print(errors)
    assert errors[131072] <= 1.2 * errors[4096]


@pytest.mark.parametrize("head_dim", [64, 128])
def test_needle(head_dim: int, rng: torch.Generator) -> None:
    """One key of 131,072 that a row's query is like, wherever it stands, gives the row its value."""
    shape = {"head_dim": head_dim, "len_q": 64, "len_k": 131072, "batch": 1, "heads_q": 1, "heads_kv": 1}
    call = make(rng, "cuda", **shape)
    places = torch.linspace(0, 131071, 64).long().cuda()
    call.k[0, 0, places] = to_float8(4 * call.q[0, 0].float(), E4M3)
    out, lse = run(call)
    values = call.v[0, 0, places].float()
    found = torch.cdist(out[0, 0].float(), values).argmin(-1)
    assert torch.equal(found, torch.arange(64, device="cuda"))
    true_out, true_lse = flash_cute.reference.attention(*call.tensors)
    # Of a short query its key has not all of the weight. The others' numerators are too small for float8: they are 0.
    scores = (call.q[0, 0].double() * call.k[0, 0, places].double()).sum(-1) / head_dim**0.5
    others = -torch.expm1(scores - true_lse[0, 0])
    assert ((out.double() - true_out).abs().amax(-1) < 0.05 + others).all()
    assert ((lse.double() - true_lse) / true_lse).abs().max() < 2.0**-9


@pytest.mark.parametrize("rise", [0.3, 3.0, 40.0])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rising_maxima(head_dim: int, rise: float, rng: torch.Generator) -> None:
    """Scores that rise from each key tile to the one before, which comes after it, by less and by more than the lag."""
    call = make(rng, "cuda", head_dim=head_dim, len_q=192, len_k=2048, batch=1, heads_q=2, heads_kv=2)
    direction = torch.randn(head_dim, generator=rng).sign()
    q, k = (0.3 * torch.randn(x.shape, generator=rng) for x in call.tensors[:2])
    tile = (2047 - torch.arange(2048)) // 128
    k += direction * (tile * rise / head_dim**0.5)[:, None]
    call.q, call.k = to_float8(q + direction, E4M3).cuda(), to_float8(k, E4M3).cuda()
    _, lse = run(call)
    _, true_lse = flash_cute.reference.attention(*call.tensors)
    assert ((lse.double() - true_lse) / true_lse.abs().clamp(min=1)).abs().max() < 0.02
    assert _error(call, 192) < 0.12

"""Packed sequences with softcap, sinks, ALiBi slopes, windows and a head dim of v's own, each and all at once."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from cases import CAUSAL, CPU_DTYPES, CUDA_DTYPES
from packed import assert_packed_gradients, assert_packed_matches, flow, make_backward, make_forward, pack

pytestmark = pytest.mark.kernel

LENGTHS = ((65, 77), (0, 4), (5, 9), (130, 33), (6, 0), (64, 64), (64, 64))


def _options(names: str, sequences: int, device: str, rng: torch.Generator) -> dict[str, Any]:
    """What the names ask for; sinks about as large as a row's LSE, so that neither they nor the keys weigh all."""
    options: dict[str, Any] = {}
    for name in names.split("+"):
        if name == "softcap":
            options["softcap"] = 3.0
        elif name == "sinks":
            options["sinks"] = (torch.randn(4, generator=rng) + 3).to(device)
        elif name == "slopes_per_head":
            options["alibi_slopes"] = (torch.rand(4, generator=rng) * 0.5).to(device)
        elif name == "slopes_per_sequence":
            options["alibi_slopes"] = (torch.rand((sequences, 4), generator=rng) * 0.5).to(device)
        elif name == "window":
            options["window"] = (40, 7)
    return options


@pytest.mark.parametrize("causal", CAUSAL, ids=str)
@pytest.mark.parametrize(
    "names",
    [
        "softcap",
        "sinks",
        "slopes_per_head",
        "slopes_per_sequence",
        "dv",
        "softcap+sinks+slopes_per_sequence+window+dv",
        "sinks+window",
    ],
)
def test_exact(device: str, names: str, causal: bool | str, backend: str | None, rng: torch.Generator) -> None:
    packed = pack(LENGTHS, device, rng, head_dim=32, head_dim_v=48 if "dv" in names else None, around=2)
    options = _options(names, len(LENGTHS), device, rng)
    out, lse = make_forward(backend)(packed, causal, **options)
    assert_packed_matches(out, lse, packed, causal, **options)
    dout, dlse = flow(packed, rng)
    given = make_backward(backend)(dout, packed, causal, dlse=dlse, **options)
    assert_packed_gradients(given, dout, packed, causal, dlse=dlse, **options)


@pytest.mark.parametrize("number", range(24))
def test_random(device: str, number: int, seed: int, backend: str | None, rng: torch.Generator) -> None:
    """Lengths, used lengths, heads, head dims, mask, options and dtype all at once."""
    draw = random.Random(seed)
    lengths = [
        (draw.choice((0, 1, draw.randint(1, 9), draw.randint(1, 150))), draw.choice((0, 2, draw.randint(2, 150))))
        for _ in range(draw.randint(1, 9))
    ]
    dtype = draw.choice(CPU_DTYPES if device == "cpu" else CUDA_DTYPES)
    head_dim, head_dim_v = (draw.choice((draw.randint(1, 128), 8 * draw.randint(1, 24))) for _ in range(2))
    shape = {"heads_kv": draw.choice((1, 2, 4)), "head_dim": head_dim, "head_dim_v": draw.choice((None, head_dim_v))}
    causal = draw.choice(CAUSAL)
    names = "+".join(x for x in ("softcap", "sinks", "window") if draw.random() < 0.3)
    names += draw.choice(("", "", "+slopes_per_head", "+slopes_per_sequence"))
    used = [draw.choice((None, [draw.randint(0, 150) for _ in lengths])) for _ in range(2)]
    print(lengths, dtype, shape, causal, names, used)

    packed = pack(lengths, device, rng, dtype=dtype, around=draw.choice((0, 3)), **shape)
    used_q, used_k = (None if x is None else torch.tensor(x, dtype=torch.int32, device=device) for x in used)
    packed = packed.replace(seqused_q=used_q, seqused_k=used_k)
    options = _options(names, len(lengths), device, rng)
    out, lse = make_forward(backend)(packed, causal, **options)
    assert_packed_matches(out, lse, packed, causal, **options)
    if used_k is not None and (used_k == 1).any():
        return  # as in test_random.py: dP - delta is 0 then, and its noise adds up
    dout, dlse = flow(packed, rng)
    given = make_backward(backend)(dout, packed, causal, dlse=dlse, **options)
    assert_packed_gradients(given, dout, packed, causal, dlse=dlse, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_gradient_of_sinks(device: str, dtype: torch.dtype, backend: str | None, rng: torch.Generator) -> None:
    """In the sinks' own dtype, whatever q's; the sum over all sequences is not rounded on its way."""
    packed = pack(((40, 40),) * 30, device, rng, dtype=torch.float16, head_dim=32)
    sinks = (torch.randn(4, generator=rng) + 3).to(device, dtype)
    dout, _ = flow(packed, rng)
    given = make_backward(backend)(dout, packed, True, sinks=sinks)
    assert_packed_gradients(given, dout, packed, True, sinks=sinks)

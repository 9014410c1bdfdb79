"""Random layouts of every tensor of a call, dense and packed, forward and backward.

What is computed must not depend on where the elements stand, and out and the gradients stand where the fakes say. On a
GPU the bits are those of the same call with contiguous tensors.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from cases import CAUSAL, CPU_DTYPES, CUDA_DTYPES, Causal, score
from numerics import assert_gradients_match, assert_matches, nan_in_new_memory, same_bits, visible
from packed import Packed, assert_packed_gradients, assert_packed_matches, offsets
from random_layouts import layout, places, size
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_cute

pytestmark = pytest.mark.kernel

DRAWS = {"cpu": 200, "cuda": 1000}  # of dense calls, and of packed ones
Tensors = dict[str, torch.Tensor]
# Those of which a dim may be expanded, so that rows or keys are alike.
REPEATED = ("q", "k", "v", "dout")


@dataclass
class Call:
    """A random call; `tensors` in random layouts: q, k, v, dout, perhaps dlse, sinks and alibi_slopes."""

    tensors: Tensors
    causal: Causal
    window: tuple[int | None, int | None] | None
    softcap: float | None
    lengths: Tensors = field(default_factory=dict)  # of packed sequences

    def __str__(self) -> str:
        shown = [f"{x} {y.dtype} {tuple(y.shape)} {y.stride()} + {y.storage_offset()}" for x, y in self.tensors.items()]
        shown += [f"{x} {y.tolist()}" for x, y in self.lengths.items()]
        return ", ".join([*shown, f"causal {self.causal}", f"window {self.window}", f"softcap {self.softcap}"])

    def options(self) -> dict[str, Any]:
        given = {x: self.tensors[x] for x in ("sinks", "alibi_slopes") if x in self.tensors}
        return {"window": self.window, "softcap": self.softcap, **given}

    def with_contiguous_tensors(self) -> Call:
        tensors = {x: y.clone(memory_format=torch.contiguous_format) for x, y in self.tensors.items()}
        return replace(self, tensors=tensors)

    def fake(self, lse: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """out, lse and the gradients of the fakes."""

        def empty(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)

        with FakeTensorMode():
            q, k, v, dout, dlse = (empty(self.tensors.get(x)) for x in ("q", "k", "v", "dout", "dlse"))
            of_score = {x: empty(self.tensors.get(x)) for x in ("sinks", "alibi_slopes")}
            options = score(self.causal, self.window or (None, None), softcap=self.softcap, **of_score)
            names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
            lengths = [empty(self.lengths.get(x)) for x in names] + [None, None] if self.lengths else []
            operators = torch.ops.flash_cute
            fwd, bwd = (operators.varlen_fwd, operators.varlen_bwd) if lengths else (operators.fwd, operators.bwd)
            out, new_lse = fwd(q, k, v, *lengths, *options, "auto")
            gradients = bwd(dout, q, k, v, out, empty(lse), dlse, *lengths, *options, True, "auto")
        return out, new_lse, *(gradients if "sinks" in self.tensors else gradients[:3])

    def run(self, backend: str | None) -> tuple[torch.Tensor, ...]:
        """out, lse and the gradients; the deterministic ones, whose bits can be compared."""
        q, k, v, dout = (self.tensors[x] for x in ("q", "k", "v", "dout"))
        options = {"causal": self.causal, **self.options(), "backend": backend, **self.lengths}
        forward, backward = flash_cute.fwd, flash_cute.bwd
        if self.lengths:
            forward, backward = flash_cute.varlen_fwd, flash_cute.varlen_bwd
        with torch.no_grad(), nan_in_new_memory(q if q.dim() == 4 else q.unsqueeze(0)):
            out, lse = forward(q, k, v, **options)
            dlse = self.tensors.get("dlse")
            gradients = backward(dout, q, k, v, out, lse, **options, dlse=dlse, deterministic=True)
        return out, lse, *gradients

    def check(self, results: tuple[torch.Tensor, ...]) -> None:
        """Against the float64 reference."""
        q, k, v, dout = (self.tensors[x] for x in ("q", "k", "v", "dout"))
        dlse = self.tensors.get("dlse")
        out, lse, *gradients = results
        options = {"causal": self.causal, **self.options()}
        # In float64 what is left of numbers that cancel is no more than the bound; see test_random.py.
        compare_gradients = q.dtype == torch.float64 or not self.cancels()
        if q.numel() == 0 or k.numel() == 0:
            assert (out == 0).all() and (lse == -torch.inf).all() and all((x == 0).all() for x in gradients)
        elif self.lengths:
            packed = Packed(q, k, v, **self.lengths)
            assert_packed_matches(out, lse, packed, **options)
            if compare_gradients:
                assert_packed_gradients(tuple(gradients), dout, packed, dlse=dlse, **options)
        else:
            assert_matches(out, lse, q, k, v, **options)
            if compare_gradients:
                assert_gradients_match(tuple(gradients), dout, q, k, v, dlse=dlse, **options)

    def cancels(self) -> bool:
        """Whether a row sees keys that are alike, or one alone: dS is the difference of equal numbers then."""
        for x in (self.tensors[x] for x in REPEATED):
            if any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)):
                return True
        q, k, v = (self.tensors[x] for x in "qkv")
        pairs = [(q.shape[-2], k.shape[-2])]
        if self.lengths:
            ranges = Packed(q, k, v, **self.lengths).sequences()
            pairs = [(rows.stop - rows.start, keys.stop - keys.start) for rows, keys in ranges]
        return any((visible(*pair, self.causal, window=self.window).sum(-1) == 1).any() for pair in pairs)


def _draw(draw: random.Random, device: str, packed: bool) -> Call:
    rng = torch.Generator().manual_seed(draw.randrange(2**31))
    batch, heads_kv = size(draw, 2, 3), size(draw, 1, 2)
    heads_q = heads_kv * draw.choice((1, 2, 3))
    rows, keys = size(draw, 5, 17, 65), size(draw, 7, 33, 70)
    head_dim = draw.choice((1, 3, 8, 16, 40, 64, 96, 128) if device == "cpu" else (1, 8, 16, 40, 64, 128, 200, 320))
    head_dim_v = draw.choice((head_dim, head_dim, 1, 8, 24, 64))
    dtype = draw.choice(CPU_DTYPES if device == "cpu" else CUDA_DTYPES)
    shapes = {"q": (heads_q, rows, head_dim), "k": (heads_kv, keys, head_dim), "v": (heads_kv, keys, head_dim_v)}
    shapes["dout"] = (heads_q, rows, head_dim_v)
    shapes = {x: (y[1], y[0], y[2]) if packed else (batch, *y) for x, y in shapes.items()}
    tensors = {x: torch.randn(y, generator=rng) for x, y in shapes.items()}
    if draw.random() < 0.5:
        tensors["dlse"] = torch.randn((heads_q, rows) if packed else (batch, heads_q, rows), generator=rng)
    if draw.random() < 0.3:
        tensors["sinks"] = torch.randn(heads_q, generator=rng) + 2
    if draw.random() < 0.3:
        tensors["alibi_slopes"] = torch.rand(draw.choice(((heads_q,), (batch, heads_q))), generator=rng) * 0.5
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    dtypes = {"dlse": wide, "sinks": draw.choice((torch.float32, dtype)), "alibi_slopes": torch.float32}
    laid_out = {x: layout(y.to(device, dtypes.get(x, dtype)), draw) for x, y in tensors.items()}
    causal, softcap = draw.choice(CAUSAL), draw.choice((None, None, 20.0))
    window = draw.choice((None, None, (3, 10), (None, 4), (8, None)))
    call = Call(laid_out, causal, window, softcap)
    if packed:
        for side, total in (("q", rows), ("k", keys)):
            bounds = sorted(draw.randrange(total + 1) for _ in range(batch + 1))
            call.lengths[f"cu_seqlens_{side}"] = torch.tensor(bounds, dtype=torch.int32, device=device)
            if draw.random() < 0.3:
                used = offsets([draw.randrange(total + 2) for _ in range(batch)], device).diff()
                call.lengths[f"seqused_{side}"] = used
    return call


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_layouts(device: str, packed: bool, seed: int, backend: str | None) -> None:
    for number in range(DRAWS[device]):
        call = _draw(random.Random(seed + number), device, packed)
        try:
            results = call.run(backend)
            if device == "cuda":
                torch.cuda.synchronize()
                assert same_bits(results, call.with_contiguous_tensors().run(backend)), "other bits"
            call.check(results)
            fakes = call.fake(results[1])
            assert [(x.shape, x.dtype, places(x)) for x in results] == [(x.shape, x.dtype, places(x)) for x in fakes]
        except Exception as error:
            raise AssertionError(f"draw {number} of seed {seed}: {call}") from error


@pytest.mark.parametrize("strides", [(1, 0, 1), (1, 0, 2), (0, 0, 2), (1, 0, 0)], ids=str)
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("head_dim_v", [16, 24])
def test_one_row_of_expanded_heads(
    device: str,
    strides: tuple[int, ...],
    first: int,
    head_dim_v: int,
    backend: str | None,
    rng: torch.Generator,
) -> None:
    """A packed tensor's own dims decide how out is laid out, and not those of its view as a batch of one."""
    dtype = torch.float16 if device == "cuda" else torch.float64
    memory, k, v, dout = (
        torch.randn(x, generator=rng).to(device, dtype)
        for x in ((64,), (5, 2, 16), (5, 2, head_dim_v), (1, 2, head_dim_v))
    )
    lengths = {f"cu_seqlens_{x}": offsets([n], device) for x, n in (("q", 1), ("k", 5))}
    q = memory.as_strided((1, 2, 16), strides, first)
    call = Call({"q": q, "k": k, "v": v, "dout": dout}, False, None, None, lengths)
    results = call.run(backend)
    if device == "cuda":
        torch.cuda.synchronize()
        assert same_bits(results, call.with_contiguous_tensors().run(backend))
    call.check(results)

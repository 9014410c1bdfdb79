"""The kernel of `flash_cute.quantize_fp8` against its CPU path; graphs, determinism, large offsets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bad_offsets import KINDS, bad_offsets
from layouts import DISTINCT_LAYOUTS, LAYOUTS
from numerics import nan_in_new_memory, same_bits

from flash_cute import Fp8Descales, quantize_fp8

pytestmark = pytest.mark.cuda

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INPUTS = (torch.float16, torch.bfloat16, torch.float32)
OPTIONS = [
    {"per": per, "rotate": rotate, "smooth_k": smooth_k}
    for per in ("head", "block")
    for rotate in (False, True)
    for smooth_k in (False, True)
]
Quantized = tuple[torch.Tensor, torch.Tensor, torch.Tensor, Fp8Descales]


def quantize(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Quantized:
    with nan_in_new_memory(q):
        return quantize_fp8(q, k, v, **options)


def tensors(found: Quantized) -> tuple[torch.Tensor, ...]:
    *values, descales = found
    return (*(x.view(torch.uint8) for x in values), *(x for x in descales if x is not None))


def steps(x8: torch.Tensor) -> torch.Tensor:
    """Float8 values as numbers that follow one another; of NaN 0."""
    codes = x8.view(torch.uint8).int()
    sizes = torch.where(codes >= 128, 128 - codes, codes)
    return sizes.where(x8.float().isfinite(), 0)


def assert_as_cpu(found: Quantized, expected: Quantized, exact: bool) -> None:
    """`exact`: without k's mean the arithmetic is the same; else k differs by a step where a mean's last bit does.

    Of a key that is nearly the mean only that bit may be left, which is many steps of float8's smallest numbers.
    """
    for i, (x8, y8) in enumerate(zip(found[:3], expected[:3], strict=True)):
        assert x8.dtype == y8.dtype and x8.stride() == y8.stride()
        x8 = x8.cpu()
        assert torch.equal(x8.float().isnan(), y8.float().isnan())
        apart = (steps(x8) - steps(y8)).abs()
        if i == 1 and not exact:
            far = (x8.double() - y8.double()).nan_to_num().abs() > 2.0**-20 * torch.finfo(x8.dtype).max
            assert not (far & (apart > 1)).any()
            assert int((apart > 0).sum()) <= 1e-3 * apart.numel() + 1
        else:
            assert not apart.any()
    for name, x, y in zip("qkv", found[3][:3], expected[3][:3], strict=True):
        if name == "k" and not exact:
            torch.testing.assert_close(x.cpu(), y, rtol=2e-6, atol=0)
        else:
            assert torch.equal(x.cpu(), y)
    if expected[3].lse_shift is not None:
        shift = expected[3].lse_shift
        bound = 1e-5 * float(shift.nan_to_num().abs().amax()) if shift.numel() else 0
        torch.testing.assert_close(found[3].lse_shift.cpu(), shift, rtol=1e-4, atol=bound + 1e-5, equal_nan=True)


def inputs(rng: torch.Generator, dtype: torch.dtype, head_dim: int, rows: int, keys: int) -> list[torch.Tensor]:
    shapes = ((2, 4, rows, head_dim), (2, 2, keys, head_dim), (2, 2, keys, 64 if head_dim == 192 else head_dim))
    made = [torch.randn(shape, generator=rng) for shape in shapes]
    return [(x * (1 + 3 * torch.rand(x.shape[3], generator=rng)) + x[:, :, :1]).to(dtype) for x in made]


@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("head_dim", [16, 48, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("of", INPUTS)
def test_as_the_cpu(device: str, of: torch.dtype, head_dim: int, options: dict[str, Any], rng: torch.Generator) -> None:
    for dtype, rows, keys in ((E4M3, 129, 700), (E5M2, 1, 1), (E4M3, 1000, 64)):
        plain = inputs(rng, of, head_dim, rows, keys)
        found = quantize(*(x.to(device) for x in plain), dtype=dtype, **options)
        assert_as_cpu(found, quantize_fp8(*plain, dtype=dtype, **options), not options["smooth_k"])


@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_many_blocks(device: str, options: dict[str, Any], rng: torch.Generator) -> None:
    """More than the CTAs have at once, so that statistics and writing take turns."""
    plain = [torch.randn(1, 16, 20000, 64, generator=rng).bfloat16() for _ in range(3)]
    plain[1] += 1
    found = quantize(*(x.to(device) for x in plain), **options)
    assert_as_cpu(found, quantize_fp8(*plain, **options), not options["smooth_k"])


@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sequences", [1, 5, 40, 1500])
def test_any_offsets(device: str, sequences: int, kind: str, rng: torch.Generator) -> None:
    rows, keys = (int(torch.randint(1, 3000, (), generator=rng)) for _ in range(2))
    plain = [torch.randn(n, h, 64, generator=rng).half() + 1 for n, h in ((rows, 4), (keys, 2), (keys, 2))]
    of = [bad_offsets(kind, sequences, total, rng) for total in (rows, keys)]
    on_device = [x.to(device) for x in (*plain, *of)]
    for options in OPTIONS[::3]:
        found = quantize(*on_device[:3], cu_seqlens_q=on_device[3], cu_seqlens_k=on_device[4], **options)
        expected = quantize_fp8(*plain, cu_seqlens_q=of[0], cu_seqlens_k=of[1], **options)
        assert_as_cpu(found, expected, not options["smooth_k"])


@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("case", range(40))
def test_random(device: str, case: int, rng: torch.Generator) -> None:
    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=rng))

    batch, heads_kv, group = draw(1, 4), draw(1, 4), draw(1, 4)
    head_dim, head_dim_v = 16 * draw(1, 17), 16 * draw(1, 17)
    rows, keys = draw(1, 600), draw(1, 600)
    shapes = ((batch, heads_kv * group, rows, head_dim), (batch, heads_kv, keys, head_dim))
    plain = [torch.randn(s, generator=rng) for s in (*shapes, (batch, heads_kv, keys, head_dim_v))]
    dtype = INPUTS[draw(0, 3)]
    options = {**OPTIONS[draw(0, len(OPTIONS))], "dtype": (E4M3, E5M2)[draw(0, 2)], "seed": draw(0, 1000)}
    # Of keys that are all alike nothing is left but the rounding of their mean.
    layouts = DISTINCT_LAYOUTS if options["smooth_k"] else LAYOUTS
    laid_out = [layouts[draw(0, len(layouts))].make((x * 10 ** draw(-3, 3)).to(dtype)) for x in plain]
    on_device = [_as_on(device, x) for x in laid_out]
    found, expected = quantize(*on_device, **options), quantize_fp8(*laid_out, **options)
    assert_as_cpu(found, expected, not options["smooth_k"])


def _as_on(device: str, x: torch.Tensor) -> torch.Tensor:
    """With the same strides, also those that make values repeat or leave gaps, and the same place in 16 bytes."""
    span = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
    storage = x.as_strided((x.storage_offset() + span,), (1,), 0)
    return storage.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_same_bits(device: str, options: dict[str, Any], rng: torch.Generator) -> None:
    """Also beside another stream's calls, which change who is the last of a group's CTAs."""
    q, k, v = (torch.randn(2, 8, 5000, 128, generator=rng).to(device, torch.bfloat16) for _ in range(3))
    expected = tensors(quantize(q, k, v, **options))
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(tensors(quantize_fp8(q, k, v, **options)))
        torch.cuda.synchronize()
        assert all(same_bits(one, expected) for one in found)


@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_graphs(device: str, options: dict[str, Any], rng: torch.Generator) -> None:
    """Replayed with other values and lengths."""
    q, k, v = (torch.zeros(2000, heads, 64, device=device, dtype=torch.float16) for heads in (4, 2, 2))
    of = torch.tensor([0, 500, 2000], device=device, dtype=torch.int32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = quantize_fp8(q, k, v, cu_seqlens_q=of, cu_seqlens_k=of, **options)
    for middle in (1, 128, 1990):
        of[1] = middle
        for x in (q, k, v):
            x.copy_(torch.randn(x.shape, generator=rng) + 0.5)
        for x in tensors(found):
            x.fill_(77)
        graph.replay()
        expected = quantize(q, k, v, cu_seqlens_q=of, cu_seqlens_k=of, **options)
        assert same_bits(tensors(found), tensors(expected))


@pytest.mark.parametrize("device", ["cuda"])
def test_offsets_past_31_bits(device: str, rng: torch.Generator) -> None:
    plain = [torch.randn(2, 2, 300, 64, generator=rng).bfloat16() for _ in range(3)]
    far = 2**31 + 64
    storage = torch.zeros(far + 4 * 300 * 64, dtype=torch.bfloat16, device=device)
    shape = (2, 2, 300, 64)
    layouts = [(far, 300 * 64, 64, 1), (300 * 64, far, 64, 1), (2 * 64, 64, 7_182_272, 1)]
    for x, strides in zip(plain, layouts, strict=True):
        spread = storage.as_strided(shape, strides).copy_(x)
        for options in ({"per": "head", "smooth_k": True}, {"per": "block", "smooth_k": False, "rotate": True}):
            found, expected = quantize_fp8(spread, spread, spread, **options), quantize_fp8(x, x, x, **options)
            same = [y.contiguous() for y in tensors(found)[:3]]
            assert_as_cpu((*(y.view(E4M3) for y in same), found[3]), expected, not options["smooth_k"])


@pytest.mark.parametrize("device", ["cuda"])
def test_compiled(device: str, rng: torch.Generator) -> None:
    q, k, v = (torch.randn(2, 4, 300, 64, generator=rng).to(device) for _ in range(3))
    compiled = torch.compile(lambda *x: quantize_fp8(*x, rotate=True), fullgraph=True)
    assert same_bits(tensors(compiled(q, k, v)), tensors(quantize_fp8(q, k, v, rotate=True)))

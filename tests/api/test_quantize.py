"""`flash_cute.quantize_fp8`: values, descales and the LSE's shift against float64, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from layouts import LAYOUTS, Layout
from numerics import nan_in_new_memory

import flash_cute
from flash_cute import Fp8Descales, quantize_fp8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
INPUTS = (torch.float16, torch.bfloat16, torch.float32)
Quantized = tuple[torch.Tensor, torch.Tensor, torch.Tensor, Fp8Descales]


def quantize(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Quantized:
    with nan_in_new_memory(q):
        return quantize_fp8(q, k, v, **options)


def inputs(
    device: str, rng: torch.Generator, dtype: torch.dtype = torch.float32, head_dim: int = 64, rows: int = 300
) -> tuple[torch.Tensor, ...]:
    """q, k and v of 4 and 2 heads, whose rows and channels differ in size, and whose channels have an offset."""
    shapes = ((2, 4, rows, head_dim), (2, 2, rows + 70, head_dim), (2, 2, rows + 70, head_dim))
    made = []
    for shape in shapes:
        x = torch.randn(shape, generator=rng)
        x *= torch.rand(shape[2], 1, generator=rng) + 0.1
        x = x * (3 * torch.rand(shape[3], generator=rng)) + 2 * torch.randn(shape[3], generator=rng)
        made.append(x.to(device, dtype))
    return tuple(made)


def nearest(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The finite values of a dtype nearest to float64 x; of two that are equally near the one with an even code."""
    codes = torch.arange(0x7F if dtype == E4M3 else 0x7C, dtype=torch.uint8)
    values = codes.view(dtype).double().to(x.device)  # ascending from 0
    above = torch.searchsorted(values, x.abs().contiguous()).clamp(1, len(values) - 1)
    to_below, to_above = x.abs() - values[above - 1], values[above] - x.abs()
    up = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    return torch.where(up, values[above], values[above - 1]).copysign(x)


def group_amax(x: torch.Tensor, heads_kv: int) -> torch.Tensor:
    return x.abs().unflatten(1, (heads_kv, -1)).amax((2, 3, 4))


def by_rows(descale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A descale of any shape, as one for each element of x."""
    if descale.dim() == 2:
        return descale.repeat_interleave(x.shape[1] // descale.shape[1], 1)[..., None, None].expand(x.shape)
    if descale.shape[1:] == (x.shape[1], x.shape[3]) and x.shape[2] > 128:
        return descale.unsqueeze(2).expand(x.shape)  # of v, by channel
    return descale.repeat_interleave(128, 2)[:, :, : x.shape[2], None].expand(x.shape)


def assert_nearest(x8: torch.Tensor, x: torch.Tensor, descale: torch.Tensor) -> None:
    """x / descale in float32 is rounded once more: where float64 is as near to two values, either is right."""
    exact = x.double() / by_rows(descale, x).double()
    wrong = x8.double() != nearest(exact, x8.dtype)
    tied = nearest(exact * (1 - 1e-6), x8.dtype) != nearest(exact * (1 + 1e-6), x8.dtype)
    assert not bool((wrong & ~tied).any())


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("of", INPUTS)
@pytest.mark.parametrize("per", ["head", "block"])
def test_values_and_descales(device: str, per: str, of: torch.dtype, dtype: torch.dtype, rng: torch.Generator) -> None:
    q, k, v = inputs(device, rng, of)
    q8, k8, v8, descales = quantize(q, k, v, dtype=dtype, per=per, smooth_k=False)
    assert descales.lse_shift is None
    wide = [x.float() for x in (q, k, v)]
    if per == "head":
        amax = [group_amax(x, 2) for x in wide]
    else:
        padded = [torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % 128)) for x in wide[:2]]
        amax = [x.abs().unflatten(2, (-1, 128)).amax((3, 4)) for x in padded] + [wide[2].abs().amax(2)]
    for x, x8, descale, most in zip(wide, (q8, k8, v8), descales[:3], amax, strict=True):
        assert x8.dtype == dtype and x8.shape == x.shape
        assert torch.equal(descale.cpu(), most.cpu() / LARGEST[dtype])  # CUDA multiplies by the inverse
        assert_nearest(x8, x, descale)


@pytest.mark.parametrize("per", ["head", "block"])
@pytest.mark.parametrize("rows", [1, 127, 128, 129, 500])
def test_mean_of_k(device: str, rows: int, per: str, rng: torch.Generator) -> None:
    q, k, v = inputs(device, rng, torch.bfloat16, rows=rows)
    _, k8, _, descales = quantize(q, k, v, per=per)
    mean = k.double().mean(2, keepdim=True)
    centered = k.double() - mean
    of_rows = by_rows(descales.k, k).double()
    error = (k8.double() * of_rows - centered).abs()
    assert bool((error <= centered.abs() * 2**-4 + of_rows * 2**-10 + 1e-5).all())
    most = centered.abs().amax((2, 3)) if per == "head" else None
    if most is not None:
        torch.testing.assert_close(descales.k.double(), most / 448, rtol=1e-5, atol=0)
    shift = (q.double().unflatten(1, (2, 2)) * mean.unsqueeze(2)).sum(-1).flatten(1, 2)
    torch.testing.assert_close(descales.lse_shift.double(), shift, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rotate", [False, True])
def test_lse_is_that_of_k(device: str, rotate: bool, rng: torch.Generator) -> None:
    q, k, v = inputs(device, rng, torch.bfloat16)
    q8, k8, _, descales = quantize(q, k, v, per="block", rotate=rotate)
    scale = q.shape[3] ** -0.5

    def lse(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (scale * q @ k.repeat_interleave(2, 1).transpose(2, 3)).logsumexp(3)

    found = lse(q8.double() * by_rows(descales.q, q), k8.double() * by_rows(descales.k, k))
    expected = lse(q.double(), k.double())
    size = expected.abs().mean()
    without, corrected = found - expected, found + scale * descales.lse_shift.double() - expected
    assert without.abs().mean() > 0.1 * size  # the mean matters here
    assert corrected.abs().mean() < 0.02 * size + 0.1  # what is left is the rounding of scores


@pytest.mark.parametrize("head_dim", [16, 32, 64, 96, 128, 192, 256])
def test_rotation_is_orthogonal(device: str, head_dim: int) -> None:
    """The unit vectors become rows of +-1 / sqrt(size), which float8 holds; q and k have the same rotation."""
    size = head_dim & -head_dim
    x = torch.eye(head_dim, device=device)[None, None]
    q8, k8, _, descales = quantize(x, x, x, rotate=True, smooth_k=False, seed=5)
    matrix = q8[0, 0].double() * descales.q.double()
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(head_dim, device=device).double(), rtol=0, atol=1e-6)
    parts = torch.block_diag(*[torch.ones(size, size)] * (head_dim // size)).bool().to(device)
    assert torch.equal(matrix != 0, parts)
    assert torch.equal(q8.float(), k8.float())
    other = quantize(x, x, x, rotate=True, smooth_k=False, seed=6)[0]
    assert not torch.equal(other.float(), q8.float())
    signs = [torch.equal(matrix[i].sign(), matrix[0].sign()) for i in range(1, size)]
    assert not any(signs)


def test_rotated_products(device: str, rng: torch.Generator) -> None:
    q, k, v = (torch.randn(1, 2, 256, 128, generator=rng).to(device) for _ in range(3))
    q8, k8, _, descales = quantize(q, k, v, rotate=True, smooth_k=False)
    found = (q8.double() * by_rows(descales.q, q)) @ (k8.double() * by_rows(descales.k, k)).transpose(2, 3)
    exact = q.double() @ k.double().transpose(2, 3)
    assert (found - exact).abs().mean() < 0.06 * exact.abs().mean()


def offsets_of(lengths: list[int], device: str, before: int = 0) -> torch.Tensor:
    return torch.tensor([before, *(before + torch.tensor(lengths).cumsum(0)).tolist()], dtype=torch.int32).to(device)


@pytest.mark.parametrize("per", ["head", "block"])
@pytest.mark.parametrize("rotate", [False, True])
def test_packed_as_dense(device: str, rotate: bool, per: str, rng: torch.Generator) -> None:
    """Bit for bit; rows of no sequence hold NaN, and become 0."""
    lengths_q, lengths_k = [5, 0, 128, 300, 1], [130, 17, 257, 0, 1]
    q, k, v = (torch.full((rows, heads, 64), math.nan, device=device) for rows, heads in ((450, 4), (420, 2), (420, 2)))
    of_q, of_k = offsets_of(lengths_q, device, 7), offsets_of(lengths_k, device, 3)
    q[7:441], k[3:408], v[3:408] = (
        torch.randn(n, h, 64, generator=rng).to(device) + 1 for n, h in ((434, 4), (405, 2), (405, 2))
    )
    options: dict[str, Any] = {"per": per, "rotate": rotate}
    if per == "block":
        options |= {"max_seqlen_q": 300, "max_seqlen_k": 257}
    packed = quantize(q, k, v, cu_seqlens_q=of_q, cu_seqlens_k=of_k, **options)
    for name, x in zip("qkv", packed[:3], strict=True):
        of = of_q if name == "q" else of_k
        assert not x[: of[0]].float().any() and not x[of[-1] :].float().any()
    assert not packed[3].lse_shift[:, :7].any() and not packed[3].lse_shift[:, 441:].any()
    options = {"per": per, "rotate": rotate}
    for b in range(5):
        rows, keys = slice(of_q[b], of_q[b + 1]), slice(of_k[b], of_k[b + 1])
        alone = [x[part].transpose(0, 1)[None] for x, part in ((q, rows), (k, keys), (v, keys))]
        dense = quantize(*alone, **options)
        for i, part in enumerate((rows, keys, keys)):
            assert torch.equal(dense[i][0].transpose(0, 1).float(), packed[i][part].float())
            one, all_of_them = dense[3][i][0], packed[3][i][b]
            if i < 2 and per == "block":
                assert bool((all_of_them[:, one.shape[1] :] == 1).all())
                all_of_them = all_of_them[:, : one.shape[1]]
            assert torch.equal(one, all_of_them)
        assert torch.equal(dense[3].lse_shift[0], packed[3].lse_shift[:, rows])


def test_rows_past_the_longest_are_nan(device: str, rng: torch.Generator) -> None:
    x = torch.randn(400, 2, 32, generator=rng).to(device)
    of = offsets_of([100, 300], device)
    q8, _, _, descales = quantize(x, x, x, per="block", cu_seqlens_q=of, cu_seqlens_k=of, max_seqlen_q=130)
    assert descales.q.shape == (2, 2, 2) and descales.k.shape == (2, 2, 4)
    assert bool(q8.float()[:356].isfinite().all()) and bool(q8.float()[356:].isnan().all())
    assert bool(descales.lse_shift[:, :356].isfinite().all()) and bool(descales.lse_shift[:, 356:].isnan().all())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts(device: str, layout: Layout, rng: torch.Generator) -> None:
    plain = inputs(device, rng, torch.bfloat16)
    laid_out = [layout.make(x) for x in plain]
    same = [x.contiguous() for x in laid_out]
    for per in ("head", "block"):
        found, expected = quantize(*laid_out, per=per, rotate=True), quantize(*same, per=per, rotate=True)
        for x, x8, y8 in zip(laid_out, found[:3], expected[:3], strict=True):
            assert torch.equal(x8.float(), y8.float())
            like = torch.empty_like(x) if x.stride(3) == 1 else torch.empty(x.shape, device="meta")
            assert x8.stride() == like.stride()
        assert all(torch.equal(a, b) for a, b in zip(found[3], expected[3], strict=True))


@pytest.mark.parametrize("per", ["head", "block"])
@pytest.mark.parametrize("smooth_k", [False, True])
def test_zeros(device: str, smooth_k: bool, per: str) -> None:
    x = torch.zeros(1, 2, 130, 32, device=device)
    *values, descales = quantize(x, x, x, per=per, smooth_k=smooth_k)
    assert not any(x8.float().any() for x8 in values)
    assert all(bool((descale == 1).all()) for descale in descales[:3])
    assert descales.lse_shift is None or not descales.lse_shift.any()


@pytest.mark.parametrize("per", ["head", "block"])
@pytest.mark.parametrize("smooth_k", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_not_finite(device: str, dtype: torch.dtype, smooth_k: bool, per: str, rng: torch.Generator) -> None:
    """Infinities saturate, NaN stays, and neither changes a descale; to a mean they count as 0."""
    plain = [torch.randn(1, 2, 200, 32, generator=rng).to(device) for _ in range(3)]
    bad = [x.clone() for x in plain]
    for x, y in zip(bad, plain, strict=True):
        for row, value in ((3, math.inf), (130, -math.inf), (131, math.nan)):
            x[0, 0, row, 5], y[0, 0, row, 5] = value, 0
    found = quantize(*bad, dtype=dtype, per=per, smooth_k=smooth_k)
    expected = quantize(*plain, dtype=dtype, per=per, smooth_k=smooth_k)
    for x8, y8 in zip(found[:3], expected[:3], strict=True):
        x, y = x8.float(), y8.float()
        assert x[0, 0, 3, 5] == LARGEST[dtype] and x[0, 0, 130, 5] == -LARGEST[dtype] and x[0, 0, 131, 5].isnan()
        x[0, 0, (3, 130, 131), 5] = y[0, 0, (3, 130, 131), 5]
        assert torch.equal(x, y)
    assert all(torch.equal(a, b) for a, b in zip(found[3][:3], expected[3][:3], strict=True))


@pytest.mark.parametrize("size", [1e-42, 1e-37, 1e-30, 1e30, 3e38])
def test_sizes_of_float32(device: str, size: float, rng: torch.Generator) -> None:
    x = (torch.rand(1, 1, 140, 16, generator=rng) * 2 - 1).to(device) * size
    q8, _, _, descales = quantize(x, x, x, smooth_k=False)
    assert bool(descales.q.isfinite().all()) and bool((descales.q >= 2**-126).all())
    error = (q8.double() * descales.q.double() - x.double()).abs().amax()
    assert error <= max(size / 16, 2.0**-136)


@pytest.mark.parametrize("shape", [(0, 2, 5), (2, 2, 0), (2, 0, 5)], ids=str)
def test_empty(device: str, shape: tuple[int, ...]) -> None:
    x = torch.zeros(*shape, 32, device=device)
    for per in ("head", "block"):
        q8, _, _, descales = quantize(x, x, x, per=per)
        assert q8.shape == x.shape and descales.lse_shift.shape == shape
        assert all(bool((descale == 1).all()) for descale in descales[:3])


def test_fakes_and_compile(rng: torch.Generator) -> None:
    q, k, v = inputs("cpu", rng)
    of = offsets_of([100, 200], "cpu")
    arguments = [(x, name, "float8_e4m3fn", per, 2, False, None, None, None, None) for x, name, per in (
        (q, "q", "block"), (k, "k", "head"), (v, "v", "channel"))]  # fmt: skip
    mean = torch.randn(2, 2, 64)
    arguments.append((k, "k", "float8_e5m2", "head", 2, True, 3, None, None, None))
    arguments.append((q, "q", "float8_e4m3fn", "head", 2, False, 3, mean, None, None))
    arguments.append((q[0].transpose(0, 1), "q", "float8_e4m3fn", "block", 2, False, 3, mean, of, 200))
    for one in arguments:
        torch.library.opcheck(torch.ops.flash_cute.quantize_fp8.default, one, test_utils="test_faketensor")

    def both(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q8, k8, v8, descales = quantize_fp8(q, k, v, per="block", rotate=True)
        return q8.float() * 2, k8, v8, *descales

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(q, k, v), both(q, k, v), strict=True):
        assert torch.equal(a.float(), b.float())


BAD: tuple[tuple[dict[str, Any], str], ...] = (
    ({"q": None}, "q: expected a torch.Tensor, got None"),
    ({"dtype": torch.float16}, "dtype: expected torch.float8_e4m3fn or torch.float8_e5m2, got torch.float16"),
    ({"per": "row"}, "per: expected 'head' or 'block', got 'row'"),
    ({"smooth_k": 1}, "smooth_k: expected False or True, got 1"),
    ({"rotate": None}, "rotate: expected False or True, got None"),
    ({"seed": 0.5}, "seed: expected a number of 64 bits, got 0.5"),
    ({"seed": 2**63}, f"seed: expected a number of 64 bits, got {2**63}"),
    ({"q": torch.zeros(2, 4, 5)}, "q: expected 4 dims (batch, heads, length, head_dim), got 3: (2, 4, 5)"),
    ({"k": torch.zeros(2, 2, 6, 16)}, "k: expected q's head dim 32, got 16"),
    ({"k": torch.zeros(1, 2, 6, 32)}, "k: expected q's batch size 2, got 1"),
    ({"v": torch.zeros(2, 1, 6, 32)}, "v: expected as many heads as k, 2, got 1"),
    ({"v": torch.zeros(2, 2, 7, 32)}, "v: expected k's length 6, got 7"),
    ({"q": torch.zeros(2, 3, 5, 32)}, "q: expected a number of heads that is a multiple of k's 2, got 3"),
    ({"v": torch.zeros(2, 2, 6, 24)}, "v: expected a head dim that is a multiple of 16 and at most 256, got 24"),
    ({"v": torch.zeros(2, 2, 6, 272)}, "v: expected a head dim that is a multiple of 16 and at most 256, got 272"),
    ({"q": torch.zeros(2, 4, 5, 32).double()}, "q: expected float16, bfloat16 or float32, got float64"),
    ({"v": torch.zeros(2, 2, 6, 32, device="meta")}, "v: expected q's device cpu, got meta"),
    ({"cu_seqlens_q": torch.zeros(2)}, "cu_seqlens_k: expected offsets beside cu_seqlens_q, got None"),
    ({"max_seqlen_q": 5}, "max_seqlen: expected None without cu_seqlens, got 5"),
    ({"max_seqlen_q": 5.0}, "max_seqlen_q: expected None or a number of rows, got 5.0"),
)


@pytest.mark.parametrize(("changes", "sentence"), BAD, ids=[sentence for _, sentence in BAD])
def test_refusals(changes: dict[str, Any], sentence: str) -> None:
    call: dict[str, Any] = {"q": torch.zeros(2, 4, 5, 32), "k": torch.zeros(2, 2, 6, 32), "v": torch.zeros(2, 2, 6, 32)}
    with pytest.raises(ValueError) as caught:
        quantize_fp8(**{**call, **changes})
    assert str(caught.value).splitlines()[0] == f"flash_cute: {sentence}"


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_gradients_are_refused(name: str) -> None:
    tensors = {x: torch.randn(1, 1, 4, 32, requires_grad=x == name) for x in "qkv"}
    with pytest.raises(ValueError, match=f"flash_cute: {name}: expected a tensor that does not require grad"):
        quantize_fp8(**tensors)
    with torch.no_grad():
        assert flash_cute.quantize_fp8(**tensors)[0].dtype == E4M3


PACKED_BAD: tuple[tuple[Any, str], ...] = (
    (torch.zeros(3), "cu_seqlens_q: expected int32, got float32"),
    (torch.zeros(2, 3, dtype=torch.int32), "cu_seqlens_q: expected the shape (sequences + 1,), got (2, 3)"),
    (torch.zeros(6, dtype=torch.int32)[::2], "cu_seqlens_q: expected a contiguous tensor, got a stride of 2"),
    ([0, 5], "cu_seqlens_q: expected a torch.Tensor, got list"),
)


@pytest.mark.parametrize(("offsets", "sentence"), PACKED_BAD, ids=[sentence for _, sentence in PACKED_BAD])
def test_packed_refusals(offsets: Any, sentence: str) -> None:
    x = torch.zeros(5, 2, 32)
    with pytest.raises(ValueError) as caught:
        if torch.is_tensor(offsets):
            torch.ops.flash_cute.quantize_fp8(x, "q", "float8_e4m3fn", "head", 2, False, None, None, offsets, None)
        else:
            quantize_fp8(x, x, x, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    assert str(caught.value).splitlines()[0] == f"flash_cute: {sentence}"

"""The gradients are exact: over instances, masks, dtypes, lengths, heads and strides, and through the LSE."""

from __future__ import annotations

import pytest
import torch
from cases import (
    CAUSAL,
    CPU_DTYPES,
    CUDA_DTYPES,
    EDGE_LENGTHS,
    HEADS,
    INSTANCE_HEAD_DIMS,
    LENGTHS,
    NATIVE_HEAD_DIMS,
    PADDED_HEAD_DIMS,
    SANITIZER_CASES,
    TINY_LENGTHS,
    Backward,
    Case,
    Causal,
    mask_name,
    params,
    sampled_dtypes,
)
from layouts import LAYOUTS, Layout, surrounded
from numerics import assert_gradients_match, bits, same_bits

import flash_cute

pytestmark = pytest.mark.kernel

ON_CUDA = [pytest.param("cuda", marks=pytest.mark.cuda)]
BOTH = pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])

CPU = list(sampled_dtypes((64,), TINY_LENGTHS + EDGE_LENGTHS + ((300, 129), (129, 300)), CPU_DTYPES))
CUDA = sorted({*sampled_dtypes(INSTANCE_HEAD_DIMS, LENGTHS, CUDA_DTYPES), *SANITIZER_CASES}, key=str)
CPU_HEAD_DIMS = list(sampled_dtypes((1, 3, 33, 80, 256, 320), ((65, 77),), CPU_DTYPES))
CUDA_HEAD_DIMS = list(sampled_dtypes(NATIVE_HEAD_DIMS + PADDED_HEAD_DIMS, ((113, 203),), CUDA_DTYPES))


def flow(q: torch.Tensor, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """What may flow back into out and lse of an attention of q: standard normal."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    dout = torch.randn(q.shape, generator=rng).to(q.device, q.dtype)
    return dout, torch.randn(q.shape[:3], generator=rng).to(q.device, wide)


@BOTH
@pytest.mark.parametrize(("device", "case"), params(cpu=CPU, cuda=CUDA))
def test_exact(device: str, case: Case, deterministic: bool, bwd: Backward, rng: torch.Generator) -> None:
    if device == "cpu" and not deterministic:
        pytest.skip("the CPU has one mode")
    q, k, v = case.inputs(device, rng)
    dout, dlse = flow(q, rng)
    given = bwd(dout, q, k, v, case.causal, dlse=dlse, deterministic=deterministic)
    assert_gradients_match(given, dout, q, k, v, case.causal, dlse=dlse)


@pytest.mark.parametrize(("device", "case"), params(cpu=CPU_HEAD_DIMS, cuda=CUDA_HEAD_DIMS))
def test_head_dims(device: str, case: Case, bwd: Backward, rng: torch.Generator) -> None:
    q, k, v = case.inputs(device, rng)
    dout, dlse = flow(q, rng)
    assert_gradients_match(bwd(dout, q, k, v, case.causal, dlse=dlse), dout, q, k, v, case.causal, dlse=dlse)


@BOTH
@pytest.mark.parametrize("causal", CAUSAL, ids=mask_name)
@pytest.mark.parametrize(("heads_q", "heads_kv"), [*HEADS, (16, 2)])
def test_grouped_heads(
    device: str,
    causal: Causal,
    heads_q: int,
    heads_kv: int,
    deterministic: bool,
    bwd: Backward,
    rng: torch.Generator,
) -> None:
    case = Case(64, 77, 131, causal, torch.bfloat16, 2, heads_q, heads_kv)
    q, k, v = case.inputs(device, rng)
    dout, _ = flow(q, rng)
    assert_gradients_match(bwd(dout, q, k, v, causal, deterministic=deterministic), dout, q, k, v, causal)


@pytest.mark.parametrize("head_dim", INSTANCE_HEAD_DIMS)
@pytest.mark.parametrize("device", ON_CUDA)
def test_grouped_heads_of_every_instance(device: str, head_dim: int, bwd: Backward, rng: torch.Generator) -> None:
    q, k, v = Case(head_dim, 200, 300, True, torch.float16, 2, 8, 2).inputs(device, rng)
    dout, dlse = flow(q, rng)
    given = bwd(dout, q, k, v, True, dlse=dlse, deterministic=True)
    assert_gradients_match(given, dout, q, k, v, True, dlse=dlse)


@pytest.mark.parametrize("device", ON_CUDA)
@pytest.mark.parametrize(
    "case",
    [
        Case(96, 200, 700, True, torch.bfloat16, 12, 16, 16),
        Case(96, 700, 500, True, torch.float16, 12, 24, 24),  # rows that see no key
        Case(128, 300, 650, "top_left", torch.bfloat16, 12, 16, 16),  # keys that no row sees
        Case(192, 200, 333, True, torch.bfloat16, 10, 20, 20),
        Case(256, 333, 260, "top_left", torch.float16, 12, 18, 18),
    ],
    ids=str,
)
def test_many_heads(device: str, case: Case, bwd: Backward, rng: torch.Generator) -> None:
    """Several waves of key tiles of few rows, which the deterministic sm80 kernel takes from the last to the first."""
    q, k, v = case.inputs(device, rng)
    dout, dlse = flow(q, rng)
    given = bwd(dout, q, k, v, case.causal, dlse=dlse, deterministic=True)
    assert_gradients_match(given, dout, q, k, v, case.causal, dlse=dlse)
    again = bwd(dout, q, k, v, case.causal, dlse=dlse, deterministic=True)
    assert same_bits(again, given)


@pytest.mark.sanitizer
@pytest.mark.parametrize("device", ON_CUDA)
def test_small(device: str, bwd: Backward, rng: torch.Generator) -> None:
    q, k, v = Case(64, 65, 65, heads_q=6, heads_kv=2).inputs(device, rng)
    dout, dlse = flow(q, rng)
    assert_gradients_match(bwd(dout, q, k, v, True, dlse=dlse), dout, q, k, v, True, dlse=dlse)


@pytest.mark.parametrize("scale", [1e-3, 0.5, 3.0])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_scale(device: str, scale: float, causal: Causal, bwd: Backward, rng: torch.Generator) -> None:
    q, k, v = Case(64, 113, 203, dtype=torch.bfloat16).inputs(device, rng)
    dout, dlse = flow(q, rng)
    given = bwd(dout, q, k, v, causal, scale=scale, dlse=dlse)
    assert_gradients_match(given, dout, q, k, v, causal, scale, dlse)


def test_only_the_lse(device: str, bwd: Backward, rng: torch.Generator) -> None:
    q, k, v = Case(64, 113, 203, heads_q=4).inputs(device, rng)
    _, dlse = flow(q, rng)
    zero = torch.zeros_like(q)
    dq, dk, dv = bwd(zero, q, k, v, True, dlse=dlse)
    assert_gradients_match((dq, dk, dv), zero, q, k, v, True, dlse=dlse)
    assert (dv == 0).all()
    assert dq.any() and dk.any()


def test_no_gradient_of_the_lse_is_one_of_zero(device: str, bwd: Backward, rng: torch.Generator) -> None:
    q, k, v = Case(64, 113, 203).inputs(device, rng)
    dout, dlse = flow(q, rng)
    given = bwd(dout, q, k, v, True, dlse=torch.zeros_like(dlse), deterministic=True)
    expected = bwd(dout, q, k, v, True, deterministic=True)
    if device == "cpu":  # computed in other ways
        assert_gradients_match(given, dout, q, k, v, True)
        assert_gradients_match(expected, dout, q, k, v, True)
    else:
        assert same_bits(given, expected)


@BOTH
@pytest.mark.parametrize(("len_q", "len_k"), [(130, 1), (200, 65), (300, 17), (129, 128)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rows_that_see_nothing(
    device: str, head_dim: int, len_q: int, len_k: int, deterministic: bool, bwd: Backward, rng: torch.Generator
) -> None:
    """Their gradient is 0, whatever flows into their LSE of -inf: NaN, for one, of a difference of two such."""
    q, k, v = Case(head_dim, len_q, len_k).inputs(device, rng)
    dout, dlse = flow(q, rng)
    dlse[:, :, : len_q - len_k] = torch.nan
    dq, dk, dv = bwd(dout, q, k, v, "bottom_right", dlse=dlse, deterministic=deterministic)
    assert (dq[:, :, : len_q - len_k] == 0).all()
    dlse[:, :, : len_q - len_k] = 0
    assert_gradients_match((dq, dk, dv), dout, q, k, v, "bottom_right", dlse=dlse)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_keys_that_no_row_sees(device: str, head_dim: int, bwd: Backward, rng: torch.Generator) -> None:
    q, k, v = Case(head_dim, 65, 333).inputs(device, rng)
    dout, dlse = flow(q, rng)
    given = bwd(dout, q, k, v, "top_left", dlse=dlse)
    assert all((x[:, :, 65:] == 0).all() for x in given[1:])
    assert_gradients_match(given, dout, q, k, v, "top_left", dlse=dlse)


@BOTH
@pytest.mark.parametrize("causal", CAUSAL, ids=mask_name)
@pytest.mark.parametrize(
    ("q_shape", "k_shape"),
    [
        ((2, 4, 130, 64), (2, 2, 0, 64)),
        ((2, 4, 0, 64), (2, 2, 7, 64)),
        ((2, 4, 0, 33), (2, 2, 7, 33)),
        ((0, 2, 5, 64), (0, 2, 7, 64)),
        ((2, 0, 5, 64), (2, 2, 7, 64)),
        ((0, 0, 0, 64), (0, 0, 0, 64)),
    ],
    ids=str,
)
def test_nothing_to_compute(
    device: str,
    causal: Causal,
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    deterministic: bool,
    bwd: Backward,
    rng: torch.Generator,
) -> None:
    q, k = (torch.randn(shape, device=device).half() for shape in (q_shape, k_shape))
    dout, dlse = flow(q, rng)
    for x, gradient in zip((q, k, k), bwd(dout, q, k, k, causal, dlse=dlse, deterministic=deterministic), strict=True):
        assert (gradient.shape, gradient.dtype) == (x.shape, x.dtype)
        assert (gradient == 0).all()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 33])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_strides_of_all(
    device: str, layout: Layout, head_dim: int, causal: Causal, bwd: Backward, rng: torch.Generator
) -> None:
    """Each of q, k, v and dout laid out so: as if contiguous. The gradients are laid out like empty_like."""
    q, k, v = Case(head_dim, 65, 77, heads_q=4).inputs(device, rng)
    dout, dlse = flow(q, rng)
    dout, q, k, v = (layout.make(x) for x in (dout, q, k, v))
    same = [x.clone(memory_format=torch.contiguous_format) for x in (dout, q, k, v)]
    given = bwd(dout, q, k, v, causal, dlse=dlse, deterministic=True)
    for x, y in zip(given, bwd(*same, causal, dlse=dlse, deterministic=True), strict=True):
        torch.testing.assert_close(x, y, rtol=0 if device == "cuda" else 1e-3, atol=0 if device == "cuda" else 1e-3)
    for x, gradient in zip((q, k, v), given, strict=True):
        assert gradient.stride() == torch.empty_like(x).stride()


@pytest.mark.parametrize("which", range(5), ids=["dout", "q", "k", "v", "out"])
@pytest.mark.parametrize("name", ["bnhd", "surrounded", "misaligned_storage", "strided_columns", "all_expanded"])
def test_strides_of_one(device: str, name: str, which: int, backend: str | None, rng: torch.Generator) -> None:
    layout = next(x for x in LAYOUTS if x.name == name)
    q, k, v = Case(96, 65, 77, dtype=torch.bfloat16).inputs(device, rng)
    out, lse = flash_cute.fwd(q, k, v, True, backend=backend)
    plain = [flow(q, rng)[0], q, k, v, out]
    given = [layout.make(x) if i == which else x for i, x in enumerate(plain)]
    same = [x.clone(memory_format=torch.contiguous_format) for x in given]
    options = {"deterministic": True, "backend": backend}
    expected = flash_cute.bwd(*same, lse, True, **options)
    for x, y in zip(flash_cute.bwd(*given, lse, True, **options), expected, strict=True):
        if device == "cuda":
            assert same_bits((x,), (y,))
        torch.testing.assert_close(x, y)


def test_rows_of_any_strides(device: str, backend: str | None, rng: torch.Generator) -> None:
    """lse and dlse are contiguous where autograd gives them; what is not is copied."""
    q, k, v = Case(64, 65, 77, heads_q=4).inputs(device, rng)
    out, lse = flash_cute.fwd(q, k, v, True, backend=backend)
    dout, dlse = flow(q, rng)
    options = {"deterministic": True, "backend": backend}
    expected = flash_cute.bwd(dout, q, k, v, out, lse, True, dlse=dlse, **options)
    for change in (
        lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
        lambda x: torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0],
    ):
        given = flash_cute.bwd(dout, q, k, v, out, change(lse), True, dlse=change(dlse), **options)
        assert same_bits(given, expected)
    one = torch.ones((), device=device)
    given = flash_cute.bwd(dout, q, k, v, out, lse, True, dlse=one.expand_as(dlse), **options)
    assert same_bits(given, flash_cute.bwd(dout, q, k, v, out, lse, True, dlse=torch.ones_like(dlse), **options))


@BOTH
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("len_q", "len_k"), [(1, 1), (63, 65), (113, 203), (129, 31)])
@pytest.mark.parametrize("head_dim", [64, 128, 72, 100])
def test_nan_round_every_input(
    device: str,
    head_dim: int,
    len_q: int,
    len_k: int,
    causal: Causal,
    deterministic: bool,
    bwd: Backward,
    rng: torch.Generator,
) -> None:
    q, k, v = Case(head_dim, len_q, len_k).inputs(device, rng)
    dout, dlse = flow(q, rng)
    given = bwd(*(surrounded(x) for x in (dout, q, k, v)), causal, dlse=dlse, deterministic=deterministic)
    assert_gradients_match(given, dout, q, k, v, causal, dlse=dlse)


@pytest.mark.sanitizer
@pytest.mark.parametrize("device", ON_CUDA)
@pytest.mark.parametrize("head_dim", [64, 72, 100, 256])
def test_nan_round_every_input_small(device: str, head_dim: int, bwd: Backward, rng: torch.Generator) -> None:
    q, k, v = Case(head_dim, 65, 77).inputs(device, rng)
    dout, dlse = flow(q, rng)
    given = bwd(*(surrounded(x) for x in (dout, q, k, v)), True, dlse=dlse, deterministic=True)
    assert_gradients_match(given, dout, q, k, v, True, dlse=dlse)


@pytest.mark.parametrize("which", ["q", "k", "v", "dout"])
def test_a_nan_stays_in_its_head(device: str, which: str, bwd: Backward, rng: torch.Generator) -> None:
    q, k, v = Case(64, 113, 203).inputs(device, rng)
    dout, _ = flow(q, rng)
    {"q": q, "k": k, "v": v, "dout": dout}[which][0, 1, 50, 7] = torch.nan
    given = bwd(dout, q, k, v)
    assert any(x[0, 1].isnan().any() for x in given)
    others = torch.ones(2, 2, dtype=torch.bool)
    others[0, 1] = False
    assert all(x[others].isfinite().all() for x in given)


def test_inputs_are_not_changed(device: str, backend: str | None, rng: torch.Generator) -> None:
    q, k, v = Case(64, 113, 203).inputs(device, rng)
    tensors = (flow(q, rng)[0], q, k, v, *flash_cute.fwd(q, k, v, True, backend=backend))
    before = [x.clone() for x in tensors]
    flash_cute.bwd(*tensors, True, backend=backend)
    assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))


def test_one_tensor_may_be_all(device: str, bwd: Backward, rng: torch.Generator) -> None:
    q, _, _ = Case(64, 130, 130).inputs(device, rng)
    assert_gradients_match(bwd(q, q, q, q, True), q, q, q, q, True)


def test_parts_of_the_keys_add_up(device: str, backend: str | None, rng: torch.Generator) -> None:
    """With out and lse of the whole, the gradients of two halves of the keys are those of the whole."""
    q, k, v = Case(64, 130, 256, dtype=torch.bfloat16).inputs(device, rng)
    out, lse = flash_cute.fwd(q, k, v, backend=backend)
    dout, dlse = flow(q, rng)
    halves = [
        flash_cute.bwd(dout, q, k[:, :, part], v[:, :, part], out, lse, dlse=dlse, backend=backend)
        for part in (slice(0, 128), slice(128, 256))
    ]
    whole = (halves[0][0] + halves[1][0], *(torch.cat([halves[0][i], halves[1][i]], 2) for i in (1, 2)))
    assert_gradients_match(whole, dout, q, k, v, dlse=dlse)


@pytest.mark.parametrize("device", ON_CUDA)
def test_training_mode_of_autograd_is_the_operator(device: str, backend: str | None, rng: torch.Generator) -> None:
    q, k, v = (x.requires_grad_() for x in Case(128, 200, 300, heads_q=4).inputs(device, rng))
    dout, dlse = flow(q, rng)
    out, lse = flash_cute.attention(q, k, v, True, return_lse=True, deterministic=True, backend=backend)
    given = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    with torch.no_grad():
        expected = flash_cute.bwd(dout, q, k, v, out, lse, True, dlse=dlse, deterministic=True, backend=backend)
    assert all(torch.equal(bits(x), bits(y)) for x, y in zip(given, expected, strict=True))

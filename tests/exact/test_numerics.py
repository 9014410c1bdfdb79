"""The tests can fail: the oracle is right by independent means, and the comparison catches wrong results."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from cases import CAUSAL, CPU_DTYPES, HEADS, Case, Causal, Inputs, mask_name
from numerics import ABSOLUTE, gradient_mismatches, mismatches, nan_in_new_memory, visible

from flash_cute import reference

Result = tuple[torch.Tensor, torch.Tensor]


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: Causal, scale: float) -> Result:
    """Attention as the contract words it, a row at a time in Python's own arithmetic."""
    (batch, heads, len_q, _), (_, heads_kv, len_k, dv) = q.shape, v.shape
    out = torch.zeros(batch, heads, len_q, dv, dtype=torch.float64)
    lse = torch.full((batch, heads, len_q), -math.inf, dtype=torch.float64)
    last = {"none": len_k - 1, "top_left": 0, "bottom_right": len_k - len_q}[mask_name(causal)]
    for b, h, i in itertools.product(range(batch), range(heads), range(len_q)):
        kv = h // (heads // heads_kv)
        end = last if not causal else i + last
        scores = [
            scale * math.fsum((q[b, h, i].double() * k[b, kv, j].double()).tolist()) for j in range(len_k) if j <= end
        ]
        if not scores:
            continue
        peak = max(scores)
        weights = [math.exp(s - peak) for s in scores]
        lse[b, h, i] = peak + math.log(math.fsum(weights))
        for j, weight in enumerate(weights):
            out[b, h, i] += weight / math.fsum(weights) * v[b, kv, j].double()
    return out, lse


@pytest.mark.parametrize("causal", CAUSAL, ids=mask_name)
@pytest.mark.parametrize(("len_q", "len_k"), [(1, 1), (3, 7), (7, 3), (5, 5), (4, 0)])
def test_oracle_is_the_definition(causal: Causal, len_q: int, len_k: int, rng: torch.Generator) -> None:
    case = Case(8, len_q, len_k, dtype=torch.float64, heads_q=4, heads_kv=2)
    q, k, v = case.inputs("cpu", rng)
    out, lse = reference.attention(q, k, v, causal, 0.7)
    expected_out, expected_lse = by_hand(q, k, v, causal, 0.7)
    torch.testing.assert_close(out, expected_out, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", CAUSAL, ids=mask_name)
@pytest.mark.parametrize(("heads_q", "heads_kv"), HEADS)
def test_oracle_agrees_with_sdpa(causal: Causal, heads_q: int, heads_kv: int, rng: torch.Generator) -> None:
    case = Case(16, 33, 65, causal, torch.float64, 2, heads_q, heads_kv)
    q, k, v = case.inputs("cpu", rng)
    out, _ = reference.attention(q, k, v, causal, None)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=visible(33, 65, causal), enable_gqa=True
        )
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", CPU_DTYPES, ids=str)
@pytest.mark.parametrize("causal", CAUSAL, ids=mask_name)
@pytest.mark.parametrize(("len_q", "len_k"), [(1, 1), (65, 127), (127, 65), (300, 300)])
def test_comparison_accepts_the_truth_rounded(
    dtype: torch.dtype, causal: Causal, len_q: int, len_k: int, rng: torch.Generator
) -> None:
    q, k, v = Case(64, len_q, len_k, causal, dtype).inputs("cpu", rng)
    out, lse = reference.attention(q, k, v, causal, None)
    lse = lse.to(torch.promote_types(dtype, torch.float32))
    assert mismatches(out.to(dtype), lse, q, k, v, causal) == []


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: Causal, **kw: float) -> Result:
    out, lse = reference.attention(q, k, v, causal, kw.get("scale"))
    return out.to(q.dtype), lse.float()


def _one_column_too_many(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: Causal) -> Result:
    """The mask's diagonal one column too far to the right."""
    len_q, len_k = q.shape[2], k.shape[2]
    diagonal = (0 if causal == "top_left" else len_k - len_q) + 1
    seen = torch.ones(len_q, len_k, dtype=torch.bool).tril(diagonal)
    scores = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~seen, -math.inf)
    out = scores.softmax(-1).nan_to_num(nan=0.0) @ v.double()
    return out.to(q.dtype), scores.logsumexp(-1).float()


def _one_key_dropped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: Causal) -> Result:
    return _attend(q, k[:, :, 1:], v[:, :, 1:], causal)


def _one_value_wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: Causal) -> Result:
    wrong = v.clone()
    wrong[:, :, 0] = v[:, :, 1]
    return _attend(q, k, wrong, causal)


def _scale_off(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: Causal) -> Result:
    return _attend(q, k, v, causal, scale=1.01 / math.sqrt(q.shape[-1]))


def _heads_swapped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: Causal) -> Result:
    return _attend(q, k.flip(1), v.flip(1), causal)


def _base_two_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: Causal) -> Result:
    out, lse = _attend(q, k, v, causal)
    return out, lse / math.log(2)


def _one_row_not_written(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: Causal) -> Result:
    out, lse = _attend(q, k, v, causal)
    out[-1, -1, -1] = math.nan
    return out, lse


MISTAKES: tuple[Callable[..., Result], ...] = (
    _one_key_dropped,
    _one_value_wrong,
    _scale_off,
    _heads_swapped,
    _base_two_lse,
    _one_row_not_written,
)


def _inputs(len_q: int, len_k: int, rng: torch.Generator) -> Inputs:
    return Case(64, len_q, len_k, dtype=torch.bfloat16).inputs("cpu", rng)


@pytest.mark.parametrize(("len_q", "len_k"), [(2, 3), (64, 64), (113, 203), (512, 1024)])
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.__name__.strip("_"))
def test_comparison_catches(mistake: Callable[..., Result], len_q: int, len_k: int, rng: torch.Generator) -> None:
    q, k, v = _inputs(len_q, len_k, rng)
    assert mismatches(*mistake(q, k, v, False), q, k, v, False)


@pytest.mark.parametrize(("len_q", "len_k"), [(2, 3), (64, 64), (113, 203), (512, 1024)])
@pytest.mark.parametrize("causal", CAUSAL[1:], ids=mask_name)
def test_comparison_catches_a_shifted_diagonal(causal: Causal, len_q: int, len_k: int, rng: torch.Generator) -> None:
    q, k, v = _inputs(len_q, len_k, rng)
    assert mismatches(*_one_column_too_many(q, k, v, causal), q, k, v, causal)


def test_comparison_catches_the_other_alignment(rng: torch.Generator) -> None:
    q, k, v = _inputs(113, 203, rng)
    assert mismatches(*_attend(q, k, v, "top_left"), q, k, v, "bottom_right")
    assert mismatches(*_attend(q, k, v, "bottom_right"), q, k, v, "top_left")


def test_comparison_catches_a_wrong_form(rng: torch.Generator) -> None:
    q, k, v = _inputs(5, 7, rng)
    out, lse = _attend(q, k, v, False)
    assert mismatches(out, lse, q, k, v) == []
    assert mismatches(out.float(), lse, q, k, v)
    assert mismatches(out, lse.double(), q, k, v)
    assert mismatches(out[:, :, 1:], lse, q, k, v)
    assert mismatches(out, lse[..., None], q, k, v)


def test_new_memory_is_nan_inside_the_context(device: str) -> None:
    q = torch.zeros(2, 3, 5, 8, device=device)
    with nan_in_new_memory(q):
        assert torch.empty_like(q).isnan().all()
        assert torch.empty(7, device=device).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def _problem(
    len_q: int, len_k: int, dtype: torch.dtype, rng: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dout, q, k, v, dlse, with grouped heads."""
    q, k, v = Case(64, len_q, len_k, dtype=dtype, heads_q=4).inputs("cpu", rng)
    dout = torch.randn(q.shape, generator=rng).to(dtype)
    return dout, q, k, v, torch.randn(q.shape[:3], generator=rng, dtype=torch.promote_types(dtype, torch.float32))


@pytest.mark.parametrize("causal", CAUSAL, ids=mask_name)
@pytest.mark.parametrize(("len_q", "len_k"), [(1, 1), (3, 7), (7, 3), (5, 0), (0, 5)])
def test_gradient_oracle_is_the_derivative(causal: Causal, len_q: int, len_k: int, rng: torch.Generator) -> None:
    """Against central differences of the oracle of the forward, in a random direction of each input."""
    case = Case(8, len_q, len_k, dtype=torch.float64, heads_q=4)
    inputs = list(case.inputs("cpu", rng))
    blind = ~visible(len_q, len_k, causal).any(-1)
    dout, dlse = (torch.randn(shape, generator=rng, dtype=torch.float64) for shape in ((2, 4, len_q, 8), (2, 4, len_q)))

    def loss(x: list[torch.Tensor]) -> float:
        out, lse = reference.attention(x[0], x[1], x[2], causal, 0.7)
        return float((out * dout).sum() + (lse * dlse).masked_fill(blind, 0).sum())

    gradients = reference.gradients(dout, inputs[0], inputs[1], inputs[2], causal, 0.7, dlse)
    assert not gradients[0][:, :, blind].any()
    for i, gradient in enumerate(gradients):
        step = 1e-5 * torch.randn(inputs[i].shape, generator=rng, dtype=torch.float64)
        ahead, behind = ([x + sign * step if j == i else x for j, x in enumerate(inputs)] for sign in (1, -1))
        expected = (loss(ahead) - loss(behind)) / 2
        assert float((gradient * step).sum()) == pytest.approx(expected, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("dtype", CPU_DTYPES, ids=str)
@pytest.mark.parametrize("causal", CAUSAL, ids=mask_name)
@pytest.mark.parametrize(("len_q", "len_k"), [(1, 1), (65, 127), (127, 65)])
def test_comparison_accepts_true_gradients_rounded(
    dtype: torch.dtype, causal: Causal, len_q: int, len_k: int, rng: torch.Generator
) -> None:
    dout, q, k, v, dlse = _problem(len_q, len_k, dtype, rng)
    dq, dk, dv = (x.to(dtype) for x in reference.gradients(dout, q, k, v, causal, None, dlse))
    assert gradient_mismatches((dq, dk, dv), dout, q, k, v, causal, None, dlse) == []


Tensors = tuple[torch.Tensor, ...]


def _dlse_dropped(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dlse: torch.Tensor) -> Tensors:
    return reference.gradients(dout, q, k, v)


def _delta_dropped(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dlse: torch.Tensor
) -> Tensors:
    """dS = P * dP: what a delta of 0 gives."""
    out, _ = reference.attention(q, k, v)
    return reference.gradients(dout, q, k, v, False, None, dlse + (out * dout).sum(-1))


def _dq_without_scale(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dlse: torch.Tensor
) -> Tensors:
    dq, dk, dv = reference.gradients(dout, q, k, v, False, None, dlse)
    return dq * 8, dk, dv


def _one_head_of_a_group_missing(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dlse: torch.Tensor
) -> Tensors:
    mask = torch.tensor([1.0, 1.0, 1.0, 0.0])[:, None, None]
    dq, _, _ = reference.gradients(dout, q, k, v, False, None, dlse)
    _, dk, dv = reference.gradients(dout * mask, q, k, v, False, None, dlse * mask[..., 0])
    return dq, dk, dv


def _last_keys_missing_in_dq(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dlse: torch.Tensor
) -> Tensors:
    _, dk, dv = reference.gradients(dout, q, k, v, False, None, dlse)
    less = k.clone()
    less[:, :, -1] = 0
    weights = (q.double() @ k.double().repeat_interleave(2, 1).mT / 8).softmax(-1)
    delta = (reference.attention(q, k, v)[0] * dout).sum(-1) - dlse
    ds = weights * (dout.double() @ v.double().repeat_interleave(2, 1).mT - delta.unsqueeze(-1))
    return ds @ less.double().repeat_interleave(2, 1) / 8, dk, dv


def _dv_of_one_key_not_written(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dlse: torch.Tensor
) -> Tensors:
    dq, dk, dv = reference.gradients(dout, q, k, v, False, None, dlse)
    dv[-1, -1, -1] = math.nan
    return dq, dk, dv


GRADIENT_MISTAKES: tuple[Callable[..., Tensors], ...] = (
    _dlse_dropped,
    _delta_dropped,
    _dq_without_scale,
    _one_head_of_a_group_missing,
    _last_keys_missing_in_dq,
    _dv_of_one_key_not_written,
)


@pytest.mark.parametrize(("len_q", "len_k"), [(64, 64), (113, 203)])
@pytest.mark.parametrize("mistake", GRADIENT_MISTAKES, ids=lambda m: m.__name__.strip("_"))
def test_comparison_catches_wrong_gradients(
    mistake: Callable[..., Tensors], len_q: int, len_k: int, rng: torch.Generator
) -> None:
    dout, q, k, v, dlse = _problem(len_q, len_k, torch.bfloat16, rng)
    dq, dk, dv = (x.bfloat16() for x in mistake(dout, q, k, v, dlse))
    assert gradient_mismatches((dq, dk, dv), dout, q, k, v, False, None, dlse)


@pytest.mark.parametrize("causal", CAUSAL[1:], ids=mask_name)
def test_comparison_catches_gradients_of_the_other_alignment(causal: Causal, rng: torch.Generator) -> None:
    dout, q, k, v, dlse = _problem(113, 203, torch.bfloat16, rng)
    other = "top_left" if causal == "bottom_right" else "bottom_right"
    dq, dk, dv = (x.bfloat16() for x in reference.gradients(dout, q, k, v, other, None, dlse))
    assert gradient_mismatches((dq, dk, dv), dout, q, k, v, causal, None, dlse)


def test_comparison_knows_how_float32_sums_round(rng: torch.Generator) -> None:
    """With one key per row dS is the difference of two sums of the same products: nothing but their roundings."""
    dout, q, k, v, _ = _problem(65, 1, torch.float16, rng)
    dout = 100 * dout
    products = dout.float() * v.float().repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    order = torch.randperm(products.shape[-1], generator=rng)
    ds = functools.reduce(torch.add, products.unbind(-1))  # one after the other, in float32
    ds = ds - functools.reduce(torch.add, products[..., order].unbind(-1))
    keys = k.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    dq = ds[..., None] * keys / math.sqrt(q.shape[-1])
    _, dk, dv = (x.half() for x in reference.gradients(dout, q, k, v))
    assert float(dq.abs().max()) > ABSOLUTE
    assert gradient_mismatches((dq.half(), dk, dv), dout, q, k, v) == []
    assert gradient_mismatches((100 * dq.half(), dk, dv), dout, q, k, v)


def test_comparison_catches_gradients_of_a_wrong_form(rng: torch.Generator) -> None:
    dout, q, k, v, _ = _problem(5, 7, torch.bfloat16, rng)
    dq, dk, dv = (x.bfloat16() for x in reference.gradients(dout, q, k, v))
    assert gradient_mismatches((dq, dk, dv), dout, q, k, v) == []
    assert gradient_mismatches((dq.float(), dk, dv), dout, q, k, v)
    assert gradient_mismatches((dq, dk[:, :, 1:], dv), dout, q, k, v)

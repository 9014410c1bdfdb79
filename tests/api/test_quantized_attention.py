"""`attention(quantize="fp8")`: quantisation and attention of float8 in one call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from numerics import same_bits

import flash_cute

OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True, "scale": 0.3},
    {"window": (20, 0)},
    {"softcap": 3.0},
    {"sinks": True},
]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def qkv(request: pytest.FixtureRequest, rng: torch.Generator) -> list[torch.Tensor]:
    """bfloat16, with an offset in k's channels, as trained models have it."""
    if request.param == "cuda" and not flash_cute.backends()["sm90"]:
        pytest.skip("float8 needs a GPU of compute capability 9.0")
    tensors = [torch.randn(2, heads, 200, 64, generator=rng) for heads in (4, 2, 2)]
    tensors[1] += 3 * torch.randn(1, 2, 1, 64, generator=rng)
    return [x.to(torch.bfloat16).to(request.param) for x in tensors]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_is_attention_of_the_quantised(qkv: list[torch.Tensor], options: dict[str, Any]) -> None:
    """The same bits as by two calls, and near attention of q, k and v themselves."""
    q, k, v = qkv
    if "sinks" in options:
        options = {"sinks": torch.linspace(-1, 1, 4, device=q.device)}
    out, lse = flash_cute.attention(q, k, v, quantize="fp8", return_lse=True, **options)
    smooth_k = "softcap" not in options and "sinks" not in options
    q8, k8, v8, d = flash_cute.quantize_fp8(q, k, v, smooth_k=smooth_k)
    descales = {"descale_q": d.q, "descale_k": d.k, "descale_v": d.v}
    two_calls = flash_cute.attention(q8, k8, v8, out_dtype=q.dtype, **descales, **options)
    assert out.dtype == q.dtype and same_bits((out,), (two_calls,))
    assert same_bits((flash_cute.attention(q, k, v, quantize="fp8", **options),), (out,))

    causal = options.pop("causal", False)
    true_out, true_lse = flash_cute.reference.attention(q, k, v, causal, **options)
    # Without the mean of k taken out, up to 0.1 and 0.5 of 60 seeds.
    assert ((out.double() - true_out).norm() / true_out.norm()) < 0.2
    assert (lse.double() - true_lse).abs().max() < 1
    assert (lse.double() - true_lse).mean().abs() < 0.02  # a forgotten mean of k would be in all


def test_packed_is_dense(qkv: list[torch.Tensor]) -> None:
    q, k, v = (x[:1].transpose(1, 2)[0] for x in qkv)
    offsets = torch.tensor([0, 70, 200], dtype=torch.int32, device=q.device)
    out, lse = flash_cute.varlen_attention(q, k, v, offsets, offsets, causal=True, quantize="fp8", return_lse=True)
    for rows in (slice(0, 70), slice(70, 200)):
        alone = [x[:1, :, rows] for x in qkv]
        expected, of_lse = flash_cute.attention(*alone, causal=True, quantize="fp8", return_lse=True)
        torch.testing.assert_close(out[rows].transpose(0, 1), expected[0], atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse[:, rows], of_lse[0], atol=1e-3, rtol=1e-3)


def test_what_a_sequence_does_not_use_does_not_count(qkv: list[torch.Tensor]) -> None:
    """Not for its factors, nor for k's mean: rows past the used ones are NaN in one call, and large in another."""
    q, k, v = (x[:1].transpose(1, 2)[0].contiguous() for x in qkv)
    offsets = torch.tensor([0, 70, 200], dtype=torch.int32, device=q.device)
    used_q, used_k = (torch.tensor(x, dtype=torch.int32, device=q.device) for x in ((70, 90), (33, 130)))
    results = []
    for unused in (0.0, 1e4, torch.nan):
        q_now, (k_now, v_now) = q.clone(), (k.clone(), v.clone())
        q_now[160:] = k_now[33:70] = v_now[33:70] = unused
        options = {"seqused_q": used_q, "seqused_k": used_k, "quantize": "fp8", "return_lse": True}
        results.append(flash_cute.varlen_attention(q_now, k_now, v_now, offsets, offsets, **options))
    out, lse = results[0]
    assert all(same_bits(results[0], other) for other in results[1:])
    assert (out[160:] == 0).all() and (lse[:, 160:] == -torch.inf).all()
    for rows, keys in ((slice(0, 70), slice(0, 33)), (slice(70, 160), slice(70, 200))):
        alone = (qkv[0][:1, :, rows], *(x[:1, :, keys] for x in qkv[1:]))
        expected, of_lse = flash_cute.attention(*alone, quantize="fp8", return_lse=True)
        torch.testing.assert_close(out[rows].transpose(0, 1), expected[0], atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse[:, rows], of_lse[0], atol=1e-3, rtol=1e-3)
    with pytest.raises(ValueError, match="seqused_k: expected"):
        flash_cute.varlen_attention(q, k, v, offsets, offsets, seqused_k=used_k.long(), quantize="fp8")
    with pytest.raises(ValueError, match="seqused_q: expected"):
        flash_cute.varlen_attention(q, k, v, offsets, offsets, seqused_q=used_q[:1], quantize="fp8")


def test_refusals(qkv: list[torch.Tensor]) -> None:
    q, k, v = qkv
    with pytest.raises(ValueError, match="quantize: expected None or 'fp8', got 'int8'"):
        flash_cute.attention(q, k, v, quantize="int8")
    with pytest.raises(ValueError, match="descale_k: expected None with quantize='fp8'"):
        flash_cute.attention(q, k, v, quantize="fp8", descale_k=torch.ones((), device=q.device))
    with pytest.raises(NotImplementedError, match="q requires grad"):
        flash_cute.attention(q.requires_grad_(), k, v, quantize="fp8")
    with pytest.raises(ValueError, match="expected float16, bfloat16 or float32, got float8_e4m3fn"):
        flash_cute.attention(*[x.detach().to(torch.float8_e4m3fn) for x in (q, k, v)], quantize="fp8")

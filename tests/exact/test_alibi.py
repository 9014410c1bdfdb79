"""ALiBi: slope * distance is subtracted from a score; a slope per head, or per batch and head."""

from __future__ import annotations

import pytest
import torch
from cases import CAUSAL, Backward, Case, Causal, Forward, mask_name, score
from checks import assert_exact, inputs_and_options, on_each_device
from numerics import distances, same_bits, visible

import flash_cute

CASES = [
    *(
        Case(64, len_q, len_k, causal, torch.float32, heads_q=4, slopes=slopes)
        for len_q, len_k in ((1, 1), (1, 200), (65, 129), (129, 65), (300, 300))
        for causal in CAUSAL
        for slopes in ("head", "batch")
    ),
    *(
        Case(head_dim, 113, 203, True, dtype, slopes="batch")
        for head_dim in (32, 128, 256)
        for dtype in (torch.float16, torch.bfloat16)
    ),
    Case(128, 203, 113, "top_left", torch.float64, slopes="head"),
    Case(64, 300, 300, dtype=torch.float32, window=(40, 5), slopes="batch", batch=3),
]


@pytest.mark.kernel
@pytest.mark.parametrize(("device", "case"), on_each_device(CASES))
@pytest.mark.parametrize("dlse", [False, True])
def test_exact(
    device: str, case: Case, dlse: bool, backend: str | None, fwd: Forward, bwd: Backward, rng: torch.Generator
) -> None:
    assert_exact(case, device, fwd, bwd, rng, dlse=dlse, backend=backend)


@pytest.mark.parametrize("causal", CAUSAL, ids=mask_name)
@pytest.mark.parametrize(("len_q", "len_k"), [(7, 7), (5, 9), (9, 5)])
def test_it_is_a_bias_of_scaled_dot_product_attention(
    len_q: int, len_k: int, causal: Causal, rng: torch.Generator
) -> None:
    q, k, v = Case(16, len_q, len_k, dtype=torch.float64).inputs("cpu", rng)
    slopes = torch.tensor([0.5, 2.0])
    seen = visible(len_q, len_k, causal)
    bias = (-slopes[:, None, None] * distances(len_q, len_k, causal)).double().masked_fill(~seen, -torch.inf)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    expected = expected.masked_fill(~seen.any(-1)[:, None], 0)
    given = flash_cute.attention(q, k, v, causal, alibi_slopes=slopes)
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-12)


@pytest.mark.kernel
def test_per_batch_is_per_head_where_batches_agree(
    device: str, backend: str | None, fwd: Forward, bwd: Backward, rng: torch.Generator
) -> None:
    """Strides of any kind, too."""
    inputs, options = inputs_and_options(Case(64, 65, 129, heads_q=4, slopes="head"), device, rng)
    slopes = options["alibi_slopes"]
    for other in (slopes.expand(2, 4), slopes.repeat(2, 1), slopes.repeat_interleave(3)[::3]):
        assert same_bits(fwd(*inputs, True, alibi_slopes=other), fwd(*inputs, True, **options))
        given = bwd(inputs[0], *inputs, True, alibi_slopes=other, deterministic=True)
        assert same_bits(given, bwd(inputs[0], *inputs, True, deterministic=True, **options))


@pytest.mark.kernel
def test_a_steep_slope_leaves_the_nearest_key(
    device: str, backend: str | None, fwd: Forward, rng: torch.Generator
) -> None:
    q, k, v = Case(64, 65, 129).inputs(device, rng)
    slopes = torch.full((2,), 1000.0, device=device)
    out, _ = fwd(q, k, v, alibi_slopes=slopes)
    assert torch.equal(out, v[:, :, 129 - 65 :])
    out, lse = fwd(q, k, v, "top_left", alibi_slopes=slopes)
    assert torch.equal(out, v[:, :, :65])
    diagonal = (q.double() * k[:, :, :65].double()).sum(-1) / 8
    torch.testing.assert_close(lse.double(), diagonal, rtol=1e-4, atol=1e-4)


def test_gradcheck(rng: torch.Generator) -> None:
    leaves = [x.requires_grad_() for x in Case(6, 5, 7, dtype=torch.float64, heads_q=4).inputs("cpu", rng)]
    slopes = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8]])
    assert torch.autograd.gradcheck(lambda *x: flash_cute.fwd(*x, True, alibi_slopes=slopes), leaves)


@pytest.mark.parametrize("way", ["attention", "fwd", "operator", "func", "compile", "bwd"])
def test_there_is_no_gradient_of_slopes(way: str, rng: torch.Generator) -> None:
    """Asking for one raises; slopes that are a parameter serve where no gradient is asked for."""
    q, k, v = Case(16, 5, 7, dtype=torch.float32, heads_q=4).inputs("cpu", rng)
    slopes = torch.rand(4, requires_grad=True)

    def attend(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = flash_cute.attention(q, k, v, alibi_slopes=x)
        return out

    sentence = "alibi_slopes: expected a tensor that does not require grad, got one that does"
    with pytest.raises(Exception, match=sentence) as caught:
        if way == "attention":
            attend(slopes)
        elif way == "fwd":
            flash_cute.fwd(q, k, v, alibi_slopes=slopes)
        elif way == "operator":
            torch.ops.flash_cute.fwd(q, k, v, *score(alibi_slopes=slopes), "auto")
        elif way == "func":
            torch.func.grad(lambda x: attend(x).sum())(slopes.detach())
        elif way == "compile":
            torch._dynamo.reset()
            torch.compile(attend, backend="aot_eager", fullgraph=True)(slopes)
        else:
            out, lse = flash_cute.fwd(q, k, v, alibi_slopes=slopes.detach())
            flash_cute.bwd(out, q, k, v, out, lse, alibi_slopes=slopes)
    assert way == "compile" or isinstance(caught.value, ValueError)
    with torch.no_grad():
        assert same_bits((attend(slopes),), (attend(slopes.detach()),))

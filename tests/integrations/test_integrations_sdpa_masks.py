"""An `attn_mask` of scaled_dot_product_attention, of any shape: served as a matrix, or PyTorch's and counted."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from numerics import assert_gradients_match, assert_matches, same_bits

import flash_cute
from flash_cute import Mask
from flash_cute.integrations import sdpa

pytestmark = pytest.mark.usefixtures("sdpa_counters")

PYTORCHS = F.scaled_dot_product_attention  # as a module has it that was imported before enable()
DTYPES = {"cpu": torch.float64, "cuda": torch.float16}

# What broadcasts to (B, H, L, S), B 2 and H 4: of each dim whether it is the whole one. "+": expanded.
SHAPES = ("LS", "1LS", "HLS", "11LS", "B1LS", "1HLS", "BHLS", "L1", "B1L1", "1HL1", "1S", "B11S", "BH1S", "11", "B1LS+")


def tensors_of(
    device: str, rng: torch.Generator, lengths: tuple[int, int], heads: tuple[int, int] = (4, 4), dtype: Any = None
) -> list[torch.Tensor]:
    """query, key and value of head dim 64, that require grad, and the gradient of out."""
    shapes = ((2, heads[0], lengths[0], 64), *((2, heads[1], lengths[1], 64),) * 2)
    made = [torch.randn(x, generator=rng, dtype=torch.float64).to(device, dtype or DTYPES[device]) for x in shapes]
    return [*(x.requires_grad_() for x in made), torch.randn(shapes[0], generator=rng).to(made[0])]


def draw(name: str, lengths: tuple[int, int], rng: torch.Generator, device: str) -> torch.Tensor:
    """A mask with rows that see nothing and keys that nobody sees, where it has rows and keys."""
    rows, keys = lengths
    sizes = {"B": 2, "H": 4, "L": rows, "S": keys, "1": 1}
    seen = torch.rand([sizes[x] for x in name.strip("+")], generator=rng) < 0.5
    seen &= (torch.rand(seen.shape[-2], 1, generator=rng) < 0.9) & (torch.rand(seen.shape[-1], generator=rng) < 0.9)
    return (seen.expand(2, 4, rows, keys) if name.endswith("+") else seen).to(device)


def as_mask(seen: torch.Tensor, lengths: tuple[int, int]) -> Mask:
    """Of the whole matrix, which the oracle reads."""
    whole = seen.expand(*seen.shape[:-2], *lengths).contiguous()
    return Mask.from_matrix(
        whole.unsqueeze(0) if whole.dim() == 3 else whole
    )  # of SDPA's three dims the first is heads


def served_on(device: str) -> bool:
    """Whether the call was served; on a GPU it may be PyTorch's where no kernel reads such a mask."""
    report = sdpa.report()
    assert sum(report.served.values()) + sum(report.passed_on.values()) == 1
    assert device == "cuda" or report.served, report.passed_on
    assert all("mask" in reason for reason in report.passed_on)
    return bool(report.served)


@pytest.mark.parametrize("through", ["function", "enable"])
@pytest.mark.parametrize("lengths", [(192, 320), (9, 13)], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape(device: str, name: str, lengths: tuple[int, int], through: str, rng: torch.Generator) -> None:
    """Out and gradients; on the CPU PyTorch's own in float64. Nothing waits for the GPU."""
    *leaves, dout = tensors_of(device, rng, lengths)
    seen = draw(name, lengths, rng, device)
    function = sdpa.sdpa if through == "function" else PYTORCHS
    with sdpa.enable(devices=(device,)) if through == "enable" else nullcontext():
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            out = function(*leaves, attn_mask=seen)
            gradients = torch.autograd.grad(out, leaves, dout)
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    if device == "cpu":
        expected = F.scaled_dot_product_attention(*leaves, attn_mask=seen)
        torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
        expected_gradients = torch.autograd.grad(expected, leaves, dout)
        torch.testing.assert_close(gradients, expected_gradients, atol=1e-12, rtol=1e-12)
    if served_on(device) and device == "cuda":
        mask = as_mask(seen, lengths)
        given = [x.detach() for x in leaves]
        _, lse = _forward_of_reference(given, mask)
        assert_matches(out, lse, *given, mask=mask)
        assert_gradients_match(gradients, dout, *given, mask=mask)


def _forward_of_reference(given: list[torch.Tensor], mask: Mask) -> Any:
    out, lse = flash_cute.reference.attention(*given, mask=mask)
    return out, lse.float()


@pytest.mark.parametrize("name", ["LS", "BHLS", "B11S"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["its dtype", "float32"])
def test_a_float_mask_of_zero_and_minus_infinity(
    device: str, name: str, dtype: torch.dtype, rng: torch.Generator
) -> None:
    """In the dtype of fp16 tensors, or in float32; after a look at its values."""
    lengths = (192, 192)
    *leaves, dout = tensors_of(device, rng, lengths, dtype=torch.float16)
    seen = draw(name, lengths, rng, device)
    seen[..., 0] = True  # else the bias below may be all -inf
    bias = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, -torch.inf)
    out = sdpa.sdpa(*leaves, attn_mask=bias)
    gradients = torch.autograd.grad(out, leaves, dout)
    if not served_on(device):
        return
    mask = as_mask(seen, lengths)
    given = [x.detach() for x in leaves]
    _, lse = _forward_of_reference(given, mask)
    assert_matches(out, lse, *given, mask=mask)
    assert_gradients_match(gradients, dout, *given, mask=mask)
    if device == "cuda" and dtype != leaves[0].dtype:  # a bias that PyTorch need not take
        return
    biased = sdpa.sdpa(*leaves, attn_mask=bias.masked_fill(seen, 0.25))
    expected = F.scaled_dot_product_attention(*leaves, attn_mask=bias.masked_fill(seen, 0.25))
    torch.testing.assert_close(biased, expected)
    assert "attn_mask: expected bool, or 0 and -inf, got a bias" in sdpa.report().passed_on


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("rows", [1, 130])
def test_a_mask_by_query_head(device: str, alike: bool, rows: int, rng: torch.Generator) -> None:
    """With shared keys: served where the query heads of a key head have one mask."""
    lengths = (130, 192)
    *leaves, dout = tensors_of(device, rng, lengths, (4, 2))
    seen = (torch.rand(2, 2, rows, 192, generator=rng) < 0.5).to(device)
    by_query_head = seen.repeat_interleave(2, 1)
    if not alike:
        by_query_head[1, 3, 0, 7] = ~by_query_head[1, 3, 0, 7]
    out = sdpa.sdpa(*leaves, attn_mask=by_query_head, enable_gqa=True)
    gradients = torch.autograd.grad(out, leaves, dout)
    if device == "cpu":
        expected = F.scaled_dot_product_attention(*leaves, attn_mask=by_query_head, enable_gqa=True)
        torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(gradients, torch.autograd.grad(expected, leaves, dout), atol=1e-12, rtol=1e-12)
    if alike:
        if served_on(device) and device == "cuda":
            assert_gradients_match(gradients, dout, *(x.detach() for x in leaves), mask=as_mask(seen, lengths))
    else:
        sentence = "attn_mask: expected one mask for all heads, or one for each of 2 key heads, got 4"
        assert sdpa.report().passed_on == {sentence: 1}


def test_what_goes_on_to_pytorch(device: str, rng: torch.Generator) -> None:
    """Biases, whether they require grad or not, and masks beside dropout and causality; with PyTorch's bits."""
    *leaves, _ = tensors_of(device, rng, (130, 130))
    seen = draw("LS", (130, 130), rng, device)
    zero = torch.zeros(130, 130, device=device, dtype=leaves[0].dtype)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"attn_mask": zero.clone().requires_grad_()}, "attn_mask: expected bool, got"),
        ({"attn_mask": zero + 0.5}, "attn_mask: expected bool, or 0 and -inf, got a bias"),
        ({"attn_mask": seen, "dropout_p": 0.5}, "dropout_p: expected 0, got another"),
    ]
    for options, sentence in refused:
        outs = []
        for function in (F.scaled_dot_product_attention, sdpa.sdpa):
            torch.manual_seed(0)
            outs.append(function(*leaves, **options))
        assert same_bits(outs[:1], outs[1:])
        (reason,) = sdpa.report(reset=True).passed_on
        assert reason.startswith(sentence)


def test_a_mask_beside_causality(device: str, rng: torch.Generator) -> None:
    """PyTorch raises, on a CPU since 2.12; what it gives before that is what it gives without us."""
    *leaves, _ = tensors_of(device, rng, (130, 130))
    options: dict[str, Any] = {"attn_mask": draw("LS", (130, 130), rng, device), "is_causal": True}
    outcomes = []
    for function in (F.scaled_dot_product_attention, sdpa.sdpa):
        try:
            outcomes.append((function(*leaves, **options), ""))
        except RuntimeError as error:
            outcomes.append((None, str(error)))
    (theirs, their_error), (ours, our_error) = outcomes
    assert our_error == their_error
    if theirs is not None:
        assert same_bits([theirs], [ours])
    assert sdpa.report().passed_on == {"attn_mask: expected None with is_causal, got a tensor": 1}


def test_transforms_do_not_look(rng: torch.Generator) -> None:
    """A float mask's values are not read within them, where that would raise."""
    q, k, v, _ = (x.detach() for x in tensors_of("cpu", rng, (9, 13)))
    bias = torch.zeros(2, 9, 13, dtype=torch.float64).masked_fill(torch.rand(2, 9, 13, generator=rng) < 0.5, -torch.inf)
    mapped = torch.func.vmap(lambda q, x: sdpa.sdpa(q, k[0], v[0], attn_mask=x))(q, bias)
    expected = F.scaled_dot_product_attention(q, k[:1], v[:1], attn_mask=bias[:, None])
    torch.testing.assert_close(mapped, expected)
    leaf = q.clone().requires_grad_()
    given = torch.func.grad(lambda x: sdpa.sdpa(x, k, v, attn_mask=bias[:, None]).square().sum())(q)
    (wanted,) = torch.autograd.grad(sdpa.sdpa(leaf, k, v, attn_mask=bias[:, None]).square().sum(), leaf)
    torch.testing.assert_close(given, wanted)


def test_a_mask_of_two_batches(rng: torch.Generator) -> None:
    """Leading dims of its own, and of which it has some."""
    q, k, v = (torch.randn(2, 3, 4, 9, 8, generator=rng, dtype=torch.float64) for _ in range(3))
    for shape in ((2, 3, 4, 9, 9), (3, 1, 9, 9), (2, 1, 1, 9, 9), (1, 3, 4, 9, 1)):
        seen = torch.rand(shape, generator=rng) < 0.6
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        torch.testing.assert_close(sdpa.sdpa(q, k, v, attn_mask=seen), expected, atol=1e-12, rtol=1e-12)
    assert sdpa.report().data["passed_on"] == {}


@pytest.mark.cuda
def test_in_a_graph(rng: torch.Generator) -> None:
    """A replay reads the boolean mask again; a float one is not looked at there, and is PyTorch's."""
    q, k, v, _ = (x.detach() for x in tensors_of("cuda", rng, (192, 192)))
    seen = torch.ones(2, 1, 192, 192, dtype=torch.bool, device="cuda")
    bias = torch.zeros(seen.shape, dtype=torch.float16, device="cuda")
    sdpa.sdpa(q, k, v, attn_mask=seen)
    F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    sdpa.report(reset=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sdpa.sdpa(q, k, v, attn_mask=seen)
        sdpa.sdpa(q, k, v, attn_mask=bias)
    assert "attn_mask: expected bool, got float16, which may be a bias" in sdpa.report().passed_on
    for density in (0.5, 0.05):
        seen.copy_(torch.rand(seen.shape, generator=rng) < density)
        graph.replay()
        mask = Mask.from_matrix(seen)
        _, lse = _forward_of_reference([q, k, v], mask)
        assert_matches(out, lse, q, k, v, mask=mask)


def test_a_mask_larger_than_the_scores_is_pytorchs_to_refuse(rng: torch.Generator) -> None:
    """It is added to them in place: value's batch is none of theirs."""
    q, k = (torch.randn(1, 4, 9, 8, generator=rng) for _ in range(2))
    v = torch.randn(2, 4, 9, 8, generator=rng)
    for shape in ((2, 1, 9, 9), (1, 1, 1, 9, 9)):
        with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
            sdpa.sdpa(q, k, v, attn_mask=torch.ones(shape, dtype=torch.bool))
    assert all("expected leading dims of query and key" in reason for reason in sdpa.report().passed_on)

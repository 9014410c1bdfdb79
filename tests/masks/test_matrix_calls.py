"""Attention with masks of matrices and blocks: what they say against float64, and the rest of PyTorch around them."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from cases import Backward, Forward, score
from checks import OPCHECKS
from masks import inputs
from numerics import assert_gradients_match, assert_matches, same_bits
from packed import offsets

import flash_cute
from flash_cute import Mask
from flash_cute.report import built_architectures


def call_inputs(device: str, rng: torch.Generator, lengths: tuple[int, int], head_dim: int = 64) -> list[torch.Tensor]:
    """q, k, v and dout of 2 batch items, 4 query heads and 2 key heads."""
    dtype = torch.float16 if device == "cuda" else torch.float32
    q, k, v = inputs(device, rng, (2, 4, 2), lengths, (head_dim, head_dim), dtype)
    return [q, k, v, torch.randn(q.shape, generator=rng).to(q)]


def assert_right(
    fwd: Forward, bwd: Backward, tensors: list[torch.Tensor], mask: Mask, causal: bool | str = False, **options: Any
) -> tuple[torch.Tensor, ...]:
    """Forward and backward, and that blind rows and hidden keys have exactly 0."""
    q, k, v, dout = tensors
    out, lse = fwd(q, k, v, causal, mask=mask, **options)
    assert_matches(out, lse, q, k, v, causal, mask=mask, **options)
    gradients = bwd(dout, q, k, v, causal, mask=mask, **options)
    assert_gradients_match(gradients, dout, q, k, v, causal, mask=mask, **options)
    seen = mask.dense(q.shape[2], causal).expand(2, 2, q.shape[2], k.shape[2])
    blind, hidden = ~seen.any(-1).repeat_interleave(2, 1), ~seen.any(-2)
    assert bool((lse[blind] == -torch.inf).all())
    for x, where in ((out, blind), (gradients[0], blind), (gradients[1], hidden), (gradients[2], hidden)):
        assert bool((x[where] == 0).all())
    return (out, lse, *gradients)


@pytest.mark.kernel
@pytest.mark.parametrize("lengths", [(1, 1), (64, 192), (192, 320), (130, 300), (449, 321)], ids=str)
@pytest.mark.parametrize("density", [0.01, 0.5, 0.99])
def test_random_matrices(
    device: str,
    lengths: tuple[int, int],
    density: float,
    fwd: Forward,
    bwd: Backward,
    rng: torch.Generator,
) -> None:
    """With empty rows and columns, by batch item and KV head."""
    seen = torch.rand(2, 2, *lengths, generator=rng) < density
    seen &= torch.rand(2, 2, lengths[0], 1, generator=rng) < 0.9
    seen &= torch.rand(2, 2, 1, lengths[1], generator=rng) < 0.9
    tensors = call_inputs(device, rng, lengths)
    for matrix in (seen, seen[:1], seen[:, :1], seen[:, :, :1], seen[..., :1]):
        assert_right(fwd, bwd, tensors, Mask.from_matrix(matrix.to(device), lengths[1]))


@pytest.mark.kernel
@pytest.mark.parametrize("causal", [False, True])
def test_matrices_that_say_everything_or_nothing(
    device: str, causal: bool, fwd: Forward, bwd: Backward, rng: torch.Generator
) -> None:
    tensors = call_inputs(device, rng, (192, 192))
    q, k, v, dout = tensors
    full, blocks = torch.ones(192, 192, device=device).bool(), torch.ones(3, 3, device=device).bool()
    for everything in (
        Mask.from_matrix(full),
        Mask.from_blocks(blocks, 192),
        Mask.from_matrix(full).with_blocks(blocks),
    ):
        results = assert_right(fwd, bwd, tensors, everything, causal)
        if device == "cpu":
            assert same_bits(results, (*fwd(q, k, v, causal), *bwd(dout, q, k, v, causal)))
    for nothing in (Mask.from_matrix(~full), Mask.from_blocks(~blocks, 192)):
        out, lse, *gradients = assert_right(fwd, bwd, tensors, nothing, causal)
        assert bool((lse == -torch.inf).all()) and all(bool((x == 0).all()) for x in (out, *gradients[:3]))


@pytest.mark.kernel
def test_a_matrix_that_is_causal(device: str, backend: str | None, rng: torch.Generator) -> None:
    """The same numbers as of a causal call."""
    q, k, v, dout = (x.detach() for x in call_inputs(device, rng, (320, 320)))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mask = Mask.from_matrix(torch.ones(320, 320, device=device).tril().bool())
    outs = [
        flash_cute.attention(*leaves, mask=mask, backend=backend),
        flash_cute.attention(*leaves, True, backend=backend),
    ]
    tolerance = {"rtol": 0.0, "atol": 4e-3 if device == "cuda" else 1e-5}
    torch.testing.assert_close(*outs, **tolerance)
    for one, other in zip(*(torch.autograd.grad(out, leaves, dout) for out in outs), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=10 * tolerance["atol"])


@pytest.mark.kernel
@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("lengths", [(192, 320), (500, 700)], ids=str)
@pytest.mark.parametrize("density", [0.1, 0.5, 0.9])
def test_blocks(
    device: str,
    density: float,
    lengths: tuple[int, int],
    causal: bool | str,
    fwd: Forward,
    bwd: Backward,
    rng: torch.Generator,
) -> None:
    """Of any density, with bands and intervals too."""
    blocks = torch.rand(2, 2, -(-lengths[0] // 64), -(-lengths[1] // 64), generator=rng) < density
    mask = Mask.from_blocks(blocks.to(device), lengths[1])
    tensors = call_inputs(device, rng, lengths)
    assert_right(fwd, bwd, tensors, mask, causal)
    keys = torch.rand(2, lengths[1], generator=rng) < 0.7
    assert_right(fwd, bwd, tensors, Mask.padding(keys.to(device)).with_blocks(mask.blocks[:, :1]), causal)  # type: ignore[index]


def test_a_packed_matrix_that_says_nothing(rng: torch.Generator) -> None:
    x = tuple(torch.randn(140, 2, 16, generator=rng) for _ in range(3))
    cu = offsets((60, 0, 80))
    mask = Mask.from_matrix(torch.ones(140, 140).bool()).with_blocks(torch.ones(3, 3).bool())
    assert same_bits(flash_cute.varlen_fwd(*x, cu, cu, True, mask=mask), flash_cute.varlen_fwd(*x, cu, cu, True))


def test_a_packed_batch_is_its_sequences(rng: torch.Generator) -> None:
    """Sequences of equal lengths, which the CPU computes together, and whose blocks begin within others."""
    q, k, v = (torch.randn(300, 2, 16, generator=rng) for _ in range(3))
    seen, blocks = torch.rand(1, 2, 300, 300, generator=rng) < 0.5, torch.rand(1, 2, 5, 5, generator=rng) < 0.7
    whole = Mask.from_matrix(seen).with_blocks(blocks).dense(300)
    cu = offsets((100, 100, 100))
    out, lse = flash_cute.varlen_fwd(q, k, v, cu, cu, mask=Mask.from_matrix(seen).with_blocks(blocks))
    for first in (0, 100, 200):
        part = slice(first, first + 100)
        given = (x[part].transpose(0, 1)[None] for x in (q, k, v))
        alone, alone_lse = flash_cute.fwd(*given, mask=Mask.from_matrix(whole[:, :, part, part]))
        torch.testing.assert_close(out[part], alone[0].transpose(0, 1), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(lse[:, part], alone_lse[0], atol=1e-5, rtol=1e-5)


def test_explain(rng: torch.Generator) -> None:
    q, k, v, _ = call_inputs("cpu", rng, (70, 70))
    mask = Mask.documents(torch.arange(70) // 9)
    assert flash_cute.explain(q, k, v, mask=mask).data["mask_matrix"] is False
    for backward in (False, True):
        plan = flash_cute.explain(
            q, k, v, mask=mask.with_blocks(torch.eye(2).bool().expand(2, 2, 2)), backward=backward
        )
        assert plan.data["mask_matrix"] is True
        assert "mask of 1 interval of rows per key and a matrix of booleans, by batch item" in str(plan)


@pytest.mark.parametrize(
    "operator", ["masked_fwd", "_masked_fwd", "masked_bwd", "masked_varlen_fwd", "masked_varlen_bwd"]
)
@pytest.mark.parametrize("squares", ["matrix", "blocks"])
def test_opcheck(device: str, operator: str, squares: str, rng: torch.Generator) -> None:
    q, k, v, _ = call_inputs(device, rng, (70, 70))
    seen = (torch.rand(1, 2, 70, 70, generator=rng) < 0.5).to(device)
    mask = Mask.from_matrix(seen) if squares == "matrix" else Mask.from_blocks(seen[:, :, :2, :2], 70)
    lengths: tuple[Any, ...] = ()
    if "varlen" in operator:
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        cu = offsets((17, 53), device)
        lengths = (cu, cu, None, None, None, None)
    call = getattr(torch.ops.flash_cute, operator).default
    own = (*mask.tensors, *lengths, *score(True))
    if "bwd" in operator:
        out, lse = getattr(torch.ops.flash_cute, operator.replace("bwd", "fwd"))(q, k, v, *own, "auto")
        given = (torch.ones_like(out), q, k, v, out, lse, None, *own, True, "auto")
        torch.library.opcheck(call, given, test_utils=OPCHECKS)
        return
    torch.library.opcheck(call, (q, k, v, *own, "auto"))
    if not operator.startswith("_"):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        torch.library.opcheck(call, (*leaves, *own, "auto", True))


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, blocks: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    mask = Mask.documents(ids).with_matrix(seen).with_blocks(blocks)
    out: torch.Tensor = flash_cute.attention(q, k, v, True, mask=mask)
    return out + flash_cute.attention(q, k, v, mask=Mask.from_matrix(seen))


def test_compiled(device: str, rng: torch.Generator) -> None:
    """In one graph, with other contents, lengths and gradients."""
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (70, 70, 150):
        *leaves, _ = (x.detach().requires_grad_() for x in call_inputs(device, rng, (length, length)))
        seen = (torch.rand(2, 1, length, length, generator=rng) < 0.6).to(device)
        blocks = (torch.rand(2, 2, -(-length // 64), -(-length // 64), generator=rng) < 0.8).to(device)
        given = (*leaves, seen, blocks, torch.arange(length, device=device) // 50)
        eager, traced = attend(*given), compiled(*given)
        assert torch.equal(eager, traced)
        of_eager, of_traced = (torch.autograd.grad(x.sum(), leaves) for x in (eager, traced))
        torch.testing.assert_close(of_traced, of_eager)


class Attention(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> torch.Tensor:
        return flash_cute.attention(q, k, v, True, mask=mask)


def test_exported(rng: torch.Generator) -> None:
    q, k, v, _ = call_inputs("cpu", rng, (70, 70))
    seen, blocks = torch.rand(70, 70, generator=rng) < 0.5, torch.rand(2, 2, generator=rng) < 0.5
    mask = Mask.documents(torch.arange(70) // 30).with_matrix(seen).with_blocks(blocks)
    program = torch.export.export(Attention(), (q, k, v, mask))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    other = mask.with_matrix(torch.rand(70, 70, generator=rng) < 0.5)
    for one in (program, torch.export.load(file)):
        for given in (mask, other):
            assert torch.equal(one.module()(q, k, v, given), Attention()(q, k, v, given))


def test_transformed(rng: torch.Generator) -> None:
    q, k, v, _ = call_inputs("cpu", rng, (40, 40))
    mask = Mask.from_matrix(torch.rand(40, 40, generator=rng) < 0.5)
    leaf = q.clone().requires_grad_()
    Attention()(leaf, k, v, mask).sum().backward()
    torch.testing.assert_close(torch.func.grad(lambda x: Attention()(x, k, v, mask).sum())(q), leaf.grad)
    with pytest.raises(NotImplementedError, match="do not work under vmap"):
        torch.vmap(lambda *x: Attention()(*x, mask))(*(x.unsqueeze(0) for x in (q, k, v)))


@pytest.mark.kernel
@pytest.mark.parametrize("squares", ["matrix", "blocks"])
def test_same_bits_every_time(device: str, squares: str, backend: str | None, rng: torch.Generator) -> None:
    """100 calls, forward and deterministic backward; on the CPU 3."""
    length = 1472 if device == "cuda" else 192
    q, k, v, dout = call_inputs(device, rng, (length, length))
    seen = torch.rand(2, 2, length, length, generator=rng) < 0.5
    mask = Mask.from_matrix(seen.to(device))
    if squares == "blocks":
        mask = Mask.from_blocks(seen[:, :, : length // 64, : length // 64].to(device), length)
    first: Any = None
    for _ in range(100 if device == "cuda" else 3):
        out, lse = flash_cute.fwd(q, k, v, True, mask=mask, backend=backend)
        gradients = flash_cute.bwd(dout, q, k, v, out, lse, True, mask=mask, deterministic=True, backend=backend)
        results = (out, lse, *gradients)
        first = results if first is None else first
        assert same_bits(results, first)


@pytest.mark.skipif("sm90" not in built_architectures(), reason="this build has no sm90 kernels")
@pytest.mark.parametrize(("head_dim", "stages"), [(64, 8), (128, 4), (96, 2), (256, 2)])
def test_the_tile_for_blocks(head_dim: int, stages: int) -> None:
    """Of key tiles that are blocks, and more buffers, at the head dims of models for video."""
    x = torch.empty(1, 2, 1024, head_dim, dtype=torch.float16, device="meta")
    seen = torch.ones(16, 16, dtype=torch.bool, device="meta")
    plan = flash_cute.explain(x, x, x, mask=Mask.from_blocks(seen, 1024), capability=90)
    assert plan.data["stages"] == stages
    assert (plan.data["block_n"] == 64) == (stages > 2)
    assert ("The mask has blocks" in str(plan)) == (stages > 2)
    whole = torch.ones(1024, 1024, dtype=torch.bool, device="meta")
    assert flash_cute.explain(x, x, x, mask=Mask.from_matrix(whole), capability=90).data["stages"] == 2

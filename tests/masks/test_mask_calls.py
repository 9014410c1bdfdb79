"""`flash_cute.Mask` in the calls that take one: what is refused, whose bits, and the rest of PyTorch around it.

Past 400 lines, and one file: each promise is a short test, and all share the masks and the tensors at the top.
"""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Backward, Forward, score
from checks import OPCHECKS
from numerics import assert_gradients_match, assert_matches, same_bits
from packed import offsets
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_cute
from flash_cute import Mask

RAW_ERRORS = (ValueError, RuntimeError)
IDS = torch.arange(40) // 13


def inputs(
    device: str, rng: torch.Generator, length: int = 40, batch: int = 2, head_dim: int = 64
) -> tuple[torch.Tensor, ...]:
    dtype = torch.float16 if device == "cuda" else torch.float32
    shapes = ((batch, 4, length, head_dim), *((batch, 2, length, head_dim),) * 2)
    return tuple(torch.randn(shape, generator=rng).to(device, dtype) for shape in shapes)


def rows(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


# Name: the mask's tensors, in the order of the schema, for a call of q (2, 4, 5, 16), k (2, 2, 7, 16); what is said.
BAD: dict[str, tuple[tuple[Any, ...], str]] = {
    "dtype": ((rows(1, 1, 7, dtype=torch.int64), rows(1, 1, 7)), "mask.first_row: expected int32, got int64"),
    "float": ((rows(1, 1, 7), rows(1, 1, 7).float()), "mask.row_limit: expected int32, got float32"),
    "rank": (
        (rows(1, 7), rows(1, 1, 7)),
        "mask.first_row: expected the shape (2 or 1, 2 or 1, 7), a number per key of k, got (1, 7)",
    ),
    "keys": (
        (rows(1, 1, 7), rows(1, 1, 5)),
        "mask.row_limit: expected the shape (2 or 1, 2 or 1, 7), a number per key of k, got (1, 1, 5)",
    ),
    "heads": (
        (rows(2, 4, 7), rows(1, 1, 7)),
        "mask.first_row: expected the shape (2 or 1, 2 or 1, 7), a number per key of k, got (2, 4, 7)",
    ),
    "batch": (
        (rows(3, 1, 7), rows(1, 1, 7)),
        "mask.first_row: expected the shape (2 or 1, 2 or 1, 7), a number per key of k, got (3, 1, 7)",
    ),
    "second": (
        (rows(1, 1, 7), rows(1, 1, 7), rows(1, 2, 7), rows(2, 2, 8)),
        "mask.row_limit_2: expected the shape (2 or 1, 2 or 1, 7), a number per key of k, got (2, 2, 8)",
    ),
    "one of the second": (
        (rows(1, 1, 7), rows(1, 1, 7), rows(1, 1, 7), None),
        "mask.row_limit_2: expected a tensor beside first_row_2, got None",
    ),
    "other of the second": (
        (rows(1, 1, 7), rows(1, 1, 7), None, rows(1, 1, 7)),
        "mask.first_row_2: expected a tensor beside row_limit_2, got None",
    ),
    "matrix of numbers": (
        (rows(1, 1, 7), rows(1, 1, 7), None, None, rows(1, 1, 5, 7)),
        "mask.matrix: expected bool, got int32",
    ),
    "rows of the matrix": (
        (rows(1, 1, 7), rows(1, 1, 7), None, None, rows(2, 1, 7, 7, dtype=torch.bool)),
        "mask.matrix: expected the shape (2 or 1, 2 or 1, 5 or 1, 7 or 1), a boolean per row of q and key of k, got "
        "(2, 1, 7, 7)",
    ),
    "heads of the matrix": (
        (rows(1, 1, 7), rows(1, 1, 7), None, None, rows(1, 4, 5, 7, dtype=torch.bool)),
        "mask.matrix: expected the shape (2 or 1, 2 or 1, 5 or 1, 7 or 1), a boolean per row of q and key of k, got "
        "(1, 4, 5, 7)",
    ),
    "blocks": (
        (rows(1, 1, 7), rows(1, 1, 7), None, None, None, rows(1, 1, 1, 2, dtype=torch.bool)),
        "mask.blocks: expected the shape (2 or 1, 2 or 1, 1, 1), a boolean per block of 64 rows and 64 keys, got "
        "(1, 1, 1, 2)",
    ),
}


@pytest.mark.parametrize("operator", ["masked_fwd", "_masked_fwd", "check_masked_fwd", "masked_fwd_plan", "masked_bwd"])
@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("fake", [False, True])
def test_operators_refuse(name: str, operator: str, fake: bool) -> None:
    """In one voice, on real tensors and on fake ones."""
    tensors, sentence = BAD[name]
    mask = (*tensors, *(None,) * (6 - len(tensors)))
    q, k = torch.zeros(2, 4, 5, 16), torch.zeros(2, 2, 7, 16)
    if fake and operator not in ("masked_fwd", "_masked_fwd", "masked_bwd"):
        pytest.skip("it has no fake")
    call: tuple[Any, ...] = (q, k, k, *mask, *score(), "auto")
    if operator == "masked_fwd_plan":
        call = (*call, 0)
    if operator == "masked_bwd":
        call = (q, q, k, k, q, torch.zeros(2, 4, 5), None, *mask, *score(), False, "auto")
    mode = FakeTensorMode()
    if fake:
        call = tuple(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in call)
    with pytest.raises(RAW_ERRORS, match=f"^flash_cute: {re.escape(sentence)}"):
        getattr(torch.ops.flash_cute, operator)(*call)


def public(**options: Any) -> Callable[[], Any]:
    """A call of q (2, 4, 5, 16), k (2, 2, 7, 16)."""
    q, k = torch.zeros(2, 4, 5, 16), torch.zeros(2, 2, 7, 16)
    return lambda: flash_cute.fwd(q, k, k, **options)


def packed(**options: Any) -> Callable[[], Any]:
    x, cu = torch.zeros(7, 2, 16), offsets((3, 4))
    return lambda: flash_cute.varlen_fwd(x, x, x, cu, cu, **options)


GOOD = Mask(rows(1, 1, 7), rows(1, 1, 7))
E4M3 = torch.zeros(1, 1, 7, 16).to(torch.float8_e4m3fn)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a matrix": (
        public(mask=torch.ones(5, 7).bool()),
        "mask: expected None or a flash_cute.Mask, got torch.Tensor (Mask.from_matrix makes one of a matrix of",
    ),
    "a number": (public(mask=3), "mask: expected None or a flash_cute.Mask, got 3"),
    "other keys": (
        public(mask=Mask(rows(1, 1, 5), rows(1, 1, 5))),
        "mask.first_row: expected the shape (2 or 1, 2 or 1, 7), a number per key of k, got (1, 1, 5)",
    ),
    "meta": (
        public(mask=Mask(*(x.to("meta") for x in GOOD.tensors[:2]))),
        "mask.first_row: expected q's device cpu, got meta",
    ),
    "float8": (
        lambda: flash_cute.fwd(E4M3, E4M3, E4M3, mask=GOOD),
        "mask: expected None for float8 tensors, got a mask",
    ),
    "quantize": (
        lambda: flash_cute.attention(*(torch.zeros(1, 1, 7, 16),) * 3, mask=GOOD, quantize="fp8"),
        "mask: expected None for float8 tensors, got a mask",
    ),
    "explain of float8": (
        lambda: flash_cute.explain(E4M3, E4M3, E4M3, mask=GOOD),
        "mask: expected None for float8 tensors, got a mask",
    ),
    "accumulate": (
        lambda: flash_cute.explain(
            *(torch.zeros(1, 1, 7, 16, dtype=torch.float16, device="meta"),) * 3,
            mask=GOOD.to("meta"),
            accumulate="float16",
            capability=80,
        ),
        "accumulate: expected 'float32' with a mask, got 'float16'",
    ),
    "seqused_q": (
        packed(mask=GOOD, seqused_q=torch.ones(2, dtype=torch.int32)),
        "seqused_q: expected None with a mask, got a tensor",
    ),
    "seqused_k": (
        packed(mask=GOOD, seqused_k=torch.ones(2, dtype=torch.int32)),
        "seqused_k: expected None with a mask, got a tensor",
    ),
    "packed slopes": (
        packed(mask=GOOD, alibi_slopes=torch.ones(2)),
        "alibi_slopes: expected None with packed sequences and a mask, got a tensor",
    ),
    "packed batches": (
        packed(mask=Mask(rows(2, 1, 7), rows(2, 1, 7))),
        "mask.first_row: expected the shape (1, 2 or 1, 7), a number per key of k, got (2, 1, 7)",
    ),
    "pages": (
        lambda: flash_cute.varlen_attention(
            torch.zeros(3, 2, 16),
            *(torch.zeros(4, 16, 2, 16),) * 2,
            offsets((3,)),
            None,
            page_table=torch.zeros(1, 1, dtype=torch.int32),
            mask=GOOD,
        ),
        "mask: expected None with page_table, got a mask",
    ),
    "a cache": (
        lambda: flash_cute.explain(
            torch.zeros(1, 1, 2, 16), *(torch.zeros(1, 7, 2, 16),) * 2, mask=GOOD, kv_layout="NHD"
        ),
        "mask: expected None over a cache, got",
    ),
    "int64": (
        lambda: Mask(rows(1, 1, 7).long(), rows(1, 1, 7)),
        "mask.first_row: expected int32, got int64",
    ),
    "two dims": (
        lambda: Mask(rows(1, 1, 7), rows(1, 7)),
        "mask.row_limit: expected 3 dims (B or 1, Hkv or 1, Nk), got (1, 7)",
    ),
    "lists": (lambda: Mask([0], [1]), "mask.first_row: expected a torch.Tensor, got list"),
    "other lengths": (
        lambda: Mask(rows(1, 1, 7), rows(1, 1, 6)),
        "mask.row_limit: expected as many keys as mask.first_row, 7, got (1, 1, 6)",
    ),
    "other batches": (
        lambda: Mask(rows(2, 1, 7), rows(1, 2, 7), rows(3, 1, 7), rows(1, 1, 7)),
        "mask.first_row_2: expected 1 or 2 batch items, got (3, 1, 7)",
    ),
    "half an interval": (
        lambda: Mask(rows(1, 1, 7), rows(1, 1, 7), rows(1, 1, 7)),
        "mask.row_limit_2: expected a tensor beside the interval's other one, got None",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_calls_refuse(name: str) -> None:
    call, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=f"^flash_cute: {re.escape(sentence)}"):
        call()


@pytest.mark.kernel
@pytest.mark.parametrize("causal", [False, True])
def test_a_mask_that_says_nothing(device: str, causal: bool, fwd: Forward, bwd: Backward, rng: torch.Generator) -> None:
    """On the CPU such a call has the bits of one without; the GPU's kernels with a mask have their own."""
    q, k, v = inputs(device, rng, 130)
    dout = torch.randn(q.shape, generator=rng).to(q)
    nothing, everything = rows(1, 1, 130).to(device), (rows(1, 1, 130) + 130).to(device)
    for mask in (Mask(nothing, everything), Mask(nothing, nothing, nothing - 5, everything + 5)):
        masked = (*fwd(q, k, v, causal, mask=mask), *bwd(dout, q, k, v, causal, mask=mask))
        if device == "cpu":
            assert same_bits(masked, (*fwd(q, k, v, causal), *bwd(dout, q, k, v, causal)))
        assert_matches(*masked[:2], q, k, v, causal)
        assert_gradients_match(masked[2:], dout, q, k, v, causal)


def test_a_packed_mask_that_says_nothing(rng: torch.Generator) -> None:
    x = tuple(torch.randn(40, 2, 16, generator=rng) for _ in range(3))
    cu = offsets((13, 0, 27))
    mask = Mask(rows(1, 1, 40), rows(1, 1, 40) + 2**31 - 1)
    assert same_bits(flash_cute.varlen_fwd(*x, cu, cu, True, mask=mask), flash_cute.varlen_fwd(*x, cu, cu, True))


@pytest.mark.kernel
@pytest.mark.parametrize("causal", [False, True])
def test_documents_are_the_packed_call(device: str, causal: bool, backend: str | None, rng: torch.Generator) -> None:
    """The same numbers as of packed sequences, forward and backward, to the contract's bounds."""
    lengths = (13, 1, 70, 46)
    q, k, v = (x.detach().requires_grad_() for x in inputs(device, rng, 130, batch=1))
    cu = offsets(lengths, device)
    mask = Mask.documents(cu_seqlens=cu, length=130)
    out = flash_cute.attention(q, k, v, causal, mask=mask, backend=backend)
    dout = torch.randn(out.shape, generator=rng).to(out)
    given = torch.autograd.grad(out, (q, k, v), dout)
    one = [x[0].transpose(0, 1) for x in (q, k, v)]
    alone = flash_cute.varlen_attention(*one, cu, cu, causal, backend=backend)
    tolerance = {"rtol": 0.0, "atol": 4e-3 if device == "cuda" else 1e-5}
    torch.testing.assert_close(out[0].transpose(0, 1), alone, **tolerance)
    expected = torch.autograd.grad(alone, one, dout[0].transpose(0, 1))
    for x, y in zip(given, expected, strict=True):
        torch.testing.assert_close(x[0].transpose(0, 1), y, rtol=0, atol=10 * tolerance["atol"])
    assert_gradients_match(given, dout, q, k, v, causal, mask=mask)


def test_explain(rng: torch.Generator) -> None:
    q, k, v = inputs("cpu", rng)
    assert "mask_intervals" not in flash_cute.explain(q, k, v).data
    mask = Mask.global_tokens(torch.tensor([2, 3]), 40, (4, 4))
    for backward in (False, True):
        plan = flash_cute.explain(q, k, v, mask=mask, backward=backward)
        numbers = [plan.data[name] for name in ("mask_intervals", "mask_batches", "mask_heads")]
        assert numbers == [2, 2, 1]
        assert "mask of 2 intervals of rows per key, by batch item" in str(plan)
        assert any("it has no such mask" in reason for reason in plan.data["reasons"])
    x = torch.zeros(40, 2, 16)
    cu = offsets((13, 27))
    plan = flash_cute.explain(x, x, x, mask=Mask.chunks(4, 40), cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert [plan.data[name] for name in ("mask_intervals", "mask_batches", "mask_heads")] == [1, 1, 1]


@pytest.mark.parametrize("backward", [False, True])
def test_no_kernel_or_a_plan(backward: bool) -> None:
    """On a GPU a call with a mask has a plan, or is refused with a sentence that names it."""
    x = torch.zeros(1, 2, 256, 64, dtype=torch.float16, device="meta")
    try:
        plan = flash_cute.explain(x, x, x, mask=Mask.chunks(4, 256, device="meta"), capability=90, backward=backward)
    except ValueError as error:
        reads = "reads a mask" in str(error) and str(error).startswith("flash_cute: mask: expected ")
        assert reads or "no CUDA kernels" in str(error)
    else:
        assert plan.data["mask_intervals"] == 1
        assert any("an interval of rows for each key" in reason for reason in plan.data["reasons"])
        assert plan.data["tuning_key"] is None


@pytest.mark.parametrize(
    "operator", ["masked_fwd", "_masked_fwd", "masked_bwd", "masked_varlen_fwd", "masked_varlen_bwd"]
)
def test_opcheck(device: str, operator: str, rng: torch.Generator) -> None:
    mask = Mask.documents(IDS.to(device)).tensors
    q, k, v = inputs(device, rng)
    lengths: tuple[Any, ...] = ()
    if "varlen" in operator:
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        cu = offsets((17, 23), device)
        lengths = (cu, cu, None, None, None, None)
    call = getattr(torch.ops.flash_cute, operator).default
    own = (*mask, *lengths, *score(True))
    if "bwd" in operator:
        out, lse = getattr(torch.ops.flash_cute, operator.replace("bwd", "fwd"))(q, k, v, *own, "auto")
        torch.library.opcheck(
            call, (torch.ones_like(out), q, k, v, out, lse, None, *own, True, "auto"), test_utils=OPCHECKS
        )
        return
    torch.library.opcheck(call, (q, k, v, *own, "auto"))
    if not operator.startswith("_"):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        torch.library.opcheck(call, (*leaves, *own, "auto", True))


def every_constructor(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor, n: torch.Tensor) -> Any:
    """The sum of attention with the masks that are made without waiting for the device."""
    length = q.shape[2]
    parts = [
        (True, Mask.documents(ids)),
        (False, Mask.prefix_lm(n, length)),
        (False, Mask.images(ids, left=5)),
        (False, Mask.chunks(4, length, left=1, device=q.device)),
        (False, Mask.padding(n, length)),
        (True, Mask.global_tokens(n, length, (3, None))),
        (True, Mask.tree(ids * 0, ids * 0 + length)),
    ]
    return sum(flash_cute.attention(q, k, v, causal, mask=mask) for causal, mask in parts)


def test_compiled(device: str, rng: torch.Generator) -> None:
    """In one graph, with other contents and gradients."""
    leaves = [x.detach().requires_grad_() for x in inputs(device, rng)]
    compiled = torch.compile(every_constructor, backend="aot_eager", fullgraph=True)
    for ids, n in ((IDS, 7), (IDS.flip(0), 31)):
        given = (*leaves, ids.to(device), torch.tensor([n, n - 3], device=device))
        eager, traced = every_constructor(*given), compiled(*given)
        assert torch.equal(eager, traced)
        of_eager, of_traced = (torch.autograd.grad(x.sum(), leaves) for x in (eager, traced))
        torch.testing.assert_close(of_traced, of_eager)


class Attention(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> torch.Tensor:
        return flash_cute.attention(q, k, v, True, mask=mask)


class Documents(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return flash_cute.attention(q, k, v, True, mask=Mask.documents(ids))


def test_exported(rng: torch.Generator) -> None:
    """A mask is an input of an exported program, or made in it, for any length."""
    tensors = inputs("cpu", rng)
    mask = Mask.documents(IDS)
    program = torch.export.export(Attention(), (*tensors, mask))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for one in (program, torch.export.load(file)):
        assert torch.equal(one.module()(*tensors, mask), Attention()(*tensors, mask))
    length = torch.export.Dim("length", min=3, max=1000)
    shapes = (*({2: length},) * 3, {0: length})
    program = torch.export.export(Documents(), (*tensors, IDS), dynamic_shapes=shapes)
    longer = (*inputs("cpu", rng, 57), torch.arange(57) // 9)
    assert torch.equal(program.module()(*longer), Documents()(*longer))


class OwnMask(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mask = Mask.documents(IDS)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_cute.attention(q, k, v, True, mask=self.mask)


def test_traced_and_transformed(rng: torch.Generator) -> None:
    q, k, v = inputs("cpu", rng)
    module = OwnMask()
    expected = module(q, k, v)
    assert torch.equal(torch.fx.symbolic_trace(module)(q, k, v), expected)
    assert torch.equal(torch.jit.trace(module, (q, k, v))(q, k, v), expected)
    leaf = q.clone().requires_grad_()
    module(leaf, k, v).sum().backward()
    torch.testing.assert_close(torch.func.grad(lambda x: module(x, k, v).sum())(q), leaf.grad)
    with pytest.raises(NotImplementedError, match="do not work under vmap"):
        torch.vmap(module)(*(x.unsqueeze(0) for x in (q, k, v)))
    with pytest.raises(NotImplementedError, match="there is no double backward"):
        (first,) = torch.autograd.grad(module(leaf, k, v).sum(), leaf, create_graph=True)
        first.sum().backward()
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        module(leaf, k, v).sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 4 * 40 * 40 * (2 + 5) * 64


def test_copies(rng: torch.Generator) -> None:
    mask = Mask.global_tokens(2, 9, (1, 1))
    for other in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask), mask.to("cpu")):
        assert torch.equal(other.dense(9), mask.dense(9))
    assert mask.intervals == 2
    assert Mask.chunks(3, 9).intervals == 1
    with pytest.raises(AttributeError):
        mask.first_row = mask.row_limit  # type: ignore[misc]


def test_dense_and_draw(rng: torch.Generator) -> None:
    """`dense` by the definition of band and mask; `draw` of what it is."""
    first, limit = (torch.randint(-2, 9, (2, 3, 8), generator=rng, dtype=torch.int32) for _ in range(2))
    mask = Mask(first, limit)
    for causal, window in ((False, None), (True, None), ("top_left", (2, 0)), (False, (1, 2))):
        seen = mask.dense(5, causal, window)
        for b, h, i, j in torch.cartesian_prod(*(torch.arange(n) for n in (2, 3, 5, 8))).tolist():
            position = i if causal == "top_left" else i + 3
            left, right = window or (99, 99)
            in_band = position - left <= j <= position + (0 if causal else right)
            assert bool(seen[b, h, i, j]) == (in_band and bool(first[b, h, j] <= i < limit[b, h, j]))
    drawn = mask.draw(5, batch=1, head=2).split("\n")
    assert drawn == ["".join("#" if x else "." for x in row) for row in mask.dense(5)[1, 2]]
    assert Mask.chunks(64, 256).draw(256, width=4) == "#...\n##..\n###.\n####"
    assert Mask.prefix_lm(0, 256).draw(256, width=4) == "+...\n#+..\n##+.\n###+"
    assert Mask.chunks(4, 8).rows_from(4).draw(4) == "\n".join(["########"] * 4)


@pytest.mark.cuda
@pytest.mark.kernel
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_graph_whose_mask_changes(device: str, head_dim: int, backend: str | None, rng: torch.Generator) -> None:
    q, k, v = inputs(device, rng, 700, head_dim=head_dim)
    dout = torch.randn(q.shape, generator=rng).to(q)
    mask = Mask.documents(torch.arange(700, device=device) // 100)
    flash_cute.fwd(q, k, v, mask=mask, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flash_cute.fwd(q, k, v, mask=mask, backend=backend)
        gradients = flash_cute.bwd(dout, q, k, v, out, lse, mask=mask, deterministic=True, backend=backend)
    for length in (7, 699, 128, 64):
        other = Mask.documents(torch.arange(700, device=device) // length)
        mask.first_row.copy_(other.first_row)
        mask.row_limit.copy_(other.row_limit)
        for x in (out, lse, *gradients):
            x.fill_(torch.nan)
        graph.replay()
        assert_matches(out, lse, q, k, v, mask=mask)
        assert_gradients_match(gradients, dout, q, k, v, mask=mask)


@pytest.mark.kernel
@pytest.mark.parametrize("name", ["tree", "global"])
def test_same_bits_every_time(device: str, name: str, backend: str | None, rng: torch.Generator) -> None:
    """100 calls, forward and deterministic backward; on the CPU 3."""
    length = 1500 if device == "cuda" else 150
    q, k, v = inputs(device, rng, length)
    dout = torch.randn(q.shape, generator=rng).to(q)
    row = torch.arange(length, device=device)
    mask = Mask.global_tokens(70, length, (99, 40), device=device)
    if name == "tree":
        mask = Mask.tree(row, (row // 64 + 1 + row % 3) * 64)
    first: Any = None
    for _ in range(100 if device == "cuda" else 3):
        out, lse = flash_cute.fwd(q, k, v, mask=mask, backend=backend)
        gradients = flash_cute.bwd(dout, q, k, v, out, lse, mask=mask, deterministic=True, backend=backend)
        results = (out, lse, *gradients)
        first = results if first is None else first
        assert same_bits(results, first)

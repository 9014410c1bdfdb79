"""The gradients at head dims 257 to 1024, for which the GPU has kernels of their own, deterministic in either mode."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from cases import CAUSAL, CUDA_DTYPES, Backward, Case, Causal, backward_plan, mask_name, params, score
from large_cases import CASES
from layouts import LAYOUTS, Layout, surrounded
from numerics import assert_gradients_match, nan_in_new_memory, same_bits, visible
from packed import EMPTY, UNEVEN, USED_K, USED_Q, assert_packed_gradients, make_backward, pack
from packed import flow as packed_flow

import flash_cute
from flash_cute.report import built_instances

HALF, BF16 = CUDA_DTYPES
CUDA = pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.cuda)])
MASKS = pytest.mark.parametrize("causal", CAUSAL, ids=mask_name)
BOTH = pytest.mark.parametrize("with_dlse", [False, True], ids=["out", "out and lse"])


@pytest.mark.kernel
@pytest.mark.parametrize(("device", "case"), params(cpu=CASES[::8], cuda=CASES))
def test_exact(device: str, case: Case, bwd: Backward, rng: torch.Generator) -> None:
    """Against float64, through out and the LSE. Rows that see no key have the gradient 0."""
    inputs, options = case.inputs(device, rng), case.options(device, rng)
    dout, dlse = case.flow(device, rng)
    given = bwd(dout, *inputs, case.causal, dlse=dlse, **options)
    assert_gradients_match(given, dout, *inputs, case.causal, dlse=dlse, **options)
    blind = ~visible(case.len_q, case.len_k, case.causal, device, case.window).any(-1)
    assert (given[0][:, :, blind] == 0).all()


@pytest.mark.kernel
@BOTH
@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(264, 264), (64, 1000)], ids=str)
def test_sinks(
    device: str,
    head_dim: int,
    head_dim_v: int,
    dtype: torch.dtype,
    with_dlse: bool,
    bwd: Backward,
    rng: torch.Generator,
) -> None:
    """In float16 with a gradient of the LSE the kernels read a scaled dO, see csrc/core/bwd_preprocess.cuh."""
    case = Case(head_dim, 133, 211, True, dtype, 2, 4, 2, head_dim_v, sinks=torch.float32)
    inputs, options = case.inputs(device, rng), case.options(device, rng)
    dout, dlse = case.flow(device, rng)
    options["dlse"] = dlse if with_dlse else None
    given = bwd(dout, *inputs, True, **options)
    assert_gradients_match(given, dout, *inputs, True, **options)


@pytest.mark.kernel
@pytest.mark.parametrize(("heads_q", "heads_kv"), [(6, 2), (8, 1), (3, 3)])
def test_grouped_heads(device: str, heads_q: int, heads_kv: int, bwd: Backward, rng: torch.Generator) -> None:
    """A CTA loops over the query heads of its KV head, each with few row tiles and many."""
    for length in (20, 300):
        q, k, v = (x := Case(264, length, 150, True, BF16, 2, heads_q, heads_kv)).inputs(device, rng)
        dout, dlse = x.flow(device, rng)
        assert_gradients_match(bwd(dout, q, k, v, True, dlse=dlse), dout, q, k, v, True, dlse=dlse)


@pytest.mark.kernel
@CUDA
@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(320, 320), (512, 512), (1024, 8), (1024, 1024)], ids=str)
def test_many_tiles_and_the_same_bits(
    device: str, head_dim: int, head_dim_v: int, dtype: torch.dtype, bwd: Backward, rng: torch.Generator
) -> None:
    """The ring of stages goes round many times, and a race would show in the bits; both modes are one."""
    case = Case(head_dim, 1501, 2001, True, dtype, 1, 4, 2, head_dim_v)
    q, k, v = case.inputs(device, rng)
    dout, dlse = case.flow(device, rng)
    given = bwd(dout, q, k, v, True, dlse=dlse, deterministic=True)
    assert_gradients_match(given, dout, q, k, v, True, dlse=dlse)
    for number in range(20):
        again = bwd(dout, q, k, v, True, dlse=dlse, deterministic=number % 2 == 0)
        assert same_bits(again, given)


@pytest.mark.kernel
@CUDA
@pytest.mark.parametrize("head_dim", [264, 384, 512, 520, 1024])
def test_numbers_of_tiles(device: str, head_dim: int, bwd: Backward, rng: torch.Generator) -> None:
    """Key tiles that no row sees, and of one row tile, two and more, and the reverse: phases of rings and messages."""
    for len_q, len_k in ((20, 64), (64, 20), (65, 129), (20, 300), (193, 64), (333, 193)):
        case = Case(head_dim, len_q, len_k, True, BF16, 1, 4, 2)
        for causal in (True, "top_left"):
            q, k, v = case.inputs(device, rng)
            dout, dlse = case.flow(device, rng)
            given = bwd(dout, q, k, v, causal, dlse=dlse)
            assert_gradients_match(given, dout, q, k, v, causal, dlse=dlse)
            assert same_bits(bwd(dout, q, k, v, causal, dlse=dlse), given)


@pytest.mark.kernel
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts(device: str, layout: Layout, bwd: Backward, rng: torch.Generator) -> None:
    case = Case(264, 33, 65, heads_q=4)
    q, k, v = (layout.make(x) for x in case.inputs(device, rng))
    dout = layout.make(case.flow(device, rng)[0])
    assert_gradients_match(bwd(dout, q, k, v, True), dout, q, k, v, True)


@pytest.mark.kernel
@pytest.mark.parametrize("head_dims", [(264, 264), (1000, 320)], ids=str)
def test_nan_around_the_tensors(device: str, head_dims: tuple[int, int], bwd: Backward, rng: torch.Generator) -> None:
    """Rows before and behind, and columns beside, those of a call: nothing of them is read."""
    case = Case(head_dims[0], 100, 200, head_dim_v=head_dims[1])
    q, k, v = case.inputs(device, rng)
    dout, dlse = case.flow(device, rng)
    given = bwd(*(surrounded(x) for x in (dout, q, k, v)), True, dlse=dlse)
    assert same_bits(given, bwd(dout, q, k, v, True, dlse=dlse))


@pytest.mark.kernel
@MASKS
@pytest.mark.parametrize("head_dims", [(264, 264), (320, 64), (576, 512), (1000, 1000)], ids=str)
def test_packed(
    device: str, head_dims: tuple[int, int], causal: Causal, backend: str | None, rng: torch.Generator
) -> None:
    packed = pack(UNEVEN, device, rng, head_dim=head_dims[0], head_dim_v=head_dims[1], around=3)
    dout, dlse = packed_flow(packed, rng)
    given = make_backward(backend)(dout, packed, causal, dlse=dlse)
    assert_packed_gradients(given, dout, packed, causal, dlse=dlse)


@pytest.mark.kernel
def test_packed_with_options(device: str, backend: str | None, rng: torch.Generator) -> None:
    packed = pack(UNEVEN, device, rng, head_dim=328, around=1)
    dout, dlse = packed_flow(packed, rng)
    options = {"window": (40, 20), "softcap": 3.0, "alibi_slopes": torch.rand(9, 4, generator=rng).to(device)}
    given = make_backward(backend)(dout, packed, False, dlse=dlse, **options)
    assert_packed_gradients(given, dout, packed, False, dlse=dlse, **options)


@pytest.mark.kernel
def test_packed_without_rows_or_keys(device: str, backend: str | None, rng: torch.Generator) -> None:
    packed = pack(EMPTY, device, rng, head_dim=264, around=5)
    dout, dlse = packed_flow(packed, rng)
    for gradient in make_backward(backend)(dout, packed, dlse=dlse):
        assert (gradient == 0).all()


@pytest.mark.kernel
@pytest.mark.parametrize("number", [math.nan, math.inf], ids=str)
@MASKS
def test_unused_rows_and_keys_do_not_matter(
    device: str, causal: Causal, number: float, backend: str | None, rng: torch.Generator
) -> None:
    """Whatever is there, and whatever flows back into those rows; their own gradients are 0."""
    packed = pack(UNEVEN, device, rng, head_dim=264, around=40)
    used_q, used_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in (USED_Q, USED_K))
    packed = packed.replace(seqused_q=used_q, seqused_k=used_k)
    dout, dlse = packed_flow(packed, rng)
    bwd = make_backward(backend)
    clean = bwd(dout, packed, causal, dlse=dlse, deterministic=True)
    assert_packed_gradients(clean, dout, packed, causal, dlse=dlse)
    rows, keys = packed.unused()
    q, k, v = (x.clone() for x in packed.tensors)
    q[rows], k[keys], v[keys], dout[rows], dlse[:, rows] = (number,) * 5
    assert same_bits(bwd(dout, packed.replace(q=q, k=k, v=v), causal, dlse=dlse, deterministic=True), clean)


@CUDA
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(264, 264), (512, 512), (1024, 1024), (1024, 64)], ids=str)
@pytest.mark.parametrize("chip", ["a100", "99kb", "h100"])
def test_every_ring(device: str, chip: str, head_dim: int, head_dim_v: int, rng: torch.Generator) -> None:
    """Few stages and many, this side's operands resident and not: the tables of all chips, on the GPU that there is."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the tables of all chips fit in an H100's shared memory, and perhaps not in this GPU's")
    for causal in (False, True):
        case = Case(head_dim, 313, 603, causal, BF16, 1, 4, 2, head_dim_v)
        q, k, v = case.inputs(device, rng)
        dout, dlse = case.flow(device, rng)
        backend = f"sm80:{chip}"
        with nan_in_new_memory(q):
            out, lse = torch.ops.flash_cute._fwd(q, k, v, *score(causal), backend)
            tensors = (dout, q, k, v, out, lse, dlse)
            given = torch.ops.flash_cute._bwd(*tensors, *score(causal), False, backend)[:3]
        assert_gradients_match(given, dout, q, k, v, causal, dlse=dlse)


@pytest.mark.kernel
@pytest.mark.parametrize("head_dim", [264, 513])
def test_through_autograd(device: str, head_dim: int, rng: torch.Generator) -> None:
    case = Case(head_dim, 65, 77, True, HALF, 1, 4, 2)
    leaves = [x.requires_grad_() for x in case.inputs(device, rng)]
    dout, dlse = case.flow(device, rng)
    out, lse = flash_cute.fwd(*leaves, True)
    given = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    assert_gradients_match(given, dout, *leaves, True, dlse=dlse)


@pytest.mark.parametrize("capability", [80, 86, 90])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(264, 264), (512, 512), (576, 512), (64, 1024), (1024, 1024)])
def test_plan(capability: int, head_dim: int, head_dim_v: int) -> None:
    if ("sm80", "bwd", 1024, 1024) not in built_instances():
        pytest.skip("this build has no sm80 kernels for large head dims")
    case = Case(head_dim, 300, 200, heads_q=4, head_dim_v=head_dim_v)
    q, k, v = case.inputs("cpu", torch.Generator().manual_seed(0))
    made = backward_plan(q, k, v, capability=capability, backend="sm80")
    kernel = "bwd_keys_kernel" if max(head_dim, head_dim_v) <= 512 else "bwd_keys_pair_kernel"
    assert (made["backend"], made["kernel"], made["kernel_head_dim"]) == ("sm80", kernel, 1024)
    assert (made["block_m"], made["block_n"], made["tiles"]) == (128, 64, 2 * 2 * 4)
    assert made["smem_bytes"] <= {80: 163, 86: 99, 90: 227}[capability] * 1024 and made["stages"] >= 3
    assert set(made["copies"].values()) == {None}
    row_tiles = 2 * 4 * 5
    statistics = 2 * 4 * 64 * row_tiles
    # No sums of dq, dk or dv; for pairs of CTAs their messages, see test_large_pairs_backward.py.
    messages = 0 if kernel == "bwd_keys_kernel" else 66 * 4 * (64 * 128 * 2 + 256)
    assert statistics <= made["workspace_bytes"] <= statistics + 4096 + messages
    parts = [-(-x // 512) for x in (head_dim, head_dim_v)]
    split = f"dk, dv and dq are split over {parts[0]}, {parts[1]} and {parts[0]} CTAs per tile"
    assert any(split in reason for reason in made["reasons"])
    assert any("Deterministic in either mode" in reason for reason in made["reasons"])
    explanation = flash_cute.explain(q, k, v, capability=capability, backend="sm80", backward=True)
    assert f"flash_cute::sm80::backward::streamed::{kernel}" in str(explanation)
    compiled = explanation.data["compiled"]
    assert compiled is None or compiled["spill_stores"] == compiled["spill_loads"] == 0


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "kernel_head_dim", "ctas"),
    [(264, 320, 320, 1), (512, 64, 512, 2), (64, 328, 512, 2), (520, 512, 1024, 4)],
)
def test_plan_on_sm90(head_dim: int, head_dim_v: int, kernel_head_dim: int, ctas: int) -> None:
    """One CTA per tile, or a cluster of them, each with at most 512 columns of half of the tensors."""
    if ("sm90", "bwd", kernel_head_dim, kernel_head_dim) not in built_instances():
        pytest.skip("this build has no sm90 kernels for this head dim")
    case = Case(head_dim, 300, 200, heads_q=4, head_dim_v=head_dim_v)
    q, k, v = case.inputs("cpu", torch.Generator().manual_seed(0))
    made = backward_plan(q, k, v, capability=90)
    assert (made["backend"], made["kernel"]) == ("sm90", "bwd_keys_kernel")
    assert (made["kernel_head_dim"], made["kernel_head_dim_v"]) == (kernel_head_dim, kernel_head_dim)
    assert (made["block_m"], made["block_n"], made["tiles"]) == (64, 64, 2 * 2 * 4)
    assert made["smem_bytes"] <= 227 * 1024 and set(made["copies"].values()) == {None}
    statistics = 2 * 4 * 64 * (2 * 4 * 5)
    assert statistics <= made["workspace_bytes"] <= statistics + 4096  # no sums of dq, dk or dv
    ctas_per_tile = "one CTA, with all columns" if ctas == 1 else f"a cluster of {ctas} CTAs, half of them for q and k"
    assert any(f"A tile has {ctas_per_tile}" in reason for reason in made["reasons"])
    assert any("Deterministic in either mode" in reason for reason in made["reasons"])
    explanation = flash_cute.explain(q, k, v, capability=90, backward=True)
    assert "flash_cute::sm90::backward::dq_in_registers_large::bwd_keys_kernel" in str(explanation)
    compiled = explanation.data["compiled"]
    assert compiled is None or compiled["spill_stores"] == compiled["spill_loads"] == 0


def test_plan_of_nothing() -> None:
    if ("sm80", "bwd", 1024, 1024) not in built_instances():
        pytest.skip("this build has no sm80 kernels for large head dims")
    for len_q, len_k in ((0, 5), (5, 0)):
        case = dataclasses.replace(Case(512, 1, 1), len_q=len_q, len_k=len_k)
        q, k, v = case.inputs("cpu", torch.Generator().manual_seed(0))
        assert backward_plan(q, k, v, capability=80)["workspace_bytes"] == 0

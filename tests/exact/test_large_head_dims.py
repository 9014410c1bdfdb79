"""Head dims 257 to 1024: all that the smaller ones have, by kernels of their own on the GPU."""

from __future__ import annotations

import math

import pytest
import torch
from cases import CAUSAL, CUDA_DTYPES, Case, Causal, Forward, mask_name, plan, score
from checks import on_each_device
from large_cases import CASES
from layouts import LAYOUTS, Layout
from numerics import assert_matches, nan_in_new_memory, same_bits
from packed import UNEVEN, assert_packed_matches, make_forward, pack

import flash_cute
from flash_cute.report import built_instances

HALF, BF16 = CUDA_DTYPES
CUDA = pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.cuda)])
MASKS = pytest.mark.parametrize("causal", CAUSAL, ids=mask_name)


@pytest.mark.kernel
@pytest.mark.parametrize(("device", "case"), on_each_device(CASES))
def test_forward(device: str, case: Case, fwd: Forward, rng: torch.Generator) -> None:
    inputs, options = case.inputs(device, rng), case.options(device, rng)
    out, lse = fwd(*inputs, case.causal, **options)
    assert_matches(out, lse, *inputs, case.causal, **options)


@pytest.mark.kernel
@CUDA
@pytest.mark.parametrize("head_dim", [320, 512, 1024])
def test_many_key_tiles_and_the_same_bits(device: str, head_dim: int, fwd: Forward, rng: torch.Generator) -> None:
    """The ring of stages goes round many times, and a race would show in the bits."""
    q, k, v = Case(head_dim, 1000, 3001, True, BF16, 1, 4, 2).inputs(device, rng)
    given = fwd(q, k, v, True)
    assert_matches(*given, q, k, v, True)
    for _ in range(20):
        assert same_bits(fwd(q, k, v, True), given)


@pytest.mark.kernel
@CUDA
@pytest.mark.parametrize("head_dim", [320, 512, 1024])
def test_growing_scores(device: str, head_dim: int, fwd: Forward, rng: torch.Generator) -> None:
    """Keys in ascending order of their score, and in descending order: the maximum is raised often, and never."""
    q, k, v = Case(head_dim, 130, 1500, False, BF16, 1, 1, 1).inputs(device, rng)
    q = q[:, :, :1].expand(q.shape).contiguous()
    order = (q[0, 0, 0].float() @ k[0, 0].float().T).argsort()
    for keys in (order, order.flip(0)):
        some_k, some_v = (8 * x[:, :, keys].contiguous() for x in (k, v))
        assert_matches(*fwd(q, some_k, some_v), q, some_k, some_v)


@pytest.mark.kernel
@CUDA
@pytest.mark.parametrize("head_dim", [320, 512, 1024])
def test_rows_grow_at_different_keys(device: str, head_dim: int, fwd: Forward, rng: torch.Generator) -> None:
    """The warps of a warpgroup have to agree on each rescale of the accumulator."""
    q, k, v = Case(head_dim, 300, 1500, False, BF16, 1, 2, 1).inputs(device, rng)
    rising = torch.linspace(8, 0.1, k.shape[2], device=device, dtype=k.dtype)[:, None]
    for scaled in (k * rising, k * rising.flip(0)):
        for causal in (False, True):
            assert_matches(*fwd(q, scaled, v, causal), q, scaled, v, causal)


@pytest.mark.kernel
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts(device: str, layout: Layout, fwd: Forward, rng: torch.Generator) -> None:
    q, k, v = (layout.make(x) for x in Case(264, 33, 65, heads_q=4).inputs(device, rng))
    assert_matches(*fwd(q, k, v, True), q, k, v, True)


@pytest.mark.kernel
@MASKS
@pytest.mark.parametrize("head_dims", [(264, 264), (320, 64), (456, 456), (576, 512), (1000, 1000)], ids=str)
def test_packed(
    device: str, head_dims: tuple[int, int], causal: Causal, backend: str | None, rng: torch.Generator
) -> None:
    packed = pack(UNEVEN, device, rng, head_dim=head_dims[0], head_dim_v=head_dims[1], around=3)
    assert_packed_matches(*make_forward(backend)(packed, causal), packed, causal)


@pytest.mark.kernel
@pytest.mark.parametrize("number", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("head_dim", [264, 1000])
def test_nan_outside_of_the_lengths(
    device: str, head_dim: int, number: float, fwd: Forward, rng: torch.Generator
) -> None:
    """Rows before and behind, and columns beside, those that a call sees."""
    q, k, v = Case(head_dim, 100, 200).inputs(device, rng)

    def inside(x: torch.Tensor) -> torch.Tensor:
        wide = torch.full((*x.shape[:2], x.shape[2] + 130, head_dim + 128), number, dtype=x.dtype, device=device)
        view = wide[:, :, 65 : 65 + x.shape[2], 64 : 64 + head_dim]
        view.copy_(x)
        return view

    assert same_bits(fwd(inside(q), inside(k), inside(v), True), fwd(q, k, v, True))


@CUDA
@pytest.mark.parametrize("head_dim", [264, 512, 1024])
@pytest.mark.parametrize("chip", ["a100", "99kb", "h100"])
def test_every_ring(device: str, chip: str, head_dim: int, rng: torch.Generator) -> None:
    """Few stages and many, Q resident and not: the tables of all chips, on the GPU that there is."""
    for causal in (False, True):
        q, k, v = Case(head_dim, 313, 603, causal, BF16, 1, 4, 2).inputs(device, rng)
        with nan_in_new_memory(q):
            out, lse = torch.ops.flash_cute._fwd(q, k, v, *score(causal), f"sm80:{chip}")
        assert_matches(out, lse, q, k, v, causal)


@pytest.mark.kernel
@CUDA
@pytest.mark.parametrize("heads", [1, 7, 150])
@pytest.mark.parametrize("head_dim", [328, 512, 520, 1024])
def test_numbers_of_key_tiles(device: str, head_dim: int, heads: int, fwd: Forward, rng: torch.Generator) -> None:
    """Row tiles of none, one, two and more key tiles, one after the other in a CTA: phases of rings and messages."""
    for len_k in (20, 64, 65, 129, 193, 333):
        q, k, v = Case(head_dim, 300, len_k, True, BF16, 1, heads, 1).inputs(device, rng)
        given = fwd(q, k, v, True)
        assert_matches(*given, q, k, v, True)
        assert same_bits(fwd(q, k, v, True), given)


@pytest.mark.parametrize("head_dim", [328, 512, 520, 1024])
def test_plan_on_sm90(head_dim: int) -> None:
    """A row tile has two CTAs: of 128 rows up to 512 columns, of 64 above."""
    kernel_head_dim = 512 if head_dim <= 512 else 1024
    if ("sm90", "fwd", kernel_head_dim, kernel_head_dim) not in built_instances():
        pytest.skip("this build has no sm90 kernels for large head dims")
    name, block_m = ("fwd_pair_by_turns_kernel", 128) if head_dim <= 512 else ("fwd_pair_by_columns_kernel", 64)
    row_tiles = -(-300 // block_m)
    for heads in (2, 200):
        q = torch.empty(1, heads, 300, head_dim, dtype=HALF)
        made = plan(q, q, q, capability=90)
        assert (made["backend"], made["kernel"], made["block_m"], made["block_n"]) == ("sm90", name, block_m, 64)
        assert made["column_parts"] == 2 and made["smem_bytes"] <= 227 * 1024
        assert made["tiles"] == heads * row_tiles
        assert made["workspace_bytes"] == (4 if heads * row_tiles > 132 // 2 else 0)
    compiled = flash_cute.explain(q, q, q, capability=90).data["compiled"]
    assert compiled is None or compiled["spill_stores"] == compiled["spill_loads"] == 0


@pytest.mark.parametrize("capability", [80, 86])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(264, 264), (512, 512), (576, 512), (64, 1024), (1024, 1024)])
def test_plan(capability: int, head_dim: int, head_dim_v: int) -> None:
    if ("sm80", "fwd", 1024, 1024) not in built_instances():
        pytest.skip("this build has no sm80 kernels for large head dims")
    q = torch.empty(1, 2, 300, head_dim, dtype=HALF)
    v = torch.empty(1, 2, 300, head_dim_v, dtype=HALF)
    made = plan(q, q, v, capability=capability)
    kernel = "fwd_streamed_kernel" if head_dim_v <= 512 else "fwd_streamed_pair_kernel"
    assert (made["backend"], made["kernel"], made["kernel_head_dim"]) == ("sm80", kernel, 1024)
    assert made["column_parts"] == -(-head_dim_v // 512)
    assert made["smem_bytes"] <= (163 if capability == 80 else 99) * 1024
    assert made["stages"] >= 3 and made["tiles"] == 2 * 5
    assert set(made["copies"].values()) == {None} and (made["workspace_bytes"] == 0) == (head_dim_v <= 512)
    explanation = flash_cute.explain(q, q, v, capability=capability)
    assert f"flash_cute::sm80::forward::streamed::{kernel}" in str(explanation)
    compiled = explanation.data["compiled"]
    assert compiled is None or compiled["spill_stores"] == compiled["spill_loads"] == 0

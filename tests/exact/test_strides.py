"""Any strides: views are read in place where a 16-byte load can, copied once where not, never misread."""

from __future__ import annotations

import pytest
import torch
from cases import CUDA_DTYPES, Case, Causal, Forward, plan
from layouts import LAYOUTS, Layout
from numerics import assert_matches

Packed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.mark.kernel
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_all_three(device: str, layout: Layout, causal: Causal, fwd: Forward, rng: torch.Generator) -> None:
    case = Case(64, 77, 131, heads_q=4)
    q, k, v = (layout.make(x) for x in case.inputs(device, rng))
    out, lse = fwd(q, k, v, causal)
    assert_matches(out, lse, q, k, v, causal)
    assert out.stride() == torch.empty_like(q).stride()
    assert lse.is_contiguous()


@pytest.mark.kernel
@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_one_alone(device: str, layout: Layout, which: int, fwd: Forward, rng: torch.Generator) -> None:
    inputs = list(Case(96, 65, 77, dtype=torch.bfloat16).inputs(device, rng))
    inputs[which] = layout.make(inputs[which])
    assert_matches(*fwd(*inputs, True), *inputs, True)


@pytest.mark.kernel
@pytest.mark.parametrize("head_dim", [33, 40, 100])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_odd_head_dims(device: str, layout: Layout, head_dim: int, fwd: Forward, rng: torch.Generator) -> None:
    q, k, v = (layout.make(x) for x in Case(head_dim, 65, 77).inputs(device, rng))
    out, lse = fwd(q, k, v, True)
    assert_matches(out, lse, q, k, v, True)
    assert out.stride() == torch.empty_like(q).stride()


@pytest.mark.kernel
@pytest.mark.sanitizer
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("name", ["bnhd", "surrounded", "one_of_three", "misaligned_storage"])
def test_small(device: str, name: str, fwd: Forward, rng: torch.Generator) -> None:
    layout = next(x for x in LAYOUTS if x.name == name)
    q, k, v = (layout.make(x) for x in Case(64, 65, 77).inputs(device, rng))
    assert_matches(*fwd(q, k, v, True), q, k, v, True)


def _packed_qkv(x: torch.Tensor) -> Packed:
    """(B, N, 3, H, D), as one projection of all three gives it."""
    q, k, v = x.view(*x.shape[:2], 3, 4, 64).transpose(1, 3).unbind(2)
    return q, k, v


def _packed_heads(x: torch.Tensor) -> Packed:
    """(B, N, Hq + 2 Hkv, D), as Llama's fused projection has it."""
    q, k, v = x.view(*x.shape[:2], 12, 64).transpose(1, 2).split([8, 2, 2], dim=1)
    return q, k, v


def _packed_a_head(x: torch.Tensor) -> Packed:
    """(B, N, H, 3 D), as GPT-NeoX has it."""
    q, k, v = x.view(*x.shape[:2], 4, 192).transpose(1, 2).split(64, dim=-1)
    return q, k, v


@pytest.mark.kernel
@pytest.mark.parametrize("pack", [_packed_qkv, _packed_heads, _packed_a_head])
@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
def test_views_of_one_packed_tensor(
    device: str, pack: object, dtype: torch.dtype, fwd: Forward, rng: torch.Generator
) -> None:
    assert callable(pack)
    q, k, v = pack(torch.randn(2, 133, 768, generator=rng).to(device, dtype))
    assert set(plan(q, k, v, capability=80)["copies"].values()) == {None}
    out, lse = fwd(q, k, v, True)
    assert_matches(out, lse, q, k, v, True)
    assert out.stride() == torch.empty_like(q).stride()


@pytest.mark.kernel
def test_q_k_and_v_may_be_one_tensor(device: str, fwd: Forward, rng: torch.Generator) -> None:
    q, _, _ = Case(64, 130, 130).inputs(device, rng)
    assert_matches(*fwd(q, q, q, True), q, q, q, True)


@pytest.mark.kernel
def test_strides_of_dims_of_size_one_do_not_matter(device: str, fwd: Forward, rng: torch.Generator) -> None:
    q, k, v = Case(64, 1, 1, batch=1, heads_q=1, heads_kv=1).inputs(device, rng)
    q, k, v = (x.as_strided(x.shape, (3, 5, 7, 1)) for x in (q, k, v))
    assert set(plan(q, k, v, capability=80)["copies"].values()) == {None}
    assert_matches(*fwd(q, k, v), q, k, v)


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_plan_says_what_is_copied(layout: Layout, which: str, rng: torch.Generator) -> None:
    inputs = dict(zip("qkv", Case(64, 65, 77).inputs("cpu", rng), strict=True))
    inputs[which] = layout.make(inputs[which])
    copies = plan(*inputs.values(), capability=80)["copies"]
    for name in "qkv":
        read_in_place = name != which or layout.in_place
        assert (copies[name] is None) == read_in_place, f"{name}: {copies[name]}"


@pytest.mark.kernel
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("layout", [x for x in LAYOUTS if x.in_place], ids=str)
def test_in_place_needs_no_memory_but_outputs_and_workspace(
    device: str, layout: Layout, fwd: Forward, backend: str | None, rng: torch.Generator
) -> None:
    import flash_cute

    q, k, v = (layout.make(x) for x in Case(64, 64, 4096, batch=1, heads_q=8).inputs(device, rng))
    flash_cute.fwd(q, k, v, backend=backend)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = flash_cute.fwd(q, k, v, backend=backend)
    grown = torch.cuda.max_memory_allocated() - before
    workspace = plan(q, k, v, backend=backend)["workspace_bytes"]
    assert workspace < 2**20  # k alone is more
    # Every allocation is rounded up to 512 bytes.
    assert grown <= out.untyped_storage().nbytes() + lse.untyped_storage().nbytes() + workspace + 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "shape, strides",
    [((3, 1, 17, 16), (48, 1, 0, 1)), ((2, 1, 5, 16), (40, 1, 1, 1)), ((1, 2, 17, 16), (0, 0, 1, 1))],
    ids=str,
)
@pytest.mark.parametrize("device", ["cpu"])
def test_rows_that_overlap(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, fwd: Forward, rng: torch.Generator
) -> None:
    """An out like such a q may have its columns apart, which PyTorch's kernel for the CPU would write elsewhere."""
    q = torch.randn(200, dtype=dtype, generator=rng).as_strided(shape, strides)
    k = torch.randn((shape[0], shape[1], 33, 16), dtype=dtype, generator=rng)
    for causal in (False, True, "top_left"):
        out, lse = fwd(q, k, k, causal)
        assert_matches(out, lse, q, k, k, causal)
        assert out.stride() == torch.empty_like(q).stride()

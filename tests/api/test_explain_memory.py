"""The workspace that `explain` states is what the allocator is asked for beside the results, whatever the options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CUDA_DTYPES, Case
from packed import SELF, UNEVEN, flow, pack

import flash_cute
from flash_cute.report import built_architectures

pytestmark = pytest.mark.kernel

ON_CUDA = [pytest.param("cuda", marks=pytest.mark.cuda)]
HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256), (320, 320), (512, 512), (1024, 1024))
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (30, 0)},
    "softcap": {"softcap": 30.0, "causal": True},
    "slopes": {"alibi_slopes": "slopes"},
    "sinks": {"sinks": torch.float32},
    "sinks of 16 bits": {"sinks": "dtype", "causal": True},
    "sinks and softcap": {"sinks": torch.float32, "softcap": 30.0},
}


def _options(name: str, heads: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    options = dict(OPTIONS[name])
    if "sinks" in options:
        options["sinks"] = torch.zeros(heads, dtype=dtype if options["sinks"] == "dtype" else torch.float32).to(device)
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.full((heads,), 0.1, device=device)
    return options


def _requested(call: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[int, tuple[torch.Tensor, ...]]:
    """The bytes that a call asks the allocator for, and what it returns."""
    before = torch.cuda.memory_stats()["requested_bytes.all.allocated"]
    results = call()
    return torch.cuda.memory_stats()["requested_bytes.all.allocated"] - before, results


def _assert_asks_for(workspace: int, call: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    requested, results = _requested(call)
    assert requested == workspace + sum(x.numel() * x.element_size() for x in results)
    return results


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
@pytest.mark.parametrize("device", ON_CUDA)
def test_dense(
    device: str,
    dtype: torch.dtype,
    head_dims: tuple[int, int],
    name: str,
    backend: str | None,
    rng: torch.Generator,
) -> None:
    head_dim, head_dim_v = head_dims
    case = Case(head_dim, 300, 500, dtype=dtype, heads_q=4, head_dim_v=head_dim_v)
    q, k, v = case.inputs(device, rng)
    dout, dlse = case.flow(device, rng)
    options = _options(name, 4, dtype, device) | {"backend": backend}
    said = flash_cute.explain(q, k, v, **options).data
    out, lse = _assert_asks_for(said["workspace_bytes"], lambda: flash_cute.fwd(q, k, v, **options))
    for flows in (None, dlse):
        for deterministic in (False, True):
            asked = {**options, "deterministic": deterministic}
            said = flash_cute.explain(q, k, v, backward=True, dlse=flows is not None, **asked).data
            if any(said["copies"].values()):
                continue  # sm80 with two head dims: the copies ask for memory, too
            call = {"dlse": flows, **asked}
            _assert_asks_for(said["workspace_bytes"], lambda c=call: flash_cute.bwd(dout, q, k, v, out, lse, **c))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("head_dim", [64, 128, 256, 320, 512])
@pytest.mark.parametrize("lengths", [UNEVEN, SELF, SELF * 60], ids=["uneven", "self", "many"])
@pytest.mark.parametrize("device", ON_CUDA)
def test_packed(
    device: str,
    lengths: tuple[tuple[int, int], ...],
    head_dim: int,
    name: str,
    backend: str | None,
    rng: torch.Generator,
) -> None:
    packed = pack(lengths, device, rng, head_dim=head_dim)
    dout, dlse = flow(packed, rng)
    options = _options(name, 4, packed.q.dtype, device) | {"backend": backend}
    of_lengths = {"cu_seqlens_q": packed.cu_seqlens_q, "cu_seqlens_k": packed.cu_seqlens_k}
    said = flash_cute.explain(*packed.tensors, **options, **of_lengths).data
    out, lse = _assert_asks_for(said["workspace_bytes"], lambda: flash_cute.varlen_fwd(*packed.call, **options))
    for flows in (None, dlse):
        for deterministic in (False, True):
            asked = {**options, "deterministic": deterministic}
            said = flash_cute.explain(
                *packed.tensors, backward=True, dlse=flows is not None, **asked, **of_lengths
            ).data
            tensors = (dout, *packed.tensors, out, lse, packed.cu_seqlens_q, packed.cu_seqlens_k)
            call = {"dlse": flows, **asked}
            _assert_asks_for(said["workspace_bytes"], lambda t=tensors, c=call: flash_cute.varlen_bwd(*t, **c))


@pytest.mark.skipif(built_architectures() != {"sm80", "sm90"}, reason="this build has not both architectures' kernels")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
def test_dlse_with_sinks(dtype: torch.dtype, capability: int) -> None:
    """Its scaled dO is kept, in 16 bits, where dS is rounded to float16."""
    q, k = (torch.empty(2, 8, rows, 64, dtype=dtype, device="meta") for rows in (1000, 3000))
    sinks = torch.empty(8, device="meta")

    def stated(**options: Any) -> int:
        said = flash_cute.explain(q, k, k, capability=capability, backward=True, **options).data
        assert said["dlse"] == options.get("dlse", False)
        return int(said["workspace_bytes"])

    assert stated() == stated(dlse=True)
    scaled = stated(dlse=True, sinks=sinks) - stated(sinks=sinks)
    assert scaled == (2 * q.numel() if dtype == torch.float16 else 0)


@pytest.mark.parametrize("dlse", [None, 1, torch.zeros(1)], ids=["None", "1", "tensor"])
def test_dlse_is_a_bool(dlse: Any) -> None:
    q = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ValueError, match=r"^flash_cute: dlse: expected False or True"):
        flash_cute.explain(q, q, q, backward=True, dlse=dlse)
    assert flash_cute.explain(q, q, q, backward=True, dlse=True).data["dlse"] is True

"""The backward of many short sequences: in parts, whose workspace is not far larger than the tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bad_offsets import bad_offsets
from packed import Packed, assert_packed_gradients, flow, make_backward, pack

import flash_cute
from flash_cute.report import built_architectures

pytestmark = pytest.mark.kernel

ON_CUDA = [pytest.param("cuda", marks=pytest.mark.cuda)]
SMALL = 64 << 20  # a workspace that is never divided


def planned(packed: Packed, **options: Any) -> dict[str, Any]:
    q, k, v, of_q, of_k = packed.call
    return flash_cute.explain(q, k, v, True, cu_seqlens_q=of_q, cu_seqlens_k=of_k, backward=True, **options).data


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256, 512])
@pytest.mark.parametrize(("sequences", "length"), [(100_000, 10), (20_000, 1), (3_000, 40), (1_000, 200)])
def test_workspace(capability: int, head_dim: int, sequences: int, length: int) -> None:
    """At most 4 times q's bytes, in a kernel whose head dim is q's."""
    if not built_architectures():
        pytest.skip("this build has no kernels to plan for")
    q, k, v = (torch.empty(sequences * length, heads, head_dim, dtype=torch.float16) for heads in (16, 4, 4))
    of = (torch.arange(sequences + 1) * length).int()
    found = planned(Packed(q, k, v, of, of), capability=capability)
    assert found["workspace_bytes"] <= max(SMALL, 4 * 2 * q.numel())


def short_sequences(device: str, head_dim: int, rng: torch.Generator) -> Packed:
    """300 of 0 to 12 rows, 16 heads: a row tile for each head of each is more than SMALL."""
    lengths = torch.randint(0, 13, (300, 2), generator=rng).tolist()
    return pack(lengths, device, rng, head_dim=head_dim, heads_q=16, heads_kv=4, around=3)


@pytest.mark.parametrize("options", ["none", "sinks", "slopes", "seqused", "bad_offsets"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("device", ON_CUDA)
def test_gradients_of_a_call_in_parts(
    device: str, head_dim: int, deterministic: bool, options: str, backend: str | None, rng: torch.Generator
) -> None:
    packed = short_sequences(device, head_dim, rng)
    given: dict[str, Any] = {}
    if options == "sinks":
        given["sinks"] = torch.randn(16, generator=rng).to(device)
    elif options == "slopes":
        given["alibi_slopes"] = torch.rand(300, 16, generator=rng).to(device)
    elif options == "seqused":
        used = torch.randint(-1, 14, (2, 300), generator=rng).to(device, torch.int32)
        packed = packed.replace(seqused_q=used[0], seqused_k=used[1])
    elif options == "bad_offsets":
        of = [bad_offsets("random", 300, x.shape[0], rng).to(device) for x in (packed.q, packed.k)]
        packed = packed.replace(cu_seqlens_q=of[0], cu_seqlens_k=of[1])
    plan = planned(packed, deterministic=deterministic, backend=backend)
    assert any("launches" in reason for reason in plan["reasons"])
    dout, dlse = flow(packed, rng)
    call = make_backward(backend)
    gradients = call(dout, packed, True, dlse=dlse, deterministic=deterministic, **given)
    assert_packed_gradients(gradients, dout, packed, True, dlse=dlse, **given)
    if deterministic:
        again = call(dout, packed, True, dlse=dlse, deterministic=True, **given)
        assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("device", ON_CUDA)
def test_memory_of_a_call_in_parts(device: str, head_dim: int, backend: str | None, rng: torch.Generator) -> None:
    packed = pack(((10, 10),) * 5000, device, rng, head_dim=head_dim, heads_q=16, heads_kv=4)
    out, lse = flash_cute.varlen_fwd(*packed.call, True, backend=backend)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = flash_cute.varlen_bwd(out, *packed.tensors, out, lse, *packed.call[3:], True, backend=backend)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= sum(x.numel() * 2 for x in gradients) + 4 * 2 * packed.q.numel() + (4 << 20)

"""`explain` says what runs: the plan of the launch, the compiler's figures of that kernel, and why."""

from __future__ import annotations

import json

import cases
import pytest
import torch

import flash_cute
from flash_cute import report
from flash_cute._kernel_names import kernel_matches
from flash_cute.plan_data import PlanData

CAPABILITIES = (80, 86, 89, 90, 120)
BACKWARDS = {arch: dims for arch in ("sm80", "sm90") if (dims := cases.backward_head_dims(arch))}

needs_kernels = pytest.mark.skipif(not report.load()["kernels"], reason="this build has no CUDA kernels")


def meta(head_dim: int, dtype: torch.dtype = torch.float16, length: int = 1000) -> torch.Tensor:
    return torch.empty(2, 8, length, head_dim, dtype=dtype, device="meta")


def test_cpu():
    q, k, v = (torch.randn(1, 4, n, 16) for n in (5, 9, 9))
    explanation = flash_cute.explain(q, k, v, True)
    assert explanation.data["backend"] == "cpu"
    assert explanation.data["copies"] == {"q": None, "k": None, "v": None, "out": None}
    assert "first 4 keys" in str(explanation)
    half = flash_cute.explain(q.half(), k.half(), v.half())
    assert half.data["copies"]["q"] == "computed in float32"
    strided = flash_cute.explain(q, k, torch.randn(1, 4, 16, 9).mT)
    assert strided.data["copies"] == {"q": None, "k": None, "v": "its last dim is not contiguous", "out": None}


def test_backward_on_the_cpu():
    q, k, v = (torch.randn(1, 4, n, 16).half() for n in (5, 9, 9))
    explanation = flash_cute.explain(q, k, v, True, backward=True)
    assert explanation.data["backend"] == "cpu"
    assert explanation.data["deterministic"] is True
    assert explanation.data["copies"] == {
        **dict.fromkeys(("q", "k", "v", "out", "dout"), "computed in float32"),
        **dict.fromkeys(("dq", "dk", "dv")),
    }
    assert "5 query rows at a time" in str(explanation)


@pytest.mark.skipif(not BACKWARDS, reason="this build has no backward kernels")
@pytest.mark.parametrize("backend", BACKWARDS)
def test_backward(backend):
    q, k = meta(100, length=300), torch.empty(2, 2, 500, 100, dtype=torch.float16, device="meta")
    options = {"backend": backend, "capability": 90, "backward": True}
    explanation = flash_cute.explain(q, k, k, True, deterministic=True, **options)
    data, text = explanation.data, str(explanation)
    assert data["kernel"] == "bwd_kernel"
    assert data["deterministic"] is True
    assert data["tiles"] == 2 * 2 * -(-500 // data["block_n"])
    assert set(data["copies"]) == {"q", "k", "v", "out", "dout", "dq", "dk", "dv"}
    assert all("padded" in reason for reason in data["copies"].values())
    assert f"flash_cute::{backend}::backward::dq_in_memory::bwd_kernel" in text
    assert f"workspace      {data['workspace_bytes'] / 2**20:.1f} MiB" in text
    assert "Deterministic: " in text
    assert "4 query heads" in text
    assert max(map(len, text.splitlines())) <= 110
    other = flash_cute.explain(q, k, k, True, **options)
    assert other.data["deterministic"] is False
    assert "Not deterministic: " in str(other)
    torch.use_deterministic_algorithms(True)
    try:
        assert flash_cute.explain(q, k, k, True, **options).data == data
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.skipif(not BACKWARDS, reason="this build has no backward kernels")
def test_backward_without_work():
    q, k = meta(64), torch.empty(2, 8, 0, 64, dtype=torch.float16, device="meta")
    explanation = flash_cute.explain(q, k, k, capability=80 if "sm80" in BACKWARDS else 90, backward=True)
    assert explanation.data["workspace_bytes"] == 0
    assert "Nothing is launched" in str(explanation)


@pytest.mark.skipif(not BACKWARDS, reason="this build has no backward kernels")
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", cases.CUDA_DTYPES, ids=cases.dtype_name)
@pytest.mark.parametrize("causal", [False, True])
def test_every_backward_plan_has_its_compiled_kernel(capability, dtype, causal):
    for backend in BACKWARDS if capability == 90 else {"sm80"}.intersection(BACKWARDS):
        for head_dim in BACKWARDS[backend]:
            x = meta(head_dim, dtype)
            data = flash_cute.explain(x, x, x, causal, backend=backend, capability=capability, backward=True).data
            compiled = data["compiled"]
            assert compiled is not None, (head_dim, backend)
            assert 0 < compiled["registers"] <= 255
            assert kernel_matches(data, compiled["kernel"])
            assert not any(data["copies"].values())


def test_data_is_plain_and_a_copy():
    q = torch.randn(1, 4, 5, 16)
    explanation = flash_cute.explain(q, q, q)
    data = explanation.to_dict()
    assert json.loads(json.dumps(data)) == explanation.data
    data["copies"]["q"] = "changed"
    assert explanation.data["copies"]["q"] is None


def test_same_errors_as_the_call():
    q = torch.randn(1, 4, 5, 16)
    for arguments, options in [((q, q[:, :3], q[:, :3]), {}), ((q, q, q.double()), {}), ((q, q, q), {"scale": 0.0})]:
        with pytest.raises(ValueError) as of_fwd:
            flash_cute.fwd(*arguments, **options)
        with pytest.raises(ValueError) as of_explain:
            flash_cute.explain(*arguments, **options)
        assert str(of_fwd.value) == str(of_explain.value)


@needs_kernels
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", cases.CUDA_DTYPES, ids=cases.dtype_name)
@pytest.mark.parametrize("causal", [False, True])
def test_every_plan_has_its_compiled_kernel(capability, dtype, causal):
    for head_dim in cases.INSTANCE_HEAD_DIMS:
        x = meta(head_dim, dtype)
        for backend in {"sm80"} if capability != 90 else {"sm80", None}:
            data = flash_cute.explain(x, x, x, causal, backend=backend, capability=capability).data
            compiled = data["compiled"]
            assert compiled is not None, (head_dim, backend)
            assert 0 < compiled["registers"] <= 255
            assert kernel_matches(data, compiled["kernel"])
            assert not any(data["copies"].values())


@needs_kernels
def test_code_of_the_right_architecture():
    x = meta(64)
    loaded = {
        capability: flash_cute.explain(x, x, x, backend="sm80", capability=capability).data["compiled"]["arch"]
        for capability in CAPABILITIES
    }
    assert loaded == {80: "sm_80", 86: "sm_80", 89: "sm_80", 90: "sm_90", 120: "sm_120"}
    from_ptx = flash_cute.explain(x, x, x, backend="sm80", capability=100)
    assert from_ptx.data["compiled"] is None
    assert "from PTX" in str(from_ptx)


@needs_kernels
def test_padding_and_copies_are_named():
    x = meta(60)
    explanation = flash_cute.explain(x, x, x, capability=80)
    assert explanation.data["head_dim"] == 60
    assert explanation.data["kernel_head_dim"] == 64
    assert all("padded" in reason for reason in explanation.data["copies"].values())
    text = str(explanation)
    assert "head dim 64 (the tensors have 60)" in text
    assert "q: head dim 60 is padded to 64" in text

    strided = flash_cute.explain(
        meta(64), meta(64), torch.empty(2, 8, 64, 1000, device="meta").half().mT, capability=80
    )
    assert strided.data["copies"] == {"q": None, "k": None, "v": "its last dim is not contiguous", "out": None}


@needs_kernels
def test_text_is_tidy():
    x = meta(60)
    lines = str(flash_cute.explain(x, x, x, True, capability=90)).splitlines()
    assert [line.split("  ")[0] for line in lines if not line.startswith(" ")] == [
        "backend",
        "device",
        "kernel",
        "tile",
        "shared memory",
        "registers",
        "copied",
        "why",
    ]
    assert max(map(len, lines)) <= 110


@pytest.mark.cuda
@pytest.mark.kernel
@pytest.mark.parametrize("dtype", cases.CUDA_DTYPES, ids=cases.dtype_name)
@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("head_dim", [*cases.INSTANCE_HEAD_DIMS, 8, 72, 100])
def test_the_profiler_saw_that_kernel(head_dim, causal, dtype, backend):
    q, k, v = (torch.randn(1, 4, n, head_dim, device="cuda", dtype=dtype) for n in (130, 300, 300))
    data = flash_cute.explain(q, k, v, causal, backend=backend).data
    flash_cute.fwd(q, k, v, causal, backend=backend)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        flash_cute.fwd(q, k, v, causal, backend=backend)
        torch.cuda.synchronize()
    ran = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    ran = [name for name in ran if "zero_kernel" not in name and not name.startswith("Memset")]
    ours = [name for name in ran if "flash_cute" in name]
    assert len(ours) == 1, ran
    assert kernel_matches(data, ours[0]), (ours[0], data)
    if not any(data["copies"].values()):
        assert ran == ours


@pytest.mark.cuda
@pytest.mark.kernel
@pytest.mark.parametrize("dtype", cases.CUDA_DTYPES, ids=cases.dtype_name)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [*cases.INSTANCE_HEAD_DIMS, 100])
def test_the_profiler_saw_that_backward(head_dim, causal, dtype, backend):
    q, k, v = (torch.randn(1, 4, n, head_dim, device="cuda", dtype=dtype) for n in (130, 300, 300))
    data = flash_cute.explain(q, k, v, causal, backend=backend, backward=True).data
    out, lse = flash_cute.fwd(q, k, v, causal, backend=backend)
    flash_cute.bwd(q, q, k, v, out, lse, causal, backend=backend)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        flash_cute.bwd(q, q, k, v, out, lse, causal, backend=backend)
        torch.cuda.synchronize()
    ran = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    ours = [name for name in ran if "flash_cute" in name]
    assert sum(kernel_matches(data, name) for name in ours) == 1, (ran, data)
    if not any(data["copies"].values()):
        assert [name for name in ran if not name.startswith("Memset")] == ours


@pytest.fixture
def device() -> str:
    """What conftest's `backend` asks for: these tests make their tensors themselves."""
    return "cuda"


def test_the_fields_are_those_of_plan_data():
    """`PlanData` names every field that some plan has, and no other."""
    q = meta(64)
    packed = torch.empty(100, 8, 64, dtype=torch.float16, device="meta")
    offsets = torch.empty(5, dtype=torch.int32, device="meta")
    lengths = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    found = set(flash_cute.explain(*[torch.randn(1, 4, 5, 16)] * 3).data)
    for capability in (80, 90) if report.load()["kernels"] else ():
        for backward in (False, True):
            found |= set(flash_cute.explain(q, q, q, capability=capability, backward=backward).data)
            mask = flash_cute.Mask.chunks(4, q.shape[2], device="meta")
            found |= set(flash_cute.explain(q, q, q, mask=mask, capability=capability, backward=backward).data)
            options = {"capability": capability, "backward": backward, **lengths}
            found |= set(flash_cute.explain(packed, packed, packed, **options).data)
    if report.load()["kernels"]:
        float8 = q.to(torch.float8_e4m3fn)
        found |= set(flash_cute.explain(float8, float8, float8, capability=90).data)
        cache = torch.empty(4, 300, 8, 64, dtype=torch.float16, device="meta")
        length = torch.empty(4, dtype=torch.int32, device="meta")
        found |= set(flash_cute.explain(cache[:, :1], cache, cache, cache_seqlens=length, capability=90).data)
    fields = set(PlanData.__annotations__)
    assert found == fields if report.load()["kernels"] else found < fields

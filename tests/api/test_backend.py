"""Which backend runs is the caller's choice or the plan's, never a silent fall-back."""

from __future__ import annotations

import pytest
import torch
from cases import INSTANCE_HEAD_DIMS, Case, Causal, plan
from numerics import assert_matches, same_bits

import flash_cute

NAMES = ("cpu", "sm80", "sm90")
ON_CUDA = [pytest.param("cuda", marks=pytest.mark.cuda)]


def test_names() -> None:
    known = flash_cute.backends()
    assert set(known) == set(NAMES)
    assert known["cpu"] is True
    if not torch.cuda.is_available():
        assert not known["sm80"]
        assert not known["sm90"]


def test_cpu_is_what_cpu_tensors_get(rng: torch.Generator) -> None:
    q, k, v = Case(64, 65, 77).inputs("cpu", rng)
    assert plan(q, k, v)["backend"] == "cpu"
    assert same_bits(flash_cute.fwd(q, k, v), flash_cute.fwd(q, k, v, backend="cpu"))


@pytest.mark.parametrize("name", ["sm80", "sm90"])
def test_gpu_backend_for_cpu_tensors_raises(name: str, rng: torch.Generator) -> None:
    q, k, v = Case(64, 65, 77).inputs("cpu", rng)
    with pytest.raises(ValueError, match=f"backend.*{name}"):
        flash_cute.fwd(q, k, v, backend=name)


@pytest.mark.parametrize("device", ON_CUDA)
def test_cpu_for_cuda_tensors_raises(device: str, rng: torch.Generator) -> None:
    q, k, v = Case(64, 65, 77).inputs(device, rng)
    with pytest.raises(ValueError, match=r"backend.*cpu"):
        flash_cute.fwd(q, k, v, backend="cpu")


@pytest.mark.parametrize("capability", [80, 86, 89, 120])
def test_sm90_elsewhere_raises(capability: int) -> None:
    q = torch.empty(1, 1, 64, 64, dtype=torch.float16)
    with pytest.raises((ValueError, RuntimeError), match=r"(?i)backend.*sm90"):  # RuntimeError: torch 2.15
        plan(q, q, q, backend="sm90", capability=capability)


@pytest.mark.parametrize("capability", [80, 86, 87, 89, 90, 100, 103, 120])
@pytest.mark.parametrize("head_dim", [8, *INSTANCE_HEAD_DIMS])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_sm80_may_be_forced_on_any_gpu(capability: int, head_dim: int, causal: Causal) -> None:
    q = torch.empty(1, 2, 64, head_dim, dtype=torch.float16)
    made = plan(q, q, q, causal, backend="sm80", capability=capability)
    assert made["backend"] == "sm80"
    assert made["reasons"]


@pytest.mark.parametrize("device", ON_CUDA)
@pytest.mark.parametrize("name", ["sm80", "sm90"])
@pytest.mark.parametrize("head_dim", INSTANCE_HEAD_DIMS)
def test_forced(device: str, name: str, head_dim: int, rng: torch.Generator) -> None:
    if not flash_cute.backends()[name]:
        pytest.skip(f"{name} cannot run on this machine")
    q, k, v = Case(head_dim, 113, 203, dtype=torch.bfloat16).inputs(device, rng)
    assert plan(q, k, v, True, backend=name)["backend"] == name
    assert_matches(*flash_cute.fwd(q, k, v, True, backend=name), q, k, v, True)


@pytest.mark.parametrize("device", ON_CUDA)
def test_auto_is_the_backend_that_the_plan_names(device: str, rng: torch.Generator) -> None:
    q, k, v = Case(128, 113, 203).inputs(device, rng)
    name = plan(q, k, v, True)["backend"]
    assert name != "cpu"
    assert same_bits(flash_cute.fwd(q, k, v, True), flash_cute.fwd(q, k, v, True, backend=name))

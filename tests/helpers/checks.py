"""One case, forward and backward, against float64; the devices that a test runs on; what is asked of an operator."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from cases import CUDA_DTYPES, Backward, Case, Forward, Inputs
from numerics import assert_gradients_match, assert_matches, visible

# All of opcheck's but test_aot_dispatch_dynamic, which runs the backward where an input requires grad; bwd has none.
OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


def inputs_and_options(case: Case, device: str, rng: torch.Generator) -> tuple[Inputs, dict[str, Any]]:
    """The case's tensors and options."""
    return case.inputs(device, rng), case.options(device, rng)


def assert_exact(
    case: Case,
    device: str,
    fwd: Forward,
    bwd: Backward,
    rng: torch.Generator,
    *,
    dlse: bool = True,
    deterministic: bool = False,
    backend: str | None = None,
) -> None:
    """out, lse and the gradients of the case are within the contract's bounds; `dlse`: with a gradient of the LSE."""
    inputs, options = inputs_and_options(case, device, rng)
    out, lse = fwd(*inputs, case.causal, **options)
    assert_matches(out, lse, *inputs, case.causal, **options)
    blind = ~visible(case.len_q, case.len_k, case.causal, device, case.window).any(-1)
    assert (out[:, :, blind] == 0).all() and (lse[:, :, blind] == -torch.inf).all()

    dout, flow = case.flow(device, rng)
    options["dlse"] = flow if dlse else None
    gradients = bwd(dout, *inputs, case.causal, deterministic=deterministic, **options)
    assert_gradients_match(gradients, dout, *inputs, case.causal, **options)
    assert (gradients[0][:, :, blind] == 0).all()


def on_each_device(cases: list[Case], cuda: Iterable[Case] = ()) -> list[Any]:
    """`parametrize("device, case", ...)`: the cases on the CPU, and on the GPU in a dtype that it takes.

    `cuda`: cases for the GPU alone, tile boundaries of its kernels or large ones.
    """
    on_cpu = [pytest.param("cpu", case, id=f"cpu-{case}") for case in cases]
    on_cuda = []
    for number, case in enumerate([*cases, *cuda]):
        if case.dtype not in CUDA_DTYPES:
            dtype = CUDA_DTYPES[number % 2]
            case = dataclasses.replace(case, dtype=dtype, sinks=case.sinks and torch.float32)
        on_cuda.append(pytest.param("cuda", case, id=f"cuda-{number}-{case}", marks=pytest.mark.cuda))
    return on_cpu + on_cuda


def head_dims(*numbers: int) -> pytest.MarkDecorator:
    """On the GPU these head dims, one at least of each family of kernels; on the CPU one for all."""
    on_cuda = [pytest.param("cuda", head_dim, marks=pytest.mark.cuda) for head_dim in numbers]
    return pytest.mark.parametrize(("device", "head_dim"), [("cpu", 64), *on_cuda])


EVERY_FAMILY = head_dims(32, 64, 128, 192, 256, 320, 512, 1024)

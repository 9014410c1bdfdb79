"""Kernels run as the compiler built them: the driver compiles no PTX on the way.

With CUDA_DISABLE_PTX_JIT=1 the driver refuses to load a kernel that has no machine code for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import INSTANCE_HEAD_DIMS, backward_head_dims

import flash_cute

pytestmark = pytest.mark.cuda

EVERY_KERNEL = """
import torch
import flash_cute

count = 0
for head_dim in {head_dims}:
    for causal in (False, True):
        for dtype in (torch.float16, torch.bfloat16):
            q = torch.ones(1, 1, 200, head_dim, dtype=dtype, device="cuda", requires_grad=True)
            out, lse = flash_cute.fwd(q, q, q, causal, backend={backend!r})
            assert bool((out == 1).all()), (head_dim, causal, dtype)
            if head_dim <= {largest_backward}:
                out.sum().backward()
                assert bool(q.grad.isfinite().all()), (head_dim, causal, dtype)
            count += 1
print("ran", count)
"""


# Chips that the wheel carries machine code for, and those that run another chip's of their generation.
NATIVE = {(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (12, 0), (12, 1)}


@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("name", ["sm80", "sm90"])
def test_no_ptx_is_compiled(device: str, name: str, python: Callable[..., str]) -> None:
    if not flash_cute.backends()[name]:
        pytest.skip(f"{name} cannot run on this machine")
    if torch.cuda.get_device_capability() not in NATIVE:
        pytest.skip("the library has only PTX for this GPU")
    script = EVERY_KERNEL.format(
        head_dims=INSTANCE_HEAD_DIMS, backend=name, largest_backward=max(backward_head_dims(name), default=0)
    )
    printed = python(script, CUDA_DISABLE_PTX_JIT="1", CUDA_CACHE_DISABLE="1")
    assert f"ran {4 * len(INSTANCE_HEAD_DIMS)}" in printed

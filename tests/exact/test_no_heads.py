"""No heads: results without elements, with every option, dense and packed, forward, backward and in a plan.

With heads of k and v alone their gradients have elements, which are 0.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packed import offsets

import flash_cute
from flash_cute.report import built_architectures

HEADS = ((0, 0), (0, 2))
HEAD_DIMS = ((64, 64), (64, 32), (128, 128), (256, 256), (320, 320), (33, 40))
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (5, 0)},
    "softcap": {"softcap": 30.0},
    "sinks": {"sinks": (0,)},
    "slopes": {"alibi_slopes": (0,)},
    "slopes of batches": {"alibi_slopes": (3, 0)},
}
Results = tuple[torch.Tensor, ...]


def _inputs(heads: tuple[int, int], head_dims: tuple[int, int], device: str, packed: bool) -> Results:
    """q, k and v; packed with the offsets of 3 sequences."""
    (heads_q, heads_kv), (head_dim, head_dim_v) = heads, head_dims
    sizes = ((heads_q, 20, head_dim), (heads_kv, 33, head_dim), (heads_kv, 33, head_dim_v))
    if not packed:
        return tuple(torch.ones(3, *size, dtype=torch.half, device=device) for size in sizes)
    q, k, v = (torch.ones(n, h, d, dtype=torch.half, device=device) for h, n, d in sizes)
    return q, k, v, offsets((5, 0, 15), device), offsets((11, 12, 10), device)


def _options(name: str, device: str) -> dict[str, Any]:
    return {x: torch.zeros(y, device=device) if x in ("sinks", "alibi_slopes") else y for x, y in OPTIONS[name].items()}


@pytest.mark.kernel
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("planned", [False, True], ids=["forced", "planned"])
def test_calls(
    device: str,
    heads: tuple[int, int],
    head_dims: tuple[int, int],
    name: str,
    packed: bool,
    planned: bool,
    backend: str | None,
) -> None:
    if device == "cpu" and planned:
        pytest.skip("the CPU has one backend")
    q, k, v, *lengths = _inputs(heads, head_dims, device, packed)
    options = _options(name, device) | {"backend": None if planned else backend}
    forward, backward = (flash_cute.varlen_fwd, flash_cute.varlen_bwd) if packed else (flash_cute.fwd, flash_cute.bwd)
    out, lse = forward(q, k, v, *lengths, **options)
    assert (out.shape, out.dtype) == ((*q.shape[:-1], v.shape[-1]), q.dtype)
    assert (lse.shape, lse.dtype) == ((0, 20) if packed else (3, 0, 20), torch.float32)
    for dlse in (None, torch.zeros_like(lse)):
        gradients = backward(out, q, k, v, out, lse, *lengths, dlse=dlse, **options)
        inputs = (q, k, v) if name != "sinks" else (q, k, v, options["sinks"])
        assert [x.shape for x in gradients] == [x.shape for x in inputs]
        assert all((x == 0).all() for x in gradients)

    leaves = [x.requires_grad_() for x in (q, k, v)]
    attention = flash_cute.varlen_attention if packed else flash_cute.attention
    attention(*leaves, *lengths, **options).sum().backward()
    assert all(x.grad is not None and (x.grad == 0).all() for x in leaves)
    if device == "cuda":
        torch.cuda.synchronize()


@pytest.mark.cuda
@pytest.mark.parametrize("accumulate", ["float16", "float16_qk", "float16_pv"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_accumulated_in_float16(packed: bool, accumulate: str) -> None:
    if "sm80" not in built_architectures():
        pytest.skip("this build has no sm80 kernels")
    q, k, v, *lengths = _inputs((0, 0), (64, 64), "cuda", packed)
    out, lse = (flash_cute.varlen_fwd if packed else flash_cute.fwd)(q, k, v, *lengths, accumulate=accumulate)
    assert (out.shape, lse.numel()) == (q.shape, 0)


@pytest.mark.parametrize("capability", [None, 80, 86, 90, 120])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_plans(backward: bool, packed: bool, capability: int | None) -> None:
    if capability is not None and built_architectures() != {"sm80", "sm90"}:
        pytest.skip("this build has not the kernels of both architectures")
    for heads in HEADS:
        for head_dims in (*HEAD_DIMS, (192, 128), (512, 512), (1024, 1024)):
            for name in OPTIONS:
                q, k, v, *lengths = _inputs(heads, head_dims, "cpu", packed)
                of_lengths = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), lengths, strict=False))
                options = {**of_lengths, **_options(name, "cpu")}
                said = flash_cute.explain(q, k, v, backward=backward, capability=capability, **options)
                data = said.to_dict()
                assert (data["heads_q"], data["heads_kv"]) == heads
                if capability is not None:
                    assert (data["workspace_bytes"], data["split_tiles"]) == (0, 0)
                    assert "Nothing is launched" in " ".join(str(said).split())

"""Packages that import flash-attn, with flash_cute in its place: the real ones, computing what they are for."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

# How ring-flash-attn and yunchang deal rows to two processes; each function's gradients are compared too.
RING = """
import sys, types
import torch, torch.distributed as dist, torch.multiprocessing as mp
import flash_cute, flash_cute.reference
from flash_cute.integrations import flash_attn
flash_attn.install()
WORLD, ROWS, HEADS = 2, 48, (4, 2)

def dealt(x, rank, how):
    if how == "stripe":
        return x[:, rank::WORLD].contiguous()
    pieces = x.chunk(2 * WORLD, 1) if how == "zigzag" else x.chunk(WORLD, 1)
    kept = (pieces[rank], pieces[-1 - rank]) if how == "zigzag" else (pieces[rank],)
    return torch.cat(kept, 1)

def check(rank, name, function, how, causal=True, packed=None):
    torch.manual_seed(SEED)
    shapes = ((2, ROWS, HEADS[0], 16), (2, ROWS, HEADS[1], 16), (2, ROWS, HEADS[1], 16), (2, ROWS, HEADS[0], 16))
    # float16, since the packages sum up parts in float32, and in float32 take one for a copy of the other.
    whole = [torch.randn(shape).half() for shape in shapes]
    if packed:
        whole = [x[:1] for x in whole]
    q, k, v, dout = (x.double().transpose(1, 2) for x in whole)
    bounds = packed or [0, ROWS]
    parts = [[x[:, :, a:b] for x in (q, k, v, dout)] for a, b in zip(bounds, bounds[1:])]
    expected = [[flash_cute.reference.attention(*x[:3], causal)[0],
                 *flash_cute.reference.gradients(x[3], *x[:3], causal)] for x in parts]
    expected = [torch.cat(x, 2).transpose(1, 2) for x in zip(*expected)]
    leaves = [dealt(x, rank, how) for x in whole]
    if packed:
        leaves = [x[0] for x in leaves]
    leaves = [x.requires_grad_() for x in leaves]
    out = function(*leaves[:3], causal=causal)
    given = [out, *torch.autograd.grad(out, leaves[:3], leaves[3].detach())]
    for what, x, y in zip(("out", "dq", "dk", "dv"), given, expected, strict=True):
        y = dealt(y, rank, how)
        y = y[0] if packed else y
        error = ((x.double() - y).abs().max() / y.abs().max()).item()
        # Their basic rings round dq to bfloat16, whatever q's dtype is.
        allowed = 8e-3 if what == "dq" and name.startswith(("ring", "LongContextAttention(basic")) else 2e-3
        assert x.shape == y.shape and error <= allowed, (name, what, error)
    if rank == 0:
        print(name, "causal" if causal else "full")

def ring(rank):
    # Its adapter for Transformers asks for a name that Transformers 5 does not have; the rest needs none of it.
    adapters = types.ModuleType("ring_flash_attn.adapters")
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None
    sys.modules["ring_flash_attn.adapters"] = adapters
    import ring_flash_attn as package
    for causal in (True, False):
        check(rank, "ring_flash_attn_func", package.ring_flash_attn_func, "pieces", causal=causal)
    check(rank, "zigzag_ring_flash_attn_func", package.zigzag_ring_flash_attn_func, "zigzag")
    check(rank, "stripe_flash_attn_func", package.stripe_flash_attn_func, "stripe")
    offsets = torch.tensor([0, 10, 34, 48], dtype=torch.int32)
    for causal in (True, False):
        lengths = package.llama3_flash_attn_prepare_cu_seqlens(offsets, causal, rank, WORLD)
        def llama3(q, k, v, causal):
            return package.llama3_flash_attn_varlen_func(
                q, k, v, *lengths[:4], heads_k_stride=1, local_k_slice=lengths[4], causal=causal)
        check(rank, "llama3_flash_attn_varlen_func", llama3, "pieces", causal=causal, packed=offsets.tolist())

def yunchang(rank):
    import yunchang as package
    from yunchang.kernels import AttnType
    package.set_seq_parallel_pg(1, WORLD, rank, WORLD)
    for kind, how in (("basic", "pieces"), ("zigzag", "zigzag"), ("strip", "stripe")):
        layer = package.LongContextAttention(ring_impl_type=kind, attn_type=AttnType.FA)
        check(rank, f"LongContextAttention({kind})", layer, how)
    check(rank, "UlyssesAttention", package.UlyssesAttention(dist.group.WORLD, attn_type=AttnType.FA), "pieces")

def run(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    globals()[PACKAGE](rank)
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.start_processes(run, (STORE,), nprocs=WORLD, start_method="fork")
"""


def need(package: str) -> None:
    """Skips where a package is not installed; in CI that is a failure, for the `test` extra has it."""
    if importlib.util.find_spec(package) is None:
        if os.environ.get("FLASH_CUTE_REQUIRE_VENVS"):
            pytest.fail(f"{package} is not installed")
        pytest.skip(f"{package} is not installed")


@pytest.mark.parametrize("package", ["ring", "yunchang"])
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
def test_rings(package: str, tmp_path: Path, seed: int, python: Callable[..., str]) -> None:
    need({"ring": "ring_flash_attn"}.get(package, package))
    values = {"STORE": repr(str(tmp_path / "store")), "PACKAGE": repr(package), "SEED": str(seed % 2**31)}
    script = RING
    for name, value in values.items():
        script = script.replace(name, value)
    print(python(script))

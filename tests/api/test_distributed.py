"""DTensor shards the operators by batch and by heads; other placements are gathered, and every result is right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flash_cute import sharding

# Two processes that fork from one script: what they find is printed by the first.
SCRIPT = """
import sys, torch, torch.distributed as dist, torch.multiprocessing as mp
import flash_cute
assert "torch.distributed.tensor" not in sys.modules

def run(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode
    mesh = init_device_mesh("cpu", (2,))
    def placed(tensors, *placements):
        pairs = zip(tensors, placements, strict=True)
        return [distribute_tensor(x, mesh, [y]).requires_grad_(x.is_floating_point()) for x, y in pairs]
    for heads, heads_kv in ((4, 2), (4, 1), (3, 3)):
        torch.manual_seed(7)
        plain = [torch.randn(3, h, n, 16) for h, n in ((heads, 9), (heads_kv, 13), (heads_kv, 13))]
        leaves = [x.clone().requires_grad_() for x in plain]
        results = flash_cute.fwd(*leaves, True)
        flow = [torch.randn_like(x) for x in results]
        expected = (*results, *torch.autograd.grad(results, leaves, flow))
        for name, placements in {
            "batch": [Shard(0)] * 3, "heads": [Shard(1)] * 3, "whole": [Replicate()] * 3, "rows": [Shard(2)] * 3,
            "query_heads": [Shard(1), Replicate(), Replicate()],
        }.items():
            inputs = placed(plain, *placements)
            with CommDebugMode() as traffic:
                out, lse = flash_cute.fwd(*inputs, True)
            forward = traffic.get_total_counts()
            flows = [distribute_tensor(x, mesh, y.placements) for x, y in zip(flow, (out, lse))]
            with CommDebugMode() as traffic:
                gradients = torch.autograd.grad((out, lse), inputs, flows)
            backward = traffic.get_total_counts()
            given = [x.full_tensor() for x in (out, lse, *gradients)]
            torch.testing.assert_close(given, list(expected), rtol=1e-4, atol=1e-5)
            with torch.no_grad():
                alone = flash_cute.attention(*inputs, True)
            torch.testing.assert_close(alone.full_tensor(), expected[0], rtol=1e-4, atol=1e-5)
            direct = torch.ops.flash_cute.fwd(*inputs, "bottom_right", *[None] * 6, "auto")
            torch.testing.assert_close(direct[1].full_tensor(), expected[1], rtol=1e-4, atol=1e-5)
            if rank == 0:
                print(heads, heads_kv, name, str(out.placements[0]), forward, backward)
        sinks, slopes = torch.randn(heads), torch.rand(3, heads)
        options = {"window": (6, 2), "softcap": 3.0}
        leaves = [x.clone().requires_grad_() for x in (*plain, sinks)]
        results = flash_cute.fwd(*leaves[:3], sinks=leaves[3], alibi_slopes=slopes, **options)
        expected = (*results, *torch.autograd.grad(results, leaves, flow))
        for name, placement, of_sinks in (
            ("batch", Shard(0), Replicate()), ("heads", Shard(1), Shard(0)), ("whole", Replicate(), Replicate()),
        ):
            inputs = [*placed(plain, *[placement] * 3), *placed([sinks], of_sinks)]
            placed_slopes = distribute_tensor(slopes, mesh, [placement])
            with CommDebugMode() as traffic:
                out, lse = flash_cute.fwd(*inputs[:3], sinks=inputs[3], alibi_slopes=placed_slopes, **options)
            forward = traffic.get_total_counts()
            flows = [distribute_tensor(x, mesh, y.placements) for x, y in zip(flow, (out, lse))]
            with CommDebugMode() as traffic:
                gradients = torch.autograd.grad((out, lse), inputs, flows)
            given = [x.full_tensor() for x in (out, lse, *gradients)]
            torch.testing.assert_close(given, list(expected), rtol=1e-4, atol=1e-5)
            shared = distribute_tensor(slopes[0], mesh, [of_sinks])
            alone = flash_cute.attention(*inputs[:3], alibi_slopes=shared).full_tensor()
            undivided = flash_cute.attention(*plain, alibi_slopes=slopes[0])
            torch.testing.assert_close(alone, undivided, rtol=1e-4, atol=1e-5)
            if rank == 0:
                print("options", heads, heads_kv, name, str(gradients[3].placements[0]), forward,
                      traffic.get_total_counts())
        packed = [x.transpose(1, 2).flatten(0, 1) for x in plain]
        ends = [torch.arange(4, dtype=torch.int32) * n for n in (9, 13)]
        of = [distribute_tensor(x, mesh, [Replicate()]) for x in ends]
        for name, placement in {"heads": Shard(1), "whole": Replicate(), "rows": Shard(0)}.items():
            inputs = placed(packed, *[placement] * 3)
            with CommDebugMode() as traffic:
                out, lse = flash_cute.varlen_fwd(*inputs, *of, True)
            forward = traffic.get_total_counts()
            flows = [torch.randn(x.shape) for x in (out, lse)]
            gradients = torch.autograd.grad(
                (out, lse), inputs, [distribute_tensor(x, mesh, y.placements) for x, y in zip(flows, (out, lse))]
            )
            leaves = [x.clone().requires_grad_() for x in packed]
            results = flash_cute.varlen_fwd(*leaves, *ends, True)
            expected = [*results, *torch.autograd.grad(results, leaves, flows)]
            given = [x.full_tensor() for x in (out, lse, *gradients)]
            torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)
            if rank == 0:
                print(heads, heads_kv, "packed_" + name, str(out.placements[0]), forward)
        try:
            flash_cute.attention(*placed(plain, Shard(0), Shard(0), Shard(0)), "diagonal")
        except ValueError as error:
            assert str(error).startswith("flash_cute: causal: expected"), error
        else:
            raise AssertionError("a bad mask was taken")
        caches = [x.transpose(1, 2) for x in plain]
        try:
            with torch.no_grad():
                flash_cute.attention_with_kvcache(*placed(caches, *[Shard(0)] * 3))
        except NotImplementedError as error:
            assert "takes no DTensor" in str(error), error
        else:
            raise AssertionError("DTensors were taken for caches")
        rows = torch.zeros(1, 1, 13, dtype=torch.int32)
        mask = flash_cute.Mask(*placed([rows, rows + 9], Replicate(), Replicate()))
        try:
            flash_cute.attention(*placed(plain, *[Shard(0)] * 3), mask=mask)
        except NotImplementedError as error:
            assert "takes no DTensor" in str(error), error
        else:
            raise AssertionError("DTensors were taken beside a mask")
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.start_processes(run, (STORE,), nprocs=2, start_method="fork")
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
def test_two_processes(tmp_path: Path, python: Callable[..., str]) -> None:
    printed = python(SCRIPT.replace("STORE", repr(str(tmp_path / "store"))), timeout=300)
    found = {tuple(line.split()[:3]): line.split()[3:] for line in printed.splitlines() if line[0].isdigit()}
    assert len(found) == 24, printed
    options = [line.split()[1:] for line in printed.splitlines() if line.startswith("options")]
    assert len(options) == 9, printed
    # The placement of the sinks' gradient: of a batch's rank a part of the sum.
    assert ["4", "2", "batch", "P(sum)", "0", "0"] in options
    assert ["4", "2", "heads", "S(0)", "0", "0"] in options
    # The placement of out, and the collectives of forward and backward: a rank works alone on its batches or heads.
    assert found["4", "2", "batch"] == ["S(0)", "0", "0"]
    assert found["4", "2", "heads"] == ["S(1)", "0", "0"]
    assert found["4", "2", "query_heads"] == ["S(1)", "0", "0"]
    assert found["4", "1", "batch"] == ["S(0)", "0", "0"]
    assert found["4", "1", "query_heads"] == ["S(1)", "0", "0"]
    assert found["3", "3", "heads"][0] == "R", "three heads cannot be dealt to two ranks"
    assert found["4", "2", "packed_heads"] == ["S(1)", "0"]
    assert all(found[heads, heads_kv, "packed_rows"][0] == "R" for heads, heads_kv in (("4", "2"), ("4", "1")))
    assert all(found[heads, heads_kv, "rows"][0] == "R" for heads, heads_kv in (("4", "2"), ("4", "1"), ("3", "3")))


@pytest.mark.parametrize(
    "heads, mesh, expected",
    [
        (8, (2,), True),
        (8, (2, 4), True),
        (2, (4, 2), True),  # over the second dim; the first has more ranks than there are heads
        (6, (2,), True),
        (6, (4,), False),
        (6, (2, 2), False),  # both dims at once would cut a group of query heads from its key head
        (2, (2, 2), True),
    ],
)
def test_heads_are_dealt_evenly(heads: int, mesh: tuple[int, ...], expected: bool) -> None:
    class Mesh:
        shape = mesh

    assert sharding._divisible(heads, Mesh()) == expected

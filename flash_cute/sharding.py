"""How DTensor may shard the operators: by batch and by heads; every other placement is gathered first.

A rank then attends its own batches or heads, and nothing is communicated. The lengths and the head dim stay whole: a
row needs all the keys that it sees.
"""

from typing import Any

import torch


def register() -> None:
    """Give torch.distributed.tensor the strategies."""
    from torch.distributed.tensor.experimental import register_sharding

    operators = torch.ops.flash_cute
    register_sharding([operators.fwd.default, operators._fwd.default])(fwd)
    register_sharding([operators.bwd.default, operators._bwd.default])(bwd)


def fwd(q: Any, k: Any, v: Any, *options: Any) -> list[tuple[list[Any], list[Any]]]:
    """(placements of out and lse, placements of the arguments), one for each way to shard a dim of the mesh."""
    rest = [None] * len(options)
    return [([query, query], [query, key, key, *rest]) for query, key, _ in _ways(q, k)]


def bwd(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any, *options: Any
) -> list[tuple[list[Any], list[Any]]]:
    """(placements of dq, dk and dv, placements of the arguments)."""
    rest = [None] * len(options)
    return [
        (
            [query, gradient, gradient],
            [query, query, key, key, query, query, None if dlse is None else query, *rest],
        )
        for query, key, gradient in _ways(q, k)
    ]


def _ways(q: Any, k: Any) -> list[tuple[Any, Any, Any]]:
    """Placements of what has query heads, of what has key heads, and of the gradients of the latter."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    ways: list[tuple[Any, Any, Any]] = [(Replicate(), Replicate(), Replicate()), (Shard(0), Shard(0), Shard(0))]
    heads_q, heads_kv = q.shape[1], k.shape[1]
    if heads_kv == 1 and heads_q > 1:
        # Every query head reads the one key head, whose gradient is the sum of the ranks'.
        ways.append((Shard(1), Replicate(), Partial()))
    elif _divisible(heads_kv, q.mesh):
        ways.append((Shard(1), Shard(1), Shard(1)))
    return ways


def _divisible(heads: int, mesh: Any) -> bool:
    """Whether every rank gets as many key heads, whichever dims of the mesh shard them: a query head goes with its own.

    DTensor itself leaves out what has fewer heads than ranks.
    """
    sizes = {1}
    for size in mesh.shape:
        sizes |= {one * size for one in sizes}
    return all(heads % size == 0 for size in sizes if size <= heads)

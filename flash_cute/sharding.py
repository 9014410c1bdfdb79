"""How DTensor may shard the operators: by batch (unless packed) and by heads; other placements are gathered first.

A rank then attends its own batches or heads, and nothing is communicated. The lengths and the head dim stay whole: a
row needs all the keys that it sees.
"""

from typing import Any, NamedTuple, NoReturn

import torch

from ._call_options import CallOptions, Lengths


def register() -> None:
    """Give torch.distributed.tensor the strategies."""
    from torch.distributed.tensor.experimental import register_sharding

    operators = torch.ops.flash_cute
    register_sharding([operators.fwd.default, operators._fwd.default])(fwd)
    float8 = (operators.fp8_fwd, operators._fp8_fwd, operators.fp8_varlen_fwd, operators._fp8_varlen_fwd)
    register_sharding([operator.default for operator in float8])(refuse_float8)
    masked = ("masked_fwd", "masked_bwd", "masked_varlen_fwd", "masked_varlen_bwd")
    register_sharding([getattr(operators, x + y).default for x in ("", "_") for y in masked])(refuse_masks)
    caches = ("kvcache_fwd", "_kvcache_fwd", "kvcache_fwd_out", "_kvcache_fwd_out", "kvcache_append", "_kvcache_append")
    register_sharding([getattr(operators, name).default for name in caches])(refuse_caches)
    register_sharding([operators.bwd.default, operators._bwd.default])(bwd)
    register_sharding([operators.varlen_fwd.default, operators._varlen_fwd.default])(varlen_fwd)
    register_sharding([operators.varlen_bwd.default, operators._varlen_bwd.default])(varlen_bwd)


def refuse_float8(*given: Any) -> NoReturn:
    raise NotImplementedError(
        "flash_cute's attention of float8 tensors takes no DTensor: call it with each rank's own part (to_local())."
    )


def refuse_masks(*given: Any) -> NoReturn:
    raise NotImplementedError(
        "flash_cute's attention with a mask takes no DTensor: call it with each rank's own part (to_local())."
    )


def refuse_caches(*given: Any) -> NoReturn:
    raise NotImplementedError(
        "flash_cute's attention over a cache takes no DTensor: call it with each rank's own part (to_local())."
    )


def fwd(q: Any, k: Any, v: Any, *options: Any) -> list[tuple[list[Any], list[Any]]]:
    """(placements of out and lse, placements of the arguments), one for each way to shard a dim of the mesh."""
    return [([way.query, way.query], [way.query, way.key, way.key, *_of_options(options, way)]) for way in _ways(q, k)]


def bwd(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any, *options: Any
) -> list[tuple[list[Any], list[Any]]]:
    """(placements of dq, dk, dv and dsinks, placements of the arguments)."""
    sinks_given = options[SINKS] is not None
    return [
        (
            [query, way.key_gradient, way.key_gradient, way.sinks_gradient if sinks_given else way.nothing],
            [query, query, key, key, query, query, None if dlse is None else query, *_of_options(options, way)],
        )
        for way in _ways(q, k)
        for query, key in [(way.query, way.key)]
    ]


def varlen_fwd(q: Any, k: Any, v: Any, *options: Any) -> list[tuple[list[Any], list[Any]]]:
    """The same of packed sequences, of which every rank has the lengths."""
    return [
        ([way.query, way.per_head], [way.query, way.key, way.key, *_of_packed_options(options, way)])
        for way in _ways(q, k, packed=True)
    ]


def varlen_bwd(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any, *options: Any
) -> list[tuple[list[Any], list[Any]]]:
    sinks_given = options[LENGTHS + SINKS] is not None
    found = []
    for way in _ways(q, k, packed=True):
        gradients = [way.query, way.key_gradient, way.key_gradient]
        rows = [way.per_head, None if dlse is None else way.per_head]
        tensors = [way.query, way.query, way.key, way.key, way.query, *rows]
        dsinks = way.sinks_gradient if sinks_given else way.nothing
        found.append(([*gradients, dsinks], [*tensors, *_of_packed_options(options, way)]))
    return found


LENGTHS = len(Lengths._fields)
# Where `sinks` and `alibi_slopes` stand after the last tensor of either operator's.
SINKS, ALIBI_SLOPES = (CallOptions._fields.index(x) for x in ("sinks", "alibi_slopes"))


class _Way(NamedTuple):
    """One way to shard a dim of the mesh: the placements of what has ..."""

    query: Any  # query heads
    key: Any  # key heads
    key_gradient: Any
    per_head: Any  # query heads as its first dim: sinks, and a packed call's LSE
    sinks_gradient: Any
    slopes: Any  # (B, Hq)
    nothing: Any  # no elements, or is the same on every rank


def _of_options(options: tuple[Any, ...], way: _Way) -> list[Any]:
    """The placements of the arguments after the last tensor: None for what is no tensor."""
    placements: list[Any] = [None] * len(options)
    if options[SINKS] is not None:
        placements[SINKS] = way.per_head
    slopes = options[ALIBI_SLOPES]
    if slopes is not None:
        placements[ALIBI_SLOPES] = way.slopes if len(slopes.shape) == 2 else way.per_head
    return placements


def _of_packed_options(options: tuple[Any, ...], way: _Way) -> list[Any]:
    lengths = [None if x is None or isinstance(x, int) else way.nothing for x in options[:LENGTHS]]
    return lengths + _of_options(options[LENGTHS:], way)


def _ways(q: Any, k: Any, packed: bool = False) -> list[_Way]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    whole, per_batch, per_head = Replicate(), Shard(0), Shard(1)
    ways = [_Way(whole, whole, whole, whole, whole, whole, whole)]
    if not packed:
        ways.append(_Way(per_batch, per_batch, per_batch, whole, Partial(), per_batch, whole))
    heads_q, heads_kv = q.shape[1], k.shape[1]
    of_heads = Shard(0)  # of (Hq,)
    if heads_kv == 1 and heads_q > 1:
        # Every query head reads the one key head, whose gradient is the sum of the ranks'.
        ways.append(_Way(per_head, whole, Partial(), of_heads, of_heads, per_head, whole))
    elif _divisible(heads_kv, q.mesh):
        ways.append(_Way(per_head, per_head, per_head, of_heads, of_heads, per_head, whole))
    return ways


def _divisible(heads: int, mesh: Any) -> bool:
    """Whether every rank gets as many key heads, whichever dims of the mesh shard them: a query head goes with its own.

    DTensor itself leaves out what has fewer heads than ranks.
    """
    sizes = {1}
    for size in mesh.shape:
        sizes |= {one * size for one in sizes}
    return all(heads % size == 0 for size in sizes if size <= heads)

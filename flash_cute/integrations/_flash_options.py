"""flash-attn's options as flash_cute's: of versions 2 and 3, whose functions differ in their arguments alone."""

import operator
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .. import _ops, attention, varlen_attention
from .._layers import is_plain, is_unserved
from .._refusals import Window, check_longest

# The default of `window_size`, which is known by its identity: to look at it costs 0.1 us.
UNLIMITED = (-1, -1)
_NO_SIDES = (None, None)
# What flash-attn's functions are told of mask and score, passed on as one tuple: softmax_scale, causal, window_size,
# softcap, alibi_slopes, deterministic. `deterministic=False` is flash-attn's default, and so leaves it to
# `torch.use_deterministic_algorithms`.
Score: TypeAlias = tuple[float | None, bool, Any, float, Tensor | None, bool]
# `(out, lse or None)`: `(B, N, Hq, Dv)` and `(B, Hq, N)`, packed `(Tq, Hq, Dv)` and `(Hq, Tq)`.
Results: TypeAlias = tuple[Tensor, Tensor | None]


def dense(q: Tensor, k: Tensor, v: Tensor, score: Score, return_lse: bool) -> Results:
    """The attention of q `(B, N, Hq, D)`, k and v likewise, read in place."""
    if is_plain(q, k, v):
        both = _dense_alone(q, k, v, None, score)
        if both is not None:
            return both if return_lse else (both[0], None)
    if isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor):
        if not q.ndim == k.ndim == v.ndim == 4:
            shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
            raise ValueError(f"flash_cute: q, k, v: expected 4 dims each, (B, N, H, D), got {shapes}")
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    # anything but tensors is attention's to refuse
    softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic = score
    result: Any = attention(
        q, k, v, causal, scale=softmax_scale, window=window(window_size), softcap=cap_of(softcap),
        alibi_slopes=alibi_slopes, return_lse=return_lse, deterministic=deterministic or None,
    )  # fmt: skip
    if return_lse:
        return result[0].transpose(1, 2), result[1]
    return result.transpose(1, 2), None


def dense_stacked(
    q: Tensor | None, stacked: Tensor, num_heads_q: int | None, score: Score, return_lse: bool
) -> Results:
    """`dense` of k and v in `stacked` `(B, N, 2, Hkv, D)`; or, q being None, of all three: `(B, N, 3, H, D)`, or
    `(B, N, Hq + 2 * Hkv, D)` with `num_heads_q`."""
    first, second = (stacked, None) if q is None else (q, stacked)
    if is_plain(first, stacked, stacked):
        both = _dense_alone(first, second, None, num_heads_q, score)
        if both is not None:
            return both if return_lse else (both[0], None)
    return dense(*_unstack(q, stacked, num_heads_q), score, return_lse)


def packed(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[Any, ...], score: Score, return_lse: bool) -> Results:
    """The attention of packed sequences: q `(Tq, Hq, D)`, k and v likewise.

    `lengths`: cu_seqlens_q and cu_seqlens_k, seqused_q and seqused_k, max_seqlen_q and max_seqlen_k.
    """
    if type(lengths[4]) is not int or type(lengths[5]) is not int:
        lengths = (*lengths[:4], hint("max_seqlen_q", lengths[4]), hint("max_seqlen_k", lengths[5]))
    if is_plain(q, k, v):
        both = _packed_alone(q, k, v, lengths, score)
        if both is not None:
            return both if return_lse else (both[0], None)
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k = lengths
    softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic = score
    result: Any = varlen_attention(
        q, k, v, cu_seqlens_q, cu_seqlens_k, causal, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        seqused_q=seqused_q, seqused_k=seqused_k, scale=softmax_scale, window=window(window_size),
        softcap=cap_of(softcap), alibi_slopes=alibi_slopes, return_lse=return_lse,
        deterministic=deterministic or None,
    )  # fmt: skip
    return result if return_lse else (result, None)


def packed_stacked(
    q: Tensor | None, stacked: Tensor, lengths: tuple[Any, ...], score: Score, return_lse: bool
) -> Results:
    """`packed` of k and v in `stacked` `(Tk, 2, Hkv, D)`; or, q being None, of all three: `(T, 3, H, D)`."""
    if type(lengths[4]) is not int or type(lengths[5]) is not int:
        lengths = (*lengths[:4], hint("max_seqlen_q", lengths[4]), hint("max_seqlen_k", lengths[5]))
    first, second = (stacked, None) if q is None else (q, stacked)
    if is_plain(first, stacked, stacked):
        both = _packed_alone(first, second, None, lengths, score)
        if both is not None:
            return both if return_lse else (both[0], None)
    return packed(*_unstack(q, stacked, None), lengths, score, return_lse)


def _dense_alone(
    q: Tensor, k: Tensor | None, v: Tensor | None, num_heads_q: int | None, score: Score
) -> tuple[Tensor, Tensor] | None:
    """`(out, lse)` by the layers' operator; None: what it does not take, for the general path, which words the errors.

    Here and in `_packed_alone` every argument of the operator is written out: to pass a tuple on by `*` costs 0.2 us.
    """
    scale, causal, window_size, softcap, slopes, _ = score
    if (
        (causal is not False and causal is not True)
        or not (scale is None or isinstance(scale, float))
        or not (type(softcap) is float or type(softcap) is int)
        or not (slopes is None or _takes_slopes(slopes))
    ):
        return None
    left, right = _NO_SIDES if window_size is UNLIMITED else sides(window_size)
    try:
        both: tuple[Tensor, Tensor] = _ops.rows_fwd(
            q, k, v, num_heads_q, causal, left, right, softcap or None, None, slopes, scale
        )
    except Exception as error:
        if not is_unserved(error):
            raise
        return None
    return both


def _packed_alone(
    q: Tensor, k: Tensor | None, v: Tensor | None, lengths: tuple[Any, ...], score: Score
) -> tuple[Tensor, Tensor] | None:
    """The same of packed tensors."""
    scale, causal, window_size, softcap, slopes, _ = score
    if (
        (causal is not False and causal is not True)
        or not (scale is None or isinstance(scale, float))
        or not (type(softcap) is float or type(softcap) is int)
        or not (slopes is None or _takes_slopes(slopes))
    ):
        return None
    left, right = _NO_SIDES if window_size is UNLIMITED else sides(window_size)
    cap = softcap or None
    cu_q, cu_k, used_q, used_k, max_q, max_k = lengths
    try:
        both: tuple[Tensor, Tensor] = _ops.rows_varlen_fwd(
            q, k, v, None, cu_q, cu_k, used_q, used_k, max_q, max_k, causal, left, right, cap, None, slopes, scale
        )
    except Exception as error:
        if not is_unserved(error):
            raise
        return None
    return both


def _takes_slopes(alibi_slopes: Tensor) -> bool:
    return type(alibi_slopes) is Tensor and not alibi_slopes.requires_grad


def cap_of(softcap: Any) -> Any:
    """None for flash-attn's 0. A tensor is not asked here: that may wait."""
    return softcap if isinstance(softcap, Tensor) else softcap or None


def window(window_size: Any) -> Window | None:
    """`window_size` as flash_cute's functions take it."""
    both = _NO_SIDES if window_size is UNLIMITED else sides(window_size)
    return None if both == _NO_SIDES else both


def sides(window_size: Any) -> Window:
    """`window_size` with None for the sides that flash-attn calls unlimited: those below 0.

    Its sides may be whatever stands for an int: also what a tensor `(2,)` of ints on the CPU unpacks to.
    """
    try:
        left, right = window_size
        if type(left) is not int or type(right) is not int:
            left, right = _side(left), _side(right)
    except (TypeError, ValueError):
        given = window_size if isinstance(window_size, tuple | list) else (window_size,)
        shown = "a tensor" if any(isinstance(x, Tensor) for x in given) else repr(window_size)
        raise ValueError(
            "flash_cute: window_size: expected (left, right), each a number of keys or -1 (no limit), and on the CPU, "
            f"got {shown}"
        ) from None
    return (None if left < 0 else left), (None if right < 0 else right)


def _side(side: Any) -> Any:
    """One side of `window_size`, as an int."""
    if side is None:
        return -1
    if isinstance(side, bool) or (isinstance(side, Tensor) and (side.dtype == torch.bool or side.device.type != "cpu")):
        raise TypeError
    return side if isinstance(side, torch.SymInt) else operator.index(side)


def hint(name: str, max_seqlen: Any) -> Any:
    """A longest length; None, which is none, for a tensor that cannot be read without waiting, or breaking a graph."""
    if not isinstance(max_seqlen, Tensor):
        check_longest(name, max_seqlen)
        return max_seqlen
    if is_dynamo_compiling() or max_seqlen.device.type != "cpu" or max_seqlen.numel() != 1:
        return None
    return int(max_seqlen)


def _unstack(q: Tensor | None, stacked: Tensor, num_heads_q: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, as views: see `dense_stacked`."""
    if num_heads_q is not None:
        heads = stacked.shape[2]
        if not 0 < num_heads_q < heads or (heads - num_heads_q) % 2:
            raise ValueError(
                f"flash_cute: num_heads_q: expected Hq of the Hq + 2 * Hkv = {heads} heads of qkv, got {num_heads_q}"
            )
        heads_kv = (heads - num_heads_q) // 2
        views: tuple[Tensor, Tensor, Tensor] = stacked.split([num_heads_q, heads_kv, heads_kv], dim=2)
        return views
    name, count = ("qkv", 3) if q is None else ("kv", 2)
    if not isinstance(stacked, Tensor) or stacked.dim() < 3 or stacked.shape[-3] != count:
        given = tuple(stacked.shape) if isinstance(stacked, Tensor) else type(stacked).__name__
        raise ValueError(f"flash_cute: {name}: expected {count} stacked tensors in dim -3, got {given}")
    *first, k, v = stacked.unbind(-3)
    return (q if q is not None else first[0]), k, v


def refuse(**given: Any) -> None:
    """Raise for the first argument that asks for what flash_cute does not have."""
    for name, x in given.items():
        expected = _DEFAULTS.get(name)
        if x is expected or (expected is not None and isinstance(x, int | float) and x == expected):
            continue
        shown = repr(x) if isinstance(x, int | float | str | None) else type(x).__name__
        raise ValueError(f"flash_cute: {name}: expected {expected}, since flash_cute does not have it, got {shown}")


# The others are tensors, or None.
_DEFAULTS = {"dropout_p": 0, "attention_chunk": 0, "sm_margin": 0, "return_softmax": False}

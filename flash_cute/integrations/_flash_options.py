"""flash-attn's options as flash_cute's: of versions 2 and 3, whose functions differ in their arguments alone."""

from typing import Any, NoReturn

from torch import Tensor

from .. import _ops, attention, varlen_attention
from .._layers import is_plain
from .._refusals import Window


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: Any,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """`(out, lse or None)`: `(B, N, Hq, Dv)` and `(B, Hq, N)`, of q `(B, N, Hq, D)`, k and v likewise, read in place.

    `deterministic=False` is flash-attn's default, and so leaves it to `torch.use_deterministic_algorithms`.
    """
    if is_plain(q, k, v) and (causal is False or causal is True) and alibi_slopes is None:
        left, right = (None, None) if window_size == (-1, -1) else window(window_size) or (None, None)
        try:
            out, lse = _ops.rows_fwd(q, k, v, True, causal, left, right, softcap or None, None, softmax_scale)
        except Exception:
            pass  # what the operator does not take is called again below, where errors are worded
        else:
            return out, lse if return_lse else None
    if isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor):
        if not q.ndim == k.ndim == v.ndim == 4:
            shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
            raise ValueError(f"flash_cute: q, k, v: expected 4 dims each, (B, N, H, D), got {shapes}")
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    # anything but tensors is attention's to refuse
    result: Any = attention(
        q,
        k,
        v,
        causal,
        scale=softmax_scale,
        window=None if window_size == (-1, -1) else window(window_size),
        softcap=softcap or None,
        alibi_slopes=alibi_slopes,
        return_lse=return_lse,
        deterministic=deterministic or None,
    )
    if return_lse:
        return result[0].transpose(1, 2), result[1]
    return result.transpose(1, 2), None


def packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[Any, ...],
    softmax_scale: float | None,
    causal: bool,
    window_size: Any,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """`(out, lse or None)`: `(Tq, Hq, Dv)` and `(Hq, Tq)`.

    `lengths`: cu_seqlens_q and cu_seqlens_k, max_seqlen_q and max_seqlen_k, seqused_q and seqused_k.
    """
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k = lengths
    result: Any = varlen_attention(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        causal,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        scale=softmax_scale,
        window=None if window_size == (-1, -1) else window(window_size),
        softcap=softcap or None,
        alibi_slopes=alibi_slopes,
        return_lse=return_lse,
        deterministic=deterministic or None,
    )
    return result if return_lse else (result, None)


def window(window_size: Any) -> Window | None:
    """`window_size` with None for the sides that flash-attn calls unlimited: those below 0."""
    try:
        left, right = window_size
        sides = (None if left is None or left < 0 else left, None if right is None or right < 0 else right)
    except (TypeError, ValueError):
        raise ValueError(
            "flash_cute: window_size: expected (left, right), each a number of keys or -1 (no limit), "
            f"got {window_size!r}"
        ) from None
    return None if sides == (None, None) else sides


def split(name: str, x: Tensor, dim: int, count: int) -> tuple[Tensor, ...]:
    """The `count` tensors that are stacked in x at `dim`, counted from the last; views."""
    if not isinstance(x, Tensor) or x.dim() < -dim or x.shape[dim] != count:
        given = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"flash_cute: {name}: expected {count} stacked tensors in dim {dim}, got {given}")
    return x.unbind(dim)


def refuse(**given: Any) -> None:
    """Raise for the first argument that asks for what flash_cute does not have."""
    for name, x in given.items():
        expected = 0 if name in _NUMBERS else None
        if x is expected or (expected == 0 and isinstance(x, int | float) and x == 0):
            continue
        shown = repr(x) if isinstance(x, int | float | str | None) else type(x).__name__
        raise ValueError(f"flash_cute: {name}: expected {expected}, since flash_cute does not have it, got {shown}")


_NUMBERS = ("dropout_p", "attention_chunk", "sm_margin")  # the others are tensors


def refuse_cache() -> NoReturn:
    """What `flash_attn_with_kvcache` does."""
    raise NotImplementedError(
        "flash_cute: flash_attn_with_kvcache: KV caches come in a later version. Until then flash_attn_func serves "
        "keys that are in one tensor; it aligns its causal mask to the last key."
    )

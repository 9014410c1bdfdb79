"""`torch.nn.attention.varlen.varlen_attn` as a function of flash_cute's."""

from typing import Any, overload

from torch import Tensor

from .._refusals import check_flag
from ._flash_options import UNLIMITED, packed


@overload
def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    return_aux: None = None, scale: float | None = None, window_size: tuple[int, int] = UNLIMITED,
) -> Tensor: ...  # fmt: skip


@overload
def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    return_aux: Any, scale: float | None = None, window_size: tuple[int, int] = UNLIMITED,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = UNLIMITED,
) -> Tensor | tuple[Tensor, Tensor]:
    """`torch.nn.attention.varlen.varlen_attn` (torch 2.11) by flash_cute: attention of packed sequences.

    Args:
        query, key, value: `(Tq, Hq, D)`, `(Tk, H, D)` and `(Tk, H, Dv)`; H divides Hq. Dtypes as in
            `flash_cute.varlen_attention`, on the CPU too.
        cu_seq_q, cu_seq_k: `(N + 1,)` int32, on query's device: where each sequence begins, and where the last ends.
        max_q, max_k: the longest sequences: hints, of which a wrong one costs speed alone.
        return_aux: None, or what has an attribute `lse`, such as `torch.nn.attention.varlen.AuxRequest(lse=True)`.
        scale: what multiplies q.k; None: `1 / sqrt(D)`.
        window_size: `(left, right)` numbers of keys, -1: no limit; `(-1, 0)` is causal, aligned to the bottom right.

    Returns:
        out `(Tq, Hq, Dv)`, or `(out, lse)`: lse `(Hq, Tq)` float32, natural log.

    Raises:
        ValueError, NotImplementedError: as `flash_cute.varlen_attention`. Nothing is passed on.

    Example:
        >>> query, key, value = (torch.randn(10, 4, 64) for _ in range(3))
        >>> offsets = torch.tensor([0, 3, 10], dtype=torch.int32)
        >>> varlen_attn(query, key, value, offsets, offsets, 7, 7, window_size=(-1, 0)).shape
        torch.Size([10, 4, 64])
    """
    lengths = (cu_seq_q, cu_seq_k, None, None, max_q, max_k)
    return_lse = return_aux is not None and _asks_for_lse(return_aux)
    score = (scale, False, window_size, 0.0, None, False)
    out, lse = packed(query, key, value, lengths, score, return_lse)
    return out if lse is None else (out, lse)


def _asks_for_lse(return_aux: Any) -> bool:
    others = [name for name in getattr(return_aux, "_fields", ()) if name != "lse" and getattr(return_aux, name)]
    if others or not hasattr(return_aux, "lse"):
        raise ValueError(f"flash_cute: return_aux: expected None or a request for lse alone, got {return_aux!r}")
    return check_flag("return_aux.lse", return_aux.lse)

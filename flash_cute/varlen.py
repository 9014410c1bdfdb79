"""Attention of packed sequences: many sequences of different lengths in one tensor, without padding."""

from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from . import _check_lengths, _fp8, _masked, _quantized
from ._call import attend, differentiate, record
from ._fp8_types import FLOAT8
from ._refusals import Window, check_longest, with_row_invariance
from .autograd import VARLEN
from .kvcache import attend_pages
from .mask import Mask

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._options import VarlenOptions


@overload
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, causal: bool | str = False, *,
    return_lse: Literal[False] = False, **options: "Unpack[VarlenOptions]",
) -> Tensor: ...  # fmt: skip


@overload
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, causal: bool | str = False, *,
    return_lse: Literal[True], **options: "Unpack[VarlenOptions]",
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, causal: bool | str = False, *,
    return_lse: bool, **options: "Unpack[VarlenOptions]",
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    causal: bool | str = False,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str | None = None,
    accumulate: str | None = None,
    row_invariant: bool = False,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
    descale_v: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    descale_out: Tensor | None = None,
    quantize: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact, differentiable attention of B packed sequences: each attends to itself alone, as if by `attention`.

    Sequence b has the rows `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1]` of q and out, and the rows `cu_seqlens_k[b]` to
    `cu_seqlens_k[b + 1]` of k and v. Nothing outside of them influences its result, NaN and inf included. The lengths
    are read on the device: nothing waits for the GPU, and a CUDA graph may be replayed with other lengths.

    Args:
        q: `(Tq, Hq, D)`, the rows of all sequences; dtypes, head dims and strides as in `attention`.
        k: `(Tk, Hkv, D)`, same dtype and device; Hkv divides Hq.
        v: `(Tk, Hkv, Dv)`, same dtype and device.
        cu_seqlens_q: `(B + 1,)` int32, contiguous, on q's device: where each sequence's rows begin, and where the last
            one's end. Rows before the first and after the last are in no sequence.
        cu_seqlens_k: the same of k and v; `None` with `page_table`.
        causal, window: as in `attention`, in each sequence: row i of Nq has position `i + Nk - Nq` (`"top_left"`: i).
        max_seqlen_q, max_seqlen_k: the longest sequence's length, where it is known on the host: a hint for the choice
            of a kernel. A wrong one costs speed and never changes what is computed. A tensor is refused: its value
            would have to be waited for.
        seqused_q, seqused_k: `(B,)` int32, contiguous, on q's device: how many of each sequence's rows and keys are
            used, counted from its first; Nq and Nk are these then. `None`: all.
        page_table: `(B, max_pages)` int32, columns contiguous, on q's device: k and v are pages then,
            `(pages, page, Hkv, D)` and `(pages, page, Hkv, Dv)`, and `seqused_k` says how many keys each sequence has
            in those that its row of the table names. That is `attention_with_kvcache` of packed rows, which has more
            words for it: inference only, pages of any size, float8 pages with `descale_k` and `descale_v`. `seqused_q`,
            `accumulate`, `quantize`, `descale_q`, `out_dtype` and `descale_out` are refused.
        softcap, sinks, scale, deterministic, backend, accumulate, row_invariant: as in `attention`.
        alibi_slopes: as in `attention`: `(Hq,)`, or `(B, Hq)` for slopes per sequence.
        mask: as in `attention`, of a batch of 1: its rows and keys are those of the packed tensors, and keys are
            hidden from other sequences in any case. `seqused_q`, `seqused_k`, `alibi_slopes` and `page_table` are
            refused beside it.
        return_lse: return the logsumexp of each row too. Gradients flow through it.
        descale_q, descale_k, descale_v, out_dtype, descale_out: of float8 tensors, as in `attention`; B sequences.
            Blocks of 128 rows begin at each sequence's own first row, and a descale `(B, H, blocks)` has at least as
            many as the longest sequence. Only a `max_seqlen` lets the host check that; the last block serves the rows
            behind it.
        quantize: as in `attention`; by sequence.

    Returns:
        out: `(Tq, Hq, Dv)` in q's dtype, laid out like `torch.empty_like(q)`; or, with `return_lse`, `(out, lse)`: lse
        `(Hq, Tq)` float32 (float64 for float64 inputs).

        A row that sees no key, and a row that no sequence uses (before the first, behind the last, or past
        `seqused_q`), has out 0, lse -inf and gradients 0; so have unused keys dk and dv 0.

        Offsets that are not ascending, negative or past the end are no error, since that would need the GPU to be
        waited for. They are clamped to [0, T] and count as ascending: an offset that is smaller than one before it
        counts as that one. So nothing outside of the tensors is read or written, no two sequences share a row, and
        `seqused[b]` counts from 0 to the length that is left. With the environment's `FLASH_CUTE_CHECK=1` offsets that
        are not in order raise: each call then waits for the GPU, to read them.

    Raises:
        ValueError, NotImplementedError: as `attention`; also for offsets or used lengths of a wrong shape, dtype or
            device.

    Example:
        >>> q, k, v = (torch.randn(10, 4, 64) for _ in range(3))
        >>> offsets = torch.tensor([0, 3, 10], dtype=torch.int32)  # two sequences, of 3 and 7 rows
        >>> out = varlen_attention(q, k, v, offsets, offsets, causal=True)
        >>> alone = (x[3:].transpose(0, 1) for x in (q, k, v))
        >>> alone = torch.nn.functional.scaled_dot_product_attention(*alone, is_causal=True)
        >>> torch.allclose(out[3:], alone.transpose(0, 1), atol=1e-5)
        True
    """
    if not isinstance(q, Tensor) and has_torch_function((q, k, v)):  # torch.fx.symbolic_trace's proxies
        return record(varlen_attention, locals())
    if row_invariant is not False:
        backend = with_row_invariance(backend, row_invariant)
    if max_seqlen_q is not None and type(max_seqlen_q) is not int:
        check_longest("max_seqlen_q", max_seqlen_q)
    if max_seqlen_k is not None and type(max_seqlen_k) is not int:
        check_longest("max_seqlen_k", max_seqlen_k)
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    score = (causal, scale, window, softcap, sinks, alibi_slopes)
    if page_table is not None:
        refuse_mask_of_pages(mask)
        rest = (return_lse, deterministic, backend, accumulate)
        fp8 = (descale_q, descale_k, descale_v, out_dtype, descale_out)
        return attend_pages(q, k, v, lengths, page_table, *score, *rest, fp8, quantize)
    if _check_lengths.ENABLED:
        _check_lengths.check_lengths(q, k, lengths)
    if mask is not None:
        rest = (return_lse, deterministic, backend, accumulate)
        of_float8 = (descale_q, descale_k, descale_v, out_dtype, descale_out, quantize)
        return _masked.attend(q, k, v, lengths, mask, of_float8, *score, *rest)
    if isinstance(q, Tensor) and (
        q.dtype in FLOAT8
        or descale_q is not None
        or descale_k is not None
        or descale_v is not None
        or out_dtype is not None
        or descale_out is not None
        or quantize is not None
    ):
        fp8 = (descale_q, descale_k, descale_v, out_dtype, descale_out)
        if quantize is not None:
            rest = (return_lse, deterministic, backend, accumulate)
            return _quantized.attend(q, k, v, lengths, fp8, quantize, *score, *rest)
        return _fp8.attend(q, k, v, lengths, fp8, *score, return_lse, deterministic, backend, accumulate)
    return attend(VARLEN, q, k, v, lengths, *score, return_lse, deterministic, backend, accumulate)


def varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    causal: bool | str = False,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
    deterministic: bool | None = None,
    backend: str | None = None,
    accumulate: str | None = None,
    row_invariant: bool = False,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
    descale_v: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    descale_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`varlen_attention` with the logsumexp of each row's scores: `(out, lse)`, both differentiable.

    Args, errors: as in `varlen_attention`. The same inputs give the same bits.

    Returns:
        out: `(Tq, Hq, Dv)` in q's dtype, laid out like `torch.empty_like(q)`.
        lse: `(Hq, Tq)` float32 (float64 for float64 inputs); -inf where a row sees no key or is in no sequence.

    Example:
        >>> q, k, v = torch.randn(10, 8, 64), torch.randn(30, 2, 64), torch.randn(30, 2, 64)
        >>> offsets_q = torch.tensor([0, 3, 10], dtype=torch.int32)
        >>> offsets_k = torch.tensor([0, 20, 30], dtype=torch.int32)
        >>> out, lse = varlen_fwd(q, k, v, offsets_q, offsets_k, causal=True)
        >>> out.shape, lse.shape
        (torch.Size([10, 8, 64]), torch.Size([8, 10]))
    """
    if not isinstance(q, Tensor) and has_torch_function((q, k, v)):  # torch.fx.symbolic_trace's proxies
        return record(varlen_fwd, locals())
    if row_invariant is not False:
        backend = with_row_invariance(backend, row_invariant)
    if max_seqlen_q is not None and type(max_seqlen_q) is not int:
        check_longest("max_seqlen_q", max_seqlen_q)
    if max_seqlen_k is not None and type(max_seqlen_k) is not int:
        check_longest("max_seqlen_k", max_seqlen_k)
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    score = (causal, scale, window, softcap, sinks, alibi_slopes)
    if page_table is not None:
        refuse_mask_of_pages(mask)
        rest = (True, deterministic, backend, accumulate)
        fp8 = (descale_q, descale_k, descale_v, out_dtype, descale_out)
        return attend_pages(q, k, v, lengths, page_table, *score, *rest, fp8)
    if _check_lengths.ENABLED:
        _check_lengths.check_lengths(q, k, lengths)
    if mask is not None:
        fp8 = (descale_q, descale_k, descale_v, out_dtype, descale_out)
        return _masked.attend(q, k, v, lengths, mask, fp8, *score, True, deterministic, backend, accumulate)
    if isinstance(q, Tensor) and (
        q.dtype in FLOAT8
        or descale_q is not None
        or descale_k is not None
        or descale_v is not None
        or out_dtype is not None
        or descale_out is not None
    ):
        fp8 = (descale_q, descale_k, descale_v, out_dtype, descale_out)
        return _fp8.attend(q, k, v, lengths, fp8, *score, True, deterministic, backend, accumulate)
    return attend(VARLEN, q, k, v, lengths, *score, True, deterministic, backend, accumulate)


def varlen_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool | str = False,
    *,
    dlse: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
    deterministic: bool | None = None,
    backend: str | None = None,
) -> tuple[Tensor, ...]:
    """The gradients of `varlen_attention`, for callers that keep `out` and `lse`; autograd calls the same operator.

    Args:
        dout: gradient of out: `(Tq, Hq, Dv)` in q's dtype, any strides.
        q, k, v and all options: as given to the forward.
        out, lse: what the forward returned, `(Tq, Hq, Dv)` in q's dtype and `(Hq, Tq)` float32 (float64 for float64
            inputs).
        dlse: gradient of lse, like it in shape and dtype. `None`: 0.
        deterministic: whether dq must have the same bits in every run. `None`: what
            `torch.are_deterministic_algorithms_enabled()` says.

    Returns:
        `(dq, dk, dv)`, with sinks `(dq, dk, dv, dsinks)`: of the shapes and dtypes of q, k, v and sinks, laid out like
        `torch.empty_like` of each. 0 for rows and keys that no sequence uses.

    Raises:
        ValueError, NotImplementedError: as `bwd`, and as `varlen_attention`.

    Example:
        >>> q, k, v = (torch.randn(10, 4, 64) for _ in range(3))
        >>> offsets = torch.tensor([0, 3, 10], dtype=torch.int32)
        >>> out, lse = varlen_fwd(q, k, v, offsets, offsets)
        >>> dq, dk, dv = varlen_bwd(torch.ones_like(out), q, k, v, out, lse, offsets, offsets)
        >>> dq.shape
        torch.Size([10, 4, 64])
    """
    if not isinstance(q, Tensor) and has_torch_function((q, k, v)):  # torch.fx.symbolic_trace's proxies
        return record(varlen_bwd, locals())
    if max_seqlen_q is not None and type(max_seqlen_q) is not int:
        check_longest("max_seqlen_q", max_seqlen_q)
    if max_seqlen_k is not None and type(max_seqlen_k) is not int:
        check_longest("max_seqlen_k", max_seqlen_k)
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    tensors = (dout, q, k, v, out, lse, dlse)
    if _check_lengths.ENABLED:
        _check_lengths.check_lengths(q, k, lengths)
    score = (causal, scale, window, softcap, sinks, alibi_slopes)
    calls, own = (VARLEN, lengths) if mask is None else _masked.calls_and_tensors(mask, lengths)
    return differentiate(calls, tensors, own, *score, deterministic, backend)


def refuse_mask_of_pages(mask: Mask | None) -> None:
    """Raise for a mask beside a `page_table`: over caches there is none."""
    if mask is not None:
        raise ValueError("flash_cute: mask: expected None with page_table, got a mask")

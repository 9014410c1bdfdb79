"""The public functions."""

from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from . import _fp8, _masked, _quantized
from ._call import attend, differentiate, record
from ._fp8_types import FLOAT8
from ._refusals import Window, with_row_invariance
from .autograd import DENSE
from .mask import Mask
from .report import built_architectures

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._options import Options


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool | str = False, *,
    return_lse: Literal[False] = False, **options: "Unpack[Options]",
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool | str = False, *,
    return_lse: Literal[True], **options: "Unpack[Options]",
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool | str = False, *,
    return_lse: bool, **options: "Unpack[Options]",
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool | str = False,
    *,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    mask: Mask | None = None,
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
    """Exact, differentiable attention: `softmax(score(q, k) + mask) @ v`, the score `scale * q @ k^T` unless modified.

    The method is FlashAttention-2 (arXiv 2307.08691) on the online softmax (arXiv 1805.02867): no (Nq, Nk) matrix is
    ever in memory, the backward recomputes its tiles from q, k and the logsumexp. `fwd` is the same with the
    logsumexp always returned, `bwd` the backward beneath.

    A row i of q has the position p = i + Nk - Nq among the keys, or p = i if causal is `"top_left"`. Its score with key
    j is `s = scale * q.k`, then `softcap * tanh(s / softcap)`, then less `slope * |p - j|`.

    Args:
        q: `(B, Hq, Nq, D)`, float16 or bfloat16, D at most 1024; on the CPU also float32 or float64, and any D. Any
            strides: what is not contiguous in its last dim, or not 16-byte aligned, is copied once (`explain` says so).
            A `(B, N, H, D)` tensor is passed as `.transpose(1, 2)`. Inside `torch.autocast` q, k and v are
            cast to its dtype first, as `scaled_dot_product_attention` does. Or float8_e4m3fn or float8_e5m2, as k and v
            are then, each its own: see *Float8*.
        k: `(B, Hkv, Nk, D)`, same dtype and device. Hkv divides Hq: query head h reads key head
            `h // (Hq // Hkv)` (GQA, MQA), and nothing is copied for it.
        v: `(B, Hkv, Nk, Dv)`, same dtype and device. Dv may differ from D; its limits are D's.
        causal: `False`; `True` or `"bottom_right"`: row i sees columns j <= i + Nk - Nq, as a KV cache needs
            it; `"top_left"`: j <= i, as `scaled_dot_product_attention(is_causal=True)` has it.
        scale: what multiplies q.k; finite and > 0. `None`: `1 / sqrt(D)`.
        window: `(left, right)`, numbers of keys: a row sees p - left <= j <= p + right. `None` for a side is no limit.
            With `causal` right is 0, whatever is given.
        softcap: finite and > 0: scores are capped at +-softcap by tanh, as in Gemma 2 (arXiv 2408.00118).
        sinks: `(Hq,)`, float32 or q's dtype, natural logs: `exp(sinks[h])` is added to the denominator of head h's
            softmax, so that a row may give its weight to no key (attention sinks, arXiv 2309.17453, learned as in
            gpt-oss). They have a gradient. -inf is no sink. The LSE never contains them: the results of parts of the
            keys are merged by their LSE without sinks, and `out * sigmoid(lse - sink)` applies them once, at the end.
        alibi_slopes: `(Hq,)` or `(B, Hq)`, float32: `slope * |p - j|` is subtracted from the score (ALiBi, arXiv
            2108.12409). They have no gradient.
        mask: a `flash_cute.Mask`, for what a band cannot say: documents, images, trees, padding. A row sees a key if
            `causal` and `window` let it and the mask does. Not with float8 tensors or `accumulate`. It has no gradient.
        return_lse: return the logsumexp of each row too. Gradients flow through it.
        deterministic: whether the backward must give the same bits in every run. `None`: what
            `torch.are_deterministic_algorithms_enabled()` says now. The forward always does.
        backend: `None` picks the best one for the call; `"sm80"`, `"sm90"` or `"cpu"` insists, of the backward too:
            `backward()` raises where that one has no kernel of the backward for D.
        accumulate: what the sums of products are kept in. `None` or `"float32"`; `"float16_pv"` for P V,
            `"float16_qk"` for Q K^T, or `"float16"` for both, which GeForce chips multiply twice as fast in float16.
            Only for float16 tensors on the GPU (backend `"sm80"`), D and Dv at most 256 (`"float16_pv"`: 192), without
            gradients, softcap and ALiBi; never chosen by itself. Errors of out beside float32's: P V at most about 2
            times, Q K^T 2 times where scores are small and up to 16 times where they are large
            (docs/float16_accumulation.md). Finite inputs never give NaN where no |v| is above 1000; scores beyond
            +-65504 saturate.
        row_invariant: `True`: the bits of a row of out and lse depend on its query, and the keys and values that it
            sees, alone: they are the same in training's forward, a prefill, a chunk of one, and decoding with
            `attention_with_kvcache(row_invariant=True)`, in any batch (docs/row_invariance.md). GPUs of compute
            capability 9.0, D and Dv at most 256, without `mask`, softcap, ALiBi and float8. The backward is the usual.

    Returns:
        out: `(B, Hq, Nq, Dv)` in q's dtype, laid out like `torch.empty_like(q)` (its dims in that order in memory where
        Dv is not D); or, with `return_lse`, `(out, lse)`: lse `(B, Hq, Nq)` float32 (float64 for float64 inputs), the
        natural log of the sum of `exp(score)` over the keys that the row sees.

        A row that sees no key has out 0, lse -inf and gradients 0, with a sink too; so has every row when Nk is 0.

    Raises:
        ValueError: the call cannot be served; the sentence names the argument, what was expected and what
            was given. Nothing has been launched then. (`torch.ops.flash_cute.fwd`, and so a compiled graph,
            says the same in a RuntimeError under torch 2.15.) Also for slopes that require grad.
        NotImplementedError: for tensors with a forward-mode tangent, under `torch.vmap`, from a double backward, and
            where a gradient of float8 tensors, their descales or sinks is asked for.

    Float8:
        q, k and v, each float8_e4m3fn or float8_e5m2, stand for their values times their descales; out and lse are
        those of these numbers, within the error of P's rounding to float8. Forward only, on GPUs of compute capability
        9.0, D and Dv at most 256, and on the CPU. Sinks are float32, `accumulate` is refused, `torch.autocast` changes
        nothing.

        descale_q, descale_k, descale_v: float32 on q's device, of any strides (`expand` will do). `None`: 1. One number
            (0-dim, or of 1 element), or `(B, Hkv)`: q's too is by key head. Or of q `(B, Hq, ceil(Nq / 128))` and of k
            `(B, Hkv, ceil(Nk / 128))`: by block of 128 rows; of v `(B, Hkv, Dv)`: by channel.
        out_dtype: of out: `torch.bfloat16` (`None`), float16, float32, float8_e4m3fn or float8_e5m2.
        descale_out: of a float8 out, which is divided by it and saturates at its dtype's largest number: one number or
            `(B, Hq)`, float32. `None`: 1.

        quantize: `"fp8"` does both for q, k and v of other dtypes: `quantize_fp8` per head, k less its mean where there
            is no softcap and no sink, and attention. D and Dv are multiples of 16. out has q's dtype unless `out_dtype`
            names another, and the lse is that of k itself. It is never done without being asked for.

        Descales are finite and above 0. On the CPU others raise; a CUDA call, which does not wait for the device, does
        not see them, and its results are then of no use.

    Example:
        >>> q = torch.randn(2, 8, 128, 64, requires_grad=True)
        >>> k, v = torch.randn(2, 2, 128, 64), torch.randn(2, 2, 128, 64)
        >>> sinks = torch.zeros(8, requires_grad=True)
        >>> attention(q, k, v, causal=True, window=(31, 0), sinks=sinks).sum().backward()
        >>> q.grad.shape, sinks.grad.shape
        (torch.Size([2, 8, 128, 64]), torch.Size([8]))
        >>> x = torch.randn(2, 8, 128, 64)
        >>> scale = x.abs().amax() / 448  # one number; 448 is float8_e4m3fn's largest
        >>> x8 = (x / scale).to(torch.float8_e4m3fn)
        >>> attention(x8, x8, x8, descale_q=scale, descale_k=scale, descale_v=scale).dtype
        torch.bfloat16
    """
    if row_invariant is not False and isinstance(q, Tensor):
        backend = with_row_invariance(backend, row_invariant)
    if not isinstance(q, Tensor):
        if has_torch_function((q, k, v)):  # torch.fx.symbolic_trace's proxies
            return record(attention, locals())
    elif mask is not None:
        of_float8 = (descale_q, descale_k, descale_v, out_dtype, descale_out, quantize)
        score = (causal, scale, window, softcap, sinks, alibi_slopes)
        rest = (return_lse, deterministic, backend, accumulate)
        return _masked.attend(q, k, v, (), mask, of_float8, *score, *rest)
    elif (
        q.dtype in FLOAT8
        or descale_q is not None
        or descale_k is not None
        or descale_v is not None
        or out_dtype is not None
        or descale_out is not None
        or quantize is not None
    ):
        fp8 = (descale_q, descale_k, descale_v, out_dtype, descale_out)
        score = (causal, scale, window, softcap, sinks, alibi_slopes)
        rest = (return_lse, deterministic, backend, accumulate)
        if quantize is not None:
            return _quantized.attend(q, k, v, (), fp8, quantize, *score, *rest)
        return _fp8.attend(q, k, v, (), fp8, *score, *rest)
    return attend(
        DENSE, q, k, v, (), causal, scale, window, softcap, sinks, alibi_slopes,
        return_lse, deterministic, backend, accumulate,
    )  # fmt: skip


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool | str = False,
    *,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    mask: Mask | None = None,
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
    """`attention` with the logsumexp of each row's scores: `(out, lse)`, both differentiable.

    Args, errors: as in `attention`. The same inputs give the same bits.

    Returns:
        out: `(B, Hq, Nq, Dv)` in q's dtype (of float8 tensors `out_dtype`), laid out like `torch.empty_like(q)`.
        lse: `(B, Hq, Nq)` float32 (float64 for float64 inputs), the natural log of the sum of
            `exp(score)` over the keys that the row sees; -inf where it sees none.

    Example:
        >>> q = torch.randn(2, 8, 128, 64)
        >>> k, v = torch.randn(2, 2, 512, 64), torch.randn(2, 2, 512, 64)
        >>> out, lse = fwd(q, k, v, causal=True)
        >>> out.shape, lse.shape
        (torch.Size([2, 8, 128, 64]), torch.Size([2, 8, 128]))
    """
    if row_invariant is not False and isinstance(q, Tensor):
        backend = with_row_invariance(backend, row_invariant)
    if not isinstance(q, Tensor):
        if has_torch_function((q, k, v)):  # torch.fx.symbolic_trace's proxies
            return record(fwd, locals())
    elif mask is not None:
        fp8 = (descale_q, descale_k, descale_v, out_dtype, descale_out)
        score = (causal, scale, window, softcap, sinks, alibi_slopes)
        return _masked.attend(q, k, v, (), mask, fp8, *score, True, deterministic, backend, accumulate)
    elif (
        q.dtype in FLOAT8
        or descale_q is not None
        or descale_k is not None
        or descale_v is not None
        or out_dtype is not None
        or descale_out is not None
    ):
        fp8 = (descale_q, descale_k, descale_v, out_dtype, descale_out)
        return _fp8.attend(
            q, k, v, (), fp8, causal, scale, window, softcap, sinks, alibi_slopes,
            True, deterministic, backend, accumulate,
        )  # fmt: skip
    return attend(
        DENSE, q, k, v, (), causal, scale, window, softcap, sinks, alibi_slopes,
        True, deterministic, backend, accumulate,
    )  # fmt: skip


def bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool | str = False,
    *,
    dlse: Tensor | None = None,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    mask: Mask | None = None,
    deterministic: bool | None = None,
    backend: str | None = None,
) -> tuple[Tensor, ...]:
    """The gradients of `attention`, for callers that keep `out` and `lse` themselves; autograd calls the same operator.

    The method is FlashAttention-2's backward (arXiv 2307.08691, algorithm 2): P is recomputed a tile at a time from
    the LSE, `dS = P * (dout @ v^T - delta)` with `delta = rowsum(dout * out) - dlse`. dk and dv are summed in
    registers and always have the same bits; dq is summed in float32 in a workspace. With sinks P is divided by
    `exp(L)` for L = log(exp(lse) + exp(sink)), dlse is multiplied by `exp(L - lse)`, and
    `dsinks = -sum(exp(sink - L) * rowsum(dout * out))` over batches and rows. A softcap multiplies dS by 1 - tanh^2.

    Args:
        dout: gradient of out: `(B, Hq, Nq, Dv)` in q's dtype, any strides.
        q, k, v, causal, scale, window, softcap, sinks, alibi_slopes, mask, backend: as given to the forward.
        out, lse: what the forward returned, `(B, Hq, Nq, Dv)` in q's dtype and `(B, Hq, Nq)` float32 (float64 for
            float64 inputs). Of parts of the keys: the out and lse of the whole give that part's share of the gradients.
        dlse: gradient of lse, like it in shape and dtype. `None`: 0.
        deterministic: whether dq must have the same bits in every run. `None`: what
            `torch.are_deterministic_algorithms_enabled()` says.

    Returns:
        `(dq, dk, dv)`, of the shapes and dtypes of q, k and v, laid out like `torch.empty_like` of each; where sinks
        are given `(dq, dk, dv, dsinks)`, dsinks like sinks. Rows that see no key have dq 0; keys that no row sees have
        dk and dv 0.

    Raises:
        ValueError: as `attention`, also for dout, out, lse and dlse.
        NotImplementedError: as `attention`; and the gradients themselves cannot be differentiated.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 128, 64) for _ in range(3))
        >>> out, lse = fwd(q, k, v, causal=True)
        >>> dq, dk, dv = bwd(torch.ones_like(out), q, k, v, out, lse, causal=True)
        >>> dq.shape
        torch.Size([1, 2, 128, 64])
    """
    if not isinstance(q, Tensor) and has_torch_function((q, k, v)):  # torch.fx.symbolic_trace's proxies
        return record(bwd, locals())
    calls, own = (DENSE, ()) if mask is None else _masked.calls_and_tensors(mask, ())
    tensors = (dout, q, k, v, out, lse, dlse)
    return differentiate(
        calls, tensors, own, causal, scale, window, softcap, sinks, alibi_slopes, deterministic, backend
    )


def backends() -> dict[str, bool]:
    """The names that `attention(backend=...)` takes, and whether each can run on this machine's current device.

    Example:
        >>> backends()["cpu"]
        True
    """
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    built = built_architectures()
    return {
        "cpu": True,
        "sm80": "sm80" in built and capability[0] >= 8,
        "sm90": "sm90" in built and capability[0] == 9,
    }

"""The functions of `flash_attn.flash_attn_interface` that begin with an underscore, served by flash_cute.

They are no interface, and yet ring-flash-attn, yunchang, diffusers and TransformerEngine call them: one forward and one
backward, without autograd of flash-attn's own. Shapes, results and refusals are those of `_flash_attn_2_cuda`, whose
functions they call as flash-attn's do. A forward returns `(out, softmax_lse, S_dmask, rng_state)`; a backward writes to
dq, dk and dv and returns softmax_d.

Beside flash-attn's: a row that sees no key has LSE -inf, as elsewhere in flash_cute, not +inf; and a forward of tensors
that require grad is differentiable.
"""

from typing import NoReturn

from torch import Tensor

from . import _flash_attn_2_cuda

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "_get_block_size_n",
    "_wrapped_flash_attn_backward",
    "_wrapped_flash_attn_forward",
    "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward",
]


# The argument lists are flash-attn's, in its order.
def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor,
    dropout_p: float, softmax_scale: float | None, causal: bool, window_size_left: int, window_size_right: int,
    softcap: float, alibi_slopes: Tensor | None, return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`(out, softmax_lse, S_dmask, rng_state)` of q `(B, N, Hq, D)`, k and v likewise."""
    window = (window_size_left, window_size_right)
    out, lse, masked, state = _flash_attn_2_cuda.fwd(
        q, k, v, None, alibi_slopes, dropout_p, softmax_scale, causal, *window, softcap, return_softmax, None
    )
    return out, lse, masked, state


def _flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float | None, causal: bool, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    return_softmax: bool = False, block_table: Tensor | None = None, leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None, zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`(out, softmax_lse, S_dmask, rng_state)` of packed q `(Tq, Hq, D)`, k and v likewise."""
    out, lse, masked, state = _flash_attn_2_cuda.varlen_fwd(
        q, k, v, None, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, alibi_slopes, max_seqlen_q,
        max_seqlen_k, dropout_p, softmax_scale, zero_tensors, causal, window_size_left, window_size_right, softcap,
        return_softmax, None,
    )  # fmt: skip
    return out, lse, masked, state


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None,
    dropout_p: float, softmax_scale: float | None, causal: bool, window_size_left: int, window_size_right: int,
    softcap: float, alibi_slopes: Tensor | None, deterministic: bool, rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Writes the gradients to dq, dk and dv; returns softmax_d."""
    _check_given(dq, dk, dv)
    return _flash_attn_2_cuda.bwd(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, alibi_slopes, dropout_p, softmax_scale, causal,
        window_size_left, window_size_right, softcap, deterministic, None, rng_state,
    )[3]  # fmt: skip


def _flash_attn_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float | None, causal: bool, window_size_left: int, window_size_right: int,
    softcap: float, alibi_slopes: Tensor | None, deterministic: bool, rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:  # fmt: skip
    """Writes the gradients of packed sequences to dq, dk and dv; returns softmax_d."""
    _check_given(dq, dk, dv)
    return _flash_attn_2_cuda.varlen_bwd(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, alibi_slopes, max_seqlen_q,
        max_seqlen_k, dropout_p, softmax_scale, zero_tensors, causal, window_size_left, window_size_right, softcap,
        deterministic, None, rng_state,
    )[3]  # fmt: skip


# flash-attn's are the same as operators of torch.library, which torch.compile does not look into.
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


def _get_block_size_n(device: object, head_dim: int, is_dropout: bool, is_causal: bool) -> NoReturn:
    """Raises NotImplementedError. faesm imports it, and calls it where it looks at what dropout has left."""
    raise NotImplementedError(
        "flash_cute: _get_block_size_n: flash-attn's tiles, by which S_dmask is read. flash_cute has neither them nor "
        "the dropout that fills S_dmask."
    )


def _check_given(dq: Tensor | None, dk: Tensor | None, dv: Tensor | None) -> None:
    """Without a buffer a gradient would be lost: these functions return softmax_d alone."""
    for name, buffer in (("dq", dq), ("dk", dk), ("dv", dv)):
        if buffer is None:
            raise ValueError(f"flash_cute: {name}: expected a tensor to write the gradient to, got None")

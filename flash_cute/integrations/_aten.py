"""The aten operators of PyTorch's flash attention, computed by flash_cute: same arguments, same results.

PyTorch calls them below `scaled_dot_product_attention` (graphs of torch.compile too), nested tensors, `varlen_attn` and
context parallelism; autograd has its own kernels above them. Their causal mask is aligned to the bottom right. Each
function here raises what flash_cute raises for a call that it cannot serve, before anything is launched; `overrides`
then calls the kernel that PyTorch has. So it does on GPUs that are left to PyTorch (_left.py).
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from .. import _check_lengths, _fp8, _left, _ops, _quantized
from .._refusals import is_refusal
from ._tally import tally, this_thread


def sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    quantize: str | None = None,
) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_flash_attention, of `(B, H, N, D)`: (out, lse, None, None, Nq, Nk, *unused)."""
    _refuse(dropout_p, return_debug_mask)
    out, lse = _attend(query, key, value, (), (_mask(is_causal), None, None), None, scale, quantize)
    return out, lse, None, None, query.shape[2], key.shape[2], *_unused(query)


def sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor | None,
    philox_offset: Tensor | None,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """aten::_scaled_dot_product_flash_attention_backward, of `(B, H, N, D)`: (dq, dk, dv)."""
    _refuse(dropout_p)
    dq, dk, dv, _ = _ops.bwd_without_autograd(
        *(grad_out, query, key, value, out, logsumexp, None),
        *(_mask(is_causal), None, None, None, None, None, scale),
        *(torch.are_deterministic_algorithms_enabled(), "auto"),
    )
    return dq, dk, dv


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    quantize: str | None = None,
) -> tuple[Any, ...]:
    """aten::_flash_attention_forward, of `(B, N, H, D)`, or packed `(T, H, D)`: (out, lse, *unused).

    Newer PyTorchs have the last arguments; `num_splits` is a hint.
    """
    _refuse(dropout_p, return_debug_mask)
    if block_table is not None:
        raise ValueError("flash_cute: block_table: expected None, got a tensor")
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        for name, x in (("alibi_slopes", alibi_slopes), ("seqused_k", seqused_k)):
            if x is not None:
                raise ValueError(f"flash_cute: {name}: expected None with gradients, since aten's backward lacks it")
    mask = (_mask(is_causal), _side(window_size_left), _side(window_size_right))
    score = (alibi_slopes, scale)
    if cum_seq_q is not None:
        lengths = (cum_seq_q, cum_seq_k, None, seqused_k, max_q, max_k)
        if _check_lengths.ENABLED:
            _check_lengths.check_lengths(query, key, lengths)
        out, lse = _attend(query, key, value, lengths, mask, *score, quantize)
        return out, lse, *_unused(query)
    if seqused_k is not None:
        raise ValueError("flash_cute: seqused_k: expected None without cum_seq_q, got a tensor")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, lse = _attend(q, k, v, (), mask, *score, quantize)
    return out.transpose(1, 2), lse, *_unused(query)


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor | None,
    unused: Tensor | None,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    """aten::_flash_attention_backward, of `(B, N, H, D)`, or packed `(T, H, D)`: (dq, dk, dv)."""
    _refuse(dropout_p)
    mask = (_mask(is_causal), _side(window_size_left), _side(window_size_right))
    rest = (None, None, None, scale, torch.are_deterministic_algorithms_enabled(), "auto")
    tensors = (grad_out, query, key, value, out)
    if cum_seq_q is not None:
        lengths = (cum_seq_q, cum_seq_k, None, None, max_q, max_k)
        return tuple(_ops.varlen_bwd_without_autograd(*tensors, logsumexp, None, *lengths, *mask, *rest)[:3])
    heads_first = (x.transpose(1, 2) for x in tensors)
    gradients = _ops.bwd_without_autograd(*heads_first, logsumexp, None, *mask, *rest)[:3]
    return tuple(x.transpose(1, 2) for x in gradients)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: tuple[Any, ...],
    mask: tuple[str, int | None, int | None],
    alibi_slopes: Tensor | None,
    scale: float | None,
    quantize: str | None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of `(B, H, N, D)`, or packed where there are lengths."""
    both: tuple[Tensor, Tensor]
    if quantize is None:
        operator = _ops.varlen_fwd_without_autograd if lengths else _ops.fwd_without_autograd
        both = operator(query, key, value, *lengths, *mask, None, None, alibi_slopes, scale, "auto")
    else:
        no_float8 = (None, None, None, None, None)
        score = (mask[0], scale, mask[1:], None, None, alibi_slopes)
        both = _quantized.attend(query, key, value, lengths, no_float8, quantize, *score, True, None, None, None)
    return both


def _no_backward(*args: Any, **options: Any) -> NoReturn:
    raise NotImplementedError(f"{_fp8.NO_BACKWARD}; torch.no_grad() says that no gradient is needed.")


OPERATORS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
    "_flash_attention_forward": flash_forward,
    "_flash_attention_backward": flash_backward,
}


def overrides(strict: bool, quantize: str | None = None) -> Iterator[tuple[str, Callable[..., Any]]]:
    """(name, kernel) of each operator that this PyTorch has on CUDA. A kernel takes the dispatch keys first."""
    for name, serve in OPERATORS.items():
        if quantize is not None:
            serve = _no_backward if name.endswith("_backward") else functools.partial(serve, quantize=quantize)
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            original = torch.library.get_kernel(f"aten::{name}", "CUDA").call_boxed
            yield name, make_override(name, serve, original, strict, _left.devices)


def make_override(
    name: str,
    serve: Callable[..., Any],
    original: Callable[..., Any],
    strict: bool,
    find_left: Callable[[], frozenset[int | None]],
) -> Callable[..., Any]:
    """`serve`, and where it raises a refusal, or on a device of `find_left()`, `original`.

    Forwards are counted, and raise with `strict`.
    """
    is_forward = not name.endswith("_backward")
    left: frozenset[int | None] | None = None

    def kernel(keys: Any, *args: Any, **options: Any) -> Any:
        nonlocal left
        if is_forward and this_thread.passing_on:
            return original(keys, *args, **options)
        if left is None:
            left = find_left()
        if left and args[0].device.index in left:
            if is_forward:
                tally.pass_on(_left.REASON)
                if strict:
                    raise ValueError(f"flash_cute: {_left.REASON}")
            return original(keys, *args, **options)
        try:
            results = serve(*args, **options)
        except _check_lengths.LengthError:  # PyTorch's kernel would not look either
            raise
        except (ValueError, RuntimeError) as error:
            if not is_refusal(error):
                raise
            if is_forward:
                tally.pass_on(str(error).removeprefix("flash_cute: "))
                if strict:  # a ValueError in every PyTorch: from 2.15 on the operators' own are RuntimeErrors
                    raise ValueError(str(error)) from None
            return original(keys, *args, **options)
        if is_forward:
            tally.serve(f"aten::{name}")
        return results

    return kernel


def _refuse(dropout_p: float, return_debug_mask: bool = False) -> None:
    if dropout_p != 0:
        raise ValueError("flash_cute: dropout_p: expected 0, got another")
    if return_debug_mask:
        raise ValueError("flash_cute: return_debug_mask: expected False, got True")


def _mask(is_causal: bool) -> str:
    return "bottom_right" if is_causal else "none"


def _side(window_size: int | None) -> int | None:
    return None if window_size is None or window_size < 0 else window_size


def _unused(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The state of a random generator, its offset and the mask of dropout, as they are without dropout: not read."""
    state = torch.empty(2, dtype=torch.uint64, device=query.device)
    return state, torch.empty((), dtype=torch.uint64, device=query.device), query.new_empty(0)

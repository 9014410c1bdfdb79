"""One call of `scaled_dot_product_attention` as a call of `flash_cute.attention`, or why it cannot be one."""

import math
from itertools import zip_longest
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .. import _fp8, _ops, attention
from .._refusals import is_refusal
from .._torch import autocast_is_enabled
from ..mask import Mask
from ._sdpa_mask import read_mask

_DTYPES = {
    "cuda": (torch.float16, torch.bfloat16),
    "cpu": (torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
_MOST_HEAD_DIM = 1024  # on a GPU
_MOST_HEAD_DIM_OF_FLOAT8 = 256


class MalformedCall(ValueError, RuntimeError):
    """Shapes that no implementation can serve. PyTorch raises a RuntimeError where it looks at them."""


# q `(B, Hq, L, E)`, k and v `(B, H, S, ...)`, H a divisor of Hq; the shape of the result if not that of out; the mask.
Prepared: TypeAlias = tuple[Tensor, Tensor, Tensor, tuple[int, ...] | None, Mask | None]


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Prepared | str:
    """The tensors for `flash_cute.attention`, views where that is possible; or the reason that PyTorch must serve it.

    What the two would answer differently (empty tensors, scales that are not positive) is left to PyTorch. Raises for
    a call that no implementation can serve.
    """
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        return "query, key, value: expected tensors, got another type"
    if type(is_causal) is not bool or type(enable_gqa) is not bool:
        return "is_causal, enable_gqa: expected bools, got another type"
    if query.is_nested or key.is_nested or value.is_nested:
        _refuse_ragged(key, value)
        return "query, key, value: expected strided tensors, got a nested one"
    shape_q, shape_k, shape_v = query.shape, key.shape, value.shape
    plain = dropout_p == 0 and (scale is None or (not isinstance(scale, (bool, Tensor)) and 0 < scale < math.inf))
    if plain and attn_mask is None and len(shape_q) == len(shape_k) == len(shape_v) == 4:
        batch, heads, rows, head_dim = shape_q
        batch_k, heads_kv, keys, head_dim_k = shape_k
        batch_v, heads_v, keys_v, head_dim_v = shape_v
        if (
            batch == batch_k == batch_v
            and heads_kv == heads_v
            and (heads_kv == heads or heads_kv == 1 or (enable_gqa and heads_kv and heads % heads_kv == 0))
            and keys == keys_v
            and head_dim == head_dim_k
            and batch * heads * rows * head_dim * keys * head_dim_v != 0
        ):
            return query, key, value, None, None
    refuse_malformed(query, key, value, attn_mask, dropout_p, enable_gqa)
    if attn_mask is not None and is_causal:
        return "attn_mask: expected None with is_causal, got a tensor"
    if attn_mask is not None and torch.compiler.is_compiling():
        return "attn_mask: expected None in a graph, which cannot pass on what the planner refuses, got a tensor"
    if dropout_p != 0:
        return "dropout_p: expected 0, got another"
    if not plain:
        return "scale: expected None or a finite number > 0, got another"
    if 0 in shape_q or 0 in shape_k or 0 in shape_v:
        return "query, key, value: expected no dim of size 0, got one"
    return _broadcast(query, key, value, enable_gqa, attn_mask)


def has_sizes(*tensors: Tensor) -> bool:
    """Whether the tensors are not nested, and their sizes known numbers."""
    return not any(x.is_nested or any(type(size) is not int for size in x.shape) for x in tensors)


def refuse_malformed(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, enable_gqa: bool
) -> None:
    """Raise for a call that no implementation can serve.

    Which of PyTorch's kernels would get it decides whether PyTorch looks: its flash kernel for the CPU reads past the
    end of a key that is shorter than value, and ends the process where value has no rows.
    """
    if isinstance(dropout_p, int | float) and not 0 <= dropout_p <= 1:
        raise MalformedCall(f"flash_cute: dropout_p: expected a probability, got {dropout_p}")
    shapes = query.shape, key.shape, value.shape
    for name, shape in zip(("query", "key", "value"), shapes, strict=True):
        if len(shape) < 2:
            raise MalformedCall(f"flash_cute: {name}: expected at least 2 dims, got the shape {tuple(shape)}")
    shape_q, shape_k, shape_v = shapes
    if shape_q[-1] != shape_k[-1]:
        raise MalformedCall(f"flash_cute: key: expected query's head dim {shape_q[-1]}, got the shape {tuple(shape_k)}")
    if shape_k[-2] != shape_v[-2]:
        raise MalformedCall(f"flash_cute: value: expected key's {shape_k[-2]} rows, got the shape {tuple(shape_v)}")
    if enable_gqa and min(map(len, shapes)) > 2:
        heads, heads_k, heads_v = (shape[-3] for shape in shapes)
        if not heads_k or not heads_v or heads % heads_k or heads % heads_v:
            raise MalformedCall(
                f"flash_cute: enable_gqa: expected numbers of key and value heads that divide query's {heads}, "
                f"got {heads_k} and {heads_v}"
            )
        shape_k, shape_v = ((*shape[:-3], heads, *shape[-2:]) for shape in (shape_k, shape_v))
    if not _fit(shape_q[:-2], shape_k[:-2], shape_v[:-2]):
        given = ", ".join(str(tuple(shape)) for shape in shapes)
        raise MalformedCall(f"flash_cute: query, key, value: expected heads and batches that broadcast, got {given}")
    if isinstance(attn_mask, Tensor) and not attn_mask.is_nested:
        rows_and_keys = (shape_q[-2], shape_k[-2])
        if not all(_fit(attn_mask.shape, (*shape[:-2], *rows_and_keys)) for shape in (shape_q, shape_k, shape_v)):
            raise MalformedCall(
                f"flash_cute: attn_mask: expected a shape that broadcasts to (..., {shape_q[-2]}, {shape_k[-2]}) of "
                f"query's heads and batches, got {tuple(attn_mask.shape)}"
            )


def _refuse_ragged(key: Tensor, value: Tensor) -> None:
    """Raise where a nested key and value are of other sequences: PyTorch's kernels on CUDA read key's lengths alone.

    Nothing is waited for. Strided nested tensors keep their sizes on the host. Of jagged ones the symbolic sizes are
    compared, which are equal where the offsets are one tensor: so PyTorch compares them wherever two tensors meet.
    """
    if not (key.is_nested and value.is_nested) or key.layout != value.layout or key.dim() != value.dim():
        return  # PyTorch says it
    if key.layout == torch.strided:
        of_key, of_value = (x._nested_tensor_size()[:, -2] for x in (key, value))
        if not torch.equal(of_key, of_value):
            raise MalformedCall(
                f"flash_cute: value: expected key's numbers of rows, {of_key.tolist()}, got {of_value.tolist()}"
            )
    elif key.shape[:-1] != value.shape[:-1]:
        raise MalformedCall(
            f"flash_cute: value: expected key's sequences, {tuple(key.shape)}, got {tuple(value.shape)}; "
            "torch.nested.nested_tensor_from_jagged(values, key.offsets()) makes a tensor of them"
        )


def _fit(*shapes: tuple[int, ...]) -> bool:
    """Whether the shapes broadcast to one."""
    return all(len(set(sizes) - {1}) <= 1 for sizes in zip_longest(*map(reversed, shapes), fillvalue=1))


def check_quantize(quantize: Any) -> str | None:
    """None or "fp8", with which the tensors of a served call are quantised first."""
    if quantize is None or quantize == "fp8":
        return quantize
    raise ValueError(f"flash_cute: quantize: expected None or 'fp8', got {quantize!r}")


def graph_can_serve(query: Tensor, value: Tensor, quantize: str | None = None) -> bool:
    """Whether flash_cute has kernels for these: asked while a graph is traced, which no refusal can be caught in."""
    device = query.device.type
    head_dims = (query.shape[-1], value.shape[-1])
    if quantize is not None and (
        max(head_dims) > _MOST_HEAD_DIM_OF_FLOAT8 or any(x % 16 for x in head_dims) or query.dtype == torch.float64
    ):
        return False
    if device == "cuda" and max(query.shape[-1], value.shape[-1]) > _MOST_HEAD_DIM:
        return False
    return device in _DTYPES and (autocast_is_enabled() or query.dtype in _DTYPES[device])


def _broadcast(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, attn_mask: Tensor | None) -> Prepared | str:
    """Of other shapes: heads and leading dims expanded as PyTorch's matrix products broadcast them."""
    tensors = (query, key, value)
    heads, heads_k, heads_v = (x.shape[-3] if x.dim() > 2 else 1 for x in tensors)
    if enable_gqa:
        if min(x.dim() for x in tensors) < 3 or heads_k != heads_v:
            return "enable_gqa: expected as many key as value heads, got others"
    else:
        heads = max(heads, heads_k, heads_v)
        heads_k = heads_v = max(heads_k, heads_v)
    batch = torch.broadcast_shapes(*(x.shape[:-3] for x in tensors))
    mask: Mask | str | None = None
    if attn_mask is not None:
        leading = (*key.shape[:-3], heads) if enable_gqa else key.shape[:-2]
        scores = torch.broadcast_shapes(query.shape[:-2], leading)
        mask = read_mask(attn_mask, query, scores, batch, (heads, heads_k), (query.shape[-2], key.shape[-2]))
    if isinstance(mask, str):
        return mask
    q, k, v = (
        x.expand(*batch, n, *x.shape[-2:]).reshape(-1, n, *x.shape[-2:])
        for x, n in zip(tensors, (heads, heads_k, heads_v), strict=True)
    )
    has_heads = max(x.dim() for x in tensors) > 2
    shape = (*batch, *((heads,) if has_heads else ()), query.shape[-2], value.shape[-1])
    return q, k, v, shape, mask


def serve(prepared: Prepared, is_causal: bool, scale: float | None, quantize: str | None = None) -> Tensor:
    """The attention, in the shape that PyTorch returns."""
    q, k, v, shape, mask = prepared
    if mask is not None and q.is_cuda and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        # Raises where the backward has no kernel that reads a mask: PyTorch then serves the forward, too.
        score = ("none", None, None, None, None, None, scale, "auto")
        deterministic = torch.are_deterministic_algorithms_enabled()
        _ops.masked_bwd_plan(*_ops.autocast(q, k, v, None)[:3], *mask.tensors, *score, deterministic, 0, False)
    out: Tensor = attention(q, k, v, "top_left" if is_causal else False, scale=scale, mask=mask, quantize=quantize)
    return out if shape is None else out.reshape(shape)


def attempt(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    refusal: Exception | None,
    quantize: str | None = None,
) -> Tensor | str:
    """The result, or the reason that flash_cute cannot serve the call; no attention has been launched then.

    A gradient that is asked for of quantised tensors raises: PyTorch would compute it of others.

    `refusal`: what the layers' operator has raised for the same call, if it was asked; without its traceback, which
    would keep the tensors of a caller that holds it.
    """
    prepared = prepare(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if isinstance(prepared, str):
        return prepared
    if refusal is not None and prepared[3] is None and is_refusal(refusal):
        return str(refusal).removeprefix("flash_cute: ")  # `attention` would say the same of the same tensors
    if quantize is not None and torch.is_grad_enabled():
        _fp8.refuse_gradients(*prepared[:3])
    try:
        return serve(prepared, is_causal, scale, quantize)
    except NotImplementedError as error:  # forward-mode derivatives, vmap
        return str(error).removeprefix("flash_cute ")
    except (ValueError, RuntimeError) as error:
        if not is_refusal(error):
            raise
        return str(error).removeprefix("flash_cute: ")

"""The public functions."""

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad

from . import _ops
from .autograd import refuse_tangents
from .report import built_architectures

_fwd = _ops.fwd
_fwd_without_autograd = _ops.fwd_without_autograd


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool | str = False,
    *,
    scale: float | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Exact attention: `softmax(scale * q @ k^T + mask) @ v`, and the logsumexp of each row's scores.

    The method is FlashAttention-2 (arXiv 2307.08691) on the online softmax (arXiv 1805.02867): no
    (Nq, Nk) matrix is ever in memory. Deterministic: the same inputs give the same bits.

    Args:
        q: `(B, Hq, Nq, D)`, float16 or bfloat16; on the CPU also float32 or float64. Any strides: what is
            not contiguous in its last dim, or not 16-byte aligned, is copied once (`explain` says so).
            A `(B, N, H, D)` tensor is passed as `.transpose(1, 2)`.
        k: `(B, Hkv, Nk, D)`, same dtype and device. Hkv divides Hq: query head h reads key head
            `h // (Hq // Hkv)` (GQA, MQA), and nothing is copied for it.
        v: `(B, Hkv, Nk, D)`, same dtype and device.
        causal: `False`; `True` or `"bottom_right"`: row i sees columns j <= i + Nk - Nq, as a KV cache needs
            it; `"top_left"`: j <= i, as `scaled_dot_product_attention(is_causal=True)` has it.
        scale: what multiplies q.k; finite and > 0. `None`: `1 / sqrt(D)`.
        backend: `None` picks the best one for the device; `"sm80"`, `"sm90"` or `"cpu"` insists.

    Returns:
        out: `(B, Hq, Nq, D)` in q's dtype, laid out like `torch.empty_like(q)`.
        lse: `(B, Hq, Nq)` float32 (float64 for float64 inputs), the natural log of the sum of
            `exp(scale * q.k)` over the keys that the row sees.

        A row that sees no key has out 0 and lse -inf; so has every row when Nk is 0.

    Raises:
        ValueError: the call cannot be served; the sentence names the argument, what was expected and what
            was given. Nothing has been launched then. (`torch.ops.flash_cute.fwd`, and so a compiled graph,
            says the same in a RuntimeError under torch 2.15.)
        NotImplementedError: from `backward()`, since there is no backward yet, for tensors with a forward-mode
            tangent, and under `torch.vmap`.

    Example:
        >>> q = torch.randn(2, 8, 128, 64)
        >>> k, v = torch.randn(2, 2, 512, 64), torch.randn(2, 2, 512, 64)
        >>> out, lse = fwd(q, k, v, causal=True)
        >>> out.shape, lse.shape
        (torch.Size([2, 8, 128, 64]), torch.Size([2, 8, 128]))
    """
    if causal is False:
        causal = "none"
    elif causal is True:
        causal = "bottom_right"
    if backend is None:
        backend = "auto"
    if forward_ad._current_level >= 0:
        refuse_tangents(q, k, v)
    try:
        # The operator with autograd costs 12 us a call more (torch 2.11), also where nothing requires grad.
        if is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return _fwd(q, k, v, causal, scale, backend)
        return _fwd_without_autograd(q, k, v, causal, scale, backend)
    except RuntimeError as error:
        _ops.raise_refusal(error)
        raise


def backends() -> dict[str, bool]:
    """The names that `fwd(backend=...)` takes, and whether each can run on this machine's current device.

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

"""Implementations of attention for Transformers' models: flash_cute, FlashAttention-3, Transformers' own, and none."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bench.providers.base import Unavailable, first, module

OURS = "flash_cute"
FLASH_ATTENTION_3 = "fa3"
NONE = "none"  # no attention: what a step takes without it


def package() -> Any:
    return module("transformers")


def version() -> str:
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return ""


@contextmanager
def registered() -> Iterator[None]:
    """The names that Transformers does not have are known to it; what it has is left as it is."""
    try:
        transformers = package()
        import flash_cute.integrations.transformers

        flash_cute.integrations.transformers.register()
    except (Unavailable, ImportError):  # `Model.build` and `require` say so
        yield
        return
    for name, function in ((FLASH_ATTENTION_3, flash_attention_3), (NONE, no_attention)):
        transformers.AttentionInterface.register(name, function)
        transformers.AttentionMaskInterface.register(name, _no_mask)
    yield


def require(name: str, model: Any, direction: str) -> None:
    """Raise `Unavailable` where an implementation would compute something else than the model, or is not wanted."""
    config = model.config
    if name == "sdpa" and getattr(config, "attn_logit_softcapping", None):
        raise Unavailable("Transformers' sdpa leaves the softcap out")
    if name == "sdpa" and not model._supports_sdpa:
        raise Unavailable("Transformers has no sdpa for this model, because of its sinks")
    if name == "eager" and model._supports_sdpa and not getattr(config, "attn_logit_softcapping", None):
        raise Unavailable("measured where sdpa does not serve the model")
    if name == FLASH_ATTENTION_3:
        module("flash_attn_interface")
        if direction == "train" and any("sinks" in parameter for parameter, _ in model.named_parameters()):
            raise Unavailable("FlashAttention-3 has no sinks; applied behind it, by its LSE, they have no gradient")


def _no_mask(**arguments: Any) -> None:
    """Nothing is padded here, and each implementation applies causality and window itself."""


def flash_attention_3(
    layer: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of `(B, H, N, D)` tensors by FlashAttention-3; sinks are applied to what it returns."""
    options: dict[str, Any] = {"causal": True, "softmax_scale": scaling}
    if sliding_window is not None:
        options["window_size"] = (sliding_window - 1, 0)
    if softcap is not None:
        options["softcap"] = softcap
    tensors = (x.transpose(1, 2) for x in (query, key, value))
    function = module("flash_attn_interface").flash_attn_func
    if s_aux is None:
        return first(function(*tensors, **options)), None
    out, lse = function(*tensors, **options, return_attn_probs=True)
    weight = torch.sigmoid(lse.transpose(1, 2) - s_aux.float())  # (B, N, H)
    return (out * weight[..., None]).to(out.dtype), None


class _NoAttention(torch.autograd.Function):
    """Views alone: out is q, and the gradients of k and v are parts of out's, so that all projections still get one."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.heads_kv = key.shape[1]
        return query.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *flows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        of_query = flows[0].transpose(1, 2)
        return of_query, of_query[:, : ctx.heads_kv], of_query[:, : ctx.heads_kv]


def no_attention(
    layer: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **unused: Any
) -> tuple[torch.Tensor, None]:
    """Of queries and values of one head dim; sinks get no gradient."""
    out: torch.Tensor = _NoAttention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return out, None

"""Layers of Transformers that know eager attention and flash-attn, and no attention interface: Bark, Falcon, GPT-Neo.

They have a class of layers for every implementation with "flash" in its name. Of a model that is loaded with ours, such
layers call our attention function.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import Tensor

from ._transformers_lengths import narrowed

NAME = "flash_cute"
# Continuous batching gives the pages of its cache to implementations in whose names a 2 or a 3 stands behind "flash":
# those of flash-attn with `flash_attn_with_kvcache`. To the others it gives keys that it has gathered.
NAME_2 = "flash_cute_2"
# What the attention function is called with under each name.
OPTIONS: dict[str, dict[str, Any]] = {
    NAME: {},
    NAME_2: {},
    "flash_cute_fp8": {"quantize": "fp8"},  # inference on tensors that are quantised to float8 first
    "flash_cute_row_invariant": {"row_invariant": True},
    "flash_cute_2_row_invariant": {"row_invariant": True},
}
NAMES = tuple(OPTIONS)
ADAPTED = ("bark", "falcon", "gpt_neo")  # architectures


def adapt(kind: type) -> None:
    """Make the layers of a class of models ours where their configuration says so; again does no harm."""
    for architecture, layers, change in (
        ("bark", "BarkSelfFlashAttention2", _adapt_bark),
        ("falcon", "FalconFlashAttention2", _adapt_falcon),
        ("gpt_neo", "GPTNeoFlashAttention2", _adapt_gpt_neo),
    ):
        module = f"transformers.models.{architecture}.modeling_{architecture}"
        if any(base.__module__ == module for base in kind.__mro__):
            layer = getattr(sys.modules[module], layers, None)
            if layer is not None and not hasattr(layer.forward, "knows_flash_cute"):
                change(layer)
                # Before 5.24 the layers are looked up by the implementation's own name.
                for name, table in vars(sys.modules[module]).items():
                    if name.endswith("_ATTENTION_CLASSES"):
                        table.update(dict.fromkeys(NAMES, layer))


def _replace(layer: Any, name: str, ours: Callable[..., Any]) -> None:
    """Make a method of a class of layers ours, in models of ours."""
    theirs = getattr(layer, name)

    @functools.wraps(theirs)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (ours if self.config._attn_implementation in NAMES else theirs)(self, *args, **kwargs)

    method.knows_flash_cute = True  # type: ignore[attr-defined]
    setattr(layer, name, method)


def _adapt_bark(layer: Any) -> None:
    def attend(self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None) -> Any:
        from .transformers import attention

        if self.is_causal and attention_mask is not None:
            attention_mask = _with_causality(attention_mask, query, key, None)
        dropout = self.dropout if self.training else 0.0
        out, weights = attention(self, query, key, value, attention_mask, dropout, is_causal=self.is_causal)
        return out.transpose(1, 2), weights

    _make_eagers_but_for(layer, attend)


def _adapt_gpt_neo(layer: Any) -> None:
    def attend(self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None) -> Any:
        from .transformers import attention

        # Eager's layers have the window themselves; Transformers' own layers for flash-attn leave it out.
        window = self.config.window_size if self.attention_type == "local" else None
        if window is not None and attention_mask is not None and window < key.shape[2]:
            attention_mask = _with_causality(attention_mask, query, key, window - 1)
        dropout = self.config.attention_dropout if self.training else 0.0
        options: dict[str, Any] = {"dropout": dropout, "scaling": 1.0, "sliding_window": window, "is_causal": True}
        out, weights = attention(self, query, key, value, attention_mask, **options)
        return out.transpose(1, 2), weights

    _make_eagers_but_for(layer, attend)


def _make_eagers_but_for(layer: Any, attend: Callable[..., Any]) -> None:
    """Make all methods of a class of layers for flash-attn those of eager's, and `_attn` ours, in models of ours."""
    _replace(layer, "_attn", attend)
    for name in ("_split_heads", "_merge_heads", "forward"):
        _replace(layer, name, getattr(layer.__base__, name))


def _with_causality(attention_mask: Tensor, query: Tensor, key: Tensor, left: int | None) -> Tensor:
    """A mask with what eager's layers have beside it."""
    if query.shape[2] not in (1, key.shape[2]):
        raise ValueError(
            "flash_cute: attention_mask: expected no padding where several tokens are added to a cache, got "
            f"{query.shape[2]} tokens and {key.shape[2]} keys"
        )
    return narrowed(attention_mask, left)


def _adapt_falcon(layer: Any) -> None:
    def flash_attention_forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        query_length: int,
        use_top_left_mask: bool = False,
        **options: Any,
    ) -> Tensor:
        from .transformers import attention

        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return attention(layer, q, k, v, attention_mask, **options)[0]

    theirs: Any = inspect.unwrap(layer.forward)
    names = {**theirs.__globals__, "_flash_attention_forward": flash_attention_forward}
    ours = FunctionType(theirs.__code__, names, theirs.__name__, theirs.__defaults__, theirs.__closure__)
    ours.__kwdefaults__ = theirs.__kwdefaults__
    _replace(layer, "forward", ours)

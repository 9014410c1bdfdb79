"""Eager attention as float16 would compute it, within a model in float32: what half precision itself costs a model.

It is the rule of tests/helpers/numerics.py for whole models: a result may err at most so many times as much as the
unfused computation in the same dtype, plus a small tolerance. Truth is eager in float32. All but the attention is
float32 in each of the three, so nothing but the attention is judged.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

# Each scale rounds the same values in another way: an error that happens to be small with one is not with all.
SCALES = (1.0, 1.25, 1.5)
ROUNDED = ("matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "einsum", "softmax")
LARGEST = torch.finfo(torch.float16).max  # masks hold the least float32
EAGER = ("eager_attention_forward", "simple_eager_attention_forward")
# Attention that is a method, by its module and class.
METHODS = (
    ("transformers.models.falcon.modeling_falcon", "FalconAttention", "forward"),
    ("transformers.models.gpt_neo.modeling_gpt_neo", "GPTNeoSelfAttention", "_attn"),
)


class Half:
    """Whether flash_cute's attention computes in float16, and how often eager's was rounded to it."""

    on = False
    roundings = 0


class _Rounding(TorchFunctionMode):
    """Rounds what goes into products and softmax, and what comes out, to float16; in the backward their gradients."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # A product with a matrix is a linear layer within an attention's method.
        if getattr(func, "__name__", "") not in ROUNDED or any(isinstance(x, Tensor) and x.dim() == 2 for x in args):
            return func(*args, **kwargs)
        Half.roundings += 1
        args, kwargs = tree_map(self._rounded, (args, kwargs))
        return self._rounded(func(*args, **kwargs))

    def _rounded(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dtype != torch.float32:
            return x
        return (x * self.scale).clamp(-LARGEST, LARGEST).half().float() / self.scale


class _Smooth(TorchFunctionMode):
    """Gelu in place of relu, whose derivative a rounding turns from 0 to 1."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("relu", "relu_"):
            return torch.nn.functional.gelu(args[0])
        return func(*args, **(kwargs or {}))


def smooth() -> contextlib.AbstractContextManager[Any]:
    """Within it models have derivatives that float16 can be judged by."""
    return _Smooth() if Half.on else contextlib.nullcontext()


def _within(scale: float, attention: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(attention)
    def rounded(*args: Any, **options: Any) -> Any:
        with _Rounding(scale):
            return attention(*args, **options)

    return rounded


@contextlib.contextmanager
def rounded(scale: float) -> Iterator[None]:
    """Within it the eager attention of all models that are loaded rounds to float16."""
    before: list[tuple[Any, str, Any]] = []
    for name, module in list(sys.modules.items()):
        if not name.startswith("transformers.models."):
            continue
        before += [(module, eager, found) for eager in EAGER if callable(found := vars(module).get(eager))]
    for name, class_name, method in METHODS:
        if name in sys.modules:
            owner = getattr(importlib.import_module(name), class_name)
            before.append((owner, method, vars(owner)[method]))
    names = transformers.AttentionInterface._global_mapping
    paged = names["paged|eager"]
    names["paged|eager"] = _within(scale, paged)
    for owner, name, found in before:
        setattr(owner, name, _within(scale, found))
    try:
        yield
    finally:
        for owner, name, found in before:
            setattr(owner, name, found)
        names["paged|eager"] = paged

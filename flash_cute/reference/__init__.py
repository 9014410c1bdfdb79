"""Attention written down plainly: the float64 oracle, and the yardstick for how exact is exact enough."""

from .kvcache import append_kvcache, attention_with_kvcache
from .oracle import attention, gradients, unfused
from .packed import varlen_attention, varlen_gradients
from .yardstick import Comparison, GradientComparison, compare, compare_gradients

__all__ = [
    "Comparison",
    "GradientComparison",
    "append_kvcache",
    "attention",
    "attention_with_kvcache",
    "compare",
    "compare_gradients",
    "gradients",
    "unfused",
    "varlen_attention",
    "varlen_gradients",
]

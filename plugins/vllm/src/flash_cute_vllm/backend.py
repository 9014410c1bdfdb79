"""What vLLM asks of a backend before it runs: what it serves, and how the KV cache is laid out."""

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf
from vllm.v1.attention.backends.utils import get_kv_cache_layout

# Where the dims of a cache `(blocks, Hkv, block, 2 * D)` stand in memory, and with the dim of layers before them.
_ORDERS = {
    ("NHD", False): (0, 2, 1, 3),
    ("NHD", True): (1, 0, 3, 2, 4),
    ("HND", False): (0, 1, 2, 3),
    ("HND", True): (1, 2, 0, 3, 4),
}


class FlashCuteBackend(AttentionBackend):
    """K and V of a token and head are halves of one row, as in vLLM's FlashAttention backend; blocks are pages."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        *("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"),
    ]
    # The slots of new tokens are in the metadata, whose form for the cache's writes is computed once for all layers.
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM looks the name up among its own

    @staticmethod
    def get_impl_cls() -> Any:
        from .impl import FlashCuteImpl

        return FlashCuteImpl

    @staticmethod
    def get_builder_cls() -> Any:
        from .metadata import FlashCuteMetadataBuilder

        return FlashCuteMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [MultipleOf(16)]  # others would be right, and slow

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return _ORDERS[get_kv_cache_layout(), include_num_layers_dimension]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and 0 < head_size <= 1024

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major >= 8)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, AttentionType.ENCODER_ONLY)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

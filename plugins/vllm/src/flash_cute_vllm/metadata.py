"""What all layers of a step share: lengths and pages as vLLM has them, and new tokens' slots as pages and rows."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder


@dataclass
class FlashCuteMetadata(AttentionMetadata):
    """Of B requests and T tokens, padding included: a request that pads a graph has no tokens and no keys."""

    query_start_loc: Tensor  # (B + 1,) int32
    seq_lens: Tensor  # (B,) int32, the new tokens included
    block_table: Tensor  # (B, blocks of a request) int32
    slot_pages: Tensor  # (T, 1) int32, the block that a new token is written to
    slot_rows: Tensor  # (T,) int32, the row in it; -1: it is not written
    block_size: int
    causal: bool
    max_query_len: int  # hints
    max_seq_len: int


class FlashCuteMetadataBuilder(AttentionMetadataBuilder[FlashCuteMetadata]):
    """What a kernel reads on the device is all there is to prepare, so that a graph serves any batch of its size."""

    _cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        model = vllm_config.model_config
        if model is not None and getattr(model, "rswa_window", None) is not None:
            raise NotImplementedError(f"flash_cute: rswa_window: expected None, got {model.rswa_window}")
        most = vllm_config.scheduler_config.max_num_batched_tokens
        most = max(most, vllm_config.compilation_config.max_cudagraph_capture_size or 0)
        # At addresses that last, since graphs read them.
        self.slot_pages = torch.empty((most, 1), dtype=torch.int32, device=device)
        self.slot_rows = torch.empty((most,), dtype=torch.int32, device=device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> FlashCuteMetadata:
        """A common prefix is read once for each request, since the bits of a request do not depend on its neighbours.

        Raises:
            NotImplementedError: causality by request, prefix-LM ranges, reference windows.
        """
        common = common_attn_metadata
        if not isinstance(common.causal, bool):
            raise NotImplementedError("flash_cute: causal: expected one for all requests, got one for each")
        for name in ("mm_req_doc_ranges", "rswa_prefix_lens"):
            if getattr(common, name) is not None:
                raise NotImplementedError(f"flash_cute: {name}: expected None, since flash_cute does not have it")
        slots = common.slot_mapping
        count, size = slots.shape[0], self.kv_cache_spec.block_size
        pages, rows = self.slot_pages[:count], self.slot_rows[:count]
        # Slot -1 is none. vLLM gives it to tokens that pad a graph, and to all of a dummy run, whose block table is
        # that of another step: so it is slots that say where to write, and not the table.
        pages.copy_(slots.div(size, rounding_mode="floor")[:, None])
        rows.copy_(torch.where(slots < 0, slots, slots.remainder(size)))
        return FlashCuteMetadata(
            common.query_start_loc,
            common.seq_lens,
            common.block_table_tensor,
            pages,
            rows,
            size,
            common.causal,
            common.max_query_len,
            common.max_seq_len,
        )

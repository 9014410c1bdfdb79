"""The attention of a layer: new keys and values are written to their slots, and all are read in place."""

import os
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from flash_cute import append_kvcache, attention_with_kvcache, varlen_attention

from .metadata import FlashCuteMetadata

# vLLM keeps float8 caches as bytes.
_FLOAT8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class FlashCuteImpl(AttentionImpl[FlashCuteMetadata]):
    supports_quant_query_input = False  # q stays in 16 bits beside a float8 cache
    supports_dcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if attn_type not in (AttentionType.DECODER, AttentionType.ENCODER_ONLY):
            raise NotImplementedError(f"flash_cute: attn_type: expected decoder or encoder_only, got {attn_type}")
        if self.total_cp_world_size > 1:
            raise NotImplementedError(
                f"flash_cute: context parallelism: expected a group of 1, got {self.total_cp_world_size}"
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap or None  # 0 is none
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        asked = os.environ.get("FLASH_CUTE_ROW_INVARIANT", "0")
        if asked not in ("0", "1"):
            raise ValueError(f"flash_cute: FLASH_CUTE_ROW_INVARIANT: expected 0 or 1, got {asked!r}")
        self.row_invariant = asked == "1"
        if self.row_invariant:
            self._refuse_where_rows_depend_on_others()

    def _refuse_where_rows_depend_on_others(self) -> None:
        """What row-invariant kernels do not have is said before a model runs."""
        for name, served in (
            ("head_size", self.head_size <= 256),
            ("alibi_slopes", self.alibi_slopes is None),
            ("logits_soft_cap", self.logits_soft_cap is None),
            ("kv_cache_dtype", self.kv_cache_dtype not in _FLOAT8),
        ):
            if not served:
                raise NotImplementedError(
                    "flash_cute: FLASH_CUTE_ROW_INVARIANT: expected a head dim of at most 256, a cache in 16 bits, no "
                    f"ALiBi and no softcap, got {name} {getattr(self, name)}"
                )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        if self.alibi_slopes is not None and torch.accelerator.is_available():
            self.alibi_slopes = self.alibi_slopes.to(torch.accelerator.current_accelerator())

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FlashCuteMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """The attention of query `(T, Hq, D)`, written to output `(T, Hq, D)`.

        Args:
            layer: has the scales of float8 caches, `_k_scale` and `_v_scale`.
            key, value: `(T, Hkv, D)`.
            kv_cache: `(blocks, Hkv, block, 2 * D)`, of any strides.
            attn_metadata: None in vLLM's profiling run.

        Rows of no request are 0.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("flash_cute: output_scale: expected None, since results are not quantised")
        if attn_metadata is None:
            return output.zero_()
        if self.attn_type == AttentionType.ENCODER_ONLY:
            return self._encode(query, key, value, attn_metadata, output)
        if value.shape[-1] != self.head_size:
            raise NotImplementedError(
                f"flash_cute: value: expected q's head dim, {self.head_size}, in vLLM's cache, got {value.shape[-1]}"
            )
        scales: dict[str, Tensor] = {}
        if self.kv_cache_dtype in _FLOAT8:
            kv_cache = kv_cache.view(_FLOAT8[self.kv_cache_dtype])
            scales = {"descale_k": layer._k_scale, "descale_v": layer._v_scale}
        # (blocks, Hkv, block, 2 * D) -> (blocks, block, Hkv, D) each
        k_cache, v_cache = kv_cache.transpose(1, 2).split(self.head_size, -1)
        meta = attn_metadata
        if kv_cache.shape[2] != meta.block_size:
            raise ValueError(f"flash_cute: kv_cache: expected blocks of {meta.block_size}, got {kv_cache.shape[2]}")
        if self.kv_sharing_target_layer_name is None:  # else the other layer has written them
            count = meta.slot_rows.shape[0]
            k, v = key[:count, None], value[:count, None]  # a sequence of one new key each
            append_kvcache(k_cache, v_cache, k, v, cache_seqlens=meta.slot_rows, page_table=meta.slot_pages, **scales)
        attention_with_kvcache(
            query,
            k_cache,
            v_cache,
            cache_seqlens=meta.seq_lens,
            page_table=meta.block_table,
            cu_seqlens_q=meta.query_start_loc,
            causal=meta.causal,
            window=self._window(meta.causal),
            softcap=self.logits_soft_cap,
            sinks=self.sinks,
            alibi_slopes=self.alibi_slopes,
            scale=self.scale,
            row_invariant=self.row_invariant,
            out=output,
            **scales,
        )
        return output

    def _window(self, causal: bool) -> tuple[int, int] | None:
        if self.sliding_window is None:
            return None
        return self.sliding_window - 1, 0 if causal else self.sliding_window - 1

    def _encode(self, query: Tensor, key: Tensor, value: Tensor, meta: FlashCuteMetadata, output: Tensor) -> Tensor:
        """All tokens of a request see each other; nothing is kept."""
        offsets = meta.query_start_loc
        out = varlen_attention(
            query,
            key,
            value,
            offsets,
            offsets,
            False,
            max_seqlen_q=meta.max_query_len,
            max_seqlen_k=meta.max_query_len,
            window=self._window(False),
            softcap=self.logits_soft_cap,
            sinks=self.sinks,
            alibi_slopes=self.alibi_slopes,
            scale=self.scale,
            row_invariant=self.row_invariant,
        )
        return output.copy_(out)

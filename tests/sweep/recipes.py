"""What the generic tiny configuration and inputs do not say of single models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import sizes

_MHA = {"num_key_value_heads": sizes.HEADS}  # where all heads must have keys of their own

# By model type, or type:kind; also for a type that is a part of another's.
CONFIGS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "chameleon": {"vocabulary_map": {"<image>": 90}},
    "depth_pro": {"patch_size": 32, "intermediate_hook_ids": [1, 0]},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": _MHA,
    "dots3_note_vision_encoder": {"num_experts_per_tok": 2},
    "emu3": {"vocabulary_map": {"<image>": 90, "<|extra_200|>": 91}},
    "esm": {"vocab_size": sizes.VOCABULARY, "pad_token_id": 0, "mask_token_id": 90},
    "esmc": _MHA,
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    "glm5_next_text": _MHA,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": sizes.WINDOW},
    "timm_backbone": {"backbone": "resnet18"},
    "zamba": {"num_hidden_layers": 3},
    "zaya": {"num_experts_per_tok": 1},
}
ARGUMENTS: dict[str, Callable[[Any], dict[str, Any]]] = {}

"""What the generic tiny configuration does not say of single models."""

from __future__ import annotations

from typing import Any

from . import sizes

_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_MHA = {"num_key_value_heads": sizes.HEADS}  # where all heads must have keys of their own


# SAM 2 for images of 64 by 64; that of videos is wider than its memories, whose width 64 is fixed.
_SAM2: dict[str, Any] = {
    "prompt_encoder_config": {"image_size": 64, "patch_size": 16},
    "mask_decoder_config": {"iou_head_hidden_dim": sizes.HIDDEN},
}
_WIDE = 2 * sizes.HIDDEN
_SAM2_VIDEO: dict[str, Any] = {
    "vision_config": {"fpn_hidden_size": _WIDE},
    "prompt_encoder_config": {**_SAM2["prompt_encoder_config"], "hidden_size": _WIDE},
    "mask_decoder_config": {**_SAM2["mask_decoder_config"], "hidden_size": _WIDE},
    "image_size": 64,
    "memory_attention_hidden_size": _WIDE,
    "memory_attention_rope_feat_sizes": [4, 4],
    "memory_encoder_hidden_size": _WIDE,
    "mask_downsampler_embed_dim": _WIDE,
    "memory_fuser_embed_dim": _WIDE,
    "memory_fuser_intermediate_dim": sizes.INNER,
}
_SAM3_VISION: dict[str, Any] = {
    "backbone_config": {"image_size": 64, "patch_size": 16},
    "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
}
_EDGETAM_VIDEO: dict[str, Any] = {
    **_SAM2_VIDEO,
    "memory_attention_mlp_hidden_size": sizes.INNER,
    "memory_attention_rope_k_sizes": [2, 2],
    "perceiver_resampler_num_latents": 4,
    "perceiver_resampler_num_latents_2d": 4,
    "perceiver_resampler_mlp_intermediate_size": sizes.INNER,
}


def _rope(*sections: int, name: str = "mrope_section", **more: Any) -> dict[str, Any]:
    """Rotary sections, where the code of a model has default ones for its true sizes."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, name: list(sections), **more}}


# By model type, or type:kind; also for a type that is a part of another's.
CONFIGS: dict[str, dict[str, Any]] = {
    "apertus1p5": {
        "text_config": {"vocab_size": 400},
        "vision_config": {"codebook_size": 128},
        "audio_config": {"codebook_size": 128},
        "image_token_offset": 128,
        "audio_token_offset": 256,
    },
    "audio-spectrogram-transformer": {"max_length": 64},
    "bamba": {"attn_layer_indices": [1]},
    "chameleon": {"vocabulary_map": {"<image>": 90}},
    "chmv2": {
        "backbone_config": {
            "model_type": "dinov3_vit",
            "num_hidden_layers": 4,
            "out_indices": [1, 2, 3, 4],
            "reshape_hidden_states": True,
            "return_class_token": True,
        },
        "post_process_channels": [16, 16, 32, 32],
        "fusion_hidden_size": 32,
        "head_hidden_size": 16,
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {kind: _ROPE for kind in ("sliding_attention", "full_attention")},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_ocr2_text": {**_MHA, "num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v2": {"num_experts_per_tok": 2, "num_key_value_heads": sizes.HEADS},
    "depth_pro": {"patch_size": 32, "intermediate_hook_ids": [1, 0]},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48},
    "dory": {
        "num_hidden_layers": 3,
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": _MHA,
    "dots3_note_vision_encoder": {"num_experts_per_tok": 2, "per_layer_config": {}},
    "edgetam_video": _EDGETAM_VIDEO,
    "efficientloftr": {
        "num_attention_heads": 8,
        "stage_num_blocks": [1, 1, 1, 1],
        "out_features": [16, 16, 32, sizes.HIDDEN],
    },
    "emu3": {"vocabulary_map": {"<image>": 90, "<|extra_200|>": 91}},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [48, 48], **_rope(3, 3, 2)},
    "esm": {"vocab_size": sizes.VOCABULARY, "pad_token_id": 0, "mask_token_id": 90},
    "esmc": _MHA,
    "esmfold2": {
        "atom_encoder": {"num_uid_rope_pairs": 2},
        "structure_head": {"diffusion_module": {"atom_encoder": {"num_uid_rope_pairs": 2}}},
        "single_inputs_size": 131,
    },
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "glm4v_moe_text": _rope(2, 1, 1, partial_rotary_factor=0.5),
    "glm4v_text": _rope(4, 2, 2),
    "glm5_next_text": {**_MHA, "qk_rope_head_dim": 0, "head_dim": 0, "index_topk": 16, "linear_num_heads": 4},
    "glm_image_text": _rope(4, 2, 2),
    "glm_ocr_text": _rope(4, 2, 2),
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": sizes.WINDOW},
    "granite4_vision": {"image_grid_pinpoints": [[32, 32]], "downsample_rate": "1/2", "deepstack_layer_map": [[0, 0]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hrm_text": {"prefix_lm": False},
    "hunyuan_vl_text": _rope(2, 2, 2, 2, name="xdrope_section"),
    "idefics": {"alpha_initializer": "ones"},
    "instructblip": {"image_token_index": 90, "num_query_tokens": 4},
    "instructblipvideo": {"video_token_index": 90, "num_query_tokens": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_hidden_layers": 2},
    "kosmos-2": {"latent_query_num": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_vision_model": {"intermediate_size": 4 * sizes.HIDDEN},
    "lw_detr": {
        "backbone_config": {"model_type": "lw_detr_vit", "out_indices": [1, 2]},
        "projector_scale_factors": [1.0],
        "num_queries": 4,
    },
    "lw_detr_vit": {"num_windows": 4, "window_block_indices": [0]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "moonshine_streaming": {"num_key_value_heads": sizes.HEADS},
    "muse_spark_audio": {"num_hidden_layers": 4, "hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 1, 1]},
    "nemotron3_5_transcribe_asr_audio": _MHA,
    "nemotron3_5_transcribe_audio": _MHA,
    "nemotron3_5_transcribe_word_timestamp": _MHA,
    "nemotron3_diarization": _MHA,
    "nemotron3_diarization_audio": _MHA,
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "nougat": {"encoder": {"model_type": "donut-swin"}},
    "paddleocr_vl_text": _rope(4, 2, 2),
    "qwen2_5_omni_bigvgan": {"upsample_initial_channel": 64},
    "qwen2_5_omni_dit": {
        "look_ahead_layers": [1],
        "look_backward_layers": [0],
        "enc_channels": [16, 16, 16, 16, 48],
        "block_size": 4,
        "num_embeds": sizes.VOCABULARY,
    },
    "qwen2_5_omni_talker": _rope(4, 2, 2),
    "qwen2_5_omni_text": _rope(4, 2, 2),
    "qwen2_5_omni_thinker": {"vision_start_token_id": 126},
    "qwen2_5_vl_text": _rope(4, 2, 2),
    "qwen2_vl_text": _rope(4, 2, 2),
    "qwen3_omni_moe": {
        "talker_config": {
            "spatial_merge_size": 2,
            "thinker_hidden_size": sizes.HIDDEN,
            "accept_hidden_layer": 1,
            "num_code_groups": 4,
            "speaker_id": {"ethan": 105},
            **{
                f"codec_{name}_id": 110 + i
                for i, name in enumerate(("nothink", "think_bos", "think_eos", "pad", "bos"))
            },
            "text_config": {"vocab_size": sizes.VOCABULARY + 1024},  # the last 1024 are never spoken
            "code_predictor_config": {"num_code_groups": 4},
        },
        "code2wav_config": {"num_quantizers": 4, "initializer_range": 0.08},
    },
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 48},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 126},
    "rag": {
        "question_encoder": {
            "vocab_size": sizes.VOCABULARY,
            "hidden_size": sizes.HIDDEN,
            "num_hidden_layers": 2,
            "num_attention_heads": sizes.HEADS,
            "intermediate_size": sizes.INNER,
        },
        "generator": {
            "vocab_size": sizes.VOCABULARY,
            "d_model": sizes.HIDDEN,
            **{
                f"{part}_{name}": size
                for part in ("encoder", "decoder")
                for name, size in (("layers", 2), ("attention_heads", sizes.HEADS), ("ffn_dim", sizes.INNER))
            },
        },
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "rf_detr": {"backbone_config": {"model_type": "rf_detr_dinov2"}, "num_queries": 4},
    "sam2": _SAM2,
    "sam2_hiera_det_model": {
        "hidden_size": 16,
        "image_size": [64, 64],
        "blocks_per_stage": [1, 2, 2, 1],
        "embed_dim_per_stage": [16, 32, 64, 128],
        "num_attention_heads_per_stage": [1, 2, 4, 8],
        "window_size_per_stage": [4, 4, 2, 2],
        "global_attention_blocks": [4],
    },
    "sam2_video": {**_SAM2_VIDEO, "memory_attention_feed_forward_hidden_size": sizes.INNER},
    "sam2_vision_model": {
        "backbone_channel_list": [128, 64, 32, 16],
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    },
    "sam3_lite_text_text_model": {"num_hidden_layers": 3},
    "sam3_tracker": {**_SAM2, "vision_config": _SAM3_VISION},
    "sam3_tracker_video": {
        **_SAM2_VIDEO,
        "vision_config": {**_SAM3_VISION, "fpn_hidden_size": _WIDE},
        "memory_attention_feed_forward_hidden_size": sizes.INNER,
    },
    "timm_backbone": {"backbone": "resnet18"},
    "vitpose_backbone": {"part_features": 16},
    "xclip": {
        "vision_config": {"mit_hidden_size": sizes.HIDDEN, "num_frames": 2},
        "prompt_num_attention_heads": sizes.HEADS,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "linear_attention", "hybrid", "hybrid"]},
    "zamba2": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}

# By model type, why the attention function is never called though the class says that it may be.
NO_ATTENTION = {
    "gemma3n_audio": "its layers compute attention with a bias of positions themselves",
    "glm_image_vqmodel": "it quantizes and has no attention",
    "got_ocr2_vision": "its layers compute attention with a bias of positions themselves",
    "muse_spark_audio": "it has convolutions and no attention",
}

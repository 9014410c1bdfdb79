"""The sizes of a tiny model, by the names that configurations have for them."""

from __future__ import annotations

import re
from typing import Any

VOCABULARY, TOKENS = 128, 80  # tokens are drawn below TOKENS; what has a meaning of its own lies above
HIDDEN, HEADS, HEADS_KV, HEAD_DIM = 64, 4, 2, 16
INNER = 96
POSITIONS = 128
WINDOW, WIDE_WINDOW = 5, 64
EXPERTS, EXPERTS_PER_TOKEN = 4, 2
IMAGE, PATCH, MELS = 32, 8, 16

_NAMES: list[tuple[int, str]] = [
    (
        HIDDEN,
        """
        hidden_size d_model n_embd dim embed_dim decoder_hidden_size encoder_hidden_size cross_hidden_size
        cross_attention_hidden_size out_hidden_size output_hidden_size text_hidden_size vision_hidden_size
        audio_hidden_size projection_dim projector_hidden_size embedding_size word_embed_proj_dim output_dim
        hidden_size_global backbone_hidden_size text_dim adapter_out_dim output_proj_dims emb_dim rnn_hidden_size
        text_config_hidden_size encoder_hidden_dim vision_output_dim adaptor_output_dim
        projection_hidden_size projector_input_dim projector_output_dim decoder_hidden_dim share_embedding_dim
        vision_embedding_size hidden_size_per_layer_input encoder_dim decoder_dim
        lru_width dim_model pooler_hidden_size pooler_output_size
        mm_embed_dim vision_feature_size embedding_dim shared_embedding_dim attention_hidden_size codebook_dim
        upsample_groups condition_dim adapter_in_dim fpn_hidden_size vector_quantization_hidden_dimension
        adapter_input_size
    """,
    ),
    (
        HEADS,
        """
        num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
        decoder_num_attention_heads encoder_num_attention_heads attention_heads num_encoder_attention_heads
        num_decoder_attention_heads cross_num_attention_heads conf_num_attention_heads index_n_heads
        swa_num_attention_heads resampler_n_heads num_self_attention_heads num_cross_attention_heads heads
        swa_num_key_value_heads_unused
    """,
    ),
    (
        HEADS_KV,
        """
        num_key_value_heads num_kv_heads encoder_num_key_value_heads decoder_num_key_value_heads
        cross_num_key_value_heads swa_num_key_value_heads multi_query_group_num num_global_key_value_heads
    """,
    ),
    (
        HEAD_DIM,
        """
        head_dim d_kv attention_head_dim kv_channels v_head_dim qk_nope_head_dim swa_head_dim dim_head
        cross_head_dim global_head_dim swa_v_head_dim resampler_head_dim mamba_d_head mamba_head_dim
        qk_rope_head_dim linear_key_head_dim linear_value_head_dim attention_key_dim index_head_dim head_size
    """,
    ),
    (8, "index_topk rotary_dim mamba_n_heads mamba_num_heads chunk_size mamba_chunk_size"),
    (16, "q_lora_rank kv_lora_rank mamba_d_state ssm_state_size o_lora_rank state_size d_rel rel_extent mamba_dt_rank"),
    (
        2,
        """
        num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers
        num_decoder_layers depth encoder_num_hidden_layers decoder_num_hidden_layers conf_num_hidden_layers
        num_encoder_blocks_unused resampler_depth decoder_num_layers memory_attention_num_layers l_layers x_layers
        r_layers num_global_layers perception_layers audio_encoder_layers num_blocks text_encoder_layers
        speech_encoder_layers t2u_encoder_layers t2u_decoder_layers decoder_depth folding_trunk_num_hidden_layers
        linear_num_key_heads encoder_depth prenet_layers postnet_layers vocoder_layers flow_num_hidden_layers
    """,
    ),
    (
        1,
        """
        max_window_layers n_group topk_group n_groups mamba_n_groups first_k_dense_replace num_dense_layers
        moe_layer_start_index n_shared_experts num_shared_experts moe_num_shared_experts
        num_mtp_layers num_nextn_predict_layers mtp_num_layers
    """,
    ),
    (
        INNER,
        """
        intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size mlp_dim
        decoder_intermediate_size encoder_intermediate_size projection_intermediate_size dim_ff
        dense_intermediate_size inner_dim d_inner intermediate_size_mlp mlp_hidden_size feed_forward_dim
        projector_intermediate_size expert_ffn_hidden_size projector_ffn_dim
    """,
    ),
    (
        48,
        """
        moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size
        shared_experts_intermediate_size moe_hidden_size
    """,
    ),
    (
        EXPERTS,
        """
        num_experts n_routed_experts num_local_experts moe_num_experts linear_num_value_heads zero_expert_num
    """,
    ),
    (EXPERTS_PER_TOKEN, "num_experts_per_tok moe_topk top_k_experts moe_k num_experts_per_token top_k"),
    (
        POSITIONS,
        """
        max_position_embeddings n_positions max_seq_len max_target_positions max_position_embedding
        max_encoder_position_embeddings max_decoder_position_embeddings original_max_position_embeddings
        max_sequence_length context_window
    """,
    ),
    (24, "max_source_positions"),
    (32, "base_channels"),
    (IMAGE, "image_size"),
    (PATCH, "patch_size"),
    (
        MELS,
        """
        num_mel_bins n_mels input_feat_per_channel feature_size n_mel_bins num_mel_bins input_feat_size
    """,
    ),
]
SIZES: dict[str, Any] = {name: size for size, names in _NAMES for name in names.split()}
SIZES |= {
    "router_aux_loss_coef": 0.001,
    "initializer_range": 0.15,
    "init_std": 0.15,
    "init_range": 0.15,
    "layer_scale_init_value": 0.5,
    "layerscale_value": 0.5,
    "vocab_size": VOCABULARY,
}
# Dropout and layers left out at random are for training alone: gradients are compared in training mode too.
RANDOM = re.compile(r"(drop|layerdrop|jitter)")
VOCABULARIES = re.compile(r"(^|_)(vocab_size|num_embeddings|codebook_size|vocab_size_per_layer_input)$")
KEPT_VOCABULARIES = ("type_vocab_size", "task_type_vocab_size", "entity_vocab_size")
TOKEN = re.compile(r"(^|_)(token_id|token_index|start_id|end_id|newline_id)s?$|^(bos|eos|pad|unk|mask)_index$")
WINDOWS = ("sliding_window", "sliding_window_size", "attention_window_size", "local_attention")
TOKENS_BY_NAME = {"pad": 0, "bos": 1, "eos": 2, "decoder_start": 1}

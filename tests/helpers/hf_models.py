"""Small random models of Transformers' real configuration classes, and attention that is their oracle."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers

TOKENS = 96  # the vocabulary
WINDOW = 5

COMMON = {
    "vocab_size": TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # weights large enough that attention is far from a mean
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}
ENCODER = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
WINDOWS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

# By name: the class of the model, of its configuration, and what differs from COMMON.
DECODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 16}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": WINDOW, "head_dim": 8}),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**WINDOWS, "head_dim": 16, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    ),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**WINDOWS, "head_dim": 16, "query_pre_attn_scalar": 8}),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**WINDOWS, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 2},
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "n_routed_experts": 2,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
    ),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {"sliding_window": WINDOW}),
}
ENCODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", "BertConfig", ENCODER),
    "modernbert": (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {"local_attention": 2 * WINDOW, "cls_token_id": 1, "sep_token_id": 2, "layer_types": WINDOWS["layer_types"]},
    ),
}
SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "dropout": 0.0,
    "activation_dropout": 0.0,
    "init_std": 0.2,
    "decoder_start_token_id": 1,
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
BARK = {"num_layers": 2, "num_heads": 4, "block_size": 32, "input_vocab_size": TOKENS, "output_vocab_size": TOKENS}
# Whose masks and layers say different things.
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bart": ("BartForConditionalGeneration", "BartConfig", SEQ2SEQ),
    "pegasus_x": ("PegasusXForConditionalGeneration", "PegasusXConfig", {**SEQ2SEQ, "block_size": 4}),
    # The window is in the mask alone.
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {**WINDOWS, **EXPERTS, "use_sliding_window": True, "shared_expert_intermediate_size": 16},
    ),
    "phimoe": ("PhimoeForCausalLM", "PhimoeConfig", {"sliding_window": WINDOW, "num_local_experts": 2}),
    # The mask and the layers have windows that differ by one.
    "mistral_both_ways": (
        "MistralForCausalLM",
        "MistralConfig",
        {"sliding_window": WINDOW, "head_dim": 8, "is_causal": False},
    ),
    # The mask is made of functions of the model's own.
    "embedding_gemma": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**WINDOWS, "head_dim": 16, "query_pre_attn_scalar": 8, "use_bidirectional_attention": True},
    ),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_head": 4, "n_layer": 2}),
    "opt": ("OPTForCausalLM", "OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    # Layers of their own for flash-attn; the implementation is chosen as they are loaded.
    "falcon": ("FalconForCausalLM", "FalconConfig", {"alibi": False, "num_kv_heads": 2}),
    "falcon_alibi": ("FalconForCausalLM", "FalconConfig", {"alibi": True}),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    ),
    "bark": ("BarkSemanticModel", "BarkSemanticConfig", BARK),
    "bark_fine": ("BarkFineModel", "BarkFineConfig", {**BARK, "n_codes_total": 4, "n_codes_given": 1}),
}


def register_oracle() -> None:
    """Make "oracle" an implementation: plain attention in the dtype of the inputs, softmax too, unlike "eager"."""
    transformers.AttentionInterface.register("oracle", _oracle)
    transformers.AttentionMaskInterface.register("oracle", _whole_mask)


def _whole_mask(**arguments: Any) -> torch.Tensor:
    """(B, 1, Nq, Nk) bool, never left out."""
    arguments.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    return transformers.masking_utils.sdpa_mask(**arguments)


def _oracle(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, -1e9)  # finite: a row of padding may see nothing
    if s_aux is not None:
        scores = torch.cat((scores, s_aux[None, :, None, None].expand(*scores.shape[:3], 1)), -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2), None


@functools.cache
def build(name: str) -> Any:
    """The model of a name, in float32 on the CPU; whoever changes more than its implementation takes a copy."""
    return _whisper() if name == "whisper" else load(name, "eager")


def load(name: str, implementation: str, **changes: Any) -> Any:
    """A model with an implementation from its beginning; by one name always the same weights.

    changes: of its configuration.
    """
    model_class, config_class, options = (DECODERS | ENCODERS | OTHERS)[name]
    config = getattr(transformers, config_class)(**COMMON | options | changes)
    with torch.random.fork_rng():
        torch.manual_seed(len(name))
        # Experts one by one: the grouped product of all of them has no float64.
        options = {"attn_implementation": implementation, "experts_implementation": "eager"}
        model = getattr(transformers, model_class)._from_config(config, **options).eval()
        for parameter_name, parameter in model.named_parameters():
            if "sinks" in parameter_name:
                torch.nn.init.normal_(parameter)
    return model


def _whisper() -> Any:
    config = transformers.WhisperConfig(
        vocab_size=TOKENS,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=12,
        max_target_positions=40,
        init_std=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        dropout=0.0,
        suppress_tokens=[],
        begin_suppress_tokens=[],
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return transformers.WhisperForConditionalGeneration._from_config(config, attn_implementation="eager").eval()

"""The arguments of single models, which inputs.py does not find."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import DFlashCache

from . import sizes


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(12))


def _ids() -> torch.Tensor:
    return torch.randint(3, sizes.TOKENS, (2, 14), generator=torch.Generator().manual_seed(12))


def _ids_and_mask(config: Any) -> dict[str, Any]:
    return {"input_ids": _ids(), "attention_mask": torch.ones(2, 14, dtype=torch.long)}


def _with_images(token: int, count: int) -> torch.Tensor:
    """Tokens with `count` of an image in the middle."""
    ids = _ids()
    ids[:, 5 : 5 + count] = token
    return ids


def _idefics(config: Any) -> dict[str, Any]:
    size = config.vision_config.image_size
    return {
        "input_ids": _ids(),
        "pixel_values": _random(2, 1, 3, size, size),
        "image_attention_mask": torch.ones(2, 14, 1, dtype=torch.long),
    }


def _kosmos2(config: Any) -> dict[str, Any]:
    size = config.vision_config.image_size
    is_image = torch.zeros(2, 14, dtype=torch.long)
    is_image[:, 5:9] = 1
    return {"input_ids": _ids(), "pixel_values": _random(2, 3, size, size), "image_embeds_position_mask": is_image}


def _gemma4_vision(config: Any) -> dict[str, Any]:
    places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(2, 16, 2).clone()
    return {"pixel_values": _random(2, 16, 3 * config.patch_size**2), "pixel_position_ids": places}


def _voxtral_realtime(config: Any) -> dict[str, Any]:
    return {"input_ids": _ids(), "input_features": _random(2, sizes.MELS, 8 * 14)}


def _efficientloftr(config: Any) -> dict[str, Any]:
    return {"pixel_values": _random(2, 2, 3, 128, 128)}  # pairs of images


def _fun_asr_nano_encoder(config: Any) -> dict[str, Any]:
    mask = torch.ones(2, 24, dtype=torch.long)
    return {"input_features": _random(2, 24, config.input_size), "input_features_mask": mask}


def _gemma3n_audio(config: Any) -> dict[str, Any]:
    return {"audio_mel": _random(2, 48, config.input_feat_size), "audio_mel_mask": torch.ones(2, 48, dtype=torch.bool)}


def _gemma4_assistant(config: Any) -> dict[str, Any]:
    """One token, and the keys and values of the model that it guesses for: more than the window."""
    text = config.get_text_config()
    layers = [text.per_layer_config[i] for i in range(text.num_hidden_layers)]
    return {
        "inputs_embeds": _random(2, 1, 2 * config.backbone_hidden_size),
        "attention_mask": torch.ones(2, 14, dtype=torch.long),
        "position_ids": torch.full((2, 1), 13),
        "shared_kv_states": {
            kind: _random(2, 2, layer.num_key_value_heads, 14, layer.head_dim).unbind()
            for kind, layer in zip(text.layer_types, layers, strict=True)
        },
    }


def _glm_image_vqmodel(config: Any) -> dict[str, Any]:
    return {"hidden_states": _random(2, config.latent_channels, 4, 4)}


def _inkling2_vision(config: Any) -> dict[str, Any]:
    side = config.patch_size * config.spatial_merge_size
    return {"pixel_values": _random(32, side, side, 3), "image_grid_thw": torch.tensor([[1, 4, 4]] * 2)}


def _instructblip(config: Any) -> dict[str, Any]:
    size = config.vision_config.image_size
    return {
        "input_ids": _with_images(config.image_token_index, 4),
        "qformer_input_ids": _ids()[:, :5],
        "pixel_values": _random(2, 3, size, size),
        "attention_mask": torch.ones(2, 14, dtype=torch.long),
    }


def _instructblipvideo(config: Any) -> dict[str, Any]:
    size = config.vision_config.image_size
    return {
        "input_ids": _with_images(config.video_token_index, 4),
        "qformer_input_ids": _ids()[:, :5],
        "pixel_values": _random(2, 1, 3, size, size),
        "attention_mask": torch.ones(2, 14, dtype=torch.long),
    }


def _jev(config: Any) -> dict[str, Any]:
    """A prompt with two questions, answered at their marks."""
    return {
        "input_ids": _ids()[:1],
        "marks": torch.tensor([[6, 14]]),
        "num_options": torch.tensor([[2, 4]]),
        "question_type_ids": torch.tensor([[0, 1]]),
    }


def _latents(config: Any) -> dict[str, Any]:
    return {"latents": _random(2, config.hidden_size, 8)}


def _llama4(config: Any) -> dict[str, Any]:
    size = config.vision_config.image_size
    return {
        "input_ids": _with_images(config.image_token_id, 4),
        "pixel_values": _random(2, 3, size, size),
        "attention_mask": torch.ones(2, 14, dtype=torch.long),
    }


def _minicpm_vision(config: Any) -> dict[str, Any]:
    return {
        "pixel_values": _random(1, 3, config.patch_size, 32 * config.patch_size),
        "target_sizes": torch.tensor([[4, 4]] * 2),
    }


def _muse_glimmer_assistant(config: Any) -> dict[str, Any]:
    """A block of tokens behind a context, which the layers put before the block's keys themselves."""
    context, block = 9, 5
    cache = DFlashCache(config=config)
    cache.set_previous_accepted_tokens(context)
    return {
        "noise_embeds": _random(2, block, config.hidden_size),
        "context_hidden_states": _random(2, context, config.hidden_size * len(config.target_layer_ids)),
        "attention_mask": torch.ones(2, context + block, dtype=torch.long),
        "cache": cache,
    }


def _pe_audio_video(config: Any) -> dict[str, Any]:
    return {
        "input_ids": _ids(),
        "pixel_values_videos": _random(2, 2, 3, sizes.IMAGE, sizes.IMAGE),
        "input_values": _random(2, 1, 7680),
    }


def _qwen3_asr_encoder(config: Any) -> dict[str, Any]:
    frames = 2 * 2 * config.n_window
    mask = torch.ones(2, frames, dtype=torch.long)
    return {"input_features": _random(2, config.num_mel_bins, frames), "input_features_mask": mask}


def _qwen3_omni_moe(config: Any) -> dict[str, Any]:
    """A turn of the user, and one of the assistant that has begun."""
    given = _ids_and_mask(config)
    given["input_ids"][:, 4:6] = torch.tensor([config.im_start_token_id, config.user_token_id])
    given["input_ids"][:, 9:11] = torch.tensor([config.im_start_token_id, config.assistant_token_id])
    return given


def _sam2(config: Any) -> dict[str, Any]:
    return {
        "pixel_values": _random(2, 3, 64, 64),
        "input_points": torch.tensor([[[[20.0, 30.0]]], [[[40.0, 10.0]]]]),
        "input_labels": torch.ones(2, 1, 1, dtype=torch.long),
    }


def _session(config: Any) -> dict[str, Any]:
    """A video of three frames, and a point on an object in the first."""
    name = config.model_type
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    session_class = getattr(module, type(config).__name__.replace("Config", "InferenceSession"))
    session = session_class(_random(3, 3, 64, 64), 64, 64, dtype=torch.float32)
    point = {"point_coords": torch.tensor([[[[20.0, 30.0]]]]), "point_labels": torch.ones(1, 1, 1).int()}
    session.add_point_inputs(session.obj_id_to_idx(1), 0, point)
    session.obj_with_new_inputs = [1]
    return {"inference_session": session}


def _vitpose_backbone(config: Any) -> dict[str, Any]:
    return {"pixel_values": _random(2, 3, *config.image_size), "dataset_index": torch.tensor([0, 2])}


def _of_video(model: Any) -> Callable[..., Any]:
    of_frame = model.forward

    def forward(inference_session: Any) -> list[Any]:
        return [of_frame(inference_session, i) for i in range(len(inference_session.processed_frames))]

    return forward


def _with_image_outputs(model: Any) -> Callable[..., Any]:
    """The forward reads a field that its text model's output lacks."""
    of_text = model.language_model.forward

    def forward(*args: Any, **options: Any) -> Any:
        result = of_text(*args, **options)
        result.image_outputs = None
        return result

    model.language_model.forward = forward
    return model.forward


def _of_speech(model: Any) -> Callable[..., Any]:
    """Text, and speech of it, without choices at random."""
    model.can_generate = lambda: False  # it does so here
    if model.config.model_type == "qwen2_5_omni":
        dit = model.token2wav.code2wav_dit_model.config
        voice = {"cond": _random(1, dit.enc_emb_dim), "ref_mel": _random(1, 24, dit.mel_dim), "bos_token": 5}
        model.speaker_map = {"Chelsie": voice}

    def forward(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> list[torch.Tensor]:
        text, speech = model.generate(
            input_ids,
            attention_mask=attention_mask,
            thinker_max_new_tokens=4,
            talker_max_new_tokens=8,
            talker_do_sample=False,
        )
        return [text.double(), *speech]

    return forward


# By model type, or type:kind, what is called for a forward, where a model has none or has one for a part of its work.
FORWARDS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "edgetam_video": _of_video,
    "glm_image_vqmodel": lambda model: model.encode,
    "llama4:multimodal": _with_image_outputs,
    "qwen2_5_omni": _of_speech,
    "qwen3_omni_moe": _of_speech,
    "sam2_video": _of_video,
    "sam3_tracker_video": _of_video,
}
# By model type, the arguments of a forward; for what inputs.py does not find.
ARGUMENTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "edgetam_video": _session,
    "efficientloftr": _efficientloftr,
    "fun_asr_nano_encoder": _fun_asr_nano_encoder,
    "gemma3n_audio": _gemma3n_audio,
    "gemma4_assistant": _gemma4_assistant,
    "gemma4_unified_assistant": _gemma4_assistant,
    "gemma4_vision": _gemma4_vision,
    "glm_image_vqmodel": _glm_image_vqmodel,
    "idefics": _idefics,
    "inkling2_vision": _inkling2_vision,
    "instructblip": _instructblip,
    "instructblipvideo": _instructblipvideo,
    "jev": _jev,
    "kosmos-2": _kosmos2,
    "llama4:multimodal": _llama4,
    "mimi_decoder": _latents,
    "minicpm_ocr_vision": _minicpm_vision,
    "minicpmv4_7_vision": _minicpm_vision,
    "muse_glimmer_assistant": _muse_glimmer_assistant,
    "pe_audio_video": _pe_audio_video,
    "pocket_tts_audio_tokenizer_decoder": _latents,
    "qwen2_5_omni": _ids_and_mask,
    "qwen3_asr_encoder": _qwen3_asr_encoder,
    "qwen3_omni_moe": _qwen3_omni_moe,
    "sam2": _sam2,
    "sam2_video": _session,
    "sam3_tracker": _sam2,
    "sam3_tracker_video": _session,
    "vitpose_backbone": _vitpose_backbone,
    "voxtral_realtime": _voxtral_realtime,
}

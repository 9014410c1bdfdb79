"""The part of the sweep that CI runs: one model of each way in which models state masks, in the modes that it has."""

from __future__ import annotations

import dataclasses

WHOLE_GRAPH = ("compile", "compile left")
SLOW = (*WHOLE_GRAPH, "batching")  # seconds each, where the others take a tenth of one


@dataclasses.dataclass(frozen=True)
class Part:
    """slow: which of `SLOW` are run; refused: exactly the modes that are refused, "load" if the model is."""

    slow: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


_AT_LOAD = Part(refused=("load",))

FIXED: dict[str, Part] = {
    "llama:causal": Part(SLOW),
    "mistral:causal": Part(("compile left",)),  # a window over padding between tokens is no band
    "gemma2:causal": Part(),  # softcap
    "gpt_oss:causal": Part(("batching",)),  # sinks
    "deepseek_v3:causal": Part(),  # a head dim of v's own
    "qwen2_moe:causal": Part(),  # the window is in the mask alone
    "phimoe:causal": Part(),
    "lfm3:causal": Part(),  # convolutions between the layers
    "granitemoehybrid:causal": Part(),
    "falcon:causal": Part(),  # a flash-attention class of its own
    "gpt_neo:causal": Part(refused=("inner", "static")),
    "bert:causal": Part(),
    "bert:masked": Part(("compile",)),
    "modernbert:masked": Part(),  # windows on both sides
    "embedding_gemma2_text:base": Part(),
    "aimv2:base": Part(),  # causality is in the mask alone
    "phi4_multimodal_vision:part": Part(),  # layers say causal, the mask does not
    "bart:seq2seq": Part(),
    "pegasus_x:seq2seq": Part(),
    "whisper:speech": Part(),
    "wav2vec2:base": Part(),
    "vit:base": Part(),
    "qwen2_vl:multimodal": Part(),  # images in one row, by offsets
    "idefics3:multimodal": Part(),
    "gemma3:causal": Part(),  # images within text see each other
    "muse_glimmer_assistant:base": Part(),  # layers put a context's keys before those of the block
    "sam3_tracker:base": Part(),
    "sam3:base": _AT_LOAD,  # its layers give PyTorch's attention a mask; those of its vision model, as above, have none
    "t5:seq2seq": _AT_LOAD,  # a bias of positions
    "deepseek_v4:causal": _AT_LOAD,  # keys of its own beside those of the mask
    "doge:causal": _AT_LOAD,
}

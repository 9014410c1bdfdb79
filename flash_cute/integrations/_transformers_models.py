"""What has to be known of single models of Transformers, beyond what they say themselves.

Found by comparing each with "eager" in float32: unpadded and padded, longer than its windows, forward and generation.
"""

from typing import Any

# Architectures, by their folder in Transformers, whose classes say `_supports_flash_attn = False` and which are right
# all the same: why they say so, and what becomes of that here. What is not here is refused where it is loaded: layers
# add to masks (Doge, DeepSeek-V4), choose keys (DeepSeek-V3.2, GLM-MoE-DSA, HY-V4, AXK2) or expect a mask (SigLIP2).
TESTED = {
    "beit": "a bias of positions, which some configurations have, is refused in the call",
    "gemma3": "tokens of an image see each other: the mask function refuses such a mask",
    "gemma4_unified": "tokens of an image see each other: the mask function refuses such a mask",
    "got_ocr2": "a bias of positions in the image's layers, which do not use the interface",
    "llama4": "chunks: Transformers refuses sequences that are longer than one",
    "mllama": "a mask of its own for images is refused in the call",
    "molmo2": "tokens of an image see each other: the mask function refuses such a mask",
    "paligemma": "tokens of an image see each other: the mask function refuses such a mask",
    "pp_chart2table": "as got_ocr2",
    "shieldgemma2": "as gemma3",
    "step3p7": "a bias of positions in the image's layers, which do not use the interface",
}

# Architectures that flash-attention serves and we do not, and why.
REFUSED = {"sam3": "its layers give a mask that is not bool to PyTorch's attention"}
# Models of those that have none of these layers.
NOT_REFUSED = frozenset({"Sam3ViTModel", "Sam3VisionModel"})

# By `config.model_type`, models whose layers say something else of causality than their masks, so that None will not do
# for a mask. Transformers' "sdpa" goes by the layers where there is no padding, and is wrong.
CONTRADICTORY = frozenset({"phi4_multimodal_vision"})

# Encoders, by `config.model_type`, whose bidirectional layers attend to what they are in: padding among the keys is
# padding among the queries too, and rows of padding need not be computed. Elsewhere the queries beside a padding mask
# may be another sequence, of the same length by chance.
SELF_ATTENTION_ONLY = frozenset(
    {
        "albert",
        "bert",
        "camembert",
        "coarse_acoustics",
        "distilbert",
        "electra",
        "ernie",
        "esm",
        "eurobert",
        "fine_acoustics",
        "gemma3_text",
        "jina_embeddings_v3",
        "modernbert",
        "mpnet",
        "nomic_bert",
        "roberta",
        "roberta-prelayernorm",
        "roformer",
        "semantic",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    }
)


def window_of(config: Any, layer: int | None) -> int | None:
    """The window of a configuration, or, where layers have several, of that of a layer; 0: of some."""
    try:
        window = getattr(config, "sliding_window", None)
    except RuntimeError:  # what differs by layer has no value of its own
        window = 0 if layer is None else getattr(config.per_layer_config[layer], "sliding_window", None)
    return window if isinstance(window, int) else None


def may_contradict(config: Any) -> bool:
    """Whether layers of a model with this configuration may say something else of causality than their masks."""
    return (
        getattr(config, "model_type", None) in CONTRADICTORY
        or getattr(config, "use_bidirectional_attention", None) is not None  # PaliGemma
    )


def attends_only_to_itself(config: Any) -> bool:
    """Whether the layers of a model with this configuration have no cross-attention."""
    return (
        getattr(config, "model_type", None) in SELF_ATTENTION_ONLY
        and not getattr(config, "is_decoder", False)
        and not getattr(config, "add_cross_attention", False)
        and not getattr(config, "is_encoder_decoder", False)
    )

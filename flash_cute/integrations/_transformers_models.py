"""What has to be known of single models of Transformers, beyond what they say themselves.

Found by comparing each with "eager" in float32: unpadded and padded, longer than its windows, forward and generation.
"""

from typing import Any

# Models whose class says `_supports_flash_attn = False`, by the name of the class that says so: those that are right,
# since what it is said for is served here, or refused by the call that needs it.
TESTED: dict[str, str] = {}

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


def attends_only_to_itself(config: Any) -> bool:
    """Whether the layers of a model with this configuration have no cross-attention."""
    return (
        getattr(config, "model_type", None) in SELF_ATTENTION_ONLY
        and not getattr(config, "is_decoder", False)
        and not getattr(config, "add_cross_attention", False)
        and not getattr(config, "is_encoder_decoder", False)
    )

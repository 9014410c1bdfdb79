"""The keywords of a call of the attention function for which it has no argument: harmless, or refused.

Transformers' models hand `**kwargs` from the forward of a model down to the attention function. So beside what a layer
says there is all that a user, a trainer or `generate` gave the model and none of its forwards took. "eager" looks at
none of the keywords in HARMLESS. A keyword that is in neither table is refused too, since it is not known what would
follow from it.
"""

from typing import Any, NoReturn

import torch

# What a forward returns or writes to a folder beside its result, and how a loss is made of that (Liger's losses too).
_RESULTS = (
    "debug_io",
    "debug_io_dir",
    "ignore_index",
    "labels",
    "logits_to_keep",
    "num_items_in_batch",
    "output_attention_mask",
    "output_hidden_states",
    "output_router_logits",
    "prune_layers",
    "return_dict",
    "return_loss",
    "return_shared_kv_states",
    "return_token_accuracy",
    "shift_labels",
    "skip_logits",
    "use_token_scaling",
)
# Whether and where keys are kept: the cache has been used before the attention is called. `user_cache` is Nemotron-H's
# in Transformers 5.4.
_CACHE = ("cache_position", "use_cache", "user_cache")
# Continuous batching: where its cache has written, what of the result is used. `cu_seq_lens_k` says what to see.
_BATCHING = ("logits_indices", "logits_processor_args", "read_index", "write_index")
# The kinds of tokens, which embeddings, experts, convolutions and states look at, and mask functions beside them.
_TOKENS = ("mm_token_type_ids", "moe_mm_token_type_ids", "seq_idx", "token_type_ids")
# How an image becomes embeddings. Transformers adds a configuration's values to the keywords of each forward.
_IMAGES = ("grid_thw", "image_sizes", "vision_aspect_ratio", "vision_feature_layer", "vision_feature_select_strategy")
# What tokenizers and image processors return beside the inputs of a model, for use after it.
_PROCESSORS = (
    "length",
    "offset_mapping",
    "original_sizes",
    "overflow_to_sample_mapping",
    "reshaped_input_sizes",
    "special_tokens_mask",
)

HARMLESS = frozenset((*_RESULTS, *_CACHE, *_BATCHING, *_TOKENS, *_IMAGES, *_PROCESSORS))

# What is known to change the result and has no counterpart here.
REASONS = {
    "block_indices": "sparse attention is not served",
    "cache": "the cache of continuous batching is given to 'paged|flash_cute' alone",
    "head_mask": "weights cannot be multiplied by a mask of heads",
    "indices": "sparse attention is not served",
    "output_attentions": "the attention weights are never in memory",
    "position_bias": "a bias added to the scores is not served",
    "sinks": "sinks are s_aux, per head",
}

# By `config.model_type`, models whose layers say False of causality where there is a mask.
_LEFT_TO_THE_MASK = frozenset({"moonshine", "moonshine_streaming"})


def refuse(keywords: dict[str, Any]) -> NoReturn:
    """Raise the sentence about the keywords of a call that are not harmless."""
    told = [x for x in keywords if x not in HARMLESS and keywords[x] is not None and keywords[x] is not False]
    for name in told:
        if name in REASONS:
            raise ValueError(f"flash_cute: {name}: expected None, since {REASONS[name]}")
    raise ValueError(
        f"flash_cute: {told[0]}: expected no such argument of the attention function, since it is not known what would "
        f"follow from it, got {type(keywords[told[0]]).__name__}"
    )


def refuse_other_causality(module: torch.nn.Module, is_causal: bool, rows: int) -> None:
    """Raise where somebody says another causality than both a layer and its mask do: the mask would count.

    Where there is no mask what is said counts, as with Transformers' "sdpa".
    """
    by_layer = getattr(module, "is_causal", is_causal)
    left_to_the_mask = getattr(getattr(module, "config", None), "model_type", None) in _LEFT_TO_THE_MASK
    if rows > 1 and by_layer != is_causal and not left_to_the_mask:
        raise ValueError(
            f"flash_cute: is_causal: expected {by_layer}, as the layer and its mask have it, where there is padding, a "
            f"window or packed sequences, got {is_causal}"
        )

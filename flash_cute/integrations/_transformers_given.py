"""Lengths that a call is told of otherwise than by what the mask function returns.

A model or a user gives offsets of packed sequences, positions that begin again, or a padding mask `(B, N)` that goes to
the layers as it is.
"""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ._transformers_band import CAUSAL, WHOLE, code_of, options_of
from ._transformers_intervals import from_matrix
from ._transformers_lengths import Known, Lengths, padded, read
from ._transformers_mask import Sizes, assert_not_packed, is_in_a_graph
from ._transformers_models import attends_only_to_itself, window_of


def of_offsets(offsets_q: Tensor, offsets_k: Tensor | None, longest_q: Any, longest_k: Any) -> Lengths:
    """The offsets that a call is given."""
    if not isinstance(offsets_k, Tensor):  # continuous batching has a dict, of which the cache makes a tensor
        kind = type(offsets_k).__name__
        raise ValueError(f"flash_cute: cu_seq_lens_k: expected offsets beside those of cu_seq_lens_q, got {kind}")
    if offsets_q.dtype is not torch.int32 or offsets_k.dtype is not torch.int32:
        offsets_q, offsets_k = offsets_q.int(), offsets_k.int()
    # They are hints. A tensor's value would have to be waited for.
    longest_q = longest_q if isinstance(longest_q, int) else None
    longest_k = longest_k if isinstance(longest_k, int) else None
    return offsets_q, offsets_k, None, None, longest_q, longest_k


def refuse_unsaid_window(module: torch.nn.Module, longest: Any) -> None:
    """Raise where a layer has a window that only its mask would say, and there is none (continuous batching)."""
    config = getattr(module, "config", None)
    layer = getattr(module, "layer_idx", None)
    window = window_of(config, layer)
    if window is None or (isinstance(longest, int) and longest <= window):
        return
    types = getattr(config, "layer_types", None)
    if types is None or layer is None or types[layer] == "sliding_attention":
        raise ValueError(
            f"flash_cute: sliding_window: expected {window}, config.sliding_window, of {type(module).__name__} where "
            "sequences are packed without a mask (generate_batch), got None"
        )


def of_positions(module: torch.nn.Module, query: Tensor, key: Tensor, positions: Tensor) -> Lengths | None:
    """The lengths where positions begin again; None: there is one sequence.

    They are read without padding, with no keys before the queries', in a batch of one: the mask function sees packed
    sequences where a model has no KV cache, and by default it has one, also where sequences are packed.
    """
    known = _read_before(positions, module)
    if None in known:  # one sequence, whatever the tensors' lengths
        return None
    batch_size, _, length, _ = query.shape
    if length == 1 or batch_size != 1 or key.shape[2] != length:
        return None
    if length not in known:
        if positions.shape == (length, 2):
            raise ValueError(
                "flash_cute: position_ids: expected one position of a token, got the row and column of a patch, "
                "which do not say where an image ends: load the vision model with another attn_implementation"
            )
        if positions.dim() != 2 or positions.shape[1] != length:
            return None
        if is_in_a_graph(positions.device):
            assert_not_packed(positions)
            return None
        offsets = _read_positions(positions)
        if offsets is None:
            known[None] = None
            return None
        known[length] = (offsets, offsets, None, None, None, None)
    return known[length]


def _read_positions(positions: Tensor) -> Tensor | None:
    """`(sequences + 1,)` int32: where positions begin again; None: there is one sequence."""
    starts = (positions[0] == positions[0, 0]).nonzero()[:, 0]
    if starts.numel() == 1:
        return None
    return torch.cat((starts, starts.new_tensor([positions.shape[1]]))).int()


def of_padding(
    module: torch.nn.Module, attention_mask: Tensor, sizes: Sizes, is_causal: bool, sliding_window: int | None
) -> Known:
    """What a padding mask says that a model gives its layers itself, of the call's B, Nq and Nk."""
    # What is among the queries too is as the mask function has it.
    own = is_causal or (sizes[1] == sizes[2] and attends_only_to_itself(getattr(module, "config", None)))
    has_window = sliding_window is not None and sliding_window < sizes[2]
    call = (*sizes, own, has_window)
    known = _read_before(attention_mask, module)
    if call not in known:
        seen = attention_mask.shape[1]
        if attention_mask.shape[0] != sizes[0] or seen > sizes[2]:
            raise ValueError(
                f"flash_cute: attention_mask: expected ({sizes[0]}, at most {sizes[2]}), got "
                f"{tuple(attention_mask.shape)}"
            )
        first_row = seen - sizes[1] if own else None
        waits = not is_in_a_graph(attention_mask.device)
        band = WHOLE if not is_causal else (sliding_window - 1, 0) if sliding_window and has_window else CAUSAL
        mask = padded(attention_mask, sizes, seen, first_row, code_of(*band), waits, has_window)
        known[call] = Known() if mask is None else read(mask, *sizes)._replace(options=None)
    return known[call]


def of_matrix(module: torch.nn.Module, attention_mask: Tensor, sizes: Sizes, heads_kv: int) -> Known:
    """What a boolean mask `(B or 1, heads or 1, Nq, Nk)` says, of the call's B, Nq and Nk; a layer's band is in it."""
    batch_size, q_length, kv_length = sizes
    shape = tuple(attention_mask.shape)
    if shape[0] not in (1, batch_size) or shape[2] != q_length or shape[3] < kv_length:
        raise ValueError(
            f"flash_cute: attention_mask: expected ({batch_size} or 1, heads or 1, {q_length}, {kv_length}), got "
            f"{shape}"
        )
    waits = not is_in_a_graph(attention_mask.device)
    known = _read_before(attention_mask, module)
    call = (*sizes, heads_kv, waits)
    if call not in known:
        mask = from_matrix(attention_mask.detach()[..., :kv_length], "attention_mask", heads_kv, waits)
        known[call] = Known(None, None, options_of(code_of(*WHOLE)), None, mask)
    found: Known = known[call]
    return found


def _read_before(x: Tensor, module: torch.nn.Module) -> dict[object, Any]:
    """What the layers before this one have read of a tensor, by what it depends on; what this one reads is added.

    All layers of a forward are given the same tensor, and reading it waits for the GPU. So what was read is kept with
    it until the tensor changes, which its version tells. In inference mode there is none: a layer then takes what one
    before it has read, so that each forward's first layer reads.
    """
    if is_dynamo_compiling():
        return {}
    known: Any = getattr(x, "_flash_cute_lengths", None)
    found: dict[object, Any]
    if known is not None:
        version, read_by, found = known
        if version is not None:  # and so it was not made in inference mode, which a tensor's lifetime does not change
            if version == x._version:
                return found
        elif (layer_idx := getattr(module, "layer_idx", None)) is not None and layer_idx > read_by:
            return found
    found = {}
    if not x.is_inference():
        x._flash_cute_lengths = (x._version, None, found)  # type: ignore[attr-defined]
    elif (layer_idx := getattr(module, "layer_idx", None)) is not None:
        x._flash_cute_lengths = (None, layer_idx, found)  # type: ignore[attr-defined]
    return found

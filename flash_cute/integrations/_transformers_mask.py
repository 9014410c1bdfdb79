"""Transformers' mask function for flash_cute: what the layers have to know of bands, padding and packed sequences."""

import sys
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ._transformers_band import (
    CAUSAL,
    WHOLE,
    Band,
    MaskFunction,
    Pattern,
    band_by_values,
    code_of,
    pattern_of,
    traced_pattern,
)
from ._transformers_intervals import by_values
from ._transformers_lengths import PaddingBetweenTokensError, band_alone, packed, padded
from ._transformers_models import attends_only_to_itself, may_contradict, window_of

# B, Nq, Nk.
Sizes: TypeAlias = tuple[int, int, int]
# mask_function, use_vmap, local_size, allow_is_causal_skip, allow_is_bidirectional_skip
Stated: TypeAlias = tuple[MaskFunction | None, bool, int | None, bool, bool]

# Classes of configurations of models that Transformers' sdpa does not serve, so that nothing says that their layers and
# their masks agree on what is causal.
without_sdpa: set[type] = set()


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    config: Any = None,
    allow_torch_fix: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """Transformers' mask function: what the layers have to know.

    Query row i has the position `q_offset + i`, key j the position `kv_offset + j`. Reads the padding mask once, which
    waits for the GPU, as Transformers' own mask functions do; not in a graph (torch.export, torch.compile with
    fullgraph=True, a CUDA graph).

    Args:
        batch_size, q_length, kv_length: B, Nq, Nk.
        q_offset: positions before the first query; a tensor where a StaticCache counts them.
        mask_function: which key a row sees, as a function of indices of batch, head, row and key. None: causal,
            with a window of `local_size` if that is given.
        attention_mask: padding, `(B, positions)` bool, False where there is no token. `None`: no padding.
        local_size: the size of a window; looked at where `mask_function` cannot be.
        allow_is_causal_skip, allow_is_bidirectional_skip: whether None may say that `mask_function` is causality, or
            the whole, and nothing else.
        use_vmap: whether `mask_function` takes single indices, not tensors of them.
        config: the model's configuration.
        dtype, allow_torch_fix: not looked at.
        kwargs: none; what else Transformers may state is not known here.

    Returns:
        None: causal or whole, as the layer says. Else `(rows, Nk, code, columns)` int32, which Transformers hands on as
        it hands on 4-D masks; dim 2 is the code of the band. Without columns the band is all. One: offsets of packed
        sequences. Four, of a padded batch: offsets of queries, of keys, used queries and used keys (the last of each
        counts nothing). Three, `(B, size, code, 3)`, where tokens have padding between them: the order of the rows.
        Two, `(B or 2 B, Nk, code, 2)`, of what is no band: intervals of rows for each key, as `flash_cute.Mask` has
        them. Or bool `(B, 1, Nq, Nk)`, of what has more than two intervals for a key.

    Raises:
        ValueError: in a graph a mask function that is no band or a window over padding between tokens; an argument of
            another name.

    Example:
        >>> padding = torch.tensor([[False, False, True, True], [True, True, True, True]])
        >>> mask(2, 4, 4, attention_mask=padding)[:, 0, 0, 0]
        tensor([2, 4, 4, 8], dtype=torch.int32)
    """
    for name in kwargs:
        raise ValueError(f"flash_cute: {name}: expected no such argument of the mask function, got {kwargs[name]!r}")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"flash_cute: attention_mask: expected a padding mask (batch, positions), got {tuple(attention_mask.shape)}"
        )
    sizes = (batch_size, q_length, kv_length)
    stated = (mask_function, use_vmap, local_size, allow_is_causal_skip, allow_is_bidirectional_skip)
    make = _outside_of_graphs if is_dynamo_compiling() and not _is_whole_graph() else _make
    return make(sizes, q_offset, kv_offset, stated, attention_mask, device, config)


def _make(
    sizes: Sizes,
    q_offset: int | Tensor,
    kv_offset: int,
    stated: Stated,
    attention_mask: Tensor | None,
    device: torch.device | str,
    config: Any,
) -> Tensor | None:
    batch_size, q_length, kv_length = sizes
    waits = not is_in_a_graph(device)
    pattern = _pattern(sizes, q_offset, kv_offset, stated, device, waits)
    if pattern is None:
        return _intervals(sizes, q_offset, kv_offset, stated, attention_mask, device)
    band = left, right = _without_idle_limits(pattern.band, sizes, q_offset, kv_offset)
    has_window = band not in (CAUSAL, WHOLE)
    code = code_of(left, right)
    causal_may_be_none, whole_may_be_none = stated[3:]
    if pattern.packed is not None and q_length > 1:
        result = packed(torch.nn.functional.pad(pattern.packed.diff() != 0, (1, 0), value=True), sizes, code)
        if result is not None:
            return result
        causal_may_be_none = True  # there is one sequence, after all
    seen = q_offset + q_length - kv_offset if right == 0 else kv_length
    if attention_mask is not None or isinstance(seen, Tensor) or seen != kv_length:
        if attention_mask is None:
            tokens = torch.ones((batch_size, kv_length), dtype=torch.bool, device=device)
        else:
            tokens = attention_mask[:, kv_offset : kv_offset + kv_length]
        own = _are_own(band, sizes, config)
        try:
            result = padded(tokens, sizes, seen, seen - q_length if own else None, code, waits, has_window)
        except PaddingBetweenTokensError:
            return _intervals(sizes, q_offset, kv_offset, stated, attention_mask, device)
        if result is not None:
            return result
    may_be_none = not has_window and (whole_may_be_none if right is None else causal_may_be_none)
    return None if may_be_none and not _is_doubtful(config, kv_length) else band_alone(sizes, code, device)


_outside_of_graphs = torch.compiler.disable(_make)


def _pattern(
    sizes: Sizes,
    q_offset: int | Tensor,
    kv_offset: int,
    stated: Stated,
    device: torch.device | str,
    waits: bool,
) -> Pattern | None:
    """What a mask function says; None if it is no band, in a graph an error."""
    batch_size, q_length, kv_length = sizes
    function, use_vmap, local_size, *may_be_none = stated
    if function is None:
        return Pattern(CAUSAL if local_size is None else (local_size - 1, 0))
    if not is_dynamo_compiling():
        found = pattern_of(function, kv_offset + kv_length)
    else:
        found = None if use_vmap else traced_pattern(function, local_size, *may_be_none)
    if found is not None and (found.packed is None or waits):
        return found
    if waits:
        offsets = (int(q_offset), kv_offset)
        band = band_by_values(function, sizes, offsets, use_vmap, device)
        return None if band is None else Pattern(band)
    if not use_vmap:
        # In a graph packed sequences are looked for in any case. That there is none, nothing else that is not causal,
        # can only be seen to when it runs.
        _assert_causal(function, batch_size, q_length, q_offset, device)
        return Pattern(CAUSAL if local_size is None else (local_size - 1, 0))
    raise ValueError(
        "flash_cute: mask_function: expected causality, a window, padding or packed sequences in a graph, got one that "
        "is neither causal nor bidirectional throughout, or not known (or_mask_function, and_mask_function, "
        "block_sequence_ids); attn_implementation='sdpa' serves it"
    )


def _intervals(
    sizes: Sizes,
    q_offset: int | Tensor,
    kv_offset: int,
    stated: Stated,
    attention_mask: Tensor | None,
    device: torch.device | str,
) -> Tensor:
    """What is no band: intervals of rows or a matrix, of all values of the function and of the padding."""
    function, use_vmap, local_size, *_ = stated
    masking = sys.modules["transformers.masking_utils"]
    if function is None:
        causal = masking.causal_mask_function
        function = causal if local_size is None else masking.sliding_window_causal_mask_function(local_size)
    return by_values(sizes, (int(q_offset), kv_offset), function, use_vmap, attention_mask, device)


def assert_not_packed(positions: Tensor) -> None:
    """Positions, (1, N), do not begin again, or the graph fails when it runs."""
    torch._assert_async((positions == positions[:, :1]).sum() == 1, _IN_A_GRAPH)


def _assert_causal(
    function: MaskFunction, batch_size: int, q_length: int, q_offset: int | Tensor, device: torch.device | str
) -> None:
    """Each row sees the key before its own, and none sees the one behind it, or the graph fails when it runs."""
    if q_length == 1:
        return
    batch = torch.arange(batch_size, device=device)[:, None]
    head = torch.zeros((1, 1), dtype=torch.long, device=device)
    rows = torch.arange(1, q_length, device=device)[None] + q_offset
    torch._assert_async(function(batch, head, rows, rows - 1).all(), _IN_A_GRAPH)
    torch._assert_async(~function(batch, head, rows - 1, rows).any(), _IN_A_GRAPH)


_IN_A_GRAPH = (
    "flash_cute: position_ids: expected one causal sequence in each row of a batch where the whole forward is a graph "
    "(fullgraph=True, torch.export), got packed sequences, which cu_seq_lens_q and cu_seq_lens_k serve, or blocks"
)


def _are_own(band: Band, sizes: Sizes, config: Any) -> bool:
    """Whether padding among the keys is padding among the queries. Of cross-attention it is not, and all rows count."""
    if sizes[1] == 1:  # whatever it is, it sees all tokens up to it
        return False
    if band[1] == 0 or (sizes[1] == sizes[2] and attends_only_to_itself(config)):
        return True
    if band == WHOLE:
        return False
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise ValueError(
            "flash_cute: attention_mask: expected no padding beside a window that is not causal in a model with "
            "cross-attention, got some"
        )
    return True  # rows have positions among the keys


def _without_idle_limits(band: Band, sizes: Sizes, q_offset: int | Tensor, kv_offset: int) -> Band:
    """A band without limits that are too far away for these sizes to matter."""
    _, q_length, kv_length = sizes
    left, right = band
    last_row = kv_offset + kv_length - 1 if isinstance(q_offset, Tensor) else q_offset + q_length - 1
    if left is not None and last_row - kv_offset <= left:
        left = None
    if right:
        if isinstance(q_offset, Tensor) or q_offset - kv_offset != kv_length - q_length:
            raise ValueError(
                "flash_cute: mask_function: expected a window that is not causal to be that of rows at the end of the "
                f"keys, got {q_length} rows from {q_offset} and {kv_length} keys from {kv_offset}"
            )
        if kv_offset + kv_length - 1 - q_offset <= right:
            right = None
    return left, right


def _is_doubtful(config: Any, kv_length: int) -> bool:
    """Whether layers might do otherwise than their mask says, so that None would not do for it."""
    window = window_of(config, None)
    has_window = window is not None and kv_length >= window
    return has_window or type(config) in without_sdpa or may_contradict(config)


def is_in_a_graph(device: torch.device | str) -> bool:
    """Whether values cannot be read, since what runs is being recorded, and Dynamo may not break its graph for them."""
    if is_dynamo_compiling():
        return _is_whole_graph()
    if torch.compiler.is_compiling():  # torch.export
        return True
    return torch.device(device).type == "cuda" and torch.cuda.is_current_stream_capturing()


@torch.compiler.assume_constant_result
def _is_whole_graph() -> bool:
    """Whether Dynamo, which traces, has to make one graph of it all; else it may leave a mask out of its graphs."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        return bool(InstructionTranslator.current_tx().one_graph)
    except (ImportError, AttributeError):
        return True

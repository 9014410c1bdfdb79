"""flash_attn.bert_padding: padded batches to packed rows and back, in plain PyTorch, differentiable.

A padded batch is `(B, N, ...)` with a mask `(B, N)`, nonzero where there is a token. Its packed rows are `(T, ...)`:
the tokens of all batch items, one behind the other, as `flash_attn_varlen_func` takes them. Packing reads the mask, and
so waits for the GPU.
"""

import torch
from torch import Tensor

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """The rows `indices` `(T,)` of `input` `(R, ...)`: `(T, ...)`.

    Example:
        >>> index_first_axis(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 0])).tolist()
        [[3.0], [1.0]]
    """
    return input.index_select(0, indices)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """`index_first_axis`, and `input` beside it for a residual connection."""
    return input.index_select(0, indices), input


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """`(first_axis_dim, ...)`: `values` `(T, ...)` in the rows `indices` `(T,)`, which are distinct; 0 in the others.

    Example:
        >>> index_put_first_axis(torch.tensor([[3.0], [1.0]]), torch.tensor([2, 0]), 3).tolist()
        [[1.0], [0.0], [3.0]]
    """
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices.long(), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The packed rows of a padded batch.

    Args:
        hidden_states: `(B, N, ...)`.
        attention_mask: `(B, N)` bool or int, not 0 for a token.
        unused_mask: `(B, N)` likewise, not 0 for what is packed too and is no token.

    Returns:
        the packed rows `(T, ...)`; their indices among the `B * N` rows, `(T,)`; the offsets `(B + 1,)` int32; the
        longest sequence; the number of tokens of each batch item, `(B,)` int32.

    Example:
        >>> mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
        >>> rows, indices, offsets, longest, used = unpad_input(torch.randn(2, 3, 8), mask)
        >>> rows.shape, indices.tolist(), offsets.tolist(), longest, used.tolist()
        (torch.Size([3, 8]), [0, 1, 3], [0, 2, 3], 2, [2, 1])
    """
    tokens = attention_mask != 0
    packed = tokens if unused_mask is None else tokens | (unused_mask != 0)
    indices = packed.flatten().nonzero()[:, 0]
    offsets, longest = _offsets(packed.sum(dim=-1))
    used = tokens.sum(dim=-1, dtype=torch.int32)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, offsets, longest, used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The packed rows of a batch whose items hold several sequences each, one behind the other from the first row on.

    Args:
        hidden_states: `(B, N, ...)`.
        attention_mask_in_length: `(B, N)` int: the lengths of the item's sequences, in order, and zeros.

    Returns:
        the packed rows `(T, ...)`; their indices among the `B * N` rows, `(T,)`; the offsets `(sequences + 1,)` int32;
        the longest sequence.

    Example:
        >>> lengths = torch.tensor([[2, 1, 0, 0], [3, 0, 0, 0]])
        >>> rows, indices, offsets, longest = unpad_input_for_concatenated_sequences(torch.randn(2, 4, 8), lengths)
        >>> indices.tolist(), offsets.tolist(), longest
        ([0, 1, 2, 4, 5, 6], [0, 2, 3, 6], 3)
    """
    tokens = attention_mask_in_length.sum(dim=-1, keepdim=True)
    columns = torch.arange(attention_mask_in_length.shape[-1], device=tokens.device)
    indices = (columns < tokens).flatten().nonzero()[:, 0]
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, *_offsets(lengths)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The padded batch `(batch, seqlen, ...)` of packed rows `(T, ...)`, 0 where there is no token.

    Args:
        hidden_states: `(T, ...)`.
        indices: `(T,)`: where each row stands among the `batch * seqlen`, as `unpad_input` returns it.

    Example:
        >>> pad_input(torch.ones(3, 8), torch.tensor([0, 1, 3]), 2, 3)[..., 0].tolist()
        [[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    """
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _offsets(lengths: Tensor) -> tuple[Tensor, int]:
    """`(sequences + 1,)` int32, where each sequence begins and the last ends; the longest length."""
    ends = lengths.cumsum(0, dtype=torch.int32)
    return torch.nn.functional.pad(ends, (1, 0)), int(lengths.max()) if lengths.numel() else 0

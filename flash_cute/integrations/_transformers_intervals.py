"""Masks of Transformers that are no band, as a `flash_cute.Mask`: images among text, chunks, padding beside a window.

They are computed for all rows and keys, once a forward, as Transformers' own masks are. The mask that the layers are
given is `(intervals * B, Nk, code, 2)` int32: of each interval and batch item the first row and the limit. Where a key
has more than two intervals of rows, it is the matrix of booleans itself.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from ..mask import Mask
from ..masks.foreign import of_key_heads
from ._transformers_band import WHOLE, code_of, options_of
from ._transformers_lengths import Known, of_intervals, with_known


def by_values(
    sizes: tuple[int, int, int],
    offsets: tuple[int, int],
    function: Any,
    use_vmap: bool,
    attention_mask: Tensor | None,
    device: torch.device | str,
) -> Tensor:
    """The mask of a mask function and padding.

    Args:
        sizes: B, Nq, Nk.
        offsets: the positions of the first row and of the first key.
        function, use_vmap, attention_mask: as `mask` has them.
    """
    batch_size, q_length, kv_length = sizes
    dense = sys.modules["transformers.masking_utils"].sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=offsets[0],
        kv_offset=offsets[1],
        mask_function=function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=use_vmap,
        device=device,
    )
    code = code_of(*WHOLE)
    mask = from_matrix(dense, "mask_function")
    if mask.matrix is not None:
        return with_known(dense, Known(None, None, options_of(code), None, mask), sizes)
    parts = [(mask.first_row, mask.row_limit)]
    if mask.first_row_2 is not None and mask.row_limit_2 is not None:
        parts.append((mask.first_row_2, mask.row_limit_2))
    data = torch.cat([torch.cat(pair, 1).expand(batch_size, 2, kv_length) for pair in parts]).mT.contiguous()
    result = data[:, :, None].expand(-1, -1, code, -1)
    return with_known(result, Known(None, None, options_of(code), None, of_intervals(data, batch_size)), sizes)


def from_matrix(dense: Tensor, name: str, heads_kv: int | None = None, waits: bool = True) -> Mask:
    """The mask of bool `(B or 1, heads or 1, Nq, Nk)`: by intervals where two are enough for a key, else by the matrix.

    name: what the user knows it by. waits: whether it may be read; else it is a matrix in any case.
    """
    # Another tensor in the same memory: the layers' mask keeps what is made here, and must not keep itself.
    dense = dense.detach()
    if heads_kv is not None and dense.shape[1] not in (1, heads_kv):
        if not waits:
            raise ValueError(
                f"flash_cute: {name}: expected 1 or {heads_kv} heads in a graph, where values are not waited for, got "
                f"{tuple(dense.shape)}"
            )
        try:
            dense = of_key_heads(name, dense, heads_kv)
        except ValueError as error:
            raise ValueError(f"{error}; attn_implementation='sdpa' serves it") from None
    if waits:
        try:
            return Mask.from_dense(dense)
        except ValueError:  # that a key has a third interval, since the shape and the dtype are right
            pass
    return Mask.from_matrix(dense)

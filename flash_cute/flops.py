"""What torch.utils.flop_counter counts of the operators: the matrix products, as for scaled_dot_product_attention.

As there, the whole product counts whatever the mask: 2 * B * Hq * Nq * Nk * (D + Dv) forward; backward three products
over D and two over Dv. (`bench/` halves a causal one, which is what the kernels do.) Of packed sequences each counts
as if alone, for which the lengths are read, on CUDA by waiting for the device. Fake tensors have none to read: there
all sequences count as `max_seqlen_*` long, or, without that hint, as equally long.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._call_options import split_cache, split_fp8, split_mask
from ._torch import is_fake
from .cpu_varlen import spans


def register() -> None:
    """Give torch.utils.flop_counter the formulas."""
    from torch.utils.flop_counter import register_flop_formula

    operators = torch.ops.flash_cute
    register_flop_formula([operators.fwd, operators._fwd])(fwd)
    register_flop_formula([operators.bwd, operators._bwd])(bwd)
    register_flop_formula([operators.masked_fwd, operators._masked_fwd])(fwd)
    register_flop_formula([operators.masked_bwd, operators._masked_bwd])(bwd)
    packed = [operators.masked_varlen_fwd, operators._masked_varlen_fwd]
    register_flop_formula(packed, get_raw=True)(masked_varlen_fwd)
    packed = [operators.masked_varlen_bwd, operators._masked_varlen_bwd]
    register_flop_formula(packed, get_raw=True)(masked_varlen_bwd)
    register_flop_formula([operators.fp8_fwd, operators._fp8_fwd])(fwd)
    register_flop_formula([operators.fp8_varlen_fwd, operators._fp8_varlen_fwd], get_raw=True)(fp8_varlen_fwd)
    of_caches = [operators.kvcache_fwd, operators._kvcache_fwd, operators.kvcache_fwd_out, operators._kvcache_fwd_out]
    register_flop_formula(of_caches, get_raw=True)(kvcache_fwd)
    register_flop_formula([operators.varlen_fwd, operators._varlen_fwd], get_raw=True)(varlen_fwd)
    register_flop_formula([operators.varlen_bwd, operators._varlen_bwd], get_raw=True)(varlen_bwd)


def fwd(q: Sequence[int], k: Sequence[int], v: Sequence[int], *args: Any, **kwargs: Any) -> int:
    """FLOPs of a forward from the shapes of q, k and v: a product over D and one over Dv."""
    return _product(q, k, q[3] + v[3])


def kvcache_fwd(q: Tensor, k_cache: Tensor, v_cache: Tensor, *given: Any, **kwargs: Any) -> int:
    """FLOPs of a forward over caches, as those of each sequence by `fwd`; of full ones where lengths cannot be read."""
    cache = split_cache(given)[0]
    offsets, lengths = cache.cu_seqlens_q, cache.cache_seqlens
    capacity = k_cache.shape[1 if cache.kv_layout == "NHD" else 2]
    if cache.page_table is not None:
        capacity *= cache.page_table.shape[1]
    columns = q.shape[-2] * (k_cache.shape[3] + v_cache.shape[3])
    total = q.shape[0] if offsets is not None else q.shape[0] * q.shape[1]
    if lengths is None or q.is_meta or is_fake(q):
        return int(2 * columns * total * capacity)
    rows = torch.full_like(lengths, q.shape[1]) if offsets is None else spans(offsets, None, total).length
    new = rows if cache.new_keys < 0 else cache.new_keys
    keys = (lengths.long() + new).clamp(0, capacity).where(lengths >= 0, 0)
    return int(2 * columns * (rows * keys).sum())


def bwd(dout: Sequence[int], q: Sequence[int], k: Sequence[int], v: Sequence[int], *args: Any, **kwargs: Any) -> int:
    """FLOPs of a backward: the scores once more, dq and dk over D, dout v^T and dv over Dv."""
    return _product(q, k, 3 * q[3] + 2 * v[3])


def varlen_fwd(q: Tensor, k: Tensor, v: Tensor, *lengths: Any, **kwargs: Any) -> int:
    """FLOPs of a packed forward, as those of each sequence by `fwd`."""
    return 2 * q.shape[1] * _pairs(q, k, *lengths[:6]) * (q.shape[2] + v.shape[2])


def masked_varlen_fwd(q: Tensor, k: Tensor, v: Tensor, *given: Any, **kwargs: Any) -> int:
    """The same with a mask."""
    return varlen_fwd(q, k, v, *split_mask(given)[1])


def fp8_varlen_fwd(q: Tensor, k: Tensor, v: Tensor, *given: Any, **kwargs: Any) -> int:
    """The same of float8 tensors."""
    return varlen_fwd(q, k, v, *split_fp8(given)[1])


def varlen_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Any, *lengths: Any, **kwargs: Any
) -> int:
    """FLOPs of a packed backward, as those of each sequence by `bwd`."""
    return 2 * q.shape[1] * _pairs(q, k, *lengths[:6]) * (3 * q.shape[2] + 2 * v.shape[2])


def masked_varlen_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Any, *given: Any, **kwargs: Any
) -> int:
    """The same with a mask."""
    return varlen_bwd(dout, q, k, v, out, lse, dlse, *split_mask(given)[1])


def _pairs(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> int:
    """The number of (row, key) pairs within the sequences."""
    if cu_seqlens_q.is_meta or is_fake(cu_seqlens_q):
        sequences = cu_seqlens_q.shape[0] - 1
        longest = ((x.shape[0], hint) for x, hint in ((q, max_seqlen_q), (k, max_seqlen_k)))
        rows, keys = (total // max(1, sequences) if hint is None else hint for total, hint in longest)
        return int(sequences * rows * keys)
    of_q, of_k = spans(cu_seqlens_q, seqused_q, q.shape[0]), spans(cu_seqlens_k, seqused_k, k.shape[0])
    return int((of_q.length * of_k.length).sum())


def _product(q: Sequence[int], k: Sequence[int], columns: int) -> int:
    batch, heads, len_q, _ = q
    return 2 * batch * heads * len_q * k[2] * columns

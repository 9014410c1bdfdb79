"""What torch.utils.flop_counter counts of the operators: the matrix products, as for scaled_dot_product_attention.

As there, the whole product counts whatever the mask: 4 * B * Hq * Nq * Nk * D forward, five products of that kind
instead of two backward. (`bench/` halves a causal one, which is what the kernels do.)
"""

from collections.abc import Sequence
from typing import Any

import torch


def register() -> None:
    """Give torch.utils.flop_counter the formulas."""
    from torch.utils.flop_counter import register_flop_formula

    operators = torch.ops.flash_cute
    register_flop_formula([operators.fwd, operators._fwd])(fwd)
    register_flop_formula([operators.bwd, operators._bwd])(bwd)


def fwd(q: Sequence[int], k: Sequence[int], *args: Any, **kwargs: Any) -> int:
    """FLOPs of a forward from the shapes of q and k: two products."""
    return 2 * _product(q, k)


def bwd(dout: Sequence[int], q: Sequence[int], k: Sequence[int], *args: Any, **kwargs: Any) -> int:
    """FLOPs of a backward: five products, one of which recomputes the scores."""
    return 5 * _product(q, k)


def _product(q: Sequence[int], k: Sequence[int]) -> int:
    batch, heads, len_q, head_dim = q
    return 2 * batch * heads * len_q * k[2] * head_dim

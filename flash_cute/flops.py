"""What torch.utils.flop_counter counts of the operators: the matrix products, as for scaled_dot_product_attention.

As there, the whole product counts whatever the mask: 2 * B * Hq * Nq * Nk * (D + Dv) forward; backward three products
over D and two over Dv. (`bench/` halves a causal one, which is what the kernels do.)
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


def fwd(q: Sequence[int], k: Sequence[int], v: Sequence[int], *args: Any, **kwargs: Any) -> int:
    """FLOPs of a forward from the shapes of q, k and v: a product over D and one over Dv."""
    return _product(q, k, q[3] + v[3])


def bwd(dout: Sequence[int], q: Sequence[int], k: Sequence[int], v: Sequence[int], *args: Any, **kwargs: Any) -> int:
    """FLOPs of a backward: the scores once more, dq and dk over D, dout v^T and dv over Dv."""
    return _product(q, k, 3 * q[3] + 2 * v[3])


def _product(q: Sequence[int], k: Sequence[int], columns: int) -> int:
    batch, heads, len_q, _ = q
    return 2 * batch * heads * len_q * k[2] * columns

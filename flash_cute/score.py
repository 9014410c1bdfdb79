"""The scores of a call, as the CPU path computes them: scale * q.k, softcapped, then biased by ALiBi.

Softcapping (Gemma 2, arXiv 2408.00118) makes a score `softcap * tanh(score / softcap)`; ALiBi (arXiv 2108.12409)
subtracts `slope * |p - j|` for a row at position p and a key j. Attention sinks (arXiv 2309.17453) are no scores here:
they are a share of each row's weights that goes to no key, known from the row's LSE.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ._call_options import CallOptions
from .band import Band
from .given_mask import GivenMask


class Score(NamedTuple):
    """How a call's scores come of its products q.k."""

    scale: float
    softcap: float | None
    slopes: Tensor | None  # (B or 1, Hkv, group, 1, 1), in the dtype of the computation
    offset: int  # row i stands at position i + offset
    mask: GivenMask | None = None

    @property
    def is_plain(self) -> bool:
        """Whether a score is scale * q.k and nothing else."""
        return self.softcap is None and self.slopes is None

    def of_products(self, products: Tensor, rows: slice, keys: slice, band: Band) -> Tensor:
        """The scores in the memory of `products` (B, Hkv, group, rows, keys), -inf where a row does not see the key."""
        if self.softcap is None:
            scores = products.mul_(self.scale)
        else:
            scores = products.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap)
        if self.slopes is not None:
            scores -= self.slopes * self._distances(rows, keys).to(scores.dtype)
        scores = band.hide(scores, rows, keys)
        return scores if self.mask is None else self.mask.hide(scores, rows, keys)

    def slope_of_cap(self, products: Tensor) -> Tensor | None:
        """The derivative of a softcapped score by `scale * q.k`; None where it is 1."""
        if self.softcap is None:
            return None
        return 1 - (products * (self.scale / self.softcap)).tanh_().square_()

    def _distances(self, rows: slice, keys: slice) -> Tensor:
        positions = torch.arange(rows.start, rows.stop) + self.offset
        return (torch.arange(keys.start, keys.stop) - positions.unsqueeze(-1)).abs()


def make_score(options: CallOptions, q: Tensor, k: Tensor, scale: float, mask: GivenMask | None = None) -> Score:
    """The scores of checked arguments. `scale`: the number, where the options may leave it to the head dim."""
    slopes = None
    if options.alibi_slopes is not None and q.shape[1] > 0:
        per_head = options.alibi_slopes.to(compute_dtype(q)).view(-1, q.shape[1])
        slopes = per_head.unflatten(1, (k.shape[1], -1))[..., None, None]
    offset = 0 if options.causal == "top_left" else k.shape[2] - q.shape[2]
    return Score(scale, options.softcap, slopes, offset, mask)


def compute_dtype(q: Tensor) -> torch.dtype:
    """What a call on the CPU is computed in."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


# Below this share of the keys their weights are 0 to float32 in any case; the gradient of the LSE is divided by it.
LEAST_SHARE = math.exp(-69)


def share_of_keys(lse: Tensor, sinks: Tensor) -> Tensor:
    """(B, Hq, rows): the part of each row's weights that its keys have, the rest being the sink's."""
    return torch.sigmoid(lse - sinks.to(lse.dtype).unsqueeze(-1))


def gradient_of_sinks(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """(Hq,): minus the sum over batches and rows of the sink's share times dout . out."""
    share = torch.sigmoid(sinks.to(lse.dtype).unsqueeze(-1) - lse)
    flow = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1) * share
    return flow.masked_fill_(lse == -torch.inf, 0).sum((0, 2)).neg_().to(sinks.dtype)

"""flash_attn.layers.rotary and flash_attn.ops.triton.rotary: rotary position embeddings (RoFormer, arXiv 2104.09864).

In plain PyTorch, so that they run wherever PyTorch does; flash-attn's are one kernel each and faster. They compute in
float32 (float64 where that is the dtype) and round once.

What all have in common: x is `(B, N, H, D)`, or with `cu_seqlens` `(batch + 1,)` int32 `(T, H, D)`; cos and sin are
`(positions, R / 2)`, and the first R of D dims are rotated: the pair `(x[i], x[i + R / 2])`, `interleaved` the pair
`(x[2 * i], x[2 * i + 1])`, by the angle of its position. A row's position is its place in its sequence, plus
`seqlen_offsets`, an int or `(batch,)`. A row without a place in the table, or in no sequence, stays as it is.
`inplace` writes to x. Gradients flow to x, and to cos and sin where they require one.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

__all__ = [
    "RotaryEmbedding",
    "apply_rotary",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
    "rotate_half",
]


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """x with its first R dims rotated; see the module.

    Args:
        max_seqlen: the longest sequence, at most the number of positions in the table.
        conjugate: rotate back.

    Returns:
        a tensor like x, or x where `inplace`.

    Raises:
        ValueError: shapes that do not fit, or positions, where they are known without waiting for the GPU, that the
            table does not have.

    Example:
        >>> x = torch.randn(2, 6, 4, 32)
        >>> angles = torch.outer(torch.arange(8.0), 10000.0 ** -(torch.arange(16) / 16))
        >>> y = apply_rotary(x, angles.cos(), angles.sin(), seqlen_offsets=2)
        >>> back = apply_rotary(y, angles.cos(), angles.sin(), seqlen_offsets=2, conjugate=True)
        >>> torch.allclose(back, x, atol=1e-5)
        True
    """
    if x.dim() != (4 if cu_seqlens is None else 3):
        expected = "(B, N, H, D)" if cu_seqlens is None else "(T, H, D) beside cu_seqlens"
        raise ValueError(f"flash_cute: x: expected {expected}, got {tuple(x.shape)}")
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(
            f"flash_cute: cos, sin: expected (positions, R / 2) with R at most D = {x.shape[-1]}, got "
            f"{tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    longest = x.shape[1] if cu_seqlens is None else max_seqlen or 0
    first = seqlen_offsets if isinstance(seqlen_offsets, int) else 0
    if first < 0 or first + longest > cos.shape[0]:
        raise ValueError(
            f"flash_cute: seqlen_offsets: expected positions within the {cos.shape[0]} of cos and sin, got "
            f"{first} to {first + longest - 1}"
        )
    cos, sin = _of_rows(x, cos, sin, seqlen_offsets, cu_seqlens)
    if conjugate:
        sin = -sin
    if inplace:

        def write(x: Tensor) -> None:
            rows = x[..., : 2 * cos.shape[-1]]
            # The gradients of cos and sin are computed from what x was.
            kept = rows.clone() if cos.requires_grad or sin.requires_grad else rows
            rows.copy_(_rotate(kept, cos, sin, interleaved))

        return _in_place(x, write)
    rotated = _rotate(x[..., : 2 * cos.shape[-1]], cos, sin, interleaved)
    return rotated if rotated.shape[-1] == x.shape[-1] else torch.cat((rotated, x[..., rotated.shape[-1] :]), -1)


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """`apply_rotary`, whose arguments stand in another order here."""
    return apply_rotary(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved, inplace)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """x `(B, N, H, D)` rotated by cos and sin `(N, R / 2)` or `(B, N, R / 2)`, in the dtype that PyTorch promotes to.

    Every row has its place in the table.
    """
    rotary_dim = 2 * cos.shape[-1]
    cos, sin = (torch.cat((c, c), -1) if not interleaved else c.repeat_interleave(2, -1) for c in (cos, sin))
    rows = x[..., :rotary_dim]
    rotated = rows * cos.unsqueeze(-2) + rotate_half(rows, interleaved) * sin.unsqueeze(-2)
    return torch.cat((rotated, x[..., rotary_dim:]), -1)


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """Each pair `(a, b)` of the last dim, its halves or `interleaved` its neighbours, as `(-b, a)`."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotates q and k in place; returns qkv.

    Args:
        qkv: `(B, N, 3, H, D)`, or with `num_heads_q` `(B, N, Hq + 2 * Hkv, D)`: q's heads, k's, then v's.
        cos_k, sin_k: k's table; None: q's.

    Raises:
        ValueError: as `apply_rotary`; also for another shape of qkv.
    """
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        parts: tuple[Any, Any] = (0, 1)
    elif qkv.dim() == 4 and num_heads_q and 0 < num_heads_q < qkv.shape[2] and not (qkv.shape[2] - num_heads_q) % 2:
        heads = (qkv.shape[2] - num_heads_q) // 2
        parts = (slice(num_heads_q), slice(num_heads_q, num_heads_q + heads))
    else:
        raise ValueError(
            "flash_cute: qkv: expected (B, N, 3, H, D), or (B, N, Hq + 2 * Hkv, D) beside num_heads_q, got "
            f"{tuple(qkv.shape)} and {num_heads_q}"
        )
    tables = ((cos, sin), (cos if cos_k is None else cos_k, sin if sin_k is None else sin_k))

    def write(qkv: Tensor) -> None:
        for part, table in zip(parts, tables, strict=True):
            apply_rotary_emb(qkv[:, :, part], *table, interleaved, True, seqlen_offsets)

    return _in_place(qkv, write)


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotates k of kv `(B, N, 2, H, D)` in place; returns kv."""
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ValueError(f"flash_cute: kv: expected (B, N, 2, H, D), got {tuple(kv.shape)}")
    return _in_place(kv, lambda kv: apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets))


class RotaryEmbedding(torch.nn.Module):
    """Rotates q and k in place, by a table that grows with the longest sequence.

    Args:
        dim: R, how many dims of a head are rotated; base: the longest wavelength is 2 pi times nearly that.
        interleaved: which dims are a pair, see the module.
        scale_base: None, or XPos's (arXiv 2212.10554): q is multiplied and k divided by powers of the position over it.
        device: of the table.

    Example:
        >>> rotary = RotaryEmbedding(32)
        >>> rotary(torch.randn(2, 16, 3, 4, 64)).shape
        torch.Size([2, 16, 3, 4, 64])
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.base = float(base)
        self.interleaved = interleaved
        self.scale_base = scale_base
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        scale = None
        if scale_base is not None:
            scale = (torch.arange(0, dim, 2, device=device, dtype=torch.float32) + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotates in place; returns qkv, or `(q, kv)`.

        Args:
            qkv: as `apply_rotary_emb_qkv_`; or, beside kv, q `(B, N, H, D)`.
            kv: `(B, N, 2, H, D)`.
            seqlen_offset: an int or `(B,)`, what is added to the positions.
            max_seqlen: how many positions the table must have; None: N + seqlen_offset, beside a tensor what it has.

        Raises:
            ValueError: as `apply_rotary`; also for a tensor seqlen_offset while there is no table.
        """
        if max_seqlen is None and isinstance(seqlen_offset, int):
            max_seqlen = qkv.shape[1] + seqlen_offset
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, device=qkv.device, dtype=qkv.dtype)
        cos, sin, cos_k, sin_k = self._cos_cached, self._sin_cached, self._cos_k_cached, self._sin_k_cached
        if cos is None or sin is None:
            raise ValueError("flash_cute: max_seqlen: expected an int beside a tensor seqlen_offset, got None")
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        cos, sin = (cos, sin) if cos_k is None or sin_k is None else (cos_k, sin_k)
        return q, apply_rotary_emb_kv_(kv, cos, sin, self.interleaved, seqlen_offset)

    def _compute_inv_freq(self, device: Any = None) -> Tensor:
        return self.base ** -(torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim)

    def _update_cos_sin_cache(
        self, seqlen: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Makes the table again where it is too short, on another device, of another dtype or of inference mode."""
        kept = self._cos_cached
        if (
            kept is not None
            and seqlen <= self._seq_len_cached
            and (kept.device, kept.dtype) == (device, dtype)
            and not (self.training and kept.is_inference())
        ):
            return
        self._seq_len_cached = seqlen
        # float32, whatever the model was cast to: positions above 256 are no bfloat16 numbers.
        inv_freq = self.inv_freq if self.inv_freq.dtype == torch.float32 else self._compute_inv_freq(device)
        positions = torch.arange(seqlen, device=device, dtype=torch.float32)
        angles = torch.outer(positions, inv_freq.to(device))
        cos, sin = angles.cos(), angles.sin()
        if self.scale is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        assert self.scale_base is not None
        power = self.scale.to(device, torch.float32) ** ((positions - seqlen // 2) / self.scale_base)[:, None]
        self._cos_cached, self._sin_cached = (cos * power).to(dtype), (sin * power).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / power).to(dtype), (sin / power).to(dtype)


class _Alias(torch.autograd.Function):
    """The same memory as another tensor, and its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def _in_place(x: Tensor, write: Callable[[Tensor], object]) -> Tensor:
    """x, which `write` has written to; of a leaf that requires grad another tensor with what was written, and with its
    gradient: PyTorch lets nobody write to such a leaf itself, flash-attn does."""
    compiling = is_dynamo_compiling()  # views have no base there
    # Whether it is a leaf is asked of no other tensor: PyTorch refuses to tell of some views made without gradients.
    recorded = torch.is_grad_enabled() and x.requires_grad
    if not (recorded and (x.is_leaf or not (compiling or x._base is None or not x._base.is_leaf))):
        write(x)
        return x
    out: Tensor = x.clone() if compiling else _Alias.apply(x)
    write(out)
    if compiling:  # a graph takes no alias
        with torch.no_grad():
            x.copy_(out)
    return out


def _of_rows(
    x: Tensor, cos: Tensor, sin: Tensor, seqlen_offsets: int | Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """cos and sin of each row, which x's rows are multiplied with: one dim of 1 in place of the heads."""
    rows = torch.arange(x.shape[-3], device=x.device)
    if cu_seqlens is None:
        if isinstance(seqlen_offsets, int):
            positions = slice(seqlen_offsets, seqlen_offsets + x.shape[1])
            return cos[positions, None], sin[positions, None]
        positions = rows + seqlen_offsets[:, None]
        known = (positions >= 0) & (positions < cos.shape[0])
    else:
        batch = cu_seqlens.shape[0] - 1
        sequence = torch.searchsorted(cu_seqlens, rows.to(cu_seqlens.dtype), right=True) - 1
        known = (sequence >= 0) & (sequence < batch)
        sequence = sequence.clamp(0, max(batch - 1, 0))
        positions = rows - cu_seqlens[sequence]
        positions = positions + (seqlen_offsets if isinstance(seqlen_offsets, int) else seqlen_offsets[sequence])
        known = known & (positions >= 0) & (positions < cos.shape[0])
    positions = positions.clamp(0, max(cos.shape[0] - 1, 0))
    known = known[..., None]
    cos, sin = torch.where(known, cos[positions], 1), torch.where(known, sin[positions], 0)
    return cos.unsqueeze(-2), sin.unsqueeze(-2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    first, second, cos, sin = first.to(wide), second.to(wide), cos.to(wide), sin.to(wide)
    pair = (first * cos - second * sin, first * sin + second * cos)
    return (torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)).to(x.dtype)

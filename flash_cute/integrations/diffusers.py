"""flash_cute as an attention backend of Hugging Face's diffusers.

    import flash_cute.integrations.diffusers

    flash_cute.integrations.diffusers.register()
    pipe.transformer.set_attention_backend("flash_cute")

or, for a while, `with diffusers.attention_backend("flash_cute"): ...`. It serves the models that call diffusers'
dispatcher (Flux, Wan, Qwen-Image, ...). Those whose processors call `scaled_dot_product_attention` themselves (UNets,
PixArt, ...) take no backend: `flash_cute.integrations.sdpa.enable()` serves them. Of any backend diffusers lets them
be, without a word; `register()` makes their `set_attention_backend("flash_cute")` raise.

diffusers has no registration for others: its backends are the members of an enumeration and the entries of a private
registry. `register()` adds one to each. The environment's DIFFUSERS_ATTN_BACKEND is read as diffusers is imported, and
so cannot name it.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

import flash_cute

from ._flash_options import UNLIMITED, dense
from ._sdpa_mask import read_mask

__all__ = ["attention", "register"]

NAME = "flash_cute"


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
    **unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """diffusers' attention function: what its dispatcher calls.

    Args:
        query: `(B, N, Hq, D)`; key: `(B, Nk, Hkv, D)`; value: `(B, Nk, Hkv, Dv)`; read in place, dtypes as
            `flash_cute.attention`.
        attn_mask: True, or 0 where a row sees a key, else False, or -inf: `(B, Nk)`, or as
            `scaled_dot_product_attention` has it, `(..., N or 1, Nk or 1)`. One for all heads, or for each of key's.
            A row that sees no key has out 0. Whether a float mask is one of 0 and -inf is looked at, which waits for
            the device.
        dropout_p: 0.
        is_causal: whether row i sees the keys j <= i only (aligned to the top left, as in diffusers' native
            backend).
        scale: what multiplies q.k; None: `1 / sqrt(D)`.
        enable_gqa: whether Hkv may be a divisor of Hq.
        return_lse: return the logsumexp too.
        _parallel_config: None; diffusers' own backends serve context parallelism.
        unknown: what else a model gives its backend; not served.

    Returns:
        out `(B, N, Hq, Dv)`, or `(out, lse)`: lse `(B, Hq, N)` float32, natural log. Differentiable.

    Raises:
        ValueError: a bias, a mask beside `is_causal`, dropout, context parallelism, arguments that are not known; and
            as `flash_cute.attention`.

    Example:
        >>> query = torch.randn(2, 16, 4, 32)
        >>> attention(query, query, query).shape
        torch.Size([2, 16, 4, 32])
    """
    if dropout_p != 0:
        raise ValueError(f"flash_cute: dropout_p: expected 0, since flash_cute does not have it, got {dropout_p}")
    if _parallel_config is not None:
        raise ValueError(
            "flash_cute: _parallel_config: expected None, since diffusers' own backends serve context parallelism, got "
            "one"
        )
    for name in unknown:
        raise ValueError(f"flash_cute: {name}: expected no such argument, since flash_cute does not know it")
    if not query.dim() == key.dim() == value.dim() == 4:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise ValueError(f"flash_cute: query, key, value: expected 4 dims each, (B, N, H, D), got {shapes}")
    if query.shape[2] != key.shape[2] and not enable_gqa:
        raise ValueError(
            f"flash_cute: enable_gqa: expected True beside {query.shape[2]} heads of query and {key.shape[2]} of key, "
            "got False"
        )
    if attn_mask is not None:
        return _masked(query, key, value, attn_mask, is_causal, scale, return_lse)
    out: Tensor
    lse: Tensor | None
    if not is_causal or query.shape[1] == key.shape[1]:  # a mask's alignment does not matter: the layers' operator
        score = (scale, bool(is_causal), UNLIMITED, 0.0, None, False)
        out, lse = dense(query, key, value, score, return_lse)
    else:
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        out, lse = flash_cute.fwd(q, k, v, "top_left", scale=scale)
        out = out.transpose(1, 2)
    return (out, lse) if return_lse and lse is not None else out


def _masked(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, is_causal: bool, scale: float | None, return_lse: bool
) -> Any:
    if is_causal:
        raise ValueError("flash_cute: is_causal: expected False beside attn_mask, got True")
    batch, rows, keys = query.shape[0], query.shape[1], key.shape[1]
    if isinstance(attn_mask, Tensor) and attn_mask.shape == (batch, keys):  # as diffusers' native backend reads it
        attn_mask = attn_mask[:, None, None]
    heads = (query.shape[2], key.shape[2])
    mask = read_mask(attn_mask, query, (batch, heads[0]), (batch,), heads, (rows, keys))
    if isinstance(mask, str):
        raise ValueError(f"flash_cute: {mask}")
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    out, lse = flash_cute.attention(q, k, v, scale=scale, mask=mask, return_lse=True)
    return (out.transpose(1, 2), lse) if return_lse else out.transpose(1, 2)


class _AnyName(set[str]):
    """The arguments that `attention` takes, as diffusers' dispatcher asks: it drops what is not among them, without a
    word, where we raise."""

    def __contains__(self, name: object) -> bool:
        return True


def _refusing(set_backend: Callable[[Any, str], None]) -> Callable[[Any, str], None]:
    """A model's `set_attention_backend`, which raises where no layer would take ours."""

    @functools.wraps(set_backend)
    def setting(self: Any, backend: str) -> None:
        if backend.lower() == NAME:
            layers = [x for x in self.modules() if getattr(x, "processor", None) is not None]
            if layers and not any(_takes_backend(x.processor) for x in layers):
                raise ValueError(
                    "flash_cute: backend: expected a model whose layers call diffusers' dispatcher, got "
                    f"{type(self).__name__}, whose {type(layers[0].processor).__name__} does not; "
                    "flash_cute.integrations.sdpa.enable() serves layers that call scaled_dot_product_attention"
                )
        set_backend(self, backend)

    setting.knows_flash_cute = True  # type: ignore[attr-defined]
    return setting


def _takes_backend(processor: Any) -> bool:
    """Whether a layer's processor has a place for a backend, or calls the dispatcher, which takes the process's."""
    module = sys.modules.get(type(processor).__module__)
    return hasattr(processor, "_attention_backend") or hasattr(module, "dispatch_attention_fn")


def register() -> None:
    """Make the backend "flash_cute" known to diffusers: to `attention_backend` and `set_attention_backend`.

    To be called once, before one of them; again does no harm. `set_attention_backend("flash_cute")` raises a ValueError
    from then on where none of a model's layers takes a backend.

    Raises:
        ImportError: diffusers is not installed, or its registry is not as this version of flash_cute knows it.

    Example:
        >>> import diffusers  # doctest: +SKIP
        >>> register()  # doctest: +SKIP
        >>> with diffusers.attention_backend("flash_cute"):  # doctest: +SKIP
        ...     image = pipe(prompt).images[0]
    """
    import diffusers

    try:
        from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

        tables = (_AttentionBackendRegistry._backends, _AttentionBackendRegistry._constraints)
        names = _AttentionBackendRegistry._supported_arg_names
        known, by_value = AttentionBackendName._member_map_, AttentionBackendName._value2member_map_
        set_backend = diffusers.ModelMixin.set_attention_backend
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"flash_cute: diffusers: version {diffusers.__version__} keeps its attention backends in a way that this "
            "version of flash_cute does not know"
        ) from error
    if NAME not in by_value:
        member = str.__new__(AttentionBackendName, NAME)
        member._name_, member._value_, member._sort_order_ = NAME.upper(), NAME, len(known)
        setattr(AttentionBackendName, NAME.upper(), member)
        known[NAME.upper()] = by_value[NAME] = member
        AttentionBackendName._member_names_.append(NAME.upper())
    backend = AttentionBackendName(NAME)
    for table, entry in zip((*tables, names), (attention, [], _AnyName()), strict=True):
        table[backend] = entry
    if not hasattr(set_backend, "knows_flash_cute"):
        diffusers.ModelMixin.set_attention_backend = _refusing(set_backend)

"""flash_cute as an attention implementation of Hugging Face's Transformers.

    import flash_cute.integrations.transformers
    from transformers import AutoModelForCausalLM

    flash_cute.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="flash_cute", dtype="bfloat16")

`attn_implementation="flash_cute_fp8"` does the same in float8, for inference: each layer quantises its q, k and v first
(docs/float8.md). With "flash_cute_row_invariant" the bits of a token are the same in training, prefill and decoding
(docs/row_invariance.md).

Transformers calls two functions by that name: a mask function, once per forward and kind of layer, and the attention
function, in each layer. The mask function decides what the layers have to do and passes it on in place of a mask:

* None: every row sees all keys, or those up to its own if the layer says that it is causal. The layers call
  `flash_cute.attention`.
* A band alone, where there is a window, or where it is not sure that layers know what their mask says.
* Sequences, a small int32 tensor of offsets: a padded batch, a batch that a StaticCache has room for, or sequences
  packed into one row. The layers call `flash_cute.varlen_attention`, on views of what they have, without unpadding; of
  tokens that have padding between them on copies.
* Intervals of rows for each key, or a matrix of booleans, of a mask that is none of these. The layers call
  `flash_cute.attention` with a `flash_cute.Mask`.

Such a tensor says what is causal and which window there is, whatever the layer says: that is what "eager" computes.
The rest (softcap, sinks, scale) is passed to the attention function by the model. What cannot be served raises a
ValueError, where the model is loaded or in the call; docs/adopting/transformers.md has the table.

`attn_implementation="flash_cute_2"` is the same under a name by which continuous batching (`generate_batch`) gives the
pages of its cache to the attention function, which appends to them and reads them in place: see _transformers_paged.py.
So is "flash_cute_2_row_invariant".
"""

import functools
from typing import Any

import torch
from torch import Tensor

import flash_cute

from .. import _ops
from .._layers import is_plain
from .._refusals import check_number, is_refusal
from ._transformers_band import Band
from ._transformers_given import of_matrix, of_offsets, of_padding, of_positions, refuse_unsaid_window
from ._transformers_keywords import HARMLESS, refuse, refuse_other_causality
from ._transformers_layers import OPTIONS
from ._transformers_lengths import Known, Lengths, Order, by_heads_lengths, kept, kept_by_heads, read
from ._transformers_load import PAGED, PAGED_NAMES, has_paged_names, teach
from ._transformers_mask import mask
from ._transformers_paged import Score, decode, paged_attention
from ._transformers_sinks import row_with_sinks

__all__ = ["attention", "mask", "register"]


def register() -> None:
    """Make `attn_implementation="flash_cute"` and the other names known to Transformers 5.4 or newer.

    The others are "flash_cute_2", "flash_cute_fp8", "flash_cute_row_invariant" and "flash_cute_2_row_invariant".

    To be called once, before a model is loaded or `model.set_attn_implementation("flash_cute")`; again does no harm.

    Raises:
        ImportError: Transformers is not installed, too old, or lacks what this needs.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM  # doctest: +SKIP
        >>> register()  # doctest: +SKIP
        >>> model = LlamaForCausalLM._from_config(LlamaConfig(), attn_implementation="flash_cute")  # doctest: +SKIP
    """
    import transformers

    teach(transformers)
    for name, options in OPTIONS.items():
        function = functools.partial(attention, **options) if options else attention
        transformers.AttentionInterface.register(name, function)
        transformers.AttentionMaskInterface.register(name, mask)
    if has_paged_names():
        for name in PAGED_NAMES:
            paged = functools.partial(paged_attention, **OPTIONS[name]) if OPTIONS[name] else paged_attention
            transformers.AttentionInterface.register(f"{PAGED}{name}", paged)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    *,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: Any = None,
    max_length_k: Any = None,
    deterministic: bool | None = None,
    quantize: str | None = None,
    row_invariant: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function: what a model's layer calls.

    Args:
        module: the layer; its `is_causal` counts where the argument is None.
        query: `(B, Hq, Nq, D)`; key: `(B, Hkv, Nk, D)`; value: `(B, Hkv, Nk, Dv)`; dtypes as `flash_cute.attention`.
        attention_mask: what `mask` returned; or a padding mask `(B, up to Nk)`, nonzero where there is a token, whose
            last Nq columns are the queries'. Keys behind its last column are not seen.
        dropout: 0.
        scaling, softcap: as `scale` and `softcap` of `flash_cute.attention`.
        sliding_window: how many keys a row sees, its own included; not causal: that many on each side. What `mask`
            returned has a window of its own, or none, and counts instead; so it is with `is_causal`.
        s_aux: sinks, `(Hq,)`.
        position_ids: `(1, Nq)`; where they begin again, so does a packed sequence.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: offsets and longest of sequences packed into the rows
            of the batch.
        deterministic: whether the backward must give the same bits in every run, as `flash_cute.attention` has it.
        quantize: `"fp8"`, as `flash_cute.attention` has it: what "flash_cute_fp8" passes. D and Dv are multiples of 16,
            at most 256, and a gradient raises a NotImplementedError.
        row_invariant: as `flash_cute.attention` has it: what "flash_cute_row_invariant" passes.
        kwargs: what else a model passes on. None, False, or by a name of which it is known that nothing follows; or
            `block_table`, `k_cache` and `v_cache`, of continuous batching, whose tokens are appended to the cache.

    Returns:
        `(B, Nq, Hq, Dv)`, and None for the weights. Rows of padding are 0, but for the last row where no gradients are
        needed (`generate` goes on from it) and for those that may be queries of cross-attention.

    Raises:
        ValueError: the call cannot be served: a custom 4-D mask that is not boolean, dropout, weights, a bias, sparse
            keys, a keyword that is not known; and whatever `flash_cute.attention` refuses.

    Example:
        >>> q, k, v = torch.randn(1, 8, 128, 64), torch.randn(1, 2, 128, 64), torch.randn(1, 2, 128, 64)
        >>> out, _ = attention(torch.nn.Module(), q, k, v, None, sliding_window=32, is_causal=True)
        >>> out.shape
        torch.Size([1, 128, 8, 64])
    """
    if dropout:
        raise ValueError(_of_dropout(module, dropout))
    for name in kwargs:
        if name not in HARMLESS and kwargs[name] is not None and kwargs[name] is not False:
            if not isinstance(kwargs.get("block_table"), Tensor):
                refuse(kwargs)
            if quantize is not None:
                raise ValueError(f"flash_cute: quantize: expected None over the pages of a cache, got {quantize!r}")
            score = Score(scaling, sliding_window, softcap, s_aux, row_invariant)
            return decode(module, query, key, value, attention_mask, cu_seq_lens_k, score, **kwargs), None
    if cu_seq_lens_k is not None and cu_seq_lens_q is None:
        raise ValueError("flash_cute: cu_seq_lens_q: expected offsets beside those of cu_seq_lens_k, got None")
    given_causal = is_causal
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    plain = quantize is None and not row_invariant and is_plain(query, key, value)
    known: Known | None = None
    lengths: Lengths | None = None
    by_heads: Lengths | None = None
    options: dict[str, Any]
    window: Band | None = None
    if attention_mask is not None:
        # In a decoding step over a cache, what a layer before this one has left with the mask is all that is needed: k
        # has sizes that were compared with the mask's then, and that q has one row for each is the operator's to check.
        if plain and s_aux is None and cu_seq_lens_q is None:
            one_row = getattr(attention_mask, "_flash_cute_one_row", None)
            if one_row is not None:
                used_q, is_causal, sliding_window = one_row
                by_heads = kept_by_heads(used_q, key, value)
        if by_heads is None:
            known = _of_mask(module, query, key, is_causal, sliding_window, attention_mask)
            lengths = known.lengths
            if known.options is not None:  # a mask says all: "eager" does not ask the layer
                is_causal, sliding_window, window, simple = known.options
                plain = plain and simple
                if given_causal is not None and given_causal != is_causal:
                    refuse_other_causality(module, given_causal, query.shape[2])
            if known.order is not None or known.mask is not None:
                plain = False
            if cu_seq_lens_q is not None:
                if known.mask is not None or (lengths is not None and lengths[2] is not None):
                    raise ValueError("flash_cute: attention_mask: expected no padding beside cu_seq_lens_q, got some")
                lengths = of_offsets(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
            elif lengths is None and position_ids is not None and known.mask is None:  # no padding after all
                lengths = of_positions(module, query, key, position_ids)
    elif cu_seq_lens_q is not None:
        if sliding_window is None:
            refuse_unsaid_window(module, max_length_k)
        lengths = of_offsets(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    elif position_ids is not None:
        lengths = of_positions(module, query, key, position_ids)
    are_numbers = scaling is not True and softcap is not True and sliding_window is not True  # an operator takes True
    if plain and are_numbers and (s_aux is None or not torch.is_grad_enabled()):
        try:  # every argument is written out: to pass a tuple on by `*` costs 0.2 us
            operator = _ops.heads_varlen_fwd
            if by_heads is None:
                if lengths is None:
                    return _ops.heads_fwd(query, key, value, is_causal, sliding_window, softcap, s_aux, scaling), None
                cu_q, cu_k, used_q, used_k, longest_q, longest_k = lengths
                if longest_q == 1:  # one row of q may be served with a sequence per KV head
                    by_heads = by_heads_lengths(lengths, key, value)
                    if by_heads is not None and s_aux is not None:
                        options = {"window": None if sliding_window is None else (sliding_window - 1, 0)}
                        options |= {"softcap": softcap, "scale": scaling}
                        return row_with_sinks(query, key, value, by_heads, is_causal, s_aux, options), None
            if by_heads is not None:
                operator = _ops.cache_varlen_fwd
                cu_q, cu_k, used_q, used_k, longest_q, longest_k = by_heads
            out = operator(
                query,
                key,
                value,
                cu_q,
                cu_k,
                used_q,
                used_k,
                longest_q,
                longest_k,
                is_causal,
                sliding_window,
                softcap,
                s_aux,
                scaling,
            )
        except Exception as error:
            if not _says_what_is_not_taken(error):
                raise
            # It is called again below, where errors are worded.
        else:
            if known is None or known.last_row is None:
                return out, None
            return _with_last_row(out, query, key, value, known, softcap, s_aux, scaling), None
    if by_heads is not None and lengths is None:  # the general path counts the rows of all heads together
        assert attention_mask is not None
        known = _of_mask(module, query, key, is_causal, sliding_window, attention_mask)
        lengths = known.lengths
    options = {"scale": scaling, "softcap": softcap, "sinks": s_aux}
    check_number("sliding_window", sliding_window)
    if window is None and sliding_window is not None:
        window = (sliding_window - 1, 0 if is_causal else sliding_window - 1)
    options["window"] = window
    # False is a model's default, and must not override torch.use_deterministic_algorithms.
    options["deterministic"] = deterministic or None
    options["quantize"] = quantize
    options["row_invariant"] = row_invariant
    if known is not None and known.mask is not None:
        options["mask"] = known.mask
    out = _general(query, key, value, is_causal, lengths, None if known is None else known.order, options)
    needs_gradients = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if known is not None and known.last_row is not None and not needs_gradients:
        out = _with_last_row(out, query, key, value, known, softcap, s_aux, scaling, quantize, row_invariant)
    return out, None


def _says_what_is_not_taken(error: Exception) -> bool:
    """Whether an operator refused its arguments, before anything was launched; a device's error is none of these."""
    if isinstance(error, ValueError | TypeError | NotImplementedError) or is_refusal(error):
        return True
    return isinstance(error, RuntimeError) and str(error).startswith("flash_cute::")  # of an argument's type


def _of_dropout(module: torch.nn.Module, dropout: float) -> str:
    """The error about dropout, with the fields of the model's configuration that it comes of."""
    config = getattr(getattr(module, "config", None), "__dict__", {})
    fields = [f"config.{name}" for name, value in config.items() if "drop" in name and value == dropout]
    where = " or ".join([x for x in fields if "att" in x] or fields) or "the model's attention dropout"
    return f"flash_cute: dropout: expected 0 in training (set {where} to 0), got {dropout}"


def _with_last_row(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    known: Known,
    softcap: float | None,
    sinks: Tensor | None,
    scale: float | None,
    quantize: str | None = None,
    row_invariant: bool = False,
) -> Tensor:
    """`out` with the last row of batch items whose last row is padding, which in `out` is 0."""
    order = None if known.order is None else Order(None, known.order.keys, None)
    options = {"scale": scale, "softcap": softcap, "sinks": sinks, "quantize": quantize, "row_invariant": row_invariant}
    last = _general(query[:, :, -1:], key, value, False, known.last_row, order, options)
    return torch.cat((out[:, :-1], out[:, -1:] + last), 1)


def _general(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    lengths: Lengths | None,
    order: Order | None,
    options: dict[str, Any],
) -> Tensor:
    """The attention by the public functions, `(B, Nq, Hq, Dv)`."""
    out: Any
    if lengths is None:
        out = flash_cute.attention(query, key, value, is_causal, **options)
        result: Tensor = out.transpose(1, 2)
        return result
    cu_q, cu_k, used_q, used_k, longest_q, longest_k = lengths
    options |= {"seqused_q": used_q, "seqused_k": used_k, "max_seqlen_q": longest_q, "max_seqlen_k": longest_k}
    # (B, H, N, D) -> (B * N, H, D): a view of projections, a copy of what a cache holds.
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if order is not None:
        k, v = (x.index_select(0, order.keys) for x in (k, v))
        q = q if order.queries is None else q.index_select(0, order.queries)
    out = flash_cute.varlen_attention(q, k, v, cu_q, cu_k, is_causal, **options)
    if order is not None and order.back is not None:
        out = out.index_select(0, order.back)
    result = out.unflatten(0, (query.shape[0], query.shape[2]))
    return result


def _of_mask(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    is_causal: bool,
    sliding_window: int | None,
    attention_mask: Tensor,
) -> Known:
    """What a mask says that the mask function returned, or a padding mask that a model gives its layers itself."""
    batch_size, _, q_length, _ = query.shape
    sizes = (batch_size, q_length, key.shape[2])
    found = kept(attention_mask, *sizes)
    if found is not None:
        return found
    if attention_mask.dim() == 4 and attention_mask.dtype == torch.bool:
        return of_matrix(module, attention_mask, sizes, key.shape[1])
    if attention_mask.dim() != 2:
        return read(attention_mask, *sizes)
    return of_padding(module, attention_mask, sizes, is_causal, sliding_window)

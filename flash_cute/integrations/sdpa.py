"""PyTorch's attention functions, served by flash_cute: as functions to call, or behind PyTorch's own by `enable()`.

    from flash_cute.integrations.sdpa import sdpa  # in place of torch.nn.functional.scaled_dot_product_attention

or, for code that calls PyTorch's own, and is not to be changed,

    from flash_cute.integrations import sdpa
    sdpa.enable()          # or: with sdpa.enable(): ...
    ...
    print(sdpa.report())   # how many calls flash_cute served, how many it passed on, and why

A call that flash_cute cannot serve (an `attn_mask` that is a bias, dropout, float32 on a GPU, ...) goes on
to what PyTorch does, and is counted with its reason; with `enable(strict=True)` it raises instead. What no
implementation can serve (key and value of different lengths, ...) raises always. The method is that of
`flash_cute.attention`: FlashAttention-2 (arXiv 2307.08691).
"""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _left, _ops
from .._layers import is_plain, is_unserved
from .._refusals import check_flag
from .._torch import functorch_is_active, jit_is_tracing, without_modes
from . import _aten, _fast_path
from ._sdpa_call import attempt, check_quantize, graph_can_serve, prepare, serve
from ._sdpa_kernel import ENTRY, make_kernel
from ._tally import Report, tally, this_thread
from ._varlen_attn import varlen_attn

__all__ = ["disable", "enable", "report", "sdpa", "varlen_attn"]

NAME = "flash_cute"  # in PyTorch's registry of flash attention implementations
_FLASH = 1  # torch.nn.attention.SDPBackend.FLASH_ATTENTION, as PyTorch's order of priority has it
_count_sdpa = tally.counter("flash_cute.integrations.sdpa.sdpa")


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    quantize: str | None = None,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` by flash_cute, where it can serve the call, else by PyTorch.

    Args:
        query: `(..., Hq, L, E)`, as PyTorch takes it: any number of leading dims, which are broadcast.
        key: `(..., H, S, E)`, same dtype and device.
        value: `(..., H, S, Ev)`, same dtype and device.
        attn_mask: None, or a boolean mask of any shape that broadcasts to `(..., Hq, L, S)`; where H is less than Hq,
            one mask for the query heads of each key head. It is served where a kernel of `flash_cute.Mask` is, not in
            compiled graphs; for a mask with one row for all of query's, as `(B, 1, 1, S)` or so expanded, no matrix is
            made. Of these nothing is waited for. A float mask of 0 and -inf, and a mask by query head that is the same
            for those of a key head, are served too, after a look at their values, which waits for the device; in a
            CUDA graph's capture there is none. Else (a bias, one that requires grad) PyTorch serves the call. A row
            that sees no key has out 0.
        dropout_p: 0, else PyTorch serves the call.
        is_causal: whether row i sees the keys j <= i only (aligned to the top left).
        scale: what multiplies q.k; None: `1 / sqrt(E)`.
        enable_gqa: whether H may be a divisor of Hq: each key head then serves Hq / H query heads, without a copy.
        quantize: `"fp8"`: where flash_cute serves the call, query, key and value are quantised to float8 first, as
            `flash_cute.attention(quantize="fp8")` does it: head dims are multiples of 16, at most 256.

    Returns:
        `(..., Hq, L, Ev)` in query's dtype. Differentiable, as `flash_cute.attention`.

    Raises:
        ValueError, which is a RuntimeError too: for shapes that no implementation can serve, such as a value with more
            rows than key; and for a nested value of other sequences than key's (jagged: with other offsets). Else what
            `scaled_dot_product_attention` raises. `report()` counts what was passed on to it (not in compiled graphs).
        NotImplementedError: a gradient is asked for with `quantize`.

    Example:
        >>> query = torch.randn(2, 8, 128, 64)
        >>> key, value = torch.randn(2, 2, 160, 64), torch.randn(2, 2, 160, 64)
        >>> out = sdpa(query, key, value, is_causal=True, enable_gqa=True)
        >>> expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        >>> torch.allclose(out, expected, atol=1e-5)
        True
    """
    call = (query, key, value, attn_mask, dropout_p, is_causal)
    plain = is_plain(query, key, value)
    if quantize is not None:
        check_quantize(quantize)
        plain = False
    if not plain and torch.compiler.is_compiling():  # a graph has no counter
        prepared = prepare(*call, scale, enable_gqa)
        if not isinstance(prepared, str) and graph_can_serve(query, value, quantize):
            return serve(prepared, is_causal, scale, quantize)
        return F.scaled_dot_product_attention(*call, scale=scale, enable_gqa=enable_gqa)
    refusal: Exception | None = None
    if (
        plain
        and attn_mask is None
        and dropout_p == 0
        and query.dim() == 4
        and (scale is None or type(scale) is float)
        and type(is_causal) is bool
        and type(enable_gqa) is bool
    ):
        try:
            alone: Tensor = _ops.sdpa(query, key, value, is_causal, scale, enable_gqa)
        except Exception as error:
            if not is_unserved(error):
                raise
            refusal = error.with_traceback(None)
        else:
            _count_sdpa()
            return alone
    out = attempt(*call, scale, enable_gqa, refusal, quantize)
    if not isinstance(out, str):
        _count_sdpa()
        return out
    tally.pass_on(out)
    before, this_thread.passing_on = this_thread.passing_on, True
    try:
        return F.scaled_dot_product_attention(*call, scale=scale, enable_gqa=enable_gqa)
    finally:
        this_thread.passing_on = before


@dataclass(frozen=True)
class _Settings:
    strict: bool = False
    devices: tuple[str, ...] = ("cuda",)
    quantize: str | None = None


class _Active:
    """What is registered with PyTorch's dispatcher, until `remove()`, which PyTorch's registry calls too."""

    def __init__(self, settings: _Settings) -> None:
        self.settings = settings
        self._order: list[int] | None = None  # PyTorch's order of priority, once ours is in force
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():  # PyTorch warns of an overridden kernel, which is what is wanted here
            warnings.simplefilter("ignore")
            for device in settings.devices:
                find_left = _left.devices if device == "cuda" else frozenset
                kernel = make_kernel(settings.strict, self.keep_flash_first, find_left, settings.quantize)
                for key in (device.upper(), f"Autograd{device.upper()}"):
                    self._library.impl(ENTRY, kernel, key)
                for name, key, counter in _fast_path.counters(device, settings.strict):
                    self._library.impl(name, counter, key, with_keyset=True)
            if "cuda" in settings.devices:
                for name, override in _aten.overrides(settings.strict, settings.quantize):
                    self._library.impl(name, override, "CUDA", with_keyset=True)
        if "cuda" in settings.devices and not (torch.cuda.is_initialized() and _left.devices()):
            self._order = _prefer_flash()
        if torch.cuda.is_initialized():
            self.keep_flash_first()

    def keep_flash_first(self) -> None:
        """On some GPUs PyTorch puts cuDNN first when it chooses a backend for the first time in a process, over any
        order that was set before: let it choose once, and set ours after that. Where a GPU is left to PyTorch, so is
        the order, which is one for all GPUs."""
        global _chosen_once
        if _chosen_once or self._order is None:
            return
        if torch.cuda.is_initialized() and _left.devices():
            self._leave_order()
            return
        if functorch_is_active() or jit_is_tracing() or without_modes is None or not torch.cuda.is_available():
            return
        with without_modes():
            x = torch.empty(1, 1, 1, 8, dtype=torch.float16, device="cuda")
            torch._fused_sdp_choice(x, x, x)
        _chosen_once = True
        if _left.devices():
            self._leave_order()
        elif torch._C._get_sdp_priority_order()[0] != _FLASH:
            self._order = _prefer_flash()

    def _leave_order(self) -> None:
        if torch._C._get_sdp_priority_order()[0] == _FLASH:  # else PyTorch has set its own since
            torch._C._set_sdp_priority_order(self._order)
        self._order = None

    def remove(self) -> None:
        """Idempotent."""
        global _active
        self._library = None  # its finalizer takes the kernels out of the dispatcher
        if self._order is not None:
            torch._C._set_sdp_priority_order(self._order)
            self._order = None
        if _active is self:
            _active = None


_active: _Active | None = None
_chosen_once = False  # whether PyTorch has chosen a backend on CUDA
_next_settings = _Settings()  # of the activation that PyTorch's registry makes


class Enabled:
    """What `enable()` returns: in a `with` statement it is in force until the end of that, and then what was before."""

    def __init__(self, before: tuple[str | None, _Settings | None]) -> None:
        self._before = before

    def __enter__(self) -> "Enabled":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        implementation, settings = self._before
        disable()
        if settings is not None:
            _activate(settings)
        elif implementation is not None:
            torch.nn.attention.activate_flash_attention_impl(implementation)


def enable(*, strict: bool = False, devices: Sequence[str] = ("cuda",), quantize: str | None = None) -> Enabled:
    """Let `torch.nn.functional.scaled_dot_product_attention` be served by flash_cute, wherever it is called from.

    It is activated as "flash_cute" in PyTorch's registry of flash attention implementations (`torch.nn.attention`'s
    `activate_flash_attention_impl`, where torch has it), and replaces the active one. In force at once, in all threads:

    * `scaled_dot_product_attention` of plain tensors: whatever `sdpa` serves, so also masks that are causal and not
      square, and head dims of value's own, with which PyTorch would leave its flash attention.
    * The aten flash operators, forward and backward, on CUDA: they are called in graphs of `torch.compile`, under
      dispatch modes (FLOP counters, selective checkpointing), under torch.func and for tensor subclasses, by nested
      tensors, `torch.nn.attention.varlen.varlen_attn` and context parallelism. So that PyTorch chooses them there, the
      flash backend is put first in its order of priority. A graph keeps the backend that was chosen when it was
      compiled: enable first, then compile.

    Left to PyTorch are calls on GPUs of compute capability 10.0 and 10.3 (B200, B300), where its kernels are 3 to 4
    times as fast; a process that sees one keeps PyTorch's order of priority. `sdpa` itself serves there too.
    `torch.nn.MultiheadAttention` and `TransformerEncoderLayer` have a fast path in inference that does not call
    `scaled_dot_product_attention`: always on the CPU, on CUDA with a mask. `report()` counts it as passed on;
    `torch.backends.mha.set_fastpath_enabled(False)` turns it off.

    Nested tensors reach the operators as packed rows with key's offsets, by which value is read too. PyTorch compares
    the two on the CPU alone; `sdpa` refuses those that differ.

    `sdpa_kernel` without SDPBackend.FLASH_ATTENTION, and `torch.backends.cuda.enable_flash_sdp(False)`, turn it off.

    Args:
        strict: raise where a call cannot be served, instead of passing it on; not where the flash backend is off.
        devices: the device types it is for: `"cuda"`, and `"cpu"` if asked for.
        quantize: `"fp8"`: what is served is computed in float8, as by `flash_cute.attention(quantize="fp8")`, by the
            aten operators too. It is for inference: a call of which a gradient is asked for raises. What float8 cannot
            serve (head dims that are no multiple of 16 or above 256, GPUs other than those of compute capability 9.0)
            is passed on, with its reason.

    Returns:
        a context manager, which need not be used: at its exit what was in force before is again.

    Raises:
        ValueError: for another device type, or another `quantize`. The calls raise it for shapes that no implementation
            can serve, and in strict mode for what would be passed on, with the reason.
        NotImplementedError: by the calls, where a gradient is asked for with `quantize`.

    Example:
        >>> q = torch.randn(1, 2, 16, 64)
        >>> with enable(devices=("cpu",)):
        ...     out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        >>> report(reset=True).served
        {'scaled_dot_product_attention': 1}
    """
    names = (devices,) if isinstance(devices, str) else tuple(devices) if isinstance(devices, Iterable) else ()
    settings = _Settings(check_flag("strict", strict), names, check_quantize(quantize))
    if not names or set(names) - {"cuda", "cpu"}:
        raise ValueError(f"flash_cute: devices: expected some of 'cuda' and 'cpu', got {devices!r}")
    before = (_current_implementation(), _active.settings if _active is not None else None)
    _activate(settings)
    return Enabled(before)


def disable() -> None:
    """Undo `enable()`: PyTorch's attention is PyTorch's again. Does nothing where it is not in force.

    Example:
        >>> disable()
        >>> report().enabled
        False
    """
    if _active is None:
        return
    if _current_implementation() == NAME:
        torch.nn.attention.restore_flash_attention_impl()
    else:
        _active.remove()


def report(reset: bool = False) -> Report:
    """How many calls of PyTorch's attention flash_cute served, how many it passed on to PyTorch, and why.

    Counted are forward calls of the process: of `sdpa`, and while `enable()` is in force of
    `scaled_dot_product_attention`, of the aten flash operators below it, and of the fast path of
    `torch.nn.MultiheadAttention`, as passed on. Not seen are the replays of a CUDA graph, and malformed calls, which
    raise.

    Args:
        reset: begin to count from 0.

    Returns:
        a `Report`, which prints as text; `.served` and `.passed_on` are dicts of numbers of calls.

    Example:
        >>> q = torch.randn(1, 2, 16, 64)
        >>> _ = report(reset=True)
        >>> _ = sdpa(q, q, q), sdpa(q, q, q, dropout_p=0.1)
        >>> print(report(reset=True))
        scaled_dot_product_attention: flash_cute is not enabled
        served by flash_cute: 1
                 1 flash_cute.integrations.sdpa.sdpa
        passed on to PyTorch: 1
                 1 dropout_p: expected 0, got another
    """
    return tally.report(_active is not None, check_flag("reset", reset))


def _activate(settings: _Settings) -> None:
    global _next_settings
    before, _next_settings = _next_settings, settings
    try:
        if hasattr(torch.nn.attention, "activate_flash_attention_impl"):
            torch.nn.attention.activate_flash_attention_impl(NAME)
        else:
            disable()
            _register()
    finally:
        _next_settings = before


def _register() -> _Active:
    global _active
    _active = _Active(_next_settings)
    return _active


def _current_implementation() -> str | None:
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return current() if current is not None else None


def _prefer_flash() -> list[int] | None:
    """Put the flash backend first in PyTorch's order of priority; returns the order that was."""
    if not hasattr(torch._C, "_set_sdp_priority_order"):
        return None
    order: list[int] = torch._C._get_sdp_priority_order()
    torch._C._set_sdp_priority_order([_FLASH, *(backend for backend in order if backend != _FLASH)])
    return order


if hasattr(torch.nn.attention, "register_flash_attention_impl"):
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=_register)

"""Time every kernel, tile and split that can serve a call, and keep the answers for `use_tuning`.

The plan (csrc/api/planner.cpp) chooses by rules that were measured on one GPU. Where a call matters, `tune` measures it
on the GPU at hand; `Tuning.save` keeps what it found, and `use_tuning` makes the plan follow it. Nothing of this
happens by itself. `python -m flash_cute.tune --shapes ...` does the same from a shell.
"""

from typing import Any

from torch import Tensor, are_deterministic_algorithms_enabled

from .. import _ops
from .._call_options import CallOptions
from .._progress import Progress
from .._refusals import (
    Window,
    check_deterministic,
    check_flag,
    check_longest,
    check_number,
    mask_name,
    raise_refusal,
    window_sides,
)
from ..autograd import VARLEN
from ._measure import Call, Measured, tune_call
from ._table import Tuning, gpu_of, use_tuning

__all__ = ["Measured", "Tuning", "tune", "use_tuning"]


def tune(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool | str = False,
    *,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    deterministic: bool | None = None,
    backward: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seconds: float = 0.05,
    progress: bool = True,
) -> Tuning:
    """Time every choice that can serve `attention` for these arguments, and its backward, on the tensors' GPU.

    A choice is a backend, an entry of its tile tables (of sm80, the tables whose tiles fit in this GPU's shared
    memory), and whether the tiles of the last wave are split. The calls are replayed from CUDA graphs, in turns, with
    inputs that are not in the L2 cache; those near the best are then timed again beside the plan's own choice, which
    is replaced only where another is faster by more than the runs differ. No result of a call changes by more than a
    rounding.

    Args:
        q, k, v, causal, scale, window, softcap, sinks, alibi_slopes, deterministic: as in `attention`; of `backend`,
            every one is timed. q, k and v are read, and copied so that no timed call finds its inputs in the cache.
        backward: tune the backward too.
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k: as in `varlen_attention`, for q, k
            and v as there.
        seconds: measured time per choice; all of a call takes about ten to twenty times as long.
        progress: draw a bar on stderr, if that is a terminal, for what takes longer than a second.

    Returns:
        What was measured: `str()` is a table, `save(path)` keeps it for `use_tuning`.

    Raises:
        ValueError: as `attention`; and for tensors that are not on a GPU.

    Example:
        >>> x = torch.randn(4, 16, 4096, 128, dtype=torch.bfloat16, device="cuda")  # doctest: +SKIP
        >>> tuning = tune(x, x, x, causal=True, backward=True)  # doctest: +SKIP
        >>> print(tuning)  # doctest: +SKIP
        >>> tuning.save("tuning.json")  # doctest: +SKIP
    """
    lengths: tuple[Any, ...] = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    packed = any(x is not None for x in lengths)
    try:
        directions = (False, True) if check_flag("backward", backward) else (False,)
        mask = (mask_name(causal), *((None, None) if window is None else window_sides(window)))
        check_number("scale", scale)
        check_number("softcap", softcap)
        check_longest("max_seqlen_q", max_seqlen_q)
        check_longest("max_seqlen_k", max_seqlen_k)
        if deterministic is None:
            deterministic = are_deterministic_algorithms_enabled()
        q, k, v, sinks = _ops.autocast(q, k, v, sinks)
        options = CallOptions(*mask, softcap, sinks, alibi_slopes, scale)
        call = Call((q, k, v), lengths if packed else (), options, check_deterministic(deterministic))
        call.plan(backward=False)  # raises what the call would raise
        if not q.is_cuda:
            raise ValueError(f"flash_cute: q: expected a CUDA tensor to time its kernels, got one on {q.device}")
    except Exception as error:
        given = {"q": q, "k": k, "v": v, "sinks": sinks, "alibi_slopes": alibi_slopes}
        if packed:
            given |= dict(zip(VARLEN.length_names, lengths, strict=True))
        raise_refusal(error, given, scale, window, softcap, None)
        raise
    measured = []
    for of_backward in directions:
        bar = Progress(f"tuning the {'backward' if of_backward else 'forward'}", 100) if progress else None
        measured.append(tune_call(call, of_backward, seconds, bar))
        if bar is not None:
            bar.close()
    return Tuning(*gpu_of(q.device), tuple(measured))

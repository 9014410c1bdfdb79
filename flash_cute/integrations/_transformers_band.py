"""The band in a mask function of Transformers: how far before its position and behind it a row sees.

A mask function says of indices of batch, head, row and key whether the row sees the key. Transformers makes it of a few
functions of its own, which are recognised. Any other is computed for all rows and keys, as Transformers' own masks are;
it is served where it turns out to be a band, exactly.
"""

import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

# How many keys before its position and behind it a row sees; None: no limit. Causal: (None or a window, 0).
Band: TypeAlias = tuple[int | None, int | None]
CAUSAL: Band = (None, 0)
WHOLE: Band = (None, None)

MaskFunction: TypeAlias = Callable[..., Tensor]

# Rows times keys that are computed at once of a function that is not recognised.
_AT_ONCE = 1 << 26


class Options(NamedTuple):
    """A band as arguments of attention functions."""

    is_causal: bool
    sliding_window: int | None  # of the layers' operators: how many keys on a side, the row's own included
    window: Band | None  # of `flash_cute.attention`
    is_simple: bool  # whether is_causal and sliding_window say all


class Pattern(NamedTuple):
    """What a mask function says that is made of known functions."""

    band: Band
    packed: Tensor | None = None  # (B, N): equal numbers are of the same sequence
    is_remapped: bool = False  # whether it counts positions within sequences, which is the same if they are packed


def options_of_band(band: Band) -> Options:
    """The arguments that a band stands for."""
    left, right = band
    simple = right == 0 or left == right
    window = None if left is None and right in (None, 0) else band
    return Options(right == 0, left + 1 if simple and left is not None else None, window, simple)


# A mask carries the code of its band as a size: all else of it may get lost where it is moved to another device or goes
# through torch.compile. Code i stands at place i - 1.
_BANDS: list[Band] = [CAUSAL, WHOLE]
_OPTIONS: list[Options] = [options_of_band(band) for band in _BANDS]
_lock = threading.Lock()


@torch.compiler.assume_constant_result
def code_of(left: int | None, right: int | None) -> int:
    """The code of a band, from 1."""
    band = (left, right)
    with _lock:
        if band not in _BANDS:
            _OPTIONS.append(options_of_band(band))
            _BANDS.append(band)
        return _BANDS.index(band) + 1


def is_code(code: int) -> bool:
    """Whether it is that of a band."""
    return 0 < code <= (_count() if is_dynamo_compiling() else len(_OPTIONS))


def options_of(code: int) -> Options:
    """The arguments that a code stands for."""
    if not is_dynamo_compiling():
        return _OPTIONS[code - 1]
    # Dynamo would take the list as it was when a frame read it first, without the bands that `code_of` adds meanwhile.
    known = next(i for i in range(1, _count() + 1) if i == code)  # a number, where the size is a symbol
    left, right = _limit(known, 0), _limit(known, 1)
    return options_of_band((None if left < 0 else left, None if right < 0 else right))


@torch.compiler.assume_constant_result
def _count() -> int:
    return len(_BANDS)


@torch.compiler.assume_constant_result
def _limit(code: int, side: int) -> int:
    """How far a band goes on a side, -1 for no limit: what is constant for Dynamo has to be a number."""
    limit = _BANDS[code - 1][side]
    return -1 if limit is None else limit


def pattern_of(function: MaskFunction, end: int) -> Pattern | None:
    """What a mask function says; None if it is not made of functions that are known.

    end: the position behind the last key.
    """
    found = _read(function, sys.modules["transformers.masking_utils"], end)
    return None if found is None or (found.is_remapped and found.packed is None) else found


def traced_pattern(
    function: MaskFunction, local_size: int | None, is_causal_or_window: bool, is_bidirectional: bool
) -> Pattern | None:
    """The same while Dynamo traces, which does not let a function be looked into."""
    masking = sys.modules["transformers.masking_utils"]
    if function is masking.causal_mask_function:
        return Pattern(CAUSAL)
    if function is masking.bidirectional_mask_function:
        return Pattern(WHOLE)
    if is_causal_or_window:
        return Pattern(CAUSAL if local_size is None else (local_size - 1, 0))
    if is_bidirectional:
        return Pattern((local_size, local_size))
    return None


def _read(function: MaskFunction, masking: Any, end: int) -> Pattern | None:
    if function is masking.causal_mask_function:
        return Pattern(CAUSAL)
    if function is masking.bidirectional_mask_function:
        return Pattern(WHOLE)
    if getattr(function, "__module__", None) != masking.__name__:
        return None
    maker = function.__qualname__.partition(".")[0]
    code, cells = function.__code__, function.__closure__ or ()
    values = {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
    match maker:
        case "sliding_window_overlay":
            return Pattern((values["sliding_window"] - 1, None))
        case "sliding_window_bidirectional_overlay":
            return Pattern((values["sliding_window"], values["sliding_window"]))
        case "chunked_overlay":
            # One chunk holds all keys; those of padding before a sequence are in another, and not seen anyway.
            return Pattern(WHOLE) if end <= values["chunk_size"] else None
        case "packed_sequence_mask_function":
            return Pattern(WHOLE, values["packed_sequence_mask"])
        case "remap_positions_for_packed_sequence":
            inner = _read(values["mask_function"], masking, end)
            return None if inner is None else inner._replace(is_remapped=True)
        case "and_masks":
            return _intersection([_read(part, masking, end) for part in values["mask_functions"]])
    return None


def _intersection(parts: list[Pattern | None]) -> Pattern | None:
    left: int | None = None
    right: int | None = None
    packed: Tensor | None = None
    for part in parts:
        if part is None or (packed is not None and part.packed is not None):
            return None
        left, right = _least(left, part.band[0]), _least(right, part.band[1])
        packed = part.packed if packed is None else packed
    return Pattern((left, right), packed, any(part is not None and part.is_remapped for part in parts))


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def band_by_values(
    function: MaskFunction,
    sizes: tuple[int, int, int],
    offsets: tuple[int, int],
    use_vmap: bool,
    device: torch.device | str,
) -> Band | None:
    """The band that a mask function turns out to be, in all of its values; None if it is none.

    sizes: B, Nq, Nk; offsets: the positions of the first row and of the first key.
    """
    batch_size, q_length, kv_length = sizes
    q_offset, kv_offset = offsets
    make = sys.modules["transformers.masking_utils"].sdpa_mask
    rows_at_once = max(1, _AT_ONCE // max(1, batch_size * kv_length))

    def parts() -> Any:
        """(B, 1, rows, Nk) bool, and how far behind a row's position a key is, (rows, Nk)."""
        for first in range(0, q_length, rows_at_once):
            rows = min(rows_at_once, q_length - first)
            seen = make(
                batch_size=batch_size,
                q_length=rows,
                kv_length=kv_length,
                q_offset=q_offset + first,
                kv_offset=kv_offset,
                mask_function=function,
                allow_is_causal_skip=False,
                allow_is_bidirectional_skip=False,
                use_vmap=use_vmap,
                device=device,
            )
            keys = torch.arange(kv_length, device=device) + (kv_offset - q_offset - first)
            yield seen, keys[None] - torch.arange(rows, device=device)[:, None]

    # A limit that no pair of row and key reaches is none.
    most_left, most_right = q_offset + q_length - 1 - kv_offset, kv_offset + kv_length - 1 - q_offset
    ends = [
        torch.stack(
            (
                torch.where(seen, -away, -kv_length - q_length).amax(),
                torch.where(seen, away, -kv_length - q_length).amax(),
            )
        )
        for seen, away in parts()
    ]
    left, right = torch.stack(ends).amax(0).tolist()
    if left < 0 or right < 0:
        return None
    exact = [(seen == ((away <= right) & (away >= -left))).all() for seen, away in parts()]
    if not torch.stack(exact).all():
        return None
    return None if left >= most_left else left, None if right >= most_right else right

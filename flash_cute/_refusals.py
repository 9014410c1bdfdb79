"""Errors in one voice: "flash_cute: <argument>: expected <what>, got <what>", a ValueError.

The checks stand in csrc/api/checks.h. What never gets there, because PyTorch cannot make the operator's argument of it,
is looked at here once the call has failed, so that a good call pays nothing for it.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# How the sentence of a check begins; those of CUDA's failures do not.
_REFUSAL = re.compile(r"flash_cute: [\w.]+: ")
# Tensors that need not be given.
_OPTIONAL = (
    *("dlse", "sinks", "alibi_slopes", "seqused_q", "seqused_k"),
    *("mask.first_row_2", "mask.row_limit_2", "mask.matrix", "mask.blocks"),
    *("descale_q", "descale_k", "descale_v", "descale_out"),
)

# (left, right): how many keys before its position and how many after it a row sees; None: no limit.
Window = tuple[int | None, int | None]


def mask_name(causal: Any) -> str:
    """The operators' name of a mask; NumPy's bools count as Python's."""
    if isinstance(causal, bool) or _is_numpy_bool(causal):
        return "bottom_right" if causal else "none"
    if isinstance(causal, str):
        return causal
    raise ValueError(
        "flash_cute: causal: expected False or 'none', True or 'bottom_right', or 'top_left', "  # as csrc/api/parse.h
        f"got {shown(causal)}"
    )


def window_sides(window: Any) -> Window:
    """(left, right); what a side may be is the operators' to check, its type apart."""
    if isinstance(window, tuple | list) and len(window) == 2:
        left, right = window
        if (left is None or _is_int(left)) and (right is None or _is_int(right)):
            return left, right
    given = repr(window) if isinstance(window, tuple | list) else shown(window)
    raise ValueError(
        "flash_cute: window: expected None or (left, right), each None (no limit) or a number of keys of at least 0, "
        f"got {given}"
    )


def check_deterministic(deterministic: Any) -> bool:
    """The backward takes it long after the call that gave it."""
    if isinstance(deterministic, bool) or _is_numpy_bool(deterministic):
        return bool(deterministic)
    raise ValueError(f"flash_cute: deterministic: expected None, False or True, got {shown(deterministic)}")


def check_flag(name: str, flag: Any) -> bool:
    """What Python would take for true or false is not one: a word, a tensor, None."""
    if isinstance(flag, bool) or _is_numpy_bool(flag):
        return bool(flag)
    raise ValueError(f"flash_cute: {name}: expected False or True, got {shown(flag)}")


def check_number(name: str, number: Any) -> None:
    """Raise for what PyTorch would take for a number without a word: bools, and tensors with more than a value."""
    if number is None:
        return
    if not _is_number(number):
        raise ValueError(f"flash_cute: {name}: expected None or a number, got {shown(number)}") from None
    if not isinstance(number, Tensor):
        return
    if torch.is_grad_enabled() and number.requires_grad:
        raise ValueError(
            f"flash_cute: {name}: expected a number that does not require grad, got a tensor that does"
        ) from None
    if number.device.type != "cpu":
        raise ValueError(
            f"flash_cute: {name}: expected None or a number that is on the CPU, got a tensor on {number.device}, whose "
            "value a call does not wait for"
        ) from None


def check_longest(name: str, longest: Any) -> None:
    """Raise for a `max_seqlen` that is no number of the host's."""
    if longest is None or (_is_int(longest) and _fits(longest)):
        return
    why = ", whose value a call does not wait for" if isinstance(longest, Tensor) else ""
    raise ValueError(f"flash_cute: {name}: expected None or a number of rows, got {shown(longest)}{why}") from None


def check_seed(seed: Any) -> None:
    if not (_is_int(seed) and _fits(seed)):
        raise ValueError(f"flash_cute: seed: expected a number of 64 bits, got {shown(seed)}")


def check_capability(capability: Any) -> int:
    """0 where a plan is for the tensors' own device."""
    if capability is None:
        return 0
    if not (_is_int(capability) and _fits(capability)):
        raise ValueError(
            "flash_cute: capability: expected None or a compute capability, ten times major plus minor, "
            f"got {shown(capability)}"
        )
    return int(capability)


def backend_with(backend: str, accumulate: Any) -> str:
    """The operators' backend with what the products are accumulated in; the words are theirs to check."""
    if not isinstance(accumulate, str):
        raise ValueError(
            "flash_cute: accumulate: expected None, 'float32', 'float16', 'float16_qk' or 'float16_pv', "
            f"got {shown(accumulate)}"
        )
    return backend if accumulate == "float32" else f"{backend}+{accumulate}"


def with_row_invariance(backend: Any, row_invariant: Any) -> Any:
    """The operators' backend of a call whose rows' bits depend on nothing else; what is no backend is left to them."""
    if not check_flag("row_invariant", row_invariant) or not isinstance(backend, str | None):
        return backend
    return f"{backend or 'auto'}+row_invariant"


def with_batch_dependence(backend: Any, batch_invariant: Any, row_invariant: Any) -> Any:
    """The operators' backend of a call over a cache whose bits may depend on the batch."""
    if check_flag("batch_invariant", batch_invariant) or not isinstance(backend, str | None):
        return backend
    if row_invariant is not False:
        raise ValueError(f"flash_cute: batch_invariant: expected True beside row_invariant={row_invariant}, got False")
    return f"{backend or 'auto'}+batch_dependent"


def refuse_gradient_of(accumulate: str) -> None:
    """Raise where a gradient is asked of a forward that accumulates in float16."""
    if accumulate != "float32":
        raise ValueError(
            "flash_cute: accumulate: expected None or 'float32' where gradients are needed (torch.no_grad() says that "
            f"they are not), got {shown(accumulate)}"
        )


def is_refusal(error: Exception) -> bool:
    """Whether `error` is a check's: the call cannot be served, and nothing has been launched.

    Up to torch 2.13 a check's error is a ValueError already; torch 2.15 lost the type.
    """
    return isinstance(error, ValueError | RuntimeError) and _REFUSAL.match(str(error)) is not None


def raise_refusal(
    error: Exception, given: Mapping[str, Any], scale: Any, window: Any, softcap: Any, backend: Any
) -> None:
    """Raise our own sentence where `error` is a check's, or comes of an argument's type; else do nothing.

    `given`: the arguments that must be tensors, and the `max_seqlen`s.
    Up to torch 2.13 a check's error is a ValueError already; torch 2.15 lost the type.
    """
    if isinstance(error, RuntimeError) and _REFUSAL.match(str(error)):
        raise ValueError(str(error)) from None
    for name, x in given.items():
        if name.startswith("max_seqlen"):
            check_longest(name, x)
            continue
        if not isinstance(x, Tensor) and not (x is None and name in _OPTIONAL):
            raise ValueError(f"flash_cute: {name}: expected a torch.Tensor, got {_type_name(x)}") from None
        if isinstance(x, Tensor) and (x.is_nested or x.layout != torch.strided):
            raise ValueError(f"flash_cute: {name}: expected a strided tensor, got a sparse or nested one") from None
        if isinstance(x, Tensor) and x.is_quantized:
            raise ValueError(f"flash_cute: {name}: expected a tensor without quantization, got {x.dtype}") from None
    for name, number in (("scale", scale), ("softcap", softcap)):
        check_number(name, number)
    if window is not None and not all(side is None or _fits(side) for side in window_sides(window)):
        sides = ", ".join(shown(side) for side in window)
        raise ValueError(f"flash_cute: window: expected None (no limit) or numbers below 2^63, got ({sides})") from None
    if backend is not None and not isinstance(backend, str):
        raise ValueError(f"flash_cute: backend: expected None or a backend's name, got {shown(backend)}") from None


def _is_number(value: Any) -> bool:
    """What PyTorch takes for a float, and no bool: also NumPy's numbers, and tensors with one element."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.dtype != torch.bool
    if isinstance(value, bool):
        return False
    if isinstance(value, int) and value.bit_length() > 1024:
        return False  # no float is as large
    if isinstance(value, int | float | torch.SymInt | torch.SymFloat):
        return True  # before hasattr, which Dynamo cannot trace for a symbolic number
    is_one = hasattr(value, "__float__") and getattr(value, "ndim", 0) == 0
    return is_one and str(getattr(value, "dtype", "")) != "bool"  # NumPy's


def _fits(value: Any) -> bool:
    """Whether PyTorch takes the number for an int."""
    return isinstance(value, torch.SymInt) or -(2**63) <= int(value) < 2**63


def _is_int(value: Any) -> bool:
    """An int, NumPy's or a symbolic one too, and no bool."""
    if isinstance(value, int | torch.SymInt):
        return not isinstance(value, bool)
    return type(value).__module__ == "numpy" and hasattr(value, "__index__") and not _is_numpy_bool(value)


def _is_numpy_bool(value: Any) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")


def _type_name(value: Any) -> str:
    if value is None:
        return "None"
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def shown(value: Any) -> str:
    """An argument as a sentence shows it."""
    if isinstance(value, int) and value.bit_length() > 1024:
        return f"a number of {value.bit_length()} bits"
    return repr(value) if isinstance(value, str | int | float | complex | None) else _type_name(value)

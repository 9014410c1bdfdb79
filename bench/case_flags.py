"""A single workload, and its device, by flags."""

from __future__ import annotations

import argparse
import re
from typing import get_args

import torch

from bench.caches import CacheWorkload
from bench.figures import SHAPE_COLUMNS
from bench.lengths import DRAWN, lengths_of
from bench.workloads import DTYPES, Direction, Window, Workload

DTYPE_NAMES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "float64": "fp64",
    "double": "fp64",
    "float8_e4m3fn": "e4m3",
}


def _dtype_name(text: str) -> str:
    name = DTYPE_NAMES.get(text, text)
    if name not in DTYPES:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(DTYPES)}, given {text!r}")
    return name


def device_name(text: str) -> str:
    """A device that the bench knows, as its name; whether there is a GPU at all is each command's own to say."""
    found = re.fullmatch(r"cpu|cuda(?::(\d+))?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected cpu, cuda or cuda:<number>, given {text!r}")
    if found[1] and 0 < torch.cuda.device_count() <= int(found[1]):
        raise argparse.ArgumentTypeError(f"expected a number below {torch.cuda.device_count()}, given {text!r}")
    return text


def add_direction_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--direction",
        choices=get_args(Direction),
        default="fwd",
        help="the forward, the backward alone, or both through autograd (fwd)",
    )


def add_shape_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of a single case: the same as those of `python -m flash_cute`."""
    shape = parser.add_argument_group("a single case")
    shape.add_argument("--B", type=int, default=4, help="batch (4)")
    shape.add_argument("--H", type=int, default=16, help="heads of q (16)")
    shape.add_argument("--Hkv", type=int, default=0, help="heads of k and v (as many as q's)")
    shape.add_argument("--N", type=int, default=4096, help="queries (4096)")
    shape.add_argument("--M", type=int, default=0, help="keys (as many as queries)")
    shape.add_argument("--D", type=int, default=128, help="head dim (128)")
    shape.add_argument(
        "--causal",
        nargs="?",
        const="bottom_right",
        default="none",
        choices=["none", "bottom_right", "top_left"],
        help="causal mask; bottom_right unless said otherwise",
    )
    shape.add_argument("--dtype", type=_dtype_name, default="bf16", help="bf16 (default), fp16, fp32, fp64, e4m3")
    shape.add_argument("--Dv", type=int, default=0, help="v's head dim (D)")
    shape.add_argument(
        "--window",
        type=_window,
        metavar="LEFT,RIGHT",
        help="keys that a row sees before its position and behind it; nothing for a side: no limit (no window)",
    )
    shape.add_argument("--softcap", type=float, default=0.0, help="cap of the scores (none)")
    shape.add_argument("--sinks", action="store_true", help="attention sinks")
    shape.add_argument("--alibi", action="store_true", help="ALiBi biases")
    shape.add_argument(
        "--lengths",
        type=_lengths,
        default="",
        help=f"a packed batch instead of B, N and M: 16x1024, 4096+16x256, {', '.join(DRAWN)}; with --page, of keys",
    )
    shape.add_argument("--page", type=int, default=0, help="keys of a page: N rows over caches of M keys (no caches)")
    shape.add_argument("--cache_dtype", default="", choices=["", "e4m3"], help="with --page, of the caches (q's)")
    shape.add_argument("--append", action="store_true", help="with --page, append the rows' keys to the caches first")


def _window(text: str) -> Window:
    sides = text.split(",")
    if len(sides) != 2 or not all(side.isdecimal() or not side for side in sides):
        raise argparse.ArgumentTypeError(f"expected LEFT,RIGHT, numbers of keys or nothing, given {text!r}")
    left, right = (int(side) if side else None for side in sides)
    return left, right


def _lengths(text: str) -> str:
    try:
        if text:
            lengths_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def from_flags(flags: argparse.Namespace, direction: Direction) -> Workload:
    names = ("Dv", "window", "softcap", "sinks", "alibi", "lengths")
    options = {name: getattr(flags, name) for name in names}
    found = lengths_of(flags.lengths) if flags.lengths else ()
    batch = len(found) or flags.B
    rows = flags.N if flags.page else max(found, default=flags.N)
    keys = max(found) if found else flags.M or rows
    heads = (flags.H, flags.Hkv or flags.H)
    shape = (batch, *heads, rows, keys, flags.D, flags.causal, flags.dtype, direction)
    if flags.page:
        return CacheWorkload(*shape, **options, page=flags.page, append=flags.append, cache_dtype=flags.cache_dtype)
    return Workload(*shape, **options)


def to_flags(workload: Workload) -> list[str]:
    """The flags of which `from_flags` makes this workload, with its direction."""
    values = workload.columns
    given = ("Dv", "window", "softcap", "lengths", "page", "cache_dtype")
    flags = [f"--{name}={values[name]}" for name in given if values[name]]
    flags += [f"--{name}" for name in ("sinks", "alibi", "append") if values[name]]
    return [*(f"--{name}={values[name]}" for name in SHAPE_COLUMNS), *flags]

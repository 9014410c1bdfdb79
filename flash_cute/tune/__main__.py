"""`python -m flash_cute.tune`: time every kernel, tile and split for some shapes, and keep the best ones in a file.

    python -m flash_cute.tune --shapes B=4,H=16,N=4096,D=128,causal
    python -m flash_cute.tune --shapes B=1,H=32,Hkv=8,N=8192,D=128,causal B=1,H=32,Hkv=8,N=1,M=8192,D=128 \
        --backward --dtype bf16 --out tuning.json
    FLASH_CUTE_TUNING=tuning.json python train.py

A shape is what the flags of `python -m flash_cute` are, by comma: B, H, N and D, and where they differ Hkv, M and Dv;
`causal` or `top_left`; `window=LEFT:RIGHT` (an empty side is no limit); `softcap=NUMBER`, `sinks`, `alibi`. With
`lengths=300:1000:77` in place of B and N it is a packed batch. Exits with 2 where a flag is wrong or there is no GPU.
"""

import argparse
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from .._timing import first_line
from . import tune
from ._table import Tuning

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NUMBERS = ("B", "H", "Hkv", "N", "M", "D", "Dv")
WORDS = ("causal", "top_left", "sinks", "alibi")


def parse_shape(text: str) -> dict[str, Any]:
    """A shape's fields, those left out filled in; `lengths` is empty where it is dense."""
    shape: dict[str, Any] = {
        "B": 1,
        "window": None,
        "softcap": None,
        "lengths": [],
        "N": None,
        **dict.fromkeys(WORDS, False),
    }
    for part in text.split(","):
        name, equals, value = part.partition("=")
        try:
            if name in WORDS and not equals:
                shape[name] = True
            elif name in NUMBERS:
                shape[name] = _at_least(1, int(value))
            elif name == "softcap":
                shape[name] = float(value)
            elif name == "lengths":
                shape[name] = [_at_least(0, int(length)) for length in value.split(":")]
            elif name == "window":
                left, right = (int(side) if side else None for side in value.split(":"))
                shape[name] = (left, right)
            else:
                raise ValueError
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text}: expected a shape like B=4,H=16,N=4096,D=128, got {part!r}"
            ) from None
    beside = [name for name in ("B", "N", "M") if f",{name}=" in f",{text}"] if shape["lengths"] else []
    if beside or (shape["causal"] and shape["top_left"]):
        one, other = ("lengths", ", ".join(beside)) if beside else ("causal", "top_left")
        raise argparse.ArgumentTypeError(f"{text}: expected {one} or {other}, got both")
    lacking = [name for name in ("H", "D", *([] if shape["lengths"] else ["N"])) if shape.get(name) is None]
    if lacking:
        raise argparse.ArgumentTypeError(f"{text}: expected {', '.join(lacking)} too")
    for name, other in (("Hkv", "H"), ("M", "N"), ("Dv", "D")):
        shape.setdefault(name, shape.get(other))
    return shape


def _at_least(least: int, number: int) -> int:
    if number < least:
        raise ValueError
    return number


def inputs(shape: dict[str, Any], dtype: torch.dtype, device: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """q, k and v, standard normal, and the options of `tune`."""
    options: dict[str, Any] = {"window": shape["window"], "softcap": shape["softcap"]}
    options["causal"] = "top_left" if shape["top_left"] else shape["causal"]
    if shape["sinks"]:
        options["sinks"] = torch.zeros(shape["H"], device=device)
    if shape["alibi"]:
        options["alibi_slopes"] = 2.0 ** -(8 * torch.arange(1, shape["H"] + 1, device=device) / shape["H"])

    def normal(heads: int, length: int | None, columns: int) -> torch.Tensor:
        size = (sum(shape["lengths"]), heads, columns) if shape["lengths"] else (shape["B"], heads, length, columns)
        return torch.randn(size, dtype=dtype, device=device)

    if shape["lengths"]:
        offsets = torch.tensor([0, *accumulate(shape["lengths"])], dtype=torch.int32, device=device)
        longest = max(shape["lengths"])
        options |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": longest, "max_seqlen_k": longest}
    of_k = normal(shape["Hkv"], shape["M"], shape["D"])
    return [normal(shape["H"], shape["N"], shape["D"]), of_k, normal(shape["Hkv"], shape["M"], shape["Dv"])], options


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m flash_cute.tune", description="Time every kernel, tile and split for some shapes."
    )
    parser.add_argument(
        "--shapes", nargs="+", required=True, type=parse_shape, help="as in B=4,H=16,N=4096,D=128,causal"
    )
    parser.add_argument("--backward", action="store_true", help="the backward too")
    parser.add_argument("--deterministic", action="store_true", help="the backward's deterministic mode")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16", help="bf16")
    parser.add_argument("--device", default="cuda", help="cuda")
    parser.add_argument("--seconds", type=float, default=0.05, help="measured time per choice (0.05)")
    parser.add_argument("--out", type=Path, help="file to write, or to add to, for FLASH_CUTE_TUNING")
    args = parser.parse_args(argv)
    if args.deterministic and not args.backward:
        parser.error("--deterministic: expected --backward, whose mode it is")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if not torch.cuda.is_available():
        print(
            "python -m flash_cute.tune: torch finds no GPU here, and there is nothing to time without one",
            file=sys.stderr,
        )
        return 2
    try:
        found: Tuning | None = None
        for shape in args.shapes:
            tensors, options = inputs(shape, DTYPES[args.dtype], args.device)
            one = tune(
                *tensors,
                **options,
                backward=args.backward,
                deterministic=args.deterministic,
                seconds=args.seconds,
            )
            print(one if found is None else str(one).partition("\n")[2], flush=True)
            found = one if found is None else found + one
            if args.out:
                one.save(args.out)
    except (ValueError, RuntimeError) as error:
        print(first_line(error), file=sys.stderr, flush=True)
        return 2
    if args.out:
        print(f"\nwrote {args.out}; FLASH_CUTE_TUNING={args.out} or flash_cute.use_tuning({str(args.out)!r}) loads it")
    return 0


if __name__ == "__main__":
    sys.exit(main())

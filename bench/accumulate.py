"""What float16 accumulation costs in accuracy: errors of out against float64, by mode, beside float32's.

    python bench/accumulate.py                                     # the kernels, on the GPU
    python bench/accumulate.py --device cpu --head-dims 64 --N 1024    # simulated

Inputs are of the kinds of `bench/accuracy.py`, in fp16. The simulation rounds a sum to float16 after each 8 products,
and so is an upper estimate: a GPU rounds once per instruction of 16.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if not __package__:
    # Run as a script: bench/ must not hide the standard library's `profile`, nor this tree the installed package.
    sys.path[:] = [*sys.path[1:], str(ROOT)]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import flash_cute  # noqa: E402
from bench import case_flags  # noqa: E402
from bench.accuracy import INPUTS, rms  # noqa: E402
from bench.environment import environment  # noqa: E402
from flash_cute import reference  # noqa: E402

MODES = ("float32", "float16_qk", "float16_pv", "float16")
MOST_OF_PV_ALONE = 192  # the largest head dim of "float16_pv"
HEADS = 2
STEP = 8  # products between roundings
COLUMNS = 32  # of Q and K per sum in float16


def block_n(head_dim: int) -> int:
    """Keys per tile, csrc/sm80/forward/rows/float16_tile.h."""
    return 64 if head_dim <= 64 else 32


def simulate(q: Tensor, k: Tensor, v: Tensor, causal: bool, mode: str, dtype: torch.dtype = torch.float16) -> Tensor:
    """What the kernel computes, in PyTorch: q, k and v (B, H, N, D) float16 -> out, float16. `dtype`: of the sums."""
    head_dim, keys = q.shape[-1], k.shape[2]
    scale = head_dim**-0.5
    q32, k32, v32 = (x.float() for x in (q, k, v))
    if mode in ("float16", "float16_qk"):
        factor = 2.0 ** math.floor(math.log2(scale))
        q32 = (q32 * factor).half().float()
        scores = torch.zeros(*q.shape[:3], keys)
        for begin in range(0, head_dim, COLUMNS):
            sums = torch.zeros_like(scores, dtype=dtype)
            for d in range(begin, begin + COLUMNS, STEP):
                sums = (sums.float() + q32[..., d : d + STEP] @ k32[..., d : d + STEP].mT).to(dtype)
            scores += sums.float()
        scores *= scale / factor
    else:
        scores = q32 @ k32.mT * scale
    if causal:
        hidden = torch.ones(q.shape[2], keys, dtype=torch.bool).triu(1 + keys - q.shape[2])
        scores = scores.masked_fill(hidden, -math.inf)
    out = torch.zeros(*q.shape[:3], v.shape[-1])
    largest, total = torch.full((*q.shape[:3], 1), -1e30), torch.zeros(*q.shape[:3], 1)
    for begin in range(0, keys, block_n(head_dim)):
        tile = scores[..., begin : begin + block_n(head_dim)]
        new = torch.maximum(largest, tile.amax(-1, keepdim=True))
        weights = torch.exp(tile - new)
        factor_of_old = torch.exp(largest - new)
        largest, total = new, total * factor_of_old + weights.sum(-1, keepdim=True)
        weights = weights.half().float()
        values = v32[..., begin : begin + block_n(head_dim), :]
        if mode in ("float16", "float16_pv"):
            part = torch.zeros_like(out, dtype=dtype)
            for j in range(0, weights.shape[-1], STEP):
                part = (part.float() + weights[..., j : j + STEP] @ values[..., j : j + STEP, :]).to(dtype)
            out = out * factor_of_old + part.float()
        else:
            out = out * factor_of_old + weights @ values
    return (out / total).half()


def compute(q: Tensor, k: Tensor, v: Tensor, causal: bool, mode: str) -> Tensor:
    if q.is_cuda:
        out: Tensor = flash_cute.fwd(q, k, v, causal, backend="sm80", accumulate=mode)[0]
        return out
    return simulate(q, k, v, causal, mode)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/accumulate.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--head-dims", default="32,64,96,128,192,256", help="separated by commas")
    parser.add_argument("--N", default="1024,8192", help="queries and keys, separated by commas (1024,8192)")
    parser.add_argument(
        "--device", type=case_flags.device_name, default="cuda", help="cuda (default), or cpu: simulated"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the inputs (0)")
    parser.add_argument("--commit", default="", help="commit to name in the CSV (git's)")
    parser.add_argument("--out", type=Path, help="CSV to write")
    flags = parser.parse_args(arguments)
    if flags.device != "cpu" and not torch.cuda.is_available():
        parser.error("there is no CUDA GPU here; --device cpu simulates the kernels")
    return flags


def main(arguments: Sequence[str]) -> int:
    flags = parse(arguments)
    device = torch.device(flags.device)
    facts = environment(device, flags.commit)
    print(", ".join(f"{name} {value}" for name, value in facts.items() if value), f"seed {flags.seed}", sep=", ")
    rows: list[dict[str, object]] = []
    ratios: dict[tuple[str, str], list[float]] = {}
    for head_dim in map(int, flags.head_dims.split(",")):
        for length in map(int, flags.N.split(",")):
            for kind, change in INPUTS.items():
                generator = torch.Generator(device).manual_seed(flags.seed)
                shape = (1, HEADS, length, head_dim)
                wide = [torch.randn(shape, generator=generator, device=device) for _ in range(3)]
                change(wide[0], wide[1], wide[2])
                q, k, v = (x.half() for x in wide)
                for causal in (False, True):
                    exact, _ = reference.attention(q, k, v, causal)
                    errors = {
                        mode: rms(compute(q, k, v, causal, mode).double() - exact)
                        for mode in MODES
                        if mode != "float16_pv" or head_dim <= MOST_OF_PV_ALONE
                    }
                    where = {"D": head_dim, "N": length, "causal": causal, "inputs": kind}
                    columns = {f"rms_{x}": f"{errors[x]:.3e}" if x in errors else "" for x in MODES}
                    rows.append({**where, **columns, **facts})
                    for mode in list(errors)[1:]:
                        ratios.setdefault((kind, mode), []).append(errors[mode] / errors["float32"])
                    text = "".join(f"  {x} {error:.2e}" for x, error in errors.items())
                    print(
                        f"D {head_dim:<3} N {length:<5} {'causal' if causal else 'full':<6} {kind:<13}{text}",
                        flush=True,
                    )
    print("\nroot mean square error over that of float32: geometric mean, largest")
    for kind in INPUTS:
        found = (f"{m} {statistics.geometric_mean(ratios[kind, m]):.2f}, {max(ratios[kind, m]):.2f}" for m in MODES[1:])
        print(f"  {kind:<14}" + "   ".join(found))
    if flags.out:
        with flags.out.open("w", newline="") as file:
            table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            table.writeheader()
            table.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

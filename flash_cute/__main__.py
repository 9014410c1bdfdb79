"""`python -m flash_cute`: one attention, checked against float64 and timed beside PyTorch's own.

    python -m flash_cute                                        # on the GPU if there is one, else on the CPU
    python -m flash_cute --backward --causal                    # its gradients too: a step forward and backward
    python -m flash_cute --B 2 --H 32 --Hkv 8 --N 8192 --D 128 --causal --dtype bf16
    python -m flash_cute --N 1 --M 4096 --causal top_left --peers flash,math --no-check

Exits with 1 when a result is not within the contract's bound, with 2 when the call cannot be served or a flag is wrong.
"""

import argparse
import functools
import platform
import sys
import textwrap
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_cute
from flash_cute import reference
from flash_cute._progress import Progress
from flash_cute._timing import (
    Contender,
    Timing,
    attention_flops,
    first_line,
    input_sets,
    measure,
    rotate,
    speed_ratio,
    tflops,
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
PEERS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
OURS = "flash_cute"
SECONDS_A_ROUND = 0.03


@dataclass(frozen=True)
class Problem:
    """What the flags ask for."""

    B: int
    H: int
    Hkv: int
    N: int
    M: int
    D: int
    causal: str
    dtype: torch.dtype
    device: torch.device
    backend: str | None
    backward: bool

    @property
    def flops(self) -> float:
        directions = (False, True) if self.backward else (False,)
        shape = (self.B, self.H, self.N, self.M, self.D)
        return sum(attention_flops(*shape, causal=self.causal != "none", backward=backward) for backward in directions)

    def inputs(self, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """q `(B, H, N, D)`, k and v `(B, Hkv, M, D)`, standard normal."""
        generator = torch.Generator(self.device).manual_seed(seed)

        def normal(heads: int, length: int) -> Tensor:
            shape = (self.B, heads, length, self.D)
            return torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)

        return normal(self.H, self.N), normal(self.Hkv, self.M), normal(self.Hkv, self.M)

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """What is timed of an attention: the call; or, with the backward, a step of training."""
        if not self.backward:
            return call

        def step(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            return torch.autograd.grad(call(*leaves), leaves, q)  # q for dout: any tensor will do

        return step

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash_cute.attention(q, k, v, self.causal_argument, backend=self.backend)

    def fwd(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return flash_cute.fwd(q, k, v, self.causal_argument, backend=self.backend)

    @property
    def causal_argument(self) -> bool | str:
        return False if self.causal == "none" else self.causal


def check(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Compare with float64, one key head at a time; print the worst of them, return whether all are within bounds."""
    out, lse = problem.fwd(q, k, v)
    gradients: tuple[Tensor, Tensor, Tensor] | None = None
    if problem.backward:
        causal = problem.causal_argument
        gradients = flash_cute.bwd(q, q, k, v, out, lse, causal, backend=problem.backend)  # q for dout, as in `timed`
    group = problem.H // problem.Hkv
    progress = Progress("checking", problem.B * problem.Hkv)
    results = []
    of_gradients = []
    for b in range(problem.B):
        for h in range(problem.Hkv):
            heads = slice(h * group, (h + 1) * group)
            batch, key = slice(b, b + 1), slice(h, h + 1)
            parts = (out[batch, heads], lse[batch, heads], q[batch, heads], k[batch, key], v[batch, key])
            results.append(reference.compare(*parts, problem.causal_argument))
            if gradients is not None:
                given = (gradients[0][batch, heads], gradients[1][batch, key], gradients[2][batch, key])
                inputs = (q[batch, heads], q[batch, heads], k[batch, key], v[batch, key])
                of_gradients.append(reference.compare_gradients(given, *inputs, problem.causal_argument))
            progress()
    progress.close()
    worst = max(results, key=lambda result: result.out_error / result.out_allowed)
    lse_error = max(result.lse_error for result in results)
    ok = all(result.ok for result in results) and all(result.ok for result in of_gradients)
    print("\nlargest error against float64")
    print(
        f"  out  {worst.out_error:.2e}   allowed {worst.out_allowed:.2e} (2x PyTorch's unfused computation, + rounding)"
    )
    print(f"  lse  {lse_error:.2e}   allowed {worst.lse_allowed:.2e} (times max(1, |lse|))")
    for index, name in enumerate(("dq", "dk", "dv")) if of_gradients else ():
        pairs = [(result.errors[index], result.allowed[index]) for result in of_gradients]
        error, allowed = max(pairs, key=lambda pair: pair[0] / pair[1])
        print(f"  {name}   {error:.2e}   allowed {allowed:.2e} (as out)")
    print("  within the bounds" if ok else "  NOT WITHIN THE BOUNDS")
    return ok


def peer_call(problem: Problem, name: str) -> Callable[..., Tensor]:
    """SDPA for the problem; raises where it has no such problem."""
    if problem.causal == "bottom_right" and problem.N != problem.M:
        raise ValueError("SDPA's causal mask is the top-left one: another problem when N and M differ")
    if name == "math":
        needed = (6 if problem.backward else 3) * 4 * problem.B * problem.H * problem.N * problem.M
        free = torch.cuda.mem_get_info(problem.device)[0] if problem.device.type == "cuda" else 4 << 30
        if needed > free:
            raise ValueError(f"its N x M scores need about {needed / 2**30:.0f} GiB")
    return functools.partial(
        torch.nn.functional.scaled_dot_product_attention,
        is_causal=problem.causal != "none",
        enable_gqa=problem.Hkv != problem.H,
    )


def why_refused(error: Exception, caught: list[warnings.WarningMessage]) -> str:
    """SDPA says in warnings why a backend refuses; what it says of the others, which were not asked, is left out."""
    said = [str(warning.message).split(" (Triggered")[0] for warning in caught]
    said = [text for text in said if "not used because" not in text and "disabled" not in text]
    return "; ".join([first_line(error).split(". ")[0], *said[:1]])


def contenders(problem: Problem, peers: list[str], seed: int, missing: dict[str, str]) -> list[Contender]:
    """Ours and the peers that take the problem; why the others do not goes to `missing`."""
    element = torch.empty((), dtype=problem.dtype).element_size()
    size = element * problem.B * problem.D * (problem.H * problem.N + 2 * problem.Hkv * problem.M)
    sets = [problem.inputs(seed + index) for index in range(input_sets(size, problem.device))]
    found = [Contender(OURS, rotate(problem.timed(problem.attention if problem.backward else problem.fwd), sets))]
    for name in peers:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                call = problem.timed(peer_call(problem, name))
                context = functools.partial(sdpa_kernel, PEERS[name])
                with context():
                    call(*sets[0])
                found.append(Contender(f"sdpa {name}", rotate(call, sets), context))
            except Exception as error:
                missing[f"sdpa {name}"] = why_refused(error, caught)
    return found


def timing_table(problem: Problem, peers: list[str], rounds: int, seed: int) -> None:
    """Time ours and the peers in turn, and print the table."""
    missing: dict[str, str] = {}
    running = contenders(problem, peers, seed, missing)
    progress = Progress("timing", rounds * len(running))
    timings = measure(
        running,
        problem.device,
        clock="events" if problem.device.type == "cuda" else "wall",
        rounds=rounds,
        seconds=rounds * SECONDS_A_ROUND,
        failures=missing,
        on_turn=progress,
    )
    progress.close()
    what = "a call forward and backward" if problem.backward else "a call"
    print(f"\ntime {what} (median of {rounds} rounds, taken in turn)")
    for name in [OURS, *(f"sdpa {peer}" for peer in peers)]:
        if name in timings:
            print(f"  {name:<15}{_timing_columns(problem, timings, name)}")
        else:
            print(f"  {name:<15}does not run: {missing[name]}")


def _timing_columns(problem: Problem, timings: dict[str, Timing], name: str) -> str:
    timing = timings[name]
    columns = (
        f"{timing.median * 1e3:10.4f} ms +-{timing.spread:5.1%} {tflops(problem.flops, timing.median):9.4g} TFLOP/s"
    )
    if name == OURS or OURS not in timings:
        return columns
    ratio = speed_ratio(timings[OURS], timing)
    return f"{columns}   flash_cute is {ratio.median:.2f}x as fast (+-{ratio.spread:.2f})"


def describe(problem: Problem) -> None:
    """Print where and on what it runs."""
    device = f"CPU ({platform.processor() or platform.machine()}, {torch.get_num_threads()} threads)"
    if problem.device.type == "cuda":
        properties = torch.cuda.get_device_properties(problem.device)
        device = f"{properties.name} (compute capability {properties.major}.{properties.minor})"
    print(f"flash_cute {flash_cute.__version__}, torch {torch.__version__}, {device}")
    print(
        f"q ({problem.B}, {problem.H}, {problem.N}, {problem.D}), k and v ({problem.B}, {problem.Hkv}, {problem.M}, "
        f"{problem.D}), {str(problem.dtype).removeprefix('torch.')}, causal {problem.causal}"
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The flags; what depends on the device is filled in."""
    parser = argparse.ArgumentParser(
        prog="python -m flash_cute", description="One attention: checked against float64, timed beside SDPA, explained."
    )
    parser.add_argument("--B", type=_positive, help="batch (4; on the CPU 1)")
    parser.add_argument("--H", type=_positive, help="heads of q (16; on the CPU 8)")
    parser.add_argument("--Hkv", type=_positive, help="heads of k and v, a divisor of H (H)")
    parser.add_argument("--N", type=_positive, help="queries (4096; on the CPU 512)")
    parser.add_argument("--M", type=_positive, help="keys (N)")
    parser.add_argument("--D", type=_positive, help="head dim (128; on the CPU 64)")
    parser.add_argument(
        "--causal",
        nargs="?",
        const="bottom_right",
        default="none",
        choices=["none", "bottom_right", "top_left"],
        help="mask (none); without a value bottom_right",
    )
    parser.add_argument("--backward", action="store_true", help="check the gradients, and time forward and backward")
    parser.add_argument("--dtype", type=_dtype, metavar="{bf16,fp16,fp32,fp64}", help="bf16; on the CPU fp32")
    parser.add_argument("--backend", choices=["cpu", "sm80", "sm90"], help="insist on a backend (the best one)")
    parser.add_argument("--iters", type=_positive, default=7, help="timed rounds of about 30 ms each (7)")
    parser.add_argument(
        "--check", action=argparse.BooleanOptionalAction, default=True, help="the error against float64 (on)"
    )
    parser.add_argument(
        "--peers",
        type=_peers,
        help=f"SDPA's backends to time beside it: all, none or some of {','.join(PEERS)} (all; on the CPU flash,math)",
    )
    parser.add_argument("--device", type=_device, help="cuda, cuda:1, cpu (the GPU if there is one)")
    parser.add_argument("--seed", type=_seed, help="of the random inputs (the time)")
    args = parser.parse_args(argv)
    if args.device is None:
        available = flash_cute.backends()
        args.device = torch.device("cuda" if available["sm80"] or available["sm90"] else "cpu")
    on_cpu = args.device.type == "cpu"
    for name, (on_gpu, otherwise) in {"B": (4, 1), "H": (16, 8), "N": (4096, 512), "D": (128, 64)}.items():
        if getattr(args, name) is None:
            setattr(args, name, otherwise if on_cpu else on_gpu)
    args.Hkv = args.Hkv or args.H
    args.M = args.M or args.N
    if args.peers is None:
        args.peers = ["flash", "math"] if on_cpu else list(PEERS)
    args.dtype = args.dtype or (torch.float32 if on_cpu else torch.bfloat16)
    if args.H % args.Hkv:
        parser.error(f"--Hkv: expected a divisor of --H {args.H}, got {args.Hkv}")
    return args


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text}") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


def _device(text: str) -> torch.device:
    """A device that this torch and this machine have."""
    expected = "expected cpu, cuda or cuda:<number>"
    try:
        device = torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{expected}, got {text}") from None
    if device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{expected}, got {text}")
    if device.type == "cuda":
        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if there == 0:
            raise argparse.ArgumentTypeError(f"torch finds no GPU here, got {text}")
        if device.index is not None and device.index >= there:
            raise argparse.ArgumentTypeError(f"expected a number below {there}, the GPUs here, got {text}")
    return device


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 2^63 - 1, got {text}")
    return int(text)


def _dtype(text: str) -> torch.dtype:
    dtypes = DTYPES | {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
    if text not in dtypes:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(DTYPES)}, got {text}")
    return dtypes[text]


def _peers(text: str) -> list[str]:
    if text in ("all", "none"):
        return list(PEERS) if text == "all" else []
    names = text.split(",")
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(PEERS)}, got {', '.join(unknown)}")
    return names


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    shape = {name: getattr(args, name) for name in ("B", "H", "Hkv", "N", "M", "D")}
    options = {name: getattr(args, name) for name in ("causal", "dtype", "device", "backend", "backward")}
    problem = Problem(**shape, **options)
    seed = int(time.time()) if args.seed is None else args.seed
    try:
        describe(problem)
        q, k, v = problem.inputs(seed)
        explanations = {
            f"what runs{', backward' if backward else ''}": flash_cute.explain(
                q, k, v, problem.causal_argument, backend=args.backend, backward=backward
            )
            for backward in ((False, True) if args.backward else (False,))
        }
        ok = check(problem, q, k, v) if args.check else True
    except (ValueError, RuntimeError) as error:
        print(first_line(error), file=sys.stderr, flush=True)
        return 2
    timing_table(problem, args.peers, args.iters, seed)
    for title, explanation in explanations.items():
        print(f"\n{title}\n{textwrap.indent(str(explanation), '  ')}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

"""The shapes that are measured: single cases by flags, and named grids."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from bench.figures import shape_label

Causal = Literal["none", "top_left", "bottom_right"]
# "train" is the forward and the backward, through autograd
Direction = Literal["fwd", "bwd", "train"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
DTYPE_NAMES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "float64": "fp64",
    "double": "fp64",
}

# q, k and v; and dout, where there is a backward
Inputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Workload:
    """One attention problem. The fields are named as the flags of `python -m flash_cute` are."""

    B: int
    H: int
    Hkv: int
    N: int
    M: int
    D: int
    causal: Causal
    dtype: str
    direction: Direction = "fwd"

    @property
    def is_causal(self) -> bool:
        return self.causal != "none"

    @property
    def flops(self) -> float:
        from flash_cute._timing import attention_flops  # here: bench/versus.py chooses which flash_cute after its flags

        shape = (self.B, self.H, self.N, self.M, self.D)
        forward = attention_flops(*shape, causal=self.is_causal)
        backward = attention_flops(*shape, causal=self.is_causal, backward=True)
        return {"fwd": forward, "bwd": backward, "train": forward + backward}[self.direction]

    @property
    def query_bytes(self) -> int:
        """Bytes of q, as of out, dout and dq."""
        return self.B * self.H * self.N * self.D * DTYPES[self.dtype].itemsize

    @property
    def key_bytes(self) -> int:
        """Bytes of k, as of v, dk and dv."""
        return self.B * self.Hkv * self.M * self.D * DTYPES[self.dtype].itemsize

    @property
    def input_bytes(self) -> int:
        """Bytes of what `make_inputs` returns."""
        return (1 if self.direction == "fwd" else 2) * self.query_bytes + 2 * self.key_bytes

    @property
    def least_bytes(self) -> int:
        """Bytes of what one direction must read, and of what it must write, each once; lse is float32."""
        lse = self.B * self.H * self.N * 4
        forward = 2 * self.query_bytes + 2 * self.key_bytes + lse
        backward = 4 * self.query_bytes + 4 * self.key_bytes + lse
        return {"fwd": forward, "bwd": backward, "train": forward + backward}[self.direction]

    @property
    def label(self) -> str:
        return shape_label(vars(self))

    def make_inputs(self, device: torch.device, seed: int) -> Inputs:
        """q (B, H, N, D), k and v (B, Hkv, M, D), and where there is a backward dout (B, H, N, D); standard normal."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(heads: int, length: int) -> torch.Tensor:
            shape = (self.B, heads, length, self.D)
            return torch.randn(shape, generator=generator, device=device, dtype=DTYPES[self.dtype])

        forward = (normal(self.H, self.N), normal(self.Hkv, self.M), normal(self.Hkv, self.M))
        return forward if self.direction == "fwd" else (*forward, normal(self.H, self.N))


def case(B: int, H: int, N: int, D: int, causal: bool, *, M: int = 0, Hkv: int = 0, dtype: str = "bf16") -> Workload:
    return Workload(B, H, Hkv or H, N, M or N, D, "bottom_right" if causal else "none", dtype)


def paper_grid() -> list[Workload]:
    """16,384 tokens a batch, heads x head dim = 2048."""
    return [
        case(16384 // n, 2048 // d, n, d, causal)
        for d in (64, 128, 256)
        for causal in (False, True)
        for n in (1024, 4096, 16384)
    ]


def dims_grid() -> list[Workload]:
    """Head dims between the powers of two."""
    return [
        case(4, 16, 4096, d, causal, dtype=dtype)
        for dtype in ("bf16", "fp16")
        for d in (32, 80, 96, 192)
        for causal in (False, True)
    ]


def fp16_grid() -> list[Workload]:
    """The shapes at which Triton's fused-attention tutorial can be compared (fp16 only)."""
    cells = [case(4, 32, 4096, d, causal, dtype="fp16") for d in (64, 128) for causal in (False, True)]
    return [*cells, case(1, 48, 8192, 64, False, dtype="fp16")]


def odd_grid() -> list[Workload]:
    """Lengths that no tile divides, unequal lengths, few queries over many keys."""
    cells: list[Workload] = []
    for causal in (False, True):
        cells += [
            case(4, 16, 4097, 128, causal),
            case(4, 32, 4097, 64, causal),
            case(1, 16, 16383, 128, causal),
            case(4, 16, 4096, 128, causal),
            case(4, 16, 4095, 128, causal, M=4096),
        ]
    cells += [case(2, 32, 64, 128, False, M=32768), case(2, 32, 128, 128, False, M=65536)]
    return [*cells, case(2, 32, 64, 128, False, M=32768, Hkv=8), case(1, 16, 512, 64, False, M=8192)]


def small_grid() -> list[Workload]:
    """Problems so small that the host's work decides; measured on the host's clock and by graph replay."""
    shapes = [
        (1, 8, 512, 64),
        (1, 16, 512, 128),
        (2, 16, 512, 128),
        (4, 16, 512, 128),
        (8, 16, 512, 64),
        (8, 16, 512, 128),
        (32, 16, 512, 64),
        (1, 16, 2048, 128),
    ]
    return [case(b, h, n, d, causal) for b, h, n, d in shapes for causal in (False, True)]


def llama_grid() -> list[Workload]:
    """The attention of Llama-3-8B."""
    return [case(2, 32, 8192, 128, causal, Hkv=8) for causal in (False, True)]


def deterministic_grid() -> list[Workload]:
    """Every head dim of the kernels, for the deterministic mode of the backward beside the default one."""
    return [
        case(16384 // n, 16, n, d, causal)
        for d in (32, 64, 96, 128, 192, 256)
        for causal in (False, True)
        for n in (1024, 8192)
    ]


def host_grid() -> list[Workload]:
    """Problems whose kernel is shorter than the call that launches it."""
    return [case(1, 8, 64, 64, False), case(1, 8, 64, 128, True)]


def cpu_grid() -> list[Workload]:
    """Problems of a size that a CPU computes in milliseconds."""
    return [
        case(1, 4, n, 64, causal, dtype=dtype)
        for dtype in ("fp32", "bf16")
        for causal in (False, True)
        for n in (256, 512, 1024)
    ]


GRIDS: dict[str, Callable[[], list[Workload]]] = {
    "paper": paper_grid,
    "llama": llama_grid,
    "dims": dims_grid,
    "odd": odd_grid,
    "fp16": fp16_grid,
    "small": small_grid,
    "deterministic": deterministic_grid,
    "host": host_grid,
    "cpu": cpu_grid,
}


def _dtype_name(text: str) -> str:
    name = DTYPE_NAMES.get(text, text)
    if name not in DTYPES:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(DTYPES)}, given {text!r}")
    return name


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
    shape.add_argument("--dtype", type=_dtype_name, default="bf16", help="bf16 (default), fp16, fp32, fp64")


def from_flags(flags: argparse.Namespace, direction: Direction) -> Workload:
    return Workload(
        flags.B,
        flags.H,
        flags.Hkv or flags.H,
        flags.N,
        flags.M or flags.N,
        flags.D,
        flags.causal,
        flags.dtype,
        direction,
    )

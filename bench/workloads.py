"""The problems that are measured, and the named grids of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

import torch

from bench import float8
from bench.figures import OPTION_COLUMNS, SHAPE_COLUMNS, shape_label
from bench.lengths import lengths_of

Causal = Literal["none", "top_left", "bottom_right"]
# "train" is the forward and the backward, through autograd
Direction = Literal["fwd", "bwd", "train"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
DTYPES["e4m3"] = torch.float8_e4m3fn  # a forward alone; see `bench/float8.py`

# q, k and v; and dout, where there is a backward; of float8 the factors of q, k and v
Inputs = tuple[torch.Tensor, ...]


Window = tuple[int | None, int | None]  # keys that a row sees before its position and behind it; None: no limit


@dataclass(frozen=True)
class Workload:
    """One attention problem. The fields are named as the flags of `python -m flash_cute` are.

    Of a packed batch (`lengths`, see `bench/lengths.py`) B is the number of sequences, N and M the longest's length.
    """

    B: int
    H: int
    Hkv: int
    N: int
    M: int
    D: int
    causal: Causal
    dtype: str
    direction: Direction = "fwd"
    Dv: int = 0  # v's head dim; 0: D
    window: Window | None = None
    softcap: float = 0.0  # 0: none
    sinks: bool = False
    alibi: bool = False
    lengths: str = ""

    @property
    def is_causal(self) -> bool:
        return self.causal != "none"

    @property
    def is_float8(self) -> bool:
        return self.dtype == "e4m3"

    @property
    def head_dim_v(self) -> int:
        return self.Dv or self.D

    @property
    def sequences(self) -> tuple[int, ...]:
        """The lengths of a packed batch; none of a dense one."""
        return lengths_of(self.lengths) if self.lengths else ()

    @property
    def columns(self) -> dict[str, Any]:
        """The shape and the options as a CSV has them; of an option that is not there the empty text."""
        sides = ["" if side is None else str(side) for side in self.window or ()]
        options = (self.Dv or "", ",".join(sides), f"{self.softcap:g}" if self.softcap else "")
        chosen = ("yes" if option else "" for option in (self.sinks, self.alibi))
        shape = {name: getattr(self, name) for name in SHAPE_COLUMNS}
        of_caches = ("", "", "")  # see bench/caches.py
        return shape | dict(zip(OPTION_COLUMNS, (*options, *chosen, self.lengths, *of_caches), strict=True))

    @property
    def visible_pairs(self) -> float:
        """The (row, key) pairs of one head that the mask leaves, in all sequences: of a causal one half of all."""
        if self.window is None:
            share = 0.5 if self.is_causal else 1.0
            return share * (sum(n * n for n in self.sequences) if self.lengths else self.B * self.N * self.M)
        if self.lengths:
            return sum(pairs_in_window(n, n, self.window, self.causal) for n in self.sequences)
        return self.B * pairs_in_window(self.N, self.M, self.window, self.causal)

    @property
    def flops(self) -> float:
        """Of the products alone: two over D and Dv forward, three over D and two over Dv backward."""
        forward = 2.0 * self.H * self.visible_pairs * (self.D + self.head_dim_v)
        backward = 2.0 * self.H * self.visible_pairs * (3 * self.D + 2 * self.head_dim_v)
        return {"fwd": forward, "bwd": backward, "train": forward + backward}[self.direction]

    @property
    def rows(self) -> int:
        """Query rows of one head, in all sequences."""
        return sum(self.sequences) if self.lengths else self.B * self.N

    @property
    def keys(self) -> int:
        return self.rows if self.lengths else self.B * self.M

    @property
    def tensor_bytes(self) -> dict[str, int]:
        """Bytes of q, k, v and out, and so of their gradients."""
        of_q, of_k = self.rows * self.H, self.keys * self.Hkv
        elements = {"q": of_q * self.D, "k": of_k * self.D, "v": of_k * self.head_dim_v, "out": of_q * self.head_dim_v}
        sizes = dict.fromkeys(elements, DTYPES[self.dtype].itemsize)
        if self.is_float8:
            sizes["out"] = 2  # bfloat16
        return {name: number * sizes[name] for name, number in elements.items()}

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values in caches that rows see; 0 of a problem without caches."""
        return 0

    @property
    def input_bytes(self) -> int:
        """Bytes of what `make_inputs` returns."""
        of = self.tensor_bytes
        return of["q"] + of["k"] + of["v"] + (0 if self.direction == "fwd" else of["out"])

    @property
    def least_bytes(self) -> int:
        """Bytes of what one direction must read, and of what it must write, each once; lse is float32."""
        of, lse = self.tensor_bytes, self.rows * self.H * 4
        forward, backward = sum(of.values()) + lse, 2 * sum(of.values()) + lse
        return {"fwd": forward, "bwd": backward, "train": forward + backward}[self.direction]

    @property
    def label(self) -> str:
        return shape_label(self.columns)

    def make_inputs(self, device: torch.device, seed: int) -> Inputs:
        """q (B, H, N, D), k (B, Hkv, M, D), v (B, Hkv, M, Dv), and where there is a backward dout (B, H, N, Dv).

        Of a packed batch (rows, H, D) and so on. Standard normal. Of float8 see `float8.quantised`.
        """
        generator = torch.Generator(device).manual_seed(seed)
        drawn = torch.float32 if self.is_float8 else DTYPES[self.dtype]

        def normal(heads: int, length: int, columns: int) -> torch.Tensor:
            shape = (self.rows, heads, columns) if self.lengths else (self.B, heads, length, columns)
            return torch.randn(shape, generator=generator, device=device, dtype=drawn)

        of_v = self.head_dim_v
        forward = (normal(self.H, self.N, self.D), normal(self.Hkv, self.M, self.D), normal(self.Hkv, self.M, of_v))
        if self.is_float8:
            return float8.quantised(*forward)
        return forward if self.direction == "fwd" else (*forward, normal(self.H, self.N, of_v))

    def make_offsets(self, device: torch.device) -> torch.Tensor:
        """(B + 1,) int32: where each sequence of a packed batch begins, and where the last one ends."""
        return torch.tensor([0, *accumulate(self.sequences)], dtype=torch.int32, device=device)

    def make_sinks(self, device: torch.device) -> torch.Tensor:
        """(H,) float32, standard normal, the same ones each time."""
        return torch.randn(self.H, generator=torch.Generator().manual_seed(0)).to(device)

    def make_slopes(self, device: torch.device) -> torch.Tensor:
        """(H,) float32: 2 ** -(8 (h + 1) / H), as in the paper of ALiBi (arXiv 2108.12409)."""
        return 2.0 ** -(8 * torch.arange(1, self.H + 1, device=device) / self.H)


def pairs_in_window(rows: int, keys: int, window: Window, causal: Causal) -> int:
    """How many (row, key) pairs a window leaves of one sequence, counted exactly."""
    left, right = window[0], 0 if causal != "none" else window[1]
    position = torch.arange(rows) + (0 if causal == "top_left" else keys - rows)
    first = torch.zeros_like(position) if left is None else (position - left).clamp(0, keys)
    limit = torch.full_like(position, keys) if right is None else (position + right + 1).clamp(0, keys)
    return int((limit - first).clamp(min=0).sum())


def case(B: int, H: int, N: int, D: int, causal: bool, *, M: int = 0, Hkv: int = 0, dtype: str = "bf16") -> Workload:
    return Workload(B, H, Hkv or H, N, M or N, D, "bottom_right" if causal else "none", dtype)


def packed(lengths: str, H: int, Hkv: int, D: int) -> Workload:
    """Causal self-attention in each of the sequences."""
    found = lengths_of(lengths)
    return replace(case(len(found), H, max(found), D, True, Hkv=Hkv), lengths=lengths)


def paper_grid() -> list[Workload]:
    """16,384 tokens per batch, heads x head dim = 2048."""
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


def window_grid() -> list[Workload]:
    """Sliding windows of models: a row sees its own key and those before it, 1024, 4096 or 128 in all."""
    cells = [
        replace(case(1, 16, 16384, 128, True), window=(1023, 0)),
        replace(case(1, 32, 32768, 128, True, Hkv=8), window=(4095, 0)),
        replace(case(1, 8, 8192, 256, True, Hkv=4), window=(1023, 0)),  # Gemma 3
    ]
    gpt_oss = replace(case(1, 64, 8192, 64, True, Hkv=8), window=(127, 0))
    return [*cells, gpt_oss, replace(gpt_oss, sinks=True)]


def varlen_grid() -> list[Workload]:
    """Packed batches, causal: documents, equal lengths, short sequences, and a long one beside short ones."""
    return [
        packed(lengths, heads, heads_kv, 128)
        for heads, heads_kv in ((16, 16), (32, 8))
        for lengths in ("documents", "16x1024", "short", "28672+16x256")
    ]


def dv_grid() -> list[Workload]:
    """q and k of head dim 192 over v of 128, as in the training and the prefill of multi-head latent attention."""
    return [
        replace(case(b, 16, n, 192, causal), Dv=128)
        for causal in (False, True)
        for b, n in ((4, 4096), (2, 8192), (1, 16384))
    ]


def large_grid() -> list[Workload]:
    """Head dims above 256: Gemma 4's global layers (512) and image autoencoders (512) have them."""
    shapes = ((32, 8192, 320), (8, 8192, 512), (32, 8192, 512), (16, 16384, 512), (16, 8192, 1024))
    return [case(1, heads, n, d, causal) for heads, n, d in shapes for causal in (False, True)]


def options_grid() -> list[Workload]:
    """Sinks, a softcap, ALiBi, each on the causal shapes of the paper grid; beside `:plain`, what each costs."""
    return [
        replace(plain, **option)
        for option in ({"sinks": True}, {"softcap": 50.0}, {"alibi": True})
        for plain in paper_grid()
        if plain.is_causal
    ]


def fp8_grid() -> list[Workload]:
    """The long shapes of the paper grid in float8: q, k and v in e4m3, out in bfloat16."""
    return [replace(one, dtype="e4m3") for one in paper_grid() if one.N >= 4096]


GRIDS: dict[str, Callable[[], list[Workload]]] = {
    "paper": paper_grid,
    "llama": llama_grid,
    "dims": dims_grid,
    "odd": odd_grid,
    "fp16": fp16_grid,
    "small": small_grid,
    "window": window_grid,
    "varlen": varlen_grid,
    "dv": dv_grid,
    "large": large_grid,
    "options": options_grid,
    "fp8": fp8_grid,
    "deterministic": deterministic_grid,
    "host": host_grid,
    "cpu": cpu_grid,
}

"""GPUs whose budgets flash_cute.inspect and flash_cute.schedules compute."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CHIPS", "Chip"]


@dataclass(frozen=True)
class Chip:
    """What a multiprocessor has, by NVIDIA's tables of compute capabilities and data sheets."""

    name: str
    capability: int
    sms: int
    clock_ghz: float  # boost; for the H100 the one that its 989 TFLOP/s are given at
    smem_sm: int  # bytes; each CTA takes 1 KB more than it asks for
    threads_sm: int
    mma_flop: dict[str, int]  # architecture folder -> FLOP per clock, 16-bit operands and float32 accumulators
    entries: dict[str, tuple[str, ...]]  # architecture folder -> entries of its tile tables that run here; none: all

    registers_sm = 65536
    ex2_clk = 16  # exponentials per clock
    smem_clk = 128  # bytes per clock


CHIPS = (
    Chip("A100", 80, 108, 1.41, 164 << 10, 2048, {"sm80": 2048}, {"sm80": ("a100",)}),
    Chip("RTX 3080", 86, 68, 1.71, 100 << 10, 1536, {"sm80": 512}, {"sm80": ("99kb",)}),
    Chip("RTX 4090", 89, 128, 2.52, 100 << 10, 1536, {"sm80": 512}, {"sm80": ("99kb",)}),
    Chip("L20", 89, 92, 2.52, 100 << 10, 1536, {"sm80": 512}, {"sm80": ("99kb",)}),
    # mma.sync does not reach wgmma's rate: 645 TFLOP/s were measured with nothing else in the loop.
    Chip("H100", 90, 132, 1.83, 228 << 10, 2048, {"sm80": 2670, "sm90": 4096}, {"sm80": ("h100",), "sm90": ()}),
)

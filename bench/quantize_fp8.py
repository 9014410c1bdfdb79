"""Times flash_cute.quantize_fp8 against moving its bytes: python bench/quantize_fp8.py [rows] [heads] [head dim]

A tensor's bytes are those of x, read once, and of the float8 values: `copy` is a device-to-device copy that moves as
many. Kernel time, of CUDA graphs of 20 calls whose inputs rotate: the median of 9 rounds.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial

import torch

from flash_cute import _ops

CALLS, ROUNDS, TENSORS = 20, 9, 4


def microseconds(calls: list[Callable[[], object]]) -> float:
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            calls[i % len(calls)]()
    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / CALLS)
    return statistics.median(times)


rows, heads, head_dim = (int(x) for x in [*sys.argv[1:], *("16384", "16", "128")[len(sys.argv) - 1 :]])
x = torch.randn(TENSORS, 1, rows, heads, head_dim, device="cuda", dtype=torch.bfloat16).transpose(2, 3)
moved = x[0].numel() * 3
from_, to = (torch.empty(TENSORS, moved // 2, device="cuda", dtype=torch.uint8) for _ in range(2))
copy = microseconds([partial(to[i].copy_, from_[i]) for i in range(TENSORS)])
print(f"{torch.cuda.get_device_name()}: copy {copy:.1f} us, {moved / copy / 1e6:.2f} TB/s")
mean = torch.zeros(1, heads, head_dim, device="cuda")
for name, per, center, seed, key_mean in (
    ("q head", "head", False, None, None),
    ("q head, with k's mean", "head", False, None, mean),
    ("q block", "block", False, None, None),
    ("q head, rotated", "head", False, 0, None),
    ("k head, smooth", "head", True, None, None),
    ("k block, smooth", "block", True, None, None),
    ("k head, smooth, rotated", "head", True, 0, None),
    ("v channel", "channel", False, None, None),
):
    options = ("q", "float8_e4m3fn", per, heads, center, seed, key_mean, None, None)
    time = microseconds([partial(_ops.quantize_fp8, one, *options) for one in x])
    print(f"{name:26} {time:7.1f} us   {time / copy:.2f} of a copy")

"""Times flash_cute.quantize_fp8 against moving its bytes: python bench/quantize_fp8.py [--rows 16384] [--heads 16]

A tensor's bytes are those of x, read once, and of the float8 values. `copy` is a device-to-device copy of as many: of
three bytes for two of 16 bits. Kernel time, by CUDA graphs of 20 calls, inputs rotated, the median of 9 rounds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    options = parser.parse_args()
    shape = (1, options.rows, options.heads, options.head_dim)
    xs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(TENSORS)]
    moved = xs[0].numel() * 3
    from_, to = (torch.empty(TENSORS, moved // 2, device="cuda", dtype=torch.uint8) for _ in range(2))
    copy = microseconds([lambda i=i: to[i].copy_(from_[i]) for i in range(TENSORS)])
    print(f"{torch.cuda.get_device_name()}: copy {copy:.1f} us, {moved / copy / 1e6:.2f} TB/s")
    mean = torch.zeros(1, options.heads, options.head_dim, device="cuda")
    kinds = {
        "q head": ("head", False, None, None), "q head, with k's mean": ("head", False, None, mean),
        "q block": ("block", False, None, None), "q head, rotated": ("head", False, 0, None),
        "k head, smooth": ("head", True, None, None), "k block, smooth": ("block", True, None, None),
        "k head, smooth, rotated": ("head", True, 0, None), "v channel": ("channel", False, None, None),
    }  # fmt: skip
    for name, kind in kinds.items():
        calls = [lambda x=x, kind=kind: _ops.quantize_fp8(x, "q", "float8_e4m3fn", kind[0], options.heads, *kind[1:], None, None) for x in xs]  # fmt: skip  # noqa: E501
        time = microseconds(calls)
        print(f"{name:26} {time:7.1f} us   {time / copy:.2f} of a copy")


if __name__ == "__main__":
    main()

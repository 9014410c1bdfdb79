"""One build of flash_cute in a process of its own, which `bench/versus.py` starts and gives turns.

    versus_worker.py DEVICE FD

Reads commands from standard input and writes replies to the open file descriptor FD, one JSON object per line:

    {"do": "facts"}                        where flash_cute was loaded from, its version and the GPU
    {"do": "prepare", "shape": {...}, ...} makes inputs, calls once, keeps a sample of the results; seconds per call
    {"do": "turn", "calls": 40}            times a batch of calls; seconds per call
    {"do": "release"}                      frees every tensor and returns the memory to the driver

It imports nothing of bench and calls nothing of flash_cute but `fwd` and `bwd`, and of packed batches `varlen_fwd` and
`varlen_bwd`, each with the options that are asked for alone, so that it also runs older builds.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

# This folder would hide the standard library's `profile`. flash_cute comes from PYTHONPATH.
sys.path.pop(0)

import torch

import flash_cute

SAMPLE = 1 << 18  # elements of each result that are compared
LEAD_IN = 4  # a turn starts with a quarter of its calls untimed: caches, and the clock after the other's turn
MOST_SETS = 64


class Worker:
    """The problem at hand: its inputs in several sets, and one call that takes the sets in turn."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.call: Callable[[], object] | None = None

    def facts(self) -> dict[str, Any]:
        gpu = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        return {"path": flash_cute.__file__, "flash_cute": flash_cute.__version__, "gpu": gpu}

    def prepare(
        self,
        shape: dict[str, Any],
        causal: bool | str,
        options: dict[str, Any],
        seed: int,
        sample: str,
    ) -> dict[str, Any]:
        """Make inputs and call once.

        `shape` has B, H, Hkv, N, M, D, Dv, dtype (torch's name), direction, window (None, or left and right), softcap
        (0: none), sinks and alibi (whether there are any), and `lengths`: those of a packed batch, or none.
        """
        backward = shape["direction"] == "bwd"
        packed = "varlen_" if shape["lengths"] else ""
        compute: Callable[..., Any] = getattr(flash_cute, f"{packed}fwd")
        options = {**self._score(shape), **self._lengths(shape), **options}
        first = self._inputs(shape, seed)
        sets = self._number_of_sets(sum(x.nbytes for x in first))
        arguments = [first, *(self._inputs(shape, seed + index) for index in range(1, sets))]
        function: Callable[..., Any] = getattr(flash_cute, f"{packed}bwd") if backward else compute
        if backward:
            forward_options = {name: value for name, value in options.items() if name != "deterministic"}
            arguments = [
                (dout, q, k, v, *compute(q, k, v, causal=causal, **forward_options)) for dout, q, k, v in arguments
            ]

        results = function(*arguments[0], causal=causal, **options)
        torch.save([_sampled(result) for result in results], sample)
        del results
        following = itertools.cycle(arguments).__next__
        self.call = lambda: function(*following(), causal=causal, **options)
        seconds = [self._seconds(calls) for calls in (1, 2, 2)]
        return {"seconds": min(seconds), "sets": sets}

    def _inputs(self, shape: dict[str, Any], seed: int) -> tuple[torch.Tensor, ...]:
        """q (B, H, N, D), k (B, Hkv, M, D), v (B, Hkv, M, Dv), for a backward dout (B, H, N, Dv) before them.

        Of a packed batch (rows, H, D) and so on. Standard normal; float8 rounded from float32, with no factors.
        """
        generator = torch.Generator(self.device).manual_seed(seed)

        def normal(heads: str, length: str, columns: str) -> torch.Tensor:
            rows = (sum(shape["lengths"]),) if shape["lengths"] else ()
            size = (*rows, shape[heads]) if rows else (shape["B"], shape[heads], shape[length])
            dtype = getattr(torch, shape["dtype"])
            drawn = torch.float32 if dtype.itemsize == 1 else dtype
            return torch.randn(*size, shape[columns], generator=generator, device=self.device, dtype=drawn).to(dtype)

        forward = (normal("H", "N", "D"), normal("Hkv", "M", "D"), normal("Hkv", "M", "Dv"))
        return (normal("H", "N", "Dv"), *forward) if shape["direction"] == "bwd" else forward

    def _score(self, shape: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the window and of the score; the tensors are the same in both builds."""
        options: dict[str, Any] = {}
        if shape["window"] is not None:
            options["window"] = tuple(shape["window"])
        if shape["softcap"]:
            options["softcap"] = shape["softcap"]
        if shape["sinks"]:
            options["sinks"] = torch.linspace(-1, 1, shape["H"], device=self.device)
        if shape["alibi"]:
            options["alibi_slopes"] = torch.linspace(0.5, 0.01, shape["H"], device=self.device)
        return options

    def _lengths(self, shape: dict[str, Any]) -> dict[str, Any]:
        """Where the sequences of a packed batch are."""
        if not shape["lengths"]:
            return {}
        ends = itertools.accumulate(shape["lengths"])
        offsets = torch.tensor([0, *ends], dtype=torch.int32, device=self.device)
        hints = {"max_seqlen_q": max(shape["lengths"]), "max_seqlen_k": max(shape["lengths"])}
        return {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, **hints}

    def _number_of_sets(self, bytes_of_one: int) -> int:
        """So many that no call finds its inputs in the L2 cache; three at least, so that no one address decides."""
        if self.device.type != "cuda":
            return 2
        cache: int = torch.cuda.get_device_properties(self.device).L2_cache_size
        return min(MOST_SETS, max(3, 1 + math.ceil(2 * cache / bytes_of_one)))

    def turn(self, calls: int) -> dict[str, float]:
        self._run(math.ceil(calls / LEAD_IN))
        return {"seconds": self._seconds(calls)}

    def _run(self, calls: int) -> None:
        assert self.call is not None, "turn before prepare"
        for _ in range(calls):
            self.call()

    def _seconds(self, calls: int) -> float:
        """Seconds per call, by CUDA events; the device is idle at the end. On the CPU by the host's clock."""
        if self.device.type != "cuda":
            started = time.perf_counter()
            self._run(calls)
            return (time.perf_counter() - started) / calls
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self._run(calls)
        stop.record()
        torch.cuda.synchronize(self.device)
        return start.elapsed_time(stop) * 1e-3 / calls

    def release(self) -> dict[str, Any]:
        self.call = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        return {}


def _sampled(result: torch.Tensor) -> torch.Tensor:
    """About SAMPLE elements at an odd distance, so that they fall on every row and column; float32, on the CPU."""
    flat = result.reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE) | 1].float().cpu()


def main(device: torch.device, descriptor: int) -> None:
    if device.type == "cuda":
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_device(device)  # which does not take one without an index
    worker = Worker(device)
    with os.fdopen(descriptor, "w") as replies:
        for line in sys.stdin:
            command = json.loads(line)
            try:
                reply = getattr(worker, command.pop("do"))(**command)
            except Exception as error:
                worker.release()
                reply = {"error": (str(error).strip() or type(error).__name__).splitlines()[0]}
            print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main(torch.device(sys.argv[1]), int(sys.argv[2]))

"""Host time of a forward through each layer that other projects' interfaces put over `flash_cute.attention`.

    python bench/layers.py --out mine-layers.csv

One problem whose kernel is shorter than the call that launches it, without gradients, on clock `host` (flash_cute's own
time on the CPU thread; see docs/measuring.md). `over` is what a layer adds to `flash_cute.attention` on the same
tensors in the layout that the layer takes: microseconds, the median over rounds in which all take turns. In brackets
the same function of the package that the layer stands for, where it is installed.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
if not __package__:
    # Run as a script: bench/ must not hide the standard library's `profile`, nor this tree the installed package.
    sys.path[:] = [*sys.path[1:], str(ROOT)]

import flash_cute  # noqa: E402
from bench.environment import environment  # noqa: E402
from flash_cute._timing import Contender, Timing, first_line, measure  # noqa: E402
from flash_cute.integrations import flash_attn, flash_attn_interface, sdpa, transformers  # noqa: E402

MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}
BASE = "flash_cute.attention"
AIM = 3.0  # microseconds


@dataclass(frozen=True)
class Layer:
    """One way to call the attention; `context` is in force around a batch of calls."""

    name: str
    call: Callable[[], object]
    context: Callable[[], AbstractContextManager[object]] = nullcontext


def layers(device: torch.device, dtype: torch.dtype) -> Iterator[Layer]:
    """Causal attention of 64 rows and 8 heads of 64, of tensors that each layer finds in the layout that it takes."""
    heads_first = [torch.randn(1, 8, 64, 64, device=device, dtype=dtype) for _ in range(3)]
    rows_first = [torch.randn(1, 64, 8, 64, device=device, dtype=dtype) for _ in range(3)]
    q, k, v = heads_first
    yield Layer(BASE, lambda: flash_cute.attention(q, k, v, True))
    yield Layer("flash_attn.flash_attn_func", lambda: flash_attn.flash_attn_func(*rows_first, causal=True))
    yield Layer(
        "flash_attn_interface.flash_attn_func", lambda: flash_attn_interface.flash_attn_func(*rows_first, causal=True)
    )
    yield Layer("sdpa.sdpa", lambda: sdpa.sdpa(q, k, v, is_causal=True))
    pytorchs = torch.nn.functional.scaled_dot_product_attention
    yield Layer(
        "sdpa.enable()",
        lambda: pytorchs(q, k, v, is_causal=True),
        lambda: sdpa.enable(devices=[device.type], strict=True),
    )
    yield Layer("(scaled_dot_product_attention)", lambda: pytorchs(q, k, v, is_causal=True))
    yield from _of_transformers(heads_first)
    try:
        import flash_attn_interface as package
    except ImportError as error:
        print(f"absent: (flash_attn_interface): {first_line(error)}")
    else:
        yield Layer("(flash_attn_interface)", lambda: package.flash_attn_func(*rows_first, causal=True))


def _of_transformers(tensors: list[torch.Tensor]) -> Iterator[Layer]:
    """The attention functions as a Llama's layer calls them, with the positions that it passes on."""
    layer: Any = torch.nn.Module()
    layer.is_causal, layer.layer_idx, layer.num_key_value_groups = True, 1, 1
    positions = torch.arange(64, device=tensors[0].device)[None]
    arguments = {"dropout": 0.0, "scaling": 0.125, "position_ids": positions, "use_cache": False}
    yield Layer("transformers.attention", lambda: transformers.attention(layer, *tensors, None, **arguments))
    try:
        from transformers import AttentionInterface
    except ImportError as error:
        print(f"absent: (transformers' sdpa): {first_line(error)}")
        return
    theirs = AttentionInterface()["sdpa"]
    yield Layer("(transformers' sdpa)", lambda: theirs(layer, *tensors, None, **arguments))


def timings(mode: str, device: torch.device, dtype: torch.dtype, rounds: int) -> dict[str, Timing]:
    @contextmanager
    def both(layer: Layer) -> Iterator[None]:
        with MODES[mode](), layer.context():
            yield

    contenders = [Contender(x.name, x.call, lambda x=x: both(x)) for x in layers(device, dtype)]  # type: ignore[misc]
    return measure(contenders, device, clock="host", rounds=rounds, seconds=0.5)


def rows_of(mode: str, found: dict[str, Timing], facts: dict[str, str]) -> Iterator[dict[str, object]]:
    base = found[BASE]
    for name, timing in found.items():
        over = [1e6 * (mine - bare) for mine, bare in zip(timing.rounds, base.rounds, strict=True)]
        row: dict[str, object] = {"mode": mode, "layer": name, "median_us": f"{1e6 * timing.median:.2f}"}
        row |= {"best_us": f"{1e6 * timing.best:.2f}", "over_us": f"{statistics.median(over):.2f}"}
        yield {**row, **facts}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench/layers.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--commit", default="", help="commit to name in the CSV (git's)")
    parser.add_argument("--out", type=Path, help="CSV to write")
    flags = parser.parse_args(arguments)
    device = torch.device(flags.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    facts = environment(device, flags.commit)
    print(", ".join(f"{name} {value}" for name, value in facts.items() if value))
    rows = [row for mode in MODES for row in rows_of(mode, timings(mode, device, dtype, flags.rounds), facts)]
    print(f"\nhost microseconds per call; the layers' aim: at most {AIM:g} over {BASE}")
    for row in rows:
        print(
            f"{row['mode']:<10} {row['layer']:<40} {row['median_us']:>8} (best {row['best_us']}), over {row['over_us']}"
        )
    if flags.out is not None:
        flags.out.parent.mkdir(parents=True, exist_ok=True)
        with flags.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())

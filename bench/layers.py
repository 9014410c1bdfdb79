"""Host time of a forward through each layer that other projects' interfaces put over flash_cute's own functions.

    python bench/layers.py --out mine-layers.csv

Two problems whose kernels are shorter than the calls that launch them, a dense and a packed one, without gradients, on
clock `host` (flash_cute's own time on the CPU thread; see docs/measuring.md). `over` is what a layer adds to
`flash_cute.attention`, or to `flash_cute.varlen_attention` where it makes a packed call, of the same tensors in the
layout that the layer takes: microseconds, the median over rounds in which all take turns. Names in brackets are
the functions of the packages that a layer stands for, where these are installed. About 10 seconds; the CSV is written
after each mode.
"""

from __future__ import annotations

import argparse
import csv
import functools
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
from bench import case_flags  # noqa: E402
from bench.environment import environment  # noqa: E402
from flash_cute._progress import Progress  # noqa: E402
from flash_cute._timing import Contender, Timing, first_line, measure  # noqa: E402
from flash_cute.integrations import flash_attn, flash_attn_interface, sdpa, transformers  # noqa: E402

MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}
DENSE = "flash_cute.attention"
PACKED = "flash_cute.varlen_attention"
ONE_ROW = "flash_cute.varlen_attention, one row"  # another kernel than that of PACKED
AIM = 3.0  # microseconds
HEADS, HEAD_DIM, ROWS = 8, 64, 64


@dataclass(frozen=True)
class Layer:
    """One way to call the attention; `context` is in force around a batch of calls, `base` the layer's counterpart."""

    name: str
    base: str
    call: Callable[[], object]
    context: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True)
class Tensors:
    """The same sizes in the layouts of the interfaces: causal attention of 64 rows, packed as two sequences of 32."""

    heads_first: list[torch.Tensor]  # (1, H, N, D)
    rows_first: list[torch.Tensor]  # (1, N, H, D)
    stacked: torch.Tensor  # (1, N, 3, H, D)
    joined: torch.Tensor  # (1, N, 3 * H, D)
    offsets: torch.Tensor  # (3,) int32


def make_tensors(device: torch.device, dtype: torch.dtype) -> Tensors:
    random = functools.partial(torch.randn, device=device, dtype=dtype)
    return Tensors(
        heads_first=[random(1, HEADS, ROWS, HEAD_DIM) for _ in range(3)],
        rows_first=[random(1, ROWS, HEADS, HEAD_DIM) for _ in range(3)],
        stacked=random(1, ROWS, 3, HEADS, HEAD_DIM),
        joined=random(1, ROWS, 3 * HEADS, HEAD_DIM),
        offsets=torch.tensor([0, ROWS // 2, ROWS], dtype=torch.int32, device=device),
    )


def layers(device: torch.device, dtype: torch.dtype) -> Iterator[Layer]:
    tensors = make_tensors(device, dtype)
    yield from _dense(tensors, device)
    yield from _packed(tensors)
    yield from _of_transformers(tensors, device)
    yield from _packages(tensors)


def _dense(tensors: Tensors, device: torch.device) -> Iterator[Layer]:
    (q, k, v), rows_first = tensors.heads_first, tensors.rows_first
    stacked, joined = tensors.stacked, tensors.joined
    layer = functools.partial(Layer, base=DENSE)
    yield layer(DENSE, call=lambda: flash_cute.attention(q, k, v, True))
    yield layer("flash_attn.flash_attn_func", call=lambda: flash_attn.flash_attn_func(*rows_first, causal=True))
    yield layer(
        "flash_attn.flash_attn_kvpacked_func",
        call=lambda kv=stacked[:, :, 1:]: flash_attn.flash_attn_kvpacked_func(rows_first[0], kv, causal=True),
    )
    yield layer(
        "flash_attn.flash_attn_qkvpacked_func", call=lambda: flash_attn.flash_attn_qkvpacked_func(stacked, causal=True)
    )
    yield layer(
        "flash_attn_interface.flash_attn_func",
        call=lambda: flash_attn_interface.flash_attn_func(*rows_first, causal=True),
    )
    yield layer(
        "flash_attn_interface.flash_attn_qkvpacked_func",
        call=lambda: flash_attn_interface.flash_attn_qkvpacked_func(joined, causal=True, num_heads_q=HEADS),
    )
    yield layer("sdpa.sdpa", call=lambda: sdpa.sdpa(q, k, v, is_causal=True))
    pytorchs = torch.nn.functional.scaled_dot_product_attention
    yield layer(
        "sdpa.enable()",
        call=lambda: pytorchs(q, k, v, is_causal=True),
        context=lambda: sdpa.enable(devices=[device.type], strict=True),
    )
    yield layer("(scaled_dot_product_attention)", call=lambda: pytorchs(q, k, v, is_causal=True))


def _packed(tensors: Tensors) -> Iterator[Layer]:
    q, k, v = (x[0] for x in tensors.rows_first)
    stacked, offsets, longest = tensors.stacked[0], tensors.offsets, ROWS // 2
    lengths = (offsets, offsets, longest, longest)
    layer = functools.partial(Layer, base=PACKED)
    hints = {"max_seqlen_q": longest, "max_seqlen_k": longest}
    yield layer(PACKED, call=lambda: flash_cute.varlen_attention(q, k, v, offsets, offsets, True, **hints))
    yield layer(
        "flash_attn.flash_attn_varlen_func",
        call=lambda: flash_attn.flash_attn_varlen_func(q, k, v, *lengths, causal=True),
    )
    yield layer(
        "flash_attn.flash_attn_varlen_kvpacked_func",
        call=lambda kv=stacked[:, 1:]: flash_attn.flash_attn_varlen_kvpacked_func(q, kv, *lengths, causal=True),
    )
    yield layer(
        "flash_attn.flash_attn_varlen_qkvpacked_func",
        call=lambda: flash_attn.flash_attn_varlen_qkvpacked_func(stacked, offsets, longest, causal=True),
    )
    yield layer(
        "flash_attn_interface.flash_attn_varlen_func",
        call=lambda: flash_attn_interface.flash_attn_varlen_func(q, k, v, *lengths, causal=True),
    )
    yield layer("sdpa.varlen_attn", call=lambda: sdpa.varlen_attn(q, k, v, *lengths, window_size=(-1, 0)))


def _one_row(of_cache: torch.Tensor, rows: int) -> Layer:
    """The public call for one row of q over up to `rows` keys of a cache: a sequence is a head of a batch item."""
    keys = of_cache.view(-1, 1, HEAD_DIM)
    sequences = keys.shape[0] // rows
    offsets = torch.arange(sequences + 1, dtype=torch.int32, device=keys.device)
    used = {"seqused_q": torch.ones_like(offsets[1:]), "seqused_k": torch.full_like(offsets[1:], rows - 1)}
    call = functools.partial(
        flash_cute.varlen_attention, keys[::rows].contiguous(), keys, keys, offsets, offsets * rows, True, **used
    )
    return Layer(ONE_ROW, ONE_ROW, functools.partial(call, max_seqlen_q=1, max_seqlen_k=rows))


def _of_transformers(tensors: Tensors, device: torch.device) -> Iterator[Layer]:
    """The attention functions as a Llama's layer calls them, with the positions that it passes on.

    What is read of positions and masks, once per forward of a model, is read before anything is timed.
    """
    module: Any = torch.nn.Module()
    module.is_causal, module.layer_idx, module.num_key_value_groups = True, 1, 1
    options = {"dropout": 0.0, "scaling": HEAD_DIM**-0.5, "use_cache": False}
    positions = torch.arange(ROWS, device=device)[None]
    projected = [x.transpose(1, 2) for x in tensors.rows_first]

    def layer(what: str, base: str, given: list[torch.Tensor], mask: Any = None, **more: Any) -> Layer:
        arguments = {**options, **more}
        call = functools.partial(transformers.attention, module, *given, mask, **arguments)
        return Layer("transformers.attention" + what, base, call)

    yield layer("", DENSE, tensors.heads_first, position_ids=positions)
    yield layer(", packed by position_ids", PACKED, projected, position_ids=positions % (ROWS // 2))
    offsets = {"cu_seq_lens_q": tensors.offsets, "cu_seq_lens_k": tensors.offsets}
    longest = {"max_length_q": ROWS // 2, "max_length_k": ROWS // 2}
    yield layer(", packed by cu_seq_lens", PACKED, projected, **offsets, **longest)
    rows = ROWS // 2
    tokens = torch.ones(2, rows, dtype=torch.bool, device=device)
    tokens[0, :5] = False
    mask = transformers.mask(2, rows, rows, attention_mask=tokens, device=device)
    batch = [x.view(2, rows, HEADS, HEAD_DIM).transpose(1, 2) for x in tensors.rows_first]
    yield layer(", padded", PACKED, batch, mask)
    of_cache = [batch[0], *(x.contiguous() for x in batch[1:])]
    yield layer(", padded, k and v of a cache (two copies)", PACKED, of_cache, mask)
    step = transformers.mask(2, 1, rows, q_offset=rows - 1, attention_mask=tokens, device=device)
    yield _one_row(of_cache[1], rows)
    last = batch[0][:, :, -1:].contiguous()  # as projected from one token
    yield layer(", padded, one row over a cache", ONE_ROW, [last, *of_cache[1:]], step)
    try:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
    except ImportError as error:
        print(f"absent: (transformers' sdpa): {first_line(error)}")
        return
    arguments = {**options, "position_ids": positions}
    theirs = functools.partial(sdpa_attention_forward, module, *tensors.heads_first, None, **arguments)
    yield Layer("(transformers' sdpa)", DENSE, theirs)


def _packages(tensors: Tensors) -> Iterator[Layer]:
    """PyTorch's and FlashAttention-3's own functions, where they are there and run on this device."""
    q, k, v = (x[0] for x in tensors.rows_first)
    offsets, longest = tensors.offsets, ROWS // 2
    lengths = (offsets, offsets, longest, longest)
    if q.device.type == "cuda":
        try:
            from torch.nn.attention.varlen import varlen_attn
        except ImportError as error:
            print(f"absent: (torch.nn.attention.varlen): {first_line(error)}")
        else:
            yield Layer("(torch.nn.attention.varlen)", PACKED, lambda: varlen_attn(q, k, v, *lengths))
    try:
        import flash_attn_interface as package
    except ImportError as error:
        print(f"absent: (flash_attn_interface): {first_line(error)}")
        return
    rows_first = tensors.rows_first
    yield Layer("(flash_attn_interface)", DENSE, lambda: package.flash_attn_func(*rows_first, causal=True))
    yield Layer(
        "(flash_attn_interface, packed)",
        PACKED,
        lambda: package.flash_attn_varlen_func(q, k, v, *lengths, causal=True),
    )


def timings(mode: str, found: Sequence[Layer], device: torch.device, rounds: int) -> dict[str, Timing]:
    """Of the layers that run; why one does not is printed."""

    @contextmanager
    def both(layer: Layer) -> Iterator[None]:
        with MODES[mode](), layer.context():
            yield

    contenders = [Contender(x.name, x.call, functools.partial(both, x)) for x in found]
    progress = Progress(f"layers, {mode}", rounds * len(contenders))
    failures: dict[str, str] = {}
    try:
        taken = measure(
            contenders, device, clock="host", rounds=rounds, seconds=0.05, failures=failures, on_turn=progress
        )
    finally:
        progress.close()
    for name, why in failures.items():
        print(f"not measured: {name}: {why}")
    return taken


def rows_of(
    mode: str, found: Sequence[Layer], taken: dict[str, Timing], facts: dict[str, str]
) -> Iterator[dict[str, object]]:
    for layer in found:
        if layer.name not in taken:
            continue
        timing, base = taken[layer.name], taken[layer.base]
        over = [1e6 * (mine - bare) for mine, bare in zip(timing.rounds, base.rounds, strict=True)]
        row: dict[str, object] = {"mode": mode, "layer": layer.name, "median_us": f"{1e6 * timing.median:.2f}"}
        row |= {"best_us": f"{1e6 * timing.best:.2f}", "over_us": f"{statistics.median(over):.2f}"}
        yield {**row, "base": layer.base, **facts}


def write(path: Path, rows: Sequence[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench/layers.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", type=case_flags.device_name, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=41, help="turns of each layer, of 64 calls (41)")
    parser.add_argument("--commit", default="", help="commit to name in the CSV (git's)")
    parser.add_argument("--out", type=Path, help="CSV to write")
    flags = parser.parse_args(arguments)
    device = torch.device(flags.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    facts = environment(device, flags.commit)
    print(", ".join(f"{name} {value}" for name, value in facts.items() if value))
    with torch.no_grad():
        found = list(layers(device, dtype))
    print(f"host microseconds per call; the layers' aim: at most {AIM:g} over {DENSE} or {PACKED}", flush=True)
    rows: list[dict[str, object]] = []
    for mode in MODES:
        of_mode = list(rows_of(mode, found, timings(mode, found, device, flags.rounds), facts))
        for row in of_mode:
            times = f"{row['median_us']:>8} (best {row['best_us']}), over {row['over_us']}"
            print(f"{row['mode']:<10} {row['layer']:<62} {times}", flush=True)
        rows += of_mode
        if flags.out is not None:
            write(flags.out, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())

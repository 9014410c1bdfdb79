"""Time whole steps of models: prefill and training of 4-layer stacks, built from Transformers' configuration classes.

    python bench/run.py --models --out mine-models.csv
    python bench/run.py --models --models-only gemma2 --directions train --peers fa3,eager,flex_attention

The layers have the widths of Llama-3-8B, Gemma-2-9B (softcap, and a window in every other layer) and gpt-oss-20b
(sinks, and a window of 128 in every other layer), random weights in bfloat16 and a vocabulary of 1024; gpt-oss has 4
experts, all of which each token goes through: as many as of its 32. A model is built once, and the implementations of
its attention take turns in it, chosen by `set_attn_implementation` outside the timed part. One of them is no attention
at all (`none`): what a step takes longer than that is the attention's share of it, and nothing within a step is timed.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from bench import case_flags, steps
from bench.environment import environment
from bench.providers import transformers_attention as attention
from bench.providers.base import Unavailable
from flash_cute._timing import Contender, Timing, first_line, measure, speed_ratio, synchronize

Direction = Literal["prefill", "train"]
DIRECTIONS: tuple[Direction, ...] = ("prefill", "train")
LAYERS = 4
LENGTHS: dict[Direction, int] = {"prefill": 8192, "train": 4096}
LARGEST_DIFFERENCE = 0.1  # of ||x - y|| / ||y||: roundings of 4 layers in bf16 are 0.01 to 0.03


@dataclass(frozen=True)
class Model:
    """A stack of layers. `options`: its configuration's; the rest is the class's default."""

    name: str
    model_class: str
    config_class: str
    options: dict[str, Any] = field(hash=False)

    def build(self, device: torch.device, dtype: torch.dtype) -> Any:
        """The model, with random weights; raises `Unavailable`."""
        transformers = attention.package()
        common = {"num_hidden_layers": LAYERS, "vocab_size": 1024, "attention_dropout": 0.0, "pad_token_id": 0}
        config = getattr(transformers, self.config_class)(**common | self.options)
        with torch.device(device):
            return getattr(transformers, self.model_class)._from_config(config, dtype=dtype)


# What a model is reduced to where there is no GPU: enough to try the tool.
SMALL = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS = {
    model.name: model
    for model in (
        Model(
            "llama",
            "LlamaModel",
            "LlamaConfig",
            {
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "max_position_embeddings": 131072,
            },
        ),
        Model(
            "gemma2",
            "Gemma2Model",
            "Gemma2Config",
            {
                "hidden_size": 3584,
                "intermediate_size": 14336,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "head_dim": 256,
                "query_pre_attn_scalar": 256,
                "attn_logit_softcapping": 50.0,
                "sliding_window": 4096,
            },
        ),
        Model(
            "gpt_oss",
            "GptOssModel",
            "GptOssConfig",
            {
                "hidden_size": 2880,
                "intermediate_size": 2880,
                "num_attention_heads": 64,
                "num_key_value_heads": 8,
                "head_dim": 64,
                "sliding_window": 128,
                "num_local_experts": 4,
                "num_experts_per_tok": 4,
            },
        ),
    )
}


@dataclass
class Cell:
    """What was measured of one model, direction and length."""

    model: Model
    direction: Direction
    length: int
    timings: dict[str, Timing] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    compared_with: str = ""
    differences: dict[str, float] = field(default_factory=dict)

    @property
    def wrong(self) -> list[str]:
        """Implementations with another answer than the one they were compared with; NaN counts."""
        return [name for name, difference in self.differences.items() if not difference <= LARGEST_DIFFERENCE]

    def rows(self, facts: dict[str, str]) -> Iterator[dict[str, object]]:
        """The CSV rows, one per implementation; one that was not timed has a row that says why."""
        shape: dict[str, object] = {"model": self.model.name, "direction": self.direction, "B": 1, "N": self.length}
        base = self.timings.get(attention.NONE)
        for name, timing in self.timings.items():
            row: dict[str, object] = {
                **shape,
                "provider": name,
                "median_ms": f"{timing.median * 1e3:.3f}",
                "best_ms": f"{timing.best * 1e3:.3f}",
                "spread": f"{timing.spread:.4f}",
                "rounds": len(timing.rounds),
                "calls": timing.calls,
            }
            if base is not None and name != attention.NONE:
                row["attention_ms"] = f"{(timing.median - base.median) * 1e3:.3f}"
                row["attention_share"] = f"{1 - base.median / timing.median:.4f}"
            if name in self.differences:
                row["difference"] = f"{self.differences[name]:.2e} from {self.compared_with}"
            if name == attention.OURS:
                for peer in (x for x in self.timings if x not in (attention.OURS, attention.NONE)):
                    ratio = speed_ratio(timing, self.timings[peer])
                    row |= {f"ratio_{peer}": f"{ratio.median:.4f}", f"ratio_{peer}_spread": f"{ratio.spread:.4f}"}
            yield {**row, **facts}
        for name, reason in self.missing.items():
            yield {**shape, "provider": name, "missing": reason, **facts}


Step = Callable[[], tuple[torch.Tensor, ...]]


def make_step(model: Any, direction: Direction, length: int, seed: int) -> Step:
    """One step: it returns what is compared, and leaves no gradients behind."""
    device = model.device
    generator = torch.Generator(device).manual_seed(seed)
    ids = torch.randint(model.config.vocab_size, (1, length), generator=generator, device=device)

    def prefill() -> tuple[torch.Tensor, ...]:
        with torch.inference_mode():
            return (model(input_ids=ids, use_cache=True).last_hidden_state,)

    if direction == "prefill":
        return prefill
    shape = (1, length, model.config.hidden_size)
    flow = torch.randn(shape, generator=generator, device=device, dtype=model.dtype)

    def train() -> tuple[torch.Tensor, ...]:
        hidden = model(input_ids=ids, use_cache=False).last_hidden_state
        hidden.backward(flow)
        gradients = (model.embed_tokens.weight.grad, model.layers[0].self_attn.v_proj.weight.grad)
        model.zero_grad(set_to_none=True)
        return hidden.detach(), *gradients

    return train


def time_cell(cell: Cell, model: Any, names: Sequence[str], rounds: int, seconds: float, seed: int) -> None:
    """Fill the cell: each implementation is called once and compared, then all that are right take turns."""
    step = make_step(model, cell.direction, cell.length, seed)
    model.train(cell.direction == "train")

    @contextmanager
    def chosen(name: str) -> Iterator[None]:
        model.set_attn_implementation(name)
        yield

    reference: tuple[torch.Tensor, ...] | None = None
    for name in sorted(names, key=lambda name: name == attention.OURS):  # a peer is compared with, if one runs
        try:
            attention.require(name, model, cell.direction)
            with chosen(name):
                results = step()
            synchronize(model.device)
        except Exception as error:
            cell.missing[name] = first_line(error)
            model.zero_grad(set_to_none=True)
            continue
        if name == attention.NONE:
            continue
        if reference is None:
            reference, cell.compared_with = results, name
        else:
            cell.differences[name] = _difference(results, reference)
        del results
    for name in cell.wrong:
        cell.missing[name] = f"wrong: differs by {cell.differences[name]:.2e} from {cell.compared_with}"
    reference = None
    contenders = [Contender(x, step, lambda x=x: chosen(x)) for x in names if x not in cell.missing]  # type: ignore[misc]
    clock: Any = "events" if model.device.type == "cuda" else "wall"
    cell.timings = measure(contenders, model.device, clock=clock, rounds=rounds, seconds=seconds, failures=cell.missing)


def _difference(results: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> float:
    """The largest ||x - y|| / ||y|| of any result; NaN if one is."""
    pairs = ((x.float(), y.float()) for x, y in zip(results, expected, strict=True))
    return float(torch.stack([(x - y).norm() / y.norm().clamp_min(1e-30) for x, y in pairs]).max())


def measured(flags: argparse.Namespace, device: torch.device) -> Iterator[Cell]:
    for name in flags.models_only:
        model = MODELS[name]
        if device.type != "cuda":
            model = replace(model, options=model.options | SMALL)
        lengths = {direction: flags.N or LENGTHS[direction] for direction in flags.directions}
        cells = [Cell(model, direction, length) for direction, length in lengths.items()]
        built = None
        for cell in cells:
            try:
                built = model.build(device, getattr(torch, flags.dtype)) if built is None else built
            except Unavailable as reason:
                cell.missing = dict.fromkeys(flags.providers, str(reason))
            else:
                names = [attention.NONE, *flags.providers]
                time_cell(cell, built, names, flags.rounds, flags.seconds, flags.seed)
            yield cell
        built = None
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/run.py --models", description=(__doc__ or "").split("\n")[0], allow_abbrev=False
    )
    parser.add_argument(
        "--models-only", default=",".join(MODELS), help=f"separated by commas (all: {', '.join(MODELS)})"
    )
    parser.add_argument("--directions", default=",".join(DIRECTIONS), help="prefill, train or both (both)")
    parser.add_argument("--N", type=int, help="tokens (8192 of a prefill, 4096 of a training step)")
    parser.add_argument("--peers", default="sdpa,fa3,eager", help="names of Transformers' implementations, or fa3")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each implementation (7)")
    parser.add_argument("--seconds", type=float, default=0.5, help="measured time per implementation and cell (0.5)")
    parser.add_argument("--dtype", default="bfloat16", help="of the weights (bfloat16)")
    parser.add_argument(
        "--device",
        type=case_flags.device_name,
        default="cuda",
        help="cuda (default), or cpu with narrow layers and a small --N",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and inputs (0)")
    parser.add_argument("--commit", default="", help="commit to name in the CSV (git's)")
    parser.add_argument("--out", type=Path, help="CSV to write")
    flags = parser.parse_args(arguments)
    if flags.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("there is no CUDA GPU here; --device cpu --N 64 tries the tool on the CPU")
    for name, known in (("models_only", tuple(MODELS)), ("directions", DIRECTIONS)):
        chosen = [one for one in getattr(flags, name).split(",") if one]
        if set(chosen) - set(known):
            parser.error(f"--{name.replace('_', '-')}: expected some of {', '.join(known)}, given {','.join(chosen)}")
        setattr(flags, name, chosen)
    flags.providers = [attention.OURS, *(name for name in flags.peers.split(",") if name not in ("", "none"))]
    return flags


def print_cell(rows: Sequence[dict[str, object]]) -> None:
    for row in rows:
        text = f"{row['model']:<8} {row['direction']:<8} N {row['N']:<6} {row['provider']:<14}"
        if "missing" in row:
            print(f"{text} {row['missing']}", flush=True)
            continue
        text += f" {row['median_ms']:>9} ms ±{100 * float(str(row['spread'])):.1f} %"
        if "attention_ms" in row:
            text += f"  attention {row['attention_ms']:>8} ms, {100 * float(str(row['attention_share'])):4.1f} %"
        ratios = {k[6:]: v for k, v in row.items() if k.startswith("ratio_") and not k.endswith("_spread")}
        text += "".join(f"  {ratio} of {peer}" for peer, ratio in ratios.items())
        print(text, flush=True)


def main(arguments: Sequence[str]) -> int:
    flags = parse(arguments)
    device = torch.device(flags.device)
    started = time.perf_counter()
    facts = environment(device, flags.commit) | {"transformers": attention.version(), "dtype": flags.dtype}
    print(", ".join(f"{name} {value}" for name, value in facts.items() if value), f"seed {flags.seed}", sep=", ")
    torch.manual_seed(flags.seed)
    right, ran = True, False
    with steps.writer(flags.out, flags.providers[1:], facts) as write, attention.registered():
        for cell in measured(flags, device):
            rows = list(cell.rows(facts))
            print_cell(rows)
            write(rows)
            right &= attention.OURS not in cell.wrong
            ran |= attention.OURS in cell.timings
    print(f"\n{time.perf_counter() - started:.0f} s in all")
    return 0 if right and ran else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Train a small GPT with flash_cute's attention, and show that it learns what PyTorch's own attention learns.

    pip install '.[examples]'
    python examples/train_gpt.py --out results                      # both head dims, three runs each, on the GPU
    python examples/train_gpt.py --out results --head-dim 128 --attention flash_cute     # one run, nothing compared
    python examples/train_gpt.py --out results --small --device cpu --steps 60           # a smoke test in seconds
    python examples/train_gpt.py --out results --packed             # documents packed without crossing, beside padded

The model is a decoder with grouped-query attention and rotary positions over bytes (vocabulary 256). Its text is at
hand everywhere: this project's documents and the sources of Python's standard library. For each head dim it is trained
three times: with flash_cute and with `scaled_dot_product_attention` (SDPA) from one seed, which fixes the initial
weights and the order of the data, and with SDPA from a second seed, whose distance from the first is the noise band.
It is one file, past 400 lines, so that it can be copied and read from top to bottom.

With `--packed` a step is a number of whole documents of different lengths. flash_cute trains on them packed: one after
the other in one row of tokens, and `varlen_attention` keeps each to itself. SDPA trains on the same documents, each
padded to the longest, and so does flash_cute in a fourth run, beside which the script prints what packing gains.

Writes training-d64.csv (the loss of each step and run) and training-d64.png for head dim 64, and so on
(training-packed-d64.csv with `--packed`). Exits with 1 if the loss of a run does not fall by 1.5 nats, or if the
smoothed curves of one seed differ by more than 0.02 nats (0.005 in float32, on a CPU). docs/training.md has the curves
of an H100.
"""

import argparse
import csv
import math
import sys
import sysconfig
import textwrap
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

import flash_cute

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 256  # a byte is a token
MUST_FALL = 1.5  # nats, of each run

NO_TARGET = -100  # of padding: cross_entropy leaves it out

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # q (B, Hq, N, D), k and v (B, Hkv, N, D) -> (B, Hq, N, D)


def flash_cute_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_cute.attention(q, k, v, causal=True)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def packed_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    """Of documents one after the other in one row: B is 1, cu_seqlens (documents + 1,) says where each begins."""
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # views (T, H, D)
    options = {"max_seqlen_q": longest, "max_seqlen_k": longest}
    out = flash_cute.varlen_attention(q, k, v, cu_seqlens, cu_seqlens, causal=True, **options)
    return out.transpose(0, 1).unsqueeze(0)


ATTENTION: dict[str, Attention] = {"flash_cute": flash_cute_attention, "sdpa": sdpa_attention}


@dataclass(frozen=True)
class Config:
    head_dim: int
    heads: int
    kv_heads: int
    width: int = 768
    layers: int = 6
    context: int = 2048
    batch: int = 16
    steps: int = 300
    warm_up: int = 40  # steps over which the learning rate rises; a cosine brings it down to a tenth
    smoothing: int = 50  # steps of the running mean
    learning_rate: float = 6e-4
    may_differ: float = 0.02  # nats, between the smoothed curves of flash_cute and SDPA from the same seed
    documents: int = 32  # of a step, with --packed: about as many bytes as batch * context
    separator: bytes = b"\n\n\n"  # between documents: between top-level definitions, most of them shorter than context


def full_size(head_dim: int) -> Config:
    """As wide for every head dim; three query heads share one of k and v."""
    return Config(head_dim, heads=768 // head_dim, kv_heads=256 // head_dim)


def small(head_dim: int) -> Config:
    """A few seconds on a CPU."""
    tiny = Config(head_dim, heads=2, kv_heads=1, width=64, layers=2, context=64, batch=8)
    return replace(tiny, steps=60, warm_up=10, smoothing=10, learning_rate=3e-3, documents=12, separator=b"\n")


class Block(nn.Module):
    """Attention, then an MLP, each on the normalised input and added to it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = [config.heads, config.kv_heads, config.kv_heads]  # of q, k and v
        self.head_dim = config.head_dim
        self.norm1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, sum(self.heads) * config.head_dim, bias=False)
        self.out = nn.Linear(config.heads * config.head_dim, config.width, bias=False)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (-1, self.head_dim))  # (B, N, Hq + 2 Hkv, D)
        q, k, v = qkv.transpose(1, 2).split(self.heads, dim=1)  # views (B, H, N, D): the kernel reads such strides
        y = attention(rotate(q, cos, sin), rotate(k, cos, sin), v)  # (B, Hq, N, D)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: turn each pair of components by its angle. x (B, H, N, D), cos and sin (N, D/2)."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


class GPT(nn.Module):
    def __init__(self, config: Config, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        frequency = 10000.0 ** -torch.linspace(0, 1, config.head_dim // 2)
        angle = torch.outer(torch.arange(config.context), frequency)  # (N, D/2)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                onto_residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / (math.sqrt(2 * config.layers) if onto_residual else 1))

    def forward(self, batch: "Batch") -> Tensor:
        """Logits `(B, N, 256)` of the byte after each of the batch's tokens `(B, N)`."""
        x = self.embedding(batch.tokens)
        cos, sin = self.cos[batch.positions], self.sin[batch.positions]  # (N, D/2)
        attention = self.attention
        if batch.cu_seqlens is not None:
            attention = partial(packed_attention, cu_seqlens=batch.cu_seqlens, longest=batch.longest)
        for block in self.blocks:
            x = block(x, cos, sin, attention)
        return self.head(self.norm(x))


def read_text() -> bytes:
    """The documents of this project and the standard library's sources, in one order on every machine."""
    library = Path(sysconfig.get_paths()["stdlib"])
    without = {"site-packages", "dist-packages", "test", "tests"}
    sources = [path for path in library.rglob("*.py") if without.isdisjoint(path.relative_to(library).parts)]
    paths = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(sources)]
    return b"\n".join(path.read_bytes() for path in paths)


@dataclass
class Batch:
    tokens: Tensor  # (B, N) int64; of packed documents (1, T)
    targets: Tensor  # the same shape: the bytes after them, NO_TARGET in padding
    positions: Tensor  # (N,): of each token in its window or document
    count: int  # of tokens that are no padding
    cu_seqlens: Tensor | None = None  # (documents + 1,) int32, of packed documents: where each begins, and T
    longest: int = 0  # document


def draw_windows(config: Config, seed: int, text: Tensor) -> Callable[[int], Batch]:
    """The batch of each step: windows of `context` bytes, wherever they begin."""
    # A generator of its own: the data's order is the seed's, whoever else draws random numbers.
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - config.context, (config.steps, config.batch, 1), generator=generator)
    starts, window = starts.to(text.device), torch.arange(config.context + 1, device=text.device)

    def batch(step: int) -> Batch:
        chunk = text[starts[step] + window].long()  # (batch, context + 1)
        return Batch(chunk[:, :-1], chunk[:, 1:], window[:-1], config.batch * config.context)

    return batch


def find_documents(config: Config, text: Tensor) -> tuple[Tensor, Tensor]:
    """Where each document begins in the text, and how many of its bytes predict another: up to `context`."""
    pieces = bytes(text.cpu().numpy()).split(config.separator)
    sizes = torch.tensor([len(piece) for piece in pieces])
    starts = (sizes + len(config.separator)).cumsum(0) - sizes - len(config.separator)
    lengths = (sizes - 1).clamp(max=config.context)
    return starts[lengths > 0], lengths[lengths > 0]


def draw_documents(config: Config, seed: int, text: Tensor, packed: bool) -> Callable[[int], Batch]:
    """The batch of each step: documents, the same ones packed or padded."""
    all_starts, all_lengths = find_documents(config, text)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(all_starts), (config.steps, config.documents), generator=generator)

    def batch(step: int) -> Batch:
        starts, lengths = all_starts[drawn[step]], all_lengths[drawn[step]]  # (documents,)
        count, longest = int(lengths.sum()), int(lengths.max())
        positions = torch.arange(longest)
        real = positions < lengths[:, None]  # (documents, longest)
        source = (starts[:, None] + positions).masked_fill(~real, 0)
        cu_seqlens = None
        if packed:
            source, positions = source[real][None], positions.expand_as(real)[real]  # (1, T), (T,)
            cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).int().to(text.device)
        source, positions = source.to(text.device), positions.to(text.device)
        targets = text[source + 1].long()
        if not packed:
            targets.masked_fill_(~real.to(text.device), NO_TARGET)
        return Batch(text[source].long(), targets, positions, count, cu_seqlens, longest)

    return batch


@dataclass
class Run:
    name: str
    losses: list[float]  # in nats per byte, of each step
    tokens_per_second: float  # padding does not count
    padding: float = 0  # its share of all positions that the model computed


def pick_sdpa_backend(config: Config, device: torch.device, dtype: torch.dtype) -> SDPBackend:
    """What PyTorch chooses for this attention, asked once, so that the training loop need not choose."""
    shapes = [(config.batch, heads, config.context, config.head_dim) for heads in (config.heads, config.kv_heads)]
    q, k = (torch.empty(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes)
    return SDPBackend(torch._fused_sdp_choice(q, k, k, is_causal=True, enable_gqa=True))


def train(
    config: Config, attention: str, seed: int, text: Tensor, show_progress: bool = True, form: str = "windows"
) -> Run:
    """One run. `text` is uint8, on the device to train on; there a GPU computes in bfloat16, over float32 weights.

    `form`: what a step's tokens are: "windows" of the text, or documents "packed" (with flash_cute) or "padded".
    """
    device = text.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(seed)
    model = GPT(config, ATTENTION[attention]).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), config.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )

    def rate(step: int) -> float:
        done = max(0, step - config.warm_up) / max(1, config.steps - config.warm_up)
        return min(1, (step + 1) / config.warm_up) * (0.55 + 0.45 * math.cos(math.pi * done))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    draw = draw_windows if form == "windows" else partial(draw_documents, packed=form == "packed")
    batches = draw(config, seed, text)
    kind, choice = attention, nullcontext()
    if attention == "sdpa":
        backend = pick_sdpa_backend(config, device, dtype)
        kind, choice = f"sdpa ({backend.name.lower().replace('_attention', '')})", sdpa_kernel(backend)
    name = f"{kind} seed {seed}" if form == "windows" else f"{kind} {form} seed {seed}"
    losses = torch.zeros(config.steps, device=device)  # stays on the device: reading a loss would wait for it
    untimed = min(20, config.steps // 2)
    counted, positions = 0, 0
    with choice, tqdm(range(config.steps), desc=name, mininterval=1, disable=not show_progress) as bar:
        for step in bar:
            if step == untimed:
                start = now(device)
            batch = batches(step)
            counted += batch.count * (step >= untimed)
            positions += batch.tokens.numel() * (step >= untimed)
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                logits = model(batch)
            loss = F.cross_entropy(logits.float().flatten(0, 1), batch.targets.flatten(), ignore_index=NO_TARGET)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses[step] = loss.detach()
            if step % 50 == 49:
                bar.set_postfix(loss=f"{loss.item():.3f}")
    seconds = now(device) - start
    return Run(name, losses.tolist(), counted / seconds, 1 - counted / positions)


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def smooth(losses: list[float], config: Config) -> list[float]:
    """The mean of each `smoothing` successive losses after the warm-up (of all there are, if they are fewer)."""
    after = torch.tensor(losses[min(config.warm_up, len(losses) - 1) :], dtype=torch.float64)
    return after.unfold(0, min(config.smoothing, len(after)), 1).mean(dim=-1).tolist()


def distances(one: Run, other: Run, config: Config) -> list[float]:
    return [abs(a - b) for a, b in zip(smooth(one.losses, config), smooth(other.losses, config), strict=True)]


def check(runs: list[Run], config: Config) -> bool:
    """Print what the runs show; whether it is as it must be.

    The runs: flash_cute, SDPA, SDPA from another seed; with documents also flash_cute padded, the first being packed.
    """
    good = True
    for run in runs:
        end = smooth(run.losses, config)[-1]
        fall = run.losses[0] - end
        good &= fall >= MUST_FALL  # False for NaN
        print(f"{run.name:33}  loss {run.losses[0]:.3f} -> {end:.3f}  {run.tokens_per_second:12,.0f} tokens/s")
    if len(runs) >= 3:
        ours, same_seed, other_seed = runs[:3]
        difference, band = distances(ours, same_seed, config), distances(same_seed, other_seed, config)
        # Not max(): it may overlook a NaN.
        good &= all(d <= config.may_differ for d in difference)
        print(f"smoothed curves of one seed, flash_cute and SDPA: at most {max(difference):.4f} nats apart", end=", ")
        print(f"{sum(difference) / len(difference):.4f} on average (allowed: {config.may_differ})")
        print(f"noise band, SDPA from two seeds: at most {max(band):.4f}, {sum(band) / len(band):.4f} on average")
    if len(runs) == 4:
        packed, padded = runs[0], runs[3]
        gain = packed.tokens_per_second / padded.tokens_per_second
        print(f"packed, flash_cute trains on {gain:.2f} times as many tokens/s as padded", end=", ")
        print(f"where {100 * padded.padding:.0f} % of the positions are padding")
    must = f"a fall by {MUST_FALL}, curves within {config.may_differ} nats"
    print("as it must be" if good else f"NOT AS IT MUST BE: {must}")
    return good


def write_csv(path: Path, runs: list[Run], config: Config, facts: str) -> None:
    with path.open("w", newline="") as file:
        file.write(f"# head dim {config.head_dim}: {facts}\n")
        writer = csv.writer(file)
        writer.writerow(["step", *(run.name for run in runs)])
        for step, losses in enumerate(zip(*(run.losses for run in runs), strict=True)):
            writer.writerow([step, *(f"{loss:.5f}" for loss in losses)])


def draw(path: Path, runs: list[Run], config: Config, facts: str) -> None:
    """All curves together, raw and smoothed; below, the distances of the smoothed ones."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    first = min(config.warm_up, len(runs[0].losses) - 1) + config.smoothing - 1  # a mean stands at its last step
    # Two runs from one seed nearly coincide, step by step: a broad pale line below a thin one shows both.
    looks = [("#D55E00", "-", 2.4, 0.4), ("#0072B2", "--", 0.6, 0.9), ("#009E73", ":", 0.6, 0.6)]
    for run, (colour, style, width, alpha) in zip(runs, looks, strict=False):
        curve = smooth(run.losses, config)
        above.plot(run.losses, color=colour, alpha=alpha, linewidth=width, zorder=1)
        above.plot(range(first, first + len(curve)), curve, style, color=colour, zorder=3, label=run.name)
    title = f"head dim {config.head_dim}: loss of each step, and smoothed"
    above.set(ylabel="training loss, nats per byte", title=title)
    above.legend(frameon=False)
    for other, colour, label in ((0, "#D55E00", "flash_cute and SDPA, one seed"), (2, "#009E73", "SDPA, two seeds")):
        if len(runs) >= 3:
            distance = distances(runs[1], runs[other], config)
            below.plot(range(first, first + len(distance)), distance, color=colour, label=label)
    below.axhline(config.may_differ, color="black", linewidth=0.8, linestyle=":", label="allowed")
    below.set(xlabel="step", ylabel="distance, nats", yscale="log")
    below.legend(frameon=False)
    figure.supxlabel(textwrap.fill(facts, 120), fontsize=8)
    figure.savefig(path, dpi=130)


def describe(config: Config, text: bytes, device: torch.device, commit: str, packed: bool) -> str:
    step = f"{config.batch} x {config.context} bytes"
    if packed:
        step = f"{config.documents} documents of up to {config.context} bytes"
    with torch.device("meta"):
        parameters = sum(weight.numel() for weight in GPT(config, sdpa_attention).parameters())
    facts = [
        f"{parameters / 1e6:.1f} M parameters in {config.layers} layers",
        f"{config.heads} heads ({config.kv_heads} for k and v)",
        f"{config.steps} steps of {step} out of {len(text) / 1e6:.1f} MB",
        torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        f"torch {torch.__version__}",
        f"flash_cute {flash_cute.__version__}",
    ]
    return ", ".join(facts + [f"commit {commit}"] * bool(commit))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--head-dim", type=int, nargs="+", choices=[64, 128], default=[64, 128])
    parser.add_argument("--attention", choices=list(ATTENTION), help="only one run, with it; default: all")
    parser.add_argument("--packed", action="store_true", help="documents, packed with flash_cute and padded with SDPA")
    parser.add_argument("--steps", type=int, help="default: 300, and 60 with --small")
    parser.add_argument("--seed", type=int, default=1, help="the second seed is the next one")
    parser.add_argument("--out", type=Path, default=Path("training"), help="folder for the CSVs and plots")
    parser.add_argument("--small", action="store_true", help="a tiny model: seconds on a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", default="", help="commit to name in the results")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    device = torch.device(args.device)
    text = read_text()
    on_device = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    args.out.mkdir(parents=True, exist_ok=True)
    form, sdpa_form = ("packed", "padded") if args.packed else ("windows", "windows")
    runs_of = [("flash_cute", args.seed, form), ("sdpa", args.seed, sdpa_form), ("sdpa", args.seed + 1, sdpa_form)]
    if args.packed:
        runs_of.append(("flash_cute", args.seed, "padded"))
    if args.attention:
        runs_of = [next(run for run in runs_of if run[0] == args.attention)]
    good = True
    for head_dim in args.head_dim:
        config = small(head_dim) if args.small else full_size(head_dim)
        config = replace(config, steps=args.steps or config.steps)
        if device.type != "cuda":  # in float32, where the same runs are within 0.0006
            config = replace(config, may_differ=0.005)
        facts = describe(config, text, device, args.commit, args.packed)
        print(f"\nhead dim {head_dim}: {facts}")
        runs = [train(config, attention, seed, on_device, form=form) for attention, seed, form in runs_of]
        good &= check(runs, config)
        for suffix, write in ((".csv", write_csv), (".png", draw)):
            path = args.out / f"training{'-packed' * args.packed}-d{head_dim}{suffix}"
            write(path, runs, config, facts)
            print(f"wrote {path}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

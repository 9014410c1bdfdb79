"""Generate tokens over a paged KV cache, a step being one CUDA graph, beside SDPA over a cache of full size.

    pip install '.[examples]'
    python examples/decode_loop.py                        # on a GPU: 64 sequences of 4,096 tokens, bfloat16
    python examples/decode_loop.py --device cpu --small   # a smoke test in seconds

The prompts begin alike: the pages of that beginning are computed and kept once, and stand in the page table of every
sequence. The model is a decoder with random weights and no positions. Prints the tokens a second of both, what sharing
has saved, and how many tokens are the same; on the CPU, in float32, it exits with 1 unless all are.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import flash_cute

HEADS, HEADS_KV, DIM, PAGE, VOCABULARY = 32, 8, 128, 64, 256


def paged(caches: Tensor, table: Tensor, i: int, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """Attention of q `(B, N, Hq, D)` in layer i of caches `(layers, 2, pages, PAGE, Hkv, D)`; k, v are added."""
    return flash_cute.attention_with_kvcache(q, *caches[i], k=k, v=v, cache_seqlens=lengths, page_table=table)


def contiguous(caches: Tensor, i: int, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """SDPA's, in caches `(layers, 2, B, Hkv, room, D)`, of sequences of one length; the heads of a group are rows."""
    rows = lengths[0] + torch.arange(q.shape[1], device=q.device)
    for cache, new in zip(caches[i], (k, v), strict=True):
        cache.index_copy_(2, rows, new.transpose(1, 2))
    mask = (torch.arange(caches.shape[4], device=q.device) <= rows[:, None]).repeat(HEADS // HEADS_KV, 1)
    grouped = q.unflatten(2, (HEADS_KV, -1)).permute(0, 2, 3, 1, 4)  # (B, Hkv, Hq / Hkv, N, D)
    out = F.scaled_dot_product_attention(grouped.flatten(2, 3), *caches[i], mask).view(grouped.shape)
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3)


def next_tokens(weights: list[Tensor], attend: Callable[..., Tensor], tokens: Tensor, lengths: Tensor) -> Tensor:
    """The tokens `(B, 1)` behind `tokens` `(B, N)`, which follow on `lengths` `(B,)` others."""
    embedding, head, *layers = weights
    x = embedding[tokens]
    for i, (qkv, out) in enumerate(zip(layers[::2], layers[1::2], strict=True)):
        rows = F.linear(F.rms_norm(x, x.shape[-1:]), qkv).unflatten(-1, (-1, DIM))  # (B, N, Hq + 2 Hkv, D)
        y = attend(i, *rows.split((HEADS, HEADS_KV, HEADS_KV), 2), lengths)
        x = x + F.linear(y.flatten(2), out)
    return F.linear(F.rms_norm(x[:, -1:], x.shape[-1:]), head).argmax(-1)


def generate(name: str, step: Callable[[Tensor, Tensor], Tensor], token: Tensor, lengths: Tensor, count: int) -> Tensor:
    """`(B, count)`: token `(B, 1)` and those that follow; token and lengths are overwritten."""
    answer = [token.clone()]

    def run() -> None:
        token.copy_(step(token, lengths))
        lengths.add_(1)

    play = run
    if token.is_cuda:
        run()  # what a first call sets up is not to be captured
        answer.append(token.clone())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        play = graph.replay
    start, first = time.perf_counter(), len(answer)
    for _ in tqdm(range(first, count), desc=name, unit="step"):
        play()
        answer.append(token.clone())
    tokens = torch.cat(answer, 1).cpu()  # waits for the GPU
    print(f"{name}: {(count - first) * len(token) / (time.perf_counter() - start):,.0f} tokens/s")
    return tokens


def compare(dtype: torch.dtype, layers: int, batch: int, shared: int, own: int, count: int) -> float:
    """What share of the tokens is the same, of prompts of `shared + own` tokens."""
    torch.manual_seed(0)
    width, of_kv = HEADS * DIM, HEADS_KV * DIM
    shapes = [*[(VOCABULARY, width)] * 2, *((width + 2 * of_kv, width), (width, width)) * layers]
    # Large enough that a row attends to few keys, and that these matter.
    weights = [torch.randn(shape, dtype=dtype) * 2 / width**0.5 for shape in shapes]
    step = partial(next_tokens, weights)
    beginning, rest = torch.randint(VOCABULARY, (1, shared)), torch.randint(VOCABULARY, (batch, own))
    none, begun, lengths = (torch.full((batch,), n, dtype=torch.int32) for n in (0, shared, shared + own))

    in_common, apart = shared // PAGE, -(-(own + count) // PAGE)
    pages = torch.arange(in_common + batch * apart, dtype=torch.int32)
    table = torch.cat((pages[:in_common].expand(batch, -1), pages[in_common:].view(batch, -1)), 1)
    caches = torch.zeros(layers, 2, len(pages), PAGE, HEADS_KV, DIM, dtype=dtype)
    step(partial(paged, caches, table[:1]), beginning, none[:1])
    attend = partial(paged, caches, table)
    ours = generate("flash_cute", partial(step, attend), step(attend, rest, begun), lengths.clone(), count)
    print(f"{len(pages)} pages of {PAGE} tokens in place of {table.numel()}")

    attend = partial(contiguous, torch.zeros(layers, 2, batch, HEADS_KV, table.shape[1] * PAGE, DIM, dtype=dtype))
    token = step(attend, torch.cat((beginning.expand(batch, -1), rest), 1), none)
    same = int((ours == generate("SDPA", partial(step, attend), token, lengths, count)).sum())
    print(f"{same} of {ours.numel()} tokens are the same")
    return same / ours.numel()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="three short sequences, one layer")
    options = parser.parse_args(argv)
    on_cpu = options.device == "cpu"
    sizes = (1, 3, 2 * PAGE, 20, 9) if options.small else (8, 64, 3072, 768, 256)
    with torch.device(options.device), torch.inference_mode():
        same = compare(torch.float32 if on_cpu else torch.bfloat16, *sizes)
    return 1 if on_cpu and same < 1 else 0


if __name__ == "__main__":
    raise SystemExit(main())

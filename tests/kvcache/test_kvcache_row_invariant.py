"""Row-invariant attention: right, and a row with the same bits wherever it is computed. Kernels of Hopper alone; that
the others refuse it is tested on any machine."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from caches import Cached, alone, check, make, with_multiprocessors
from numerics import mismatches, same_bits
from packed import UNEVEN, USED_K, USED_Q, assert_packed_matches, offsets, pack

import flash_cute
from flash_cute import report

CHUNK = {64: 1024, 128: 1040, 256: 2080}  # keys, by the kernel's head dim: csrc/sm90/decode/key_chunks/tile.h


@pytest.fixture(autouse=True)
def _on_hopper(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("cuda") is None:
        return
    if not flash_cute.backends()["sm90"] or request.config.option.backend == "sm80":
        pytest.skip("row-invariant kernels are of backend sm90")


def _invariant(case: Cached) -> Cached:
    return case.replace(options={**case.options, "row_invariant": True})


@pytest.mark.cuda
@pytest.mark.kernel
@pytest.mark.parametrize("page", [None, 1, 4, 16, 48, 64, 80, 256])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 40, 104, 192])
def test_decoding(head_dim: int, page: int | None, rng: torch.Generator) -> None:
    """One row of each sequence, of no key, one, several chunks."""
    lengths = (4500, 0, 17, -1, 2047, 2100)
    check(_invariant(make(rng, "cuda", lengths, 1, page=page, head_dim=head_dim, appends=True, heads_q=8, heads_kv=2)))


@pytest.mark.cuda
@pytest.mark.kernel
@pytest.mark.parametrize("rows", [4, 70, 300, (1, 300, 0, 5, 64, 17)], ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (8, 1), (24, 2), (128, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rows_and_groups(
    dtype: torch.dtype, heads: tuple[int, int], rows: int | tuple[int, ...], rng: torch.Generator
) -> None:
    """Groups that fill a warpgroup's 64 rows, and that do not, and more."""
    lengths = (4500, 900, 17, 2047, 3, 2100)
    options: dict[str, Any] = {"heads_q": heads[0], "heads_kv": heads[1], "dtype": dtype, "appends": True}
    check(_invariant(make(rng, "cuda", lengths, rows, page=16, head_dim=128, **options)))


@pytest.mark.sanitizer
@pytest.mark.cuda
@pytest.mark.kernel
@pytest.mark.parametrize(
    "options",
    [
        {"window": (100, 0)},
        {"window": (3000, 30), "causal": False},
        {"causal": False},
        {"causal": "top_left"},
        {"scale": 0.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [1, (200, 1, 40)], ids=str)
def test_options(rows: int | tuple[int, ...], options: dict[str, Any], rng: torch.Generator) -> None:
    case = make(rng, "cuda", (5000, 400, 2200), rows, page=64, head_dim=128, appends=True, **options)
    sinks = torch.randn(case.q.shape[-2], generator=rng).cuda()
    check(_invariant(case.replace(options={**case.options, "sinks": sinks})))


def _tensors(rng: torch.Generator, length: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> Any:
    """q, k and v of a sequence: (length, heads, head_dim). Some scores are large, so that maxima change."""
    q, k, v = (
        torch.randn(length, n, head_dim, generator=rng).to("cuda", dtype) for n in (heads[0], heads[1], heads[1])
    )
    k[:: max(1, length // 7)] *= 6
    return q, k, v


def _training(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(n, Hq, D) and (Hq, n): of one sequence by `attention`."""
    dense = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out, lse = flash_cute.fwd(*dense, True, row_invariant=True, **options)
    return out[0].transpose(0, 1), lse[0]


def _steps(pick: random.Random, length: int) -> Iterator[int]:
    """A prompt in chunks, and then decoding, or drafts of a few."""
    left = length
    while left > 0:
        n = min(left, pick.choice((1, 2, 5, 16, 63, 64, 65, 200, 511, 900)))
        yield n
        left -= n


@pytest.mark.cuda
@pytest.mark.kernel
@pytest.mark.parametrize("number", range(12))
def test_a_row_has_the_same_bits_everywhere(number: int, rng: torch.Generator, seed: int) -> None:
    """In training's batch, packed or dense; a prefill; chunks of one; decoding and drafts; among any neighbours."""
    pick = random.Random(seed)
    head_dim, dtype = pick.choice(((64, torch.float16), (128, torch.bfloat16), (128, torch.half), (256, torch.half)))
    heads = pick.choice(((4, 4), (8, 2), (6, 2), (8, 1)))
    window = pick.choice((None, None, (pick.randint(0, 3000), 0)))
    options: dict[str, Any] = {"window": window, "scale": pick.choice((None, 0.2))}
    if pick.random() < 0.5:
        options["sinks"] = torch.randn(heads[0], generator=rng).cuda()
    lengths = [pick.choice((pick.randint(1, 300), pick.randint(2000, 5000))) for _ in range(3)]
    sequences = [_tensors(rng, n, heads, head_dim, dtype) for n in lengths]
    expected = [_training(*x, **options) for x in sequences]

    packed = (torch.cat(x) for x in zip(*sequences, strict=True))
    cu = offsets(lengths, "cuda")
    out, lse = flash_cute.varlen_fwd(*packed, cu, cu, True, row_invariant=True, **options)
    for got, of_lse, want in zip(out.split(lengths), lse.split(lengths, dim=1), expected, strict=True):
        assert same_bits((got, of_lse), want), "packed"

    # The same rows, step by step, of all sequences at once: those that are through have no rows.
    page = pick.choice((1, 4, 16, 64, 256))
    width = -(-max(lengths) // page)
    table = torch.randperm(3 * width, generator=rng).int().cuda().view(3, width)
    shape = (3 * width, page, heads[1], head_dim)
    caches = [torch.full(shape, float("nan"), dtype=dtype, device="cuda") for _ in range(2)]
    steps = [list(_steps(pick, n)) for n in lengths]
    done = [0, 0, 0]
    for rows in itertools.zip_longest(*steps, fillvalue=0):
        new = [[x[at : at + n] for x in of] for of, at, n in zip(sequences, done, rows, strict=True)]
        q, k, v = (torch.cat(x) for x in zip(*new, strict=True))
        kept = torch.tensor(done, dtype=torch.int32, device="cuda")
        out, lse = flash_cute.attention_with_kvcache(
            q, *caches, k=k, v=v, cache_seqlens=kept, page_table=table, cu_seqlens_q=offsets(list(rows), "cuda"),
            return_lse=True, row_invariant=True, **options,
        )  # fmt: skip
        for b, (got, of_lse) in enumerate(zip(out.split(list(rows)), lse.split(list(rows), dim=1), strict=True)):
            at = slice(done[b], done[b] + rows[b])
            want = expected[b][0][at], expected[b][1][:, at]
            assert same_bits((got, of_lse), want), f"sequence {b}, rows {at}"
            done[b] = at.stop


@pytest.mark.cuda
@pytest.mark.kernel
@pytest.mark.parametrize("rows", [1, 3, 40, 700])
@pytest.mark.parametrize("batch", [1, 5])
def test_equal_rows_have_the_bits_of_ragged_ones(batch: int, rows: int, rng: torch.Generator) -> None:
    """And those of each sequence alone, and on a smaller chip: each choice of the host's computes the same."""
    case = _invariant(make(rng, "cuda", [4321, 70, 2500, 2079, 9][:batch], rows, page=16, head_dim=128, appends=True))
    results = case.clone().run()
    ragged = case.replace(
        q=case.q.flatten(0, 1),
        cu_seqlens_q=offsets([rows] * batch, "cuda"),
        k=None if case.k is None else case.k.flatten(0, 1),
        v=None if case.v is None else case.v.flatten(0, 1),
    )
    for b in range(batch):
        of_b = case.of_sequence(b, *results)[1:]
        assert same_bits(ragged.of_sequence(b, *ragged.clone().run())[1:], of_b)
        single = alone(case, b)
        assert same_bits(single.of_sequence(0, *single.run())[1:], of_b)
    assert same_bits(case.clone().run(with_multiprocessors("sm90", 17)), results)


@pytest.mark.cuda
@pytest.mark.parametrize("packed", [False, True])
def test_gradients(packed: bool, rng: torch.Generator) -> None:
    """The backward is the usual one, of these out and LSE."""
    q, k, v = (torch.randn(600, n, 128, generator=rng).to("cuda", torch.bfloat16) for n in (4, 2, 2))
    dout = torch.randn(600, 4, 128, generator=rng).to("cuda", torch.bfloat16)
    cu = offsets([0, 250, 350], "cuda")

    def call(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        if packed:
            return flash_cute.varlen_attention(*tensors, cu, cu, True, **options)
        dense = (x.transpose(0, 1).unsqueeze(0) for x in tensors)
        return flash_cute.attention(*dense, True, **options)[0].transpose(0, 1)

    of = []
    for options in ({}, {"row_invariant": True}):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        call(*leaves, **options).backward(dout)
        of.append([x.grad for x in leaves])
    for plain, invariant in zip(*of, strict=True):
        assert plain is not None and invariant is not None
        assert (plain - invariant).abs().max() <= 0.03 * plain.abs().max()


@pytest.mark.cuda
@pytest.mark.parametrize("head_dims", [(128, 128), (64, 32), (96, 128), (256, 192)], ids=str)
@pytest.mark.parametrize("lengths", [(300, 2500), (1, 5000), (2500, 300), (5, 0)], ids=str)
def test_forwards_are_right(lengths: tuple[int, int], head_dims: tuple[int, int], rng: torch.Generator) -> None:
    q = torch.randn(2, 6, lengths[0], head_dims[0], generator=rng).half().cuda()
    k, v = (torch.randn(2, 2, lengths[1], d, generator=rng).half().cuda() for d in head_dims)
    for causal, window in ((True, None), (False, None), ("top_left", None), (True, (700, 0)), (False, (20, 900))):
        out, lse = flash_cute.fwd(q, k, v, causal, window=window, row_invariant=True)
        assert not mismatches(out, lse, q, k, v, causal, window=window), (causal, window)


@pytest.mark.cuda
@pytest.mark.parametrize("causal", [True, False, "top_left"])
def test_rows_and_keys_that_nobody_uses(causal: Any, rng: torch.Generator) -> None:
    """Before the first sequence, behind the last, and behind what a sequence uses."""
    packed = pack((*UNEVEN[:-1], (140, 4500)), "cuda", rng, around=40, head_dim=128)
    used = (torch.tensor((*of[:-1], n), dtype=torch.int32, device="cuda") for of, n in ((USED_Q, 130), (USED_K, 4300)))
    packed = packed.replace(**dict(zip(("seqused_q", "seqused_k"), used, strict=True)))
    rows, keys = packed.unused()
    packed.q[rows], packed.k[keys], packed.v[keys] = (float("nan"),) * 3
    out, lse = flash_cute.varlen_fwd(*packed.call, causal, **packed.used, row_invariant=True)
    assert_packed_matches(out, lse, packed, causal)


@pytest.mark.cuda
def test_a_graph_whose_lengths_change(rng: torch.Generator) -> None:
    case = _invariant(make(rng, "cuda", (5000, 40, 3000), (600, 30, 1), page=16, head_dim=128, heads_q=8, heads_kv=2))
    assert case.cu_seqlens_q is not None and case.cache_seqlens is not None
    case.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flash_cute.attention_with_kvcache(
            case.q, case.k_cache, case.v_cache, return_lse=True, **case.arguments()
        )
    replays = (((1, 629, 1), (900, 30, 2000)), ((0, 631, 0), (5, 40, 60)), ((600, 30, 1), (7, 1, -1)))
    for rows, lengths in replays:
        case.cu_seqlens_q.copy_(torch.tensor([0, *rows]).cumsum(0))
        case.cache_seqlens.copy_(torch.tensor(lengths))
        graph.replay()
        assert same_bits((out, lse), case.run()), rows


@pytest.mark.cuda
def test_compiled(rng: torch.Generator) -> None:
    q, k, v = (torch.randn(1, n, 300, 64, generator=rng).half().cuda().requires_grad_() for n in (4, 2, 2))

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        return flash_cute.attention(*tensors, causal=True, row_invariant=True)

    compiled = torch.compile(call, fullgraph=True)
    assert same_bits((compiled(q, k, v),), (call(q, k, v),))
    compiled(q, k, v).sum().backward()
    assert q.grad is not None


def _cached_on_cpu(**changes: Any) -> dict[str, Any]:
    q, cache = torch.zeros(2, 1, 4, 64, dtype=torch.half), torch.zeros(2, 50, 2, 64, dtype=torch.half)
    return {"q": q, "k_cache": cache, "v_cache": cache, "row_invariant": True, **changes}


def test_refused_on_the_cpu() -> None:
    x = torch.zeros(1, 2, 4, 64)
    cu = torch.tensor([0, 4], dtype=torch.int32)
    packed = [x[0].transpose(0, 1)] * 3
    for call in (
        lambda: flash_cute.attention(x, x, x, row_invariant=True),
        lambda: flash_cute.fwd(x, x, x, row_invariant=True),
        lambda: flash_cute.varlen_attention(*packed, cu, cu, row_invariant=True),
        lambda: flash_cute.varlen_fwd(*packed, cu, cu, row_invariant=True),
        lambda: flash_cute.attention_with_kvcache(**_cached_on_cpu()),
        lambda: flash_cute.explain(x, x, x, row_invariant=True),
    ):
        with pytest.raises(ValueError, match=r"^flash_cute: row_invariant: expected False for CPU tensors, got True$"):
            call()
    for bad in (None, 1, "yes"):
        with pytest.raises(ValueError, match=r"^flash_cute: row_invariant: expected False or True, got "):
            flash_cute.attention(x, x, x, row_invariant=bad)  # type: ignore[arg-type]
    assert same_bits((flash_cute.attention(x, x, x, row_invariant=False),), (flash_cute.attention(x, x, x),))


needs_kernels = pytest.mark.skipif(not report.load()["kernels"], reason="this build has no CUDA kernels")


@needs_kernels
@pytest.mark.parametrize(
    ("said", "changes"),
    [
        ("a GPU of compute capability 9.0", {"capability": 80}),
        ("a GPU of compute capability 9.0", {"backend": "sm80"}),
        ("no softcap", {"softcap": 5.0}),
        ("no alibi_slopes", {"alibi_slopes": torch.ones(4)}),
        ("sums in float32", {"accumulate": "float16_pv"}),
        ("no mask", {"mask": flash_cute.Mask.padding(torch.ones(1, 50, dtype=torch.bool))}),
        ("head dims up to 256", {"head_dim": 264}),
        ("tensors of float16 or bfloat16", {"dtype": torch.float8_e4m3fn}),
    ],
    ids=str,
)
def test_what_no_kernel_serves_is_refused(said: str, changes: dict[str, Any]) -> None:
    options = {"capability": 90, **changes}
    shape, dtype = (50, options.pop("head_dim", 64)), options.pop("dtype", torch.half)
    q, k = torch.zeros(1, 4, *shape).to(dtype), torch.zeros(1, 2, *shape).to(dtype)
    sentence = f"^flash_cute: row_invariant: expected {said}, or False; got True$"
    if "accumulate" in changes:
        sentence = "^flash_cute: row_invariant: expected False beside accumulate 'float16_pv', got True$"
    with pytest.raises(ValueError, match=sentence):
        flash_cute.explain(q, k, k, True, row_invariant=True, **options)
    if {"mask", "accumulate", "dtype"} & set(changes):
        return
    caches = [k.transpose(1, 2)] * 2
    with pytest.raises(ValueError, match=sentence):
        flash_cute.explain(q.transpose(1, 2), *caches, row_invariant=True, kv_layout="NHD", **options)


@needs_kernels
def test_float8_caches_are_refused() -> None:
    call = _cached_on_cpu(k_cache=torch.zeros(2, 50, 2, 64).to(torch.float8_e4m3fn), capability=90, kv_layout="NHD")
    call["v_cache"] = call["k_cache"]
    tensors = [call.pop(name) for name in ("q", "k_cache", "v_cache")]
    with pytest.raises(
        ValueError, match=r"^flash_cute: row_invariant: expected caches of q's dtype, or False; got True"
    ):
        flash_cute.explain(*tensors, **call)


def _said(explanation: flash_cute.Explanation) -> str:
    return " ".join(str(explanation).split())


@needs_kernels
def test_explained() -> None:
    x = torch.empty(2, 8, 4096, 128, dtype=torch.half, device="meta")
    forward = flash_cute.explain(x, x, x, True, row_invariant=True, capability=90)
    assert (forward.data["family"], forward.data["kernel"]) == ("sm90::decode::key_chunks", "chunks_kernel")
    assert f"each chunk of {CHUNK[128]} keys" in _said(forward)
    q, cache = torch.empty(2, 1, 8, 128, dtype=torch.half), torch.empty(2, 9000, 2, 128, dtype=torch.half)
    decode = flash_cute.explain(q, cache, cache, kv_layout="NHD", row_invariant=True, capability=90)
    assert decode.data["family"] == "sm90::decode::key_chunks"
    # 2 sequences, 2 groups of 4 heads, 9 chunks of 4 rows: accumulators and three statistics, in floats
    assert decode.data["workspace_bytes"] == 4 * 2 * 2 * 9 * (4 * (128 + 3))
    assert "a second kernel folds them" in _said(decode)
    many = flash_cute.explain(
        q.expand(2, 5000, 8, 128), cache, cache, kv_layout="NHD", row_invariant=True, capability=90
    )
    assert "a second kernel folds them" not in _said(many)

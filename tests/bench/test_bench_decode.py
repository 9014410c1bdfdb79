"""The benchmark's problems over a KV cache: what each provider is given, and what is counted."""

from __future__ import annotations

import argparse
import csv
import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_commands
import pytest
import torch
from repository import ROOT

import flash_cute

CPU = torch.device("cpu")
LENGTHS = "1x37+1x4+1x61"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """bench's modules. The folder comes last on the path: it must not hide the installed package."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    names = ("backends", "caches", "case_flags", "lengths", "providers.caches", "run", "timing", "workloads")
    found = {name: importlib.import_module(f"bench.{name}") for name in names}
    return SimpleNamespace(calls=found.pop("providers.caches"), **found)


def small(bench: SimpleNamespace, **changes: Any) -> Any:
    return replace(bench.caches.over_cache(3, 4, 2, 32, 61), **{"dtype": "fp32", "page": 16, **changes})


def expected(workload: Any, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """(B, H, N, Dv) in float64, of the contiguous keys, one sequence after the other."""
    q, *_, k, v = (x.transpose(1, 2).double() if x.dim() == 4 else x for x in inputs)
    results = [
        flash_cute.reference.attention(
            q[b : b + 1], k[b : b + 1, :, :keys], v[b : b + 1, :, :keys], "bottom_right", window=workload.window
        )[0]
        for b, keys in enumerate(workload.sequences)
    ]
    return torch.cat(results)


# As vLLM's library declares them.
METADATA = """get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k,
int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k,
Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? leftpad_k, int? page_size, int max_seqlen_k_new, bool is_causal,
int window_size_left, int window_size_right, bool has_softcap, int num_splits, bool? pack_gqa,
int sm_margin) -> Tensor"""
FORWARD = """fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor? out,
Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k,
int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos,
Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale,
float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap,
bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, Tensor? s_aux,
int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"""


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """vLLM's operators over flash_cute's CPU path; the splits that were asked for."""
    splits: list[int] = []
    schedules: dict[int, tuple[Any, ...]] = {}

    def metadata(*a: Any) -> torch.Tensor:
        batch, rows, keys, heads, heads_kv, head_dim, head_dim_v, dtype, lengths, offsets, *_ = a
        assert dtype == torch.float32 and (head_dim, head_dim_v) in ((32, 32), (16, 32))
        schedules[len(schedules)] = (batch, rows, keys, heads, heads_kv, lengths.tolist(), offsets.tolist(), *a[14:])
        return torch.tensor([len(schedules) - 1])

    def forward(*a: Any) -> list[torch.Tensor]:
        q, k, v, offsets, lengths, rows, keys, table = *a[:3], a[7], *a[11:15]
        scale, is_causal, left, right, softcap, _, schedule, number, pack, margin, *_ = a[23:]
        assert all(a[i] is None for i in (3, 4, 6, 8, 9, 10, *range(15, 23)))
        page = None if table is None else k.shape[1]
        heads = (q.shape[1], k.shape[2], lengths.tolist(), offsets.tolist(), page)
        assert schedules[int(schedule)] == (
            *(len(lengths), rows, keys, *heads, 0, is_causal, left, right, False, number, pack, margin),
        )
        splits.append(number)
        window = tuple(None if side < 0 else side for side in (left, right))
        options: dict[str, Any] = {"cu_seqlens_q": offsets, "cache_seqlens": lengths, "page_table": table}
        assert is_causal and not softcap
        if a[5] is not None:  # of latent attention: what of q the values are multiplied by
            q, k = torch.cat((a[5], q), -1), torch.cat((v, k), -1)
        return [flash_cute.attention_with_kvcache(q, k, v, **options, window=window, scale=scale)]

    monkeypatch.delattr(torch.ops, "_vllm_fa3_C", raising=False)
    library = torch.library.Library("_vllm_fa3_C", "DEF")
    library.define(METADATA)
    library.define(FORWARD)
    library.impl("get_scheduler_metadata", metadata, "CPU")
    library.impl("fwd", forward, "CPU")
    yield splits
    library._destroy()
    vars(torch.ops).pop("_vllm_fa3_C", None)


class FakeTensor:
    """A tensor of cuDNN's graph."""

    def __init__(self, dim: Any = None, stride: Any = None, data_type: str = "") -> None:
        self.dim, self.stride, self.data_type, self.is_output = dim, stride, data_type, False

    def set_output(self, is_output: bool) -> FakeTensor:
        self.is_output = is_output
        return self

    def set_dim(self, dim: list[int]) -> FakeTensor:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> FakeTensor:
        self.stride = stride
        return self


class FakeGraph:
    """cuDNN's graph: its arithmetic is flash_cute's CPU path on what its tensors' sizes and strides say."""

    def __init__(self, **types: Any) -> None:
        assert types["io_data_type"] == "half"

    def tensor(self, **facts: Any) -> FakeTensor:
        return FakeTensor(**facts)

    def sdpa(self, *, generate_stats: bool, use_padding_mask: bool, **arguments: Any) -> tuple[Any, Any]:
        assert use_padding_mask and not generate_stats
        self.arguments, self.out = arguments, FakeTensor()
        return self.out, None

    def build(self, modes: list[str]) -> None:
        assert self.out.is_output and self.out.dim and self.out.stride

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, pack: dict[Any, torch.Tensor], workspace: torch.Tensor, handle: int) -> None:
        given = dict(self.arguments)
        many = given.pop("diagonal_band_right_bound", None) == 0 and given.pop("diagonal_alignment") == "bottom_right"
        scale, most = given.pop("attn_scale"), given.pop("paged_attention_max_seq_len_kv")
        for tensor in given.values():
            assert list(pack[tensor].shape) == tensor.dim and list(pack[tensor].stride()) == tensor.stride
            assert pack[tensor].dtype == {"half": torch.float16, "int32": torch.int32}[tensor.data_type]
        values = {name: pack[tensor] for name, tensor in given.items()}
        rows, keys = values["seq_len_q"].flatten(), values["seq_len_kv"].flatten()
        table = values["paged_attention_k_table"][:, 0, :, 0]
        assert torch.equal(table, values["paged_attention_v_table"][:, 0, :, 0]) and keys.max() <= most
        q, k, v = (values[name].transpose(1, 2) for name in "qkv")
        assert (rows == q.shape[1]).all() and many == (q.shape[1] > 1)
        out = flash_cute.attention_with_kvcache(q, k, v, cache_seqlens=keys, page_table=table, scale=scale)
        pack[self.out].transpose(1, 2).copy_(out.transpose(1, 2))


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package nvidia-cudnn-frontend, as far as it is called."""
    fake = SimpleNamespace(
        pygraph=FakeGraph,
        data_type=SimpleNamespace(BFLOAT16="bfloat16", HALF="half", FLOAT="float", INT32="int32"),
        heur_mode=SimpleNamespace(A="a", FALLBACK="fallback"),
        diagonal_alignment=SimpleNamespace(BOTTOM_RIGHT="bottom_right"),
        create_handle=lambda: 1,
        set_stream=lambda handle, stream: None,
        backend_version=lambda: 91900,
    )
    monkeypatch.setitem(sys.modules, "cudnn", fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))


def test_pages_have_the_contiguous_keys(bench: SimpleNamespace) -> None:
    """Each page once, in no order; bytes are those of the keys that rows see."""
    workload = small(bench, lengths=LENGTHS, Dv=16)
    inputs = workload.make_inputs(CPU, seed=3)
    q, k_pages, v_pages, table, lengths, k, v = inputs
    assert [tuple(x.shape) for x in inputs] == list(workload.shapes.values())
    assert lengths.tolist() == [37, 4, 61] and len(k_pages) == 3 + 1 + 4
    used = [table[b, j] for b, keys in enumerate((37, 4, 61)) for j in range(-(-keys // 16))]
    assert sorted(map(int, used)) == list(range(8)) != list(map(int, used))
    for b, keys in enumerate((37, 4, 61)):
        for pages, whole in ((k_pages, k), (v_pages, v)):
            assert torch.equal(pages[table[b].long()].flatten(0, 1)[:keys], whole[b, :keys])
    assert workload.cache_bytes == 4 * 2 * (32 + 16) * (37 + 4 + 61)
    assert workload.input_bytes == workload.cache_bytes + q.nbytes
    assert workload.flops == 2 * 4 * (32 + 16) * (37 + 4 + 61)
    assert replace(workload, window=(9, 0), N=3).cache_bytes == 4 * 2 * (32 + 16) * (12 + 4 + 12)


PROBLEMS: tuple[dict[str, Any], ...] = ({}, {"N": 3}, {"N": 3, "lengths": LENGTHS}, {"N": 2, "window": (9, 0)})
PROBLEMS += ({"N": 3, "cache_dtype": "e4m3"},)
DENSE_NAMES = ("flash_cute:dense", "sdpa")


@pytest.mark.parametrize("name", ["flash_cute", "flash_cute:contiguous", "vllm-fa3", "vllm-fa3:contiguous"])
def test_latent_attention(bench: SimpleNamespace, vllm: list[int], name: str) -> None:
    """The values are the first columns of the keys, in the same memory, which counts once."""
    workload = small(bench, H=4, Hkv=1, D=48, Dv=32, N=2, lengths=LENGTHS)
    inputs = workload.make_inputs(CPU, seed=0)
    _, k_pages, v_pages, *_, k, v = inputs
    assert v_pages.data_ptr() == k_pages.data_ptr() and v.data_ptr() == k.data_ptr()
    assert workload.cache_bytes == 4 * 48 * (37 + 4 + 61)
    (out,) = bench.backends.first_call(bench.backends.prepare(name, workload, CPU), workload, inputs)
    assert (out.double() - expected(workload, inputs)).abs().max() < 1e-4


def test_flash_mla_is_given_pages_of_64_keys(bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(
        q: Any, pages: Any, columns: int, lengths: Any, table: Any, scale: float, causal: bool, *more: Any
    ) -> Any:
        assert causal and more in ((None, None, None), ("schedule", "splits", None))
        options = {"cache_seqlens": lengths, "page_table": table, "scale": scale}
        out = flash_cute.attention_with_kvcache(q, pages, pages[..., :columns], **options)
        return out, None, "schedule", "splits"

    monkeypatch.setattr(bench.calls, "load_flash_mla", lambda: SimpleNamespace(dense_decode_fwd=decode))
    workload = small(bench, Hkv=1, D=576, Dv=512, N=2, page=64)
    inputs = workload.make_inputs(CPU, seed=0)
    (out,) = bench.backends.first_call(bench.backends.prepare("vllm-flashmla", workload, CPU), workload, inputs)
    assert (out.double() - expected(workload, inputs)).abs().max() < 1e-4
    for changes in ({"page": 16}, {"Hkv": 2}, {"D": 320}):
        with pytest.raises(
            bench.backends.Unavailable, match="FlashMLA serves latent attention of head dims 576 and 512"
        ):
            bench.backends.prepare("vllm-flashmla", replace(workload, **changes), CPU)


@pytest.mark.parametrize("changes", PROBLEMS, ids=str)
@pytest.mark.parametrize(
    "name",
    ["flash_cute", "flash_cute:contiguous", "vllm-fa3", "vllm-fa3:contiguous", "vllm-fa3:invariant", "cudnn-paged"],
)
@pytest.mark.usefixtures("cudnn")
def test_every_provider_computes_the_same(
    bench: SimpleNamespace, vllm: list[int], name: str, changes: dict[str, Any]
) -> None:
    workload = small(bench, dtype="fp16" if name == "cudnn-paged" else "fp32", **changes)
    inputs = workload.make_inputs(CPU, seed=0)
    if name == "cudnn-paged" and workload.window:
        with pytest.raises(bench.backends.Unavailable, match=r"cuDNN over pages, .* has no window"):
            bench.backends.prepare(name, workload, CPU)
        return
    (out,) = bench.backends.first_call(bench.backends.prepare(name, workload, CPU), workload, inputs)
    right = expected(workload, inputs)
    assert out.shape == right.shape
    assert (out.double() - right).norm() < (1e-3 if name == "cudnn-paged" else 1e-6) * right.norm()
    assert splits_of(name) == vllm


def test_float8_caches(bench: SimpleNamespace) -> None:
    """Their bytes are counted, and the same values in 16 bits are what they are compared with."""
    plain, workload = (small(bench, dtype="bf16", cache_dtype=name, append=True) for name in ("", "e4m3"))
    assert workload.cache_bytes * 2 == plain.cache_bytes and workload.tensor_bytes["q"] == plain.tensor_bytes["q"]
    assert workload.label == f"{plain.label}, e4m3 cache"
    inputs = workload.make_inputs(CPU, seed=0)
    right = expected(workload, inputs)
    for name, dtype in (("flash_cute", torch.float8_e4m3fn), ("flash_cute:bf16", torch.bfloat16)):
        backend = bench.backends.prepare(name, workload, CPU)
        (_, k_cache, v_cache), places = backend.arrange(inputs)
        assert {k_cache.dtype, v_cache.dtype} == {dtype} and places["k"].dtype == torch.bfloat16
        out = backend.restore(backend.call(*backend.arrange(inputs)))
        torch.testing.assert_close(out.double(), right, rtol=0, atol=0.02)
    assert ("flash_cute", "flash_cute:bf16") in bench.backends.pairs(("flash_cute", "flash_cute:bf16"))
    with pytest.raises(bench.backends.Unavailable, match="no such mode"):
        bench.backends.prepare("flash_cute:bf16", plain, CPU)


def splits_of(name: str) -> list[int]:
    return [int(name.endswith(":invariant"))] if name.startswith("vllm") else []


@pytest.mark.parametrize("changes", PROBLEMS, ids=str)
@pytest.mark.parametrize("name", DENSE_NAMES)
def test_a_dense_call_where_there_is_one(bench: SimpleNamespace, name: str, changes: dict[str, Any]) -> None:
    workload = small(bench, **changes)
    inputs = workload.make_inputs(CPU, seed=0)
    if workload.lengths or (name == "sdpa" and workload.N > 1):
        with pytest.raises(bench.backends.Unavailable, match=r"no lengths of their own|top left|no window"):
            bench.backends.prepare(name, workload, CPU)
        return
    backend = bench.backends.prepare(name, workload, CPU)
    assert backend.name == name
    torch.testing.assert_close(
        bench.backends.first_call(backend, workload, inputs)[0].double(), expected(workload, inputs), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(
    "name", ["flash_cute", "flash_cute:contiguous", "flash_cute:plain", "flash_cute:batch-dependent"]
)
def test_new_keys_are_appended(bench: SimpleNamespace, name: str) -> None:
    """The rows' own keys, which only the call over caches writes where they belong."""
    workload = small(bench, N=2, append=True, lengths=LENGTHS)
    inputs = workload.make_inputs(CPU, seed=0)
    right = expected(workload, inputs)
    backend = bench.backends.prepare(name, workload, CPU)
    arranged = backend.arrange(inputs)
    if name != "flash_cute:plain":
        _, k_pages, v_pages, table, lengths, k, v = inputs
        for b, keys in enumerate(lengths.tolist()):
            for pages, whole in ((k_pages, k), (v_pages, v)):
                for j in (keys - 2, keys - 1):
                    pages[table[b, j // 16], j % 16] = whole[b, j] = torch.nan
        assert arranged[1]["cache_seqlens"].tolist() == [35, 2, 59]
    torch.testing.assert_close(backend.restore(backend.call(*arranged)).double(), right, rtol=0, atol=1e-6)


def test_who_cannot_says_so(bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", None)
    monkeypatch.setattr(bench.calls, "LIBRARY", "absent.so")
    prepare, unavailable = bench.backends.prepare, bench.backends.Unavailable
    for name, changes, words in (
        ("vllm-fa3", {}, "no absent.so on the path; it is in the wheel of vllm"),
        ("vllm-fa3", {"append": True}, "vllm-fa3 appends nothing"),
        ("cudnn-paged", {}, "import cudnn"),
        ("flash_cute:plain", {}, "nothing is appended"),
        ("flash_cute:deterministic", {}, "no such mode"),
        ("sdpa", {"append": True}, "it has no append"),
        ("flash_cute", {"direction": "bwd"}, "a forward alone"),
    ):
        with pytest.raises(unavailable, match=words):
            prepare(name, small(bench, **changes), CPU)
    for name, words in (
        ("vllm-fa3", "over caches alone"),
        ("flash_cute:contiguous", "only the keys of a cache"),
        ("flash_cute:batch-dependent", "only over a cache"),
    ):
        with pytest.raises(unavailable, match=words):
            prepare(name, bench.workloads.cpu_grid()[0], CPU)


def test_the_grid(bench: SimpleNamespace) -> None:
    """A mixed batch of the promised lengths; no cell twice; two sets of inputs of each fit into 40 GB."""
    mixed = bench.lengths.mixed()
    assert (len(mixed), min(mixed), max(mixed), sum(mixed)) == (64, 32, 26710, 257809)
    cells = bench.caches.decode_grid()
    assert len({cell.label for cell in cells}) == len(cells)
    assert {cell.N for cell in cells} == {1, 2, 4, 16} and {cell.page for cell in cells} == {1, 16, 64, 256}
    for cell in cells:
        elements = sum(torch.Size(shape).numel() for shape in cell.shapes.values())
        assert 2 * 2 * elements < 40e9, cell.label
    window = next(cell for cell in cells if cell.window and cell.D == 64)
    assert window.cache_bytes == 64 * 128 * 8 * 64 * 2 * 2


def test_flags_make_the_same_problem(bench: SimpleNamespace) -> None:
    parser = argparse.ArgumentParser()
    bench.case_flags.add_shape_flags(parser)
    for workload in (
        *bench.caches.decode_grid(),
        *bench.caches.prefill_grid(),
        small(bench, lengths=LENGTHS, append=True),
    ):
        flags = parser.parse_args([one for one in bench.case_flags.to_flags(workload) if "direction" not in one])
        assert bench.case_flags.from_flags(flags, "fwd") == workload


def test_rate_is_that_of_the_bytes_of_keys_and_values(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench.calls, "LIBRARY", "absent.so")
    path = tmp_path / "decode.csv"
    shape = ["--B=2", "--H=4", "--Hkv=2", "--N=1", "--M=70", "--D=32", "--causal", "--dtype=fp32", "--page=16"]
    names = ["--ours", "flash_cute,flash_cute:contiguous,flash_cute:plain", "--peers", "sdpa,vllm-fa3"]
    options = ["--device", "cpu", "--seconds", "0.02", "--rounds", "5", "--out", str(path)]
    printed = bench_commands.run("run", *shape, *names, *options)
    assert "us (TB/s of keys and values)" in printed and "absent: vllm-fa3: no absent.so" in printed
    with path.open(newline="") as file:
        rows = {row["provider"]: row for row in csv.DictReader(file)}
    for name in ("flash_cute", "flash_cute:contiguous", "sdpa"):
        row = rows[name]
        moved = 2 * 70 * 2 * 2 * 32 * 4
        assert float(row["cache_tbytes"]) == pytest.approx(moved / float(row["median_us"]) * 1e-6, rel=2e-3)
        assert (row["page"], row["append"], row["N"], row["M"]) == ("16", "", "1", "70")
    assert float(rows["flash_cute"]["ratio_flash_cute:contiguous"]) > 0 and float(rows["flash_cute"]["ratio_sdpa"]) > 0
    assert rows["flash_cute:plain"]["missing"].startswith("nothing is appended")
    summary = bench_commands.run("summary", str(path))
    assert "microseconds (TB/s of keys and values): flash_cute / the best peer" in summary
    assert "pages / contiguous" in summary and "N 1x70" in summary

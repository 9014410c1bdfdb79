"""What `explain` and `kvcache_workspace_bytes` say of calls over caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from caches import Cached, make

import flash_cute
from flash_cute import report

needs_kernels = pytest.mark.skipif(not report.load()["kernels"], reason="this build has no CUDA kernels")


def _explained(case: Cached, **more: Any) -> flash_cute.Explanation:
    options = {"cu_seqlens_q": case.cu_seqlens_q, "causal": case.causal, **case.places, **case.options, **more}
    return flash_cute.explain(case.q, case.k_cache, case.v_cache, **options)


def test_on_the_cpu(rng: torch.Generator) -> None:
    own = {"cache_dtypes": (torch.float8_e4m3fn, torch.float8_e5m2), "descales": "heads", "dtype": torch.bfloat16}
    case = make(rng, "cpu", (9, 4, 0), (1, 5, 2), page=4, head_dim_v=32, window=(7, 0), room=1, **own)
    explanation = _explained(case, new_keys=-1)
    data = explanation.data
    assert case.page_table is not None
    expected = {
        "backend": "cpu", "batch": 3, "len_q": 8, "len_k": 4 * case.page_table.shape[1], "packed": True, "page": 4,
        "cache_seqlens": True, "new_keys": -1, "heads_q": 4, "heads_kv": 2, "head_dim": 64, "head_dim_v": 32,
        "dtype": "bfloat16", "dtype_k": "float8_e4m3fn", "dtype_v": "float8_e5m2", "causal": "bottom_right",
        "window": [7, 0], "mask": "window", "workspace_bytes": 0,
    }  # fmt: skip
    assert {name: data.get(name) for name in expected} == expected
    assert set(data["copies"]) == {"q", "k_cache", "v_cache", "out"}
    text = " ".join(str(explanation).split())
    assert "a cache of float8_e4m3fn keys and float8_e5m2 values, pages of 4 keys" in text
    assert "How many keys a sequence has is read when the call runs" in text


def test_a_contiguous_cache(rng: torch.Generator) -> None:
    """`kv_layout` tells it from other calls, and causal is True then."""
    case = make(rng, "cpu", (9, 4), 2)
    data = flash_cute.explain(case.q, case.k_cache, case.v_cache, kv_layout="NHD").data
    assert (data["page"], data["cache_seqlens"], data["causal"]) == (None, False, "bottom_right")
    assert "page" not in flash_cute.explain(*(x.transpose(1, 2) for x in (case.q, case.k_cache, case.v_cache))).data


@pytest.mark.parametrize(
    ("name", "given", "shown"),
    [
        ("cu_seqlens_k", torch.zeros(3, dtype=torch.int32), "torch.Tensor"),
        ("seqused_q", torch.zeros(2, dtype=torch.int32), "torch.Tensor"),
        ("max_seqlen_k", 7, "7"),
        ("accumulate", "float16", "'float16'"),
        ("backward", True, "True"),
        ("dlse", True, "True"),
        ("descale_q", torch.ones(()), "torch.Tensor"),
        ("out_dtype", torch.float16, "torch.dtype"),
    ],
    ids=str,
)
def test_what_such_a_call_does_not_have(name: str, given: Any, shown: str, rng: torch.Generator) -> None:
    case = make(rng, "cpu", (9, 4), 2, page=4)
    with pytest.raises(ValueError, match=f"^flash_cute: {name}: expected None over a cache, got {shown}$"):
        _explained(case, **{name: given})


def test_the_workspace_on_the_cpu(rng: torch.Generator) -> None:
    case = make(rng, "cpu", (9, 4), (1, 2), page=4)
    size = flash_cute.kvcache_workspace_bytes(
        case.q, case.k_cache, case.v_cache, cu_seqlens_q=case.cu_seqlens_q, new_keys=-1, window=(3, 0), **case.places
    )
    assert size == 0
    case.run(workspace=torch.empty(0, dtype=torch.uint8))


@needs_kernels
@pytest.mark.parametrize("capability", [80, 86, 90, 120])
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize(
    ("head_dims", "kernel"),
    [
        ((136, 136), (256, 256)),
        ((192, 128), (256, 256)),
        ((64, 256), (256, 256)),
        ((320, 320), (576, 512)),
        ((512, 512), (576, 512)),
        ((576, 512), (576, 512)),
        ((576, 576), (1024, 1024)),
        ((1024, 1024), (1024, 1024)),
    ],
    ids=str,
)
def test_large_head_dims(
    head_dims: tuple[int, int], kernel: tuple[int, int], rows: int, capability: int, rng: torch.Generator
) -> None:
    """Every chip has a kernel for them. Where shared memory has no room for 64 rows, row tiles have 16."""
    case = make(rng, "cpu", (90, 31), rows, page=4, head_dim=head_dims[0], head_dim_v=head_dims[1], dtype=torch.half)
    data = _explained(case, capability=capability).data
    if capability == 90 and max(head_dims) <= 256:
        assert data["family"] == "sm90::decode::split_keys"
        data = _explained(case, capability=capability, backend="sm80").data
    assert (data["family"], data["kernel"]) == ("sm80::decode::streamed", "decode_kernel")
    assert (data["kernel_head_dim"], data["kernel_head_dim_v"]) == kernel
    few = rows == 1 or capability in (86, 120) or kernel[1] == 1024
    assert data["block_m"] == (16 if few else 64)
    assert 3 <= data["stages"] <= 12
    assert data["smem_bytes"] == {80: 163, 90: 227}.get(capability, 99) * 1024
    assert data["workspace_bytes"] > 0


@needs_kernels
@pytest.mark.parametrize("packed", [False, True])
def test_tiles_are_counted_in_32_bits(packed: bool) -> None:
    """1,000,000 keys for 32,768 rows of 64 heads, in chunks, are served; 32 times as many rows are refused by name,
    unless no row is one of the kernel that counts the tiles of a KV head."""

    def family(rows: int, **options: float) -> str:
        cache = torch.zeros(1, 1024, 8, 128, dtype=torch.half)
        table = torch.zeros(1, 1000, dtype=torch.int32)
        q = torch.zeros(1, 1, 64, 128, dtype=torch.half).expand(1, rows, -1, -1)
        q, offsets = (q[0], torch.tensor([0, rows], dtype=torch.int32)) if packed else (q, None)
        plan = flash_cute.explain(q, cache, cache, page_table=table, cu_seqlens_q=offsets, capability=90, **options)
        return str(plan.data["family"])

    refusal = r"^flash_cute: q: expected at most 2\^30 tiles of rows and keys of a KV head"
    short, long = "sm90::decode::split_keys", "sm90::decode::long_rows"
    assert family(32768, softcap=9.0) == short  # modified scores: there are no long sequences
    with pytest.raises(ValueError, match=refusal):
        family(32768 * 32, softcap=9.0)
    assert family(32768) == (short if packed else long)
    if packed:
        with pytest.raises(ValueError, match=refusal):
            family(32768 * 32)
    else:
        assert family(32768 * 32) == long


@needs_kernels
def test_large_head_dims_that_are_refused(rng: torch.Generator) -> None:
    case = make(rng, "cpu", (9, 4), 1, page=16, head_dim=512, dtype=torch.half)
    both = "head dims 512 and 512"
    with pytest.raises(ValueError, match=f"^flash_cute: q: this build has no kernel for caches of {both} with backend"):
        _explained(case, capability=90, backend="sm90")
    case = make(rng, "cpu", (9, 4), 1, page=16, head_dim=512, dtype=torch.half, cache_dtypes=(torch.float8_e4m3fn,) * 2)
    with pytest.raises(ValueError, match=f"^flash_cute: q: this build has no kernel for caches of float8 of {both}$"):
        _explained(case, capability=90)


@needs_kernels
@pytest.mark.parametrize(("backend", "of_sm"), [("sm90", 2), ("sm80", 1)])
def test_a_plan_of_fewer_multiprocessors(backend: str, of_sm: int, rng: torch.Generator) -> None:
    """Tests may say how many there are: that changes who computes what, and no sequence's pieces."""
    case = make(rng, "cpu", (9, 4), 1, page=16, dtype=torch.half)
    for count, named in ((132, backend), (66, f"{backend}:sms66"), (1, f"{backend}:sms1")):
        explained = _explained(case, capability=90, backend=named)
        text = " ".join(str(explained).split())
        assert f"dealt to {max(1, count * of_sm // 2)} CTAs of each KV head" in text
        assert explained.data["split_ctas"] == 2 * max(1, count * of_sm // 2)
    with pytest.raises(ValueError, match="backend: expected at most 132 multiprocessors, got 'sm90:sms133'"):
        _explained(case, capability=90, backend="sm90:sms133")


def test_numbers_of_multiprocessors_that_are_refused(python: Any, rng: torch.Generator) -> None:
    case = make(rng, "cpu", (9, 4), 1, page=16, dtype=torch.half)
    for name in ("cpu:sms5", "auto:sms5"):
        said = f"^flash_cute: backend: expected no number of multiprocessors on the CPU, got '{name}'$"
        with pytest.raises(ValueError, match=said):
            case.run(name)
    for name in ("sm90:sms", "sm90:sms0", "sm90:sms-1", "sm90:sms5x", "sm90:sms99999999999"):
        said = f"^flash_cute: backend: expected a number of multiprocessors behind ':sms', got '{name}'$"
        with pytest.raises(ValueError, match=said):
            _explained(case, capability=90, backend=name)
    script = """
import os
os.environ.pop("FLASH_CUTE_TEST_TILES", None)
import torch, flash_cute
q, cache = torch.zeros(1, 1, 2, 64), torch.zeros(1, 9, 2, 64)
try:
    flash_cute.attention_with_kvcache(q, cache, cache, backend="auto:sms66")
except ValueError as error:
    print(error)
"""
    assert python(script).strip() == "flash_cute: backend: expected 'auto', 'cpu', 'sm80' or 'sm90', got 'auto:sms66'"


@pytest.mark.cuda
def test_on_the_gpu(rng: torch.Generator) -> None:
    """The workspace's size follows from shapes and options alone; lengths are a rule."""
    case = make(rng, "cuda", (900, 4, 0), 1, page=16)
    data = _explained(case).data
    assert data["backend"] in ("sm80", "sm90") and data["reasons"]
    size = flash_cute.kvcache_workspace_bytes(case.q, case.k_cache, case.v_cache, **case.places)
    assert data["workspace_bytes"] == size
    others = {**case.places, "cache_seqlens": torch.full_like(case.cache_seqlens, -1)}
    assert flash_cute.kvcache_workspace_bytes(case.q, case.k_cache, case.v_cache, **others) == size


@needs_kernels
@pytest.mark.parametrize("latent", [False, True])
def test_small_pages_are_named(latent: bool, rng: torch.Generator) -> None:
    """Rows of pages that are no multiple of 16 keys are copied, by twice as many warps."""
    own = {"head_dim": 576, "head_dim_v": 512, "heads_kv": 1, "storage": "view"}
    shape: dict[str, Any] = own if latent else {"head_dim": 128}
    threads = {}
    for page in (48, 24, 1):
        case = make(rng, "cpu", (90, 31), 1, page=page, dtype=torch.half, heads_q=16, **shape)
        explained = _explained(case, capability=90)
        note = f"Pages of {page} keys are no multiple of 16: keys are copied row by row"
        assert (note in str(explained)) == (page != 48)
        threads[page] = explained.data["threads"]
    assert threads == (dict.fromkeys(threads, 384) if latent else {48: 192, 24: 256, 1: 256})


@needs_kernels
@pytest.mark.parametrize("ragged", [True, False], ids=["ragged", "equal"])
@pytest.mark.parametrize(
    ("head_dim", "dtype", "page", "long_are_copied"),
    [
        *((128, torch.half, page, page % 8 != 0) for page in (4, 8, 24, 32)),
        *((64, torch.half, page, page % 4 != 0) for page in (2, 4, 12)),
        *((128, torch.float8_e4m3fn, page, page % 4 != 0) for page in (2, 4)),
        (64, torch.float8_e4m3fn, 1, True),
    ],
    ids=str,
)
def test_small_pages_of_long_sequences(
    head_dim: int, dtype: torch.dtype, page: int, long_are_copied: bool, ragged: bool, rng: torch.Generator
) -> None:
    """Their rows are copied where a box of TMA would have still fewer, or shorter, ones."""
    stored: dict[str, Any] = {} if dtype == torch.half else {"cache_dtypes": (dtype, dtype)}
    shape = {"page": page, "dtype": torch.half, "head_dim": head_dim, "heads_q": 16, "heads_kv": 2}
    case = make(rng, "cpu", (1200, 31), (1000, 1) if ragged else 1000, **shape, **stored)
    text = " ".join(str(_explained(case, capability=90)).split())
    said = f"Pages of {page} keys are no multiple of 16: keys"
    assert (f"{said} are copied row by row" in text) == long_are_copied
    assert (f"{said} of sequences of fewer rows than 961 are copied" in text) == (
        ragged and page % 16 != 0 and not long_are_copied
    )

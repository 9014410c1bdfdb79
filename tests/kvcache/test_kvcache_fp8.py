"""Float8 caches: results are those of the dequantised values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from caches import FLOAT8, check, make
from cases import CUDA_DTYPES
from numerics import same_bits

import flash_cute

pytestmark = pytest.mark.kernel

PAIRS = [(x, y) for x in FLOAT8 for y in FLOAT8]


@pytest.mark.parametrize("descales", ["none", "number", "heads"])
@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
@pytest.mark.parametrize("rows", [1, (3, 1, 20, 0)], ids=str)
def test_dtypes_and_descales(
    device: str,
    rows: Any,
    dtypes: tuple[torch.dtype, torch.dtype],
    descales: str,
    backend: str | None,
    rng: torch.Generator,
) -> None:
    for dtype in CUDA_DTYPES:
        options = {"dtype": dtype, "cache_dtypes": dtypes, "descales": descales, "appends": True}
        check(make(rng, device, (70, -1, 0, 130), rows, page=16, **options), backend)


@pytest.mark.sanitizer
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (256, 256), (192, 128), (576, 512), (32, 80)], ids=str)
@pytest.mark.parametrize("page", [None, 1, 48])
def test_head_dims(
    device: str, page: int | None, head_dims: tuple[int, int], backend: str | None, rng: torch.Generator
) -> None:
    shapes = {"head_dim": head_dims[0], "head_dim_v": head_dims[1], "heads_q": 8, "heads_kv": 1}
    storage = "view" if head_dims == (576, 512) else "halves"
    options = {"dtype": torch.bfloat16, "cache_dtypes": (FLOAT8[0],) * 2, "descales": "number", "storage": storage}
    check(make(rng, device, (100, 31), 2, page=page, **shapes, **options), backend)


@pytest.mark.parametrize(
    "options",
    [{"window": (20, 0)}, {"softcap": 5.0}, {"causal": False}, {"causal": "top_left"}, {"scale": 0.4}],
    ids=str,
)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_options(
    device: str, kv_layout: str, options: dict[str, Any], backend: str | None, rng: torch.Generator
) -> None:
    own = {"dtype": torch.float16, "cache_dtypes": FLOAT8, "descales": "heads", "kv_layout": kv_layout}
    check(make(rng, device, (70, 33), 4, page=16, **own, **options), backend)


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
@pytest.mark.parametrize("rows", [1, 5])
def test_the_bits_of_a_cache_of_16_bits(
    device: str, rows: int, dtypes: tuple[torch.dtype, torch.dtype], backend: str | None, rng: torch.Generator
) -> None:
    """float16 holds the values of either type, so that a cache of them gives the same bits."""
    case = make(rng, device, (70, 1, 200), rows, page=16, dtype=torch.float16, cache_dtypes=dtypes)
    wide = case.replace(k_cache=case.k_cache.half(), v_cache=case.v_cache.half())
    assert same_bits(case.run(backend), wide.run(backend))


def test_other_dtypes_of_q_on_the_cpu(rng: torch.Generator) -> None:
    for dtype in (torch.float32, torch.float64):
        case = make(rng, "cpu", (70, 1), 3, page=16, dtype=dtype, cache_dtypes=FLOAT8, descales="heads", appends=True)
        assert check(case)[0].dtype == dtype


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["descale_k", "descale_v"])
def test_descales_that_make_no_sense(name: str, value: float, rng: torch.Generator) -> None:
    """On the CPU, which reads them."""
    case = make(rng, "cpu", (7, 1), 1, dtype=torch.float16, cache_dtypes=FLOAT8, descales="heads", appends=True)
    getattr(case, name)[1, 1] = value
    said = f"{name}: expected finite numbers above 0, got {value:g}"
    with pytest.raises(ValueError, match=said):
        case.replace(k=None, v=None).run()
    with pytest.raises(ValueError, match=said):
        flash_cute.append_kvcache(case.k_cache, case.v_cache, case.k, case.v, **case.places)

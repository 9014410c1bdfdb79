"""The kernels of flash_cute.schedules are exact by the rules of the library's own.

They run where they are compiled already: with the library (FLASH_CUTE_SCHEDULES=1), or by a first
`python -m flash_cute.schedules`, which takes minutes.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from cases import CUDA_DTYPES, Case, sampled_dtypes
from numerics import assert_matches

from flash_cute import schedules
from flash_cute.schedules import _compile, _library

pytestmark = pytest.mark.cuda

INSTANCES = [(name, d) for name, most in _compile.MAX_HEAD_DIM.items() for d in _compile.HEAD_DIMS if d <= most]
NAMES = schedules.names()
# Around the edges of tiles of 32, 48, 64 and 128, and one row that sees many keys.
LENGTHS = ((1, 1), (2, 3), (47, 49), (65, 63), (127, 129), (129, 257), (1, 1023), (300, 517), (513, 300))
WINDOWS = ((0, 0), (5, None), (None, 3), (64, 64), (100, 0), (0, 100), (200, 7))


@pytest.fixture(autouse=True)
def _compiled() -> None:
    if _library.compiled() is None:
        pytest.skip("the schedules are not compiled: FLASH_CUTE_SCHEDULES=1, or python -m flash_cute.schedules")


def check(name: str, case: Case, rng: torch.Generator, **options: Any) -> None:
    q, k, v = case.inputs("cuda", rng)
    window = case.window or (None, None)
    result = schedules.fwd(q, k, v, case.causal, schedule=name, window=window, **options)
    assert_matches(*result, q, k, v, case.causal, window=case.window, **options)


@pytest.mark.parametrize(("name", "head_dim"), INSTANCES)
def test_exact(name: str, head_dim: int, rng: torch.Generator) -> None:
    for case in sampled_dtypes([head_dim], LENGTHS, CUDA_DTYPES):
        check(name, case, rng)


@pytest.mark.parametrize(("name", "head_dim"), INSTANCES)
def test_long(name: str, head_dim: int, rng: torch.Generator) -> None:
    """Many steps, in which every buffer is used again and again."""
    for causal, dtype in itertools.product((False, True), CUDA_DTYPES):
        check(name, Case(head_dim, 1000, 4099, causal, dtype, batch=1), rng)


@pytest.mark.parametrize("name", NAMES)
def test_head_dims_between_instances(name: str, rng: torch.Generator) -> None:
    """Columns past the head dim are zero, also whole column tiles; head dims that are no multiple of 8 are copied."""
    for head_dim in (8, 24, 40, 72, 100, 120, 136, 250, 264, 400):
        if head_dim <= _compile.MAX_HEAD_DIM[name]:
            check(name, Case(head_dim, 129, 203, "bottom_right"), rng)


@pytest.mark.parametrize(("name", "head_dim"), INSTANCES)
def test_windows(name: str, head_dim: int, rng: torch.Generator) -> None:
    for window, (len_q, len_k) in itertools.product(WINDOWS, ((300, 300), (129, 400), (400, 129))):
        check(name, Case(head_dim, len_q, len_k, window=window, batch=1), rng)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("heads_q", "heads_kv"), [(4, 2), (6, 1), (3, 3)])
def test_grouped_heads(name: str, heads_q: int, heads_kv: int, rng: torch.Generator) -> None:
    for head_dim in (64, 128):
        check(name, Case(head_dim, 130, 203, True, torch.bfloat16, batch=3, heads_q=heads_q, heads_kv=heads_kv), rng)


@pytest.mark.parametrize("name", NAMES)
def test_scale(name: str, rng: torch.Generator) -> None:
    check(name, Case(64, 129, 203, True), rng, scale=0.3)


@pytest.mark.parametrize("name", NAMES)
def test_rows_without_keys(name: str, rng: torch.Generator) -> None:
    case = Case(64, 200, 50, "bottom_right")
    q, k, v = case.inputs("cuda", rng)
    out, lse = schedules.fwd(q, k, v, True, schedule=name)
    assert_matches(out, lse, q, k, v, True)
    assert bool((out[:, :, :150] == 0).all()) and bool((lse[:, :, :150] == -torch.inf).all())
    out, lse = schedules.fwd(q, k[:, :, :0], v[:, :, :0], schedule=name)
    assert bool((out == 0).all()) and bool((lse == -torch.inf).all())


@pytest.mark.parametrize("name", NAMES)
def test_empty(name: str) -> None:
    q = torch.empty(2, 0, 5, 64, device="cuda", dtype=torch.float16)
    assert schedules.fwd(q, q, q, schedule=name)[0].shape == q.shape


@pytest.mark.parametrize("name", NAMES)
def test_strides(name: str, rng: torch.Generator) -> None:
    """(B, N, H, D) is read and written in place; rows that vectors cannot read are copied."""
    shape = (2, 113, 3, 64)
    q, k, v = (torch.randn(shape, generator=rng).to("cuda", torch.float16).transpose(1, 2) for _ in range(3))
    out, lse = schedules.fwd(q, k, v, True, schedule=name)
    assert out.stride() == q.stride()
    assert_matches(out, lse, q, k, v, True)
    wide = torch.randn(2, 3, 113, 67, generator=rng).to("cuda", torch.float16)[..., 2:66]
    assert_matches(*schedules.fwd(wide, k, v, schedule=name), wide, k, v)


@pytest.mark.parametrize(("name", "head_dim"), INSTANCES)
def test_memory_around_the_tensors_has_no_influence(name: str, head_dim: int, rng: torch.Generator) -> None:
    q, k, v = Case(head_dim, 113, 203, batch=1).inputs("cuda", rng)
    poisoned = []
    for x in (q, k, v):
        room = torch.full((1, x.shape[1], x.shape[2] + 200, head_dim + 64), torch.nan, device="cuda", dtype=x.dtype)
        view = room[:, :, 100:-100, 32:-32]
        view.copy_(x)
        poisoned.append(view)
    for causal in (False, True):
        assert_matches(*schedules.fwd(*poisoned, causal, schedule=name), q, k, v, causal)


@pytest.mark.parametrize(("name", "head_dim"), INSTANCES)
def test_bits_repeat(name: str, head_dim: int, rng: torch.Generator) -> None:
    """A race would show as other bits, sooner or later."""
    q, k, v = Case(head_dim, 1000, 1037, heads_q=8, heads_kv=8).inputs("cuda", rng)
    first = schedules.fwd(q, k, v, True, schedule=name)
    for _ in range(50):
        again = schedules.fwd(q, k, v, True, schedule=name)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_errors(name: str) -> None:
    q = torch.randn(1, 2, 8, 64, device="cuda", dtype=torch.float16)
    call = functools.partial(schedules.fwd, schedule=name)
    most = _compile.MAX_HEAD_DIM[name]
    wide = torch.randn(1, 2, 8, most + 8, device="cuda", dtype=torch.float16)
    for inputs, message in (
        ((q.float(), q.float(), q.float()), "float16 or bfloat16"),
        ((q, q, q[..., :32]), "v: expected q's head dim"),
        ((q, q.bfloat16(), q), "k: expected q's dtype"),
        ((wide, wide, wide), f"at most {most} for the schedule '{name}'"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message):
            call(*inputs)


def test_no_spills() -> None:
    rows = schedules.report()
    assert {(row["schedule"], row["head_dim"]) for row in rows} == set(INSTANCES)
    assert {row["dtype"] for row in rows} == {"float16", "bfloat16"}
    assert [row for row in rows if row["spill_stores"] or row["spill_loads"]] == []

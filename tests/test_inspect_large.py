"""The sm80 kernels for head dims above 256, as flash_cute.inspect records them: what must hold, and can fail."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import background
import numpy as np
import pytest

pytest.importorskip("pybind11", reason="the extra flash_cute[inspect] is not installed")

import compiled

from flash_cute import inspect
from flash_cute.inspect import __main__ as command
from flash_cute.inspect import build, checks, pictures, tables
from flash_cute.inspect.kernels import Kernel

HEAD_DIMS = build.LARGE_HEAD_DIMS["sm80"]


def begin(item: pytest.Function) -> None:
    """See `background`."""
    if "large" in item.fixturenames:
        background.begin(compiled.modules)


@pytest.fixture(scope="module")
def large() -> tuple[Kernel, ...]:
    background.result(compiled.modules)
    return inspect.kernels(archs=("sm80",), head_dims=HEAD_DIMS)


@pytest.mark.parametrize("check", checks.CHECKS.values(), ids=lambda check: check.__name__)
def test_every_kernel(check: Callable[[Kernel], list[str]], large: tuple[Kernel, ...]) -> None:
    found = [f"{kernel}: {sentence}" for kernel in large for sentence in check(kernel)]
    assert not found, "\n".join(found)


def test_there_is_one_of_each(large: tuple[Kernel, ...]) -> None:
    names = {(kernel.folder, kernel.head_dim, kernel.entry) for kernel in large}
    chips = ("a100", "99kb", "h100")
    assert names == {(folder, d, chip) for folder in ("fwd_large", "bwd_large") for d in HEAD_DIMS for chip in chips}
    assert len(large) == len(names)


# What is done to one array: each breaks the flow of data.
SPOILED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "another row for ldmatrix": ("S.ldsm", lambda a: np.roll(a, 1, axis=1)),
    "another step's operand": ("S.ldsm", lambda a: np.roll(a, 4, axis=0)),
    "V's matrices as they lie": ("O.ldsm.transposed", lambda a: 0 * a),
    "P's matrices transposed": ("O.ldsm.transposed", lambda a: 1 - a),
    "a register for another": ("O.products", lambda a: a[[0, 2, 1, 3, 4, 5, 6]]),
    "a sum for another": ("S.products", lambda a: np.concatenate([np.roll(a[:1], 1), a[1:]])),
    "K's vectors swapped": ("K.copy.source", lambda a: a[:, ::-1]),
    "V's rows swapped": ("V.copy.source", lambda a: (a + 512) % (16 * 512)),
    "P stored elsewhere": ("P.store", lambda a: np.roll(a, 1, axis=0)),
    "P's halves swapped": ("P.store.registers", lambda a: (a >> 16) | ((a & 0xFFFF) << 16)),
    "O stored elsewhere": ("O.store", lambda a: np.roll(a, 1, axis=0)),
    "O read elsewhere": ("O.rows", lambda a: a[::-1]),
}


@pytest.mark.parametrize("what", SPOILED)
def test_a_spoiled_flow_is_caught(what: str, large: tuple[Kernel, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    name, spoil = SPOILED[what]
    details = copy.deepcopy(large[0].details())
    changed = spoil(details.arrays[name])
    assert changed.shape == details.arrays[name].shape and (changed != details.arrays[name]).any()
    details.arrays[name] = changed
    monkeypatch.setattr(Kernel, "details", lambda self: details)
    assert checks.data_flow(large[0])


def test_rows_without_the_permutation_conflict(large: tuple[Kernel, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    details = copy.deepcopy(large[0].details())
    for name in ("S.ldsm", "P.store", "O.read"):
        addresses = details.arrays[name]
        details.arrays[name] = addresses ^ ((addresses >> 7 & 7) << 4)
    monkeypatch.setattr(Kernel, "details", lambda self: details)
    found = "\n".join(checks.bank_conflicts(large[0]))
    assert "Q and K to registers (ldmatrix.x4)" in found and "28 more passes at worst" in found
    assert "P to shared memory" in found


def test_budgets(large: tuple[Kernel, ...], capsys: pytest.CaptureFixture[str]) -> None:
    rows = {(row["chip"], row["kernel"], row["head_dim"]): row for row in tables.rows(large)}
    assert len(rows) == 5 * 2 * len(HEAD_DIMS)  # chips, directions
    one, two = (rows["A100", "fwd_large", d] for d in (512, 1024))
    assert (one["smem_bytes"], one["ctas_sm"], one["stages"]) == (151552, 1, 4)
    # Two CTAs share the columns at 1024, and both compute the scores: 1.5 times the products of 512 at twice the depth.
    assert two["mma_clk"] == pytest.approx(1.5 * one["mma_clk"], rel=0.01)
    assert pictures.budget_picture([k for k in large if k.entry == "a100" and k.is_forward], 80).data["bars"]
    assert command.main(["table", "--arch", "sm80", "--direction", "bwd", "--head-dims", "512", "--chip", "A100"]) == 0
    assert "bwd_keys" in capsys.readouterr().out

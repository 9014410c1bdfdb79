"""The kernels for large head dims, as flash_cute.inspect describes them: what must hold, and can fail.

That every check holds of them is in test_inspect.py.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import background
import numpy as np
import pytest

pytest.importorskip("pybind11", reason="the extra inspect is not installed")

import compiled

from flash_cute import inspect
from flash_cute.inspect import __main__ as command
from flash_cute.inspect import build, checks, pictures, schedule, tables, warps
from flash_cute.inspect.kernels import Kernel

HEAD_DIMS = (320, 512, 1024)
CHIPS = ("a100", "99kb", "h100")


def begin(item: pytest.Function) -> None:
    """See `background`."""
    if "large" in item.fixturenames:
        background.begin(compiled.modules)


@pytest.fixture(scope="module")
def large() -> tuple[Kernel, ...]:
    background.result(compiled.modules)
    return inspect.kernels(head_dims=HEAD_DIMS)


def test_there_is_one_of_each(large: tuple[Kernel, ...]) -> None:
    names = {(kernel.arch, kernel.folder, kernel.head_dim, kernel.entry) for kernel in large}
    streamed = ("forward/streamed", "backward/streamed")
    expected = {("sm80", folder, d, chip) for folder in streamed for d in HEAD_DIMS for chip in CHIPS}
    expected |= {("sm90", "forward/rows", 320, "rows128"), ("sm90", "forward/rows", 320, "rows64")}
    expected |= {("sm90", "forward/pair_by_turns", 512, ""), ("sm90", "forward/pair_by_columns", 1024, "")}
    backward = "backward/dq_in_registers_large"
    expected |= {("sm90", backward, d, entry) for d in HEAD_DIMS for entry in ("keys", "queries")}
    assert names == expected and len(large) == len(names)


# --- What is recorded of sm80's kernels ------------------------------------------------------------------------

Change = Callable[[Any], Any]
# What is done to arrays: each breaks the flow of data.
SPOILED: dict[str, tuple[tuple[str, ...], Change]] = {
    "another row for ldmatrix": (("S.ldsm",), lambda a: np.roll(a, 1, axis=1)),
    "Q of another step": (("S.ldsm",), lambda a: a[[4, 5, 2, 3, 0, 1, *range(6, 16)]]),
    "V's matrices as they lie": (("O.ldsm.transposed",), lambda a: 0 * a),
    "P's matrices transposed": (("O.ldsm.transposed",), lambda a: 1 - a),
    "a register for another": (("O.products",), lambda a: a[[0, 2, 1, 3, 4, 5, 6]]),
    "a sum for another": (("S.products",), lambda a: np.concatenate([np.roll(a[:1], 1), a[1:]])),
    "K's vectors swapped": (("K.copy.source", "K.copy.next.source"), lambda a: a[:, ::-1]),
    "V's rows swapped": (("V.copy.source", "V.copy.next.source"), lambda a: a ^ 512),
    "Q of the same chunk twice": (("Q.copy.next.source",), lambda a: a - 64),
    "the next V elsewhere": (("V.copy.next",), lambda a: a + 128),
    "P stored elsewhere": (("P.store",), lambda a: np.roll(a, 1, axis=0)),
    "P's halves swapped": (("P.store.registers",), lambda a: (a >> 16) | ((a & 0xFFFF) << 16)),
    "O stored elsewhere": (("O.store",), lambda a: np.roll(a, 1, axis=0)),
    "O read elsewhere": (("O.rows",), lambda a: a[::-1]),
}


def spoil(kernel: Kernel, names: tuple[str, ...], change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets Kernel.details return other arrays than the kernel's."""
    details = copy.deepcopy(kernel.details())
    for name in names:
        changed = change(details.arrays[name])
        assert changed.shape == details.arrays[name].shape and (changed != details.arrays[name]).any()
        details.arrays[name] = changed
    monkeypatch.setattr(Kernel, "details", lambda self: details)


@pytest.mark.parametrize("what", SPOILED)
@pytest.mark.parametrize("chip", ["99kb", "h100"], ids=["through the ring", "resident"])
def test_a_spoiled_flow_is_caught(
    what: str, chip: str, large: tuple[Kernel, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = inspect.find(large, 512, "sm80", chip, "forward/streamed")
    assert kernel.tile["left_resident"] == (chip == "h100") and not checks.data_flow(kernel)
    spoil(kernel, *SPOILED[what], monkeypatch)
    assert checks.data_flow(kernel)


def test_rows_without_the_permutation_conflict(large: tuple[Kernel, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = inspect.find(large, 512, "sm80", "a100", "forward/streamed")
    spoil(kernel, ("S.ldsm", "P.store", "O.read"), lambda a: a ^ ((a >> 7 & 7) << 4), monkeypatch)
    found = "\n".join(checks.bank_conflicts(kernel))
    assert "Q and K to registers (ldmatrix.x4)" in found and "28 more passes at worst" in found
    assert "P to shared memory" in found


# --- What lies in shared memory of sm90's forwards --------------------------------------------------------------

SPOILED_P: dict[str, tuple[str, Change]] = {
    "P's registers swapped": ("SharedP.sts.register", lambda a: a[::-1]),
    "another lane's row": ("SharedP.sts.coord", lambda a: np.roll(a, 1, axis=-1)),
    "P read elsewhere": ("SharedP.descriptor", lambda a: a + 2),
}
SPOILED_LAYOUTS: dict[str, tuple[str, Change]] = {
    "another unit's V": ("V.descriptor", lambda a: np.roll(a, 1, axis=-1)),
    "V's rows elsewhere": ("V.smem", lambda a: a[:, ::-1]),
    "Q's columns elsewhere": ("Q.smem", lambda a: a[:, ::-1]),
    "another order of scores": ("P.mma.register", lambda a: a[..., ::-1]),
}


@pytest.mark.parametrize(
    ("folder", "head_dim", "what"),
    [
        *(("forward/pair_by_turns", 512, what) for what in SPOILED_LAYOUTS),
        *(("forward/pair_by_columns", 1024, what) for what in (*SPOILED_LAYOUTS, *SPOILED_P)),
    ],
)
def test_a_spoiled_layout_is_caught(
    folder: str, head_dim: int, what: str, large: tuple[Kernel, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = inspect.find(large, head_dim, "sm90", folder=folder)
    assert not checks.data_flow(kernel)
    name, change = (SPOILED_LAYOUTS | SPOILED_P)[what]
    spoil(kernel, (name,), change, monkeypatch)
    assert checks.data_flow(kernel)


# --- sm90's backward: one CTA per tile, or a cluster of two sides ------------------------------------------------

SpoiledMask = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
SPOILED_MASKS: dict[str, SpoiledMask] = {
    "the mask of the next row": lambda held, hidden: (held, np.roll(hidden, 1, axis=0)),
    "the mask of another piece": lambda held, hidden: (held, np.roll(hidden, 16, axis=1)),
    "a piece that no CTA makes": lambda held, hidden: (held * (np.arange(held.shape[1]) < 48), hidden),
    "a piece that two CTAs make": lambda held, hidden: (held + (np.arange(held.shape[0]) < 16)[:, None], hidden),
}


@pytest.fixture
def fresh_masks() -> Iterator[None]:
    """What is spoiled is not kept, nor are earlier results taken for it."""
    checks._masks_of_tile.cache_clear()
    yield
    checks._masks_of_tile.cache_clear()


@pytest.mark.parametrize("what", SPOILED_MASKS)
@pytest.mark.parametrize("entry", ["keys", "queries"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.usefixtures("fresh_masks")
def test_a_spoiled_mask_is_caught(
    head_dim: int, entry: str, what: str, large: tuple[Kernel, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = inspect.find(large, head_dim, "sm90", entry, "backward/dq_in_registers_large")
    problem = inspect.Problem(1, 1, 1, 150, 200, head_dim, "bottom_right")
    assert not checks._mask(kernel, problem)
    real = Kernel.masked
    monkeypatch.setattr(Kernel, "masked", lambda *arguments: SPOILED_MASKS[what](*real(*arguments)))
    assert checks._mask(kernel, problem)


def test_kernels_that_mask_in_other_pieces_are_not_taken_for_the_same(large: tuple[Kernel, ...]) -> None:
    named = [
        inspect.find(large, d, "sm90", entry, "backward/dq_in_registers_large")
        for d in HEAD_DIMS
        for entry in ("keys", "queries")
    ]
    assert [kernel.facts.get("pieces", 1) for kernel in named] == [1, 1, 2, 2, 4, 4]
    assert len({checks._SameMask(kernel) for kernel in named}) == len(named)


def test_what_the_backward_shares_out(large: tuple[Kernel, ...]) -> None:
    """Shared memory and registers of an SM, as docs/sm90_backward_large.md has them."""
    one_cta = {
        "keys": {"K, then dV": 40, "V, then dK": 40, "Q": 80, "dO": 40, "P": 16},
        "queries": {"Q, then dQ": 40, "dO": 40, "K": 80, "V": 40, "dS": 16},
    }
    side = {
        "keys": {"K or V, then dK or dV": 64, "Q or dO": 128, "parts of S and dP": 16, "P or dS": 16},
        "queries": {"Q or dO, then dQ": 64, "K or V": 128, "parts of S and dP": 16, "dS": 16},
    }
    for head_dim in HEAD_DIMS:
        for entry in ("keys", "queries"):
            kernel = inspect.find(large, head_dim, "sm90", entry, "backward/dq_in_registers_large")
            *buffers, rest = kernel.details().buffers
            expected = (one_cta if head_dim == 320 else side)[entry]
            assert {buffer.name: buffer.bytes / 1024 for buffer in buffers} == expected
            assert rest.bytes <= 2048 and rest.offset + rest.bytes <= kernel.facts["smem_bytes"] <= 227 * 1024
            facts = kernel.facts
            warpgroups = [facts["producer_registers"], *[facts["consumer_registers"]] * facts["warpgroups"]]
            warpgroups += [facts["scores_registers"]] if "scores_registers" in facts else []
            at_launch = 65536 // facts["threads"] // 8 * 8  # a kernel whose threads have as many as they may
            assert 128 * len(warpgroups) == facts["threads"] and sum(warpgroups) <= len(warpgroups) * at_launch
            held = tables.registers_held(kernel)
            sums = 160 if head_dim == 320 else 128
            scores = {} if (head_dim, entry) == (320, "queries") else {"S or dP": 32}
            assert held == {"dK or dV" if entry == "keys" else "dQ": sums, **scores}


# --- Schedules and budgets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm80", "sm90"])
@pytest.mark.parametrize("sms", [1, 2, 7, 132])
def test_ctas_that_share_a_tile_have_one_slot(arch: str, sms: int, large: tuple[Kernel, ...]) -> None:
    named = {
        "sm80": (("forward/streamed", 512, 1), ("forward/streamed", 1024, 2)),
        "sm90": (("forward/pair_by_turns", 512, 2), ("forward/pair_by_columns", 1024, 2)),
    }
    for folder, head_dim, ctas in named[arch]:
        kernel = inspect.find(large, head_dim, arch, None, folder)
        row_tiles = -(-500 // kernel.block_m)
        line = schedule.timeline(kernel, inspect.Problem(2, 4, 2, 500, 700, head_dim, "bottom_right"), sms)
        assert kernel.ctas_per_tile == ctas and line.slots == max(1, sms // ctas)
        assert len({(run.m_block, run.head) for run in line.runs}) == len(line.runs) == 8 * row_tiles
        end = dict.fromkeys(range(line.slots), 0)
        for run in sorted(line.runs, key=lambda run: run.start):
            assert run.start >= end[run.slot]
            end[run.slot] = run.end
        assert 0 < line.balance <= 1


def test_budgets(large: tuple[Kernel, ...], capsys: pytest.CaptureFixture[str]) -> None:
    rows = {(row["chip"], row["arch"], row["kernel"], row["head_dim"]): row for row in tables.rows(large)}
    # Chips and both directions of sm80; sm90's forwards, and its two backward kernels.
    assert len(rows) == 5 * 2 * len(HEAD_DIMS) + len(HEAD_DIMS) + 2 * len(HEAD_DIMS)
    one, two = (rows["A100", "sm80", "fwd_streamed", d] for d in (512, 1024))
    assert (one["smem_bytes"], one["ctas_sm"], one["stages"]) == (151552, 1, 4)
    assert two["mma_clk"] == one["mma_clk"]  # two CTAs share the products at 1024
    one, two = (rows["A100", "sm80", "bwd_keys", d] for d in (512, 1024))
    assert two["mma_clk"] == one["mma_clk"]
    assert command.main(["table", "--arch", "sm80", "--direction", "bwd", "--head-dims", "512", "--chip", "A100"]) == 0
    assert "bwd_keys" in capsys.readouterr().out


def test_roofline_by_hand(large: tuple[Kernel, ...]) -> None:
    """Clocks of a step from closed forms; docs/large_head_dims.md has those of sm80."""
    h100 = next(chip for chip in tables.CHIPS if chip.name == "H100")
    for kernel in large:
        if not kernel.is_large:
            continue
        clocks, turns = tables.step_clocks(kernel, h100), 1
        m, n, d, ctas = kernel.block_m, kernel.block_n, kernel.head_dim, kernel.tile["parts"]
        if kernel.arch == "sm80":
            columns = d // ctas
            products = (2 if kernel.is_forward else 3) / ctas
            scores = (640 if kernel.tile["left_resident"] else 704) * -(-d // 64)
            scores *= (1 if kernel.is_forward else 2) / ctas
            out = 8 * (columns // 4 + (256 if columns > 320 else 224))
            assert clocks["shared memory"] == scores + 128 + out, str(kernel)
        elif kernel.folder == "forward/pair_by_turns":
            products, turns = 2 / ctas, 2
            # By turns both warpgroups read Q and K for the scores, TMA writes K, and a message is written and read.
            moved = (2 * (2 * (m // 2 + n) * d) + 2 * n * d + 2 * (2 * m * n + 16 * 256)) // 2
            moved += (2 + 1) * 2 * n * 256  # both read the CTA's columns of V, and TMA writes them
            assert clocks["shared memory"] == moved / 128
        elif kernel.is_forward:
            products = 2 / ctas
            moved = 2 * (m + n) * d // ctas + 2 * n * 512 + 3 * 2 * m * n + 2 * n * (d // ctas + 512)
            assert clocks["shared memory"] == (moved + 8 * m * n) / 128
        else:
            # In a cluster half of the CTAs compute S and dQ, and the others dP alone.
            products = (3 if (kernel.entry, ctas) == ("queries", 1) else 4) / ctas
            assert "shared memory" not in clocks
        rate = h100.mma_flop[kernel.arch]
        assert clocks["MMA"] == pytest.approx(2 * products * m * n * d / rate) and clocks["MUFU"] == m * n / turns / 16


# --- Pictures and the command ----------------------------------------------------------------------------------------


def test_the_warps_share_out_the_results(large: tuple[Kernel, ...], tmp_path: Path) -> None:
    picture = warps.warp_picture(inspect.find(large, 512, "sm80", None, "forward/streamed"))
    scores, out = (np.array(panel["warps"]) for panel in picture.data["panels"])
    assert scores.shape == (64 // 16, 128 // 8) and out.shape == (64 // 16, 512 // 8)
    for grid in (scores, out):
        assert (np.bincount(grid.ravel()) == grid.size // 8).all()
    # A warp has 32 rows of the scores, and all of out.
    assert [len(set(np.nonzero(scores == warp)[0])) for warp in range(8)] == [2] * 8
    assert [len(set(np.nonzero(out == warp)[0])) for warp in range(8)] == [4] * 8
    assert picture.save(tmp_path, ("svg",))[0].exists()
    with pytest.raises(ValueError, match="of sm80's forwards"):
        warps.warp_picture(inspect.find(large, 512, "sm90", None, "forward/pair_by_turns"))


@pytest.mark.parametrize("arch", ["sm80", "sm90"])
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_all_pictures_are_drawn(arch: str, direction: str, large: tuple[Kernel, ...], tmp_path: Path) -> None:
    arguments = ["draw", "all", "--arch", arch, "--direction", direction, "--head-dim", "1024", "--causal"]
    assert command.main([*arguments, "--lengths", "500", "500", "--format", "svg", "--out", str(tmp_path)]) == 0
    drawn = {path.stem.removeprefix(f"{arch}_").removeprefix("d1024_") for path in tmp_path.glob("*.svg")}
    expected = {"mask_causal", "schedule", "threads_mma"} if direction == "fwd" else set()
    if (arch, direction) == ("sm90", "fwd"):
        expected |= {"packed", "banks_k_wgmma", "budget_fwd_large"}
    else:
        expected |= {f"budget_{direction}" + ("_large_a100" if arch == "sm80" else "_large")}
    if (arch, direction) == ("sm80", "fwd"):
        expected |= {"warps"}
    assert drawn == expected


def test_pictures_that_there_are_not(large: tuple[Kernel, ...]) -> None:
    with pytest.raises(ValueError, match="it computes addresses, without layouts"):
        pictures.bank_picture(inspect.find(large, 512, "sm80", None, "forward/streamed"))


def test_kernels_that_other_headers_do_not_have_are_left_out(tmp_path: Path) -> None:
    families = {
        "sm80": {"forward/rows": [128, 256], "forward/streamed": [320, 512]},
        "sm90": {"forward/rows": [[192, 128], 256, 320]},
    }
    (tmp_path / "families.json").write_text(json.dumps(families))
    units = build.units(tmp_path, build.ARCHS, build.DIRECTIONS, (256, 320, 512))
    expected = [
        *("sm80_forward_rows_d256", "sm80_forward_streamed_d320", "sm80_forward_streamed_d512"),
        *("sm90_forward_rows_d256", "sm90_forward_rows_d320"),
    ]
    assert [unit.name for unit in units] == expected


def test_unknown_head_dims_are_said() -> None:
    for head_dim in (40, 300, 2048):
        with pytest.raises(inspect.InspectError, match=rf"expected some of 32, .* 1024, got {head_dim}"):
            inspect.kernels(head_dims=(64, head_dim))

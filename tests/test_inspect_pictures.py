"""The pictures, tables and the tour are drawn from the traits, follow them when they change, and are up to date."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import pytest
from test_inspect import broken, broken_csrc, kernels  # noqa: F401  (fixtures)

pytest.importorskip("matplotlib", reason="the extra flash_cute[inspect] is not installed")

from flash_cute import inspect
from flash_cute.inspect import __main__ as command
from flash_cute.inspect import build, checks, pictures, schedule, tables, tour
from flash_cute.inspect.kernels import Kernel

ROOT = Path(__file__).parent.parent
PROBLEM = inspect.Problem(1, 3, 1, 1000, 1000, 64, "bottom_right")


def every_picture(among: tuple[Kernel, ...], arch: str = "sm80", head_dim: int = 64) -> list[pictures.Picture]:
    causal, full = (inspect.find(among, head_dim, mask, arch) for mask in ("causal", "full"))
    reads = "registers" if arch == "sm80" else "tensor"
    drawn = [pictures.bank_picture(causal, operand, reads) for operand in "QKV"]
    drawn.append(pictures.thread_value_picture(causal))
    if arch == "sm80":
        drawn.append(pictures.bank_picture(causal, "O", "to shared"))
        drawn.append(pictures.bank_picture(causal, "K", "into"))
        drawn.append(pictures.thread_value_picture(causal, ["K.gmem", "V.ldsm"]))
    drawn.append(pictures.mask_picture(causal))
    drawn.append(pictures.gantt_picture([full, causal], PROBLEM, 3))
    drawn.append(pictures.budget_picture([causal], 80 if arch == "sm80" else 90))
    return drawn


def test_pictures_are_drawn(kernels: tuple[Kernel, ...], tmp_path: Path) -> None:  # noqa: F811
    for arch in sorted({kernel.arch for kernel in kernels}):
        for picture in every_picture(kernels, arch):
            svg = picture.save(tmp_path, ("svg",))[0]
            assert svg.read_text().lstrip().startswith("<?xml")
    png = picture.save(tmp_path, ("png",))[0]
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_picture_is_the_same_twice(kernels: tuple[Kernel, ...], tmp_path: Path) -> None:  # noqa: F811
    saved = [
        pictures.mask_picture(kernels[0]).save(tmp_path / name, ("svg",))[0].read_bytes() for name in ("one", "two")
    ]
    assert saved[0] == saved[1]


def test_another_tile_changes_every_picture(
    broken: tuple[Kernel, ...],  # noqa: F811
    kernels: tuple[Kernel, ...],  # noqa: F811
) -> None:
    """Those of Q and O too: the broken headers have no swizzle."""
    mine = {picture.name: picture.digest() for picture in every_picture(kernels)}
    theirs = {picture.name: picture.digest() for picture in every_picture(broken)}
    same = {name for name in mine if mine[name] == theirs.get(name)}
    # The corner of an MMA is the instruction's, whatever the tile.
    assert same <= {"sm80_d64_threads_mma"}


def test_no_swizzle_is_seen(broken: tuple[Kernel, ...], kernels: tuple[Kernel, ...]) -> None:  # noqa: F811
    for among, passes in ((kernels, [8, 1]), (broken, [8, 8])):
        picture = pictures.bank_picture(inspect.find(among, 64), "K")
        assert [panel["passes"] for panel in picture.data["panels"]] == passes


def test_timeline_works_off_every_tile(kernels: tuple[Kernel, ...]) -> None:  # noqa: F811
    for kernel in kernels:
        if kernel.head_dim != 64:
            continue
        line = schedule.timeline(kernel, PROBLEM, 5)
        assert len({(run.m_block, run.head, run.key_begin) for run in line.runs}) == len(line.runs)
        busy: dict[int, int] = {}
        for run in line.runs:
            assert run.start >= busy.get(run.slot, 0)
            assert run.slot < line.slots
            busy[run.slot] = run.end
        assert 0 < line.balance <= 1


# --- Tables -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table(kernels: tuple[Kernel, ...]) -> list[dict]:  # noqa: F811
    return tables.rows(kernels)


def test_every_kernel_has_a_row(table: list[dict], kernels: tuple[Kernel, ...]) -> None:  # noqa: F811
    listed = {(row["arch"], row["head_dim"], row["mask"], row["config"]) for row in table}
    assert listed == {(k.arch, k.head_dim, k.mask, k.config) for k in kernels}
    assert {row["chip"] for row in table} == {chip.name for chip in tables.CHIPS}


def test_formats_agree(table: list[dict]) -> None:
    assert json.loads(tables.to_json(table))["rows"] == table
    read = list(csv.DictReader(io.StringIO(tables.to_csv(table))))
    assert [[str(row[name]) if row[name] is not None else "" for name in row] for row in table] == [
        list(row.values()) for row in read
    ]
    header, *lines = tables.to_text(table).splitlines()
    assert header.split() == list(tables.COLUMNS)
    assert len(lines) == len(table)


def test_plans_fit_as_often_as_they_say(table: list[dict], kernels: tuple[Kernel, ...]) -> None:  # noqa: F811
    """The table's occupancy, from shared memory, threads and the compiler's registers."""
    planned = {(k.arch, k.head_dim, k.mask, k.config): k.shape["ctas_per_sm"] for k in kernels}
    for row in table:
        assert row["ctas_sm"] >= planned[row["arch"], row["head_dim"], row["mask"], row["config"]], row


def test_roofline_by_hand(kernels: tuple[Kernel, ...]) -> None:  # noqa: F811
    """Clocks of a step from closed forms."""
    a100, h100 = (next(chip for chip in tables.CHIPS if chip.name == name) for name in ("A100", "H100"))
    for kernel in kernels:
        m, n, d = kernel.block_m, kernel.block_n, kernel.head_dim
        clocks = tables.step_clocks(kernel, a100 if kernel.arch == "sm80" else h100)
        assert clocks["MMA"] == m * n * d / (512 if kernel.arch == "sm80" else 1024)
        assert clocks["MUFU"] == m * n / 16
        if kernel.arch == "sm80":  # K and V in once, and out to each warp; Q out once
            moved = 4 * n * d * (1 + kernel.warps) + (0 if kernel.tile["q_in_regs"] else 2 * m * d)
        else:  # the same for warpgroups
            moved = 4 * n * d * (1 + kernel.facts["warpgroups"]) + 2 * m * d
        assert clocks["shared memory"] == moved / 128, str(kernel)


# --- The tour -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_checkout() -> tuple[Kernel, ...]:
    if not (ROOT / "csrc").exists():
        pytest.skip("not in a checkout")
    return inspect.kernels(ROOT / "csrc", head_dims=build.HEAD_DIMS)


def test_the_tour_is_up_to_date(of_checkout: tuple[Kernel, ...]) -> None:
    assert not tour.stale(of_checkout, ROOT / "docs"), f"run {tour.COMMAND}"


def test_a_stale_tour_is_found(of_checkout: tuple[Kernel, ...], tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    shutil.copytree(ROOT / "docs", docs)
    page = docs / tour.PAGE
    page.write_text(page.read_text().replace("ldmatrix", "ldvector"))
    digests = docs / tour.FOLDER / "digests.json"
    name, digest = next(iter(json.loads(digests.read_text()).items()))
    digests.write_text(digests.read_text().replace(digest, digest[::-1]))
    assert tour.stale(of_checkout, docs) == [str(docs / tour.FOLDER / f"{name}.svg"), str(page)]


def test_the_tours_pictures_are_there_and_shown(of_checkout: tuple[Kernel, ...]) -> None:
    page = (ROOT / "docs" / tour.PAGE).read_text()
    for picture in tour.pictures(of_checkout).values():
        assert f"({tour.FOLDER}/{picture.name}.svg)" in page
        assert (ROOT / "docs" / tour.FOLDER / f"{picture.name}.svg").exists()


# --- The command --------------------------------------------------------------------------------------------


def test_command(kernels: tuple[Kernel, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    assert command.main(["kernels"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(kernel) for kernel in kernels]
    assert command.main(["table", "--chip", "A100", "--format", "csv", "--out", str(tmp_path / "a100.csv")]) == 0
    assert {row["chip"] for row in csv.DictReader((tmp_path / "a100.csv").open())} == {"A100"}
    arguments = ["draw", "all", "--head-dim", "64", "--format", "svg", "--out", str(tmp_path)]
    assert command.main(arguments) == 0
    assert len(list(tmp_path.glob("*.svg"))) == len(capsys.readouterr().out.splitlines()) == len(command.DRAW)
    assert command.main(["draw", "banks", "--head-dim", "40"]) == 2
    assert "no kernel sm80 d40 causal" in capsys.readouterr().err


def test_command_checks(
    broken_csrc: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only = {"archs": ("sm80",), "head_dims": (64,)}
    monkeypatch.setattr(command, "kernels", lambda csrc, head_dims: inspect.kernels(csrc, **only))
    assert command.main(["--csrc", str(broken_csrc), "check"]) == 1
    out = capsys.readouterr().out
    assert all(f"{name}: " in out for name in checks.CHECKS)
    assert "data flow: ok, 6 kernels" in out
    assert "bank conflicts: ok" not in out and "K of stage 0 to registers (ldmatrix.x4): " in out

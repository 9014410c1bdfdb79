"""The pictures, tables and the tour are drawn from the traits, follow them when they change, and are up to date."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import pytest
from repository import ROOT

pytest.importorskip("pybind11", reason="the extra inspect is not installed")
pytest.importorskip("matplotlib", reason="the extra inspect is not installed")

from flash_cute import inspect
from flash_cute.inspect import __main__ as command
from flash_cute.inspect import checks, float8, pictures, schedule, tables, tour
from flash_cute.inspect.kernels import Kernel

FULL = inspect.Problem(1, 3, 1, 1000, 1000, 64)
PROBLEM = inspect.Problem(1, 3, 1, 1000, 1000, 64, "bottom_right")
WINDOW = inspect.Problem(1, 3, 1, 1000, 1000, 64, window=(200, 50))


def every_picture(among: tuple[Kernel, ...], arch: str = "sm80", head_dim: int = 64) -> list[pictures.Picture]:
    kernel = inspect.find(among, head_dim, arch)
    reads = "registers" if arch == "sm80" else "tensor"
    drawn = [pictures.bank_picture(kernel, operand, reads) for operand in "QKV"]
    drawn.append(pictures.thread_value_picture(kernel))
    if arch == "sm80":
        drawn.append(pictures.bank_picture(kernel, "O", "to shared"))
        drawn.append(pictures.bank_picture(kernel, "K", "into"))
        drawn.append(pictures.thread_value_picture(kernel, ["K.gmem", "V.ldsm"]))
    drawn += [pictures.mask_picture(kernel, problem) for problem in (PROBLEM, WINDOW)]
    drawn.append(pictures.gantt_picture([(kernel, FULL), (kernel, PROBLEM)], 3))
    drawn.append(pictures.budget_picture([kernel], 80 if arch == "sm80" else 90))
    return drawn


def test_pictures_are_drawn(kernels: tuple[Kernel, ...], tmp_path: Path) -> None:
    for arch in sorted({kernel.arch for kernel in kernels}):
        for picture in every_picture(kernels, arch):
            svg = picture.save(tmp_path, ("svg",))[0]
            assert svg.read_text().lstrip().startswith("<?xml")
    for kernel in kernels:
        if not kernel.is_forward and kernel.head_dim == 64:
            assert pictures.budget_picture([kernel], None).save(tmp_path, ("svg",))
    png = picture.save(tmp_path, ("png",))[0]
    assert png.read_bytes().startswith(b"\x89PNG")


def test_pictures_say_what_they_show(kernels: tuple[Kernel, ...], tmp_path: Path) -> None:
    threads = pictures.thread_value_picture(inspect.find(kernels, 64)).save(tmp_path, ("svg",))[0].read_text()
    for axis in (">row<", ">key<", ">head dim<"):
        assert axis in threads
    schedule = pictures.gantt_picture([(inspect.find(kernels, 64), PROBLEM)], 3).save(tmp_path, ("svg",))[0].read_text()
    assert "3 heads (numbers)" in schedule
    window = pictures.mask_picture(inspect.find(kernels, 64), WINDOW)
    assert window.data["mask"] == "window"
    # Row 500 sees keys 300 to 550; what is whole lies between tiles with the mask, and those between some not visited.
    tiles = window.data["tiles"][500 // window.data["block"][0]]
    assert sorted(set(tiles)) in ([0, 1], [0, 1, 2]) and tiles[0] == tiles[-1] == 0


def test_float8_is_drawn(kernels: tuple[Kernel, ...], tmp_path: Path) -> None:
    """The pictures of V's transposition and of P show the order of keys that transpose.cuh describes."""
    kernel = next(kernel for kernel in kernels if kernel.is_float8 and kernel.head_dim == 64)
    order = [key for p in range(4) for key in (2 * p, 2 * p + 1, 8 + 2 * p, 8 + 2 * p + 1)]
    assert float8.keys_of_positions(kernel.details()).tolist() == [16 * i + key for i in range(8) for key in order]
    picture = float8.transposition_picture(kernel)
    assert picture.data["keys"] == order
    for position, key in enumerate(order):
        column = [line[position] for line in picture.data["after"]]
        assert column == picture.data["before"][key]  # each element by the same lane and byte
    threads = pictures.thread_value_picture(kernel)
    scores, numerators = (next(x for x in threads.data["panels"] if x["name"] == name) for name in ("S.mma", "P.mma"))
    assert numerators["columns"] == order
    for row, line in enumerate(numerators["held"]):
        owners = [cell.split(":")[0] for cell in line]
        assert owners == [scores["held"][row][key].split(":")[0] for key in order]  # no shuffle
    drawn = [picture, threads, pictures.mask_picture(kernel, PROBLEM), pictures.budget_picture([kernel], 90)]
    drawn += [pictures.bank_picture(kernel, "LoadedV", "registers"), pictures.bank_picture(kernel, "V", "shared")]
    for one in drawn:
        assert one.save(tmp_path, ("svg",))[0].exists() and "fp8" in one.name
    for bank in drawn[-2:]:
        assert [panel["passes"] for panel in bank.data["panels"]][1] == 1
    with pytest.raises(ValueError, match="does not transpose V"):
        float8.transposition_picture(inspect.find(kernels, 64))


def test_a_picture_is_the_same_twice(kernels: tuple[Kernel, ...], tmp_path: Path) -> None:
    saved = [
        pictures.mask_picture(kernels[0], PROBLEM).save(tmp_path / name, ("svg",))[0].read_bytes()
        for name in ("one", "two")
    ]
    assert saved[0] == saved[1]


def test_another_tile_changes_every_picture(
    broken: tuple[Kernel, ...],
    kernels: tuple[Kernel, ...],
) -> None:
    """Those of Q and O too: the broken headers have no swizzle."""
    mine = {picture.name: picture.digest() for picture in every_picture(kernels)}
    theirs = {picture.name: picture.digest() for picture in every_picture(broken)}
    same = {name for name in mine if mine[name] == theirs.get(name)}
    # The corner of an MMA is the instruction's, whatever the tile.
    assert same <= {"sm80_d64_threads_mma"}


def test_no_swizzle_is_seen(broken: tuple[Kernel, ...], kernels: tuple[Kernel, ...]) -> None:
    for among, passes in ((kernels, [8, 1]), (broken, [8, 8])):
        picture = pictures.bank_picture(inspect.find(among, 64), "K")
        assert [panel["passes"] for panel in picture.data["panels"]] == passes


def test_timeline_works_off_every_tile(kernels: tuple[Kernel, ...]) -> None:
    for kernel in kernels:
        if kernel.head_dim != 64 or not kernel.is_forward:
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
def table(kernels: tuple[Kernel, ...]) -> list[dict]:
    return tables.rows(kernels)


def _direction(kernel: Kernel) -> str:
    return "fwd" if kernel.is_forward else "bwd"


def test_every_kernel_has_a_row(table: list[dict], kernels: tuple[Kernel, ...]) -> None:
    listed = [(row["arch"], row["kernel"][:3], row["head_dim"], row["entry"]) for row in table if row["chip"] != "L20"]
    assert set(listed) == {(k.arch, _direction(k), k.head_dim, k.entry) for k in kernels}
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


def test_plans_fit_as_often_as_they_say(table: list[dict], kernels: tuple[Kernel, ...]) -> None:
    """The table's occupancy, from shared memory, threads and the compiler's registers."""
    planned = {(k.arch, _direction(k), k.head_dim, k.entry): k.shape["ctas_per_sm"] for k in kernels}
    for row in table:
        assert row["ctas_sm"] >= planned[row["arch"], row["kernel"][:3], row["head_dim"], row["entry"]], row


def test_roofline_by_hand(kernels: tuple[Kernel, ...]) -> None:
    """Clocks of a step from closed forms."""
    a100, h100 = (next(chip for chip in tables.CHIPS if chip.name == name) for name in ("A100", "H100"))
    for kernel in kernels:
        m, n, d = kernel.block_m, kernel.block_n, kernel.head_dim
        clocks = tables.step_clocks(kernel, a100 if kernel.arch == "sm80" else h100)
        if kernel.is_large:
            continue  # test_inspect_large.py has them
        products = {"rows": 2, "fp8_rows": 2, "dq_in_memory": 5, "dq_in_registers": 4 if kernel.entry == "keys" else 3}[
            kernel.folder.split("/")[1]
        ]
        rate = 512 if kernel.arch == "sm80" else 2048 if kernel.is_float8 else 1024
        assert clocks["MMA"] == products / 2 * m * n * d / rate
        assert clocks["MUFU"] == m * n / 16
        if not kernel.is_forward:
            if kernel.arch == "sm80":
                assert clocks["shared memory"] == sm80_backward_bytes(kernel) / 128, str(kernel)
            continue
        if kernel.arch == "sm80":  # K and V in once, and out to each warp; Q out once
            moved = 4 * n * d * (1 + kernel.warps) + (0 if kernel.tile["q_in_regs"] else 2 * m * d)
        elif kernel.is_float8:  # in half of the bytes; V is read and written once more, and has 8 columns of ones
            moved = 2 * n * d * (1 + kernel.facts["warpgroups"]) + m * d + 2 * n * d
            moved += 8 * n * kernel.facts["warpgroups"] if kernel.tile["pieces"] == 1 else 0
        else:  # the same for warpgroups
            moved = 4 * n * d * (1 + kernel.facts["warpgroups"]) + 2 * m * d
        assert clocks["shared memory"] == moved / 128, str(kernel)


def sm80_backward_bytes(kernel: Kernel) -> int:
    """What a step of m rows moves, by the tile alone: each operand is read by every warp that shares it."""
    m, n, d, tile = kernel.block_m, kernel.block_n, kernel.head_dim, kernel.tile
    warps, parts = tile["warps"], m // kernel.facts["score_rows"]
    scores = 2 * (n * d * parts * (warps // tile["score_warps"]) + m * d * tile["score_warps"])  # K with Q, V with dO
    in_registers = tile["score_warps"] == tile["key_warps"] == warps
    keys = 2 * m * d * tile["key_warps"] + (0 if in_registers else 2 * m * n * (warps // tile["key_warps"]))
    queries = m * n * (warps // tile["row_warps"]) + n * d * tile["row_warps"]
    stored = (1 if in_registers else 2) * m * n
    return 2 * (scores + keys + queries + stored + 2 * m * d)


# --- The tour -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_checkout() -> tuple[Kernel, ...]:
    if not (ROOT / "csrc").exists():
        pytest.skip("not in a checkout")
    return tour.needed(ROOT / "csrc")


def test_the_tours_are_up_to_date(of_checkout: tuple[Kernel, ...]) -> None:
    assert not tour.stale(of_checkout, ROOT / "docs"), f"run {tour.COMMAND}"


def test_a_stale_tour_is_found(of_checkout: tuple[Kernel, ...], tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    shutil.copytree(ROOT / "docs", docs)
    first = docs / tour.TOURS[0].page
    first.write_text(first.read_text().replace("ldmatrix", "ldvector"))
    digests = docs / tour.FOLDER / "digests.json"
    *_, (name, digest) = json.loads(digests.read_text()).items()  # of the last page that is no tour
    digests.write_text(digests.read_text().replace(digest, digest[::-1]))
    (docs / tour.TOURS[1].page).unlink()
    picture = docs / tour.FOLDER / f"{name}.svg"
    page = docs / next(iter(tour.PAGES))
    page.write_text(page.read_text().replace(f"({tour.FOLDER}/", "("))
    assert tour.stale(of_checkout, docs) == [str(first), str(docs / tour.TOURS[1].page), str(page), str(picture)]


def test_the_tours_pictures_are_there_and_shown(of_checkout: tuple[Kernel, ...]) -> None:
    shown = set()
    drawn = {guide.page: [*tour.pictures(guide, of_checkout).values()] for guide in tour.TOURS}
    drawn |= {page: draw(of_checkout) for page, draw in tour.PAGES.items()}
    for name, pictures_of_page in drawn.items():
        page = (ROOT / "docs" / name).read_text()
        for picture in pictures_of_page:
            assert f"({tour.FOLDER}/{picture.name}.svg)" in page
            shown.add(f"{picture.name}.svg")
    files = {path.name: path.stat().st_size for path in (ROOT / "docs" / tour.FOLDER).glob("sm*_*.svg")}
    assert set(files) == shown
    assert max(files.values()) < 120_000


# --- The command --------------------------------------------------------------------------------------------


def test_command(kernels: tuple[Kernel, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["kernels"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(kernel) for kernel in kernels]
    arguments = [
        "table",
        "--chip",
        "A100",
        "--head-dims",
        "64,128",
        "--format",
        "csv",
        "--out",
        str(tmp_path / "a100.csv"),
    ]
    assert command.main(arguments) == 0
    rows = list(csv.DictReader((tmp_path / "a100.csv").open()))
    assert {row["chip"] for row in rows} == {"A100"}
    assert {(row["kernel"], row["head_dim"]) for row in rows} == {(k, d) for k in ("fwd", "bwd") for d in ("64", "128")}
    arguments = ["draw", "all", "--head-dim", "64", "--window", "100", "-1", "--format", "svg", "--out", str(tmp_path)]
    assert command.main(arguments) == 0
    assert len(list(tmp_path.glob("*.svg"))) == len(capsys.readouterr().out.splitlines()) == len(command.DRAW) - 2
    assert not [*tmp_path.glob("*packed*"), *tmp_path.glob("*transposition*")]  # of sm90 alone
    assert (tmp_path / "sm80_d64_mask_window.svg").exists()
    arguments = ["draw", "all", "--arch", "sm90", "--family", "forward/fp8_rows", "--head-dim", "64"]
    assert command.main([*arguments, "--causal", "--format", "svg", "--out", str(tmp_path / "fp8")]) == 0
    drawn = {path.stem for path in (tmp_path / "fp8").glob("*.svg")}
    names = ("banks_k_wgmma", "threads_mma", "transposition", "mask_causal", "schedule", "packed")
    assert drawn == {*(f"sm90_fp8_d64_{name}" for name in names), "sm90_budget_fp8_plain"}
    capsys.readouterr()
    for operand in ("Kt", "dS", "dK"):
        arguments = ["draw", "banks", "--direction", "bwd", "--head-dim", "64", "--operand", operand]
        assert command.main([*arguments, "--format", "svg", "--out", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("draw banks --head-dim 40", "--head-dim: expected one of "),
        ("draw mask --head-dim 64 --entry tiny", "no kernel sm80 forward/rows d64 tiny; its entries are a100"),
        ("draw mask --head-dim 64 --lengths 100000000 100000000", "expected at most 20000 tiles in a picture"),
        ("draw transposition --head-dim 64", "does not transpose V: that is drawn of float8 kernels"),
        ("draw mask --head-dim 64 --family forward/rowz", "no kernel sm80 forward/rowz d64"),
        ("draw mask --head-dim 64 --direction bwd", "masks and schedules are drawn of forwards"),
        ("draw banks --head-dim 64 --operand X", "has no access 'X' 'registers'; it has "),
        ("table --head-dims 64 --out /nowhere/table.txt", "No such file or directory: '/nowhere/table.txt'"),
    ],
)
def test_what_cannot_be_done_is_said(
    arguments: str,
    sentence: str,
    kernels: tuple[Kernel, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command.main(arguments.split()) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("draw schedule --heads 0", "--heads: expected a number of at least 1, got 0"),
        ("draw schedule --sms 0", "--sms: expected a number of at least 1, got 0"),
        ("draw mask --lengths 0 0", "--lengths: expected a number of at least 1, got 0"),
        ("draw mask --window -2 0", "--window"),
        ("table --head-dims", "--head-dims: expected one argument"),
        ("table --head-dims 64,x", "--head-dims: expected a number of at least 1, got x"),
        ("--head-dims 64 table", "argument command: invalid choice: '64'"),
    ],
)
def test_wrong_flags_are_said(arguments: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments.split())
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err


def test_command_checks(
    broken_csrc: Path,
    broken: tuple[Kernel, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    some = ["--arch", "sm80", "--direction", "fwd", "--head-dims", "64"]
    assert command.main(["--csrc", str(broken_csrc), "check", *some]) == 1
    out = capsys.readouterr().out
    assert all(f"{name}: " in out for name in checks.CHECKS)
    assert "data flow: ok, 3 kernels" in out
    assert "mask definition: ok" not in out
    assert "bank conflicts: ok" not in out and "K of stage 0 to registers (ldmatrix.x4): " in out


@pytest.mark.parametrize("field", ["batch", "heads_q", "heads_kv", "len_q"])
def test_a_problem_without_work_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}: expected at least 1, got 0"):
        inspect.Problem(**{**FULL.__dict__, field: 0})

"""Hopper kernels on the emulated machine, see emulator.py: right for random masks and schedules; and the
machine sees faults that are planted in them. Minutes: with --emulated alone."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from emulator import CSRC, Emulator, run


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    return Emulator(tmp_path_factory.mktemp("emulated"))


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("driver", "head_dims"),
    [
        ("masked_forward", (64,)),
        ("masked_forward", (128,)),
        ("masked_forward", (192, 128)),
        ("masked_forward", (320,)),
        ("masked_backward", (64,)),
        ("masked_backward", (128,)),
        ("long_rows", (64,)),
        ("long_rows", (128,)),
        ("key_chunks", (64,)),
        ("key_chunks", (128,)),
        ("split_keys", (64,)),
        ("split_keys", (192, 128)),
        ("split_keys", (256,)),
        ("latent", (576, 512)),
    ],
    ids=str,
)
def test_kernels_are_right(emulator: Emulator, driver: str, head_dims: tuple[int, ...], seed: int) -> None:
    program = emulator.build(driver, head_dims)
    lines = list(run(program, seed % 1_000_000, 40))
    assert [line for line in lines if not line.startswith("ok ")] == []
    assert len(lines) == 40


@dataclass(frozen=True)
class Fault:
    """What a fault changes in a file of csrc/sm90/`folder`/: pairs of what is right and what is wrong."""

    what: str
    file: str
    edits: tuple[tuple[str, str], ...]
    driver: str = "masked_forward"
    folder: str = "forward/masked_rows"
    cases: int = 30
    head_dims: tuple[int, ...] = (64,)


WAIT_FOR_SCORES = "    warpgroup_wait<1>();  // S(n)\n"
FAULTS = (
    Fault(
        *("V is read before it has landed", "mainloop.cuh"),
        (("smem.v_pipeline.wait_full(v_state);  // TMA", "// TMA"),),
    ),
    Fault(
        *("V is released before its product", "mainloop.cuh"),
        ((WAIT_FOR_SCORES, "    release_v();\n" + WAIT_FOR_SCORES), ("        release_v);", "        [] {});")),
    ),
    Fault(
        *("S is read before it is there", "mainloop.cuh"),
        ((WAIT_FOR_SCORES, "    warpgroup_wait<2>();\n"),),
    ),
    Fault(
        *("the stage of V is wrong", "mainloop.cuh"),
        (("tOrV(_, _, _, v_state.stage)", "tOrV(_, _, _, k_state.stage)"),),
    ),
    Fault(
        *("a turn is not handed on", "mainloop.cuh"),
        (("    Turn::hand_on(warpgroup);\n    smem.v_pipeline", "    smem.v_pipeline"),),
    ),
    Fault(
        *("K is loaded before its stage is empty", "load.cuh"),
        (("smem_.k_pipeline.wait_empty(state);", ""),),
    ),
    Fault(
        *("a batch of key tiles is overwritten", "walk.cuh"),
        (("smem_.batch_pipeline.wait_empty(at_step(batches_));", ""),),
    ),
    Fault(
        *("a tile is never released", "kernel.cuh"),
        (("smem.tile_pipeline.release(at_step(tile_number));", ""),),
    ),
    Fault(
        *("V of keys that do not exist is not cleared", "load.cuh"),
        (("if (!keys.has(n * kBlockN + i / kVectors % kBlockN)) vectors[i] = uint4{};", ""),),
        *("long_rows", "decode/long_rows"),
    ),
    Fault(
        *("V is cleared before it has landed", "load.cuh"),
        (("      edge_pipeline(smem_).wait_full({0, edges_++ & 1});\n", ""),),
        *("long_rows", "decode/long_rows"),
    ),
    Fault(
        *("K is loaded before its stage is empty", "load.cuh"),
        (("State state) const { pipeline().wait_empty(state); }", "State) const {}"),),
        *("long_rows", "decode/long_rows"),
    ),
    Fault(
        *("float16 numbers are written before their stage is empty", "load_float8.cuh"),
        (("    pipeline().wait_empty(state);  // all", "    // all"),),
        *("long_rows", "decode/long_rows"),
    ),
    Fault(
        *("float8 numbers are read before they have landed", "load_float8.cuh"),
        (("    smem_.stored_pipeline.wait_full(state);\n", ""),),
        *("long_rows", "decode/long_rows"),
    ),
    Fault(
        *("copied rows are read before they have landed", "copies.cuh"),
        (("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0]", "mbarrier.arrive.shared::cta.b64 _, [%0]"),),
        *("long_rows", "decode/common"),
        cases=60,
    ),
    Fault(
        *("bfloat16 queries are not made float16", "float8.cuh"),
        (("uint4 const x = vectors[i];", "continue;\n      uint4 const x = vectors[i];"),),
        *("long_rows", "decode/long_rows"),
    ),
    Fault(
        *("a chunk to the left of all whole key tiles is not masked", "tile.cuh"),
        (("whole_begin = min(whole_end, max(begin, range.whole_begin));", "whole_begin = range.whole_begin;"),),
        *("key_chunks", "decode/key_chunks"),
        cases=120,
    ),
    Fault(
        *("chunks are folded from the last to the first", "merge.cuh"),
        (("kHeadDim, first_part + i);", "kHeadDim, first_part + chunks.count - 1 - i);"),),
        *("key_chunks", "decode/key_chunks"),
    ),
    Fault(
        *("a cut tile goes on from what another CTA has begun", "fold.cuh"),
        (("folds.words(cta, /*handed=*/true, warpgroup);", "folds.words(cta + 1, /*handed=*/true, warpgroup);"),),
        *("key_chunks", "decode/key_chunks"),
    ),
    Fault(
        *("a fold leaves the errors out", "fold.cuh"),
        (("factors.add(fold.error, chunk.error)};", "chunk.error};"),),
        *("key_chunks", "decode/key_chunks"),
        cases=150,
    ),
    Fault(
        *("the softmax does not restart", "mainloop.cuh"),
        (("    softmax = Softmax(params.scale_log2, params.power_scale);\n", ""),),
        *("key_chunks", "decode/key_chunks"),
    ),
    Fault(
        *("a tile of a cache is loaded before its stage is empty", "load.cuh"),
        (("    smem_.pipeline.wait_empty(state_);\n", ""),),
        *("split_keys", "decode/split_keys"),
    ),
    Fault(
        *("a unit of work is overwritten", "load.cuh"),
        (("    smem_.unit_pipeline.wait_empty(unit_state_);\n", ""),),
        *("split_keys", "decode/split_keys"),
    ),
    Fault(
        *("V is read before it has landed", "kernel.cuh"),
        (
            (
                "const* wait_values() const { return wait(values_); }",
                "const* wait_values() const { return tile_of(); }",
            ),
            (
                "  CUTE_DEVICE Cache const* wait_keys()",
                "  CUTE_DEVICE Cache const* tile_of() const { return smem_.tiles[values_.stage]; }\n"
                "  CUTE_DEVICE Cache const* wait_keys()",
            ),
        ),
        *("split_keys", "decode/split_keys"),
    ),
    Fault(
        *("the tiles of pieces that are not seen count as less than none", "work.cuh"),
        (
            (
                "min(tile_end, max(tile_begin, pieces.begin + piece * pieces.tiles))",
                "max(tile_begin, pieces.begin + piece * pieces.tiles)",
            ),
            ("{ return begin_of(piece + 1); }", "{ return min(tile_end, begin_of(piece + 1)); }"),
        ),
        *("latent", "../core/split_keys"),
        cases=60,
        head_dims=(576, 512),
    ),
)


def _plant(fault: Fault, csrc: Path) -> None:
    file = csrc / "sm90" / fault.folder / fault.file
    text = file.read_text()
    for right, wrong in fault.edits:
        assert text.count(right) == 1, right
        text = text.replace(right, wrong)
    file.write_text(text)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_faults_are_of_todays_kernels(fault: Fault, tmp_path: Path) -> None:
    csrc = tmp_path / "csrc"
    file = Path("sm90", fault.folder, fault.file)
    (csrc / file).parent.mkdir(parents=True)
    shutil.copy(CSRC / file, csrc / file)
    _plant(fault, csrc)


@pytest.mark.emulated
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_planted_faults_are_seen(emulator: Emulator, fault: Fault, tmp_path: Path, seed: int) -> None:
    csrc = tmp_path / "csrc"
    shutil.copytree(CSRC, csrc)
    _plant(fault, csrc)
    program = emulator.build(fault.driver, fault.head_dims, csrc, ["-DONE_KERNEL"])
    lines = list(run(program, seed % 1_000_000, fault.cases))
    assert any(line.startswith("FAILED") for line in lines)

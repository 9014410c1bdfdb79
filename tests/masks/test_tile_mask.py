"""The kernels of csrc/masks, compiled for the host: of random masks intervals or bits, lists, the order of tiles."""

from __future__ import annotations

import subprocess
from pathlib import Path

from flash_cute.inspect.build import default_csrc
from flash_cute.inspect.tools import find_tools

SOURCE = Path(__file__).with_name("tile_mask.cpp")
MASKS = 60


def test_intervals_bits_and_order(tmp_path: Path, seed: int) -> None:
    tools, program = find_tools(), tmp_path / "tile_mask"
    headers = [flag for folder in tools.includes for flag in ("-isystem", str(folder))]
    flags = ["-std=c++20", "-O1", "-w", "-fpermissive", "-I", str(default_csrc())]
    subprocess.run([tools.cxx, *flags, *headers, str(SOURCE), "-o", str(program)], check=True)
    done = subprocess.run([program, str(seed), str(MASKS)], capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0 and done.stdout.endswith(" 0 wrong\n"), done.stdout + done.stderr

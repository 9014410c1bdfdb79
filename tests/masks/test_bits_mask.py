"""The masks of a tile's scores by bits and by intervals, compiled for the host, at the coordinates of every thread."""

from __future__ import annotations

import subprocess
from pathlib import Path

from flash_cute.inspect.build import default_csrc
from flash_cute.inspect.tools import find_tools

SOURCE = Path(__file__).with_name("bits_mask.cpp")


def test_what_the_threads_hide(tmp_path: Path, seed: int) -> None:
    tools, program = find_tools(), tmp_path / "bits_mask"
    headers = [flag for folder in tools.includes for flag in ("-isystem", str(folder))]
    flags = ["-std=c++20", "-O1", "-fno-strict-aliasing", "-pthread", "-w", "-fpermissive", "-I", str(default_csrc())]
    subprocess.run([tools.cxx, *flags, *headers, str(SOURCE), "-o", str(program)], check=True)
    done = subprocess.run([program, str(seed)], capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0 and done.stdout.endswith(" 0 wrong\n"), done.stdout + done.stderr

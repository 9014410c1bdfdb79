"""Division by a number that the host knows, csrc/contract/divisor.h, beside that of the language."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = """
#include <initializer_list>
#include <random>
#include "contract/divisor.h"

static_assert(int(flash_cute::Divisor(7)) == 7 && int(flash_cute::Divisor()) == 1 && 20 / flash_cute::Divisor(0) == 20);

extern "C" long wrong(int draws, unsigned seed) {
  long bad = 0;
  auto const check = [&](int number, int by) {
    flash_cute::Divisor const divisor(by);
    bad += number / divisor != number / by || number % divisor != number % by;
  };
  constexpr int kLargest = 2147483647;
  for (int by = 1; by < 3000; ++by) {
    int const last = kLargest / by * by;
    for (int number : {0, 1, by - 1, by, by + 1, 2 * by - 1, last - 1, last, kLargest - 1, kLargest}) check(number, by);
  }
  std::mt19937 random(seed);
  auto const draw = [&] { return int(random() >> 1 >> random() % 31); };
  for (int i = 0; i < draws; ++i) {
    int const number = draw(), by = draw();
    check(number, by > 0 ? by : kLargest - i);
  }
  return bad;
}
"""


def test_divides_as_the_language_does(tmp_path: Path, seed: int) -> None:
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    (tmp_path / "divisor.cpp").write_text(SOURCE)
    flags = ["-std=c++20", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", f"-I{ROOT / 'csrc'}"]
    subprocess.run(["g++", *flags, str(tmp_path / "divisor.cpp"), "-o", str(tmp_path / "divisor.so")], check=True)
    wrong = ctypes.CDLL(str(tmp_path / "divisor.so")).wrong
    wrong.argtypes, wrong.restype = [ctypes.c_int, ctypes.c_uint], ctypes.c_long
    assert wrong(2_000_000, seed) == 0

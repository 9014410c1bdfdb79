"""The layout of an output is one rule, written in C++, in the fakes and in the CPU path: that of torch.empty_like."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import random_layouts
import torch
from repository import ROOT
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_cute._layout import empty_out

HEADERS = Path(torch.__file__).parent / "include"
DRAWS = 2000

SOURCE = """
#include "api/packed_view.h"

// A tensor's, or of a packed one (3 dims) its own dims'. 0: (sizes, strides) like empty_like; else of out.
extern "C" void output_strides(
    int64_t rank, int64_t const* sizes, int64_t const* strides, int64_t head_dim_v, int64_t* found) {
  using namespace flash_cute;
  TensorInfo info{.name = "q", .handle = nullptr, .sizes = sizes, .strides = strides, .rank = rank};
  if (rank == 4) {
    auto const output = head_dim_v == 0 ? empty_like_strides(info) : out_strides(info, head_dim_v);
    std::copy(output.begin(), output.end(), found);
  } else {
    PackedView view;
    auto const output = packed_out_strides(view.info(info, 3), head_dim_v == 0 ? sizes[2] : head_dim_v);
    std::copy(output.begin(), output.end(), found);
  }
}
"""

Strides = Callable[[torch.Tensor, int], tuple[int, ...]]


@pytest.fixture(scope="module")
def strides_in_cpp(tmp_path_factory: pytest.TempPathFactory) -> Strides:
    """(q, head dim of v) -> the strides of out; the head dim 0 stands for empty_like."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    folder = tmp_path_factory.mktemp("strides")
    (folder / "strides.cpp").write_text(SOURCE)
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    include = [f"-I{ROOT / 'csrc'}", "-isystem", str(HEADERS)]
    library = folder / "strides.so"
    subprocess.run(["g++", *flags, *include, str(folder / "strides.cpp"), "-o", str(library)], check=True)
    function = ctypes.CDLL(str(library)).output_strides
    function.argtypes = [ctypes.c_int64, *[ctypes.c_void_p] * 2, ctypes.c_int64, ctypes.c_void_p]
    function.restype = None

    def strides(q: torch.Tensor, head_dim_v: int) -> tuple[int, ...]:
        numbers = ctypes.c_int64 * q.dim()
        found = numbers()
        function(q.dim(), numbers(*q.shape), numbers(*q.stride()), head_dim_v, found)
        return tuple(found)

    return strides


def _draw(draw: random.Random) -> torch.Tensor:
    sizes = [random_layouts.size(draw, 2, 3, 8, 16) for _ in range(draw.choice((3, 4)))]
    sizes[-1] = max(1, sizes[-1])
    return random_layouts.layout(torch.zeros(sizes), draw)


def test_layouts(strides_in_cpp: Strides, seed: int) -> None:
    for number in range(DRAWS):
        draw = random.Random(seed + number)
        q = _draw(draw)
        head_dim_v = draw.choice((1, 2, 8, 24, q.shape[-1]))
        for of, expected in ((0, torch.empty_like(q)), (head_dim_v, empty_out(q, head_dim_v))):
            what = f"draw {seed + number}: {tuple(q.shape)}, strides {q.stride()}, head dim of v {of or q.shape[-1]}"
            assert strides_in_cpp(q, of) == expected.stride(), what
            assert expected.shape == (*q.shape[:-1], of or q.shape[-1]), what


def test_fakes(seed: int) -> None:
    for number in range(DRAWS // 4):
        draw = random.Random(seed + number)
        q = _draw(draw)
        head_dim_v = draw.choice((1, 2, 8, 24, q.shape[-1]))
        with FakeTensorMode() as mode:
            fake = empty_out(mode.from_tensor(q), head_dim_v)
        real = empty_out(q, head_dim_v)
        what = f"draw {seed + number}: {tuple(q.shape)}, strides {q.stride()}, head dim of v {head_dim_v}"
        assert (fake.shape, random_layouts.places(fake)) == (real.shape, random_layouts.places(real)), what


@pytest.mark.parametrize(
    "shape, strides",
    [((1, 2, 16), (1, 0, 1)), ((1, 2, 16), (1, 0, 2)), ((1, 1, 16), (0, 0, 2)), ((1, 2, 3, 16), (0, 1, 0, 1))],
    ids=str,
)
def test_expanded_heads(strides_in_cpp: Strides, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """A stride of 0 compares equal to every other, so that the order depends on which dims are compared first."""
    q = torch.zeros(100).as_strided(shape, strides)
    assert strides_in_cpp(q, 0) == torch.empty_like(q).stride()

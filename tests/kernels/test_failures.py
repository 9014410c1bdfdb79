"""A call that fails on the device: what is raised, that nothing is printed, and that the next call is good."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case, Inputs
from numerics import assert_gradients_match, assert_matches, same_bits
from packed import ONE, pack
from repository import ROOT

import flash_cute

CUDA = [pytest.param("cuda", marks=pytest.mark.cuda)]
CASE = Case(64, 113, 203, heads_q=4)


def test_this_torch_allocates_for_us() -> None:
    """csrc/api/allocate.h calls at::empty_strided by its symbol; without it a lack of memory is a RuntimeError."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libtorch_cpu.so"))
    source = (ROOT / "csrc/api/allocate.h").read_text()
    start = source.index('__asm__("')
    symbol = "".join(source[start : source.index(";", start)].split('"')[1::2])
    assert symbol.startswith("_ZN2at4_ops13empty_strided4call")
    assert hasattr(library, symbol)


ALLOCATING_OPERATOR = """
#include <torch/csrc/stable/library.h>
#include "api/tensor.h"

void boxed_make(StableIValue* stack, uint64_t, uint64_t) {
  int64_t const sizes[] = {torch::stable::detail::to<int64_t>(stack[0]), 3}, strides[] = {1, 5};
  flash_cute::Tensor made(flash_cute::allocate(2, sizes, strides, aoti_torch_dtype_float64(),
                                               aoti_torch_device_type_cpu(), -1));
  stack[0] = torch::stable::detail::from(made.release());
}

STABLE_TORCH_LIBRARY(flash_cute_test, m) { m.def("make(int rows) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(flash_cute_test, CompositeExplicitAutograd, m) { m.impl("make", &boxed_make); }
"""


def test_pytorchs_exceptions_pass(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As they would from an operator of its own, and without a word on stderr: what a lack of GPU memory relies on."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    (tmp_path / "make.cpp").write_text(ALLOCATING_OPERATOR)
    folder = Path(torch.__file__).parent
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    flags += [f"-I{ROOT / 'csrc'}", "-isystem", str(folder / "include"), f"-L{folder / 'lib'}"]
    files = [str(tmp_path / "make.cpp"), "-ltorch_cpu", "-o", str(tmp_path / "make.so")]
    subprocess.run(["g++", *flags, *files], check=True)
    torch.ops.load_library(str(tmp_path / "make.so"))
    make = torch.ops.flash_cute_test.make
    x = make(2)
    assert (x.shape, x.stride(), x.dtype, x.device.type) == ((2, 3), (1, 5), torch.float64, "cpu")
    x.fill_(1)
    assert x.sum() == 6
    capfd.readouterr()
    for rows in (-1, 2**50):
        with pytest.raises(RuntimeError) as theirs:
            torch.empty_strided((rows, 3), (1, 5), dtype=torch.float64)
        with pytest.raises(type(theirs.value)) as caught:
            make(rows)
        assert str(caught.value).splitlines()[0] == str(theirs.value).splitlines()[0]
    assert capfd.readouterr() == ("", ""), "it printed something"


def _too_large(device: str) -> Inputs:
    """q whose out is half a terabyte, in 128 bytes of memory."""
    q = torch.ones(64, dtype=torch.float16, device=device).expand(64, 64, 10**6, 64)
    k = torch.ones(64, 1, 10, 64, dtype=torch.float16, device=device)
    return q, k, k


def _assert_out_of_memory(call: Callable[[], Any], capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\. Tried to allocate"):
        call()
    assert capfd.readouterr() == ("", ""), "it printed something"


def _assert_works(inputs: Inputs, backend: str | None) -> None:
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    out, lse = flash_cute.fwd(q, k, v, True, backend=backend)
    assert_matches(out, lse, q, k, v, True)
    gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert_gradients_match(gradients, torch.ones_like(out), q, k, v, True)


@pytest.mark.kernel
@pytest.mark.parametrize("device", CUDA)
def test_out_of_memory(
    device: str, backend: str | None, rng: torch.Generator, capfd: pytest.CaptureFixture[str]
) -> None:
    q, k, v = _too_large(device)
    lse = torch.ones(1, device=device).expand(q.shape[:3])
    operators = torch.ops.flash_cute
    score = ("none", None, None, None, None, None, None)
    name = backend or "auto"
    for call in (
        lambda: flash_cute.attention(q, k, v, backend=backend),
        lambda: flash_cute.bwd(q, q, k, v, q, lse, backend=backend),
        lambda: operators.fwd(q, k, v, *score, name),
        lambda: operators._fwd(q, k, v, *score, name),
        lambda: operators._bwd(q, q, k, v, q, lse, None, *score, False, name),
    ):
        _assert_out_of_memory(call, capfd)
        _assert_works(CASE.inputs(device, rng), backend)


@pytest.mark.kernel
@pytest.mark.parametrize("device", CUDA)
def test_out_of_memory_packed(
    device: str, backend: str | None, rng: torch.Generator, capfd: pytest.CaptureFixture[str]
) -> None:
    q = torch.ones(64, dtype=torch.float16, device=device).expand(10**8, 64, 64)
    k = torch.ones(10, 1, 64, dtype=torch.float16, device=device)
    lengths = [torch.tensor([0, n], dtype=torch.int32, device=device) for n in (10**8, 10)]
    _assert_out_of_memory(lambda: flash_cute.varlen_attention(q, k, k, *lengths, backend=backend), capfd)
    packed = pack(ONE, device, rng)
    out, lse = flash_cute.varlen_fwd(*packed.call, True, backend=backend)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in packed.tensors)
    assert_matches(out.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0), q, k, v, True)


@pytest.fixture
def no_more_memory() -> Iterator[Callable[[], None]]:
    """A function after which the allocator has no MiB left and gets none from the device."""
    held = []

    def limit() -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1e-6)
        # The allocator keeps a segment that a living tensor uses a part of, and may give away the rest.
        for log2_size in range(36, 19, -1):
            with contextlib.suppress(torch.OutOfMemoryError):
                while True:
                    held.append(torch.empty(2**log2_size, dtype=torch.uint8, device="cuda"))

    yield limit
    held.clear()
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.kernel
@pytest.mark.parametrize("device", CUDA)
def test_out_of_memory_in_autograd(
    device: str,
    backend: str | None,
    rng: torch.Generator,
    capfd: pytest.CaptureFixture[str],
    no_more_memory: Callable[[], None],
) -> None:
    """The backward runs in a thread of the autograd engine."""
    q, k, v = (x.requires_grad_() for x in Case(128, 4000, 4000, heads_q=8, heads_kv=8).inputs(device, rng))
    out = flash_cute.attention(q, k, v, backend=backend)
    dout = torch.ones_like(out)
    no_more_memory()
    _assert_out_of_memory(lambda: out.backward(dout, retain_graph=True), capfd)
    torch.cuda.set_per_process_memory_fraction(1.0)
    out.backward(dout)
    assert_gradients_match((q.grad, k.grad, v.grad), dout, q, k, v)


class _Capture:
    """A capture by somebody else, on a stream of the driver that the legacy stream waits for."""

    def __init__(self) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.stream = ctypes.c_void_p()
        relaxed = 2
        assert self.driver.cuStreamCreate(ctypes.byref(self.stream), 0) == 0
        assert self.driver.cuStreamBeginCapture_v2(self.stream, relaxed) == 0

    def end(self) -> int:
        """The driver's error: 901 for a capture that was spoilt."""
        graph = ctypes.c_void_p()
        error: int = self.driver.cuStreamEndCapture(self.stream, ctypes.byref(graph))
        assert self.driver.cuStreamDestroy_v2(self.stream) == 0
        return error


@pytest.mark.kernel
@pytest.mark.parametrize("device", CUDA)
@pytest.mark.parametrize("what", ["forward", "backward", "packed"])
def test_failed_launch(device: str, what: str, backend: str | None, rng: torch.Generator) -> None:
    """On the legacy stream, beside a capture on a stream that it waits for, nothing can be launched."""
    inputs = CASE.inputs(device, rng)
    _assert_works(inputs, backend)  # allocates what the call below will need
    out, lse = flash_cute.fwd(*inputs, backend=backend)
    packed = pack(ONE, device, rng)
    flash_cute.varlen_fwd(*packed.call, backend=backend)
    torch.cuda.synchronize()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    capture = _Capture()
    try:
        with pytest.raises(RuntimeError, match=r"^flash_cute: CUDA could not launch the .*cudaErrorStreamCapture"):
            if what == "forward":
                flash_cute.fwd(*inputs, backend=backend)
            elif what == "backward":
                flash_cute.bwd(out, *inputs, out, lse, backend=backend)
            else:
                flash_cute.varlen_fwd(*packed.call, backend=backend)
    finally:
        capture.end()
    _assert_works(inputs, backend)
    flash_cute.varlen_fwd(*packed.call, backend=backend)
    torch.cuda.synchronize()


@pytest.mark.kernel
@pytest.mark.parametrize("device", CUDA)
def test_beside_a_capture_in_another_thread(device: str, backend: str | None, rng: torch.Generator) -> None:
    """A call on a stream of its own is good, and so is the capture."""
    inputs = CASE.inputs(device, rng)
    expected = flash_cute.fwd(*inputs, True, backend=backend)
    torch.cuda.synchronize()
    results: list[tuple[torch.Tensor, ...]] = []

    def call() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            results.extend(flash_cute.fwd(*inputs, True, backend=backend) for _ in range(20))
        stream.synchronize()

    x = torch.zeros(1000, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        thread = threading.Thread(target=call)
        x += 1
        thread.start()
        thread.join()
        x += 1
    graph.replay()
    torch.cuda.synchronize()
    assert (x == 2).all()
    assert len(results) == 20 and all(same_bits(result, expected) for result in results)


FOREIGN_CONTEXT = """
import ctypes, threading, torch, flash_cute
from cases import Case
from numerics import same_bits

driver = ctypes.CDLL("libcuda.so.1")

def current():
    context = ctypes.c_void_p()
    assert driver.cuCtxGetCurrent(ctypes.byref(context)) == 0
    return context.value

inputs = Case(64, 113, 203).inputs("cuda", torch.Generator().manual_seed({seed}))
expected = flash_cute.fwd(*inputs, True, backend={backend!r})
torch.cuda.synchronize()
primary = current()
foreign = ctypes.c_void_p()
assert driver.cuCtxCreate_v2(ctypes.byref(foreign), 0, 0) == 0
assert current() == foreign.value != primary
results = []
for _ in range(3):
    results.append(flash_cute.fwd(*inputs, True, backend={backend!r}))
    assert current() == foreign.value, "another context is current"

def in_a_thread():  # whose first call finds a foreign context
    assert current() is None
    assert driver.cuCtxSetCurrent(foreign) == 0
    results.append(flash_cute.fwd(*inputs, True, backend={backend!r}))
    assert current() == foreign.value
    results.append(None)

thread = threading.Thread(target=in_a_thread)
thread.start()
thread.join()
assert results.pop() is None
assert driver.cuCtxDestroy_v2(foreign) == 0
assert driver.cuCtxSetCurrent(ctypes.c_void_p(primary)) == 0
torch.cuda.synchronize()
assert len(results) == 4 and all(same_bits(result, expected) for result in results)
print("right")
"""


@pytest.mark.kernel
@pytest.mark.parametrize("device", CUDA)
def test_a_foreign_context_stays_current(
    device: str, backend: str | None, seed: int, python: Callable[..., str]
) -> None:
    assert "right" in python(FOREIGN_CONTEXT.format(seed=seed, backend=backend))

r"""The Hopper kernels on the host: builds a driver of this folder, and runs random cases on the emulated machine.

    python tests/emulated/emulator.py masked_forward 64 --count 100
    python tests/emulated/emulator.py masked_forward 192 128 --csrc ../other/csrc --first 100
    python tests/emulated/emulator.py masked_backward 128 --diverge

(With flash_cute installed, or the checkout on PYTHONPATH.)

A change of a kernel's schedule is checked without a GPU: results against double precision, deadlocks, reads of memory
that may not have been written yet, or that may have been overwritten. How that is seen is said in machine/machine.h.

The kernel's own headers, and their launch, are compiled by g++. `machine/device.h` has CUDA's device functions, and
`ptx_calls.py` turns inline PTX into calls of the machine's functions; an instruction that it does not know stops the
kernel with its text. `tensors.h` and `mask.h` have what the drivers share.

What is not emulated: memory order and proxy fences (a missing fence.proxy.async is not seen), the number of registers,
clusters.

The lanes of a warp stay together where they do on the GPU, in code that does not diverge. With --diverge they do so
only where an instruction makes them: more than today's GPUs do, and code may rely on less.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import ptx_calls

from flash_cute.inspect.tools import find_tools

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
MACHINE = ("machine", "async")  # files of machine/
STANDARD = ("-std=c++20", "-w")
# The machine computes the products. Of the kernels, -O1 compiles twice as fast as -O2 and runs as fast. Registers are
# read as words of another type; templates that nobody instantiates call device functions that nobody declares.
MACHINE_FLAGS = ("-O3", "-march=native")
KERNEL_FLAGS = ("-O1", "-march=native", "-ffp-contract=off", "-fno-strict-aliasing", "-fpermissive")


class Emulator:
    """Builds in `folder`, which keeps the machine's objects."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tools = find_tools()
        self.cxx = tools.cxx
        self.includes = [flag for path in tools.includes for flag in ("-isystem", str(path))]

    def build(self, driver: str, head_dims: Sequence[int], csrc: Path = CSRC, flags: Sequence[str] = ()) -> Path:
        """The program of a driver for head dims of q and k, and of v if another; `flags`: macros."""
        objects = [self._machine(name) for name in MACHINE]
        program = self.folder / driver
        macros = [f"-DHEAD_DIM={head_dims[0]}", f"-DHEAD_DIM_V={head_dims[-1]}", *flags]
        device = ["-include", str(HERE / "machine/device.h"), f"-I{csrc}", f"-I{HERE}"]
        source = self._compile("-E", *macros, *self.includes, *device, HERE / f"{driver}.cpp")
        rewritten = program.with_suffix(".ii")
        rewritten.write_text(ptx_calls.rewrite(source))
        self._compile(*KERNEL_FLAGS, "-fpreprocessed", rewritten, *objects, "-o", program)
        return program

    def _machine(self, name: str) -> Path:
        target = self.folder / f"{name}.o"
        if not target.exists():
            self._compile(*MACHINE_FLAGS, *self.includes, "-c", HERE / f"machine/{name}.cpp", "-o", target)
        return target

    def _compile(self, *arguments: str | Path) -> str:
        done = subprocess.run([self.cxx, *STANDARD, *arguments], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{self.cxx} failed:\n" + done.stderr[:4000])
        return done.stdout


def run(program: Path, first: int, count: int, diverge: bool = False) -> Iterator[str]:
    """The cases of the seeds from `first` on, a line each: "ok", or "FAILED" and a further line that says what."""
    arguments = [str(program), str(first), str(count), *(["diverge"] if diverge else [])]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield line.rstrip("\n")
    if process.returncode not in (0, 1):
        yield f"FAILED: the program ended with {process.returncode}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("driver", choices=sorted(path.stem for path in HERE.glob("*.cpp")))
    parser.add_argument("head_dims", type=int, nargs="+", help="of q and k, and of v if it is another")
    parser.add_argument("--csrc", type=Path, default=CSRC, help="the kernels of another tree")
    parser.add_argument("--first", type=int, default=0, help="seed of the first case")
    parser.add_argument("--count", type=int, default=40, help="cases")
    parser.add_argument("--diverge", action="store_true", help="the lanes of a warp run apart, see above")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        program = Emulator(Path(folder)).build(options.driver, options.head_dims, options.csrc)
        failed = 0
        for line in run(program, options.first, options.count, options.diverge):
            print(line, flush=True)
            failed += line.startswith("FAILED")
    print(f"{failed} of {options.count} cases failed" if failed else f"all {options.count} cases passed")
    return os.EX_OK if failed == 0 else 1


if __name__ == "__main__":
    sys.exit(main())

"""The kernels that are compiled: one list, from which come the generated sources and the dispatcher's table."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

from .config import ROOT, BuildConfig

DIRECTIONS = ("fwd", "bwd", "decode")

# Of csrc/<arch>/, in which the families have theirs.
FOLDERS = {"fwd": "forward/", "bwd": "backward/", "decode": "decode/"}

# The kernel families by architecture: their folders of csrc/<arch>/, which are namespaces too, and their head dims, of
# q and k, and of v where it is another.
FAMILIES: dict[str, dict[str, list[int | list[int]]]] = json.loads((ROOT / "csrc/families.json").read_text())

# Head dims that the kernel of a larger one serves: just as fast, since it computes only the columns that there are, or
# because they have none of their own. That one is built for them.
SERVED_BY = {
    ("sm80", "fwd"): {320: 1024, 512: 1024},
    ("sm80", "bwd"): {320: 1024, 512: 1024},
    ("sm80", "decode"): {32: 64, 96: 128, 192: 256, 320: 576, 512: 576},
    ("sm90", "decode"): {32: 64, 96: 128, 320: 576, 512: 576},
}

# Head dims whose kernels are compiled in one file. A file costs 11 to 14 s of processor time before its first kernel,
# since CuTe is parsed three times, twice for the host: where each head dim had a file, a sixth of all. No file takes
# much longer than the slowest head dim alone, which limits a build on many cores, or more than 6 GB: together, 96 and
# 128 of the sm80 backward would (6.9 GB, 227 s), and all of the sm90 decode.
TOGETHER = {
    ("sm80", "fwd"): ((32, 64), (96, 1024)),
    ("sm80", "bwd"): ((32, 64), (96, 1024)),
    ("sm90", "fwd"): ((32, 64, 512, 1024), (96, 128), (192, 256, 320)),
    ("sm90", "fwd_fp8"): ((64, 96, 128, 192, 256),),
    ("sm90", "fwd_masked"): ((32, 64, 96, 128, 192, 256, 320),),
    ("sm90", "bwd"): ((32, 64), (96, 128), (192, 256), (320, 512, 1024)),
    ("sm80", "decode"): ((64, 128, 256, 576, 1024),),
    ("sm90", "decode"): ((64, 128), (192, 576)),
}

# Families with files of their own, and what those are named after.
OWN_FILES = {"forward/fp8_rows": "fp8", "forward/masked_rows": "masked"}

# What nvcc takes for a head dim, roughly, in seconds of processor time on 16 cores: the longest files start first, else
# a build on many cores ends with one of them.
SECONDS = {
    ("sm80", "fwd"): {32: 80, 64: 115, 96: 135, 128: 220, 192: 155, 256: 210, 1024: 30},
    ("sm80", "bwd"): {32: 60, 64: 85, 96: 130, 128: 165, 192: 140, 256: 135, 1024: 75},
    ("sm90", "fwd"): {32: 70, 64: 70, 96: 80, 128: 100, 192: 30, 256: 40, 320: 30, 512: 30, 1024: 60},
    ("sm90", "fwd_fp8"): {64: 20, 96: 20, 128: 45, 192: 30, 256: 65},
    ("sm90", "fwd_masked"): {32: 20, 64: 25, 96: 25, 128: 25, 192: 25, 256: 30, 320: 25},
    ("sm90", "bwd"): {32: 85, 64: 120, 96: 120, 128: 125, 192: 90, 256: 65, 320: 30, 512: 30, 1024: 30},
    ("sm80", "decode"): {64: 35, 128: 35, 256: 15, 576: 15, 1024: 10},
    ("sm90", "decode"): {64: 100, 128: 110, 192: 70, 256: 175, 576: 45},
}


@dataclass(frozen=True)
class Instance:
    """The kernels of one family for one head dim, both dtypes and every tile."""

    arch: str
    direction: str
    family: str  # the folder of csrc/<arch>/
    head_dim: int
    head_dim_v: int

    @property
    def files(self) -> str:
        """What the names of its files begin with, behind the architecture: some families have files of their own."""
        own = OWN_FILES.get(self.family)
        return f"{self.direction}_{own}" if own else self.direction

    @property
    def head_dims(self) -> str:
        """As file names have them."""
        return f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d{self.head_dim}_{self.head_dim_v}"

    @property
    def namespace(self) -> str:
        """In flash_cute."""
        return f"{self.arch}::{self.family}".replace("/", "::")

    @property
    def arguments(self) -> str:
        """The template arguments of its `launch`."""
        return f"{self.head_dim}, {self.head_dim_v}"


@dataclass(frozen=True)
class KernelFile:
    """One generated file: instances of one architecture and direction, of float8 or of other dtypes."""

    instances: tuple[Instance, ...]

    @property
    def name(self) -> str:
        first = self.instances[0]
        head_dims = dict.fromkeys(instance.head_dims for instance in self.instances)
        return "_".join([first.arch, first.files, *head_dims]) + ".cu"

    @property
    def seconds(self) -> int:
        """What nvcc takes for it, roughly."""
        kinds = {(i.arch, i.files, i.head_dim, i.head_dim_v) for i in self.instances}
        return sum(SECONDS[arch, files].get(head_dim, 100) for arch, files, head_dim, _ in kinds)

    @property
    def source(self) -> str:
        first = self.instances[0]
        prefix = f"flash_cute::{first.direction.capitalize()}"
        parameters = f"{prefix}Plan const&, {prefix}Params const&, cudaStream_t"
        families = sorted({i.family for i in self.instances})
        includes = (f'#include "{first.arch}/{family}/launch.cuh"\n' for family in families)
        launches = (
            f"template cudaError_t flash_cute::{i.namespace}::launch<{i.arguments}>({parameters});\n"
            for i in self.instances
        )
        return f"// generated by setup.py\n{''.join(includes)}{''.join(launches)}"


@dataclass(frozen=True)
class SideKernel:
    """Kernels beside the families', compiled once for the chips of each architecture's folder, in one file."""

    name: str
    include: str  # where its launch is
    namespace: str  # in flash_cute
    launch: str
    parameters: str  # of the launch, in flash_cute
    declares: str  # what must be declared before it, in flash_cute


SIDE_KERNELS = (
    SideKernel(
        *("quantize_fp8", "quantize/launch.cuh", "quantize", "launch"),
        *("quantize::Params const&, int, cudaStream_t", "namespace quantize { struct Params; }"),
    ),
    SideKernel(
        *("append", "kvcache/append.cuh", "kvcache", "launch_append"),
        *("AppendParams const&, cudaStream_t", "struct AppendParams;"),
    ),
    SideKernel(
        *("tile_mask", "masks/launch.cuh", "masks", "launch"),
        *("masks::Params const&, int, cudaStream_t", "namespace masks { struct Params; }"),
    ),
)


SIDE_SECONDS = {"sm80": 65, "sm90": 35}


@dataclass(frozen=True)
class SideFile:
    """One generated file: the side kernels for an architecture."""

    arch: str

    @property
    def name(self) -> str:
        return f"{self.arch}_side.cu"

    @property
    def seconds(self) -> int:
        """What nvcc takes for it, roughly."""
        return SIDE_SECONDS[self.arch]

    @property
    def number(self) -> str:
        """The template argument of its launches."""
        return self.arch.removeprefix("sm")

    @property
    def source(self) -> str:
        includes = "".join(f'#include "{kernel.include}"\n' for kernel in SIDE_KERNELS)
        launches = "".join(
            f"template cudaError_t {kernel.namespace}::{kernel.launch}<{self.number}>({kernel.parameters});\n"
            for kernel in SIDE_KERNELS
        )
        return f"// generated by setup.py\n{includes}namespace flash_cute {{\n{launches}}}\n"


def side_files(built: list[Instance]) -> list[SideFile]:
    """The side kernels for every architecture that has kernels."""
    return [SideFile(arch) for arch in dict.fromkeys(instance.arch for instance in built)]


def source_files(built: list[Instance]) -> list[KernelFile | SideFile]:
    """Every generated file; those that take longest, roughly, come first."""
    return sorted([*side_files(built), *kernel_files(built)], key=lambda file: -file.seconds)


def instances(config: BuildConfig) -> list[Instance]:
    """Every kernel of the architectures and head dims asked for.

    The kernels of two head dims are built with those of the first.
    """
    built = []
    for arch, direction in itertools.product(config.gencode, DIRECTIONS):
        served_by = SERVED_BY.get((arch, direction), {})
        asked = {served_by.get(d, d) for d in config.head_dims}
        for family, head_dims in FAMILIES[arch].items():
            if not family.startswith(FOLDERS[direction]):
                continue
            pairs = [(d, d) if isinstance(d, int) else tuple(d) for d in head_dims]
            built += [Instance(arch, direction, family, d, d_v) for d, d_v in pairs if d in asked]
    return built


def kernel_files(built: list[Instance]) -> list[KernelFile]:
    """The instances by file."""
    files: dict[tuple[str, str, tuple[int, ...]], list[Instance]] = {}
    for instance in built:
        kind = (instance.arch, instance.files)
        groups = [group for group in TOGETHER.get(kind, ()) if instance.head_dim in group]
        files.setdefault((*kind, groups[0] if groups else (instance.head_dim,)), []).append(instance)
    return [KernelFile(tuple(of_file)) for of_file in files.values()]


def write_instances(folder: Path, built: list[Instance]) -> None:
    """Writes the instance files and instances.h; a file that would not change keeps its time stamp."""
    for file in source_files(built):
        write_if_changed(folder / file.name, file.source)
    lines = ["// generated by setup.py: the kernels in this library, see csrc/api/families.cpp", "#pragma once"]
    for direction in DIRECTIONS:
        of_direction = [instance for instance in built if instance.direction == direction]
        prefix = direction.capitalize()
        parameters = f"{prefix}Plan const&, {prefix}Params const&, cudaStream_t"
        lines.append(f"namespace flash_cute {{ struct {prefix}Plan; struct {prefix}Params; }}")
        for namespace in dict.fromkeys(i.namespace for i in of_direction):
            launch = f"template <int, int> cudaError_t launch({parameters});"
            lines.append(f"namespace flash_cute::{namespace} {{ {launch} }}")
        rows = "".join(f" X({i.namespace}, {i.arguments})" for i in of_direction)
        lines.append(f"#define FLASH_CUTE_{direction.upper()}_INSTANCES(X){rows}")
    for kernel in SIDE_KERNELS:
        launch = f"template <int> cudaError_t {kernel.launch}({kernel.parameters});"
        lines.append(f"namespace flash_cute {{ {kernel.declares} namespace {kernel.namespace} {{ {launch} }} }}")
        numbers = "".join(f" X({file.number})" for file in side_files(built))
        lines.append(f"#define FLASH_CUTE_{kernel.name.upper()}_INSTANCES(X){numbers}")
    write_if_changed(folder / "instances.h", "\n".join(lines) + "\n")


def write_if_changed(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)

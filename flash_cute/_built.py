"""What the build made, the compiled library and the compiler's report on it: the folder that holds them, and loading.

The folder is usually this package's own. In a clone after `pip install .` it is that of the installed package, since
from the clone's root Python imports the clone's flash_cute/, beside which nothing was built.
"""

import platform
import re
from importlib.metadata import distributions
from pathlib import Path

import torch

from . import __version__

LIBRARY = "_C.abi3.so"


def folder() -> Path:
    """This package's folder, or the installed package's where only that one has the library."""
    here = Path(__file__).parent
    if (here / LIBRARY).exists():
        return here
    for dist in distributions(name="flash_cute"):
        installed = Path(str(dist.locate_file("flash_cute")))
        if not (installed / LIBRARY).exists():
            continue
        if dist.version != __version__:
            raise ImportError(
                f"{here} is flash_cute {__version__} without a compiled library, and the installed one is "
                f"{dist.version}: run `pip install .` again, or import flash_cute from another folder."
            )
        return installed
    raise ImportError(
        f"flash_cute's compiled library ({LIBRARY}) is neither in {here} nor in an installed flash_cute: "
        "run `pip install .` in the source checkout."
    )


def load(path: Path) -> None:
    """Loads the library, which registers its operators.

    An ImportError has the loader's own words, and what they mean where they are about the system's C or C++ library or
    about torch.
    """
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        said = str(error.__cause__ or error)  # torch 2.11 raises an error of its own from the loader's
        hint = _meaning(said.replace(str(path), ""))  # the path may say "torch" too
        raise ImportError(f"flash_cute's compiled library does not load{hint}. The loader said: {said}") from error


def _meaning(said: str) -> str:
    if newer := re.search(r"version `(GLIBC|GLIBCXX|CXXABI)_([\d.]+)' not found", said):
        library, version = newer.groups()
        needed = f"glibc {version}" if library == "GLIBC" else f"a libstdc++ with {library}_{version}"
        here = " ".join(platform.libc_ver())
        return (
            f": it was built for newer systems, with {needed} or later, and this one has {here}; "
            "build it on this system (`pip install .` in the source checkout) or on an older one"
        )
    if re.search(r"lib(torch|c10)|undefined symbol: (_ZN\w*(at|c10|torch)|aoti_|torch_)", said):
        return f" under torch {torch.__version__}: flash_cute needs torch >= 2.10 on Linux"
    return ""

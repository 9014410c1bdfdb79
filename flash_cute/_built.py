"""The folder that holds what the build made: the compiled library and the compiler's report on it.

Usually this package's own. In a clone after `pip install .` it is that of the installed package, since from the
clone's root Python imports the clone's flash_cute/, beside which nothing was built.
"""

from importlib.metadata import distributions
from pathlib import Path

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

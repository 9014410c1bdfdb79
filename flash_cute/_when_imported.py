"""Runs a registration once another module is imported, so that `import flash_cute` need not import it.

torch.distributed.tensor and torch.utils.flop_counter keep registries that flash_cute's operators belong in. Importing
them takes from a tenth of a second to seconds, and most programs use neither.
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def when_imported(module: str, action: Callable[[], None]) -> None:
    """Call `action` after `module` has been imported: now, or when a program does it.

    The action runs inside somebody else's import, which must not fail for it: where that version of the module takes no
    such registration, there is none.
    """
    if module in sys.modules:
        _run(action)
    else:
        sys.meta_path.insert(0, _Finder(module, action))


def _run(action: Callable[[], None]) -> None:
    with contextlib.suppress(Exception):
        action()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as the other finders do, and has its loader call the action when it is done."""

    def __init__(self, module: str, action: Callable[[], None]) -> None:
        self.module = module
        self.action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.module:
            return None
        with contextlib.suppress(ValueError):  # another thread was first
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.action)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, action: Callable[[], None]) -> None:
        self.loader = loader
        self.action = action

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # From here on the module is as if it had been found without us: its loader is its own.
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        self.loader.exec_module(module)
        _run(self.action)

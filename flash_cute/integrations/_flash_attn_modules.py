"""`import flash_attn` finds flash_cute: the modules that `install()` puts in place, and what it says of the others.

Two things besides modules belong to a package that is installed. Its version is asked of `importlib.metadata`, by
Transformers before it offers `attn_implementation="flash_attention_2"`. And what it does not have is asked for, too: an
ImportError or an AttributeError then says that flash_cute stands here, and how to undo it. Both are a finder's, which
`sys.meta_path` has while the modules are in place.
"""

import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from .. import __version__

VERSION = "2.8.3"  # of flash-attn's interface: programs take it apart at the dots, so that nothing else can stand in it

# What is in place, while it is.
_modules: dict[str, ModuleType] = {}


def install(replace: bool = False) -> None:
    """Make `import flash_attn` and its modules find flash_cute.

    In place are `flash_attn`, its modules `flash_attn_interface`, `bert_padding`, `layers.rotary` and
    `ops.triton.rotary`, the compiled module `flash_attn_2_cuda`, and FlashAttention-3's `flash_attn_interface`. What
    else is asked of them raises ImportError or AttributeError, which say that flash_cute stands here.
    `importlib.metadata` has flash_attn in version 2.8.3, which is also `flash_attn.__version__`; the version of
    flash_cute is `flash_attn.__flash_cute__`.

    Of this process alone, and of imports from now on: a module that has imported the real functions keeps them, and one
    that has looked for flash-attn before has found none. So it is called before what wants flash-attn is imported.

    Args:
        replace: whether to hide a flash-attn or FlashAttention-3 that is installed or has been imported.

    Raises:
        ValueError: one is, and `replace` is False.

    Example:
        >>> install()
        >>> import flash_attn
        >>> flash_attn.flash_attn_func(*(torch.randn(1, 16, 2, 64) for _ in range(3))).shape
        torch.Size([1, 16, 2, 64])
        >>> uninstall()
    """
    if _is_ours("flash_attn"):
        return
    if not replace:
        for name in _ROOTS:
            if _is_installed(name):
                raise ValueError(
                    f"flash_cute: replace: expected True, since another {name} is installed that install() would hide, "
                    "got False"
                )
    uninstall()  # what is left of an earlier one where somebody has removed a module
    modules = _make_modules()
    for name in [x for x in sys.modules if x.partition(".")[0] in _ROOTS]:
        del sys.modules[name]  # a real one's submodules would stay beside ours
    _modules.update(modules)
    sys.modules.update(modules)
    sys.meta_path.insert(0, _FINDER)  # type: ignore[arg-type]


def uninstall() -> None:
    """Undo `install()`: imports from now on find what is installed, if anything is."""
    for name in _modules:
        if _is_ours(name):
            del sys.modules[name]
    _modules.clear()
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)  # type: ignore[arg-type]


_ROOTS = ("flash_attn", "flash_attn_interface", "flash_attn_2_cuda")


def _make_modules() -> dict[str, ModuleType]:
    from . import _bert_padding, _flash_attn_2_cuda, _flash_attn_calls, _rotary, flash_attn, flash_attn_interface

    functions = {name: getattr(flash_attn, name) for name in flash_attn.__all__ if name.startswith("flash_attn_")}
    cuda = _make("flash_attn_2_cuda", _public(_flash_attn_2_cuda))
    inner = {"flash_attn_gpu": cuda, **_public(_flash_attn_calls)}
    modules = [
        cuda,
        _make("flash_attn_interface", _public(flash_attn_interface)),
        _make("flash_attn", functions),
        _make("flash_attn.flash_attn_interface", functions, inner),
        _make("flash_attn.bert_padding", _public(_bert_padding)),
        _make("flash_attn.layers", {}),
        _make("flash_attn.layers.rotary", _public(_rotary)),
        _make("flash_attn.ops", {}),
        _make("flash_attn.ops.triton", {}),
        _make("flash_attn.ops.triton.rotary", {"apply_rotary": _rotary.apply_rotary}),
    ]
    by_name = {module.__name__: module for module in modules}
    for name, module in by_name.items():
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(by_name[parent], last, module)
    by_name["flash_attn"].__version__ = VERSION  # type: ignore[attr-defined]
    return by_name


def _public(module: ModuleType) -> dict[str, Any]:
    return {name: getattr(module, name) for name in module.__all__}


def _make(name: str, public: dict[str, Any], others: dict[str, Any] | None = None) -> ModuleType:
    module = ModuleType(name, f"flash_cute with the interface of {name}. {_UNDO}")
    # find_spec and the module's repr read it. All are packages, so that an import asks our finder for what they lack.
    module.__spec__ = ModuleSpec(name, None, origin=f"flash_cute {__version__}", is_package=True)
    module.__path__ = []
    module.__flash_cute__ = __version__  # type: ignore[attr-defined]
    module.__dict__.update(public, **(others or {}))
    module.__all__ = sorted(public)  # type: ignore[attr-defined]

    def refuse(attribute: str) -> None:
        raise AttributeError(_sentence(f"{name}.{attribute}"), name=attribute, obj=module)

    module.__getattr__ = refuse  # type: ignore[method-assign]
    return module


_UNDO = "flash_cute.integrations.flash_attn.uninstall() takes it away again."


def _sentence(name: str) -> str:
    return (
        f"flash_cute: {name}: flash_cute, which has no such name, stands in the place of flash-attn in this process. "
        f"{_UNDO}"
    )


class _Finder:
    """The finder of a package's metadata, and of what its modules do not have."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name.partition(".")[0] not in _ROOTS or name.count(".") == 0:
            return
        # importlib.util.find_spec asks whether there is such a module, and is to be told that there is none. An import
        # has no use for that answer, and its own sentence would be that there is no such module.
        if sys._getframe(2).f_globals.get("__name__") != "importlib.util":
            # With a name it would be taken, by `from flash_attn import name`, for a name that is no module.
            raise ModuleNotFoundError(_sentence(name))

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        asked = {} if context is None else vars(context)
        if "path" in asked:  # only what is in these folders
            return
        name = asked.get("name")
        if name is None or re.sub(r"[-_.]+", "-", name).lower() == "flash-attn":
            yield _Distribution()

    def invalidate_caches(self) -> None:
        """It has none."""


class _Distribution(importlib.metadata.Distribution):
    """flash-attn as a package that is installed, in the version whose interface this is."""

    def read_text(self, filename: str) -> str | None:
        if filename == "METADATA":
            summary = f"Summary: flash_cute {__version__} with flash-attn's interface"
            return f"Metadata-Version: 2.1\nName: flash_attn\nVersion: {VERSION}\n{summary}\n"
        return "flash_attn\nflash_attn_2_cuda\n" if filename == "top_level.txt" else None

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent / path


_FINDER = _Finder()


def _is_ours(name: str) -> bool:
    return name in _modules and sys.modules.get(name) is _modules[name]


def _is_installed(name: str) -> bool:
    if name in sys.modules:
        return sys.modules[name] is not None
    return importlib.util.find_spec(name) is not None

"""Other projects' interfaces to attention, served by flash_cute: each a module, imported when it is asked for.

* `flash_cute.integrations.flash_attn`: the functions of flash-attn 2.8, and `install()` for `import flash_attn`.
* `flash_cute.integrations.flash_attn_interface`: FlashAttention-3's, whose signatures differ.
* `flash_cute.integrations.sdpa`: `torch.nn.functional.scaled_dot_product_attention` and
  `torch.nn.attention.varlen.varlen_attn`, as functions, and `enable()` for code that calls PyTorch's own.
* `flash_cute.integrations.transformers`: `register()`, an attention implementation of Hugging Face's Transformers.
* `flash_cute.integrations.diffusers`: `register()`, an attention backend of Hugging Face's diffusers.

They are imported by name, or as attributes: `flash_cute.integrations.sdpa.enable()` needs `import flash_cute` alone,
which itself pays for none of them.
"""

from typing import TYPE_CHECKING

_MODULES = ("diffusers", "flash_attn", "flash_attn_interface", "sdpa", "transformers")

if TYPE_CHECKING:
    from . import flash_attn as flash_attn
    from . import flash_attn_interface as flash_attn_interface
    from . import sdpa as sdpa
    from . import transformers as transformers
else:  # type checkers would take any name for an attribute

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return import_module(f".{name}", __name__)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})

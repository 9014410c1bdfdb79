"""What Transformers does where a model is built with, or set to, `attn_implementation="flash_cute"`, or another of our
names.

By "flash" in a name Transformers knows implementations that are given padding as a 2-D mask and packed sequences as
offsets, as we want. It then also looks for flash-attn or for a kernel of that name on the hub, here and there; each of
these places learns the name.
"""

import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import Tensor

from ._transformers_layers import ADAPTED, NAME, NAMES, OPTIONS, adapt
from ._transformers_mask import without_sdpa
from ._transformers_models import NOT_REFUSED, REFUSED, TESTED

PAGED = "paged|"  # before a name, in 5.17: the attention function is given the cache itself
PAGED_NAMES = tuple(name for name in NAMES if "quantize" not in OPTIONS[name])


def teach(transformers: ModuleType) -> None:
    """Change what Transformers does at this name; again does no harm.

    Raises:
        ImportError: a version that has not what is changed.
    """
    # Before 5.4 its mask functions take the positions of the queries in place of lengths.
    masking = getattr(transformers, "masking_utils", None)
    version = transformers.__version__
    if masking is None or "q_length" not in inspect.signature(masking.sdpa_mask).parameters:
        raise ImportError(f"flash_cute: transformers: expected version 5.4 or newer, got {version}")
    flash = import_module("transformers.modeling_flash_attention_utils")
    capturing = import_module("transformers.utils.output_capturing")
    for owner, name, change in (
        (transformers.PreTrainedModel, "_check_and_adjust_attn_implementation", _accepts),
        (transformers.PreTrainedModel, "get_correct_attn_implementation", _accepts_of_parts),
        (flash, "_lazy_imports", _imports),
        (flash, "_flash_attention_forward", _refuses_our_masks),
        (capturing, "install_output_capuring_hook", _refuses_weights),
    ):
        function = getattr(owner, name, None)
        if function is None:
            raise ImportError(
                f"flash_cute: transformers: version {version} chooses an attention implementation in a way that this "
                f"version of flash_cute does not know ({name} is missing)"
            )
        if not hasattr(function, "knows_flash_cute"):
            changed: Any = functools.wraps(function)(change(function))
            changed.knows_flash_cute = True
            setattr(owner, name, changed)


def _accepts(check: Callable[..., str]) -> Callable[..., str]:
    """PreTrainedModel's choice of an implementation, which takes our name as it is.

    It would replace the name where a model lists the implementations that it works with (gpt-oss: those with sinks).
    """

    def accepting(self: Any, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        name = attn_implementation.removeprefix(PAGED) if isinstance(attn_implementation, str) else None
        if name not in NAMES:
            return check(self, attn_implementation, *args, **kwargs)
        _check(self, name)
        return attn_implementation if has_paged_names() and name in PAGED_NAMES else name  # type: ignore[return-value]

    return accepting


def has_paged_names() -> bool:
    """Whether this Transformers gives continuous batching's cache to implementations that are named for it."""
    from transformers import AttentionInterface

    return f"{PAGED}sdpa" in AttentionInterface._global_mapping


def _accepts_of_parts(choose: Callable[..., str]) -> Callable[..., str]:
    """The same choice for the models within a model, where its implementation is set."""

    def accepting(self: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        if (name := (requested_attention or "").removeprefix(PAGED)) in NAMES:
            _check(self, name)
        return choose(self, requested_attention, *args, **kwargs)

    return accepting


def _check(model: Any, name: str) -> None:
    """Raise where a model would not do what our attention function is told, and prepare those that need it."""
    kind = type(model)
    if not model._supports_flash_attn and _architecture(kind) not in TESTED:
        raise ValueError(
            "flash_cute: attn_implementation: expected a model that flash-attention serves too, got "
            f"{kind.__name__}, whose attention has masks, biases or keys of its own, or does not use Transformers' "
            "interface (_supports_flash_attn is False)"
        )
    if _architecture(kind) in REFUSED and kind.__name__ not in NOT_REFUSED:
        raise ValueError(
            f"flash_cute: attn_implementation: expected another model, got {kind.__name__}: "
            f"{REFUSED[_architecture(kind)]}; attn_implementation='sdpa' serves it"
        )
    if getattr(model.config, "alibi", False):
        raise ValueError(
            f"flash_cute: attn_implementation: expected {kind.__name__} without ALiBi, which it adds to its mask, got "
            "config.alibi = True"
        )
    if OPTIONS[name] and _architecture(kind) in ADAPTED:
        raise ValueError(
            f"flash_cute: attn_implementation: expected {NAME!r} for {kind.__name__}, whose layers do not use "
            f"Transformers' attention interface, got {name!r}"
        )
    adapt(kind)
    if not model._supports_sdpa:
        without_sdpa.add(type(model.config))


def _architecture(kind: type) -> str:
    """The folder of Transformers that a model's class is from."""
    for base in kind.__mro__:
        if base.__module__.startswith("transformers.models."):
            return base.__module__.split(".")[2]
    return ""


def _imports(imports: Callable[..., Any]) -> Callable[..., Any]:
    """Transformers' look-up of flash-attn's functions, for callers who ask for those of the implementation in use."""

    def importing(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        name = (implementation or "").removeprefix(PAGED)
        if name not in NAMES:
            return imports(implementation, *args, **kwargs)
        from transformers import modeling_flash_attention_utils as flash

        from . import flash_attn

        functions: list[Callable[..., Any]]
        functions = [flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func, flash_attn.flash_attn_with_kvcache]
        if OPTIONS[name]:  # Transformers looks at the functions' arguments where our attention function is called, too
            functions = [_refusing_calls(function, name) for function in functions]
        return *functions, flash._pad_input, flash._unpad_input

    return importing


def _refusing_calls(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function of flash-attn, which does not know what a name asks for, as it may be looked at and not be called."""

    @functools.wraps(function)
    def refusing(*args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            f"flash_cute: attn_implementation: expected {NAME!r} where flash-attn's own functions are called, got "
            f"{name!r}"
        )

    return refusing


def _refuses_our_masks(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Transformers' function for layers that know flash-attention alone, which would take our masks for padding."""

    def refusing(
        query_states: Tensor, key_states: Tensor, value_states: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        if getattr(attention_mask, "ndim", 2) != 2:
            raise ValueError(
                "flash_cute: attention_mask: expected a padding mask (batch, positions), got "
                f"{tuple(attention_mask.shape)}: this model's layers do not use Transformers' attention interface"
            )
        return forward(query_states, key_states, value_states, attention_mask, *args, **kwargs)

    return refusing


def _refuses_weights(install: Callable[..., None]) -> Callable[..., None]:
    """The installation of hooks that collect what layers return, where `output_attentions` asks for it."""

    def installing(module: Any, key: str, index: int, *args: Any, **kwargs: Any) -> None:
        install(module, key, index, *args, **kwargs)
        if "attentions" in key:
            module.register_forward_hook(functools.partial(_refuse_weights, key, index))

    return installing


def _refuse_weights(key: str, index: int, module: Any, args: Any, output: Any) -> None:
    from transformers.utils import output_capturing

    asked = output_capturing._active_collector.get()
    if asked is None or key not in asked or not isinstance(output, tuple) or output[index] is not None:
        return
    name = getattr(getattr(module, "config", None), "_attn_implementation", None) or NAME
    if name.removeprefix(PAGED) in NAMES:
        raise ValueError(
            "flash_cute: output_attentions: expected False, since the attention weights are never in memory"
        )

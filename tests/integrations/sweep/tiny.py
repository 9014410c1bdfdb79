"""A tiny configuration of any class of configurations: few layers, heads, experts and tokens, small images."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from . import sizes
from .recipes import CONFIGS

MOST_KINDS_OF_LAYERS = 4


def tiny(model_type: str, kind: str = "base", *, window: int = sizes.WINDOW) -> PreTrainedConfig:
    """The tiny configuration of a model type; window: what a field that is a sliding window is set to."""
    config_class = CONFIG_MAPPING[model_type]
    use = {**CONFIGS.get(model_type, {}), **CONFIGS.get(f"{model_type}:{kind}", {})}
    if kind == "causal" and any(field.name == "is_decoder" for field in dataclasses.fields(config_class)):
        use = {"is_decoder": True, **use}
    return _tiny(config_class, model_type, window, use)


def _tiny(config_class: Any, model_type: str, window: int, use: dict[str, Any]) -> PreTrainedConfig:
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        if field.name in use or not field.init:
            continue
        found = _size(field.name, _default(field), str(field.type), window)
        if found is not None:
            arguments[field.name] = found
    for name, part in config_class.sub_configs_defaults.items():
        given = use.get(name, {})
        if given is None or isinstance(given, PreTrainedConfig):
            continue
        part_type = given.get("model_type", part.model_type)
        part_class = part.config_class if hasattr(part.config_class, "sub_configs_defaults") else None
        if part_class is None or part_class.__name__ == "AutoConfig" or part_class is PreTrainedConfig:
            part_class = CONFIG_MAPPING[part_type]
        of_part = {**CONFIGS.get(part_type, {}), **{k: x for k, x in given.items() if k != "model_type"}}
        arguments[name] = _tiny(part_class, part_type, window, of_part)
    known = {field.name for field in dataclasses.fields(config_class)} | set(config_class.sub_configs_defaults)
    arguments |= {k: x for k, x in use.items() if k not in config_class.sub_configs_defaults or x is None}
    if "kv_lora_rank" in known and "num_key_value_heads" not in use:
        arguments["num_key_value_heads"] = sizes.HEADS  # latent attention has keys for every head
    if "layer_types" in known and "layer_types" not in use:
        arguments |= _layers(config_class, arguments)
    _shrink_rope(config_class, arguments)
    return config_class(**arguments)


def _default(field: Any) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None


def _size(name: str, default: Any, kind: str, window: int) -> Any:
    """What the field of a name is set to; None: it keeps its default."""
    if name in sizes.WINDOWS:
        return 2 * window if name == "local_attention" else window
    if name == "use_sliding_window":
        return window < sizes.WIDE_WINDOW or None
    if isinstance(default, bool):
        return None
    if sizes.RANDOM.search(name) and isinstance(default, (int, float)):
        return type(default)(0)
    if sizes.TOKEN.search(name):
        return _token(name, default)
    if sizes.VOCABULARIES.search(name) and name not in sizes.KEPT_VOCABULARIES and default is not None:
        return sizes.VOCABULARY
    size = sizes.SIZES.get(name)
    if size is None or isinstance(default, (list, tuple, dict)):
        is_size = name in ("image_size", "patch_size") and isinstance(default, (list, tuple))
        return [size] * len(default) if is_size else None
    if default is None and name in ("num_key_value_heads", "intermediate_size", "n_inner", "head_dim"):
        return size
    if default is None and not ("int" in kind and name in ("num_kv_heads", "decoder_hidden_size")):
        return None
    if isinstance(default, (int, float)):
        return size
    return None


def _token(name: str, default: Any) -> Any:
    for begin, token in sizes.TOKENS_BY_NAME.items():
        if name.startswith(f"{begin}_"):
            return None if default is None and begin == "decoder_start" else token
    if isinstance(default, int) and not isinstance(default, bool):
        return special(name)
    return None


_special: dict[str, int] = {}


def special(name: str) -> int:
    """A token for each name, the same in all parts of a model."""
    name = re.sub("_index$", "_id", name)
    return _special.setdefault(name, sizes.TOKENS + len(_special) % (sizes.VOCABULARY - sizes.TOKENS))


def _layers(config_class: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """One layer of each kind that the default configuration has, and at least two."""
    whole = config_class()
    kinds = list(dict.fromkeys(getattr(whole, "layer_types", None) or []))[:MOST_KINDS_OF_LAYERS]
    if not kinds:
        return {}
    if kinds == ["full_attention"] and arguments.get("use_sliding_window"):
        kinds = ["sliding_attention", "full_attention"]
    if len(kinds) == 1:
        kinds *= 2
    result: dict[str, Any] = {"layer_types": kinds, "num_hidden_layers": len(kinds)}
    if isinstance(mlps := getattr(whole, "mlp_layer_types", None), list):
        both = list(dict.fromkeys(mlps))
        result["mlp_layer_types"] = (both + both[-1:] * len(kinds))[: len(kinds)]
    return result


def _shrink_rope(config_class: Any, arguments: dict[str, Any]) -> None:
    """Sections of the rotary embedding add up to half of a head's rotated part."""
    try:
        rope = getattr(config_class(), "rope_parameters", None)
    except Exception:  # a configuration that has no defaults
        return
    if isinstance(rope, dict) and (shrunk := _shrunk_rope(rope)) != rope:
        arguments.setdefault("rope_parameters", shrunk)


def _shrunk_rope(rope: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in rope.items():
        if isinstance(value, dict):
            result[name] = _shrunk_rope(value)
        elif name in ("mrope_section", "xdrope_section") and value is not None:
            half = int(sizes.HEAD_DIM * rope.get("partial_rotary_factor", 1.0)) // 2
            result[name] = [half - (len(value) - 1) * (half // len(value)), *[half // len(value)] * (len(value) - 1)]
        elif name in ("long_factor", "short_factor"):
            result[name] = value[: sizes.HEAD_DIM // 2]
        else:
            result[name] = value
    return result

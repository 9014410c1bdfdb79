"""The architectures that the installed Transformers has, and tiny random models of them."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from .arguments import FORWARDS

# By what a model is run as, the mappings of model types to classes, in the order in which they are asked. A type is run
# as each of the first five kinds that it has, else as the first of the others.
KINDS: dict[str, tuple[str, ...]] = {
    "causal": ("MODEL_FOR_CAUSAL_LM",),
    "seq2seq": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",),
    "speech": ("MODEL_FOR_SPEECH_SEQ_2_SEQ",),
    "multimodal": ("MODEL_FOR_MULTIMODAL_LM", "MODEL_FOR_IMAGE_TEXT_TO_TEXT"),
    "masked": ("MODEL_FOR_MASKED_LM",),
    "base": ("MODEL",),
}


@dataclasses.dataclass(frozen=True)
class Model:
    model_type: str
    kind: str
    class_name: str

    @property
    def name(self) -> str:
        return f"{self.model_type}:{self.kind}"

    @property
    def model_class(self) -> Any:
        if self.kind == "part":
            return _class_of_part(self.model_type)
        return getattr(transformers, self.class_name, None)


def models() -> Iterator[Model]:
    """Each architecture once for each of the kinds that it has."""
    names = [n.removesuffix("_MAPPING_NAMES") for n in dir(modeling_auto) if n.endswith("_MAPPING_NAMES")]
    others = [n for n in names if n != "CONFIG"]
    parts: list[str] = []
    for model_type in CONFIG_MAPPING_NAMES:
        seen: set[str] = set()
        for kind, mappings in KINDS.items():
            name = _class_name(model_type, mappings)
            if name is None or name in seen or (kind == "base" and seen):
                continue
            seen.add(name)
            yield Model(model_type, kind, name)
        if not seen:
            name = _class_name(model_type, tuple(others))
            if name is not None:
                yield Model(model_type, "other", name)
            else:
                parts.append(model_type)
    for model_type in parts:
        yield Model(model_type, "part", "")


def _class_of_part(model_type: str) -> Any:
    """The class of a part of other models that no mapping has: the last one that is of its configuration's class."""
    config_class = CONFIG_MAPPING[model_type]
    module_name = config_class.__module__.replace(".configuration_", ".modeling_")
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        return None
    found = None
    for name, x in vars(module).items():
        if not isinstance(x, type) or x.__module__ != module_name or name.endswith("PreTrainedModel"):
            continue
        of_class = vars(x).get("config_class") or inspect.get_annotations(x).get("config")
        if issubclass(x, transformers.PreTrainedModel) and of_class in (config_class, config_class.__name__):
            found = x
    return found


def _class_name(model_type: str, mappings: tuple[str, ...]) -> str | None:
    for mapping in mappings:
        found = getattr(modeling_auto, f"{mapping}_MAPPING_NAMES").get(model_type)
        if found is not None:
            return found if isinstance(found, str) else found[0]
    return None


def build(model: Model, config: Any, implementation: str) -> torch.nn.Module:
    """The model with random weights, the same for each implementation."""
    torch.manual_seed(0)
    config = copy.deepcopy(_of_class(model.model_class, config))
    built = model.model_class._from_config(config, attn_implementation=implementation)
    torch.manual_seed(1)
    for name, parameter in built.named_parameters():
        if parameter.numel() and parameter.is_floating_point():
            _make_heard(name, parameter)
    if forward := FORWARDS.get(model.name) or FORWARDS.get(model.model_type):
        built.forward = forward(built)
    return built.eval()


def _of_class(model_class: Any, config: Any) -> Any:
    """The part of a configuration that a class is for: some mappings name the text model of a multimodal type."""
    wanted = getattr(model_class, "config_class", None)
    if wanted is None or isinstance(config, wanted):
        return config
    parts = [getattr(config, name) for name in config.sub_configs_defaults]
    return next((part for part in parts if isinstance(part, wanted)), config)


@torch.no_grad()
def _make_heard(name: str, parameter: torch.Tensor) -> None:
    """Gates and scales that begin near 0 would hide what attention computes."""
    if parameter.abs().max() < 1e-2 and any(x in name for x in ("gate", "scale", "gamma", "lambda", "sinks")):
        parameter.uniform_(0.3, 0.7)

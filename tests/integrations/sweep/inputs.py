"""Random inputs of any model, by the names of its forward's arguments."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import sizes
from .arguments import ARGUMENTS
from .outcome import NotApplicable
from .sizes import MELS

BATCH, LENGTH, TARGETS = 2, 14, 9  # tokens of an encoder, or of a model with one stack; of a decoder beside an encoder
FRAMES, SAMPLES = 48, 1920  # of audio: columns of a spectrogram, samples
PADDING = {"left": slice(0, 4), "right": slice(-4, None), "inner": slice(5, 8)}


@dataclasses.dataclass
class Inputs:
    """Arguments of a forward; which tokens count, (B, N) bool; which part of the first item's audio is no padding."""

    arguments: dict[str, Any]
    kept: Tensor | None = None
    kept_targets: Tensor | None = None
    part: float = 1.0


class Seed:
    """Added to the seeds of all inputs."""

    value = 0


def rng(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed + 100 * Seed.value)


def on_device_of(model: Any, arguments: Any) -> Any:
    """Arguments with all tensors where the model's parameters are."""
    device = next(model.parameters()).device

    def moved(x: Any) -> Any:
        if hasattr(x, "inference_device"):  # a session
            x.inference_device = x.cache.inference_device = device
        return x.to(device) if isinstance(x, Tensor) else x

    return torch.utils._pytree.tree_map(moved, arguments)


def tokens(batch: int, length: int, seed: int = 3) -> Tensor:
    return torch.randint(3, sizes.TOKENS, (batch, length), generator=rng(seed))


def ones(kind: str, length: int, batch: int = BATCH) -> Tensor:
    """(B, N) int64: 1 where there is a token. The first batch item has padding, the others none."""
    result = torch.ones(batch, length, dtype=torch.long)
    if kind != "none":
        where = PADDING[kind]
        result[0, slice(2, 4) if kind == "inner" and length < LENGTH else where] = 0
    return result


def _field(config: Any, name: str, default: Any) -> Any:
    """A field of a configuration or of the part of it that has one."""
    parts = ("vision_config", "audio_config", "backbone_config", "encoder", "encoder_config", "thinker_config")
    if (found := getattr(config, name, None)) is not None:
        return found
    for part in parts:
        if (of_part := getattr(config, part, None)) is not None and not isinstance(of_part, str):
            found = _field(of_part, name, None)
            if found is not None:
                return found
    return default


def _image(config: Any) -> Tensor:
    size = _field(config, "image_size", sizes.IMAGE)
    height, width = (size, size) if isinstance(size, int) else size
    channels = _field(config, "num_channels", 3)
    frames = () if not hasattr(config, "num_frames") or not hasattr(config, "tubelet_size") else (config.num_frames,)
    return torch.randn(BATCH, *frames, channels, height, width, generator=rng(5))


def _patches(config: Any) -> Tensor:
    """(B * 16, values of a patch)"""
    size, frames = _field(config, "patch_size", sizes.PATCH), _field(config, "temporal_patch_size", 1)
    channels = _field(config, "in_channels", None) or _field(config, "num_channels", 3)
    return torch.randn(BATCH * 16, channels * frames * size * size, generator=rng(5))


def _features(config: Any) -> Tensor:
    mels = _field(config, "num_mel_bins", None) or _field(config, "n_mels", None)
    mels = mels or _field(config, "input_feat_per_channel", sizes.MELS)
    return torch.randn(BATCH, mels, FRAMES, generator=rng(6))


def _values(config: Any) -> Tensor:
    return torch.randn(BATCH, SAMPLES, generator=rng(7))


def _grid(config: Any) -> Tensor:
    """Images of 4 by 4 patches in one row, as the vision parts of Qwen's models take them."""
    return torch.tensor([[1, 4, 4]] * BATCH)


def _series(config: Any) -> Tensor:
    length, channels = _field(config, "context_length", 32), _field(config, "num_input_channels", 1)
    return torch.randn(BATCH, length, channels, generator=rng(13))


BUILDERS: dict[str, Callable[[Any], Any]] = {
    "input_ids": lambda config: tokens(BATCH, LENGTH),
    "decoder_input_ids": lambda config: tokens(BATCH, TARGETS, 4),
    "qformer_input_ids": lambda config: tokens(BATCH, 5, 8),
    "pixel_values": _image,
    "pixel_values_videos": _image,
    "input_features": _features,
    "input_features_mask": lambda config: torch.ones(BATCH, FRAMES, dtype=torch.long),
    "input_values": _values,
    "past_values": _series,
    "bbox": lambda config: torch.tensor([1, 2, 5, 6]).expand(BATCH, LENGTH, 4).clone(),
    "visual_feats": lambda config: torch.randn(BATCH, 5, config.visual_feat_dim, generator=rng(8)),
    "visual_pos": lambda config: torch.rand(BATCH, 5, config.visual_pos_dim, generator=rng(9)),
    "inputs_embeds": lambda config: torch.randn(BATCH, LENGTH, config.hidden_size, generator=rng(10)),
    "hidden_states": lambda config: torch.randn(BATCH, LENGTH, config.hidden_size, generator=rng(10)),
    "grid_thw": _grid,
    "image_grid_thw": _grid,
    "merge_sizes": lambda config: torch.ones(BATCH, dtype=torch.long),
    "target_sizes": lambda config: torch.tensor([[4, 4]] * BATCH),
}
# Other shapes that models have for what is built: channels, frames as rows, several images, patches.
FORMS: dict[str, tuple[Callable[[Tensor, Any], Tensor], ...]] = {
    "input_features": (lambda x, config: x.transpose(1, 2).contiguous(),),
    "input_values": (
        lambda x, config: x[:, None],
        lambda x, config: x[:, : _field(config, "max_length", 64) * MELS].reshape(BATCH, -1, MELS),
    ),
    "pixel_values": (
        lambda x, config: x[:, None].expand(-1, _field(config, "num_frames", 2), *x.shape[1:]).contiguous(),
    ),
    "past_values": (lambda x, config: x[..., 0],),
}
FORMS["pixel_values_videos"] = FORMS["pixel_values"]
PATCHES: tuple[Callable[[Tensor, Any], Tensor], ...] = (
    lambda x, config: torch.cat((x, x.flip(0)), 1),  # two frames
    lambda x, config: x.unflatten(1, (3, sizes.PATCH, -1)),
    lambda x, config: x.unflatten(1, (3, sizes.PATCH, -1))[None],
)
MAIN = ("input_ids", "decoder_input_ids")
MODALITIES = ("pixel_values", "pixel_values_videos", "input_features", "input_values", "past_values")
GRIDS = ("grid_thw", "image_grid_thw")
ROWS = ("input_ids", "inputs_embeds", "noise_embeds")


class Feed:
    """What one model is given in every mode; chosen as the first of a few candidates that eager takes."""

    def __init__(self, name: str, model: Any) -> None:
        self.config = model.config
        self.signature = inspect.signature(model.forward).parameters
        self.images: Any = None  # what images.py finds
        self.form: Callable[[Tensor, Any], Tensor] | None = None  # one of FORMS or PATCHES
        self.recipe = ARGUMENTS.get(name) or ARGUMENTS.get(name.split(":")[0])
        self.names = self._choose(model)

    def _choose(self, model: Any) -> list[str]:
        if self.recipe is not None:
            try:
                with torch.no_grad():
                    model(**on_device_of(model, self.recipe(self.config)))
            except Exception as error:
                raise NotApplicable(f"{type(error).__name__}: {error}") from error
            return [n for n in self.recipe(self.config) if n in BUILDERS]
        known = [n for n in self.signature if n in BUILDERS]
        required = [n for n in known if self.signature[n].default is inspect.Parameter.empty]
        text = [n for n in known if n in MAIN]
        modality = [n for n in known if n in MODALITIES][:1]
        candidates = [text + required, text + required + modality, modality + required]
        candidates += [[n for n in known if n != "inputs_embeds"], ["inputs_embeds"], ["hidden_states"]]
        candidates += [[*modality, *(n for n in known if n in GRIDS), *required], ["hidden_states", "grid_thw"]]
        failures = []
        for names in dict.fromkeys(tuple(dict.fromkeys(c)) for c in candidates if c):
            if any(n not in known for n in names):
                continue
            self.names = list(names)
            forms = PATCHES if set(GRIDS) & set(names) else next((FORMS[n] for n in names if n in FORMS), ())
            for self.form in (None, *forms):
                try:
                    with torch.no_grad():
                        model(**on_device_of(model, self.make().arguments))
                except Exception as error:
                    failures.append(f"{', '.join(names)}: {type(error).__name__}: {error}")
                else:
                    return self.names
        raise NotApplicable("no inputs found: " + " | ".join(x[:200] for x in failures))

    def make(self, pad: str = "none", *, equal: bool = False) -> Inputs:
        """Inputs with padding of a kind; equal: as many tokens of the target as of the source."""
        if self.recipe is not None:
            result = self.recipe(self.config)
        else:
            result = {name: BUILDERS[name](self.config) for name in self.names}
            main = next((n for n in self.names if n in FORMS or n == "hidden_states"), None)
            if main is not None and set(GRIDS) & set(self.names):
                result[main] = _patches(self.config)
            if main is not None and self.form is not None:
                result[main] = self.form(result[main], self.config)
        made = Inputs(result)
        if "decoder_input_ids" in result and equal:
            result["decoder_input_ids"] = tokens(BATCH, result["input_ids"].shape[1], 4)
        if pad != "none":
            self._pad(made, pad)
        return made

    def _pad(self, made: Inputs, pad: str) -> None:
        given = made.arguments
        if "attention_mask" not in self.signature and "input_features_mask" in given and pad == "right":
            mask = given["input_features_mask"]
            mask[0, -mask.shape[1] // 4 :] = 0
            made.part = 0.75
            return
        if "attention_mask" not in self.signature:
            raise NotApplicable("the model takes no attention_mask")
        if "attention_mask" in given:
            mask = ones(pad, given["attention_mask"].shape[1])
        elif "input_ids" in given:
            mask = ones(pad, given["input_ids"].shape[1])
        elif "inputs_embeds" in given:
            mask = ones(pad, given["inputs_embeds"].shape[1])
        elif "input_features" in given and pad == "right":
            mask = torch.ones(BATCH, FRAMES, dtype=torch.long)
            mask[0, -FRAMES // 4 :] = 0
            made.part = 0.75
        elif "input_values" in given and pad == "right":
            mask = torch.ones(BATCH, given["input_values"].shape[-1], dtype=torch.long)
            mask[0, -SAMPLES // 4 :] = 0
            made.part = 0.75
        else:
            raise NotApplicable("the inputs have no padding of this kind")
        given["attention_mask"] = mask
        rows = next((given[n].shape[1] for n in ROWS if n in given), None)
        if rows is not None:
            made.kept = mask[:, -rows:].bool()  # the mask may be of keys before them too
        if "decoder_input_ids" in given and "decoder_attention_mask" in self.signature:
            of_targets = ones(pad, given["decoder_input_ids"].shape[1]).flip(0)
            given["decoder_attention_mask"] = of_targets
            made.kept_targets = of_targets.bool()

    @property
    def is_text(self) -> bool:
        return "input_ids" in self.names and "decoder_input_ids" not in self.names

    @property
    def is_seq2seq(self) -> bool:
        return "decoder_input_ids" in self.names

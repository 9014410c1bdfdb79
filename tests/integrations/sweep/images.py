"""Images within text: what a multimodal model takes, found by trying."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .inputs import BATCH, Inputs, _field, _image, _patches, on_device_of, ones, tokens
from .outcome import NotApplicable

FIRST = 6  # column of the first token of an image: behind left padding
MOST_TOKENS = 100
MISMATCH = re.compile(r"tokens:?\s*(\d+).{0,40}?features:?\s*(?:torch\.Size\(\[)?(\d+)", re.DOTALL)
TYPES = ("token_type_ids", "mm_token_type_ids")


class Images:
    """Text with one image in each batch item."""

    def __init__(self, model: Any, signature: Any) -> None:
        self.config, self.signature = model.config, signature
        self.token = _field(self.config, "image_token_id", None)
        if self.token is None:
            self.token = _field(self.config, "image_token_index", None)
        if self.token is None or "pixel_values" not in signature or "input_ids" not in signature:
            raise NotApplicable("the model takes no images within text")
        self.count = 1
        failures = []
        for form, extra in self._forms():
            self.form, self.extra = form, extra
            try:
                self._fit(model)
            except Exception as error:
                failures.append(f"{self.form}: {type(error).__name__}: {error}"[:150])
            else:
                return
        raise NotApplicable("no inputs with images found: " + " | ".join(failures))

    def _forms(self) -> Iterator[tuple[str, dict[str, Any]]]:
        grids = {"image_grid_thw": torch.tensor([[1, 4, 4]] * BATCH)}
        if "image_grid_thw" in self.signature:
            yield "patches", grids
            yield "images", grids
        size = _field(self.config, "image_size", 32)
        size = size if isinstance(size, int) else size[0]
        sizes = torch.tensor([[size, size]] * BATCH)
        for form, given in itertools.product(("images", "lists of images"), ({}, {"image_sizes": sizes})):
            if all(name in self.signature for name in given):
                yield form, given

    def _pixels(self) -> Tensor:
        if self.form == "patches":
            return _patches(self.config)
        return _image(self.config) if self.form == "images" else _image(self.config)[:, None]

    def _fit(self, model: Any) -> None:
        """Runs the model until there are as many tokens as the image has features."""
        self.count = 1
        for _ in range(3):
            try:
                with torch.no_grad():
                    model(**on_device_of(model, self.make().arguments))
                return
            except (ValueError, RuntimeError) as error:
                found = MISMATCH.search(str(error))
                if found is None or int(found[1]) == int(found[2]):
                    raise
                features = int(found[2])
                if features // BATCH > MOST_TOKENS:  # some count all values
                    features //= self.config.get_text_config().hidden_size
                if features % BATCH or features // BATCH > MOST_TOKENS:
                    raise
                self.count = features // BATCH
        raise NotApplicable("tokens and features never match")

    def make(self, pad: str = "none") -> Inputs:
        ids = tokens(BATCH, FIRST + self.count + 5)
        is_image = torch.zeros_like(ids)
        is_image[:, FIRST : FIRST + self.count] = 1
        given: dict[str, Any] = {"input_ids": ids.masked_fill(is_image.bool(), self.token), **self.extra}
        given["pixel_values"] = self._pixels()
        given |= {name: is_image for name in TYPES if name in self.signature}
        made = Inputs(given)
        if pad != "none":
            mask = ones(pad, ids.shape[1])
            given["attention_mask"] = mask
            made.kept = mask.bool()
        return made

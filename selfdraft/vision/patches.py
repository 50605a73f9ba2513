"""From pixels to the patches that a tower takes, as a checkpoint's preprocessor_config.json says. Knows numpy alone.

Sizes are those of transformers' Qwen2VLImageProcessor, which Qwen3.5 checkpoints name: a picture is scaled to whole
merged patches, within a least and a most number of pixels; its shape is kept as far as that allows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError, InvalidRequest

__all__ = ["Grid", "Patching"]

_FILES = ("preprocessor_config.json", "processor_config.json")
_BICUBIC = 3  # as Pillow numbers its filters
_LONGEST = 200  # times as long as it is wide: beyond, transformers refuses too


@dataclass(frozen=True)
class Grid:
    """A picture in patches.

    Attributes:
        height, width: in patches, each a multiple of `merge`.
        merge: how many patches a side become one token.
    """

    height: int
    width: int
    merge: int

    @property
    def patches(self) -> int:
        """How many patches."""
        return self.height * self.width

    @property
    def rows(self) -> int:
        """Of tokens."""
        return self.height // self.merge

    @property
    def columns(self) -> int:
        """Of tokens."""
        return self.width // self.merge

    @property
    def tokens(self) -> int:
        """How many tokens."""
        return self.rows * self.columns


@dataclass(frozen=True)
class Patching:
    """How pictures are cut up.

    Attributes:
        patch: pixels a side. merge: patches a side of a token. frames: how often a still picture is repeated.
        least, most: pixels of a picture, after scaling.
        rescale: what a pixel is multiplied with. mean, deviation: of each channel, to normalise by.
    """

    patch: int
    merge: int
    frames: int
    least: int
    most: int
    rescale: float
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    @classmethod
    def from_folder(cls, folder: Path) -> Patching:
        """Read a checkpoint's settings.

        Raises:
            CheckpointError: there are none, or others than are supported, with the field and its value.
        """
        for name in _FILES:
            if (folder / name).exists():
                try:
                    read = json.loads((folder / name).read_text(encoding="utf-8"))
                    return cls._of(read.get("image_processor", read))
                except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
                    said = f"no {error}" if isinstance(error, KeyError) else str(error)
                    raise CheckpointError(f"{name} does not say how pictures are cut up: {said}") from error
        raise CheckpointError(f"there is no {_FILES[0]}, which says how pictures are cut up: fetch it")

    @classmethod
    def _of(cls, settings: Mapping[str, Any]) -> Patching:
        sizes = settings.get("size") or {}
        whole = {
            "patch": settings["patch_size"],
            "merge": settings["merge_size"],
            "frames": settings["temporal_patch_size"],
            "least": settings.get("min_pixels") or sizes["shortest_edge"],
            "most": settings.get("max_pixels") or sizes["longest_edge"],
        }
        for name, value in whole.items():
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} is {value!r}, not a positive whole number")
        if whole["least"] > whole["most"]:
            raise ValueError(f"the least number of pixels, {whole['least']}, is over the most, {whole['most']}")
        for name in ("do_resize", "do_rescale", "do_normalize"):
            if not settings.get(name, True):
                raise ValueError(f"{name} is off, which is not supported")
        if settings.get("resample", _BICUBIC) != _BICUBIC:
            raise ValueError(f"resample is {settings['resample']!r}, and {_BICUBIC} (bicubic) alone is supported")
        mean, deviation = (tuple(map(float, settings[f"image_{name}"])) for name in ("mean", "std"))
        if len(mean) != 3 or len(deviation) != 3 or not all(deviation):
            raise ValueError(f"image_mean {mean} and image_std {deviation} must each have 3 values, none of them 0")
        return cls(**whole, rescale=float(settings.get("rescale_factor", 1 / 255)), mean=mean, deviation=deviation)

    def grid(self, width: int, height: int) -> Grid:
        """The patches of a picture of so many pixels.

        Raises:
            InvalidRequest: it is a strip.
        """
        if max(height, width) > _LONGEST * min(height, width):
            raise InvalidRequest(
                f"the image is {width}x{height} pixels: one side may be at most {_LONGEST} times the other; crop it",
                param="image",
            )
        unit = self.patch * self.merge
        sides = [round(side / unit) * unit for side in (height, width)]
        if math.prod(sides) > self.most:
            by = math.sqrt(height * width / self.most)
            sides = [max(unit, math.floor(side / by / unit) * unit) for side in (height, width)]
        elif math.prod(sides) < self.least:
            by = math.sqrt(self.least / (height * width))
            sides = [math.ceil(side * by / unit) * unit for side in (height, width)]
        return Grid(sides[0] // self.patch, sides[1] // self.patch, self.merge)

    def patches(self, rgb: NDArray[np.uint8], grid: Grid) -> NDArray[np.float32]:
        """The pixels of a picture, float32 [patches, 3 x frames x patch x patch].

        Patches of one token follow each other, tokens go row by row.

        Args:
            rgb: [H, W, 3]. grid: of its size.
        """
        from PIL import Image

        size = grid.width * self.patch, grid.height * self.patch
        scaled = np.asarray(Image.fromarray(rgb).resize(size, resample=Image.Resampling.BICUBIC))
        mean, deviation = np.array(self.mean, np.float32), np.array(self.deviation, np.float32)
        pixels = (scaled.astype(np.float32) * np.float32(self.rescale) - mean) / deviation
        blocks = pixels.reshape(grid.rows, self.merge, self.patch, grid.columns, self.merge, self.patch, 3)
        still = blocks.transpose(0, 3, 1, 4, 6, 2, 5)[..., None, :, :]  # channel, frame, then a patch's own pixels
        return np.repeat(still, self.frames, axis=5).reshape(grid.patches, -1)

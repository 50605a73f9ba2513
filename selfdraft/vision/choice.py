"""Whether a model reads images: by its checkpoint, what is installed, and what its user wants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from ..errors import CheckpointError
from ..models.checkpoint import Checkpoint
from ..text import Tokenizer
from .pictures import PicturePrompts
from .tower import NONE, Tower, TowerReport, inspect_tower, load_tower

__all__ = ["VisionChoice", "VisionSetting", "choose_vision", "tower_report"]

VisionSetting = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class VisionChoice:
    """What was decided.

    Attributes:
        there: whether the checkpoint has a tower.
        reason: why no image can be read; empty when they can.
        token, token_id: what a template writes for an image.
    """

    there: bool
    reason: str = ""
    token: str = ""
    token_id: int = 0

    @property
    def described(self) -> str:
        """In a few words."""
        return "loaded" if not self.reason else f"not loaded: {self.reason}" if self.there else "none"

    @property
    def notes(self) -> list[str]:
        """What a user should know."""
        return [f"images cannot be read: {self.reason}"] if self.there and self.reason else []

    def load(self, checkpoint: Checkpoint, dtype: mx.Dtype | None) -> Tower | None:
        """The tower, if images are to be read."""
        return None if self.reason else load_tower(checkpoint, dtype)

    def prompts(self, tower: Tower | None, vocab_size: int) -> PicturePrompts | str:
        """For prompts with images, or why there can be none."""
        return PicturePrompts(tower, self.token, self.token_id, vocab_size) if tower else self.reason


def choose_vision(checkpoint: Checkpoint, setting: VisionSetting, tokenizer: Tokenizer) -> VisionChoice:
    """Decide.

    Raises:
        CheckpointError: images must be read, and cannot be.
    """
    report = tower_report(checkpoint, setting)
    number = checkpoint.config.get("image_token_id")
    token, token_id = next(((text, known) for text, known in tokenizer.added.items() if known == number), ("", 0))
    reason = report.reason
    if not reason and not token:
        reason = f"the tokenizer has no token {number!r}, which config.json names as image_token_id"
    if reason and setting == "on":
        raise CheckpointError(f"{checkpoint.folder}: vision is on, and images cannot be read: {reason}")
    return VisionChoice(report.tensors > 0, reason, token, token_id)


def tower_report(checkpoint: Checkpoint, setting: VisionSetting) -> TowerReport:
    """What a checkpoint has of a tower, and whether it is used."""
    if setting != "off":
        return inspect_tower(checkpoint)
    tensors = checkpoint.tower()
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    return TowerReport(len(tensors), nbytes, "vision is off" if tensors else NONE)

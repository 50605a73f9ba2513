"""Pictures for a model that has a vision tower: from pixels to embeddings, and their places in a prompt.

`choice.py` says whether images are read, `tower.py` what a checkpoint has of a tower, and loads it; `patches.py` cuts
pictures up as the tower takes them, `positions.py` knows rotary positions, `prompt.py` is what one prompt hands to the
engine, `pictures.py` what templates and tokenizers see. Knows nothing of image files, templates or HTTP.
"""

from .choice import VisionChoice, VisionSetting, choose_vision, tower_report
from .pictures import PicturePrompts
from .prompt import PictureInputs
from .tower import Tower, TowerReport, inspect_tower, load_tower

__all__ = [
    "PictureInputs",
    "PicturePrompts",
    "Tower",
    "TowerReport",
    "VisionChoice",
    "VisionSetting",
    "choose_vision",
    "inspect_tower",
    "load_tower",
    "tower_report",
]

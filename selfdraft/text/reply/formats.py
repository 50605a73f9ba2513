"""The call syntaxes we read, and which of them a chat template teaches. Knows templates as source text only."""

from __future__ import annotations

from .call import ToolFormat
from .deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from .glm import GLM
from .hermes import HERMES
from .qwen_xml import MIMO, QWEN_XML

__all__ = ["FORMATS", "THINK", "THINK_END", "detect_format", "markers"]

THINK, THINK_END = "<think>", "</think>"

# In the order they are tried. HERMES is last: its one marker is in the templates of its neighbours too.
FORMATS: tuple[ToolFormat, ...] = (DEEPSEEK_V3, DEEPSEEK_V31, GLM, QWEN_XML, MIMO, HERMES)


def detect_format(template_source: str) -> ToolFormat | None:
    """The syntax in which this chat template renders past calls, hence writes new ones; None: none of ours."""
    return next((format for format in FORMATS if format.written_by(template_source)), None)


def markers(format: ToolFormat | None) -> frozenset[str]:
    """Strings that must survive detokenisation even where the tokenizer lists them as special tokens."""
    return frozenset({THINK, THINK_END}) | (format.markers if format else frozenset())

"""What a package is made like: bits by path, the head, the dtype of what stays dense. Knows no tensors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import mlx.core as mx

from ..errors import InvalidRequest
from ..settings import LEAST_IDS

__all__ = ["BITS", "DENSE", "NAMED", "Recipe"]

BITS = (3, 4, 5, 6, 8)  # of MLX's affine layers
DENSE = 16  # stands for: not quantised
GROUPS = (32, 64, 128)

Rules = tuple[tuple[str, int], ...]
Head = Literal["auto", "dense", "4bit", "4bit-naive"]

_RULE = re.compile(r"(?P<pattern>[\w.*?\[\]-]+)=(?P<bits>\d+)")

# What few bits hurt most: the embedding, the output projection, and what writes into the residual stream at both ends.
_SENSITIVE = (
    ("model.embed_tokens", 8),
    ("lm_head", 8),
    ("*.v_proj", 6),
    ("*.down_proj", 6),
    ("*.in_proj_qkv", 6),
)


@dataclass(frozen=True)
class Recipe:
    """How to quantise.

    Attributes:
        bits: of a layer of the trunk, 16 for dense ones. Layers that are stored quantised stay as they are.
        group_size: of quantised layers.
        usual: (pattern of a layer's path, least bits), of a named recipe; they need not fit any layer.
        rules: (pattern, bits) that win over those; the last that fits decides. Routers, and layers that the group size
            does not divide, stay dense.
        head: "dense", "4bit" with codes calibrated on text, "4bit-naive" rounded, or "auto": what drafts best.
        dtype: of what is not quantised, and of scales; "auto" for float16 where the source has that, else bfloat16.
        draft_vocabulary: see `Settings.draft_vocabulary`; 0 for none.
        head_order: whether the head's projection takes [embedding; hidden], or [hidden; embedding] and is turned round.
        head_norms: how the head's norms are stored; "auto" is by their values.
    """

    bits: int = 4
    group_size: int = 64
    usual: Rules = ()
    rules: Rules = ()
    head: Head = "auto"
    dtype: Literal["auto", "bfloat16", "float16"] = "auto"
    draft_vocabulary: int = 0
    head_order: Literal["embedding-first", "hidden-first"] = "embedding-first"
    head_norms: Literal["auto", "zero-centred", "one-plus"] = "auto"

    def __post_init__(self) -> None:
        for param, numbers in (("bits", [self.bits]), ("set", [bits for _, bits in self.rules])):
            if wrong := [bits for bits in numbers if bits not in (*BITS, DENSE)]:
                raise InvalidRequest(
                    f"{wrong[0]} bits are not possible; possible: {', '.join(map(str, BITS))}, or {DENSE} for dense",
                    param=param,
                )
        if self.group_size not in GROUPS:
            raise InvalidRequest(f"group size {self.group_size} is not possible; possible: 32, 64, 128", param="group")
        if self.draft_vocabulary != 0 and self.draft_vocabulary < LEAST_IDS:
            raise InvalidRequest(
                f"a draft vocabulary of {self.draft_vocabulary} is not possible: 0 for all tokens, or {LEAST_IDS} ids "
                "and more",
                param="draft_vocabulary",
            )

    @staticmethod
    def named(name: str, **fields: Any) -> Recipe:
        """A recipe by name, with fields of its own in place of some.

        Raises:
            InvalidRequest: there is none of that name.
        """
        if name not in NAMED:
            raise InvalidRequest(f"no recipe {name!r}; there is {', '.join(NAMED)}", param="recipe")
        return Recipe(**{**NAMED[name], **fields})

    @staticmethod
    def parse_rules(rules: Sequence[str]) -> Rules:
        """From "PATTERN=BITS" texts.

        Raises:
            InvalidRequest: one is no such text.
        """
        found = []
        for rule in rules:
            match = _RULE.fullmatch(rule)
            if match is None:
                raise InvalidRequest(f"{rule!r} is no rule; write PATTERN=BITS, as in 'lm_head=8'", param="set")
            found.append((match["pattern"], int(match["bits"])))
        return tuple(found)

    def bits_of(self, path: str) -> int:
        """Of a layer of the trunk."""
        found = max([self.bits, *(bits for pattern, bits in self.usual if fnmatchcase(path, pattern))])
        for pattern, bits in self.rules:
            if fnmatchcase(path, pattern):
                found = bits
        return found

    def settled(self, stored: mx.Dtype) -> Recipe:
        """With a dtype in place of "auto", for a source that is stored in some."""
        if self.dtype != "auto":
            return self
        return replace(self, dtype="float16" if stored == mx.float16 else "bfloat16")

    def describe(self) -> dict[str, Any]:
        """For `selfdraft.json`."""
        return {
            "bits": self.bits,
            "group_size": self.group_size,
            "usual": [f"{pattern}={bits}" for pattern, bits in self.usual],
            "rules": [f"{pattern}={bits}" for pattern, bits in self.rules],
            "head": self.head,
            "dtype": self.dtype,
            "draft_vocabulary": self.draft_vocabulary,
            "head_order": self.head_order,
            "head_norms": self.head_norms,
        }


NAMED: dict[str, dict[str, Any]] = {
    "4bit": {"bits": 4, "usual": (("model.embed_tokens", 8), ("lm_head", 8))},
    "8bit": {"bits": 8},
    "mixed": {"bits": 4, "usual": _SENSITIVE},
    "dense": {"bits": DENSE},
}

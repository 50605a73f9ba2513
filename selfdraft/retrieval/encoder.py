"""An encoder of mlx-embeddings with its weights, and what a folder says of it before they are read.

Tensors must be the module's, each by name and shape, as for chat models; of a head on top only what was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..errors import CheckpointError, OutOfMemoryBudget, SelfdraftError
from ..memory import free_memory, gibibytes
from ..models.fit import describe_misfits
from ..models.folder import read_json, weight_files
from ..models.tensor_header import entries
from .families import Family, family_of
from .tokens import Tokens

__all__ = ["Encoder", "Plan", "check_installed", "plan", "reads_texts"]

# Of other uses of the same trunk: predictions of masked words, of the next sentence.
_FOREIGN = ("cls.", "lm_head.", "decoder.", "head.", "classifier.", "score.")
_SCORES = 12  # bytes of a score of attention: in fp32, before the softmax, behind it and masked
_UNUSED = ("position_ids", "inv_freq")  # buffers that some files carry


@dataclass(frozen=True)
class Plan:
    """What a folder holds, known before its weights are read.

    Attributes:
        config: config.json.
        files: with the weights.
        dtype: in which they are computed.
        nbytes: that the weights will take.
        width: of a hidden state.
        heads: of attention.
        positions: that a text can have.
    """

    folder: Path
    family: Family
    config: Mapping[str, Any]
    files: tuple[Path, ...]
    dtype: mx.Dtype
    nbytes: int
    width: int
    heads: int
    positions: int

    @property
    def architecture(self) -> str:
        """The class that the weights were saved from; "" if the file does not say."""
        named = self.config.get("architectures")
        return str(named[0]) if isinstance(named, list) and named else ""


def check_installed() -> None:
    """Refuse to go on without mlx-embeddings.

    Raises:
        SelfdraftError: it is not installed.
    """
    if find_spec("mlx_embeddings") is None:
        raise SelfdraftError(
            "embeddings and reranking need mlx-embeddings, which is not installed: pip install 'selfdraft[retrieval]'"
        )


def plan(folder: Path) -> Plan:
    """Look at a model folder.

    Raises:
        CheckpointError: it cannot be used, with what is wrong in it.
    """
    config = read_json(folder / "config.json")
    family = family_of(config)
    files = tuple(weight_files(folder)[0])
    width, heads, positions = (
        _whole(config, key) for key in ("hidden_size", "num_attention_heads", "max_position_embeddings")
    )
    stored = [entry for path in files for entry in entries(path)]
    dtype = _dtype({entry.dtype for entry in stored})
    size = {"F32": 4, "F16": 2, "BF16": 2}
    nbytes = sum(
        entry.nbytes * dtype.size // size[entry.dtype] if entry.dtype in size else entry.nbytes for entry in stored
    )
    return Plan(folder, family, config, files, dtype, nbytes, width, heads, positions - family.reserved)


def reads_texts(folder: Path) -> bool:
    """Whether a folder is of a family that embeds or ranks, as far as its config.json says."""
    try:
        family_of(read_json(folder / "config.json"))
    except CheckpointError:
        return False
    return True


def _dtype(stored: set[str]) -> mx.Dtype:
    """What is computed in: bf16 where it is stored and the device has it, else fp32.

    fp16 is none of them: masks of -1e9 are infinite there, and rows of nothing else become NaN.
    """
    return mx.bfloat16 if "BF16" in stored and mx.default_device() == mx.gpu else mx.float32


def _whole(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise CheckpointError(f"config.json: {key} must be a whole number above 0, not {value!r}")
    return value


class Encoder:
    """An encoder in memory.

    Attributes:
        plan: what it was made of.
        head: what was read on top of it; None for nothing.
    """

    def __init__(
        self, planned: Plan, head: nn.Module | None = None, head_names: Mapping[str, str] | None = None
    ) -> None:
        """Read the weights.

        Args:
            head: a module on top.
            head_names: its parameters by their names in the files.

        Raises:
            CheckpointError: tensors are missing, surplus or of the wrong shape, each by name.
            SelfdraftError: mlx-embeddings is not installed.
        """
        check_installed()
        self.plan = planned
        self.head = head
        config = dict(planned.config)
        self._module = planned.family.build(config)
        tensors: dict[str, Any] = {}
        for path in planned.files:
            tensors |= mx.load(str(path))  # type: ignore[arg-type]
        tensors = {
            name: tensor.astype(planned.dtype) if mx.issubdtype(tensor.dtype, mx.floating) else tensor
            for name, tensor in tensors.items()
            if not name.endswith(_UNUSED)
        }
        names = head_names or {}
        if head is not None:
            self._fill(head, {names[name]: tensor for name, tensor in tensors.items() if name in names})
        self._fill(self._module, self._trunk(tensors))

    def _trunk(self, tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """The encoder's own tensors, by the names that its module has."""
        prefix = self.plan.family.prefix
        own = {
            name.removeprefix(prefix) if prefix else name: tensor
            for name, tensor in tensors.items()
            if not name.startswith(_FOREIGN)
        }
        found: dict[str, mx.array] = self._module.sanitize(own)
        pooler = getattr(self._module, "pooler", None)
        if pooler is not None and not any(name.startswith("pooler.") for name in found):
            self._module.pooler = _no_pooler  # nobody reads its output
        return found

    def _fill(self, module: nn.Module, tensors: Mapping[str, mx.array]) -> None:
        if problems := describe_misfits(module, tensors):
            raise CheckpointError(f"{self.plan.folder}: the weights do not fit config.json: {problems}")
        module.load_weights(list(tensors.items()), strict=True)
        module.eval()
        mx.eval(module.parameters())

    @property
    def embedding(self) -> Any:
        """The layer of token embeddings, for families whose output projection it is."""
        return self._module.model.embed_tokens

    def hidden(self, batch: list[Tokens], padding: int) -> tuple[mx.array, mx.array]:
        """One forward.

        Args:
            batch: tokens of each text, none of them empty.
            padding: id to fill up with, on the right.

        Returns:
            The last hidden states, [rows, length, width], and the mask, fp32 [rows, length].

        Raises:
            OutOfMemoryBudget: attention would need more memory than is free.
        """
        length = max(len(tokens) for tokens in batch)
        self._check_room(len(batch), length)
        ids = np.full((len(batch), length), padding, np.int32)
        segments, mask = np.zeros_like(ids), np.zeros(ids.shape, np.float32)
        for row, tokens in enumerate(batch):
            ids[row, : len(tokens)] = tokens.ids
            segments[row, : len(tokens)] = tokens.segments
            mask[row, : len(tokens)] = 1
        given = mx.array(mask)
        states = self.plan.family.hidden(self._module, mx.array(ids), given.astype(self.plan.dtype), mx.array(segments))
        return states, given

    def _check_room(self, rows: int, length: int) -> None:
        needed = _SCORES * self.plan.heads * rows * length**2
        if needed > (free := free_memory()):
            raise OutOfMemoryBudget(
                f"a text of {length} tokens needs {gibibytes(needed)} for attention, and {gibibytes(free)} are free: "
                "split it, or close other programs",
                later=True,
            )


def _no_pooler(states: mx.array) -> None:
    return None

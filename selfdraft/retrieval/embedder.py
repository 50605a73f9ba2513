"""Texts to vectors. Knows the steps from tokens to a vector; nothing of requests."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..errors import CheckpointError, InvalidRequest, NonFiniteOutput
from ..models.folder import read_json
from .batches import batches
from .encoder import Encoder, Plan
from .modules import read_steps
from .pooling import normalised
from .tokens import Texts, Tokens, most_tokens

__all__ = ["Embedder", "Vectors", "refuse_generators"]

_GENERATES = ("ForCausalLM", "ForConditionalGeneration")

Vectors = npt.NDArray[np.float32]


class Embedder:
    """An embedding model in memory.

    Attributes:
        width: of a vector.
        most_tokens: that a text may have.

    Raises:
        CheckpointError: the folder holds no embedding model that can be used.
    """

    def __init__(self, planned: Plan) -> None:
        refuse_generators(planned)
        self._steps = read_steps(planned.folder, planned.family.pooling)
        self._prompts, self._default = _prompts(planned.folder)
        self._texts = Texts(planned.folder, most_tokens(planned.folder, planned.positions))
        self._encoder = Encoder(planned)
        self.most_tokens = self._texts.most
        self.width: int = self._pooled([Tokens([0], [0])]).shape[1]  # of its shape; nothing is computed

    def read(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        truncate: bool = False,
        prompt: str | None = None,
        where: str = "input",
    ) -> list[Tokens]:
        """The tokens of texts.

        Args:
            inputs: texts, or ids of this model's tokens with all that belongs around a text.
            truncate: cut off the end of what is too long.
            prompt: name of a prompt in config_sentence_transformers.json, set before texts; by default the one which
                that file says, if any.
            where: what the caller calls the inputs.

        Raises:
            InvalidRequest, ContextOverflow: an input that cannot be read; a prompt that the model does not have.
        """
        before = self._prompt(prompt)
        return [
            self._texts.text(before + each, truncate=truncate, where=f"{where}[{index}]")
            if isinstance(each, str)
            else self._texts.ids(each, truncate=truncate, where=f"{where}[{index}]")
            for index, each in enumerate(inputs)
        ]

    def embed(
        self, tokens: Sequence[Tokens], *, dimensions: int | None = None, where: str = "input"
    ) -> Generator[None, None, Vectors]:
        """Vectors of texts, one forward at each step of the generator.

        Args:
            tokens: what `read` gave.
            dimensions: keep so many leading numbers of each vector, and make it length 1 again.

        Returns:
            fp32 [texts, dimensions or width].

        Raises:
            InvalidRequest: `dimensions` is above the width. NonFiniteOutput: the model made NaN or infinity.
        """
        if dimensions is not None and not 0 < dimensions <= self.width:
            raise InvalidRequest(
                f"dimensions {dimensions} is not possible: this model has {self.width}", param="dimensions"
            )
        vectors = np.zeros((len(tokens), dimensions or self.width), np.float32)
        for chosen in batches([len(each) for each in tokens]):
            yield
            found = self._pooled([tokens[index] for index in chosen])
            vectors[chosen] = np.array(found if dimensions is None else normalised(found[:, :dimensions]))
        if not np.isfinite(vectors).all():
            index = int(np.flatnonzero(~np.isfinite(vectors).all(axis=1))[0])
            raise NonFiniteOutput(f"the embedding of {where}[{index}] is NaN or infinite: the model cannot be used")
        return vectors

    def known_prompt(self, name: str) -> str | None:
        """A prompt's name, if the model has that prompt."""
        return name if name in self._prompts else None

    def _pooled(self, batch: list[Tokens]) -> mx.array:
        values, mask = self._encoder.hidden(batch, self._texts.padding)
        for step in self._steps:
            values = step(values, mask)
        return values

    def _prompt(self, name: str | None) -> str:
        name = self._default if name is None else name
        if name is None:
            return ""
        if name not in self._prompts:
            known = ", ".join(self._prompts) or "none"
            raise InvalidRequest(f"prompt_name {name!r} is not one of this model's: {known}", param="prompt_name")
        return self._prompts[name]


def refuse_generators(planned: Plan) -> None:
    """Refuse a chat model: it has no pooling of its own, and what it would give is no embedding.

    Raises:
        CheckpointError: it is one.
    """
    if planned.architecture.endswith(_GENERATES) and not (planned.folder / "modules.json").exists():
        raise CheckpointError(
            f"{planned.folder} holds {planned.architecture}, which writes text and was not trained to embed: take an "
            "embedding model"
        )


def _prompts(folder: Path) -> tuple[Mapping[str, str], str | None]:
    """The prompts of a model by name, and the one that is set if nobody asks for another."""
    path = folder / "config_sentence_transformers.json"
    config = read_json(path) if path.exists() else {}
    prompts = config.get("prompts") or {}
    default = config.get("default_prompt_name")
    texts = isinstance(prompts, dict) and all(isinstance(text, str) for text in prompts.values())
    if not texts or (default is not None and default not in prompts):
        raise CheckpointError(f"{path}: prompts must map names to texts, and default_prompt_name must be one of them")
    return prompts, default

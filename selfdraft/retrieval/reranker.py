"""Documents to scores of their relevance to a query, in one of three ways. Knows nothing of requests.

A cross-encoder reads query and document together and has a head for the score; Qwen3's rerankers say yes or no; and an
embedding model can only compare vectors. The last is not what a reranker was trained for, and goes by its own name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..errors import ContextOverflow, NonFiniteOutput
from .batches import batches
from .embedder import Embedder
from .encoder import Encoder, Plan
from .heads import HeadKind, OutputHead, head_of
from .pooling import pool
from .tokens import Texts, Tokens, most_tokens

__all__ = ["CrossEncoder", "EmbeddingCosine", "Reranker", "Scores", "YesNo", "open_reranker"]

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"

# The prompt that these models were trained with (the model card of Qwen3-Reranker).
_BEGIN = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True)
class Scores:
    """How relevant documents are; larger is more.

    Attributes:
        logits: fp32 [documents].
        relevance: fp32 [documents], the same between 0 and 1; of cosines, what they are.
    """

    logits: npt.NDArray[np.float32]
    relevance: npt.NDArray[np.float32]


class Reranker(ABC):
    """What scores documents.

    Attributes:
        method: "cross-encoder", "yes-no" or "embedding-cosine".
        most_tokens: that query and document may have together; of cosines, each of them.
    """

    method: str
    most_tokens: int

    @abstractmethod
    def read(
        self, query: str, documents: Sequence[str], *, truncate: bool = True, instruction: str | None = None
    ) -> list[Tokens]:
        """The tokens of what is to be scored.

        Args:
            truncate: cut off the end of documents that are too long.
            instruction: what is searched for, for models that take one; others do without.

        Raises:
            ContextOverflow: the query is too long; or a document, and `truncate` is off.
            InvalidRequest: no Unicode text.
        """

    @abstractmethod
    def score(self, tokens: Sequence[Tokens]) -> Generator[None, None, Scores]:
        """Scores of what was read, one forward at each step of the generator.

        Raises:
            NonFiniteOutput: the model made NaN or infinity.
        """


class _Together(Reranker):
    """Query and document in one row."""

    def __init__(self, encoder: Encoder, texts: Texts) -> None:
        self._encoder = encoder
        self._texts = texts
        self.most_tokens = texts.most

    def score(self, tokens: Sequence[Tokens]) -> Generator[None, None, Scores]:
        """See `Reranker`."""
        logits = np.zeros(len(tokens), np.float32)
        for chosen in batches([len(row) for row in tokens]):
            yield
            states, mask = self._encoder.hidden([tokens[index] for index in chosen], self._texts.padding)
            logits[chosen] = np.array(self._logits(states, mask).astype(mx.float32))
        return Scores(_finite(logits), _sigmoid(logits))

    @abstractmethod
    def _logits(self, states: mx.array, mask: mx.array) -> mx.array:
        """A logit for each row."""


class CrossEncoder(_Together):
    """A sequence classifier of one label."""

    method = "cross-encoder"

    def read(
        self, query: str, documents: Sequence[str], *, truncate: bool = True, instruction: str | None = None
    ) -> list[Tokens]:
        """See `Reranker`."""
        return [
            self._texts.pair(query, document, truncate=truncate, where=f"documents[{index}]")
            for index, document in enumerate(documents)
        ]

    def _logits(self, states: mx.array, mask: mx.array) -> mx.array:
        assert self._encoder.head is not None
        logits: mx.array = self._encoder.head(states, mask)
        return logits


class YesNo(_Together):
    """A decoder that answers yes or no: the logit is that of yes less that of no."""

    method = "yes-no"

    def __init__(self, encoder: Encoder, texts: Texts) -> None:
        super().__init__(encoder, texts)
        self._begin, self._end = texts.marked(_BEGIN), texts.marked(_END)
        self._yes, self._no = texts.id_of("yes"), texts.id_of("no")

    def read(
        self, query: str, documents: Sequence[str], *, truncate: bool = True, instruction: str | None = None
    ) -> list[Tokens]:
        """See `Reranker`."""
        asked = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: "
        room = self.most_tokens - len(self._begin) - len(self._end)
        if len(self._texts.spelled(asked, "query")) >= room:
            raise ContextOverflow(
                f"the query alone fills the {self.most_tokens} tokens that this model reads; shorten it", param="query"
            )
        rows = []
        for index, document in enumerate(documents):
            middle = self._texts.spelled(asked + document, f"documents[{index}]")
            if len(middle) > room and not truncate:
                raise ContextOverflow(
                    f"documents[{index}] and the query have {len(middle)} tokens, and this model reads {room}: split "
                    "the document, or send truncate: true to have its end cut off",
                    param="documents",
                )
            ids = [*self._begin, *middle[:room], *self._end]
            rows.append(Tokens(ids, [0] * len(ids)))
        return rows

    def _logits(self, states: mx.array, mask: mx.array) -> mx.array:
        last = pool(states, mask, ["lasttoken"]).astype(states.dtype)
        head = self._encoder.head
        logits: mx.array = self._encoder.embedding.as_linear(last) if head is None else head(last)
        return logits[:, self._yes] - logits[:, self._no]


class EmbeddingCosine(Reranker):
    """The cosine of query and document, each embedded alone."""

    method = "embedding-cosine"

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self.most_tokens = embedder.most_tokens

    def read(
        self, query: str, documents: Sequence[str], *, truncate: bool = True, instruction: str | None = None
    ) -> list[Tokens]:
        """See `Reranker`; the query comes first."""
        read, known = self._embedder.read, self._embedder.known_prompt
        asked = read([query], prompt=known("query"), where="query")
        return asked + read(documents, truncate=truncate, prompt=known("document"), where="documents")

    def score(self, tokens: Sequence[Tokens]) -> Generator[None, None, Scores]:
        """See `Reranker`."""
        asked = yield from self._embedder.embed(tokens[:1], where="query")
        found = yield from self._embedder.embed(tokens[1:], where="documents")
        cosines = _unit(found) @ _unit(asked)[0]
        return Scores(cosines, cosines)


def open_reranker(planned: Plan) -> Reranker:
    """The reranker of a folder.

    Raises:
        CheckpointError: it holds nothing that scores or embeds, or cannot be used.
    """
    texts = Texts(planned.folder, most_tokens(planned.folder, planned.positions))
    kind = head_of(planned.architecture, planned.config)
    if kind is not None:
        return CrossEncoder(Encoder(planned, kind.build(planned.config), kind.parameters()), texts)
    if planned.architecture == "Qwen3ForCausalLM":
        return YesNo(_with_output(planned), texts)
    return EmbeddingCosine(Embedder(planned))


def _with_output(planned: Plan) -> Encoder:
    """A decoder with its output projection, where that is not the embedding."""
    if planned.config.get("tie_word_embeddings", True):
        return Encoder(planned)
    kind = HeadKind(lambda config: OutputHead(planned.width, config["vocab_size"]), {"lm_head": "out"})
    return Encoder(planned, kind.build(planned.config), kind.parameters())


def _finite(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    if not np.isfinite(logits).all():
        index = int(np.flatnonzero(~np.isfinite(logits))[0])
        raise NonFiniteOutput(f"the score of documents[{index}] is NaN or infinite: the model cannot be used")
    return logits


def _sigmoid(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):
        relevance: npt.NDArray[np.float32] = (1 / (1 + np.exp(-logits))).astype(np.float32)
    return relevance


def _unit(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    lengths = np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    unit: npt.NDArray[np.float32] = (vectors / lengths).astype(np.float32)
    return unit

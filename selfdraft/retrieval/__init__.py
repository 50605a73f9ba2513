"""Embeddings and relevance: texts in, vectors and scores out. No drafting; knows nothing of HTTP or of chats.

`Embedder` makes vectors, `open_reranker` what scores documents. Both read texts to tokens first, and then are
generators of one bounded forward a step: whoever runs them decides between two steps who is next.
"""

from .embedder import Embedder, Vectors, refuse_generators
from .encoder import Plan, check_installed, plan, reads_texts
from .reranker import Reranker, Scores, open_reranker
from .tokens import Tokens

__all__ = [
    "Embedder",
    "Plan",
    "Reranker",
    "Scores",
    "Tokens",
    "Vectors",
    "check_installed",
    "open_reranker",
    "plan",
    "reads_texts",
    "refuse_generators",
]

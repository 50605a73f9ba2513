"""Guards the reply limit that clients are told: a part of the context, and of the memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from selfdraft.server.memory import MemoryBudget


def budget(context: int, memory: int) -> MemoryBudget:
    """Of a model whose rows take a byte a token."""
    model: Any = SimpleNamespace(context_length=context, row_bytes=lambda tokens: tokens, vocab_size=8)
    return MemoryBudget(SimpleNamespace(model=model), memory)  # type: ignore[arg-type]


@pytest.mark.parametrize(("context", "limit"), [(32_768, 8_192), (4096, 1024), (131_072, 32_768), (1_000_000, 32_768)])
def test_an_answer_takes_a_part_of_the_context(context: int, limit: int) -> None:
    assert budget(context, 10**9).reply_tokens() == limit


def test_less_where_four_such_answers_and_prompts_would_not_fit() -> None:
    assert budget(131_072, 4 * 2 * 8192).reply_tokens() == 8192
    assert budget(131_072, 4 * 2 * 8192 - 1).reply_tokens() == 4096
    assert budget(131_072, 1).reply_tokens() == 256  # an answer has to be one
    assert budget(2, 10**9).reply_tokens() == 1

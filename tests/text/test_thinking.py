"""Guards the budget of reasoning: which token is forced where, along drafts and behind what was emitted."""

from __future__ import annotations

import numpy as np

from selfdraft.text import Tokenizer
from selfdraft.text.grammar import Grammars
from selfdraft.text.thinking import ThinkingBudget


def forced(mask: np.ndarray) -> list[int] | None:
    """The tokens a position allows, if they are few."""
    found = np.flatnonzero(mask)
    return found.tolist() if len(found) < 3 else None


def test_the_end_is_forced_where_the_budget_ends_along_the_drafts(tokenizer: Tokenizer) -> None:
    (end,) = tokenizer.encode("</think>", special=True)
    sentence = ThinkingBudget(3, tokenizer, tokenizer.vocab_size, begun=True).start()
    a, b, c, d = tokenizer.encode(" one two three four", special=False)[:4]
    assert [forced(mask) for mask in sentence.allowed([a, b, c, end, d])] == [None, None, None, [end], None, None]
    assert [forced(mask) for mask in sentence.allowed([a, end, b, c, d])] == [None] * 6
    sentence.emit([a, b])
    assert [forced(mask) for mask in sentence.allowed([c, end])] == [None, [end], None]
    sentence.emit([c])
    assert [forced(mask) for mask in sentence.allowed([])] == [[end]]
    sentence.emit([end])
    assert [forced(mask) for mask in sentence.allowed([a] * 5)] == [None] * 6


def test_an_end_that_is_spelled_out_counts(tokenizer: Tokenizer) -> None:
    spelled = [id for char in "</think>" for id in tokenizer.encode(char, special=False)]
    assert len(spelled) == 8
    sentence = ThinkingBudget(9, tokenizer, tokenizer.vocab_size, begun=True).start()
    sentence.emit(spelled)
    assert [forced(mask) for mask in sentence.allowed([spelled[0]] * 4)] == [None] * 5


def test_reasoning_that_the_answer_opens_is_bounded_and_an_answer_without_is_free(tokenizer: Tokenizer) -> None:
    begin, end = tokenizer.encode("<think></think>", special=True)
    (a,) = tokenizer.encode("a", special=False)
    budget = ThinkingBudget(1, tokenizer, tokenizer.vocab_size, begun=False)
    assert [forced(mask) for mask in budget.start().allowed([begin, a, end])] == [None, None, [end], None]
    assert [forced(mask) for mask in budget.start().allowed([a] * 8 + [begin, a, a])] == [None] * 12


def test_a_grammar_goes_on_behind_the_reasoning(tokenizer: Tokenizer) -> None:
    (end,) = tokenizer.encode("</think>", special=True)
    (yes,) = tokenizer.encode("yes", special=False)
    inner = Grammars(tokenizer).regex("yes").after("</think>")
    sentence = ThinkingBudget(1, tokenizer, tokenizer.vocab_size, begun=True, inner=inner).start()
    (a,) = tokenizer.encode("a", special=False)
    masks = sentence.allowed([a, end, yes])
    assert forced(masks[1]) == [end]
    assert masks[2][yes]
    assert not masks[2][a]
    sentence.emit([a, end])
    assert forced(sentence.allowed([yes])[1]) == sorted(tokenizer.eos_ids)

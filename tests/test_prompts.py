"""Where prompts are cut for the next turn, and which ids are served again."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import selfdraft
from selfdraft.llm import LLM
from selfdraft.params import SamplingParams
from selfdraft.prompts import NEAR, Prompted, Prompts, _common
from selfdraft.sessions import Transcripts
from selfdraft.text import ChatTemplate, Tokenizer
from tests.support.checkpoints import add_text_side
from tests.support.nano import nano_model, write_checkpoint

LONG = "Words upon words, and none of them matters. " * 12
# Histories are rendered as they were generated, which the reference template does not do with thinking off.
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("models") / "nano"
    model = nano_model(vocab_size=8192, sharpness=3.0)
    add_text_side(write_checkpoint(folder, model, config={"vocab_size": 8192}))
    return selfdraft.load(str(folder))


@pytest.fixture
def plain(llm: LLM) -> Iterator[LLM]:
    """The same with a template that renders an answer as it was written, and nothing kept yet."""
    before = llm.prompts
    llm.prompts = Prompts(llm.tokenizer, ChatTemplate(PLAIN), Transcripts())
    assert llm.sessions is not None
    llm.sessions.clear()
    yield llm
    llm.prompts = before


def shared(tokenizer: Tokenizer, a: Prompted, b: Prompted) -> int:
    """Tokens two prompts begin with alike."""
    return next((n for n, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y), len(a.tokens))


TURNS: dict[str, list[dict[str, Any]]] = {
    "first": [{"role": "user", "content": LONG}],
    "with instructions": [{"role": "system", "content": LONG}, {"role": "user", "content": LONG}],
    "third": [
        {"role": "system", "content": LONG},
        {"role": "user", "content": LONG},
        {"role": "assistant", "content": LONG, "reasoning_content": LONG},
        {"role": "user", "content": "And then?"},
    ],
    "in a tool loop": [
        {"role": "user", "content": LONG},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": LONG,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": LONG}}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": LONG},
    ],
}


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("turn", TURNS)
def test_the_next_turn_shares_all_up_to_a_stop_and_little_more(llm: LLM, turn: str, thinking: bool) -> None:
    """Whatever the answer, and although the template drops reasoning of the turns before."""
    messages = TURNS[turn]
    prompted = llm.prompts.chat(messages, enable_thinking=thinking)
    answer = {"role": "assistant", "content": "Something.", "reasoning_content": "Because."}
    later = llm.prompts.chat([*messages, answer, {"role": "user", "content": LONG}], enable_thinking=thinking)
    common = shared(llm.tokenizer, prompted, later)
    reached = [stop for stop in prompted.stops if stop <= common]
    assert reached
    assert common - max(reached) < 8  # what lies behind the last special token


def test_a_question_asked_again_shares_all_before_it(llm: LLM) -> None:
    messages = TURNS["with instructions"]
    prompted = llm.prompts.chat(messages)
    other = llm.prompts.chat([*messages[:-1], {"role": "user", "content": "Something else."}])
    common = shared(llm.tokenizer, prompted, other)
    assert min(common - stop for stop in prompted.stops if stop <= common) < 8


def test_stops_are_apart_and_in_order(llm: LLM) -> None:
    for messages in TURNS.values():
        stops = llm.prompts.chat(messages).stops
        assert all(later - earlier >= NEAR for earlier, later in itertools.pairwise(stops))
        assert list(stops) == sorted(stops)
    assert list(llm.prompts.chat([{"role": "user", "content": "Hi"}]).stops) == []  # nothing worth a boundary


@pytest.mark.parametrize("turn", TURNS)
def test_a_fork_lies_behind_a_special_token(llm: LLM, turn: str) -> None:
    """What follows is then tokenised by itself: inside a word the tokens of the two prompts would differ before it."""
    prompted = llm.prompts.chat(TURNS[turn])
    forks = [stop for stop in prompted.stops if stop != len(prompted.tokens) - 1]
    assert forks
    special = set(llm.tokenizer.added.values())
    assert all(prompted.tokens[fork - 1] in special for fork in forks)


def test_a_template_that_refuses_what_may_come_is_no_trouble(llm: LLM) -> None:
    strict = ChatTemplate(
        "{% if messages|length > 1 %}{{ raise_exception('one only') }}{% endif %}<|im_start|>{{ messages[0].content }}"
    )
    prompted = Prompts(llm.tokenizer, strict, Transcripts()).chat([{"role": "user", "content": LONG}])
    assert list(prompted.stops) == [len(prompted.tokens) - 1]


def test_a_prompt_that_is_continued(llm: LLM) -> None:
    messages = [*TURNS["first"], {"role": "assistant", "content": "It is"}]
    prompted = llm.prompts.chat(messages, continue_final=True)
    assert prompted.text is not None
    assert prompted.text.endswith("It is")
    assert all(stop < len(prompted.tokens) for stop in prompted.stops)


def test_bare_text_and_ids_stop_before_their_last_token(llm: LLM) -> None:
    assert list(llm.prompted(LONG, raw=True).stops) == [len(llm.tokens(LONG, raw=True)) - 1]
    assert list(llm.prompted([1, 2, 3]).stops) == [2]


def ending(llm: LLM, seed: int) -> SamplingParams:
    """Random ids, as no tokenizer would cut them, and then the end of the turn."""
    end = next(iter(llm.tokenizer.eos_ids))
    return SamplingParams(temperature=1.0, seed=seed, min_tokens=40, max_tokens=60, logit_bias={end: 100.0})


def test_ids_that_were_committed_are_served_again(plain: LLM) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": LONG}]
    recut = 0
    for seed in range(6):
        before = plain.prompted(messages)
        answer = plain.generate(messages, ending(plain, seed))
        assert answer.finish_reason == "stop"
        messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "Go on."}]
        after = plain.prompted(messages)
        committed = [*before.tokens, *answer.token_ids]
        assert after.tokens[: len(committed)] == committed
        assert plain.tokenizer.decode(after.tokens, skip_special=False) == after.text
        recut += plain.tokenizer.encode(after.text or "", special=True) != after.tokens
    assert recut  # else this tests nothing
    result = plain.generate(messages, ending(plain, 9))
    assert result.usage.cached_tokens == len(committed)


def test_not_where_the_text_is_another(plain: LLM) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": LONG}]
    answer = plain.generate(messages, ending(plain, 1))
    for text in (answer.text + " ", answer.text[:-1], answer.text.swapcase()):
        history = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
        prompted = plain.prompted(history)
        assert prompted.tokens == plain.tokenizer.encode(prompted.text or "", special=True)


def test_not_for_others(plain: LLM) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": LONG}]
    mine = plain.prompts.chat(messages, scope="mine")
    plain.prompts.remember(mine, [*mine.tokens, 70, 71, next(iter(plain.tokenizer.eos_ids))])
    text = plain.tokenizer.decode([70, 71], skip_special=False)
    history = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
    assert plain.prompts.chat(history, scope="mine").tokens[: len(mine.tokens) + 2] == [*mine.tokens, 70, 71]
    theirs = plain.prompts.chat(history, scope="theirs")
    assert theirs.tokens == plain.tokenizer.encode(theirs.text or "", special=True)


def test_an_answer_that_does_not_end_in_a_special_token_is_cut_anew(plain: LLM) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": LONG}]
    answer = plain.generate(messages, SamplingParams(temperature=1.0, seed=4, max_tokens=9))
    assert answer.finish_reason == "length"
    continued = plain.prompts.chat([*messages, {"role": "assistant", "content": answer.text}], continue_final=True)
    assert continued.tokens == plain.tokenizer.encode(continued.text or "", special=True)


def test_common_prefix() -> None:
    rng = random.Random(3)
    for _ in range(300):
        a = "".join(rng.choice("ab") for _ in range(rng.randint(0, 9)))
        b = a[: rng.randint(0, 9)] + "".join(rng.choice("ab") for _ in range(rng.randint(0, 3)))
        plain = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        assert _common(a, b) == plain


def test_without_a_cache_nothing_is_rendered_twice(tmp_path: Path, llm: LLM) -> None:
    class Counted(ChatTemplate):
        rendered = 0

        def render(self, *args: Any, **options: Any) -> str:
            self.rendered += 1
            return super().render(*args, **options)

    template = Counted(PLAIN)
    Prompts(llm.tokenizer, template, None).chat(TURNS["third"])
    assert template.rendered == 1


def test_a_conversation_that_renders_slowly_is_rendered_once(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 1.5)
    monkeypatch.setattr("selfdraft.prompts.time.monotonic", lambda: next(clock))
    rendered: list[int] = []
    render = ChatTemplate.render
    monkeypatch.setattr(ChatTemplate, "render", lambda self, *a, **k: rendered.append(1) or render(self, *a, **k))
    prompted = plain.prompts.chat([{"role": "user", "content": LONG}])
    assert len(rendered) == 1
    assert prompted.stops == ()

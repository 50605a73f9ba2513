"""A model that says what a test wants, served like any other: each answer is held to a grammar of one sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import selfdraft
from selfdraft.llm import LLM
from selfdraft.prompts import Prompted
from selfdraft.stream import Answer
from tests.support.checkpoints import add_text_side
from tests.support.nano import SMALLER, nano_model, write_checkpoint

__all__ = ["FIRST", "SAID", "load_scripted", "playing", "quick_checkpoint"]

FIRST = "I look first."
SAID = "The model says hello."
_SPECIAL = re.compile(r"(</?(?:tool_call|think)>)")


def quick_checkpoint(folder: Path) -> Path:
    """A checkpoint with the reference tokenizer and template, and a trunk that reads an agent's prompt in a second."""
    config = {
        **SMALLER,
        "vocab_size": 8192,
        "max_position_embeddings": 32768,
        "num_hidden_layers": 1,
        "layer_types": ["linear_attention"],
    }
    return add_text_side(write_checkpoint(folder, nano_model(sharpness=3.0, **config), config=config))


def load_scripted(folder: Path, script: Callable[[str], str]) -> LLM:
    """A model whose answers come from `script`, which is given the rendered prompt.

    Tokens are drafted, verified and streamed as ever, only from a grammar that leaves no choice.
    """
    llm = selfdraft.load(str(folder))
    answer = llm.answer

    def scripted(prompted: Prompted, *given: Any, **options: Any) -> Answer:
        said = script(llm.tokenizer.decode(prompted.tokens, skip_special=False))
        options["grammar"] = llm.grammars.lark(_sentence(said))
        return answer(prompted, *given, **options)

    llm.answer = scripted  # type: ignore[method-assign]
    return llm


def playing(calls: Sequence[str]) -> Callable[[str], str]:
    """A script: one call an answer, told by the results that are in the prompt already, then a last word.

    A prompt without tools, such as one that asks for a title, gets the last word at once.
    """

    def script(prompt: str) -> str:
        done = prompt.count("<tool_response>")
        begun = "Let us see.\n</think>\n\n" if prompt.endswith("<think>\n") else ""
        over = "<tools>" not in prompt or done >= len(calls)
        return begun + (SAID if over else f"{FIRST}\n\n{calls[done]}")

    return script


def _sentence(text: str) -> str:
    parts = [part for part in _SPECIAL.split(text) if part]
    return "start: " + " ".join(part if _SPECIAL.fullmatch(part) else json.dumps(part) for part in parts)

"""Guards warm prefixes with pictures: restored bit for bit, in memory and from disk, for these pixels and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from selfdraft.engine import Engine, Request
from selfdraft.images import Picture
from selfdraft.sessions import PromptSession, SessionBank
from selfdraft.sessions.disk.store import DiskStore
from selfdraft.vision import PictureInputs, PicturePrompts
from tests.sessions.test_exact import Watched
from tests.support.nano import SMALLER, nano_model
from tests.support.rows import finish, params
from tests.support.sessions import differences, replay
from tests.support.vision import PAD, SIGHTED, Sketch, pictured

TEXT = [3, 1, 4, 1, 5, 9, 2, 6]
FIRST, SECOND = pictured(3, 4), pictured(5, 2)
PLENTY = 10**9


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def model(request: pytest.FixtureRequest) -> Any:
    dtype = {"fp32": mx.float32, "bf16": mx.bfloat16}[request.param]
    return nano_model(sharpness=2.0, dtype=dtype, **{**SMALLER, **SIGHTED})


class Asker:
    """Asks with ids and pictures, on a bank, and checks every boundary that a row goes on from."""

    def __init__(self, model: Any, chunk: int = 8) -> None:
        self.model, self.chunk = model, chunk
        self.tower = Sketch(model.args.hidden_size)
        self.prompts = PicturePrompts(self.tower, "", PAD, 16)  # type: ignore[arg-type]
        self.bank = SessionBank(model.new_state, PLENTY)

    def made(self, parts: list[Any]) -> tuple[list[int], list[int], PictureInputs | None]:
        """Tokens, keys and, if there are pictures, inputs."""
        pictures = [part for part in parts if isinstance(part, Picture)]
        tokens: list[int] = []
        for part in parts:
            tokens += [PAD] * self.tower.grid(part).tokens if isinstance(part, Picture) else part
        if not pictures:
            return tokens, tokens, None
        return tokens, self.prompts.keys(tokens, pictures), self.prompts.inputs(tokens, pictures)

    def ask(self, *parts: Any, depth: int = 3, stops: list[int] | None = None) -> tuple[list[int], int]:
        """An answer, and how many tokens were restored."""
        tokens, keys, inputs = self.made(list(parts))
        session: PromptSession = Watched(self.bank, "a", keys, [len(tokens) - 3] if stops is None else stops)
        engine = Engine(self.model, prefill_chunk=self.chunk)
        given = params(temperature=0.0, max_tokens=9, depth=depth)
        row = engine.add(Request(tokens, given, session=session, inputs=inputs))
        finish(engine)
        assert row.error is None
        engine.settle(row)
        assert isinstance(session, Watched)
        if session.resumed is not None:
            self.check(tokens, session.resumed[1], list(parts))
        return row.emitted, row.statistics.restored_tokens

    def check(self, tokens: list[int], boundary: Any, parts: list[Any]) -> None:
        _, _, inputs = self.made(parts)
        while inputs and inputs.prepare(0, len(tokens)):
            self.tower.encoded.pop()
        end = boundary.state.length
        fresh = replay(self.model, tokens[:end], boundary.cuts, head=boundary.drafts, inputs=inputs)
        assert differences(self.model, boundary, fresh) == []


@pytest.mark.parametrize("depth", [0, 3])
def test_a_conversation_goes_on_behind_its_pictures(model: Any, depth: int) -> None:
    """The tower runs for a new picture alone."""
    asker = Asker(model)
    said: list[Any] = [TEXT, FIRST, [7, 8]]
    answer, restored = asker.ask(*said, depth=depth)
    assert (restored, asker.tower.encoded) == (0, [FIRST])
    said += [answer, [2], SECOND, TEXT]
    again, restored = asker.ask(*said, depth=depth)
    assert (restored, asker.tower.encoded) == (8 + 12 + 2 + 9, [FIRST, SECOND])
    said += [again, TEXT]
    _, restored = asker.ask(*said, depth=depth)
    assert (restored, asker.tower.encoded) == (8 + 12 + 2 + 9 + 1 + 10 + 8 + 9, [FIRST, SECOND])


def test_other_pixels_are_another_prompt(model: Any) -> None:
    asker = Asker(model)
    asker.ask(TEXT, FIRST, TEXT, stops=[8, 20])
    assert asker.ask(TEXT, pictured(3, 4, seed=1), TEXT)[1] == 8  # the text before it is the same
    assert asker.ask(TEXT, pictured(4, 3), TEXT)[1] == 8
    assert asker.ask(TEXT, FIRST, [5, 5, 5, 5])[1] == 20
    assert asker.ask(TEXT, [PAD] * 12, TEXT)[1] == 8  # the same ids, and no picture


@pytest.mark.parametrize("stop", range(6, 24))
def test_a_boundary_at_every_length(model: Any, stop: int) -> None:
    asker = Asker(model, chunk=5)
    first, _ = asker.ask(TEXT, FIRST, [7, 8, 9, 10], stops=[stop])
    asker.bank.allow(PLENTY)
    again, restored = asker.ask(TEXT, FIRST, [7, 8, 9, 10], stops=[])
    assert (restored, again) == (min(stop, 23), first)


def test_from_disk(model: Any, tmp_path: Path) -> None:
    """What a new process finds has the keys of pictures in it, and their positions."""
    said: list[Any] = [TEXT, FIRST, [7, 8]]
    for turn in range(3):
        asker = Asker(model)
        store = DiskStore(tmp_path, "a" * 64, max_bytes=PLENTY, writes_per_hour=PLENTY)
        asker.bank.attach(store, store.records())
        answer, restored = asker.ask(*said)
        assert asker.tower.encoded == ([] if turn else [FIRST])
        assert (restored > 20) == bool(turn)
        said += [answer, TEXT]
        assert store.flush(20)
        store.close()

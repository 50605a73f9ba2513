"""The bank with its disk: what a new process restores is, bit for bit, what a fresh forward gives; and what is damaged,
gone or another model's is a miss."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import selfdraft
from selfdraft import keeping
from selfdraft.engine import Engine, Request
from selfdraft.keeping import DiskSessions
from selfdraft.llm import LLM
from selfdraft.params import SamplingParams
from selfdraft.prompts import Prompts
from selfdraft.sessions import PromptSession, SessionBank
from selfdraft.sessions.disk.store import DiskStore, Stored
from selfdraft.sessions.tree import walk
from selfdraft.settings import load_settings
from tests.sessions.test_exact import CHUNK, KINDS, MODELS, Watched, check_bank, check_row
from tests.support.checkpoints import add_text_side
from tests.support.nano import nano_model, write_checkpoint
from tests.support.rows import finish, params
from tests.support.sessions import Known

PLENTY = 10**9


def store_in(folder: Path, identity: str = "a" * 64, **options: Any) -> DiskStore:
    return DiskStore(folder, identity, **{"max_bytes": PLENTY, "writes_per_hour": PLENTY, **options})


class Process:
    """A bank on a folder, as a process has it; replays may be shared with other processes of the model."""

    def __init__(
        self, model: Any, folder: Path, *, limit: int = PLENTY, replayed: Known | None = None, **options: Any
    ) -> None:
        self.model = model
        self.replayed = Known() if replayed is None else replayed
        self.bank = SessionBank(model.new_state, limit)
        self.store = store_in(folder, **options)
        self.bank.attach(self.store, self.store.records())

    def ask(self, prompt: list[int], stops: list[int], depth: Any = 2, tokens: int = 6) -> tuple[list[int], int]:
        """An answer, checked against a fresh forward, and how many tokens were restored."""
        engine = Engine(self.model, prefill_chunk=CHUNK)
        session = Watched(self.bank, "a", prompt, stops)
        row = engine.add(Request(prompt, params(temperature=0.0, max_tokens=tokens, depth=depth), session=session))
        finish(engine)
        engine.settle(row)
        check_row(self.model, row, session, self.replayed)
        return row.emitted, row.statistics.restored_tokens

    def end(self) -> None:
        assert self.store.flush(20)
        self.store.close()


def prompt_of(seed: int, length: int) -> list[int]:
    return [random.Random(seed).randrange(16) for _ in range(length)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [0, 3])
def test_a_conversation_over_restarts(tmp_path: Path, kind: str, depth: int) -> None:
    model, rng, replayed = MODELS[kind], random.Random(depth), Known()
    tokens = prompt_of(1, 21)
    for turn in range(4):
        process = Process(model, tmp_path, replayed=replayed)
        answer, restored = process.ask(tokens, [rng.randrange(1, len(tokens))], depth)
        assert restored == (len(tokens) - 4 if turn else 0)
        check_bank(model, process.bank, replayed)  # all of it, most read from disk
        process.end()
        tokens = [*tokens, *answer, *prompt_of(turn, 4)]


@pytest.mark.parametrize("seed", range(6))
def test_random_conversations_in_little_memory(tmp_path: Path, seed: int) -> None:
    """Boundaries leave memory and come back, in one process and the next."""
    model, rng, replayed = MODELS["bf16"], random.Random(seed), Known()
    histories = [prompt_of(seed, rng.randint(5, 40))]
    hits = 0
    for _ in range(3):
        process = Process(model, tmp_path, limit=rng.choice([0, 12_000, 40_000]), replayed=replayed)
        for _ in range(4):
            prompt = [*rng.choice(histories), *prompt_of(rng.randrange(9), rng.randint(1, 9))]
            stops = [rng.randrange(1, len(prompt)) for _ in range(2)]
            answer, _ = process.ask(prompt, stops, rng.choice([0, 2, "auto"]))
            histories.append([*prompt, *answer])
            assert process.bank.figures.bytes == sum(node.nbytes for node in walk(process.bank.root("a")))
            assert process.store.flush(20)
        hits += process.bank.figures.disk_hits
        process.end()
    assert hits


def damage_everything(folder: Path, how: str) -> None:
    """To every blob of a session folder."""
    blobs = [path for path in folder.rglob("*") if path.is_file() and len(path.stem) == 64]
    assert blobs
    for path in blobs:
        content = bytearray(path.read_bytes())
        if how == "gone":
            path.unlink()
            continue
        if how == "flipped":
            content[len(content) // 2] ^= 4
        path.write_bytes(content[: -1 if how == "cut" else None])


@pytest.mark.parametrize("how", ["gone", "flipped", "cut"])
def test_what_is_damaged_is_forwarded_again(tmp_path: Path, how: str) -> None:
    model, tokens = MODELS["fp32"], prompt_of(3, 30)
    first = Process(model, tmp_path)
    answer, _ = first.ask(tokens, [10, 20])
    first.end()
    second = Process(model, tmp_path)
    damage_everything(tmp_path, how)
    again, restored = second.ask(tokens, [10, 20])
    assert (again, restored) == (answer, 0)
    second.end()
    third = Process(model, tmp_path)  # what the second wrote is sound
    assert third.ask(tokens, [10, 20]) == (answer, 20)
    third.end()


def test_one_damaged_link_leaves_what_stands_before_it(tmp_path: Path) -> None:
    model, tokens = MODELS["fp32"], prompt_of(4, 40)
    process = Process(model, tmp_path)
    process.ask(tokens, [10, 20, 30])
    process.end()
    process = Process(model, tmp_path)
    process.bank._take_arrivals()
    nodes = {node.end: node for node in walk(process.bank.root("a"))}
    stored = nodes[20].stored
    assert stored is not None
    assert stored.entry is not None
    blob = stored.entry.row.span.blobs[0]
    path = next(path for path in tmp_path.rglob("*") if blob.name in path.name)
    path.write_bytes(b"nothing")
    _, restored = process.ask(tokens, [])
    assert restored == 10
    assert {node.end for node in walk(process.bank.root("a"))}.isdisjoint({20, 30})  # what hung on it is gone, too
    process.end()


def test_a_row_whose_boundary_was_cleared_leaves_all_it_has_to_the_disk(tmp_path: Path) -> None:
    """The disk could still give what the row went on from, but nobody would find what hangs there."""
    model, tokens = MODELS["fp32"], prompt_of(9, 30)
    process = Process(model, tmp_path)
    process.ask(tokens, [20])
    assert process.store.flush(20)
    engine = Engine(model, prefill_chunk=CHUNK)
    session = PromptSession(process.bank, "a", [*tokens, 1], [])
    row = engine.add(Request([*tokens, 1], params(temperature=0.0, max_tokens=4), session=session))
    finish(engine)
    process.bank.clear()
    engine.settle(row)
    assert process.ask([*tokens, 1, *row.emitted, 2], [])[1] == len(tokens) + 1 + 4
    process.end()


def test_another_identity_finds_nothing(tmp_path: Path) -> None:
    model, tokens = MODELS["fp32"], prompt_of(5, 30)
    process = Process(model, tmp_path)
    process.ask(tokens, [20])
    process.end()
    other = Process(model, tmp_path, identity="b" * 64)
    assert other.ask(tokens, [20])[1] == 0
    other.end()
    assert Process(model, tmp_path).ask(tokens, [20])[1] == 20


def test_write_only_is_not_read(tmp_path: Path) -> None:
    model, tokens = MODELS["fp32"], prompt_of(6, 30)
    process = Process(model, tmp_path, read=False, limit=0)
    process.ask(tokens, [20])
    assert process.store.flush(20)
    assert process.ask(tokens, [20])[1] == 0
    process.end()
    assert Process(model, tmp_path).ask(tokens, [20])[1] == 20


def test_what_was_kept_before_the_disk_came_is_written_too(tmp_path: Path) -> None:
    model, tokens = MODELS["fp32"], prompt_of(7, 40)
    bank = SessionBank(model.new_state, PLENTY)
    engine = Engine(model, prefill_chunk=CHUNK)
    engine.add(Request(tokens, params(max_tokens=1), session=PromptSession(bank, "a", tokens, [10, 20, 30])))
    finish(engine)
    store = store_in(tmp_path)
    bank.attach(store, store.records())
    assert bank.resume("a", bank.root("a").children[0].ids, longer_than=0, drafts=False) is not None
    assert store.flush(20)
    store.close()
    assert Process(model, tmp_path).ask(tokens, [])[1] == 30


def test_what_was_refused_is_offered_again_with_what_follows_it(tmp_path: Path) -> None:
    model, tokens = MODELS["fp32"], prompt_of(7, 40)
    process = Process(model, tmp_path)
    offer = process.store.offer
    process.store.offer = lambda **boundary: Stored(failed=True)  # type: ignore[method-assign]
    process.ask(tokens, [10, 20])
    process.store.offer = offer  # type: ignore[method-assign]
    assert process.ask([*tokens, 1, 2, 3], [30])[1] == 20
    process.end()
    assert Process(model, tmp_path).ask(tokens, [])[1] == 30


def test_of_what_was_refused_and_left_memory_the_rest_is_offered(tmp_path: Path) -> None:
    """One refusal must not keep all that follows off the disk."""
    model, tokens = MODELS["fp32"], prompt_of(7, 40)
    process = Process(model, tmp_path)
    offer = process.store.offer
    process.store.offer = lambda **boundary: Stored(failed=True)  # type: ignore[method-assign]
    process.ask(tokens, [10, 20])
    process.store.offer = offer  # type: ignore[method-assign]
    ten = next(node for node in walk(process.bank.root("a")) if node.end == 10)
    process.bank._let_go(ten)
    assert process.ask([*tokens, 1, 2, 3], [30])[1] == 20
    process.end()
    process = Process(model, tmp_path)
    assert process.ask(tokens[:20], [])[1] == 0  # nobody goes on from where only the span is
    assert process.ask(tokens, [])[1] == 30
    process.store.close()


def test_the_folder_may_vanish(tmp_path: Path) -> None:
    model, tokens = MODELS["fp32"], prompt_of(8, 30)
    process = Process(model, tmp_path / "cache", limit=0)
    answer, _ = process.ask(tokens, [20])
    assert process.store.flush(20)
    shutil.rmtree(tmp_path / "cache")
    assert process.ask(tokens, [20]) == (answer, 0)
    process.store.close()


LONG = "Words upon words, and none of them matters. " * 12


@pytest.fixture(scope="module")
def nano_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "nano"
    model = nano_model(vocab_size=8192, sharpness=3.0)
    return add_text_side(write_checkpoint(folder, model, config={"vocab_size": 8192}))


@pytest.fixture
def opened(nano_folder: Path, tmp_path: Path) -> Iterator[Callable[..., tuple[LLM, DiskSessions]]]:
    """Opens the nano model as a new process would."""
    kept: list[DiskSessions] = []

    def open_it(folder: Path = nano_folder, **settings: Any) -> tuple[LLM, DiskSessions]:
        for each in kept:
            each.close()
        given = {"ssd_session_cache": "on", "ssd_session_cache_dir": tmp_path / "cache", **settings}
        llm = selfdraft.load(str(folder), settings=load_settings(**given))
        kept.append(DiskSessions(llm))
        return llm, kept[-1]

    yield open_it
    for each in kept:
        each.close()


def asked(llm: LLM) -> tuple[str, int]:
    result = llm.generate([{"role": "user", "content": LONG}], SamplingParams(temperature=0, max_tokens=8))
    return result.text, result.usage.cached_tokens


def test_a_model_goes_on_after_a_restart(opened: Callable[..., tuple[LLM, DiskSessions]]) -> None:
    llm, disk = opened()
    assert disk.ready(20)
    text, cached = asked(llm)
    assert cached == 0
    llm, disk = opened()
    assert disk.ready(20)
    again, cached = asked(llm)
    assert again == text
    assert cached > 50
    assert disk.figures is not None
    assert disk.figures.read_bytes > 0


def test_a_model_that_leaves_before_its_files_are_known_saves_what_it_has(
    opened: Callable[..., tuple[LLM, DiskSessions]], monkeypatch: pytest.MonkeyPatch
) -> None:
    known, identity = threading.Event(), keeping.identity

    def slowly(*given: Any) -> str:
        assert known.wait(20)
        return identity(*given)

    monkeypatch.setattr(keeping, "identity", slowly)
    llm, disk = opened()
    text, _ = asked(llm)
    threading.Timer(0.2, known.set).start()
    disk.save(20)
    llm, disk = opened()
    assert disk.ready(20)
    again, cached = asked(llm)
    assert again == text
    assert cached > 50


def test_ids_of_an_answer_are_served_again_after_a_restart(opened: Callable[..., tuple[LLM, DiskSessions]]) -> None:
    llm, disk = opened()
    assert disk.ready(20)
    end = next(iter(llm.tokenizer.eos_ids))
    writing = SamplingParams(temperature=1.0, seed=3, min_tokens=30, max_tokens=60, logit_bias={end: 100.0})
    prompted = llm.prompted(LONG, raw=True)
    answer = llm.generate(LONG, writing, raw=True)
    history = (prompted.text or "") + answer.text + llm.tokenizer.decode([end], skip_special=False) + " and on"
    committed = [*prompted.tokens, *answer.token_ids]
    assert list(llm.prompted(history, raw=True).tokens[: len(committed)]) == committed
    llm, disk = opened()
    assert disk.ready(20)
    assert list(llm.prompted(history, raw=True).tokens[: len(committed)]) == committed


@pytest.mark.parametrize("change", ["weights", "template", "dtype", "kernels"])
def test_a_changed_model_finds_nothing(
    opened: Callable[..., tuple[LLM, DiskSessions]],
    nano_folder: Path,
    tmp_path: Path,
    change: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm, disk = opened()
    assert disk.ready(20)
    asked(llm)
    other = tmp_path / "other"
    shutil.copytree(nano_folder, other)
    if change == "weights":
        weights = mx.load(str(other / "model.safetensors"))
        name = next(name for name in weights if name.endswith("down_proj.weight"))
        weights[name] = weights[name] + 1e-3
        mx.save_safetensors(str(other / "model.safetensors"), weights, {"format": "mlx"})
    if change == "template":
        path = other / "chat_template.jinja"
        path.write_text(path.read_text() + "{# changed #}")
    if change == "kernels":
        monkeypatch.setattr("selfdraft.llm.used_kernels", lambda: ["verify_qmv"])
    llm, disk = opened(other, **({"dtype": "bfloat16"} if change == "dtype" else {}))
    assert disk.ready(20)
    assert asked(llm)[1] == 0


def test_eight_bits_are_another_identity_and_go_on_nearly_the_same(
    opened: Callable[..., tuple[LLM, DiskSessions]],
) -> None:
    llm, disk = opened()
    assert disk.ready(20)
    text, _ = asked(llm)
    for cached in (False, True):
        llm, disk = opened(ssd_session_cache_kv="8bit")
        assert disk.ready(20)
        again, tokens = asked(llm)
        assert (tokens > 50) == cached
        assert again[:4] == text[:4]


def test_texts_of_the_conversations_used_last_come_first(
    opened: Callable[..., tuple[LLM, DiskSessions]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, disk = opened()
    assert disk.ready(20)
    end = next(iter(llm.tokenizer.eos_ids))
    writing = SamplingParams(temperature=1.0, seed=3, min_tokens=4, max_tokens=60, logit_bias={end: 100.0})
    texts = []
    for number in range(3):
        prompted = llm.prompted(f"{number} {LONG}", raw=True)
        answer = llm.generate(f"{number} {LONG}", writing, raw=True)
        texts.append(((prompted.text or "") + answer.text + llm.tokenizer.decode([end], skip_special=False), answer))
    tokens = len(llm.prompted(texts[2][0], raw=True).tokens)
    monkeypatch.setattr("selfdraft.keeping.TEXT_BYTES", 8 * (tokens + tokens // 2))
    recalled: list[int] = []
    monkeypatch.setattr(Prompts, "recall", lambda self, scope, ids: recalled.append(ids[0]))
    llm, disk = opened()
    assert disk.ready(20)
    assert recalled == [llm.prompted(texts[2][0], raw=True).tokens[0]]


def test_off_is_off(opened: Callable[..., tuple[LLM, DiskSessions]], tmp_path: Path) -> None:
    for settings in ({"ssd_session_cache": "off"}, {"session_cache_max_bytes": 0}):
        llm, disk = opened(**settings)
        assert not disk.ready(1)
        asked(llm)
        assert not (tmp_path / "cache").exists()

"""Guards what a user meets: messages with pictures, answers that drafts do not change, one clear error otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import selfdraft
from selfdraft.device import active_blas
from selfdraft.errors import CheckpointError, InvalidRequest, OutOfMemoryBudget
from selfdraft.keeping import DiskSessions
from selfdraft.llm import LLM
from selfdraft.params import SamplingParams
from selfdraft.prompts import Prompts
from selfdraft.settings import load_settings
from selfdraft.text import ChatTemplate
from tests.support.vision import asked, pictured, write_sighted

CAT, DOG = pictured(24, 32), pictured(33, 25, seed=1)
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
TALK: list[dict[str, Any]] = [asked("Look: ", CAT, " and ", DOG, "\nNow tell me a story about a penguin who sings.")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sighted(tmp_path_factory.mktemp("sighted") / "model")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return selfdraft.load(str(folder), settings=load_settings(prefill_chunk=16))


def encoded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Digests of the pictures that the tower runs for from now on."""
    found: list[str] = []
    assert llm.tower is not None
    encode = llm.tower.encode

    def counting(picture: Any, grid: Any) -> Any:
        found.append(picture.digest)
        return encode(picture, grid)

    monkeypatch.setattr(llm.tower, "encode", counting)
    return found


def test_it_is_said_that_images_are_read(llm: LLM) -> None:
    assert llm.vision
    described = llm.describe()
    assert described["vision"] == "loaded"
    assert llm.tower is not None
    assert described["weights_bytes"] == llm.loaded.nbytes + llm.tower.nbytes
    with_tower, without = (llm.checkpoint.weight_bytes(llm.loaded.dtype, tower=tower) for tower in (True, False))
    assert with_tower - without == llm.tower.nbytes
    assert llm.notes == []


def test_pictures_take_as_many_tokens_as_they_have_embeddings(llm: LLM) -> None:
    prompted = llm.prompted(TALK)
    assert llm.tower is not None
    counts = [llm.tower.grid(picture).tokens for picture in (CAT, DOG)]
    pad = llm.checkpoint.config["image_token_id"]
    assert [list(prompted.tokens).count(pad), prompted.tokens[-1] != pad] == [sum(counts), True]
    assert prompted.text is not None
    assert prompted.text.count("<|vision_start|><|image_pad|>") == 2
    keys, vocabulary = list(prompted.keys), llm.loaded.model.vocab_size
    assert [key for key in keys if key < vocabulary] == [token for token in prompted.tokens if token != pad]
    assert len({key for key in keys if key >= vocabulary}) == sum(counts)


@pytest.mark.skipif(active_blas() != "reference", reason="bit parity is claimed for reference BLAS only")
def test_drafts_change_nothing(llm: LLM) -> None:
    answers = [llm.generate(TALK, GREEDY.resolved({"depth": depth})) for depth in (0, 1, 3)]
    assert len({answer.text for answer in answers}) == 1
    seeded = SamplingParams(temperature=0.8, seed=3, max_tokens=16)
    assert len({llm.generate(TALK, seeded.resolved({"depth": depth})).text for depth in (0, 3)}) == 1
    assert answers[2].timings.emitted["draft"] > 0
    assert answers[2].timings.trunk_replays == 0


def test_the_next_turn_goes_on_behind_the_picture(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = [asked(pictured(40, 24, seed=7), "Tell me a story about a fox.")]
    ran = encoded(llm, monkeypatch)
    answer = llm.generate(begun, GREEDY)
    assert len(ran) == 1
    later = [*begun, {"role": "assistant", "content": answer.text}, {"role": "user", "content": "And then?"}]
    again = llm.generate(later, GREEDY)
    assert (len(ran), again.usage.cached_tokens > 24) == (1, True)
    other = [asked(pictured(40, 24, seed=8), "Tell me a story about a fox."), *later[1:]]
    assert llm.generate(other, GREEDY).usage.cached_tokens < 8
    assert len(ran) == 2


def test_a_new_process_goes_on_behind_the_picture(folder: Path, tmp_path: Path) -> None:
    settings = load_settings(ssd_session_cache="on", ssd_session_cache_dir=tmp_path)
    talk = [asked(CAT, "Tell me a story about a fox who went to the market and met a hen there. " * 2)]
    restored = []
    for _ in range(2):
        llm = selfdraft.load(str(folder), settings=settings)
        kept = DiskSessions(llm)
        assert kept.ready(30)
        answer = llm.generate(talk, GREEDY)
        restored.append(answer.usage.cached_tokens)
        talk = [*talk, {"role": "assistant", "content": answer.text}, {"role": "user", "content": "And then?"}]
        kept.close()
    assert restored[0] == 0
    assert restored[1] > llm.tower.grid(CAT).tokens  # type: ignore[union-attr]


def test_ids_of_long_ago_are_recalled_as_tokens(llm: LLM) -> None:
    prompted = llm.prompted(TALK)
    end = list(prompted.tokens).index(llm.tokenizer.token_id("<|im_end|>")) + 1
    llm.prompts.recall("another", prompted.keys[:end])
    assert llm.prompts._transcripts is not None
    found = llm.prompts._transcripts.longest("another", prompted.text or "")
    assert found is not None
    assert found[1] == list(prompted.tokens[:end])


def test_prompts_with_pictures_are_scored(llm: LLM) -> None:
    scores = llm.score(TALK)
    assert len(scores) == len(llm.prompted(TALK).tokens)
    other = llm.score([asked("Look: ", DOG, " and ", CAT, "\nNow tell me a story about a penguin who sings.")])
    sums = [sum(score.logprob for score in each if score) for each in (scores, other)]
    assert sums[0] != sums[1]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user", "content": [{"type": "video", "video": "x"}]}, "videos cannot be read"),
        ({"role": "user", "content": [{"type": "image", "image": "cat.png"}]}, "holds a Picture"),
        (asked("<|image_pad|>", CAT), "stands for an image"),
        (asked(CAT, pictured(1, 201)), "1x201 pixels"),
    ],
    ids=["video", "no picture", "token", "strip"],
)
def test_what_is_refused(llm: LLM, message: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        llm.prompted([message])


def test_text_may_hold_the_token_where_no_image_is(llm: LLM) -> None:
    assert llm.prompted([{"role": "user", "content": "<|image_pad|>"}]).inputs is None


def test_templates_that_write_no_images(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    blind = ChatTemplate("{% for m in messages %}{{ m.content if m.content is string else 'x' }}{% endfor %}!!")
    prompts = Prompts(llm.tokenizer, blind, None, llm.prompts._pictures)
    with pytest.raises(InvalidRequest, match="writes 0 of the 2 images"):
        prompts.chat(TALK)
    last = ChatTemplate("{% for m in messages %}Hi<|image_pad|><|image_pad|>{% endfor %}")
    with pytest.raises(InvalidRequest, match="ends with an image"):
        Prompts(llm.tokenizer, last, None, llm.prompts._pictures).chat(TALK)


def test_a_picture_too_large_for_the_memory_is_refused(folder: Path) -> None:
    llm = selfdraft.load(str(folder), settings=load_settings(memory_limit="200MiB"))
    assert llm.tower is not None
    llm.tower.working_bytes = lambda grid: 2**30  # type: ignore[method-assign]
    with pytest.raises(OutOfMemoryBudget, match="image"):
        llm.generate(TALK, GREEDY)
    assert llm.generate("Hi", GREEDY).text


@pytest.mark.parametrize(
    ("setting", "missing", "said"),
    [
        ("off", "", "vision is off"),
        ("auto", "preprocessor_config.json", "there is no preprocessor_config.json"),
        ("auto", "image_token_id", "no token None"),
        ("auto", "vision_config", "no vision_config"),
    ],
)
def test_without_what_it_takes(folder: Path, tmp_path: Path, setting: Any, missing: str, said: str) -> None:
    """Text goes on; what is missing is said at load, in `describe`, and to whoever sends an image."""
    for path in folder.iterdir():
        if path.name != missing:
            (tmp_path / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text())
    if config.pop(missing, None) is not None:
        (tmp_path / "config.json").unlink()
        (tmp_path / "config.json").write_text(json.dumps(config))
    llm = selfdraft.load(str(tmp_path), settings=load_settings(vision=setting))
    assert not llm.vision
    assert said in llm.describe()["vision"]
    assert llm.describe()["vision"].startswith("not loaded: ")
    assert any(said in note for note in llm.notes)
    assert llm.describe()["weights_bytes"] == llm.loaded.nbytes
    with pytest.raises(InvalidRequest, match=said):
        llm.generate(TALK, GREEDY)
    assert llm.generate("Hi", GREEDY).text
    if setting == "auto":
        with pytest.raises(CheckpointError, match=said):
            selfdraft.load(str(tmp_path), settings=load_settings(vision="on"))


def test_a_model_without_a_tower_says_so() -> None:
    llm = selfdraft.load()
    assert (llm.vision, llm.describe()["vision"], llm.notes) == (False, "none", [])
    with pytest.raises(InvalidRequest, match="has no vision tower"):
        llm.prompted(TALK)
    with pytest.raises(CheckpointError, match="has no vision tower"):
        selfdraft.load(settings=load_settings(vision="on"))

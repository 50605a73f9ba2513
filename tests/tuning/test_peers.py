"""Guards how other runtimes take part: driven as they document it, named where they cannot be, never left running.

`llama-server` is played by a script that answers in its format and notes what it was asked. mlx-vlm is played by
modules of its names, and by itself where it is installed. Speeds are not asserted.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from selfdraft.loading import load
from selfdraft.settings import load_settings
from selfdraft.tuning import peer_llama_cpp, peer_mlx_vlm
from selfdraft.tuning.peer import PeerError
from selfdraft.tuning.peer_llama_cpp import DRAFTS, find_gguf, llama_cpp_peer
from selfdraft.tuning.peer_mlx_vlm import MlxVlm, mlx_vlm_peer
from selfdraft.tuning.peers import drafting_peers
from selfdraft.tuning.subject import Subject, loaded, planted

SERVER = """\
#!{python}
import json, os, signal, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

how = json.loads(os.environ["STAND_IN"])
note = open(how["notes"], "a")
def tell(**what):
    print(json.dumps(what), file=note, flush=True)
tell(pid=os.getpid(), argv=sys.argv[1:], foreign=sorted(name for name in os.environ if name.startswith("LLAMA_")))
if how["stubborn"]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if how["dies"]:
    sys.exit("loading\\n" + how["dies"])

class Handler(BaseHTTPRequestHandler):
    loading = 2
    def log_message(self, *_): pass
    def answer(self, body, status=200):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())
    def do_GET(self):
        if self.path == "/health":
            Handler.loading -= 1
            self.answer({{"status": "ok"}}, 503 if Handler.loading >= 0 else 200)
        elif self.path == "/props":
            self.answer({{"build_info": "b7-abc"}})
        else:
            self.answer({{"data": [{{"meta": {{"n_vocab": how["vocab"], "n_embd": 384, "ftype": "Q8_0"}}}}]}})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tell(path=self.path, **asked)
        tokens = asked["n_predict"]
        times = {{"prompt_n": 5, "prompt_ms": 20.0, "predicted_n": tokens, "predicted_ms": 500.0}}
        if how["drafts"]:
            times |= {{"draft_n": 12, "draft_n_accepted": 4}}
        self.answer({{"content": "", "timings": times}})

port = int(sys.argv[sys.argv.index("--port") + 1])
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def subject() -> Subject:
    return loaded(load("reference", settings=load_settings(session_cache_max_bytes=0)))


@dataclass
class StandIn:
    """A `llama-server` on the PATH."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch

    def behaves(self, *, vocab: int = 8192, dies: str = "", stubborn: bool = False, drafts: bool = True) -> None:
        how = {"notes": str(self.notes), "vocab": vocab, "dies": dies, "stubborn": stubborn, "drafts": drafts}
        self.monkeypatch.setenv("STAND_IN", json.dumps(how))

    @property
    def notes(self) -> Path:
        return self.folder / "notes"

    @property
    def told(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.notes.read_text().splitlines()]

    @property
    def gguf(self) -> Path:
        return self.folder / "model.gguf"

    def ended(self) -> bool:
        return gone(self.told[0]["pid"])


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    program = tmp_path / "bin" / "llama-server"
    program.parent.mkdir()
    program.write_text(SERVER.format(python=sys.executable))
    program.chmod(0o755)
    (tmp_path / "model.gguf").touch()
    monkeypatch.setenv("PATH", str(program.parent))
    made = StandIn(tmp_path, monkeypatch)
    made.behaves()
    return made


def gone(pid: int, patience: float = 5.0) -> bool:
    """Whether a process ends, and is not left as a zombie of ours."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def refusal(subject: Subject, gguf: Path | None = None) -> str:
    with pytest.raises(PeerError) as caught, llama_cpp_peer(subject, gguf):
        pass
    return str(caught.value)


def test_llama_cpp_gets_ids_and_reports_its_own_times(subject: Subject, stand_in: StandIn) -> None:
    stand_in.monkeypatch.setenv("LLAMA_ARG_N_PREDICT", "1")
    stand_in.monkeypatch.setenv("LLAMA_API_KEY", "secret")
    with llama_cpp_peer(subject, stand_in.gguf) as peer:
        total = peer.decode([[5, 6, 7], [8]], 11)
        assert (peer.name, peer.version, peer.drafts) == (f"llama.cpp Q8_0, {DRAFTS} drafts", "b7-abc", DRAFTS)
    # Two answers of 11 tokens, the first of which came with the prompt; of the other ten four were drafts.
    assert (total.tokens, total.cycles) == (20, 12)
    assert total.rate == pytest.approx(20)
    assert total.prompt_seconds == pytest.approx(0.04)
    started, warm_up, *asked = stand_in.told
    argv = started["argv"]
    flags = dict(zip(argv[::2], argv[1::2], strict=True))
    assert flags["--model"] == str(stand_in.gguf)
    assert flags["--host"] == "127.0.0.1"
    assert (flags["--spec-type"], flags["--spec-draft-n-max"]) == ("draft-mtp", str(DRAFTS))
    assert ("--device" in flags) == (subject.described["device"] == "cpu")
    assert started["foreign"] == []  # nothing that a user set for other servers
    assert warm_up["prompt"] == list(subject.prompts[0])
    assert [(each["path"], each["prompt"], each["n_predict"]) for each in asked] == [
        ("/completion", [5, 6, 7], 11),
        ("/completion", [8], 11),
    ]
    assert all(each["temperature"] == 0 and each["ignore_eos"] and not each["cache_prompt"] for each in asked)
    assert stand_in.ended()


@pytest.mark.parametrize("leave", [KeyboardInterrupt, SystemExit, ValueError])
def test_llama_cpp_is_ended_however_the_run_ends(
    subject: Subject, stand_in: StandIn, leave: type[BaseException]
) -> None:
    with pytest.raises(leave), llama_cpp_peer(subject, stand_in.gguf):
        raise leave
    assert stand_in.ended()


def test_llama_cpp_that_does_not_listen_is_killed(subject: Subject, stand_in: StandIn) -> None:
    stand_in.behaves(stubborn=True)
    stand_in.monkeypatch.setattr(peer_llama_cpp, "GRACE", 0.2)
    with llama_cpp_peer(subject, stand_in.gguf):
        pass
    assert stand_in.ended()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_us_ends_the_process_too(number: signal.Signals) -> None:
    """Python dies of SIGTERM and SIGHUP without unwinding: a process in a session of its own would live on.

    Whoever runs the tests may have it ignore signals, as nohup does; a child inherits that.
    """
    usual = "default_int_handler" if number == signal.SIGINT else "SIG_DFL"
    code = (
        "import signal, tempfile, time\n"
        f"signal.signal({int(number)}, signal.{usual})\n"
        "from selfdraft.tuning.peer_llama_cpp import _process\n"
        "with tempfile.TemporaryFile() as said, _process(['/bin/sleep', '60'], said) as process:\n"
        "    print(process.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as ours:
        assert ours.stdout is not None
        theirs = int(ours.stdout.readline())
        ours.send_signal(number)
        assert ours.wait(20) != 0
    assert gone(theirs)


def test_without_llama_server_that_is_the_reason(subject: Subject, stand_in: StandIn) -> None:
    stand_in.monkeypatch.setenv("PATH", str(stand_in.folder))
    assert "not installed" in refusal(subject, stand_in.gguf)


def test_a_server_that_cannot_begin_is_quoted(subject: Subject, stand_in: StandIn) -> None:
    """As it was seen to do with a file without a head, and with a type of drafts that it does not know."""
    stand_in.behaves(dies="0.1 W srv: failed to fit\n0.2 E srv: failed to create MTP context\n0.3 E srv: exiting")
    assert refusal(subject, stand_in.gguf) == "llama-server ended with code 1: srv: failed to create MTP context"
    assert stand_in.ended()
    stand_in.behaves(dies='error while handling argument "--spec-type": unknown speculative type\n\nusage:\n')
    assert refusal(subject, stand_in.gguf).endswith('handling argument "--spec-type": unknown speculative type')


def test_a_server_that_never_gets_ready_is_given_up(subject: Subject, stand_in: StandIn) -> None:
    stand_in.monkeypatch.setattr(peer_llama_cpp, "PATIENCE", 0.0)
    assert "was not ready after 0 s" in refusal(subject, stand_in.gguf)


def test_decoding_without_drafts_is_no_peer(subject: Subject, stand_in: StandIn) -> None:
    stand_in.behaves(drafts=False)
    assert "without drafts" in refusal(subject, stand_in.gguf)
    assert stand_in.ended()


def test_another_model_is_refused(subject: Subject, stand_in: StandIn) -> None:
    stand_in.behaves(vocab=32000)
    assert "model.gguf is another model: it has a vocabulary of 32000, ours of 8192" in refusal(subject, stand_in.gguf)


def test_a_server_that_dies_later_is_a_peer_error(subject: Subject, stand_in: StandIn) -> None:
    with llama_cpp_peer(subject, stand_in.gguf) as peer:
        os.kill(stand_in.told[0]["pid"], signal.SIGKILL)
        with pytest.raises(PeerError, match="does not answer /completion"):
            peer.decode([[1]], 4)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (["tiny/model.gguf"], "tiny/model.gguf"),
        (["Tiny-Q8_0.gguf", "other.gguf"], "Tiny-Q8_0.gguf"),
        (
            ["tiny/a-00001-of-00002.gguf", "tiny/a-00002-of-00002.gguf", "tiny/mmproj-a.gguf"],
            "tiny/a-00001-of-00002.gguf",
        ),
        (["other.gguf"], "no GGUF file in"),
        (["tiny/a.gguf", "tiny-b.gguf"], r"several GGUF files \(a.gguf, tiny-b.gguf\)"),
    ],
)
def test_the_file_beside_the_model(tmp_path: Path, files: Sequence[str], found: str) -> None:
    (tmp_path / "tiny").mkdir()
    for file in files:
        (tmp_path / file).touch()
    if found.endswith(".gguf"):
        assert find_gguf(tmp_path / "tiny") == tmp_path / found
    else:
        with pytest.raises(PeerError, match=found):
            find_gguf(tmp_path / "tiny")


def test_who_is_not_here_is_a_line(subject: Subject, stand_in: StandIn) -> None:
    stand_in.monkeypatch.setenv("PATH", str(stand_in.folder))
    stand_in.monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with drafting_peers(subject, stand_in.gguf) as (peers, amiss):
        assert peers == []
    assert [line.split(" (")[0] for line in amiss] == ["mlx-vlm: not installed", "llama.cpp: not installed"]


def test_a_synthetic_model_has_nothing_for_them(stand_in: StandIn) -> None:
    stand_in.monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    tiny = planted("tiny", load_settings(dtype="float32"), acceptance=(1.0,))
    with drafting_peers(tiny, stand_in.gguf) as (peers, amiss):
        assert peers == []
    assert all("synthetic model" in line for line in amiss)
    assert len(amiss) == 2


@dataclass
class FakeVlm:
    """Modules of mlx-vlm's names, and what they were called with."""

    loaded: list[tuple[str, dict[str, Any], list[str]]]
    steps: list[dict[str, Any]]
    kind: str = "mtp"
    fails: bool = False


class Weights:
    """As much of a module as is looked at."""

    def __init__(self) -> None:
        self.config = types.SimpleNamespace(block_size=3)
        self.tensors = {"a": mx.ones((2,), mx.bfloat16), "b": mx.ones((2,), mx.uint32)}
        self.accept_lens: list[int] = []
        self.draft_lens: list[int] = []

    def parameters(self) -> dict[str, mx.array]:
        return self.tensors

    def update(self, tensors: dict[str, mx.array]) -> None:
        self.tensors = tensors


@pytest.fixture
def vlm(monkeypatch: pytest.MonkeyPatch) -> FakeVlm:
    fake = FakeVlm([], [])

    def seen(what: str, folder: Path) -> Weights:
        config = json.loads((folder / "config.json").read_text())
        fake.loaded.append((what, config, sorted(file.name for file in folder.iterdir())))
        return Weights()

    def generate_step(
        ids: mx.array, model: Weights, pixels: None, mask: None, **given: Any
    ) -> Iterator[tuple[int, None]]:
        if fake.fails:
            raise RuntimeError("no kernel\nat all")
        fake.steps.append({"ids": ids.tolist(), **given})
        drafter = given["draft_model"]
        drafter.draft_lens, drafter.accept_lens = [2, 2, 2, 1], [2, 0, 1, 1]
        yield from ((token, None) for token in range(given["max_tokens"]))

    parts: dict[str, dict[str, Any]] = {
        "mlx_vlm": {},
        "mlx_vlm.utils": {"load_model": lambda folder: seen("trunk", folder)},
        "mlx_vlm.generate": {"generate_step": generate_step},
        "mlx_vlm.speculative": {},
        "mlx_vlm.speculative.drafters": {"load_drafter": lambda folder: (seen("drafter", Path(folder)), fake.kind)},
    }
    for name, holds in parts.items():
        module = types.ModuleType(name)
        module.__dict__.update(holds)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(peer_mlx_vlm, "version", lambda name: "9.9")
    return fake


def test_mlx_vlm_is_shown_a_bare_checkpoint_under_the_names_it_knows(subject: Subject, vlm: FakeVlm) -> None:
    peer = mlx_vlm_peer(subject)
    assert (peer.version, peer.drafts) == ("9.9", 2)
    (trunk, config, files), (drafter, wrapped, same_files) = vlm.loaded
    assert (trunk, drafter) == ("trunk", "drafter")
    assert config["model_type"] == "qwen3_5_text"
    assert config["hidden_size"] == 384
    assert "text_config" not in config
    assert wrapped["model_type"] == "qwen3_5"
    assert wrapped["text_config"] == config
    assert files == same_files
    assert "model.safetensors" in files
    dtype = getattr(mx, subject.described["dtype"])
    assert [peer.model.tensors[name].dtype for name in "ab"] == [dtype, mx.uint32]
    assert peer.drafter.tensors["a"].dtype == dtype


def test_mlx_vlm_reads_a_wrapped_checkpoint_where_it_lies(tmp_path: Path) -> None:
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"model.language_model.norm.weight": mx.ones((1,))})
    assert peer_mlx_vlm._folders(tmp_path, {}, tmp_path / "none") == (tmp_path, tmp_path)


def test_mlx_vlm_decodes_with_drafts_and_is_counted_like_us(subject: Subject, vlm: FakeVlm) -> None:
    total = mlx_vlm_peer(subject).decode([[5, 6], [7]], 6)
    assert [step["ids"] for step in vlm.steps] == [[[5, 6]], [[7]]]
    assert all(
        (step["draft_kind"], step["draft_block_size"], step["temperature"]) == ("mtp", 3, 0) for step in vlm.steps
    )
    assert (total.tokens, total.cycles) == (10, 8)
    # Of cycles with 2, 2, 2, 1 drafts 2, 0, 1, 1 stayed: three of four first ones, then one of two second ones. Twice.
    assert (list(total.tried), list(total.accepted)) == ([8, 4], [6, 2])


def test_mlx_vlm_that_cannot_is_a_reason_in_one_line(subject: Subject, vlm: FakeVlm) -> None:
    peer = mlx_vlm_peer(subject)
    vlm.fails = True
    with pytest.raises(PeerError, match=r"^decoding failed \(RuntimeError: no kernel\)$"):
        peer.decode([[1]], 4)
    vlm.kind = "dflash"
    with pytest.raises(PeerError, match=r"cannot load this model .*'dflash'"):
        mlx_vlm_peer(subject)


def test_mlx_vlm_without_a_head_is_no_peer(subject: Subject, vlm: FakeVlm) -> None:
    model = types.SimpleNamespace(max_depth=0)
    with pytest.raises(PeerError, match="no MTP head"):
        mlx_vlm_peer(replace(subject, engine=types.SimpleNamespace(model=model)))  # type: ignore[arg-type]


@pytest.mark.skipif(importlib.util.find_spec("mlx_vlm") is None, reason="mlx-vlm is not installed")
@pytest.mark.filterwarnings("ignore")
def test_mlx_vlm_itself_decodes_the_bundled_model(subject: Subject) -> None:
    """Its greedy drafts stay about as often as ours; if its head did not see the prompt, about half would."""
    with contextlib.redirect_stderr(None):
        peer: MlxVlm = mlx_vlm_peer(subject)
    total = peer.decode(subject.prompts, 24)
    assert total.tokens == 4 * 23
    assert total.cycles < total.tokens
    assert total.acceptance[0] > 0.7

"""Guards what leaves the machine: no key, token, name of user or host, home folder or text of a user is in a bundle,
wherever it stood; and no file is overwritten.
"""

from __future__ import annotations

import getpass
import json
import platform
import socket
import stat
import zipfile
from pathlib import Path
from typing import Any

import pytest

from selfdraft.cli.settings import kinds
from selfdraft.doctor.bundle import write_bundle
from selfdraft.doctor.context import Context
from selfdraft.doctor.finding import Finding
from selfdraft.doctor.redaction import Redactor, log_without_texts
from selfdraft.doctor.report import Report, examine
from selfdraft.errors import InvalidRequest

USER, HOST = "wilhelmina", "blue-whale"
API_KEY = "correcthorsebatterystaple"
FILE_KEYS = ("sd-first0123456789abcdefgh", "plain-second-key-of-the-file")
HUB_TOKEN = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz"
TYPED = "typed-where-it-does-not-belong"
PROMPTS = ("my diagnosis is a secret of mine", "it's the patient's file", "second line of a prompt")

LOG = f"""2026-01-02 03:04:05,678 INFO selfdraft.engine.engine: row done: prompt=7 emitted=9
2026-01-02 03:04:06,678 WARNING selfdraft.server: setting stop: got '{PROMPTS[0]}' and "{PROMPTS[1]}"
2026-01-02 03:04:06,700 INFO selfdraft.server.run: Bearer {API_KEY} from {HOST}.example.org in /home/{USER}/work
{PROMPTS[2]}
and its third
2026-01-02 03:04:07,678 ERROR selfdraft.server.service: an answer failed
Traceback (most recent call last):
  File "/home/{USER}/selfdraft/engine.py", line 12, in step
    call({PROMPTS[0]!r})
ValueError: cannot read {PROMPTS[0]}
2026-01-02 03:04:08,000 INFO selfdraft.x: b'{PROMPTS[0]}' the server's log, {USER}@example.org
2026-01-02 03:04:08,000 INFO selfdraft.x: sk-proj-0123456789abcdefghij
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another user on another machine."""
    home = tmp_path / "home" / USER
    home.mkdir(parents=True)
    for name in ("USER", "LOGNAME"):
        monkeypatch.setenv(name, USER)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(getpass, "getuser", lambda: USER)
    monkeypatch.setattr(socket, "gethostname", lambda: f"{HOST}.example.org")
    monkeypatch.setattr(platform, "node", lambda: f"{HOST}.example.org")
    return home


@pytest.fixture
def planted(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Secrets wherever they may stand."""
    config = home / ".config"
    config.mkdir()
    monkeypatch.setenv("SELFDRAFT_CONFIG_DIR", str(config))
    monkeypatch.setenv("SELFDRAFT_API_KEY", API_KEY)
    monkeypatch.setenv("HF_TOKEN", HUB_TOKEN)
    keys = home / "keys.txt"
    keys.write_text("\n".join(FILE_KEYS))
    keys.chmod(0o600)
    (config / "settings.toml").write_text(
        f'[server]\napi_key_file = "{keys}"\nallowed_host = ["{HOST}.lan"]\n'
        f'cors_origin = ["http://{HOST}.lan:3000"]\n[start]\nmodel = "{home}/models/of-{USER}"\n'
    )
    return home


SECRETS = (USER, HOST, API_KEY, *FILE_KEYS, HUB_TOKEN, TYPED, *PROMPTS)


def content(path: Path) -> str:
    with zipfile.ZipFile(path) as archive:
        return "\n".join([*archive.namelist(), *(archive.read(name).decode() for name in archive.namelist())])


def bundled(home: Path, log: str | None = LOG, **also: str) -> str:
    context = Context(kinds)
    report = examine(context)
    said = [Finding(name, "warn", text, text, text, {text: [text]}) for name, text in also.items()]
    path, file = home.parent / "report.zip", None
    if log is not None:
        file = home / f"{USER}.log"
        file.write_text(log)
    write_bundle(path, Report([*report.findings, *said], report.settings), context, file)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    return content(path)


def test_no_secret_is_in_a_bundle(planted: Path) -> None:
    everything = " ".join((str(planted), f"/Users/{USER}/x", f"/home/somebody/{USER}", USER.upper(), *SECRETS[:-4]))
    text = bundled(planted, finding=everything)
    for secret in (*SECRETS, str(planted), "somebody", "patient", "diagnosis", "sk-proj", "example.org in", "third"):
        assert secret.lower() not in text.lower(), f"{secret!r} is in the bundle"
    for kept in (
        "~/models/of-<user>",
        "<host>",
        "<secret>",
        "********",
        "row done: prompt=7 emitted=9",
        "line 12, in step",
    ):
        assert kept in text
    assert '"schema_version": 1' in text


@pytest.mark.parametrize(
    "line",
    [
        f'[server]\napi_key = "{TYPED}"',
        f'[server]\napi_kee = "{TYPED}"',
        f'api_key = "{TYPED}"',
        f'[sever]\nkeys = ["{TYPED}"]',
        f'[server]\nport = 1\nnested = {{deep = "{TYPED}"}}',
        f'x = "{TYPED}',
    ],
)
def test_a_key_in_a_wrong_place_of_the_file_is_not_in_a_bundle(planted: Path, line: str) -> None:
    """The finding that the line is wrong is there, and would quote it."""
    (planted / ".config" / "settings.toml").write_text(f"{line}\n")
    text = bundled(planted, None)
    found = {each["name"]: each for each in json.loads(text.partition("\n")[2])["findings"]}
    assert found["settings"]["status"] == "fail"
    for secret in (TYPED, API_KEY, HUB_TOKEN):
        assert secret not in text


def test_structure_survives_names_that_are_words(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "a")
    monkeypatch.setenv("SOME_KEY", "true")
    redactor = Redactor(["x", ""])
    tree = {"a": [1, True, None, "a cat, Aa"], "name": "x-ray"}
    assert redactor.tree(tree) == {"<user>": [1, True, None, "<user> cat, Aa"], "name": "x-ray"}


def test_a_secret_within_another_is_taken_out_whole() -> None:
    assert Redactor(["abcd", "abcdefgh"]).text("xabcdefghx abcd") == "x<secret>x <secret>"


def test_a_log_keeps_what_selfdraft_says() -> None:
    lines = log_without_texts(LOG).splitlines()
    assert lines[0] == LOG.splitlines()[0]
    assert lines[1].endswith("WARNING selfdraft.server: setting stop: got <text>")
    assert lines[3] == "[2 lines left out]"
    assert [line.split()[0] for line in lines[5:7]] == ["Traceback", "File"]
    assert lines[7:9] == ["[1 line left out]", "ValueError: <text>"]
    assert log_without_texts("") == ""
    assert log_without_texts("words\n") == "[1 line left out]\n"


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("rows' memory and 'mine'", "rows' memory and <text>"),
        ("MLX's own \"mine", "MLX's own <text>"),
        ("b'mine' is 'it's mine'", "<text>"),
        ("no quotes", "no quotes"),
    ],
)
def test_quotes(said: str, kept: str) -> None:
    head = "2026-01-02 03:04:05,678 INFO selfdraft.x: "
    assert log_without_texts(f"{head}{said}\n") == f"{head}{kept}\n"


def test_the_end_of_a_long_log(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfdraft.doctor.bundle._LOG_BYTES", 200)
    line = "2026-01-02 03:04:05,678 INFO selfdraft.x: number {}\n"
    text = bundled(home, "".join(line.format(number) for number in range(100)))
    assert "number 99" in text
    assert "number 90" not in text
    assert "left out" not in text  # begins with a whole line


def test_nothing_is_overwritten(home: Path) -> None:
    context, report = Context(kinds), Report([], [])
    path = home / "there.zip"
    path.write_text("mine")
    with pytest.raises(InvalidRequest, match="exists, and is left as it is"):
        write_bundle(path, report, context)
    assert path.read_text() == "mine"
    link = home / "link.zip"
    link.symlink_to(home / "elsewhere.zip")
    with pytest.raises(InvalidRequest):
        write_bundle(link, report, context)
    with pytest.raises(InvalidRequest, match=r"the log .* cannot be read"):
        write_bundle(home / "new.zip", report, context, home / "no.log")
    assert not (home / "new.zip").exists()


def test_a_bundle_without_a_log(home: Path) -> None:
    path = home / "new.zip"
    found: Any = write_bundle(path, Report([], []), Context(kinds))
    assert found == ["report.json"]

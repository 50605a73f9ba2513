"""The coding agents: how each is set up against a server and asked one thing. Knows their settings, no wire format."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["AGENTS", "FOLDER", "MODEL", "NOTES", "PINNED", "PROMPT", "Agent", "call"]

FOLDER = Path(__file__).parents[2] / ".agents"  # where scripts/setup_agents.sh puts them
PINNED: dict[str, str] = json.loads(Path(__file__).with_name("package.json").read_text())["dependencies"]
MODEL = "reference"
KEY = "local-key-0123456789"
PROMPT = "Say hello."
NOTES = "the word is cormorant\n"  # what is in notes.txt, for an agent that reads it

# They may talk to the server and to nobody else: what they send elsewhere goes to a proxy that is not there.
OFFLINE = {"HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}


@dataclass(frozen=True)
class Agent:
    """A coding agent.

    Attributes:
        package: its name on npm; package.json pins the version.
        command: its command line, without the prompt; the first word is a program in .agents.
        configure: writes its settings into a home for a server's address, and says what the environment must hold.
        calls: tool calls in the model's own syntax, one answer each, that take it through its tools.
    """

    package: str
    command: tuple[str, ...]
    configure: Callable[[Path, str], dict[str, str]]
    calls: tuple[str, ...]

    def ask(
        self, url: str, place: Path, *, timeout: float, think: bool = True, prompt: str = PROMPT
    ) -> subprocess.CompletedProcess[str]:
        """One turn, in a fresh home and an empty project with one file.

        Args:
            url: the server.
            place: an empty folder.
            timeout: seconds.
            think: let an agent ask for reasoning that does so by itself.
        """
        home, project = place / "home", place / "project"
        home.mkdir()
        project.mkdir()
        (project / "notes.txt").write_text(NOTES)
        environment = {"HOME": str(home), "PATH": os.environ["PATH"], **OFFLINE, **self.configure(home, url)}
        if not think:
            environment["MAX_THINKING_TOKENS"] = "0"
        program = FOLDER / "node_modules" / ".bin" / self.command[0]
        return subprocess.run(
            [program, *self.command[1:], prompt],
            cwd=project,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    @property
    def version(self) -> str:
        """The version that is installed.

        Raises:
            FileNotFoundError: none is.
        """
        return str(json.loads((FOLDER / "node_modules" / self.package / "package.json").read_text())["version"])


def call(name: str, **arguments: str) -> str:
    """A tool call as the reference model writes it."""
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def _claude(home: Path, url: str) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": KEY,
        "ANTHROPIC_MODEL": MODEL,
        "API_TIMEOUT_MS": "1800000",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "512",
        "CLAUDE_CODE_MAX_RETRIES": "0",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_TELEMETRY": "1",
    }


def _codex(home: Path, url: str) -> dict[str, str]:
    folder = home / ".codex"
    folder.mkdir()
    (folder / "config.toml").write_text(f"""\
model = "{MODEL}"
model_provider = "selfdraft"
check_for_update_on_startup = false

[model_providers.selfdraft]
name = "Selfdraft"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "SELFDRAFT_API_KEY"
request_max_retries = 0
stream_max_retries = 0

[analytics]
enabled = false
""")
    return {"SELFDRAFT_API_KEY": KEY}


def _opencode(home: Path, url: str) -> dict[str, str]:
    folder = home / ".config" / "opencode"
    folder.mkdir(parents=True)
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Selfdraft",
        "options": {"baseURL": f"{url}/v1", "apiKey": KEY},
        "models": {MODEL: {"name": MODEL, "limit": {"context": 32768, "output": 512}}},
    }
    settings = {
        "model": f"selfdraft/{MODEL}",
        "small_model": f"selfdraft/{MODEL}",
        "autoupdate": False,
        "share": "disabled",
        "provider": {"selfdraft": provider},
    }
    (folder / "opencode.json").write_text(json.dumps(settings))
    return {
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
    }


AGENTS = {
    "claude-code": Agent(
        "@anthropic-ai/claude-code",
        ("claude", "-p"),
        _claude,
        (call("ToolSearch", query="select:WebFetch"), call("Read", file_path="notes.txt")),
    ),
    "codex": Agent(
        "@openai/codex",
        ("codex", "exec", "--skip-git-repo-check"),
        _codex,
        (call("exec_command", cmd="cat notes.txt"), call("multi_agent_v1__wait_agent", targets='["x"]')),
    ),
    "opencode": Agent(
        "opencode-ai",
        ("opencode", "run"),
        _opencode,
        (call("read", filePath="notes.txt") + "\n" + call("bash", command="ls", description="List files"),),
    ),
}

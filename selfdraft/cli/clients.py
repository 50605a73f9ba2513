"""What each client wants to be told to use a server of ours. Knows their settings' names; touches no file.

Names were checked against Claude Code 2.1, Codex 0.171 and opencode 1.18, and the documentation of the others.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

__all__ = ["CLIENTS", "KEY_VARIABLE", "Client", "Endpoint", "Key"]

KEY_VARIABLE = "SELFDRAFT_API_KEY"

Format = Literal["json", "toml", "yaml", "env", "form"]

_NO_KEY = "selfdraft"  # clients insist on a key; a server without one takes any


@dataclass(frozen=True)
class Key:
    """Where a client finds the API key; the key itself is never written into its settings.

    Attributes:
        needed: the server asks for one.
        file: the file that holds it; None if it is in the environment.
    """

    needed: bool = False
    file: Path | None = None

    @property
    def note(self) -> list[str]:
        """How to bring the key into the environment, if that is where a client looks."""
        if not self.needed:
            return []
        value = f'"$(cat {shlex.quote(str(self.file))})"' if self.file else "the server's API key"
        return [f"it reads the key from the environment: export {KEY_VARIABLE}={value}"]


@dataclass(frozen=True)
class Endpoint:
    """A server as clients see it.

    Attributes:
        url: without a path.
        model: the name to ask for.
        context: most tokens of prompt and answer together; None if nobody could be asked.
        output: tokens of an answer to plan for, likewise. An agent keeps this much of the context free; were it all of
            it, it would sum up its history at every turn.
    """

    url: str
    model: str
    context: int | None = None
    output: int | None = None
    key: Key = Key()

    @property
    def v1(self) -> str:
        """Where the OpenAI API lies."""
        return f"{self.url}/v1"


@dataclass(frozen=True)
class Client:
    """A client's settings.

    Attributes:
        settings: what to merge into its file; None as a value means to take the setting out, a list of mappings to
            replace the entries of the same `name` or `model_name`.
        format: of its file: "env" are environment variables, "form" fields to fill in by hand.
        path: its file; None if it has none that others should write, and `notes` says why.
        absent: settings that are added only where there are none.
        notes: what else a user must know or do.
    """

    settings: Mapping[str, Any]
    format: Format
    path: Path | None = None
    absent: Mapping[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def _claude_code(to: Endpoint) -> Client:
    env: dict[str, str | None] = {
        "ANTHROPIC_BASE_URL": to.url,
        "ANTHROPIC_AUTH_TOKEN": None if to.key.needed else _NO_KEY,
        "ANTHROPIC_MODEL": to.model,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": to.model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": to.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": to.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # it changes with every request, at the very start of the prompt
    }
    if to.context:
        env |= {
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(to.context),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(to.output),
        }
    settings: dict[str, Any] = {"env": env}
    notes = ["`claude --settings FILE` takes the same settings for one run only, from a file of your own"]
    if to.key.needed:
        command = f"cat {shlex.quote(str(to.key.file))}" if to.key.file else f"printenv {KEY_VARIABLE}"
        settings["apiKeyHelper"] = command
        notes += [] if to.key.file else to.key.note
    folder = Path(os.environ.get("CLAUDE_CONFIG_DIR") or "~/.claude").expanduser()
    return Client(settings, "json", folder / "settings.json", notes=notes)


def _codex(to: Endpoint) -> Client:
    provider: dict[str, str | None] = {
        "name": "Selfdraft",
        "base_url": to.v1,
        "wire_api": "responses",
        "env_key": KEY_VARIABLE if to.key.needed else None,
    }
    settings: dict[str, Any] = {"model": to.model, "model_provider": "selfdraft"}
    if to.context and to.output:
        # Codex has no setting for the length of a reply: what is kept free for it is when it sums up the history.
        settings |= {
            "model_context_window": to.context,
            "model_auto_compact_token_limit": to.context - to.output,
        }
    settings["model_providers"] = {"selfdraft": provider}
    folder = Path(os.environ.get("CODEX_HOME") or "~/.codex").expanduser()
    return Client(settings, "toml", folder / "config.toml", notes=to.key.note)


def _opencode(to: Endpoint) -> Client:
    model: dict[str, Any] = {"name": to.model}
    if to.context:
        model["limit"] = {"context": to.context, "output": to.output}
    key = f"{{file:{to.key.file}}}" if to.key.file else f"{{env:{KEY_VARIABLE}}}"
    settings = {
        "model": f"selfdraft/{to.model}",
        "small_model": f"selfdraft/{to.model}",
        "provider": {
            "selfdraft": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "Selfdraft",
                "options": {"baseURL": to.v1, "apiKey": key if to.key.needed else _NO_KEY},
                "models": {to.model: model},
            }
        },
    }
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "opencode"
    path = folder / "opencode.json"
    if (folder / "opencode.jsonc").exists() and not path.exists():
        path = folder / "opencode.jsonc"
    notes = [] if to.key.file else to.key.note
    return Client(settings, "json", path, {"$schema": "https://opencode.ai/config.json"}, notes)


def _continue(to: Endpoint) -> Client:
    model: dict[str, Any] = {
        "name": "Selfdraft",
        "provider": "openai",
        "model": to.model,
        "apiBase": to.v1,
        "apiKey": f"${{{{ secrets.{KEY_VARIABLE} }}}}" if to.key.needed else _NO_KEY,
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use"],
    }
    if to.context:
        model["defaultCompletionOptions"] = {"contextLength": to.context, "maxTokens": to.output}
    folder = Path(os.environ.get("CONTINUE_GLOBAL_DIR") or "~/.continue").expanduser()
    notes = [f"it reads the key from {folder / '.env'}: add {KEY_VARIABLE}=the server's API key"]
    absent = {"name": "Local", "version": "1.0.0", "schema": "v1"}
    return Client({"models": [model]}, "yaml", folder / "config.yaml", absent, notes if to.key.needed else [])


def _litellm(to: Endpoint) -> Client:
    entry: dict[str, Any] = {
        "model_name": to.model,
        "litellm_params": {
            "model": f"openai/{to.model}",
            "api_base": to.v1,
            "api_key": f"os.environ/{KEY_VARIABLE}" if to.key.needed else _NO_KEY,
        },
    }
    if to.context and to.output:
        entry["model_info"] = {"max_input_tokens": to.context - to.output, "max_output_tokens": to.output}
    notes = ["`litellm --config FILE` reads it; --file says which", *to.key.note]
    return Client({"model_list": [entry]}, "yaml", Path("litellm_config.yaml"), notes=notes)


def _openwebui(to: Endpoint) -> Client:
    settings = {
        "ENABLE_OPENAI_API": "True",
        "OPENAI_API_BASE_URLS": to.v1,
        "OPENAI_API_KEYS": f"${KEY_VARIABLE}" if to.key.needed else _NO_KEY,
        "DEFAULT_MODELS": to.model,
    }
    notes = [
        "Open WebUI has no file of its own: it reads these from the environment of its first start and keeps them in "
        "its database; later change them under Admin Settings, Connections",
        "in a container it reaches this machine as host.docker.internal: write that into the URL, and start the server "
        "with --host 0.0.0.0, a key and --allowed-host host.docker.internal",
    ]
    return Client(settings, "env", notes=[*notes, *to.key.note])


def _cline(to: Endpoint) -> Client:
    settings: dict[str, Any] = {
        "API Provider": "OpenAI Compatible",
        "Base URL": to.v1,
        "API Key": f"the value of {KEY_VARIABLE}" if to.key.needed else _NO_KEY,
        "Model ID": to.model,
    }
    if to.context:
        settings |= {"Context Window Size": to.context, "Max Output Tokens": to.output}
    note = "Cline keeps its settings inside VS Code's own storage, where no other program should write"
    return Client(settings, "form", notes=[f"{note}: enter these in its settings (the last ones under Model Config)"])


CLIENTS: Mapping[str, Callable[[Endpoint], Client]] = {
    "claude-code": _claude_code,
    "codex": _codex,
    "opencode": _opencode,
    "cline": _cline,
    "continue": _continue,
    "openwebui": _openwebui,
    "litellm": _litellm,
}

"""Chat templates: messages to one prompt string, in a sandbox. Knows Jinja; nothing of tokens or models.

A template comes with the checkpoint and is code from a stranger: it runs in Jinja's immutable sandbox, reaching
for Python internals is an error, and time and size of its output are bounded.

The rendered prompt is tokenised as one string with special tokens recognised, as every runtime does. So a
user message that contains `<|im_end|>` ends its own turn: message text is not a security boundary, and an
application that puts untrusted text into a message must remove such markers first.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence, Sized
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils
from jinja2.exceptions import SecurityError

from ..errors import CheckpointError, InvalidRequest, SelfdraftError
from ._deadline import DeadlineExceeded, deadline
from ._files import read_json, read_text, token_content
from .messages import place_instructions, prepare_messages, prepare_tools

__all__ = ["TEMPLATE_VARIABLES", "ChatTemplate"]

# What a request may set besides the named parameters. Anything else could shadow what the template relies on.
TEMPLATE_VARIABLES = frozenset(
    {
        "add_vision_id",
        "builtin_tools",
        "clear_thinking",
        "date_string",
        "documents",
        "model_identity",
        "preserve_thinking",
        "reasoning_effort",
        "thinking",
        "thinking_budget",
    }
)

MAX_SECONDS = 10.0  # to render; a long coding session takes milliseconds
MAX_CHARACTERS = 64 * 2**20  # of a prompt
MAX_BITS = 4096  # of a whole number

_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the Jinja text.
        tokens: special tokens the template may print, as {"bos_token": "<s>"}.
        origin: where it was read, for messages about the file; those about a conversation go to clients, and name none.

    Attributes:
        source: the Jinja text.
        tokens: special tokens it may print.
        variables: names the template reads from outside ("enable_thinking" in it: the template knows
            thinking).

    Raises:
        CheckpointError: the template does not compile.
    """

    def __init__(self, source: str, *, tokens: Mapping[str, str] | None = None, origin: str = "chat template") -> None:
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Namespace)
        self.source = source
        self.tokens = dict(tokens or {})
        self._origin = origin
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except (jinja2.TemplateError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            at = "" if line is None else f" at line {line}"
            raise CheckpointError(f"{origin} is not a valid chat template{at}: {error}") from error
        self.variables: frozenset[str] = frozenset(jinja2.meta.find_undeclared_variables(tree))

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate | None:
        """The template in chat_template.jinja, else the one in tokenizer_config.json, else None.

        Raises:
            CheckpointError: a file is malformed, the template does not compile, or a list of named templates
                has no `default`.
        """
        folder = Path(folder)
        config = read_json(folder / "tokenizer_config.json")
        path = folder / "chat_template.jinja"
        source = read_text(path)
        if source is None:
            path = folder / "tokenizer_config.json"
            source = _configured(config.get("chat_template"), path)
        if source is None:
            return None
        tokens = {name: content for name in _TOKEN_NAMES if (content := token_content(config.get(name))) is not None}
        return cls(source, tokens=tokens, origin=str(path))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = False,
        continue_final: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt string. `messages.prepare_messages` says what happens to the messages first.

        Args:
            messages: dicts with a role, content (string, None or list of parts) and what the template reads
                besides.
            tools: tool definitions as the template expects them; an empty list is none.
            add_generation_prompt: end with the opening of the assistant's turn.
            enable_thinking: passed under this name; None leaves it undefined, for the template's own default.
            continue_final: end inside the last message, which must be an assistant's with text: the answer goes on
                where that text ends.
            variables: further template variables, out of TEMPLATE_VARIABLES.

        Raises:
            InvalidRequest: malformed messages or tools, a variable that may not be set, or a conversation the
                template rejects or cannot render.
            CheckpointError: the template tried to leave the sandbox.
        """
        for name in variables:
            if name not in TEMPLATE_VARIABLES:
                raise InvalidRequest(
                    f"template variable {name!r} is not one of {', '.join(sorted(TEMPLATE_VARIABLES))}",
                    param="chat_template_kwargs",
                )
        prepared = self._placed(prepare_messages(messages))
        end = _mark_end(prepared) if continue_final else None
        context: dict[str, Any] = {
            **self.tokens,
            **variables,
            "messages": prepared,
            "tools": prepare_tools(tools),
            "add_generation_prompt": add_generation_prompt and not continue_final,
        }
        if enable_thinking is not None:
            context["enable_thinking"] = enable_thinking
        text = self._rendered(context)
        if end is None:
            return text
        if text.count(end) != 1:
            raise InvalidRequest(
                "the chat template cannot continue the last message of this conversation", param="messages"
            )
        return text[: text.index(end)]

    def _placed(self, messages: list[dict[str, Any]]) -> list[Mapping[str, Any]]:
        late = any(message["role"] == "system" for message in messages[1:]) and self.takes_late_instructions
        return place_instructions(messages, late=late)

    @cached_property
    def takes_late_instructions(self) -> bool:
        """Whether it renders a system message that is not the first."""
        mark = "late instructions"
        roles = ("user", "assistant", "system", "user")
        messages = [{"role": role, "content": mark if role == "system" else "-"} for role in roles]
        try:
            return mark in self._rendered({**self.tokens, "messages": messages, "tools": None})
        except SelfdraftError:
            return False

    def _rendered(self, context: Mapping[str, Any]) -> str:
        try:
            pieces, size = [], 0
            with deadline(MAX_SECONDS):
                for piece in self._template.generate(context):
                    size += len(piece)
                    if size > MAX_CHARACTERS:
                        raise InvalidRequest(
                            f"the chat template makes a prompt of over {MAX_CHARACTERS} characters", param="messages"
                        )
                    pieces.append(piece)
            return "".join(pieces)
        except InvalidRequest:
            raise
        except DeadlineExceeded as error:
            raise InvalidRequest(
                f"the chat template took more than {MAX_SECONDS:g} s to render these messages", param="messages"
            ) from error
        except SecurityError as error:
            raise CheckpointError(f"{self._origin} was refused: {error}") from error
        except _Rejected as error:
            raise InvalidRequest(f"the chat template refuses this conversation: {error}", param="messages") from error
        except Exception as error:  # a template is foreign code: any Python error can come out of it
            raise InvalidRequest(
                f"the chat template cannot render these messages ({type(error).__name__}: {error}). "
                "They lack something it reads, or the template is faulty.",
                param="messages",
            ) from error


def _mark_end(messages: list[Mapping[str, Any]]) -> str:
    """Put a mark behind the text of the last message, where the prompt will be cut."""
    last = messages[-1]
    if last.get("role") != "assistant" or not isinstance(last.get("content"), str) or last.get("tool_calls"):
        raise InvalidRequest("only an assistant's last message with text can be continued", param="messages")
    mark = f"<mark {secrets.token_hex(16)}>"
    messages[-1] = {**last, "content": last["content"] + mark}
    return mark


def _configured(value: object, path: Path) -> str | None:
    """The template in a config: a string, or a list of {"name": ..., "template": ...}."""
    if value is None or isinstance(value, str):
        return value
    named: dict[str, str] = {}
    for entry in value if isinstance(value, list) else [value]:
        match entry:
            case {"name": str(name), "template": str(template)}:
                named[name] = template
            case _:
                raise CheckpointError(
                    f"chat_template in {path} must be a string or a list of {{name, template}}, "
                    f"not {type(value).__name__}."
                )
    if named and "default" not in named:
        raise CheckpointError(f"chat_template in {path} has no 'default', only: {', '.join(named)}.")
    return named.get("default")


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja lets a forbidden attribute print as nothing; here reaching for one is refused.

    So is a product or power of a size that no prompt needs: it is one step, which the time limit cannot break off.
    """

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if _too_large(operator, left, right):
            raise SecurityError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        if attribute.startswith("_"):
            raise SecurityError(f"access to attribute {attribute!r} of a {type(obj).__name__}")
        return super().unsafe_undefined(obj, attribute)


def _too_large(operator: str, left: Any, right: Any) -> bool:
    if isinstance(left, int) and isinstance(right, int):
        length = left.bit_length()
        return (length * right if operator == "**" else length + right.bit_length()) > MAX_BITS
    pairs = [(left, right), (right, left)] if operator == "*" else []
    return any(
        isinstance(many, Sized) and isinstance(times, int) and len(many) * times > MAX_CHARACTERS
        for many, times in pairs
    )


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without underscore names, which Jinja itself would use as hooks of the object."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be an attribute's name
        self, args = args[0], args[1:]
        jinja2.utils.Namespace.__init__(self, *args, **kwargs)
        for name in dict(*args, **kwargs):
            _check_name(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"namespace attribute {name!r} begins with an underscore")


class _GenerationBlock(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %} marks training targets; in a prompt it is just its body."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Rejected(jinja2.TemplateError):
    """What a template's raise_exception raises."""


def _raise_exception(message: str) -> None:
    raise _Rejected(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes <, >, & and non-ASCII and sorts keys: models were not trained on that."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

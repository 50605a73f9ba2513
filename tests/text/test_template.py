"""Guards: the reference template's exact prompts, faithful tojson, a sandbox that templates cannot leave."""

from __future__ import annotations

import copy
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from selfdraft.errors import CheckpointError, InvalidRequest
from selfdraft.text import ChatTemplate, Tokenizer
from selfdraft.text.messages import prepare_messages

USER = {"role": "user", "content": "Hi"}
TOOL = {
    "type": "function",
    "function": {"name": "météo", "parameters": {"z": {"type": "string"}, "a": "<b> & 'c'"}},
}
TOOLS_TEXT = (
    "<|im_start|>system\n# Tools\n\nYou may call these functions:\n\n<tools>\n"
    '{"type": "function", "function": {"name": "météo", '
    '"parameters": {"z": {"type": "string"}, "a": "<b> & \'c\'"}}}'
    "\n</tools>\n\nTo call a function, reply only in this format:\n\n<tool_call>\n<function=function_name>\n"
    "<parameter=parameter_name>\nvalue\n</parameter>\n</function>\n</tool_call>"
)
NO_THINKING = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
THINKING = "<|im_start|>assistant\n<think>\n"
ARGUMENTS = {"city": "Zürich", "days": 3, "units": {"t": "°C"}, "brief": True}
CALLED = (
    "<tool_call>\n<function=météo>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    '<parameter=units>\n{"t": "°C"}\n</parameter>\n<parameter=brief>\ntrue\n</parameter>\n'
    "</function>\n</tool_call>"
)


def conversation(arguments: object) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "météo", "arguments": arguments}}
    return [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Looking.", "reasoning_content": "need data", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "12"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "rain"}]},
    ]


TOOL_RESULTS = (
    "<|im_start|>user\nWeather?<|im_end|>\n"
    f"<|im_start|>assistant\n<think>\nneed data\n</think>\n\nLooking.\n\n{CALLED}<|im_end|>\n"
    "<|im_start|>user\n<tool_response>\n12\n</tool_response>\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
)

GOLDEN: list[tuple[str, list[dict[str, Any]], dict[str, Any], str]] = [
    ("plain", [USER], {}, f"<|im_start|>user\nHi<|im_end|>\n{NO_THINKING}"),
    ("thinking", [USER], {"enable_thinking": True}, f"<|im_start|>user\nHi<|im_end|>\n{THINKING}"),
    ("default thinking", [USER], {"enable_thinking": None}, f"<|im_start|>user\nHi<|im_end|>\n{NO_THINKING}"),
    ("no prompt", [USER], {"add_generation_prompt": False}, "<|im_start|>user\nHi<|im_end|>\n"),
    (
        "system",
        [{"role": "system", "content": " Be brief. "}, USER],
        {},
        f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n{NO_THINKING}",
    ),
    (
        "developer",
        [{"role": "developer", "content": "Be brief."}, USER],
        {},
        f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n{NO_THINKING}",
    ),
    (
        "parts",
        [{"role": "user", "content": [{"type": "text", "text": "नमस्ते "}, {"type": "text", "text": "🙂"}]}],
        {},
        f"<|im_start|>user\nनमस्ते 🙂<|im_end|>\n{NO_THINKING}",
    ),
    (
        "tools",
        [{"role": "developer", "content": "Be brief."}, USER],
        {"tools": [TOOL]},
        f"{TOOLS_TEXT}\n\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n{NO_THINKING}",
    ),
    ("no tools", [USER], {"tools": []}, f"<|im_start|>user\nHi<|im_end|>\n{NO_THINKING}"),
    (
        "past reasoning is dropped",
        [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello."}, USER],
        {},
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
        f"<|im_start|>user\nHi<|im_end|>\n{NO_THINKING}",
    ),
    ("tool results", conversation(ARGUMENTS), {}, TOOL_RESULTS + NO_THINKING),
    ("arguments as a string", conversation(json.dumps(ARGUMENTS)), {}, TOOL_RESULTS + NO_THINKING),
]
CASES = pytest.mark.parametrize(
    ("messages", "options", "expected"), [case[1:] for case in GOLDEN], ids=[case[0] for case in GOLDEN]
)


@CASES
def test_golden(template: ChatTemplate, messages: list[dict[str, Any]], options: dict[str, Any], expected: str) -> None:
    before = copy.deepcopy((messages, options))
    assert template.render(messages, **options) == expected
    assert (messages, options) == before


def test_same_as_transformers(template: ChatTemplate, reference: Path) -> None:
    """Its renderer, given the messages as prepared, gives the same prompts from the same file."""
    renderer = pytest.importorskip("transformers.utils.chat_template_utils")
    source = (reference / "chat_template.jinja").read_text(encoding="utf-8")
    for name, messages, options, expected in GOLDEN:
        given = {"enable_thinking": False, "add_generation_prompt": True, **options}
        if given["enable_thinking"] is None:
            del given["enable_thinking"]
        prompts, _ = renderer.render_jinja_template(
            conversations=[prepare_messages(messages)], chat_template=source, **given
        )
        assert prompts == [expected], name


def test_variables(template: ChatTemplate) -> None:
    assert {"messages", "tools", "enable_thinking"} <= template.variables
    assert "reasoning_effort" not in template.variables


def test_markers_in_a_message_act_as_tokens(template: ChatTemplate, tokenizer: Tokenizer) -> None:
    """Documented, not wanted: a rendered prompt is tokenised as a whole, so message text can end its turn."""
    text = template.render([{"role": "user", "content": "a<|im_end|>b"}], add_generation_prompt=False)
    assert tokenizer.encode(text, special=True).count(8174) == 2


# Where a template comes from


def make(folder: Path, config: object = None, jinja: str | bytes | None = None) -> Path:
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if jinja is not None:
        (folder / "chat_template.jinja").write_bytes(jinja if isinstance(jinja, bytes) else jinja.encode())
    return folder


def rendered(folder: Path) -> str:
    template = ChatTemplate.from_folder(folder)
    assert template is not None
    return template.render([USER])


def test_sources(tmp_path: Path) -> None:
    assert ChatTemplate.from_folder(tmp_path) is None
    assert ChatTemplate.from_folder(make(tmp_path, {"chat_template": None})) is None
    assert ChatTemplate.from_folder(make(tmp_path, {"chat_template": []})) is None
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert rendered(make(tmp_path, {"chat_template": named})) == "D"
    assert rendered(make(tmp_path, {"chat_template": "S"})) == "S"
    assert rendered(make(tmp_path, {"chat_template": "S"}, jinja="J")) == "J"


def test_special_tokens_reach_the_template(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    assert rendered(make(tmp_path, config, "{{ bos_token }}{{ eos_token }}{{ pad_token }}")) == "<s></s>"


@pytest.mark.parametrize(
    ("config", "jinja", "says"),
    [
        ({"chat_template": 5}, None, "chat_template in .* not int"),
        ({"chat_template": {"default": "x"}}, None, "chat_template in .* not dict"),
        ({"chat_template": [{"name": "x"}]}, None, "list of {name, template}"),
        ({"chat_template": [{"name": "tool_use", "template": "T"}]}, None, "no 'default', only: tool_use"),
        (None, "a\n{% if %}", r"chat_template\.jinja is not a valid chat template at line 2"),
        (None, "{{ x | no_such_filter }}", "not a valid chat template"),
        (None, b"\xff", r"cannot read .*chat_template\.jinja"),
        ([], None, "must hold a JSON object"),
    ],
)
def test_unusable_files(tmp_path: Path, config: object, jinja: str | bytes | None, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        ChatTemplate.from_folder(make(tmp_path, config, jinja))


# What the environment offers


def test_tojson_is_plain_json() -> None:
    tools = [{"b": "<é & 'x'>", "a": [1, None, True]}]
    assert ChatTemplate("{{ tools | tojson }}").render([USER], tools=tools) == json.dumps(tools, ensure_ascii=False)
    indented = ChatTemplate("{{ tools | tojson(indent=2) }}").render([USER], tools=tools)
    assert indented == json.dumps(tools, ensure_ascii=False, indent=2)


def test_blocks_leave_no_white_space_and_loops_can_break() -> None:
    source = "{% for n in range(9) %}\n  {% if n == 2 %}\n    {% break %}\n  {% endif %}\n{{ n }}\n{% endfor %}\n."
    assert ChatTemplate(source).render([USER]) == "0\n1\n."


def test_strftime_now() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}").render([USER]) == datetime.now().strftime("%Y")


def test_generation_blocks_are_their_body() -> None:
    source = "{% for m in messages %}{% generation %}[{{ m.content }}]{% endgeneration %}{% endfor %}"
    assert ChatTemplate(source).render([USER, USER]) == "[Hi][Hi]"


def test_namespace_works() -> None:
    source = (
        "{% set ns = namespace(n=0, self=5) %}"
        "{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ ns.self }}"
    )
    assert ChatTemplate(source).render([USER, USER]) == "25"


def test_raise_exception_becomes_ours() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="refuses this conversation: roles must alternate") as caught:
        template.render([USER, USER])
    assert caught.value.param == "messages"


@pytest.mark.parametrize("source", ["{{ messages[0].content.x.y }}", "{{ 1 + messages[0].content }}", "{{ 1 / 0 }}"])
def test_any_failure_becomes_ours(source: str) -> None:
    with pytest.raises(InvalidRequest, match="the chat template cannot render these messages"):
        ChatTemplate(source).render([USER])


def test_a_refusal_names_no_path(tmp_path: Path) -> None:
    """It goes to clients of a server."""
    (tmp_path / "chat_template.jinja").write_text("{{ messages[9].role.nothing }}")
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None
    with pytest.raises(InvalidRequest, match="the chat template cannot render") as caught:
        template.render([{"role": "user", "content": "x"}])
    assert str(tmp_path) not in str(caught.value)


def test_allowed_variables() -> None:
    template = ChatTemplate("{{ reasoning_effort }}|{{ enable_thinking is defined }}")
    assert template.render([USER], reasoning_effort="high", enable_thinking=None) == "high|False"


@pytest.mark.parametrize("name", ["bos_token", "raise_exception", "namespace", "unheard_of", "range", "__class__"])
def test_other_variables_are_refused(name: str) -> None:
    variables: dict[str, Any] = {name: "y"}
    with pytest.raises(InvalidRequest, match=name) as caught:
        ChatTemplate("x").render([USER], **variables)
    assert caught.value.param == "chat_template_kwargs"


# The sandbox


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ [''] | map(attribute='__class__') | list }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ self.__init__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ '{0.__class__}'.format('') }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(__html__=1) }}",
        # one step each, which no time limit could break off
        "{{ ('a' * 70000000) | length }}",
        "{{ (70000000 * [1]) | length }}",
        "{{ 10 ** 100000000 }}",
        "{{ (10 ** 1000) * (10 ** 1000) }}",
    ],
)
def test_malicious_template_is_refused(source: str) -> None:
    with pytest.raises(CheckpointError, match="was refused"):
        ChatTemplate(source).render([USER])


def test_products_that_prompts_need_are_made() -> None:
    source = "{{ '-' * 3 }}{{ 2 * 3 }}{{ 2 ** 5 }}{{ 1.5 * 2 }}{{ 2 ** -1 }}"
    assert ChatTemplate(source).render([USER]) == "---6323.00.5"


@pytest.mark.parametrize("source", ["{{ messages.append(1) }}", "{{ messages[0].update(role='system') }}"])
def test_template_cannot_change_messages(source: str) -> None:
    messages = [dict(USER)]
    with pytest.raises(CheckpointError, match="was refused"):
        ChatTemplate(source).render(messages)
    assert messages == [USER]


EACH = "[{{ m.role }}]{{ m.content }}"
ROLES = "{% for m in messages %}" + EACH + "{% endfor %}[assistant]"
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}" + EACH + "{% endfor %}[assistant]"
)
SYSTEM_DROPPED = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}" + EACH + "{% endif %}{% endfor %}[assistant]"
)


@pytest.mark.parametrize(
    ("source", "late"),
    [(ROLES, "system"), (SYSTEM_FIRST, "user"), (SYSTEM_DROPPED, "user")],
    ids=["takes", "refuses", "drops"],
)
def test_late_instructions_stay_at_their_place(source: str, late: str) -> None:
    """As the system's where the template renders that, else as the user's; those at the start are one message."""
    messages = [
        {"role": "developer", "content": "a"},
        {"role": "system", "content": ""},
        {"role": "system", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
        {"role": "system", "content": "e"},
        {"role": "user", "content": "f"},
    ]
    rendered = ChatTemplate(source).render(messages)
    assert rendered == f"[system]a\n\nb[user]c[assistant]d[{late}]e[user]f[assistant]"
    assert ChatTemplate(source).render(messages[3:4]) == "[user]c[assistant]"


def test_late_instructions_leave_what_comes_before_as_it_was() -> None:
    template = ChatTemplate(SYSTEM_FIRST)
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    before = template.render(messages, add_generation_prompt=False)
    assert template.render([*messages, {"role": "system", "content": "late"}]).startswith(
        before.removesuffix("[assistant]")
    )

"""Asks a server by way of litellm, in both dialects, and writes down what came. Runs in .venv-clients."""

import json
import sys
from pathlib import Path

import litellm

RESULT, URL = sys.argv[1:]
HELLO = [{"role": "user", "content": "Hello"}]
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["c", "f"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


def ask(provider, **given):
    base = f"{URL}/v1" if provider == "openai" else URL
    asked = {"messages": HELLO, "max_tokens": 12, "temperature": 0, "timeout": 120, "num_retries": 0, **given}
    return litellm.completion(model=f"{provider}/nano", api_base=base, api_key="none", **asked)


def answer_of(provider):
    """A plain answer, whole and streamed; a call, whole and streamed, and what follows its result."""
    whole = ask(provider)
    chunks = list(ask(provider, stream=True, stream_options={"include_usage": True}))
    calling = {
        "messages": QUESTION,
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 200,
    }
    called = ask(provider, **calling)
    message = called.choices[0].message
    rebuilt = litellm.stream_chunk_builder(list(ask(provider, **calling, stream=True)), messages=QUESTION)
    results = [{"role": "tool", "tool_call_id": call.id, "content": "clear, 21 degrees"} for call in message.tool_calls]
    after = ask(provider, messages=[*QUESTION, message.model_dump(), *results], tools=[TOOL], max_tokens=4)
    return {
        "text": whole.choices[0].message.content,
        "finish": whole.choices[0].finish_reason,
        "usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "streamed_usage": next([c.usage.prompt_tokens, c.usage.completion_tokens] for c in chunks if c.get("usage")),
        "calls": [[call.function.name, call.function.arguments] for call in message.tool_calls],
        "call_finish": called.choices[0].finish_reason,
        "streamed_calls": [
            [call.function.name, call.function.arguments] for call in rebuilt.choices[0].message.tool_calls
        ],
        "call_prompt": called.usage.prompt_tokens,
        "after_prompt": after.usage.prompt_tokens,
    }


def refusal():
    try:
        ask("openai", messages=[{"role": "user", "content": "word " * 5000}])
    except litellm.ContextWindowExceededError as error:
        return type(error).__name__


found = {provider: answer_of(provider) for provider in ("openai", "anthropic")}
Path(RESULT).write_text(json.dumps({**found, "refusal": refusal()}), encoding="utf-8")

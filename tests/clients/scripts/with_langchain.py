"""Asks a server by way of langchain's ChatOpenAI, and writes down what came. Runs in .venv-clients."""

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

RESULT, TRAINED, NANO = sys.argv[1:]


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=12)
    mood: Literal["calm", "wild"]


@tool
def get_weather(city: Annotated[str, Field(max_length=12)], unit: Literal["c", "f"]) -> str:
    """The weather of a city."""
    return f"clear in {city}, 21 {unit}"


def model(url=TRAINED, **given):
    asked = {"max_tokens": 60, "temperature": 0, "timeout": 120, "max_retries": 0, **given}
    return ChatOpenAI(model="any", base_url=f"{url}/v1", api_key="none", **asked)


def plain():
    """An answer, whole and streamed."""
    whole = model().invoke("Hello")
    total = None
    for chunk in model(stream_usage=True).stream("Hello"):
        total = chunk if total is None else total + chunk
    return {
        "text": whole.content,
        "usage": dict(whole.usage_metadata),
        "finish": whole.response_metadata["finish_reason"],
        "streamed": total.content,
        "streamed_usage": dict(total.usage_metadata),
    }


def called():
    """A call, run, and its result sent back."""
    question = HumanMessage("What is the weather in Paris?")
    forced = model(NANO, max_tokens=300).bind_tools([get_weather], tool_choice="get_weather", parallel_tool_calls=False)
    message = forced.invoke([question])
    total = None
    for chunk in forced.stream([question]):
        total = chunk if total is None else total + chunk
    results = [ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]) for call in message.tool_calls]
    after = model(NANO, max_tokens=4).bind_tools([get_weather]).invoke([question, message, *results])
    return {
        "calls": [[call["name"], call["args"]] for call in message.tool_calls],
        "streamed_calls": [[call["name"], call["args"]] for call in total.tool_calls],
        "invalid": message.invalid_tool_calls,
        "prompt": message.usage_metadata["input_tokens"],
        "after_prompt": after.usage_metadata["input_tokens"],
    }


def structured(url, method):
    """A pydantic object by one of langchain's methods."""
    asked = model(url, max_tokens=300).with_structured_output(Person, method=method)
    return asked.invoke("Describe a person as JSON.").model_dump()


def responses():
    """The same greeting over the Responses API."""
    return model(use_responses_api=True, output_version="responses/v1").invoke("Hello").text


found = {
    "plain": plain(),
    "called": called(),
    "structured": [structured(TRAINED, "json_schema"), structured(NANO, "function_calling")],
    "responses": responses(),
}
Path(RESULT).write_text(json.dumps(found), encoding="utf-8")

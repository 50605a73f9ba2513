"""Guards names of several models, and spans of time: each means one thing, or is refused with what to do."""

from __future__ import annotations

import math

import pytest

from selfdraft.errors import InvalidRequest, ModelNotFound
from selfdraft.server.durations import seconds
from selfdraft.server.registry import Given, Registry


@pytest.mark.parametrize(
    ("text", "name", "source"),
    [
        ("reference", "reference", "reference"),
        ("owner/name", "owner/name", "owner/name"),
        ("owner/name@abc", "owner/name@abc", "owner/name@abc"),
        ("/models/qwen/", "qwen", "/models/qwen/"),
        ("~/a=b", "a=b", "~/a=b"),
        ("small=owner/name", "small", "owner/name"),
        ("small=/models/a=b", "small", "/models/a=b"),
        ("=x", "=x", "=x"),
    ],
)
def test_what_a_model_of_the_command_line_is_called(text: str, name: str, source: str) -> None:
    assert Given.parse(text) == (name, source)


def test_names_of_several_models() -> None:
    models = [Given.parse(each) for each in ("owner/name", "/models/nano", "b=/models/big")]
    registry = Registry(models, ("fast=nano", "gpt=/models/big", "main"), lenient=True)
    assert registry.models == ["owner/name", "nano", "b"]
    assert registry.names == ["owner/name", "nano", "b", "fast", "gpt", "main"]
    assert [registry.resolve(each).model for each in (None, "default", "main")] == ["owner/name"] * 3
    assert registry.resolve("fast") == ("fast", "nano")
    assert registry.resolve("gpt") == ("gpt", "b")
    for name in ("claude", "/models/nano", "Default", ""):
        with pytest.raises(ModelNotFound, match="fast, gpt, main"):
            registry.resolve(name)


@pytest.mark.parametrize(
    ("models", "aliases", "said"),
    [
        (["a", "a=b"], [], "two models would be called 'a': serve one as NAME=b"),
        (["/x/a", "/y/a"], [], "serve one as NAME=/y/a"),
        (["a", "b"], ["b"], "'b' means another model already"),
        (["a", "b"], ["c=a", "c=b"], "'c' means another model already"),
        (["a", "b"], ["c=d"], "'d' is not the model that is served, a, b"),
        (["a", "b"], ["=b"], "--alias '=b'"),
        (["a", "b"], ["default=b"], "'default' means another model already"),
        (["a", "b"], ["c=a", "d=c"], "'c' is not the model"),
    ],
)
def test_names_that_could_mean_two_models_are_refused(models: list[str], aliases: list[str], said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Registry([Given.parse(each) for each in models], aliases, lenient=False)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (0, 0),
        ("0", 0),
        ("5m", 300),
        ("1h30m", 5400),
        ("2d", 172800),
        ("0.5s", 0.5),
        (" 90s ", 90),
        ("-1", -1),
        (7.5, 7.5),
    ],
)
def test_spans_of_time(given: str | float, found: float) -> None:
    assert seconds(given) == found


@pytest.mark.parametrize("given", ["", "m", "5 m", "5x", "1h-3m", "nan", "inf", "1e300", "100000d", math.inf, math.nan])
def test_what_is_no_span_of_time(given: str | float) -> None:
    with pytest.raises(ValueError, match="span"):
        seconds(given)

"""Sampling parameters: what a caller may ask of one request. Knows no model and imports no MLX."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .errors import InvalidRequest

__all__ = ["DEFAULT_MAX_TOKENS", "SamplingParams"]

DEFAULT_MAX_TOKENS = 1024
MAX_STOPS = 16
MAX_LOGPROBS = 20

# Used where neither the caller nor the checkpoint's generation_config.json says anything.
_FALLBACK: dict[str, float | int] = {
    "max_tokens": DEFAULT_MAX_TOKENS,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. A field left at None takes the checkpoint's default.

    The chain, in fp32 and in this order: repetition penalty over prompt and output, presence and
    frequency penalties over the output only (drafts before the position included), `logit_bias`, the
    mask of a grammar, temperature, top-k (ties kept), top-p (the token that crosses the border is kept,
    and tokens tied with it), min-p (relative to the largest probability after temperature).

    Attributes:
        depth: tokens drafted in a cycle; 0 is plain decoding; "auto" adapts to measured cost and acceptance.
        max_tokens: most tokens to emit, EOS included.
        temperature: 0 is greedy, else in [1e-6, 100].
        top_p: nucleus mass in (0, 1]; 1 is off.
        top_k: most likely tokens kept; 0 is off.
        min_p: least probability relative to the largest, in [0, 1]; 0 is off.
        presence_penalty: subtracted once from tokens already in the output, in [-2, 2].
        frequency_penalty: subtracted for every occurrence in the output, in [-2, 2].
        repetition_penalty: divides positive and multiplies negative logits of tokens seen, in [0.01, 10]; 1 is off.
        logit_bias: token id -> value added to its logit, in [-100, 100].
        seed: with a seed the text is a function of seed and prompt, at every depth; None draws fresh randomness.
        stop: strings that end the answer; they are not part of it.
        logprobs: None for none; N for the chosen token's raw log-probability and the N most likely ones.
        ignore_eos: go on after an end token.
        min_tokens: no end token and no stop string before this many tokens.
        cache_prompt: go on from warm prefixes, and leave some; changes no token.

    Raises:
        InvalidRequest: a value out of its range, with the value and the range.
    """

    depth: int | Literal["auto"] = "auto"
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    logprobs: int | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    cache_prompt: bool = True

    def __post_init__(self) -> None:
        if self.depth != "auto":
            _integer("depth", self.depth, 0, None, 'or "auto"', required=True)
        _integer("max_tokens", self.max_tokens, 1, None)
        if self.temperature != 0:  # below 1e-6 the division would leave fp32
            _number("temperature", self.temperature, 1e-6, 100, extra="or 0 for greedy")
        _number("top_p", self.top_p, 0, 1, open_low=True)
        _integer("top_k", self.top_k, 0, None)
        _number("min_p", self.min_p, 0, 1)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 10)
        _integer("seed", self.seed, -(2**63), 2**64 - 1)
        _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _integer("min_tokens", self.min_tokens, 0, None, required=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens}); lower one or raise the other",
                param="min_tokens",
            )
        for name in ("ignore_eos", "cache_prompt"):
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be true or false, not {value!r}", param=name)
        object.__setattr__(self, "stop", _stops(self.stop))
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))

    def resolved(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """A copy in which no field is None but seed, logit_bias and logprobs.

        Args:
            defaults: the checkpoint's own values (see `defaults_from_generation_config`).
        """
        known = {**_FALLBACK, **defaults}
        missing = {name: value for name, value in known.items() if getattr(self, name) is None}
        return dataclasses.replace(self, **missing)

    def with_max_tokens(self, max_tokens: int) -> SamplingParams:
        """A copy with another `max_tokens`."""
        return dataclasses.replace(self, max_tokens=max_tokens)

    @staticmethod
    def defaults_from_generation_config(config: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults in our names from the fields of a generation_config.json (null fields are left out)."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        defaults = {name: config[name] for name in names if config.get(name) is not None}
        if config.get("max_new_tokens") is not None:
            defaults["max_tokens"] = config["max_new_tokens"]
        if config.get("do_sample") is False:
            defaults["temperature"] = 0.0
        SamplingParams(**defaults)  # a broken file is reported here, by value
        return defaults


def _number(
    name: str, value: float | None, low: float, high: float, *, open_low: bool = False, extra: str = ""
) -> None:
    if value is None:
        return
    interval = f"{'(' if open_low else '['}{low}, {high}]{' ' + extra if extra else ''}"
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise InvalidRequest(f"{name} must be a number in {interval}, not {value!r}", param=name)
    if value > high or value < low or (open_low and value == low):
        raise InvalidRequest(f"{name} must lie in {interval}; got {value!r}", param=name)


def _integer(
    name: str, value: int | str | None, low: int, high: int | None, extra: str = "", *, required: bool = False
) -> None:
    if value is None and not required:
        return
    wanted = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise InvalidRequest(f"{name} must be {wanted}{' ' + extra if extra else ''}, not {value!r}", param=name)


def _stops(stop: Sequence[str] | str | None) -> tuple[str, ...]:
    if stop is not None and not isinstance(stop, Sequence):
        raise InvalidRequest(f"stop takes a string or a list of strings, not {stop!r}", param="stop")
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop takes at most {MAX_STOPS} strings; got {len(stops)}", param="stop")
    for text in stops:
        if not isinstance(text, str) or not text:
            raise InvalidRequest(f"stop takes non-empty strings, not {text!r}", param="stop")
    return stops


def _bias(bias: Mapping[int, float] | None) -> Mapping[int, float] | None:
    if bias is not None and not isinstance(bias, Mapping):
        raise InvalidRequest(f"logit_bias maps token ids to numbers; got {bias!r}", param="logit_bias")
    if not bias:
        return None
    for token, value in bias.items():
        _integer("logit_bias", token, 0, None, "as a token id")
        _number("logit_bias", value, -100, 100)
    return dict(bias)

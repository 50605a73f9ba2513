"""From messages to prompt tokens: ids that were committed before are served again, and it is said where the next
request of the conversation may want to go on. Knows templates and tokenizers; nothing of models or of what is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .errors import InvalidRequest, SelfdraftError
from .images import Picture, in_messages
from .sessions import Transcripts
from .text import ChatTemplate, Tokenizer

if TYPE_CHECKING:  # they import MLX, and the server's settings are read before it may come in
    from .vision import PictureInputs, PicturePrompts

__all__ = ["LOCAL", "Prompted", "Prompts"]

LOCAL = "local"  # the scope of whoever needs no key

NEAR = 32  # tokens: of two stops that are closer than this one is not worth its state
_PATIENCE = 1.0  # seconds: a conversation that takes longer is not rendered again to find where the next one forks
_WINDOW = 4096  # characters before a fork in which a special token is looked for

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Prompted:
    """A prompt as tokens.

    Attributes:
        tokens: its ids.
        text: what it was made from; None if it was given as ids.
        stops: lengths of it behind which a later prompt may differ, in increasing order.
        scope: whose it is: nobody else goes on from it.
        inputs: its pictures, if it has some.
        pictured: ids by which it is told from prompts with other pictures; None where its tokens do.
    """

    tokens: Sequence[int]
    text: str | None = None
    stops: Sequence[int] = ()
    scope: str = LOCAL
    inputs: PictureInputs | None = None
    pictured: Sequence[int] | None = None

    @property
    def keys(self) -> Sequence[int]:
        """Ids that no other prompt has."""
        return self.tokens if self.pictured is None else self.pictured


class Prompts:
    """Renders and tokenises. Any thread may call it.

    Args:
        pictures: for prompts with images; or why there can be none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        transcripts: Transcripts | None,
        pictures: PicturePrompts | str = "",
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._transcripts = transcripts
        self._pictures = pictures

    def chat(
        self, messages: Sequence[Message], *, scope: str = LOCAL, answered: bool = True, **arguments: Any
    ) -> Prompted:
        """The prompt of a conversation.

        Args:
            answered: it is going to be; else nobody needs its stops.
            arguments: see `ChatTemplate.render`.

        Raises:
            InvalidRequest: there is no template, images that cannot be read, a video, or what `ChatTemplate.render`
                raises.
        """
        if self._template is None:
            raise InvalidRequest("this checkpoint has no chat template; use raw=True (--raw)", param="messages")
        begin = time.monotonic()
        text = self._rendered(messages, arguments)
        slow = time.monotonic() - begin > _PATIENCE
        prompted = self._pictured(Prompted(self._tokens(text, scope), text, scope=scope), in_messages(messages))
        if self._transcripts is None or not answered or slow:
            return prompted
        forks = [self._fork(text, other) for other in self._others(messages, arguments)]
        return replace(prompted, stops=self._stops(text, prompted.tokens, forks))

    def raw(self, text: str, *, scope: str = LOCAL) -> Prompted:
        """The prompt of bare text; it begins with the BOS token where the tokenizer has one."""
        tokens = self._tokens(text, scope)
        bos = self._tokenizer.bos_id
        if bos is not None and tokens[:1] != [bos]:
            return Prompted([bos, *tokens], None, (len(tokens),), scope)
        return Prompted(tokens, text, (len(tokens) - 1,), scope)

    def remember(self, prompted: Prompted, tokens: Sequence[int]) -> None:
        """Take note of a prompt and its answer, to be served again where the text is the same."""
        if self._transcripts is None or prompted.text is None or not self._cuts(tokens[-1]):
            return
        begun = len(prompted.tokens) - 1  # behind a token of the prompt: decoders may strip what comes first
        before = self._tokenizer.decode(tokens[begun : begun + 1], skip_special=False)
        both = self._tokenizer.decode(tokens[begun:], skip_special=False)
        if both.startswith(before):
            self._transcripts.add(prompted.scope, prompted.text + both[len(before) :], tokens)

    def recall(self, scope: str, tokens: Sequence[int]) -> None:
        """Take note of a prompt and its answer of long ago, by `Prompted.keys`."""
        if not isinstance(self._pictures, str):
            tokens = self._pictures.tokens(tokens)
        if self._transcripts is not None and self._cuts(tokens[-1]):
            self._transcripts.add(scope, self._tokenizer.decode(tokens, skip_special=False), tokens)

    def _cuts(self, token: int) -> bool:
        """Whether what follows a token is tokenised by itself."""
        return token in self._tokenizer.added.values()

    def _rendered(self, messages: Sequence[Message], arguments: Mapping[str, Any]) -> str:
        """The text of a conversation, with each picture's token as often as it has embeddings."""
        assert self._template is not None
        pictures = in_messages(messages)
        if not pictures:
            return self._template.render(messages, **arguments)
        if isinstance(self._pictures, str):
            raise InvalidRequest(f"this model cannot read images: {self._pictures}", param="messages")
        text = self._template.render([_without_pixels(message) for message in messages], **arguments)
        return self._pictures.expanded(text, pictures, [messages, dict(arguments)])

    def _pictured(self, prompted: Prompted, pictures: Sequence[Picture]) -> Prompted:
        """A prompt with its pictures."""
        if not pictures or isinstance(self._pictures, str):
            return prompted
        inputs = self._pictures.inputs(prompted.tokens, pictures)
        return replace(prompted, inputs=inputs, pictured=self._pictures.keys(prompted.tokens, pictures))

    def _tokens(self, text: str, scope: str) -> list[int]:
        known = self._transcripts.longest(scope, text) if self._transcripts else None
        if known is None:
            return self._tokenizer.encode(text, special=True)
        begun, ids = known
        return [*ids, *self._tokenizer.encode(text[len(begun) :], special=True)]

    def _others(self, messages: Sequence[Message], arguments: Mapping[str, Any]) -> list[str]:
        """Prompts that may come later, the likeliest first: the next question; the newest one asked differently."""
        later: list[list[Message]] = []
        if not arguments.get("continue_final"):
            later.append([*messages, {"role": "assistant", "content": "-"}, {"role": "user", "content": "-"}])
        newest = max((n for n, message in enumerate(messages) if message.get("role") == "user"), default=None)
        if newest is not None:
            later.append([*messages[:newest], {"role": "user", "content": "-"}])
        render = self._renderer({**arguments, "continue_final": False})
        return [text for each in later if (text := render(each)) is not None]

    def _renderer(self, arguments: Mapping[str, Any]) -> Callable[[Sequence[Message]], str | None]:
        def render(messages: Sequence[Message]) -> str | None:
            try:
                return self._rendered(messages, arguments)
            except SelfdraftError:  # a template may refuse what nobody has said yet
                return None

        return render

    def _fork(self, text: str, other: str) -> int:
        """Characters of `text` up to the last added token that it shares with `other`: what follows such a token is
        tokenised by itself."""
        common = _common(text, other)
        window = max(0, common - _WINDOW)
        return max(
            (
                text.rfind(token, window, common) + len(token)
                for token in self._tokenizer.added
                if text.rfind(token, window, common) >= 0
            ),
            default=0,
        )

    def _stops(self, text: str, tokens: Sequence[int], forks: Sequence[int]) -> list[int]:
        """Lengths in tokens of the prefixes that end at `forks`, and of all but the last token. Of those that are near
        each other the first named counts."""
        stops: list[int] = []
        behind = [len(self._tokenizer.encode(text[fork:], special=True)) for fork in forks if fork]
        for stop in (len(tokens) - count for count in (*behind, 1)):
            if stop >= NEAR and all(abs(stop - other) >= NEAR for other in stops):
                stops.append(stop)
        return sorted(stops)


def _without_pixels(message: Message) -> Message:
    """A message as a template takes it: templates look for these keys, and some for the type."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, (list, tuple)):
        return message
    image = {"type": "image", "image": ""}
    return {**message, "content": [image if part.get("type") == "image" else part for part in content]}


def _common(a: str, b: str) -> int:
    """Characters at the start that two texts share; by halving, for texts may be long."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

"""Pictures in messages, in a rendered prompt and among its tokens. Knows a tower's token for them; no templates."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import InvalidRequest
from ..images import Picture
from .positions import Place, Places
from .prompt import PictureInputs
from .tower import Tower

__all__ = ["PicturePrompts"]

_TEXT_BEHIND = 2  # tokens: the head's first pair of an answer hangs on the last but one
_MOST_ID = 2**31 - 1


class PicturePrompts:
    """Makes prompts with pictures. Any thread may call it.

    Args:
        tower: what will read them.
        token, token_id: what a template writes for a picture, of which a prompt has one for each of its embeddings.
        vocab_size: of the model: ids from there on tell pictures apart.
    """

    def __init__(self, tower: Tower, token: str, token_id: int, vocab_size: int) -> None:
        self._tower = tower
        self._token = token
        self._token_id = token_id
        self._vocab_size = vocab_size

    def expanded(self, text: str, pictures: Sequence[Picture], said: object) -> str:
        """A rendered prompt with each picture's token as often as the picture has embeddings.

        Args:
            said: all that the prompt was made of, in lists and dicts.

        Raises:
            InvalidRequest: the template wrote another number of pictures than there are; a text has that token.
        """
        if _says(said, self._token):
            raise InvalidRequest(
                f"a text holds {self._token!r}, which stands for an image here: take it out", param="messages"
            )
        head, *tails = text.split(self._token)
        if len(tails) != len(pictures):
            raise InvalidRequest(
                f"this checkpoint's chat template writes {len(tails)} of the {len(pictures)} images of the "
                "conversation: it may take images from the user alone, or none",
                param="messages",
            )
        counts = [self._tower.grid(picture).tokens for picture in pictures]
        return head + "".join(self._token * count + tail for count, tail in zip(counts, tails, strict=True))

    def inputs(self, tokens: Sequence[int], pictures: Sequence[Picture]) -> PictureInputs:
        """What goes to the engine with the tokens of an expanded prompt.

        Raises:
            InvalidRequest: pictures are not where they should be.
        """
        where = np.flatnonzero(np.array(tokens) == self._token_id).tolist()
        places = []
        for picture in pictures:
            grid = self._tower.grid(picture)
            own, where = where[: grid.tokens], where[grid.tokens :]
            if len(own) < grid.tokens or own[-1] - own[0] != grid.tokens - 1:
                raise InvalidRequest("the tokens of an image are not in one piece in this prompt", param="messages")
            places.append(Place(own[0], grid.rows, grid.columns))
        if where:
            raise InvalidRequest(f"the prompt has {len(where)} tokens of images too many", param="messages")
        if places and places[-1].end > len(tokens) - _TEXT_BEHIND:
            raise InvalidRequest("the prompt ends with an image; put text behind it", param="messages")
        return PictureInputs(self._tower, pictures, Places(places), len(tokens))

    def keys(self, tokens: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
        """Ids by which a prompt with these pictures is told from every other: those of images come from the pixels."""
        keys, at = np.array(tokens), 0
        where = np.flatnonzero(keys == self._token_id)
        room = _MOST_ID - self._vocab_size
        for picture in pictures:
            count = self._tower.grid(picture).tokens
            drawn = hashlib.shake_256(picture.digest.encode()).digest(4 * count)
            keys[where[at : at + count]] = self._vocab_size + np.frombuffer(drawn, np.uint32) % room
            at += count
        found: list[int] = keys.tolist()
        return found

    def tokens(self, keys: Sequence[int]) -> list[int]:
        """The ids that `keys` were made of."""
        return [self._token_id if key >= self._vocab_size else key for key in keys]


def _says(value: object, text: str) -> bool:
    """Whether any string in lists and dicts holds a text."""
    if isinstance(value, str):
        return text in value
    if isinstance(value, Mapping):
        return any(_says(each, text) for each in value.values())
    return isinstance(value, (list, tuple)) and any(_says(each, text) for each in value)

"""Text: tokenizers, chat templates, incremental detokenisation and stop strings.

Knows token ids and strings. Knows nothing of models, MLX or HTTP: it reads a checkpoint's tokenizer and
template files, and everything else is handed to it.

    tokenizer = Tokenizer.from_folder(folder)
    template = ChatTemplate.from_folder(folder)                       # None: the checkpoint ships no template
    ids = tokenizer.encode(template.render(messages), special=True)
    row = RowText(tokenizer, stops=["\\n\\n"])                          # one per row
    row.push(new_ids); print(row.take())                              # as the engine emits
    print(row.finish())
"""

from __future__ import annotations

from .request_text import RowText
from .stream import StopMatcher, TokenStream
from .template import ChatTemplate
from .tokenizer import Tokenizer

__all__ = ["ChatTemplate", "RowText", "StopMatcher", "TokenStream", "Tokenizer"]

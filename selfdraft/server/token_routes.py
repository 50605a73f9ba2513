"""Routes about tokens: counted, of a text, as a text, and what the tokenizer and the template are. Decode nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Query, Request

from ..errors import InvalidRequest
from ..llm import LLM
from .chat import Chats
from .dialects import anthropic_messages, openai_chat
from .dialects.wire import WireModel, read
from .openapi import described
from .pictures import Pictures
from .registry import DEFAULT
from .served import ServedModels
from .service import EngineService
from .streaming import unless_gone

__all__ = ["add_tokens"]

T = TypeVar("T")


class TokenizeRequest(openai_chat.ChatPrompt):
    """The body of POST /tokenize: a text, or a chat, with all that may stand in one."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(WireModel):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: list[int]


def add_tokens(app: FastAPI, models: ServedModels, pictures: Pictures) -> None:
    """Serve the paths that count and translate."""
    _add_count(app, models, pictures)
    _add_tokenize(app, models, pictures)
    _add_detokenize(app, models)


def _add_count(app: FastAPI, models: ServedModels, pictures: Pictures) -> None:
    @app.post(
        "/v1/messages/count_tokens",
        summary="How many tokens a message request sends to the model",
        **described(anthropic_messages.CountRequest),
    )
    async def count(request: Request) -> dict[str, object]:
        asked = read(anthropic_messages.CountRequest, await request.body())
        models.registry.resolve(asked.model)
        job = replace(anthropic_messages.to_job(asked), scope=request.state.owner)
        tokens = await _with_model(models, request, asked.model, lambda service: Chats(service, pictures).tokens(job))
        return anthropic_messages.count_body(len(tokens))


def _add_tokenize(app: FastAPI, models: ServedModels, pictures: Pictures) -> None:
    @app.post(
        "/tokenize",
        summary="The tokens of a text, or of messages as the model reads them",
        **described(TokenizeRequest),
    )
    async def tokenize(request: Request) -> dict[str, object]:
        asked = read(TokenizeRequest, await request.body())
        models.registry.resolve(asked.model)
        if (asked.prompt is None) == (not asked.messages):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        job = replace(openai_chat.to_job(asked), scope=request.state.owner) if asked.messages else None

        async def tokens(service: EngineService) -> dict[str, object]:
            if job is not None:
                found = list(await Chats(service, pictures).tokens(job))
            else:
                found = await asyncio.to_thread(_bare, service.llm, asked)
            return {"tokens": found, "count": len(found), "max_model_len": service.llm.context_length}

        return await _with_model(models, request, asked.model, tokens)


def _add_detokenize(app: FastAPI, models: ServedModels) -> None:
    @app.post("/detokenize", summary="The text of tokens", **described(DetokenizeRequest))
    async def detokenize(request: Request) -> dict[str, object]:
        asked = read(DetokenizeRequest, await request.body())

        async def text(service: EngineService) -> dict[str, object]:
            llm = service.llm
            if outside := [token for token in asked.tokens if not 0 <= token < llm.loaded.model.vocab_size]:
                raise InvalidRequest(f"token id {outside[0]} is outside the vocabulary", param="tokens")
            return {"prompt": await asyncio.to_thread(llm.tokenizer.decode, asked.tokens, skip_special=False)}

        return await _with_model(models, request, asked.model, text)

    @app.get("/tokenizer_info", summary="The tokens with a meaning and the chat template, as in the model's files")
    async def tokenizer_info(
        request: Request, model: Annotated[str | None, Query(examples=[DEFAULT])] = None
    ) -> dict[str, str | None]:
        async def info(service: EngineService) -> dict[str, str | None]:
            template = service.llm.template
            if template is None:
                return {"chat_template": None}
            return {**template.tokens, "chat_template": template.source}

        return await _with_model(models, request, model, info)


async def _with_model(
    models: ServedModels, request: Request, name: str | None, work: Callable[[EngineService], Coroutine[Any, Any, T]]
) -> T:
    """What work with a model comes to, which is loaded if it is not."""
    with await unless_gone(request, models.use(name)) as service:
        return await unless_gone(request, work(service))


def _bare(llm: LLM, asked: TokenizeRequest) -> list[int]:
    """The tokens of a text as a completion begins with it."""
    tokens = llm.tokenizer.encode(asked.prompt or "", special=True)
    bos = llm.tokenizer.bos_id
    return [bos, *tokens] if asked.add_special_tokens and bos is not None and tokens[:1] != [bos] else tokens

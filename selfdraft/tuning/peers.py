"""Other runtimes in the same run. Knows who there is, and how to drive stock mlx-lm on the same checkpoint or shape."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from ..llm import LLM
from .measure import Tally
from .peer import Peer, PeerError
from .peer_llama_cpp import llama_cpp_peer
from .peer_mlx_vlm import mlx_vlm_peer
from .subject import Subject
from .synthetic import BITS, GROUP, SyntheticModel

__all__ = ["MlxLm", "drafting_peers", "mlx_lm_peers"]


@dataclass(frozen=True)
class MlxLm:
    """A model in stock mlx-lm, which decodes plainly."""

    name: str
    model: Any
    drafts: int = 0

    @property
    def version(self) -> str:
        return version("mlx-lm")

    def decode(self, prompts: Sequence[Sequence[int]], tokens: int) -> Tally:
        """See `Peer.decode`."""
        from mlx_lm.generate import generate_step

        total = Tally()
        for prompt in prompts:
            begin = time.perf_counter()
            steps: Iterator[Any] = generate_step(mx.array(list(prompt)), self.model, max_tokens=tokens)
            next(steps)
            first = time.perf_counter()
            count = sum(1 for _ in steps)
            total += Tally(count, time.perf_counter() - first, count, first - begin)
        return total


def mlx_lm_peers(subject: Subject) -> tuple[list[MlxLm], list[str]]:
    """Stock mlx-lm on a subject's weights in our dtype, and as it loads them where that differs; and what is amiss.

    Beside a synthetic model stands one of its shape. An adapter is theirs, too, where it is of their format.
    """
    dtype = subject.described["dtype"]
    try:
        if isinstance(subject.source, SyntheticModel):
            return [MlxLm(f"mlx-lm {dtype}", _likewise(subject.source))], []
        return _stock(subject.source, dtype), []
    except (
        ImportError,
        ValueError,
        TypeError,
        KeyError,
        OSError,
    ) as error:  # its versions differ in what they can load
        return [], [f"mlx-lm: cannot load this model ({type(error).__name__}: {str(error).splitlines()[0]})"]


@contextlib.contextmanager
def drafting_peers(subject: Subject, gguf: Path | None = None) -> Iterator[tuple[list[Peer], list[str]]]:
    """Runtimes with drafting of their own, those that can decode a subject; and a line for each other, saying why.

    Args:
        gguf: see `llama_cpp_peer`, which runs until the context is left.
    """
    with contextlib.ExitStack() as running:
        peers: list[Peer] = []
        amiss: list[str] = []
        if isinstance(subject.source, LLM) and subject.source.adapter:
            yield [], ["mlx-vlm, llama.cpp: left out, as they would decode without the adapter"]
            return
        try:
            peers.append(mlx_vlm_peer(subject))
        except PeerError as error:
            amiss.append(f"mlx-vlm: {error}")
        try:
            peers.append(running.enter_context(llama_cpp_peer(subject, gguf)))
        except PeerError as error:
            amiss.append(f"llama.cpp: {error}")
        yield peers, amiss


def _stock(llm: LLM, dtype: str) -> list[MlxLm]:
    from mlx_lm.utils import load_model

    folder = llm.checkpoint.folder
    as_loaded = _with_adapter(load_model(folder)[0], llm)
    own = str(llm.checkpoint.tensors["model.norm.weight"].dtype).removeprefix("mlx.core.")
    if llm.checkpoint.quantised or own == dtype:
        return [MlxLm(f"mlx-lm {own}", as_loaded)]
    cast = _with_adapter(load_model(folder)[0], llm)
    wanted = getattr(mx, dtype)
    cast.update(tree_map(lambda x: x.astype(wanted) if mx.issubdtype(x.dtype, mx.floating) else x, cast.parameters()))
    mx.eval(cast.parameters())
    return [MlxLm(f"mlx-lm {dtype}", cast), MlxLm(f"mlx-lm {own}, as it loads", as_loaded)]


def _with_adapter(model: Any, llm: LLM) -> Any:
    """mlx-lm's model with the same adapter.

    Raises:
        ValueError: mlx-lm does not read it.
    """
    if llm.adapter is None:
        return model
    if llm.adapter.form != "mlx-lm":
        raise ValueError(f"it does not read an adapter of {llm.adapter.form}'s format")
    from mlx_lm.tuner.utils import load_adapters

    model = load_adapters(model, str(llm.adapter.folder))
    model.eval()
    return model


def _likewise(built: SyntheticModel) -> Any:
    """mlx-lm's own model of a synthetic one's shape, with random words of its own: what they are costs nothing."""
    from mlx_lm.models.qwen3_5 import TextModel, TextModelArgs

    module: Any = TextModel(TextModelArgs.from_dict(built.shape.config()))
    nn.quantize(module, group_size=GROUP, bits=BITS)  # lazy: what is not evaluated before it is replaced costs nothing
    weights = dict(tree_flatten(module.parameters()))
    for name, tensor in weights.items():
        if tensor.dtype == mx.uint32:
            shape = (*tensor.shape[:-1], 2 * tensor.shape[-1])
            weights[name] = mx.random.randint(0, 1 << 16, shape, dtype=mx.uint16).view(mx.uint32)
        elif name.endswith((".scales", ".biases")):
            step = 1 / math.sqrt(21.25 * tensor.shape[-1] * GROUP)  # 21.25: the variance of 0..15
            weights[name] = mx.full(tensor.shape, step if name.endswith(".scales") else -7.5 * step, built.dtype)
        elif not name.endswith("A_log"):
            weights[name] = tensor.astype(built.dtype)
        mx.eval(weights[name])
    module.load_weights(list(weights.items()), strict=True)
    module.eval()
    return module

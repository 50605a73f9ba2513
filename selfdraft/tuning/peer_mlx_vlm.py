"""mlx-vlm with its MTP drafter, made of the checkpoint's own head. Knows how to drive it, in this process.

mlx-vlm expects a model's text part under a wrapper's names. A checkpoint without the wrapper is shown to it as two
folders of links to the same weights: one whose config.json says so for the trunk, one for the drafter.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from ..llm import LLM
from .measure import Tally
from .peer import PeerError
from .subject import Subject

__all__ = ["MlxVlm", "mlx_vlm_peer"]


@dataclass(frozen=True)
class MlxVlm:
    """A model and its drafter in mlx-vlm."""

    name: str
    version: str
    drafts: int
    model: Any
    drafter: Any

    def decode(self, prompts: Sequence[Sequence[int]], tokens: int) -> Tally:
        """See `Peer.decode`. Acceptance by position is of the counts that its drafter keeps."""
        generate_step = importlib.import_module("mlx_vlm.generate").generate_step
        total = Tally()
        for prompt in prompts:
            begin = time.perf_counter()
            try:
                steps: Iterator[Any] = generate_step(
                    mx.array([list(prompt)]),
                    self.model,
                    None,
                    None,
                    max_tokens=tokens,
                    temperature=0,
                    prefill_step_size=None,  # read in pieces, the prompt would be no history of the drafter's
                    draft_model=self.drafter,
                    draft_kind="mtp",
                    draft_block_size=self.drafts + 1,
                )
                next(steps)
                first = time.perf_counter()
                count = sum(1 for _ in steps)
            except Exception as error:  # whatever it raises, ours can still be measured
                raise PeerError(f"decoding failed ({_short(error)})") from error
            seconds = time.perf_counter() - first
            kept: Sequence[int] = getattr(self.drafter, "accept_lens", ())  # of this prompt's cycles
            tried, accepted = _by_position(getattr(self.drafter, "draft_lens", ()), kept)
            total += Tally(count, seconds, len(kept), first - begin, tried, accepted)
        return total


def mlx_vlm_peer(subject: Subject) -> MlxVlm:
    """mlx-vlm on a subject's checkpoint, in our dtype, with as many drafts as it makes when not told otherwise.

    Raises:
        PeerError: it is not installed, cannot load this model, or there is no head.
    """
    if importlib.util.find_spec("mlx_vlm") is None:
        raise PeerError("not installed (pip install mlx-vlm)")
    if not isinstance(subject.source, LLM):
        raise PeerError("a synthetic model has no checkpoint that it could load")
    if not subject.model.max_depth:
        raise PeerError("this checkpoint has no MTP head to draft with")
    dtype = subject.described["dtype"]
    try:
        model, drafter = _loaded(subject.source, dtype)
        drafts = int(drafter.config.block_size) - 1
    except Exception as error:  # versions differ in what they can load and in what they raise
        raise PeerError(f"cannot load this model ({_short(error)})") from error
    return MlxVlm(f"mlx-vlm {dtype}, {drafts} drafts", version("mlx-vlm"), drafts, model, drafter)


def _loaded(llm: LLM, dtype: str) -> tuple[Any, Any]:
    """The trunk and the drafter, evaluated."""
    load_model = importlib.import_module("mlx_vlm.utils").load_model
    load_drafter = importlib.import_module("mlx_vlm.speculative.drafters").load_drafter
    with tempfile.TemporaryDirectory() as scratch:
        trunk_folder, drafter_folder = _folders(llm.checkpoint.folder, llm.checkpoint.config, Path(scratch))
        model = load_model(trunk_folder)
        drafter, kind = load_drafter(str(drafter_folder))
        if kind != "mtp":
            raise ValueError(f"it takes the head for a drafter of kind {kind!r}")
        if not llm.checkpoint.quantised:
            for module in (model, drafter):
                module.update(tree_map(partial(_cast, dtype=getattr(mx, dtype)), module.parameters()))
        mx.eval(model.parameters(), drafter.parameters())
    return model, drafter


def _cast(tensor: mx.array, dtype: mx.Dtype) -> mx.array:
    return tensor.astype(dtype) if mx.issubdtype(tensor.dtype, mx.floating) else tensor


def _folders(folder: Path, config: Mapping[str, Any], scratch: Path) -> tuple[Path, Path]:
    """Where mlx-vlm finds the trunk and the head: the folder itself, if the names in its weights have the wrapper's."""
    weights = [mx.load(str(file)) for file in folder.glob("*.safetensors")]  # mapped, not read
    if any("language_model." in name for names in weights if isinstance(names, dict) for name in names):
        return folder, folder
    text = {**config, **config.get("text_config", {})}
    text.pop("text_config", None)
    kind = str(text.get("model_type", "")).removesuffix("_text")
    text["model_type"] = f"{kind}_text"
    trunk = _view(folder, scratch / "trunk", text)
    return trunk, _view(folder, scratch / "drafter", {**config, "model_type": kind, "text_config": text})


def _view(folder: Path, view: Path, config: Mapping[str, Any]) -> Path:
    """A folder of links to the weights, under another config.json."""
    view.mkdir()
    (view / "config.json").write_text(json.dumps(dict(config)))
    for file in folder.iterdir():
        if file.is_file() and file.name != "config.json":
            (view / file.name).symlink_to(file.resolve())
    return view


def _by_position(drafted: Sequence[int], accepted: Sequence[int]) -> tuple[list[int], list[int]]:
    """Drafts tried and accepted at each position, of how many each cycle had; one is tried if all before it stay."""
    if len(drafted) != len(accepted):
        return [], []
    places = range(max(drafted, default=0))
    cycles = list(zip(drafted, accepted, strict=True))
    tried = [sum(many > place and kept >= place for many, kept in cycles) for place in places]
    return tried, [sum(kept > place for _, kept in cycles) for place in places]


def _short(error: Exception) -> str:
    """One line of an error that may have hundreds."""
    lines = str(error).strip().splitlines() or ["no reason given"]
    return f"{type(error).__name__}: {lines[0][:200]}"

"""Is a package worth running here? Measured on this machine, never taken from labels; the answer may be no.

Finite weights and logits, the head's wiring by acceptance, drafting against plain decoding token for token, rows of a
verify pass against rows alone, speed by depth against plain decoding. What was found is stamped into selfdraft.json.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..device import active_blas
from ..engine import Engine, Request
from ..errors import NonFiniteLogits, SelfdraftError
from ..llm import LLM
from ..models.checkpoint import classify
from ..models.probe import LEAST_ACCEPTANCE, PROBE_TEXT
from ..params import SamplingParams
from ..settings import load_settings
from ..stamp import Stamp, changed_files, digests, read_stamp, write_stamp
from ..tuning.tune import Tuning, describe, tune
from .texts import HELD_OUT
from .wiring import AS_BUILT, wirings

__all__ = ["verify"]

Tell = Callable[[str], None]

_CLEARLY = 0.1  # by how much another wiring must draft better to be believed
_TOKENS = 48  # of an answer that is compared
_ROUNDS = 3


def verify(folder: Path, *, speed: bool = True, tell: Tell = lambda line: None) -> Stamp:
    """Measure a package, and stamp it.

    Args:
        speed: also measure how fast each depth is, in processes of their own: minutes.
        tell: called with a line for each thing that is done.

    Returns:
        What was written into its selfdraft.json.

    Raises:
        CheckpointError: it cannot be loaded. OSError: the stamp cannot be written.
    """
    stamp = read_stamp(folder) or Stamp(recipe={}, source=str(folder))
    if stamp.files and (changed := changed_files(folder, stamp)):
        tell(f"changed since it was verified: {', '.join(changed)}")
    reasons: list[str] = []
    evidence: dict[str, Any] = {"when": datetime.now(UTC).isoformat(timespec="seconds"), "machine": _machine()}
    tell("weights")
    evidence["finite"], broken = _finite(folder)
    if broken:
        reasons.append(f"{broken} holds values that are not finite")
    else:
        evidence |= _measured(folder, reasons, tell)
    depth_limit = None
    if speed and not reasons and evidence["max_depth"]:
        tuned = _speed(folder, evidence["max_depth"], tell)
        evidence["speed"], depth_limit = tuned.report(), tuned.chosen.depth
        if not depth_limit:
            reasons.append("no depth decodes faster than plain decoding here")
    made = replace(
        stamp,
        files=digests(folder),
        evidence=evidence,
        verdict="no" if reasons else "yes",
        reasons=tuple(reasons),
        depth_limit=None if reasons else depth_limit,
    )
    write_stamp(folder, made)
    return made


def _machine() -> dict[str, str]:
    device = mx.default_device()
    name = str(mx.device_info().get("device_name", "")) if device == mx.gpu else platform.processor()
    packages = {package: version(package) for package in ("mlx", "mlx-lm", "selfdraft")}
    return {"device": "gpu" if device == mx.gpu else "cpu", "name": name, "blas": active_blas(), **packages}


def _finite(folder: Path) -> tuple[bool, str]:
    """Whether all weights are, and the first that is not; one at a time."""
    tensors = classify(folder).mapped_anew()
    for name in sorted(tensors):
        tensor = tensors.pop(name)
        if mx.issubdtype(tensor.dtype, mx.floating) and not mx.isfinite(tensor).all().item():
            return False, name
        del tensor
        mx.clear_cache()
    return True, ""


def _measured(folder: Path, reasons: list[str], tell: Tell) -> dict[str, Any]:
    """What a loaded model shows; adds why it is not worth running."""
    llm = LLM.open(folder.name, folder, load_settings(session_cache_max_bytes=0))
    found: dict[str, Any] = {"max_depth": llm.max_depth, "dtype": str(llm.loaded.dtype).removeprefix("mlx.core.")}
    if not llm.max_depth:
        reasons.append(" ".join(llm.notes) or "it has no MTP head")
        return found
    tell("wiring of the head")
    model: Any = llm.loaded.model
    found["wiring"] = wirings(model, llm.checkpoint.architecture, llm.tokenizer.encode(PROBE_TEXT, special=False))
    reasons += _wrongly_wired(found["wiring"])
    tell("drafting against plain decoding")
    try:
        found["exactness"] = {**_equal_texts(llm), "rows": _rows_alike(llm)}
    except NonFiniteLogits as error:
        reasons.append(str(error))
    return found


def _wrongly_wired(found: dict[str, float]) -> list[str]:
    built, (best, share) = found[AS_BUILT], max(found.items(), key=lambda pair: pair[1])
    if best != AS_BUILT and share > built + _CLEARLY:
        return [
            f"the head drafts {share:.0%} of its trunk's own tokens with {best}, and {built:.0%} as it was built: its "
            "labels are wrong; build it again with --head-order or --head-norms"
        ]
    if built < LEAST_ACCEPTANCE:
        return [f"the head drafts {built:.0%} of its trunk's own tokens, below {LEAST_ACCEPTANCE:.0%}, in every wiring"]
    return []


def _equal_texts(llm: LLM) -> dict[str, Any]:
    """Greedy answers of every depth that are plain decoding's, token for token. Where kernels let a row's rounding hang
    on how many rows there are, an answer may part where two tokens nearly tie."""
    prompts = [llm.tokens(text, raw=llm.template is None) for text in HELD_OUT]
    depths = sorted({1, min(2, llm.max_depth), min(4, llm.max_depth)})
    plain = [_answer(llm, prompt, 0) for prompt in prompts]
    equal = {
        depth: sum(_answer(llm, p, depth) == text for p, text in zip(prompts, plain, strict=True)) for depth in depths
    }
    return {"prompts": len(prompts), "tokens": _TOKENS, "equal_by_depth": {str(d): n for d, n in equal.items()}}


def _answer(llm: LLM, prompt: Sequence[int], depth: int) -> list[int]:
    asked = SamplingParams(depth=depth, max_tokens=_TOKENS, temperature=0, ignore_eos=True).resolved({})
    engine = Engine(llm.loaded.model)
    row = engine.add(Request(prompt, asked))
    for _ in engine.run(row):
        pass
    if row.error is not None:
        raise row.error
    return row.emitted


def _rows_alike(llm: LLM) -> dict[str, float]:
    """Largest difference of logits between a pass over several tokens and passes over one, by how many there are."""
    model, tokens = llm.loaded.model, llm.tokenizer.encode(PROBE_TEXT, special=False)
    begun = model.new_state()
    _, captured = model.forward(mx.array([tokens[:32]]), [begun], keep_steps=False)
    captured.commit([begun], [32])
    found = {}
    for width in range(2, min(llm.max_depth, 4) + 2):
        together, alone = begun.fork(), begun.fork()
        window = tokens[32 : 32 + width]
        wide = model.logits(model.forward(mx.array([window]), [together], keep_steps=True)[0])
        single = []
        for token in window:
            hidden, captured = model.forward(mx.array([[token]]), [alone], keep_steps=True)
            captured.commit([alone], [1])
            single.append(model.logits(hidden))
        difference: Any = (
            mx.abs(wide.astype(mx.float32) - mx.concatenate(single, axis=1).astype(mx.float32)).max().item()
        )
        found[str(width)] = float(difference)
    return found


def _speed(folder: Path, max_depth: int, tell: Tell) -> Tuning:
    name = str(folder)
    return tune(name, describe(name), max_depth=min(max_depth, 4), rounds=_ROUNDS, tokens=_TOKENS, pause=0, tell=tell)


def refuse_unverified(folder: Path) -> Stamp:
    """The stamp of a package that may be shown to others.

    Raises:
        SelfdraftError: it is not verified, was changed since, or the answer was no.
    """
    stamp = read_stamp(folder)
    if stamp is None or not stamp.verdict:
        raise SelfdraftError(f"{folder} is not verified: run `selfdraft forge verify {folder}` first")
    if stamp.verdict != "yes":
        raise SelfdraftError(f"{folder} is not worth publishing: {'; '.join(stamp.reasons)}")
    if changed := changed_files(folder, stamp):
        raise SelfdraftError(f"{changed[0]} changed since {folder} was verified: run `selfdraft forge verify` again")
    return stamp

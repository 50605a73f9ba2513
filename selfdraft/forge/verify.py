"""Is a package worth running here? Measured on this machine, never taken from labels; the answer may be no.

Finite weights and logits, drafting against plain decoding, the head's wiring by acceptance, speed by depth against
plain decoding. What was found is stamped into selfdraft.json, and nothing of what was found before.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..device import active_blas
from ..errors import NonFiniteLogits, SelfdraftError
from ..llm import LLM
from ..models.checkpoint import classify
from ..models.probe import LEAST_ACCEPTANCE, PROBE_TEXT
from ..settings import load_settings
from ..stamp import STAMP, Stamp, changed_files, digests, read_stamp, write_stamp
from ..tuning.tune import Tuning, describe, tune
from . import exactness
from .wiring import AS_BUILT, remedy, wirings

__all__ = ["verify"]

Tell = Callable[[str], None]

_CLEARLY = 0.1  # by how much another wiring must draft better to be believed
_DEEPEST = 4  # depth whose speed is measured
_ROUNDS = 3
_TOKENS = 48


def verify(folder: Path, *, speed: bool = True, tell: Tell = lambda line: None) -> Stamp:
    """Measure a package, and stamp it.

    Args:
        speed: also measure how fast each depth is, in processes of their own: minutes.
        tell: called with a line for each thing that is done.

    Returns:
        What was written into its selfdraft.json.

    Raises:
        CheckpointError: it cannot be loaded. SelfdraftError: the stamp cannot be written.
    """
    checkpoint = classify(folder)
    before = read_stamp(folder) or Stamp(recipe={}, source=folder.name)
    tell("digests")
    files = digests(folder)
    if changed := changed_files(files, before):
        tell(f"changed since it was verified: {', '.join(changed)}")
    # A limit that an earlier answer set would bind what is measured; and one that is broken off leaves no answer.
    stamp = replace(before, files={}, evidence={}, verdict="", reasons=(), depth_limit=None)
    _write(folder, stamp)
    evidence: dict[str, Any] = {"when": datetime.now(UTC).isoformat(timespec="seconds"), "machine": _machine()}
    tell("weights")
    broken = _not_finite(checkpoint.mapped_anew())
    evidence["finite"] = not broken
    reasons = [f"{broken} holds values that are not finite"] if broken else _judged(folder, stamp, evidence, tell)
    limit = None
    if speed and not reasons:
        tuned = _speed(folder, evidence["max_depth"], tell)
        evidence["speed"] = _reported(tuned)
        limit = _depth_limit(tuned)
        if limit == 0:
            limit = None
            reasons.append("no depth decodes faster than plain decoding here")
    made = replace(
        stamp,
        files=files,
        evidence=evidence,
        verdict="no" if reasons else "yes",
        reasons=tuple(reasons),
        depth_limit=limit,
    )
    _write(folder, made)
    return made


def _write(folder: Path, stamp: Stamp) -> None:
    try:
        write_stamp(folder, stamp)
    except OSError as error:
        raise SelfdraftError(
            f"{folder / STAMP} cannot be written ({error.strerror or error}); copy the package to where you may write"
        ) from error


def _machine() -> dict[str, str]:
    """What the figures hang on. No name of a host or a user."""
    device = mx.default_device()
    name = str(mx.device_info().get("device_name", "")) if device == mx.gpu else platform.processor()
    packages = {package: version(package) for package in ("mlx", "mlx-lm", "selfdraft")}
    return {"device": "gpu" if device == mx.gpu else "cpu", "name": name, "blas": active_blas(), **packages}


def _not_finite(tensors: dict[str, mx.array]) -> str:
    """The first tensor with a value that is not finite, "" if all are; one in memory at a time."""
    for name in sorted(tensors):
        tensor = tensors.pop(name)
        if mx.issubdtype(tensor.dtype, mx.floating) and not mx.isfinite(tensor).all().item():
            return name
        del tensor
        mx.clear_cache()
    return ""


def _judged(folder: Path, stamp: Stamp, evidence: dict[str, Any], tell: Tell) -> list[str]:
    """Why it is not worth running, by what it shows once it is loaded, which is added to the evidence."""
    llm = LLM.open(folder.name, folder, load_settings(session_cache_max_bytes=0))
    evidence["max_depth"], evidence["dtype"] = llm.max_depth, str(llm.loaded.dtype).removeprefix("mlx.core.")
    if not llm.max_depth:
        return [llm.notes[-1].removeprefix("plain decoding: ") if llm.notes else "it has no MTP head"]
    tell("drafting against plain decoding")
    try:
        exact = exactness.measure(llm)
    except NonFiniteLogits as error:
        return [str(error)]
    evidence["exactness"] = exact.describe()
    tell("wiring of the head")
    tokens = llm.tokenizer.encode(PROBE_TEXT, special=False)
    evidence["wiring"] = wirings(llm.loaded.model, llm.checkpoint.architecture, tokens)
    return [problem for problem in (exact.problem, _wrongly_wired(evidence["wiring"], stamp)) if problem]


def _wrongly_wired(found: Mapping[str, float], stamp: Stamp) -> str:
    """What is wrong with a head that drafts better in another wiring, or badly in all; "" for nothing."""
    built, (best, share) = found[AS_BUILT], max(found.items(), key=lambda pair: pair[1])
    if share >= LEAST_ACCEPTANCE and share > built + _CLEARLY:
        flags = remedy(best, stamp.recipe.get("head_order", ""))
        then = f"build it again with {flags}" if flags else "no flag of `forge build` makes that of it"
        return (
            f"the head drafts {share:.0%} of its trunk's own tokens with {best}, and {built:.0%} as it was built: "
            f"its labels are wrong; {then}"
        )
    if built < LEAST_ACCEPTANCE:
        return (
            f"the head drafts {built:.0%} of its trunk's own tokens, below {LEAST_ACCEPTANCE:.0%}, and no better in "
            "another wiring: it was not trained with this trunk, or was lost in rounding (`--head dense` tells)"
        )
    return ""


def _speed(folder: Path, max_depth: int, tell: Tell) -> Tuning:
    name = str(folder)
    depth = min(max_depth, _DEEPEST)
    return tune(name, describe(name), max_depth=depth, rounds=_ROUNDS, tokens=_TOKENS, pause=0, tell=tell)


def _reported(tuned: Tuning) -> dict[str, Any]:
    """What was measured, without where the package lies."""
    report = tuned.report()
    return {name: report[name] for name in ("tokens", "rounds", "candidates", "chosen", "verdict")}


def _depth_limit(tuned: Tuning) -> int | None:
    """The deepest draft that pays, 0 if none does; None if that is the deepest that was measured."""
    plain, *drafting = tuned.candidates
    pays = [candidate.depth for candidate in drafting if candidate.beats(plain)]
    deepest = max(pays, default=0)
    return None if deepest == drafting[-1].depth else deepest

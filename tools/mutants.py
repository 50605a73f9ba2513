"""Planted faults: applies each one-line fault to a copy of the project and shows which test catches it.

A fault that no test catches ("survives") means a rule of the project is not guarded; the exit status is then 1. Every
new rule gets a fault here.

    usage: mutants.py [NAME ...]      only the faults whose name contains one of these words
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Fault:
    """One line replaced in one file, and the tests that ought to notice.

    Attributes:
        name: what is broken.
        path: file under selfdraft/.
        right, wrong: the text as it is (it must occur exactly once) and the fault.
        tests: pytest arguments.
    """

    name: str
    path: str
    right: str
    wrong: str
    tests: str


FAULTS = [
    Fault(
        "residual dropped: a rejection draws from p",
        "engine/accept.py",
        "return mx.where(residual.sum(axis=-1, keepdims=True) > 0, residual, p_next)",
        "return p_next",
        "tests/engine/test_joint_law.py",
    ),
    Fault(
        "block residual without its scale",
        "engine/accept.py",
        "mx.maximum(at(scale, accepted)[:, None] * p_next - q_next, 0)",
        "mx.maximum(p_next - q_next, 0)",
        "tests/engine/test_joint_law.py",
    ),
    Fault(
        "block threshold without the deficit",
        "engine/accept.py",
        "denominator = excess + 1 - reached",
        "denominator = excess + 1",
        "tests/engine/test_joint_law.py",
    ),
    Fault(
        "acceptance <= instead of <",
        "engine/accept.py",
        "rule.stays(uniforms < probabilities)",
        "rule.stays(uniforms <= probabilities)",
        "tests/engine/test_rejection_sampling.py",
    ),
    Fault(
        "q unfiltered in the ratio",
        "engine/cycle.py",
        "filtered.append(z)",
        "filtered.append(logits[:, 0].astype(mx.float32))",
        "tests/engine/test_distribution.py",
    ),
    Fault(
        "a cycle started early draws the noise of the one before",
        "engine/cycle.py",
        "self.counters = [row.counter + (unread is not None) for row in rows]",
        "self.counters = [row.counter for row in rows]",
        "tests/engine/test_running_ahead.py",
    ),
    Fault(
        "penalties ignore the unread token",
        "engine/cycle.py",
        "before = drafts.tokens if batch.unread is None else batch.unread",
        "before = drafts.tokens",
        "tests/engine/test_running_ahead.py",
    ),
    Fault(
        "an early move is not undone for a swallowed token",
        "engine/cycle.py",
        "            if kept == 0:\n                state.recurrent",
        "            if kept < 0:\n                state.recurrent",
        "tests/engine/test_running_ahead.py",
    ),
    Fault(
        "a row that ended leaves its early cycle behind",
        "engine/engine.py",
        "                self.cycle.drop_ahead(row)\n",
        "",
        "tests/engine/test_running_ahead.py",
    ),
    Fault(
        "a cancelled row is forwarded to the end of its chunk",
        "engine/prefill.py",
        "            if row.done:\n                return\n        mx.eval(state.arrays())",
        "        mx.eval(state.arrays())",
        "tests/engine/test_prefill.py",
    ),
    Fault(
        "a thread ends with its MLX streams",
        "engine/threads.py",
        "_local.guard = _AtThreadEnd()",
        "pass",
        "tests/engine/test_threads.py",
    ),
    Fault(
        "noise of a rejected row used again",
        "engine/cycle.py",
        "row.draws += batch.depth + 1",
        "row.draws += 0",
        "tests/engine/test_distribution.py",
    ),
    Fault(
        "uniforms drawn with the keys of the Gumbel noise",
        "engine/noise.py",
        "_keys(streams, counters, 1, _UNIFORM)",
        "_keys(streams, counters, 1, 0)",
        "tests/engine/test_noise.py",
    ),
    Fault(
        "seeded noise keyed by cycle instead of emitted index",
        "engine/row.py",
        "return len(self.emitted) if self.coupled else self.draws",
        "return self.statistics.cycles",
        "tests/engine/test_parity.py",
    ),
    Fault(
        "head history reset each cycle",
        "engine/cycle.py",
        "[state.head_length for state in states])",
        "[0 for state in states])",
        "tests/engine/test_scripted_head.py tests/models/test_acceptance_reference.py",
    ),
    Fault(
        "position counted in cycles",
        "state/captured.py",
        "row.length += count",
        "row.length += 1",
        "tests/engine/test_parity.py",
    ),
    Fault(
        "head entries trimmed by K after a full acceptance, not K-1",
        "engine/cycle.py",
        "row.state.head_length += count",
        "row.state.head_length += count if count <= 2 else count - 1",
        "tests/engine/test_scripted_head.py",
    ),
    Fault(
        "EOS accepted but the token after it still emitted",
        "engine/cycle.py",
        "kept = tokens[: index + 1]",
        "kept = tokens[: index + 2]",
        "tests/engine/test_stops.py",
    ),
    Fault(
        "conv window off by one",
        "state/captured.py",
        "self.window[row : row + 1, tokens : tokens + taps]",
        "self.window[row : row + 1, tokens - 1 : tokens - 1 + taps]",
        "tests/state tests/engine/test_parity.py",
    ),
    Fault(
        "recurrent state one step short after an acceptance",
        "state/captured.py",
        "self.memories[tokens - self.first][row : row + 1]",
        "self.memories[max(tokens - self.first - 1, 0)][row : row + 1]",
        "tests/state tests/engine/test_parity.py",
    ),
    Fault(
        "penalties ignore the drafts before a position",
        "engine/sampling.py",
        "counts = counts + before",
        "counts = counts + 0 * before",
        "tests/engine/test_sampling_chain.py",
    ),
    Fault(
        "top-k drops ties",
        "engine/sampling.py",
        "mx.where(z >= threshold, z, -mx.inf)",
        "mx.where(z > threshold, z, -mx.inf)",
        "tests/engine/test_sampling_chain.py",
    ),
    Fault(
        "top-p drops the token that crosses the border",
        "engine/sampling.py",
        "mx.maximum(kept.sum(axis=-1, keepdims=True) - 1, 0)",
        "mx.maximum(kept.sum(axis=-1, keepdims=True) - 2, 0)",
        "tests/engine/test_sampling_chain.py",
    ),
    Fault(
        "min_tokens one short",
        "engine/sampling.py",
        "max(least - done - first, 0)",
        "max(least - done - first - 1, 0)",
        "tests/engine/test_sampling_chain.py tests/engine/test_stops.py",
    ),
    Fault(
        "norm shift missed",
        "models/loader.py",
        "tensor = tensor.astype(mx.float32) + 1.0",
        "tensor = tensor.astype(mx.float32)",
        "tests/models/test_golden.py",
    ),
    Fault(
        "halves of the head's input swapped",
        "models/qwen3_5.py",
        "[self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)]",
        "[self.pre_fc_norm_hidden(hidden), self.pre_fc_norm_embedding(embeddings)]",
        "tests/models/test_golden.py",
    ),
    Fault(
        "bonus skipped",
        "engine/cycle.py",
        "outcome.tokens[index][: accepted + 1]",
        "outcome.tokens[index][: max(min(accepted + 1, depth), 1)]",
        "tests/engine/test_scripted_head.py",
    ),
    Fault(
        "verify rows see the drafts after them",
        "state/kv.py",
        'mask = "causal" if q.shape[2] > 1 else None',
        "mask = None",
        "tests/engine/test_parity.py",
    ),
    Fault(
        "trunk run again after a rejection",
        "engine/cycle.py",
        "hidden, captured = self._model.forward(tokens, batch.states, keep_steps=True)",
        "self._model.forward(tokens, batch.states, keep_steps=True); "
        "hidden, captured = self._model.forward(tokens, batch.states, keep_steps=True)",
        "tests/engine/test_scripted_head.py",
    ),
    Fault(
        "NaN logits decoded on",
        "engine/cycle.py",
        "if not all(outcome.finite[index][: decisive + 1]):",
        "if False:",
        "tests/engine/test_stops.py",
    ),
    Fault(
        "foreign head attached without a probe",
        "llm.py",
        "if acceptance >= LEAST_ACCEPTANCE:",
        "if acceptance >= 0:",
        "tests/models/test_separate_head.py",
    ),
    Fault(
        "the constraint's mask is left out of p",
        "engine/cycle.py",
        "z = batch.chain(verified.logits, batch.emitted, batch.histories, before, allowed)",
        "z = batch.chain(verified.logits, batch.emitted, batch.histories, before)",
        "tests/engine/test_constraint.py",
    ),
    Fault(
        "the first position's mask stands for all of them",
        "engine/cycle.py",
        "return batch.allowed(drafts.tokens if waits else None)",
        "return batch.allowed(None)",
        "tests/engine/test_constraint.py",
    ),
    Fault(
        "a constraint is not told what was emitted",
        "engine/cycle.py",
        "row.request.constraint.emit(kept)",
        "pass",
        "tests/engine/test_constraint.py",
    ),
    Fault(
        "the first token of an answer is not masked",
        "engine/prefill.py",
        "batch.histories, None, allowed)",
        "batch.histories, None)",
        "tests/engine/test_constraint.py",
    ),
    Fault(
        "a row with a constraint runs ahead of its mask",
        "engine/cycle.py",
        "if batch.constrained or any(",
        "if any(",
        "tests/engine/test_constraint.py",
    ),
    Fault(
        "min_tokens withholds the only token a constraint allows",
        "engine/sampling.py",
        "early = early & (allowed.tokens & ~self._stops).any(axis=-1, keepdims=True)",
        "pass",
        "tests/engine/test_constraint.py",
    ),
    Fault(
        "masks are not rolled back after a look along the drafts",
        "text/grammar.py",
        "self._matcher.rollback(taken)",
        "pass",
        "tests/text/test_grammar.py",
    ),
    Fault(
        "an end token passes as text of a grammar",
        "text/grammar.py",
        "mask[self._vocabulary.ends] = self._matcher.is_accepting()",
        "pass",
        "tests/text/test_grammar.py",
    ),
    Fault(
        "stop string does not end the row",
        "engine/cycle.py",
        "kept = kept[:count]",
        "kept = kept",
        "tests/engine/test_stops.py",
    ),
]


def main() -> int:
    words = sys.argv[1:]
    faults = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    if not faults:
        print(f"no fault has a name with {' or '.join(words)}")
        return 2
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = _copy(Path(folder))
        for fault in faults:
            begin = time.monotonic()
            caught = _try(copy, fault)
            survivors += caught is None
            verdict = f"caught by {caught}" if caught else "SURVIVES"
            print(f"{fault.name}\n    {fault.path}: {verdict}  ({time.monotonic() - begin:.0f} s)", flush=True)
    print(f"\n{len(faults) - survivors} faults caught, {survivors} survived")
    return 1 if survivors else 0


def _copy(folder: Path) -> Path:
    """The project without its environments; weights are linked, not copied."""
    copy = folder / "project"
    skipped = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "assets", "build", "dist")
    shutil.copytree(ROOT, copy, ignore=skipped)
    (copy / "selfdraft" / "assets").symlink_to(ROOT / "selfdraft" / "assets")
    return copy


def _try(copy: Path, fault: Fault) -> str | None:
    """Plant a fault, run its tests, take it out again. Returns the first test that failed."""
    path = copy / "selfdraft" / fault.path
    text = path.read_text(encoding="utf-8")
    if text.count(fault.right) != 1:
        raise SystemExit(f"{fault.name}: {fault.path} holds {fault.right!r} {text.count(fault.right)} times, not once")
    path.write_text(text.replace(fault.right, fault.wrong), encoding="utf-8")
    try:
        done = subprocess.run(
            [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *fault.tests.split()],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
        )
    finally:
        path.write_text(text, encoding="utf-8")
    if done.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.MULTILINE)
    if done.returncode != 1 or not found:
        raise SystemExit(f"{fault.name}: pytest itself failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return found.group(1)


if __name__ == "__main__":
    sys.exit(main())

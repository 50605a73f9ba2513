"""Faults of warm prefixes: what a boundary holds, how it is found, who sees it, what is on disk."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

EXACT, BANK, DISK, PROMPTS = (
    f"tests/{name}.py"
    for name in ("sessions/test_exact", "sessions/test_bank", "sessions/test_on_disk", "test_prompts")
)

FAULTS = [
    Fault(
        "head's entries cut where the trunk's are",
        "sessions/payload.py",
        "1 + shape.behind",
        "shape.behind",
        EXACT,
    ),
    Fault(
        "a turn is kept without the pairs of its last cycle",
        "engine/cycle.py",
        "if row.drafts and kept:",
        "if row.drafts and not row.done:",
        EXACT,
    ),
    Fault(
        "a turn is kept before the head has seen it",
        "engine/prefill.py",
        "        if row.pending:\n            self._cycle.commit_history([row])\n",
        "",
        EXACT,
    ),
    Fault(
        "recurrent states of an empty row restored",
        "sessions/payload.py",
        'RecurrentState(moment[f"recurrent.{index}.window"], moment[f"recurrent.{index}.memory"])',
        "state.recurrent[index]",
        EXACT,
    ),
    Fault(
        "chunks counted from where a row goes on",
        "engine/prefill.py",
        "(start // self._chunk + 1) * self._chunk",
        "start + self._chunk",
        EXACT,
    ),
    Fault(
        "a boundary whose parent was cleared hangs on it all the same",
        "sessions/bank.py",
        "if not behind.attached or",
        "if",
        DISK,
    ),
    Fault(
        "a row that drafts goes on without the head's history",
        "sessions/bank.py",
        "and node.drafts >= drafts",
        "",
        BANK,
    ),
    Fault(
        "the last token of a prompt restored too",
        "sessions/prompt_session.py",
        "self._prompt[:-1]",
        "self._prompt",
        BANK,
    ),
    Fault(
        "scopes share a tree",
        "sessions/bank.py",
        "if scope not in self._roots:",
        "scope = ''\n        if not self._roots:",
        BANK,
    ),
    Fault(
        "spans leave under boundaries that need them",
        "sessions/bank.py",
        "if any(child.span is not None for child in current.children):\n                return\n            ",
        "",
        BANK,
    ),
    Fault(
        "what a row goes on from may leave",
        "sessions/bank.py",
        "if node.moment is not None and not node.users",
        "if node.moment is not None",
        BANK,
    ),
    Fault(
        "a view keeps a row's buffer",
        "sessions/payload.py",
        "return mx.slice_update(mx.zeros(x.shape, dtype=x.dtype), x, mx.array([0]), (0,))",
        "return x",
        BANK,
    ),
    Fault(
        "ids compared by their first alone",
        "sessions/tree.py",
        "np.array_equal(ids[self.end : child.end], child.ids)",
        "len(ids) >= child.end",
        BANK,
    ),
    Fault(
        "another scope's transcripts",
        "sessions/transcripts.py",
        "known = self._known.get(scope, OrderedDict())",
        "known = next(iter(self._known.values()), OrderedDict())",
        PROMPTS,
    ),
    Fault(
        "ids served although their text is cut inside a word",
        "prompts.py",
        "prompted.text is None or not self._cuts(tokens[-1])",
        "prompted.text is None",
        PROMPTS,
    ),
    Fault("a fork inside a word", "prompts.py", "text.rfind(token, window, common) + len(token)", "common", PROMPTS),
    Fault(
        "the template is no part of the identity",
        "sessions/identity.py",
        '"**/*.safetensors", "*.json", "*.jinja"',
        '"**/*.safetensors", "*.json"',
        "tests/sessions/test_identity.py",
    ),
    Fault(
        "damage leaves the node in the tree",
        "sessions/bank.py",
        "            self._forget(node)\n            raise\n",
        "            raise\n",
        DISK,
    ),
    Fault(
        "a span alone is taken for a boundary",
        "sessions/bank.py",
        "(self._readable(node) and node.stored is not None and node.stored.whole)",
        "self._readable(node)",
        DISK,
    ),
    Fault(
        "what was refused and has left memory silences what follows",
        "sessions/bank.py",
        "(not _on_disk(each) and each.span is None)",
        "(not _on_disk(each) and (each.span is None or each.moment is None))",
        DISK,
    ),
    Fault(
        "a request that wants no cache has one",
        "llm.py",
        "if params.cache_prompt and not only_prompt",
        "if not only_prompt",
        "tests/server/test_security.py",
    ),
    Fault(
        "any key reads the figures of all",
        "server/security.py",
        "key is not None and key != self._access.keys[0]",
        "False",
        "tests/server/test_security.py",
    ),
    Fault(
        "a slow template is rendered three times",
        "prompts.py",
        "or not answered or slow",
        "or not answered",
        PROMPTS,
    ),
    Fault(
        "texts used longest ago come first",
        "keeping.py",
        "key=lambda each: -each.used",
        "key=lambda each: each.used",
        DISK,
    ),
    Fault(
        "every key has one owner",
        "server/security.py",
        "LOCAL if key is None else",
        "LOCAL if True else",
        "tests/server/test_security.py",
    ),
]

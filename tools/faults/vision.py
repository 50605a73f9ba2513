"""Faults of images: where embeddings and positions go, what tells pictures apart, what a tower is."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

REFERENCE = "tests/vision/test_reference.py"
DECODING = "tests/vision/test_decoding.py"
SESSIONS = "tests/vision/test_sessions.py"
LLM = "tests/vision/test_llm.py"
TOWER = "tests/vision/test_tower.py"
INPUTS = "tests/kernels/test_attention_inputs.py"

FAULTS = [
    Fault(
        "the head sees the token that stands for an image, not its embeddings",
        "models/qwen3_5.py",
        "self.mtp(self.model.embedded(tokens, spliced)",
        "self.mtp(self.model.embedded(tokens, None)",
        REFERENCE,
    ),
    Fault(
        "a pair of the head is at the position of its own token",
        "vision/prompt.py",
        "self.places.positions(start - 1, end - 1)",
        "self.places.positions(start, end)",
        REFERENCE,
    ),
    Fault(
        "heights and widths change places",
        "vision/positions.py",
        "positions[1, inside] += (token // place.columns)",
        "positions[1, inside] += (token % place.columns)",
        REFERENCE,
    ),
    Fault(
        "text goes on behind the shorter side of an image",
        "vision/positions.py",
        "- max(self.rows, self.columns)",
        "- min(self.rows, self.columns)",
        REFERENCE,
    ),
    Fault(
        "frequencies are dealt out to the axes in blocks",
        "models/multimodal_rope.py",
        "range(axis, AXES * sections[axis], AXES)",
        "range(sum(sections[:axis]), sum(sections[: axis + 1]))",
        REFERENCE,
    ),
    Fault(
        "kernels turn what comes behind an image by the number of its token",
        "models/few_tokens.py",
        "numbers(tuple(rope_deltas))",
        "numbers(tuple(0 * delta for delta in rope_deltas))",
        f"{DECODING} -k kernels_take",
    ),
    Fault(
        "the kernel leaves rope deltas out",
        "kernels/source/attention_inputs.h",
        "float(position + rope_deltas[group.z])",
        "float(position)",
        INPUTS,
    ),
    Fault(
        "a row that goes on from a boundary counts its positions as text",
        "engine/prefill.py",
        "row.state.rope_delta = inputs.rope_delta(length)",
        "row.state.rope_delta = 0",
        SESSIONS,
    ),
    Fault(
        "a boundary inside of an image begins its embeddings anew",
        "vision/prompt.py",
        "[first - place.start : last - place.start]",
        "[: last - first]",
        REFERENCE,
    ),
    Fault(
        "prompts with other pixels are one prompt",
        "vision/pictures.py",
        "picture.digest.encode()",
        'b""',
        SESSIONS,
    ),
    Fault(
        "the bank is handed the tokens of images",
        "sessions/prompt_session.py",
        "[*self._prompt[: len(tokens)].tolist(), *tokens",
        "[*tokens[: len(self._prompt)], *tokens",
        SESSIONS,
    ),
    Fault(
        "all images of a prompt are encoded in one turn",
        "engine/prefill.py",
        "if self._prepares(row, body):\n            return row.done",
        "while self._prepares(row, body):\n            pass",
        f"{DECODING} -k encoded_once",
    ),
    Fault(
        "what the tower takes is not asked for",
        "budget.py",
        "max(working, inputs.working_bytes)",
        "working",
        f"{DECODING} -k memory_is",
    ),
    Fault(
        "a text may stand for an image",
        "vision/pictures.py",
        "if _says(said, self._token):",
        "if False and _says(said, self._token):",
        f"{LLM} -k refused",
    ),
    Fault(
        "ids of images on disk are no tokens",
        "vision/pictures.py",
        "self._token_id if key >= self._vocab_size else key",
        "key",
        f"{LLM} -k recalled",
    ),
    Fault(
        "videos are left to the template",
        "images.py",
        'and "video" in kind:',
        'and kind == "film":',
        f"{LLM} -k refused",
    ),
    Fault(
        "a tower that lacks tensors is taken",
        "vision/tower.py",
        "if problems := describe_misfits(module, weights):",
        "if (problems := describe_misfits(module, weights)) and False:",
        f"{TOWER} -k fit_is_said",
    ),
    Fault(
        "the most pixels of a checkpoint are not kept to",
        "vision/patches.py",
        "if math.prod(sides) > self.most:",
        "if math.prod(sides) > 10 * self.most:",
        f"{TOWER} -k pixels_are",
    ),
    Fault(
        "patches of a token do not follow each other",
        "vision/patches.py",
        ".transpose(0, 3, 1, 4, 6, 2, 5)",
        ".transpose(0, 1, 3, 4, 6, 2, 5)",
        f"{TOWER} -k pixels_are",
    ),
    Fault(
        "the tower's weights are not counted",
        "models/checkpoint.py",
        "used += self.tower().values() if tower else ()",
        "used += ()",
        f"{LLM} -k it_is_said",
    ),
    Fault(
        "MLX comes in before the BLAS is chosen",
        "prompts.py",
        "from .images import Picture, in_messages",
        "from .images import Picture, in_messages\nfrom .vision import PicturePrompts as _",
        "tests/test_import_rules.py -k heavy",
    ),
]

"""Faults in the families of models."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

_FAMILIES = "tests/models/test_families.py"
_GEMMA = "tests/models/test_gemma4.py"

FAULTS = [
    Fault(
        "ERNIE weighs experts with the bias that only chooses",
        "models/ernie4_5_moe.py",
        "weights = mx.take_along_axis(scores, chosen, axis=-1)",
        "weights = mx.take_along_axis(scores + self.e_score_correction_bias, chosen, axis=-1)",
        f"{_FAMILIES} -k ernie",
    ),
    Fault(
        "ERNIE chooses experts without the bias",
        "models/ernie4_5_moe.py",
        "mx.argpartition(-(scores + self.e_score_correction_bias)",
        "mx.argpartition(-scores",
        f"{_FAMILIES} -k ernie",
    ),
    Fault(
        "ERNIE's module is not behind the trunk's norm",
        "models/ernie4_5_moe.py",
        "super().draft_logits(self.model.norm(hidden), step, whole=whole)",
        "super().draft_logits(hidden, step, whole=whole)",
        f"{_FAMILIES} -k ernie",
    ),
    Fault(
        "ERNIE's transposed projection stays as it is",
        "models/ernie4_5_moe.py",
        "found[projection] = found[projection].T",
        "pass",
        "tests/models/test_ernie4_5_moe.py",
    ),
    Fault(
        "ERNIE without biases says nothing",
        "models/ernie4_5_moe.py",
        'if not lost or config.get("moe_use_aux_free") is False:',
        "if True:",
        "tests/models/test_ernie4_5_moe.py",
    ),
    Fault(
        "ERNIE's last layer with experts is not counted from the end",
        "models/ernie4_5_moe.py",
        "last = layers - 1 if last == -1 else last",
        "last = last",
        "tests/models/test_ernie4_5_moe.py",
    ),
    Fault(
        "a Mamba layer starts each forward anew",
        "models/nemotron_h.py",
        "memory = state.memory\n",
        "memory = state.memory * 0\n",
        f"{_FAMILIES} -k nemotron",
    ),
    Fault(
        "a Mamba layer keeps the last step alone",
        "models/nemotron_h.py",
        "CapturedLayer(window, memories, first=length)",
        "CapturedLayer(window, [memory] * len(memories), first=length)",
        f"{_FAMILIES} -k nemotron",
    ),
    Fault(
        "a Mamba layer scans few tokens as it does a prompt's",
        "models/nemotron_h.py",
        "(ssm_update, 1) if keep_steps else (ssm_attn, tokens)",
        "(ssm_attn, tokens)",
        f"{_FAMILIES} -k nemotron",
    ),
    Fault(
        "a Mamba layer's convolution has no bias",
        "models/nemotron_h.py",
        'mixed + self.conv1d.bias if "bias" in self.conv1d else mixed',
        "mixed",
        f"{_FAMILIES} -k nemotron",
    ),
    Fault(
        "Nemotron-H's head takes hidden first",
        "models/nemotron_h.py",
        "[first.enorm(embeddings), first.hnorm(hidden)]",
        "[first.hnorm(hidden), first.enorm(embeddings)]",
        f"{_FAMILIES} -k nemotron",
    ),
    Fault(
        "Nemotron-H's head has no last norm",
        "models/nemotron_h.py",
        "out: mx.array = self.layers[-1].final_layernorm(x)",
        "out: mx.array = x",
        f"{_FAMILIES} -k nemotron",
    ),
    Fault(
        "Nemotron-H clamps time steps by a rule of its own",
        "models/nemotron_h.py",
        'value = config.get("time_step_limit") or (0.0, math.inf)',
        "value = (0.001, 0.1)",
        "tests/models/test_nemotron_h.py",
    ),
    Fault(
        "Gemma's assistant stands at the newest key, not behind it",
        "models/gemma4.py",
        "ReadCache(row.attention[source], offset - step, behind=1, length=row.length)",
        "ReadCache(row.attention[source], offset - step, behind=0, length=row.length)",
        f"{_FAMILIES} -k gemma",
    ),
    Fault(
        "Gemma's assistant moves on with each draft",
        "models/gemma4.py",
        "ReadCache(row.attention[source], offset - step, behind=1, length=row.length)",
        "ReadCache(row.attention[source], min(offset, row.length - 1), behind=1, length=row.length)",
        f"{_FAMILIES} -k gemma",
    ),
    Fault(
        "a layer that reads another's keys sees past its window",
        "models/gemma4.py",
        "begin, end = self._held.begin(self.offset), min(",
        "begin, end = self._held.first, min(",
        f"{_FAMILIES} -k gemma",
    ),
    Fault(
        "queries side by side see past the window",
        "models/gemma4.py",
        "seen & (keys > queries + self.offset - self._held.window)",
        "seen",
        f"{_FAMILIES} {_GEMMA} -k gemma",
    ),
    Fault(
        "padded pairs are answered with keys that are not held",
        "models/gemma4.py",
        "min(self._newest + tokens, self._length)",
        "self._newest + tokens",
        _GEMMA,
    ),
    Fault(
        "Gemma's assistant is fed its own output as it is",
        "models/gemma4.py",
        "hidden = self.post_projection(hidden)",
        "hidden = mx.pad(hidden, [(0, 0), (0, 0), (0, self.post_projection.weight.shape[0] - hidden.shape[-1])])",
        f"{_FAMILIES} -k gemma",
    ),
    Fault(
        "Gemma's assistant gets embeddings without their scale",
        "models/gemma4.py",
        "embeddings = self.model.embed_tokens(tokens) * self.model.embed_scale",
        "embeddings = self.model.embed_tokens(tokens)",
        f"{_FAMILIES} -k gemma",
    ),
    Fault(
        "Gemma's assistant scores all clusters, always",
        "models/gemma4.py",
        'if whole or "masked_embedding" not in self:',
        "if True:",
        f"{_FAMILIES} {_GEMMA} -k gemma",
    ),
    Fault(
        "Gemma's logits are not capped",
        "models/gemma4.py",
        "if self._softcap is None:",
        "if True:",
        f"{_FAMILIES} -k gemma",
    ),
    Fault(
        "an assistant of another vocabulary is taken",
        "models/gemma4.py",
        '_must_equal("vocab_size", args.vocab_size, "vocab_size", target.vocab_size)',
        "pass",
        _GEMMA,
    ),
    Fault(
        "an assistant beside its model is not found",
        "models/folder.py",
        'places = [folder / ending.strip("-"), folder.with_name(folder.name + ending)]',
        'places = [folder / ending.strip("-")]',
        _GEMMA,
    ),
    Fault(
        "a head that its configuration contradicts is no reason, but an error",
        "models/checkpoint.py",
        'except ValueError as error:\n        return f"the MTP head cannot be used: {error}"',
        "except ValueError:\n        raise",
        _GEMMA,
    ),
    Fault(
        "the probe asks a head before the trunk holds the text",
        "models/probe.py",
        "captured.commit([row], [len(tokens)])",
        "captured.commit([row], [0])",
        _GEMMA,
    ),
]

"""Faults of how a package's head is calibrated and chosen, of what is verified and published, and of the stamp."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

_GPTQ = "tests/forge/test_gptq.py"
_INPUTS = "tests/forge/test_inputs.py"
_ACCEPTANCE = "tests/forge/test_acceptance.py"
_HEAD = "tests/forge/test_head.py"
_WIRING = "tests/forge/test_wiring.py"
_VERIFY = "tests/forge/test_verify.py"
_PUBLISH = "tests/forge/test_publish.py"
_STAMP = "tests/test_stamp.py"

FAULTS = [
    Fault(
        "forge: few inputs are believed",
        "forge/gptq.py",
        "(_DAMPING + _DOUBT * inputs / count)",
        "_DAMPING",
        _GPTQ,
    ),
    Fault(
        "forge: what a group loses is not made up for",
        "forge/gptq.py",
        "w[end:] -= spread[group, end:].T @ lost",
        "w[end:] -= 0",
        _GPTQ,
    ),
    Fault(
        "forge: experts are calibrated on each other's inputs",
        "forge/inputs.py",
        "bool(experts) and inputs <= outputs",
        "False",
        f"{_GPTQ} {_INPUTS}",
    ),
    Fault(
        "forge: a head stays recorded",
        "forge/inputs.py",
        "    finally:\n        head.update_modules(tree_unflatten(list(plain.items())))",
        "    finally:\n        pass",
        _INPUTS,
    ),
    Fault(
        "forge: a deeper draft counts as if it were always made",
        "forge/acceptance.py",
        "weight = weight * mx.minimum(ratio[:, 0], 1)",
        "weight = weight * 1",
        _ACCEPTANCE,
    ),
    Fault(
        "forge: deeper drafts are measured at the position of the first",
        "forge/acceptance.py",
        "[start + step for start in starts]",
        "[start for start in starts]",
        _ACCEPTANCE,
    ),
    Fault(
        "forge: a measured head stays in the model",
        "forge/acceptance.py",
        "        model.mtp = own",
        "        pass",
        _ACCEPTANCE,
    ),
    Fault(
        "forge: a difference has no error",
        "forge/acceptance.py",
        "(apart**2).sum()) ** 0.5",
        "0) ** 0.5",
        _ACCEPTANCE,
    ),
    Fault(
        "forge: noise decides how a head is stored",
        "forge/head.py",
        "more > max(error, WITHIN * calibrated.tokens_per_cycle)",
        "more > 0",
        _HEAD,
    ),
    Fault(
        "forge: scales of a calibrated head are fp32",
        "forge/head.py",
        "calibrated(weight, seen[path], dtype=dtype, **form)",
        "calibrated(weight, seen[path], dtype=mx.float32, **form)",
        _HEAD,
    ),
    Fault("forge: routers of a head in codes", "forge/head.py", " and not path.endswith(_STAYS)", "", _HEAD),
    Fault(
        "forge: the hidden before the final norm is the one behind it",
        "forge/wiring.py",
        "return hidden / mx.where(weight == 0, 1, weight)",
        "return hidden",
        _WIRING,
    ),
    Fault(
        "forge: a remedy asks for the order that was wrong",
        "forge/wiring.py",
        '"embedding-first" if head_order == "hidden-first" else "hidden-first"',
        '"hidden-first"',
        _WIRING,
    ),
    Fault(
        "forge: a head is left in another wiring",
        "forge/wiring.py",
        "    finally:\n        head.load_weights([(name, plain[name]) for name, _ in differing], strict=False)",
        "    finally:\n        pass",
        _WIRING,
    ),
    Fault(
        "forge: an earlier depth limit binds what is verified",
        "forge/verify.py",
        "reasons=(), depth_limit=None)",
        "reasons=())",
        _VERIFY,
    ),
    Fault("forge: yes to what is not faster", "forge/verify.py", "if limit == 0:", "if False:", _VERIFY),
    Fault(
        "forge: a stamp tells where the package lies",
        "forge/verify.py",
        'for name in ("tokens", "rounds", "candidates", "chosen", "verdict")}',
        "for name in report}",
        _VERIFY,
    ),
    Fault(
        "forge: yes to answers that part",
        "forge/exactness.py",
        "self.largest_gap <= self.rounding",
        "self.largest_gap >= 0",
        _VERIFY,
    ),
    Fault(
        "forge: what changed since it was verified is published",
        "forge/publish.py",
        "if changed := changed_files(digests(folder), stamp):",
        "if changed := []:",
        _PUBLISH,
    ),
    Fault(
        "forge: whatever lies in the folder is published",
        "forge/publish.py",
        "allow_patterns=files",
        'allow_patterns=["*"]',
        _PUBLISH,
    ),
    Fault("forge: a no is published", "forge/publish.py", 'if stamp.verdict != "yes":', "if False:", _PUBLISH),
    Fault(
        "forge: published for all", "forge/publish.py", "private=private, exist_ok", "private=False, exist_ok", _PUBLISH
    ),
    Fault("stamp: the depth limit is not obeyed", "stamp.py", "min(max_depth, self.depth_limit)", "max_depth", _STAMP),
    Fault("stamp: a lying limit is believed", "stamp.py", "is not None and limit < 0", "is not None and False", _STAMP),
    Fault(
        "stamp: a draft vocabulary is forgotten",
        "opening.py",
        "size = size or stamp.draft_vocabulary",
        "size = size or 0",
        _STAMP,
    ),
    Fault(
        "stamp: inspect tells another depth than is loaded",
        "cli/inspect.py",
        "    depth = stamp.limited(depth) if stamp else depth",
        "    pass",
        _STAMP,
    ),
]

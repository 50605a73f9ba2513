"""The process of one candidate: loads a model, decodes with one depth, prints what it measured. Started by `tune`.

A job comes as JSON in the only argument, a report leaves as the last line of standard output. A job without tokens
only says what the model is.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from ..errors import SelfdraftError
from ..loading import load
from ..settings import load_settings

__all__ = ["main"]


def main(argument: str) -> int:
    """Do a job and print its report; 1, and a report with an error, if it cannot be done."""
    try:
        report = _work(json.loads(argument))
    except SelfdraftError as error:
        report = {"error": str(error)}
    print(json.dumps(report), flush=True)
    return 1 if "error" in report else 0


def _work(job: dict[str, Any]) -> dict[str, Any]:
    llm = load(job["model"], settings=load_settings(session_cache_max_bytes=0), adapter=job.get("adapter"))
    from ..tuned import belongs_to  # MLX is loaded by now
    from .measure import PROMPTS, decode

    if not job["tokens"]:
        return {
            "belongs_to": belongs_to(llm.checkpoint.folder, llm.describe()),
            "max_depth": llm.max_depth,
            "notes": llm.notes,
        }
    prompts = [llm.tokens(text, raw=llm.template is None) for text in PROMPTS]
    decode(llm.engine, prompts[:1], job["depth"], job["tokens"])  # kernels are compiled, pages come in
    return asdict(decode(llm.engine, prompts, job["depth"], job["tokens"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

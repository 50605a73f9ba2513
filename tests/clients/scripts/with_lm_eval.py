"""Runs lm-eval on local tasks against a server's completions, and writes down the scores: tokenised by the client, then
by the server. Runs in .venv-clients.
"""

import json
import sys
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager
from lm_eval.utils import RemoteTokenizer

RESULT, URL, TOKENIZER = sys.argv[1:]
QUESTIONS = [
    ("The capital of France is", ["London", "Paris"], 1),
    ("Two and two make", ["four", "window"], 0),
    ("The sun rises in the", ["morning", "carpet"], 0),
    ("Dogs and cats are", ["numbers", "animals"], 1),
]
CHOICES = """\
task: tiny_choices
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
num_fewshot: 0
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
WRITTEN = """\
task: tiny_written
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
num_fewshot: 0
generation_kwargs: {until: ["."], max_gen_toks: 8, temperature: 0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""

folder = Path(RESULT).parent / "tasks"
folder.mkdir()
data = folder / "data.jsonl"
lines = [json.dumps({"question": text, "choices": choices, "answer": right}) for text, choices, right in QUESTIONS]
data.write_text("\n".join(lines), encoding="utf-8")
for name, task in {"choices": CHOICES, "written": WRITTEN}.items():
    (folder / f"{name}.yaml").write_text(task.replace("DATA", str(data)), encoding="utf-8")


def evaluate(**tokenizer: str) -> dict[str, Any]:
    """Results, and each question with the scores of its choices."""
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": "reference",
            "base_url": f"{URL}/v1/completions",
            "num_concurrent": 2,
            "max_retries": 1,
            "max_length": 1024,
            **tokenizer,
        },
        tasks=["tiny_choices", "tiny_written"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    samples = [
        {**sample["doc"], "scores": [float(score) for score, _ in sample["filtered_resps"]]}
        for sample in found["samples"]["tiny_choices"]
    ]
    return {"results": found["results"], "samples": samples}


found = {
    "here": evaluate(tokenizer_backend="huggingface", tokenizer=TOKENIZER),
    "remote": evaluate(tokenizer_backend="remote"),
    "remote_eos": RemoteTokenizer(URL).eos_token_id,
}
Path(RESULT).write_text(json.dumps(found, default=str), encoding="utf-8")

"""Runs schemathesis on what a server says of its own API, and writes down its report, with what it printed as
`output`. Runs in .venv-clients.
"""

import json
import subprocess
import sys
from pathlib import Path

RESULT, URL, EXAMPLES, PHASES = sys.argv[1:]
done = subprocess.run(
    [
        Path(sys.executable).parent / "st",
        "run",
        f"{URL}/openapi.json",
        f"--max-examples={EXAMPLES}",
        f"--phases={PHASES}",
        # A schema cannot say all that is refused: which ids are tokens, what a template takes.
        "--exclude-checks=positive_data_acceptance",
        "--suppress-health-check=all",  # how long generating takes is the machine's business
        "--request-timeout=120",
        "--continue-on-failure",
        "--seed=1",
        "--no-color",
        "--report=json",
        f"--report-json-path={RESULT}",
    ],
    capture_output=True,
    text=True,
)
report = json.loads(Path(RESULT).read_text(encoding="utf-8"))
Path(RESULT).write_text(json.dumps({**report, "output": done.stdout + done.stderr}), encoding="utf-8")

#!/bin/sh
# Creates .venv-clients with lm-eval, litellm and langchain-openai: only for the tests that run them, never for users.
set -eu
cd "$(dirname "$0")/.."
stamp=.venv-clients/.installed
if [ -e "$stamp" ] && [ ! tests/clients/requirements.txt -nt "$stamp" ]; then exit 0; fi
python=${PYTHON:-python3}
[ -x .venv-clients/bin/python ] || "$python" -m venv .venv-clients
printf 'installing lm-eval, litellm and langchain-openai into .venv-clients\n' >&2
.venv-clients/bin/python -m pip install --quiet --disable-pip-version-check -r tests/clients/requirements.txt
touch "$stamp"

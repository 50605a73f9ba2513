#!/bin/sh
# Creates .venv-reference with torch and transformers: only for regenerating reference fixtures, never for users.
set -eu
cd "$(dirname "$0")/.."
stamp=.venv-reference/.installed
if [ -e "$stamp" ] && [ ! tests/reference/requirements.txt -nt "$stamp" ]; then exit 0; fi
python=${PYTHON:-python3}
[ -x .venv-reference/bin/python ] || "$python" -m venv .venv-reference
printf 'installing torch and transformers into .venv-reference\n' >&2
.venv-reference/bin/python -m pip install --quiet --disable-pip-version-check -r tests/reference/requirements.txt
touch "$stamp"

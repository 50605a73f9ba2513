#!/bin/sh
# Puts the coding agents of tests/agents/package.json into .agents: over a gigabyte, only for the tests that run them.
set -eu
cd "$(dirname "$0")/.."
if [ -e .agents/.installed ] && [ ! tests/agents/package.json -nt .agents/.installed ]; then exit 0; fi
if ! command -v npm >/dev/null 2>&1; then
    printf 'the coding agents come from npm, and there is none: install Node.js 20 or newer\n' >&2
    exit 1
fi
mkdir -p .agents
cp tests/agents/package.json .agents/
printf 'installing the coding agents into .agents\n' >&2
# Their programs are put in place by install scripts. npm 11 warns of those, and all of npm of the Node version.
npm install --prefix .agents --no-audit --no-fund --no-package-lock --ignore-scripts=false --loglevel=error
touch .agents/.installed

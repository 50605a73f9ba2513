# Selfdraft. `make` lists what there is.
.DEFAULT_GOAL := help
.PHONY: help setup start test test-full test-reference test-clients check docs mutants bench bench-gpu bench-server bench-sessions share locks dist sbom formula release-check clean

PY := .venv/bin/python

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## create .venv and install; the command is then .venv/bin/selfdraft
	@sh scripts/setup.sh

start: setup ## choose a model once, and talk with it; without a terminal the bundled one answers
	@.venv/bin/selfdraft start

test: ## all tests that need no more than this machine; 20 minutes on 2 cores
	@sh scripts/setup.sh test
	@sh scripts/setup_models.sh
	$(PY) -m pytest -n 2 --dist worksteal

test-full: ## the whole parity grid: 50 prompts x 128 tokens x depths 0-5 x bf16/4-bit/8-bit; takes an hour
	@sh scripts/setup.sh test
	$(PY) tools/parity_grid.py --output benchmarks/results/parity_grid.json

test-reference: ## regenerate the reference fixtures with torch and transformers, in a .venv-reference of its own
	@sh scripts/setup_aside.sh reference tests/reference/requirements.txt
	.venv-reference/bin/python -m pytest -q -c tests/reference/pytest.ini tests/reference

test-clients: ## the real Claude Code, Codex and OpenCode (from npm, over a gigabyte) against the server; 6 minutes
	@sh scripts/setup.sh test
	@sh scripts/setup_agents.sh
	TESTS_AGENTS=1 $(PY) -m pytest -v tests/agents

check: ## ruff and mypy --strict
	@sh scripts/setup.sh check
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

docs: ## the documentation as a site in build/site; a link that leads nowhere is an error
	@sh scripts/setup_aside.sh docs tests/docs/requirements.txt
	.venv-docs/bin/mkdocs build --strict --quiet

mutants: ## plant known faults in a copy and show which test catches each
	@sh scripts/setup.sh test
	$(PY) tools/mutants.py

bench: ## speed on this machine against stock mlx-lm, in one alternating run
	@sh scripts/setup.sh
	$(PY) benchmarks/decode.py

bench-gpu: ## every bar for a GPU, on a synthetic model of 27B shape: 3 minutes, some 60 GB; see docs/performance.md
	@sh scripts/setup.sh
	$(PY) benchmarks/gpu.py

bench-sessions: ## the second turn: cold, warm in memory, warm on disk, against mlx_lm.server with its prompt cache; 15 minutes
	@sh scripts/setup.sh
	$(PY) benchmarks/sessions.py

bench-server: ## speed over HTTP on this machine against mlx_lm.server, in one alternating run; 5 minutes
	@sh scripts/setup.sh
	$(PY) benchmarks/server.py

share: ## write the man page and the completions (packaging/share) of the command line as it is
	@sh scripts/setup.sh
	$(PY) tools/release/share.py

locks: ## pin every dependency of each target, with hashes (packaging/locks); UPGRADE=--upgrade for the newest
	@sh scripts/setup_aside.sh packaging packaging/requirements.txt
	.venv-packaging/bin/python tools/release/locks.py $(UPGRADE)

dist: ## build the sdist and the wheel into dist/, the same bytes for the same sources, and check what they hold
	@sh scripts/setup_aside.sh packaging packaging/requirements.txt
	.venv-packaging/bin/python tools/release/dist.py

sbom: ## write the bills of materials into dist/, and refuse licences that are not allowed
	@sh scripts/setup_aside.sh packaging packaging/requirements.txt
	.venv-packaging/bin/python tools/release/sbom.py

formula: dist ## write the Homebrew formula of the wheel and the macOS lock
	.venv-packaging/bin/python tools/release/formula.py

release-check: ## what docs/release.md asks before an upload, as far as a program can tell
	@sh scripts/setup.sh
	@sh scripts/setup_aside.sh packaging packaging/requirements.txt
	@.venv-packaging/bin/python tools/release/check.py

clean: ## remove the environments, builds and caches
	rm -rf .agents .models .venv .venv-clients .venv-docs .venv-packaging .venv-proxy .venv-reference build/site dist \
		.pytest_cache .mypy_cache .ruff_cache .hypothesis

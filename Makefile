# Development in .venv: `make check` before every commit, `make format` to put the style right.
.PHONY: check lint test format

check: lint test

lint:
	./scripts/lint

test:
	./scripts/test

format:
	bash -euo pipefail -c 'source scripts/venv.sh; prepare_venv dev'
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

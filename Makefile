# Development in .venv: `make check` before every commit, `make format` to put the style right.
.PHONY: check lint types imports docs test format

check: lint test

lint:
	./scripts/lint

types imports: venv
	./scripts/$@

docs:
	./scripts/docs

test:
	./scripts/test

format: venv
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

.PHONY: venv
venv:
	bash -euo pipefail -c 'source scripts/venv.sh; prepare_venv dev'

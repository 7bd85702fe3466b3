# Two commands for everybody (demo, test), and the gate for contributors (check). Each does its own set-up.

export TOKENIZERS_PARALLELISM = false
export PYTHONUNBUFFERED = 1
BIN = .venv/bin

.PHONY: demo test check format clean

demo: .venv/.ready
	HF_HUB_OFFLINE=1 $(BIN)/python scripts/demo.py

# Lint, types, import layers, every test.
test: check
	$(BIN)/python -m pytest -n 2 --dist loadfile -m system

# What a contributor runs before each commit: the same without the tests that launch programs.
check: lint
	$(BIN)/python -m pytest -n 2 -m "not system"

.PHONY: lint
lint: .venv/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/.ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.venv/.ready: requirements.lock pyproject.toml scripts/setup.sh
	sh scripts/setup.sh

clean:
	rm -rf .venv runs build *.egg-info

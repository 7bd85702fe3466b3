# demo and test are for everybody, check is the gate for contributors. Each sets itself up.

export TOKENIZERS_PARALLELISM = false
export PYTHONUNBUFFERED = 1
# Compile test modules, with rewritten asserts, once for all runs and workers.
export PYTHONDONTWRITEBYTECODE =
# Let OpenMP's idle threads sleep soon: many times faster on busy cores. decoding/threads.py does it for commands.
ifeq ($(OMP_WAIT_POLICY),)
export GOMP_SPINCOUNT ?= 1000
endif
BIN = .venv/bin
PYTEST = $(BIN)/python -m pytest -n 2

.PHONY: demo test check format clean docs engines gpu vllm wheel

demo: .venv/.ready
	HF_HUB_OFFLINE=1 $(BIN)/python scripts/demo.py

# Everything: lint, import layers, the project's size, and all tests with all examples, slow ones and types first.
test: lint engines
	$(BIN)/python scripts/sizes.py
	$(PYTEST) --dist loadfile --no-loadscope-reorder --hypothesis-profile thorough \
		tests/system tests/thorough tests/gpu tests/test_*.py

# The gate before each commit: lint, types, import layers and the fast tests. Pytest lists a folder again for each file
# that is named, so naming them all would take seconds.
check: lint
	$(PYTEST) --dist worksteal --ignore tests/system --ignore tests/thorough tests

# GPU tests and measurements in 8 minutes, with only torch and transformers; PRETEND=1 tries them on the CPU.
gpu:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,python3) benchmarks/gpu_suite.py $(if $(PRETEND),--pretend)

# The documentation site, into site/. A warning is an error; with --quiet mkdocs would count none.
docs: .venv/.ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "written: site/index.html"

# The wheel for `pip install`, into dist/.
wheel: .venv/.ready
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .

# Exports in real vLLM, before a release. Its environment (3 GB) is built once, in the user's cache folder.
vllm: .venv/.ready
	sh scripts/vllm.sh
	HEADSTART_VLLM=1 $(BIN)/python -m pytest -s --hypothesis-profile thorough tests/system/test_vllm.py

.PHONY: lint
lint: .venv/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

format: .venv/.ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Other engines, for tests that decode with exported files.
engines: .venv-engines/.ready

.venv-engines/.ready: requirements-engines.lock scripts/engines.sh
	sh scripts/engines.sh

.venv/.ready: requirements.lock requirements-quickstart.lock pyproject.toml scripts/setup.sh
	sh scripts/setup.sh

clean:
	rm -rf .venv .venv-engines runs build dist site *.egg-info

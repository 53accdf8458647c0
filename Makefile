# Two commands: `make explore` opens the explorer, `make test` runs every check.
# Variables: PYTHON (which interpreter makes the environment), VENV (where), JUPYTER_ARGS (handed to JupyterLab).

PYTHON ?= python3
VENV ?= .venv
JUPYTER_ARGS ?=
PYTEST_ARGS ?=

BIN := $(VENV)/bin
# A stamp is newer than what it was made from, or it is made again; so the second call starts in seconds.
INSTALLED := $(VENV)/.installed
TEST_INSTALLED := $(VENV)/.test-installed

.PHONY: explore test lint screenshot bench clean

explore: $(INSTALLED)
	$(BIN)/zeroviz explore $(JUPYTER_ARGS)

# Arithmetic and pictures on every core; then engines and browsers, one test after another: they take all cores themselves.
test: lint
ifeq ($(strip $(PYTEST_ARGS)),)
	$(BIN)/python -m pytest -n logical tests/pure tests/view
	$(BIN)/python -m pytest tests/browser tests/dist tests/gpu tests/notebooks
else
	$(BIN)/python -m pytest $(PYTEST_ARGS)
endif

lint: $(TEST_INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

screenshot: $(TEST_INSTALLED)
	$(BIN)/python docs/screenshot.py

bench: $(TEST_INSTALLED)
	$(BIN)/python benchmarks/predict_times.py
	$(BIN)/python benchmarks/start_times.py

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

$(TEST_INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test,deepspeed,megatron]'
	touch $(INSTALLED) $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "zeroviz needs Python 3.11 or newer, and '$(PYTHON)' is not; name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu install the package python3-venv." >&2; exit 1; }

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Two targets do all the set-up: `make run` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SCENARIOS ?= scenarios

CASES ?= 2000

.PHONY: run test nightly check fuzz bench clean

# torch first, and by its exact version: a range would fetch the newest build with its GPU libraries.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

run: $(VENV)/.installed
	$(BIN)/zero-sim run $(SCENARIOS) --jobs $$(getconf _NPROCESSORS_ONLN)

test: $(VENV)/.installed
	$(BIN)/python -m pytest --numprocesses auto --quiet

nightly: $(VENV)/.installed
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest property_tests --numprocesses auto --quiet

check: $(VENV)/.installed
	$(BIN)/ruff check zero_sim tests property_tests
	$(BIN)/ruff format --check zero_sim tests property_tests
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python
	$(BIN)/lint-imports

fuzz: $(VENV)/.installed
	$(BIN)/zero-sim fuzz --cases $(CASES) --jobs $$(getconf _NPROCESSORS_ONLN)

bench: $(VENV)/.installed
	$(BIN)/zero-sim bench

clean:
	rm -rf $(VENV) .pytest_cache .hypothesis .ruff_cache .import_linter_cache

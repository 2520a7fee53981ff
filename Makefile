# Two targets do all the set-up: `make run` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SCENARIOS ?= scenarios

CASES ?= 2000
MEASURED ?= .zero-sim/durations.json

.PHONY: run run-all test test-all nightly check fuzz device device-fast bench bench-check pytorch-suites scripts libraries compat compat-lowest dist docs clean

# Runs a command; whatever comes of it, says how to go on without make.
and_say_how = status=0; $(1) || status=$$?; echo; \
	echo "To go on: $(BIN)/zero-sim --help, or first . $(BIN)/activate and then zero-sim --help"; \
	exit $$status

# torch first, and by its exact version: a range would fetch the newest build with its GPU libraries.
# A pip that is quiet says nothing for minutes.
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "== Setting up $(VENV), once: an environment, then torch, then zero-sim and its tools"
	$(PYTHON) -m venv $(VENV)
	@echo "== torch: about 200 MB to fetch, and a minute or so to unpack"
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt torch
	@echo "== zero-sim, what it needs and what its tests need"
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

run: $(VENV)/.installed
	@echo "== Cases under $(SCENARIOS) that have every feature and pair: a minute on two idle cores"
	@$(call and_say_how,$(BIN)/zero-sim run $(SCENARIOS) --cover $(VERBOSE) --jobs $$(getconf _NPROCESSORS_ONLN))

# All of them; VERBOSE=-v shows each case, here and above.
run-all: $(VENV)/.installed
	$(BIN)/zero-sim run $(SCENARIOS) $(VERBOSE) --jobs $$(getconf _NPROCESSORS_ONLN)

test: $(VENV)/.installed
	@echo "== Fast tests: about four minutes on two idle cores, a dot for each; make test-all runs all"
	@$(call and_say_how,HYPOTHESIS_PROFILE=fast $(BIN)/python -m pytest -m "not slow" --numprocesses auto --quiet \
	  -o console_output_style=count)

# Measures each test, and fails if one outgrew the fast tier; tests/tiers.py says how to record it.
test-all: $(VENV)/.installed
	mkdir -p $(dir $(MEASURED))
	$(BIN)/python -m pytest --numprocesses auto --quiet -o console_output_style=count --durations-to $(MEASURED)
	$(BIN)/python -m tests.tiers check $(MEASURED)

# Many more examples of each property, other ones each night, and hunts of all mutants.
nightly: $(VENV)/.installed
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest property_tests --numprocesses auto --quiet

check: $(VENV)/.installed
	$(BIN)/ruff check zero_sim tests property_tests docs/site
	$(BIN)/ruff format --check zero_sim tests property_tests docs/site
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python
	$(BIN)/lint-imports

fuzz: $(VENV)/.installed
	$(BIN)/zero-sim fuzz --cases $(CASES) --jobs $$(getconf _NPROCESSORS_ONLN)

# PyTorch's own multi-rank tests: those that torch installs, and with SOURCE=/path/to/pytorch, a
# checkout of its source, the others. More options as SUITES="--suite test_store --details".
pytorch-suites: $(VENV)/.installed
	$(BIN)/python -m tests.pytorch_suites $(if $(SOURCE),--source "$(SOURCE)") \
	  --jobs $$(getconf _NPROCESSORS_ONLN) $(SUITES)

# Scripts in the manner of public examples, by torchrun on gloo and by zero-sim torchrun: all they print.
scripts: $(VENV)/.installed
	$(BIN)/python -m tests.script.against_gloo $(SCRIPTS)

# The libraries of docs/libraries.md in an environment of their own: their scenarios, what is known to go
# wrong in them, drawn cases, some of these on gloo processes as well, and the rules that they follow.
# LIBRARIES=deepspeed-zero-1 for one.
LIBRARY_CASES ?= 200
GLOO_CASES ?= 40
libraries:
	test -x $(VENV)-libraries/bin/python || $(PYTHON) -m venv $(VENV)-libraries
	$(VENV)-libraries/bin/python -m pip install --quiet --constraint constraints.txt torch setuptools
	DS_BUILD_OPS=0 $(VENV)-libraries/bin/python -m pip install --quiet --constraint constraints.txt \
	  --constraint constraints-libraries.txt --editable ".[test,deepspeed,megatron,megatron-fsdp]" accelerate
	$(VENV)-libraries/bin/python -m pytest --quiet tests/against/test_upstream.py
	$(VENV)-libraries/bin/zero-sim run scenarios/libraries scenarios/upstream --no-bundles
	$(VENV)-libraries/bin/python -m property_tests.libraries $(LIBRARIES) \
	  --cases $(LIBRARY_CASES) --gloo $(GLOO_CASES) --rules

# The suite with another torch, in an environment of its own: make compat TORCH=2.14.1
compat:
	@test -n "$(TORCH)" || { echo "Say which torch: make compat TORCH=2.14.1" >&2; exit 2; }
	grep -v '^torch==' constraints.txt > $(VENV)-constraints-without-torch.txt
	test -x $(VENV)-torch-$(TORCH)/bin/python || $(PYTHON) -m venv $(VENV)-torch-$(TORCH)
	$(VENV)-torch-$(TORCH)/bin/python -m pip install "torch==$(TORCH)"
	$(VENV)-torch-$(TORCH)/bin/python -m pip install --quiet \
	  --constraint $(VENV)-constraints-without-torch.txt --editable ".[test]"
	$(VENV)-torch-$(TORCH)/bin/python -m pytest --numprocesses auto --quiet

# The suite with the oldest release of every other package that pyproject.toml allows.
compat-lowest:
	test -x $(VENV)-lowest/bin/python || $(PYTHON) -m venv $(VENV)-lowest
	$(VENV)-lowest/bin/python -m pip install --quiet --constraint constraints.txt torch uv
	$(VENV)-lowest/bin/uv pip install --python $(VENV)-lowest/bin/python \
	  --resolution lowest-direct --editable ".[test]" "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	$(VENV)-lowest/bin/python -m pytest --numprocesses auto --quiet

# What is computed on a device, on one that stands in for a GPU: tests/standin says what it is. A C++
# compiler builds it, once.
device: $(VENV)/.installed
	$(BIN)/python -m tests.standin $(BIN)/python -m pytest tests/device tests/gpu \
	  --numprocesses auto --quiet
	$(BIN)/python -m tests.standin $(BIN)/zero-sim run $(SCENARIOS) --device standin --no-bundles \
	  --jobs $$(getconf _NPROCESSORS_ONLN)

# The stand-in itself, what a device changes in a case, and the shipped cases that `make run` chooses.
device-fast: $(VENV)/.installed
	$(BIN)/python -m tests.standin $(BIN)/python -m pytest tests/device/test_standin.py \
	  tests/device/test_cases.py -k "not drawn_cases" --numprocesses auto --quiet
	$(BIN)/python -m tests.standin $(BIN)/zero-sim run $(SCENARIOS) --cover --device standin --no-bundles \
	  --jobs $$(getconf _NPROCESSORS_ONLN)

# The wheel and the source distribution, in dist/.
dist: $(VENV)/.installed
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .

# The site, in site/. Strict: a broken link, or a page that cannot be made, is an error.
docs: $(VENV)/.installed
	DISABLE_MKDOCS_2_WARNING=true NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "== Built in site. For search, serve it: $(BIN)/python -m http.server --directory site"

bench: $(VENV)/.installed
	$(BIN)/zero-sim bench

# Fails where a ratio of the benchmark is 15 % worse than at BASE, measured on this machine before.
bench-check: $(VENV)/.installed
	.ci/bench $(BASE)

clean:
	rm -rf $(VENV) dist site .pytest_cache .hypothesis .ruff_cache .import_linter_cache

# `make demo` and `make test` set up everything they need, in $(VENV), the first time.
PYTHON ?= python3
VENV ?= .venv
# Pinned, because an unpinned torch may bring other packages each day, of gigabytes. `make test TORCH=` uses the torch
# of $(PYTHON).
TORCH ?= torch==2.13.0
TRITON ?= triton==3.9.0

REPO_ID := kernels-community/finegrained-kernels
VENV_PYTHON := $(VENV)/bin/python
# Each target begins with this. It takes a moment if nothing has changed since the last time. An existing environment
# is used, whichever Python made it, unless PYTHON is given.
SET_UP := $(PYTHON) scripts/set_up.py $(VENV) --torch "$(TORCH)" --triton "$(TRITON)" \
	$(if $(filter file,$(origin PYTHON)),--any-python)

# Where `make bench` writes its CSV files, apart from the committed ones, from which figures and README are made.
RESULTS ?= benchmarks/local

.PHONY: demo test test-slow test-all ready checked bundle check docs coverage compile mutation mutation-gpu bench figures wheel clean

demo: bundle
	LOCAL_KERNELS=$(REPO_ID)=$(CURDIR)/build $(VENV_PYTHON) -m finegrained_kernels demo

# Takes minutes; test-slow runs the tests that take longer.
test: bundle
	$(VENV_PYTHON) -m pytest -q -n auto --dist loadfile -m "not slow" tests $(PYTEST)

test-slow: bundle
	$(VENV_PYTHON) -m pytest -q -n auto --dist loadfile -m slow tests $(PYTEST)

test-all: test test-slow

# Static checks, and the API pages.
check: checked docs
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy --disallow-untyped-defs -p finegrained_kernels
	cd torch-ext && $(abspath $(VENV))/bin/mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache/bundle -p finegrained_kernels
	$(VENV)/bin/vulture
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

docs: bundle checked
	LOCAL_KERNELS=$(REPO_ID)=$(CURDIR)/build $(VENV_PYTHON) scripts/build_docs.py

# All tests, with line coverage, including that of processes that tests start and of Triton's interpreter.
coverage: bundle
	$(MAKE) test PYTEST="--cov --cov-report="
	$(MAKE) test-slow PYTEST="--cov --cov-append --cov-report=term --cov-fail-under=90"

compile: bundle
	LOCAL_KERNELS=$(REPO_ID)=$(CURDIR)/build $(VENV_PYTHON) scripts/compile_kernels.py

mutation: ready
	$(VENV_PYTHON) scripts/mutation_check.py

# Faults in code that only a GPU runs; needs a GPU.
mutation-gpu: ready
	$(VENV_PYTHON) scripts/mutation_check_gpu.py

# Runs the benchmarks that this machine can run.
bench: bundle
	LOCAL_KERNELS=$(REPO_ID)=$(CURDIR)/build $(VENV_PYTHON) benchmarks/run.py --out $(RESULTS)

figures: ready
	$(VENV_PYTHON) benchmarks/figures.py
	$(VENV_PYTHON) benchmarks/report.py

wheel: ready
	$(VENV_PYTHON) -m hatchling build -t wheel -d dist

bundle: ready
	$(VENV_PYTHON) scripts/build_bundle.py

ready:
	@$(SET_UP)

checked:
	@$(SET_UP) --check

clean:
	rm -rf build build-docs dist .nix $(VENV) .pytest_cache .ruff_cache .mypy_cache .coverage* benchmarks/local
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# `make demo` and `make test` set up all they need, in $(VENV), the first time.
PYTHON ?= python3
VENV ?= .venv
# Pinned: what an unpinned torch installs changes with the day, by gigabytes. `make test TORCH=` uses $(PYTHON)'s own.
TORCH ?= torch==2.13.0
TRITON ?= triton==3.9.0

REPO_ID := kernels-community/finegrained-kernels
VENV_PYTHON := $(VENV)/bin/python
# Each target begins with this: a moment's work where nothing has changed since the last time. An environment that is
# there serves, whatever Python made it, unless PYTHON is named.
SET_UP := $(PYTHON) scripts/set_up.py $(VENV) --torch "$(TORCH)" --triton "$(TRITON)" \
	$(if $(filter file,$(origin PYTHON)),--any-python)

# Where `make bench` writes its CSV files: apart from the committed ones, which figures and README are made from.
RESULTS ?= benchmarks/local

.PHONY: demo test test-slow test-all ready checked bundle check docs coverage compile mutation mutation-gpu bench figures wheel clean

demo: bundle
	LOCAL_KERNELS=$(REPO_ID)=$(CURDIR)/build $(VENV_PYTHON) -m finegrained_kernels demo

# In minutes; what takes longer is left to test-slow.
test: bundle
	$(VENV_PYTHON) -m pytest -q -n auto --dist loadfile -m "not slow" tests $(PYTEST)

test-slow: bundle
	$(VENV_PYTHON) -m pytest -q -n auto --dist loadfile -m slow tests $(PYTEST)

test-all: test test-slow

# What reads the code without running it, and the API pages.
check: checked docs
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy --disallow-untyped-defs -p finegrained_kernels
	cd torch-ext && $(abspath $(VENV))/bin/mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache/bundle -p finegrained_kernels
	$(VENV)/bin/vulture
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

docs: bundle checked
	LOCAL_KERNELS=$(REPO_ID)=$(CURDIR)/build $(VENV_PYTHON) scripts/build_docs.py

# All tests, with the lines counted that they run: also in the processes that tests start, Triton's interpreter too.
coverage: bundle
	$(MAKE) test PYTEST="--cov --cov-report="
	$(MAKE) test-slow PYTEST="--cov --cov-append --cov-report=term --cov-fail-under=90"

compile: bundle
	LOCAL_KERNELS=$(REPO_ID)=$(CURDIR)/build $(VENV_PYTHON) scripts/compile_kernels.py

mutation: ready
	$(VENV_PYTHON) scripts/mutation_check.py

# Faults in what only a GPU runs, on one.
mutation-gpu: ready
	$(VENV_PYTHON) scripts/mutation_check_gpu.py

# Runs what this machine can.
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

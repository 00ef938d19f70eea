# `make demo` and `make test` each do all of their own set-up; the first run on a fresh machine downloads PyTorch.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Two test processes of one thread each. More threads than cores make small tensors slower, not faster.
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

QUICK := tests/architecture tests/commit tests/contract tests/laws $(addprefix tests/ops/test_,batch.py group.py moments.py weight.py)

# Tests start many processes, and without bytecode on disk each compiles the sources of torch anew: two seconds per start.
unexport PYTHONDONTWRITEBYTECODE

# The wheel pinned in constraints.txt carries pyright itself and node: no download, no notice of newer versions.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo quick test lint format coverage test-slow test-gpu bench sweep clean

help: ## this list
	@echo "make demo   trains five networks on digits and writes a page of results, about one minute on one CPU core"
	@echo "make test   lint, types and tests, about six minutes on two cores"
	@echo
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | grep -v -E '^(demo|test):' | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

demo: setup ## trains five networks on digits and writes a page
	$(BIN)/micronorm demo

quick: setup ## references, laws, commits and architecture, in under 90 seconds
	$(PYTEST) -m "not slow and not gpu" $(QUICK)

test: setup lint ## lint, types and tests: what a contributor runs
	$(PYTEST) -m "not slow and not gpu"

setup: $(READY) ## the environment in .venv, at the versions of constraints.txt

# uv because it is several times faster. pip where uv fails: uv does not read pip's configuration, so a machine that has its
# packages from a mirror named there needs pip.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "micronorm needs Python 3.11 or newer, this is %s; try make PYTHON=python3.13" % sys.version.split()[0])'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv \
	  && $(BIN)/uv pip install --python $(BIN)/python -c constraints.txt -b constraints.txt -e '.[dev]' \
	  || $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

lint: setup ## ruff's rules, its format, and pyright
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

format: setup ## put the code into ruff's format and apply its safe fixes
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

coverage: setup ## the tests of `make test` with the lines they miss; fails under 95 %
	$(PYTEST) -m "not slow and not gpu" --cov --cov-report=term-missing:skip-covered

test-slow: setup ## many architectures, all kernel shapes in the interpreter, torch.compile, several processes
	$(PYTEST) -m "slow and not gpu"

# One process: two would time and fill the same device.
test-gpu: setup ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

bench: setup ## norm + ReLU beside its peers, on the GPU where there is one; prints, writes nothing
	$(BIN)/micronorm bench

sweep: setup ## plan and convert every architecture of timm and torchvision into results/sweep.csv (about 15 minutes)
	$(BIN)/python benchmarks/sweep.py

clean: ## remove caches and build products; .venv and runs/ stay
	rm -rf .pytest_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov build dist
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# Every target sets up what it needs in .venv; nothing outside this folder and the caches is changed.
PYTHON ?= python3
TORCH ?= torch==2.13.0
JOBS ?= 2
BUDGET_S ?= 240
WHEELS ?= build/gpu-wheels
VENV := .venv
BIN := $(VENV)/bin
FOLDERS := tiers hashing cuda daemon integrations
SOURCES := $(wildcard kvstore $(FOLDERS) tests bench examples setup.py)
PYTEST := $(BIN)/python -m pytest tests -n $(JOBS)

.DELETE_ON_ERROR:
.PHONY: help setup demo test check format types bench long gpu gpu-wheels clean
help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-10s %s\n", $$1, $$2 }'
	@echo "  PYTHON=$(PYTHON) makes .venv; TORCH=$(TORCH) is installed if .venv has no torch that fits."

setup: $(VENV)/ready  ## .venv with all that the other targets need, and nothing else

# A torch that is in .venv already and fits is kept: install another build there first to choose it.
$(VENV)/ready: pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "kvstore needs Python 3.11 or newer; name one: make PYTHON=python3.12 ...")'
	@test -x $(BIN)/python || { echo "Making $(VENV)" && $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -c 'from importlib.metadata import version; \
	  major, minor = map(int, version("torch").split(".")[:2]); \
	  raise SystemExit(not (2, 6) <= (major, minor) < (3, 0))' 2>/dev/null \
	  || { echo "Installing $(TORCH): a download of 0.2 GB as a CPU build, of about 3 GB with CUDA" \
	  && $(BIN)/python -m pip install $(TORCH); }
	@echo "Installing kvstore and what it needs into $(VENV)"
	@$(BIN)/python -m pip install -q -e '.[runtime,daemon,test]'
	@touch $@

demo: $(VENV)/ready  ## fetch a model, run the main job on it, print and write build/demo.json
	$(BIN)/kvstore demo --output build/demo.json

test: $(VENV)/ready  ## all tests but the long ones
	$(PYTEST) -m "not long"

check: $(VENV)/ready types  ## format, lint, types and the fast tests
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(PYTEST) -m "not slow and not long"

format: $(VENV)/ready  ## rewrite the sources in the one format
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix-only $(SOURCES)

# mypy cannot run setup.py's mapping of folders to packages, so it reads the same mapping as links.
types: $(VENV)/ready  ## mypy --strict over the product
	@rm -rf build/links && mkdir -p build/links/kvstore
	@ln -s $(foreach folder,$(FOLDERS),$(CURDIR)/$(folder)) $(CURDIR)/kvstore/* build/links/kvstore
	$(BIN)/mypy --strict -p kvstore

bench: $(VENV)/ready  ## measure: every figure of the README and of bench/results
	$(BIN)/python -m bench

long: $(VENV)/ready  ## the long form of the tests: minutes to hours
	$(BIN)/python -m pytest tests -m long

# Runs from the checkout, with the Python that has torch and CuPy; what that one lacks comes from WHEELS.
gpu:  ## tests and figures on this machine's GPU, within BUDGET_S seconds: results in build/gpu
	$(PYTHON) -m bench.gpu --budget-s $(BUDGET_S) --wheels $(WHEELS)

gpu-wheels:  ## fill WHEELS with what a GPU machine without a registry may lack, for Python 3.12
	$(PYTHON) -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
	  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
	  -d $(WHEELS) 'lmdb>=1.4,<3' 'xxhash>=3.4,<4' 'gguf>=0.10,<1'
	@du -sh $(WHEELS)

clean:  ## remove what can be made again, but not .venv
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Every target sets up what it needs in .venv; nothing outside the checkout is changed.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
FOLDERS := tiers hashing cuda daemon integrations
SOURCES := kvstore $(FOLDERS) tests bench examples setup.py

.PHONY: help demo test check types bench long gpu clean
help:  ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

$(VENV)/ready: pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvstore needs Python 3.11 or newer: make PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# A torch that fits is kept: choose your own build by installing it into .venv first.
	@$(BIN)/python -c 'import torch; v = tuple(map(int, torch.__version__.split(".")[:2])); assert v >= (2, 6)' 2>/dev/null \
	  || $(BIN)/python -m pip install -q $(TORCH)
	$(BIN)/python -m pip install -q -e '.[runtime,daemon,test]'
	@touch $@

demo: $(VENV)/ready  ## fetch the model and show what the store saves on it
	$(BIN)/kvstore demo --output build/demo.json

test: $(VENV)/ready  ## all tests but the hours-long ones
	$(BIN)/python -m pytest tests -m "not long" -n 2

check: $(VENV)/ready types  ## format, lint, types, fast tests
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/python -m pytest tests -m "not slow and not long" -n 2

types: $(VENV)/ready  ## mypy cannot run setup.py's mapping, so it reads the same mapping laid out as links
	@rm -rf build/links && mkdir -p build/links/kvstore
	@ln -s $(foreach folder,$(FOLDERS),$(CURDIR)/$(folder)) $(CURDIR)/kvstore/* build/links/kvstore
	$(BIN)/mypy --strict -p kvstore

bench: $(VENV)/ready  ## every figure of the README and of bench/results
	$(BIN)/python -m bench

long: $(VENV)/ready  ## the long form of the tests
	$(BIN)/python -m pytest tests -m long

gpu:  ## brought by the GPU path, which is not part of this version yet
	@echo "make gpu: the CUDA path is not part of this version yet; everything here runs on the CPU." && exit 2

clean:  ## what can be made again
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

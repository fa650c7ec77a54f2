# Everything from nothing but Python 3.11 or newer and make; nothing needs to be activated.
# PYTHON=… chooses the interpreter, VENV=… the environment, PIP_ARGS=… what pip gets in place of the
# pins: `make VENV=newest PIP_ARGS= test` tries the newest releases that pyproject.toml allows. pip's
# own environment variables and files keep their meaning.

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PIP_ARGS := -c constraints.txt
EXTRAS := dev,trackers,eval,quantized
# Two tests at a time; those that share what is dear to make run in one process, in the order of the
# files. Launched tests wait a lot, so there are three of them. At the end the ten slowest and the time.
PYTEST := $(BIN)/python -m pytest -q --durations 10
TWO := -n 2 --dist loadfile --no-loadscope-reorder
THREE := -n 3 --dist loadfile --no-loadscope-reorder
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.PHONY: FORCE help quickstart test test-all test-slow test-faults check lint types format docs clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' Makefile | expand -t 14

quickstart: $(VENV)/installed  ## train on the built-in sample with two processes, write a report
	@$(BIN)/llmtrain quickstart

test: $(VENV)/installed-dev  ## the unit tests, and a test with real runs for each promise
	@$(PYTEST) $(TWO) -m "not slow and (core or not (launches or wide))"

test-all: $(VENV)/installed-dev  ## the same, then everything else but the sweeps
	@begun=$$(date +%s); $(MAKE) test && \
	  $(PYTEST) $(THREE) -m "not slow and not core and (launches or wide)" && \
	  echo "make test-all: $$(( $$(date +%s) - begun )) seconds"

test-slow: $(VENV)/installed-dev  ## only the longer sweeps of the suite
	@$(PYTEST) -m "slow or deeper" --hypothesis-profile sweep \
	  --timeout 3600 -o faulthandler_timeout=3660

test-faults: $(VENV)/installed-dev  ## every scenario of faults, sweeps too; writes docs/reference/faults.md
	@FAULTS_REPORT=1 $(PYTEST) tests/faults \
	  tests/distributed/test_portability.py -m "slow or not slow" \
	  --timeout 7200 -o faulthandler_timeout=7260

check: lint types test-all  ## lint, types and all tests but the sweeps: what the CI runs

lint: $(VENV)/installed-dev  ## ruff: rules and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(VENV)/installed-dev  ## mypy --strict
	@$(BIN)/mypy

format: $(VENV)/installed-dev  ## bring the code into ruff's format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(VENV)/installed-dev  ## build the pages of docs/ into site/, strictly
	@$(BIN)/zensical build --strict --clean

clean:  ## remove .venv, caches and built pages
	@rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache

# The stamps: an installation is made again when what it is made from has changed. A failed one
# leaves no stamp. The first python that is new enough and can make environments is taken.
$(VENV)/bin/python:
	@found=; for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.14 python); do \
	  if "$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	  then found="$$python"; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "llmtrain needs Python 3.11 or newer with the modules venv and ensurepip."; \
	  echo "    looked at: $(or $(PYTHON),python3 python3.11 … python3.14 python)"; \
	  echo "    try:       make PYTHON=/path/to/python3.11 (Debian, Ubuntu: also python3-venv)"; \
	  exit 2; \
	fi >&2; \
	"$$found" -m venv $(VENV)

# What pip was given, written again where it is not what it was.
$(VENV)/pip-args: $(VENV)/bin/python FORCE
	@echo '$(PIP_ARGS) $(EXTRAS)' | cmp --quiet - $@ || echo '$(PIP_ARGS) $(EXTRAS)' > $@

$(VENV)/installed: $(VENV)/pip-args pyproject.toml constraints.txt
	@echo "Installing llmtrain into $(VENV): some minutes, torch is the largest part …"
	@$(PIP) install $(PIP_ARGS) -e .
	@touch $@

$(VENV)/installed-dev: $(VENV)/pip-args pyproject.toml constraints.txt
	@echo "Installing llmtrain and its tools into $(VENV): some minutes, torch is the largest part …"
	@$(PIP) install $(PIP_ARGS) -e '.[$(EXTRAS)]'
	@touch $(VENV)/installed $@

# Two commands: `make conformance` holds every installed framework to the specification,
# `make test` tests this project. Both make .venv first if it is missing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: conformance test self-test lint freeze vectors readme power porting initialisation clean help

conformance: $(STAMP)  ## run the suite on every installed framework; ARGS="--quick" and the like are passed on
	$(BIN)/iha run $(ARGS)

test: lint  ## lint, types and all tests
	$(BIN)/python -m pytest -q -n auto $(ARGS)

self-test: $(STAMP)  ## prove that the suite catches what it should
	$(BIN)/iha self-test $(ARGS)

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "expected Python 3.11 or newer, got " + sys.version.split()[0] + "; set PYTHON=/path/to/python3")'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

freeze: $(STAMP)  ## add new cases to the frozen corpus
	$(BIN)/python conformance/tools/freeze_corpus.py $(ARGS)

vectors: $(STAMP)  ## write the frozen vectors that are shipped
	$(BIN)/python conformance/tools/core_vectors.py $(ARGS)

readme: $(STAMP)  ## run the suite and write the support table of README.md
	$(BIN)/iha run --json $(VENV)/report.json
	$(BIN)/python conformance/tools/readme_table.py $(VENV)/report.json README.md

power: $(STAMP)  ## run the self-test and write the tables of docs/power.md
	$(BIN)/iha self-test --json $(VENV)/self-test.json
	$(BIN)/python conformance/tools/power_page.py $(VENV)/self-test.json docs/power.md

porting: $(STAMP)  ## write what the commands of PORTING.md and docs/diagnose.md print
	$(BIN)/python conformance/tools/porting_page.py $(ARGS)
	$(BIN)/python conformance/tools/porting_page.py docs/diagnose.md $(ARGS)

initialisation: $(STAMP)  ## measure the initialisers and write the tables of docs/initialisation.md
	$(BIN)/python conformance/tools/initialisation_page.py docs/initialisation.md

clean:  ## remove the environment and caches
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:[^#]*##/\t/'

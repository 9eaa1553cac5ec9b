# Two commands need nothing but python3 and make:
#   make demo    trains on digits with wrong labels, prints a table, writes runs/demo.png
#   make test    runs the tests
# Each sets up what it needs in .venv the first time; the demo needs no framework and no test tool.
#
#   make check      lint, types and the unit tests: what to run between two edits
#   make test-slow  the tests that take minutes
#   make docs       the documentation site, in site/

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# a process per core, a file at a time
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile

.PHONY: demo test test-slow check lint docs hooks clean

demo: $(VENV)/.demo
	$(BIN)/python recipes/digits_noise.py

test: $(VENV)/.dev
	$(PYTEST)

test-slow: $(VENV)/.dev
	$(PYTEST) -m slow

check: lint
	$(PYTEST) -m 'not integration and not recipe and not slow'

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict

hooks: $(VENV)/.dev
	$(BIN)/pre-commit install

# The extra of the same name is installed. dev has the others in it, so their stamps are set with its own.
$(VENV)/.demo $(VENV)/.docs: $(VENV)/.%: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[$*]'
	touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@ $(VENV)/.demo $(VENV)/.docs

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache

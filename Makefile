# Two commands need nothing but python3 and make:
#   make demo    trains on digits with wrong labels, prints a table, writes runs/demo.png
#   make test    runs the tests
# Each sets up its own environment in .venv the first time.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-slow lint clean

demo: $(VENV)/.ready
	$(BIN)/python recipes/digits_noise.py

test: $(VENV)/.ready
	$(BIN)/python -m pytest

test-slow: $(VENV)/.ready
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache

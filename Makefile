# make demo, make serve, make test: each makes .venv first and needs nothing but Python and make.
PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
BIN := $(VENV)/bin

.PHONY: demo serve test lint types clean

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(VENV)/installed
	$(BIN)/python examples/demo.py

serve: $(VENV)/installed
	$(BIN)/torch-py-backend serve examples/model_repository

test: lint types
	$(BIN)/pytest

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed
	$(BIN)/mypy

clean:
	rm -rf $(VENV)

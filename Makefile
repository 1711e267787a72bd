.DEFAULT_GOAL := help
.PHONY: help demo test docs readme format clean

# Keeps a notice of the documentation's theme about its successor out of the output.
export NO_MKDOCS_2_WARNING := 1

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# Newer than pyproject.toml and constraints.txt: nothing is installed and no network is asked.
INSTALLED := $(VENV)/.installed

help:
	@echo 'make demo    train on the digits with 4 processes, some of them late: DDP against the methods of five papers'
	@echo 'make test    formatting, lint, types, documentation and tests'
	@echo 'make docs    build the documentation into build/docs'
	@echo 'make readme  rewrite the table of methods from their cards, and the outputs that the documentation shows'
	@echo 'make format  let ruff format the code and mend what it can'
	@echo 'make clean   remove the virtual environment, caches and build outputs'
	@echo
	@echo 'The first of them makes $(VENV) with Python 3.11 or later; PYTHON=/path/to/python chooses another one.'

$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo 'no Python found; install 3.11 or later, or say PYTHON=/path/to/python'; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Offbeat needs Python 3.11 or later, and $(PYTHON) is {sys.version.split()[0]}; say PYTHON=/path/to/a/newer/python")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(INSTALLED)
	$(BIN)/offbeat demo

test: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mkdocs build --strict --quiet
	$(BIN)/pytest -q -m "not live" -n 2
	$(BIN)/pytest -q -m live -n 3 --dist loadfile --no-loadscope-reorder

docs: $(INSTALLED)
	$(BIN)/mkdocs build --strict

readme: $(INSTALLED)
	$(BIN)/python tools/cards.py
	$(BIN)/python tools/examples.py

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

.DEFAULT_GOAL := help
.PHONY: help demo test check tests tests-alone tests-live again long stress docs readme format hooks clean

# Keeps a notice of the documentation's theme about its successor out of the output.
export NO_MKDOCS_2_WARNING := 1

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Another torch than that of constraints.txt, in an environment of its own: make test TORCH=2.6.0
TORCH ?=
VENV := .venv$(addprefix -torch-,$(TORCH))
BIN := $(VENV)/bin
# Newer than pyproject.toml and constraints.txt: nothing is installed and no network is asked. The demo needs little; what
# tests and checks need besides, four trainers among it, is many times that, and comes into the same environment.
SMALL := $(VENV)/.small
INSTALLED := $(VENV)/.installed
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt

help:
	@echo 'make demo    train on the digits with 4 processes, some of them late: DDP against the methods of five papers'
	@echo 'make test    everything: make check, then make tests'
	@echo 'make check   formatting, lint, types, what is made from the cards, and the documentation'
	@echo 'make tests   the tests alone'
	@echo 'make again   what of them failed the last time, if that was little'
	@echo 'make long    the tests with all rows of their tables and more that is drawn: hours'
	@echo 'make stress  ten minutes of random runs, some of which are stopped or killed'
	@echo 'make docs    build the documentation, with the reference, into build/docs'
	@echo 'make readme  rewrite the table of methods and CITATION.cff from the cards, and outputs and pictures of the docs'
	@echo 'make format  let ruff format the code and mend what it can'
	@echo 'make hooks   let git run the quick checks before every commit'
	@echo 'make clean   remove the virtual environments, caches and build outputs'
	@echo
	@echo 'The first of them makes $(VENV) with Python 3.11 or later; PYTHON=/path/to/python chooses another one.'
	@echo 'make test TORCH=2.6.0 runs the tests with another torch, in .venv-torch-2.6.0.'

# A torch may ask for a sympy of its own: with another one, sympy is free.
$(SMALL): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo 'no Python found; install 3.11 or later, or say PYTHON=/path/to/python'; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Offbeat needs Python 3.11 or later, and $(PYTHON) is {sys.version.split()[0]}; say PYTHON=/path/to/a/newer/python")'
	$(PYTHON) -m venv $(VENV)
	@sed -E '$(if $(TORCH),/^(torch|sympy)==/d)' constraints.txt > $(VENV)/constraints.txt
	@$(if $(TORCH),echo 'torch==$(TORCH)' >> $(VENV)/constraints.txt,true)
	@echo 'installing torch and what the demo needs into $(VENV): a minute or two, the first time'
	$(PIP) -e '.[report]'
	@touch $@

$(INSTALLED): $(SMALL)
	@echo 'adding what tests and checks need: a few minutes, the first time'
	$(PIP) -e '.[dev]'
	@touch $@

demo: $(SMALL)
	$(BIN)/offbeat demo

# Types are those of the torch in constraints.txt; with another one, only the tests tell something.
test: $(if $(TORCH),,check) tests

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tools/cards.py --check
	$(BIN)/python tools/citation.py --check
	$(BIN)/mkdocs build --strict # not --quiet, with which a broken link is no error

tests: tests-alone tests-live

tests-alone: $(INSTALLED)
	$(BIN)/pytest -q -m "not live" -n 2

tests-live: $(INSTALLED)
	$(BIN)/pytest -q -m live -n 4 --dist loadfile --no-loadscope-reorder

# What failed the last time, once more and by itself: a machine that others use may let a process stand for long.
again: $(INSTALLED)
	@$(BIN)/pytest --lf --lfnf none --collect-only -q | grep :: | tee -a /dev/stderr | awk 'END { exit NR > 5 }'
	$(BIN)/pytest -q --lf --lfnf none

long: export OFFBEAT_TESTS := long
long: tests

stress: $(INSTALLED)
	$(BIN)/python tools/stress.py --minutes 10

docs: $(INSTALLED)
	$(BIN)/mkdocs build --strict

readme: $(INSTALLED)
	$(BIN)/python tools/cards.py
	$(BIN)/python tools/citation.py
	$(BIN)/python tools/examples.py
	$(BIN)/python tools/pictures.py

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

hooks: $(INSTALLED)
	$(BIN)/pre-commit install

clean:
	rm -rf .venv .venv-torch-* build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

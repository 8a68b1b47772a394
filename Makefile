# Needs python3 (3.11 or newer, with venv) and make; everything else goes into .venv.
#
#   make demo     train a small language model with its optimizer on the host, beside plain AdamW
#   make test     the test suite               (make test ARGS="tests/train -x")
#   make lint     ruff and mypy
#   make format   let ruff rewrite the files
#   make clean    remove .venv and everything built

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints-dev.txt
ARGS ?=

# torch's threads sleep while they wait for each other: where they spin, a busy machine runs small models ten times slower.
export OMP_WAIT_POLICY ?= passive

.PHONY: demo test lint format clean

demo: $(VENV)/.installed-demo
	rm -rf build/demo
	$(RUN) -m zoff_async train --size tiny --steps 600 --lr 2e-3 --max-norm 1 --compare --checkpoint build/demo $(ARGS)

test: $(VENV)/.installed-dev
	$(RUN) -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile $(ARGS)

lint: $(VENV)/.installed-dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(VENV)/.installed-dev
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# A stamp a set of extras: made again when what is to be installed changes.
$(VENV)/.installed-demo: pyproject.toml constraints-dev.txt | $(VENV)/bin/python
	$(PIP) --editable '.[fast]'
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints-dev.txt | $(VENV)/bin/python
	$(PIP) --editable '.[dev]'
	touch $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "zoff_async needs Python 3.11 or newer, $(PYTHON) is %d.%d: make PYTHON=python3.12 ..." % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)

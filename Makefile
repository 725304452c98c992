# Two commands for a fresh machine with Python >= 3.10: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test thorough versions newest dist lint types docs snippets pages clean

demo: $(STAMP)  ## train, evaluate and re-rank on the drawn data set; leaves demo/report.html
	$(BIN)/python -m examples.retrieval.demo --out demo

test: lint types docs  ## in minutes: tests that are not slow, and a sample of those with many cases
	$(BIN)/python -m pytest --fast -n auto --maxprocesses 4

thorough: lint types docs  ## everything, in a quarter of an hour
	$(BIN)/python -m pytest -n auto --maxprocesses 4

# PyTorch brings its own Triton, and the newest FAISS does not take every NumPy: these pins go.
versions: PINS := grep -vE '^(torch|triton|numpy|faiss-cpu)==' constraints.txt
versions: WANTED := 'torch==$(TORCH)' 'numpy==$(NUMPY)'
versions:  ## the tests of `make test` on other versions: make versions TORCH=2.8.0 NUMPY=1.24.4 PYTHON=python3.10
	@test -n "$(TORCH)" -a -n "$(NUMPY)" || { echo "usage: make versions TORCH=2.8.0 NUMPY=1.24.4 [PYTHON=python3.10]"; exit 2; }
	$(test-in-a-new-environment)

newest: PINS := true
newest: WANTED :=
newest:  ## the tests of `make test` on the newest releases of everything, to be run every week
	$(test-in-a-new-environment)

versions newest: SHELL := /bin/bash
define test-in-a-new-environment
set -e; venv=$$(mktemp -d); trap 'rm -rf "$$venv"' EXIT; \
	$(PYTHON) -m venv "$$venv"; \
	$(PINS) >"$$venv/constraints.txt"; \
	"$$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c "$$venv/constraints.txt" \
		-e '.[examples,docs,test]' $(WANTED); \
	"$$venv/bin/python" -m pip list --disable-pip-version-check; \
	"$$venv/bin/python" -m pytest --fast
endef

dist: $(STAMP)  ## wheel and sdist, checked as PyPI would
	rm -rf dist build
	$(BIN)/python -m pip install --quiet --disable-pip-version-check build twine
	$(BIN)/python -m build --quiet
	$(BIN)/python -m twine check --strict dist/*

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/pyright

docs: $(STAMP)  ## warnings are errors; the snippets run while the pages are written
	$(MAKE) --no-print-directory --jobs=2 snippets pages

snippets: $(STAMP)
	$(BIN)/python -m sphinx -W --keep-going -q -b doctest docs docs/_build/doctest

pages: $(STAMP)
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("itrloss needs Python 3.10 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 10) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[examples,docs,test]'
	touch $@

clean:
	rm -rf .venv demo dist build docs/_build .pytest_cache .ruff_cache

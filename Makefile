# Two commands for a fresh machine with Python >= 3.10: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
COMMA := ,

.PHONY: demo test fast thorough versions version newest dist lint types docs clean

demo: $(STAMP)  ## train, evaluate and re-rank on the drawn data set; leaves demo/report.html
	$(BIN)/python -m examples.retrieval.demo --out demo

test: $(STAMP)  ## in minutes: linter, types and documentation beside the fast tests
	$(MAKE) --no-print-directory --jobs=2 lint types docs fast

fast: $(STAMP)  ## tests that are not slow, and a sample of those with many cases
	$(BIN)/python -m pytest --fast -n auto --maxprocesses 4

thorough: $(STAMP)  ## all tests, in a quarter of an hour
	$(BIN)/python -m pytest -n auto --maxprocesses 4

# PyTorch and a NumPy that goes with it; Python 3.10 and 3.11 have all of them.
VERSIONS ?= 1.13.1=1.24.4 2.4.1=1.26.4 2.8.0=1.24.4
versions:  ## `make version` for each of VERSIONS, one after the other
	for both in $(VERSIONS); do $(MAKE) version TORCH=$${both%=*} NUMPY=$${both#*=} || exit; done

# Before 2.8 without integrations, whose packages need a newer PyTorch, and with the newest of the others that go together.
# PyTorch brings its own Triton, and the newest FAISS does not take every NumPy: these pins go.
OLD := $(filter 1.% 2.0.% 2.1.% 2.2.% 2.3.% 2.4.% 2.5.% 2.6.% 2.7.%,$(TORCH))
version: EXTRAS := $(if $(OLD),examples$(COMMA)test-core,examples$(COMMA)docs$(COMMA)test)
version: PINS := $(if $(OLD),true,grep -vE '^(torch|triton|numpy|faiss-cpu)==' constraints.txt)
version: WANTED := 'torch==$(TORCH)' 'numpy==$(NUMPY)'
version:  ## the tests of `make test` on another version: make version TORCH=2.8.0 NUMPY=1.24.4 PYTHON=python3.10
	@test -n "$(TORCH)" -a -n "$(NUMPY)" || { echo "usage: make version TORCH=2.8.0 NUMPY=1.24.4 [PYTHON=python3.10]"; exit 2; }
	$(test-in-a-new-environment)

newest: EXTRAS := examples,docs,test
newest: PINS := true
newest: WANTED :=
newest:  ## the tests of `make test` on the newest releases of everything, to be run every week
	$(test-in-a-new-environment)

version newest: SHELL := /bin/bash
define test-in-a-new-environment
set -e; venv=$$(mktemp -d); trap 'rm -rf "$$venv"' EXIT; \
	$(PYTHON) -m venv $(VENV) "$$venv"; \
	$(PINS) >"$$venv/constraints.txt"; \
	"$$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c "$$venv/constraints.txt" \
		-e '.[$(EXTRAS)]' $(WANTED); \
	"$$venv/bin/python" -m pip list --disable-pip-version-check; \
	"$$venv/bin/python" -m pytest --fast
endef

dist: $(STAMP)  ## wheel and sdist, checked as PyPI would
	! grep -n example.org address.ini || { echo "fill in address.ini first"; exit 2; }
	rm -rf dist build
	$(BIN)/python -m pip install --quiet --disable-pip-version-check build twine
	$(BIN)/python -m build --quiet
	$(BIN)/python -m twine check --strict dist/*

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/pyrefly check --min-severity error

# Both builders read the pages once.
docs: $(STAMP)  ## warnings are errors; the pages are written, then their snippets run
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	$(BIN)/python -m sphinx -W --keep-going -q -b doctest -d docs/_build/html/.doctrees docs docs/_build/doctest

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("itrloss needs Python 3.10 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 10) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[examples,docs,test]'
	touch $@

clean:
	rm -rf .venv demo dist build docs/_build .pytest_cache .ruff_cache

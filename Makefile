# Two commands for a fresh machine with Python >= 3.10: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test lint types docs clean

demo: $(STAMP)  ## train, evaluate and re-rank on the drawn data set; leaves demo/report.html
	$(BIN)/python -m examples.retrieval.demo --out demo

test: lint types docs  ## everything CI runs
	$(BIN)/python -m pytest -n auto --maxprocesses 4

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/pyright

docs: $(STAMP)  ## warnings are errors; the snippets run
	$(BIN)/python -m sphinx -W --keep-going -q -b doctest docs docs/_build/doctest
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("itrloss needs Python 3.10 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 10) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[examples,docs,test]'
	touch $@

clean:
	rm -rf .venv demo docs/_build .pytest_cache .ruff_cache

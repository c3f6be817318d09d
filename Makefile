# One command for each thing a developer does; each sets up .venv first where it is missing or out of date.
#   make run     start the app (ARGS="--port 7861" passes flags on)
#   make test    lint and the fast tests
#   make lint    ruff alone
#   make proof   the checks too slow for `make test`
#   make setup   only build .venv
# PYTHON=python3.12 chooses the interpreter that .venv is made from (3.10 or newer).

PYTHON ?= python3
ARGS ?=

ifeq ($(OS),Windows_NT)
BIN := .venv/Scripts
else
BIN := .venv/bin
endif
STAMP := .venv/.setup-done

.PHONY: setup run test lint proof

setup: $(STAMP)

# The stamp is written last, so a set-up that was interrupted is taken up again. Which torch comes, and by what,
# is decided in core/setup_environment.py.
$(STAMP): pyproject.toml requirements.txt constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Redline needs Python 3.10 or newer; choose one with: make setup PYTHON=python3.12")'
	@$(PYTHON) -m core.setup_environment
	@$(BIN)/python -c 'import pathlib; pathlib.Path("$(STAMP)").touch()'

run: setup
	$(BIN)/python app.py $(ARGS)

lint: setup
	$(BIN)/python -m ruff check .

# Three files of tests at a time, for two cores: much of a browser test is waiting. In the order of tests/conftest.py, the longest
# first; xdist's own would be by the number of tests, and the browser's files have few.
test: lint
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

proof: setup
	$(BIN)/python -m pytest -m proof
	$(BIN)/python tests/mutants.py

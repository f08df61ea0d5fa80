# One command is the contract: what a person runs here is what .ci/run runs.
# The first target that needs it sets up .venv in the checkout: about a minute and 1.5 GB, once.

PYTHON ?= python3
# What pip is asked for: make TORCH="<options> torch==2.13.0" takes another build than PyPI's.
TORCH ?= torch==2.13.0
# Extra arguments for the command of a target: make test ARGS="tests/config -x"
ARGS ?=

BIN := .venv/bin
# Named after the folder: a checkout that was copied or moved installs itself again.
STAMP := .venv/installed-$(shell echo "$(CURDIR)" | cksum | cut -d " " -f 1)
CODE := schemas kernels kvstore services tests

.PHONY: help setup demo up kernels test test-all sanitize chaos check format readme clean

help:
	@echo "make demo      start a pipeline, ask it three questions, stop"
	@echo "make up        run the whole pipeline here until Ctrl-C"
	@echo "make test      the test suite; ARGS=... goes to pytest"
	@echo "make test-all  the suite with its slow tests"
	@echo "make sanitize  the tests of the C++ kernels under the address, undefined behaviour and thread sanitizers (gcc)"
	@echo "make kernels   build the C++ kernels again after a change of their sources"
	@echo "make chaos     500 jobs under random faults, a soak, kills: about an hour; ARGS=\"--seed 7\" repeats a run"
	@echo "make check     format, lint, types, architecture"
	@echo "make format    rewrite files in the house format"
	@echo "make readme    write the table of settings into README.md, and the schemas of messages into infra/schemas"
	@echo "make setup     only set up .venv"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "kvrelay needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --upgrade pip
	$(BIN)/python -m pip install --constraint constraints.txt $(TORCH)
	$(BIN)/python -m pip install --constraint constraints.txt --editable ".[dev]"
	@rm -f .venv/installed-*
	@touch $@

demo: $(STAMP)
	$(BIN)/kvrelay demo $(ARGS)

up: $(STAMP)
	exec $(BIN)/kvrelay up $(ARGS)

# Most tests wait for processes most of the time, so two run side by side; a file's tests share a broker and stay in one.
# OpenMP's threads sleep when they wait: spinning for one another on the same cores, they take ten times as long.
SIDE_BY_SIDE := --numprocesses 2 --dist loadfile --no-loadscope-reorder

# An open() without an encoding is an error in our packages (see filterwarnings in pyproject.toml).
test: $(STAMP)
	PYTHONWARNDEFAULTENCODING=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -m "not slow" $(SIDE_BY_SIDE) $(ARGS)

# The sanitizers slow torch down too: fewer examples of each property are tried.
sanitize: $(STAMP)
	$(BIN)/python -m kernels.native.sanitize address,undefined -m pytest --capture=sys tests/kernels/native $(ARGS)
	$(BIN)/python -m kernels.native.sanitize thread -m pytest --capture=sys tests/kernels/native $(ARGS)

kernels: $(STAMP)
	$(BIN)/python -m kernels.native.build

test-all: $(STAMP)
	PYTHONWARNDEFAULTENCODING=1 $(BIN)/python -m pytest $(ARGS)

chaos: $(STAMP)
	PYTHONWARNDEFAULTENCODING=1 $(BIN)/python -m pytest tests/chaos --full-chaos --kills 10 --timeout 3600 -s -v $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/python -m mypy
	$(BIN)/python -m pytest tests/architecture

format: $(STAMP)
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

readme: $(STAMP)
	$(BIN)/kvrelay config table --update README.md
	$(BIN)/kvrelay schemas --write infra/schemas

clean:
	rm -rf .venv build kernels/native/*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info

# make demo: set up and run the main example.  make test: set up, lint, type-check and test.
# Everything lives in .venv; a stamp there makes a second run start at once.
# make matrix: the tests on each version of torch in TORCH, in environments of their own under .venvs.

PYTHON ?= $(shell python3.11 -c 'import sys; print(sys.executable)' 2>/dev/null || echo python3)
VENV := .venv
BIN := $(VENV)/bin
comma := ,

# CI also installs the packages whose models the tests marked "zoo" convert; elsewhere those skip where they are absent.
EXTRAS := $(if $(filter true 1,$(CI)),dev$(comma)zoo,dev)
STAMP := $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))

# A file of tests stays in one process, where what its tests share is made once.
PYTEST_ARGS ?= -n 2 --dist loadfile --no-loadscope-reorder

TORCH ?= 2.10.0 2.11.0 2.13.0 2.14.1

.PHONY: demo test matrix lint hooks install clean

demo: install
	$(BIN)/python examples/digits_cnn.py

# Empty: processes that tests start find the bytecode of those before them.
test: lint
	PYTHONDONTWRITEBYTECODE= HF_HUB_OFFLINE=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

matrix:
	HF_HUB_OFFLINE=1 $(PYTHON) tests/tools/matrix.py $(TORCH) -- $(PYTEST_ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-cache

hooks: install
	$(BIN)/pre-commit install

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
	touch $@

clean:
	rm -rf $(VENV) .venvs build dist *.egg-info .pytest_cache .ruff_cache .hypothesis

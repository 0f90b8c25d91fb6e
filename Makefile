# make demo: set up and run the main example.  make test: set up, lint, type-check and test.
# make check: the linters that take seconds and the core of the tests, in less than two minutes, while one works.
# Everything lives in .venv; a stamp there makes a second run start at once.
# make docs: the pages and a reference of the public names, as a site.
# make matrix: the tests on each version of torch in TORCH, in environments of their own under .venvs.

PYTHON ?= $(shell python3.11 -c 'import sys; print(sys.executable)' 2>/dev/null || echo python3)
VENV := .venv
BIN := $(VENV)/bin
comma := ,

# CI also installs the frameworks and models that some tests want; elsewhere those skip where they are absent.
DEV := $(VENV)/.installed-dev$(if $(filter true 1,$(CI)),-frameworks)
# A demo runs in what the tests installed, or else in what it needs itself.
DEMO := $(firstword $(wildcard $(VENV)/.installed-dev-frameworks $(VENV)/.installed-dev) $(VENV)/.installed-examples)

# A file of tests stays in one process, where what its tests share is made once.
PYTEST_ARGS ?= -n 2 --dist loadfile --no-loadscope-reorder

# Empty where somebody looks on: pip shows what it downloads.
QUIET := $(if $(filter true 1,$(CI)),--quiet)

# timm wants a torchvision, and what finds one imports it, which fails beside a torch of another build (tests alone put
# this folder on their path).
BESIDE_TIMM := $(BIN)/python -m pip install $(QUIET) --disable-pip-version-check -c constraints.txt --no-deps \
	--upgrade --target $(VENV)/timm timm torchvision

TORCH ?= 2.10.0 2.11.0 2.13.0 2.14.1

.PHONY: demo check test matrix lint docs hooks install clean

demo: $(DEMO)
	$(BIN)/python examples/digits_cnn.py

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m core $(PYTEST_ARGS)

# Empty: processes that tests start find the bytecode of those before them.
test: lint docs
	PYTHONDONTWRITEBYTECODE= HF_HUB_OFFLINE=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

matrix:
	HF_HUB_OFFLINE=1 $(PYTHON) tests/tools/matrix.py $(TORCH) -- $(PYTEST_ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(if $(filter %-frameworks,$(DEV)),$(BIN)/pyright --project pyright-frameworks.json --pythonpath $(BIN)/python)
	$(BIN)/lint-imports --no-cache

# The pages and a reference as a site, in build/site; a link that leads nowhere is an error.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/python docs/site.py

hooks: install
	$(BIN)/pre-commit install

install: $(DEV)

# The stamp's name says which extras: .installed-dev-frameworks stands for [dev,frameworks].
$(VENV)/.installed-%: pyproject.toml constraints.txt
	@echo "Making $(VENV) with fxprec[$(subst -,$(comma),$*)]: PyTorch is downloaded once, and takes a while to unpack"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(QUIET) --disable-pip-version-check -c constraints.txt -e ".[$(subst -,$(comma),$*)]"
	$(if $(findstring frameworks,$*),$(BESIDE_TIMM))
	touch $@

clean:
	rm -rf $(VENV) .venvs build dist *.egg-info .pytest_cache .ruff_cache .hypothesis

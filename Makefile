# `make` or `make help` lists what can be made.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check
LOCK = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	--custom-compile-command "make lock" $(UPGRADE)
IMAGE := amd-llm-load:local
BASE ?= python:3.11-slim
TEST_PROCESSES ?= 6
WITHOUT_TIERS := --ignore tests/docker --ignore tests/real --ignore tests/lemonade --ignore tests/browser
PYTEST := $(BIN)/python -m pytest $(PYTEST_ARGS) --dist loadfile --no-loadscope-reorder
# Pytest rewrites the assertions of all tests: here once, or each of its processes would.
REWRITE := $(BIN)/python -m pytest --collect-only -qq > /dev/null

# Where it is set, each of the many processes of the tests compiles what it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo install dev test test-all test-fast test-nightly lint format image lock sbom clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

demo: install ## Quick start: install and run scenarios/first-look.yaml on the embedded engine (no Docker, no GPU)
	$(BIN)/harness run scenarios/first-look.yaml

install: $(VENV)/installed ## Install into a virtual environment (.venv)

dev: $(VENV)/installed-dev ## Install what the tests need, too

test: lint test-all ## Run every tier of tests that this machine supports; report the others, with the reason

test-all: dev # The engines are set up while the tests run that need none; the others wait for them.
	@tests/support/engines/setup-for-tests & setup=$$!; $(REWRITE); \
	HARNESS_TEST_SETUP=$$setup $(PYTEST) -m "not alone" --numprocesses $(TEST_PROCESSES); status=$$?; wait; exit $$status

test-fast: dev ## Run the tests that need neither Docker nor real engines nor a browser
	@$(REWRITE) || true
	$(PYTEST) -m "not alone" $(WITHOUT_TIERS) --numprocesses $(TEST_PROCESSES)

test-nightly: ## Run `make test` with the slow tests and all draws of the simulations (CONTRIBUTING.md lists them)
	NIGHTLY=1 $(MAKE) test
	NIGHTLY=1 $(PYTEST) -m alone

lint: dev ## Check style and types
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && nice $(BIN)/mypy  # the tests run meanwhile, and take longer

format: dev ## Format the code
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

image: ## Build the container image (BASE=... for another base)
	docker build --build-arg BASE=$(BASE) --tag $(IMAGE) .

lock: dev ## Write requirements/*.txt anew: every dependency with its version and hashes (UPGRADE=--upgrade for newer ones)
	$(BIN)/python -m pip install --quiet uv
	$(LOCK) pyproject.toml requirements/build.in -o requirements/run.txt
	$(LOCK) pyproject.toml requirements/build.in --extra dev -o requirements/dev.txt

sbom: dev ## Write sbom.cdx.json: what is in the container image, as a CycloneDX list
	$(BIN)/cyclonedx-py requirements requirements/run.txt --output-reproducible --output-file sbom.cdx.json

clean: ## Remove the virtual environment and caches of tools, never runs
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build *.egg-info

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; this is $$($(PYTHON) --version). Use make PYTHON=python3.11 ..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
		|| { rm -rf $(VENV); echo "No virtual environment could be made. On Debian: apt install python3-venv"; exit 1; }

$(VENV)/installed: $(VENV)/bin/python pyproject.toml requirements/run.txt
	@echo "Installing into $(VENV) (about half a minute) ..."
	@$(PIP) --require-hashes --requirement requirements/run.txt
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed requirements/dev.txt
	@echo "Installing the tests' tools ..."
	@$(PIP) --no-compile --require-hashes --requirement requirements/dev.txt
	@touch $@


# lorad: `make demo` and `make test` are all a newcomer needs.
#
#   PYTHON=python3.12 make demo     another interpreter (3.11 or newer)
#   TORCH_INDEX=URL make demo       a package index to take torch from, for the small CPU build

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH_INDEX ?=
PYTEST_ARGS ?=

# On two workers.  A test that hangs fails with its stacks after five minutes, and the rest goes on:
# `thread` ends its worker, whatever that waits for, and another one takes its place.
BOTH := -n 2 --dist loadfile --no-loadscope-reorder --timeout 300 --timeout-method thread

# The installation is done again only when what it is made from changes.
STAMP := $(VENV)/.installed

# Real clients, in an environment of their own: docs/howto/clients.md.
CLIENTS := build/clients

.PHONY: demo test test-late test-slow test-clients check gpu bench docs site clean

demo: $(STAMP)
	@$(BIN)/lorad demo

test: $(STAMP)
	@$(BIN)/python -m lorad.demo_model > /dev/null
	@$(BIN)/python -m compileall -q engine lorad migrations
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(BOTH) $(PYTEST_ARGS)

test-late: $(STAMP)
	@$(BIN)/python -m lorad.demo_model > /dev/null
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m late $(BOTH) $(PYTEST_ARGS)

test-slow: $(STAMP)
	@$(BIN)/python -m lorad.demo_model > /dev/null
	$(BIN)/python -m pytest -m 'slow and not clients and not gpu' $(PYTEST_ARGS)

# Their warnings are not ours, hence -W ignore.
test-clients: $(CLIENTS)/.installed
	$(CLIENTS)/bin/python -m pytest -m clients -W ignore tests/clients $(PYTEST_ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

bench: $(STAMP)
	$(BIN)/python benchmarks/engine_steps.py

docs: $(STAMP)
	$(BIN)/python docs/generate.py

# Not with --quiet: mkdocs then counts no warning, and strict is not strict.
site: docs
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file docs/site/mkdocs.yml
	@echo "build/site/index.html"

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lorad needs Python 3.11 or newer; set PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV), for some minutes: torch is 3 GB (CUDA build) or 200 MB (CPU build)"
	$(if $(TORCH_INDEX),$(BIN)/python -m pip install --quiet --index-url $(TORCH_INDEX) -c constraints.txt torch)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

$(CLIENTS)/.installed: pyproject.toml constraints.txt $(wildcard tests/clients/requirements.txt tests/clients/package*.json)
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(if $(TORCH_INDEX),$(CLIENTS)/bin/python -m pip install --quiet --index-url $(TORCH_INDEX) -c constraints.txt torch)
	$(CLIENTS)/bin/python -m pip install --quiet -c constraints.txt -r tests/clients/requirements.txt -e '.[dev]'
	mkdir -p $(CLIENTS)/node && cp tests/clients/package*.json $(CLIENTS)/node
	npm ci --prefix $(CLIENTS)/node --no-audit --no-fund || echo "without npm the tests of openai-node are skipped"
	@touch $@

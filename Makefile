# make setup | demo | test | test-all | bench | clean        (needs Python >= 3.11; PYTHON=python3.12 make ... picks one)
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEMO   := runs/demo
PIP    := $(BIN)/python -m pip --disable-pip-version-check -qq

.PHONY: setup demo lint test test-all bench clean
setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "certtool needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "setting up $(VENV) (a few minutes the first time, mostly torch)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install --upgrade "pip>=25.1" -c constraints.txt
	@$(PIP) install -c constraints.txt --editable ".[lirpa]" --group dev
	@$(PIP) install --no-deps auto_LiRPA==0.3    # its pins are stale, not its code: see certtool/bounds/lirpa.py
	@touch $@

demo: setup
	$(BIN)/certtool train recipes/tiny_cnn7.toml --out $(DEMO) --overwrite
	$(BIN)/certtool verify $(DEMO)
	$(BIN)/certtool inspect $(DEMO)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow and not realdata"

test-all: lint
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

# Ratios, measured side by side; leave the machine alone meanwhile. CERTTOOL_DATA=... names the data sets' folder.
bench: setup
	$(BIN)/python benchmarks/run_all.py

clean:
	rm -rf $(VENV) runs build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

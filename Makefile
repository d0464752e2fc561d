PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: demo test gpu-test sanitize bench lint clean

demo: $(READY)
	@$(BIN)/flashlatte demo

test: $(READY)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu and not interpreter" --numprocesses auto --quiet
	@TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m interpreter --numprocesses auto --quiet

gpu-test: $(READY)
	@$(BIN)/python -m pytest -m gpu --quiet

sanitize: $(READY)
	@command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is needed: it comes with the CUDA toolkit" >&2; exit 2; }
	@compute-sanitizer --tool memcheck --error-exitcode 1 $(BIN)/python tests/gpu/sanitize.py

bench: $(VENV)/.bench-ready
	@$(BIN)/flashlatte bench

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --warnings

clean:
	rm -rf $(VENV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=python3.11")'
	@$(PYTHON) -m venv $(VENV)

$(READY): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing FlashLatte and what it needs into $(VENV) (once)"
	@$(PIP) --editable '.[transformers,dev]'
	@touch $@

$(VENV)/.bench-ready: $(READY)
	@$(PIP) --editable '.[bench]'
	@touch $@

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check install --constraint constraints.txt
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto

.PHONY: demo test test-all docs wheel gpu-test sanitize bench lint clean

demo: $(READY)
	@$(BIN)/flashlatte demo

test: $(READY)
	@$(PYTEST) -m "not gpu and not interpreter"
	@TRITON_INTERPRET=1 $(PYTEST) -m interpreter

docs: $(VENV)/.docs-ready
	@NO_MKDOCS_2_WARNING=1 PATH=$(BIN):$$PATH $(BIN)/mkdocs build --quiet --strict
	@echo "The site is in build/site; $(BIN)/mkdocs serve shows it while you write"

wheel: $(READY)
	@$(BIN)/python .ci/wheel.py

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
	rm -rf $(VENV) build

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=python3.11")'
	@$(PYTHON) -m venv $(VENV)

$(READY): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Once: FlashLatte, PyTorch, transformers and the tests' packages go into $(VENV), and nowhere else."
	@echo "PyTorch is the most of it: 0.2 GB to download for a CPU, 3 GB with CUDA, as PyPI has it for Linux; some minutes."
	@$(PIP) --editable '.[transformers,dev]'
	@touch $@

$(VENV)/.docs-ready: $(READY)
	@echo "Once: mkdocs-material and mkdocstrings, 15 MB to download."
	@$(PIP) --editable '.[docs]'
	@touch $@

$(VENV)/.bench-ready: $(READY)
	@$(PIP) --editable '.[bench]'
	@touch $@

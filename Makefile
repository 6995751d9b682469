# run, test and lint work in .venv, made on first use by PYTHON. test-gpu and bench use the current python3 as it is:
# the machine with the GPU has its own torch and Triton.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# The two ends of the supported range, each in a folder of its own: .venv shows that Speedlight works without Triton.
TRITON_VERSIONS := 3.6.0 3.9.0
TRITON_FOLDERS := $(TRITON_VERSIONS:%=.triton-versions/%)
SOURCE := PYTHONPATH=src

.PHONY: help run test test-gpu bench lint format compile-all clean

help:
	@echo "make run          install into .venv and run the demo"
	@echo "make test         install into .venv and run everything that needs no GPU"
	@echo "make test-gpu     run what needs a GPU, with the current python3"
	@echo "make bench        measure on this machine, with the current python3 (BENCH='run CASE --out FILE')"
	@echo "make lint         ruff and mypy"
	@echo "make format       let ruff format and fix"
	@echo "make compile-all  compile every combination of options for every GPU (a day on two cores)"

run: $(VENV)/.demo
	$(BIN)/speedlight demo

test: $(VENV)/.dev $(TRITON_FOLDERS:%=%/.installed)
	$(BIN)/python tools/run_tests.py

test-gpu:
	$(SOURCE) $(PYTHON) -m pytest -q tests/test_gpu.py tests/test_bench.py -m gpu
	$(SOURCE) $(PYTHON) -m pytest -q tests/backends

BENCH ?= run
bench:
	$(SOURCE) $(PYTHON) -m speedlight.bench $(BENCH)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

compile-all: $(VENV)/.dev $(TRITON_FOLDERS:%=%/.installed)
	for version in $(TRITON_VERSIONS); do \
		PYTHONPATH=.triton-versions/$$version $(BIN)/python tools/compile_all.py || exit 1; \
	done

clean:
	rm -rf $(VENV) .triton-versions build dist src/*.egg-info

# Debian splits venv off from python3; virtualenv is the same for a python3 that has only pip.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV) \
		&& $(PYTHON) -m pip install --quiet --target build/virtualenv virtualenv \
		&& PYTHONPATH=build/virtualenv $(PYTHON) -m virtualenv --quiet $(VENV); }

$(VENV)/.%: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) install --quiet --no-compile --constraint constraints.txt --editable '.[$*]'
	touch $@

.triton-versions/%/.installed: | $(BIN)/python
	rm -rf $(@D)
	$(PIP) install --quiet --no-compile --no-deps --target $(@D) triton==$*
	touch $@

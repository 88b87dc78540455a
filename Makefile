# Two commands: `make demo` and `make test` set up .venv by themselves. `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
GPU := $(shell command -v nvidia-smi)
FAST := tests/pure tests/multiproc tests/cpu tests/kernels tests/e2e
CONSTRAINTS := $(if $(GPU),,-c constraints-cpu.txt)

.PHONY: help demo test test-all mutants lint benchmark clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/ -/'

$(VENV)/ready: setup.py constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(if $(GPU),,$(BIN)/pip install -q -r constraints-cpu.txt)
	$(BIN)/pip install -q $(CONSTRAINTS) -e '.[demo,test]'
	touch $@

demo: $(VENV)/ready ## train three adapters at once on SmolLM2-135M-Instruct and show what they learnt
	$(BIN)/python examples/demo.py

# one thread each: the models of the tests are tiny, and two threads on a busy machine wait for each other
test test-all: export OMP_NUM_THREADS = 1

test: lint ## everything that runs in minutes
	$(BIN)/python -m pytest $(FAST) -m "not slow and not timed" -n auto --maxprocesses 8 --dist loadfile
	$(BIN)/python -m pytest $(FAST) -m "not slow and timed"

test-all: lint mutants ## every test, the slow ones too
	$(BIN)/python -m pytest tests

mutants: $(VENV)/ready ## break each invariant on purpose and see its test fail
	$(BIN)/python tests/mutants/run.py

lint: $(VENV)/ready ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

benchmark: $(VENV)/ready ## sharing against PEFT, as ratios
	$(BIN)/python benchmarks/sharing.py

clean: ## remove the environment and build products
	rm -rf $(VENV) build dist *.egg-info

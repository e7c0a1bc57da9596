#!/usr/bin/env bash
# Whether the protos break those of the newest released version (protos/released/vVERSION.binpb): for its peers, and for JSON.
# A release adds its own: buf build --exclude-source-info -o protos/released/vVERSION.binpb
set -eu
newest=$(printf '%s\n' protos/released/v*.binpb | sort -V | tail -n 1)
exec "${BUF:-.venv/bin/buf}" breaking --against "$newest"

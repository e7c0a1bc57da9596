#!/usr/bin/env bash
# Whether the protos break those of the newest released version (a tag v*): for peers of that version, and for JSON.
# Before the first tag nobody depends on them: says so and succeeds.
set -eu
if ! tag=$(git describe --tags --abbrev=0 --match 'v*' 2>/dev/null); then
  echo "no version is tagged yet: the protos are compared with nothing"
  exit 0
fi
exec "${BUF:-.venv/bin/buf}" breaking --against "$(git rev-parse --git-common-dir)#tag=$tag"

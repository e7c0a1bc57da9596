#!/usr/bin/env bash
# Whether the protos break those of an earlier commit (default: the one before HEAD), for peers in its version and for JSON.
# Says so and succeeds where git does not have that commit, as in a clone of depth 1.
set -eu
before=${1:-HEAD~1}
if ! commit=$(git rev-parse --verify --quiet "$before^{commit}"); then
  echo "$before is not in this clone: the protos are compared with nothing"
  exit 0
fi
exec "${BUF:-.venv/bin/buf}" breaking --against "$(git rev-parse --git-common-dir)#ref=$commit"

#!/usr/bin/env bash
# Whether the protos break those of the newest released version (protos/released/vVERSION.binpb): for its peers, and for JSON.
# A release adds its own: buf build --exclude-source-info -o protos/released/vVERSION.binpb
set -eu -o pipefail
buf=${BUF:-.venv/bin/buf}
newest=$(printf '%s\n' protos/released/v*.binpb | sort -V | tail -n 1)
"$buf" breaking --against "$newest"
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
case $version in
  *.dev*) ;;
  *)
    "$buf" build --exclude-source-info -o - | cmp - "protos/released/v$version.binpb" || {
      echo "protos/released/v$version.binpb is not made of these protos: see $0"
      exit 1
    }
    ;;
esac

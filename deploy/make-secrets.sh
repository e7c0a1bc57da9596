#!/bin/sh
# Creates the secrets of the services in the given folder: one random token for each role, a first API key for clients, Grafana's
# password, a Redis password and the Redis user list that contains it. Existing files are kept, so the script may run again at any
# time. To rotate a secret, delete its file, run the script again, and do what deploy/README.md says below "Permissions".
# docs/security.md describes how to rotate the tokens of roles without an interruption.
#   ./make-secrets.sh compose/secrets      for compose/compose.yaml
#   ./make-secrets.sh k8s/base/secrets     for k8s/base
set -eu
case "$#${1-}" in
  1-h | 1--help) echo "usage: $0 FOLDER"; exit 0 ;;
  1-* | 1 | [02-9]*) echo "usage: $0 FOLDER" >&2; exit 2 ;;
esac
umask 022
mkdir -p "$1"
# The folder is closed and its files are readable, because Compose mounts files with their owner and mode on the host, and
# services run as another user than the one who deploys.
chmod 700 "$1"
for name in agent gateway operator observer redis-password grafana-admin; do
  [ -s "$1/$name" ] || head -c 32 /dev/urandom | base64 | tr '+/' '-_' | tr -d '=\n' > "$1/$name"
done
# Keys of the gateway's clients: lines TENANT:KEY. Add a line for each tenant.
[ -s "$1/api-keys" ] || echo "default:sk-$(head -c 32 /dev/urandom | base64 | tr -d '+/=\n')" > "$1/api-keys"
# The URL of the Redis with the name `redis` and the password of the user list below; or the URL of your own Redis, from REDIS_URL
# in the environment, which is kept until the file is deleted.
if [ -n "${REDIS_URL:-}" ]; then
  printf '%s' "$REDIS_URL" > "$1/redis-url"
elif [ ! -s "$1/redis-url" ] || grep -q '@redis:6379/' "$1/redis-url"; then
  printf 'redis://pointsman:%s@redis:6379/0' "$(cat "$1/redis-password")" > "$1/redis-url"
fi
digest=$(sha256sum < "$1/redis-password" | cut -d ' ' -f 1)
# The health check's ping needs no password. All other commands need the user pointsman, which is no administrator.
printf '%s\n%s\n' \
  'user default on nopass resetkeys resetchannels -@all +ping' \
  "user pointsman on #$digest resetkeys resetchannels ~pointsman:* &pointsman:* -@all +@read +@write +@pubsub +@transaction +@scripting +@connection +time -@dangerous +info" \
  > "$1/redis-users.acl"

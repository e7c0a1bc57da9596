#!/bin/sh
# Creates an authority and certificates signed by it in the given folder, for those who have no authority. Each of redis, router,
# gateway, agent, operator and picker gets a folder with ca.pem, cert.pem and key.pem, valid for the service's name and for this
# machine.
# Existing files are kept. Certificates are valid for a year; to renew one, delete its cert.pem and run this script again. The
# folder must stay, because running containers have mounted it.
#   ./make-certificates.sh compose/tls                   for compose/tls.yaml
#   ./make-certificates.sh k8s/components/tls/tls        for k8s/components/tls
#   ./make-certificates.sh k8s/components/picker/tls     for k8s/components/picker
set -eu
case "$#${1-}" in
  1-h | 1--help) echo "usage: $0 FOLDER"; exit 0 ;;
  1-* | 1 | [02-9]*) echo "usage: $0 FOLDER" >&2; exit 2 ;;
esac
umask 022
mkdir -p "$1/authority"
# As with the secrets, the folder is closed and its files are readable, because services run as other users.
chmod 700 "$1"
ca="$1/authority"
new_key() { openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes "$@" 2> /dev/null; }
[ -s "$ca/ca.pem" ] || new_key -x509 -keyout "$ca/ca.key" -out "$ca/ca.pem" -days 3650 -subj "/CN=pointsman"
chmod 600 "$ca/ca.key"
for name in redis router gateway agent operator picker; do
  [ -s "$1/$name/cert.pem" ] && continue
  mkdir -p "$1/$name"
  cp "$ca/ca.pem" "$1/$name/ca.pem"
  new_key -keyout "$1/$name/key.pem" -out "$1/$name/request.pem" -subj "/CN=$name"
  names="DNS:$name,DNS:localhost,IP:127.0.0.1"
  # In Kubernetes each router has its own name, to which clients connect.
  [ "$name" != router ] || names="$names,DNS:router-0,DNS:router-1"
  echo "subjectAltName=$names" > "$1/$name/names"
  openssl x509 -req -in "$1/$name/request.pem" -CA "$ca/ca.pem" -CAkey "$ca/ca.key" -CAcreateserial \
    -extfile "$1/$name/names" -out "$1/$name/cert.pem" -days 365 2> /dev/null
  chmod 644 "$1/$name/key.pem"
  rm "$1/$name/request.pem" "$1/$name/names"
done

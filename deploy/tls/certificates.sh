#!/bin/sh
# Certificates by which the nodes of a server know each other: certificates.sh FOLDER
# Makes FOLDER/ca.crt, tls.crt and tls.key, for a year: an authority whose own key is thrown away, so that nobody can make more, and one
# certificate for all nodes, for the name that penstock asks for.
set -eu
umask 077
folder="${1:?name the folder}"
mkdir -p "$folder"
authority="$(mktemp -d)"
trap 'rm -rf "$authority"' EXIT
# openssl's words are seen only where it fails, or is missing.
quietly() {
    "$@" 2>"$authority/words" || { cat "$authority/words" >&2; exit 1; }
}
quietly openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 365 -subj "/CN=penstock nodes" \
    -addext "keyUsage=critical,keyCertSign" -keyout "$authority/key" -out "$folder/ca.crt"
quietly openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=penstock" \
    -keyout "$folder/tls.key" -out "$authority/request"
printf 'subjectAltName=DNS:penstock\nextendedKeyUsage=serverAuth,clientAuth\nkeyUsage=critical,digitalSignature\nbasicConstraints=critical,CA:FALSE\n' \
    >"$authority/extensions"
quietly openssl x509 -req -in "$authority/request" -CA "$folder/ca.crt" -CAkey "$authority/key" -CAserial "$authority/serial" -CAcreateserial -days 365 \
    -extfile "$authority/extensions" -out "$folder/tls.crt"

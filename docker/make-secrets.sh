#!/bin/sh
# Makes an authority, the server's certificate, a token for each role, and of these what compose.secure.yaml mounts: the
# folders `server` and `client`. Usage: make-secrets.sh [FOLDER]; a FOLDER that exists stays as it is.
set -eu

folder=${1:-$(dirname "$0")/secrets}
if [ -e "$folder" ]; then
    echo "$folder is there already; move it away to make new secrets"
    exit 0
fi
mkdir -m 700 "$folder"
cd "$folder"

new_key="-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
# shellcheck disable=SC2086
openssl req -x509 $new_key -days 3650 -subj "/CN=replay authority" -keyout ca.key -out ca.crt 2>/dev/null
# shellcheck disable=SC2086
openssl req $new_key -subj "/CN=server" -keyout server.key -out server.csr 2>/dev/null
echo "subjectAltName = DNS:server, DNS:server-1, DNS:server-2, DNS:localhost, IP:127.0.0.1" > server.ext
openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -days 365 -extfile server.ext -out server.crt 2>/dev/null
rm server.csr server.ext

for role in read-only read-write admin; do
    openssl rand -hex 32 > "token-$role"
    echo "$role:$(cat "token-$role")" >> tokens
done
mkdir -m 755 server client
mv server.crt server.key tokens server
cp ca.crt server
cp ca.crt client
cp token-read-only server/token
cp token-read-write client/token
# The containers' user is not the owner, and compose keeps owner and mode. Nobody else gets into this folder.
chmod 444 ca.crt token-* server/* client/*
chmod 400 ca.key
echo "made $folder: keep ca.key elsewhere; the server's certificate ends in a year"

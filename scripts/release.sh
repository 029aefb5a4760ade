#!/bin/sh
# Builds what a release consists of into DIR: CoreDNS with nanny for Linux, the manual page, the bill of materials as
# CycloneDX, and SHA-256 sums. Usage: release.sh DIR [ARCH...]
set -eu
cd "$(dirname "$0")/.."

dir=$1
shift
[ $# -gt 0 ] || set -- amd64 arm64
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)

for arch; do
	CGO_ENABLED=0 GOOS=linux GOARCH=$arch GOFLAGS=-buildvcs=false \
		go -C cmd/coredns build -trimpath -ldflags=-s -o "$dir/coredns-nanny-linux-$arch" .
done
cp man/coredns-nanny.7 "$dir"
(cd cmd/coredns && GOFLAGS=-buildvcs=false go run github.com/CycloneDX/cyclonedx-gomod/cmd/cyclonedx-gomod@v1.10.0 \
	app -json -output "$dir/sbom.json" .)
cd "$dir"
rm -f SHA256SUMS
sha256sum -- * >SHA256SUMS.new
mv SHA256SUMS.new SHA256SUMS

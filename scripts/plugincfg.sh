#!/bin/sh
# Compiles nanny into CoreDNS by a line in plugin.cfg, as CoreDNS's manual describes it, and checks
# that the result has the plugin. The CoreDNS is the one that go.mod names.
set -eu

module=github.com/coredns/nanny
nanny=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM

cd "$nanny"
go mod download github.com/coredns/coredns
cp -R "$(go list -m -f '{{.Dir}}' github.com/coredns/coredns)" "$work/coredns"
cd "$work/coredns"
chmod -R u+w .

awk -v line="nanny:$module" '/^forward:/ { print line } { print }' plugin.cfg >plugin.cfg.new
mv plugin.cfg.new plugin.cfg
go mod edit -replace "$module=$nanny"
go generate coredns.go
go build -mod=mod -o coredns . # adds nanny to go.mod, which `go get` can't do for a checkout

if ! ./coredns -plugins | grep -qx nanny; then
	echo "$0: the CoreDNS built from plugin.cfg has no plugin nanny" >&2
	exit 1
fi
echo "plugin.cfg: $(./coredns -version | head -n 1) has nanny"

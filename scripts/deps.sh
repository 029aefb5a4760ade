#!/bin/sh
# Installs what `make run` needs beside Go, if it is missing: dnsmasq and dig. With the argument "tests", what root's tests
# on Debian need, too: they make network namespaces and containers (ip, nft, ipset, udhcpc, capsh, setcap), and ask systemd-analyze
# and Prometheus. Where it can't, it says what to install.
set -eu

# Debian keeps dnsmasq in a directory that only root has in $PATH.
PATH=$PATH:/usr/sbin:/usr/local/sbin:/opt/homebrew/sbin

have() { command -v "$1" >/dev/null; }

tools='dnsmasq dig'
# dnsmasq-base is the program without a service that would take port 53.
packages='dnsmasq-base bind9-dnsutils'
tests=
if [ "${1:-}" = tests ] && [ "$(id -u)" -eq 0 ] && have apt-get; then
	tests=yes
	tools="$tools ip nft ipset udhcpc capsh setcap systemd-analyze prometheus promtool"
	packages="$packages iproute2 nftables ipset udhcpc libcap2-bin systemd"
fi
missing=
for tool in $tools; do
	have "$tool" || missing="$missing $tool"
done
if [ -z "$missing" ]; then
	exit 0
fi

say() {
	echo "$0: missing:$missing; install with: $1" >&2
	exit 1
}

case $(uname -s) in
Darwin) say 'brew install dnsmasq' ;;
Linux) ;;
*) say 'the package manager (packages dnsmasq and bind-tools)' ;;
esac

if have dnf; then
	say 'dnf install dnsmasq bind-utils'
elif have apk; then
	say 'apk add dnsmasq bind-tools'
elif ! have apt-get; then
	say 'the package manager'
fi

if [ "$(id -u)" -eq 0 ]; then
	sudo=
elif have sudo; then
	sudo=sudo
else
	say "apt-get install $packages (as root)"
fi
$sudo apt-get update
# shellcheck disable=SC2086 # several words
$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $packages

# The package itself would start a server, now and at each boot.
if [ -n "$tests" ] && ! { have prometheus && have promtool; }; then
	dir=$(mktemp -d)
	trap 'rm -rf "$dir"' EXIT
	cd "$dir"
	apt-get download prometheus
	dpkg-deb --fsys-tarfile prometheus_*.deb |
		tar -x -C /usr/local/bin --strip-components=3 ./usr/bin/prometheus ./usr/bin/promtool
fi

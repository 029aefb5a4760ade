#!/bin/sh
# Installs what the tests and `make run` need beside Go, if it is missing: dnsmasq and dig.
# Where it can't, it says what to install.
set -eu

# Debian keeps dnsmasq in a directory that only root has in $PATH.
PATH=$PATH:/usr/sbin:/usr/local/sbin:/opt/homebrew/sbin

have() { command -v "$1" >/dev/null; }

if have dnsmasq && have dig; then
	exit 0
fi

say() {
	echo "$0: dnsmasq or dig is missing; install them with: $1" >&2
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

# dnsmasq-base is the program without a service that would take port 53.
if [ "$(id -u)" -eq 0 ]; then
	sudo=
elif have sudo; then
	sudo=sudo
else
	say 'apt-get install dnsmasq-base bind9-dnsutils (as root)'
fi
$sudo apt-get update
$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends dnsmasq-base bind9-dnsutils

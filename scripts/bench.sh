#!/bin/sh
# Compares nanny with forward in front of the same dnsmasq; bench/main.go says how. Takes about five minutes.
set -eu
cd "$(dirname "$0")/.."
PATH=$PATH:/usr/sbin

if ! command -v dnsperf >/dev/null; then
	if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
		apt-get update
		DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends dnsperf
	else
		echo "$0: install dnsperf" >&2
		exit 1
	fi
fi
exec go run ./bench "$@"

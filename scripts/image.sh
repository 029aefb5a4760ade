#!/bin/sh
# Puts CoreDNS with nanny and dnsmasq into ROOT, as the Dockerfile does with / and a test with a directory.
# Usage: image.sh ROOT COREDNS. Needs Debian 12 and root.
set -eu

root=${1%/}
coredns=$2
export DEBIAN_FRONTEND=noninteractive

apt-get update
if [ -z "$root" ]; then
	apt-get install -y --no-install-recommends dnsmasq-base ca-certificates libcap2-bin
else
	# dnsmasq, its libraries and theirs: all that it needs to run.
	work=$(mktemp -d)
	trap 'rm -rf "$work"' EXIT
	trap 'exit 1' INT TERM
	packages=$(apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces \
		--no-enhances dnsmasq-base | grep -E '^(lib|dnsmasq-base$)' | grep -vE '^lib(elogind0|debian-installer4)$' | sort -u)
	# shellcheck disable=SC2086 # several words
	(cd "$work" && apt-get -o APT::Sandbox::User=root download $packages)
	for deb in "$work"/*.deb; do
		dpkg -x "$deb" "$root"
	done
	mkdir -p "$root/etc" "$root/tmp" "$root/proc" "$root/dev"
	chmod 1777 "$root/tmp"
	echo 'root:x:0:0:root:/:/usr/sbin/nologin' >"$root/etc/passwd"
	echo 'root:x:0:' >"$root/etc/group"
fi

# The user is a number, so that runAsNonRoot of Kubernetes can tell.
echo 'nanny:x:65532:65532:CoreDNS:/:/usr/sbin/nologin' >>"$root/etc/passwd"
echo 'nanny:x:65532:' >>"$root/etc/group"
mkdir -p "$root/etc/coredns" "$root/usr/bin"
install -m 755 "$coredns" "$root/usr/bin/coredns"
# For port 53. The container's bounding set has to have it, or the kernel doesn't start the program.
setcap cap_net_bind_service=+ep "$root/usr/bin/coredns"

#!/bin/sh
# Starts the image's root directory as a container engine does: read-only, as user 65532, with no capability but
# NET_BIND_SERVICE, in a network of its own. Asks it, changes its configuration and stops it. Needs root.
# Usage: imagetest.sh [COREDNS]
set -eu
cd "$(dirname "$0")/.."

if [ "${1:-}" != inside ]; then
	coredns=$(realpath "${1:-bin/coredns}")
	work=$(mktemp -d)
	trap 'rm -rf "$work"' EXIT
	trap 'exit 1' INT TERM
	chmod 755 "$work"
	scripts/image.sh "$work/root" "$coredns" >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
	unshare --mount --propagation private --net scripts/imagetest.sh inside "$work"
	exit
fi

work=$2
root=$work/root
pid=

fail() {
	echo "$0: $*" >&2
	cat "$work/log" >&2
	[ -z "$pid" ] || kill -KILL "$pid" || true
	exit 1
}

# waits COMMAND...: until it succeeds, for 10 s at most.
waits() {
	i=0
	until "$@"; do
		i=$((i + 1))
		[ "$i" -lt 100 ] || fail "not within 10 s: $*"
		[ -d "/proc/$pid" ] || fail "CoreDNS has ended"
		sleep 0.1
	done
}

# says NAME ADDRESS: whether that is the answer.
says() { [ "$(dig @127.0.0.1 -p "$port" +time=1 +tries=1 +short "$1")" = "$2" ]; }

# run PORT ARGUMENT...: starts CoreDNS with the arguments for capsh.
run() {
	port=$1
	shift
	cat >"$work/etc/Corefile" <<COREFILE
.:$port {
    bind 127.0.0.1
    errors
    ready 127.0.0.1:8181
    nanny {
        config /config
        args --no-resolv --no-hosts
    }
}
COREFILE
	echo 'address=/a.example/192.0.2.1' >"$work/config/a.conf"
	rm -f "$work/config/b.conf"
	capsh --chroot="$root" --drop="$drop" --gid=65532 --groups= --uid=65532 "$@" \
		--shell=/usr/bin/coredns -- -conf /etc/coredns/Corefile >"$work/log" 2>&1 &
	pid=$!
}

# stop ends CoreDNS; nothing of it may be left.
stop() {
	kill "$pid"
	wait "$pid" || fail "it ended with status $?"
	set -- "$root"/tmp/*
	[ ! -e "$1" ] || fail "left in /tmp: $*"
}

ip link set lo up
mkdir "$work/config" "$work/etc" "$root/config"
chmod 755 "$work/config" "$work/etc"
mount --bind "$root" "$root"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for d in null urandom; do
	touch "$root/dev/$d"
	mount --bind "/dev/$d" "$root/dev/$d"
done
mount -t proc proc "$root/proc"
mount --bind "$work/config" "$root/config"
mount --bind "$work/etc" "$root/etc/coredns"
mount -o remount,bind,ro "$root"
drop=$(capsh --print | sed -n 's/^Bounding set =//p' | tr , '\n' | grep -vx cap_net_bind_service | paste -sd ,)

# As deploy/kubernetes has it: no new privileges, so the file's capability isn't given, and port 1053.
# Then port 53 with the file's capability.
for how in '1053 --no-new-privs' 53; do
	run $how
	waits says a.example 192.0.2.1
	grep -q '^Uid:.65532.65532.65532.65532$' "/proc/$pid/status" || fail "it isn't user 65532"
	! touch "$root/usr/x" 2>/dev/null || fail "the root directory can be written"
	echo 'address=/b.example/192.0.2.2' >"$work/config/b.conf"
	waits says b.example 192.0.2.2
	stop
	echo "image: port ${how%% *} answers, applies a change and stops"
done

# Without the capability in the bounding set the kernel refuses the program: the manifests have to add it.
drop=$drop,cap_net_bind_service
run 1053 --no-new-privs
! wait "$pid" || fail "it starts without NET_BIND_SERVICE"
echo "image: doesn't start without NET_BIND_SERVICE, as said"

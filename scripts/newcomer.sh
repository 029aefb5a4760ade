#!/bin/sh
# Does what README.md tells a newcomer, as it is written there: in a fresh clone, `make run` and the commands shown at its
# top, whose output has to be the one shown, and in CoreDNS's source the commands of Compilation.
set -eu
cd "$(dirname "$0")/.."

repo=$PWD
module=github.com/coredns/nanny
work=$(mktemp -d)
pid=
version=v0.0.0-$(date -u +%Y%m%d%H%M%S)-newcomer0000
cache=$(go env GOMODCACHE)
trap 'if [ -n "$pid" ]; then kill -- "-$pid" && wait "$pid" || true; fi
	set -- "$work" "$cache/$module@$version" "$cache/cache/download/$module/@v/$version".*
	for path; do if [ -e "$path" ]; then chmod -R u+w "$path" && rm -rf "$path"; fi; done' EXIT
trap 'exit 1' INT TERM

fail() {
	echo "$0: $*" >&2
	exit 1
}

# The checkout may be another user's.
export GIT_CONFIG_GLOBAL="$work/gitconfig"
git config --global safe.directory '*'
git clone --quiet "$repo" "$work/clone"
cd "$work/clone"

# shown HEADING LANGUAGE: the blocks below a heading, or those before the first one.
shown() {
	awk -v heading="$1" -v start="~~~ $2" '
		/^## / { section = $0 }
		section != heading { next }
		$0 == "~~~" { on = 0 }
		on { print }
		$0 == start { on = 1 }' README.md
}

# mask hides what differs from run to run.
mask() { sed -E 's/pid=[0-9]+/pid=N/; s/took=[0-9.]+s/took=Ns/'; }

# shellcheck disable=SC2016 # these are the README's backquotes
grep -q '`make run`' README.md || fail "the README doesn't say \`make run\`"
setsid make run >"$work/log" 2>&1 &
pid=$!
i=0
until grep -q 'plugin/nanny: Configuration applied' "$work/log"; do
	i=$((i + 1))
	[ "$i" -lt 3000 ] && kill -0 "$pid" || { cat "$work/log" >&2; fail "make run doesn't come to serve"; }
	sleep 0.1
done

# Runs what begins with "$ " and compares what it prints with the lines below. A change takes a moment to be in service:
# for 15 s it is asked again. Other lines are the log's.
shown '' txt >"$work/shown"
awk -v dir="$work" '
	/^\$ / { n++; print substr($0, 3) >(dir "/command." n); printf "" >(dir "/want." n); out = dir "/want." n; next }
	/^\[/ { out = dir "/want.log" }
	/./ { print >out }' "$work/shown"
n=1
while [ -f "$work/command.$n" ]; do
	command=$(cat "$work/command.$n")
	i=0
	while :; do
		sh -c "$command" >"$work/got" 2>&1 || fail "$command: $(cat "$work/got")"
		cmp -s "$work/want.$n" "$work/got" && break
		i=$((i + 1))
		case $command in *'>>'*) i=150 ;; esac # not twice
		[ "$i" -lt 150 ] || { diff "$work/want.$n" "$work/got" >&2 || true; fail "$command: not what the README shows"; }
		sleep 0.1
	done
	echo "as shown: $command"
	n=$((n + 1))
done
[ "$n" -gt 1 ] || fail 'the README shows no command'
mask <"$work/want.log" | while read -r line; do
	i=0
	until mask <"$work/log" | grep -qxF "$line"; do
		i=$((i + 1))
		[ "$i" -lt 150 ] || { cat "$work/log" >&2; fail "not in the log: $line"; }
		sleep 0.1
	done
	echo "as shown: $line"
done
kill -- "-$pid"
wait "$pid" || true
pid=

# Compilation, for the CoreDNS that go.mod names. A proxy of one module has what `go get` would get: a version of its own,
# as the module cache would keep it for the next run.
proxy=$work/proxy/$module/@v
mkdir -p "$proxy"
echo "$version" >"$proxy/list"
echo "{\"Version\": \"$version\"}" >"$proxy/$version.info"
cp go.mod "$proxy/$version.mod"
git archive --format=zip --prefix="$module@$version/" -o "$proxy/$version.zip" HEAD . ':!cmd/coredns' ':!deploy/kubernetes'
line=$(shown '## Compilation' txt)
shown '## Compilation' sh >"$work/commands"
[ -n "$line" ] && [ -s "$work/commands" ] || fail 'Compilation has no commands'

go mod download github.com/coredns/coredns
cp -R "$(go list -m -f '{{.Dir}}' github.com/coredns/coredns)" "$work/coredns"
cd "$work/coredns"
chmod -R u+w .
awk -v line="$line" '/^forward:/ { print line } { print }' plugin.cfg >plugin.cfg.new
mv plugin.cfg.new plugin.cfg
GOPROXY="file://$work/proxy,$(go env GOPROXY)" GONOSUMDB=$module sh -ex "$work/commands"
./coredns -plugins | grep -qx nanny || fail 'the CoreDNS built from plugin.cfg has no plugin nanny'
echo "as shown: $(./coredns -version | head -n 1) has nanny"

#!/bin/sh
# Writes the manual page, README.md from Name on, to standard output. A table is too wide for a terminal: each of its rows
# becomes an item of a list.
set -eu
cd "$(dirname "$0")/.."

printf '%s\n' '.\" Made from README.md by `make man`.'
{
	echo '% "COREDNS-NANNY" "7" "" "CoreDNS" "CoreDNS Plugins"'
	echo
	sed -n '/^## Name$/,$p' README.md | sed -e '/^<!--/d' -e '/^!\[/d' -e 's/^##/#/'
} | awk -F ' *[|] *' '
	/^~~~/ { code = !code }
	code || !/^[|]/ { print; rows = 0; next }
	{ rows++ }
	rows == 1 { split($0, head) }
	rows > 2 {
		item = "* " $2 ":"
		for (i = 3; i < NF; i++)
			if ($i != "" && $i != "-")
				item = item (NF == 4 ? " " $i : (item ~ /:$/ ? " " : "; ") head[i] ": " $i)
		print item
	}' | go run github.com/cpuguy83/go-md2man/v2@v2.0.7

#!/bin/sh
# Runs bin/coredns with the example configuration in the foreground; Ctrl-C ends it.
set -eu
cd "$(dirname "$0")/.."

cat <<'TEXT'
CoreDNS with nanny listens on port 1053. Try in another terminal:

  dig @127.0.0.1 -p 1053 +short printer.home.example
  dig @127.0.0.1 -p 1053 +short ads.example

Then edit a file in examples/config (add a line to names.hosts, say) and ask again: the change is
in service at once, and this log says how it was applied.

TEXT
exec bin/coredns -conf examples/Corefile

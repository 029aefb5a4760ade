// Command coredns is CoreDNS with every stock plugin and nanny, which stands just before forward.
package main

import (
	"log"
	"slices"

	"github.com/coredns/coredns/core/dnsserver"
	_ "github.com/coredns/coredns/core/plugin" // every stock plugin
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/nanny"
)

// next is the plugin that nanny stands before.
const next = "forward"

func init() {
	i := slices.Index(dnsserver.Directives, next)
	if i < 0 {
		log.Fatalf("no place for nanny: this CoreDNS has no plugin %q", next)
	}
	dnsserver.Directives = slices.Insert(dnsserver.Directives, i, "nanny")
}

func main() { coremain.Run() }

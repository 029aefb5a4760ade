package main

import (
	"slices"
	"testing"

	"github.com/coredns/caddy"
	"github.com/coredns/coredns/core/dnsserver"
)

func TestNannyStandsBeforeForward(t *testing.T) {
	i := slices.Index(dnsserver.Directives, "nanny")
	if i < 0 {
		t.Fatalf("nanny isn't among the directives %q", dnsserver.Directives)
	}
	if got := dnsserver.Directives[i+1]; got != "forward" {
		t.Errorf("after nanny comes %q, want %q", got, "forward")
	}
	if _, err := caddy.DirectiveAction("dns", "nanny"); err != nil {
		t.Errorf("nanny has a place but isn't registered: %v", err)
	}
}

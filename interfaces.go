package nanny

import (
	"fmt"
	"net"
	"path/filepath"
	"strings"
)

// absentError is an interface that isn't there. dnsmasq ends at it, but it may still come, as at a router's start.
type absentError struct{ error }

// Unwrap returns the reason.
func (e *absentError) Unwrap() error { return e.error }

// findInterfaces gives the `interface` lines of the watched directory.
func findInterfaces(ds []directive) (named []directive) {
	for _, d := range ds {
		if d.name == "interface" && d.watched() {
			named = append(named, d)
		}
	}
	return named
}

// absent returns an *absentError for the first interface of c that the system doesn't have, or that has no address,
// which is the same to dnsmasq. Patterns and labels (`eth*`, `eth0:1`) are left to dnsmasq.
func (c *config) absent(dir string) error {
	for _, d := range c.interfaces {
		for name := range strings.SplitSeq(d.value, ",") {
			if name = strings.TrimSpace(name); name == "" || strings.ContainsAny(name, "*:") {
				continue
			}
			what := "there is no interface"
			if i, err := net.InterfaceByName(name); err == nil {
				if addrs, err := i.Addrs(); err != nil || len(addrs) > 0 {
					continue
				}
				what = "no address on interface"
			}
			return &absentError{fmt.Errorf("%s: %s %q yet; it is tried again when there is", filepath.Join(dir, d.at()), what, name)}
		}
	}
	return nil
}

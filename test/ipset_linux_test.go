package test

import (
	"strings"
	"testing"
)

// TestIpset: what CoreDNS's clients resolve is in the set, after a change, too.
func TestIpset(t *testing.T) {
	t.Parallel()
	needs(t, "nsenter", "unshare", "ip", "ipset")
	n := newNetns(t, "lo")
	n.run(t, "ip", "address", "add", routerAddr+"/32", "dev", "lo")
	n.run(t, "ipset", "create", "allow4", "hash:ip")
	upstream := n.upstream(t, "--address=/updates.example/192.0.2.80", "--address=/other.example/192.0.2.81")

	dir := tempDir(t)
	put(t, dir, "a.conf", "no-resolv\nno-hosts\nserver="+upstream+"\nipset=/updates.example/allow4\n")
	c := n.startNanny(t, routerAddr, dir)
	c.logs.wait(t, 0, "Configuration applied")
	set := func() string { return n.run(t, "ipset", "list", "allow4") }
	n.fills(t, c, set, func() { put(t, dir, "more.conf", "ipset=/other.example/allow4\n") })
}

// fills checks that what CoreDNS's clients resolve below updates.example, and nothing else, is in the set of IPv4 addresses,
// and what is below other.example after change, which adds more.conf: the dnsmasq that follows may fill it, too.
func (n *netns) fills(t *testing.T, c *coreDNS, set func() string, change func()) {
	t.Helper()
	for _, name := range []string{"www.updates.example", "other.example"} {
		if got := n.says(t, "udp", routerAddr+":53", name); !strings.HasPrefix(got, "192.0.2.8") {
			t.Errorf("%s: got %s", name, got)
		}
	}
	if got := set(); !strings.Contains(got, "192.0.2.80") || strings.Contains(got, "192.0.2.81") {
		t.Errorf("got %s, want 192.0.2.80 alone", got)
	}
	change()
	c.logs.wait(t, 0, "Configuration applied", "+more.conf")
	within(t, patience, "192.0.2.81 is in the set", func() bool {
		n.says(t, "udp", routerAddr+":53", "other.example")
		return strings.Contains(set(), "192.0.2.81")
	})
}

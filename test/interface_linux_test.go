package test

import (
	"strings"
	"testing"
	"time"
)

// TestInterfaceComes: what names an interface that isn't there is refused, once, and is in service when the interface is
// there, also where that takes the place of a DHCP server, which goes on until then.
func TestInterfaceComes(t *testing.T) {
	t.Parallel()
	needs(t, "nsenter", "unshare", "ip")
	n := newNetns(t, "late0")
	dir := tempDir(t)
	put(t, dir, "a.conf", "no-resolv\nno-hosts\naddress=/a.example/192.0.2.80\ninterface=late0\n")
	c := n.startNanny(t, "127.0.0.1", dir+" 300ms")
	add := func(name, address string) {
		n.run(t, "sh", "-c", "ip link add "+name+" type veth peer name "+name+"p && ip link set "+name+" up")
		n.run(t, "ip", "address", "add", address, "dev", name)
	}
	refused := func(mark int, file, name string) {
		t.Helper()
		c.logs.wait(t, mark, "[ERROR]", "Configuration rejected", dir+"/"+file+":4: there is no interface \""+name+"\"")
	}
	refused(0, "a.conf", "late0")
	add("late0", "192.0.2.1/24")
	n.waits(t, "a.example", "192.0.2.80")

	put(t, dir, "a.conf", "no-resolv\nno-hosts\naddress=/a.example/192.0.2.81\ninterface=late0\ndhcp-range=192.0.2.100,192.0.2.200\n")
	n.waits(t, "a.example", "192.0.2.81")
	within(t, patience, "one dnsmasq", func() bool { return len(c.services()) == 1 })
	child, mark := c.services()[0].pid, c.logs.mark()
	put(t, dir, "b.conf", "address=/b.example/192.0.2.82\n\n\ninterface=later0\n")
	refused(mark, "b.conf", "later0")
	n.waits(t, "a.example", "192.0.2.81")
	for begin := time.Now(); time.Since(begin) < time.Second; { // three times the interval
		if now := c.services(); len(now) != 1 || now[0].pid != child {
			t.Fatalf("got %v, want pid %d alone: there is no interface yet", now, child)
		}
	}
	add("later0", "198.51.100.1/24")
	n.waits(t, "b.example", "192.0.2.82")
	if errs := c.errors(mark); len(errs) != 1 || !strings.Contains(errs[0], "rejected") {
		t.Errorf("got %q, want one error", errs)
	}
}

package test

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
)

// A long list costs CoreDNS no memory once dnsmasq has it, and can be read again from what CoreDNS keeps.
func TestMemoryOfLongList(t *testing.T) {
	dir := configDir(t, map[string]string{"a.hosts": "192.0.2.1 a.example\n"})
	c := start(t, watching(dir))
	c.waits(t, "a.example", "192.0.2.1")
	before := anonymous(t, c)
	put(t, dir, "list.conf", longList()+"address=/list.example/192.0.2.5\n")
	c.waitsFor(t, 4*patience, "list.example", "192.0.2.5")
	const grown = 8 << 10 // the list has 4 MiB, and makes some 25 of CoreDNS's
	took := within(t, patience, "the memory is given back", func() bool { return anonymous(t, c) < before+grown })
	t.Logf("%d KiB before, %d with the list, %s after it", before, anonymous(t, c), took)
	kill(t, c.child(t).pid, syscall.SIGKILL)
	c.waitsFor(t, 4*patience, "list.example", "192.0.2.5")
}

// anonymous returns the memory of CoreDNS's own, in KiB: not its program's (proc_pid_status(5)).
func anonymous(t *testing.T, c *coreDNS) (kib int) {
	t.Helper()
	status := readFile(t, fmt.Sprintf("/proc/%d/status", c.pid))
	_, rest, _ := strings.Cut(status, "RssAnon:")
	if _, err := fmt.Sscan(rest, &kib); err != nil {
		t.Fatalf("no RssAnon: %v", err)
	}
	return kib
}

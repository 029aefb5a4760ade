package test

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// reload gives c a new Corefile and waits for the outcome, a line in the log.
func (c *coreDNS) reload(t *testing.T, corefile, outcome string) {
	t.Helper()
	mark := c.logs.mark()
	c.rewrite(t, corefile)
	kill(t, c.pid, syscall.SIGUSR1)
	c.logs.wait(t, mark, outcome)
}

const (
	reloaded = "Reloading complete"
	failed   = "[ERROR] Restart failed"
)

func TestCorefileReload(t *testing.T) {
	t.Parallel()
	port := freePort(t)
	dir := configDir(t, map[string]string{"a.conf": "address=/kept.example/192.0.2.1\n"})
	block := func(address string) string { return watching(dir, "args --address=/args.example/"+address) }
	first := server(port, block("192.0.2.11"))
	c := startAs(t, port, first)
	c.waits(t, "args.example", "192.0.2.11")
	c.logs.wait(t, 0, "Configuration applied")
	load := c.loads(t, "udp", 100, "kept.example")

	t.Run("unchanged", func(t *testing.T) {
		before := c.child(t)
		for i := range 5 {
			c.reload(t, first+strings.Repeat("# a comment\n", i+1), reloaded)
			if now := c.child(t); now.pid != before.pid {
				t.Errorf("the dnsmasq with pid %d was replaced by %d", before.pid, now.pid)
			}
		}
	})
	t.Run("other settings of nanny", func(t *testing.T) {
		before := c.child(t)
		c.reload(t, server(port, watching(dir, "args --address=/args.example/192.0.2.11", "timeout 4s", "max_concurrent 5000")), reloaded)
		if now := c.child(t); now.pid != before.pid {
			t.Errorf("the dnsmasq with pid %d was replaced by %d", before.pid, now.pid)
		}
		put(t, dir, "b.conf", "address=/b.example/192.0.2.2\n")
		c.waits(t, "b.example", "192.0.2.2")
	})
	t.Run("other arguments", func(t *testing.T) {
		before := c.child(t)
		c.reload(t, server(port, block("192.0.2.12")), reloaded)
		c.waits(t, "args.example", "192.0.2.12")
		c.wants(t, "b.example", "192.0.2.2")
		if now := c.child(t); now.pid == before.pid {
			t.Error("the same dnsmasq still serves")
		}
	})
	broken := []struct{ name, corefile string }{
		{"no Corefile", "jfkdjk\n" + first},
		{"unknown property", server(port, nanny("nosuch"))},
		{"other arguments and a health port that is taken", server(port, block("192.0.2.13")+fmt.Sprintf("\nhealth 127.0.0.1:%d", takenPort(t)))},
		{"other arguments and a DNS port that is taken", server(port, block("192.0.2.14")) + server(takenPort(t), "whoami")},
		{"arguments that dnsmasq refuses", server(port, block("192.0.2.999"))},
		{"a dnsmasq that ends at once", server(port, nanny("exec "+script(t, "exit 1")))},
	}
	for _, tt := range broken {
		t.Run(tt.name, func(t *testing.T) {
			before := c.child(t)
			c.reload(t, tt.corefile, failed)
			if now := c.child(t); now.pid != before.pid {
				t.Errorf("the dnsmasq with pid %d was replaced by %d", before.pid, now.pid)
			}
			c.wants(t, "args.example", "192.0.2.12")
			put(t, dir, "c.conf", "# "+tt.name+"\naddress=/c.example/192.0.2.3\n")
			c.waits(t, "c.example", "192.0.2.3")
			remove(t, dir, "c.conf")
			c.waits(t, "c.example", "REFUSED")
		})
	}
	t.Run("metrics port that is taken", func(t *testing.T) {
		// CoreDNS 1.15 takes that over without its metrics.
		before := c.child(t)
		c.reload(t, server(port, block("192.0.2.12")+fmt.Sprintf("\nprometheus 127.0.0.1:%d", takenPort(t))), "eload")
		if now := c.child(t); now.pid != before.pid {
			t.Errorf("the dnsmasq with pid %d was replaced by %d", before.pid, now.pid)
		}
		c.wants(t, "args.example", "192.0.2.12")
	})
	t.Run("mended", func(t *testing.T) {
		c.reload(t, server(port, block("192.0.2.15")), reloaded)
		c.waits(t, "args.example", "192.0.2.15")
		c.child(t)
	})
	flawless(t, load)
	c.stagesOnly(t, 1)
	t.Run("nanny removed", func(t *testing.T) {
		c.reload(t, server(port, "whoami"), reloaded)
		within(t, patience, "no dnsmasq", func() bool { return len(c.children()) == 0 })
		c.stagesOnly(t, 0)
	})
}

func TestCorefileReloadFixedAddress(t *testing.T) {
	t.Parallel()
	port := freePort(t)
	one, two := freePort(t), freePort(t)
	corefile := func(listen int, address string) string {
		return server(port, nanny(fmt.Sprintf("listen 127.0.0.1:%d", listen), "args --no-resolv --no-hosts --address=/kept.example/192.0.2.1 --address=/args.example/"+address))
	}
	c := startAs(t, port, corefile(one, "192.0.2.11"))
	c.waits(t, "args.example", "192.0.2.11")
	load := c.loads(t, "udp", 100, "kept.example")
	c.reload(t, corefile(one, "192.0.2.12"), reloaded)
	c.waits(t, "args.example", "192.0.2.12")
	c.child(t)
	c.reload(t, corefile(two, "192.0.2.12"), reloaded)
	within(t, patience, "dnsmasq at the new address", func() bool {
		list := c.services()
		return len(list) == 1 && list[0].addr() == fmt.Sprintf("127.0.0.1:%d", two)
	})
	c.waits(t, "args.example", "192.0.2.12")
	flawless(t, load)
}

func TestSharedChild(t *testing.T) {
	t.Parallel()
	a, b := freePort(t), freePort(t)
	block := nanny("args --no-resolv --no-hosts --address=/kept.example/192.0.2.1")
	for _, tt := range []struct {
		name, corefile string
	}{
		{"several keys of one block", fmt.Sprintf("kept.example:%d other.example:%d {\nbind 127.0.0.1\nerrors\n%s\n}\n", a, a, block)},
		{"several ports of one block", fmt.Sprintf(".:%d .:%d {\nbind 127.0.0.1\nerrors\n%s\n}\n", a, b, block)},
		{"equal blocks", server(a, block) + server(b, block)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := startAs(t, a, tt.corefile)
			c.wants(t, "kept.example", "192.0.2.1")
			if strings.Contains(tt.corefile, fmt.Sprint(b)) {
				if got := says("udp", fmt.Sprintf("127.0.0.1:%d", b), "kept.example"); got != "192.0.2.1" {
					t.Errorf("at the second port: got %s, want 192.0.2.1", got)
				}
			}
			if list := c.services(); len(list) != 1 {
				t.Errorf("%d dnsmasq, want 1: %v", len(list), list)
			}
			if err := c.end(syscall.SIGTERM); err != nil {
				t.Error(err)
			}
		})
	}
}

// A dnsmasq whose upstream is CoreDNS itself is found and doesn't multiply queries.
func TestLoop(t *testing.T) {
	t.Parallel()
	port := freePort(t)
	corefile := server(port, "log\n"+nanny(fmt.Sprintf("args --no-resolv --no-hosts --address=/kept.example/192.0.2.1 \"--server=127.0.0.1#%d\"", port), "timeout 2s"))
	c := startAs(t, port, corefile)
	c.waits(t, "kept.example", "192.0.2.1")
	t.Run("said", func(t *testing.T) {
		c.logs.wait(t, 0, "[ERROR]", "forwards to this CoreDNS", "--server=")
	})
	t.Run("doesn't multiply", func(t *testing.T) {
		for _, network := range []string{"udp", "tcp"} {
			mark := c.logs.mark()
			begin := time.Now()
			got := says(network, c.addr(), network+".example.org")
			if got != "REFUSED" {
				t.Errorf("over %s: got %s after %s, want REFUSED", network, got, time.Since(begin))
			}
			if lines := c.logs.lines(mark, network+".example.org."); len(lines) > 10 {
				t.Errorf("%d lines in the log for one query over %s, want a few", len(lines), network)
			}
		}
		c.wants(t, "kept.example", "192.0.2.1")
		if lines := c.logs.lines(0, "[ERROR]", "forwards to this CoreDNS"); len(lines) != 1 {
			t.Errorf("said %d times, want once", len(lines))
		}
	})
	if list := c.services(); slices.ContainsFunc(list, func(p process) bool { return !alive(p.pid) }) || len(list) != 1 {
		t.Errorf("dnsmasq processes %v, want one", list)
	}
}

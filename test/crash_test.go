package test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestHung(t *testing.T) {
	t.Parallel()
	fixed := freePort(t)
	for _, tt := range []struct{ name, property string }{
		{"free port", "timeout 5s"},
		{"fixed address, held by a client's connection too", fmt.Sprintf("listen 127.0.0.1:%d", fixed)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			dir := configDir(t, map[string]string{"a.conf": "address=/kept.example/192.0.2.1\n"})
			c := start(t, watching(dir, tt.property))
			c.waits(t, "kept.example", "192.0.2.1")
			old := c.child(t)
			idleTCP(t, old.addr(), "kept.example")
			load := c.loads(t, "udp", 100, "kept.example")
			mark := c.logs.mark()
			kill(t, old.pid, syscall.SIGSTOP)
			c.logs.wait(t, mark, "[ERROR]", "answers nothing")
			c.logs.wait(t, mark, "dnsmasq started")
			if now := c.child(t); now.pid == old.pid {
				t.Error("the stopped dnsmasq still serves")
			}
			flawless(t, load)
			c.wants(t, "kept.example", "192.0.2.1")
			within(t, goneTime, "nothing left of the stopped one", func() bool { return len(c.children()) == 1 })
		})
	}
	t.Run("changed while stopped", func(t *testing.T) {
		t.Parallel()
		dir := configDir(t, map[string]string{"a.conf": "address=/kept.example/192.0.2.1\n"})
		c := start(t, watching(dir, fmt.Sprintf("listen 127.0.0.1:%d", freePort(t))))
		c.waits(t, "kept.example", "192.0.2.1")
		old := c.child(t)
		idleTCP(t, old.addr(), "kept.example")
		kill(t, old.pid, syscall.SIGSTOP)
		put(t, dir, "a.conf", "address=/kept.example/192.0.2.2\n")
		c.waits(t, "kept.example", "192.0.2.2")
		within(t, goneTime, "nothing left of the stopped one", func() bool { return len(c.children()) == 1 })
	})
}

// A dnsmasq that can't be kept running costs little, and each query is answered within its timeout.
func TestNeverRunning(t *testing.T) {
	t.Parallel()
	const line = "dnsmasq: cannot do this"
	c := start(t, nanny("exec "+script(t, "echo '"+line+"' >&2\nexit 3"), "timeout 1s"))
	c.logs.wait(t, 0, "[ERROR]", "can't be started", "status 3", "cannot do this")
	before := stat(c.pid).cpu
	begin := time.Now()
	load := c.loads(t, "udp", 300, "kept.example")
	time.Sleep(4 * time.Second)
	load.end()
	used, span := stat(c.pid).cpu-before, time.Since(begin)
	t.Logf("%s of CPU in %s, %v, longest wait %s", used, span, load.results, load.longest)
	if used > span/2 {
		t.Errorf("CoreDNS used %s of CPU in %s, want less than half", used, span)
	}
	if excused := min(udpDrops(t, c.port)-load.drops, load.lost); load.results["SERVFAIL"]+excused != load.sent {
		t.Errorf("got %v of %d queries, of which %d were dropped before CoreDNS; want SERVFAIL for all", load.results, load.sent, excused)
	}
	if lines := c.logs.lines(0, "can't be started"); len(lines) > 30 {
		t.Errorf("%d starts in %s, want backoff", len(lines), span)
	}
	endsQuickly(t, c)
}

// endsQuickly ends c with SIGTERM.
func endsQuickly(t *testing.T, c *coreDNS) {
	t.Helper()
	begin := time.Now()
	if err := c.end(syscall.SIGTERM); err != nil {
		t.Error(err)
	}
	if took := time.Since(begin); took > 8*time.Second {
		t.Errorf("CoreDNS took %s to end", took)
	}
}

func TestStartErrors(t *testing.T) {
	t.Parallel()
	plain := filepath.Join(tempDir(t), "plain")
	if err := os.WriteFile(plain, []byte("#!/bin/sh\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name, block string
		want        []string
	}{
		{"no such program", nanny("exec /nosuch/dnsmasq"), []string{"/nosuch/dnsmasq", "package dnsmasq"}},
		{"no such program in the path", nanny("exec nosuch-dnsmasq"), []string{"nosuch-dnsmasq", "package dnsmasq"}},
		{"not executable", nanny("exec " + plain), []string{plain, "can't be executed"}},
		{"a setting of nanny's own", nanny("args --no-resolv --port=53"), []string{"Corefile:5", "port"}},
		{"unknown property", nanny("nosuch"), []string{"Corefile:5", "nosuch"}},
		{"no parent directory", nanny("config /nosuch/parent/config"), []string{"Corefile:5", "/nosuch/parent"}},
		{"one address for two", "nanny a.example {\nlisten 127.0.0.1:1\nargs --no-resolv\n}\nnanny b.example {\nlisten 127.0.0.1:1\n}",
			[]string{"Corefile:8", "Corefile:4", "127.0.0.1:1"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			port := freePort(t)
			c := launch(t, port, server(port, tt.block))
			within(t, patience, "CoreDNS's end", c.ended)
			if c.err == nil {
				t.Error("CoreDNS ended without an error")
			}
			text := strings.Join(c.logs.lines(0), "\n")
			for _, want := range tt.want {
				if !strings.Contains(text, want) {
					t.Errorf("got %q, want %q in it", text, want)
				}
			}
		})
	}
	t.Run("ends at once", func(t *testing.T) {
		t.Parallel()
		c := start(t, nanny("exec "+script(t, "echo nothing to do\nexit 0")))
		c.logs.wait(t, 0, "[ERROR]", "can't be started", "status 0", "nothing to do")
		endsQuickly(t, c)
	})
	t.Run("never ready", func(t *testing.T) {
		t.Parallel()
		c := start(t, nanny("exec "+script(t, "sleep 600")))
		within(t, 3*patience, "the error", func() bool {
			return len(c.logs.lines(0, "[ERROR]", "doesn't answer on 127.0.0.1:")) > 0
		})
		endsQuickly(t, c)
	})
	t.Run("ended while not ready", func(t *testing.T) {
		t.Parallel()
		c := start(t, nanny("exec "+script(t, "sleep 600")))
		within(t, patience, "the program runs", func() bool { return len(c.services()) == 1 })
		endsQuickly(t, c)
	})
	t.Run("its port is taken twice", func(t *testing.T) {
		t.Parallel()
		tries, monitor := filepath.Join(tempDir(t), "tries"), freePort(t)
		c := start(t, fmt.Sprintf("prometheus 127.0.0.1:%d\n", monitor)+nanny("args --no-resolv --no-hosts --address=/kept.example/192.0.2.1",
			"exec "+script(t, `echo x >>`+tries+`
if [ $(wc -l <`+tries+`) -lt 3 ]; then
	echo "dnsmasq: failed to create listening socket for 127.0.0.1: Address already in use" >&2
	exit 2
fi
exec `+dnsmasqPath(t)+` "$@"
`)))
		c.waits(t, "kept.example", "192.0.2.1")
		if n := scrape(t, monitor)[`starts_total{reason="initial",zones="."}`]; n != 1 {
			t.Errorf("%v starts, want 1: another port is no other start", n)
		}
		if got := readFile(t, tries); got != "x\nx\nx\n" {
			t.Errorf("dnsmasq was run %d times, want 3", len(got)/2)
		}
	})
	t.Run("its last lines are logged", func(t *testing.T) {
		t.Parallel()
		c := start(t, nanny("exec "+script(t, `i=0
while [ $i -lt 5000 ]; do echo "dnsmasq[$$]: line $$ $i"; i=$((i+1)); done
printf 'dnsmasq: bad option at line 3 of %s' $$
exit 1`)))
		line := c.logs.wait(t, 0, "[ERROR]", "can't be started")
		_, after, _ := strings.Cut(line, "bad option at line 3 of ")
		pid := strings.Fields(after + " -")[0]
		within(t, patience, "all lines", func() bool {
			return len(c.logs.lines(0, "dnsmasq: line "+pid+" ")) == 5000 && len(c.logs.lines(0, "plugin/nanny: dnsmasq: bad option at line 3 of "+pid)) == 1
		})
	})
}

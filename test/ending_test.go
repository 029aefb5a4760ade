package test

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// goneTime is how long after CoreDNS's end a dnsmasq may be there. By design it is 1 s; the machine may be busy.
const goneTime = 3 * time.Second

// However CoreDNS ends, whoever it runs as and whoever is connected, no dnsmasq is left.
func TestEnd(t *testing.T) {
	t.Parallel()
	for _, u := range users() {
		for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGKILL} {
			t.Run(fmt.Sprintf("%s as %s", sig, u.name), func(t *testing.T) {
				t.Parallel()
				port := freePort(t)
				dir := configDir(t, map[string]string{"a.conf": "address=/kept.example/192.0.2.1\n"})
				c := startAs(t, port, server(port, watching(dir)), u.wrap...)
				c.waits(t, "kept.example", "192.0.2.1")
				idleTCP(t, c.child(t).addr(), "kept.example")
				idleTCP(t, c.addr(), "kept.example")
				if n := len(c.children()); n < 2 {
					t.Fatalf("%d dnsmasq processes, want one more for the TCP client", n)
				}

				begin := time.Now()
				if err := c.end(sig); err != nil {
					t.Fatal(err)
				}
				ended := time.Since(begin)
				gone := within(t, goneTime, "no dnsmasq left", func() bool { return len(c.children()) == 0 })
				t.Logf("CoreDNS ended after %s, dnsmasq was gone %s later", ended, gone)
				if left := c.staged(t); len(left) > 0 && (sig == syscall.SIGTERM || sig == syscall.SIGINT) {
					t.Errorf("staging left: %q", left)
				}
			})
		}
	}
}

// A CoreDNS that fails at its start calls none of nanny's hooks.
func TestFailedStartLeavesNothing(t *testing.T) {
	t.Parallel()
	for _, u := range users() {
		t.Run(u.name, func(t *testing.T) {
			t.Parallel()
			port, taken := freePort(t), takenPort(t)
			dir := configDir(t, map[string]string{"a.conf": "address=/kept.example/192.0.2.1\n"})
			c := launch(t, port, server(port, watching(dir))+server(taken, "whoami"), u.wrap...)
			within(t, patience, "CoreDNS's end", c.ended)
			if c.err == nil {
				t.Error("CoreDNS ended without an error")
			}
			within(t, goneTime, "no dnsmasq left", func() bool { return len(c.children()) == 0 })
		})
	}
}

// Processes that the program starts are ended with it, even when they keep its output open.
func TestEndOfPrograms(t *testing.T) {
	t.Parallel()
	pidFile := filepath.Join(tempDir(t), "pid")
	for _, tt := range []struct{ name, text string }{
		{"with a process in the background", "sleep 600 & echo $! >" + pidFile + "\nexec " + dnsmasqPath(t) + ` "$@"`},
		{"that ignores SIGTERM", "trap '' TERM\n" + dnsmasqPath(t) + ` "$@" & echo $! >` + pidFile + "\nwhile :; do sleep 1; done"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			os.Remove(pidFile)
			c := start(t, nanny("exec "+script(t, tt.text), "args --no-resolv --no-hosts --address=/kept.example/192.0.2.1"))
			c.waits(t, "kept.example", "192.0.2.1")
			pid := 0
			within(t, patience, "the second process has said its pid", func() bool {
				data, _ := os.ReadFile(pidFile)
				pid, _ = strconv.Atoi(strings.TrimSpace(string(data)))
				return pid > 0
			})
			if !alive(pid) {
				t.Fatal("the second process doesn't run")
			}
			begin := time.Now()
			if err := c.end(syscall.SIGTERM); err != nil {
				t.Error(err)
			}
			t.Logf("CoreDNS ended after %s", time.Since(begin))
			if took := time.Since(begin); took > 10*time.Second {
				t.Errorf("CoreDNS took %s to end, want 3 s and a little", took)
			}
			within(t, goneTime, "its second process is gone", func() bool { return !alive(pid) })
		})
	}
}

package test

import (
	"flag"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

var full = flag.Bool("full", false, "TestEvents makes each event as often as it is promised, not a tenth of that, at 2,000 queries/s over UDP and 200 over TCP")

// TestEvents makes one kind of event after the other under load, again and again: no query may get anything but its answer.
// It is alone, as it counts what gets lost. The longest wait of each kind is printed.
func TestEvents(t *testing.T) {
	rate, share := 300, 10
	if *full {
		rate, share = 2000, 1
	}
	port, fixedPort, monitor := freePort(t), freePort(t), freePort(t)
	dir := configDir(t, map[string]string{"a.conf": "address=/kept.example/192.0.2.1\n"})
	fixedDir := configDir(t, map[string]string{"a.conf": "address=/kept.example/192.0.2.1\n", "n.hosts": "192.0.2.1 h.example\n"})
	listen := fmt.Sprintf("127.0.0.1:%d", freePort(t))
	fixed := server(fixedPort, watching(fixedDir, "listen "+listen))
	corefile := func(properties ...string) string {
		return server(port, fmt.Sprintf("prometheus 127.0.0.1:%d\n", monitor)+watching(dir, properties...)) + fixed
	}
	args := func(n int) string { return fmt.Sprintf("args --address=/args.example/192.0.2.%d", n) }
	c := startAs(t, port, corefile(args(0)))
	c.waits(t, "kept.example", "192.0.2.1")
	inPlace := c.at(fixedPort)
	inPlace.waits(t, "kept.example", "192.0.2.1")

	// serving is the dnsmasq that can be swapped; there is one other, on a fixed address.
	serving := func(t *testing.T) process {
		t.Helper()
		var list []process
		within(t, patience, "the one dnsmasq of each block", func() bool {
			list = c.services()
			return len(list) == 2 && answers(list[0].addr()) && answers(list[1].addr())
		})
		if list[0].addr() == listen {
			return list[1]
		}
		return list[0]
	}
	ends := func(sig syscall.Signal) func(*testing.T, int) {
		return func(t *testing.T, _ int) {
			t.Helper()
			old := serving(t)
			kill(t, old.pid, sig)
			within(t, patience, "another dnsmasq serves", func() bool { return !alive(old.pid) && serving(t).pid != old.pid })
			within(t, patience, "what waited is answered", func() bool { return scrape(t, monitor)[`inflight_requests{zones="."}`] == 0 })
		}
	}
	var took []time.Duration
	version, newest := 0, 0 // of n.example, and of args.example
	change := func(t *testing.T, c *coreDNS, in, file, line string) {
		t.Helper()
		version++
		put(t, in, file, fmt.Sprintf(line, version))
		took = append(took, c.waits(t, "n.example", fmt.Sprintf("192.0.2.%d", version)))
	}
	list := longList() + "address=/list.example/192.0.2.5\n"

	for _, event := range []struct {
		name  string
		on    *coreDNS
		times int
		do    func(t *testing.T, i int)
	}{
		{"change, one in five wrong", c, 100, func(t *testing.T, i int) {
			t.Helper()
			next := time.Now().Add(600 * time.Millisecond)
			if i%5 == 3 { // the last one is good
				mark := c.logs.mark()
				put(t, dir, "b.conf", "address=/n.example/11.0.0.999\n")
				c.logs.wait(t, mark, "[ERROR]", "Configuration rejected")
			} else {
				change(t, c, dir, "b.conf", "address=/n.example/192.0.2.%d\n")
			}
			time.Sleep(time.Until(next))
		}},
		{"SIGKILL", c, 50, ends(syscall.SIGKILL)},
		{"SIGTERM", c, 50, ends(syscall.SIGTERM)},
		{"SIGSTOP", c, 20, ends(syscall.SIGSTOP)},
		{"reload of the Corefile", c, 50, func(t *testing.T, i int) {
			t.Helper()
			old := serving(t)
			switch i % 5 {
			case 0:
				c.reload(t, corefile(args(newest))+strings.Repeat("#\n", i+1), reloaded)
			case 1:
				c.reload(t, corefile("nosuch"), failed)
			case 2: // other arguments, and a plugin that can't start
				c.reload(t, corefile(args(99))+server(takenPort(t), "whoami"), failed)
			case 3:
				c.reload(t, corefile(args(999)), failed)
			case 4:
				newest++
				c.reload(t, corefile(args(newest)), reloaded)
			}
			if replaced := serving(t).pid != old.pid; replaced != (i%5 == 4) {
				t.Errorf("reload %d: replaced: %t", i, replaced)
			}
			c.wants(t, "args.example", fmt.Sprintf("192.0.2.%d", newest))
		}},
		{"reload by the plugin *reload*", c, 10, func(t *testing.T, i int) {
			t.Helper()
			reloading := func() string {
				return strings.Replace(corefile(args(newest)), "errors\n", "errors\nreload 2s 1s\n", 1)
			}
			if i == 0 {
				c.reload(t, reloading(), reloaded)
			}
			newest++
			c.rewrite(t, reloading())
			c.waits(t, "args.example", fmt.Sprintf("192.0.2.%d", newest))
		}},
		{"110,000 lines in and out", c, 10, func(t *testing.T, _ int) {
			t.Helper()
			put(t, dir, "list.conf", list)
			c.waitsFor(t, 4*patience, "list.example", "192.0.2.5")
			remove(t, dir, "list.conf")
			c.waitsFor(t, 4*patience, "list.example", "REFUSED")
		}},
		{"change in place", inPlace, 20, func(t *testing.T, _ int) {
			t.Helper()
			change(t, inPlace, fixedDir, "b.conf", "address=/n.example/192.0.2.%d\n")
		}},
		{"change by SIGHUP", inPlace, 20, func(t *testing.T, i int) {
			t.Helper()
			if i == 0 {
				remove(t, fixedDir, "b.conf")
			}
			change(t, inPlace, fixedDir, "n.hosts", "192.0.2.%d n.example\n")
		}},
	} {
		t.Run(event.name, func(t *testing.T) {
			took = nil
			loads := []*load{event.on.loads(t, "udp", rate, "kept.example"), event.on.loads(t, "tcp", rate/10, "kept.example")}
			times := max(2, event.times/share)
			start := time.Now()
			for i := range times {
				event.do(t, i)
			}
			t.Logf("%d times in %s", times, time.Since(start).Round(time.Millisecond))
			if strings.HasPrefix(event.name, "reload") {
				loads[1].excuseReload(t)
			}
			flawless(t, loads...)
			if len(took) > 0 {
				slices.Sort(took)
				t.Logf("in service after %s, the median", took[len(took)/2])
				if took[len(took)/2] > usual {
					t.Errorf("half of the changes take longer than %s", usual)
				}
			}
		})
	}
	if got := scrape(t, monitor)[`up{zones="."}`]; got != 1 {
		t.Errorf("up is %v at the end", got)
	}
	c.stagesOnly(t, 2) // one for each block
}

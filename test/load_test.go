package test

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// longList is a configuration of 110,000 lines, which dnsmasq takes some 0.3 s to read.
func longList() string {
	var list strings.Builder
	for i := range 110000 {
		fmt.Fprintf(&list, "server=/name%d.example/192.0.2.53\n", i)
	}
	return list.String()
}

// load asks c the same question again and again, each time from a socket of its own, once, for queryWait.
type load struct {
	c       *coreDNS
	network string
	stop    chan struct{}
	drops   int
	wg      sync.WaitGroup

	mu      sync.Mutex
	sent    int
	lost    int
	results map[string]int // by the answer's RCODE, or by the reason that there was none
	longest time.Duration
}

// loads starts rate queries a second over network for the addresses of name. At the test's end it has ended.
func (c *coreDNS) loads(t *testing.T, network string, rate int, name string) *load {
	t.Helper()
	l := &load{c: c, network: network, stop: make(chan struct{}), results: map[string]int{}, drops: udpDrops(t, c.port)}
	l.wg.Go(func() {
		tick := time.NewTicker(max(time.Second/time.Duration(rate), 5*time.Millisecond))
		defer tick.Stop()
		begin, asked := time.Now(), 0
		for {
			select {
			case <-l.stop:
				return
			case <-tick.C:
			}
			// Ticks get lost on a busy machine: make up for it, but not in one burst.
			due := int(time.Since(begin).Seconds() * float64(rate))
			for range min(due-asked, 10) {
				asked++
				l.wg.Go(func() { l.ask(name) })
			}
		}
	})
	t.Cleanup(func() { l.end() })
	return l
}

func (l *load) ask(name string) {
	start := time.Now()
	r, err := exchange(l.network, l.c.addr(), question(name, dns.TypeA))
	took := time.Since(start)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sent++
	l.longest = max(l.longest, took)
	switch {
	case err != nil:
		l.lost++
		l.results[strings.ReplaceAll(reason(err), " ", "-")]++
	case r.Rcode == dns.RcodeSuccess && len(r.Answer) == 0:
		l.results["empty"]++
	default:
		l.results[dns.RcodeToString[r.Rcode]]++
	}
}

// reason is what err says without the addresses.
func reason(err error) string {
	if op := (*net.OpError)(nil); errors.As(err, &op) {
		return op.Op + ": " + op.Err.Error()
	}
	return err.Error()
}

// end ends the load and waits for the last answers.
func (l *load) end() {
	select {
	case <-l.stop:
	default:
		close(l.stop)
	}
	l.wg.Wait()
}

// excuseReload ends the load and takes from it the connections that CoreDNS itself closed at a reload of the Corefile: those
// that it had accepted and not read from yet.
func (l *load) excuseReload(t *testing.T) {
	t.Helper()
	l.end()
	for _, reason := range []string{"read:-read:-connection-reset-by-peer", "EOF"} {
		if n := l.results[reason]; n > 0 {
			t.Logf("%d connections closed by CoreDNS: %s", n, reason)
			l.sent -= n
			l.lost -= n
			delete(l.results, reason)
		}
	}
}

// flawless ends the loads of one CoreDNS and fails the test if a query got anything but its answer.
func flawless(t *testing.T, loads ...*load) {
	t.Helper()
	for _, l := range loads {
		l.end()
	}
	// What the kernel dropped before CoreDNS read it, on a busy machine, isn't nanny's.
	dropped := udpDrops(t, loads[0].c.port) - loads[0].drops
	for _, l := range loads {
		excused := 0
		if l.network == "udp" {
			excused = min(dropped, l.lost)
			dropped -= excused
		}
		summary := fmt.Sprintf("%s: %d queries, %v, longest wait %s, %d dropped before CoreDNS", l.network, l.sent, l.results, l.longest, excused)
		if good := l.results["NOERROR"]; good == 0 || good+excused != l.sent {
			t.Error(summary)
			continue
		}
		t.Log(summary)
	}
}

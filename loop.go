package nanny

import (
	"crypto/rand"
	"encoding/hex"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coredns/coredns/request"
	"github.com/miekg/dns"
)

// A loop is a dnsmasq whose upstream is this CoreDNS itself, as with a resolv.conf that says 127.0.0.1. dnsmasq's own
// guard compares ports and misses it. So nanny asks each new child for a name that nobody else can know; if the handler
// sees that name, the child forwards to CoreDNS.

const (
	loopLabel = "nanny-loop"
	loopZones = 3 // of a block that are tried
)

// loopDelays are from a child's start: at CoreDNS's own start its listeners come later than the child.
var loopDelays = []time.Duration{0, time.Second, 3 * time.Second}

// loopGuard finds loops of one supervisor's children and breaks them.
type loopGuard struct {
	found atomic.Bool // the child in service forwards to CoreDNS

	mu          sync.Mutex
	mark        string          // the label asked for now
	outstanding map[string]bool // questions with the child; kept while found
}

// watch asks run's child for marked names below zones until one comes back or the last delay has passed.
func (g *loopGuard) watch(run *running, zones []string) {
	var raw [16]byte
	rand.Read(raw[:])
	mark := hex.EncodeToString(raw[:])
	g.mu.Lock()
	g.mark, g.outstanding = mark, map[string]bool{}
	g.found.Store(false)
	g.mu.Unlock()
	start := time.Now()
	for _, d := range loopDelays {
		select {
		case <-run.child.done:
			return
		case <-time.After(time.Until(start.Add(d))):
		}
		for _, zone := range zones[:min(len(zones), loopZones)] {
			q := new(dns.Msg)
			q.SetQuestion(mark+"."+loopLabel+"."+strings.TrimPrefix(zone, "."), dns.TypeTXT)
			_, _ = run.child.ask(q, probeWait) // only what the handler sees counts
			if g.found.Load() {
				return
			}
		}
	}
}

// sees tells whether name is the one that the child was asked for; the first time the loop is said.
func (g *loopGuard) sees(name string) bool {
	label, rest, _ := strings.Cut(name, ".")
	if !strings.HasPrefix(rest, loopLabel+".") {
		return false
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if label != g.mark {
		return false
	}
	if !g.found.Swap(true) {
		log.Errorf("dnsmasq forwards to this CoreDNS, so queries go round; they are refused to it from now on. " +
			"Give dnsmasq other servers: upstreamNameservers in the directory, or args --no-resolv --server=ADDRESS")
	}
	return true
}

// enter is called before a query goes to the child. Where there is a loop, a query of this host that is with the child
// already is the child's own, come round: it may not go there again. Else, and unless key is empty, leave has to be called.
func (g *loopGuard) enter(state *request.Request) (key string, ok bool) {
	if !g.found.Load() {
		return "", true
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	q := state.Req.Question[0]
	key = strings.ToLower(q.Name) + " " + dns.Type(q.Qtype).String() + " " + dns.Class(q.Qclass).String()
	if g.outstanding[key] {
		return "", !isOwnAddress(state.IP())
	}
	g.outstanding[key] = true
	return key, true
}

// leave is called when the query that enter gave key to has come back.
func (g *loopGuard) leave(key string) {
	if key == "" {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.outstanding, key)
}

// isOwnAddress tells whether ip is an address of this host.
func isOwnAddress(ip string) bool {
	a, err := netip.ParseAddr(ip)
	if err != nil {
		return false
	}
	if a.IsLoopback() {
		return true
	}
	own, _ := net.InterfaceAddrs()
	for _, o := range own {
		if p, err := netip.ParsePrefix(o.String()); err == nil && p.Addr() == a.Unmap() {
			return true
		}
	}
	return false
}

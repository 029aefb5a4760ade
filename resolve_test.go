package nanny

import (
	"net"
	"net/netip"
	"reflect"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// zone serves records on a loopback port until the test ends; while *down is
// set it fails.
func zone(t *testing.T, down *atomic.Bool, records ...string) netip.AddrPort {
	t.Helper()
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	handler := dns.HandlerFunc(func(w dns.ResponseWriter, req *dns.Msg) {
		m := new(dns.Msg).SetRcode(req, dns.RcodeNameError)
		for _, r := range records {
			rr, _ := dns.NewRR(r)
			if rr.Header().Name == req.Question[0].Name {
				m.Rcode = dns.RcodeSuccess
				if rr.Header().Rrtype == req.Question[0].Qtype {
					m.Answer = append(m.Answer, rr)
				}
			}
		}
		if down.Load() {
			m = new(dns.Msg).SetRcode(req, dns.RcodeServerFailure)
		}
		w.WriteMsg(m)
	})
	started := make(chan struct{})
	s := &dns.Server{PacketConn: pc, Handler: handler, NotifyStartedFunc: func() { close(started) }}
	go s.ActivateAndServe()
	<-started
	t.Cleanup(func() { s.Shutdown() })
	return netip.MustParseAddrPort(pc.LocalAddr().String())
}

func addrs(list ...string) []netip.Addr {
	var as []netip.Addr
	for _, s := range list {
		as = append(as, netip.MustParseAddr(s))
	}
	return as
}

func TestResolve(t *testing.T) {
	var down atomic.Bool
	good := zone(t, &down, "ns.example. A 192.0.2.2", "ns.example. A 192.0.2.1", "ns.example. AAAA 2001:db8::1", "b.example. A 192.0.2.9", "null.example. A 0.0.0.0")
	var always atomic.Bool
	always.Store(true)
	bad := zone(t, &always)
	r := newResolver([]netip.AddrPort{bad, good})
	got, errs := r.resolve(t.Context(), []string{"ns.example", "b.example", "none.example", "null.example"}, true, 20*time.Second)
	want := map[string][]netip.Addr{"ns.example": addrs("192.0.2.1", "192.0.2.2", "2001:db8::1"), "b.example": addrs("192.0.2.9")}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if errs["none.example"] == nil || errs["null.example"] == nil || len(errs) != 2 {
		t.Errorf("got errors %v, want two", errs)
	}
	down.Store(true)
	got, errs = r.resolve(t.Context(), []string{"ns.example"}, true, 20*time.Second)
	if want := map[string][]netip.Addr{"ns.example": want["ns.example"]}; !reflect.DeepEqual(got, want) || errs["ns.example"] == nil {
		t.Errorf("while down: got %v, %v, want the last known addresses and an error", got, errs)
	}
	// b.example was not asked for in between.
	if got, errs = r.resolve(t.Context(), []string{"b.example"}, true, 20*time.Second); len(got) != 0 || len(errs) != 1 {
		t.Errorf("got %v, %v, want only an error", got, errs)
	}
}

func TestResolveSystem(t *testing.T) {
	got, errs := newResolver(nil).resolve(t.Context(), []string{"localhost"}, true, 20*time.Second)
	if len(errs) != 0 || !slices.Contains(got["localhost"], netip.MustParseAddr("127.0.0.1")) {
		t.Errorf("got %v, %v, want 127.0.0.1", got, errs)
	}
}

// A server that never answers costs the limit, whatever the number of names.
func TestResolveLimit(t *testing.T) {
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer pc.Close()
	var names []string
	for i := range 100 {
		names = append(names, string(rune('a'+i%26))+string(rune('a'+i/26))+".example")
	}
	start := time.Now()
	_, errs := newResolver([]netip.AddrPort{netip.MustParseAddrPort(pc.LocalAddr().String())}).resolve(t.Context(), names, true, 300*time.Millisecond)
	if len(errs) != len(names) {
		t.Errorf("got %d errors, want %d", len(errs), len(names))
	}
	if d := time.Since(start); d > 10*time.Second {
		t.Errorf("took %v, want about 300ms", d)
	}
}

func TestLines(t *testing.T) {
	s := &snapshot{version: "v", files: []file{
		{name: "stubDomains", data: []byte(`{"b.test": ["1.2.3.4:53", "ns.example:5353", "[2001:db8::1]:53", "1.2.3.4"], "a.test": ["gone.example"], "c.test": [], "e.test": ["192.0.2.9"], "f.test": ["192.0.2.9:53", "192.0.2.9:54"], "d.test": ["fe80::1%eth0", "a.example"]}`)},
		{name: "upstreamNameservers", data: []byte(`["8.8.8.8", "[2001:db8::2]:5353"]`)},
	}}
	k, err := parseKubeDNS(s)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := k.hosts(), []string{"a.example", "gone.example", "ns.example"}; !slices.Equal(got, want) {
		t.Errorf("got hosts %q, want %q", got, want)
	}
	known := map[string][]netip.Addr{"ns.example": addrs("192.0.2.1", "2001:db8::3"), "a.example": addrs("192.0.2.2")}
	lines, missing, looped := k.lines(known, netip.MustParseAddrPort("192.0.2.9:53"))
	want := []string{
		"server=/b.test/1.2.3.4#53", "server=/b.test/192.0.2.1#5353", "server=/b.test/2001:db8::3#5353", "server=/b.test/2001:db8::1#53",
		"server=/f.test/192.0.2.9#54", "server=/d.test/fe80::1%eth0", "server=/d.test/192.0.2.2",
		"server=8.8.8.8", "server=2001:db8::2#5353",
	}
	if !slices.Equal(lines, want) {
		t.Errorf("got %q, want %q", lines, want)
	}
	if want := []string{"a.test", "c.test", "e.test"}; !slices.Equal(missing, want) {
		t.Errorf("got missing %q, want %q", missing, want)
	}
	if want := []string{"e.test", "f.test"}; !slices.Equal(looped, want) {
		t.Errorf("got looped %q, want %q", looped, want)
	}
	v := configVersion(s, k, known)
	known["gone.example"] = addrs("192.0.2.3")
	if w := configVersion(s, k, known); v == "v" || w == v || len(w) != 64 {
		t.Errorf("got versions %q and %q, want two different ones", v, w)
	}
	if got := configVersion(s, new(kubeDNS), known); got != "v" {
		t.Errorf("without names: got %q, want the snapshot's", got)
	}
}

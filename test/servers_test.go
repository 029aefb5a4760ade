package test

import (
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// records is a server that a test writes: what it has for a name can be changed while it runs.
type records struct {
	asked atomic.Int64
	list  atomic.Pointer[[]string]
}

func (r *records) set(list ...string) { r.list.Store(&list) }

// ServeDNS gives the records for the question; without any, an answer with neither records nor SOA. Over UDP it is cut to
// nothing, with TC, where it is too large.
func (r *records) ServeDNS(w dns.ResponseWriter, req *dns.Msg) {
	r.asked.Add(1)
	m := new(dns.Msg).SetReply(req)
	for _, text := range *r.list.Load() {
		rr, err := dns.NewRR(text)
		if err != nil {
			panic(err)
		}
		switch h := rr.Header(); {
		case !strings.EqualFold(h.Name, req.Question[0].Name):
		case h.Rrtype == dns.TypeSOA && len(m.Answer) == 0:
			m.Ns = append(m.Ns, rr)
		case h.Rrtype == req.Question[0].Qtype || h.Rrtype == dns.TypeCNAME:
			m.Answer, m.Ns = append(m.Answer, rr), nil
		}
	}
	if w.LocalAddr().Network() == "udp" && m.Len() > 1232 {
		m.Answer, m.Truncated = nil, true
	}
	_ = w.WriteMsg(m)
}

// serve lets r answer at addr, over each of the networks.
func (r *records) serve(t *testing.T, addr string, networks ...string) {
	t.Helper()
	for _, network := range networks {
		up := make(chan struct{})
		s := &dns.Server{Addr: addr, Net: network, Handler: r, NotifyStartedFunc: func() { close(up) }}
		failed := make(chan error, 1)
		go func() { failed <- s.ListenAndServe() }()
		select {
		case <-up:
		case err := <-failed:
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Shutdown() })
	}
}

// crowded listens at port and has no room for another connection: who connects gets no answer, not even a refusal.
func crowded(t *testing.T, port int) {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Close(fd) })
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	for {
		conn, err := net.DialTimeout("tcp", fmt.Sprintf("127.0.0.1:%d", port), 100*time.Millisecond)
		if err != nil {
			return
		}
		t.Cleanup(func() { conn.Close() })
	}
}

// text is a record of n times 250 bytes.
func text(name string, n int) string {
	return name + " 60 TXT" + strings.Repeat(` "`+strings.Repeat("x", 250)+`"`, n)
}

// TestServers has what the servers behind dnsmasq do to those who ask.
func TestServers(t *testing.T) {
	t.Parallel()
	at := func(port int) string { return fmt.Sprintf("127.0.0.1:%d", port) }
	serves := func(t *testing.T, networks []string, list ...string) (*records, int) {
		t.Helper()
		r, port := &records{}, freePort(t)
		r.set(list...)
		r.serve(t, at(port), networks...)
		return r, port
	}
	udp, both := []string{"udp"}, []string{"udp", "tcp"}
	running := func(t *testing.T, before string, files map[string]string, properties ...string) (*coreDNS, string) {
		t.Helper()
		dir := configDir(t, files)
		c := start(t, before+nanny(append([]string{"config " + dir + " 100ms"}, properties...)...))
		c.logs.wait(t, 0, "Configuration applied")
		return c, dir
	}
	stub := func(zone string, ports ...int) map[string]string {
		list := make([]string, 0, len(ports))
		for _, p := range ports {
			list = append(list, fmt.Sprintf("%q", at(p)))
		}
		return map[string]string{"stubDomains": fmt.Sprintf("{%q: [%s]}", zone, strings.Join(list, ", "))}
	}

	t.Run("a server whose name gets another address", func(t *testing.T) {
		t.Parallel()
		_, port := serves(t, udp, "www.z.example. 0 A 192.0.2.1")
		other := &records{}
		other.set("www.z.example. 0 A 192.0.2.2")
		other.serve(t, fmt.Sprintf("127.0.0.2:%d", port), "udp")
		const one, two = "ns.example. 2 A 127.0.0.1", "ns.example. 2 A 127.0.0.2"
		names, resolver := serves(t, udp, one)
		c, _ := running(t, "", map[string]string{"stubDomains": fmt.Sprintf(`{"z.example": ["ns.example:%d"]}`, port)}, "resolver "+at(resolver))
		stays := func(want string, records ...string) {
			t.Helper()
			names.set(records...)
			c.waits(t, "www.z.example", want)
			pid := c.settled(t).pid
			applied, asked := c.applied(), names.asked.Load()
			within(t, patience, "the name is looked up again", func() bool { return names.asked.Load() > asked+6 })
			if c.applied() != applied || c.child(t).pid != pid {
				t.Errorf("%q: %d applied, dnsmasq %d; want nothing to happen after %d, %d", records, c.applied(), c.child(t).pid, applied, pid)
			}
		}
		stays("192.0.2.1", one)
		stays("192.0.2.2", two)
		c.logs.wait(t, 0, "Configuration applied", "files=addresses")
		before := c.applied()
		names.set(one, two)
		within(t, patience, "both addresses are applied", func() bool { return c.applied() == before+1 })
		names.set(two, one)
		asked := names.asked.Load()
		within(t, patience, "the name is looked up again", func() bool { return names.asked.Load() > asked+6 })
		if got := c.applied() - before; got != 1 {
			t.Errorf("%d applied, want no more for another order of the addresses", got)
		}
	})
	t.Run("all keys of kube-dns", func(t *testing.T) {
		t.Parallel()
		says := func(address string) int { return dnsmasq(t, "--address=/#/"+address) }
		c, _ := running(t, "", map[string]string{
			"a.conf":              fmt.Sprintf("server=/cluster.local/127.0.0.1#%d\n", says("192.0.2.1")),
			"stubDomains":         fmt.Sprintf(`{"abc.example": [%q], "my.cluster.local": [%q]}`, at(says("192.0.2.2")), at(says("192.0.2.3"))),
			"upstreamNameservers": fmt.Sprintf("[%q]", at(says("192.0.2.4"))),
			"federations":         "foo=foo.fed.example",
		})
		for name, want := range map[string]string{
			"x.cluster.local": "192.0.2.1", "x.abc.example": "192.0.2.2", "x.my.cluster.local": "192.0.2.3", "x.foo.fed.example": "192.0.2.4",
		} {
			c.wants(t, name, want)
		}
		if n := len(c.logs.lines(0, "federations is valid and has no effect")); n != 1 || len(c.errors(0)) > 0 {
			t.Errorf("said %d times that federations have no effect, want once and no error", n)
		}
	})
	t.Run("over UDP only, and large answers", func(t *testing.T) {
		t.Parallel()
		var list []string
		for _, zone := range []string{"refuses", "drops", "good"} {
			list = append(list, fmt.Sprintf("www.%s.example. 60 A 192.0.2.1", zone), text("big."+zone+".example.", 6), text("mid."+zone+".example.", 3))
		}
		_, refuses := serves(t, udp, list...)
		_, drops := serves(t, udp, list...)
		crowded(t, drops)
		_, good := serves(t, both, list...)
		c, _ := running(t, "", map[string]string{"stubDomains": fmt.Sprintf(`{"refuses.example": [%q], "drops.example": [%q], "good.example": [%q]}`,
			at(refuses), at(drops), at(good))}, "timeout 8s")
		for _, tt := range []struct {
			network, name string
			size          uint16 // of EDNS, 0: none
			within        time.Duration
			want          string
		}{
			{"tcp", "www.refuses.example", 0, 3 * time.Second, "192.0.2.1"},
			{"tcp", "www.drops.example", 0, 3 * time.Second, "192.0.2.1"},
			{"udp", "big.refuses.example", 4096, 3 * time.Second, "TC"},
			{"tcp", "big.refuses.example", 0, 7 * time.Second, "SERVFAIL"}, // before the timeout
			{"tcp", "big.drops.example", 0, patience, "SERVFAIL"},
			{"udp", "mid.good.example", 0, 3 * time.Second, "TC"},
			{"udp", "mid.good.example", 1232, 3 * time.Second, "3 texts"},
			{"udp", "big.good.example", 0, 3 * time.Second, "TC"},
			{"udp", "big.good.example", 4096, 3 * time.Second, "TC"},
			{"tcp", "big.good.example", 0, 3 * time.Second, "6 texts"},
		} {
			t.Run(fmt.Sprint(tt.network, " ", tt.name, " ", tt.size), func(t *testing.T) {
				t.Parallel()
				m := question(tt.name, dns.TypeTXT)
				if strings.HasPrefix(tt.name, "www.") {
					m.Question[0].Qtype = dns.TypeA
				}
				if tt.size > 0 {
					m.SetEdns0(tt.size, false)
				}
				begin := time.Now()
				client := dns.Client{Net: tt.network, Timeout: patience, UDPSize: dns.MaxMsgSize}
				r, _, err := client.Exchange(m, c.addr())
				if err != nil {
					t.Fatal(err)
				}
				got := dns.RcodeToString[r.Rcode]
				if r.Truncated {
					got = "TC"
				}
				for _, rr := range r.Answer { // with TC there may be none: a part would be taken for the whole
					if a, ok := rr.(*dns.A); ok {
						got = a.A.String()
					} else {
						got = fmt.Sprint(len(rr.(*dns.TXT).Txt), " texts")
					}
				}
				if took := time.Since(begin); got != tt.want || took > tt.within {
					t.Errorf("got %s after %s, want %s within %s", got, took, tt.want, tt.within)
				}
			})
		}
	})
	t.Run("an alias in another plugin's zone", func(t *testing.T) {
		t.Parallel()
		r, port := serves(t, udp, "www.stub.example. 60 A 192.0.2.1", "b.stub.example. 60 CNAME a.host.example.")
		zone := tempDir(t)
		put(t, zone, "db", "@ 60 SOA ns a 1 60 60 60 60\n@ 60 NS ns\nfoo 60 CNAME www.stub.example.\na 60 CNAME b.stub.example.\n")
		c, _ := running(t, "file "+zone+"/db host.example\n", stub("stub.example", port))
		for _, network := range both {
			q := question("foo.host.example", dns.TypeA)
			got, err := exchange(network, c.addr(), q)
			if err != nil {
				t.Fatal(err)
			}
			if len(got.Answer) != 2 || got.Question[0] != q.Question[0] || !strings.Contains(got.String(), "192.0.2.1") {
				t.Errorf("over %s: got\n%s\nwant the alias and its address", network, got)
			}
		}
		asked := r.asked.Load()
		got, err := exchange("udp", c.addr(), question("a.host.example", dns.TypeA)) // a ring
		if n := r.asked.Load() - asked; err != nil || n > 4 || len(got.Answer) > 4 {
			t.Errorf("got %v, %v and %d queries to the server, want an end", got, err, n)
		}
	})
	t.Run("an empty answer", func(t *testing.T) {
		t.Parallel()
		const kept = "kept.stub.example."
		empty, filled := kept+" 600 SOA ns.stub.example. a.stub.example. 1 60 60 60 600", []string{"www.stub.example. 0 A 192.0.2.1", kept + " 0 A 192.0.2.1"}
		r, port := serves(t, udp, empty)
		c, dir := running(t, "", stub("stub.example", port))
		c.wants(t, "www.stub.example", "NOERROR") // no SOA: for no time
		c.wants(t, kept, "NOERROR")               // for as long as its SOA says
		r.set(filled...)
		c.wants(t, "www.stub.example", "192.0.2.1")
		c.wants(t, kept, "NOERROR")
		before := c.applied()
		put(t, dir, "a.conf", "no-negcache\n")
		changed(t, c, before, kept, "192.0.2.1")
		r.set(empty)
		c.wants(t, kept, "NOERROR")
		r.set(filled...)
		c.wants(t, kept, "192.0.2.1")
	})
	t.Run("no-ident", func(t *testing.T) {
		t.Parallel()
		for _, tt := range []struct {
			conf  string
			rcode int
			size  float64
		}{{"", dns.RcodeSuccess, 150}, {"no-ident\n", dns.RcodeNotImplemented, 0}} {
			monitor := freePort(t)
			c, _ := running(t, fmt.Sprintf("prometheus 127.0.0.1:%d\n", monitor), map[string]string{"a.conf": tt.conf + fmt.Sprintf("server=127.0.0.1#%d\n", silent(t))})
			for _, recursive := range []bool{true, false} {
				m := question("hits.bind", dns.TypeTXT)
				m.Question[0].Qclass, m.RecursionDesired = dns.ClassCHAOS, recursive
				if r, err := exchange("udp", c.addr(), m); err != nil || r.Rcode != tt.rcode {
					t.Errorf("%qRD %t: got %v, %v, want %s", tt.conf, recursive, r, err, dns.RcodeToString[tt.rcode])
				}
			}
			scrape(t, monitor)
			got := scrape(t, monitor)
			for series, want := range map[string]float64{"up": 1, "dnsmasq_scrape_errors_total": 0, "dnsmasq_cache_size": tt.size, "exits_total": 0} {
				if v, ok := got[series+`{zones="."}`]; !ok || v != want {
					t.Errorf("%q%s is %v, %t; want %v", tt.conf, series, v, ok, want)
				}
			}
		}
	})
	t.Run("dnsmasq itself", func(t *testing.T) {
		t.Parallel()
		own, other := freePort(t), dnsmasq(t, "--address=/#/192.0.2.1")
		files := stub("z.example", own)
		files["upstreamNameservers"] = fmt.Sprintf("[%q, %q]", at(own), at(other))
		c, dir := running(t, "", files, "listen "+at(own))
		c.wants(t, "www.example.org", "192.0.2.1")
		c.wants(t, "www.z.example", "REFUSED") // its names aren't for the other server
		c.logs.wait(t, 0, "[WARNING]", "a server of z.example is "+at(own))
		c.logs.wait(t, 0, "[WARNING]", "ignoring nameserver 127.0.0.1 - local interface") // the first of upstreamNameservers
		put(t, dir, "stubDomains", stub("z.example", own, other)["stubDomains"])
		c.waits(t, "www.z.example", "192.0.2.1")
	})
}

package nanny

import (
	"context"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/plugin/pkg/transport"
	"github.com/coredns/coredns/request"
	"github.com/miekg/dns"
)

// frontEnd serves the block's handler as CoreDNS does: behind its ScrubWriter, over UDP and TCP on one port. With octets an
// answer over UDP isn't unpacked.
func frontEnd(t *testing.T, n *Nanny, octets bool) string {
	t.Helper()
	addr := freeAddr(t, "127.0.0.1").String()
	ctx := context.WithValue(context.Background(), dnsserver.Key{}, &dnsserver.Server{Addr: transport.DNS + "://" + addr})
	handler := dns.HandlerFunc(func(w dns.ResponseWriter, r *dns.Msg) {
		var sw dns.ResponseWriter = request.NewScrubWriter(r, w)
		if !octets {
			sw = struct{ dns.ResponseWriter }{sw} // as of a plugin that looks at the answer
		}
		if rcode, err := n.ServeDNS(ctx, sw, r); err != nil || rcode != dns.RcodeSuccess {
			m := new(dns.Msg)
			m.SetRcode(r, rcode)
			sw.WriteMsg(m)
		}
	})
	for _, network := range []string{"udp", "tcp"} {
		ready := make(chan struct{})
		srv := &dns.Server{Addr: addr, Net: network, Handler: handler, NotifyStartedFunc: func() { close(ready) }}
		served := make(chan error, 1)
		go func() { served <- srv.ListenAndServe() }()
		t.Cleanup(func() {
			srv.Shutdown()
			<-served
		})
		<-ready
	}
	return addr
}

// exchangeWith sends m and gives the answer as text without its ID, or the error.
func exchangeWith(network, addr string, m *dns.Msg) (string, *dns.Msg) {
	c := dns.Client{Net: network, Timeout: defaultTimeout + time.Second, UDPSize: 65535}
	r, _, err := c.Exchange(m, addr)
	if err != nil { // dnsmasq gives a broken message for dns-rr with ANY: SERVFAIL is what CoreDNS can make of it
		return dns.RcodeToString[dns.RcodeServerFailure], nil
	}
	if r.Rcode == dns.RcodeServerFailure {
		return dns.RcodeToString[r.Rcode], nil
	}
	r = r.Copy()
	r.Id = 0
	return r.String(), r
}

// The answer through nanny is the one that dnsmasq gives itself, but for what CoreDNS's server changes:
//
//   - it compresses names, which doesn't show in an unpacked message;
//   - over UDP it cuts an answer to the client's buffer (dnsmasq passes on a larger one that comes from its upstream), and
//     to what bufsize says;
//   - a truncated answer it cuts once more, to have room for its OPT record, so such an answer's records may be fewer;
//   - it takes an OPT record out of an answer to a query without one, and gives its own size and the query's DO bit in
//     the OPT of an answer to a query with one.
func TestTransparency(t *testing.T) {
	long := strings.Repeat("a23456789012345678901234567890123456789012345678901234567890abc.", 3) // 3 labels of 63
	var conf strings.Builder
	fmt.Fprint(&conf, `address=/wild.test/192.0.2.1
address=/wild.test/2001:db8::1
local=/wild.test/
no-round-robin
local=/local.test/
host-record=host.local.test,192.0.2.2,2001:db8::2
txt-record=txt.local.test,"one","two"
mx-host=local.test,mail.local.test,10
srv-host=_sip._tcp.local.test,host.local.test,5060,1,2
cname=alias.local.test,host.local.test
cname=alias2.local.test,alias.local.test
caa-record=local.test,0,issue,"ca.example"
naptr-record=local.test,1,2,u,E2U+sip,,host.local.test
ptr-record=ptr.local.test,host.local.test
dns-rr=rr.local.test,99,01:23:45
address=/blocked.test/
`)
	fmt.Fprintf(&conf, "address=/%sx.test/192.0.2.9\n", long)
	for i := range 40 {
		fmt.Fprintf(&conf, "txt-record=many.local.test,\"record %02d of forty, long enough for all of them to be cut over UDP\"\n", i)
	}
	b := newBench(t, spec{}, settings{}, map[string]string{"a.conf": conf.String()})
	b.await("x.wild.test", "192.0.2.1")
	direct := b.stats.run.Load().child.addr.String()
	handler := b.handler()
	unpacked, octets := frontEnd(t, handler, false), frontEnd(t, handler, true)
	t.Cleanup(func() { forget(".") })

	count := 0
	compare := func(m *dns.Msg) {
		t.Helper()
		for _, to := range []struct{ network, addr string }{{"udp", octets}, {"udp", unpacked}, {"tcp", unpacked}} {
			want, msg := exchangeWith(to.network, direct, m)
			if msg != nil {
				want = serverChanges(m, msg)
			}
			got, msg := exchangeWith(to.network, to.addr, m)
			if msg != nil {
				got = serverChanges(m, msg)
			}
			count++
			if got != want {
				t.Errorf("%s over %+v:\ngot\n%s\nwant\n%s", m.Question[0].String(), to, got, want)
			}
		}
	}
	question := func(name string, qtype, class uint16) *dns.Msg {
		m := new(dns.Msg)
		m.SetQuestion(name, qtype)
		m.Question[0].Qclass = class
		return m
	}
	names := []string{
		"x.wild.test.", "X.wIlD.TeSt.", "host.local.test.", "HOST.local.TEST.", "txt.local.test.", "local.test.", "alias2.local.test.",
		"_sip._tcp.local.test.", "ptr.local.test.", "rr.local.test.", "nx.local.test.", "x.blocked.test.", "many.local.test.",
		long + "x.test.", "elsewhere.test.", ".",
	}
	for _, name := range names {
		for qtype := range dns.TypeToString {
			if qtype == dns.TypeNone || qtype == dns.TypeReserved {
				continue
			}
			compare(question(name, qtype, dns.ClassINET))
		}
		for _, class := range []uint16{dns.ClassCHAOS, dns.ClassANY, dns.ClassHESIOD} {
			compare(question(name, dns.TypeTXT, class))
		}
		for bits := range 16 {
			m := question(name, dns.TypeA, dns.ClassINET)
			m.RecursionDesired, m.CheckingDisabled, m.AuthenticatedData = bits&1 > 0, bits&2 > 0, bits&4 > 0
			if bits&8 > 0 {
				m.SetEdns0(1232, true)
			}
			compare(m)
		}
		for _, size := range []uint16{0, 1, 511, 512, 513, 1231, 1232, 1233, 4096, 65535} {
			m := question(name, dns.TypeTXT, dns.ClassINET)
			m.SetEdns0(size, false)
			compare(m)
		}
		for _, option := range []dns.EDNS0{
			&dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: "24a5ac1122334455"},
			&dns.EDNS0_SUBNET{Code: dns.EDNS0SUBNET, Family: 1, SourceNetmask: 24, Address: net.IPv4(192, 0, 2, 0)},
			&dns.EDNS0_LOCAL{Code: 65001, Data: []byte("unknown")},
			&dns.EDNS0_PADDING{Padding: make([]byte, 100)},
			&dns.EDNS0_NSID{Code: dns.EDNS0NSID},
		} {
			m := question(name, dns.TypeA, dns.ClassINET)
			m.SetEdns0(1232, false)
			m.IsEdns0().Option = append(m.IsEdns0().Option, option)
			compare(m)
		}
	}
	for _, name := range []string{"version.bind.", "authors.bind.", "copyright.bind.", "servers.bind.", "auth.bind.", "cachesize.bind.", "hostname.bind."} {
		compare(question(name, dns.TypeTXT, dns.ClassCHAOS))
	}
	t.Logf("%d answers compared", count)
	if count < 2000 {
		t.Errorf("only %d answers compared", count)
	}
}

// serverChanges applies to r what CoreDNS's server changes in an answer to q, so that both ways compare.
func serverChanges(q, r *dns.Msg) string {
	opt := q.IsEdns0()
	if r.Truncated {
		r.Answer = nil
	}
	var extra []dns.RR
	for _, rr := range r.Extra {
		if rr.Header().Rrtype != dns.TypeOPT {
			extra = append(extra, rr)
		}
	}
	r.Extra = extra
	if opt != nil { // CoreDNS gives the query's size and DO
		r.Extra = append(r.Extra, &dns.OPT{Hdr: dns.RR_Header{Name: ".", Rrtype: dns.TypeOPT}})
	}
	return r.String()
}

// What dnsmasq would treat in another way than its own rules never gets there.
func TestHandlerRefuses(t *testing.T) {
	b := newBench(t, spec{args: []string{"--address=/a.test/192.0.2.1", "--log-queries"}}, settings{}, nil)
	b.await("x.a.test", "192.0.2.1")
	n := b.handler()
	t.Cleanup(func() { forget(".") })
	rr, err := dns.NewRR("x.a.test. 60 IN A 192.0.2.66")
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name   string
		change func(*dns.Msg)
		want   int
	}{
		{"answer", func(m *dns.Msg) { m.Answer = []dns.RR{rr} }, dns.RcodeFormatError},
		{"authority", func(m *dns.Msg) { m.Ns = []dns.RR{rr} }, dns.RcodeFormatError},
		{"no question", func(m *dns.Msg) { m.Question = nil }, dns.RcodeFormatError},
		{"two questions", func(m *dns.Msg) { m.Question = append(m.Question, m.Question[0]) }, dns.RcodeFormatError},
		{"a response", func(m *dns.Msg) { m.Response = true }, dns.RcodeFormatError},
		{"notify", func(m *dns.Msg) { m.Opcode = dns.OpcodeNotify }, dns.RcodeNotImplemented},
		{"update", func(m *dns.Msg) { m.Opcode = dns.OpcodeUpdate }, dns.RcodeNotImplemented},
		{"status", func(m *dns.Msg) { m.Opcode = dns.OpcodeStatus }, dns.RcodeNotImplemented},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m := new(dns.Msg)
			m.SetQuestion("x.a.test.", dns.TypeA)
			tt.change(m)
			before := b.stats.run.Load().backend.answers()
			rcode, err := n.ServeDNS(t.Context(), nil, m)
			if rcode != tt.want || err != nil {
				t.Errorf("got %s (%v), want %s", dns.RcodeToString[rcode], err, dns.RcodeToString[tt.want])
			}
			if after := b.stats.run.Load().backend.answers(); after != before {
				t.Error("dnsmasq was asked")
			}
		})
	}
}

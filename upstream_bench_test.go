package nanny

import (
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/coredns/coredns/plugin/pkg/proxy"
	"github.com/coredns/coredns/plugin/pkg/transport"
	"github.com/coredns/coredns/plugin/test"
	"github.com/coredns/coredns/request"
	"github.com/miekg/dns"
)

// BenchmarkExchange compares exchange with the way plugin forward takes, both with 100 queries
// outstanding. cpu-ns/op is this process alone: the echo server is part of it, dnsmasq isn't. `make benchstat` shows them
// side by side.
func BenchmarkExchange(b *testing.B) {
	servers := []struct {
		name  string
		start func(b *testing.B) netip.AddrPort
	}{
		{"echo", func(b *testing.B) netip.AddrPort { at, _ := udpServer(b, echo); return at }},
		{"dnsmasq", func(b *testing.B) netip.AddrPort {
			at, _ := realDnsmasq(b, "127.0.0.1", "--address=/test/192.0.2.1")
			return at
		}},
	}
	for _, server := range servers {
		b.Run("server="+server.name+"/way=nanny", func(b *testing.B) {
			u := testUpstream(b)
			u.use(testBackend(b, u, server.start(b)))
			parallel(b, func(m *dns.Msg) error {
				_, err := u.exchangeMsg(served(b), m, time.Now().Add(5*time.Second), false, false)
				return err
			})
		})
		b.Run("server="+server.name+"/way=forward", func(b *testing.B) {
			p := proxy.NewProxy("bench", server.start(b).String(), transport.DNS)
			p.Start(time.Hour)
			defer p.Stop()
			parallel(b, func(m *dns.Msg) error {
				_, _, _, err := p.Connect(b.Context(), request.Request{W: &test.ResponseWriter{}, Req: m}, proxy.Options{PreferUDP: true})
				return err
			})
		})
	}
}

func parallel(b *testing.B, exchange func(m *dns.Msg) error) {
	b.Helper()
	b.ReportAllocs()
	b.SetParallelism(50) // with 2 CPUs
	before := cpuTime()
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		m := question("a.test.", dns.TypeA)
		for pb.Next() {
			if err := exchange(m); err != nil {
				b.Error(err)
			}
		}
	})
	b.StopTimer()
	b.ReportMetric(float64(cpuTime()-before)/float64(b.N), "cpu-ns/op")
}

// cpuTime returns the CPU time this process has used.
func cpuTime() time.Duration {
	var r syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &r)
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// BenchmarkExchangeTCP is 50 clients on TCP whose answers don't fit UDP.
func BenchmarkExchangeTCP(b *testing.B) {
	at, _ := realDnsmasq(b, "127.0.0.1", bigRecords(40)...)
	u := testUpstream(b)
	u.use(testBackend(b, u, at))
	b.SetParallelism(25)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			a, err := u.exchangeMsg(served(b), question("big.test.", dns.TypeTXT), time.Now().Add(5*time.Second), true, false)
			if err != nil || !a.tcp {
				b.Errorf("got tcp %t, %v, want an answer over TCP", a.tcp, err)
			}
		}
	})
}

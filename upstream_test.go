package nanny

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"
	"go.uber.org/goleak"
)

// realDnsmasq runs dnsmasq at a free port of addr, with args, until the test ends or stop is called.
func realDnsmasq(t testing.TB, addr string, args ...string) (at netip.AddrPort, stop func()) {
	t.Helper()
	for range 5 {
		at = freeAddr(t, addr)
		cmd := exec.Command("dnsmasq", append(dnsmasqArgs(at), args...)...)
		var stderr strings.Builder
		cmd.Stderr = &stderr
		cmd.WaitDelay = time.Second
		if err := cmd.Start(); err != nil {
			t.Fatalf("starting dnsmasq: %v", err)
		}
		exited := make(chan struct{})
		go func() {
			_ = cmd.Wait()
			close(exited)
		}()
		stop = sync.OnceFunc(func() {
			_ = cmd.Process.Kill()
			<-exited
		})
		t.Cleanup(stop)
		if answersAt(at, exited) {
			return at, stop
		}
		stop()
		t.Logf("dnsmasq didn't start: %s", stderr.String())
	}
	t.Fatal("dnsmasq doesn't start")
	return at, stop
}

// dnsmasqArgs are the arguments of a dnsmasq in the foreground that answers at addr and knows nothing.
func dnsmasqArgs(addr netip.AddrPort) []string {
	return []string{
		"-k", "--conf-file=/dev/null", "--no-resolv", "--no-hosts", "--user=", "--group=",
		"--pid-file=", "--log-facility=-", "--bind-interfaces", "--dns-forward-max=4096",
		"--listen-address=" + addr.Addr().String(), fmt.Sprintf("--port=%d", addr.Port()),
	}
}

var lastPort atomic.Uint32

// freeAddr returns a port of addr that is free for UDP and TCP, once. It is below those that the kernel gives to clients,
// which would otherwise take it before its server does.
func freeAddr(t testing.TB, addr string) netip.AddrPort {
	t.Helper()
	first := os.Getpid() % 10 * 1000
	for range 10000 {
		port := 10000 + (first+int(lastPort.Add(1)))%10000
		at := netip.AddrPortFrom(netip.MustParseAddr(addr), uint16(port))
		if p, err := takePort(at); err == nil {
			p.release()
			return at
		}
	}
	t.Fatal("no port is free for UDP and TCP")
	return netip.AddrPort{}
}

func answersAt(at netip.AddrPort, exited <-chan struct{}) bool {
	m := new(dns.Msg)
	m.SetQuestion("version.bind.", dns.TypeTXT)
	m.Question[0].Qclass = dns.ClassCHAOS
	c := dns.Client{Timeout: 100 * time.Millisecond}
	for start := time.Now(); time.Since(start) < testPatience; {
		select {
		case <-exited:
			return false
		default:
		}
		if _, _, err := c.Exchange(m, at.String()); err == nil {
			return true
		}
		time.Sleep(2 * time.Millisecond)
	}
	return false
}

// exchangeMsg is exchange with the answer unpacked. The error may also say why that is malformed.
func (u *upstream) exchangeMsg(ctx context.Context, m *dns.Msg, deadline time.Time, stream, giveUp bool) (answer, error) {
	a, err := u.exchange(ctx, m, deadline, stream, giveUp)
	if err == nil {
		err = a.unpack()
	}
	if err != nil {
		return answer{way: &way{}}, err
	}
	return a, nil
}

// udpServer calls handle for each datagram, in one goroutine, until the test ends or stop is called.
func udpServer(t testing.TB, handle func(conn *net.UDPConn, from netip.AddrPort, packet []byte)) (at netip.AddrPort, stop func()) {
	t.Helper()
	return udpServerAt(t, netip.MustParseAddrPort("127.0.0.1:0"), handle)
}

func udpServerAt(t testing.TB, addr netip.AddrPort, handle func(conn *net.UDPConn, from netip.AddrPort, packet []byte)) (at netip.AddrPort, stop func()) {
	t.Helper()
	conn, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(addr))
	if err != nil {
		t.Fatalf("listening: %v", err)
	}
	_ = conn.SetReadBuffer(4 << 20)
	var wg sync.WaitGroup
	wg.Go(func() {
		buf := make([]byte, 65535)
		for {
			n, from, err := conn.ReadFromUDPAddrPort(buf)
			if err != nil {
				return
			}
			handle(conn, from, buf[:n])
		}
	})
	stop = sync.OnceFunc(func() {
		conn.Close()
		wg.Wait()
	})
	t.Cleanup(stop)
	return conn.LocalAddr().(*net.UDPAddr).AddrPort(), stop
}

// echo answers a packet with itself as a response.
func echo(conn *net.UDPConn, from netip.AddrPort, packet []byte) {
	packet[2] |= 0x80
	_, _ = conn.WriteToUDPAddrPort(packet, from)
}

func silent(*net.UDPConn, netip.AddrPort, []byte) {}

func testUpstream(t testing.TB) *upstream {
	t.Helper()
	u := newUpstream()
	t.Cleanup(u.close)
	return u
}

func testBackend(t testing.TB, u *upstream, at netip.AddrPort) *backend {
	t.Helper()
	b, err := newBackend(at)
	if err != nil {
		t.Fatalf("newBackend(%s): %v", at, err)
	}
	t.Cleanup(func() { u.drop(b) })
	return b
}

func question(name string, qtype uint16) *dns.Msg {
	m := new(dns.Msg)
	m.SetQuestion(name, qtype)
	return m
}

// served is a context such as CoreDNS's servers for UDP and TCP give: it never ends.
func served(t testing.TB) context.Context {
	t.Helper()
	return context.WithoutCancel(t.Context())
}

func in(d time.Duration) time.Time { return time.Now().Add(d) }

func TestExchangeDnsmasq(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	for _, addr := range []string{"127.0.0.1", "::1"} {
		t.Run(addr, func(t *testing.T) {
			at, _ := realDnsmasq(t, addr, "--local=/test/", "--address=/a.test/192.0.2.1",
				"--txt-record=t.test,text", "--host-record=six.test,2001:db8::1")
			u := testUpstream(t)
			u.use(testBackend(t, u, at))
			tests := []struct {
				name  string
				qtype uint16
				rcode int
				want  string
			}{
				{"a.test.", dns.TypeA, dns.RcodeSuccess, "192.0.2.1"},
				{"A.tEsT.", dns.TypeA, dns.RcodeSuccess, "A.tEsT."},
				{"t.test.", dns.TypeTXT, dns.RcodeSuccess, `"text"`},
				{"six.test.", dns.TypeAAAA, dns.RcodeSuccess, "2001:db8::1"},
				{"none.test.", dns.TypeA, dns.RcodeNameError, ""},
				{"example.org.", dns.TypeA, dns.RcodeRefused, ""},
				{"example.org.", 65280, dns.RcodeRefused, ""},
			}
			for _, tc := range tests {
				t.Run(fmt.Sprint(tc.name, tc.qtype), func(t *testing.T) {
					m := question(tc.name, tc.qtype)
					m.SetEdns0(4096, true)
					before := m.String()
					a, err := u.exchangeMsg(served(t), m, in(5*time.Second), false, false)
					if err != nil {
						t.Fatalf("exchange: %v", err)
					}
					if m.String() != before {
						t.Errorf("exchange changed the query to\n%s", m)
					}
					if a.msg.Id != m.Id || a.msg.Rcode != tc.rcode || !strings.Contains(a.msg.String(), tc.want) {
						t.Errorf("got\n%s\nwant ID %d, %s, %s", a.msg, m.Id, dns.RcodeToString[tc.rcode], tc.want)
					}
					if a.tcp || a.remote != at || a.local.Addr() != at.Addr() || a.local.Port() == 0 {
						t.Errorf("got tcp %t, local %s, remote %s, want remote %s over UDP", a.tcp, a.local, a.remote, at)
					}
				})
			}
		})
	}
}

func TestExchangeMany(t *testing.T) {
	at, _ := realDnsmasq(t, "127.0.0.1", "--address=/test/192.0.2.1")
	u := testUpstream(t)
	b := testBackend(t, u, at)
	u.use(b)
	const goroutines, each = 200, 100
	var wg sync.WaitGroup
	for g := range goroutines {
		wg.Go(func() {
			for i := range each {
				name := fmt.Sprintf("q%d-%d.test.", g, i)
				a, err := u.exchangeMsg(served(t), question(name, dns.TypeA), in(10*time.Second), false, false)
				if err != nil || len(a.msg.Answer) != 1 || a.msg.Answer[0].Header().Name != name {
					t.Errorf("%s: got %v, %v, want one answer", name, a.msg, err)
				}
			}
		})
	}
	wg.Wait()
	if got := b.answers(); got != goroutines*each {
		t.Errorf("got %d answers, want %d", got, goroutines*each)
	}
	if b.outstanding() != 0 || u.inflight.Load() != 0 {
		t.Errorf("got %d outstanding, %d in flight, want none", b.outstanding(), u.inflight.Load())
	}
}

// TestExchangeForeign has everything that isn't the answer before the answer.
func TestExchangeForeign(t *testing.T) {
	reply := func(change func(m *dns.Msg)) func([]byte) []byte {
		return func(packet []byte) []byte {
			m := new(dns.Msg)
			if err := m.Unpack(packet); err != nil {
				panic(err)
			}
			m.Response = true
			change(m)
			packed, err := m.Pack()
			if err != nil {
				panic(err)
			}
			return packed
		}
	}
	const strangers = "the right one, from another port"
	tests := []struct {
		name  string
		first func(packet []byte) []byte
	}{
		{"empty", func([]byte) []byte { return nil }},
		{"short", func(p []byte) []byte { return p[:11] }},
		{"header only", func(p []byte) []byte { return append([]byte{p[0], p[1], 0x80, 0, 0, 1}, p[6:12]...) }},
		{"cut in the question", func(p []byte) []byte { return append([]byte{p[0], p[1], 0x80}, p[3:len(p)-1]...) }},
		{"no response", func(p []byte) []byte { return p }},
		{"other ID", reply(func(m *dns.Msg) { m.Id++ })},
		{"other name", reply(func(m *dns.Msg) { m.Question[0].Name = "b.test." })},
		{"longer name", reply(func(m *dns.Msg) { m.Question[0].Name = "a.test.test." })},
		{"other type", reply(func(m *dns.Msg) { m.Question[0].Qtype = dns.TypeAAAA })},
		{"other class", reply(func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassCHAOS })},
		{"no question", reply(func(m *dns.Msg) { m.Question = nil })},
		{"two questions", reply(func(m *dns.Msg) { m.Question = append(m.Question, m.Question[0]) })},
		{"large", func([]byte) []byte { return make([]byte, 60000) }},
		{strangers, reply(func(m *dns.Msg) { m.Rcode = dns.RcodeNameError })},
	}
	stranger, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer stranger.Close()
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			at, _ := udpServer(t, func(conn *net.UDPConn, from netip.AddrPort, packet []byte) {
				first := conn
				if tc.name == strangers {
					first = stranger
				}
				_, _ = first.WriteToUDPAddrPort(tc.first(packet), from)
				_, _ = conn.WriteToUDPAddrPort(reply(func(m *dns.Msg) {
					m.Question[0].Name = "A.TesT."
					m.Rcode = dns.RcodeNotZone
				})(packet), from)
			})
			u := testUpstream(t)
			b := testBackend(t, u, at)
			u.use(b)
			a, err := u.exchangeMsg(served(t), question("a.test.", dns.TypeA), in(5*time.Second), false, false)
			if err != nil || a.msg.Rcode != dns.RcodeNotZone {
				t.Fatalf("got %v, %v, want the right answer", a.msg, err)
			}
			if b.answers() != 1 {
				t.Errorf("got %d answers, want 1", b.answers())
			}
		})
	}
}

// TestExchangeLate has an answer come after the deadline; it must not meet the next query.
func TestExchangeLate(t *testing.T) {
	var first []byte
	at, _ := udpServer(t, func(conn *net.UDPConn, from netip.AddrPort, packet []byte) {
		if first == nil {
			first = append(first, packet...)
			return
		}
		echo(conn, from, first)
		echo(conn, from, packet)
	})
	u := testUpstream(t)
	u.use(testBackend(t, u, at))
	if _, err := u.exchangeMsg(served(t), question("a.test.", dns.TypeA), in(20*time.Millisecond), false, false); !errors.Is(err, errTimeout) {
		t.Fatalf("got error %v, want %v", err, errTimeout)
	}
	a, err := u.exchangeMsg(served(t), question("b.test.", dns.TypeA), in(5*time.Second), false, false)
	if err != nil || a.msg.Question[0].Name != "b.test." {
		t.Fatalf("got %v, %v, want an answer for b.test.", a.msg, err)
	}
}

func TestExchangeMalformed(t *testing.T) {
	at, _ := udpServer(t, func(conn *net.UDPConn, from netip.AddrPort, packet []byte) {
		packet[7] = 1 // ANCOUNT
		echo(conn, from, append(packet, 0xc0))
	})
	u := testUpstream(t)
	u.use(testBackend(t, u, at))
	_, err := u.exchangeMsg(served(t), question("a.test.", dns.TypeA), in(5*time.Second), false, false)
	if err == nil || !strings.Contains(err.Error(), "malformed answer") {
		t.Errorf("got error %v, want a malformed answer", err)
	}
}

func TestExchangeRetransmits(t *testing.T) {
	var packets atomic.Int32
	at, _ := udpServer(t, func(conn *net.UDPConn, from netip.AddrPort, packet []byte) {
		if packets.Add(1) == 3 {
			echo(conn, from, packet)
		}
	})
	for _, ctx := range []context.Context{served(t), t.Context()} {
		packets.Store(0)
		u := testUpstream(t)
		u.use(testBackend(t, u, at))
		start := time.Now()
		if _, err := u.exchangeMsg(ctx, question("a.test.", dns.TypeA), in(20*time.Second), false, false); err != nil {
			t.Fatalf("exchange: %v", err)
		}
		// Two, and one more for each second that the answer was late.
		if got, most := u.retransmitted.Load(), uint64(time.Since(start)/retransmitAfter); got < 2 || got > most {
			t.Errorf("got %d retransmitted, want 2 to %d", got, most)
		}
		if u.resent.Load() != 0 || u.held.Load() != 0 {
			t.Errorf("got %d resent, %d held, want none", u.resent.Load(), u.held.Load())
		}
	}
}

func TestExchangeDeadline(t *testing.T) {
	at, _ := udpServer(t, silent)
	tests := []struct {
		name   string
		setup  func(u *upstream)
		giveUp bool
		budget time.Duration
		want   error
	}{
		{"no backend", func(*upstream) {}, false, 50 * time.Millisecond, errNoBackend},
		{"no backend, past", func(*upstream) {}, false, -time.Second, errNoBackend},
		{"no backend, would give up", func(*upstream) {}, true, 50 * time.Millisecond, errNoBackend},
		{"down", func(u *upstream) { u.down(true) }, false, 50 * time.Millisecond, errNoBackend},
		{"down, gives up", func(u *upstream) { u.down(true) }, true, time.Hour, errNoBackend},
		{"silent", func(u *upstream) { u.use(testBackend(t, u, at)) }, false, 50 * time.Millisecond, errTimeout},
		{"silent, past", func(u *upstream) { u.use(testBackend(t, u, at)) }, false, -time.Second, errTimeout},
		{"held", func(u *upstream) { u.use(testBackend(t, u, at)); u.hold() }, false, 50 * time.Millisecond, errNoBackend},
		{"closed", func(u *upstream) { u.close() }, false, time.Hour, errClosed},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			u := testUpstream(t)
			tc.setup(u)
			start := time.Now()
			_, err := u.exchangeMsg(served(t), question("a.test.", dns.TypeA), in(tc.budget), false, tc.giveUp)
			if !errors.Is(err, tc.want) {
				t.Errorf("got error %v, want %v", err, tc.want)
			}
			if tc.budget < time.Hour && time.Since(start) < tc.budget {
				t.Errorf("ended %s before its deadline", tc.budget-time.Since(start))
			}
			if u.inflight.Load() != 0 {
				t.Errorf("got %d in flight, want none", u.inflight.Load())
			}
		})
	}
}

func TestExchangeDownWakes(t *testing.T) {
	u := testUpstream(t)
	errs := make(chan error)
	go func() {
		_, err := u.exchangeMsg(served(t), question("a.test.", dns.TypeA), in(time.Hour), false, true)
		errs <- err
	}()
	eventually(t, "the query waits", func() bool { return u.held.Load() == 1 })
	u.down(true)
	if err := <-errs; !errors.Is(err, errNoBackend) {
		t.Errorf("got error %v, want %v", err, errNoBackend)
	}
}

func TestExchangeContext(t *testing.T) {
	at, _ := udpServer(t, silent)
	for _, use := range []bool{false, true} {
		t.Run(fmt.Sprint("backend ", use), func(t *testing.T) {
			u := testUpstream(t)
			b := testBackend(t, u, at)
			if use {
				u.use(b)
			}
			ctx, cancel := context.WithCancel(t.Context())
			errs := make(chan error)
			go func() {
				_, err := u.exchangeMsg(ctx, question("a.test.", dns.TypeA), in(time.Hour), false, false)
				errs <- err
			}()
			eventually(t, "the query waits", func() bool { return u.held.Load() == 1 || b.outstanding() == 1 })
			cancel()
			if err := <-errs; !errors.Is(err, context.Canceled) {
				t.Errorf("got error %v, want %v", err, context.Canceled)
			}
		})
	}
}

// burst starts n queries and returns a function that waits for them and returns their errors.
func burst(t *testing.T, u *upstream, n int, budget time.Duration, stream bool) (wait func() []error) {
	t.Helper()
	var (
		wg   sync.WaitGroup
		mu   sync.Mutex
		errs []error
	)
	deadline := in(budget)
	for i := range n {
		wg.Go(func() {
			_, err := u.exchangeMsg(served(t), question(fmt.Sprintf("q%d.test.", i), dns.TypeA), deadline, stream, false)
			if err != nil {
				mu.Lock()
				errs = append(errs, err)
				mu.Unlock()
			}
		})
	}
	return func() []error {
		wg.Wait()
		return errs
	}
}

func TestExchangeRefused(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	at, stop := udpServerAt(t, freeAddr(t, "127.0.0.1"), silent) // a port that nobody takes before it is used again
	u := testUpstream(t)
	b := testBackend(t, u, at)
	u.use(b)
	wait := burst(t, u, 100, 20*time.Second, false)
	eventually(t, "all are outstanding", func() bool { return b.outstanding() == 100 })
	stop()
	more := burst(t, u, 100, 20*time.Second, false)
	select {
	case <-b.refused():
	case <-time.After(20 * time.Second):
		t.Fatal("nobody noticed that the port is closed")
	}
	eventually(t, "all are held", func() bool { return b.outstanding() == 0 && u.inflight.Load() == 200 })

	t.Run("same backend", func(t *testing.T) {
		_, stop := udpServerAt(t, at, silent)
		u.use(b)
		eventually(t, "all are sent again", func() bool { return b.outstanding() == 200 })
		stop()
	})
	t.Run("other backend", func(t *testing.T) {
		at2, _ := udpServer(t, echo)
		u.use(testBackend(t, u, at2))
		u.drop(b)
		if errs := append(wait(), more()...); len(errs) > 0 {
			t.Errorf("got %d errors, the first %v, want none", len(errs), errs[0])
		}
	})
	if u.resent.Load() < 200 {
		t.Errorf("got %d resent, want 200 at least", u.resent.Load())
	}
	u.close()
}

// TestExchangeRefusedByMistake has a refusal come late: the port has a new owner, and use came before.
func TestExchangeRefusedByMistake(t *testing.T) {
	at, _ := udpServer(t, echo)
	u := testUpstream(t)
	b := testBackend(t, u, at)
	u.use(b)
	b.refuse()
	if _, err := u.exchangeMsg(served(t), question("a.test.", dns.TypeA), in(20*time.Second), false, false); err != nil {
		t.Errorf("exchange: %v", err)
	}
}

// TestExchangeHandover swaps real children under load, as each configuration change does.
func TestExchangeHandover(t *testing.T) {
	u := testUpstream(t)
	stopLoad := make(chan struct{})
	var (
		wg   sync.WaitGroup
		done atomic.Int64
	)
	for range 100 {
		wg.Go(func() {
			for {
				select {
				case <-stopLoad:
					return
				default:
				}
				name := fmt.Sprintf("q%d.test.", rand.Uint32())
				a, err := u.exchangeMsg(served(t), question(name, dns.TypeA), in(testPatience), false, false)
				if err != nil || len(a.msg.Answer) != 1 {
					t.Errorf("%s: got %v, %v, want one answer", name, a.msg, err)
				}
				done.Add(1)
			}
		})
	}
	var old *backend
	var stopOld func()
	for i := range 6 {
		at, stop := realDnsmasq(t, "127.0.0.1", "--address=/test/192.0.2.1")
		b := testBackend(t, u, at)
		u.use(b)
		if old != nil {
			switch i % 2 {
			case 0: // as it should be
				ctx, cancel := context.WithTimeout(t.Context(), testPatience)
				if !old.wait(ctx) {
					t.Errorf("%d queries never ended at the old backend", old.outstanding())
				}
				cancel()
				stopOld()
			case 1: // killed
				stopOld()
			}
			u.drop(old)
		}
		old, stopOld = b, stop
		n := done.Load()
		eventually(t, "1,000 answers", func() bool { return done.Load() > n+1000 })
	}
	close(stopLoad)
	wg.Wait()
}

// TestExchangeHandoverOutstanding drops a backend with more queries outstanding than the receive
// queue of its successor takes.
func TestExchangeHandoverOutstanding(t *testing.T) {
	const n = 5000
	tests := []struct {
		name string
		do   func(u *upstream, b1, b2 *backend)
	}{
		{"use, drop", func(u *upstream, b1, b2 *backend) { u.use(b2); u.drop(b1) }},
		{"drop, use", func(u *upstream, b1, b2 *backend) { u.drop(b1); u.use(b2) }},
		{"hold, drop, use", func(u *upstream, b1, b2 *backend) { u.hold(); u.drop(b1); u.use(b2) }},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			silentAt, _ := udpServer(t, silent)
			at, _ := realDnsmasq(t, "127.0.0.1", "--address=/test/192.0.2.1")
			u := testUpstream(t)
			b1, b2 := testBackend(t, u, silentAt), testBackend(t, u, at)
			u.use(b1)
			wait := burst(t, u, n, 30*time.Second, false)
			eventually(t, "all are outstanding", func() bool { return b1.outstanding() == n })
			tc.do(u, b1, b2)
			if errs := wait(); len(errs) > 0 {
				t.Errorf("got %d errors, the first %v, want none", len(errs), errs[0])
			}
			if got := u.resent.Load(); got != n {
				t.Errorf("got %d resent, want %d", got, n)
			}
			if b1.outstanding() != 0 || b2.outstanding() != 0 {
				t.Errorf("got %d and %d outstanding, want none", b1.outstanding(), b2.outstanding())
			}
		})
	}
}

func TestExchangeHold(t *testing.T) {
	var asked atomic.Int32
	var restarted atomic.Bool
	at, _ := udpServer(t, func(conn *net.UDPConn, from netip.AddrPort, packet []byte) {
		asked.Add(1)
		if restarted.Load() { // what was asked before is lost with the child
			echo(conn, from, packet)
		}
	})
	u := testUpstream(t)
	b := testBackend(t, u, at)
	u.use(b)
	start := time.Now()
	late := func() int64 { return int64(time.Since(start) / retransmitAfter) } // how often each may be sent again
	first := burst(t, u, 1, 20*time.Second, false)
	eventually(t, "the first is asked", func() bool { return asked.Load() > 0 })
	u.hold()
	second := burst(t, u, 10, 20*time.Second, false)
	eventually(t, "the others wait", func() bool { return u.held.Load() == 10 })
	if n := int64(asked.Load()); b.outstanding() != 1 || n > 1+late() {
		t.Errorf("got %d outstanding, %d asked during hold, want one", b.outstanding(), n)
	}
	restarted.Store(true)
	u.use(b)
	if errs := append(first(), second()...); len(errs) > 0 {
		t.Errorf("got errors %v, want none", errs)
	}
	if n := int64(u.retransmitted.Load()); u.resent.Load() != 1 || n > 11*late() {
		t.Errorf("got %d resent, %d retransmitted, want 1, 0", u.resent.Load(), n)
	}
}

func TestExchangeClose(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	for _, use := range []bool{false, true} {
		t.Run(fmt.Sprint("backend ", use), func(t *testing.T) {
			at, _ := udpServer(t, silent)
			u := testUpstream(t)
			if use {
				u.use(testBackend(t, u, at))
			}
			wait := burst(t, u, 50, time.Hour, false)
			eventually(t, "all wait", func() bool { return u.inflight.Load() == 50 })
			u.close()
			errs := wait()
			for _, err := range errs {
				if !errors.Is(err, errClosed) {
					t.Errorf("got error %v, want %v", err, errClosed)
				}
			}
			if len(errs) != 50 {
				t.Errorf("got %d errors, want 50", len(errs))
			}
		})
	}
}

// The reader stops reading when nothing more is outstanding. An answer that comes then is read at once, and not with the next
// one, or by being asked for again.
func TestExchangeFew(t *testing.T) {
	at, _ := udpServer(t, echo)
	u := testUpstream(t)
	u.use(testBackend(t, u, at))
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			for range 5000 {
				if _, err := u.exchange(served(t), question("a.test.", dns.TypeA), time.Now().Add(5*time.Second), false, false); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if n := u.retransmitted.Load(); n > 0 {
		t.Errorf("%d queries were sent again", n)
	}
}

// TestExchangeIDs has more queries outstanding than there are IDs, which come in no order.
func TestExchangeIDs(t *testing.T) {
	at, _ := udpServer(t, silent)
	u := testUpstream(t)
	b := testBackend(t, u, at)
	s := b.sockets[0]
	const n = maxIDs
	next, last := 0, uint16(0)
	for range n {
		q := queries.Get().(*query)
		if err := q.pack(question("a.test.", dns.TypeA)); err != nil {
			t.Fatal(err)
		}
		if err := s.add(q); err != nil {
			t.Fatalf("add: %v", err)
		}
		id := binary.BigEndian.Uint16(q.wire)
		if id == last+1 {
			next++
		}
		last = id
	}
	if next > n/100 {
		t.Errorf("%d of %d IDs follow the one before", next, n)
	}
	if len(s.waiting) != n {
		t.Fatalf("got %d different IDs, want %d", len(s.waiting), n)
	}
	q := queries.Get().(*query)
	if err := q.pack(question("a.test.", dns.TypeA)); err != nil {
		t.Fatal(err)
	}
	if err := s.add(q); !errors.Is(err, errBusy) {
		t.Errorf("add: got error %v, want %v", err, errBusy)
	}
	for _, full := range b.sockets[1:] {
		full.waiting = maps.Clone(s.waiting)
	}
	u.use(b)
	_, err := u.exchangeMsg(served(t), question("a.test.", dns.TypeA), in(100*time.Millisecond), false, false)
	if !errors.Is(err, errTimeout) || !errors.Is(err, errBusy) {
		t.Errorf("exchange: got error %v, want %v and %v", err, errTimeout, errBusy)
	}
	for _, full := range b.sockets[1:] { // a query is told only once that its backend is lost
		full.mu.Lock()
		clear(full.waiting)
		full.mu.Unlock()
	}
}

func TestExchangeAllocs(t *testing.T) {
	at, _ := udpServer(t, echo)
	u := testUpstream(t)
	u.use(testBackend(t, u, at))
	m := question("a.test.", dns.TypeA)
	m.SetEdns0(1232, true)
	got := testing.AllocsPerRun(1000, func() {
		if _, err := u.exchangeMsg(served(t), m, in(5*time.Second), false, false); err != nil {
			t.Fatal(err)
		}
	})
	if got > 10 {
		t.Errorf("got %.1f allocations for an exchange, want 10 at most", got)
	}
}

// FuzzReply gives a socket bytes from the child while one query is outstanding.
func FuzzReply(f *testing.F) {
	m := question("a.test.", dns.TypeA)
	m.Id = 0
	m.Response = true
	m.Answer = []dns.RR{&dns.A{
		Hdr: dns.RR_Header{Name: "a.test.", Rrtype: dns.TypeA, Class: dns.ClassINET},
		A:   net.IPv4(192, 0, 2, 1),
	}}
	packed, err := m.Pack()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(packed)
	f.Add(packed[:len(packed)-3])
	f.Add(packed[:headerSize])
	f.Add([]byte{})
	b, err := newBackend(netip.MustParseAddrPort("127.0.0.1:1"))
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(b.close)
	f.Fuzz(func(t *testing.T, reply []byte) {
		q := queries.Get().(*query)
		defer q.free()
		if err := q.pack(question("a.test.", dns.TypeA)); err != nil {
			t.Fatal(err)
		}
		s := &socket{b: b, waiting: map[uint16]*query{}}
		if err := s.add(q); err != nil {
			t.Fatal(err)
		}
		if len(reply) >= 2 { // the fuzzer can't know the ID
			copy(reply, q.wire[:2])
		}
		s.deliver(reply)
		if q.remove() {
			return
		}
		a, err := q.result(<-q.done) // as when the deadline meets the answer
		if err != nil {
			t.Fatal(err)
		}
		rcode, whole := rcodeOf(a.wire)
		if err := a.unpack(); err != nil {
			return
		}
		if whole && rcode != a.msg.Rcode {
			t.Errorf("RCODE %d of %v", rcode, a.msg)
		}
		if len(a.msg.Question) != 1 {
			t.Fatalf("got %v, want one question", a.msg)
		}
		got := a.msg.Question[0]
		if !strings.EqualFold(got.Name, "a.test.") || got.Qtype != dns.TypeA || got.Qclass != dns.ClassINET || !a.msg.Response {
			t.Errorf("took %v for the answer", a.msg)
		}
	})
}

// A server that says nothing costs what its queries need, however long they wait and often they are sent again.
func TestExchangeMemory(t *testing.T) {
	u := testUpstream(t)
	var sent atomic.Int64
	at, _ := udpServer(t, func(*net.UDPConn, netip.AddrPort, []byte) { sent.Add(1) })
	b := testBackend(t, u, at)
	u.use(b)
	inUse := func() int {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC() // a sync.Pool keeps for one
		runtime.ReadMemStats(&m)
		return int(m.HeapAlloc + m.StackInuse)
	}
	const queries, each = 2000, 24 << 10 // bytes a query; a stack of 8 KiB is the most of it
	before := inUse()
	deadline := time.Now().Add(time.Hour)
	var wg sync.WaitGroup
	for i := range queries {
		wg.Go(func() {
			q := question(fmt.Sprintf("n%d.test.", i), dns.TypeA)
			if _, err := u.exchange(context.Background(), q, deadline, false, false); !errors.Is(err, errClosed) {
				t.Errorf("got %v, want errClosed", err)
			}
		})
	}
	eventually(t, "most were sent", func() bool { return b.outstanding() == queries && sent.Load() > queries/2 })
	again := func(times int) func() bool {
		return func() bool { return int(sent.Load()) >= times*queries*3/4 } // the first time, some don't fit its buffer
	}
	eventually(t, "they were sent again", again(2))
	first := inUse() - before
	if first > queries*each {
		t.Errorf("%d bytes a query, want %d at most", first/queries, each)
	}
	eventually(t, "and again", again(4))
	if later := inUse() - before; later > first+first/4 {
		t.Errorf("%d bytes for the queries at first, %d when they were sent again", first, later)
	}
	u.close()
	wg.Wait()
	after := inUse() - before
	t.Logf("%d bytes a query at first, %d left of each", first/queries, after/queries)
	if after > first/2 {
		t.Errorf("%d of %d bytes are left", after, first)
	}
}

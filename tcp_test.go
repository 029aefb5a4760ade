package nanny

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"
	"go.uber.org/goleak"
)

// tcpServer answers each query over UDP with TC, and calls handle for each connection, in a
// goroutine of its own, until the test ends. A nil handle: nobody listens on TCP.
func tcpServer(t *testing.T, handle func(conn net.Conn)) netip.AddrPort {
	t.Helper()
	at, _ := udpServerAt(t, freeAddr(t, "127.0.0.1"), func(conn *net.UDPConn, from netip.AddrPort, packet []byte) {
		packet[2] |= 0x02 // TC
		echo(conn, from, packet)
	})
	if handle == nil {
		return at
	}
	l, err := net.Listen("tcp", at.String())
	if err != nil {
		t.Fatalf("listening: %v", err)
	}
	var (
		wg    sync.WaitGroup
		mu    sync.Mutex
		conns []net.Conn
	)
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			conns = append(conns, conn)
			mu.Unlock()
			wg.Go(func() {
				defer conn.Close()
				handle(conn)
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		mu.Lock()
		for _, conn := range conns {
			conn.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
	return at
}

// readTCP reads a query with its length; nil at the end.
func readTCP(conn net.Conn) []byte {
	var head [2]byte
	if _, err := io.ReadFull(conn, head[:]); err != nil {
		return nil
	}
	packet := make([]byte, 2+int(head[0])<<8+int(head[1]))
	copy(packet, head[:])
	if _, err := io.ReadFull(conn, packet[2:]); err != nil {
		return nil
	}
	return packet
}

// echoTCP answers n queries of conn with themselves.
func echoTCP(conn net.Conn, n int) {
	for range n {
		packet := readTCP(conn)
		if packet == nil {
			return
		}
		packet[4] |= 0x80
		_, _ = conn.Write(packet)
	}
}

// bigRecords has dnsmasq answer TXT of big.test with n records, beyond what fits UDP.
func bigRecords(n int) []string {
	args := []string{"--local=/test/"}
	for i := range n {
		args = append(args, fmt.Sprintf("--txt-record=big.test,%d-%s", i, strings.Repeat("x", 200)))
	}
	return args
}

func TestExchangeTCPDnsmasq(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	at, stop := realDnsmasq(t, "127.0.0.1", bigRecords(40)...)
	u := testUpstream(t)
	b := testBackend(t, u, at)
	u.use(b)
	t.Run("stream", func(t *testing.T) {
		m := question("big.test.", dns.TypeTXT)
		a, err := u.exchangeMsg(served(t), m, in(10*time.Second), true, false)
		if err != nil || a.msg.Truncated || len(a.msg.Answer) != 40 || a.msg.Id != m.Id {
			t.Fatalf("got %v, %v, want 40 records", a.msg, err)
		}
		if !a.tcp || a.remote != at || a.local.Addr() != at.Addr() || a.local.Port() == 0 {
			t.Errorf("got tcp %t, local %s, remote %s, want TCP to %s", a.tcp, a.local, a.remote, at)
		}
	})
	t.Run("UDP client", func(t *testing.T) {
		a, err := u.exchangeMsg(served(t), question("big.test.", dns.TypeTXT), in(10*time.Second), false, false)
		if err != nil || !a.msg.Truncated || a.tcp {
			t.Fatalf("got %v, %v, want a truncated answer", a.msg, err)
		}
	})
	t.Run("small answer", func(t *testing.T) {
		a, err := u.exchangeMsg(served(t), question("none.test.", dns.TypeTXT), in(10*time.Second), true, false)
		if err != nil || a.tcp || a.msg.Rcode != dns.RcodeNameError {
			t.Fatalf("got %v, %v, want NXDOMAIN over UDP", a.msg, err)
		}
	})
	for _, stream := range []bool{true, false} { // dnsmasq drops what is too large for its UDP buffer
		t.Run(fmt.Sprint("large query, stream ", stream), func(t *testing.T) {
			m := question("big.test.", dns.TypeTXT)
			m.SetEdns0(1232, false)
			m.IsEdns0().Option = append(m.IsEdns0().Option, &dns.EDNS0_PADDING{Padding: make([]byte, 1300)})
			before := b.answers()
			a, err := u.exchangeMsg(served(t), m, in(10*time.Second), stream, false)
			if err != nil || !a.tcp || len(a.msg.Answer) != 40 || b.answers() != before {
				t.Fatalf("got %v, %v, want 40 records over TCP alone", a.msg, err)
			}
		})
	}
	t.Run("250 in a row", func(t *testing.T) { // dnsmasq ends a connection after 100
		for i := range 250 {
			a, err := u.exchangeMsg(served(t), question("big.test.", dns.TypeTXT), in(10*time.Second), true, false)
			if err != nil || !a.tcp || len(a.msg.Answer) != 40 {
				t.Fatalf("query %d: got %v, %v, want 40 records", i, a.msg, err)
			}
		}
	})
	t.Run("200 at once", func(t *testing.T) {
		var wg sync.WaitGroup
		for range 200 {
			wg.Go(func() {
				a, err := u.exchangeMsg(served(t), question("big.test.", dns.TypeTXT), in(20*time.Second), true, false)
				if err != nil || !a.tcp || len(a.msg.Answer) != 40 {
					t.Errorf("got %v, %v, want 40 records", a.msg, err)
				}
			})
		}
		wg.Wait()
		b.tcp.mu.Lock()
		defer b.tcp.mu.Unlock()
		if got := len(b.tcp.open); got < 1 || got > tcpConns {
			t.Errorf("got %d connections, want %d at most", got, tcpConns)
		}
	})
	stop()
	u.close()
}

func TestExchangeTCPMisbehaviour(t *testing.T) {
	const soon = tcpPersist / 5
	tests := []struct {
		name    string
		handle  func(conn net.Conn)
		queries int
		budget  time.Duration
		want    error
	}{
		{"well-behaved", func(conn net.Conn) { echoTCP(conn, 1000) }, 50, 10 * time.Second, nil},
		{"closes after each answer", func(conn net.Conn) { echoTCP(conn, 1) }, 50, 10 * time.Second, nil},
		{"resets after each answer", func(conn net.Conn) {
			echoTCP(conn, 1)
			_ = conn.(*net.TCPConn).SetLinger(0)
		}, 50, 10 * time.Second, nil},
		{"in pieces", func(conn net.Conn) {
			for {
				packet := readTCP(conn)
				if packet == nil {
					return
				}
				packet[4] |= 0x80
				for i := range packet {
					_, _ = conn.Write(packet[i : i+1])
				}
			}
		}, 3, 10 * time.Second, nil},
		{"64 KiB", func(conn net.Conn) {
			for {
				packet := readTCP(conn)
				if packet == nil {
					return
				}
				m := new(dns.Msg)
				if m.Unpack(packet[2:]) != nil {
					return
				}
				m.Response, m.Compress = true, true
				for m.Len() < 64000 {
					m.Answer = append(m.Answer, &dns.TXT{
						Hdr: dns.RR_Header{Name: "a.test.", Rrtype: dns.TypeTXT, Class: dns.ClassINET},
						Txt: []string{strings.Repeat("x", 255), strings.Repeat("y", 255), strings.Repeat("z", 255)},
					})
				}
				packed, _ := m.Pack()
				_, _ = conn.Write(append([]byte{byte(len(packed) >> 8), byte(len(packed))}, packed...))
			}
		}, 3, 10 * time.Second, nil},
		{"nobody listens", nil, 1, soon, errTimeout},
		{"never answers", func(conn net.Conn) { _, _ = io.Copy(io.Discard, conn) }, 1, soon, errTimeout},
		{"closes at once", func(net.Conn) {}, 1, soon, errTimeout},
		{"closes after each question", func(conn net.Conn) { readTCP(conn) }, 1, 10 * time.Second, errNotTCP},
		{"half an answer", func(conn net.Conn) {
			if packet := readTCP(conn); packet != nil {
				_, _ = conn.Write(packet[:len(packet)/2])
			}
		}, 1, soon, errTimeout},
		{"empty answer", func(conn net.Conn) {
			if readTCP(conn) != nil {
				_, _ = conn.Write([]byte{0, 0})
			}
		}, 1, soon, errTimeout},
		{"other ID", func(conn net.Conn) {
			if packet := readTCP(conn); packet != nil {
				packet[3]++
				packet[4] |= 0x80
				_, _ = conn.Write(packet)
			}
		}, 1, soon, errTimeout},
		{"other question", func(conn net.Conn) {
			if packet := readTCP(conn); packet != nil {
				packet[2+headerSize+1] = 'b'
				packet[4] |= 0x80
				_, _ = conn.Write(packet)
			}
		}, 1, soon, errTimeout},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			u := testUpstream(t)
			b := testBackend(t, u, tcpServer(t, tc.handle))
			u.use(b)
			for i := range tc.queries {
				start := time.Now()
				a, err := u.exchangeMsg(served(t), question("a.test.", dns.TypeA), in(tc.budget), true, false)
				if tc.budget == soon && time.Since(start) > tcpPersist && errors.Is(err, errNotTCP) {
					continue // the machine was too busy to see the end of so short a time
				}
				if !errors.Is(err, tc.want) || err == nil && (!a.tcp || a.msg.Truncated) {
					t.Fatalf("query %d: got %v, %v, want %v", i, a.msg, err, tc.want)
				}
			}
			if b.outstanding() != 0 || len(b.tcp.turns) != 0 {
				t.Errorf("got %d outstanding, %d at a connection, want none", b.outstanding(), len(b.tcp.turns))
			}
		})
	}
}

// TestExchangeTCPDrop drops a backend whose connections are all taken, with queries in the line.
func TestExchangeTCPDrop(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	t.Run("", func(t *testing.T) {
		var asked atomic.Int32
		silentAt := tcpServer(t, func(conn net.Conn) {
			asked.Add(1)
			_, _ = io.Copy(io.Discard, conn)
		})
		at := tcpServer(t, func(conn net.Conn) { echoTCP(conn, 1000) })
		u := testUpstream(t)
		b1, b2 := testBackend(t, u, silentAt), testBackend(t, u, at)
		u.use(b1)
		wait := burst(t, u, 50, 20*time.Second, true)
		eventually(t, "all are outstanding over TCP", func() bool {
			return asked.Load() == tcpConns && b1.outstanding() == 50 && b1.answers() == 50
		})
		u.use(b2)
		u.drop(b1)
		if errs := wait(); len(errs) > 0 {
			t.Errorf("got %d errors, the first %v, want none", len(errs), errs[0])
		}
		if got := u.resent.Load(); got < tcpConns || got > 50 { // some may not have been in the line yet
			t.Errorf("got %d resent, want %d to 50", got, tcpConns)
		}
	})
}

func TestExchangeTCPContext(t *testing.T) {
	var asked atomic.Int32
	u := testUpstream(t)
	u.use(testBackend(t, u, tcpServer(t, func(conn net.Conn) {
		asked.Add(1)
		_, _ = io.Copy(io.Discard, conn)
	})))
	ctx, cancel := context.WithCancel(t.Context())
	const n = 2 * tcpConns
	errs := make(chan error)
	for range n {
		go func() {
			_, err := u.exchangeMsg(ctx, question("a.test.", dns.TypeA), in(time.Hour), true, false)
			errs <- err
		}()
	}
	eventually(t, "the connections are taken", func() bool { return asked.Load() == tcpConns })
	cancel()
	for range n {
		if err := <-errs; !errors.Is(err, context.Canceled) {
			t.Errorf("got error %v, want %v", err, context.Canceled)
		}
	}
}

// TestTCPPool looks at what becomes of idle connections.
func TestTCPPool(t *testing.T) {
	var conns atomic.Int32
	u := testUpstream(t)
	b := testBackend(t, u, tcpServer(t, func(conn net.Conn) {
		conns.Add(1)
		echoTCP(conn, 1000)
	}))
	u.use(b)
	p := b.tcp
	ask := func(want int32) {
		t.Helper()
		a, err := u.exchangeMsg(served(t), question("a.test.", dns.TypeA), in(10*time.Second), true, false)
		if err != nil || !a.tcp {
			t.Fatalf("got tcp %t, %v, want an answer over TCP", a.tcp, err)
		}
		if conns.Load() != want || len(p.idle) != 1 || len(p.open) != 1 {
			t.Fatalf("got %d connections so far, %d idle, %d open, want %d, 1, 1", conns.Load(), len(p.idle), len(p.open), want)
		}
	}
	ask(1)
	ask(1)
	b.renew()
	ask(2)
	p.expire()
	ask(2)
	p.idle[0].used = in(-tcpIdle)
	p.expire()
	if len(p.idle) != 0 || len(p.open) != 0 || p.timer != nil {
		t.Errorf("got %d idle, %d open, timer %v, want none", len(p.idle), len(p.open), p.timer)
	}
	ask(3)
	u.use(b) // is in use already
	ask(3)
	u.hold()
	u.use(b) // restarted
	ask(4)
}

package nanny

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"testing"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"
)

// Nobody but dnsmasq gets the port that is kept for it, though it lets others (SO_REUSEADDR), and it hears what is sent
// there.
func TestPortKept(t *testing.T) {
	p, err := takePort(netip.AddrPort{})
	if err != nil {
		t.Fatal(err)
	}
	udp := net.UDPAddrFromAddrPort(p.addr)
	if conn, err := net.ListenUDP("udp", udp); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("%s: %v, %v; want it to be in use", p.addr, conn, err)
	}
	ch, err := start(command{
		path: "dnsmasq", args: append(dnsmasqArgs(p.addr), "--address=/a.test/192.0.2.1"), port: p,
		emit: func(line string) { t.Log(line) },
	})
	if err != nil {
		p.release()
		t.Fatal(err)
	}
	defer ch.stop(0)
	answers := func() {
		t.Helper()
		q := new(dns.Msg)
		q.SetQuestion("a.test.", dns.TypeA)
		if r, err := ask(p.addr, q, testPatience); err != nil || len(r.Answer) != 1 {
			t.Errorf("got %v, %v; want one address", r, err)
		}
	}
	must(t, awaitReady(t.Context(), ch))
	answers()
	must(t, p.reclaim())
	shutOut(t, p.addr)
	answers()
	ch.stop(0)
	conn, err := net.ListenUDP("udp", udp)
	if err != nil {
		t.Fatalf("once the child is gone: %v", err)
	}
	conn.Close()
}

func TestSupervisorPortKept(t *testing.T) {
	for name, listen := range map[string]netip.AddrPort{"free": {}, "fixed": freeAddr(t, "127.0.0.1"), "IPv6": freeAddr(t, "::1")} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, spec{listen: listen}, settings{}, map[string]string{"a.conf": "address=/a.test/192.0.2.1\n"})
			for i := range 2 {
				b.await("x.a.test", fmt.Sprintf("192.0.2.%d", i+1))
				shutOut(t, b.stats.run.Load().child.addr)
				b.write("a.conf", fmt.Sprintf("address=/a.test/192.0.2.%d\n", i+2))
			}
		})
	}
}

// shutOut binds addr as dnsmasq does, which must fail.
func shutOut(t *testing.T, addr netip.AddrPort) {
	t.Helper()
	reuse := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		if ctlErr := c.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
		}); ctlErr != nil {
			return ctlErr
		}
		return err
	}}
	if conn, err := reuse.ListenPacket(t.Context(), "udp", addr.String()); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("UDP %s: %v, %v; want it to be in use", addr, conn, err)
	}
	if conn, err := reuse.Listen(t.Context(), "tcp", addr.String()); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("TCP %s: %v, %v; want it to be in use", addr, conn, err)
	}
}

package nanny

import (
	"errors"
	"fmt"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// Nobody but dnsmasq gets the port that is kept for it, and dnsmasq hears what is sent there.
func TestReserve(t *testing.T) {
	addr, release, err := reserve()
	if err != nil {
		t.Fatal(err)
	}
	udp, tcp := net.UDPAddrFromAddrPort(addr), net.TCPAddrFromAddrPort(addr)
	taken := func() {
		t.Helper()
		if conn, err := net.ListenUDP("udp", udp); !errors.Is(err, syscall.EADDRINUSE) {
			t.Errorf("UDP %s: %v, %v; want it to be in use", addr, conn, err)
		}
		if conn, err := net.DialTCP("tcp", tcp, tcp); !errors.Is(err, syscall.EADDRINUSE) {
			t.Errorf("TCP from %s: %v, %v; want it to be in use", addr, conn, err)
		}
	}
	taken()
	ch, err := start(command{
		path: "dnsmasq", addr: addr, emit: func(line string) { t.Log(line) }, args: []string{
			"-k", "--conf-file=/dev/null", "--no-resolv", "--no-hosts", "--user=", "--group=", "--pid-file=", "--log-facility=-",
			"--bind-interfaces", "--listen-address=" + addr.Addr().String(), fmt.Sprintf("--port=%d", addr.Port()), "--address=/a.test/192.0.2.1",
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer ch.stop(stopTime)
	if err := awaitReady(t.Context(), ch); err != nil {
		t.Fatal(err)
	}
	taken()
	for range 2 {
		q := new(dns.Msg)
		q.SetQuestion("a.test.", dns.TypeA)
		if r, err := ask(addr, q, time.Second); err != nil || len(r.Answer) != 1 {
			t.Errorf("got %v, %v; want one address", r, err)
		}
		release()
		release = func() {}
	}
	taken()
}

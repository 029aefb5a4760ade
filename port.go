package nanny

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
)

var loopback = netip.AddrFrom4([4]byte{127, 0, 0, 1})

// port is where a child is to answer. It is kept for it from before its start to its end: on Linux nobody else can bind it
// for UDP, but for the moment in which dnsmasq does, nor does the kernel give it to a client. For TCP the one who listens
// there has it alone.
type port struct {
	addr netip.AddrPort
	conn *net.UDPConn // nil: not kept
}

// takePort takes listen or, if that is invalid, a free port of 127.0.0.1.
func takePort(listen netip.AddrPort) (p port, err error) {
	if listen.IsValid() {
		p, err = bindPort(listen)
		switch {
		case errors.Is(err, os.ErrPermission): // the child may be allowed to what CoreDNS isn't
			return port{addr: listen}, nil
		case errors.Is(err, syscall.EADDRINUSE):
			return p, fmt.Errorf("listen %s: another program has this address (a dnsmasq left from an earlier run, or CoreDNS itself?): %w", listen, err)
		case err != nil:
			return p, fmt.Errorf("listen %s: %w", listen, err)
		}
		return p, nil
	}
	for range portTries {
		if p, err = bindPort(netip.AddrPortFrom(loopback, 0)); err == nil {
			return p, nil
		}
	}
	return p, fmt.Errorf("no free port of %s: %w", loopback, err)
}

func bindPort(at netip.AddrPort) (port, error) {
	// TCP first: of the ports there, the kernel knows a free one where thousands are still closing.
	tcp, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(at))
	if err != nil {
		return port{}, err
	}
	at = netip.AddrPortFrom(at.Addr(), tcp.Addr().(*net.TCPAddr).AddrPort().Port())
	tcp.Close()
	conn, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
	if err != nil {
		return port{}, err
	}
	if err := lend(conn); err != nil {
		conn.Close()
		return port{}, err
	}
	return port{at, conn}, nil
}

// reclaim shuts others out, once the child has bound the port.
func (p port) reclaim() error {
	if p.conn == nil {
		return nil
	}
	return reclaim(p.conn)
}

// release ends it.
func (p port) release() {
	if p.conn != nil {
		p.conn.Close()
	}
}

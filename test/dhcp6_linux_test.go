package test

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// Numbers of DHCPv6 (RFC 8415, RFC 4704).
const (
	solicit6, reply6            = 1, 7
	clientID6, ia6, address6    = 1, 3, 5
	rapid6, nameServers6, fqdn6 = 14, 23, 39
)

// option6 is a DHCPv6 option.
func option6(code uint16, data ...byte) []byte {
	head := binary.BigEndian.AppendUint16(nil, code)
	return append(binary.BigEndian.AppendUint16(head, uint16(len(data))), data...)
}

// options6 finds the first option of each code.
func options6(data []byte) map[uint16][]byte {
	found := map[uint16][]byte{}
	for len(data) >= 4 {
		code, size := binary.BigEndian.Uint16(data), int(binary.BigEndian.Uint16(data[2:]))
		if data = data[4:]; size > len(data) {
			break
		}
		if found[code] == nil {
			found[code] = data[:size]
		}
		data = data[size:]
	}
	return found
}

// lease6 lets a device with the last byte of its DUID, and a name if it isn't empty, ask for an IPv6 address, with the
// reply to its first message (rapid commit). It returns the address and the name server.
func (h *house) lease6(t *testing.T, id byte, name string) (address, server string) {
	t.Helper()
	message := append([]byte{solicit6, 0, 0, id}, option6(clientID6, 0, 3, 0, 1, 2, 0, 0, 0, 0, id)...)
	message = append(message, option6(ia6, 0, 0, 0, id, 0, 0, 0, 0, 0, 0, 0, 0)...)
	message = append(message, option6(rapid6)...)
	if name != "" {
		label := append([]byte{0, byte(len(name))}, name...) // flags, and a name that isn't complete
		message = append(message, option6(fqdn6, label...)...)
	}
	var reply map[uint16][]byte
	within(t, patience, "a lease", func() bool {
		h.client.do(t, func() {
			wire, err := net.InterfaceByName(h.client.name)
			if err != nil {
				t.Error(err)
				return
			}
			conn, err := net.ListenUDP("udp6", &net.UDPAddr{Port: 546})
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			_ = conn.SetDeadline(time.Now().Add(time.Second))
			servers := net.UDPAddr{IP: net.ParseIP("ff02::1:2"), Port: 547, Zone: fmt.Sprint(wire.Index)} // the name's index is of another namespace
			if _, err := conn.WriteTo(message, &servers); err != nil {
				return // there is no address of the link yet
			}
			packet := make([]byte, 1500)
			if n, err := conn.Read(packet); err == nil && n > 4 && packet[0] == reply6 && packet[3] == id {
				reply = options6(packet[4:n])
			}
		})
		return reply != nil
	})
	if ia := reply[ia6]; len(ia) > 12 {
		if a := options6(ia[12:])[address6]; len(a) >= 16 {
			address = netip.AddrFrom16([16]byte(a)).String()
		}
	}
	if s := reply[nameServers6]; len(s) >= 16 {
		server = netip.AddrFrom16([16]byte(s)).String()
	}
	if address == "" {
		t.Fatalf("no address in %x", reply)
	}
	return address, server
}

// leases is the gauge of leases.
func (h *house) leases(t *testing.T) (count string) {
	t.Helper()
	h.router.do(t, func() {
		conn, err := net.DialTimeout("tcp", "127.0.0.1:9153", queryWait)
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(patience))
		fmt.Fprint(conn, "GET /metrics HTTP/1.0\r\n\r\n")
		page, err := io.ReadAll(conn)
		if err != nil {
			t.Error(err)
		}
		_, count, _ = strings.Cut(string(page), "\ncoredns_nanny_dnsmasq_dhcp_leases{zones=\".\"} ")
		count, _, _ = strings.Cut(count, "\n")
	})
	return count
}

func TestDHCPv6(t *testing.T) {
	t.Parallel()
	h := newHouse(t)
	h.corefile = strings.Replace(h.corefile, "errors\n", "errors\n    prometheus 127.0.0.1:9153\n", 1)
	put(t, h.dir, "more.conf", "dhcp-host=id:00:03:00:01:02:00:00:00:00:02,[::1f0],scanner\n")
	h.client.run(t, "ip", "address", "add", "192.0.2.9/24", "dev", "lan1")
	h.client.run(t, "ip", "address", "add", "2001:db8:1::9/64", "dev", "lan1")
	port := h.router.sample("udp6", 547)
	c := h.start(t)

	laptop, server := h.lease6(t, 1, "laptop")
	start := time.Now()
	h.known(t, "laptop.home.example", laptop)
	if took := time.Since(start); took > soon {
		t.Errorf("known after %s, want 1 s", took)
	}
	if !strings.HasPrefix(laptop, "2001:db8:1::1") {
		t.Errorf("got %s, want an address of the range", laptop)
	}
	h.client.do(t, func() {
		r, err := exchange("udp", net.JoinHostPort(server, "53"), question("laptop.home.example", dns.TypeAAAA))
		if err != nil || len(r.Answer) != 1 {
			t.Errorf("the name server %q that the lease names: got %v, %v", server, r, err)
		}
	})
	scanner, _ := h.lease6(t, 2, "")
	if scanner != "2001:db8:1::1f0" {
		t.Errorf("got %s for the scanner, want its fixed address", scanner)
	}
	all := func() {
		t.Helper()
		h.known(t, "laptop.home.example", laptop)
		h.known(t, "scanner.home.example", scanner)
		if got := h.leases(t); got != "2" {
			t.Errorf("got %q leases, want 2", got)
		}
	}
	all()

	child := h.child(t, c)
	kill(t, child.pid, syscall.SIGKILL)
	all()
	if now := h.child(t, c); now.pid == child.pid {
		t.Error("it is the same dnsmasq")
	}
	if err := c.end(syscall.SIGTERM); err != nil {
		t.Error(err)
	}
	if n := h.router.sockets("udp6", 547); n != 0 {
		t.Errorf("%d sockets of port 547 are left", n)
	}
	h.start(t)
	all()
	if again, _ := h.lease6(t, 1, "laptop"); again != laptop {
		t.Errorf("got %s, want %s again", again, laptop)
	}
	if port.end(); port.most != 1 || port.samples == 0 {
		t.Errorf("at most %d DHCPv6 servers in %d samples, want 1", port.most, port.samples)
	}
}

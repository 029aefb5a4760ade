package nanny

import (
	"context"
	"encoding/binary"
	"reflect"
	"strings"

	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/plugin"
	"github.com/coredns/coredns/plugin/pkg/transport"
	"github.com/coredns/coredns/request"
	"github.com/miekg/dns"
)

// An answer goes to the client as the octets that dnsmasq sent where nobody between looks at it. Else it is unpacked for
// the plugins, and packed again by CoreDNS.

// overUDP tells whether the client's answer has to fit a datagram. QUIC is on UDP too, but its streams carry any length.
func overUDP(ctx context.Context, state *request.Request) bool {
	if state.Proto() != "udp" {
		return false
	}
	server, ok := ctx.Value(dnsserver.Key{}).(*dnsserver.Server)
	return !ok || strings.HasPrefix(server.Addr, transport.DNS+"://")
}

// takesOctets tells whether w, of a client on UDP, writes octets as they are: it is CoreDNS's own, and no plugin has wrapped it to
// see the answer. CoreDNS's own is also around a plugin's, where one (*file* for the target of a CNAME) asks the server itself.
func takesOctets(w dns.ResponseWriter) bool {
	for noter != nil && reflect.TypeOf(w) == noter {
		w = reflect.ValueOf(w).Elem().FieldByIndex(noted).Interface().(dns.ResponseWriter)
	}
	own, ok := w.(*request.ScrubWriter)
	if !ok {
		return false
	}
	t := reflect.TypeOf(own.ResponseWriter)
	return t.Kind() == reflect.Pointer && t.Elem().PkgPath() == library
}

// library is the package of the writer that a message comes with.
var library = reflect.TypeFor[dns.Msg]().PkgPath()

// noter is what CoreDNS wraps a writer in for each plugin, to note which one writes, and noted where the writer is in it.
// CoreDNS has no name for it.
var noter, noted = func() (typ reflect.Type, field []int) {
	see := func(_ context.Context, w dns.ResponseWriter, _ *dns.Msg) (int, error) {
		t := reflect.TypeOf(w)
		if t == nil || t.Kind() != reflect.Pointer || t.Elem().Kind() != reflect.Struct {
			return 0, nil
		}
		if f, ok := t.Elem().FieldByName("ResponseWriter"); ok && f.Type == reflect.TypeFor[dns.ResponseWriter]() {
			typ, field = t, f.Index
		}
		return 0, nil
	}
	_, _ = plugin.NextOrFailure("", plugin.HandlerFunc(see), context.Background(), nil, nil)
	return typ, field
}()

// rcodeOf returns the RCODE of a message, that of its OPT record included (RFC 6891, section 6.1.3). It is false unless the
// octets are exactly a message: what isn't is to be looked at by those who say what is wrong.
func rcodeOf(wire []byte) (rcode int, ok bool) {
	if len(wire) < headerSize {
		return 0, false
	}
	count := func(i int) int { return int(binary.BigEndian.Uint16(wire[i:])) }
	rcode = int(wire[3] & 0xf)
	at := headerSize
	for range count(4) {
		if at = skipName(wire, at) + 4; at > len(wire) {
			return 0, false
		}
	}
	const fixed = 10 // type, class, TTL and length of the data
	for range count(6) + count(8) + count(10) {
		if at = skipName(wire, at); at+fixed > len(wire) {
			return 0, false
		}
		if binary.BigEndian.Uint16(wire[at:]) == dns.TypeOPT {
			rcode |= int(wire[at+4]) << 4
		}
		at += fixed + count(at+8)
	}
	return rcode, at == len(wire)
}

// skipName returns where the name at wire[at] ends, or a place beyond wire.
func skipName(wire []byte, at int) int {
	for at < len(wire) {
		switch c := int(wire[at]); {
		case c == 0:
			return at + 1
		case c >= 0xc0: // a pointer is the end
			return at + 2
		case c > 63:
			return len(wire) + 1
		default:
			at += c + 1
		}
	}
	return len(wire) + 1
}

package nanny

import (
	"context"
	"net"
	"net/netip"
	"time"

	"github.com/coredns/coredns/plugin/dnstap"
	"github.com/coredns/coredns/plugin/dnstap/msg"
	"github.com/coredns/coredns/request"

	tap "github.com/dnstap/golang-dnstap"
)

// setTap remembers the chain of dnstap plugins that begins with d.
func (n *Nanny) setTap(d *dnstap.Dnstap) {
	for ok := true; ok; d, ok = d.Next.(*dnstap.Dnstap) {
		n.tap = append(n.tap, d)
	}
}

// toDnstap sends the query to dnsmasq and its answer to the dnstap plugins, from CoreDNS's point of view, as the
// types FORWARDER_QUERY and FORWARDER_RESPONSE.
func (n *Nanny) toDnstap(ctx context.Context, a answer, state *request.Request, start time.Time) {
	address := func(ap netip.AddrPort) net.Addr {
		if a.tcp {
			return net.TCPAddrFromAddrPort(ap)
		}
		return net.UDPAddrFromAddrPort(ap)
	}
	now := time.Now()
	for _, d := range n.tap {
		q, r := new(tap.Message), new(tap.Message)
		for _, m := range []*tap.Message{q, r} {
			msg.SetQueryTime(m, start)
			msg.SetQueryAddress(m, address(a.local))
			msg.SetResponseAddress(m, address(a.remote))
		}
		msg.SetType(q, tap.Message_FORWARDER_QUERY)
		msg.SetType(r, tap.Message_FORWARDER_RESPONSE)
		msg.SetResponseTime(r, now)
		if d.IncludeRawMessage {
			q.QueryMessage, _ = state.Req.Pack()
			r.ResponseMessage, _ = a.msg.Pack()
		}
		d.TapMessageWithMetadata(ctx, q, *state)
		d.TapMessageWithMetadata(ctx, r, *state)
	}
}

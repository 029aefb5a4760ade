// Package nanny is a CoreDNS plugin that keeps a dnsmasq process and proxies zones to it.
//
// Data flows one way. A watched directory becomes a snapshot (sync.go, kubedns.go), the snapshot a configuration
// (config.go), which is staged (stage.go) and started as a child (child.go); the supervisor (nanny.go) puts it into
// service by telling the exchange (upstream.go) its address; the handler (plugin.go) asks the exchange.
package nanny

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/coredns/coredns/plugin"
	"github.com/coredns/coredns/plugin/dnstap"
	"github.com/coredns/coredns/plugin/metadata"
	"github.com/coredns/coredns/plugin/pkg/fall"
	"github.com/coredns/coredns/request"

	"github.com/miekg/dns"
	ot "github.com/opentracing/opentracing-go"
	otext "github.com/opentracing/opentracing-go/ext"
)

// Nanny is one nanny block: the handler that sends its zones to a dnsmasq.
type Nanny struct {
	Next plugin.Handler

	where         string // file and line in the Corefile
	zones         []string
	except        []string
	fall          fall.F
	maxConcurrent int64
	spec          spec
	set           settings

	sup      atomic.Pointer[supervisor] // from OnStartup on
	tap      []*dnstap.Dnstap
	observer *observer
	inflight atomic.Int64
}

var errLimit = errors.New("concurrent queries exceeded max_concurrent")

// Name implements plugin.Handler.
func (n *Nanny) Name() string { return "nanny" }

// Ready implements ready.Readiness: a child is in service, and so are those of the blocks after this one, since *ready*
// asks one plugin of a name only. An instance that was replaced is ready, too.
func (n *Nanny) Ready() bool {
	sup := n.sup.Load()
	if sup == nil {
		return false
	}
	select {
	case <-sup.done:
	default:
		if sup.stats.run.Load() == nil {
			return false
		}
	}
	next, ok := n.Next.(*Nanny)
	return !ok || next.Ready()
}

// ServeDNS implements plugin.Handler.
func (n *Nanny) ServeDNS(ctx context.Context, w dns.ResponseWriter, r *dns.Msg) (int, error) {
	state := request.Request{W: w, Req: r}
	if !n.match(state.Name()) {
		return plugin.NextOrFailure(n.Name(), n.Next, ctx, w, r)
	}
	switch {
	case r.Opcode != dns.OpcodeQuery:
		return dns.RcodeNotImplemented, nil
	case r.Response || len(r.Question) != 1 || len(r.Answer) > 0 || len(r.Ns) > 0:
		// dnsmasq would send it to its upstreams, past its own rules.
		return dns.RcodeFormatError, nil
	}
	sup := n.sup.Load()
	inflight := n.inflight.Add(1)
	defer n.inflight.Add(-1)
	if n.maxConcurrent > 0 && inflight > n.maxConcurrent {
		n.observer.rejects.Inc()
		return dns.RcodeRefused, errLimit
	}

	if sup.loop.sees(state.Name()) {
		return dns.RcodeRefused, nil
	}
	key, ok := sup.loop.enter(&state)
	if !ok {
		return dns.RcodeRefused, nil
	}
	defer sup.loop.leave(key)

	start := time.Now()
	falls := n.Next != nil && n.fall.Through(state.Name())
	udp := overUDP(ctx, &state)
	a, err := n.ask(ctx, sup, &state, start.Add(n.set.timeout), !udp, falls)
	var rcode int
	if err == nil {
		rcode, err = n.read(&a, &state, udp)
	}
	switch {
	case err == nil:
	case falls:
		return plugin.NextOrFailure(n.Name(), n.Next, ctx, w, r)
	default:
		n.observer.observe(dns.RcodeServerFailure, start)
		return dns.RcodeServerFailure, err
	}
	if metadata.ValueFuncs(ctx) != nil {
		metadata.SetValueFunc(ctx, "nanny/upstream", a.remote.String)
		metadata.SetValueFunc(ctx, "nanny/version", sup.stats.versionInService)
	}
	if len(n.tap) > 0 {
		n.toDnstap(ctx, a, &state, start)
	}
	n.observer.observe(rcode, start)
	switch {
	case rcode == dns.RcodeNameError && falls:
		return plugin.NextOrFailure(n.Name(), n.Next, ctx, w, r)
	case a.msg == nil:
		_, err = w.Write(a.wire)
	default:
		err = w.WriteMsg(a.msg)
	}
	if err != nil {
		return dns.RcodeServerFailure, err
	}
	return dns.RcodeSuccess, nil
}

// ask is exchange in a span, if the query is traced.
func (n *Nanny) ask(ctx context.Context, sup *supervisor, state *request.Request, deadline time.Time, stream, falls bool) (answer, error) {
	ctx, span := startSpan(ctx)
	a, err := sup.up.exchange(ctx, state.Req, deadline, stream, falls)
	if span != nil {
		if err == nil {
			otext.PeerAddress.Set(span, a.remote.String())
		}
		span.Finish()
	}
	return a, err
}

// startSpan returns a nil span if the query isn't traced. It is no part of ask, as it would make the stack of each query larger.
func startSpan(ctx context.Context) (context.Context, ot.Span) {
	parent := ot.SpanFromContext(ctx)
	if parent == nil {
		return ctx, nil
	}
	span := parent.Tracer().StartSpan("connect", ot.ChildOf(parent.Context()))
	return ot.ContextWithSpan(ctx, span), span
}

// read returns the RCODE of a. Unless its octets can go on as they are, it unpacks it.
func (n *Nanny) read(a *answer, state *request.Request, udp bool) (rcode int, err error) {
	if udp && len(n.tap) == 0 && len(a.wire) <= state.Size() && takesOctets(state.W) {
		if rcode, ok := rcodeOf(a.wire); ok {
			return rcode, nil
		}
	}
	if err := a.unpack(); err != nil {
		return 0, err
	}
	return a.msg.Rcode, nil
}

// match tells whether name is one for dnsmasq.
func (n *Nanny) match(name string) bool {
	zone := plugin.Zones(n.zones).Matches(name)
	if zone == "" {
		return false
	}
	return zone == name || !plugin.Zones(n.except).Contains(name)
}

package nanny

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/miekg/dns"
)

const (
	probeEvery  = 250 * time.Millisecond // where no query is answered
	probeWait   = 500 * time.Millisecond // for the answer to one probe
	hungTime    = 2 * time.Second        // without any answer: the child is hung
	refusedWait = 2 * time.Millisecond   // between probes while nobody has the port yet
)

var errNoAnswer = errors.New("no answer")

// versionProbe is a question that dnsmasq answers itself, with no upstream; with `no-ident` it refuses, which
// is an answer too.
func versionProbe() *dns.Msg { return chaosQuestion("version.bind.") }

func chaosQuestion(name string) *dns.Msg {
	m := new(dns.Msg)
	m.SetQuestion(name, dns.TypeTXT)
	m.Question[0].Qclass = dns.ClassCHAOS
	m.SetEdns0(4096, false) // servers.bind can be long
	return m
}

// ask sends m to ch and returns the answer. It fails at once where the port is closed and when ch ends, as what it had
// received then brings no ECONNREFUSED, and after wait where it doesn't answer.
func (ch *child) ask(m *dns.Msg, wait time.Duration) (*dns.Msg, error) {
	return askUntil(ch.done, ch.addr, m, wait)
}

// askUntil sends m to addr over UDP and returns the answer. It fails at once where the port is closed, when gone is
// closed, and after wait where nobody answers.
func askUntil(gone <-chan struct{}, addr netip.AddrPort, m *dns.Msg, wait time.Duration) (*dns.Msg, error) {
	conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(addr))
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	co := &dns.Conn{Conn: conn, UDPSize: 4096}
	if err := co.SetDeadline(time.Now().Add(wait)); err != nil {
		return nil, err
	}
	if err := co.WriteMsg(m); err != nil {
		return nil, err
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	answered := make(chan struct{})
	defer close(answered)
	wg.Go(func() {
		select {
		case <-gone:
			_ = co.SetDeadline(time.Now())
		case <-answered:
		}
	})
	for {
		r, err := co.ReadMsg()
		if r != nil && r.Id == m.Id && r.Response {
			return r, nil
		}
		if nerr := net.Error(nil); errors.As(err, &nerr) {
			if nerr.Timeout() {
				return nil, errNoAnswer
			}
			return nil, err
		}
	}
}

// wasAsked tells whether err is the child's doing, not CoreDNS's own.
func wasAsked(err error) bool {
	return errors.Is(err, errNoAnswer) || errors.Is(err, syscall.ECONNREFUSED)
}

// awaitReady returns when ch answers on its own port. The error is ch's own when it ended before that, and a *transientError
// where CoreDNS couldn't ask.
func awaitReady(ctx context.Context, ch *child) error {
	for {
		_, err := ch.ask(versionProbe(), probeWait)
		select {
		case <-ch.done:
			return ch.err
		case <-ctx.Done():
			return context.Cause(ctx)
		default:
		}
		if err == nil {
			return nil
		}
		if !wasAsked(err) {
			return &transientError{err}
		}
		time.Sleep(refusedWait)
	}
}

// watchdog closes the returned channel when run's child lives but has answered neither a query nor a probe for hungTime. It
// ends with the child.
func watchdog(run *running, wg *sync.WaitGroup) <-chan struct{} {
	hung := make(chan struct{})
	ch, answers := run.child, run.backend.answers
	wg.Go(func() {
		tick := time.NewTicker(probeEvery)
		defer tick.Stop()
		seen, last := answers(), time.Now()
		for {
			select {
			case <-ch.done:
				return
			case <-tick.C:
			}
			if n := answers(); n != seen {
				seen, last = n, time.Now()
				continue
			}
			switch _, err := ch.ask(versionProbe(), probeWait); {
			case err == nil:
				run.probes.Add(1)
				last = time.Now()
			case run.reading.Load(), !wasAsked(err): // what CoreDNS lacks, a file say, is no reason to end the child
				last = time.Now()
			case time.Since(last) >= hungTime:
				close(hung)
				return
			}
		}
	})
	return hung
}

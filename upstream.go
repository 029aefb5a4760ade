package nanny

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"
)

// The way to the child. A query takes a random message ID on one of the few sockets of the
// current backend, is written by the goroutine that brought it, and waits; the reader of that
// socket gives it the answer.
//
// A backend that is lost (refused, dropped) wakes its queries with errLost: each goes to the next
// backend, or waits until there is one.

const (
	udpSockets = 2     // of a backend
	maxIDs     = 32768 // outstanding queries of a socket: half of all IDs, so a free one is found soon
	maxUDP     = 1232  // what dnsmasq reads of a query over UDP (its edns-packet-max)
	udpBuffer  = 65535 // the largest datagram
	recvBuffer = 4 << 20

	// dnsmasq's receive queue takes some 270 small queries, then the kernel drops them without a
	// word. So a query without an answer is sent again each retransmitAfter, and whatever isn't
	// sent for the first time takes turns: no more than that in the time turnTime, in which
	// dnsmasq reads many more.
	retransmitAfter = time.Second
	turns           = 128
	turnTime        = 10 * time.Millisecond
	retryAfter      = 20 * time.Millisecond // a failed write
	tickTime        = 20 * time.Millisecond // between two looks for queries that have waited long
)

var (
	errTimeout   = errors.New("no answer from dnsmasq in time")
	errNotTCP    = errors.New("dnsmasq closes its connections without an answer: it can't reach a server over TCP")
	errNoBackend = errors.New("no dnsmasq is ready to answer")
	errClosed    = errors.New("stopped")

	errLost = errors.New("dnsmasq has gone") // never leaves exchange
	errBusy = errors.New("too many queries outstanding")
)

// answer is what dnsmasq said.
type answer struct {
	wire []byte   // with the client's ID
	msg  *dns.Msg // wire unpacked, or nil
	*way
}

// way is how an answer came (for dnstap and metadata).
type way struct {
	local, remote netip.AddrPort
	tcp           bool
}

// upstream is the way to the child. It lives as long as the supervisor; children come and go as
// backends.
type upstream struct {
	held          atomic.Uint64 // queries that had to wait for a backend
	resent        atomic.Uint64 // queries sent again because their backend was lost
	retransmitted atomic.Uint64 // datagrams sent again for want of an answer
	inflight      atomic.Int64  // queries in exchange

	state atomic.Pointer[state]

	mu       sync.Mutex // held while state changes
	backends map[*backend]struct{}
}

// state is what exchange has to know. It is never changed, but replaced.
type state struct {
	b       *backend      // nil: none
	down    bool          // starts keep failing
	closed  bool          // for good
	changed chan struct{} // closed when another state has replaced this one
}

func newUpstream() *upstream {
	u := &upstream{backends: make(map[*backend]struct{})}
	u.state.Store(&state{changed: make(chan struct{})})
	return u
}

// change replaces the state by what f makes of it. u.mu is held.
func (u *upstream) change(f func(*state)) {
	old := u.state.Load()
	if old.closed {
		return
	}
	s := &state{b: old.b, down: old.down, changed: make(chan struct{})}
	f(s)
	u.state.Store(s)
	close(old.changed)
}

// use sends new queries and those that wait to b. What is outstanding at an earlier backend stays
// there. A b used before (held or refused meanwhile) is taken for a restarted child: what is
// outstanding at it is sent again.
func (u *upstream) use(b *backend) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.state.Load().closed {
		return
	}
	if _, ok := u.backends[b]; !ok {
		u.backends[b] = struct{}{}
		b.start()
	} else if u.state.Load().b != b || b.lost.Load() {
		b.renew()
		b.lose()
		b.lost.Store(false)
	}
	u.change(func(s *state) { s.b = b })
}

// drop ends b. Its outstanding queries are sent again to the current backend, or wait for one if b
// was that. When it returns, the sockets of b are closed and its goroutines have ended.
func (u *upstream) drop(b *backend) {
	u.mu.Lock()
	delete(u.backends, b)
	if u.state.Load().b == b {
		u.change(func(s *state) { s.b = nil })
	}
	u.mu.Unlock()
	b.close()
}

// hold makes new queries wait for the next use, during an in-place restart. The current backend
// isn't dropped.
func (u *upstream) hold() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.change(func(s *state) { s.b = nil })
}

// down tells whether starts of dnsmasq keep failing, so that queries that can go elsewhere
// (giveUp) don't wait.
func (u *upstream) down(down bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.state.Load().down != down {
		u.change(func(s *state) { s.down = down })
	}
}

// close ends all backends. Queries in exchange get errClosed, later ones too.
func (u *upstream) close() {
	u.mu.Lock()
	u.change(func(s *state) { s.b, s.closed = nil, true })
	backends := u.backends
	u.backends = nil
	u.mu.Unlock()
	for b := range backends {
		b.close()
	}
}

// unpack fills a.msg.
func (a *answer) unpack() error {
	a.msg = new(dns.Msg)
	if err := a.msg.Unpack(a.wire); err != nil {
		return fmt.Errorf("malformed answer from dnsmasq: %w", err)
	}
	return nil
}

// truncated is the flag TC.
func (a *answer) truncated() bool { return a.wire[2]&0x02 != 0 }

// exchange sends m to the current backend and returns the answer, with the ID of m. m is only
// read. deadline is the whole budget, waiting for a backend included. stream tells that the client
// isn't on UDP: a truncated answer is asked again over TCP. With giveUp it doesn't wait for a
// backend while the upstream is down. The error is that of ctx or wraps errTimeout (asked, not
// answered), errNotTCP, errNoBackend (never asked) or errClosed, or says why m is malformed.
func (u *upstream) exchange(ctx context.Context, m *dns.Msg, deadline time.Time, stream, giveUp bool) (answer, error) {
	u.inflight.Add(1)
	defer u.inflight.Add(-1)

	q := queries.Get().(*query)
	defer q.free()
	if err := q.pack(m); err != nil {
		return answer{}, fmt.Errorf("packing the query: %w", err)
	}
	q.deadline, q.giveUp = deadline, giveUp

	if len(q.wire) > maxUDP { // dnsmasq would drop it without a word
		return u.over(ctx, q, (*backend).askTCP)
	}
	a, err := u.over(ctx, q, (*backend).ask)
	if err != nil || !stream || !a.truncated() {
		return a, err
	}
	return u.over(ctx, q, (*backend).askTCP) // or an error: a truncated answer is of no use over TCP
}

// over asks one backend after the other, by the given method, until one answers.
func (u *upstream) over(ctx context.Context, q *query, ask func(*backend, context.Context, *query) (answer, error)) (answer, error) {
	for again := false; ; again = true {
		b, err := u.current(ctx, q)
		if err != nil {
			return answer{}, err
		}
		if again {
			u.resent.Add(1)
		}
		q.again = q.again || again
		a, err := ask(b, ctx, q)
		if q.retransmitted > 0 {
			u.retransmitted.Add(q.retransmitted)
			q.retransmitted = 0
		}
		if err == nil {
			return a, nil
		}
		if !errors.Is(err, errLost) {
			return answer{}, err
		}
	}
}

// current returns the current backend; it waits for one if it has to.
func (u *upstream) current(ctx context.Context, q *query) (*backend, error) {
	for waited := false; ; {
		s := u.state.Load()
		switch {
		case s.closed:
			return nil, errClosed
		case s.b != nil && !s.b.lost.Load():
			return s.b, nil
		case s.down && q.giveUp:
			return nil, errNoBackend
		}
		if !waited {
			waited = true
			if !q.again {
				q.again = true
				u.held.Add(1)
			}
		}
		left := time.Until(q.deadline)
		if s.b != nil {
			q.timer.Reset(min(left, retransmitAfter))
		} else {
			q.timer.Reset(left)
		}
		select {
		case <-s.changed:
		case <-q.timer.C:
			if s.b == nil || left <= retransmitAfter {
				return nil, errNoBackend
			}
			u.retry(s)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// retry lets queries try a backend that refused them, if it is still the current one: the refusal
// may have been meant for the child before.
func (u *upstream) retry(s *state) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.state.Load() == s { // so drop hasn't come to close it
		s.b.lost.Store(false)
	}
}

// backend is one child's address with its sockets.
type backend struct {
	lost    atomic.Bool // refused or closed: takes no queries
	n       atomic.Int64
	addr    netip.AddrPort
	sockets [udpSockets]*socket
	tcp     *tcpPool
	turns   chan struct{} // see turnTime
	idle    chan struct{} // told when n gets 0
	gone    chan struct{} // closed at the first refusal
	stop    chan struct{} // closed by close
	refuse1 sync.Once
	readers sync.WaitGroup
	quit    atomic.Bool
}

// newBackend opens the sockets to addr, without sending anything. upstream.drop closes them.
func newBackend(addr netip.AddrPort) (*backend, error) {
	b := &backend{
		addr:  addr,
		tcp:   newTCPPool(addr),
		turns: make(chan struct{}, turns),
		idle:  make(chan struct{}, 1),
		gone:  make(chan struct{}),
		stop:  make(chan struct{}),
	}
	for i := range b.sockets {
		s, err := newSocket(b)
		if err != nil {
			b.close()
			return nil, fmt.Errorf("socket to dnsmasq at %s: %w", addr, err)
		}
		b.sockets[i] = s
	}
	return b, nil
}

// start starts the readers and the clock.
func (b *backend) start() {
	b.readers.Go(b.clock)
	for _, s := range b.sockets {
		b.readers.Go(s.read)
	}
}

// clock looks after the queries that wait without a timer, which most are answered too soon to need.
func (b *backend) clock() {
	tick := time.NewTicker(tickTime)
	defer tick.Stop()
	for {
		select {
		case now := <-tick.C:
			if b.n.Load() > 0 {
				for _, s := range b.sockets {
					s.remind(now)
				}
			}
		case <-b.stop:
			return
		}
	}
}

// outstanding returns the number of queries that wait for an answer from b.
func (b *backend) outstanding() int64 { return b.n.Load() }

// answers returns how many replies b gave over UDP. A reply over TCP is no sign of life: the process
// that gives it outlives the one we supervise.
func (b *backend) answers() uint64 {
	var n uint64
	for _, s := range b.sockets {
		n += s.replies.Load()
	}
	return n
}

// refused returns a channel that is closed when the kernel says for the first time that nobody
// listens at b's address. Its queries then wait for the next use or, should that not come, try b
// again each second.
func (b *backend) refused() <-chan struct{} { return b.gone }

// wait waits until nothing is outstanding at b. It returns false if ctx ended before.
func (b *backend) wait(ctx context.Context) bool {
	for b.n.Load() > 0 {
		select {
		case <-b.idle:
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// renew makes the next query over TCP use a new connection. dnsmasq's process for a connection
// keeps the configuration of the time it was forked, so this belongs to each SIGHUP.
func (b *backend) renew() { b.tcp.renew() }

// enter and leave frame each query at b.
func (b *backend) enter() { b.n.Add(1) }

func (b *backend) leave() {
	if b.n.Add(-1) == 0 {
		select {
		case b.idle <- struct{}{}:
		default:
		}
	}
}

// refuse is called when the kernel says that nobody listens.
func (b *backend) refuse() {
	b.lose()
	b.refuse1.Do(func() { close(b.gone) })
}

// lose takes all outstanding queries from b, which takes no more.
func (b *backend) lose() {
	b.lost.Store(true) // before the locks below: see socket.add
	for _, s := range b.sockets {
		if s != nil {
			s.lose()
		}
	}
}

func (b *backend) close() {
	if !b.quit.Swap(true) {
		close(b.stop)
	}
	b.lose()
	b.tcp.close()
	for _, s := range b.sockets {
		if s != nil {
			s.conn.Close()
		}
	}
	b.readers.Wait()
}

// ask sends q over UDP and waits for the answer. The error is errLost, errTimeout or that of ctx.
func (b *backend) ask(ctx context.Context, q *query) (answer, error) {
	b.enter()
	defer b.leave()

	q.timeless = !q.again && ctx.Done() == nil
	if q.again {
		return b.await(ctx, q, false, 0, nil)
	}
	switch err := q.send(b); {
	case errors.Is(err, errLost):
		return answer{}, err
	case err != nil:
		return b.await(ctx, q, false, retryAfter, err)
	case !q.timeless:
		return b.await(ctx, q, true, retransmitAfter, nil)
	}
	if e := <-q.done; e != reminded { // the usual case: nothing but the answer to wait for
		return q.result(e)
	}
	return b.await(ctx, q, true, 0, nil)
}

// await waits for the answer to q and sends it again, first after pause. err is why it wasn't sent yet, if it was tried.
func (b *backend) await(ctx context.Context, q *query, sent bool, pause time.Duration, err error) (answer, error) {
	var (
		turn chan struct{} // b.turns while q waits for its turn
		has  bool          // q has its turn
	)
	defer func() {
		if has {
			<-b.turns
		}
	}()

	now := time.Now()
	due := now.Add(pause) // time to send (again)
	if pause == 0 {
		if now.Before(q.deadline) {
			turn = b.turns
		}
		q.timer.Reset(q.deadline.Sub(now))
	} else {
		q.timer.Reset(min(pause, q.deadline.Sub(now)))
	}
	for {
		select {
		case e := <-q.done:
			if e != reminded {
				return q.result(e)
			}
		case turn <- struct{}{}:
			turn, has = nil, true
			if err = q.send(b); errors.Is(err, errLost) {
				return answer{}, err
			}
			now, pause = time.Now(), retryAfter
			if err == nil {
				if sent {
					q.retransmitted++
				}
				sent, pause = true, retransmitAfter
			}
			due = now.Add(pause)
			q.timer.Reset(min(turnTime, q.deadline.Sub(now)))
		case <-q.timer.C:
			now = time.Now()
			switch {
			case !now.Before(q.deadline):
				if !q.remove() {
					return q.result(q.outcome())
				}
				if err != nil {
					return answer{}, fmt.Errorf("%w: %w", errTimeout, err)
				}
				return answer{}, errTimeout
			case has:
				<-b.turns
				has = false
				q.timer.Reset(min(due.Sub(now), q.deadline.Sub(now)))
			default:
				turn = b.turns
				q.timer.Reset(q.deadline.Sub(now))
			}
		case <-ctx.Done():
			if !q.remove() {
				return q.result(q.outcome())
			}
			return answer{}, ctx.Err()
		}
	}
}

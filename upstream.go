package nanny

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
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
	udpSockets = 4     // of a backend: fewer, and goroutines wait for each other to write
	maxIDs     = 32768 // outstanding queries of a socket: half of all IDs, so a free one is found soon
	maxUDP     = 1232  // what dnsmasq reads of a query over UDP (its edns-packet-max)
	udpBuffer  = 65535 // the largest datagram
	recvBuffer = 4 << 20

	// dnsmasq's receive queue takes some 270 small queries, then the kernel drops them without a
	// word. So a query without an answer is sent again, twice, and whatever isn't sent for the
	// first time takes turns: at most turns queries in the time turnTime, in which dnsmasq reads
	// many more.
	retransmitAfter = time.Second
	retransmits     = 2
	turns           = 128
	turnTime        = 5 * time.Millisecond
	retryAfter      = 10 * time.Millisecond // a failed write; more than turnTime
)

var (
	errTimeout   = errors.New("no answer from dnsmasq in time")
	errNoBackend = errors.New("no dnsmasq is ready to answer")
	errClosed    = errors.New("stopped")

	errLost = errors.New("dnsmasq has gone") // never leaves exchange
)

// answer is what dnsmasq said, with the addresses of the exchange (for dnstap and metadata).
type answer struct {
	msg           *dns.Msg
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

// exchange sends m to the current backend and returns the answer, with the ID of m. m is only
// read. deadline is the whole budget, waiting for a backend included. stream tells that the client
// isn't on UDP: a truncated answer is asked again over TCP. With giveUp it doesn't wait for a
// backend while the upstream is down. The error is that of ctx or wraps errTimeout (asked, not
// answered), errNoBackend (never asked) or errClosed, or says why m or the answer is malformed.
func (u *upstream) exchange(ctx context.Context, m *dns.Msg, deadline time.Time, stream, giveUp bool) (answer, error) {
	u.inflight.Add(1)
	defer u.inflight.Add(-1)

	q := queries.Get().(*query)
	defer q.free()
	if err := q.pack(m); err != nil {
		return answer{}, fmt.Errorf("packing the query: %w", err)
	}
	q.deadline, q.stream, q.giveUp = deadline, stream, giveUp

	if stream && len(q.wire) > maxUDP {
		return u.over(ctx, q, (*backend).askTCP)
	}
	a, err := u.over(ctx, q, (*backend).ask)
	if err != nil || !stream || !a.msg.Truncated {
		return a, err
	}
	full, err := u.over(ctx, q, (*backend).askTCP)
	switch {
	case err == nil:
		return full, nil
	case errors.Is(err, errTimeout), errors.Is(err, errNoBackend):
		return a, nil // better than nothing
	}
	return answer{}, err
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
		if err != errLost { //nolint:errorlint // never wrapped
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
			q.timer.Reset(time.Until(q.deadline))
		}
		select {
		case <-s.changed:
		case <-q.timer.C:
			return nil, errNoBackend
		case <-ctx.Done():
			return nil, ctx.Err()
		}
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

// start starts the readers.
func (b *backend) start() {
	for _, s := range b.sockets {
		b.readers.Go(s.read)
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
// listens at b's address. Until the next use, b takes no queries.
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
	b.quit.Store(true)
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

	var (
		turn chan struct{} // b.turns while q waits for its turn
		has  bool          // q has its turn
		sent int
		err  error
	)
	defer func() {
		if has {
			<-b.turns
		}
	}()

	now := time.Now()
	due := now // time to send (again)
	if q.again {
		turn = b.turns
		q.timer.Reset(q.deadline.Sub(now))
	} else {
		if err = q.send(b); err == errLost { //nolint:errorlint // never wrapped
			return answer{}, err
		}
		if err == nil {
			sent++
		}
		due = now.Add(pause(sent, err))
		q.timer.Reset(min(due.Sub(now), q.deadline.Sub(now)))
	}
	for {
		select {
		case ok := <-q.done:
			return q.result(ok)
		case turn <- struct{}{}:
			turn, has = nil, true
			if err = q.send(b); err == errLost { //nolint:errorlint // never wrapped
				return answer{}, err
			}
			if err == nil {
				if sent++; sent > 1 {
					q.retransmitted++
				}
			}
			now = time.Now()
			due = now.Add(pause(sent, err))
			q.timer.Reset(min(turnTime, q.deadline.Sub(now)))
		case <-q.timer.C:
			now = time.Now()
			switch {
			case !now.Before(q.deadline):
				if !q.remove() {
					return q.result(<-q.done)
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
				return q.result(<-q.done)
			}
			return answer{}, ctx.Err()
		}
	}
}

// pause returns how long to wait before q is sent again, if it was sent so many times, the last
// time with err.
func pause(sent int, err error) time.Duration {
	switch {
	case err != nil:
		return retryAfter
	case sent > retransmits:
		return time.Hour // beyond any deadline
	}
	return retransmitAfter
}

// socket is one connected UDP socket with the queries outstanding on it.
type socket struct {
	b       *backend
	conn    *net.UDPConn
	raw     syscall.RawConn
	local   netip.AddrPort
	replies atomic.Uint64

	mu      sync.Mutex
	waiting map[uint16]*query
}

func newSocket(b *backend) (*socket, error) {
	conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(b.addr))
	if err != nil {
		return nil, err
	}
	_ = conn.SetReadBuffer(recvBuffer) // the kernel gives what it may
	raw, err := conn.SyscallConn()
	if err != nil {
		conn.Close()
		return nil, err
	}
	return &socket{
		b:       b,
		conn:    conn,
		raw:     raw,
		local:   conn.LocalAddr().(*net.UDPAddr).AddrPort(),
		waiting: make(map[uint16]*query),
	}, nil
}

// add gives q an ID of its own on s. It returns errLost, or errBusy if s has no room.
func (s *socket) add(q *query) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.b.lost.Load() { // set before lose takes the lock, so it can't miss q
		return errLost
	}
	if len(s.waiting) >= maxIDs {
		return errBusy
	}
	id := uint16(rand.Uint32())
	for s.waiting[id] != nil {
		id = uint16(rand.Uint32())
	}
	s.waiting[id] = q
	q.socket = s
	q.setID(id)
	return nil
}

// lose tells the queries outstanding on s that there will be no answer.
func (s *socket) lose() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, q := range s.waiting {
		q.done <- false
	}
	clear(s.waiting)
}

// read gives each reply to its query, until s is closed.
func (s *socket) read() {
	buf := make([]byte, udpBuffer)
	for {
		n, err := s.conn.Read(buf)
		switch {
		case err == nil:
			s.deliver(buf[:n])
		case s.b.quit.Load():
			return
		case isRefused(err):
			s.b.refuse()
		default:
			time.Sleep(retryAfter) // out of memory, say; never spin
		}
	}
}

// deliver gives reply to its query. What answers none is dropped: late, foreign, garbage.
func (s *socket) deliver(reply []byte) {
	if len(reply) < headerSize {
		return
	}
	id := uint16(reply[0])<<8 | uint16(reply[1])
	s.mu.Lock()
	q := s.waiting[id]
	if q == nil || !q.answeredBy(reply) {
		s.mu.Unlock()
		return
	}
	delete(s.waiting, id)
	s.mu.Unlock()
	s.replies.Add(1)
	q.reply = append(q.reply[:0], reply...)
	q.done <- true
}

var errBusy = errors.New("too many queries outstanding")

// isRefused tells whether err is the kernel's word that nobody listens at the other end.
func isRefused(err error) bool {
	return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ECONNRESET)
}

const headerSize = 12

// query is one query in exchange, with all it needs, so that it can be used again.
type query struct {
	deadline       time.Time
	stream, giveUp bool
	again          bool   // held or resent: takes turns
	retransmitted  uint64 // not counted yet

	id     uint16 // that of the client
	packed []byte // the length, for TCP, then the message
	wire   []byte // the message in packed
	end    int    // of the question in wire
	reply  []byte

	socket *socket   // where it is outstanding
	done   chan bool // true: reply is there; false: the backend is lost. Filled once by who takes q out of socket.waiting
	timer  *time.Timer
	write  func(fd uintptr) bool // writes wire, once, for RawConn.Write
	err    error                 // of write

	msg   dns.Msg // the client's message as it is packed
	opt   dns.OPT
	extra []dns.RR
}

var queries = sync.Pool{New: func() any {
	q := &query{
		packed: make([]byte, 2+maxUDP),
		done:   make(chan bool, 1),
		timer:  time.NewTimer(time.Hour),
	}
	q.timer.Stop()
	q.write = func(fd uintptr) bool {
		_, q.err = syscall.Write(int(fd), q.wire)
		return true
	}
	return q
}}

// free gives q back. It isn't outstanding.
func (q *query) free() {
	q.timer.Stop()
	q.wire, q.socket, q.err = nil, nil, nil
	q.again = false
	if cap(q.packed) > 2*maxUDP || cap(q.reply) > 4*maxUDP {
		return // few are as large
	}
	queries.Put(q)
}

// pack packs m, which isn't changed: packing writes to the OPT record, so it gets a copy of that.
func (q *query) pack(m *dns.Msg) error {
	q.id = m.Id
	q.msg = *m
	q.msg.Compress = false
	for i, rr := range m.Extra {
		if opt, ok := rr.(*dns.OPT); ok {
			q.extra = append(q.extra[:0], m.Extra...)
			q.opt = *opt
			q.extra[i] = &q.opt
			q.msg.Extra = q.extra
			break
		}
	}
	wire, err := q.msg.PackBuffer(q.packed[2:cap(q.packed)])
	q.msg, q.opt = dns.Msg{}, dns.OPT{}
	clear(q.extra)
	if err != nil {
		return err
	}
	q.packed = append(q.packed[:2], wire...) // a copy only if it didn't fit
	q.packed[0], q.packed[1] = byte(len(wire)>>8), byte(len(wire))
	q.wire = q.packed[2:]

	q.end = headerSize
	for q.end < len(q.wire) && q.wire[q.end] != 0 {
		q.end += int(q.wire[q.end]) + 1
	}
	q.end += 1 + 4 // root, type, class
	if len(m.Question) != 1 || q.end > len(q.wire) {
		return errors.New("not one question")
	}
	return nil
}

func (q *query) setID(id uint16) { q.wire[0], q.wire[1] = byte(id>>8), byte(id) }

// send writes q to a socket of b: that where it is outstanding, or any. The error is errLost if b
// is, or else worth another try.
func (q *query) send(b *backend) error {
	if q.socket == nil || q.socket.b != b {
		r := rand.Uint32()
		err := errBusy
		for i := range uint32(udpSockets) {
			if err = b.sockets[(r+i)%udpSockets].add(q); err != errBusy { //nolint:errorlint // never wrapped
				break
			}
		}
		if err != nil {
			return err
		}
	}
	s := q.socket
	err := s.raw.Write(q.write)
	if err == nil {
		err = q.err
	}
	if isRefused(err) {
		b.refuse() // q gets its errLost from there
		return nil
	}
	return err
}

// remove takes q back from its socket. If it returns false, somebody has done so and fills q.done.
func (q *query) remove() bool {
	s := q.socket
	if s == nil {
		return true
	}
	q.socket = nil
	s.mu.Lock()
	defer s.mu.Unlock()
	id := uint16(q.wire[0])<<8 | uint16(q.wire[1])
	if s.waiting[id] != q {
		return false
	}
	delete(s.waiting, id)
	return true
}

// result returns the answer in q.reply, or errLost if there is none.
func (q *query) result(ok bool) (answer, error) {
	s := q.socket
	q.socket = nil
	if !ok {
		return answer{}, errLost
	}
	msg, err := q.unpack()
	if err != nil {
		return answer{}, err
	}
	return answer{msg: msg, local: s.local, remote: s.b.addr}, nil
}

// unpack unpacks the reply and gives it the client's ID.
func (q *query) unpack() (*dns.Msg, error) {
	msg := new(dns.Msg)
	if err := msg.Unpack(q.reply); err != nil {
		return nil, fmt.Errorf("malformed answer from dnsmasq: %w", err)
	}
	msg.Id = q.id
	return msg, nil
}

// answeredBy tells whether reply, but for its ID, answers q: a response to the same question (RFC
// 5452, section 9.1), in any case.
func (q *query) answeredBy(reply []byte) bool {
	return len(reply) >= q.end &&
		reply[2]&0x80 != 0 && // QR
		reply[4] == 0 && reply[5] == 1 && // QDCOUNT
		bytes.Equal(reply[q.end-4:q.end], q.wire[q.end-4:q.end]) &&
		equalNames(reply[headerSize:q.end-4], q.wire[headerSize:q.end-4])
}

// equalNames compares two names in wire format. Lengths of labels are below the letters, so they
// stay what they are.
func equalNames(a, b []byte) bool {
	if bytes.Equal(a, b) {
		return true
	}
	for i := range a {
		if lower(a[i]) != lower(b[i]) {
			return false
		}
	}
	return true
}

func lower(c byte) byte {
	if 'A' <= c && c <= 'Z' {
		c += 'a' - 'A'
	}
	return c
}

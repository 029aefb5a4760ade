package nanny

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/miekg/dns"
)

// socket is one connected UDP socket with the queries outstanding on it.
type socket struct {
	b       *backend
	conn    *net.UDPConn
	raw     syscall.RawConn
	way     way
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
		way:     way{local: conn.LocalAddr().(*net.UDPAddr).AddrPort(), remote: b.addr},
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
	id := uint16(rand.Uint32()) // #nosec G115 G404 -- math/rand/v2 is ChaCha8 with a seed of the system
	for s.waiting[id] != nil {
		id = uint16(rand.Uint32()) // #nosec G115 G404 -- math/rand/v2 is ChaCha8 with a seed of the system
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
		q.done <- lost
	}
	clear(s.waiting)
}

// remind tells the queries on s that wait without a timer when it is time to be sent again, or their deadline has passed.
func (s *socket) remind(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, q := range s.waiting {
		if !q.timeless || q.told {
			continue
		}
		q.ticks++
		if q.ticks > int(retransmitAfter/tickTime) || !now.Before(q.deadline) {
			q.told = true
			q.done <- reminded
		}
	}
}

// read gives each reply to its query, until s is closed.
func (s *socket) read() {
	buf := make([]byte, udpBuffer)
	_ = s.raw.Read(func(fd uintptr) (end bool) { // called again when there is something to read
		for {
			n, err := syscall.Read(int(fd), buf)
			switch {
			case err == nil:
				if s.deliver(buf[:n]) {
					return false
				}
			case errors.Is(err, syscall.EAGAIN):
				return false
			case isRefused(err):
				s.b.refuse()
			case s.b.quit.Load():
				return true
			default:
				time.Sleep(retryAfter) // out of memory, say; never spin
			}
		}
	})
}

// deliver gives reply to its query. What answers none is dropped: late, foreign, garbage. It returns true if no other query is
// outstanding, so that there is nothing more to read now: who asks the kernel for it delays the query that has its answer.
func (s *socket) deliver(reply []byte) (last bool) {
	if len(reply) < headerSize {
		return false
	}
	id := uint16(reply[0])<<8 | uint16(reply[1])
	s.mu.Lock()
	q := s.waiting[id]
	if q == nil || !q.answeredBy(reply) {
		s.mu.Unlock()
		return false
	}
	delete(s.waiting, id)
	last = len(s.waiting) == 0
	s.mu.Unlock()
	s.replies.Add(1)
	q.reply = append(q.reply[:0], reply...)
	q.done <- answered
	return last
}

// isRefused tells whether err is the kernel's word that nobody listens at the other end.
func isRefused(err error) bool {
	return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ECONNRESET)
}

const headerSize = 12

// event is what a query waits for.
type event int8

const (
	answered event = iota // reply is there
	lost                  // the backend is
	reminded              // see socket.remind; at most once
)

// query is one query in exchange, with all it needs, so that it can be used again.
type query struct {
	deadline      time.Time
	giveUp        bool
	again         bool   // held or resent: takes turns
	retransmitted uint64 // not counted yet

	id     uint16 // that of the client
	packed []byte // the length, for TCP, then the message
	wire   []byte // the message in packed
	end    int    // of the question in wire
	reply  []byte

	socket   *socket    // where it is outstanding
	done     chan event // but for reminded, filled once by who takes q out of socket.waiting
	timeless bool       // waits for done alone: remind it
	told     bool       // reminded; socket.mu
	ticks    int        // of the clock so far; socket.mu
	timer    *time.Timer
	write    func(fd uintptr) // writes wire, once
	err      error            // of write

	msg   dns.Msg // the client's message as it is packed
	opt   dns.OPT
	extra []dns.RR
}

var queries = sync.Pool{New: func() any {
	q := &query{
		packed: make([]byte, 2+maxUDP),
		done:   make(chan event, 2),
		timer:  time.NewTimer(time.Hour),
	}
	q.timer.Stop()
	q.write = func(fd uintptr) { _, q.err = syscall.Write(int(fd), q.wire) }
	return q
}}

// free gives q back. It isn't outstanding.
func (q *query) free() {
	q.timer.Stop()
	q.wire, q.socket, q.err = nil, nil, nil
	q.again, q.timeless, q.told, q.ticks = false, false, false, 0
	select {
	case <-q.done: // reminded, too late
	default:
	}
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
	q.packed = append(q.packed[:2], wire...)                // a copy only if it didn't fit
	binary.BigEndian.PutUint16(q.packed, uint16(len(wire))) // #nosec G115 -- at most 65535
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

func (q *query) setID(id uint16) { binary.BigEndian.PutUint16(q.wire, id) }

// send writes q to a socket of b: that where it is outstanding, or any. The error is errLost if b
// is, or else worth another try.
func (q *query) send(b *backend) error {
	if q.socket == nil || q.socket.b != b {
		r := rand.Uint32() // #nosec G115 G404 -- math/rand/v2 is ChaCha8 with a seed of the system
		err := errBusy
		for i := range uint32(udpSockets) {
			if err = b.sockets[(r+i)%udpSockets].add(q); !errors.Is(err, errBusy) {
				break
			}
		}
		if err != nil {
			return err
		}
	}
	s := q.socket
	err := s.raw.Control(q.write) // unlike RawConn.Write it lets several write at once
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
	s.mu.Lock()
	defer s.mu.Unlock()
	id := uint16(q.wire[0])<<8 | uint16(q.wire[1])
	if s.waiting[id] != q {
		return false
	}
	delete(s.waiting, id)
	q.socket = nil
	return true
}

// outcome waits for answered or lost.
func (q *query) outcome() event {
	e := <-q.done
	if e == reminded {
		e = <-q.done
	}
	return e
}

// result returns the answer in q.reply, or errLost if there is none.
func (q *query) result(e event) (answer, error) {
	s := q.socket
	q.socket = nil
	if e == lost {
		return answer{}, errLost
	}
	return answer{wire: q.takeReply(), way: &s.way}, nil
}

// takeReply returns the reply, with the client's ID. q gets another buffer for its next one.
func (q *query) takeReply() []byte {
	wire := q.reply
	q.reply = nil
	binary.BigEndian.PutUint16(wire, q.id)
	return wire
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

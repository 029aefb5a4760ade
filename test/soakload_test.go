package test

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// soakLoad asks both blocks for random keys, each query once, and checks each answer.
type soakLoad struct {
	blocks  []*soakBlock
	sockets []*soakSocket
	stop    chan struct{}
	expired chan struct{} // closed after stop, when no query waits any more
	once    sync.Once
	senders sync.WaitGroup
	readers sync.WaitGroup
	ports   []int
	dropped int // datagrams that the kernel dropped because nobody read them in time

	mu       sync.Mutex
	sent     map[string]int // by network
	reloads  int            // of the Corefile so far, begun or ended: odd while one is under way
	cut      int            // connections that CoreDNS closed at a reload before it read the query
	answered int
	lost     map[string]int         // by network
	rcodes   map[string]int         // but for NOERROR
	wrong    int                    // answers that no valid configuration gives, or none that could be in service
	half     int                    // answers from a half-written file
	longest  map[kind]time.Duration // wait
	failures []string               // the first ones
	began    time.Time
	span     time.Duration // until no more were sent
}

// soakQuery is one query over UDP on its way.
type soakQuery struct {
	b      *soakBlock
	k      *soakKey
	floor  uint32 // of k when it was sent
	sent   time.Time
	kind   kind // of event under way when it was sent
	reload int  // soakLoad.reloads then
}

// soakSocket is a client's socket. Several take an answer to all that waited without overflow.
type soakSocket struct {
	conn    *net.UDPConn
	mu      sync.Mutex
	waiting map[uint16]soakQuery
}

const soakSockets = 32 // for each block

// newSoakLoad starts rate queries a second over UDP and a tenth of it over TCP. end ends it.
func newSoakLoad(t *testing.T, blocks []*soakBlock, rate int) *soakLoad {
	t.Helper()
	l := &soakLoad{
		blocks: blocks, stop: make(chan struct{}), expired: make(chan struct{}), began: time.Now(),
		sent: map[string]int{}, lost: map[string]int{}, rcodes: map[string]int{}, longest: map[kind]time.Duration{},
	}
	for _, b := range blocks {
		l.ports = append(l.ports, b.port)
		var sockets []*soakSocket
		for range soakSockets {
			conn, err := net.DialUDP("udp", nil, &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: b.port})
			if err != nil {
				t.Fatal(err)
			}
			l.ports = append(l.ports, conn.LocalAddr().(*net.UDPAddr).Port)
			so := &soakSocket{conn: conn, waiting: map[uint16]soakQuery{}}
			l.readers.Go(func() { l.read(so) })
			sockets = append(sockets, so)
		}
		l.sockets = append(l.sockets, sockets...)
		l.senders.Go(func() { l.pace(rate/len(blocks), func() { l.sendUDP(b, sockets[rand.IntN(len(sockets))]) }) })
		l.senders.Go(func() {
			l.pace(rate/len(blocks)/10, func() { l.senders.Go(func() { l.askTCP(b) }) })
		})
	}
	l.dropped = -l.drops(t)
	go l.expire()
	return l
}

// drops counts what the kernel dropped before CoreDNS or the test read it.
func (l *soakLoad) drops(t *testing.T) int {
	t.Helper()
	n := 0
	for _, p := range l.ports {
		n += udpDrops(t, p)
	}
	return n
}

// pace calls ask rate times a second. Ticks get lost on a busy machine: it makes up for it, but not in one burst.
func (l *soakLoad) pace(rate int, ask func()) {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	last, due := time.Now(), 0.0
	for {
		select {
		case <-l.stop:
			return
		case now := <-tick.C:
			due = min(due+now.Sub(last).Seconds()*float64(rate), 20)
			last = now
		}
		for ; due >= 1; due-- {
			ask()
		}
	}
}

func (l *soakLoad) pick(b *soakBlock) soakQuery {
	k := b.keys[rand.IntN(len(b.keys))]
	return soakQuery{b: b, k: k, floor: k.floor.Load(), sent: time.Now(), kind: kind(b.kind.Load())}
}

func (l *soakLoad) sendUDP(b *soakBlock, so *soakSocket) {
	q := l.pick(b)
	m := question(q.k.name, dns.TypeA)
	so.mu.Lock()
	for _, taken := so.waiting[m.Id]; taken; _, taken = so.waiting[m.Id] {
		m.Id = dns.Id()
	}
	so.waiting[m.Id] = q
	so.mu.Unlock()
	wire, err := m.Pack()
	if err == nil {
		_, err = so.conn.Write(wire)
		if errors.Is(err, syscall.ECONNREFUSED) { // that is the answer to one before, which expires
			_, err = so.conn.Write(wire)
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil {
		so.take(m.Id)
		l.fail(q, "not sent: "+reason(err))
		return
	}
	l.sent["udp"]++
}

// take takes the query with id from the waiting ones.
func (so *soakSocket) take(id uint16) (soakQuery, bool) {
	so.mu.Lock()
	defer so.mu.Unlock()
	q, ok := so.waiting[id]
	delete(so.waiting, id)
	return q, ok
}

func (l *soakLoad) read(so *soakSocket) {
	buf := make([]byte, dns.MaxMsgSize)
	for {
		n, err := so.conn.Read(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		m := new(dns.Msg)
		if err != nil || m.Unpack(buf[:n]) != nil {
			continue
		}
		if q, ok := so.take(m.Id); ok {
			l.got("udp", q, m, nil)
		}
	}
}

// expire finds the queries over UDP that a client would give up, until the last.
func (l *soakLoad) expire() {
	defer close(l.expired)
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for range tick.C {
		left := 0
		for _, so := range l.sockets {
			var gone []soakQuery
			so.mu.Lock()
			for id, q := range so.waiting {
				if time.Since(q.sent) > queryWait {
					gone = append(gone, q)
					delete(so.waiting, id)
				}
			}
			left += len(so.waiting)
			so.mu.Unlock()
			for _, q := range gone {
				l.got("udp", q, nil, errors.New("no answer"))
			}
		}
		select {
		case <-l.stop:
			if left == 0 {
				return
			}
		default:
		}
	}
}

func (l *soakLoad) askTCP(b *soakBlock) {
	q := l.pick(b)
	l.mu.Lock()
	l.sent["tcp"]++
	q.reload = l.reloads
	l.mu.Unlock()
	m, err := exchange("tcp", b.addr(), question(q.k.name, dns.TypeA))
	l.got("tcp", q, m, err)
}

// got judges what came for q.
func (l *soakLoad) got(network string, q soakQuery, m *dns.Msg, err error) {
	took := time.Since(q.sent)
	l.mu.Lock()
	defer l.mu.Unlock()
	during := max(q.kind, kind(q.b.kind.Load())) // the kinds that keep queries waiting longer come later
	l.longest[during] = max(l.longest[during], took)
	if network == "tcp" && (errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET)) && (q.reload%2 == 1 || l.reloads != q.reload) {
		// CoreDNS itself: a server that ends closes the connections it has accepted and read no query from. nanny
		// never closes any.
		l.cut++
		return
	}
	if err != nil {
		l.lost[network]++
		l.fail(q, network+": "+reason(err))
		return
	}
	if m.Rcode != dns.RcodeSuccess {
		l.rcodes[dns.RcodeToString[m.Rcode]]++
		l.fail(q, network+": "+dns.RcodeToString[m.Rcode])
		return
	}
	version, valid := uint32(0), false
	if len(m.Answer) == 1 {
		if a, ok := m.Answer[0].(*dns.A); ok && a.A.To4()[0] == 10 {
			ip := a.A.To4()
			version, valid = uint32(ip[1])<<16|uint32(ip[2])<<8|uint32(ip[3]), true
		}
	}
	switch {
	case valid && version == 0 && q.k.file == "written.conf":
		l.half++
	case !valid, version < q.floor, version > q.k.newest.Load():
		l.wrong++
		l.fail(q, fmt.Sprintf("%s: %v, want a version from %d to %d", network, m.Answer, q.floor, q.k.newest.Load()))
	default:
		l.answered++
	}
}

// reload tells that a reload of the Corefile begins or has ended.
func (l *soakLoad) reload() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.reloads++
}

// fail notes what went wrong. l.mu is held.
func (l *soakLoad) fail(q soakQuery, what string) {
	if len(l.failures) < 20 {
		l.failures = append(l.failures, fmt.Sprintf("%s sent at %s (+%s), given up or answered after %s, %s: %s", q.k.name,
			q.sent.Format("15:04:05.000"), q.sent.Sub(l.began).Round(time.Millisecond), time.Since(q.sent).Round(time.Millisecond), kind(q.b.kind.Load()), what))
	}
}

// bad tells whether the test has failed already.
func (l *soakLoad) bad() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lost["tcp"]+len(l.rcodes)+l.wrong > 0
}

// end ends the load and waits for the last answers.
func (l *soakLoad) end(t *testing.T) {
	t.Helper()
	l.once.Do(func() {
		close(l.stop)
		l.span = time.Since(l.began)
		l.senders.Wait()
		<-l.expired
		l.dropped += l.drops(t)
		for _, so := range l.sockets {
			so.conn.Close()
		}
		l.readers.Wait()
	})
}

// check prints the summary and fails the test if anything but good answers came.
func (l *soakLoad) check(t *testing.T, what string, s *soak) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	excused := min(l.dropped, l.lost["udp"])
	lost := l.lost["udp"] + l.lost["tcp"] - excused
	var waits []string
	for k := calm; k <= hung; k++ {
		waits = append(waits, fmt.Sprintf("%s %s", k, l.longest[k].Round(time.Millisecond)))
	}
	gap := time.Duration(0)
	for _, b := range s.blocks {
		gap = max(gap, b.gap)
	}
	log := func(parts ...string) int { return len(s.c.logs.lines(0, parts...)) }
	t.Logf(`soak: %s
  queries sent      %d over UDP, %d over TCP, %.0f a second
  answered          %d
  lost              %d (and %d dropped by the kernel, %d connections closed by CoreDNS at a reload, before the query was read)
  SERVFAIL, REFUSED %d, %d
  never valid       %d
  half-written file %d (a file was half written for at most %s)
  longest wait      %s
  changes           %d applied, %d rejected
  crashes healed    %d, of these hung %d
  Corefile reloads  %d, and %d that failed as they should`,
		what, l.sent["udp"], l.sent["tcp"], float64(l.sent["udp"]+l.sent["tcp"])/l.span.Seconds(), l.answered, lost, excused, l.cut,
		l.rcodes["SERVFAIL"], l.rcodes["REFUSED"], l.wrong, l.half, gap.Round(time.Millisecond), strings.Join(waits, ", "),
		log("Configuration applied"), log("Configuration rejected"), log("ended unexpectedly"), log("lives but answers nothing"), s.reloads, s.failed)
	if lost > 0 || len(l.rcodes) > 0 || l.wrong > 0 || l.answered+l.half+excused+l.cut != l.sent["udp"]+l.sent["tcp"] {
		t.Errorf("not every query got a good answer: %v\n%s", l.rcodes, strings.Join(l.failures, "\n"))
	}
	if l.half > 0 && gap < 25*time.Millisecond { // the time between two reads that have to agree
		t.Errorf("%d answers from a file that was half written for no longer than %s", l.half, gap)
	}
}

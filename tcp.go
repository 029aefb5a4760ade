package nanny

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// TCP is for what doesn't fit UDP. dnsmasq forks for each connection and takes 20; further ones
// get no answer. So connections are few and used again, by one query at a time: the process
// behind a connection does one at a time too.

const (
	tcpConns   = 8
	tcpIdle    = 10 * time.Second      // then an unused connection is closed
	tcpRetry   = 50 * time.Millisecond // between a failed connection and the next
	tcpPersist = time.Second           // of new connections that are closed without an answer
	tcpReadBuf = 4096
)

// tcpPool is a backend's TCP connections.
type tcpPool struct {
	addr  netip.AddrPort
	turns chan struct{} // a place for each query at a connection
	gone  chan struct{} // closed by close

	mu    sync.Mutex
	age   int // of the configuration: see renew
	idle  []*tcpConn
	open  map[*tcpConn]struct{} // nil: closed
	timer *time.Timer           // closes idle ones
}

// tcpConn is one connection.
type tcpConn struct {
	net.Conn
	way  way
	r    *bufio.Reader
	age  int
	used time.Time
}

func newTCPPool(addr netip.AddrPort) *tcpPool {
	return &tcpPool{
		addr:  addr,
		turns: make(chan struct{}, tcpConns),
		gone:  make(chan struct{}),
		open:  make(map[*tcpConn]struct{}),
	}
}

// askTCP sends q over TCP and waits for the answer. The error is errLost, errNotTCP, that of ctx, or
// wraps errTimeout.
func (b *backend) askTCP(ctx context.Context, q *query) (answer, error) {
	b.enter()
	defer b.leave()

	p := b.tcp
	q.timer.Reset(time.Until(q.deadline))
	select {
	case p.turns <- struct{}{}:
		defer func() { <-p.turns }()
	case <-p.gone:
		return answer{}, errLost
	case <-q.timer.C:
		return answer{}, errTimeout
	case <-ctx.Done():
		return answer{}, ctx.Err()
	}
	var unanswered time.Time // when a new connection was first closed without an answer
	for {
		c, err := p.take(), error(nil)
		reused := c != nil
		if !reused {
			c, err = p.dial(ctx, q.deadline)
		}
		if err == nil {
			err = c.ask(ctx, q)
			if err == nil {
				p.put(c)
				return answer{wire: q.takeReply(), way: &c.way}, nil
			}
			p.forget(c)
		}
		left := time.Until(q.deadline)
		if reused && left > 0 && ctx.Err() == nil {
			continue // dnsmasq closes a connection after 100 queries or 150 s
		}
		if errors.Is(err, io.EOF) { // so does one that ends, and one whose servers refuse TCP: that one goes on
			if unanswered.IsZero() {
				unanswered = time.Now()
			} else if time.Since(unanswered) >= tcpPersist {
				return answer{}, errNotTCP
			}
		}
		q.timer.Reset(min(tcpRetry, left))
		select {
		case <-p.gone:
			return answer{}, errLost
		case <-ctx.Done():
			return answer{}, ctx.Err()
		case <-q.timer.C:
		}
		if left <= tcpRetry {
			return answer{}, fmt.Errorf("%w: %w", errTimeout, err)
		}
	}
}

// take returns the connection used last, or nil.
func (p *tcpPool) take() *tcpConn {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.idle) == 0 {
		return nil
	}
	c := p.idle[len(p.idle)-1]
	p.idle = p.idle[:len(p.idle)-1]
	return c
}

func (p *tcpPool) dial(ctx context.Context, deadline time.Time) (*tcpConn, error) {
	p.mu.Lock()
	age := p.age
	p.mu.Unlock()
	d := net.Dialer{Deadline: deadline}
	conn, err := d.DialContext(ctx, "tcp", p.addr.String())
	if err != nil {
		return nil, err
	}
	local := conn.LocalAddr().(*net.TCPAddr).AddrPort()
	c := &tcpConn{Conn: conn, way: way{local: local, remote: p.addr, tcp: true}, r: bufio.NewReaderSize(conn, tcpReadBuf), age: age}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.open == nil {
		conn.Close()
		return nil, net.ErrClosed
	}
	p.open[c] = struct{}{}
	return c, nil
}

// put gives c back for the next query.
func (p *tcpPool) put(c *tcpConn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.open == nil || c.age != p.age || c.r.Buffered() > 0 {
		delete(p.open, c)
		c.Close()
		return
	}
	c.used = time.Now()
	p.idle = append(p.idle, c)
	if p.timer == nil {
		p.timer = time.AfterFunc(tcpIdle, p.expire)
	}
}

// forget closes c.
func (p *tcpPool) forget(c *tcpConn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.open, c)
	c.Close()
}

// expire closes the connections that weren't used for tcpIdle. p.timer calls it.
func (p *tcpPool) expire() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.open == nil {
		return
	}
	now := time.Now()
	p.idle = slices.DeleteFunc(p.idle, func(c *tcpConn) bool {
		old := now.Sub(c.used) >= tcpIdle
		if old {
			delete(p.open, c)
			c.Close()
		}
		return old
	})
	p.timer = nil
	if len(p.idle) > 0 {
		p.timer = time.AfterFunc(tcpIdle-now.Sub(p.idle[0].used), p.expire)
	}
}

// renew has no query use a connection opened before.
func (p *tcpPool) renew() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.age++
	for _, c := range p.idle {
		delete(p.open, c)
		c.Close()
	}
	p.idle = nil
}

// close closes all connections; their queries get errLost.
func (p *tcpPool) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.open == nil {
		return
	}
	close(p.gone)
	for c := range p.open {
		c.Close()
	}
	p.open, p.idle = nil, nil
	if p.timer != nil {
		p.timer.Stop()
	}
}

// ask sends q and reads the answer to q.reply. After an error c is of no more use.
func (c *tcpConn) ask(ctx context.Context, q *query) error {
	if err := c.SetDeadline(q.deadline); err != nil {
		return err
	}
	if ctx.Done() != nil {
		stop := context.AfterFunc(ctx, func() { c.Close() })
		defer stop()
	}
	q.setID(uint16(rand.Uint32())) // #nosec G115 G404 -- math/rand/v2 is ChaCha8 with a seed of the system
	if _, err := c.Write(q.packed); err != nil {
		return err
	}
	var head [2]byte
	if _, err := io.ReadFull(c.r, head[:]); err != nil {
		return err
	}
	n := int(head[0])<<8 | int(head[1])
	q.reply = slices.Grow(q.reply[:0], n)[:n]
	if _, err := io.ReadFull(c.r, q.reply); err != nil {
		return err
	}
	if n < headerSize || [2]byte(q.reply) != [2]byte(q.wire) || !q.answeredBy(q.reply) {
		return errors.New("the answer over TCP is to another question")
	}
	return nil
}

package nanny

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode"

	clog "github.com/coredns/coredns/plugin/pkg/log"
)

var log = clog.NewWithPlugin("nanny")

const (
	maxLogLine = 16 << 10 // bytes of one line of the child that are logged
	maxBacklog = 4 << 20  // bytes of lines that wait for a slow log
	lastLines  = 5        // lines of the child that an error about its exit repeats
)

// lineLog carries a child's output to CoreDNS's log. Two goroutines do it: one only reads, so that the
// child never blocks on a full pipe, one only logs, since CoreDNS's own standard output may be slow.
// Between them at most maxBacklog bytes wait; what is beyond is counted, and the count logged.
type lineLog struct {
	emit func(line string)

	mu      sync.Mutex
	wake    *sync.Cond
	queue   []string
	size    int
	dropped int
	closed  bool
	last    []string

	progress     atomic.Int64  // lines read plus lines logged
	read, logged chan struct{} // closed when the reader, the logger has ended
}

// newLineLog reads r until its end and hands each line to emit.
func newLineLog(r io.Reader, emit func(line string)) *lineLog {
	l := &lineLog{emit: emit, read: make(chan struct{}), logged: make(chan struct{})}
	l.wake = sync.NewCond(&l.mu)
	go l.readAll(r)
	go l.logAll()
	return l
}

// await returns when done is closed, or when for the time d nothing was read or logged.
func (l *lineLog) await(done <-chan struct{}, d time.Duration) {
	tick := time.NewTicker(d)
	defer tick.Stop()
	for last := l.progress.Load(); ; {
		select {
		case <-done:
			return
		case <-tick.C:
		}
		now := l.progress.Load()
		if now == last {
			return
		}
		last = now
	}
}

// tail returns the last lines read, oldest first, joined by "; ".
func (l *lineLog) tail() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(l.last, "; ")
}

func (l *lineLog) readAll(r io.Reader) {
	defer close(l.read)
	br := bufio.NewReaderSize(r, maxLogLine)
	for {
		line, err := br.ReadSlice('\n')
		text := strings.TrimRight(string(line), "\r\n")
		if errors.Is(err, bufio.ErrBufferFull) {
			cut := 0
			for errors.Is(err, bufio.ErrBufferFull) {
				line, err = br.ReadSlice('\n')
				cut += len(line)
			}
			text = fmt.Sprintf("%s [line cut: %d bytes more]", text, cut)
		}
		text = strings.Map(printable, text)
		if text != "" { // dnsmasq puts an empty line before a start-up error
			l.push(text)
		}
		if err != nil {
			l.mu.Lock()
			l.closed = true
			l.mu.Unlock()
			l.wake.Signal()
			return
		}
	}
}

// printable puts a question mark in the place of what a terminal takes for a command.
func printable(r rune) rune {
	if unicode.IsControl(r) && r != '\t' {
		return '?'
	}
	return r
}

func (l *lineLog) push(text string) {
	l.progress.Add(1)
	l.mu.Lock()
	defer l.mu.Unlock()
	short := text
	if len(short) > 300 {
		short = short[:300] + "…"
	}
	_, short = splitPrefix(short)
	if len(l.last) == lastLines {
		l.last = append(l.last[:0], l.last[1:]...)
	}
	l.last = append(l.last, short)
	if l.size+len(text) > maxBacklog {
		l.dropped++
		return
	}
	l.queue = append(l.queue, text)
	l.size += len(text)
	l.wake.Signal()
}

func (l *lineLog) logAll() {
	defer close(l.logged)
	for {
		l.mu.Lock()
		for len(l.queue) == 0 && !l.closed {
			l.wake.Wait()
		}
		lines, dropped, closed := l.queue, l.dropped, l.closed
		l.queue, l.size, l.dropped = nil, 0, 0
		l.mu.Unlock()
		for _, line := range lines {
			l.emit(line)
			l.progress.Add(1)
		}
		if dropped > 0 {
			log.Warningf("%d lines of dnsmasq's log were dropped: CoreDNS's log takes them too slowly", dropped)
		}
		if closed && len(lines) == 0 {
			return
		}
	}
}

// programPrefix is how dnsmasq begins a line on standard error: dnsmasq, dnsmasq-dhcp, dnsmasq-tftp, …
var programPrefix = regexp.MustCompile(`^(dnsmasq(?:-[a-z]+)?)(?:\[\d+\])?: `)

// splitPrefix parts a line of the child into the part of dnsmasq that speaks and what it says.
func splitPrefix(line string) (program, text string) {
	if m := programPrefix.FindStringSubmatch(line); m != nil {
		return m[1], line[len(m[0]):]
	}
	return "dnsmasq", line
}

// dnsmasq gives no severity to what it writes on standard error, so the text decides. Both match the text's
// beginning only: what follows may hold names that a client chose.
var (
	failure = regexp.MustCompile(`^(FAILED |failed |cannot |bad |illegal |error|unknown (user|interface)|` +
		`extraneous parameter|missing |junk found|out of memory|could not |directory \S+ for resolv-file|` +
		`process is missing|setting capabilities failed|no root trust anchor|TFTP directory \S+ inaccessible|` +
		`Cannot |dhcp-range |inconsistent |netlink |recvmsg|duplicate )`)
	complaint = regexp.MustCompile(`^(warning: |LOUD WARNING|Maximum number of |ignoring |NOT using |possible DNS-rebind |` +
		`overflow: |Insecure DS |reducing DNS packet |no servers found |not giving name |nameserver \S+ refused |` +
		`no address range |not using configured |abandoning |limiting maximum |duplicate|unknown |config error is )`)
)

// logLine logs one line of the child with the level that its text deserves.
func logLine(line string) {
	program, text := splitPrefix(line)
	switch {
	case failure.MatchString(text):
		log.Errorf("%s: %s", program, text)
	case complaint.MatchString(text):
		log.Warningf("%s: %s", program, text)
	default:
		log.Infof("%s: %s", program, text)
	}
}

package main

import (
	"context"
	"fmt"
	"log"
	"math"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/miekg/dns"
)

// What is asked for, of each hundred queries: hosts of the watched directory, names that only the upstream knows, some often
// and many seldom; the rest are names that don't exist, and now and then one for which the upstream has an error.
const (
	hostNames     = 50
	upstreamNames = 1000
	queries       = 150 // a second, in the mean
)

func freePort() int {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// startUpstream starts the server that dnsmasq forwards to, and returns its address.
func startUpstream() (addr string, stop func(), err error) {
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	server := &dns.Server{PacketConn: conn, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		time.Sleep(time.Duration(4+rand.IntN(12)) * time.Millisecond)
		r := new(dns.Msg).SetReply(q)
		name := q.Question[0].Name
		switch {
		case strings.HasPrefix(name, "error"):
			r.Rcode = dns.RcodeServerFailure
		case strings.HasPrefix(name, "www"):
			r.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 300}, A: net.IPv4(192, 0, 2, 80)}}
		default:
			r.Rcode = dns.RcodeNameError
		}
		_ = w.WriteMsg(r)
	})}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.ActivateAndServe()
	}()
	return conn.LocalAddr().String(), func() {
		conn.Close()
		<-done
	}, nil
}

// ask asks addr until ctx ends, more and less in turns, and returns how many queries were answered.
func ask(ctx context.Context, addr string) int {
	var wg sync.WaitGroup
	var answered atomic.Int64
	seldom := rand.NewZipf(rand.New(rand.NewPCG(1, 2)), 1.1, 1, upstreamNames-1)
	begin := time.Now()
	for i := 0; ctx.Err() == nil; i++ {
		name := fmt.Sprintf("host%d.home.example.", rand.IntN(hostNames))
		switch n := rand.IntN(100); {
		case n < 60:
			name = fmt.Sprintf("www%d.example.org.", seldom.Uint64())
		case n < 70:
			name = fmt.Sprintf("none%d.example.org.", i)
		case n < 72:
			name = fmt.Sprintf("error%d.example.org.", i)
		}
		wg.Go(func() {
			client := dns.Client{Timeout: 6 * time.Second}
			if _, _, err := client.Exchange(new(dns.Msg).SetQuestion(name, dns.TypeA), addr); err == nil {
				answered.Add(1)
			}
		})
		rate := queries * (1 + 0.4*math.Sin(time.Since(begin).Seconds()/10))
		time.Sleep(time.Duration(rand.ExpFloat64() / rate * float64(time.Second)))
	}
	wg.Wait()
	return int(answered.Load())
}

// event is something that happens to nanny, at a time since the picture's begin.
type event struct {
	at   time.Duration
	kind string // "change", "wrong" or "kill"
}

// scene is what happens while queries are asked.
type scene struct {
	dir     string
	coredns int // process ID
	version int
	events  []event
}

// play lets happen what happens, spread over length.
func (s *scene) play(ctx context.Context, begin time.Time, length time.Duration) error {
	steps := []struct {
		at   float64 // of length
		kind string
		do   func() error
	}{
		{0.12, "change", func() error { return s.write("names.hosts", s.hosts()) }},
		{0.24, "change", func() error { return s.write("more.conf", "address=/shop.example/192.0.2.90\n") }},
		{0.37, "wrong", func() error { return s.write("more.conf", "adress=/shop.example/192.0.2.91\n") }},
		{0.47, "change", func() error { return s.write("more.conf", "address=/shop.example/192.0.2.91\n") }},
		{0.60, "kill", s.kill},
		{0.63, "kill", s.kill},
		{0.76, "change", func() error { return s.write("names.hosts", s.hosts()) }},
		{0.88, "kill", s.kill},
		{1, "", func() error { return nil }},
	}
	for _, step := range steps {
		at := time.Duration(step.at * float64(length))
		if err := sleep(ctx, time.Until(begin.Add(at))); err != nil {
			return err
		}
		if err := step.do(); err != nil {
			return err
		}
		if step.kind != "" {
			s.events = append(s.events, event{at, step.kind})
		}
	}
	return nil
}

// hosts is a hosts file that differs each time.
func (s *scene) hosts() string {
	s.version++
	var b strings.Builder
	for i := range hostNames {
		fmt.Fprintf(&b, "192.0.2.%d host%d.home.example\n", i+s.version, i)
	}
	return b.String()
}

// write writes a file of the watched directory in one step.
func (s *scene) write(name, text string) error {
	next := s.dir + ".next"
	if err := os.WriteFile(next, []byte(text), 0o644); err != nil {
		return err
	}
	return os.Rename(next, filepath.Join(s.dir, name))
}

// kill kills CoreDNS's dnsmasq.
func (s *scene) kill() error {
	paths, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return err
	}
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		// "PID (NAME) STATE PARENT …", see proc(5)
		if _, rest, ok := strings.Cut(string(data), " (dnsmasq) "); ok {
			if f := strings.Fields(rest); len(f) > 1 && f[1] == strconv.Itoa(s.coredns) {
				pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
				return syscall.Kill(pid, syscall.SIGKILL)
			}
		}
	}
	return fmt.Errorf("CoreDNS (pid %d) has no dnsmasq", s.coredns)
}

package test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// same checks that c gives the answer that its dnsmasq gives, but for the ID.
func same(t *testing.T, c *coreDNS, child, network string, m *dns.Msg) *dns.Msg {
	t.Helper()
	want, err := exchange(network, child, m.Copy())
	if err != nil {
		t.Fatalf("dnsmasq itself: %v", err)
	}
	got, err := exchange(network, c.addr(), m.Copy())
	if err != nil {
		t.Fatalf("CoreDNS: %v", err)
	}
	got.Id, want.Id = 0, 0
	if got.String() != want.String() {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	return got
}

// octets is the answer to m over UDP as it comes.
func octets(t *testing.T, addr string, m *dns.Msg) []byte {
	t.Helper()
	packed, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	conn, err := net.Dial("udp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(queryWait)); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Write(packed); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, dns.MaxMsgSize)
	n, err := conn.Read(buf)
	if err != nil {
		t.Fatal(err)
	}
	return buf[:n]
}

func TestAnswersAreDnsmasqs(t *testing.T) {
	t.Parallel()
	upstream := dnsmasq(t, "--host-record=www.up.example,192.0.2.1,2001:db8::1", "--txt-record=www.up.example,some text",
		"--mx-host=up.example,mail.up.example,10", "--cname=alias.up.example,www.up.example", "--local=/up.example/")
	cluster := dnsmasq(t, "--address=/svc.cluster.local/10.96.0.1")
	acme := dnsmasq(t, "--address=/acme.example/192.0.2.3")
	upstream2 := dnsmasq(t, "--address=/other.example/192.0.2.4")
	dir := configDir(t, map[string]string{
		"a.conf":              fmt.Sprintf("address=/doubleclick.example/127.0.0.1\nserver=127.0.0.1#%d\nserver=/cluster.local/127.0.0.1#%d\n", upstream, cluster),
		"stubDomains":         fmt.Sprintf(`{"acme.example": ["127.0.0.1:%d"]}`, acme),
		"upstreamNameservers": fmt.Sprintf(`["127.0.0.1:%d"]`, upstream),
		"lan.hosts":           "192.0.2.7 printer.home.example\n2001:db8::7 printer.home.example\n",
	})
	port, second := freePort(t), freePort(t)
	// Both blocks are the same child. In the second a plugin looks at the answers on their way.
	c := startAs(t, port, server(port, watching(dir))+server(second, "log . {\nclass error\n}\n"+watching(dir)))
	looked := c.at(second)
	child := c.child(t).addr()

	variant := func(f func(*dns.Msg)) func(string, uint16) *dns.Msg {
		return func(name string, qtype uint16) *dns.Msg {
			m := question(name, qtype)
			f(m)
			return m
		}
	}
	variants := []struct {
		name, network string
		make          func(string, uint16) *dns.Msg
	}{
		{"udp", "udp", question},
		{"tcp", "tcp", question},
		{"dnssec ok", "udp", variant(func(m *dns.Msg) { m.SetEdns0(1232, true) })},
		{"checking disabled, authentic data", "udp", variant(func(m *dns.Msg) { m.CheckingDisabled, m.AuthenticatedData = true, true })},
		{"no recursion", "udp", variant(func(m *dns.Msg) { m.RecursionDesired = false })},
	}
	tests := []struct {
		name, query string
		qtype       uint16
		want        string // part of the answer
	}{
		{"address", "ad.doubleclick.example", dns.TypeA, "127.0.0.1"},
		{"address in mixed case", "AD.DoubleClick.Example", dns.TypeA, "127.0.0.1"},
		{"hosts file", "printer.home.example", dns.TypeA, "192.0.2.7"},
		{"hosts file, IPv6", "printer.home.example", dns.TypeAAAA, "2001:db8::7"},
		{"hosts file, reverse", "7.2.0.192.in-addr.arpa", dns.TypePTR, "printer.home.example."},
		{"server for a domain", "web.svc.cluster.local", dns.TypeA, "10.96.0.1"},
		{"stub domain", "www.acme.example", dns.TypeA, "192.0.2.3"},
		{"upstream, address", "www.up.example", dns.TypeA, "192.0.2.1"},
		{"upstream, text", "www.up.example", dns.TypeTXT, "some text"},
		{"upstream, mail", "up.example", dns.TypeMX, "mail.up.example."},
		{"upstream, alias", "alias.up.example", dns.TypeA, "www.up.example."},
		{"upstream, no such name", "nothing.up.example", dns.TypeA, "NXDOMAIN"},
		{"upstream, no such type", "www.up.example", dns.TypeSRV, "NOERROR"},
		{"upstream, any type", "www.up.example", dns.TypeANY, "www.up.example."},
		{"unknown type", "www.up.example", 65280, "NOERROR"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			for _, v := range variants {
				same(t, looked, child, v.network, v.make(tt.query, tt.qtype))
				got := same(t, c, child, v.network, v.make(tt.query, tt.qtype))
				if v.name == "udp" && !strings.Contains(got.String(), tt.want) {
					t.Errorf("got\n%s\nwant %s in it", got, tt.want)
				}
			}
		})
	}
	t.Run("octets", func(t *testing.T) {
		m := question("www.UP.example", dns.TypeTXT)
		m.SetEdns0(1400, true)
		m.Extra[0].(*dns.OPT).Option = []dns.EDNS0{&dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: "0102030405060708"}}
		for _, m := range []*dns.Msg{m, question("printer.home.example", dns.TypeA), question("nothing.up.example", dns.TypeA)} {
			if got, want := octets(t, c.addr(), m), octets(t, child, m); !bytes.Equal(got, want) {
				t.Errorf("got  %x\nwant %x", got, want)
			}
		}
	})
	t.Run("version", func(t *testing.T) {
		for _, name := range []string{"version.bind", "authors.bind", "cachesize.bind"} {
			m := question(name, dns.TypeTXT)
			m.Question[0].Qclass = dns.ClassCHAOS
			if got := same(t, c, child, "udp", m); name == "version.bind" && !strings.Contains(got.String(), "dnsmasq-") {
				t.Errorf("got\n%s\nwant dnsmasq-… in it", got)
			}
		}
	})
	t.Run("upstreamNameservers alone", func(t *testing.T) {
		put(t, dir, "a.conf", "# nothing\n")
		put(t, dir, "upstreamNameservers", fmt.Sprintf(`["127.0.0.1:%d"]`, upstream2))
		c.waits(t, "www.other.example", "192.0.2.4")
	})
}

func TestLargeAnswer(t *testing.T) {
	t.Parallel()
	var conf strings.Builder
	for i := range 6 {
		fmt.Fprintf(&conf, "txt-record=big.example,%s\n", strings.Repeat(string(rune('a'+i)), 250))
	}
	c := start(t, watching(configDir(t, map[string]string{"a.conf": conf.String()})))

	t.Run("truncated over UDP", func(t *testing.T) {
		for _, size := range []uint16{0, 1232, 4096} {
			m := question("big.example", dns.TypeTXT)
			if size > 0 {
				m.SetEdns0(size, false)
			}
			r, err := exchange("udp", c.addr(), m)
			if err != nil {
				t.Fatal(err)
			}
			if !r.Truncated {
				t.Errorf("UDP size %d: got %d answers and no TC, want TC", size, len(r.Answer))
			}
		}
	})
	t.Run("whole over TCP", func(t *testing.T) {
		r, err := exchange("tcp", c.addr(), question("big.example", dns.TypeTXT))
		if err != nil {
			t.Fatal(err)
		}
		if r.Truncated || len(r.Answer) != 6 || r.Len() < 1500 {
			t.Errorf("got %d answers, %d bytes, TC %t; want 6, more than 1500, false", len(r.Answer), r.Len(), r.Truncated)
		}
	})
	t.Run("200 clients over TCP at once, then a large answer", func(t *testing.T) {
		var wg sync.WaitGroup
		results := make(chan string, 200)
		for i := range 200 {
			wg.Go(func() {
				r, err := exchange("tcp", c.addr(), question(fmt.Sprintf("n%d.big.example", i), dns.TypeTXT))
				if err != nil {
					results <- err.Error()
					return
				}
				results <- dns.RcodeToString[r.Rcode]
			})
		}
		wg.Wait()
		close(results)
		count := map[string]int{}
		for r := range results {
			count[r]++
		}
		if count["REFUSED"] != 200 { // dnsmasq's word for a name it doesn't know, without an upstream
			t.Errorf("got %v, want dnsmasq's REFUSED 200 times", count)
		}
		for range 30 {
			r, err := exchange("tcp", c.addr(), question("big.example", dns.TypeTXT))
			if err != nil || len(r.Answer) != 6 {
				t.Fatalf("got %v, %v; want 6 answers", r, err)
			}
		}
	})
	t.Run("clients over TCP at once after dnsmasq was killed", func(t *testing.T) {
		kill(t, c.child(t).pid, syscall.SIGKILL)
		var wg sync.WaitGroup
		for range 20 {
			wg.Go(func() {
				r, err := exchange("tcp", c.addr(), question("big.example", dns.TypeTXT))
				if err != nil || len(r.Answer) != 6 {
					t.Errorf("got %v, %v; want 6 answers", r, err)
				}
			})
		}
		wg.Wait()
	})
}

func TestLimits(t *testing.T) {
	t.Parallel()
	t.Run("timeout", func(t *testing.T) {
		c := start(t, nanny(fmt.Sprintf("args --no-resolv --no-hosts "+minPort+" \"--server=127.0.0.1#%d\"", silent(t)), "timeout 700ms"))
		c.child(t)
		begin := time.Now()
		c.wants(t, "www.example.org", "SERVFAIL")
		if took := time.Since(begin); took < 600*time.Millisecond || took > 4*time.Second {
			t.Errorf("SERVFAIL after %s, want it after 700 ms", took)
		}
	})
	t.Run("max_concurrent", func(t *testing.T) {
		monitor := freePort(t)
		c := start(t, fmt.Sprintf("prometheus 127.0.0.1:%d\n", monitor)+nanny(fmt.Sprintf("args --no-resolv --no-hosts "+minPort+" \"--server=127.0.0.1#%d\" --address=/here.example/192.0.2.1", silent(t)),
			"timeout 3s", "max_concurrent 3"))
		c.child(t)
		got := atOnce(c, 10)
		if got["REFUSED"] != 7 || got["SERVFAIL"] != 3 {
			t.Errorf("got %v, want 7 times REFUSED and 3 times SERVFAIL", got)
		}
		if n := scrape(t, monitor)[`max_concurrent_rejects_total{zones="."}`]; n != 7 {
			t.Errorf("max_concurrent_rejects_total is %v, want 7", n)
		}
		c.wants(t, "www.here.example", "192.0.2.1")
	})
	t.Run("more queries outstanding than dnsmasq takes", func(t *testing.T) {
		monitor := freePort(t)
		c := start(t, fmt.Sprintf("prometheus 127.0.0.1:%d\n", monitor)+nanny(fmt.Sprintf("args --no-resolv --no-hosts "+minPort+" \"--server=127.0.0.1#%d\"", silent(t)), "timeout 4s"))
		c.child(t)
		var got map[string]int
		for round := 1; got["REFUSED"] == 0 && round <= 5; round++ { // again where the kernel dropped too many before CoreDNS
			drops := udpDrops(t, c.port)
			got = atOnce(c, 1200)
			if n := got["REFUSED"]; n > 200 || n == 0 && udpDrops(t, c.port) == drops { // nanny's own questions take some of the 1024
				t.Errorf("got %v, want some REFUSED, at most 200", got)
			}
		}
		c.logs.wait(t, 0, "[WARNING]", "Maximum number of concurrent DNS queries reached (max: 1024)")
		if n := len(c.logs.lines(0, "Maximum number")); n > 3 { // dnsmasq says it once in 5 s
			t.Errorf("the limit is said %d times, want few", n)
		}
		within(t, patience, fmt.Sprintf("%d queries are refused by the metrics", got["REFUSED"]), func() bool {
			return int(scrape(t, monitor)[`request_duration_seconds_count{rcode="REFUSED",zones="."}`]) == got["REFUSED"]
		})
	})
	t.Run("dnsmasq's own limit set by the user", func(t *testing.T) {
		dir := configDir(t, map[string]string{"x.conf": fmt.Sprintf("dns-forward-max=2\nserver=127.0.0.1#%d\n", silent(t))})
		c := start(t, watching(dir, "timeout 2s"))
		c.logs.wait(t, 0, "Configuration applied", "+x.conf")
		if got := atOnce(c, 10); got["REFUSED"] < 7 {
			t.Errorf("got %v, want dnsmasq's REFUSED at least 7 times", got)
		}
	})
}

// atOnce asks c n different questions at once and counts the answers.
func atOnce(c *coreDNS, n int) map[string]int {
	var mu sync.Mutex
	count := map[string]int{}
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			got := c.says(fmt.Sprintf("n%d.example.org", i))
			mu.Lock()
			defer mu.Unlock()
			count[got]++
		})
	}
	wg.Wait()
	return count
}

func TestRouting(t *testing.T) {
	t.Parallel()
	next := dnsmasq(t, "--address=/#/198.51.100.1")
	forward := fmt.Sprintf("\nforward . 127.0.0.1:%d", next)
	const args = "args --no-resolv --no-hosts --address=/there.example/192.0.2.1 --local=/there.example/ --address=/gone.example/"

	t.Run("zones", func(t *testing.T) {
		t.Parallel()
		c := start(t, "nanny there.example {\n"+args+"\n}"+forward)
		c.wants(t, "www.there.example", "192.0.2.1")
		c.wants(t, "www.elsewhere.example", "198.51.100.1")
	})
	t.Run("except", func(t *testing.T) {
		t.Parallel()
		c := start(t, nanny(args, "except sub.there.example")+forward)
		c.wants(t, "www.there.example", "192.0.2.1")
		c.wants(t, "www.sub.there.example", "198.51.100.1")
	})
	t.Run("no fallthrough", func(t *testing.T) {
		t.Parallel()
		c := start(t, nanny(args)+forward)
		c.wants(t, "www.gone.example", "NXDOMAIN")
	})
	t.Run("fallthrough at NXDOMAIN", func(t *testing.T) {
		t.Parallel()
		c := start(t, nanny(args, "fallthrough")+forward)
		c.wants(t, "www.there.example", "192.0.2.1")
		c.wants(t, "www.gone.example", "198.51.100.1")
	})
	t.Run("fallthrough for a zone", func(t *testing.T) {
		t.Parallel()
		c := start(t, nanny(args, "fallthrough a.gone.example")+forward)
		c.wants(t, "www.a.gone.example", "198.51.100.1")
		c.wants(t, "www.b.gone.example", "NXDOMAIN")
	})
	t.Run("fallthrough while dnsmasq can't be kept running", func(t *testing.T) {
		t.Parallel()
		broken := filepath.Join(tempDir(t), "broken")
		c := start(t, nanny("exec "+script(t, "[ -e "+broken+" ] && exit 1\nexec "+dnsmasqPath(t)+` "$@"`), args, "fallthrough")+forward)
		c.wants(t, "www.there.example", "192.0.2.1")
		if err := os.WriteFile(broken, nil, 0o644); err != nil {
			t.Fatal(err)
		}
		mark := c.logs.mark()
		kill(t, c.child(t).pid, syscall.SIGKILL)
		c.logs.wait(t, mark, "can't be started")
		begin := time.Now()
		c.wants(t, "www.there.example", "198.51.100.1")
		if took := time.Since(begin); took > 4*time.Second {
			t.Errorf("the next plugin was asked after %s, want at once", took)
		}
		if err := os.Remove(broken); err != nil {
			t.Fatal(err)
		}
		c.waits(t, "www.there.example", "192.0.2.1")
	})
	t.Run("several blocks in order", func(t *testing.T) {
		t.Parallel()
		c := start(t, "nanny a.example {\nargs --no-resolv --address=/a.example/192.0.2.1 --address=/gone.a.example/\nfallthrough\n}\n"+
			"nanny a.example b.example {\nargs --no-resolv --address=/a.example/192.0.2.2 --address=/b.example/192.0.2.2\n}"+forward)
		c.wants(t, "www.a.example", "192.0.2.1")
		c.wants(t, "gone.a.example", "192.0.2.2")
		c.wants(t, "www.b.example", "192.0.2.2")
		c.wants(t, "www.c.example", "198.51.100.1")
		if n := len(c.services()); n != 2 {
			t.Errorf("%d dnsmasq, want 2", n)
		}
	})
}

// TestGarbage sends what isn't a query, over UDP, TCP and HTTPS, where CoreDNS itself lets more of it pass. dnsmasq sees nothing
// of it, and CoreDNS answers what is one.
func TestGarbage(t *testing.T) {
	t.Parallel()
	cert, key, trusted := certificate(t)
	port, web := freePort(t), freePort(t)
	outside, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)}) // where dnsmasq sends what isn't a query
	if err != nil {
		t.Fatal(err)
	}
	defer outside.Close()
	block := nanny("args --no-resolv --no-hosts --log-queries --address=/example/192.0.2.1", fmt.Sprintf("args \"--server=127.0.0.1#%d\"", outside.LocalAddr().(*net.UDPAddr).Port))
	secure := fmt.Sprintf("https://.:%d {\nbind 127.0.0.1\ntls %s %s\n%s\n}\n", web, cert, key, block)
	c := startAs(t, port, server(port, block)+secure)
	transport := &http.Transport{TLSClientConfig: trusted, ForceAttemptHTTP2: true}
	defer transport.CloseIdleConnections()
	client := http.Client{Transport: transport, Timeout: queryWait}
	c.waits(t, "kept.example", "192.0.2.1")
	c.logs.wait(t, 0, "query[A] kept.example")

	const name = "\x07garbage\x07example\x00"
	header := func(flags byte, questions, answers int) string {
		return string([]byte{0x12, 0x34, flags, 0, 0, byte(questions), 0, byte(answers), 0, 0, 0, 0})
	}
	const inA = "\x00\x01\x00\x01"
	packets := []string{
		"", "\x00", header(1, 0, 0), header(1, 1, 0), // cut short
		header(1, 1, 0) + "\x07garb", header(1, 1, 0) + name + "\x00",
		header(1, 0, 0) + name + inA,              // no question
		header(1, 2, 0) + name + inA + name + inA, // two
		header(1, 1, 1) + name + inA + name + inA + "\x00\x00\x00\x3c\x00\x04\xc0\x00\x02\x42",
		header(1, 1, 0) + "\xc0\x0c" + inA,                   // a pointer to itself
		header(1, 1, 0) + "\x87garbage\x07example\x00" + inA, // a kind of label that isn't one
		header(1, 1, 0) + "\x3f" + strings.Repeat("garbage", 9) + strings.Repeat("\x3f"+strings.Repeat("garbage", 9), 4) + "\x00" + inA,
		header(0x81, 1, 0) + name + inA, // an answer
	}
	for opcode := range byte(15) {
		packets = append(packets, header(1|(opcode+1)<<3, 1, 0)+name+inA)
	}
	random := rand.New(rand.NewPCG(1, 2))
	for n := range 300 {
		packet := make([]byte, n)
		for i := range packet {
			packet[i] = byte(random.Uint32())
		}
		packets = append(packets, string(packet))
	}
	for _, packet := range packets {
		for _, network := range []string{"udp", "tcp"} {
			text := packet
			if network == "tcp" {
				text = string([]byte{byte(len(packet) >> 8), byte(len(packet))}) + packet
			}
			conn, err := net.Dial(network, c.addr())
			if err != nil {
				t.Fatal(err)
			}
			if _, err := conn.Write([]byte(text)); err != nil {
				t.Error(err)
			}
			conn.Close()
		}
		_, _ = askHTTP(t.Context(), &client, fmt.Sprintf("127.0.0.1:%d", web), []byte(packet))
	}
	mark := c.logs.mark()
	for _, network := range []string{"udp", "tcp"} {
		if got := says(network, c.addr(), "last.example"); got != "192.0.2.1" {
			t.Errorf("over %s: got %s", network, got)
		}
	}
	c.logs.wait(t, mark, "query[A] last.example")
	_ = outside.SetReadDeadline(time.Now().Add(100 * time.Millisecond)) // what came is there
	for buf := make([]byte, dns.MaxMsgSize); ; {
		n, err := outside.Read(buf)
		if err != nil {
			break
		}
		if strings.Contains(string(buf[:n]), "garb") {
			t.Errorf("sent to dnsmasq's upstream: %q", buf[:n])
		}
	}
	for _, said := range []string{"garb", "panic", "[ERROR]"} {
		if lines := c.logs.lines(0, said); len(lines) > 0 {
			t.Errorf("in the log: %.300q", lines)
		}
	}
}

// Command bench compares nanny with CoreDNS's forward plugin, both in front of the same dnsmasq, and prints a table.
//
// It needs bin/coredns, dnsmasq and dnsperf. The three CoreDNS processes (whoami, forward, nanny) are asked in turns, in
// several rounds; each figure is the median of the rounds. Only the ratios mean something on another machine.
package main

import (
	"bufio"
	"bytes"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/miekg/dns"
)

var (
	coredns = flag.String("coredns", "bin/coredns", "the CoreDNS to measure")
	seconds = flag.Int("seconds", 4, "length of one run")
	rounds  = flag.Int("rounds", 3, "runs of each kind")
	only    = flag.String("only", "", "names of loads, separated by commas; all if empty")
)

// load is what dnsperf is told to do.
type load struct {
	name        string
	queries     string   // file of queries
	args        []string // for dnsperf
	outstanding int
	latency     bool // figures are latencies; else throughput and CPU
	seen        bool // with a plugin before that sees each answer
}

// seen is a plugin that sees each answer, so that none goes on as dnsmasq's octets.
const seen = "prometheus 127.0.0.1:0"

// result is the outcome of one run.
type result struct {
	qps, cpu         float64 // queries/s; µs of CoreDNS's CPU a query
	median, p99      float64 // µs
	lost, sent       int
	rss              float64 // MiB
	unexpectedAnswer int     // other than NOERROR
}

const (
	names = 10000
	rules = 110000
)

func main() {
	flag.Parse()
	if err := run(); err != nil {
		log.Fatal(err)
	}
}

func run() error {
	dir, err := os.MkdirTemp("", "bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	files, err := writeFiles(dir)
	if err != nil {
		return err
	}
	servers, stop, err := startServers(dir, "")
	defer stop()
	if err != nil {
		return err
	}
	seeing, stop, err := startServers(dir, seen)
	defer stop()
	if err != nil {
		return err
	}

	loads := []load{
		{name: "hosts, 100 outstanding", queries: files["hosts"], outstanding: 100},
		{name: "list of 110,000 rules, 100 outstanding", queries: files["list"], outstanding: 100},
		{name: "answers of 1,200 bytes, 100 outstanding", queries: files["big"], outstanding: 100, args: []string{"-e"}},
		{name: "hosts, 100 outstanding, prometheus", queries: files["hosts"], outstanding: 100, seen: true},
		{name: "TCP, 50 connections", queries: files["hosts"], outstanding: 100, args: []string{"-m", "tcp", "-c", "50"}},
		{name: "latency, 1 outstanding", queries: files["hosts"], outstanding: 1, latency: true},
		{name: "latency, 20 outstanding", queries: files["hosts"], outstanding: 20, latency: true},
		{name: "latency, 200 outstanding", queries: files["hosts"], outstanding: 200, latency: true},
	}
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "load\tfigure\tforward\tnanny\tnanny/forward\t")
	for _, l := range loads {
		if *only != "" && !slices.ContainsFunc(strings.Split(*only, ","), func(s string) bool { return strings.Contains(l.name, s) }) {
			continue
		}
		got := map[string][]result{}
		asked := servers
		if l.seen {
			asked = seeing
		}
		for range *rounds {
			for _, s := range asked {
				if s.name == "whoami" && l.latency {
					continue
				}
				r, err := l.run(s)
				if err != nil {
					return fmt.Errorf("%s, %s: %w", l.name, s.name, err)
				}
				got[s.name] = append(got[s.name], r)
			}
		}
		report(w, l, got)
	}
	return w.Flush()
}

func report(w io.Writer, l load, got map[string][]result) {
	median := func(server string, f func(result) float64) float64 {
		all := make([]float64, 0, len(got[server]))
		for _, r := range got[server] {
			all = append(all, f(r))
		}
		slices.Sort(all)
		if len(all) == 0 {
			return 0
		}
		return all[len(all)/2]
	}
	row := func(figure, format string, forward, nanny float64) {
		fmt.Fprintf(w, "%s\t%s\t"+format+"\t"+format+"\t%.2f\t\n", l.name, figure, forward, nanny, nanny/forward)
	}
	both := func(figure, format string, f func(result) float64) {
		row(figure, format, median("forward", f), median("nanny", f))
	}
	if l.latency {
		both("median, µs", "%.0f", func(r result) float64 { return r.median })
		both("p99, µs", "%.0f", func(r result) float64 { return r.p99 })
		return
	}
	both("queries/s", "%.0f", func(r result) float64 { return r.qps })
	cpu := func(r result) float64 { return r.cpu }
	both("CPU, µs a query", "%.1f", cpu)
	own := median("whoami", cpu)
	row("CPU beyond whoami's", "%.1f", median("forward", cpu)-own, median("nanny", cpu)-own)
	both("RSS, MiB", "%.0f", func(r result) float64 { return r.rss })
	for _, s := range []string{"forward", "nanny"} {
		for _, r := range got[s] {
			if r.lost > 0 || r.unexpectedAnswer > 0 {
				fmt.Fprintf(w, "%s\t%s: %d of %d lost, %d not NOERROR\t\t\t\t\n", l.name, s, r.lost, r.sent, r.unexpectedAnswer)
			}
		}
	}
}

// writeFiles writes the directory that nanny watches and the queries.
func writeFiles(dir string) (map[string]string, error) {
	conf := filepath.Join(dir, "conf")
	if err := os.Mkdir(conf, 0o755); err != nil {
		return nil, err
	}
	var hosts, list, hostsQ, listQ, bigQ bytes.Buffer
	for i := range names {
		fmt.Fprintf(&hosts, "192.0.%d.%d host%d.example.org\n", i>>8&255, i&255, i)
		fmt.Fprintf(&hostsQ, "host%d.example.org A\n", i)
		fmt.Fprintf(&listQ, "www.rule%d.example A\n", i*rules/names)
	}
	for i := range rules {
		fmt.Fprintf(&list, "address=/rule%d.example/192.0.2.1\n", i)
	}
	text := strings.Repeat("x", 250)
	for i := range 100 { // two records of 550 bytes each: a line of the configuration has at most 1,000
		for range 2 {
			fmt.Fprintf(&list, "txt-record=big%d.example.org,%s,%s,%s\n", i, text, text, text[:50])
		}
		fmt.Fprintf(&bigQ, "big%d.example.org TXT\n", i)
	}
	files := map[string]string{}
	for name, data := range map[string][]byte{"hosts": hostsQ.Bytes(), "list": listQ.Bytes(), "big": bigQ.Bytes()} {
		files[name] = filepath.Join(dir, name)
		if err := os.WriteFile(files[name], data, 0o644); err != nil {
			return nil, err
		}
	}
	for name, data := range map[string][]byte{"a.hosts": hosts.Bytes(), "b.conf": list.Bytes()} {
		if err := os.WriteFile(filepath.Join(conf, name), data, 0o644); err != nil {
			return nil, err
		}
	}
	return files, nil
}

// server is a CoreDNS under test.
type server struct {
	name string
	port int
	cmd  *exec.Cmd
}

// startServers starts the three, with plugin before each of them; nanny's dnsmasq has a fixed address, where forward asks it too.
func startServers(dir, plugin string) (servers []*server, stop func(), err error) {
	stop = func() {
		for _, s := range servers {
			_ = s.cmd.Process.Signal(syscall.SIGTERM)
			_ = s.cmd.Wait()
		}
	}
	dnsmasq := freePort()
	for _, s := range []struct{ name, block string }{
		{"nanny", fmt.Sprintf("nanny . {\nconfig %s/conf\nlisten 127.0.0.1:%d\nargs --no-resolv --no-hosts\n}", dir, dnsmasq)},
		{"forward", fmt.Sprintf("forward . 127.0.0.1:%d {\nmax_fails 0\n}", dnsmasq)},
		{"whoami", "whoami"},
	} {
		port := freePort()
		path := filepath.Join(dir, s.name+".corefile")
		if err := os.WriteFile(path, fmt.Appendf(nil, ".:%d {\n%s\n%s\n}\n", port, plugin, s.block), 0o644); err != nil {
			return servers, stop, err
		}
		cmd := exec.Command(*coredns, "-conf", path)
		cmd.Stderr = os.Stderr
		if err := cmd.Start(); err != nil {
			return servers, stop, err
		}
		servers = append(servers, &server{s.name, port, cmd})
		if err := awaitPort(port); err != nil {
			return servers, stop, fmt.Errorf("%s: %w", s.name, err)
		}
	}
	return servers, stop, nil
}

func freePort() int {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// awaitPort waits until a server answers a query over TCP.
func awaitPort(port int) error {
	query := []byte("\x00\x1d\x00\x01\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x04big1\x07example\x03org\x00\x00\x10\x00\x01")
	query[1] = byte(len(query) - 2)
	var err error
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		var c net.Conn
		if c, err = net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port)); err != nil {
			continue
		}
		_ = c.SetDeadline(time.Now().Add(5 * time.Second))
		if _, err = c.Write(query); err == nil {
			_, err = c.Read(make([]byte, 64))
		}
		c.Close()
		if err == nil {
			return nil
		}
	}
	return err
}

var (
	sentLine   = regexp.MustCompile(`Queries sent:\s+(\d+)`)
	lostLine   = regexp.MustCompile(`Queries lost:\s+(\d+)`)
	qpsLine    = regexp.MustCompile(`Queries per second:\s+([\d.]+)`)
	okLine     = regexp.MustCompile(`NOERROR (\d+)`)
	doneLine   = regexp.MustCompile(`Queries completed:\s+(\d+)`)
	answerLine = regexp.MustCompile(`^> \S+ \S+ \S+ ([\d.]+)`)
)

// ask asks s one query after the other. dnsperf, with one outstanding, sends only some tens of them a second.
func (l load) ask(s *server) (result, error) {
	var r result
	text, err := os.ReadFile(l.queries)
	if err != nil {
		return r, err
	}
	c, err := net.Dial("udp", fmt.Sprintf("127.0.0.1:%d", s.port))
	if err != nil {
		return r, err
	}
	defer c.Close()
	var all []float64
	buf := make([]byte, dns.MaxMsgSize)
	lines := strings.Fields(string(text)) // name and type in turns
	end := time.Now().Add(time.Duration(*seconds) * time.Second)
	for i := 0; time.Now().Before(end); i = (i + 2) % len(lines) {
		q, err := new(dns.Msg).SetQuestion(dns.Fqdn(lines[i]), dns.StringToType[lines[i+1]]).Pack()
		if err != nil {
			return r, err
		}
		start := time.Now()
		_ = c.SetDeadline(start.Add(6 * time.Second))
		if _, err := c.Write(q); err != nil {
			return r, err
		}
		if _, err := c.Read(buf); err != nil {
			return r, err
		}
		all = append(all, float64(time.Since(start).Nanoseconds())/1e3)
	}
	slices.Sort(all)
	r.median, r.p99 = all[len(all)/2], all[len(all)*99/100]
	return r, nil
}

// run drives s with l.
func (l load) run(s *server) (result, error) {
	var r result
	if l.outstanding == 1 {
		return l.ask(s)
	}
	args := append([]string{
		"-s", "127.0.0.1", "-p", strconv.Itoa(s.port), "-d", l.queries, "-l", strconv.Itoa(*seconds),
		"-q", strconv.Itoa(l.outstanding), "-t", "6", "-b", "1024", // KiB: no answer may get lost at dnsperf
	}, l.args...)
	if l.latency {
		args = append(args, "-v")
	}
	cpu := cpuTime(s.cmd.Process.Pid)
	out, err := exec.Command("dnsperf", args...).Output()
	if err != nil {
		return r, fmt.Errorf("dnsperf: %w: %s", err, out)
	}
	cpu = cpuTime(s.cmd.Process.Pid) - cpu
	number := func(re *regexp.Regexp) float64 {
		if m := re.FindSubmatch(out); m != nil {
			n, _ := strconv.ParseFloat(string(m[1]), 64)
			return n
		}
		return 0
	}
	r.sent, r.lost, r.qps = int(number(sentLine)), int(number(lostLine)), number(qpsLine)
	done := number(doneLine)
	r.unexpectedAnswer = int(done - number(okLine))
	r.cpu = cpu.Seconds() * 1e6 / done
	r.rss = rss(s.cmd.Process.Pid)
	if l.latency {
		var all []float64
		for sc := bufio.NewScanner(bytes.NewReader(out)); sc.Scan(); {
			if m := answerLine.FindStringSubmatch(sc.Text()); m != nil {
				n, _ := strconv.ParseFloat(m[1], 64)
				all = append(all, n*1e6)
			}
		}
		if len(all) == 0 {
			return r, fmt.Errorf("dnsperf -v printed no latency: %.300s", out)
		}
		slices.Sort(all)
		r.median, r.p99 = all[len(all)/2], all[len(all)*99/100]
	}
	return r, nil
}

// cpuTime is the user and system time of a process, from /proc/PID/stat (proc(5)).
func cpuTime(pid int) time.Duration {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		log.Fatal(err)
	}
	f := strings.Fields(string(data[bytes.LastIndexByte(data, ')')+1:]))
	user, _ := strconv.Atoi(f[11])
	system, _ := strconv.Atoi(f[12])
	return time.Duration(user+system) * 10 * time.Millisecond // USER_HZ is 100
}

// rss is the resident memory of a process in MiB.
func rss(pid int) float64 {
	data, _ := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	f := strings.Fields(string(data))
	if len(f) < 2 {
		return 0
	}
	n, _ := strconv.ParseFloat(f[1], 64)
	return n * float64(os.Getpagesize()) / (1 << 20)
}

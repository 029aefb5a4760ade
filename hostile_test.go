package nanny

import (
	"encoding/json"
	"fmt"
	"io"
	golog "log"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// cfgOf gives the configuration of a directory with files, given as name and contents by turns.
func cfgOf(t *testing.T, files ...string) (*config, error) {
	t.Helper()
	dir := t.TempDir()
	write(t, dir, files...)
	s, err := readDir(dir, true)
	if err != nil {
		return nil, err
	}
	k, err := parseKubeDNS(s)
	if err != nil {
		return nil, err
	}
	return newConfig(spec{}, s, k, nil)
}

// Nothing that is put into a domain, a server or a federation makes a directive, or gets past its check.
func TestHostileValues(t *testing.T) {
	for _, bad := range []string{
		"\n", "\r", "\t", " ", ",", "/", "#", `\`, `"`, "'", "\x00", "=", "@", "%", "*", "_", "$(id)", "`id`", "\u2028", "\u00e4", "\u0430", "..", ".", "-", "A",
		"\nconf-script=/bin/sh\n", "\naddress=/#/192.0.2.66", "/192.0.2.66\naddress=/", "#53\nserver=192.0.2.66", strings.Repeat("a", 64), strings.Repeat("a.", 1<<19),
	} {
		quoted := func(v any) string {
			b, err := json.Marshal(v)
			if err != nil {
				t.Fatal(err)
			}
			return string(b)
		}
		for name, files := range map[string][2]string{
			"domain, before":     {"stubDomains", "{\n" + quoted(bad+"corp.example") + `: ["192.0.2.53"]}`},
			"domain, after":      {"stubDomains", "{\n" + quoted("corp.example"+bad) + `: ["192.0.2.53"]}`},
			"domain, within":     {"stubDomains", "{\n" + quoted("corp."+bad+".example") + `: ["192.0.2.53"]}`},
			"server, before":     {"stubDomains", "{\"corp.example\":\n[" + quoted(bad+"192.0.2.53") + `]}`},
			"server, after":      {"stubDomains", "{\"corp.example\":\n[" + quoted("192.0.2.53"+bad) + `]}`},
			"nameserver, before": {"upstreamNameservers", "[\n" + quoted(bad+"192.0.2.53") + "]"},
			"nameserver, after":  {"upstreamNameservers", "[\n" + quoted("192.0.2.53"+bad) + "]"},
			"zone":               {"upstreamNameservers", "[\n" + quoted("fe80::1%"+bad) + "]"},
			"federation":         {"federations", "a=a.example,\n" + bad + ",b=b.example"},
			"federation, domain": {"federations", "a=a.example,\nb=b." + bad + ".example"},
		} {
			t.Run(fmt.Sprintf("%s %.20q", name, bad), func(t *testing.T) {
				cfg, err := cfgOf(t, files[0], files[1], "a.conf", "address=/kept.example/192.0.2.1\n")
				if err == nil {
					if name != "zone" || !strings.Contains("_..-A", bad) { // an interface may be called so
						t.Errorf("taken: %s", cfg.files[serversFile].bytes())
					}
					return
				}
				at := files[0] + ":2:"
				if files[0] == "federations" { // a newline there is one more line
					at = "federations:"
				}
				if !strings.HasPrefix(err.Error(), at) || len(err.Error()) > 1000 || strings.ContainsAny(err.Error(), "\n\r\x00") {
					t.Errorf("got %.200q, want a short error of one line with %s", err, at)
				}
			})
		}
	}
}

func TestHostileJSON(t *testing.T) {
	deep := func(open, close string, n int) string { return strings.Repeat(open, n) + strings.Repeat(close, n) }
	for _, tc := range []struct{ name, file, text, want string }{
		{"deep objects", "stubDomains", deep(`{"a":`, "}", 1<<18), "an array of servers expected"},
		{"deep arrays", "stubDomains", `{"corp.example": ` + deep("[", "]", 1<<20) + "}", "a server (a string) expected"},
		{"1 MB string", "stubDomains", `{"corp.example": ["` + strings.Repeat("9", 1<<20) + `"]}`, "server"},
		{"1 MB of digits", "upstreamNameservers", "[" + strings.Repeat("9", 1<<20) + "]", "a server (a string) expected"},
		{"1 MB of blanks and a bracket", "upstreamNameservers", strings.Repeat(" \n", 1<<19) + "{", ":524289: an array of servers expected"},
		{"a key twice", "stubDomains", "{\"corp.example\": [\"192.0.2.53\"],\n\"corp.example\": [\"192.0.2.66\"]}", ":2: domain corp.example is given twice"},
		{"a key twice, escaped", "stubDomains", "{\"corp.example\": [\"192.0.2.53\"],\n\"\\u0063orp.example\": [\"192.0.2.66\"]}", ":2: domain corp.example is given twice"},
		{"half a surrogate", "stubDomains", `{"\ud800.example": []}`, "domain"},
		{"not UTF-8", "stubDomains", "{\"\xff.example\": []}", "0xFF is not UTF-8"},
		{"two byte order marks", "stubDomains", "\ufeff\ufeff{}", "not JSON"},
		{"UTF-16", "stubDomains", "{\x00}\x00", "not JSON"},
		{"comment", "stubDomains", "{} // none", "something follows"},
		{"NUL after the end", "upstreamNameservers", "[]\x00", "something follows"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			start := cpuTime()
			_, err := cfgOf(t, tc.file, tc.text)
			if err == nil || !strings.HasPrefix(err.Error(), tc.file+":") || !strings.Contains(err.Error(), tc.want) || len(err.Error()) > 1000 {
				t.Errorf("got %.300v, want a short error with %q", err, tc.want)
			}
			if took := cpuTime() - start; took > 5*time.Second {
				t.Errorf("took %s", took)
			}
		})
	}
}

// stubs is a stubDomains of n domains.
func stubs(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "%c\n\"domain-%d.example\": [\"192.0.2.53:5353\"]", "{,"[min(i, 1)], i)
	}
	return b.String() + "}"
}

func TestManyStubDomains(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "stubDomains", stubs(100_000))
	e := newEye(spec{path: "dnsmasq", dir: dir}, nil, make(chan look, 1))
	start := cpuTime()
	cfg, err := e.read(t.Context(), true)
	if err != nil {
		t.Fatal(err)
	}
	read := cpuTime()
	empty := &config{}
	text := empty.changes(cfg)
	t.Logf("read in %s, its changes told in %s of CPU", read-start, cpuTime()-read)
	if n := strings.Count(string(cfg.files[serversFile].bytes()), "\n"); n != 100_000 {
		t.Errorf("got %d servers", n)
	}
	if want := `files=+stubDomains domains="+domain-0.example,`; !strings.HasPrefix(text, want) || len(text) > 500 {
		t.Errorf("got %.600s, want %s...", text, want)
	}
}

// BenchmarkManyStubDomains is what a change costs before and after dnsmasq has it.
func BenchmarkManyStubDomains(b *testing.B) {
	s := snap("stubDomains", stubs(100_000))
	for b.Loop() {
		k, err := parseKubeDNS(s)
		if err != nil {
			b.Fatal(err)
		}
		cfg, err := newConfig(spec{}, s, k, nil)
		if err != nil {
			b.Fatal(err)
		}
		(&config{}).changes(cfg)
	}
}

// A *.hosts has no directives, whatever stands in it, and a *.conf has none behind what dnsmasq doesn't read as the end of
// a line.
func TestHostileFiles(t *testing.T) {
	for _, tc := range []struct{ name, file, text, want string }{
		{"a directive in a hosts file", "a.hosts", "conf-script=/bin/sh\n192.0.2.1 a.example\n", ""},
		{"conf-script", "a.conf", "\nconf-script=/bin/sh\n", "a.conf:2: conf-script is allowed only in"},
		{"after a carriage return", "a.conf", "# a\rconf-script=/bin/sh\n", ""},
		{"after a NUL", "a.conf", "# a\x00\nconf-script=/bin/sh\n", "a.conf:2: conf-script"},
		{"after a form feed", "a.conf", "\fconf-script=/bin/sh\n", "a.conf:1: conf-script"},
		{"in quotes", "a.conf", `"conf-script"="/bin/sh"`, "a.conf:1: conf-script"},
		{"escaped", "a.conf", `"conf\-script"=/bin/sh`, ""},
		{"behind a long line", "a.conf", strings.Repeat("#", 1024) + "conf-script=/bin/sh\n", "a.conf:1: the line has more than"},
		{"a line of 1 MB", "a.conf", strings.Repeat("x", 1<<20), "a.conf:1: the line has more than"},
		{"a million lines", "a.conf", strings.Repeat("\n", 1<<20) + "conf-file=/etc/dnsmasq.conf", "a.conf:1048577: conf-file"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg, err := cfgOf(t, tc.file, tc.text)
			if tc.want == "" {
				if err != nil {
					t.Fatal(err)
				}
				for path, text := range cfg.files {
					for d := range parseConf(path, text.bytes()) {
						if filepath.Dir(path) != hostsDir && d.name == "conf-script" {
							t.Errorf("%s: %+v", path, d)
						}
					}
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
}

// Who may write the directory can't write lines of their own into CoreDNS's log.
func TestHostileLog(t *testing.T) {
	var logged strings.Builder
	golog.SetOutput(&logged)
	defer golog.SetOutput(io.Discard)
	dir := t.TempDir()
	for _, text := range []string{`user="x\n[ERROR] forged"`, `group="x\n[ERROR] forged"`} {
		put(t, filepath.Join(dir, "a.conf"), text)
		put(t, filepath.Join(dir, "a\n[ERROR] forged"), "")
		looks := make(chan look, 1)
		newEye(spec{dir: dir}, nil, looks).look(t.Context(), true)
		l := <-looks
		if l.err == nil || strings.Contains(l.err.Error(), "\n") {
			t.Errorf("%s: got %v, want an error of one line", text, l.err)
		}
	}
	if got := logged.String(); !strings.Contains(got, "forged") || strings.Contains(got, "\n[ERROR]") {
		t.Errorf("got %q, want each message on one line", got)
	}
}

// Names that don't resolve are some lines in the log, however many there are and however often they are looked up. Each
// look-up of a closed port has another reason: its own port.
func TestHostileNames(t *testing.T) {
	var logged strings.Builder
	golog.SetOutput(&logged)
	defer golog.SetOutput(io.Discard)
	closed, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(loopback, 0)))
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	var names strings.Builder
	for i := range 100 {
		fmt.Fprintf(&names, `, "ns%d.example.org"`, i)
	}
	dir := t.TempDir()
	write(t, dir, "stubDomains", `{"corp.example": [`+names.String()[2:]+"]}")
	e := newEye(spec{dir: dir}, []netip.AddrPort{closed.LocalAddr().(*net.UDPAddr).AddrPort()}, make(chan look, 1))
	for range 3 {
		e.look(t.Context(), false)
	}
	if n := strings.Count(logged.String(), "can't be resolved"); n != maxWarnings+1 || !strings.Contains(logged.String(), "80 more servers can't be resolved") {
		t.Errorf("got %d lines, want %d and one for the others:\n%.1000s", n, maxWarnings, logged.String())
	}
	logged.Reset()
	e.resolver = newResolver([]netip.AddrPort{zone(t, new(atomic.Bool), "ns1.example.org. A 192.0.2.1")})
	for start := time.Now(); logged.Len() == 0 && time.Since(start) < testPatience; { // no name may resolve in a second
		e.look(t.Context(), false)
	}
	if got := logged.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, `server "ns1.example.org" resolves again`) {
		t.Errorf("got %q, want that one resolves again", got)
	}
}

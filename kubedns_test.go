package nanny

import (
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

func snap(name, data string) *snapshot {
	return &snapshot{files: []file{{name: name, data: []byte(data)}}}
}

func TestParseServer(t *testing.T) {
	ip := netip.MustParseAddr
	for _, tc := range []struct {
		in   string
		want server
	}{
		{"1.2.3.4", server{addr: ip("1.2.3.4")}},
		{"1.2.3.4:53", server{addr: ip("1.2.3.4"), port: 53}},
		{"1.2.3.4:65535", server{addr: ip("1.2.3.4"), port: 65535}},
		{"::1", server{addr: ip("::1")}},
		{"[::1]", server{addr: ip("::1")}},
		{"[::1]:53", server{addr: ip("::1"), port: 53}},
		{"::1:1535", server{addr: ip("::1:1535")}},
		{"::ffff:1.2.3.4", server{addr: ip("1.2.3.4")}},
		{"fe80::1%eth0", server{addr: ip("fe80::1%eth0")}},
		{"[fe80::1%eth0.1]:53", server{addr: ip("fe80::1%eth0.1"), port: 53}},
		{"ns.example.org", server{host: "ns.example.org"}},
		{"ns.example.org:5353", server{host: "ns.example.org", port: 5353}},
		{"ns", server{host: "ns"}},
		{"ns1", server{host: "ns1"}},
	} {
		t.Run(tc.in, func(t *testing.T) {
			if got, err := parseServer(tc.in, true); err != nil || got != tc.want {
				t.Errorf("got %+v, %v, want %+v", got, err, tc.want)
			}
			if got, err := parseServer(tc.in, false); (err != nil) != (tc.want.host != "") || err == nil && got != tc.want {
				t.Errorf("without host names: got %+v, %v", got, err)
			}
		})
	}
	for _, in := range []string{
		"", " ", ".", ":", ":53", "1.2.3.4:", "1.2.3.4:0", "1.2.3.4:00053", "1.2.3.4:+53", "1.2.3.4:-1", "1.2.3.4:65536", "1.2.3.4:5_3", "1.2.3.4:0x35", "1.2.3.4#53",
		"1.2.3.256", "1.2.3", "1", "010.1.1.1", "0x7f.1", "0x7f000001", "1.2.3.4.", "1.2.3.4 ", " 1.2.3.4", "1.2.3.4\n", "1.2.3.4\nconf-script=x", "1.2.3.4@lo", "1.2.3.4,5.6.7.8", "1.2.3.4/8",
		"1.2.3.4%lo", "[1.2.3.4]", "[1.2.3.4]:53", "[::1", "[::1]53", "[::1]:", "[::1]:0", "[[::1]]", "::1]", "[ns.example.org]", "[ns.example.org]:53", "[]", "1::2::3", "::1:15354", "::1:53:", ":::",
		"fe80::1%", "fe80::1%a/b", "fe80::1%a#b", "fe80::1%a b", "fe80::1%a\nb", "fe80::1%sixteen-letters-", "fe80::1%ä",
		"0.0.0.0", "::", "[::]:53", "::ffff:0.0.0.0", "224.0.0.1", "ff02::1", "ff02::1%eth0", "NS.example.org", "ns.example.org.", "-ns.example.org", "ns_1.example.org", "ns/a", "ns#53", "ns,a", "ns a", "ns\x00", "*.a", "ä.example",
		strings.Repeat("a", 64) + ".example.org", strings.Repeat("a.", 130) + "a", "a..b",
	} {
		t.Run(fmt.Sprintf("refuse %q", in), func(t *testing.T) {
			if got, err := parseServer(in, true); err == nil {
				t.Errorf("got %+v, want an error", got)
			}
		})
	}
}

func TestParseKubeDNS(t *testing.T) {
	srv := func(s string) server { return server{addr: netip.MustParseAddr(s)} }
	for _, tc := range []struct {
		name, key, in string
		want          kubeDNS
	}{
		{"no file", "a.conf", "x", kubeDNS{}},
		{"empty", "stubDomains", "", kubeDNS{}},
		{"blank", "upstreamNameservers", " \n\t", kubeDNS{}},
		{"empty object", "stubDomains", "{}\n", kubeDNS{}},
		{"empty array", "upstreamNameservers", "[]", kubeDNS{}},
		{"order of the file", "stubDomains", "{\"b.test\": [\"1.2.3.4\", \"ns.example\"],\n\n\"a.test\"\n:\n[]}", kubeDNS{stubs: []stubDomain{
			{"b.test", []server{srv("1.2.3.4"), {host: "ns.example"}}, 1}, {"a.test", nil, 3}}}},
		{"three", "upstreamNameservers", `["8.8.8.8","::1","1.1.1.1"]`, kubeDNS{upstreams: []server{srv("8.8.8.8"), srv("::1"), srv("1.1.1.1")}}},
		{"escapes", "upstreamNameservers", `["\u0038.8.8.8"]`, kubeDNS{upstreams: []server{srv("8.8.8.8")}}},
		{"federations", "federations", " a=a.example ,\n b = b.example\n", kubeDNS{federations: 2}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := parseKubeDNS(snap(tc.key, tc.in))
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(*got, tc.want) {
				t.Errorf("got %+v, want %+v", *got, tc.want)
			}
		})
	}
}

func TestParseKubeDNSErrors(t *testing.T) {
	for _, tc := range []struct{ name, key, in, want string }{
		{"truncated", "stubDomains", "{\"a.test\": [\n", "stubDomains:2: the JSON ends too early"},
		{"truncated string", "stubDomains", "{\n\"a.te", "stubDomains:2: the JSON ends too early"},
		{"truncated array", "stubDomains", "{\"a.test\": [\"1.2.3.4\"", "stubDomains:1: the JSON ends too early"},
		{"truncated object", "stubDomains", "{\"a.test\": [\"1.2.3.4\"]\n\n", "stubDomains:3: the JSON ends too early"},
		{"text", "stubDomains", "a.test=1", "stubDomains:1: not JSON: "},
		{"no comma", "upstreamNameservers", "[\"1.2.3.4\"\n\"1.2.3.5\"]", "upstreamNameservers:2: not JSON: "},
		{"trailing comma", "upstreamNameservers", "[\"1.2.3.4\",\n]", "upstreamNameservers:2: "},
		{"raw newline", "upstreamNameservers", "[\"1.2.3.4\n\"]", "upstreamNameservers:1: not JSON: "},
		{"garbage", "upstreamNameservers", "[]\n x", "upstreamNameservers:2: something follows"},
		{"two values", "stubDomains", "{}\n\n{}", "stubDomains:3: something follows"},
		{"null", "stubDomains", "null", "stubDomains:1: an object of domains expected, found null"},
		{"array", "stubDomains", "[]", "stubDomains:1: an object of domains expected, found an array"},
		{"object", "upstreamNameservers", "\n{}", "upstreamNameservers:2: an array of servers expected, found an object"},
		{"number", "upstreamNameservers", "[\n8\n]", "upstreamNameservers:2: a server (a string) expected, found 8"},
		{"null server", "upstreamNameservers", "[null]", "upstreamNameservers:1: a server (a string) expected, found null"},
		{"string for array", "stubDomains", "{\"a.test\":\n\"1.2.3.4\"}", `stubDomains:2: an array of servers expected, found "1.2.3.4"`},
		{"nested", "stubDomains", "{\"a.test\": [[]]}", "stubDomains:1: a server (a string) expected, found an array"},
		{"deep", "upstreamNameservers", strings.Repeat("[", 1<<20), "upstreamNameservers:1: a server (a string) expected, found an array"},
		{"twice", "stubDomains", "{\"acme.local\": [],\n\"acme.local\": []}", "stubDomains:2: domain acme.local is given twice"},
		{"domain", "stubDomains", "{\n\n\"a b\": []}", `stubDomains:3: domain "a b": `},
		{"injection", "stubDomains", `{"a\nconf-script=x": []}`, `stubDomains:1: domain "a\nconf-script=x": `},
		{"long label", "stubDomains", `{"` + strings.Repeat("a", 64) + `.test": []}`, "stubDomains:1: domain \"" + strings.Repeat("a", 64)},
		{"server", "stubDomains", "{\"a.test\": [\"1.2.3.4\",\n\"1.2.3.4:0\"]}", `stubDomains:2: server "1.2.3.4:0": the port is not`},
		{"host upstream", "upstreamNameservers", `["ns.example.org"]`, `upstreamNameservers:1: server "ns.example.org": not an IP address`},
		{"fourth", "upstreamNameservers", "[\"1.2.3.4\",\"1.2.3.5\",\"1.2.3.6\",\n\"1.2.3.7\"]", `upstreamNameservers:2: a fourth nameserver, "1.2.3.7": at most 3 are allowed`},
		{"federation", "federations", "a=a.example,\n\nb", `federations:3: federation "b": not of the form`},
		{"federation name", "federations", "\na.b=c.example", `federations:2: federation name "a.b": `},
		{"federation domain", "federations", "a=b/c", `federations:1: federation domain "b/c": `},
		{"federation comma", "federations", "a=b.example,", `federations:1: federation "": `},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := parseKubeDNS(snap(tc.key, tc.in))
			if err == nil || !strings.HasPrefix(err.Error(), tc.want) {
				t.Fatalf("got %v, want %s...", err, tc.want)
			}
			if want := (*configError)(nil); !errors.As(err, &want) || want.file != tc.key {
				t.Errorf("got %T, want a *configError for %s", err, tc.key)
			}
		})
	}
}

// A value of any size leaves a short error.
func TestParseKubeDNSErrorIsShort(t *testing.T) {
	huge := strings.Repeat("\u00e4/", 1<<19)
	for name, s := range map[string]*snapshot{
		"domain":      snap("stubDomains", `{"`+huge+`": []}`),
		"server":      snap("stubDomains", `{"a.test": ["`+huge+`"]}`),
		"upstream":    snap("upstreamNameservers", `["`+huge+`"]`),
		"type":        snap("stubDomains", `"`+huge+`"`),
		"number":      snap("stubDomains", strings.Repeat("1", 1<<20)),
		"federation":  snap("federations", huge),
		"federations": snap("federations", "a="+huge),
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := parseKubeDNS(s); err == nil || len(err.Error()) > 1000 {
				t.Errorf("got %.2000v, want a short error", err)
			}
		})
	}
}

func TestParseKubeDNSMany(t *testing.T) {
	var b strings.Builder
	for i := range 100_000 {
		fmt.Fprintf(&b, "%c\n\"domain-%d.example\": [\"10.0.0.1:5353\"]", map[bool]rune{true: '{', false: ','}[i == 0], i)
	}
	b.WriteString("}")
	start := time.Now()
	k, err := parseKubeDNS(snap("stubDomains", b.String()))
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d domains in %v", len(k.stubs), time.Since(start))
	if n := len(k.stubs); n != 100_000 || k.stubs[n-1].line != n+1 {
		t.Errorf("got %d domains, the last %+v", n, k.stubs[n-1])
	}
}

// Whatever is accepted makes lines that are one directive each.
func FuzzKubeDNS(f *testing.F) {
	for _, s := range []string{
		`{"acme.local": ["1.2.3.4", "[2001:db8::1]:5353", "ns.acme.example:53"]}`, `["8.8.8.8", "[2001:db8::2]:53"]`, `{"a.test": ["fe80::1%eth0"]}`,
		"a=b.example,c=d.example", `{"a\nb": [null]}`, `["1.2.3.4#53"`, `{"a.test": [], "a.test": []}`, "{}", "null",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, data string) {
		for _, key := range []string{"stubDomains", "upstreamNameservers", "federations"} {
			k, err := parseKubeDNS(snap(key, data))
			if err != nil {
				if want := (*configError)(nil); !errors.As(err, &want) || want.line < 1 || want.line > 1+strings.Count(data, "\n") {
					t.Errorf("%s: bad error %v", key, err)
				}
				continue
			}
			addrs := make(map[string][]netip.Addr)
			for _, h := range k.hosts() {
				addrs[h] = []netip.Addr{netip.MustParseAddr("2001:db8::1")}
			}
			lines, _, _ := k.lines(addrs, netip.AddrPort{})
			for _, line := range lines {
				got := slices.Collect(parseConf("", []byte(line)))
				if len(got) != 1 || got[0].name != "server" || "server="+got[0].value != line || len(line) > maxLine {
					t.Errorf("%s: line %q reads as %+v", key, line, got)
				}
				value := got[0].value
				if i := strings.LastIndexByte(value, '/'); i >= 0 {
					value = value[i+1:]
				}
				host, port, _ := strings.Cut(value, "#")
				if a, err := netip.ParseAddr(host); err != nil || a.IsUnspecified() || port == "0" {
					t.Errorf("%s: line %q has no good address: %v", key, line, err)
				}
			}
		}
	})
}

package nanny

import (
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/coredns/caddy"
	"github.com/coredns/coredns/core/dnsserver"
)

// parseText parses the text of a Corefile's server block for the zones given.
func parseText(t *testing.T, text string, zones ...string) ([]*Nanny, error) {
	t.Helper()
	c := caddy.NewTestController("dns", text)
	c.ServerBlockKeys = zones
	dnsserver.GetConfig(c)
	return parse(c)
}

func TestParse(t *testing.T) {
	program, err := findProgram("dnsmasq")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	block := func(change func(*Nanny)) *Nanny {
		n := &Nanny{
			where: "Testfile:1",
			zones: []string{"."},
			spec:  spec{path: program},
			set:   settings{interval: 10 * time.Second, timeout: 5 * time.Second},
		}
		change(n)
		return n
	}
	for _, tt := range []struct {
		name, text string
		want       func(*Nanny)
	}{
		{"defaults", "nanny", func(*Nanny) {}},
		{"empty block", "nanny {\n}", func(*Nanny) {}},
		{"zones", "nanny Example.ORG 10.0.0.0/23 192.0.2.0/24", func(n *Nanny) {
			n.zones = []string{"example.org.", "0.0.10.in-addr.arpa.", "1.0.10.in-addr.arpa.", "2.0.192.in-addr.arpa."}
		}},
		{"exec", "nanny {\nexec " + program + "\n}", func(*Nanny) {}},
		{"exec by name", "nanny {\nexec dnsmasq\n}", func(*Nanny) {}},
		{"args", "nanny {\nargs --no-resolv \"--txt-record=a.test,b c\"\nargs -S 192.0.2.1\n}", func(n *Nanny) {
			n.spec.args = []string{"--no-resolv", "--txt-record=a.test,b c", "-S", "192.0.2.1"}
		}},
		{"config", "nanny {\nconfig " + dir + "\n}", func(n *Nanny) { n.spec.dir = dir }},
		{"config missing yet", "nanny {\nconfig " + dir + "/x 100ms\n}", func(n *Nanny) {
			n.spec.dir, n.set.interval = filepath.Join(dir, "x"), 100*time.Millisecond
		}},
		{"reload auto", "nanny {\nreload auto\n}", func(*Nanny) {}},
		{"reload restart", "nanny {\nreload restart\n}", func(n *Nanny) { n.set.reload = reloadRestart }},
		{"reload off", "nanny {\nreload off\n}", func(n *Nanny) { n.set.reload = reloadOff }},
		{"listen", "nanny {\nlisten 127.0.0.2:5353\n}", func(n *Nanny) { n.spec.listen = netip.MustParseAddrPort("127.0.0.2:5353") }},
		{"listen v6", "nanny {\nlisten [::1]:5353\n}", func(n *Nanny) { n.spec.listen = netip.MustParseAddrPort("[::1]:5353") }},
		{"resolver", "nanny {\nresolver 192.0.2.1 192.0.2.2:5353 2001:db8::1 [2001:db8::2] [2001:db8::3]:54\n}", func(n *Nanny) {
			for _, a := range []string{"192.0.2.1:53", "192.0.2.2:5353", "[2001:db8::1]:53", "[2001:db8::2]:53", "[2001:db8::3]:54"} {
				n.set.resolver = append(n.set.resolver, netip.MustParseAddrPort(a))
			}
		}},
		{"except", "nanny {\nexcept a.example.org B.example.org\nexcept 192.0.2.0/24\n}", func(n *Nanny) {
			n.except = []string{"a.example.org.", "b.example.org.", "2.0.192.in-addr.arpa."}
		}},
		{"fallthrough", "nanny {\nfallthrough\n}", func(n *Nanny) { n.fall.SetZonesFromArgs(nil) }},
		{"fallthrough zones", "nanny {\nfallthrough example.org\n}", func(n *Nanny) { n.fall.SetZonesFromArgs([]string{"example.org"}) }},
		{"timeout", "nanny {\ntimeout 1500ms\n}", func(n *Nanny) { n.set.timeout = 1500 * time.Millisecond }},
		{"max_concurrent", "nanny {\nmax_concurrent 1000\n}", func(n *Nanny) { n.maxConcurrent = 1000 }},
		{"max_concurrent 0", "nanny {\nmax_concurrent 0\n}", func(*Nanny) {}},
		{"stats", "nanny {\nstats 1h\n}", func(n *Nanny) { n.set.stats = time.Hour }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := parseText(t, tt.text, ".")
			if err != nil {
				t.Fatal(err)
			}
			if want := block(tt.want); len(got) != 1 || !reflect.DeepEqual(got[0], want) {
				t.Errorf("got %+v, want %+v", got[0], want)
			}
		})
	}
}

func TestParseServerBlockZones(t *testing.T) {
	got, err := parseText(t, "nanny", "example.org.:1053", "dns://Example.COM.:53")
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"example.org.", "example.com."}; !reflect.DeepEqual(got[0].zones, want) {
		t.Errorf("got %q, want %q", got[0].zones, want)
	}
}

func TestParseErrors(t *testing.T) {
	dir := t.TempDir()
	notExecutable := filepath.Join(dir, "dnsmasq")
	if err := os.WriteFile(notExecutable, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ name, block, want string }{
		{"unknown property", "perid 5s", "unknown property 'perid'"},
		{"twice", "timeout 5s\ntimeout 5s", "'timeout' is given twice"},
		{"bad zone in except", "except a..example.org", "'a..example.org' is not a zone"},
		{"bad zone in fallthrough", "fallthrough a..example.org", "'a..example.org' is not a zone"},
		{"except without zone", "except", "wrong count of arguments for 'except'"},
		{"exec without program", "exec", "wrong count of arguments for 'exec'"},
		{"exec twice as much", "exec a b", "wrong count of arguments for 'exec'"},
		{"exec missing", "exec no-such-dnsmasq", "package dnsmasq-base"},
		{"exec missing path", "exec " + dir + "/no-such-dnsmasq", "isn't there: install dnsmasq (package dnsmasq-base"},
		{"exec directory", "exec " + dir, "is no program"},
		{"exec not executable", "exec " + notExecutable, "can't be executed"},
		{"exec's line", "exec no-such-dnsmasq\ntimeout 5s", "Testfile:2"},
		{"args without argument", "args", "wrong count of arguments for 'args'"},
		{"args port", "args --port=53", "args '--port=53': port is set by nanny alone"},
		{"args port, short", "args -p53", "port is set by nanny alone"},
		{"args port, bundled", "args -Rp 53", "port is set by nanny alone"},
		{"args port, abbreviated", "args --por=53", "port is set by nanny alone"},
		{"args log-facility", "args -8 /var/log/x", "log-facility is set by nanny alone"},
		{"args no-daemon", "args -d", "no-daemon is set by nanny alone"},
		{"args test", "args --test", "test is set by nanny alone"},
		{"args version", "args -v", "version is set by nanny alone"},
		{"args help", "args --help", "help is set by nanny alone"},
		{"args bind", "args --bind-dyn", "bind-dynamic is set by nanny alone"},
		{"args listen-address", "args -a 127.0.0.1", "listen-address is set by nanny alone"},
		{"args pid-file", "args --pid-file", "pid-file is set by nanny alone"},
		{"args port, behind an option that has its argument from the line before", "args --address\nargs --address --port=53", "port is set by nanny alone"},
		{"config without directory", "config", "wrong count of arguments for 'config'"},
		{"config empty", "config \"\"", "must be a directory"},
		{"config with too much", "config " + dir + " 1s 2s", "wrong count of arguments for 'config'"},
		{"config without parent", "config " + dir + "/no/such", "the directory's parent can't be used"},
		{"config below a file", "config " + notExecutable + "/x", "is not a directory"},
		{"config too often", "config " + dir + " 99ms", "must be at least 100ms"},
		{"config bad interval", "config " + dir + " 5", "not a duration"},
		{"reload unknown", "reload sometimes", "must be auto, restart or off"},
		{"reload without mode", "reload", "wrong count of arguments for 'reload'"},
		{"listen without port", "listen 127.0.0.1", "must be one address of this host and a port"},
		{"listen port 0", "listen 127.0.0.1:0", "must be one address of this host and a port"},
		{"listen name", "listen localhost:53", "must be one address of this host and a port"},
		{"listen everywhere", "listen 0.0.0.0:53", "must be one address of this host and a port"},
		{"listen bad port", "listen 127.0.0.1:65536", "must be one address of this host and a port"},
		{"resolver without address", "resolver", "wrong count of arguments for 'resolver'"},
		{"resolver name", "resolver ns.example.org", "must be an IP address"},
		{"resolver, half a bracket", "resolver [::1", "must be an IP address"},
		{"resolver, the other half", "resolver ::1]", "must be an IP address"},
		{"resolver port 0", "resolver 192.0.2.1:0", "must be an IP address"},
		{"timeout bad", "timeout 5", "not a duration"},
		{"timeout negative", "timeout -5s", "must be at least"},
		{"timeout zero", "timeout 0s", "must be at least"},
		{"timeout nothing", "timeout", "wrong count of arguments"},
		{"max_concurrent negative", "max_concurrent -1", "must be a count"},
		{"max_concurrent word", "max_concurrent many", "must be a count"},
		{"stats bad", "stats often", "not a duration"},
		{"stats zero", "stats 0s", "must be at least"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := parseText(t, "nanny {\n"+tt.block+"\n}", ".")
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("got %v, want %q", err, tt.want)
			}
			if !strings.Contains(err.Error(), "Testfile:") {
				t.Errorf("%v doesn't say where in the Corefile", err)
			}
		})
	}
	if _, err := parseText(t, "nanny a..example.org", "."); err == nil || !strings.Contains(err.Error(), "is not a zone") {
		t.Errorf("got %v", err)
	}
}

func TestParseSeveralBlocks(t *testing.T) {
	got, err := parseText(t, "nanny a.example.org\nnanny b.example.org {\nargs --no-resolv\n}", ".")
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 2 || got[0].zones[0] != "a.example.org." || got[1].zones[0] != "b.example.org." {
		t.Errorf("got %+v", got)
	}
}

func TestSetupSharedListen(t *testing.T) {
	c := caddy.NewTestController("dns", "nanny a.test {\nlisten 127.0.0.1:5399\n}\nnanny b.test {\nlisten 127.0.0.1:5399\nargs --no-resolv\n}")
	c.ServerBlockKeys = []string{"."}
	err := setup(c)
	if err == nil || !strings.Contains(err.Error(), "Testfile:4: listen 127.0.0.1:5399 belongs to the block at Testfile:1") {
		t.Errorf("got %v, want an error that names both blocks", err)
	}
}

// Only what makes another child makes another key.
func TestSpecKey(t *testing.T) {
	a := spec{path: "/usr/sbin/dnsmasq", args: []string{"a", "b"}}
	b := spec{path: "/usr/sbin/dnsmasq", args: []string{"a b"}}
	if a.key() == b.key() {
		t.Error("different arguments have the same key")
	}
	if a.key() != (spec{path: "/usr/sbin/dnsmasq", args: []string{"a", "b"}}).key() {
		t.Error("equal specs have different keys")
	}
}

// A Corefile is read by its owner, who may mistype anything.
func FuzzParse(f *testing.F) {
	f.Add("nanny")
	f.Add("nanny example.org 10.0.0.0/22 {\nexec dnsmasq\nargs -S \"a b\" --x\nconfig /tmp 1s\nreload off\nlisten [::1]:53\n}")
	f.Add("nanny {\nresolver 192.0.2.1 [::1]:5\nexcept a.example.org\nfallthrough\ntimeout 1s\nmax_concurrent 1\nstats 1h\n}\nnanny .")
	f.Fuzz(func(t *testing.T, text string) {
		c := caddy.NewTestController("dns", text)
		c.ServerBlockKeys = []string{"."}
		blocks, err := parse(c)
		if err != nil {
			return
		}
		for _, n := range blocks {
			if len(n.zones) == 0 || n.spec.path == "" || n.set.timeout <= 0 || n.set.interval < minInterval {
				t.Errorf("%q: got %+v", text, n)
			}
			if arg, _ := refusedArg(n.spec.args); arg != "" {
				t.Errorf("%q: argument %q was taken", text, arg)
			}
		}
	})
}

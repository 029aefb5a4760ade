package test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// TestHabits has what dnsmasq's users are used to, with dnsmasq behind CoreDNS.
func TestHabits(t *testing.T) {
	t.Parallel()
	private := dnsmasq(t, "--host-record=host.corp.example,10.0.0.5")
	running := func(t *testing.T, files map[string]string) (*coreDNS, string) {
		t.Helper()
		dir := configDir(t, files)
		c := start(t, watching(dir))
		c.logs.wait(t, 0, "Configuration applied")
		return c, dir
	}
	reverse := func(t *testing.T, c *coreDNS, name string) string {
		t.Helper()
		r, err := exchange("udp", c.addr(), question(name, dns.TypePTR))
		if err != nil {
			t.Fatal(err)
		}
		if len(r.Answer) == 0 {
			return dns.RcodeToString[r.Rcode]
		}
		return r.Answer[0].(*dns.PTR).Ptr
	}

	t.Run("bogus-priv and a stub for a private zone", func(t *testing.T) {
		t.Parallel()
		c, _ := running(t, map[string]string{
			"a.conf":      "bogus-priv\n",
			"stubDomains": fmt.Sprintf(`{"0.0.10.in-addr.arpa": ["127.0.0.1:%d"]}`, private),
		})
		if got := reverse(t, c, "5.0.0.10.in-addr.arpa"); got != "host.corp.example." {
			t.Errorf("got %s, want host.corp.example.", got)
		}
		if got := reverse(t, c, "5.1.0.10.in-addr.arpa"); got != "NXDOMAIN" {
			t.Errorf("got %s for another, want NXDOMAIN", got)
		}
	})
	t.Run("stop-dns-rebind and a stub with private addresses", func(t *testing.T) {
		t.Parallel()
		stub := fmt.Sprintf(`{"corp.example": ["127.0.0.1:%d"]}`, private)
		c, dir := running(t, map[string]string{"a.conf": "stop-dns-rebind\n", "stubDomains": stub})
		if got := c.says("host.corp.example"); strings.Contains(got, "10.0.0.5") {
			t.Errorf("got %s", got)
		}
		c.logs.wait(t, 0, "[WARNING]", "possible DNS-rebind attack detected: host.corp.example")
		put(t, dir, "a.conf", "stop-dns-rebind\nrebind-domain-ok=/corp.example/\n")
		c.waits(t, "host.corp.example", "10.0.0.5")
	})
	t.Run("dnssec without a trust anchor", func(t *testing.T) {
		t.Parallel()
		c, dir := running(t, map[string]string{"a.conf": "address=/kept.example/192.0.2.1\n"})
		put(t, dir, "b.conf", "dnssec\n") // passes dnsmasq --test
		c.logs.wait(t, 0, "[ERROR]", "Configuration rejected", "no root trust anchor")
		c.wants(t, "kept.example", "192.0.2.1")
	})
	t.Run("copies that editors and packages leave", func(t *testing.T) {
		t.Parallel()
		files := map[string]string{"a.conf": "address=/kept.example/192.0.2.1\n"}
		for _, name := range []string{"a.conf.bak", "a.conf~", ".a.conf.swp", "#a.conf#", "a.conf.dpkg-new", "a.txt", "a.hosts~"} {
			files[name] = "bogus-option\n"
		}
		c, _ := running(t, files)
		c.wants(t, "kept.example", "192.0.2.1")
		if errs := c.errors(0); len(errs) > 0 {
			t.Errorf("errors in the log: %q", errs)
		}
	})
	t.Run("strict-order", func(t *testing.T) {
		t.Parallel()
		answers, none := dnsmasq(t, "--address=/order.example/192.0.2.1"), dnsmasq(t, "--local=/order.example/")
		c, _ := running(t, map[string]string{
			"a.conf":              "strict-order\n",
			"upstreamNameservers": fmt.Sprintf(`["127.0.0.1:%d", "127.0.0.1:%d"]`, answers, none),
			"stubDomains":         fmt.Sprintf(`{"stub.order.example": ["127.0.0.1:%d", "127.0.0.1:%d"]}`, answers, none),
		})
		for i := range 30 {
			c.wants(t, fmt.Sprintf("n%d.order.example", i), "192.0.2.1")
			c.wants(t, fmt.Sprintf("n%d.stub.order.example", i), "192.0.2.1")
		}
	})
	for _, tt := range []struct{ name, text, conf, property, said string }{ // %s is the file's path, in text an address
		{"a hosts file that a *.conf names isn't watched", "%s named.example\n", "addn-hosts=%s\n", "", ""},
		{"a configuration that args names isn't watched", "address=/named.example/%s\n", "", "args --conf-file=%s", "conf-file %s in args isn't watched"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			outside := tempDir(t)
			named := func(s string) string { return strings.ReplaceAll(s, "%s", filepath.Join(outside, "named")) }
			put(t, outside, "named", fmt.Sprintf(tt.text, "192.0.2.1"))
			dir := configDir(t, map[string]string{"a.conf": "address=/kept.example/192.0.2.1\n" + named(tt.conf)})
			c := start(t, watching(dir, named(tt.property)))
			c.waits(t, "named.example", "192.0.2.1")
			c.logs.wait(t, 0, "Configuration applied")
			before := c.applied()
			put(t, outside, "named", fmt.Sprintf(tt.text, "192.0.2.2"))
			c.wants(t, "named.example", "192.0.2.1")
			put(t, dir, "b.conf", "# nothing\n") // a change of the directory brings it in: dnsmasq is started anew
			changed(t, c, before, "named.example", "192.0.2.2")
			if lines := c.logs.lines(0, "[INFO]", named(tt.said)); tt.said != "" && len(lines) != 1 {
				t.Errorf("said %d times, want once", len(lines))
			}
		})
	}
	t.Run("a server that doesn't answer beside one that does", func(t *testing.T) {
		t.Parallel()
		dead, live := silent(t), dnsmasq(t, "--address=/#/192.0.2.1")
		list := fmt.Sprintf(`["127.0.0.1:%d", "127.0.0.1:%d"]`, dead, live)
		c, _ := running(t, map[string]string{"upstreamNameservers": list, "stubDomains": `{"stub.example": ` + list + "}"})
		begin := time.Now()
		for i := range 30 {
			c.wants(t, fmt.Sprintf("n%d.example", i), "192.0.2.1")
			c.wants(t, fmt.Sprintf("n%d.stub.example", i), "192.0.2.1")
		}
		if took := time.Since(begin); took > 30*time.Second { // each would cost a second or more
			t.Errorf("60 queries took %s", took)
		}
	})
	t.Run("dns-loop-detect", func(t *testing.T) {
		t.Parallel()
		dir := configDir(t, map[string]string{"a.conf": "address=/kept.example/192.0.2.1\n"})
		c := start(t, watching(dir, fmt.Sprintf("listen 127.0.0.1:%d", freePort(t))))
		c.waits(t, "kept.example", "192.0.2.1")
		put(t, dir, "l.conf", fmt.Sprintf("dns-loop-detect\nserver=127.0.0.1#%d\n", c.port))
		c.logs.wait(t, 0, "[WARNING]", fmt.Sprintf("NOT using nameserver 127.0.0.1#%d - query loop detected", c.port))
		c.wants(t, "www.example.org", "REFUSED")
		c.wants(t, "kept.example", "192.0.2.1")
	})
	t.Run("an empty directory", func(t *testing.T) {
		t.Parallel()
		dir := filepath.Join(tempDir(t), "config")
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		c := start(t, nanny("config "+dir+" 100ms", "args --no-resolv --no-hosts --address=/args.example/192.0.2.1"))
		c.waits(t, "args.example", "192.0.2.1")
		c.logs.wait(t, 0, "Configuration applied", "files=none")
		c.logs.wait(t, 0, "[WARNING]", dir+" has no regular file named stubDomains, upstreamNameservers, federations, *.conf or *.hosts")
		put(t, dir, "README", "nothing of interest")
		c.logs.wait(t, 0, "README is ignored") // so it was looked at once more
		put(t, dir, "a.conf", "address=/a.example/192.0.2.2\n")
		c.waits(t, "a.example", "192.0.2.2")
		if n := len(c.logs.lines(0, "has no regular file")); n != 1 {
			t.Errorf("said %d times, want once", n)
		}
	})
	t.Run("10,000 stub domains are few lines in the log", func(t *testing.T) {
		t.Parallel()
		var b strings.Builder
		for i := range 10_000 {
			fmt.Fprintf(&b, ", \"domain-%d.example\": [\"127.0.0.1:%d\"]", i, private)
		}
		c, dir := running(t, map[string]string{"stubDomains": "{" + b.String()[1:] + "}"})
		for i := range 3 {
			mark := c.logs.mark()
			put(t, dir, "a.conf", fmt.Sprintf("address=/n.example/192.0.2.%d\n", i+1))
			c.waits(t, "n.example", fmt.Sprintf("192.0.2.%d", i+1))
			c.logs.wait(t, mark, "Configuration applied")
			if n := len(c.logs.lines(mark)); n > 200 {
				t.Errorf("%d lines in the log for one change", n)
			}
		}
	})
}

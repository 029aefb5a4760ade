package test

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// soon is how long a change may take here. By design it is 200 ms; the machine may be busy. Of many changes, half come
// within usual.
const (
	soon  = 5 * time.Second
	usual = 2 * time.Second
)

// changed checks that one change, made just before, is in service soon: name is now want, after exactly one more
// configuration was applied than before.
func changed(t *testing.T, c *coreDNS, before int, name, want string) {
	t.Helper()
	if took := c.waits(t, name, want); took > soon {
		t.Errorf("in service after %s, want within %s", took, soon)
	} else {
		t.Logf("in service after %s", took)
	}
	within(t, patience, "the log says so", func() bool { return c.applied() > before })
	if got := c.applied() - before; got != 1 {
		t.Errorf("%d configurations applied for one change", got)
	}
}

// twoUpstreams returns stubDomains for x.example whose servers say 192.0.2.1 or 192.0.2.2 for all names, and that these may
// be kept: what one has said may not be given once the other is asked.
func twoUpstreams(t *testing.T) (one, two string) {
	t.Helper()
	stub := func(address string) string {
		return fmt.Sprintf(`{"x.example": ["127.0.0.1:%d"]}`, dnsmasq(t, "--local-ttl=600", "--address=/#/"+address))
	}
	return stub("192.0.2.1"), stub("192.0.2.2")
}

func TestChange(t *testing.T) {
	t.Parallel()
	one, two := twoUpstreams(t)
	dir := configDir(t, map[string]string{"stubDomains": one})
	c := start(t, watching(dir))
	c.waits(t, "www.x.example", "192.0.2.1")
	c.logs.wait(t, 0, "Configuration applied")

	t.Run("by rename", func(t *testing.T) {
		before := c.applied()
		put(t, dir, "stubDomains", two)
		changed(t, c, before, "www.x.example", "192.0.2.2")
	})
	t.Run("an unrelated file", func(t *testing.T) {
		before := c.applied()
		put(t, dir, "README", "nothing of interest")
		put(t, dir, ".hidden.conf", "address=/h.example/192.0.2.9\n")
		c.logs.wait(t, 0, "README is ignored")
		if got := c.applied() - before; got != 0 {
			t.Errorf("%d configurations applied, want none", got)
		}
	})
	t.Run("while another file is written all the time", func(t *testing.T) {
		before, stop := c.applied(), make(chan struct{})
		var writer sync.WaitGroup
		writer.Go(func() {
			for tick := time.NewTicker(20 * time.Millisecond); ; {
				select {
				case <-stop:
					return
				case <-tick.C:
				}
				if err := os.WriteFile(filepath.Join(dir, "noise.tmp"), []byte(time.Now().String()), 0o644); err != nil {
					t.Error(err)
				}
			}
		})
		defer writer.Wait()
		defer close(stop)
		c.logs.wait(t, 0, "noise.tmp is ignored")
		put(t, dir, "stubDomains", one)
		changed(t, c, before, "www.x.example", "192.0.2.1")
	})
	if got := c.applied(); got != 3 {
		t.Errorf("%d configurations applied, want 3", got)
	}
	t.Run("truncated and written in pieces", func(t *testing.T) {
		texts, mark := []string{one, two}, c.logs.mark()
		for round, steady := 1, 0; steady < 10 && round <= 50; round++ {
			before, n := c.applied(), round%2
			if !inPieces(t, filepath.Join(dir, "stubDomains"), texts[n]) {
				c.waits(t, "www.x.example", fmt.Sprintf("192.0.2.%d", n+1))
				c.settled(t)
				mark = c.logs.mark()
				continue
			}
			steady++
			changed(t, c, before, "www.x.example", fmt.Sprintf("192.0.2.%d", n+1))
			if errs := c.errors(mark); len(errs) > 0 {
				t.Fatalf("errors in the log: %q", errs)
			}
		}
	})
}

// inPieces truncates a file and writes text in two pieces, with a pause longer than a burst of events has and shorter than
// nanny waits for the rest. If the machine has made it longer, it returns false.
func inPieces(t *testing.T, path, text string) (steady bool) {
	t.Helper()
	begin := time.Now()
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	write := func(piece string) {
		if _, err := f.WriteString(piece); err != nil {
			t.Fatal(err)
		}
	}
	half := len(text) / 2
	write(text[:half])
	steady = time.Since(begin) < 50*time.Millisecond
	time.Sleep(100 * time.Millisecond)
	write(text[half:])
	return steady && time.Since(begin) < 200*time.Millisecond
}

// volume is a directory that changes as the kubelet changes a ConfigMap's: all files are links through ..data, which is
// replaced by a rename.
type volume struct {
	dir     string
	version int
	keys    map[string]string
	slow    bool // a key that was removed may have been seen as a link to nothing for longer than nanny waits
}

// swap brings in new keys.
func (v *volume) swap(t *testing.T, keys map[string]string) {
	t.Helper()
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	v.version++
	name := fmt.Sprintf("..2026_%d", v.version)
	check(os.Mkdir(filepath.Join(v.dir, name), 0o755))
	for key, content := range keys {
		check(os.WriteFile(filepath.Join(v.dir, name, key), []byte(content), 0o644))
	}
	old, _ := os.Readlink(filepath.Join(v.dir, "..data"))
	begin := time.Now()
	check(os.Symlink(name, filepath.Join(v.dir, "..data_tmp")))
	check(os.Rename(filepath.Join(v.dir, "..data_tmp"), filepath.Join(v.dir, "..data")))
	for key := range keys {
		if _, ok := v.keys[key]; !ok {
			check(os.Symlink(filepath.Join("..data", key), filepath.Join(v.dir, key)))
		}
	}
	for key := range v.keys {
		if _, ok := keys[key]; !ok {
			check(os.Remove(filepath.Join(v.dir, key)))
		}
	}
	v.slow = v.slow || time.Since(begin) > 200*time.Millisecond
	if old != "" {
		check(os.RemoveAll(filepath.Join(v.dir, old)))
	}
	v.keys = maps.Clone(keys)
}

func TestConfigMapSwaps(t *testing.T) {
	t.Parallel()
	one, two := twoUpstreams(t)
	stubs := []string{two, one}
	v := &volume{dir: filepath.Join(tempDir(t), "config")}
	if err := os.Mkdir(v.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	keys := func(n int) map[string]string {
		return map[string]string{
			"00.conf":     "no-resolv\nno-hosts\n",
			"stubDomains": stubs[n%2],
			"n.conf":      fmt.Sprintf("address=/n.example/192.0.2.%d\n", n),
		}
	}
	v.swap(t, keys(1))
	c := start(t, watching(v.dir))
	c.waits(t, "www.x.example", "192.0.2.1")
	c.logs.wait(t, 0, "Configuration applied")

	n := 1
	var times []time.Duration
	for n < 200 {
		n++
		before := c.applied()
		v.swap(t, keys(n))
		took := c.waits(t, "n.example", fmt.Sprintf("192.0.2.%d", n))
		c.wants(t, "www.x.example", fmt.Sprintf("192.0.2.%d", 2-n%2))
		within(t, patience, "the log says so", func() bool { return c.applied() > before })
		if got := c.applied() - before; got != 1 {
			t.Errorf("swap %d: %d configurations applied", n, got)
		}
		times = append(times, took)
	}
	slices.Sort(times)
	middle, longest := times[len(times)/2], times[len(times)-1]
	t.Logf("in service after %s, at most %s", middle, longest)
	if middle > usual || longest > soon {
		t.Errorf("in service after %s, at most %s; want %s, at most %s", middle, longest, usual, soon)
	}

	t.Run("two within 50 ms", func(t *testing.T) {
		before := c.applied()
		v.swap(t, keys(201))
		time.Sleep(20 * time.Millisecond)
		v.swap(t, keys(202))
		c.waits(t, "n.example", "192.0.2.202")
		c.wants(t, "www.x.example", "192.0.2.2")
		if got := c.applied() - before; got > 2 {
			t.Errorf("%d configurations applied for two swaps", got)
		}
	})
	t.Run("a key removed", func(t *testing.T) {
		c.settled(t)
		before := c.applied()
		k := keys(203)
		delete(k, "n.conf")
		v.swap(t, k)
		changed(t, c, before, "n.example", "REFUSED")
		c.wants(t, "www.x.example", "192.0.2.1")
	})
	t.Run("the same content", func(t *testing.T) {
		child, before := c.child(t), c.applied()
		v.swap(t, v.keys)
		time.Sleep(300 * time.Millisecond) // nothing is to happen
		v.swap(t, keys(204))
		changed(t, c, before, "n.example", "192.0.2.204")
		if now := c.child(t); now.pid == child.pid {
			t.Error("the change after it wasn't applied by a new dnsmasq")
		}
	})
	errs := slices.DeleteFunc(c.errors(0), func(line string) bool { return v.slow && strings.Contains(line, "n.conf: no such file") })
	if len(errs) > 0 {
		t.Errorf("errors in the log: %q", errs)
	}
}

// TestForbidden: who can only write the directory can't run programs by it.
func TestForbidden(t *testing.T) {
	t.Parallel()
	ran := filepath.Join(tempDir(t), "ran")
	run := script(t, "touch "+ran+"\n")
	other := filepath.Join(tempDir(t), "other.conf")
	if err := os.WriteFile(other, []byte("conf-script="+run+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	long := func(comment, directive string) string {
		return comment + strings.Repeat("x", 1024-len(comment)) + directive + "\n"
	}
	dir := configDir(t, map[string]string{"a.conf": "address=/kept.example/192.0.2.1\n"})
	c := start(t, watching(dir))
	c.waits(t, "kept.example", "192.0.2.1")
	c.logs.wait(t, 0, "Configuration applied")

	for i, tt := range []struct{ name, content string }{
		{"conf-script", "conf-script=" + run},
		{"conf-script after spaces", "  conf-script = " + run},
		{"conf-script in quotes", `"conf-script"=` + run},
		{"conf-script half in quotes", `"conf-"script=` + run},
		{"conf-script with an escape", `"conf\-script"=` + run},
		{"conf-script after a tab and a carriage return", "\tconf-script=" + run + "\r"},
		{"dhcp-script", "dhcp-script=" + run + "\ndhcp-range=127.0.0.0,static"},
		{"dhcp-luascript", "dhcp-luascript=" + run},
		{"conf-file", "conf-file=" + other},
		{"conf-file in quotes", `"conf-file"="` + other + `"`},
		{"conf-dir", "conf-dir=" + filepath.Dir(other)},
		{"conf-script behind a long comment", long("#", "conf-script="+run)},
		{"conf-script behind a long line", long("address=/long.example/192.0.2.1 # ", "conf-script="+run)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			mark := c.logs.mark()
			put(t, dir, "a.conf", "address=/kept.example/192.0.2.66\n"+tt.content+"\n")
			if tt.name == "conf-script with an escape" {
				// Not that directive to every dnsmasq; it is refused in any case.
				c.logs.wait(t, mark, "[ERROR]", "Configuration rejected", "a.conf")
			} else {
				c.logs.wait(t, mark, "[ERROR]", "Configuration rejected", "a.conf:2")
			}
			c.wants(t, "kept.example", "192.0.2.1")
			mended(t, c, dir, mark, i)
			if _, err := os.Stat(ran); err == nil {
				t.Fatal("the script ran")
			}
		})
	}
	t.Run("dnsmasq alone runs it", func(t *testing.T) {
		// So that the test above tests something.
		for _, content := range []string{"conf-script=" + run + "\n", long("#", "conf-script="+run)} {
			os.Remove(ran)
			file := filepath.Join(tempDir(t), "a.conf")
			if err := os.WriteFile(file, []byte(content), 0o644); err != nil {
				t.Fatal(err)
			}
			runTest(t, file)
			if _, err := os.Stat(ran); err != nil {
				t.Errorf("not run by %.60q", content)
			}
		}
	})
}

// mended puts back a good a.conf, with another new address for new.example, and checks that it is applied and that one
// error, and no more, was logged since mark.
func mended(t *testing.T, c *coreDNS, dir string, mark, n int) {
	t.Helper()
	put(t, dir, "a.conf", fmt.Sprintf("address=/kept.example/192.0.2.1\naddress=/new.example/198.51.100.%d\n", n+1))
	c.waits(t, "new.example", fmt.Sprintf("198.51.100.%d", n+1))
	c.logs.wait(t, mark, "Configuration applied")
	c.wants(t, "kept.example", "192.0.2.1")
	if errs := c.errors(mark); len(errs) != 1 {
		t.Errorf("%d errors in the log, want 1: %q", len(errs), errs)
	}
}

func TestBadContent(t *testing.T) {
	t.Parallel()
	dir := configDir(t, map[string]string{"a.conf": "address=/kept.example/192.0.2.1\n"})
	c := start(t, watching(dir))
	c.waits(t, "kept.example", "192.0.2.1")
	c.logs.wait(t, 0, "Configuration applied")
	for i, tt := range []struct{ name, file, content, reason string }{
		{"JSON cut short", "stubDomains", `{"x.example": ["127.0.0.1"`, "ends too early"},
		{"no JSON", "stubDomains", "$$$$", "not JSON"},
		{"JSON of another shape", "stubDomains", `"10.0.0.1"`, "an object of domains expected"},
		{"JSON array", "stubDomains", `[1, 2]`, "an object of domains expected"},
		{"shell text for an address", "stubDomains", `{"global": ["$(get ip)"]}`, "$(get ip)"},
		{"four nameservers", "upstreamNameservers", `["127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4"]`, "127.0.0.4"},
		{"host name as nameserver", "upstreamNameservers", `["ns.example.org"]`, "not an IP address"},
		{"unknown directive", "a.conf", "foo=bar\n", "bad option"},
		{"bad value", "a.conf", "address=/kept.example/192.0.2.666\n", "ad address"},
		{"byte 0xC0", "a.conf", "address=/kept.example/192.0.2.1\n# \xc0\n", "0xC0"},
		{"port 0", "stubDomains", `{"x.example": ["127.0.0.1:0"]}`, "port"},
		{"no domain", "stubDomains", `{"not a domain": ["127.0.0.1"]}`, "not a domain"},
		{"no federation", "federations", "nothing", "name=domain"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			mark := c.logs.mark()
			put(t, dir, tt.file, tt.content)
			line := c.logs.wait(t, mark, "[ERROR]", "Configuration rejected", filepath.Join(dir, tt.file))
			if !strings.Contains(line, tt.reason) {
				t.Errorf("got %q, want %q in it", line, tt.reason)
			}
			c.wants(t, "kept.example", "192.0.2.1")
			if tt.file != "a.conf" {
				remove(t, dir, tt.file)
			}
			mended(t, c, dir, mark, i)
			if c.ended() {
				t.Fatal("CoreDNS ended")
			}
		})
	}
	t.Run("a bad line for longer", func(t *testing.T) {
		mark := c.logs.mark()
		put(t, dir, "bad.conf", "bogus-option\n")
		c.logs.wait(t, mark, "[ERROR]", "bad.conf")
		for range 10 {
			if err := os.Chtimes(filepath.Join(dir, "bad.conf"), time.Now(), time.Now()); err != nil {
				t.Fatal(err)
			}
			put(t, dir, "bad.conf", "bogus-option\n")
			time.Sleep(100 * time.Millisecond)
			c.wants(t, "kept.example", "192.0.2.1")
		}
		if lines := c.logs.lines(mark); len(lines) > 20 {
			t.Errorf("%d lines in the log, want few: %q", len(lines), lines)
		}
		remove(t, dir, "bad.conf")
		c.logs.wait(t, mark, "holds the configuration in service again: version="+c.versions()[c.applied()-1])
		before := c.applied()
		put(t, dir, "bad.conf", "address=/mended.example/192.0.2.5\n")
		changed(t, c, before, "mended.example", "192.0.2.5")
	})
}

// TestPassesCheckOnly has what dnsmasq --test lets pass and what then doesn't start, or isn't for the directory to say.
func TestPassesCheckOnly(t *testing.T) {
	t.Parallel()
	dir := configDir(t, map[string]string{"a.conf": "address=/kept.example/192.0.2.1\n"})
	c := start(t, watching(dir))
	c.waits(t, "kept.example", "192.0.2.1")
	c.logs.wait(t, 0, "Configuration applied")
	for _, tt := range []struct{ content, said string }{
		{"user=nosuch", "nosuch"},
		{"interface=nosuch0", "nosuch0"},
		{"resolv-file=/nosuch/resolv.conf", "resolv"},
		{"listen-address=192.0.2.99", "listen-address is set by nanny"},
		{"log-facility=/nosuch/log", "log-facility is set by nanny"},
		{"pid-file=/nosuch/pid", "pid-file is set by nanny"},
		{"port=0", "port is set by nanny"},
		{"no-daemon", "no-daemon is set by nanny"},
	} {
		t.Run(tt.content, func(t *testing.T) {
			mark := c.logs.mark()
			put(t, dir, "t.conf", tt.content+"\n")
			c.logs.wait(t, mark, tt.said)
			within(t, patience, "a decision", func() bool {
				return len(c.logs.lines(mark, "Configuration applied"))+len(c.logs.lines(mark, "Configuration rejected")) > 0
			})
			c.wants(t, "kept.example", "192.0.2.1")
			c.child(t)
			remove(t, dir, "t.conf")
			put(t, dir, "n.conf", fmt.Sprintf("# after %s\n", tt.content))
			c.logs.wait(t, mark, "Configuration applied", "n.conf")
			c.wants(t, "kept.example", "192.0.2.1")
		})
	}
}

func TestDirectoryComesAndGoes(t *testing.T) {
	t.Parallel()
	parent := tempDir(t)
	dir := filepath.Join(parent, "config")
	c := start(t, watching(dir, "args --no-resolv --no-hosts --address=/args.example/192.0.2.9"))
	c.waits(t, "args.example", "192.0.2.9")
	c.logs.wait(t, 0, "[ERROR]", dir, "waiting for it")

	ready := configDir(t, map[string]string{"a.conf": "address=/a.example/192.0.2.1\n"})
	before := c.applied()
	remove(t, ready, "00.conf") // args has it already
	if err := os.Rename(ready, dir); err != nil {
		t.Fatal(err)
	}
	changed(t, c, before, "a.example", "192.0.2.1")

	mark := c.logs.mark()
	if err := os.Rename(dir, ready); err != nil { // at once: with its file removed, it would be an empty one for a moment
		t.Fatal(err)
	}
	c.logs.wait(t, mark, "[ERROR]", "Configuration rejected", dir)
	c.wants(t, "a.example", "192.0.2.1")

	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	put(t, dir, "a.conf", "address=/a.example/192.0.2.2\n")
	t.Logf("in service after %s", c.waits(t, "a.example", "192.0.2.2"))
	c.wants(t, "args.example", "192.0.2.9")
}

// TestChangesFasterThanApplied also has a dnsmasq that takes its time to stop.
func TestChangesFasterThanApplied(t *testing.T) {
	t.Parallel()
	slow := script(t, dnsmasqPath(t)+` "$@" & child=$!
trap 'sleep 2; kill $child; wait $child; exit 0' TERM
wait $child
`)
	for _, tt := range []struct{ name, property string }{
		{"dnsmasq", "timeout 5s"},
		{"dnsmasq slow to stop", "exec " + slow},
		{"fixed address", fmt.Sprintf("listen 127.0.0.1:%d", freePort(t))},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			dir := configDir(t, map[string]string{"a.conf": "address=/kept.example/192.0.2.1\n"})
			c := start(t, watching(dir, tt.property))
			c.waits(t, "kept.example", "192.0.2.1")
			load := c.loads(t, "udp", 200, "www.kept.example")
			most := 0
			for i := range 50 {
				put(t, dir, "b.conf", fmt.Sprintf("address=/n.example/192.0.2.%d\n", i+1))
				time.Sleep(100 * time.Millisecond)
				most = max(most, len(together(c.services)))
			}
			c.waits(t, "n.example", "192.0.2.50")
			flawless(t, load)
			if most > 2 {
				t.Errorf("%d dnsmasq at once, want at most 2", most)
			}
			if tt.name == "fixed address" && most > 1 {
				t.Errorf("%d dnsmasq at once, want 1", most)
			}
			c.child(t)
			if err := c.end(syscall.SIGTERM); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestHostsAndServers changes nothing but servers and hosts files, which is SIGHUP where only one dnsmasq may run.
func TestHostsAndServers(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		how, property string
		cycles        int
	}{
		{"swap", "timeout 5s", 10},
		{"SIGHUP", fmt.Sprintf("listen 127.0.0.1:%d", freePort(t)), 40},
	} {
		t.Run(tt.how, func(t *testing.T) {
			t.Parallel()
			one, two := twoUpstreams(t)
			dir := configDir(t, map[string]string{"stubDomains": one, "kept.hosts": "192.0.2.9 kept.example\n"})
			c := start(t, watching(dir, tt.property))
			c.waits(t, "www.x.example", "192.0.2.1")
			c.logs.wait(t, 0, "Configuration applied")
			child, load, mark := c.child(t), c.loads(t, "udp", 100, "kept.example"), c.logs.mark()
			put(t, dir, "stubDomains", two)
			c.waits(t, "www.x.example", "192.0.2.2")
			for i := range tt.cycles {
				address := fmt.Sprintf("192.0.2.%d", i+1)
				put(t, dir, "n.hosts", address+" n.example\n")
				c.waits(t, "n.example", address)
				remove(t, dir, "n.hosts")
				c.waits(t, "n.example", "REFUSED")
			}
			flawless(t, load)
			c.wants(t, "www.x.example", "192.0.2.2")
			if now := c.child(t); (now.pid == child.pid) != (tt.how == "SIGHUP") {
				t.Errorf("pid %d, then %d", child.pid, now.pid)
			}
			want := 1 + 2*tt.cycles
			within(t, patience, "all changes are said", func() bool { return len(c.logs.lines(mark, "Configuration applied")) >= want })
			if n := len(c.logs.lines(mark, "Configuration applied", fmt.Sprintf("how=%q", tt.how))); n != want {
				t.Errorf("%d changes applied by %s, want %d", n, tt.how, want)
			}
		})
	}
}

func TestStubDomainServers(t *testing.T) {
	t.Parallel()
	port := dnsmasq(t, "--address=/#/192.0.2.1")
	t.Run("a name that doesn't resolve", func(t *testing.T) {
		resolver := dnsmasq(t, "--address=/invalid/", "--address=/ns.example/127.0.0.1")
		dir := configDir(t, map[string]string{
			"stubDomains": fmt.Sprintf(`{"a.example": ["ns.invalid"], "b.example": ["127.0.0.1:%d"], "c.example": ["ns.example:%d"]}`, port, port),
			"a.conf":      fmt.Sprintf("server=127.0.0.1#%d\n", port), // a name of a.example may not go there
		})
		c := start(t, watching(dir, fmt.Sprintf("resolver 127.0.0.1:%d", resolver)))
		c.waits(t, "www.b.example", "192.0.2.1")
		c.waits(t, "www.c.example", "192.0.2.1") // again after an interval, if it didn't resolve in a second
		if got := c.says("www.a.example"); got != "REFUSED" && got != "SERVFAIL" {
			t.Errorf("www.a.example: got %s, want REFUSED or SERVFAIL", got)
		}
		c.logs.wait(t, 0, "ns.invalid")
	})
	t.Run("IPv6", func(t *testing.T) {
		dir := configDir(t, map[string]string{"a.conf": "address=/kept.example/192.0.2.1\n"})
		c := start(t, watching(dir))
		c.waits(t, "kept.example", "192.0.2.1")
		for i, server := range []string{"::1", "[::1]", "[::1]:15354", "::1:1535", "fe80::1%lo"} {
			for _, content := range []struct{ file, text string }{
				{"upstreamNameservers", fmt.Sprintf("[%q]", server)},
				{"stubDomains", fmt.Sprintf("{%q: [%q]}", fmt.Sprintf("d%d.example", i), server)},
			} {
				before := c.applied()
				put(t, dir, content.file, content.text)
				within(t, patience, content.text+" applied", func() bool { return c.applied() > before })
				c.wants(t, "kept.example", "192.0.2.1")
			}
		}
		if errs := c.errors(0); len(errs) > 0 {
			t.Errorf("errors in the log: %q", errs)
		}
	})
}

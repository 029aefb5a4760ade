package nanny

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/coredns/coredns/plugin"
	"github.com/miekg/dns"
)

// bench is a supervisor under test and its directory.
type bench struct {
	*supervisor
	t *testing.T
}

// newBench starts a supervisor with the real dnsmasq, unless sp names another program, and files in its directory.
func newBench(t *testing.T, sp spec, set settings, files map[string]string) *bench {
	t.Helper()
	if sp.path == "" {
		path, err := findProgram("dnsmasq")
		if err != nil {
			t.Fatal(err)
		}
		sp.path = path
		sp.args = append([]string{"--no-resolv", "--no-hosts"}, sp.args...)
	}
	if sp.dir == "" {
		sp.dir = t.TempDir()
	}
	if set.interval == 0 {
		set.interval = time.Minute // what is seen is seen by inotify
	}
	if set.timeout == 0 {
		set.timeout = defaultTimeout
	}
	for name, text := range files {
		put(t, filepath.Join(sp.dir, name), text)
	}
	s, err := newSupervisor(sp, set, "initial", nil)
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{s, t}
	t.Cleanup(func() {
		s.stop()
		if _, err := os.Stat(s.stage.root); !os.IsNotExist(err) {
			t.Errorf("the staging directory is left: %v", err)
		}
	})
	return b
}

// put replaces a file by a rename.
func put(t *testing.T, path, text string) {
	t.Helper()
	tmp := filepath.Join(filepath.Dir(path), ".tmp")
	if err := os.WriteFile(tmp, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(tmp, path); err != nil {
		t.Fatal(err)
	}
}

func (b *bench) write(name, text string) {
	b.t.Helper()
	put(b.t, filepath.Join(b.spec.dir, name), text)
}

// lookup asks for an address of name and returns it, or the RCODE or the error.
func (b *bench) lookup(name string) string {
	q := new(dns.Msg)
	q.SetQuestion(dns.Fqdn(name), dns.TypeA)
	a, err := b.up.exchangeMsg(context.Background(), q, in(testPatience), false, false)
	if err != nil {
		return err.Error()
	}
	if len(a.msg.Answer) > 0 {
		if rr, ok := a.msg.Answer[0].(*dns.A); ok {
			return rr.A.String()
		}
	}
	return dns.RcodeToString[a.msg.Rcode]
}

// await waits until want is the answer for name, and the child that gives it is known to be in service.
func (b *bench) await(name, want string) {
	b.t.Helper()
	eventually(b.t, fmt.Sprintf("%s is %s", name, want), func() bool {
		run := b.stats.run.Load()
		return b.lookup(name) == want && run != nil && b.up.state.Load().b == run.backend
	})
}

func (b *bench) reloads(result string) float64 {
	b.stats.mu.Lock()
	defer b.stats.mu.Unlock()
	return b.stats.counts.reloads[result]
}

func (b *bench) pid() int {
	if run := b.stats.run.Load(); run != nil {
		return run.child.pid
	}
	return 0
}

func (b *bench) awaitPid() int {
	b.t.Helper()
	eventually(b.t, "a child is in service", func() bool { return b.pid() != 0 })
	return b.pid()
}

func TestSupervisorAppliesChanges(t *testing.T) {
	b := newBench(t, spec{}, settings{}, map[string]string{"a.conf": "address=/a.test/192.0.2.1\n"})
	if got := b.lookup("x.a.test"); got != "192.0.2.1" {
		t.Fatalf("got %s; the first query waits for the first child", got)
	}
	b.write("a.conf", "address=/a.test/192.0.2.2\n")
	b.await("x.a.test", "192.0.2.2")
	b.write("b.hosts", "192.0.2.3 h.a.test\n")
	b.await("h.a.test", "192.0.2.3")
	if err := os.Remove(filepath.Join(b.spec.dir, "a.conf")); err != nil {
		t.Fatal(err)
	}
	b.await("x.a.test", "REFUSED")
	if got := b.lookup("h.a.test"); got != "192.0.2.3" {
		t.Errorf("got %s", got)
	}
	eventually(t, "three changes are counted", func() bool { return b.reloads("applied") == 3 })
}

func TestSupervisorServers(t *testing.T) {
	up := newBench(t, spec{args: []string{"--address=/#/192.0.2.9"}}, settings{}, nil)
	up.awaitPid()
	a, err := up.up.exchangeMsg(t.Context(), versionProbe(), in(testPatience), false, false)
	if err != nil {
		t.Fatal(err)
	}
	b := newBench(t, spec{}, settings{}, map[string]string{
		"stubDomains": fmt.Sprintf(`{"acme.test": [%q], "dead.test": [], "lost.test": ["ns.invalid"]}`, a.remote),
	})
	for name, want := range map[string]string{
		"x.acme.test": "192.0.2.9", "x.dead.test": "REFUSED", "x.lost.test": "REFUSED", "x.other.test": "REFUSED",
	} {
		if got := b.lookup(name); got != want {
			t.Errorf("%s: got %s, want %s", name, got, want)
		}
	}
	// A domain that is left without a server is not asked of the other upstreams.
	b.write("upstreamNameservers", fmt.Sprintf(`[%q]`, a.remote))
	b.await("x.other.test", "192.0.2.9")
	for _, name := range []string{"x.dead.test", "x.lost.test"} {
		if got := b.lookup(name); got != "REFUSED" {
			t.Errorf("%s: got %s, want REFUSED", name, got)
		}
	}
}

// The last known addresses of a server stay through a reload of the Corefile, too.
func TestSupervisorAddressesStay(t *testing.T) {
	server, _ := realDnsmasq(t, "127.0.0.1", "--address=/acme.test/192.0.2.9")
	var down atomic.Bool
	set := settings{interval: time.Minute, timeout: defaultTimeout, resolver: []netip.AddrPort{zone(t, &down, "ns.example.org. 60 IN A 127.0.0.1")}}
	b := newBench(t, spec{}, set, map[string]string{"stubDomains": fmt.Sprintf(`{"acme.test": ["ns.example.org:%d"]}`, server.Port())})
	b.await("x.acme.test", "192.0.2.9")
	down.Store(true)
	b.configure(set)
	eventually(t, "the directory is read", func() bool { return b.reloads("unchanged")+b.reloads("applied") > 0 })
	if got := b.lookup("x.acme.test"); got != "192.0.2.9" {
		t.Errorf("got %s", got)
	}
}

func TestSupervisorRejects(t *testing.T) {
	b := newBench(t, spec{}, settings{}, map[string]string{"a.conf": "address=/a.test/192.0.2.1\n"})
	b.await("x.a.test", "192.0.2.1")
	pid, root := b.pid(), t.TempDir()
	rejected := 0.0
	for _, tt := range []struct{ name, file, text string }{
		{"script", "b.conf", "conf-script=/bin/sh -c 'touch " + root + "/ran'\n"},
		{"unknown option", "b.conf", "foo=bar\n"},
		{"unknown user", "b.conf", "user=nosuchuser\n"},
		{"unknown interface", "b.conf", "interface=nosuch0\n"},
		{"truncated JSON", "stubDomains", `{"acme.test": ["192.0.2.1"`},
		{"not JSON", "stubDomains", "$$$$"},
		{"four nameservers", "upstreamNameservers", `["192.0.2.1", "192.0.2.2", "192.0.2.3", "192.0.2.4"]`},
		{"not UTF-8", "c.hosts", "192.0.2.1 \xc0\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b.write(tt.file, tt.text)
			rejected++
			eventually(t, "it is rejected", func() bool { return b.reloads("rejected") == rejected })
			if b.stats.valid.Load() {
				t.Error("config_valid isn't 0")
			}
			if got := b.lookup("x.a.test"); got != "192.0.2.1" || b.pid() != pid {
				t.Errorf("got %s from pid %d, want the old answer from pid %d", got, b.pid(), pid)
			}
			if err := os.Remove(filepath.Join(b.spec.dir, tt.file)); err != nil {
				t.Fatal(err)
			}
			eventually(t, "valid again", b.stats.valid.Load)
		})
		if err := os.Remove(filepath.Join(b.spec.dir, tt.file)); err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
	}
	if _, err := os.Stat(filepath.Join(root, "ran")); err == nil {
		t.Error("the script ran")
	}
}

// An option that lacks its argument doesn't take --test for it.
func TestSupervisorArgumentMissing(t *testing.T) {
	start := time.Now()
	b := newBench(t, spec{args: []string{"--domain"}}, settings{}, map[string]string{"a.conf": "address=/a.test/192.0.2.1\n"})
	eventually(t, "it is refused", func() bool { return b.reloads("rejected") > 0 })
	if took := time.Since(start); took > checkTime/2 {
		t.Errorf("refused after %s: dnsmasq ran instead of checking", took)
	}
}

// Some editors begin a file with a byte order mark.
func TestSupervisorByteOrderMark(t *testing.T) {
	upstream, _ := realDnsmasq(t, "127.0.0.1", "--address=/c.test/192.0.2.3")
	b := newBench(t, spec{}, settings{}, map[string]string{
		"a.conf":      "\uFEFFaddress=/a.test/192.0.2.1\n",
		"a.hosts":     "\uFEFF192.0.2.2 b.test\n",
		"stubDomains": fmt.Sprintf("\uFEFF{\"c.test\": [%q]}", upstream),
	})
	b.await("a.test", "192.0.2.1")
	b.await("b.test", "192.0.2.2")
	b.await("c.test", "192.0.2.3")
}

func TestSupervisorStartsWithoutUsableSnapshot(t *testing.T) {
	b := newBench(t, spec{args: []string{"--address=/base.test/192.0.2.5"}}, settings{}, map[string]string{"a.conf": "foo=bar\n"})
	if got := b.lookup("x.base.test"); got != "192.0.2.5" {
		t.Fatalf("got %s", got)
	}
	b.write("a.conf", "address=/a.test/192.0.2.1\n")
	b.await("x.a.test", "192.0.2.1")
}

// At the start, a directory that can't be applied yet leaves dnsmasq to start without it, and is applied when it can be.
func TestSupervisorStartsWithoutRoom(t *testing.T) {
	program, dir := beforeDnsmasq(t, `[ -z "$check" ] || exit 0
if [ -e taken ] && [ -e "$conf" ]; then
	echo "dnsmasq: failed to bind DHCP server socket: Address already in use" >&2
	exit 2
fi
`)
	taken := filepath.Join(dir, "taken")
	put(t, taken, "")
	b := newBench(t, spec{path: program, args: []string{"--no-resolv", "--no-hosts", "--address=/base.test/192.0.2.5"}}, settings{},
		map[string]string{"a.conf": "address=/a.test/192.0.2.1\n"})
	if got := b.lookup("x.base.test"); got != "192.0.2.5" {
		t.Errorf("got %s", got)
	}
	must(t, os.Remove(taken))
	b.await("x.a.test", "192.0.2.1")
}

func TestSupervisorDirectoryAppears(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "later")
	b := newBench(t, spec{dir: dir}, settings{}, nil)
	b.awaitPid()
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	b.write("a.conf", "address=/a.test/192.0.2.1\n")
	b.await("x.a.test", "192.0.2.1")
	must(t, os.Rename(dir, dir+"-away")) // at once: with its file removed, it would be an empty one for a moment
	eventually(t, "the loss is noticed", func() bool { return !b.stats.valid.Load() })
	if got := b.lookup("x.a.test"); got != "192.0.2.1" {
		t.Errorf("got %s, want the last good configuration", got)
	}
}

func TestSupervisorCrash(t *testing.T) {
	b := newBench(t, spec{}, settings{}, map[string]string{"a.conf": "address=/a.test/192.0.2.1\n"})
	for range 3 {
		pid := b.awaitPid()
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		if got := b.lookup("x.a.test"); got != "192.0.2.1" {
			t.Fatalf("got %s", got)
		}
		eventually(t, "another child", func() bool { p := b.pid(); return p != 0 && p != pid })
	}
	if n := b.counts().exits; n != 3 {
		t.Errorf("got %v exits, want 3", n)
	}
}

// A start that fails once, after a row of crashes, is tried again soon: the pauses after failed starts begin anew.
func TestSupervisorStartFailsOnce(t *testing.T) {
	program, dir := beforeDnsmasq(t, "rm fail 2>/dev/null && exit 9\n")
	b := newBench(t, spec{path: program, args: []string{"--no-resolv", "--no-hosts", "--address=/a.test/192.0.2.1"}}, settings{}, nil)
	dies := func() {
		t.Helper()
		pid := b.awaitPid()
		must(t, syscall.Kill(pid, syscall.SIGKILL))
		eventually(t, "it is noticed", func() bool { return b.pid() != pid })
	}
	for range 7 {
		b.await("x.a.test", "192.0.2.1")
		dies()
	}
	b.await("x.a.test", "192.0.2.1")
	put(t, filepath.Join(dir, "fail"), "")
	start := time.Now()
	dies()
	b.await("x.a.test", "192.0.2.1")
	if took := time.Since(start); took > 5*time.Second { // 0.4 s when the machine has nothing else to do, 7.5 s after 8 failures
		t.Errorf("the next start came after %s", took)
	}
	if n := b.stats.started.Load(); n != 10 {
		t.Errorf("got %d starts, want 10, of which one failed", n)
	}
}

// Where the configuration before a change doesn't start any more, the change is tried again, though it had taken too long
// while no child served.
func TestSupervisorChangeMends(t *testing.T) {
	program, dir := beforeDnsmasq(t, `if ! grep -q second "$conf"; then
	[ ! -e broken ] || exit 1
elif [ "$check" ] && [ ! -e slow ]; then # the first time
	touch slow
	exec sleep 60
fi
`)
	b := newBench(t, spec{path: program, args: []string{"--no-resolv", "--no-hosts"}}, settings{}, map[string]string{"a.conf": "# first\n"})
	b.awaitPid()
	put(t, filepath.Join(dir, "broken"), "")
	b.write("a.conf", "# second\naddress=/a.test/192.0.2.2\n")
	eventually(t, "the change is tried", func() bool { return exists(filepath.Join(dir, "slow")) })
	if err := syscall.Kill(b.pid(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	b.await("x.a.test", "192.0.2.2")
}

// A start of the configuration before a change that fails once doesn't leave all the time to a change that never answers.
func TestSupervisorChangeHangs(t *testing.T) {
	program, dir := beforeDnsmasq(t, `[ -z "$check" ] || exit 0
if grep -q second "$conf"; then
	touch hangs
	exec sleep 60
fi
! mv broken mended || exit 1
`)
	b := newBench(t, spec{path: program, args: []string{"--no-resolv", "--no-hosts"}}, settings{},
		map[string]string{"a.conf": "address=/a.test/192.0.2.1\n"})
	b.await("x.a.test", "192.0.2.1")
	put(t, filepath.Join(dir, "broken"), "")
	b.write("a.conf", "# second\n")
	eventually(t, "the change is tried", func() bool { return exists(filepath.Join(dir, "hangs")) })
	must(t, syscall.Kill(b.pid(), syscall.SIGKILL))
	b.await("x.a.test", "192.0.2.1")
	if _, err := os.Stat(filepath.Join(dir, "mended")); err != nil {
		t.Errorf("no start has failed: %v", err)
	}
}

// A configuration that was refused while dnsmasq didn't start without it either isn't left out once it does.
func TestSupervisorNotToBlame(t *testing.T) {
	program, dir := beforeDnsmasq(t, "[ -e broken ] && exit 9\n")
	broken := filepath.Join(dir, "broken")
	put(t, broken, "")
	b := newBench(t, spec{path: program, args: []string{"--no-resolv", "--no-hosts"}}, settings{}, map[string]string{"a.conf": "address=/a.test/192.0.2.1\n"})
	eventually(t, "the start without it has failed, too", func() bool { return b.stats.started.Load() > 1 })
	must(t, os.Remove(broken))
	b.await("x.a.test", "192.0.2.1")
	eventually(t, "it is said to be usable", b.stats.valid.Load)
}

func TestSupervisorHungChild(t *testing.T) {
	b := newBench(t, spec{}, settings{}, map[string]string{"a.conf": "address=/a.test/192.0.2.1\n"})
	pid := b.awaitPid()
	start := time.Now()
	must(t, syscall.Kill(pid, syscall.SIGSTOP))
	if got := b.lookup("x.a.test"); got != "192.0.2.1" {
		t.Fatalf("got %s; the query goes to the successor", got)
	}
	if took := time.Since(start); took > 3*hungTime { // 2 s to 2.5 s, and a start
		t.Errorf("answered after %s", took)
	}
	if b.pid() == pid {
		t.Error("the hung child is still in service")
	}
}

// What a hung child has, while it is replaced because of a change, is answered by its successor.
func TestSupervisorReplacedChildHung(t *testing.T) {
	b := newBench(t, spec{}, settings{timeout: 2 * testPatience}, map[string]string{"a.conf": "address=/a.test/192.0.2.1\n"})
	pid := b.awaitPid()
	must(t, syscall.Kill(pid, syscall.SIGSTOP))
	answered := make(chan string, 1)
	go func() { answered <- b.lookup("x.a.test") }()
	eventually(t, "the query waits", func() bool { return b.up.inflight.Load() == 1 })
	b.write("a.conf", "address=/a.test/192.0.2.2\n")
	if got := <-answered; !strings.HasPrefix(got, "192.0.2.") {
		t.Errorf("got %s, want the successor's answer", got)
	}
}

// What a child has that dies while it finishes its queries, replaced because of a change, is answered by its successor.
func TestSupervisorReplacedChildDies(t *testing.T) {
	reached := make(chan struct{}, 1)
	server := tcpServer(t, func(conn net.Conn) {
		select {
		case reached <- struct{}{}:
		default:
		}
		io.Copy(io.Discard, conn) // no answer
	})
	b := newBench(t, spec{}, settings{timeout: 2 * testPatience}, map[string]string{"a.conf": fmt.Sprintf("server=/a.test/127.0.0.1#%d\n", server.Port())})
	pid := b.awaitPid()
	answered := make(chan error, 1)
	go func() {
		_, err := b.up.exchangeMsg(context.Background(), question("x.a.test.", dns.TypeA), in(testPatience), true, false)
		answered <- err
	}()
	<-reached
	b.write("a.conf", "address=/a.test/192.0.2.2\n")
	b.await("x.a.test", "192.0.2.2")
	must(t, syscall.Kill(pid, syscall.SIGKILL))
	if err := <-answered; err != nil {
		t.Errorf("got %v, want the successor's answer", err)
	}
}

// A change that needs no second child beside the first keeps it; another never lets two run at once.
func TestSupervisorInPlace(t *testing.T) {
	addr := freeAddr(t, "127.0.0.1")
	b := newBench(t, spec{listen: addr}, settings{}, map[string]string{
		"a.conf": "address=/a.test/192.0.2.1\n", "b.hosts": "192.0.2.2 h.test\n",
	})
	b.await("x.a.test", "192.0.2.1")
	pid := b.pid()
	b.write("b.hosts", "192.0.2.3 h.test\n")
	b.await("h.test", "192.0.2.3")
	b.write("stubDomains", `{"acme.test": []}`)
	eventually(t, "both changes are in service", func() bool { return b.reloads("applied") == 2 })
	if b.pid() != pid {
		t.Errorf("got pid %d, want %d: a SIGHUP is enough", b.pid(), pid)
	}
	b.write("a.conf", "address=/a.test/192.0.2.4\n")
	b.await("x.a.test", "192.0.2.4")
	if b.pid() == pid {
		t.Error("a changed *.conf needs a new process")
	}
	b.write("a.conf", "interface=nosuch0\naddress=/a.test/192.0.2.5\n") // passes --test
	eventually(t, "the change is rejected", func() bool { return b.reloads("rejected") == 1 })
	if b.stats.valid.Load() {
		t.Error("the directory is said to be usable")
	}
	if got := b.lookup("x.a.test"); got != "192.0.2.4" {
		t.Errorf("got %s, want the last good configuration", got)
	}
	direct := func(want string) {
		t.Helper()
		q := new(dns.Msg)
		q.SetQuestion("x.a.test.", dns.TypeA)
		r, err := ask(addr, q, testPatience)
		if err != nil || len(r.Answer) != 1 || r.Answer[0].(*dns.A).A.String() != want {
			t.Errorf("the fixed address answers %v (%v), want %s", r, err, want)
		}
	}
	direct("192.0.2.4")
}

// A hung child isn't waited for because there is a change that needs SIGHUP.
func TestSupervisorHungInPlace(t *testing.T) {
	b := newBench(t, spec{listen: freeAddr(t, "127.0.0.1")}, settings{}, map[string]string{"b.hosts": "192.0.2.2 h.test\n"})
	b.await("h.test", "192.0.2.2")
	must(t, syscall.Kill(b.pid(), syscall.SIGSTOP))
	b.write("b.hosts", "192.0.2.3 h.test\n")
	if got := b.lookup("h.test"); !strings.HasPrefix(got, "192.0.2.") {
		t.Errorf("got %s", got)
	}
	b.await("h.test", "192.0.2.3")
}

// A child that reads a long list again because of SIGHUP answers nothing meanwhile, and isn't taken for hung.
func TestSupervisorReadsForLong(t *testing.T) {
	fifo := filepath.Join(reachableDir(t), "fifo")
	must(t, syscall.Mkfifo(fifo, 0o644))
	read := func() { // returns when dnsmasq has opened it
		f, err := os.OpenFile(fifo, os.O_WRONLY, 0)
		must(t, err)
		must(t, f.Close())
	}
	b := newBench(t, spec{listen: freeAddr(t, "127.0.0.1"), args: []string{"--addn-hosts=" + fifo}}, settings{},
		map[string]string{"b.hosts": "192.0.2.2 h.test\n"})
	read()
	b.await("h.test", "192.0.2.2")
	pid := b.pid()
	b.write("b.hosts", "192.0.2.3 h.test\n")
	time.Sleep(hungTime + time.Second) // so long it takes
	if b.pid() != pid {
		t.Fatal("it was killed")
	}
	read()
	b.await("h.test", "192.0.2.3")
	if b.pid() != pid {
		t.Error("another dnsmasq is in service")
	}
}

func TestSupervisorFixedAddressTaken(t *testing.T) {
	conn, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(freeAddr(t, "127.0.0.1")))
	if err != nil {
		t.Fatal(err)
	}
	b := newBench(t, spec{listen: conn.LocalAddr().(*net.UDPAddr).AddrPort()}, settings{}, map[string]string{"a.conf": "address=/a.test/192.0.2.1\n"})
	if err := <-b.first; err == nil || !strings.Contains(err.Error(), "another program has this address") {
		t.Errorf("got %v", err)
	}
	conn.Close()
	b.await("x.a.test", "192.0.2.1")
}

// Never more than two children, the last change wins.
func TestSupervisorMergesChanges(t *testing.T) {
	b := newBench(t, spec{}, settings{}, nil)
	b.awaitPid()
	stop := make(chan struct{})
	most := make(chan int)
	go func() {
		n := 0
		for {
			select {
			case <-stop:
				most <- n
				return
			case <-time.After(time.Millisecond):
				n = max(n, countChildren(b.stage.root))
			}
		}
	}()
	for i := range 40 {
		b.write("a.conf", fmt.Sprintf("address=/a.test/192.0.2.%d\n", i+1))
		time.Sleep(60 * time.Millisecond) // longer than the debounce, shorter than a change
	}
	b.await("x.a.test", "192.0.2.40")
	close(stop)
	if n := <-most; n > 3 { // two children and a check (--test)
		t.Errorf("%d dnsmasq at once", n)
	}
}

// countChildren counts the processes whose arguments name the staging directory root. A look at /proc takes its time, in which
// one may end and its successor begin; so what is there in two looks in a row was there at once, between them.
func countChildren(root string) int {
	look := func() map[string]bool {
		paths, _ := filepath.Glob("/proc/[0-9]*/cmdline")
		found := map[string]bool{}
		for _, p := range paths {
			if data, err := os.ReadFile(p); err == nil && strings.Contains(string(data), root+"/") {
				found[p] = true
			}
		}
		return found
	}
	first, n := look(), 0
	for p := range look() {
		if first[p] {
			n++
		}
	}
	return n
}

func TestSupervisorReloadOff(t *testing.T) {
	b := newBench(t, spec{}, settings{reload: reloadOff}, map[string]string{"a.conf": "address=/a.test/192.0.2.1\n"})
	b.await("x.a.test", "192.0.2.1")
	pid := b.pid()
	b.write("a.conf", "address=/a.test/192.0.2.2\n")
	eventually(t, "the change is seen", func() bool { return b.stats.held.Load() })
	if got := b.lookup("x.a.test"); got != "192.0.2.1" || b.pid() != pid {
		t.Errorf("got %s from pid %d; with reload off the change isn't applied", got, b.pid())
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	b.await("x.a.test", "192.0.2.2")
}

// A change made just before a reload of the Corefile is applied by it, though reload is off.
func TestSupervisorReloadOffAtOnce(t *testing.T) {
	b := newBench(t, spec{}, settings{reload: reloadOff}, map[string]string{"a.conf": "address=/a.test/192.0.2.1\n"})
	b.await("x.a.test", "192.0.2.1")
	b.write("a.conf", "address=/a.test/192.0.2.2\n")
	b.configure(settings{reload: reloadOff, interval: time.Minute, timeout: defaultTimeout})
	b.await("x.a.test", "192.0.2.2")
	b.write("a.conf", "address=/a.test/192.0.2.3\n")
	eventually(t, "the next change waits", func() bool { return b.stats.held.Load() })
	if got := b.lookup("x.a.test"); got != "192.0.2.2" {
		t.Errorf("got %s; with reload off the change isn't applied", got)
	}
}

// A change that reload off held back and that never answers doesn't keep the configuration before it from service.
func TestSupervisorReloadOffHung(t *testing.T) {
	program, _ := beforeDnsmasq(t, `[ -z "$check" ] || exit 0
! grep -q second "$conf" || exec sleep 60
`)
	b := newBench(t, spec{path: program, args: []string{"--no-resolv", "--no-hosts"}}, settings{reload: reloadOff},
		map[string]string{"a.conf": "address=/a.test/192.0.2.1\n"})
	b.await("x.a.test", "192.0.2.1")
	b.write("a.conf", "# second\n")
	eventually(t, "the change is seen", func() bool { return b.stats.held.Load() })
	must(t, syscall.Kill(b.pid(), syscall.SIGKILL))
	b.await("x.a.test", "192.0.2.1")
}

// What dies while a change is checked that is then refused, or has to wait for an interface, is started again at once.
func TestSupervisorDiesWhileChecking(t *testing.T) {
	program, dir := beforeDnsmasq(t, `if [ "$check" ] && grep -q nosuch0 "$conf"; then
	touch checking
	until [ -e go ]; do sleep 0.01; done
fi
`)
	b := newBench(t, spec{path: program, args: []string{"--no-resolv", "--no-hosts"}}, settings{},
		map[string]string{"a.conf": "address=/a.test/192.0.2.1\n"})
	b.await("x.a.test", "192.0.2.1")
	b.write("a.conf", "interface=nosuch0\n")
	eventually(t, "the change is checked", func() bool { return exists(filepath.Join(dir, "checking")) })
	pid := b.pid()
	must(t, syscall.Kill(pid, syscall.SIGKILL))
	eventually(t, "the end is noticed", func() bool { return b.pid() != pid })
	put(t, filepath.Join(dir, "go"), "")
	if got := b.lookup("x.a.test"); got != "192.0.2.1" {
		t.Errorf("got %s, want the configuration before", got)
	}
}

// A change isn't wrong because somebody ends the dnsmasq that checks it or starts with it.
func TestSupervisorKilledWhileChanging(t *testing.T) {
	for name, how := range map[string]string{
		"SIGKILL": "kill -KILL $$", "SIGTERM": "kill -TERM $$", "SIGTERM, later": "exit 0", // dnsmasq's own end
	} {
		t.Run(name, func(t *testing.T) {
			program, _ := beforeDnsmasq(t, `what=${check:-started}
if grep -q second "$conf" && [ ! -e $what ]; then
	touch $what
	`+how+`
fi
`)
			b := newBench(t, spec{path: program, args: []string{"--no-resolv", "--no-hosts"}}, settings{},
				map[string]string{"a.conf": "address=/a.test/192.0.2.1\n"})
			b.await("x.a.test", "192.0.2.1")
			b.write("a.conf", "# second\naddress=/a.test/192.0.2.2\n")
			b.await("x.a.test", "192.0.2.2")
			if n := b.reloads("rejected"); n != 0 {
				t.Errorf("refused %v times", n)
			}
		})
	}
}

// settled is a supervisor whose loop doesn't run, after the outcome of a change while want is wanted.
func settled(t *testing.T, o outcome, want *config) *supervisor {
	t.Helper()
	s := &supervisor{up: newUpstream(), stats: newStats(), good: &config{version: "good"}, want: want, retry: time.NewTimer(time.Hour)}
	s.attempt = &attempt{cancel: func() {}}
	s.settle(o)
	return s
}

// A change that failed isn't kept for another try where the directory holds another by then.
func TestSupervisorNewerChange(t *testing.T) {
	for name, err := range map[string]error{
		"disk full":    &transientError{errors.New("no space")},
		"no interface": &absentError{errors.New("no interface")},
		"wrong":        errors.New("wrong"),
	} {
		older := &config{version: "older"}
		if s := settled(t, outcome{keep: true, cfg: older, err: err}, nil); s.later != older && s.doubtful != older {
			t.Errorf("%s: it isn't tried again", name)
		}
		if s := settled(t, outcome{keep: true, cfg: older, err: err}, &config{version: "newer"}); s.later != nil || s.doubtful != nil {
			t.Errorf("%s: it would be applied after the newer one", name)
		}
	}
}

// After a pause in a row of crashes, what was in service comes first: a change that waits may fail again, and take its time.
func TestSupervisorGoodFirst(t *testing.T) {
	later := &config{version: "later"}
	s := settled(t, outcome{keep: true, cfg: later, err: &transientError{errors.New("no space")}}, nil)
	s.looked = true
	s.retried()
	if s.want != nil || s.later != later {
		t.Errorf("%v is tried before the configuration that was in service", s.want)
	}
	s.failures++ // that may be what has to be mended
	s.retried()
	if s.want != later || s.later != nil {
		t.Errorf("got %v, want the change", s.want)
	}
}

// A child may end between its SIGHUP and the word that it has read its files.
func TestSupervisorDiesAfterSIGHUP(t *testing.T) {
	read := &config{version: "read"}
	s := settled(t, outcome{keep: true, run: &running{child: &child{pid: 1}}, how: "SIGHUP", cfg: read}, nil)
	if s.good != read || s.cur != nil {
		t.Errorf("got %v in service, want none; the next starts with what was read", s.cur)
	}
}

func TestSupervisorBadPrograms(t *testing.T) {
	for _, tt := range []struct{ mode, want string }{
		{"exits", "exited with status 7: cannot do this"},
	} {
		t.Run(tt.mode, func(t *testing.T) {
			b := newBench(t, spec{path: fakeProgram(t, tt.mode)}, settings{}, nil)
			select {
			case err := <-b.first:
				if err == nil || !strings.Contains(err.Error(), tt.want) {
					t.Errorf("got %v, want %q", err, tt.want)
				}
			case <-time.After(10 * time.Second):
				t.Fatal("no outcome")
			}
			q := new(dns.Msg)
			q.SetQuestion("x.test.", dns.TypeA)
			eventually(t, "queries that can go elsewhere don't wait", func() bool {
				_, err := b.up.exchangeMsg(t.Context(), q, time.Now().Add(time.Second), false, true)
				return errors.Is(err, errNoBackend)
			})
		})
	}
}

func TestSupervisorStopsWhileStarting(t *testing.T) {
	b := newBench(t, spec{path: fakeProgram(t, "silent")}, settings{}, nil)
	eventually(t, "a child is started", func() bool { return b.stats.started.Load() > 0 })
}

// The one in service and the one that is to follow are stopped side by side, deaf to SIGTERM as they are.
func TestSupervisorStopsWhileChanging(t *testing.T) {
	var begin time.Time
	t.Cleanup(func() { // after the supervisor's end
		if took := time.Since(begin); took > stopTime+2*time.Second {
			t.Errorf("it took %s", took)
		}
	})
	program, dir := beforeDnsmasq(t, `[ -z "$check" ] || exit 0
trap '' TERM
if grep -q second "$conf"; then
	touch hangs
	exec sleep 60
fi
dnsmasq "$@"
exit
`)
	b := newBench(t, spec{path: program, args: []string{"--no-resolv", "--no-hosts"}}, settings{}, map[string]string{"a.conf": "# first\n"})
	b.awaitPid()
	b.write("a.conf", "# second\n")
	eventually(t, "the second starts", func() bool { return exists(filepath.Join(dir, "hangs")) })
	begin = time.Now()
}

func TestBackoff(t *testing.T) {
	failed := func(n int) time.Duration { return backoff(n, maxBackoff) }
	for _, tt := range []struct {
		pause    func(int) time.Duration
		n        int
		min, max time.Duration
	}{
		{failed, 1, 75 * time.Millisecond, 125 * time.Millisecond},
		{failed, 3, 300 * time.Millisecond, 500 * time.Millisecond},
		{failed, 100, 7500 * time.Millisecond, 12500 * time.Millisecond},
		{servedBackoff, 1, 75 * time.Millisecond, 125 * time.Millisecond},
		{servedBackoff, 50, 110 * time.Millisecond, 190 * time.Millisecond},
		{servedBackoff, 67, 300 * time.Millisecond, 500 * time.Millisecond},
		{servedBackoff, 100, 7500 * time.Millisecond, 12500 * time.Millisecond},
	} {
		if d := tt.pause(tt.n); d < tt.min || d > tt.max {
			t.Errorf("%d failures: got %s, want %s to %s", tt.n, d, tt.min, tt.max)
		}
	}
}

// handler gives the supervisor's handler for all names, as setup does.
func (b *bench) handler() *Nanny {
	n := &Nanny{zones: []string{"."}, set: settings{timeout: defaultTimeout}, observer: newObserver(".")}
	n.sup.Store(b.supervisor)
	return n
}

// A dnsmasq whose upstream is CoreDNS is found, and a query goes round once at most.
func TestSupervisorLoop(t *testing.T) {
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	coredns := pc.LocalAddr().(*net.UDPAddr).AddrPort()
	b := newBench(t, spec{args: []string{fmt.Sprintf("--server=127.0.0.1#%d", coredns.Port())}}, settings{zones: []string{"."}}, nil)
	n := b.handler()
	defer forget(".")
	var asked atomic.Int64
	srv := &dns.Server{PacketConn: pc, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, r *dns.Msg) {
		asked.Add(1)
		if rcode, err := n.ServeDNS(context.Background(), w, r); err != nil || !plugin.ClientWrite(rcode) {
			m := new(dns.Msg)
			w.WriteMsg(m.SetRcode(r, rcode))
		}
	})}
	served := make(chan error)
	go func() { served <- srv.ActivateAndServe() }()
	defer func() {
		srv.Shutdown()
		<-served
	}()
	eventually(t, "the loop is found", b.loop.found.Load)
	asked.Store(0)
	q := new(dns.Msg)
	q.SetQuestion("www.example.org.", dns.TypeA)
	start := time.Now()
	r, err := ask(coredns, q, testPatience)
	if err != nil || r.Rcode != dns.RcodeRefused {
		t.Errorf("got %v (%v), want REFUSED", r, err)
	}
	// One more if the search for loops isn't over, and two each time that it had to be sent again.
	if n := asked.Load(); n > 3+2*int64(time.Since(start)/retransmitAfter) {
		t.Errorf("CoreDNS was asked %d times for one query", n)
	}
}

package nanny

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
)

// ownerBench plays CoreDNS's part in a reload of the Corefile.
type ownerBench struct {
	*owner
	t       *testing.T
	program string
}

func newOwnerBench(t *testing.T) *ownerBench {
	t.Helper()
	program, err := findProgram("dnsmasq")
	if err != nil {
		t.Fatal(err)
	}
	o := &ownerBench{&owner{entries: map[string]*entry{}}, t, program}
	t.Cleanup(func() {
		if len(o.entries) > 0 {
			t.Errorf("%d children are left", len(o.entries))
		}
	})
	return o
}

// load makes a load whose blocks have the specs given, as setup and OnStartup do, and returns their supervisors.
func (o *ownerBench) load(specs ...spec) (*load, []*supervisor) {
	o.t.Helper()
	l := &load{parent: o.restarting, released: make(chan struct{})}
	var sups []*supervisor
	for _, sp := range specs {
		sup, _, err := o.acquire(l, sp, settings{timeout: defaultTimeout, interval: time.Minute}, ".")
		if err != nil {
			o.t.Fatal(err)
		}
		sups = append(sups, sup)
	}
	return l, sups
}

func (o *ownerBench) spec(args ...string) spec {
	return spec{path: o.program, args: append([]string{"--no-resolv", "--no-hosts"}, args...)}
}

func awaitRun(t *testing.T, s *supervisor) int {
	t.Helper()
	eventually(t, "a child is in service", func() bool { return s.stats.run.Load() != nil })
	return s.stats.run.Load().child.pid
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func isDone(s *supervisor) bool {
	select {
	case <-s.done:
		return true
	default:
		return false
	}
}

func TestOwnerAdoptsEqualSpec(t *testing.T) {
	o := newOwnerBench(t)
	old, a := o.load(o.spec())
	pid := awaitRun(t, a[0])
	must(t, o.restart(old))
	next, b := o.load(o.spec())
	if b[0] != a[0] {
		t.Error("an equal spec has another supervisor")
	}
	must(t, o.shutdown(old))
	if got := awaitRun(t, b[0]); got != pid {
		t.Errorf("got pid %d, want %d", got, pid)
	}
	must(t, o.shutdown(next)) // the end of CoreDNS: children answer on
	if isDone(b[0]) {
		t.Error("OnShutdown without OnRestart ended the child")
	}
	must(t, o.release(next))
	if !isDone(b[0]) {
		t.Error("OnFinalShutdown didn't end the child")
	}
}

func TestOwnerReplacesChangedSpec(t *testing.T) {
	o := newOwnerBench(t)
	old, a := o.load(o.spec())
	awaitRun(t, a[0])
	must(t, o.restart(old))
	next, b := o.load(o.spec("--cache-size=10"))
	awaitRun(t, b[0])
	if isDone(a[0]) {
		t.Error("the old child ended before its successor serves")
	}
	must(t, o.shutdown(old))
	if !isDone(a[0]) || isDone(b[0]) {
		t.Error("the old child has to end, and only that")
	}
	must(t, o.release(next))
}

func TestOwnerFailedReload(t *testing.T) {
	o := newOwnerBench(t)
	old, a := o.load(o.spec(), o.spec("--cache-size=1"))
	pid := awaitRun(t, a[0])
	for range 2 {
		must(t, o.restart(old))
		_, b := o.load(o.spec(), o.spec("--cache-size=10")) // its start-up fails then: no hook of its own is called
		must(t, o.restartFailed(old))
		if !isDone(b[1]) {
			t.Error("the child of the failed instance is left")
		}
		if isDone(a[0]) || isDone(a[1]) || awaitRun(t, a[0]) != pid {
			t.Error("a failed reload touched the running children")
		}
	}
	must(t, o.release(old))
}

// Two children that may not run side by side don't, across a reload of the Corefile either.
func TestOwnerExclusiveChildWaits(t *testing.T) {
	o := newOwnerBench(t)
	sp := o.spec("--cache-size=10")
	sp.listen = freeAddr(t, "127.0.0.1")
	old, a := o.load(sp)
	awaitRun(t, a[0])
	must(t, o.restart(old))
	sp.args = append(sp.args, "--address=/a.test/192.0.2.1")
	next, b := o.load(sp)
	<-b[0].gated
	if b[0].stats.started.Load() != 0 {
		t.Error("a second child was started")
	}
	must(t, o.shutdown(old))
	awaitRun(t, b[0])
	must(t, o.release(next))
}

func TestOwnerSharedByBlocks(t *testing.T) {
	o := newOwnerBench(t)
	l, a := o.load(o.spec(), o.spec())
	if a[0] != a[1] {
		t.Error("two equal blocks have a child each")
	}
	must(t, o.release(l))
	must(t, o.release(l)) // OnShutdown and OnFinalShutdown may both come
}

// A hundred reloads leave what one leaves; goleak looks for goroutines at the end.
func TestOwnerManyReloads(t *testing.T) {
	o := newOwnerBench(t)
	before := openFiles(t)
	l, _ := o.load(o.spec("--cache-size=0"))
	for i := range 20 {
		must(t, o.restart(l))
		next, sups := o.load(o.spec("--cache-size=0", "--neg-ttl="+strings.Repeat("1", i%2+1)))
		awaitRun(t, sups[0])
		must(t, o.shutdown(l))
		l = next
	}
	must(t, o.release(l))
	eventually(t, fmt.Sprintf("not many more than %d open files", before), func() bool { return openFiles(t) <= before+5 })
}

func openFiles(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// The series come with a block and go with it; the names are the contract.
func TestMetrics(t *testing.T) {
	program, err := findProgram("dnsmasq")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	l := &load{released: make(chan struct{})}
	sup, _, err := children.acquire(l, spec{path: program, dir: dir}, settings{timeout: defaultTimeout, interval: time.Minute}, "example.org.")
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{sup, t}
	b.awaitPid()
	b.write("a.conf", "address=/a.test/192.0.2.1\n")
	b.await("x.a.test", "192.0.2.1")
	b.write("a.conf", "foo=bar\n")
	eventually(t, "the change is rejected", func() bool { return b.reloads("rejected") == 1 })

	newObserver("example.org.").observe(0, time.Now())
	problems, err := testutil.CollectAndLint(collector{})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		if !strings.Contains(p.Metric, "dnsmasq_process_") { // client_golang's own
			t.Errorf("%s: %s", p.Metric, p.Text)
		}
	}
	err = testutil.CollectAndCompare(collector{}, strings.NewReader(`
# HELP coredns_nanny_config_valid Whether the configuration directory's newest state is usable.
# TYPE coredns_nanny_config_valid gauge
coredns_nanny_config_valid{zones="example.org."} 0
# HELP coredns_nanny_exits_total Counter of unexpected ends of dnsmasq.
# TYPE coredns_nanny_exits_total counter
coredns_nanny_exits_total{zones="example.org."} 0
# HELP coredns_nanny_reloads_total Counter of changes of the configuration directory, by result.
# TYPE coredns_nanny_reloads_total counter
coredns_nanny_reloads_total{result="applied",zones="example.org."} 1
coredns_nanny_reloads_total{result="failed",zones="example.org."} 0
coredns_nanny_reloads_total{result="rejected",zones="example.org."} 1
coredns_nanny_reloads_total{result="unchanged",zones="example.org."} 0
# HELP coredns_nanny_starts_total Counter of dnsmasq processes started to serve, by reason.
# TYPE coredns_nanny_starts_total counter
coredns_nanny_starts_total{reason="config",zones="example.org."} 1
coredns_nanny_starts_total{reason="corefile",zones="example.org."} 0
coredns_nanny_starts_total{reason="exit",zones="example.org."} 0
coredns_nanny_starts_total{reason="initial",zones="example.org."} 1
# HELP coredns_nanny_up Whether a dnsmasq is in service.
# TYPE coredns_nanny_up gauge
coredns_nanny_up{zones="example.org."} 1
`), "coredns_nanny_up", "coredns_nanny_config_valid", "coredns_nanny_exits_total", "coredns_nanny_reloads_total", "coredns_nanny_starts_total")
	if err != nil {
		t.Error(err)
	}
	for _, name := range []string{
		"reload_duration_seconds", "config_hash", "config_last_success_timestamp_seconds", "requests_held_total",
		"requests_resent_total", "inflight_requests", "dnsmasq_cache_size", "dnsmasq_cache_hits_total", "dnsmasq_cache_misses_total",
		"dnsmasq_cache_insertions_total", "dnsmasq_cache_evictions_total", "dnsmasq_auth_total", "dnsmasq_scrape_errors_total",
		"dnsmasq_process_resident_memory_bytes", "dnsmasq_process_cpu_seconds_total", "dnsmasq_process_open_fds",
	} {
		if n := testutil.CollectAndCount(collector{}, "coredns_nanny_"+name); n != 1 {
			t.Errorf("%s: got %d series, want 1", name, n)
		}
	}
	must(t, children.release(l))
	if n := testutil.CollectAndCount(collector{}); n != 0 {
		t.Errorf("%d series of a block that is gone", n)
	}
	if n := testutil.CollectAndCount(requestDuration); n != 0 {
		t.Errorf("%d histograms of a block that is gone", n)
	}
}

// After 200 starts and stops, some of a child that isn't ready yet, nothing is left.
func TestOwnerRounds(t *testing.T) {
	dir := t.TempDir()
	tmp, err := os.MkdirTemp("", "") //nolint:usetesting // the child's user has to reach it
	must(t, err)
	defer os.RemoveAll(tmp)
	must(t, os.Chmod(tmp, 0o755))
	t.Setenv("TMPDIR", tmp)
	o := newOwnerBench(t)
	must(t, os.WriteFile(dir+"/a.conf", []byte("address=/a.test/192.0.2.1\n"), 0o644))
	round := func(i int) {
		t.Helper()
		sp := o.spec()
		sp.dir = dir
		l, sups := o.load(sp)
		if i%4 != 0 {
			awaitRun(t, sups[0])
		}
		must(t, o.release(l))
	}
	round(1) // what the runtime opens once
	l, sups := o.load(o.spec())
	awaitRun(t, sups[0])
	if n := leftovers(t, tmp); n.processes != 1 || n.staged != 1 {
		t.Fatalf("with one child: %+v", n)
	}
	must(t, o.release(l))
	before := leftovers(t, tmp)
	for i := range 200 {
		round(i)
	}
	defer func() { t.Logf("at first %+v, after 200 rounds %+v", before, leftovers(t, tmp)) }()
	eventually(t, "nothing is left", func() bool { return leftovers(t, tmp).within(before) })
}

// leftover counts what a start makes.
type leftover struct{ goroutines, files, processes, staged int }

// within tells whether l is no more than before: something of another test may have been left then.
func (l leftover) within(before leftover) bool {
	return l.goroutines <= before.goroutines && l.files <= before.files && l.processes <= before.processes && l.staged <= before.staged
}

func leftovers(t *testing.T, tmp string) leftover {
	t.Helper()
	count := func(dir string) int {
		list, err := os.ReadDir(dir)
		must(t, err)
		return len(list)
	}
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	must(t, err)
	processes := 0
	for _, path := range stats {
		data, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		_, rest, _ := strings.Cut(string(data), ") ") // state and parent, proc(5)
		if fields := strings.Fields(rest); len(fields) > 1 && fields[1] == strconv.Itoa(os.Getpid()) {
			processes++
		}
	}
	return leftover{runtime.NumGoroutine(), count("/proc/self/fd"), processes, count(tmp)}
}

// Of children with the same label the first tells its hash and its process: always the same one.
func TestOwnerOrder(t *testing.T) {
	o := newOwnerBench(t)
	l, _ := o.load(o.spec("--address=/a.test/192.0.2.1"), o.spec("--address=/b.test/192.0.2.1"), o.spec("--address=/c.test/192.0.2.1"))
	first := o.supervisors()["."][0]
	for range 50 {
		if o.supervisors()["."][0] != first {
			t.Error("the first one changes from scrape to scrape")
			break
		}
	}
	must(t, o.release(l))
}

// A reload of the Corefile that fails leaves all as it is: what `reload off` holds back, too.
func TestOwnerFailedReloadHoldsBack(t *testing.T) {
	o := newOwnerBench(t)
	sp, set := o.spec(), settings{timeout: defaultTimeout, interval: time.Minute, reload: reloadOff}
	sp.dir = t.TempDir()
	acquire := func(l *load) *supervisor {
		sup, _, err := o.acquire(l, sp, set, ".")
		must(t, err)
		return sup
	}
	served := &load{released: make(chan struct{})}
	b := &bench{acquire(served), t}
	defer o.release(served)
	awaitRun(t, b.supervisor)
	b.write("a.hosts", "192.0.2.1 a.test\n")
	eventually(t, "the change is seen", func() bool { return b.stats.held.Load() })
	must(t, o.restart(served))
	acquire(&load{parent: served, released: make(chan struct{})})
	must(t, o.restartFailed(served))
	must(t, os.Remove(filepath.Join(sp.dir, "a.hosts")))
	eventually(t, "the directory is as it was", func() bool { return b.reloads("unchanged") > 0 })
	if n := b.stats.started.Load(); n != 1 {
		t.Errorf("got %d children; the change was applied", n)
	}
}

package nanny

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	clog "github.com/coredns/coredns/plugin/pkg/log"
	"github.com/miekg/dns"
	"go.uber.org/goleak"
)

// TestMain is also the misbehaving children: the test binary, started by the name fake-MODE, plays one.
func TestMain(m *testing.M) {
	if mode, ok := strings.CutPrefix(filepath.Base(os.Args[0]), "fake-"); ok {
		fake(mode)
		os.Exit(0)
	}
	clog.Discard()
	// A look-up of the standard library goes on for a while after its context has ended.
	goleak.VerifyTestMain(m,
		goleak.IgnoreAnyFunction("net.(*Resolver).goLookupIPCNAMEOrder"),
		goleak.IgnoreAnyFunction("net.(*Resolver).goLookupIPCNAMEOrder.func3.1"))
}

// fakeProgram returns the path of a program that misbehaves as mode says.
func fakeProgram(t *testing.T, mode string) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(reachableDir(t), "fake-"+mode)
	if err := os.Link(self, path); err != nil { // another file system
		data, err := os.ReadFile(self)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, data, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return path
}

// scriptProgram returns the path of a program in dir that is a shell script.
func scriptProgram(t *testing.T, dir, script string) string {
	t.Helper()
	path := filepath.Join(dir, "program")
	must(t, os.WriteFile(path, []byte("#!/bin/sh\n"+script), 0o755))
	return path
}

// beforeDnsmasq makes a program that runs script and then dnsmasq, and the directory that script is in and may write to,
// as dnsmasq's user. $check is `checked` where dnsmasq is to check only, $conf is the staged a.conf.
func beforeDnsmasq(t *testing.T, script string) (program, dir string) {
	t.Helper()
	dir = reachableDir(t)
	must(t, os.Chmod(dir, 0o777))
	return scriptProgram(t, dir, "cd "+dir+`
for arg; do
	case $arg in
	--test) check=checked ;;
	--conf-dir=*) conf=${arg#*=} conf=${conf%%,*}/a.conf ;;
	esac
done
`+script+`exec dnsmasq "$@"
`), dir
}

// reachableDir makes a directory that a child reaches, which may run as another user.
func reachableDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for d := dir; d != os.TempDir() && d != "/"; d = filepath.Dir(d) {
		must(t, os.Chmod(d, 0o755))
	}
	return dir
}

func fake(mode string) {
	say := func(format string, a ...any) { fmt.Fprintf(os.Stderr, format, a...) }
	if slices.Contains(os.Args, "--test") {
		return
	}
	switch mode {
	case "exits":
		say("\ndnsmasq: cannot do this\n")
		os.Exit(7)
	case "lines":
		for i := range 5000 {
			say("dnsmasq[1]: line %d\n", i)
		}
		say("dnsmasq: bad option at line 3")
		os.Exit(1)
	case "silent":
		select {}
	case "deaf":
		signal.Ignore(syscall.SIGTERM)
	case "flood":
		go func() {
			line := []byte("dnsmasq[1]: " + strings.Repeat("x", 80) + "\n")
			for range time.Tick(10 * time.Millisecond) {
				for range 1000 {
					os.Stderr.Write(line)
				}
			}
		}()
	case "bigline":
		os.Stderr.Write(bytes.Repeat([]byte("y"), 10<<20))
		say("\n")
	case "mute":
		os.Stderr.Close()
		os.Stdout.Close()
	case "forks": // a process that leaves the group and keeps standard error open
		cmd := exec.Command("sleep", "60")
		cmd.Stderr = os.Stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		if err := cmd.Start(); err != nil {
			say("%v\n", err)
		}
	}
	serveFake()
}

// serveFake answers each query with the address 192.0.2.99 until the process ends.
func serveFake() {
	var addr, port string
	for _, a := range os.Args {
		if v, ok := strings.CutPrefix(a, "--listen-address="); ok {
			addr = v
		}
		if v, ok := strings.CutPrefix(a, "--port="); ok {
			port = v
		}
	}
	handler := dns.HandlerFunc(func(w dns.ResponseWriter, r *dns.Msg) {
		m := new(dns.Msg)
		m.SetReply(r)
		m.Answer = []dns.RR{&dns.A{
			Hdr: dns.RR_Header{Name: r.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET},
			A:   net.IPv4(192, 0, 2, 99),
		}}
		w.WriteMsg(m)
	})
	fmt.Fprintln(os.Stderr, dns.ListenAndServe(net.JoinHostPort(addr, port), "udp", handler))
	os.Exit(2)
}

// ask sends m to addr over UDP and returns the answer.
func ask(addr netip.AddrPort, m *dns.Msg, wait time.Duration) (*dns.Msg, error) {
	return askUntil(nil, addr, m, wait)
}

// testPatience is how long the tests wait for what should come soon: the machine may be busy.
const testPatience = 20 * time.Second

// eventually waits until cond is true, or fails the test after testPatience. cond is looked at once more then: the test itself may
// have been kept from running.
func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for deadline := time.Now().Add(testPatience); ; time.Sleep(2 * time.Millisecond) {
		last := time.Now().After(deadline)
		if cond() {
			return
		}
		if last {
			t.Fatalf("not within %s: %s", testPatience, what)
		}
	}
}

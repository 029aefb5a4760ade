package test

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// patience is how long the tests wait for what should come soon: the machine may be busy.
const patience = 15 * time.Second

// logBuffer keeps what CoreDNS writes.
type logBuffer struct {
	mu   sync.Mutex
	text []byte
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.text = append(b.text, p...)
	return len(p), nil
}

// mark is a place in the log: its end now.
func (b *logBuffer) mark() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.text)
}

// lines returns the complete lines from mark on that have all parts.
func (b *logBuffer) lines(mark int, parts ...string) []string {
	b.mu.Lock()
	text := string(b.text[mark:])
	b.mu.Unlock()
	var found []string
	for line := range strings.Lines(text) {
		if strings.HasSuffix(line, "\n") && !slices.ContainsFunc(parts, func(p string) bool { return !strings.Contains(line, p) }) {
			found = append(found, strings.TrimSuffix(line, "\n"))
		}
	}
	return found
}

// wait waits for a line from mark on that has all parts, and returns it.
func (b *logBuffer) wait(t *testing.T, mark int, parts ...string) string {
	t.Helper()
	within(t, patience, fmt.Sprintf("a log line with %q", parts), func() bool { return len(b.lines(mark, parts...)) > 0 })
	return b.lines(mark, parts...)[0]
}

// coreDNS is a running CoreDNS.
type coreDNS struct {
	logs *logBuffer
	port int           // of its first server block
	pid  int           //
	conf string        // path of the Corefile
	tmp  string        // its TMPDIR, and so the place of its staging
	done chan struct{} // closed when it has ended
	err  error         // how; valid after done
}

// at is c as it is asked at another of its ports; it doesn't tell how it ended (err may be being written).
func (c *coreDNS) at(port int) *coreDNS {
	return &coreDNS{logs: c.logs, port: port, pid: c.pid, conf: c.conf, tmp: c.tmp, done: c.done}
}

var lastPort atomic.Int64

// freePort returns a port of 127.0.0.1 that is free for UDP and TCP, once. It is below those that the kernel gives to
// clients, which would otherwise take it before its server does.
func freePort(t *testing.T) int {
	t.Helper()
	first := int64(20000 + os.Getpid()%100*100)
	for range 10000 {
		port := int(first + lastPort.Add(1)%2000)
		if udp, tcp, err := listenBoth(port); err == nil {
			udp.Close()
			tcp.Close()
			return port
		}
	}
	t.Fatal("no free port")
	return 0
}

func listenBoth(port int) (*net.UDPConn, net.Listener, error) {
	udp, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: port})
	if err != nil {
		return nil, nil, err
	}
	tcp, err := net.Listen("tcp", udp.LocalAddr().String())
	if err != nil {
		udp.Close()
	}
	return udp, tcp, err
}

// takenPort returns a port that the test holds until its end.
func takenPort(t *testing.T) int {
	t.Helper()
	for range 10 { // dnsmasq takes any port for a moment, to ask its servers
		port := freePort(t)
		if udp, tcp, err := listenBoth(port); err == nil {
			t.Cleanup(func() {
				udp.Close()
				tcp.Close()
			})
			return port
		}
	}
	t.Fatal("no free port")
	return 0
}

// tempDir is t.TempDir for processes of other users.
func tempDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp(base, "") //nolint:usetesting // t.TempDir's parents are closed to other users
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// server returns a server block for all zones on port, with the plugins in block. CoreDNS closes a TCP connection on which
// it hasn't read a query in 3 s, which on a busy machine may be one that is there; so it gets longer.
func server(port int, block string) string {
	return fmt.Sprintf(".:%d {\nbind 127.0.0.1\nerrors\n%s\ntimeouts {\nread 30s\n}\n}\n", port, block)
}

// start starts CoreDNS with one server block and waits until it listens.
func start(t *testing.T, block string) *coreDNS {
	t.Helper()
	port := freePort(t)
	return startAs(t, port, server(port, block))
}

// startAs starts CoreDNS with a Corefile, through the command wrap if there is one, and waits until it listens.
func startAs(t *testing.T, port int, corefile string, wrap ...string) *coreDNS {
	t.Helper()
	c := launch(t, port, corefile, wrap...)
	within(t, patience, "CoreDNS listens", func() bool {
		select {
		case <-c.done:
			t.Fatalf("CoreDNS ended: %v", c.err)
		default:
		}
		return len(c.logs.lines(0, "CoreDNS-")) > 0
	})
	return c
}

// launch starts CoreDNS. At the test's end it is ended, and no dnsmasq of its may be left.
func launch(t *testing.T, port int, corefile string, wrap ...string) *coreDNS {
	t.Helper()
	c := &coreDNS{
		logs: &logBuffer{}, port: port, tmp: tempDir(t),
		conf: filepath.Join(tempDir(t), "Corefile"), done: make(chan struct{}),
	}
	c.rewrite(t, corefile)
	argv := slices.Concat(wrap, []string{program(), "-conf", c.conf})
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), "TMPDIR="+c.tmp)
	cmd.Stdout, cmd.Stderr = c.logs, c.logs
	cmd.WaitDelay = 3 * time.Second
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	c.pid = cmd.Process.Pid
	go func() {
		c.err = cmd.Wait()
		close(c.done)
	}()
	t.Cleanup(func() {
		if t.Failed() {
			lines := c.logs.lines(0)
			t.Logf("log of CoreDNS (pid %d):\n%s", c.pid, strings.Join(lines[max(0, len(lines)-60):], "\n"))
		}
		if err := c.end(syscall.SIGTERM); err != nil {
			t.Error(err)
		}
		deadline := time.Now().Add(patience)
		for len(c.children()) > 0 && time.Now().Before(deadline) {
			time.Sleep(5 * time.Millisecond)
		}
		for _, p := range c.children() {
			t.Errorf("dnsmasq left: pid %d: %q", p.pid, p.args)
			_ = syscall.Kill(p.pid, syscall.SIGKILL)
		}
	})
	return c
}

// end sends sig, waits for CoreDNS's end, and kills it if that doesn't come.
func (c *coreDNS) end(sig syscall.Signal) error {
	select {
	case <-c.done:
		return nil
	default:
	}
	if err := syscall.Kill(c.pid, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
		return err
	}
	select {
	case <-c.done:
		return nil
	case <-time.After(patience):
		_ = syscall.Kill(c.pid, syscall.SIGKILL)
		<-c.done
		return fmt.Errorf("CoreDNS (pid %d) didn't end within %s of %v", c.pid, patience, sig)
	}
}

// ended tells whether CoreDNS has.
func (c *coreDNS) ended() bool {
	select {
	case <-c.done:
		return true
	default:
		return false
	}
}

// rewrite replaces the Corefile.
func (c *coreDNS) rewrite(t *testing.T, corefile string) {
	t.Helper()
	if err := os.WriteFile(c.conf, []byte(corefile), 0o644); err != nil {
		t.Fatal(err)
	}
}

// errors returns the errors in the log from mark on, but for a port that somebody took in between: nanny takes another.
func (c *coreDNS) errors(mark int) []string {
	return slices.DeleteFunc(c.logs.lines(mark, "[ERROR]"), func(line string) bool { return strings.Contains(line, "Address already in use") })
}

// children returns all dnsmasq processes of c, those for TCP too.
func (c *coreDNS) children() []process { return processes(c.tmp + "/nanny-") }

// services returns the dnsmasq processes that are to answer: neither those for TCP nor a --test.
func (c *coreDNS) services() []process {
	return slices.DeleteFunc(c.children(), func(p process) bool {
		return p.ppid != c.pid || slices.Contains(p.args, "--test") || !slices.ContainsFunc(p.args, func(a string) bool { return strings.HasPrefix(a, "--port=") })
	})
}

// child waits until there is exactly one dnsmasq that answers, and returns it.
func (c *coreDNS) child(t *testing.T) process {
	t.Helper()
	var list []process
	within(t, patience, "exactly one dnsmasq", func() bool {
		list = c.services()
		return len(list) == 1 && answers(list[0].addr())
	})
	return list[0]
}

// settled is child, once the log says that it is in service: then c.applied has all that came before.
func (c *coreDNS) settled(t *testing.T) process {
	t.Helper()
	p := c.child(t)
	within(t, patience, "the log says what is in service", func() bool {
		return len(c.logs.lines(0, "Configuration applied", fmt.Sprintf(" pid=%d ", p.pid))) > 0
	})
	return p
}

// stagesOnly waits until n staging directories are left.
func (c *coreDNS) stagesOnly(t *testing.T, n int) {
	t.Helper()
	var got []string
	defer func() {
		if len(got) != n {
			t.Logf("staging directories %q", got)
		}
	}()
	within(t, patience, fmt.Sprintf("%d staging directories", n), func() bool {
		got = c.staged(t)
		return len(got) == n
	})
}

// applied is how many configurations were put into service.
func (c *coreDNS) applied() int { return len(c.versions()) }

// versions are what the log has of the versions put into service, the newest last.
func (c *coreDNS) versions() []string {
	lines := c.logs.lines(0, "Configuration applied")
	for i, line := range lines {
		_, rest, _ := strings.Cut(line, "version=")
		lines[i], _, _ = strings.Cut(rest, " ")
	}
	return lines
}

// staged returns the staging directories that are left.
func (c *coreDNS) staged(t *testing.T) []string {
	t.Helper()
	left, err := filepath.Glob(c.tmp + "/nanny-*")
	if err != nil {
		t.Fatal(err)
	}
	return left
}

// user is whom CoreDNS runs as.
type user struct {
	name string
	wrap []string
}

// users are the test's own user, and, if that is root, an unprivileged one.
func users() []user {
	list := []user{{name: "own user"}}
	if os.Geteuid() == 0 {
		list = append(list, user{"uid 65534", []string{"setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"}})
	}
	return list
}

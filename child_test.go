package nanny

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode"
)

// lines collects what a child says.
type lines struct {
	mu  sync.Mutex
	all []string
}

func (l *lines) add(line string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, line)
}

func (l *lines) get() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.all)
}

// startFake starts a misbehaving child, which is ended with the test.
func startFake(t *testing.T, mode string, emit func(string)) *child {
	t.Helper()
	addr := freeAddr(t, "127.0.0.1")
	ch, err := start(command{
		path: fakeProgram(t, mode), port: port{addr: addr}, emit: emit,
		args: []string{"--listen-address=" + addr.Addr().String(), fmt.Sprintf("--port=%d", addr.Port())},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ch.stop(0) })
	return ch
}

func awaitFake(t *testing.T, ch *child) {
	t.Helper()
	if err := awaitReady(t.Context(), ch); err != nil {
		t.Fatal(err)
	}
}

// Its last line, without a newline, is the one that says why.
func TestChildLosesNoLineAtExit(t *testing.T) {
	for range 20 {
		var l lines
		ch := startFake(t, "lines", l.add)
		<-ch.done
		got := l.get()
		if len(got) != 5001 || got[5000] != "dnsmasq: bad option at line 3" {
			t.Fatalf("got %d lines, the last %q; want 5001, the last with the reason", len(got), got[max(0, len(got)-1)])
		}
		exit := (*exitError)(nil)
		if !errors.As(ch.err, &exit) || exit.status != "exited with status 1" || !strings.HasSuffix(exit.tail, "bad option at line 3") {
			t.Fatalf("got %v", ch.err)
		}
	}
}

func TestChildDeafToSIGTERM(t *testing.T) {
	ch := startFake(t, "deaf", func(string) {})
	awaitFake(t, ch)
	start := time.Now()
	ch.stop(200 * time.Millisecond)
	if took := time.Since(start); took < 200*time.Millisecond {
		t.Errorf("gone after %s, before the time to end by itself was over", took)
	}
	if !strings.Contains(ch.err.Error(), "killed") {
		t.Errorf("got %v, want a death by SIGKILL", ch.err)
	}
}

// One that was found hung while it is being stopped is killed at once.
func TestChildKilledWhileStopping(t *testing.T) {
	ch := startFake(t, "deaf", func(string) {})
	awaitFake(t, ch)
	start := time.Now()
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { ch.stop(10 * time.Second) })
	time.AfterFunc(100*time.Millisecond, func() { ch.stop(0) })
	<-ch.done
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("gone after %s", took)
	}
}

// The parent-death signal is tied to the thread that started the child (prctl(2)): the ends of other threads don't matter.
func TestChildOutlivesThreads(t *testing.T) {
	ch := startFake(t, "mute", func(string) {})
	awaitFake(t, ch)
	var wg sync.WaitGroup
	for range 200 {
		wg.Go(func() { runtime.LockOSThread() }) // the thread ends with the goroutine
	}
	wg.Wait()
	for range 10 {
		if _, err := ask(ch.addr, versionProbe(), testPatience); err != nil {
			t.Fatalf("the child is gone: %v", err)
		}
	}
}

// A process that left the group keeps standard error open: the end of the child is not held up by that.
func TestChildOutputHeldOpen(t *testing.T) {
	ch := startFake(t, "forks", func(string) {})
	awaitFake(t, ch)
	stopped := make(chan struct{})
	go func() {
		ch.stop(stopTime)
		close(stopped)
	}()
	select {
	case <-stopped:
	case <-time.After(10 * time.Second):
		t.Fatal("stop hangs while something else has standard error open")
	}
}

func TestChildFloods(t *testing.T) {
	var l lines
	ch := startFake(t, "flood", func(s string) {
		time.Sleep(50 * time.Microsecond) // a log slower than the child
		l.add(s[:1])
	})
	awaitFake(t, ch)
	for range 100 {
		if _, err := ask(ch.addr, versionProbe(), testPatience); err != nil {
			t.Fatalf("a child that floods its log doesn't answer: %v", err)
		}
	}
	ch.output.mu.Lock()
	size := ch.output.size
	ch.output.mu.Unlock()
	if size > maxBacklog {
		t.Errorf("%d bytes wait for the log, want at most %d", size, maxBacklog)
	}
}

func TestChildLongLine(t *testing.T) {
	var l lines
	ch := startFake(t, "bigline", l.add)
	awaitFake(t, ch)
	eventually(t, "the line is logged", func() bool { return len(l.get()) == 1 })
	line := l.get()[0]
	if len(line) > maxLogLine+100 || !strings.Contains(line, "[line cut: ") {
		t.Errorf("got a line of %d bytes that ends with %q", len(line), line[len(line)-50:])
	}
}

func TestChildControlCharacters(t *testing.T) {
	var l lines
	log := newLineLog(strings.NewReader("dnsmasq: for \x1b[31mred\x00 \u009bnames\tü\n"), l.add)
	<-log.logged
	const want = "dnsmasq: for ?[31mred? ?names\tü"
	if got := l.get(); !slices.Equal(got, []string{want}) {
		t.Errorf("got %q, want %q", got, want)
	}
	if got := log.tail(); got != want[len("dnsmasq: "):] {
		t.Errorf("got %q in errors", got)
	}
}

func TestChildClosesItsOutput(t *testing.T) {
	ch := startFake(t, "mute", func(string) {})
	awaitFake(t, ch)
	select {
	case <-ch.output.logged:
	case <-time.After(testPatience):
		t.Fatal("the end of its output isn't seen")
	}
	if _, err := ask(ch.addr, versionProbe(), testPatience); err != nil {
		t.Error(err)
	}
}

func TestChildEnvironment(t *testing.T) {
	t.Setenv("SECRET", "x")
	t.Setenv("TZ", "Europe/Berlin")
	ch := startFake(t, "mute", func(string) {})
	awaitFake(t, ch)
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", ch.pid))
	if err != nil {
		t.Fatal(err)
	}
	want := "PATH=" + os.Getenv("PATH") + "\x00LANG=C\x00TZ=Europe/Berlin\x00"
	if string(data) != want {
		t.Errorf("got %q, want %q", data, want)
	}
	if in, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/0", ch.pid)); err != nil || in != os.DevNull {
		t.Errorf("standard input is %s (%v)", in, err)
	}
}

func TestStartError(t *testing.T) {
	if _, err := start(command{path: "/nonexistent/dnsmasq"}); err == nil || !strings.Contains(err.Error(), "/nonexistent/dnsmasq") {
		t.Errorf("got %v, want an error that names the program", err)
	}
}

func TestLogLevel(t *testing.T) {
	for _, tt := range []struct{ line, want string }{
		{"dnsmasq[12]: started, version 2.90 cachesize 150", "info"},
		{"dnsmasq[12]: exiting on receipt of SIGTERM", "info"},
		{"dnsmasq[12]: query[A] failed.example.org from 127.0.0.1", "info"},
		{"dnsmasq[12]: server 127.0.0.1#53: queries sent 2, retried 0, failed 0, nxdomain replies 0, avg. latency 1ms", "info"},
		{"dnsmasq-dhcp[12]: DHCPACK(eth0) 192.0.2.7 00:00:5e:00:53:01 laptop", "info"},
		{"dnsmasq[12]: warning: no upstream servers configured", "warning"},
		{"dnsmasq[12]: Maximum number of concurrent DNS queries reached (max: 150)", "warning"},
		{"dnsmasq[12]: ignoring nameserver 127.0.0.1 - local interface", "warning"},
		{"dnsmasq[12]: NOT using nameserver 127.0.0.1#53 - query loop detected", "warning"},
		{"dnsmasq[12]: possible DNS-rebind attack detected: x.example.org", "warning"},
		{"dnsmasq: bad option at line 6 of /x/a.conf", "error"},
		{"dnsmasq: failed to create listening socket for 127.0.0.1: Address already in use", "error"},
		{"dnsmasq[12]: failed to load names from /x: No such file or directory", "error"},
		{"dnsmasq[12]: FAILED to start up", "error"},
		{"dnsmasq: cannot read /x: Permission denied", "error"},
		{"dnsmasq: unknown user or group: nosuch", "error"},
	} {
		_, text := splitPrefix(tt.line)
		got := "info"
		switch {
		case failure.MatchString(text):
			got = "error"
		case complaint.MatchString(text):
			got = "warning"
		}
		if got != tt.want {
			t.Errorf("%s: got level %s, want %s", tt.line, got, tt.want)
		}
	}
}

// FuzzLog: whatever the child writes, each of its lines is one of the log, not too long and harmless to a terminal.
func FuzzLog(f *testing.F) {
	f.Add([]byte("dnsmasq[1]: query[A] a.test from 127.0.0.1\n\ndnsmasq: bad option at line 1 of a.conf"))
	f.Add([]byte("dnsmasq-dhcp: \x1b[2J\x00\xff\r\n\u0085\u2028"))
	f.Add(bytes.Repeat([]byte("\xff"), maxLogLine+1))
	f.Fuzz(func(t *testing.T, output []byte) {
		lines := 0
		l := newLineLog(bytes.NewReader(output), func(line string) {
			lines++
			if strings.ContainsFunc(line, func(r rune) bool { return r != '\t' && unicode.IsControl(r) }) || len(line) > 4*maxLogLine {
				t.Errorf("got a line of %d bytes: %.300q", len(line), line)
			}
			logLine(line)
		})
		<-l.logged
		if most := bytes.Count(output, []byte("\n")) + 1; lines > most {
			t.Errorf("%d lines of at most %d", lines, most)
		}
		if tail := l.tail(); strings.Contains(tail, "\n") || len(tail) > 5000 {
			t.Errorf("the last lines are %.300q", tail)
		}
	})
}

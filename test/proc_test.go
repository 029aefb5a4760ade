package test

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// process is one running process.
type process struct {
	pid, ppid int
	args      []string
}

// arg returns the value of the argument that begins with prefix.
func (p process) arg(prefix string) string {
	for _, a := range p.args {
		if v, ok := strings.CutPrefix(a, prefix); ok {
			return v
		}
	}
	return ""
}

// addr is where a dnsmasq was told to answer.
func (p process) addr() string { return p.arg("--listen-address=") + ":" + p.arg("--port=") }

// processes returns the running processes with mark in an argument, sorted by pid. Zombies have no arguments.
func processes(mark string) []process {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		panic(err)
	}
	var list []process
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		cmdline, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err != nil || !strings.Contains(string(cmdline), mark) {
			continue
		}
		list = append(list, process{pid, stat(pid).ppid, strings.Split(strings.TrimRight(string(cmdline), "\x00"), "\x00")})
	}
	slices.SortFunc(list, func(a, b process) int { return a.pid - b.pid })
	return list
}

// procStat is what the tests need of /proc/PID/stat (proc(5)).
type procStat struct {
	state string
	ppid  int
	cpu   time.Duration // user and system
}

// stat returns the zero value for a process that is gone.
func stat(pid int) procStat {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return procStat{}
	}
	_, rest, _ := strings.Cut(string(data), ") ")
	f := strings.Fields(rest)
	num := func(i int) int {
		n, _ := strconv.Atoi(f[i])
		return n
	}
	return procStat{state: f[0], ppid: num(1), cpu: time.Duration(num(11)+num(12)) * 10 * time.Millisecond}
}

// alive tells whether pid runs and isn't a zombie.
func alive(pid int) bool {
	s := stat(pid).state
	return s != "" && s != "Z" && s != "X"
}

// zombies returns the children of pid that have ended and weren't waited for.
func zombies(pid int) []int {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		panic(err)
	}
	var list []int
	for _, e := range entries {
		if n, err := strconv.Atoi(e.Name()); err == nil {
			if st := stat(n); st.ppid == pid && st.state == "Z" {
				list = append(list, n)
			}
		}
	}
	return list
}

// udpDrops returns how many datagrams the kernel dropped because nobody read them in time from 127.0.0.1:port. Those
// never reached CoreDNS.
func udpDrops(t *testing.T, port int) int {
	t.Helper()
	data, err := os.ReadFile("/proc/net/udp")
	if err != nil {
		t.Fatal(err)
	}
	local, drops := fmt.Sprintf("0100007F:%04X", port), 0
	for line := range strings.Lines(string(data)) {
		f := strings.Fields(line)
		if len(f) > 12 && f[1] == local {
			n, _ := strconv.Atoi(f[len(f)-1])
			drops += n
		}
	}
	return drops
}

// together returns the processes of list that are in a second list, too. A look at /proc takes its time, in which one may end
// and its successor begin; those in two lists in a row were there at once, between them.
func together(list func() []process) []process {
	first := list()
	return slices.DeleteFunc(list(), func(p process) bool {
		return !slices.ContainsFunc(first, func(q process) bool { return q.pid == p.pid })
	})
}

// kill sends sig to a process that the test has started.
func kill(t *testing.T, pid int, sig syscall.Signal) {
	t.Helper()
	if err := syscall.Kill(pid, sig); err != nil {
		t.Fatalf("%v to pid %d: %v", sig, pid, err)
	}
}

// within waits until cond holds and returns how long that took; after limit the test fails. cond is looked at once more then:
// the test itself may have been kept from running.
func within(t *testing.T, limit time.Duration, what string, cond func() bool) time.Duration {
	t.Helper()
	for start := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		last := time.Since(start) > limit
		if cond() {
			return time.Since(start)
		}
		if last {
			t.Fatalf("not within %s: %s", limit, what)
		}
	}
}

// readFile returns what is in a file.
func readFile(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

package test

import (
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestFewCapabilities runs CoreDNS as root without some capabilities, as a container does.
func TestFewCapabilities(t *testing.T) {
	t.Parallel()
	needs(t, "setpriv")
	for _, tt := range []struct {
		missing string
		root    bool // dnsmasq is root
	}{
		{"-all", true},
		{"-setuid,-setgid", true},
		{"-kill", true},
		{"-net_admin,-net_raw,-net_bind_service", false},
	} {
		t.Run(tt.missing, func(t *testing.T) {
			t.Parallel()
			dir := configDir(t, map[string]string{"a.conf": "address=/kept.example/192.0.2.1\n", "a.hosts": "192.0.2.2 host.example\n"})
			port := freePort(t)
			c := startAs(t, port, server(port, watching(dir, fmt.Sprintf("listen 127.0.0.1:%d", freePort(t)))),
				"setpriv", "--bounding-set="+tt.missing, "--inh-caps=-all")
			c.waits(t, "kept.example", "192.0.2.1")
			child := c.child(t)
			if uid := owner(t, child.pid); (uid == 0) != tt.root {
				t.Errorf("dnsmasq has the uid %d", uid)
			}
			put(t, dir, "a.hosts", "192.0.2.3 host.example\n")
			c.waits(t, "host.example", "192.0.2.3")
			if now := c.child(t); now.pid != child.pid {
				t.Errorf("got pid %d, want %d: a SIGHUP is enough", now.pid, child.pid)
			}
			put(t, dir, "a.conf", "address=/kept.example/192.0.2.4\n")
			c.waits(t, "kept.example", "192.0.2.4")
			kill(t, c.child(t).pid, syscall.SIGSTOP)
			c.logs.wait(t, 0, "lives but answers nothing")
			c.waits(t, "kept.example", "192.0.2.4")
			if errs := c.logs.lines(0, "not permitted"); len(errs) > 0 {
				t.Errorf("in the log: %q", errs)
			}
			endsQuickly(t, c)
		})
	}
}

// TestMountedFile has a file that is a mount of its own, as with subPath: what replaces it outside isn't seen.
func TestMountedFile(t *testing.T) {
	t.Parallel()
	needs(t, "unshare")
	outside := tempDir(t)
	put(t, outside, "a.conf", "address=/mounted.example/192.0.2.1\n")
	dir := configDir(t, map[string]string{"a.conf": "# the file to mount on\n"})
	port := freePort(t)
	c := startAs(t, port, server(port, nanny("config "+dir+" 100ms")),
		"unshare", "-m", "sh", "-c", `mount --bind "$1" "$2" && shift 2 && exec "$@"`, "sh", filepath.Join(outside, "a.conf"), filepath.Join(dir, "a.conf"))
	c.waits(t, "mounted.example", "192.0.2.1")
	c.logs.wait(t, 0, "[WARNING]", filepath.Join(dir, "a.conf")+" is a mount of its own")
	put(t, outside, "a.conf", "address=/mounted.example/192.0.2.2\n")
	put(t, dir, "b.conf", "address=/other.example/192.0.2.3\n")
	c.waits(t, "other.example", "192.0.2.3")
	c.wants(t, "mounted.example", "192.0.2.1")
	if lines := c.logs.lines(0, "is a mount of its own"); len(lines) != 1 {
		t.Errorf("said of %q, want it once, of the mounted file", lines)
	}
}

// owner returns the effective user of a process.
func owner(t *testing.T, pid int) int {
	t.Helper()
	_, rest, _ := strings.Cut(readFile(t, fmt.Sprintf("/proc/%d/status", pid)), "\nUid:")
	uid, err := strconv.Atoi(strings.Fields(rest)[1])
	if err != nil {
		t.Fatal(err)
	}
	return uid
}

// TestFirstProcess runs CoreDNS as process 1 of a container, which has to wait for processes that it hasn't started: those
// that dnsmasq forks for TCP.
func TestFirstProcess(t *testing.T) {
	t.Parallel()
	needs(t, "unshare")
	dir := configDir(t, map[string]string{"a.conf": "address=/kept.example/192.0.2.1\n"})
	port := freePort(t)
	c := startAs(t, port, server(port, watching(dir)), "unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
	c.waits(t, "kept.example", "192.0.2.1")
	c.logs.wait(t, 0, "Configuration applied")
	var first, child process
	find := func() bool {
		list := slices.DeleteFunc(c.children(), func(p process) bool { return p.arg("--port=") == "" || slices.Contains(p.args, "--test") })
		if len(list) == 0 {
			return false
		}
		child = list[0]
		first.pid = child.ppid
		return true
	}
	for i := range 3 {
		within(t, patience, "dnsmasq is there", find)
		for range 3 {
			idleTCP(t, child.addr(), "kept.example")
		}
		old := child.pid
		want := fmt.Sprintf("192.0.2.%d", i+2)
		if i == 0 {
			kill(t, old, syscall.SIGKILL)
			want = "192.0.2.1"
		} else {
			put(t, dir, "a.conf", "address=/kept.example/"+want+"\n")
		}
		within(t, patience, "the old one and its processes are gone", func() bool {
			return len(c.children()) == 1 && find() && child.pid != old && len(zombies(first.pid)) == 0
		})
		c.waits(t, "kept.example", want)
	}
	begin := time.Now()
	kill(t, first.pid, syscall.SIGTERM)
	<-c.done
	if c.err != nil {
		t.Errorf("CoreDNS ended with %v", c.err)
	}
	if took := time.Since(begin); took > 8*time.Second {
		t.Errorf("CoreDNS took %s to end", took)
	}
}

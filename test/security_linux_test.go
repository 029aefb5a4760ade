package test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// TestLoopbackOnly: dnsmasq's port is on 127.0.0.1, whatever the directory says.
func TestLoopbackOnly(t *testing.T) {
	t.Parallel()
	dir := configDir(t, map[string]string{"a.conf": "listen-address=0.0.0.0\nlisten-address=127.0.0.2\nbind-dynamic\naddress=/kept.example/192.0.2.1\n"})
	c := start(t, watching(dir))
	c.waits(t, "kept.example", "192.0.2.1")
	port, err := strconv.Atoi(c.child(t).arg("--port="))
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, table := range []string{"udp", "udp6", "tcp", "tcp6"} {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", c.child(t).pid, table))
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(data)) {
			// The local address, in the order of the machine, and the remote one, which is 0 where somebody listens.
			fields := strings.Fields(line)
			if !strings.HasSuffix(fields[1], fmt.Sprintf(":%04X", port)) || !strings.HasSuffix(fields[2], ":0000") {
				continue
			}
			n++
			if !strings.HasPrefix(fields[1], "0100007F:") && !strings.HasPrefix(fields[1], "7F000001:") {
				t.Errorf("%s: dnsmasq listens on %s", table, fields[1])
			}
		}
	}
	if n != 2 {
		t.Errorf("%d sockets at dnsmasq's port, want one for UDP and one for TCP", n)
	}
}

// TestRootByAnotherName: the directory can't make dnsmasq run as a user with root's number.
func TestRootByAnotherName(t *testing.T) {
	t.Parallel()
	needs(t, "unshare")
	etc := tempDir(t)
	put(t, etc, "passwd", readFile(t, "/etc/passwd")+"toor:x:0:0::/:/bin/sh\nhalf:x:4711:0::/:/bin/sh\n")
	put(t, etc, "group", readFile(t, "/etc/group")+"wheel:x:0:\n")
	const mount = `mount --bind "$1/passwd" /etc/passwd && mount --bind "$1/group" /etc/group && shift && exec "$@"`
	dir := configDir(t, map[string]string{"a.conf": "address=/kept.example/192.0.2.1\n"})
	port := freePort(t)
	c := startAs(t, port, server(port, watching(dir)), "unshare", "-m", "sh", "-c", mount, "sh", etc)
	c.waits(t, "kept.example", "192.0.2.1")
	for i, line := range []string{"user=toor", "user=half", "group=wheel"} {
		put(t, dir, "a.conf", fmt.Sprintf("address=/kept.example/198.51.100.%d\n%s\n", i, line))
		c.waits(t, "kept.example", fmt.Sprintf("198.51.100.%d", i))
		c.logs.wait(t, 0, "[WARNING]", "a.conf:2: "+strings.Replace(line, "=", " ", 1)+" is root")
		ids := regexp.MustCompile(`(?m)^[UG]id:.*\t0\b.*`).FindAllString(readFile(t, fmt.Sprintf("/proc/%d/status", c.child(t).pid)), -1)
		if len(ids) > 0 {
			t.Errorf("%s: dnsmasq has %q", line, ids)
		}
	}
}

// TestStagingIsPrivate: another user can't read or change what dnsmasq reads.
func TestStagingIsPrivate(t *testing.T) {
	t.Parallel()
	dir := configDir(t, map[string]string{"a.conf": "address=/kept.example/192.0.2.1\n", "a.hosts": "192.0.2.2 b.example\n", "stubDomains": `{"c.example": ["192.0.2.53"]}`})
	c := start(t, watching(dir))
	c.waits(t, "kept.example", "192.0.2.1")
	n := 0
	for _, root := range c.staged(t) {
		err := filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
			if err != nil {
				return err
			}
			info, err := d.Info()
			if err != nil {
				return err
			}
			allowed := os.FileMode(0)
			if path == root {
				allowed = 0o001 // to reach its own directory, by a name that it knows
			}
			if got := info.Mode().Perm() & 0o007; got&^allowed != 0 {
				t.Errorf("%s: mode %s", path, info.Mode())
			}
			if !d.IsDir() {
				n++
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}
	if n < 4 {
		t.Errorf("%d files staged, want all", n)
	}
	if os.Geteuid() == 0 {
		conf := c.child(t).arg("--conf-file=")
		if out, err := exec.Command("setpriv", "--reuid=12345", "--regid=12345", "--clear-groups", "cat", conf).CombinedOutput(); err == nil {
			t.Errorf("another user reads %s: %s", conf, out)
		}
	}
}

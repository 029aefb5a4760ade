package test

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestHostileDirectory puts into the directory what isn't a file that can be read. What is in service stays, and the next
// good change is applied.
func TestHostileDirectory(t *testing.T) {
	t.Parallel()
	secret := filepath.Join(tempDir(t), "secret")
	if err := os.WriteFile(secret, []byte("s3cret:x:0\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	mkfifo := func(path string) error { return syscall.Mkfifo(path, 0o666) }
	for _, u := range users() {
		t.Run(u.name, func(t *testing.T) {
			t.Parallel()
			dir := configDir(t, map[string]string{"a.conf": "address=/kept.example/192.0.2.1\n"})
			port := freePort(t)
			c := startAs(t, port, server(port, nanny("config "+dir+" 300ms")), u.wrap...)
			c.waits(t, "kept.example", "192.0.2.1")
			c.logs.wait(t, 0, "Configuration applied")
			for i, tt := range []struct {
				name, file string
				make       func(path string) error
				rejected   string // in the error; "": the file is ignored and said
			}{
				{"FIFO", "fifo.conf", mkfifo, ""},
				{"FIFO with a name of kube-dns", "stubDomains", mkfifo, ""},
				{"socket", "socket.conf", func(path string) error {
					l, err := net.Listen("unix", path)
					if err == nil {
						t.Cleanup(func() { l.Close() })
					}
					return err
				}, ""},
				{"link to a device that never ends", "zero.hosts", func(path string) error { return os.Symlink("/dev/zero", path) }, ""},
				{"link to itself", "self.conf", func(path string) error { return os.Symlink("self.conf", path) }, "too many levels"},
				{"link to nothing", "dangling.conf", func(path string) error { return os.Symlink("nothing", path) }, "no such file"},
				{"link to another's file", "link.conf", func(path string) error { return os.Symlink(secret, path) }, "link.conf"},
				{"file for nobody", "closed.conf", func(path string) error { return os.WriteFile(path, []byte("bogus-option\n"), 0) }, "closed.conf"},
				{"more than 64 MiB", "big.hosts", func(path string) error {
					if err := os.WriteFile(path, nil, 0o644); err != nil {
						return err
					}
					return os.Truncate(path, 1<<40)
				}, "more than 64 MiB"},
			} {
				t.Run(tt.name, func(t *testing.T) {
					mark, path := c.logs.mark(), filepath.Join(dir, tt.file)
					if err := tt.make(path); err != nil {
						t.Fatal(err)
					}
					if tt.rejected == "" {
						c.logs.wait(t, mark, "[INFO]", tt.file, "is ignored")
					} else {
						line := c.logs.wait(t, mark, "[ERROR]", "Configuration rejected, the one before stays in service", tt.rejected)
						if strings.Contains(line, "s3cret") {
							t.Errorf("the error shows what is in the file: %s", line)
						}
					}
					c.wants(t, "kept.example", "192.0.2.1")
					if err := os.Remove(path); err != nil {
						t.Fatal(err)
					}
					put(t, dir, "b.conf", fmt.Sprintf("address=/new.example/198.51.100.%d\n", i+1))
					c.waits(t, "new.example", fmt.Sprintf("198.51.100.%d", i+1))
					c.wants(t, "kept.example", "192.0.2.1")
				})
			}
			t.Run("a file that can be read later", func(t *testing.T) {
				path := filepath.Join(dir, "late.conf")
				if err := os.WriteFile(path, []byte("address=/late.example/192.0.2.9\n"), 0); err != nil {
					t.Fatal(err)
				}
				if u.wrap != nil {
					c.logs.wait(t, 0, "[ERROR]", "late.conf", "permission denied")
				}
				if err := os.Chmod(path, 0o644); err != nil {
					t.Fatal(err)
				}
				c.waits(t, "late.example", "192.0.2.9")
			})
			t.Run("a file in the directory's place", func(t *testing.T) {
				mark := c.logs.mark()
				if err := os.Rename(dir, dir+".away"); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(dir, []byte("address=/kept.example/192.0.2.66\n"), 0o644); err != nil {
					t.Fatal(err)
				}
				c.logs.wait(t, mark, "[ERROR]", "Configuration rejected, the one before stays in service", "not a directory")
				c.wants(t, "kept.example", "192.0.2.1")
				if err := os.Remove(dir); err != nil {
					t.Fatal(err)
				}
				put(t, dir+".away", "b.conf", "address=/new.example/198.51.100.200\n")
				if err := os.Rename(dir+".away", dir); err != nil {
					t.Fatal(err)
				}
				c.waits(t, "new.example", "198.51.100.200")
			})
			c.child(t)
		})
	}
}

// TestHostileLines has lines in a *.hosts and a *.conf that dnsmasq cuts, refuses or reads in another way than one who looks at
// them. The line after them holds, and what was in service.
func TestHostileLines(t *testing.T) {
	t.Parallel()
	dir := configDir(t, map[string]string{"a.conf": "address=/kept.example/192.0.2.1\n"})
	c := start(t, watching(dir))
	c.waits(t, "kept.example", "192.0.2.1")
	for i, tt := range []struct{ name, file, line, said string }{
		{"a name of 1 MB", "a.hosts", "192.0.2.9 " + strings.Repeat("a", 1<<20), "bad name at " + dir + "/a.hosts line 1"},
		{"1 MB of names", "a.hosts", "192.0.2.9" + strings.Repeat(" a.example", 1<<17), ""},
		{"1 MB of another kind", "a.hosts", strings.Repeat("x", 1<<20) + "=y", "bad address at " + dir + "/a.hosts line 1"},
		{"a directive", "a.hosts", "address=/kept.example/192.0.2.66", "bad address at " + dir + "/a.hosts line 1"},
		{"NUL in a hosts file", "a.hosts", "192.0.2.9 a.example\x00b", ""},
		{"carriage return in a hosts file", "a.hosts", "192.0.2.9 a.example\r", ""},
		{"NUL", "b.conf", "address=/a.example/192.0.2.9\x00", ""},
		{"carriage return", "b.conf", "address=/a.example/192.0.2.9\r", ""},
		{"a setting of nanny's own after NUL", "b.conf", "# \x00\nport=1", dir + "/b.conf:2: port is set by nanny"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			mark, address := c.logs.mark(), fmt.Sprintf("198.51.100.%d", i+1)
			last := "address=/new.example/" + address
			if tt.file == "a.hosts" {
				last = address + " new.example"
			}
			put(t, dir, tt.file, tt.line+"\n"+last+"\n")
			c.waits(t, "new.example", address)
			c.wants(t, "kept.example", "192.0.2.1")
			if tt.said != "" {
				c.logs.wait(t, mark, tt.said)
			}
			for _, line := range c.logs.lines(mark) {
				if len(line) > 1500 {
					t.Errorf("a line of %d bytes in the log: %.300s", len(line), line)
				}
			}
			remove(t, dir, tt.file)
			c.waits(t, "new.example", "REFUSED")
		})
	}
}

// TestGrowingFile reads a file while it grows: what is there by then is no error, and all of it is in service in the end.
func TestGrowingFile(t *testing.T) {
	t.Parallel()
	dir := configDir(t, map[string]string{"a.conf": "address=/kept.example/192.0.2.1\n", "grows.conf": ""})
	c := start(t, watching(dir))
	c.waits(t, "kept.example", "192.0.2.1")
	f, err := os.OpenFile(filepath.Join(dir, "grows.conf"), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	mark := c.logs.mark()
	lines := 0
	for begin := time.Now(); time.Since(begin) < 2*time.Second; lines++ { // less than it may keep changing
		if _, err := fmt.Fprintf(f, "address=/g%d.example/192.0.2.2\n", lines); err != nil {
			t.Fatal(err)
		}
		c.wants(t, "kept.example", "192.0.2.1")
	}
	c.waits(t, fmt.Sprintf("g%d.example", lines-1), "192.0.2.2")
	if errs := c.errors(mark); len(errs) > 0 {
		t.Errorf("errors in the log: %q", errs)
	}
	t.Logf("%d configurations applied for %d lines", c.applied(), lines)
}

// startSmall is start with 64 KiB for staging.
func startSmall(t *testing.T, block string) *coreDNS {
	t.Helper()
	port := freePort(t)
	return startAs(t, port, server(port, block),
		"unshare", "-m", "sh", "-c", `mount -t tmpfs -o size=64k,mode=1777 tmpfs "$TMPDIR" && exec "$@"`, "sh")
}

// TestStagingFull has no room for what a change needs, with a swap and in place.
func TestStagingFull(t *testing.T) {
	t.Parallel()
	needs(t, "unshare")
	for _, tt := range []struct{ name, property string }{
		{"swap", "timeout 5s"},
		{"in place", fmt.Sprintf("listen 127.0.0.1:%d", freePort(t))},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			dir := configDir(t, map[string]string{"a.conf": "address=/kept.example/192.0.2.1\n", "a.hosts": "192.0.2.2 host.example\n"})
			c := startSmall(t, watching(dir, tt.property))
			c.waits(t, "kept.example", "192.0.2.1")
			c.logs.wait(t, 0, "Configuration applied")
			child := c.child(t)

			put(t, dir, "b.hosts", "192.0.2.3 small.example\n"+strings.Repeat("#"+strings.Repeat("x", 99)+"\n", 2000))
			c.logs.wait(t, 0, "[ERROR]", "Configuration not applied, to be tried again", "b.hosts", "no space left on device")
			c.wants(t, "kept.example", "192.0.2.1")
			c.wants(t, "host.example", "192.0.2.2")
			if now := c.child(t); now.pid != child.pid {
				t.Errorf("got pid %d, want %d: nothing was to happen", now.pid, child.pid)
			}
			kill(t, child.pid, syscall.SIGKILL) // what can't be applied doesn't keep the configuration in service from a new start
			c.waits(t, "kept.example", "192.0.2.1")
			remove(t, dir, "b.hosts")
			put(t, dir, "a.hosts", "192.0.2.4 host.example\n")
			c.waits(t, "host.example", "192.0.2.4")
			c.wants(t, "small.example", "REFUSED")
			c.wants(t, "kept.example", "192.0.2.1")
		})
	}
}

// TestStagingFullAtStart has no room for what the directory holds from the beginning: what fits is served, all once there is
// room.
func TestStagingFullAtStart(t *testing.T) {
	t.Parallel()
	needs(t, "unshare")
	for _, tt := range []struct{ name, property string }{
		{"swap", "timeout 5s"},
		{"in place", fmt.Sprintf("listen 127.0.0.1:%d", freePort(t))},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			dir := configDir(t, map[string]string{"a.hosts": "192.0.2.2 host.example\n" + strings.Repeat("#"+strings.Repeat("x", 99)+"\n", 2000)})
			c := startSmall(t, watching(dir, tt.property, "args --no-resolv --no-hosts --address=/args.example/192.0.2.1"))
			c.waits(t, "args.example", "192.0.2.1")
			c.logs.wait(t, 0, "[ERROR]", "Configuration not applied, to be tried again", "no space left on device")
			c.wants(t, "host.example", "REFUSED")
			if out, err := exec.Command("nsenter", "-t", strconv.Itoa(c.pid), "-m", "mount", "-o", "remount,size=1m", c.tmp).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			c.waits(t, "host.example", "192.0.2.2")
			c.wants(t, "args.example", "192.0.2.1")
		})
	}
}

// TestFewFiles has no more than a few file descriptors left, from none to more than a change needs. Whatever fails for it is
// tried again.
func TestFewFiles(t *testing.T) {
	t.Parallel()
	dir := configDir(t, map[string]string{"a.conf": "address=/kept.example/192.0.2.1\n"})
	c := start(t, nanny("config "+dir+" 300ms"))
	c.waits(t, "kept.example", "192.0.2.1")
	c.logs.wait(t, 0, "Configuration applied")
	limit := func(files int) {
		t.Helper()
		if err := unix.Prlimit(c.pid, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(files), Max: 4096}, nil); err != nil {
			t.Fatal(err)
		}
	}
	for left := range 12 {
		address, mark := fmt.Sprintf("192.0.2.%d", left+2), c.logs.mark()
		limit(openFiles(t, c.pid) + left)
		put(t, dir, "b.conf", "address=/new.example/"+address+"\n")
		within(t, patience, "the change is applied or fails", func() bool {
			return c.says("new.example") == address || len(c.logs.lines(mark, "too many open files")) > 0
		})
		c.wants(t, "kept.example", "192.0.2.1")
		limit(4096)
		c.waits(t, "new.example", address)
	}
	if len(c.logs.lines(0, "Configuration not applied, to be tried again", "too many open files")) == 0 {
		t.Error("nothing failed")
	}
	child := c.child(t).pid
	limit(0) // nor can it be asked then whether it lives
	for begin := time.Now(); time.Since(begin) < 4*time.Second; time.Sleep(100 * time.Millisecond) {
		if now := c.services(); len(now) != 1 || now[0].pid != child {
			t.Fatalf("got %v, want pid %d in service", now, child)
		}
	}
}

// TestNoInotify has no watches or no instances of inotify left. A user namespace has its own number of them.
func TestNoInotify(t *testing.T) {
	t.Parallel()
	needs(t, "unshare", "setpriv")
	for _, tt := range []struct{ limit, reason string }{
		{"max_inotify_watches", "no space left on device"},
		{"max_inotify_instances", "too many open files"},
	} {
		t.Run(tt.limit, func(t *testing.T) {
			t.Parallel()
			dir := configDir(t, map[string]string{"a.conf": "address=/kept.example/192.0.2.1\n"})
			port := freePort(t)
			// Without CAP_SETUID, as the namespace has no user but root for dnsmasq.
			c := startAs(t, port, server(port, nanny("config "+dir+" 300ms")),
				"unshare", "-U", "-r", "sh", "-c", `echo 0 >/proc/sys/user/`+tt.limit+` && exec setpriv --bounding-set=-setuid "$@"`, "sh")
			c.waits(t, "kept.example", "192.0.2.1")
			c.logs.wait(t, 0, "[WARNING]", "No change notifications for "+dir+", looking at it at intervals only: ", tt.reason)
			put(t, dir, "b.conf", "address=/new.example/192.0.2.2\n")
			c.waits(t, "new.example", "192.0.2.2")
			if n := len(c.logs.lines(0, "No change notifications")); n != 1 {
				t.Errorf("said %d times, want once", n)
			}
		})
	}
}

// TestOddNames has file names that mean something to a shell, to dnsmasq's command line or to its configuration.
func TestOddNames(t *testing.T) {
	t.Parallel()
	dir := configDir(t, map[string]string{"a.conf": "address=/kept.example/192.0.2.1\n"})
	c := start(t, watching(dir))
	c.waits(t, "kept.example", "192.0.2.1")
	for i, name := range []string{"a,b", "a b", "a#b", "#a", "a'b", `a"b`, `a\b`, "a;b", "$(false)", "-a", "a=b", "*", "%s%n", "\u00e4"} {
		name, address := name+".conf", fmt.Sprintf("192.0.2.%d", i+2)
		put(t, dir, name, "address=/new.example/"+address+"\n")
		c.waits(t, "new.example", address)
		remove(t, dir, name)
	}
	put(t, dir, "a\nconf-file=b.conf", "address=/new.example/192.0.2.66\n")
	put(t, dir, "b.conf", "address=/last.example/192.0.2.1\n")
	c.waits(t, "last.example", "192.0.2.1")
	c.wants(t, "new.example", "REFUSED")
	if errs := c.errors(0); len(errs) > 0 {
		t.Errorf("errors in the log: %q", errs)
	}
}

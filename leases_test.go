package nanny

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

func TestFindLeases(t *testing.T) {
	const served = "dhcp-range=192.0.2.100,192.0.2.200\n"
	for _, tc := range []struct {
		name, conf string
		args       []string
		want       leases
	}{
		{"no DHCP", "dhcp-leasefile=/srv/leases\n", nil, leases{}},
		{"default", served, nil, leases{path: defaultLeases, isDefault: true}},
		{"default, named", served + "dhcp-leasefile=/var/lib//misc/dnsmasq.leases\n", nil, leases{path: defaultLeases, isDefault: true}},
		{"in the directory", served + "dhcp-leasefile=/srv/leases\n", nil, leases{path: "/srv/leases", watched: "a.conf:2"}},
		{"in args", served, []string{"-l", "/srv/leases"}, leases{path: "/srv/leases"}},
		{"in args, without a /", "", []string{"--dhcp-leasefile=srv/leases", "--dhcp-range=::,static"}, leases{path: "/srv/leases"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got := findLeases(slices.AppendSeq(parseArgs(tc.args), parseConf("a.conf", []byte(tc.conf)))); got != tc.want {
				t.Errorf("got %+v, want %+v", got, tc.want)
			}
		})
	}
}

func TestPrepareLeases(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root gives files away")
	}
	child := privileges{switchUser: true, uid: 12345, gid: 12346}
	const none = -1
	for _, tc := range []struct {
		name  string
		path  string // below a new directory
		l     leases
		p     privileges
		setup func(dir string) error
		fails string
		owner int // of path afterwards; none: there is none
	}{
		{name: "made", path: "leases", p: child, owner: 12345},
		{name: "made with its directory", path: "a/b/leases", p: child, owner: 12345},
		{name: "default, made", path: "a/leases", l: leases{isDefault: true}, p: child, owner: 12345},
		{name: "named by the directory", path: "leases", l: leases{watched: "a.conf:1"}, p: child, owner: none},
		{name: "dnsmasq is CoreDNS's own user", path: "leases", owner: none},
		{name: "dnsmasq is root", path: "leases", p: privileges{switchUser: true, gid: 1}, owner: none},
		{name: "there, another's", path: "leases", p: child, setup: file0("leases"), owner: 0},
		{name: "default, there", path: "leases", l: leases{isDefault: true}, p: child, setup: file0("leases"), owner: 12345},
		{name: "default, a second name of another file", path: "leases", l: leases{isDefault: true}, p: child, fails: "with one name", owner: 0,
			setup: func(dir string) error {
				return errors.Join(file0("other")(dir), os.Link(filepath.Join(dir, "other"), filepath.Join(dir, "leases")))
			}},
		{name: "default, a FIFO", path: "leases", l: leases{isDefault: true}, p: child, fails: "not a regular file", owner: 0,
			setup: func(dir string) error { return syscall.Mkfifo(filepath.Join(dir, "leases"), 0o600) }},
		{name: "default, a directory", path: "leases", l: leases{isDefault: true}, p: child, fails: "is a directory", owner: 0,
			setup: func(dir string) error { return os.Mkdir(filepath.Join(dir, "leases"), 0o755) }},
		{name: "a link", path: "leases", l: leases{isDefault: true}, p: child, fails: "symbolic links", owner: none,
			setup: func(dir string) error {
				return os.Symlink(filepath.Join(dir, "made"), filepath.Join(dir, "leases"))
			}},
		{name: "a link to a file", path: "leases", l: leases{isDefault: true}, p: child, fails: "symbolic links", owner: 0,
			setup: func(dir string) error {
				return errors.Join(file0("other")(dir), os.Symlink("other", filepath.Join(dir, "leases")))
			}},
		{name: "a link on the way", path: "way/leases", p: child, fails: "way: not a directory", owner: none,
			setup: func(dir string) error {
				return errors.Join(os.Mkdir(filepath.Join(dir, "to"), 0o755), os.Symlink("to", filepath.Join(dir, "way")))
			}},
		{name: "a file on the way", path: "way/leases", p: child, fails: "way: not a directory", owner: none, setup: file0("way")},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dir := t.TempDir()
			if tc.setup != nil {
				if err := tc.setup(dir); err != nil {
					t.Fatal(err)
				}
			}
			l := tc.l
			l.path = filepath.Join(dir, tc.path)
			err := l.prepare(tc.p)
			if (err != nil) != (tc.fails != "") || (err != nil && !strings.Contains(err.Error(), tc.fails)) {
				t.Errorf("got error %v, want %q", err, tc.fails)
			}
			owner := none
			if info, err := os.Stat(l.path); err == nil {
				owner = int(info.Sys().(*syscall.Stat_t).Uid)
				if owner == 12345 && info.Mode() != 0o644 {
					t.Errorf("got mode %v", info.Mode())
				}
			}
			if owner != tc.owner {
				t.Errorf("got owner %d, want %d", owner, tc.owner)
			}
			if _, err := os.Stat(filepath.Join(dir, "made")); err == nil {
				t.Error("the link's target was made")
			}
		})
	}
}

// file0 makes an empty file called name.
func file0(name string) func(dir string) error {
	return func(dir string) error { return os.WriteFile(filepath.Join(dir, name), nil, 0o644) }
}

func TestLeasesAdvice(t *testing.T) {
	refused := &exitError{status: "exited with status 3", tail: "dnsmasq: cannot open or create lease file /srv/leases: Permission denied"}
	other := privileges{switchUser: true, uid: 12345}
	for _, tc := range []struct {
		name      string
		l         leases
		p         privileges
		preparing error
		err       error
		want      string
	}{
		{"another error", leases{}, other, nil, errors.New("something else"), ""},
		{"not made writable", leases{}, other, errors.New("read-only file system"), refused, "couldn't be made writable for dnsmasq: read-only"},
		{"named by the directory", leases{watched: "a.conf:3"}, other, nil, refused, "a.conf:3: only the default file"},
		{"there, another's", leases{}, other, nil, refused, "writable for the user with the number 12345"},
		{"not root", leases{isDefault: true}, privileges{}, nil, refused, "the user that CoreDNS runs as"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := tc.l.advice(tc.err, tc.p, tc.preparing)
			if !errors.Is(got, tc.err) || (tc.want == "") != (got.Error() == tc.err.Error()) || !strings.Contains(got.Error(), tc.want) {
				t.Errorf("got %v, want %q in it", got, tc.want)
			}
		})
	}
}

// The watched directory may name any file for the leases.
func TestCountLeases(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "leases", "1 02:00:00:00:00:01 192.0.2.1 laptop *\n2 02:00:00:00:00:02 192.0.2.2 * *\nduid 00:01\n3 4 2001:db8::1 laptop 00:02\n")
	if err := syscall.Mkfifo(filepath.Join(dir, "fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]float64{
		filepath.Join(dir, "leases"): 3, filepath.Join(dir, "fifo"): -1, filepath.Join(dir, "none"): -1, "/dev/zero": -1, dir: -1, "": -1,
	} {
		n, ok := countLeases(&running{leases: leases{path: path}})
		if ok != (want >= 0) || (ok && n != want) {
			t.Errorf("%q: got %v, %v, want %v", path, n, ok, want)
		}
	}
}

// A scrape may come while SIGHUP gives the child another configuration.
func TestCountLeasesWhileChanged(t *testing.T) {
	b := newBench(t, spec{listen: freeAddr(t, "127.0.0.1")}, settings{}, map[string]string{"a.hosts": "192.0.2.1 h.test\n"})
	b.await("h.test", "192.0.2.1")
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
				countLeases(b.stats.run.Load())
			}
		}
	})
	b.write("a.hosts", "192.0.2.2 h.test\n")
	eventually(t, "the change is applied", func() bool { return b.reloads("applied") == 1 })
	close(stop)
	wg.Wait()
}

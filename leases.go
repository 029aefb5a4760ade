package nanny

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// defaultLeases is where Debian's dnsmasq keeps its leases.
const defaultLeases = "/var/lib/misc/dnsmasq.leases"

// leases is the file in which dnsmasq keeps its leases.
type leases struct {
	path      string // empty: no DHCP
	isDefault bool   // its path is the default one
	watched   string // where the watched directory names another: "a.conf:3"
}

// findLeases gives the lease file, if dnsmasq serves DHCP.
func findLeases(ds []directive) leases {
	l, serves := leases{path: defaultLeases, isDefault: true}, false
	for _, d := range ds {
		switch d.name {
		case "dhcp-range":
			serves = true
		case "dhcp-leasefile", "dhcp-lease":
			l = leases{path: filepath.Join("/", cmp.Or(d.value, defaultLeases))} // / is the child's working directory
			l.isDefault = l.path == defaultLeases
			if d.watched() && !l.isDefault {
				l.watched = d.at()
			}
		}
	}
	if !serves {
		return leases{}
	}
	return l
}

// prepare lets the child's user write the lease file: as root, dnsmasq opens it before it changes its user; here it never
// is root. Only the default file and one that args names are made, since otherwise who may write the watched directory
// could have root make files; and of files that exist, only the default one changes its owner.
func (l leases) prepare(p privileges) error {
	if l.path == "" || l.watched != "" || !p.switchUser || p.uid == 0 {
		return nil
	}
	dir, err := openDir(filepath.Dir(l.path))
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	const flags = unix.O_RDWR | unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_CLOEXEC
	fd, err := unix.Openat(dir, filepath.Base(l.path), flags|unix.O_CREAT|unix.O_EXCL, 0o644)
	made := err == nil
	if errors.Is(err, unix.EEXIST) {
		fd, err = unix.Openat(dir, filepath.Base(l.path), flags, 0)
	}
	if err != nil {
		return &os.PathError{Op: "open", Path: l.path, Err: err}
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return &os.PathError{Op: "stat", Path: l.path, Err: err}
	}
	if st.Uid == p.uid || (!made && !l.isDefault) {
		return nil
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Nlink != 1 {
		return fmt.Errorf("%s: not a regular file with one name", l.path)
	}
	if err := unix.Fchown(fd, int(p.uid), int(p.gid)); err != nil {
		return &os.PathError{Op: "chown", Path: l.path, Err: err}
	}
	return nil
}

// openDir opens the directory at the absolute path, making what is missing of it. It follows no link, by which somebody who
// may write a directory on the way could choose where root makes a file.
func openDir(path string) (int, error) {
	const flags = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC
	dir, err := unix.Open("/", flags, 0)
	if err != nil {
		return -1, &os.PathError{Op: "open", Path: "/", Err: err}
	}
	at := "/"
	for name := range strings.SplitSeq(strings.Trim(path, "/"), "/") {
		if name == "" {
			break
		}
		at = filepath.Join(at, name)
		next, err := unix.Openat(dir, name, flags, 0)
		if errors.Is(err, unix.ENOENT) {
			if err = unix.Mkdirat(dir, name, 0o755); err == nil || errors.Is(err, unix.EEXIST) {
				next, err = unix.Openat(dir, name, flags, 0)
			}
		}
		unix.Close(dir)
		if err != nil {
			return -1, fmt.Errorf("the way to the lease file has to be of directories, without links: %w",
				&os.PathError{Op: "open", Path: at, Err: err})
		}
		dir = next
	}
	return dir, nil
}

// advice says what to do if a child that runs with p has ended with err because of its lease file. preparing is prepare's
// error.
func (l leases) advice(err error, p privileges, preparing error) error {
	exit := (*exitError)(nil)
	if !errors.As(err, &exit) || !strings.Contains(exit.tail, "lease file") {
		return err
	}
	switch {
	case preparing != nil:
		return fmt.Errorf("%w (it couldn't be made writable for dnsmasq: %w)", err, preparing)
	case p.switchUser && l.watched != "":
		return fmt.Errorf("%w (%s: only the default file and one that args names are made; "+
			"make this one, and give it to the user with the number %d)", err, l.watched, p.uid)
	case p.switchUser:
		return fmt.Errorf("%w (it has to be writable for the user with the number %d)", err, p.uid)
	}
	return fmt.Errorf("%w (the user that CoreDNS runs as has to be able to write it; dhcp-leasefile names another)", err)
}

// countLeases counts the leases of run, if it serves DHCP.
func countLeases(run *running) (float64, bool) {
	if run == nil || run.leases.path == "" {
		return 0, false
	}
	var data bytes.Buffer
	n, err := readFile(run.leases.path, maxConfig, &data) // the watched directory may name any file
	if err != nil || n > maxConfig {
		return 0, false
	}
	lines := bytes.Split(data.Bytes(), []byte("\n"))
	lines = slices.DeleteFunc(lines, func(line []byte) bool {
		return len(line) == 0 || bytes.HasPrefix(line, []byte("duid ")) // the server's own DHCPv6 id
	})
	return float64(len(lines)), true
}

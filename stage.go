package nanny

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// staging is the private directory with what children read. Each child has a directory of its own in it, so that
// what was checked is what is served, and what is served doesn't change under it.
type staging struct {
	root string
	lock *os.File // root itself, with a lock while it is in use; systemd-tmpfiles(8), too, spares a directory that has one
	last int
}

const (
	stagingPrefix = "nanny-"
	stagingMark   = "staging" // an empty file: what has it is a staging directory
)

// newStaging makes the directory below os.TempDir, and removes those that a CoreDNS which was killed has left there.
func newStaging() (*staging, error) {
	removeStale()
	s := new(staging)
	return s, s.make()
}

func (s *staging) make() (err error) {
	if s.root, err = os.MkdirTemp("", stagingPrefix); err != nil {
		return fmt.Errorf("no staging directory (set TMPDIR to a directory that can be written): %w", err)
	}
	if strings.Contains(s.root, ",") { // dnsmasq would split it
		return errors.Join(fmt.Errorf("staging directory %s: TMPDIR may not contain a comma", s.root), os.Remove(s.root))
	}
	s.lock, err = lockDir(s.root, unix.LOCK_EX)
	if err == nil {
		// A child of another user has to reach its own directory; the names stay unreadable.
		err = os.Chmod(s.root, 0o711) // #nosec G302
	}
	if err == nil { // last: what has the mark and no lock is stale
		err = os.WriteFile(filepath.Join(s.root, stagingMark), nil, 0o600)
	}
	if err != nil {
		s.close()
		return fmt.Errorf("staging directory: %w", err)
	}
	return nil
}

// there tells whether nobody has removed the directory.
func (s *staging) there() bool {
	ours, err := s.lock.Stat()
	if err != nil {
		return false
	}
	now, err := os.Lstat(s.root)
	return err == nil && os.SameFile(ours, now)
}

// lockDir opens a directory and locks it; how is flock(2)'s operation.
func lockDir(path string, how int) (*os.File, error) {
	dir, err := os.OpenFile(path, os.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW, 0) // #nosec G304
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(dir.Fd()), how); err != nil {
		return nil, errors.Join(err, dir.Close())
	}
	return dir, nil
}

// removeStale removes the staging directories of this user whose lock nobody holds.
func removeStale() {
	marks, _ := filepath.Glob(filepath.Join(os.TempDir(), stagingPrefix+"*", stagingMark))
	for _, mark := range marks {
		path := filepath.Dir(mark)
		dir, err := lockDir(path, unix.LOCK_EX|unix.LOCK_NB)
		if err != nil {
			continue
		}
		if info, err := dir.Stat(); err == nil {
			if st, ok := info.Sys().(*syscall.Stat_t); ok && int(st.Uid) == os.Geteuid() {
				_ = os.RemoveAll(path)
			}
		}
		dir.Close()
	}
}

// write stages c in a new directory that c's user can read, and returns its path.
func (s *staging) write(c *config) (string, error) {
	if !s.there() {
		log.Warningf("Somebody has removed the staging directory %s; another one is made", s.root)
		s.lock.Close()
		if err := s.make(); err != nil {
			return "", &transientError{err}
		}
	}
	s.last++
	dir := filepath.Join(s.root, strconv.Itoa(s.last))
	err := func() error {
		for _, d := range []string{"", confDir, hostsDir} {
			if err := makeReadable(os.Mkdir(filepath.Join(dir, d), 0o750), filepath.Join(dir, d), c.priv); err != nil {
				return err
			}
		}
		for path, text := range c.files {
			if err := writeStaged(filepath.Join(dir, path), text, c.priv); err != nil {
				return err
			}
		}
		return nil
	}()
	if err != nil {
		return "", &transientError{errors.Join(fmt.Errorf("staging: %w", err), os.RemoveAll(dir))}
	}
	return dir, nil
}

// update brings dir from old's files to next's, each by a rename. If it fails, dir is as it was.
func (s *staging) update(dir string, old, next *config) error {
	const fresh = "~" // dnsmasq skips names that end so
	var paths []string
	for path, text := range next.files {
		if was, ok := old.files[path]; ok && was.sum == text.sum && exists(filepath.Join(dir, path)) {
			continue
		}
		paths = append(paths, filepath.Join(dir, path))
		if err := writeStaged(paths[len(paths)-1]+fresh, text, next.priv); err != nil {
			for _, p := range paths {
				_ = os.Remove(p + fresh)
			}
			return fmt.Errorf("staging: %w", err)
		}
	}
	for _, p := range paths {
		if err := os.Rename(p+fresh, p); err != nil {
			return fmt.Errorf("staging: %w", err)
		}
	}
	for path := range old.files {
		if _, ok := next.files[path]; !ok {
			if err := os.Remove(filepath.Join(dir, path)); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("staging: %w", err)
			}
		}
	}
	return nil
}

// remove removes one child's directory.
func (s *staging) remove(dir string) {
	if dir == "" {
		return
	}
	if err := os.RemoveAll(dir); err != nil {
		log.Warningf("Staging directory can't be removed: %v", err)
	}
}

// close removes all.
func (s *staging) close() {
	s.remove(s.root)
	s.lock.Close()
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

func writeStaged(path string, t text, p privileges) error {
	return makeReadable(func() error {
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o640) // #nosec G302 G304 -- the child's group reads it
		if err != nil {
			return err
		}
		_, err = io.Copy(f, t.reader())
		return errors.Join(err, f.Close())
	}(), path, p)
}

// makeReadable hands path to the child's group, unless it failed to be made.
func makeReadable(err error, path string, p privileges) error {
	if err != nil || !p.switchUser {
		return err
	}
	return os.Chown(path, -1, int(p.gid))
}

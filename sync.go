package nanny

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
	"unicode"
	"unicode/utf8"
)

const (
	maxConfig   = 64 << 20               // bytes in all files of the directory together
	readGap     = 25 * time.Millisecond  // between two reads that have to agree
	readPatient = 250 * time.Millisecond // how long a directory may be broken in the middle of a change
	readGiveUp  = 5 * time.Second        // how long a directory may keep changing
)

// byteOrderMark begins a file of some editors. dnsmasq would take it for a part of the first line.
var byteOrderMark = []byte("\uFEFF")

var errNotRegular = errors.New("not a regular file")

// file is one regular file of the watched directory.
type file struct {
	name string
	sum  [sha256.Size]byte // of data
	data []byte            // nil if only looked at
}

// snapshot is one consistent set of the directory's files that have a meaning.
type snapshot struct {
	files   []file   // sorted by name
	ignored []string // names without a meaning and meaningful ones that aren't regular files, sorted
	version string   // lower-case hexadecimal SHA-256 over the names and the sums of files
}

// configError says which file and, where there is one, which line of the
// watched directory is wrong, and why.
type configError struct {
	file string
	line int // from 1; 0 when the file as a whole is meant
	err  error
}

// Error implements the error interface.
func (e *configError) Error() string {
	if e.line == 0 {
		return fmt.Sprintf("%s: %v", e.file, e.err)
	}
	return fmt.Sprintf("%s:%d: %v", e.file, e.line, e.err)
}

// Unwrap returns the reason.
func (e *configError) Unwrap() error { return e.err }

// meaningful reports whether name is one of the directory's files that nanny
// reads. Unprintable names are not: they end up in the log and in dnsmasq's
// configuration, where a newline would be a directive.
func meaningful(name string) bool {
	switch name {
	case "stubDomains", "upstreamNameservers", "federations":
		return true
	}
	return (strings.HasSuffix(name, ".conf") || strings.HasSuffix(name, ".hosts")) &&
		!strings.HasPrefix(name, ".") && utf8.ValidString(name) &&
		!strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) })
}

// readStable reads dir until two reads in a row agree, so that the snapshot is
// the set before or after a change, not something in between. An error is
// returned when it has lasted for readPatient, and when dir never comes to rest
// within readGiveUp. A snapshot of the version known has no contents.
func readStable(ctx context.Context, dir, known string) (*snapshot, error) {
	var last string      // version of the read before
	var broken time.Time // since when reads have failed
	end := time.Now().Add(readGiveUp)
	for {
		now := time.Now() // before it is read: what a read took, and a busy machine, isn't patience
		s, err := readDir(dir, false)
		if err == nil && s.version == last && last != known {
			s, err = readDir(dir, true)
		}
		switch {
		case err == nil && s.version == last:
			return s, nil
		case err == nil:
			last, broken = s.version, time.Time{}
		case broken.IsZero():
			broken = time.Now()
		case now.Sub(broken) >= readPatient:
			return nil, err
		}
		if now.After(end) {
			return nil, fmt.Errorf("%s keeps changing: no two reads in a row agreed within %v", dir, readGiveUp)
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(readGap):
		}
	}
}

// lasts reports whether dir holds the same version for readPatient; where it doesn't, at once.
func lasts(ctx context.Context, dir, version string) bool {
	for end := time.Now().Add(readPatient); ; {
		select {
		case <-ctx.Done():
			return true
		case <-time.After(readGap):
		}
		last := time.Now().After(end) // before it is read, as above
		if s, err := readDir(dir, false); err != nil || s.version != version {
			return false
		}
		if last {
			return true
		}
	}
}

// readDir reads dir once. It follows links, as Kubernetes makes each key of a
// volume one, skips subdirectories and names that begin with a dot, and never
// opens what has no meaning. Only with keep the contents are kept, and checked:
// a long list is in memory once, and not at all while it is as it was. An error
// names the directory or file.
func readDir(dir string, keep bool) (*snapshot, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	s := new(snapshot)
	hash := sha256.New()
	left := maxConfig
	for _, e := range entries {
		name := e.Name()
		if strings.HasPrefix(name, ".") || e.IsDir() {
			continue
		}
		path := filepath.Join(dir, name)
		info, err := os.Stat(path)
		switch {
		case err == nil && info.IsDir(): // a link to one
			continue
		case !meaningful(name), err == nil && !info.Mode().IsRegular():
			s.ignored = append(s.ignored, name)
			continue
		case err != nil:
			return nil, err
		}
		var contents bytes.Buffer
		sum := sha256.New()
		w := io.Writer(sum)
		if keep {
			contents.Grow(int(min(info.Size(), int64(left))) + bytes.MinRead)
			w = io.MultiWriter(sum, &contents)
		}
		n, err := readFile(path, left, w)
		if errors.Is(err, errNotRegular) { // replaced since it was looked at
			s.ignored = append(s.ignored, name)
			continue
		}
		if err != nil {
			return nil, err
		}
		if n > left {
			return nil, &configError{name, 0, fmt.Errorf("with this file the directory has more than %d MiB", maxConfig>>20)}
		}
		f := file{name: name, data: bytes.TrimPrefix(contents.Bytes(), byteOrderMark)}
		sum.Sum(f.sum[:0])
		if err := checkUTF8(name, f.data); err != nil {
			return nil, err
		}
		left -= n
		s.files = append(s.files, f)
		// The length first: no two sets write the same bytes.
		var size [8]byte
		binary.BigEndian.PutUint64(size[:], uint64(len(name)))
		hash.Write(size[:])
		io.WriteString(hash, name)
		hash.Write(f.sum[:])
	}
	s.version = hex.EncodeToString(hash.Sum(nil))
	return s, nil
}

// readFile writes the regular file at path to w, but only one byte more than
// limit: what is longer than limit is too long. O_NONBLOCK keeps a FIFO, put in
// its place a moment ago, from blocking the open, and the deadline a link to
// /proc/kmsg, which says that it is a regular file, from blocking the read.
func readFile(path string, limit int, w io.Writer) (n int, err error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	if !info.Mode().IsRegular() {
		return 0, errNotRegular
	}
	_ = f.SetReadDeadline(time.Now().Add(readPatient)) // not for what never blocks
	long, err := io.Copy(w, io.LimitReader(f, int64(limit)+1))
	return int(long), err
}

// checkUTF8 returns where data stops to be UTF-8.
func checkUTF8(name string, data []byte) error {
	if utf8.Valid(data) {
		return nil
	}
	for i := 0; ; {
		r, size := utf8.DecodeRune(data[i:])
		if r == utf8.RuneError && size == 1 {
			line := 1 + bytes.Count(data[:i], []byte("\n"))
			return &configError{name, line, fmt.Errorf("byte 0x%02X is not UTF-8", data[i])}
		}
		i += size
	}
}

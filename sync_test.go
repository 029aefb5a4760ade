package nanny

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// write puts files, given as name and contents by turns, into dir.
func write(t *testing.T, dir string, files ...string) {
	t.Helper()
	for i := 0; i < len(files); i += 2 {
		if err := os.WriteFile(filepath.Join(dir, files[i]), []byte(files[i+1]), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func names(s *snapshot) []string {
	var list []string
	for _, f := range s.files {
		list = append(list, f.name+"="+string(f.data))
	}
	return list
}

func TestReadDir(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "stubDomains", "{}", "z.conf", "z", "a.hosts", "h", "federations", "", "upstreamNameservers", "[]",
		".hidden.conf", "x", "b.conf~", "x", "README", "x", "new\nline.conf", "x")
	for _, sub := range []string{"sub", "sub.conf"} {
		if err := os.Mkdir(filepath.Join(dir, sub), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for link, to := range map[string]string{"link.conf": "z.conf", "dir.conf": "sub", "other": "nowhere", "dirlink": "sub", "dev.conf": "/dev/zero"} {
		if err := os.Symlink(to, filepath.Join(dir, link)); err != nil {
			t.Fatal(err)
		}
	}
	if err := syscall.Mkfifo(filepath.Join(dir, "fifo.conf"), 0o644); err != nil {
		t.Fatal(err)
	}
	s, err := readDir(dir, true)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := names(s), []string{"a.hosts=h", "federations=", "link.conf=z", "stubDomains={}", "upstreamNameservers=[]", "z.conf=z"}; !slices.Equal(got, want) {
		t.Errorf("got files %q, want %q", got, want)
	}
	if want := []string{"README", "b.conf~", "dev.conf", "fifo.conf", "new\nline.conf", "other"}; !slices.Equal(s.ignored, want) {
		t.Errorf("got ignored %q, want %q", s.ignored, want)
	}
}

func TestReadDirVersion(t *testing.T) {
	version := func(files ...string) string {
		dir := t.TempDir()
		write(t, dir, files...)
		s, err := readDir(dir, true)
		if err != nil {
			t.Fatal(err)
		}
		return s.version
	}
	sum := sha256.New()
	binary.Write(sum, binary.BigEndian, uint64(len("a.conf")))
	x := sha256.Sum256([]byte("x"))
	sum.Write(append([]byte("a.conf"), x[:]...))
	if got, want := version("a.conf", "x", "README", "y"), hex.EncodeToString(sum.Sum(nil)); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	seen := make(map[string][]string)
	for _, files := range [][]string{{}, {"a.conf", ""}, {"a.conf", "x"}, {"b.conf", "x"}, {"a.conf", "", "x.conf", ""}, {"a.conf", "x.conf"}, {"a.conf", "x", "b.conf", ""}, {"a.conf", "", "b.conf", "x"}} {
		v := version(files...)
		if other, ok := seen[v]; ok {
			t.Errorf("%q and %q have the same version", files, other)
		}
		seen[v] = files
	}
}

func TestReadDirErrors(t *testing.T) {
	for _, tc := range []struct {
		name  string
		setup func(dir string) string
		want  string
	}{
		{"gone", func(dir string) string { return filepath.Join(dir, "gone") }, "gone: no such file or directory"},
		{"file", func(dir string) string { write(t, dir, "plain", ""); return filepath.Join(dir, "plain") }, "plain: not a directory"},
		{"dangling link", func(dir string) string { os.Symlink("nowhere", filepath.Join(dir, "a.conf")); return dir }, "a.conf: no such file or directory"},
		{"not UTF-8", func(dir string) string { write(t, dir, "a.hosts", "\ufffd\n\nx\xc0y\xff"); return dir }, "a.hosts:3: byte 0xC0 is not UTF-8"},
		{"truncated UTF-8", func(dir string) string { write(t, dir, "a.hosts", "\xe2\x82"); return dir }, "a.hosts:1: byte 0xE2 is not UTF-8"},
		{"too large", func(dir string) string {
			write(t, dir, "a.conf", "x", "b.conf", "", "c.conf", "")
			os.Truncate(filepath.Join(dir, "b.conf"), maxConfig)
			return dir
		}, "b.conf: with this file the directory has more than 64 MiB"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s, err := readDir(tc.setup(t.TempDir()), true)
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, %v, want ...%s...", s, err, tc.want)
			}
		})
	}
}

func TestReadStable(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "dir")
	if _, err := readStable(t.Context(), dir, ""); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v, want os.ErrNotExist", err)
	}
	// A directory that comes while it is looked for is found. It comes too late where the machine has made it so.
	for round := 1; ; round++ {
		start, made := time.Now(), make(chan time.Duration, 1)
		time.AfterFunc(readPatient/4, func() {
			os.Mkdir(dir, 0o755)
			made <- time.Since(start)
		})
		s, err := readStable(t.Context(), dir, "")
		after := <-made
		if err == nil && len(s.files) == 0 {
			break
		}
		if after < readPatient/2 || round == 20 {
			t.Fatalf("got %v, %v, want an empty set: the directory was there after %s", s, err, after)
		}
		must(t, os.Remove(dir))
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := readStable(ctx, dir+"2", ""); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want context.Canceled", err)
	}
}

// The kubelet's swap of ..data is seen whole or not at all.
func TestReadStableKubernetes(t *testing.T) {
	dir := t.TempDir()
	swap := func(n int) {
		sub := fmt.Sprintf("..v%d", n)
		if err := os.Mkdir(filepath.Join(dir, sub), 0o755); err != nil {
			t.Error(err)
		}
		for _, name := range []string{"a.conf", "b.conf", "c.conf"} {
			if err := os.WriteFile(filepath.Join(dir, sub, name), fmt.Append(nil, n), 0o644); err != nil {
				t.Error(err)
			}
		}
		os.Symlink(sub, filepath.Join(dir, "..tmp"))
		if err := os.Rename(filepath.Join(dir, "..tmp"), filepath.Join(dir, "..data")); err != nil {
			t.Error(err)
		}
		os.RemoveAll(filepath.Join(dir, fmt.Sprintf("..v%d", n-1)))
	}
	swap(0)
	for _, name := range []string{"a.conf", "b.conf", "c.conf"} {
		if err := os.Symlink("..data/"+name, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for n := range 20 {
			time.Sleep(readGap)
			swap(n + 1)
		}
	}()
	for last := false; !last; {
		select {
		case <-done:
			last = true
		default:
		}
		s, err := readStable(t.Context(), dir, "")
		if err != nil {
			t.Fatal(err)
		}
		if len(s.files) != 3 || string(s.files[0].data) != string(s.files[1].data) || string(s.files[1].data) != string(s.files[2].data) {
			t.Errorf("got a mixture: %q", names(s))
		}
	}
}

// The kernel's uuid file is another one at each read.
func TestReadStableGivesUp(t *testing.T) {
	dir := t.TempDir()
	if err := os.Symlink("/proc/sys/kernel/random/uuid", filepath.Join(dir, "a.conf")); err != nil {
		t.Fatal(err)
	}
	if _, err := readStable(t.Context(), dir, ""); err == nil || !strings.Contains(err.Error(), dir+" keeps changing") {
		t.Errorf("got %v, want that it keeps changing", err)
	}
}

// The kernel's log says that it is a regular file, and has its reader wait for the next message.
func TestReadDirBlocks(t *testing.T) {
	dir := t.TempDir()
	if err := os.Symlink("/proc/kmsg", filepath.Join(dir, "a.conf")); err != nil {
		t.Fatal(err)
	}
	read := make(chan error, 1)
	go func() {
		_, err := readDir(dir, true)
		read <- err
	}()
	select {
	case err := <-read:
		if err == nil || !strings.Contains(err.Error(), "a.conf: ") { // permission denied, for most users
			t.Errorf("got %v, want an error that names the file", err)
		}
	case <-time.After(testPatience):
		t.Error("reading it doesn't end")
	}
}

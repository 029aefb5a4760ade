package nanny

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// What a killed CoreDNS has left is removed; what another one has in use, and what isn't its own, stays.
func TestStagingStale(t *testing.T) {
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	inUse, err := newStaging()
	if err != nil {
		t.Fatal(err)
	}
	defer inUse.close()
	stale, elsewhere := filepath.Join(tmp, stagingPrefix+"1"), t.TempDir()
	if err := os.MkdirAll(filepath.Join(stale, "1", confDir), 0o750); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(stale, "1", confDir), "a.conf", "old")
	write(t, stale, stagingMark, "")
	write(t, elsewhere, stagingMark, "", "file", "")
	if err := os.Symlink(elsewhere, filepath.Join(tmp, stagingPrefix+"2")); err != nil {
		t.Fatal(err)
	}
	second, err := newStaging()
	if err != nil {
		t.Fatal(err)
	}
	second.close()
	for path, want := range map[string]bool{
		stale: false, second.root: false, inUse.root: true, filepath.Join(elsewhere, "file"): true,
	} {
		if _, err := os.Stat(path); (err == nil) != want {
			t.Errorf("%s: there %t, want %t", path, err == nil, want)
		}
	}
}

// An update that fails leaves what was there, and nothing more.
func TestStagingUpdateFails(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	s, err := newStaging()
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	hosts := func(name string) string { return filepath.Join(hostsDir, name+".hosts") }
	of := func(s string) text { return newText([]byte(s)) }
	old := &config{files: texts{hosts("a"): of("old"), hosts("b"): of("old"), hosts("e"): of("same")}}
	dir, err := s.write(old)
	if err != nil {
		t.Fatal(err)
	}
	next := &config{files: texts{hosts("a"): of("new"), hosts("c"): of("new"), hosts("e"): of("same"), filepath.Join("gone", "d"): of("new")}}
	want := "a.hosts=old b.hosts=old e.hosts=same "
	for range 20 { // the order of a map differs
		if err := s.update(dir, old, next); err == nil {
			t.Fatal("no error, though a file couldn't be written")
		}
		if got := contents(t, filepath.Join(dir, hostsDir)); got != want {
			t.Fatalf("got %s, want %s", got, want)
		}
	}
	delete(next.files, filepath.Join("gone", "d"))
	if err := os.Remove(filepath.Join(dir, hosts("e"))); err != nil { // as by one who cleans up
		t.Fatal(err)
	}
	if err := s.update(dir, old, next); err != nil {
		t.Fatal(err)
	}
	if got, want := contents(t, filepath.Join(dir, hostsDir)), "a.hosts=new c.hosts=new e.hosts=same "; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// Whoever removes the staging directory, as a cleaner of /tmp does, costs nothing: changes are applied, and a child that
// ends is started again.
func TestStagingRemoved(t *testing.T) {
	b := newBench(t, spec{}, settings{}, map[string]string{"a.conf": "address=/a.test/192.0.2.1\n"})
	remove := func() {
		t.Helper()
		if err := os.RemoveAll(filepath.Dir(b.stats.run.Load().dir)); err != nil {
			t.Fatal(err)
		}
	}
	b.await("x.a.test", "192.0.2.1")
	remove()
	pid := b.awaitPid()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "another child is in service", func() bool { p := b.pid(); return p != 0 && p != pid })
	b.await("x.a.test", "192.0.2.1")
	remove()
	b.write("a.conf", "address=/a.test/192.0.2.2\n")
	b.await("x.a.test", "192.0.2.2")
}

func contents(t *testing.T, dir string) (text string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		text += fmt.Sprintf("%s=%s ", e.Name(), readText(t, filepath.Join(dir, e.Name())))
	}
	return text
}

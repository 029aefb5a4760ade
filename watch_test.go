package nanny

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// watched runs watchDir with an interval that no test reaches and returns a
// function that waits for the next change.
func watched(t *testing.T, dir string, interval time.Duration) (wait func(what string), calls chan time.Time) {
	t.Helper()
	leak := goleak.IgnoreCurrent()
	ctx, cancel := context.WithCancel(t.Context())
	calls = make(chan time.Time, 1000)
	done := make(chan struct{})
	go func() {
		defer close(done)
		watchDir(ctx, dir, interval, func(bool) { calls <- time.Now() })
	}()
	t.Cleanup(func() {
		cancel()
		<-done
		goleak.VerifyNone(t, leak)
	})
	wait = func(what string) {
		t.Helper()
		select {
		case <-calls:
		case <-time.After(10 * time.Second):
			t.Fatalf("no call after %s", what)
		}
	}
	wait("the start")
	return wait, calls
}

func TestWatchDir(t *testing.T) {
	parent := t.TempDir()
	dir := filepath.Join(parent, "dir")
	wait, calls := watched(t, dir, time.Hour)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.Mkdir(dir, 0o755))
	wait("the directory was made")
	put(t, filepath.Join(dir, "a.conf"), "x") // one event, so one call
	wait("a file was made")
	write(t, dir, "README", "x", ".a.conf.swp", "x")
	write(t, parent, "b.conf", "x")
	select {
	case <-calls:
		t.Error("called for names without a meaning")
	case <-time.After(4 * debounce):
	}
	must(os.Mkdir(filepath.Join(dir, "..v1"), 0o755))
	wait("the kubelet made a directory")
	must(os.Rename(dir, dir+"-old"))
	wait("the directory was moved away")
	must(os.Mkdir(dir, 0o755))
	wait("the directory was made again")
	write(t, dir, "stubDomains", "{}")
	wait("a file was made in the new directory")
	must(os.RemoveAll(dir))
	wait("the directory was removed")
	must(os.Symlink("dir-old", dir))
	wait("the directory became a link")
	write(t, dir+"-old", "a.conf", "y")
	wait("a file behind the link changed")
	must(os.Mkdir(dir+"-new", 0o755))
	must(os.Symlink("dir-new", dir+"-tmp"))
	must(os.Rename(dir+"-tmp", dir))
	wait("the link got another target")
	write(t, dir+"-new", "a.conf", "z")
	wait("a file behind the new target changed")
}

func TestWatchDirDebounce(t *testing.T) {
	dir := t.TempDir()
	wait, calls := watched(t, dir, time.Hour)
	start := time.Now()
	for len(calls) == 0 || time.Since(start) < debounceMax {
		if time.Since(start) > 10*debounceMax {
			t.Fatalf("no call in %s of changes", 10*debounceMax)
		}
		write(t, dir, "a.conf", "x")
		time.Sleep(debounce / 10)
	}
	wait("a burst")
	// On a busy machine the burst may have had pauses: each that ends it is as long as debounce.
	if n, most := len(calls), int(time.Since(start)/debounce); n > most {
		t.Errorf("got %d more calls in %s of changes, want %d at most", n, time.Since(start), most)
	}
}

func TestWatchDirInterval(t *testing.T) {
	// No parent, so there is nothing to watch.
	dir := filepath.Join(t.TempDir(), "gone", "dir")
	wait, _ := watched(t, dir, 20*time.Millisecond)
	wait("one interval")
	wait("another")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	wait("the directory was made")
}

// A list that is in service isn't kept in memory a second time, also when the directory is again as it was.
func TestEyeForgetsContents(t *testing.T) {
	sp := spec{dir: t.TempDir()}
	e := newEye(sp, nil, make(chan look, 1))
	for _, text := range []string{"{}", "{", "{}"} {
		put(t, filepath.Join(sp.dir, "stubDomains"), text)
		e.look(t.Context(), true)
	}
	l := <-e.looks
	if l.err != nil || e.known == "" || e.known != l.cfg.version {
		t.Errorf("got %v; the contents are read again at each look: knows %q", l.err, e.known)
	}
}

package nanny

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"
)

const (
	debounce    = 50 * time.Millisecond // of quiet end a burst of events
	debounceMax = time.Second           // after its first event a burst ends in any case
)

// watchDir calls changed at once, after each burst of events that may concern a
// file of dir (event is true for these), and every interval, until ctx is done.
// It is called from this goroutine only. Where inotify isn't to be had, one
// warning is logged and interval is what remains.
func watchDir(ctx context.Context, dir string, interval time.Duration, changed func(event bool)) {
	// Events carry the path that was added.
	if abs, err := filepath.Abs(dir); err == nil {
		dir = abs
	}
	w := watcher{dir: dir, seen: make(map[string]fs.FileInfo)}
	defer w.close()
	w.attach()
	changed(true)

	tick := time.NewTicker(interval)
	defer tick.Stop()
	quiet := time.NewTimer(0)
	quiet.Stop()
	var first time.Time // of the burst's events
	for {
		var events chan fsnotify.Event
		var errs chan error
		if w.notify != nil {
			events, errs = w.notify.Events, w.notify.Errors
		}
		burst := false
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			w.attach()
			changed(false)
		case <-quiet.C:
			first = time.Time{}
			changed(true)
		case e, ok := <-events:
			if !ok {
				w.close()
				continue
			}
			burst = w.concerns(e.Name)
			if e.Name == dir {
				w.forget(dir) // the inode's number may be the same again
				w.attach()
			}
		case _, ok := <-errs: // an overflow: events are lost
			if !ok {
				w.close()
				continue
			}
			burst = true
		}
		if burst {
			if first.IsZero() {
				first = time.Now()
			}
			quiet.Reset(min(debounce, time.Until(first.Add(debounceMax))))
		}
	}
}

// watcher keeps the watches on a directory and on its parent, which shows the
// directory appear, vanish and be replaced.
type watcher struct {
	dir    string
	notify *fsnotify.Watcher // nil while there is no inotify
	seen   map[string]fs.FileInfo
	warned bool
}

// attach watches whatever of the two exists and isn't watched yet.
func (w *watcher) attach() {
	if w.notify == nil {
		n, err := fsnotify.NewWatcher()
		if err != nil {
			w.warn(err)
			return
		}
		w.notify = n
	}
	for _, path := range []string{filepath.Dir(w.dir), w.dir} {
		info, err := os.Stat(path)
		if err != nil {
			w.forget(path)
			continue
		}
		if old := w.seen[path]; old != nil && os.SameFile(old, info) && slices.Contains(w.notify.WatchList(), path) {
			continue
		}
		w.forget(path)
		if err := w.notify.Add(path); err != nil {
			w.warn(err)
			continue
		}
		w.seen[path] = info
	}
}

// forget drops the watch on path.
func (w *watcher) forget(path string) {
	if _, ok := w.seen[path]; ok {
		delete(w.seen, path)
		_ = w.notify.Remove(path) // gone already where the directory is
	}
}

// warn logs err, the first time.
func (w *watcher) warn(err error) {
	if w.warned || errors.Is(err, fs.ErrNotExist) {
		return
	}
	w.warned = true
	log.Warningf("No change notifications for %s, looking at it at intervals only: %v", w.dir, err)
}

// concerns reports whether an event for path may change the snapshot. Names
// that begin with two dots are the kubelet's.
func (w *watcher) concerns(path string) bool {
	if path == w.dir {
		return true
	}
	base := filepath.Base(path)
	return filepath.Dir(path) == w.dir && (meaningful(base) || strings.HasPrefix(base, ".."))
}

// close ends all watches; attach begins anew.
func (w *watcher) close() {
	if w.notify != nil {
		w.notify.Close()
		w.notify = nil
		clear(w.seen)
	}
}

package nanny

import (
	"sync"
	"sync/atomic"
	"time"
)

// stats is what a supervisor tells of itself.
type stats struct {
	run     atomic.Pointer[running] // the child in service; nil: none
	valid   atomic.Bool             // the directory's newest state is usable
	newest  string                  // version of that state, empty if it has none; the supervisor's loop's
	wrong   string                  // version refused last; the loop's
	started atomic.Int64            // children started, for whatever reason
	held    atomic.Bool             // a change waits because of reload off

	scraper scraper

	mu      sync.Mutex
	counts  counts    // but for what the upstream and the scraper count
	version string    // in service
	success time.Time // of the last change applied
}

func newStats() *stats {
	return &stats{scraper: scraper{past: newTally(), now: map[*child]tally{}}, counts: newCounts()}
}

// start counts a child that was started.
func (s *stats) start(reason string) {
	s.started.Add(1)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts.starts[reason]++
}

// exit counts a child that ended unexpectedly.
func (s *stats) exit() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts.exits++
}

func (s *stats) reload(result string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts.reloads[result]++
}

// looked notes what the directory holds.
func (s *stats) looked(l look) {
	if !l.repeated { // what was refused stays so, though it is written once more
		s.newest = ""
		if l.err == nil {
			s.newest = l.cfg.version
		}
		s.valid.Store(l.err == nil && s.newest != s.wrong)
	}
	switch {
	case l.err != nil && !l.repeated:
		s.reload("rejected")
	case l.err == nil && l.event && l.cfg.version == s.versionInService():
		s.reload("unchanged")
	}
}

// applied notes a configuration that is in service. The first one changes nothing, so it isn't counted.
func (s *stats) applied(o outcome, first bool) {
	s.mu.Lock()
	s.version, s.success = o.cfg.version, time.Now()
	if !first {
		s.counts.took.observe(o.took)
		s.counts.reloads["applied"]++
	}
	s.mu.Unlock()
	s.held.Store(false)
	if o.cfg.version == s.wrong {
		s.wrong = ""
	}
	if o.cfg.version == s.newest { // it may have been refused before
		s.valid.Store(true)
	}
}

// refused notes a change that isn't.
func (s *stats) refused(o outcome) {
	s.wrong = o.cfg.version
	if o.cfg.version == s.newest { // else the directory holds another by now
		s.valid.Store(false)
	}
	s.reload("rejected")
}

// inService returns the configuration's version, empty without a snapshot, and when it was applied.
func (s *stats) inService() (version string, success time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.version, s.success
}

// versionInService returns the configuration's version, empty without a snapshot.
func (s *stats) versionInService() string {
	version, _ := s.inService()
	return version
}

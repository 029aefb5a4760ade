package nanny

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/coredns/coredns/plugin"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// stats is what a supervisor tells of itself.
type stats struct {
	run     atomic.Pointer[running] // the child in service; nil: none
	valid   atomic.Bool             // the directory's newest state is usable
	started atomic.Int64            // children started, for whatever reason
	exits   atomic.Int64
	held    atomic.Bool // a change waits because of reload off

	scraper scraper
	took    prometheus.Histogram // of changes applied

	mu      sync.Mutex
	starts  map[string]uint64 // by reason
	reloads map[string]uint64 // by result
	version string            // in service
	success time.Time         // of the last change applied
}

func newStats() *stats {
	return &stats{
		scraper: scraper{past: newTally(), now: map[*child]tally{}},
		starts:  map[string]uint64{},
		reloads: map[string]uint64{},
		took: promauto.With(nil).NewHistogram(prometheus.HistogramOpts{
			Namespace: plugin.Namespace, Subsystem: subsystem, Name: "reload_duration_seconds",
			Buckets: prometheus.ExponentialBuckets(0.01, 2, 12),
			Help:    "Histogram of the time from a change seen in the directory to the change in service.",
		}),
	}
}

// start counts a child that was started.
func (s *stats) start(reason string) {
	s.started.Add(1)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.starts[reason]++
}

func (s *stats) reload(result string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reloads[result]++
}

// looked notes what the directory holds.
func (s *stats) looked(l look) {
	s.valid.Store(l.err == nil)
	switch {
	case l.err != nil && !l.repeated:
		s.reload("rejected")
	case l.err == nil && l.event && l.cfg.version == s.versionInService():
		s.reload("unchanged")
	}
}

// applied notes a change that is in service.
func (s *stats) applied(o outcome) {
	s.mu.Lock()
	s.version, s.success = o.cfg.version, time.Now()
	s.mu.Unlock()
	s.valid.Store(true)
	s.held.Store(false)
	s.took.Observe(o.took.Seconds())
	s.reload("applied")
}

// refused notes a change that isn't.
func (s *stats) refused(o outcome) {
	if o.undone {
		s.reload("failed")
		return
	}
	s.valid.Store(false)
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

package nanny

import (
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coredns/coredns/plugin"

	"github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

const subsystem = "nanny"

// Metrics that the handler counts, and histograms. What a supervisor knows is in statsCollector.
var (
	requestDuration = promauto.NewHistogramVec(prometheus.HistogramOpts{
		Namespace: plugin.Namespace, Subsystem: subsystem, Name: "request_duration_seconds",
		Buckets:                     plugin.SlimTimeBuckets,
		NativeHistogramBucketFactor: plugin.NativeHistogramBucketFactor,
		Help:                        "Histogram of the time a query took, waiting for dnsmasq included.",
	}, []string{"zones", "rcode"})

	rejectCount = promauto.NewCounterVec(prometheus.CounterOpts{
		Namespace: plugin.Namespace, Subsystem: subsystem, Name: "max_concurrent_rejects_total",
		Help: "Counter of queries refused because max_concurrent was reached.",
	}, []string{"zones"})

	reloadDuration = promauto.NewHistogramVec(prometheus.HistogramOpts{
		Namespace: plugin.Namespace, Subsystem: subsystem, Name: "reload_duration_seconds",
		Buckets: prometheus.ExponentialBuckets(0.01, 2, 12),
		Help:    "Histogram of the time from a change seen to the change in service.",
	}, []string{"zones"})
)

// observer is what a handler counts into, looked up once for its label.
type observer struct {
	rejects prometheus.Counter
	vec     prometheus.ObserverVec
	known   [16]atomic.Pointer[prometheus.Observer] // by RCODE
}

func newObserver(zones string) *observer {
	return &observer{
		rejects: rejectCount.WithLabelValues(zones),
		vec:     requestDuration.MustCurryWith(prometheus.Labels{"zones": zones}),
	}
}

// observe counts a query that was answered with rcode and began at start.
func (o *observer) observe(rcode int, start time.Time) {
	took := time.Since(start).Seconds()
	if rcode >= len(o.known) {
		o.vec.WithLabelValues(rcodeName(rcode)).Observe(took)
		return
	}
	p := o.known[rcode].Load()
	if p == nil {
		obs := o.vec.WithLabelValues(rcodeName(rcode))
		p = &obs
		o.known[rcode].Store(p)
	}
	(*p).Observe(took)
}

func rcodeName(rcode int) string {
	if name, ok := dns.RcodeToString[rcode]; ok {
		return name
	}
	return strconv.Itoa(rcode)
}

// stats is what a supervisor tells of itself.
type stats struct {
	pid     atomic.Int64 // of the child in service; 0: none
	valid   atomic.Bool  // the directory's newest state is usable
	started atomic.Int64 // children started, for whatever reason
	exits   atomic.Int64
	held    atomic.Bool // a change waits because of reload off

	mu      sync.Mutex
	starts  map[string]uint64 // by reason
	reloads map[string]uint64 // by result
	version string            // in service
	success time.Time         // of the last change applied
}

// start counts a child that was started.
func (s *stats) start(reason string) {
	s.started.Add(1)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.starts == nil {
		s.starts = map[string]uint64{}
	}
	s.starts[reason]++
}

func (s *stats) reload(result string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.reloads == nil {
		s.reloads = map[string]uint64{}
	}
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

// versionInService returns the configuration's version, empty without a snapshot.
func (s *stats) versionInService() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.version
}

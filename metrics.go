package nanny

import (
	"strconv"
	"sync/atomic"
	"time"

	"github.com/coredns/coredns/plugin"

	"github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

const subsystem = "nanny"

// Metrics that the handler counts, and histograms. What a supervisor knows is in collector.go.
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

// forget removes the series of a block that is gone.
func forget(zones string) {
	requestDuration.DeletePartialMatch(prometheus.Labels{"zones": zones})
	rejectCount.DeleteLabelValues(zones)
}

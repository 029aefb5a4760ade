package nanny

import (
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// counts are what a supervisor has counted. A supervisor that replaces another goes on with its predecessor's, so that no
// counter goes back at a reload of the Corefile.
type counts struct {
	exits, held, resent, scrapeErrors float64

	starts  map[string]float64 // by reason
	reloads map[string]float64 // by result
	took    durations          // of changes applied
	dnsmasq tally
}

func newCounts() counts {
	return counts{starts: map[string]float64{}, reloads: map[string]float64{}, took: newDurations(), dnsmasq: newTally()}
}

// add adds what other counts, times n.
func (c *counts) add(other counts, n float64) {
	c.exits += n * other.exits
	c.held += n * other.held
	c.resent += n * other.resent
	c.scrapeErrors += n * other.scrapeErrors
	for reason, count := range other.starts {
		c.starts[reason] += n * count
	}
	for result, count := range other.reloads {
		c.reloads[result] += n * count
	}
	c.took.add(other.took, n)
	c.dnsmasq.add(other.dnsmasq, n)
}

// counts returns what s and its predecessors have counted.
func (s *supervisor) counts() counts {
	c := newCounts()
	c.held, c.resent = float64(s.up.held.Load()), float64(s.up.resent.Load())
	c.dnsmasq, c.scrapeErrors = s.stats.scraper.totals()
	s.stats.mu.Lock()
	defer s.stats.mu.Unlock()
	c.add(s.stats.counts, 1)
	return c
}

// inherit makes s go on with what a predecessor has counted.
func (s *supervisor) inherit(c counts) {
	s.stats.mu.Lock()
	defer s.stats.mu.Unlock()
	s.stats.counts.add(c, 1)
}

// durations are a histogram whose counts can be added to another's.
type durations struct {
	count, sum float64
	buckets    []float64 // durations up to the bound of the same index
}

// durationBounds are the histogram's bounds in seconds.
var durationBounds = prometheus.ExponentialBuckets(0.01, 2, 12)

func newDurations() durations { return durations{buckets: make([]float64, len(durationBounds))} }

func (d *durations) observe(took time.Duration) {
	d.count++
	d.sum += took.Seconds()
	first, _ := slices.BinarySearch(durationBounds, took.Seconds())
	for i := first; i < len(d.buckets); i++ {
		d.buckets[i]++
	}
}

func (d *durations) add(other durations, n float64) {
	d.count += n * other.count
	d.sum += n * other.sum
	for i, count := range other.buckets {
		d.buckets[i] += n * count
	}
}

// metric gives d as a metric.
func (d *durations) metric(desc *prometheus.Desc, labels ...string) prometheus.Metric {
	buckets := map[float64]uint64{}
	for i, bound := range durationBounds {
		buckets[bound] = uint64(d.buckets[i])
	}
	return prometheus.MustNewConstHistogram(desc, uint64(d.count), d.sum, buckets, labels...)
}

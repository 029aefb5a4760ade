package nanny

import (
	"encoding/hex"
	"errors"
	"maps"
	"slices"
	"sync"

	"github.com/coredns/coredns/plugin"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
)

func init() { prometheus.MustRegister(collector{}) }

// collector exports what the supervisors know, asked at the time of the scrape. What is exported changes with the
// Corefile, so it describes nothing beforehand. Blocks of the same zones are one series, their counts added up.
type collector struct{}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(prometheus.BuildFQName(plugin.Namespace, subsystem, name), help, append([]string{"zones"}, labels...), nil)
}

var (
	descUp         = desc("up", "Whether a dnsmasq is in service.")
	descStarts     = desc("starts_total", "Counter of dnsmasq processes started to serve, by reason.", "reason")
	descExits      = desc("exits_total", "Counter of unexpected ends of dnsmasq.")
	descReloads    = desc("reloads_total", "Counter of changes of the configuration directory, by result.", "result")
	descTook       = desc("reload_duration_seconds", "Histogram of the time from a change seen in the directory to the change in service.")
	descValid      = desc("config_valid", "Whether the configuration directory's newest state is usable.")
	descHash       = desc("config_hash", "The first 48 bits of the SHA-256 of the configuration in service.")
	descSuccess    = desc("config_last_success_timestamp_seconds", "Time at which the configuration in service was applied.")
	descHeld       = desc("requests_held_total", "Counter of queries that waited because no dnsmasq was in service.")
	descResent     = desc("requests_resent_total", "Counter of queries sent again because their dnsmasq had gone.")
	descInflight   = desc("inflight_requests", "Queries that wait for dnsmasq's answer.")
	descLoop       = desc("loop", "Whether dnsmasq forwards to this CoreDNS.")
	descSize       = desc("dnsmasq_cache_size", "Size of dnsmasq's cache in entries.")
	descQueries    = desc("dnsmasq_server_queries_total", "Counter of queries that dnsmasq sent to an upstream server.", "to")
	descFailures   = desc("dnsmasq_server_failures_total", "Counter of queries to an upstream server that failed.", "to")
	descScrapeErrs = desc("dnsmasq_scrape_errors_total", "Counter of scrapes that dnsmasq didn't answer.")
	descLeases     = desc("dnsmasq_dhcp_leases", "Leases in dnsmasq's lease file.")
	descCounters   = map[string]*prometheus.Desc{
		"cache_hits_total":       desc("dnsmasq_cache_hits_total", "Counter of queries that dnsmasq answered itself."),
		"cache_misses_total":     desc("dnsmasq_cache_misses_total", "Counter of queries that dnsmasq forwarded."),
		"cache_insertions_total": desc("dnsmasq_cache_insertions_total", "Counter of names put into dnsmasq's cache."),
		"cache_evictions_total":  desc("dnsmasq_cache_evictions_total", "Counter of names that left dnsmasq's cache before their time."),
		"auth_total":             desc("dnsmasq_auth_total", "Counter of queries for zones that dnsmasq is authoritative for."),
	}

	startReasons  = []string{"initial", "exit", "config", "corefile"}
	reloadResults = []string{"applied", "unchanged", "rejected", "failed"}
)

// Describe implements prometheus.Collector.
func (collector) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (collector) Collect(ch chan<- prometheus.Metric) {
	byZones := children.supervisors()
	var wg sync.WaitGroup
	for zones, sups := range byZones {
		wg.Go(func() { collect(ch, zones, sups) })
	}
	wg.Wait()
}

// collect sends the series of the blocks with zones.
func collect(ch chan<- prometheus.Metric, zones string, sups []*supervisor) {
	send := func(d *prometheus.Desc, t prometheus.ValueType, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, t, v, append([]string{zones}, labels...)...)
	}
	const counter, gauge = prometheus.CounterValue, prometheus.GaugeValue

	var reads sync.WaitGroup
	for _, s := range sups {
		if run := s.stats.run.Load(); run != nil {
			reads.Go(func() { s.stats.scraper.scrape(run) })
		}
	}
	reads.Wait()

	up, valid, loop, inflight, size, leases, hasLeases := 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, false
	sum := newCounts()
	for _, s := range sups {
		run := s.stats.run.Load()
		if run == nil {
			up = 0
		}
		if !s.stats.valid.Load() {
			valid = 0
		}
		if s.loop.found.Load() {
			loop = 1
		}
		inflight += float64(s.up.inflight.Load())
		size += s.stats.scraper.cacheSize()
		if n, ok := countLeases(run); ok {
			hasLeases = true
			leases += n
		}
		sum.add(s.counts(), 1)
	}
	send(descUp, gauge, up)
	send(descValid, gauge, valid)
	send(descLoop, gauge, loop)
	send(descInflight, gauge, inflight)
	send(descExits, counter, sum.exits)
	send(descHeld, counter, sum.held)
	send(descResent, counter, sum.resent)
	send(descScrapeErrs, counter, sum.scrapeErrors)
	for _, reason := range startReasons {
		send(descStarts, counter, sum.starts[reason], reason)
	}
	for _, result := range reloadResults {
		send(descReloads, counter, sum.reloads[result], result)
	}
	ch <- sum.took.metric(descTook, zones)
	if up == 1 {
		send(descSize, gauge, size)
	}
	for metric, d := range descCounters {
		send(d, counter, sum.dnsmasq.counters[metric])
	}
	for _, to := range slices.Sorted(maps.Keys(sum.dnsmasq.servers)) {
		send(descQueries, counter, sum.dnsmasq.servers[to].queries, to)
		send(descFailures, counter, sum.dnsmasq.servers[to].failures, to)
	}
	if hasLeases {
		send(descLeases, gauge, leases)
	}
	// Of several children with the same label only the first has what follows.
	s := sups[0]
	if version, success := s.stats.inService(); version != "" {
		hash, _ := hex.DecodeString(version[:12])
		n := 0.0
		for _, b := range hash {
			n = n*256 + float64(b)
		}
		send(descHash, gauge, n)
		send(descSuccess, gauge, float64(success.UnixMilli())/1000)
	}
	labels := prometheus.Labels{"zones": zones}
	prometheus.WrapCollectorWith(labels, collectors.NewProcessCollector(collectors.ProcessCollectorOpts{
		Namespace: prometheus.BuildFQName(plugin.Namespace, subsystem, "dnsmasq"),
		PidFn: func() (int, error) {
			if run := s.stats.run.Load(); run != nil {
				return run.child.pid, nil
			}
			return 0, errors.New("no dnsmasq is in service")
		},
	})).Collect(ch)
}

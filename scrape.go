package nanny

import (
	"context"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"
)

// scrapeTime bounds how long a scrape waits for a child.
const scrapeTime = time.Second

// chaosCounters are the names at which dnsmasq tells its statistics (dnsmasq(8), under cache-size), by metric.
var chaosCounters = map[string]string{
	"cache_hits_total": "hits.bind.", "cache_misses_total": "misses.bind.", "cache_insertions_total": "insertions.bind.",
	"cache_evictions_total": "evictions.bind.", "auth_total": "auth.bind.",
}

// serverCounters are what dnsmasq counts for one upstream server.
type serverCounters struct{ queries, failures float64 }

// tally are a child's counters; sums of them over all children never go back.
type tally struct {
	counters map[string]float64 // by metric
	servers  map[string]serverCounters
}

func newTally() tally {
	return tally{counters: map[string]float64{}, servers: map[string]serverCounters{}}
}

// add adds what other counts, times n.
func (t tally) add(other tally, n float64) {
	for name, count := range other.counters {
		t.counters[name] += n * count
	}
	for to, c := range other.servers {
		have := t.servers[to]
		t.servers[to] = serverCounters{have.queries + n*c.queries, have.failures + n*c.failures}
	}
}

// keep keeps what an earlier reading has that t hasn't: a server that is gone, or what another scrape has read since.
func (t tally) keep(earlier tally) {
	for name, count := range earlier.counters {
		t.counters[name] = max(t.counters[name], count)
	}
	for to, c := range earlier.servers {
		have := t.servers[to]
		t.servers[to] = serverCounters{max(have.queries, c.queries), max(have.failures, c.failures)}
	}
}

// scraper reads dnsmasq's statistics and adds up those of a supervisor's children.
type scraper struct {
	mu     sync.Mutex
	past   tally            // of children that have ended
	now    map[*child]tally // of the others, as last read
	size   float64          // of the newest child's cache
	errors float64
}

// scrape reads run's statistics for somebody who wants them now.
func (s *scraper) scrape(run *running) {
	if err := s.read(run); err != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.errors++
	}
}

// read asks run for its statistics, without the lock: a hung child takes scrapeTime.
func (s *scraper) read(run *running) error {
	t, size, err := askStatistics(run)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !run.counted {
		t.keep(s.now[run.child])
		s.now[run.child], s.size = t, size
	}
	return nil
}

// end adds what run has counted to the past; a child that still answers is read once more.
func (s *scraper) end(run *running) {
	select {
	case <-run.child.done:
	default:
		_ = s.read(run) // what was read before stands
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.past.add(s.now[run.child], 1)
	delete(s.now, run.child)
	run.counted = true
}

// totals returns the sums and the count of failed scrapes.
func (s *scraper) totals() (sum tally, errors float64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sum = newTally()
	sum.add(s.past, 1)
	for _, t := range s.now {
		sum.add(t, 1)
	}
	return sum, s.errors
}

// cacheSize returns the size of the newest child's cache.
func (s *scraper) cacheSize() float64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.size
}

// askStatistics asks a child by CHAOS TXT, each name by itself: dnsmasq forwards a message with several questions.
func askStatistics(run *running) (t tally, size float64, err error) {
	t = newTally()
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTime)
	defer cancel()
	ask := func(name string) []string {
		if err != nil {
			return nil
		}
		deadline, _ := ctx.Deadline()
		var r *dns.Msg
		if r, err = run.child.ask(chaosQuestion(name), time.Until(deadline)); err != nil {
			return nil
		}
		run.probes.Add(1)
		if len(r.Answer) == 1 {
			if txt, ok := r.Answer[0].(*dns.TXT); ok {
				return txt.Txt
			}
		}
		return nil // no-ident
	}
	number := func(name string) float64 {
		if txt := ask(name); len(txt) == 1 {
			n, _ := strconv.ParseFloat(txt[0], 64)
			return n
		}
		return 0
	}
	size = number("cachesize.bind.")
	for metric, name := range chaosCounters {
		probes := float64(run.probes.Load()) // dnsmasq counts each such question as a hit
		t.counters[metric] = number(name)
		if metric == "cache_hits_total" {
			t.counters[metric] = max(0, t.counters[metric]-probes)
		}
	}
	for _, s := range ask("servers.bind.") { // "127.0.0.1#53 3 0": address, queries sent, failed
		if f := strings.Fields(s); len(f) == 3 {
			queries, _ := strconv.ParseFloat(f[1], 64)
			failures, _ := strconv.ParseFloat(f[2], 64)
			have := t.servers[f[0]]
			t.servers[f[0]] = serverCounters{have.queries + queries, have.failures + failures}
		}
	}
	return t, size, err
}

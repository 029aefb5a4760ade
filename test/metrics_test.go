package test

import (
	"fmt"
	"io"
	"maps"
	"math"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// samples are what a scrape gives of nanny: the values by series, as in `up{zones="."}`, without the prefix coredns_nanny_.
// A histogram is its count and sum.
type samples map[string]float64

// metrics asks the *prometheus* plugin on port. It has to answer soon, whatever state dnsmasq is in.
func metrics(t *testing.T, port int) string {
	t.Helper()
	client := http.Client{Timeout: patience}
	resp, err := client.Get(fmt.Sprintf("http://127.0.0.1:%d/metrics", port))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%s, %v: %s", resp.Status, err, body)
	}
	return string(body)
}

// scrape is metrics, parsed.
func scrape(t *testing.T, port int) samples {
	t.Helper()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(metrics(t, port)))
	if err != nil {
		t.Fatal(err)
	}
	got := samples{}
	for name, family := range families {
		name, ok := strings.CutPrefix(name, "coredns_nanny_")
		if !ok {
			continue
		}
		for _, m := range family.GetMetric() {
			put := func(suffix string, value float64) { got[name+suffix+labels(m)] = value }
			switch family.GetType() {
			case dto.MetricType_COUNTER:
				put("", m.GetCounter().GetValue())
			case dto.MetricType_GAUGE:
				put("", m.GetGauge().GetValue())
			case dto.MetricType_HISTOGRAM:
				put("_count", float64(m.GetHistogram().GetSampleCount()))
				put("_sum", m.GetHistogram().GetSampleSum())
			default:
				t.Errorf("%s is a %s", name, family.GetType())
			}
		}
	}
	return got
}

func labels(m *dto.Metric) string {
	list := make([]string, 0, len(m.GetLabel()))
	for _, l := range m.GetLabel() {
		list = append(list, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
	}
	return "{" + strings.Join(list, ",") + "}"
}

// nameOf is the metric of a series.
func nameOf(series string) string {
	name, _, _ := strings.Cut(series, "{")
	return name
}

// expectation is what a series has to be: a value, or a range where the machine decides.
type expectation struct{ from, to float64 }

func exactly(v float64) expectation          { return expectation{v, v} }
func atLeast(v float64) expectation          { return expectation{v, math.Inf(1)} }
func (e expectation) holds(got float64) bool { return got >= e.from && got <= e.to }

// compare checks that got has the series of want and no other, each as expected.
func (got samples) compare(t *testing.T, want map[string]expectation) {
	t.Helper()
	for _, series := range slices.Sorted(maps.Keys(got)) {
		if e, ok := want[series]; !ok {
			t.Errorf("unexpected: %s %v", series, got[series])
		} else if !e.holds(got[series]) {
			t.Errorf("%s is %v, want %v to %v", series, got[series], e.from, e.to)
		}
	}
	for _, series := range slices.Sorted(maps.Keys(want)) {
		if _, ok := got[series]; !ok {
			t.Errorf("missing: %s", series)
		}
	}
}

// TestMetrics compares every sample with what happened: a start, 3 good changes, 2 bad ones, a crash, a Corefile reload.
func TestMetrics(t *testing.T) {
	t.Parallel()
	upstream := dnsmasq(t, "--local-ttl=600", "--address=/up.example/192.0.2.80")
	port, monitor := freePort(t), freePort(t)
	conf := func(n int) string {
		return fmt.Sprintf("server=/up.example/127.0.0.1#%d\naddress=/kept.example/192.0.2.%d\n", upstream, n)
	}
	dir := configDir(t, map[string]string{"a.conf": conf(1)})
	corefile := func(args string) string {
		return server(port, fmt.Sprintf("prometheus 127.0.0.1:%d\n", monitor)+watching(dir, "args --no-resolv --no-hosts "+args))
	}
	begin := time.Now()
	c := startAs(t, port, corefile("--cache-size=200"))
	slow := 0.0 // dnsmasq gets a second for each
	scraped := func() samples {
		start := time.Now()
		got := scrape(t, monitor)
		if time.Since(start) > 900*time.Millisecond {
			slow++
		}
		return got
	}
	answers := map[string]int{}
	ask := func(name, want string) {
		t.Helper()
		c.wants(t, name, want)
		if _, ok := dns.StringToRcode[want]; ok {
			answers[want]++
		} else {
			answers["NOERROR"]++
		}
	}
	c.logs.wait(t, 0, "Configuration applied")
	ask("kept.example", "192.0.2.1")
	ask("www.up.example", "192.0.2.80") // the upstream's
	ask("www.up.example", "192.0.2.80") // the cache's
	ask("none.example", "REFUSED")      // nobody to ask

	change := func(n int) {
		t.Helper()
		before := c.applied()
		put(t, dir, "a.conf", conf(n))
		within(t, patience, "the change is applied", func() bool { return c.applied() > before })
		ask("kept.example", fmt.Sprintf("192.0.2.%d", n))
	}
	refused := func(content string) {
		t.Helper()
		mark := c.logs.mark()
		put(t, dir, "a.conf", content)
		c.logs.wait(t, mark, "[ERROR]", "stays in service")
		if got := scraped()[`config_valid{zones="."}`]; got != 0 {
			t.Errorf("config_valid is %v after a refusal", got)
		}
	}
	change(2)
	refused("nosuchoption\n")
	change(3)
	refused("address=/x.example/192.0.2.999\n")
	change(4)
	ask("www.up.example", "192.0.2.80")
	beforeCrash := scraped()

	mark := c.logs.mark()
	kill(t, c.child(t).pid, syscall.SIGKILL)
	c.logs.wait(t, mark, "dnsmasq started")
	ask("www.up.example", "192.0.2.80")
	c.reload(t, corefile("--cache-size=300"), reloaded)
	child := c.child(t)
	ask("www.up.example", "192.0.2.80")

	const zones = `{zones="."}`
	var got samples
	within(t, patience, "the last answer is counted", func() bool { // it came before it was
		got = scraped()
		return got["inflight_requests"+zones] == 0 && got[`request_duration_seconds_count{rcode="NOERROR",zones="."}`] >= float64(answers["NOERROR"])
	})
	to := fmt.Sprintf(`{to="127.0.0.1#%d",zones="."}`, upstream)
	total := 0
	want := map[string]expectation{
		"up" + zones:          exactly(1),
		"exits_total" + zones: exactly(1),
		`starts_total{reason="initial",zones="."}`:   exactly(1),
		`starts_total{reason="config",zones="."}`:    exactly(3),
		`starts_total{reason="exit",zones="."}`:      exactly(1),
		`starts_total{reason="corefile",zones="."}`:  exactly(1),
		`reloads_total{result="applied",zones="."}`:  exactly(3),
		`reloads_total{result="rejected",zones="."}`: exactly(2),
		`reloads_total{result="failed",zones="."}`:   exactly(0),
		// One change may come as several events.
		`reloads_total{result="unchanged",zones="."}`: atLeast(0),
		"reload_duration_seconds_count" + zones:       exactly(3),
		"reload_duration_seconds_sum" + zones:         {0.001, time.Since(begin).Seconds()},
		"config_valid" + zones:                        exactly(1),
		"config_hash" + zones:                         hashInLog(t, c),
		"config_last_success_timestamp_seconds" + zones: {
			float64(begin.UnixMilli()) / 1000, float64(time.Now().UnixMilli()) / 1000},
		"requests_held_total" + zones:               atLeast(0), // whether a query came just then
		"requests_resent_total" + zones:             exactly(0),
		"max_concurrent_rejects_total" + zones:      exactly(0),
		"inflight_requests" + zones:                 exactly(0),
		"loop" + zones:                              exactly(0),
		"dnsmasq_cache_size" + zones:                exactly(300),
		"dnsmasq_cache_misses_total" + zones:        {4, 5}, // one of each child; dnsmasq counts a query that it can't send, too
		"dnsmasq_cache_hits_total" + zones:          atLeast(5),
		"dnsmasq_cache_insertions_total" + zones:    atLeast(4),
		"dnsmasq_cache_evictions_total" + zones:     exactly(0),
		"dnsmasq_auth_total" + zones:                exactly(0),
		"dnsmasq_server_queries_total" + to:         exactly(4),
		"dnsmasq_server_failures_total" + to:        exactly(0),
		"dnsmasq_scrape_errors_total" + zones:       {0, slow},
		"dnsmasq_process_cpu_seconds_total" + zones: {0, 1},
		"dnsmasq_process_open_fds" + zones:          exactly(float64(openFiles(t, child.pid))),
		"dnsmasq_process_max_fds" + zones:           atLeast(64),
		"dnsmasq_process_resident_memory_bytes" + zones: {
			1 << 20, 64 << 20},
		"dnsmasq_process_virtual_memory_bytes" + zones:     atLeast(1 << 20),
		"dnsmasq_process_virtual_memory_max_bytes" + zones: atLeast(-1),
		"dnsmasq_process_start_time_seconds" + zones: {
			float64(begin.Unix() - 1), float64(time.Now().Unix() + 1)},
		"dnsmasq_process_network_receive_bytes_total" + zones:  atLeast(0),
		"dnsmasq_process_network_transmit_bytes_total" + zones: atLeast(0),
	}
	for rcode, n := range answers {
		series := fmt.Sprintf(`{rcode=%q,zones="."}`, rcode)
		want["request_duration_seconds_count"+series] = exactly(float64(n))
		want["request_duration_seconds_sum"+series] = expectation{0.00001, time.Since(begin).Seconds()}
		total += n
	}
	if total != 10 {
		t.Errorf("%d questions asked, want 10", total)
	}
	got.compare(t, want)
	for series, before := range beforeCrash {
		if strings.HasSuffix(nameOf(series), "_total") && !strings.Contains(series, "_process_") && got[series] < before {
			t.Errorf("%s went back from %v to %v", series, before, got[series])
		}
	}

	// Other zones: the old series go, the new ones begin.
	c.reload(t, strings.Replace(corefile(""), "nanny {", "nanny example.org Example.COM {", 1), reloaded)
	for series := range scraped() {
		if !strings.Contains(series, `zones="example.org. example.com."`) {
			t.Errorf("after a reload with other zones: %s", series)
		}
	}
}

// TestMetricsOfHungChild: a scrape is answered, with all that nanny knows itself.
func TestMetricsOfHungChild(t *testing.T) {
	t.Parallel()
	monitor := freePort(t)
	c := start(t, fmt.Sprintf("prometheus 127.0.0.1:%d\n", monitor)+nanny("args --no-resolv --no-hosts --address=/kept.example/192.0.2.1"))
	c.waits(t, "kept.example", "192.0.2.1")
	before := scrape(t, monitor)
	old := c.child(t)
	kill(t, old.pid, syscall.SIGSTOP)
	hung := scrape(t, monitor)
	for _, series := range []string{"up", "exits_total", "config_valid", "inflight_requests", "dnsmasq_cache_hits_total"} {
		if _, ok := hung[series+`{zones="."}`]; !ok {
			t.Errorf("a hung dnsmasq: no %s", series)
		}
	}
	within(t, patience, "the failed scrape is counted", func() bool {
		return scrape(t, monitor)[`dnsmasq_scrape_errors_total{zones="."}`] > before[`dnsmasq_scrape_errors_total{zones="."}`]
	})
	within(t, patience, "another dnsmasq serves", func() bool {
		now := scrape(t, monitor)
		return now[`up{zones="."}`] == 1 && now[`exits_total{zones="."}`] == 1 && now[`starts_total{reason="exit",zones="."}`] == 1
	})
}

// hashInLog is what config_hash, 12 hexadecimal digits of the version, may be by the 8 that the log's last change names.
func hashInLog(t *testing.T, c *coreDNS) expectation {
	t.Helper()
	versions := c.versions()
	n, err := strconv.ParseUint(versions[len(versions)-1], 16, 64)
	if err != nil {
		t.Fatal(err)
	}
	return expectation{float64(n << 16), float64(n<<16 + 1<<16 - 1)}
}

// openFiles counts the descriptors of a process.
func openFiles(t *testing.T, pid int) int {
	t.Helper()
	list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

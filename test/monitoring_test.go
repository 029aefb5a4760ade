package test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/miekg/dns"
)

var monitoring = filepath.Join("..", "examples", "monitoring")

// scraped is what a scrape has: the labels of each series name.
type scraped map[string]map[string]bool

var (
	sampleLine  = regexp.MustCompile(`(?m)^([a-z_]+)(?:\{(.*)\})? `)
	sampleLabel = regexp.MustCompile(`(\w+)="(?:[^"\\]|\\.)*"`)
)

func parseScrape(text string) scraped {
	s := scraped{}
	for _, m := range sampleLine.FindAllStringSubmatch(text, -1) {
		if s[m[1]] == nil {
			s[m[1]] = map[string]bool{"instance": true, "job": true}
		}
		for _, l := range sampleLabel.FindAllStringSubmatch(m[2], -1) {
			s[m[1]][l[1]] = true
		}
	}
	return s
}

var (
	promString   = regexp.MustCompile(`"(?:[^"\\]|\\.)*"`)
	promDuration = regexp.MustCompile(`\[[^\]]*\]`)
	promGrouping = regexp.MustCompile(`\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)`)
	promSelector = regexp.MustCompile(`([a-zA-Z_:][\w:]*)\s*(?:\{([^}]*)\}|(\())?`)
	promMatcher  = regexp.MustCompile(`(\w+)\s*(?:=~|!~|!=|=)`)
	promOperator = regexp.MustCompile(`^(and|or|unless|bool|offset|sum|min|max|count|count_values|by|without|on|ignoring|e\d*)$`)
	promIdent    = regexp.MustCompile(`[a-zA-Z_]\w*`)
)

// unknown returns what is wrong with the names in a PromQL expression: neither in the scrape nor recorded.
func unknown(expr string, have scraped) []string {
	var bad []string
	// Labels of a grouping may be any series'. Those that a function makes are its first argument, a string.
	made := promString.FindAllString(expr, -1)
	expr = promDuration.ReplaceAllString(promString.ReplaceAllString(expr, `""`), "")
	expr = promGrouping.ReplaceAllStringFunc(expr, func(g string) string {
		for _, l := range promIdent.FindAllString(g, -1)[1:] {
			if slices.Contains(made, `"`+l+`"`) || slices.ContainsFunc(keys(have), func(name string) bool { return have[name][l] }) {
				continue
			}
			bad = append(bad, "label "+l)
		}
		return ""
	})
	for _, m := range promSelector.FindAllStringSubmatch(expr, -1) {
		switch labels := have[m[1]]; {
		case m[3] == "(" || promOperator.MatchString(m[1]): // promtool knows functions and operators
		case labels == nil:
			bad = append(bad, m[1])
		default:
			for _, l := range promMatcher.FindAllStringSubmatch(m[2], -1) {
				if !labels[l[1]] {
					bad = append(bad, m[1]+"{"+l[1]+"}")
				}
			}
		}
	}
	return bad
}

func keys(s scraped) []string {
	list := make([]string, 0, len(s))
	for name := range s {
		list = append(list, name)
	}
	return list
}

func TestMonitoringUnknownIsFound(t *testing.T) {
	t.Parallel()
	have := parseScrape("coredns_nanny_up{zones=\".\"} 1\ncoredns_nanny_x_total{zones=\"{a\\\"}\",to=\"b\"} 1e+06\nplain 3\n")
	for expr, want := range map[string]string{
		`min(coredns_nanny_up{instance=~"$instance"}) == 0 and plain > 1e6`:                  "",
		`sum without (to) (rate(coredns_nanny_x_total{to="", zones!=""}[$__rate_interval]))`: "",
		`count by (v) (count_values("v", plain))`:                                            "",
		`min(coredns_nanny_upp)`:             "coredns_nanny_upp",
		`coredns_nanny_up / coredns_nany_up`: "coredns_nany_up",
		`coredns_nanny_up{zone="."}`:         "coredns_nanny_up{zone}",
		`sum by (zone) (coredns_nanny_up)`:   "label zone",
		`coredns_nanny_up{to=""}`:            "coredns_nanny_up{to}",
	} {
		if got := strings.Join(unknown(expr, have), " "); got != want {
			t.Errorf("%s: got %q, want %q", expr, got, want)
		}
	}
}

// query is a PromQL expression and where it is from.
type query struct{ from, expr string }

// dashboardQueries returns the queries of the dashboard's panels and variables.
func dashboardQueries(t *testing.T) []query {
	t.Helper()
	var dashboard struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
		Templating struct {
			List []struct{ Name, Definition string }
		}
	}
	if err := json.Unmarshal([]byte(readFile(t, filepath.Join(monitoring, "dashboard.json"))), &dashboard); err != nil {
		t.Fatal(err)
	}
	var all []query
	for _, p := range dashboard.Panels {
		for _, target := range p.Targets {
			all = append(all, query{"panel " + p.Title, target.Expr})
		}
	}
	for _, v := range dashboard.Templating.List {
		if m := regexp.MustCompile(`^label_values\((.*), (\w+)\)$`).FindStringSubmatch(v.Definition); m != nil {
			all = append(all, query{"variable " + v.Name, fmt.Sprintf("sum by (%s) (%s)", m[2], m[1])})
		}
	}
	return all
}

var (
	ruleStart  = regexp.MustCompile(`(?m)^ +- (record|alert): (\S+)\n`)
	ruleExpr   = regexp.MustCompile(`(?m)^ +expr: (?:\|\n((?: {10}.*\n)+)|(.*)\n)`)
	namedThere = regexp.MustCompile(`\bcoredns_\w+`)
)

// rules returns the expressions of rules.yml, and the names of what is recorded and of the alerts.
func rules(t *testing.T) (exprs []query, recorded, alerts []string) {
	t.Helper()
	text := readFile(t, filepath.Join(monitoring, "rules.yml"))
	starts := ruleStart.FindAllStringSubmatchIndex(text, -1)
	for i, at := range starts {
		end := len(text)
		if i+1 < len(starts) {
			end = starts[i+1][0]
		}
		kind, name := text[at[2]:at[3]], text[at[4]:at[5]]
		m := ruleExpr.FindStringSubmatch(text[at[1]:end])
		if m == nil {
			t.Fatalf("rules.yml: %s has no expression", name)
		}
		exprs = append(exprs, query{"rule " + name, m[1] + m[2]})
		if kind == "record" {
			recorded = append(recorded, name)
		} else {
			alerts = append(alerts, name)
		}
	}
	return exprs, recorded, alerts
}

// promtool runs promtool in the directory of the examples, or skips where nobody but root has to have it.
func promtool(t *testing.T, stdin string, args ...string) {
	t.Helper()
	if _, err := exec.LookPath("promtool"); err != nil {
		if os.Geteuid() != 0 && os.Getenv("CI") == "" {
			t.Skip("promtool isn't installed: ", err)
		}
		t.Fatalf("%v (scripts/deps.sh tests installs it)", err)
	}
	cmd := exec.Command("promtool", args...)
	cmd.Dir = monitoring
	cmd.Stdin = strings.NewReader(stdin)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("promtool %q: %v\n%s", args, err, out)
	}
}

// TestMonitoring starts a CoreDNS that has every metric, and compares what it exports with what examples/monitoring asks for.
func TestMonitoring(t *testing.T) {
	t.Parallel()
	text := scrapeAll(t)
	have := parseScrape(text)
	exprs, recorded, alerts := rules(t)
	have["up"] = map[string]bool{"instance": true, "job": true}
	for _, name := range recorded {
		have[name] = map[string]bool{"instance": true, "job": true, "zones": true, "rcode": strings.HasPrefix(name, "zones_rcode:")}
	}
	panels := dashboardQueries(t)
	if len(panels) < 30 || len(recorded) < 5 || len(alerts) < 8 {
		t.Fatalf("found %d queries of the dashboard, %d recorded names, %d alerts", len(panels), len(recorded), len(alerts))
	}

	t.Run("names", func(t *testing.T) {
		for _, q := range slices.Concat(panels, exprs) {
			for _, name := range unknown(q.expr, have) {
				switch {
				case os.Geteuid() != 0 && name == "coredns_nanny_dnsmasq_dhcp_leases": // only root's dnsmasq has DHCP
				case runtime.GOOS != "linux" && strings.Contains(name, "_process_"):
				default:
					t.Errorf("%s: %s isn't exported\n%s", q.from, name, q.expr)
				}
			}
		}
		for _, name := range namedThere.FindAllString(readFile(t, filepath.Join(monitoring, "README.md")), -1) {
			if have[name] == nil && have[name+"_count"] == nil {
				t.Errorf("README.md: %s isn't exported", name)
			}
		}
	})

	t.Run("every metric is shown", func(t *testing.T) {
		var shown strings.Builder
		for _, q := range panels {
			shown.WriteString(q.expr + "\n")
		}
		for name := range have {
			if strings.HasPrefix(name, "coredns_nanny_") && !strings.Contains(name, "_process_") && !strings.Contains(shown.String(), strings.TrimSuffix(name, "_sum")) {
				t.Errorf("no panel shows %s", name)
			}
		}
	})

	t.Run("every alert is tested", func(t *testing.T) {
		tests := readFile(t, filepath.Join(monitoring, "rules_test.yml"))
		for _, name := range alerts {
			for _, want := range []string{` \[\]\n`, `\n {10}- `} {
				if !regexp.MustCompile(`alertname: ` + name + `\n +eval_time: \S+\n +exp_alerts:` + want).MatchString(tests) {
					t.Errorf("%s: no test with %q", name, want)
				}
			}
		}
	})

	t.Run("promtool", func(t *testing.T) {
		promtool(t, "", "check", "config", "prometheus.yml")
		promtool(t, "", "check", "rules", "rules.yml")
		promtool(t, "", "test", "rules", "rules_test.yml")

		// CoreDNS's own metrics aren't ours to judge.
		var own strings.Builder
		for line := range strings.Lines(text) {
			if strings.Contains(line, "coredns_nanny_") {
				own.WriteString(line)
			}
		}
		promtool(t, own.String(), "check", "metrics")

		// The dashboard's queries are PromQL if rules with them are rules.
		asRules := bytes.NewBufferString("groups:\n- name: dashboard\n  rules:\n")
		for i, q := range panels {
			expr := strings.ReplaceAll(q.expr, "$__rate_interval", "1m")
			fmt.Fprintf(asRules, "  - record: dashboard:%d\n    expr: %q\n", i, expr)
		}
		path := filepath.Join(t.TempDir(), "dashboard.yml")
		if err := os.WriteFile(path, asRules.Bytes(), 0o600); err != nil {
			t.Fatal(err)
		}
		promtool(t, "", "check", "rules", path)
	})
}

// scrapeAll starts CoreDNS with nanny in all its ways, asks it, and returns its metrics.
func scrapeAll(t *testing.T) string {
	t.Helper()
	upstream := dnsmasq(t, "--address=/example.org/192.0.2.80")
	dir := configDir(t, map[string]string{
		"names.hosts":         "192.0.2.10 printer.home.example\n",
		"upstreamNameservers": fmt.Sprintf(`["127.0.0.1:%d"]`, upstream),
		"stubDomains":         fmt.Sprintf(`{"corp.example": ["127.0.0.1:%d"]}`, silent(t)),
	})
	port, at := freePort(t), freePort(t)
	block := fmt.Sprintf("prometheus 127.0.0.1:%d\n", at) + watching(dir, "max_concurrent 100")
	if os.Geteuid() == 0 {
		// Nobody gets an address: lo isn't served.
		block += fmt.Sprintf("\nnanny lan.example {\nargs --no-resolv --no-hosts --dhcp-range=192.0.2.100,192.0.2.200 --dhcp-alternate-port=%d,%d --except-interface=lo --dhcp-leasefile=%s\n}",
			freePort(t), freePort(t), filepath.Join(tempDir(t), "leases"))
	}
	c := startAs(t, port, server(port, block))
	c.waits(t, "printer.home.example", "192.0.2.10")
	for i := range 20 {
		c.wants(t, fmt.Sprintf("www%d.example.org", i%10), "192.0.2.80")
	}
	if r, err := exchange("udp", c.addr(), question("unknown.example", dns.TypeA)); err != nil {
		t.Fatal(r, err)
	}
	applied := c.applied()
	put(t, dir, "names.hosts", "192.0.2.11 printer.home.example\n")
	changed(t, c, applied, "printer.home.example", "192.0.2.11")

	var text string
	within(t, patience, "the metrics have the queries to the upstream", func() bool {
		text = metrics(t, at)
		return strings.Contains(text, fmt.Sprintf(`coredns_nanny_dnsmasq_server_queries_total{to="127.0.0.1#%d"`, upstream))
	})
	return text
}

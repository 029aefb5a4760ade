package nanny

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/coredns/caddy"
	"github.com/coredns/coredns/core/dnsserver"
	_ "github.com/coredns/coredns/plugin/bind" // the plugins that the examples use
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/forward"
	_ "github.com/coredns/coredns/plugin/hosts"
	_ "github.com/coredns/coredns/plugin/ready"
	"github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
)

func init() {
	caddy.Quiet, dnsserver.Quiet = true, true
	if err := dnsserver.Register(); err != nil {
		panic(err)
	}
	if !slices.Contains(dnsserver.Directives, "nanny") {
		dnsserver.Directives = slices.Insert(dnsserver.Directives, slices.Index(dnsserver.Directives, "forward"), "nanny")
	}
}

func readText(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

var fence = regexp.MustCompile(`(?ms)^~~~ *(\w*)\n(.*?)^~~~\n`)

func TestReadmeHeadings(t *testing.T) {
	text := fence.ReplaceAllString(readText(t, "README.md"), "")
	got := regexp.MustCompile(`(?m)^##? .*$`).FindAllString(text, -1)
	want := []string{
		"# nanny", "## Name", "## Description", "## Syntax", "## The directory", "## Metrics", "## Ready", "## Examples",
		"## Coming from dnsmasq-nanny", "## What is promised", "## Performance", "## Privileges", "## Compilation", "## Bugs", "## See Also",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}

// exampleCorefiles returns the Corefiles below examples, sorted, but those with a README of their own: these need networks
// that the tests in test/ make.
func exampleCorefiles(t *testing.T) []string {
	t.Helper()
	var paths []string
	err := filepath.WalkDir("examples", func(path string, _ fs.DirEntry, err error) error {
		if _, err := os.Stat(filepath.Join(filepath.Dir(path), "README.md")); err == nil {
			return nil
		}
		if filepath.Base(path) == "Corefile" || filepath.Ext(path) == ".corefile" {
			paths = append(paths, path)
		}
		return err
	})
	if err != nil || len(paths) == 0 {
		t.Fatalf("got %d examples, error %v", len(paths), err)
	}
	return paths
}

func TestReadmeExamplesAreTheFiles(t *testing.T) {
	files := map[string]string{} // path by text
	for _, path := range exampleCorefiles(t) {
		files[readText(t, path)] = path
	}
	readme := readText(t, "README.md")
	for _, block := range fence.FindAllStringSubmatch(readme, -1) {
		if block[1] != "corefile" {
			continue
		}
		path, ok := files[block[2]]
		if !ok {
			t.Errorf("this is none of the files below examples, or shown twice:\n%s", block[2])
			continue
		}
		delete(files, block[2])
		if !strings.Contains(readme, "`"+path+"`") {
			t.Errorf("the README shows %s and doesn't name it", path)
		}
	}
	for _, path := range files {
		t.Errorf("the README doesn't show %s", path)
	}
}

var (
	examplePort = regexp.MustCompile(`:\d{4,5}\b`)
	exampleDir  = regexp.MustCompile(`config /\S+`)
)

// startExample starts the Corefile at path, with a free port for each port in it and examples/config for each absolute
// directory, and returns where its first server listens. It is stopped at the end of the test.
func startExample(t *testing.T, path string) (addr string) {
	t.Helper()
	before := goleak.IgnoreCurrent()
	dir, ports := t.TempDir(), map[string]string{}
	free := func(port string) string {
		if ports[port] == "" {
			ports[port] = fmt.Sprintf(":%d", freeAddr(t, "127.0.0.1").Port())
		}
		return ports[port]
	}
	if err := os.CopyFS(dir, os.DirFS("examples/config")); err != nil {
		t.Fatal(err)
	}
	stubs := filepath.Join(dir, "stubDomains")
	text := examplePort.ReplaceAllStringFunc(readText(t, stubs), free)
	if err := os.WriteFile(stubs, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	corefile := examplePort.ReplaceAllStringFunc(readText(t, path), free)
	corefile = exampleDir.ReplaceAllLiteralString(corefile, "config "+dir)
	corefile = strings.ReplaceAll(corefile, "examples/config", dir)

	inst, err := caddy.Start(caddy.CaddyfileInput{Contents: []byte(corefile), Filepath: path, ServerTypeName: "dns"})
	if err != nil {
		t.Fatalf("%v\n%s", err, corefile)
	}
	t.Cleanup(func() {
		for _, err := range inst.ShutdownCallbacks() {
			t.Error(err)
		}
		if err := inst.Stop(); err != nil {
			t.Error(err)
		}
		// One goroutine of forward ends only when the garbage collector finds its proxy. caddy's list of instances keeps
		// the one stopped last until another takes its place, if only to fail.
		inst = nil
		if _, err := caddy.Start(caddy.CaddyfileInput{ServerTypeName: "none"}); err == nil {
			t.Error("caddy starts a server of no type")
		}
		eventually(t, "no goroutine of the example is left", func() bool {
			runtime.GC()
			return goleak.Find(before) == nil
		})
	})
	return "127.0.0.1" + ports[":1053"]
}

// exampleAnswer asks addr for name and returns the data of the first record, or the RCODE.
func exampleAnswer(t *testing.T, addr, name string, qtype uint16) string {
	t.Helper()
	q := new(dns.Msg)
	q.SetQuestion(name, qtype)
	r, _, err := (&dns.Client{Timeout: 10 * time.Second}).Exchange(q, addr)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	if len(r.Answer) == 0 {
		return dns.RcodeToString[r.Rcode]
	}
	return strings.TrimPrefix(r.Answer[0].String(), r.Answer[0].Header().String())
}

// In a Corefile a # begins a comment, within a word, too; so does what the examples show of dnsmasq's ADDRESS#PORT.
func TestExamplesQuoteHashes(t *testing.T) {
	quoted, cut := regexp.MustCompile(`"[^"]*"`), regexp.MustCompile(`(?m)^.*[^\s#]#.*$`)
	for _, path := range append(exampleCorefiles(t), "deploy/kubernetes/base/Corefile") {
		if line := cut.FindString(quoted.ReplaceAllString(readText(t, path), "")); line != "" {
			t.Errorf("%s: %s", path, line)
		}
	}
}

func TestReadmeExamplesRun(t *testing.T) {
	type query struct {
		name  string
		qtype uint16
		want  string
	}
	printer := query{"printer.home.example.", dns.TypeA, "192.0.2.10"}
	tests := map[string][]query{
		"examples/Corefile": {
			printer,
			{"nas.home.example.", dns.TypeA, "192.0.2.20"},
			{"unknown.home.example.", dns.TypeA, "NXDOMAIN"},
			{"ads.example.", dns.TypeA, "0.0.0.0"},
			{"www.ads.example.", dns.TypeAAAA, "::"},
			{"intranet.corp.example.", dns.TypeA, "192.0.2.50"},
		},
		"examples/blocklist.corefile":    {{"tracker.example.", dns.TypeA, "0.0.0.0"}},
		"examples/fixed-listen.corefile": {printer},
		"examples/kube-dns.corefile":     {printer},
		"examples/reload-off.corefile":   {printer, {"office.example.", dns.TypeTXT, `"first floor"`}},
		"examples/several-blocks.corefile": {
			printer,
			{"unknown.home.example.", dns.TypeA, "NXDOMAIN"},
			{"ads.example.", dns.TypeA, "0.0.0.0"},
		},
		"examples/stub-and-forward.corefile": {
			printer,
			{"10.2.0.192.in-addr.arpa.", dns.TypePTR, "printer.home.example."},
		},
	}
	for _, path := range exampleCorefiles(t) {
		t.Run(path, func(t *testing.T) {
			queries := tests[path]
			if len(queries) == 0 {
				t.Fatal("the test has no query for this example")
			}
			addr := startExample(t, path)
			for _, q := range queries {
				if got := exampleAnswer(t, addr, q.name, q.qtype); got != q.want {
					t.Errorf("%s: got %s, want %s", q.name, got, q.want)
				}
			}
		})
	}
}

// readmeSection returns the text below a heading, up to the next one.
func readmeSection(t *testing.T, heading string) string {
	t.Helper()
	_, text, ok := strings.Cut(readText(t, "README.md"), "\n"+heading+"\n")
	if !ok {
		t.Fatalf("the README has no %q", heading)
	}
	text, _, _ = strings.Cut(text, "\n## ")
	return text
}

// firstGroups returns what the first group of re matches in text, sorted, each once.
func firstGroups(re, text string) []string {
	var found []string
	for _, m := range regexp.MustCompile(re).FindAllStringSubmatch(text, -1) {
		found = append(found, m[1])
	}
	slices.Sort(found)
	return slices.Compact(found)
}

func TestReadmeProperties(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "setup.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	ast.Inspect(file.Scope.Lookup("parseProperty").Decl.(*ast.FuncDecl), func(n ast.Node) bool {
		if c, ok := n.(*ast.CaseClause); ok {
			for _, e := range c.List {
				if lit, ok := e.(*ast.BasicLit); ok && lit.Kind == token.STRING {
					want = append(want, strings.Trim(lit.Value, `"`))
				}
			}
		}
		return true
	})
	slices.Sort(want)
	want = slices.Compact(want)
	if len(want) == 0 {
		t.Fatal("no property found in setup.go")
	}

	syntax := readmeSection(t, "## Syntax")
	block := fence.FindStringSubmatch(syntax)
	if block == nil {
		t.Fatal("Syntax has no block")
	}
	if got := firstGroups(`(?m)^ +(\w+)`, block[2]); !slices.Equal(got, want) {
		t.Errorf("the block of Syntax has %q, setup.go %q", got, want)
	}
	if got := firstGroups("(?m)^\\* `(\\w+)", syntax); !slices.Equal(got, want) {
		t.Errorf("the bullets of Syntax have %q, setup.go %q", got, want)
	}
}

func TestReadmeMetrics(t *testing.T) {
	addr := startExample(t, "examples/Corefile")
	exampleAnswer(t, addr, "printer.home.example.", dns.TypeA)
	families, err := prometheus.DefaultGatherer.Gather()
	if err != nil {
		t.Fatal(err)
	}
	named, n := firstGroups("(?m)^\\* `(coredns_nanny_\\w+)", readmeSection(t, "## Metrics")), 0
	for _, f := range families {
		if !strings.HasPrefix(f.GetName(), "coredns_nanny_") {
			continue
		}
		n++
		if !slices.ContainsFunc(named, func(name string) bool { // a last * isn't in name
			return name == f.GetName() || strings.HasSuffix(name, "_") && strings.HasPrefix(f.GetName(), name)
		}) {
			t.Errorf("%s isn't in the README", f.GetName())
		}
	}
	if n == 0 {
		t.Error("no metric of nanny is exported")
	}
}

// TestDocsTests checks that the tests that the documents name exist.
func TestDocsTests(t *testing.T) {
	var code strings.Builder
	for _, pattern := range []string{"*_test.go", "test/*_test.go", "deploy/kubernetes/*_test.go"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			code.WriteString(readText(t, f))
		}
	}
	have := firstGroups(`(?m)^func ((?:Test|Fuzz)\w+)\(`, code.String())
	docs := []string{"README.md", "SECURITY.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/migration.md", "deploy/kubernetes/README.md"}
	for _, doc := range docs {
		for _, name := range firstGroups("`((?:Test|Fuzz)\\w+)`", readText(t, doc)) {
			if !slices.Contains(have, name) {
				t.Errorf("%s names %s, which doesn't exist", doc, name)
			}
		}
	}
	// Each row of a table in SECURITY.md is a claim, and has its test.
	for line := range strings.Lines(readText(t, "SECURITY.md")) {
		if strings.HasPrefix(line, "| ") && !strings.HasPrefix(line, "| ---") && !strings.HasSuffix(line, "| tests |\n") && !strings.Contains(line, "`Test") {
			t.Errorf("SECURITY.md: no test for %s", line)
		}
	}
}

// TestWorkflows checks what GitHub is to run: each command is a target of the Makefile or a script, and each action is of a
// version that runs where GitHub's runners have no Node 20.
func TestWorkflows(t *testing.T) {
	least := map[string]int{
		"actions/checkout": 5, "actions/setup-go": 6, "actions/upload-artifact": 6, "github/codeql-action/analyze": 4, "github/codeql-action/init": 4,
	}
	targets := firstGroups(`(?m)^([a-z-]+):`, readText(t, "Makefile"))
	golang := firstGroups(`(?m)^go (\d+\.\d+)`, readText(t, "go.mod"))[0]
	files, err := filepath.Glob(".github/workflows/*.yml")
	if err != nil || len(files) == 0 {
		t.Fatalf("%d workflows, error %v", len(files), err)
	}
	for _, file := range files {
		text := readText(t, file)
		for _, version := range firstGroups(`(?m)(?:go-version: "|golang:)([0-9.]+)`, text) {
			if version != golang {
				t.Errorf("%s: Go %s, want that of go.mod, %s", file, version, golang)
			}
		}
		commands := firstGroups(`(?m)^ *- run: (.*)$`, text)
		if len(commands) == 0 {
			t.Errorf("%s runs nothing", file)
		}
		for _, command := range commands {
			switch words := strings.Fields(command); words[0] {
			case "gh":
			case "make":
				if len(words) > 1 && !slices.Contains(targets, words[1]) {
					t.Errorf("%s: the Makefile has no target %s", file, words[1])
				}
			default:
				if info, err := os.Stat(words[0]); err != nil || info.Mode()&0o111 == 0 {
					t.Errorf("%s: %s can't be run: %v", file, words[0], err)
				}
			}
		}
		for _, use := range firstGroups(`(?m)\buses: (.*)$`, text) {
			name, version, _ := strings.Cut(use, "@v")
			if n, err := strconv.Atoi(version); err != nil || least[name] == 0 || n < least[name] {
				t.Errorf("%s: %s, want version %d or later", file, use, least[name])
			}
		}
	}
}

package nanny

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
)

const (
	maxNamed = 5 // of what a change changed, in the log
	maxFiles = 10
)

// changes says for the log what differs from c to next, which has been in service: the snapshot's files, then the domains
// and servers of server=, local=, address= and the kube-dns keys, if they differ. + is new, - gone, ~ changed.
func (c *config) changes(next *config) string {
	same := func(path string) bool { return c.files[path].sum == next.files[path].sum }
	differ := func(path string) bool { return !same(path) }
	files := difference(c.sources, next.sources)
	if len(files) == 0 { // a host name of stubDomains has other addresses, or there are no files yet
		files = []string{"addresses"}
		if len(next.sources) == 0 {
			files = []string{"none"}
		}
	}
	parts := []string{"files=" + list(files, maxFiles)}
	domains, servers := c.routes(differ)
	nextDomains, nextServers := next.routes(differ)
	newDomains, newServers := difference(domains, nextDomains), difference(servers, nextServers)
	if len(newDomains)+len(newServers) == 0 {
		return parts[0]
	}
	stayDomains, stayServers := next.routes(same)
	for _, what := range []struct {
		name  string
		names []string
		stay  map[string]struct{}
	}{{"domains", newDomains, stayDomains}, {"servers", newServers, stayServers}} {
		names := slices.DeleteFunc(what.names, func(name string) bool { _, ok := what.stay[name[1:]]; return ok })
		if len(names) > 0 {
			parts = append(parts, fmt.Sprintf("%s=%q", what.name, list(names, maxNamed)))
		}
	}
	return strings.Join(parts, " ")
}

// difference names the keys that differ from a to b in the order of the names, each with what happened to it.
func difference[V comparable](a, b map[string]V) []string {
	var names []string
	for name, v := range b {
		old, ok := a[name]
		switch {
		case !ok:
			names = append(names, "+"+name)
		case old != v:
			names = append(names, "~"+name)
		}
	}
	for name := range a {
		if _, ok := b[name]; !ok {
			names = append(names, "-"+name)
		}
	}
	slices.SortFunc(names, func(a, b string) int { return strings.Compare(a[1:], b[1:]) })
	return names
}

// list joins names, limit of them at most.
func list(names []string, limit int) string {
	if len(names) > limit {
		names = append(names[:limit:limit], fmt.Sprintf("and %d more", len(names)-limit))
	}
	return strings.Join(names, ",")
}

// routes collects the domains that the files of c with take(path) name, and the servers that they are sent to.
func (c *config) routes(take func(path string) bool) (domains, servers map[string]struct{}) {
	domains, servers = map[string]struct{}{}, map[string]struct{}{}
	for path, text := range c.files {
		if filepath.Dir(path) == hostsDir || !take(path) {
			continue
		}
		for d := range parseConf(path, text.bytes()) {
			if d.name != "server" && d.name != "local" && d.name != "address" {
				continue
			}
			to := d.value
			if rest, ok := strings.CutPrefix(d.value, "/"); ok {
				end := strings.LastIndexByte(rest, '/')
				if end < 0 {
					continue
				}
				for domain := range strings.SplitSeq(rest[:end], "/") {
					domains[domain] = struct{}{}
				}
				to = rest[end+1:]
			}
			if d.name == "server" && to != "" && to != "#" && to != noServer {
				servers[to] = struct{}{}
			}
		}
	}
	return domains, servers
}

package nanny

import (
	"crypto/sha256"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Paths below a child's staging directory.
const (
	mainConf    = "dnsmasq.conf" // what nanny itself sets
	confDir     = "conf.d"       // the watched *.conf, with managed settings commented out
	hostsDir    = "hosts.d"      // the watched *.hosts
	serversFile = "servers"      // stubDomains and upstreamNameservers
)

// noServer is given to dnsmasq for a domain that is left with no server: sending to it fails at once, so
// dnsmasq answers REFUSED; without it, it would ask the other upstreams for the domain's names.
const noServer = "255.255.255.255"

// config is what a child is started from, besides its address: the pure result of a block's spec and a snapshot.
type config struct {
	version   string                       // of the snapshot and of what its host names resolved to; empty without one
	sources   map[string][sha256.Size]byte // the snapshot's files, to tell what a change changed
	files     texts                        // what is staged
	args      []string                     // for dnsmasq, before the block's own
	exclusive []string                     // why two such children may not run side by side; empty: they may
	priv      privileges
	warnings  []string
	leases    leases

	interfaces []directive // that have to be there
}

// newConfig renders s (nil: no snapshot) for the block sp. The error is a *configError where a file is to blame.
func newConfig(sp spec, s *snapshot, k *kubeDNS, addrs map[string][]netip.Addr) (*config, error) {
	c := &config{sources: map[string][sha256.Size]byte{}, files: texts{}}
	directives, err := includedDirectives(sp.args)
	if err != nil {
		return nil, err
	}
	if s != nil {
		c.version = configVersion(s, k, addrs)
		for _, f := range s.files {
			c.sources[f.name] = f.sum
			switch filepath.Ext(f.name) {
			case ".conf":
				staged, warnings, err := sanitize(f)
				if err != nil {
					return nil, err
				}
				c.warnings = append(c.warnings, warnings...)
				c.files.set(filepath.Join(confDir, f.name), staged)
				for d := range parseConf(f.name, f.data) {
					if d.name != "address" && d.name != "local" { // what long lists have means nothing below
						directives = append(directives, d)
					}
				}
			case ".hosts":
				c.files.set(filepath.Join(hostsDir, f.name), f.data)
			}
		}
	}

	port := uint16(1024) // a free port is never a privileged one
	if sp.listen.IsValid() {
		port = sp.listen.Port()
		c.exclusive = append(c.exclusive, "listen "+sp.listen.String())
	}
	for _, d := range directives {
		if isExclusive(d) {
			c.exclusive = append(c.exclusive, fmt.Sprintf("%s in %s", d.name, d.at()))
		}
	}
	c.leases = findLeases(directives)
	c.interfaces = findInterfaces(directives)
	if c.priv, err = findPrivileges(directives, port); err != nil {
		return nil, err
	}

	if len(c.exclusive) > 0 {
		record, _ := generationRecord(1)
		c.files.set(filepath.Join(hostsDir, generationFile), record)
	}
	c.warnings = append(c.warnings, c.priv.warnings...)
	own := []string{"# Written by nanny."}
	if k != nil {
		lines, missing, looped := k.lines(addrs, sp.listen)
		for _, domain := range looped {
			c.warnings = append(c.warnings, fmt.Sprintf("stubDomains: a server of %s is %s, where this dnsmasq listens; it isn't asked", domain, sp.listen))
		}
		for _, domain := range missing {
			lines = append(lines, "server=/"+domain+"/"+noServer)
		}
		if len(k.upstreams) > 0 {
			own = append(own, "no-resolv")
		}
		// dnsmasq takes one servers-file, which it reads again at SIGHUP.
		if slices.ContainsFunc(directives, func(d directive) bool { return d.name == "servers-file" }) {
			own = append(own, lines...)
		} else {
			c.files.set(serversFile, []byte(strings.Join(append(lines, ""), "\n")))
		}
	}
	c.files.set(mainConf, []byte(strings.Join(append(own, ""), "\n")))

	if !slices.ContainsFunc(parseArgs(sp.args), func(d directive) bool { return d.name == "dns-forward-max" }) {
		// Its own default of 150 shows as REFUSED behind one client. A dns-forward-max in a file wins over this.
		c.args = append(c.args, "--dns-forward-max=1024")
	}
	return c, nil
}

// at says where d stands: "a.conf:3" or "args".
func (d directive) at() string {
	if d.line == 0 || d.file == argsFile {
		return d.file
	}
	return fmt.Sprintf("%s:%d", d.file, d.line)
}

// watched tells whether d stands in the watched directory.
func (d directive) watched() bool { return d.file != argsFile && !filepath.IsAbs(d.file) }

// isExclusive tells whether two dnsmasq with d may not run side by side, not even for a moment: both would serve
// DHCP, TFTP or router advertisements, or the second couldn't start.
func isExclusive(d directive) bool {
	return isDHCP(d) || slices.Contains([]string{"enable-tftp", "enable-dbus", "enable-ubus", "query-port", "dumpfile"}, d.name)
}

// commandLine gives all of dnsmasq's arguments for c, staged in dir, at addr.
func (c *config) commandLine(sp spec, dir string, addr netip.AddrPort) []string {
	args := []string{
		"--keep-in-foreground",
		"--log-facility=-",
		"--pid-file=",
		"--bind-interfaces",
		"--listen-address=" + addr.Addr().String(),
		fmt.Sprintf("--port=%d", addr.Port()),
		"--conf-file=" + filepath.Join(dir, mainConf),
		"--conf-dir=" + filepath.Join(dir, confDir) + ",*.conf",
		"--addn-hosts=" + filepath.Join(dir, hostsDir),
	}
	if _, ok := c.files[serversFile]; ok {
		args = append(args, "--servers-file="+filepath.Join(dir, serversFile))
	}
	// Empty: don't change the user, which is set before the program runs. The block's own may name one.
	own := parseArgs(sp.args)
	for _, name := range []string{"user", "group"} {
		if !slices.ContainsFunc(own, func(d directive) bool { return d.name == name }) {
			args = append(args, "--"+name+"=")
		}
	}
	return slices.Concat(args, c.args, sp.args)
}

// rereadable tells whether a running child of c becomes one of next by SIGHUP: only hosts files and servers differ.
func (c *config) rereadable(next *config) bool {
	fixed := func(path string, _ text) bool {
		return path == serversFile || filepath.Dir(path) == hostsDir
	}
	a, b := maps.Clone(c.files), maps.Clone(next.files)
	_, had := a[serversFile]
	_, has := b[serversFile]
	maps.DeleteFunc(a, fixed)
	maps.DeleteFunc(b, fixed)
	return had == has && maps.EqualFunc(a, b, func(a, b text) bool { return a.sum == b.sum })
}

// includedDirectives gives the directives of args and of all files that they include. Such files aren't staged, so a
// setting there that nanny alone sets can't be taken out and is an error.
func includedDirectives(args []string) ([]directive, error) {
	ds := parseArgs(args)
	seen := map[string]bool{}
	for i := 0; i < len(ds); i++ { // ds grows
		d := ds[i]
		if d.file != argsFile && slices.Contains(managed, d.name) {
			return nil, &configError{file: d.file, line: d.line,
				err: fmt.Errorf("%s is set by nanny alone: take it out of this file, which args names", d.name)}
		}
		var paths []string
		switch d.name {
		case "conf-file":
			paths = []string{belowRoot(d.value)}
		case "conf-dir":
			paths = confDirFiles(belowRoot(d.value))
		}
		for _, path := range paths {
			if seen[path] {
				continue
			}
			seen[path] = true
			data, err := os.ReadFile(path) // #nosec G304 -- the Corefile's owner names it
			if err != nil {
				return nil, &configError{file: d.file, line: d.line, err: fmt.Errorf("%s: %w", d.name, err)}
			}
			ds = slices.AppendSeq(ds, parseConf(path, data))
		}
	}
	return ds, nil
}

// belowRoot is path as a child sees it, whose working directory is /.
func belowRoot(path string) string { return "/" + strings.TrimLeft(path, "/") }

// confDirFiles lists the files that dnsmasq reads for conf-dir=value: a directory, then suffixes to leave out, or, with
// a leading `*`, to take alone (dnsmasq(8)).
func confDirFiles(value string) []string {
	parts := strings.Split(value, ",")
	entries, err := os.ReadDir(parts[0])
	if err != nil {
		return []string{parts[0]} // reading it gives the error
	}
	var paths []string
	for _, e := range entries {
		name := e.Name()
		if strings.HasPrefix(name, ".") || strings.HasSuffix(name, "~") ||
			(strings.HasPrefix(name, "#") && strings.HasSuffix(name, "#")) {
			continue
		}
		take, wanted := true, false
		for _, p := range parts[1:] {
			if only, ok := strings.CutPrefix(p, "*"); ok {
				wanted = wanted || strings.HasSuffix(name, only)
				take = wanted
			} else if p != "" && strings.HasSuffix(name, p) {
				take = false
				break
			}
		}
		path := filepath.Join(parts[0], name)
		if info, err := os.Stat(path); take && err == nil && info.Mode().IsRegular() {
			paths = append(paths, path)
		}
	}
	return paths
}

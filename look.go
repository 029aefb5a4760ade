package nanny

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
)

// resolveLimit bounds the look-up of host names used as servers, so that a dead resolver doesn't hold up a change.
const resolveLimit = time.Second

// look is what the directory holds: a configuration, or what is wrong with it.
type look struct {
	cfg      *config
	err      error
	event    bool // a change was noticed; false: the periodic rescan
	repeated bool // the same as the look before
}

// eye looks at a directory and tells what it holds when that has changed. It is used by one goroutine.
type eye struct {
	spec     spec
	resolver *resolver
	looks    chan look

	seen       string   // version or error told last
	known      string   // version of the snapshot that kube and last are of
	kube       *kubeDNS // of the snapshot read last
	last       *config  // rendered last
	ignored    map[string]bool
	mounted    map[string]bool
	unresolved map[string]bool
	federated  bool
	empty      bool
}

func newEye(sp spec, servers []netip.AddrPort, looks chan look) *eye {
	return &eye{
		spec: sp, resolver: newResolver(servers), looks: looks,
		ignored: map[string]bool{}, mounted: map[string]bool{}, unresolved: map[string]bool{},
	}
}

// look reads the directory once. A result that waits in the channel is replaced: only the newest counts.
func (e *eye) look(ctx context.Context, event bool) {
	cfg, err := e.read(ctx, event)
	if ctx.Err() != nil {
		return
	}
	var id string
	if err != nil {
		id = err.Error()
	} else {
		id = cfg.version
	}
	if id == e.seen && !event {
		return
	}
	l := look{cfg: cfg, err: err, event: event, repeated: id == e.seen}
	e.seen = id
	select {
	case <-e.looks:
		l.repeated = false
	default:
	}
	e.looks <- l
}

// read returns what the directory holds. What is wrong may be half of a file that is being written, so it has to last.
func (e *eye) read(ctx context.Context, event bool) (*config, error) {
	for end := time.Now().Add(readGiveUp); ; {
		s, err := readStable(ctx, e.spec.dir, e.known)
		if err != nil {
			return nil, e.blame(err)
		}
		cfg, err := e.parse(ctx, s, event)
		switch {
		case cfg != nil:
			return cfg, nil
		case err != nil && (time.Now().After(end) || lasts(ctx, e.spec.dir, s.version)):
			return nil, e.blame(err)
		}
	}
}

// parse makes a configuration of s; nil without an error: s has to be read again, with its contents.
func (e *eye) parse(ctx context.Context, s *snapshot, event bool) (cfg *config, err error) {
	e.tellFiles(s)
	if s.version != e.known {
		e.known = ""
		if e.kube, err = parseKubeDNS(s); err != nil {
			return nil, err
		}
	}
	k := e.kube
	if k.federations > 0 && !e.federated {
		e.federated = true
		log.Infof("%s/federations is valid and has no effect: dnsmasq knows no federations", e.spec.dir)
	}
	addrs, errs := e.resolver.resolve(ctx, k.hosts(), !event, resolveLimit)
	e.tellUnresolved(errs, addrs)
	if e.last != nil && e.last.version == configVersion(s, k, addrs) {
		e.known = s.version // also when it is so again
		return e.last, nil
	}
	if s.version == e.known { // the same names have other addresses: read the contents again
		e.known = ""
		return nil, nil
	}
	if e.last, err = newConfig(e.spec, s, k, addrs); err != nil {
		return nil, err
	}
	e.known = s.version
	return e.last, nil
}

const meanings = "stubDomains, upstreamNameservers, federations, *.conf or *.hosts"

// onOneLine returns name, quoted if it could end a line of the log.
func onOneLine(name string) string {
	if strings.ContainsFunc(name, unicode.IsControl) {
		return strconv.Quote(name)
	}
	return name
}

// tellFiles logs, once, what may not be as the directory's owner thinks.
func (e *eye) tellFiles(s *snapshot) {
	for _, name := range s.ignored {
		if !e.ignored[name] {
			e.ignored[name] = true
			log.Infof("%s/%s is ignored: not a regular file named %s", e.spec.dir, onOneLine(name), meanings)
		}
	}
	for _, f := range s.files {
		if path := filepath.Join(e.spec.dir, f.name); !e.mounted[f.name] && isMountPoint(path) {
			e.mounted[f.name] = true
			log.Warningf("%s is a mount of its own (subPath?), so a file that replaces the mounted one isn't seen; mount the directory", path)
		}
	}
	if len(s.files) == 0 && !e.empty {
		log.Warningf("%s has no regular file named %s; dnsmasq runs without any (is the right directory mounted?)", e.spec.dir, meanings)
	}
	e.empty = len(s.files) == 0
}

// blame puts the directory before the name of a file in it.
func (e *eye) blame(err error) error {
	if ce := (*configError)(nil); errors.As(err, &ce) && ce.file != "" && (directive{file: ce.file}).watched() {
		return fmt.Errorf("%s/%w", e.spec.dir, err)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: waiting for it", err)
	}
	return err
}

// tellUnresolved logs of each server name that it doesn't resolve, when that begins and when it ends. The reason may be
// another each time, and may have a port in it that is; it isn't told again for that.
func (e *eye) tellUnresolved(errs map[string]error, addrs map[string][]netip.Addr) {
	var lost, found []string
	for _, name := range slices.Sorted(maps.Keys(errs)) {
		if e.unresolved[name] {
			continue
		}
		e.unresolved[name] = true
		stays := "it has no address"
		if len(addrs[name]) > 0 {
			stays = "its last known addresses stay"
		}
		lost = append(lost, fmt.Sprintf("server %q can't be resolved, %s: %v", name, stays, errs[name]))
	}
	for _, name := range slices.Sorted(maps.Keys(e.unresolved)) {
		if errs[name] == nil {
			delete(e.unresolved, name)
			if len(addrs[name]) > 0 {
				found = append(found, fmt.Sprintf("server %q resolves again", name))
			}
		}
	}
	e.tellSome(log.Errorf, lost, "can't be resolved")
	e.tellSome(log.Infof, found, "resolve again")
}

// tellSome logs what is to be said of servers of stubDomains, not more than maxWarnings lines of it.
func (e *eye) tellSome(logf func(format string, v ...any), texts []string, what string) {
	for _, text := range texts[:min(len(texts), maxWarnings)] {
		logf("%s/stubDomains: %s", e.spec.dir, text)
	}
	if more := len(texts) - maxWarnings; more > 0 {
		logf("%s/stubDomains: %d more servers %s", e.spec.dir, more, what)
	}
}

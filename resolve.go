package nanny

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// maxLookups is how many names are looked up at a time.
const maxLookups = 32

// resolver turns the host names of stubDomains into addresses and remembers the
// last known ones. It is used by one goroutine at a time.
type resolver struct {
	servers []*net.Resolver // each asks one server; nil: the system's resolver
	asked   bool            // else known is of a resolver before this one
	known   map[string][]netip.Addr
	failed  map[string]error // what the last look-up of a name ended with
}

// newResolver returns a resolver that asks servers, in order, or the system's
// resolver if there are none.
func newResolver(servers []netip.AddrPort) *resolver {
	r := new(resolver)
	for _, s := range servers {
		r.servers = append(r.servers, &net.Resolver{
			PreferGo: true,
			Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
				conn, err := new(net.Dialer).DialContext(ctx, network, s.String())
				if err == nil { // the resolver itself waits for its own time-out
					context.AfterFunc(ctx, func() { conn.Close() })
				}
				return conn, err
			},
		})
	}
	return r
}

// resolve looks up names, all at once, within limit; those looked up before only
// if again is set. A name that fails is in the errors and keeps its last known
// addresses; names no longer asked for are forgotten.
func (r *resolver) resolve(ctx context.Context, names []string, again bool, limit time.Duration) (map[string][]netip.Addr, map[string]error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	known, errs := make(map[string][]netip.Addr), make(map[string]error)
	var mu sync.Mutex
	var wg sync.WaitGroup
	slots := make(chan struct{}, maxLookups)
	for _, name := range names {
		if addrs, err := r.known[name], r.failed[name]; !again && r.asked && (addrs != nil || err != nil) {
			mu.Lock()
			if known[name] = addrs; err != nil {
				errs[name] = err
			}
			mu.Unlock()
			continue
		}
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			addrs, err := r.lookup(ctx, name)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				errs[name] = err
				addrs = r.known[name]
			}
			if len(addrs) > 0 {
				known[name] = addrs
			}
		})
	}
	wg.Wait()
	r.known, r.failed, r.asked = known, maps.Clone(errs), true
	return maps.Clone(known), errs
}

// lookup returns the addresses of name, sorted. Of several servers each gets its
// share of the time left; one that says that there is no such name is believed.
func (r *resolver) lookup(ctx context.Context, name string) ([]netip.Addr, error) {
	if len(r.servers) == 0 {
		return lookup(ctx, net.DefaultResolver, name, name)
	}
	var err error
	for i, s := range r.servers {
		share := ctx
		if end, ok := ctx.Deadline(); ok {
			var cancel context.CancelFunc
			share, cancel = context.WithTimeout(ctx, time.Until(end)/time.Duration(len(r.servers)-i))
			defer cancel()
		}
		var addrs []netip.Addr
		// The final dot keeps search lists out.
		if addrs, err = lookup(share, s, name, name+"."); err == nil {
			return addrs, nil
		}
		if dnsErr := (*net.DNSError)(nil); errors.As(err, &dnsErr) && dnsErr.IsNotFound {
			break
		}
	}
	return nil, err
}

// lookup asks one resolver for query, which is the name name.
func lookup(ctx context.Context, r *net.Resolver, name, query string) ([]netip.Addr, error) {
	addrs, err := r.LookupNetIP(ctx, "ip", query)
	if err != nil {
		if dnsErr := (*net.DNSError)(nil); errors.As(err, &dnsErr) && r != net.DefaultResolver {
			dnsErr.Server = "" // the system's, which wasn't asked
		}
		return nil, fmt.Errorf("resolving server %s: %w", name, err)
	}
	for i, a := range addrs {
		addrs[i] = a.Unmap()
	}
	// As in the file: a filtering resolver's 0.0.0.0 is no server.
	addrs = slices.DeleteFunc(addrs, func(a netip.Addr) bool { return a.IsUnspecified() || a.IsMulticast() })
	if len(addrs) == 0 {
		return nil, fmt.Errorf("resolving server %s: no usable address", name)
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	return slices.Compact(addrs), nil
}

// hosts returns the host names among the servers, sorted, each once.
func (k *kubeDNS) hosts() []string {
	var names []string
	for _, stub := range k.stubs {
		for _, s := range stub.servers {
			if s.host != "" {
				names = append(names, s.host)
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// lines returns dnsmasq's server lines for k, in the order of the files and with
// addrs in the place of host names, as dnsmasq ends when one doesn't resolve.
// missing are the domains without any server, in order. A stub domain's server at own, where
// dnsmasq itself listens, is none, and its domain one of looped: dnsmasq would leave the server
// out, and with it the domain.
func (k *kubeDNS) lines(addrs map[string][]netip.Addr, own netip.AddrPort) (lines, missing, looped []string) {
	for _, stub := range k.stubs {
		seen := make(map[netip.AddrPort]bool)
		for _, s := range stub.servers {
			list := addrs[s.host]
			if s.host == "" {
				list = []netip.Addr{s.addr}
			}
			for _, a := range list {
				switch at := netip.AddrPortFrom(a, cmp.Or(s.port, 53)); {
				case at == own:
					looped = append(looped, stub.domain)
				case !seen[at]:
					seen[at] = true
					lines = append(lines, "server=/"+stub.domain+"/"+format(a, s.port))
				}
			}
		}
		if len(seen) == 0 {
			missing = append(missing, stub.domain)
		}
	}
	for _, s := range k.upstreams {
		lines = append(lines, "server="+format(s.addr, s.port))
	}
	return lines, missing, looped
}

// format writes an address as dnsmasq reads it: no brackets, # before the port.
func format(a netip.Addr, port uint16) string {
	if port == 0 {
		return a.String()
	}
	return fmt.Sprintf("%s#%d", a, port)
}

// configVersion extends the version of s by what the host names of k resolved
// to; without any it is the version of s.
func configVersion(s *snapshot, k *kubeDNS, addrs map[string][]netip.Addr) string {
	names := k.hosts()
	if len(names) == 0 {
		return s.version
	}
	hash := sha256.New()
	fmt.Fprintln(hash, s.version)
	for _, name := range names {
		fmt.Fprintln(hash, name, addrs[name])
	}
	return hex.EncodeToString(hash.Sum(nil))
}

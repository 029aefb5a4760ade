package nanny

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"

	"github.com/coredns/caddy"
)

// children owns every child of this process. CoreDNS builds a new instance from a changed Corefile while the old
// one serves, and forgets a new one that failed, so no instance can own them.
var children = &owner{entries: map[string]*entry{}}

// load is one reading of the Corefile: what all its nanny blocks have in common. It holds the supervisors of its blocks.
type load struct {
	parent   *load         // the load in service that this one is to replace; nil from then on, and at the first start
	released chan struct{} // closed when it holds nothing any more
	once     sync.Once
	listens  map[netip.AddrPort]*Nanny // fixed addresses and the first block with each
}

// entry is a supervisor and the loads that hold it, with what each wants of it.
type entry struct {
	sup   *supervisor
	holds map[*load]hold
}

// hold is one load's use of a supervisor.
type hold struct {
	set   settings
	zones []string // the label of each block that uses it
}

// owner maps the spec of a child to its supervisor. A supervisor lives while at least one load holds it:
//
//	acquire        by the hook OnStartup of a block: held by that load. Equal specs, in another block or in the
//	               load that is replaced, are the same supervisor: its child isn't touched
//	restart        OnRestart: loads made from now on are the successors of this one
//	restartFailed  OnRestartFailed: successors let go what they hold; what only they held ends
//	shutdown       OnShutdown after OnRestart, that is, a successor serves: this load lets go. OnShutdown alone is the
//	               end of CoreDNS, where the children still answer while health waits: nothing happens
//	finalShutdown  OnFinalShutdown: this load lets go
//
// A first start that fails, SIGQUIT and SIGKILL run no hook: there the child ends by its parent-death signal.
type owner struct {
	mu         sync.Mutex
	entries    map[string]*entry
	restarting *load
}

// loadKey is where the load is kept in CoreDNS's instance.
type loadKey struct{}

// loadOf returns the load that c belongs to; the first time it registers the load's hooks.
func (o *owner) loadOf(c *caddy.Controller) *load {
	if l, ok := c.Get(loadKey{}).(*load); ok {
		return l
	}
	o.mu.Lock()
	l := &load{parent: o.restarting, released: make(chan struct{}), listens: map[netip.AddrPort]*Nanny{}}
	o.mu.Unlock()
	c.Set(loadKey{}, l)
	c.OnRestart(func() error { return o.restart(l) })
	c.OnRestartFailed(func() error { return o.restartFailed(l) })
	c.OnShutdown(func() error { return o.shutdown(l) })
	c.OnFinalShutdown(func() error { return o.release(l) })
	return l
}

// claim refuses a fixed address that another block of the Corefile has for another child.
func (l *load) claim(n *Nanny) error {
	addr := n.spec.listen
	if !addr.IsValid() {
		return nil
	}
	if first := l.listens[addr]; first != nil && first.spec.key() != n.spec.key() {
		return fmt.Errorf("%s: listen %s belongs to the block at %s, whose dnsmasq is another", n.where, addr, first.where)
	}
	l.listens[addr] = n
	return nil
}

// acquire gives the supervisor for sp to l, and tells whether it was started for that.
func (o *owner) acquire(l *load, sp spec, set settings, zones string) (sup *supervisor, fresh bool, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	e := o.entries[sp.key()]
	if e == nil {
		reason, gate := "initial", (<-chan struct{})(nil)
		if l.parent != nil {
			reason, gate = "corefile", l.parent.released
		}
		sup, err := newSupervisor(sp, set, reason, gate)
		if err != nil {
			return nil, false, err
		}
		e = &entry{sup: sup, holds: map[*load]hold{}}
		o.entries[sp.key()] = e
		fresh = true
	}
	e.holds[l] = hold{set: set, zones: append(e.holds[l].zones, zones)}
	return e.sup, fresh, nil
}

func (o *owner) restart(l *load) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.restarting = l
	return nil
}

func (o *owner) restartFailed(l *load) error {
	o.mu.Lock()
	o.restarting = nil
	successors := map[*load]bool{}
	for _, e := range o.entries {
		for h := range e.holds {
			if h.parent == l {
				successors[h] = true
			}
		}
	}
	o.mu.Unlock()
	for s := range successors {
		if err := o.release(s); err != nil {
			return err
		}
	}
	return nil
}

func (o *owner) shutdown(l *load) error {
	o.mu.Lock()
	replaced := o.restarting == l
	if replaced {
		o.restarting = nil
	}
	o.mu.Unlock()
	if replaced {
		return o.release(l)
	}
	return nil
}

// release lets go what l holds and waits for the end of what nobody else holds. What goes on gets the settings that its
// remaining holder wants; what takes the place of what ends goes on with its counts.
func (o *owner) release(l *load) error {
	o.mu.Lock()
	served := l.parent == nil
	ending := map[*supervisor][]string{} // with the labels of its blocks
	goingOn := map[*supervisor]settings{}
	gone := map[string]bool{}
	for key, e := range o.entries {
		held, ok := e.holds[l]
		if !ok {
			continue
		}
		for _, zones := range held.zones {
			gone[zones] = true
		}
		delete(e.holds, l)
		if len(e.holds) == 0 {
			delete(o.entries, key)
			ending[e.sup] = held.zones
			continue
		}
		if !served {
			continue // its settings weren't in force
		}
		for _, h := range e.holds {
			goingOn[e.sup] = h.set
		}
	}
	for _, e := range o.entries {
		for h := range e.holds {
			if h.parent == l {
				h.parent = nil
			}
		}
	}
	left := o.byZones()
	for zones := range left {
		delete(gone, zones)
	}
	var wg sync.WaitGroup
	for sup, labels := range ending {
		heirs := map[*supervisor]bool{}
		for _, zones := range labels {
			if served && len(left[zones]) > 0 {
				heirs[left[zones][0]] = true
			}
		}
		counted := sup.counts()
		for heir := range heirs {
			heir.inherit(counted)
		}
		wg.Go(func() {
			sup.stop()
			rest := sup.counts()
			rest.add(counted, -1)
			for heir := range heirs {
				heir.inherit(rest)
			}
		})
	}
	o.mu.Unlock()

	for zones := range gone {
		forget(zones)
	}
	for sup, set := range goingOn {
		sup.configure(set)
	}
	wg.Wait()
	l.once.Do(func() { close(l.released) })
	return nil
}

// supervisors gives the supervisors in service by the zones of the blocks that use them.
func (o *owner) supervisors() map[string][]*supervisor {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.byZones()
}

// byZones is supervisors for those who have the lock. Their order is always the same.
func (o *owner) byZones() map[string][]*supervisor {
	m := map[string][]*supervisor{}
	for _, key := range slices.Sorted(maps.Keys(o.entries)) {
		e := o.entries[key]
		for l, h := range e.holds {
			if l.parent != nil {
				continue
			}
			for _, zones := range h.zones {
				if !slices.Contains(m[zones], e.sup) {
					m[zones] = append(m[zones], e.sup)
				}
			}
		}
	}
	return m
}

package nanny

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/miekg/dns"
)

// try is one attempt to bring a configuration into service, on a goroutine of its own beside the supervisor's loop.
type try struct {
	*supervisor
	cur    *running // the child in service; nil: none
	cfg    *config
	check  bool   // cfg is new: let dnsmasq check it first
	hup    bool   // SIGHUP will do where it can
	reason string // label of starts_total
	hurry  func() // ends the child that is still draining, if there is one
}

// transientError is one that the configuration isn't to blame for: an address that is taken, a disk that is full.
// What failed so is tried again.
type transientError struct{ error }

// Unwrap returns the reason.
func (e *transientError) Unwrap() error { return e.error }

// do tries it. ctx ends it early; what it has started it then stops.
func (t try) do(ctx context.Context) outcome {
	if t.hup && t.check && t.cur != nil && len(t.cfg.exclusive) > 0 && t.cur.cfg.rereadable(t.cfg) {
		err := t.reread(ctx)
		if err == nil {
			return outcome{keep: true, run: t.cur, how: "SIGHUP"}
		}
		log.Warningf("SIGHUP didn't apply the change, dnsmasq is started anew: %v", err)
	}
	dir, err := t.stage.write(t.cfg)
	if err != nil {
		return outcome{keep: true, err: err}
	}
	if t.check {
		err := t.test(ctx, dir)
		for n := 1; n < killTries && killed(err); n++ {
			err = t.test(ctx, dir)
		}
		if err == nil {
			err = t.cfg.absent(t.spec.dir)
		}
		if err != nil {
			t.stage.remove(dir)
			return outcome{keep: true, err: err}
		}
	}
	if err := t.awaitGate(ctx); err != nil {
		t.stage.remove(dir)
		return outcome{keep: true, err: err}
	}
	t.hurry() // there are never three

	how, inPlace := "swap", t.cur != nil && len(t.cfg.exclusive) > 0 && len(t.cur.cfg.exclusive) > 0
	switch {
	case t.cur == nil:
		how = "start"
	case inPlace:
		how = "in place"
		t.cur.taken.Store(true)
		t.up.hold()
		t.end(t.cur)
	}
	run, err := t.launch(ctx, t.cfg, dir)
	switch {
	case err == nil:
		return outcome{run: run, how: how}
	case !inPlace:
		return outcome{keep: true, err: err}
	case ctx.Err() != nil:
		return outcome{err: err}
	}
	back, backErr := t.relaunch(ctx, t.cur.cfg)
	if backErr != nil {
		err = fmt.Errorf("%w (and the one before doesn't start again: %w)", err, backErr)
	}
	return outcome{run: back, how: how, err: err}
}

// awaitGate waits until a child that may not run beside others can start.
func (t try) awaitGate(ctx context.Context) error {
	if len(t.cfg.exclusive) == 0 || t.gate == nil {
		return nil
	}
	t.gatedOnce.Do(func() { close(t.gated) })
	select {
	case <-t.gate:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// relaunch starts a known configuration again.
func (t try) relaunch(ctx context.Context, cfg *config) (*running, error) {
	dir, err := t.stage.write(cfg)
	if err != nil {
		return nil, err
	}
	return t.launch(ctx, cfg, dir)
}

// test lets dnsmasq check the configuration staged in dir, as the user that is to run it.
func (t try) test(ctx context.Context, dir string) error {
	addr := t.spec.listen
	if !addr.IsValid() {
		addr = netip.AddrPortFrom(loopback, 1024) // nothing is bound
	}
	ch, err := start(command{
		// First: an option in args that lacks its argument would take it for that, and dnsmasq would run.
		path: t.spec.path, args: append([]string{"--test"}, t.cfg.commandLine(t.spec, dir, addr)...), port: port{addr: addr}, priv: t.cfg.priv,
		emit: func(string) {},
	})
	if err != nil {
		return &transientError{err}
	}
	ctx, cancel := context.WithTimeoutCause(ctx, checkTime, fmt.Errorf("dnsmasq --test took longer than %s", checkTime))
	defer cancel()
	select {
	case <-ch.done:
		if exit := (*exitError)(nil); errors.As(ch.err, &exit) && exit.status != exitedWell {
			return t.explain(exit, dir)
		}
		return nil
	case <-ctx.Done():
		ch.stop(0)
		return context.Cause(ctx)
	}
}

// launch starts a child on cfg, staged in dir, and returns it when it answers. On failure dir is removed.
func (t try) launch(ctx context.Context, cfg *config, dir string) (run *running, err error) {
	defer func() {
		if err != nil {
			t.stage.remove(dir)
		}
	}()
	preparing := cfg.leases.prepare(cfg.priv)
	names := t.names(dir)
	emit := func(line string) { logLine(names.Replace(line)) }
	for n := 1; ; n++ {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		p, err := takePort(t.spec.listen)
		if err != nil {
			return nil, &transientError{err}
		}
		addr := p.addr
		ch, err := start(command{
			path: t.spec.path, args: cfg.commandLine(t.spec, dir, addr), port: p, priv: cfg.priv, emit: emit,
		})
		if err != nil {
			p.release()
			return nil, &transientError{err}
		}
		if n == 1 { // another port is the same start
			t.stats.start(t.reason)
		}
		readyCtx, cancel := context.WithTimeoutCause(ctx, readyTime,
			fmt.Errorf("dnsmasq (pid %d) didn't answer on %s within %s", ch.pid, addr, readyTime))
		slow := time.AfterFunc(slowTime, func() {
			log.Errorf("dnsmasq (pid %d) doesn't answer on %s after %s; it is given up after %s", ch.pid, addr, slowTime, readyTime)
		})
		err = awaitReady(readyCtx, ch)
		slow.Stop()
		cancel()
		if err == nil {
			err = p.reclaim()
		}
		if err == nil {
			var b *backend
			if b, err = newBackend(addr); err == nil {
				run := &running{child: ch, backend: b, cfg: cfg, leases: cfg.leases, dir: dir, since: time.Now()}
				run.hung = watchdog(run, &t.retired)
				run.probes.Store(1)
				return run, nil
			}
			err = &transientError{err}
		}
		ch.stop(stopTime)
		exit := (*exitError)(nil)
		if errors.As(err, &exit) {
			taken := strings.Contains(exit.tail, "Address already in use")
			if taken && !t.spec.listen.IsValid() && n < portTries {
				continue
			}
			if n < killTries && killed(err) {
				continue
			}
			err = cfg.leases.advice(t.explain(exit, dir), cfg.priv, preparing)
			if taken { // that of another service, DHCP's say
				err = &transientError{err}
			}
		}
		if len(cfg.priv.missing) > 0 {
			err = fmt.Errorf("%w (CoreDNS lacks %s, which this configuration needs)", err, strings.Join(cfg.priv.missing, ", "))
		}
		return nil, err
	}
}

// killed tells whether somebody else ended the child, with SIGKILL or SIGTERM: the configuration isn't to blame.
func killed(err error) bool {
	exit := (*exitError)(nil)
	return errors.As(err, &exit) && slices.Contains([]string{"signal: killed", "signal: terminated", exitedWell}, exit.status)
}

// names puts the watched files in the place of those staged in dir, where dnsmasq speaks of them.
func (t try) names(dir string) *strings.Replacer {
	own := filepath.Join(dir, hostsDir, generationFile) // not a watched file: it stays
	return strings.NewReplacer(
		own, own,
		filepath.Join(dir, confDir)+"/", t.spec.dir+"/",
		filepath.Join(dir, hostsDir)+"/", t.spec.dir+"/",
	)
}

// explain names the watched files where dnsmasq's last words name the staged ones.
func (t try) explain(e *exitError, dir string) error {
	return &exitError{status: e.status, tail: t.names(dir).Replace(e.tail)}
}

// generation is a name in a hosts file of nanny's own. SIGHUP has no mark of completion; but once dnsmasq gives the
// new address for this name, it has read all that it reads again.
const (
	generation     = "generation.nanny.invalid."
	generationFile = "generation"
	rereadTime     = 5 * time.Second
)

func generationRecord(n uint32) (record []byte, addr netip.Addr) {
	var bytes [4]byte
	binary.BigEndian.PutUint32(bytes[:], n)
	bytes[0] = 127
	addr = netip.AddrFrom4(bytes)
	return fmt.Appendf(nil, "%s %s\n", addr, strings.TrimSuffix(generation, ".")), addr
}

// reread applies the change with SIGHUP and returns when the child answers from the new files.
func (t try) reread(ctx context.Context) error {
	if _, err := t.cur.child.ask(versionProbe(), probeWait); err != nil { // a hung one is left to the watchdog
		return err
	}
	t.cur.probes.Add(1)
	if err := t.stage.update(t.cur.dir, t.cur.cfg, t.cfg); err != nil {
		return err
	}
	t.cur.generation++
	record, addr := generationRecord(t.cur.generation + 1)
	if err := writeStaged(filepath.Join(t.cur.dir, hostsDir, generationFile), newText(record), t.cfg.priv); err != nil {
		return err
	}
	t.cur.reading.Store(true)
	defer t.cur.reading.Store(false)
	if err := t.cur.child.signal(syscall.SIGHUP); err != nil {
		return err
	}
	q := new(dns.Msg)
	q.SetQuestion(generation, dns.TypeA)
	for deadline := time.Now().Add(rereadTime); time.Now().Before(deadline); {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-t.cur.child.done:
			return t.cur.child.err
		case <-time.After(refusedWait):
		}
		r, err := t.cur.child.ask(q, probeWait)
		if err != nil || len(r.Answer) == 0 {
			continue
		}
		if a, ok := r.Answer[0].(*dns.A); ok && a.A.Equal(addr.AsSlice()) {
			t.cur.backend.renew()
			return nil
		}
	}
	return fmt.Errorf("dnsmasq (pid %d) hasn't read its files again within %s", t.cur.child.pid, rereadTime)
}

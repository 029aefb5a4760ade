package nanny

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	readyTime   = 30 * time.Second // a child that doesn't answer by then is given up
	slowTime    = 5 * time.Second  // and one that doesn't by then is said
	checkTime   = 20 * time.Second // for dnsmasq --test
	settledTime = 10 * time.Second // a child that lived so long isn't part of a crash loop
	minBackoff  = 100 * time.Millisecond
	maxBackoff  = 10 * time.Second
	servedPause = 150 * time.Millisecond // the longest after a child that had served: queries wait for the next one
	patience    = 64                     // so many of those in a row; then the pauses grow, if no query was answered
	tryLimit    = time.Second            // for a change to take the place of a child that has ended
	portTries   = 5
	killTries   = 3               // for a child that others end before it answers
	startTries  = 3               // for the directory's configuration at the start; then dnsmasq starts without it
	firstLook   = 6 * time.Second // for the directory at the start
)

// spec says what a block's children are made of. Equal specs are the same child across a reload of the Corefile.
type spec struct {
	path   string // of the program
	args   []string
	dir    string         // the watched directory; empty: none
	listen netip.AddrPort // fixed address; invalid: 127.0.0.1 and a free port
}

// key tells specs apart.
func (sp spec) key() string { return fmt.Sprintf("%q %q %q %q", sp.path, sp.args, sp.dir, sp.listen) }

// reloadMode is the value of the property reload.
type reloadMode int

const (
	reloadAuto reloadMode = iota
	reloadRestart
	reloadOff
)

// settings are what may change on a running supervisor.
type settings struct {
	interval time.Duration // of the directory's rescan
	reload   reloadMode
	zones    []string         // of a block that uses it
	resolver []netip.AddrPort // for host names used as servers; none: the system's
	timeout  time.Duration    // a child that is replaced has so long to finish its queries
	stats    time.Duration    // between two SIGUSR1; 0: none
}

// running is a child that has answered, with what belongs to it.
type running struct {
	child   *child
	backend *backend
	cfg     *config         // the loop's and the attempt's
	leases  leases          // of cfg; SIGHUP doesn't change them
	dir     string          // its staging directory
	hung    <-chan struct{} // closed when it lives but answers nothing
	since   time.Time       // when it became ready

	probes     atomic.Int64 // CHAOS questions it has answered to nanny
	counted    bool         // its statistics are in the sum of the past; the scraper's
	taken      atomic.Bool  // an attempt has ended it on purpose
	reading    atomic.Bool  // its files again: it may answer nothing meanwhile
	generation uint32       // how often it was made to read its files again
}

// supervisor keeps one dnsmasq in service. Its loop (run) is the only one that starts and stops children, through
// at most one attempt at a time, so that there are never more than two. It is in one of these states:
//
//	serving    cur answers, nothing to do
//	changing   cur answers while an attempt checks and starts its successor; in place, the attempt owns cur
//	starting   no cur; an attempt starts one; queries wait
//	pausing    no cur, none could be kept alive; the next attempt comes when retry fires, or with the next change
//
// A change (want) is tried from each state but while another is being tried; the newest wins. If it fails, the
// configuration before it (good) goes on, with cur as it was or started again.
type supervisor struct {
	spec   spec
	reason string          // of the first start: initial or corefile
	gate   <-chan struct{} // closed when a child that may not run beside its predecessor may start; nil: now
	up     *upstream
	stats  *stats
	loop   loopGuard

	looks       chan look     // the directory's newest state; capacity 1
	reconfigure chan settings // unbuffered
	quit        chan struct{}
	done        chan struct{} // closed when the loop and all that it owns have ended
	first       chan error    // the outcome of the first attempt, once

	// The loop's own.
	set       settings
	stage     *staging
	cur       *running
	good      *config // what a new child is started from
	want      *config // the change to try next
	later     *config // a change that failed for a transient reason, to be tried when retry fires
	awaiting  *config // a change that was refused for want of an interface: later, when it is there
	doubtful  *config // a change that was refused while no child served: if good doesn't start either, it may not be to blame
	pending   *config // with reload off: the change that waits for a start
	attempt   *attempt
	outcomes  chan outcome // capacity 1
	retired   sync.WaitGroup
	gated     chan struct{} // closed when an attempt waits at the gate
	gatedOnce sync.Once
	restore   bool   // good comes first, though a change is wanted
	hurry     func() // ends the draining of the child before cur, and waits for it
	retry     *time.Timer
	paused    bool // until retry fires
	short     int  // children in a row that lived less than settledTime
	failures  int  // starts of good in a row that failed
	tries     int  // of later that failed
	looked    bool // the directory was seen, or there is none
	reloaded  bool // the Corefile was, and the directory not seen since: what it holds is applied, reload off or not
	warned    map[string]bool
	known     map[string][]netip.Addr // of the servers in stubDomains, from one watch to the next
}

// attempt is the change or start under way.
type attempt struct {
	cancel context.CancelFunc
	alone  bool // no other may be started in its place
}

// outcome is what became of an attempt.
type outcome struct {
	keep bool     // cur stays what it is, if anything; it may have ended meanwhile
	run  *running // else: what is cur from now on; nil: there is none. With SIGHUP: whose files were read again
	cfg  *config  // what was to be applied
	how  string   // swap, in place, SIGHUP or start
	err  error    // why run isn't cfg's
	took time.Duration
}

// newSupervisor starts a supervisor. gate may be nil.
func newSupervisor(sp spec, set settings, reason string, gate <-chan struct{}) (*supervisor, error) {
	stage, err := newStaging()
	if err != nil {
		return nil, err
	}
	s := &supervisor{
		spec: sp, set: set, reason: reason, gate: gate, stage: stage,
		up:          newUpstream(),
		stats:       newStats(),
		looks:       make(chan look, 1),
		reconfigure: make(chan settings),
		quit:        make(chan struct{}),
		done:        make(chan struct{}),
		first:       make(chan error, 1),
		outcomes:    make(chan outcome, 1),
		gated:       make(chan struct{}),
		hurry:       func() {},
		retry:       time.NewTimer(firstLook),
		looked:      sp.dir == "",
		warned:      map[string]bool{},
	}
	s.stats.valid.Store(true)
	for _, d := range parseArgs(sp.args) {
		if d.name == "conf-file" || d.name == "conf-dir" {
			log.Infof("%s %s in args isn't watched: dnsmasq reads it when it is started", d.name, d.value)
		}
	}
	go s.run()
	return s, nil
}

// configure changes the settings; the child isn't touched. A change that reload off held back is applied.
func (s *supervisor) configure(set settings) {
	select {
	case s.reconfigure <- set:
	case <-s.done:
	}
}

// stop ends the child and everything else, and waits for it. It may be called once.
func (s *supervisor) stop() {
	close(s.quit)
	<-s.done
}

func (s *supervisor) run() {
	defer close(s.done)
	watch := s.watch()
	statsTick := newTicker(s.set.stats)
	for {
		s.proceed()
		var exited, hung <-chan struct{}
		if s.cur != nil {
			exited, hung = s.cur.child.done, s.cur.hung
		}
		select {
		case <-s.quit:
			statsTick.Stop()
			s.shutdown()
			watch() // last: a directory on a file system that hangs doesn't keep children from their end
			return
		case set := <-s.reconfigure:
			watch()
			statsTick.Stop()
			s.set, s.reloaded = set, true
			select {
			case <-s.looks: // a new one comes
			default:
			}
			watch, statsTick = s.watch(), newTicker(set.stats)
		case l := <-s.looks:
			s.saw(l)
		case o := <-s.outcomes:
			s.settle(o)
		case <-exited:
			s.lost()
		case <-hung:
			log.Errorf("dnsmasq (pid %d) lives but answers nothing; killing it", s.cur.child.pid)
			s.cur.hung = nil
			ch := s.cur.child
			s.retired.Go(func() { ch.stop(0) })
		case <-s.retry.C:
			s.retried()
		case <-statsTick.C:
			if s.cur != nil {
				if err := s.cur.child.signal(syscall.SIGUSR1); err != nil {
					log.Error(err)
				}
			}
		}
	}
}

// newTicker is a time.NewTicker that never ticks for d 0.
func newTicker(d time.Duration) *time.Ticker {
	if d > 0 {
		return time.NewTicker(d)
	}
	t := time.NewTicker(time.Hour)
	t.Stop()
	return t
}

// watch starts to look at the directory and returns a function that ends that.
func (s *supervisor) watch() (stop func()) {
	if s.spec.dir == "" {
		return func() {}
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	e := newEye(s.spec, s.set.resolver, s.looks)
	e.resolver.known = s.known
	wg.Go(func() { watchDir(ctx, s.spec.dir, s.set.interval, func(event bool) { e.look(ctx, event) }) })
	return func() {
		cancel()
		wg.Wait()
		s.known = e.resolver.known
	}
}

// proceed starts the next attempt, if there is cause for one.
func (s *supervisor) proceed() {
	switch {
	case s.attempt != nil:
	case s.want != nil && s.good != nil && s.want.version == s.good.version:
		s.want = nil
		s.proceed()
	case s.want != nil && (!s.restore || s.cur != nil):
		cfg := s.want
		s.want = nil
		s.begin(cfg, true)
	case s.cur == nil && s.looked && !s.paused:
		if s.good == nil {
			base, err := newConfig(s.spec, nil, nil, nil)
			if err != nil {
				s.settle(outcome{err: err, how: "start"})
				return
			}
			s.good = base
		}
		s.begin(s.good, false)
	}
}

// begin starts an attempt at cfg, which is to be checked first or is known as good.
func (s *supervisor) begin(cfg *config, check bool) {
	ctx, cancel := context.WithCancel(context.Background())
	s.paused = false
	s.retry.Stop()
	alone := s.cur == nil
	if alone && check && s.good != nil { // good is tried if the change takes long, longer each time that this fails
		alone = false
		s.retry.Reset(tryLimit << min(s.failures, 5))
	}
	s.attempt = &attempt{cancel: cancel, alone: alone}
	t := try{
		supervisor: s, cur: s.cur, cfg: cfg, check: check, hurry: s.hurry,
		reason: s.startReason(check), hup: s.set.reload == reloadAuto,
	}
	start := time.Now()
	go func() {
		o := t.do(ctx)
		o.cfg, o.took = cfg, time.Since(start)
		s.outcomes <- o
	}()
}

// startReason is the label of starts_total.
func (s *supervisor) startReason(change bool) string {
	switch {
	case s.good == nil || s.stats.started.Load() == 0:
		return s.reason
	case change:
		return "config"
	}
	return "exit"
}

// settle takes over what an attempt has led to.
func (s *supervisor) settle(o outcome) {
	if s.attempt != nil {
		s.attempt.cancel()
		s.attempt = nil
	}
	s.paused = false // it was the attempt's turn
	if o.how == "SIGHUP" {
		o.run.cfg = o.cfg
		s.watchLoop()
	}
	if prev := s.cur; !o.keep && o.run != prev {
		s.cur = o.run
		if o.run != nil {
			s.up.use(o.run.backend)
		}
		s.stats.run.Store(o.run)
		s.watchLoop()
		if prev != nil && o.how == "swap" {
			s.retire(prev)
		}
	}
	if s.cur != nil {
		s.up.down(false)
		s.restore = false
	}
	failed := s.failures > 0
	if o.err == nil {
		s.failures = 0
	}
	var old *config
	switch {
	case errors.Is(o.err, context.Canceled):
		if s.want == nil && o.cfg != s.good {
			s.want = o.cfg // its turn comes again
		}
	case o.err == nil && o.cfg == s.good:
		log.Infof("dnsmasq started: pid=%d took=%s", s.cur.child.pid, seconds(o.took))
		if failed { // what kept it from starting may have kept the change, too
			s.tries = 0
		}
		if s.later != nil {
			s.retry.Reset(backoff(max(s.tries, 1), maxBackoff))
		}
		if failed && s.want == nil {
			s.want = s.doubtful
		}
		s.doubtful = nil
	case o.err == nil:
		old, s.good = s.good, o.cfg
		s.applied(old, o)
	case o.cfg == s.good || o.cfg == nil: // a start failed
		log.Errorf("dnsmasq can't be started: %v", o.err)
		s.restore = false // a change that is wanted may mend it
		s.later = cmp.Or(s.later, s.doubtful)
		s.failures++
		s.up.down(true)
		s.pause(backoff(s.failures, maxBackoff))
	case errors.As(o.err, new(*transientError)):
		log.Errorf("Configuration not applied, to be tried again: version=%.8s: %v", o.cfg.version, o.err)
		s.stats.reload("failed")
		if s.want == nil { // else there is a newer one
			s.later = o.cfg
		}
		s.tries++
		s.retry.Reset(backoff(s.tries, maxBackoff))
		if s.good == nil && s.tries < startTries { // else that starts meanwhile, or dnsmasq without the directory
			s.paused = true
			s.up.down(true)
		}
	default:
		s.rejected(o)
	}
	select {
	case s.first <- o.err:
	default:
	}
}

// watchLoop looks whether the child in service forwards to CoreDNS.
func (s *supervisor) watchLoop() {
	if run, zones := s.cur, s.set.zones; run != nil {
		s.retired.Go(func() { s.loop.watch(run, zones) })
	}
}

// lost deals with an unexpected end of cur.
func (s *supervisor) lost() {
	run := s.cur
	s.cur = nil
	s.stats.run.Store(nil)
	if run.taken.Load() {
		return
	}
	s.stats.exit()
	s.up.drop(run.backend)
	s.stats.scraper.end(run)
	s.stage.remove(run.dir)
	var wait time.Duration
	switch {
	case time.Since(run.since) >= settledTime:
		s.short = 0
	case run.backend.answers() > 0: // it is of use, however often that happens
		s.short = min(s.short+1, patience)
	default:
		s.short++
	}
	if s.short > 1 {
		wait = servedBackoff(s.short - 1)
	}
	log.Errorf("dnsmasq (pid %d) ended unexpectedly: %v; a new one starts in %s", run.child.pid, run.child.err, seconds(wait))
	s.wantPending()
	switch {
	case s.attempt != nil: // its child takes over; but don't let queries wait for one that takes long
		s.pause(tryLimit)
	case wait > 0:
		s.pause(wait)
	}
}

// servedBackoff is the pause after n children in a row that had served, but not for long.
func servedBackoff(n int) time.Duration {
	if n <= patience {
		return backoff(n, servedPause)
	}
	return backoff(n-patience, maxBackoff)
}

// backoff is the pause after n failures, n at least 1: doubled from minBackoff to limit, a quarter more or less.
func backoff(n int, limit time.Duration) time.Duration {
	d := minBackoff << min(n-1, 10)
	d = min(d, limit)
	return d*3/4 + rand.N(d/2) // #nosec G404 -- jitter
}

func (s *supervisor) pause(d time.Duration) {
	s.paused = true
	s.retry.Reset(d)
}

// retried ends a pause.
func (s *supervisor) retried() {
	s.paused = false
	switch {
	case s.want != nil:
		s.later = nil
	case s.cur == nil && s.good != nil && s.failures == 0: // good comes first
	default:
		s.want, s.later = s.later, nil
	}
	if !s.looked {
		log.Warningf("%s wasn't read in %s; dnsmasq starts without it", s.spec.dir, seconds(firstLook))
		s.looked = true
	}
	if s.attempt != nil && s.cur == nil && !s.attempt.alone {
		s.restore = true
		s.attempt.cancel()
	}
}

// saw takes what the directory holds now.
func (s *supervisor) saw(l look) {
	s.looked = true
	reloaded := s.reloaded
	s.reloaded = false
	valid := s.stats.valid.Load()
	s.stats.looked(l)
	if l.repeated {
		return
	}
	s.later, s.doubtful, s.tries = nil, nil, 0
	if l.err != nil {
		s.want, s.pending = nil, nil
		if s.cur == nil && s.good == nil {
			log.Errorf("Configuration rejected, dnsmasq starts without it: %v", l.err)
		} else {
			log.Errorf("Configuration rejected, the one before stays in service: %v", l.err)
		}
		return
	}
	for _, w := range l.cfg.warnings {
		w = s.spec.dir + "/" + w
		if !s.warned[w] {
			s.warned[w] = true
			log.Warning(w)
		}
	}
	if s.attempt == nil && s.good != nil && l.cfg.version == s.good.version {
		s.want, s.pending = nil, nil
		if !valid {
			log.Infof("%s holds the configuration in service again: version=%.8s", s.spec.dir, l.cfg.version)
		}
		return
	}
	if s.set.reload == reloadOff && s.good != nil && !reloaded {
		log.Infof("Configuration changed, not applied (reload off): version=%.8s %s", l.cfg.version, s.good.changes(l.cfg))
		s.pending = l.cfg
		s.stats.held.Store(true)
		return
	}
	s.want, s.pending = l.cfg, nil
}

// wantPending makes a change wanted that reload off held back.
func (s *supervisor) wantPending() {
	if s.pending != nil {
		s.want, s.pending, s.later = s.pending, nil, nil
	}
}

func (s *supervisor) applied(old *config, o outcome) {
	s.doubtful, s.tries = nil, 0
	s.stats.applied(o, old == nil)
	if old == nil {
		old = &config{}
	}
	log.Infof("Configuration applied: version=%.8s %s pid=%d how=%q took=%s",
		o.cfg.version, old.changes(o.cfg), o.run.child.pid, o.how, seconds(o.took))
	if old.files.long() || o.cfg.files.long() {
		s.retired.Go(debug.FreeOSMemory) // CoreDNS itself needs a few MiB, and would keep five times as much
	}
}

func (s *supervisor) rejected(o outcome) {
	if errors.As(o.err, new(*absentError)) {
		told := s.awaiting == o.cfg
		s.awaiting = o.cfg
		if s.want == nil { // else there is a newer one
			s.later = o.cfg
			s.retry.Reset(s.set.interval)
		}
		if told {
			return
		}
	}
	s.stats.refused(o)
	stays := "the one before stays in service"
	if s.cur == nil {
		if s.want == nil {
			s.doubtful = o.cfg
		}
		stays = "dnsmasq starts with the one before"
		if s.good == nil {
			stays = "dnsmasq starts without it"
		}
	}
	log.Errorf("Configuration rejected, %s: %v", stays, o.err)
}

// retire lets a child that was replaced finish its queries, then ends it.
func (s *supervisor) retire(run *running) {
	ctx, cancel := context.WithTimeout(context.Background(), s.set.timeout)
	gone := make(chan struct{})
	s.hurry = func() {
		cancel()
		<-gone
	}
	hung := run.hung
	s.retired.Go(func() { // what it won't answer any more goes to its successor while there is time
		select {
		case <-hung:
			cancel()
		case <-run.child.done:
			cancel()
		case <-gone:
		}
	})
	s.retired.Go(func() {
		defer close(gone)
		defer cancel()
		run.backend.wait(ctx)
		s.end(run)
	})
}

// end sends run's queries to its successor, then stops it.
func (s *supervisor) end(run *running) {
	s.up.drop(run.backend)
	s.stats.scraper.end(run)
	run.child.stop(stopTime)
	s.stage.remove(run.dir)
}

// shutdown ends all, side by side: each child may take its time.
func (s *supervisor) shutdown() {
	s.retry.Stop()
	s.stats.run.Store(nil)
	s.up.close()
	s.retired.Go(s.hurry)
	if cur := s.cur; cur != nil {
		s.retired.Go(func() { s.end(cur) })
	}
	if s.attempt != nil {
		s.attempt.cancel()
		if o := <-s.outcomes; o.run != nil && o.run != s.cur {
			s.retired.Go(func() { s.end(o.run) })
		}
	}
	s.retired.Wait()
	s.stage.close()
}

// seconds prints d the way CoreDNS logs durations.
func seconds(d time.Duration) string { return fmt.Sprintf("%.3fs", d.Seconds()) }

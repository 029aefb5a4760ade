package test

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

var (
	soakTime = flag.Duration("soak", 10*time.Second, "how long TestSoak makes changes")
	soakSeed = flag.Uint64("seed", 1, "what TestSoak's changes are drawn from")
	soakRate = flag.Int("rate", 300, "TestSoak's queries a second over UDP; a tenth of it in addition over TCP")
)

// settled is how long a dnsmasq has to live for its end to be answered by a new start at once, and a little.
const settled = 10500 * time.Millisecond

// kind is what happens to a dnsmasq while queries wait; those for which they wait longer come later.
type kind int32

const (
	calm kind = iota
	bySwap
	bySIGHUP
	inPlace
	killed
	hung
)

func (k kind) String() string {
	return [...]string{"calm", "swap", "SIGHUP", "in place", "kill", "hung"}[k]
}

// soakKey is a name whose address tells which version of a file, or of the Corefile, is in service: 10.0.0.0 and the
// version. Configurations that aren't valid have 11.0.0.0 and more. Version 0 is what remains of a half-written file.
type soakKey struct {
	name  string // the question
	file  string // in the watched directory; empty: it is an argument in the Corefile
	write func(t *testing.T, content string)

	newest atomic.Uint32 // valid version
	floor  atomic.Uint32 // version that was in service once all had settled: none before it may come again
}

func (k *soakKey) content(address string) string {
	host := strings.TrimSuffix(k.name, ".")
	if strings.HasSuffix(k.file, ".hosts") {
		return "# a version of the soak test\n" + address + " " + host + "\n"
	}
	return "# a version of the soak test\naddress=/" + host + "/" + address + "\n"
}

// next writes the next version.
func (k *soakKey) next(t *testing.T) {
	t.Helper()
	k.write(t, k.content(validAddress(k.newest.Add(1)))) // known before it can be answered
}

func validAddress(version uint32) string { return soakAddress(10, version) }

func soakAddress(first byte, version uint32) string {
	return fmt.Sprintf("%d.%d.%d.%d", first, byte(version>>16), byte(version>>8), byte(version))
}

// soakBlock is a nanny block and what the test knows of it.
type soakBlock struct {
	name   string
	zone   string
	port   int // of CoreDNS
	listen int // of its dnsmasq; 0: swappable
	dir    string
	volume *volume
	keys   []*soakKey
	args   *soakKey // one of keys: that in the Corefile
	hosts  *soakKey // and that in a hosts file

	kind   atomic.Int32
	pid    int       // of its dnsmasq when the last step began
	since  time.Time // it was seen first
	deaths int
	gap    time.Duration // the longest time that a file was half written
}

func newSoakBlock(t *testing.T, name, zone string, listen int) *soakBlock {
	t.Helper()
	b := &soakBlock{name: name, zone: zone, listen: listen, port: freePort(t)}
	b.dir = configDir(t, nil)
	b.volume = &volume{dir: b.dir}
	byRename := func(file string) func(*testing.T, string) {
		return func(t *testing.T, content string) { t.Helper(); put(t, b.dir, file, content) }
	}
	b.keys = []*soakKey{
		{name: "renamed." + zone, file: "renamed.conf", write: byRename("renamed.conf")},
		{name: "written." + zone, file: "written.conf", write: b.overwrite},
		{name: "swapped." + zone, file: "swapped.conf", write: func(t *testing.T, content string) { t.Helper(); b.swap(t, content, "{}") }},
		{name: "hosts." + zone, file: "names.hosts", write: byRename("names.hosts")},
		{name: "args." + zone},
	}
	b.hosts, b.args = b.keys[3], b.keys[4]
	put(t, b.dir, "00.conf", "no-resolv\nno-hosts\naddress=/"+strings.TrimSuffix(zone, ".")+"/"+validAddress(0)+"\n")
	for _, k := range b.keys {
		if k.file != "" {
			k.next(t)
		}
	}
	b.args.newest.Add(1)
	return b
}

// overwrite truncates written.conf and writes it in pieces.
func (b *soakBlock) overwrite(t *testing.T, content string) {
	t.Helper()
	begin := time.Now()
	f, err := os.OpenFile(filepath.Join(b.dir, "written.conf"), os.O_WRONLY|os.O_TRUNC|os.O_CREATE, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(content) {
		if _, err := f.WriteString(line); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Millisecond)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	b.gap = max(b.gap, time.Since(begin))
}

// swap brings in swapped.conf and stubDomains as the kubelet does.
func (b *soakBlock) swap(t *testing.T, conf, stubDomains string) {
	t.Helper()
	b.volume.swap(t, map[string]string{"swapped.conf": conf, "stubDomains": stubDomains})
}

// confKey draws one of the keys in a watched *.conf.
func (b *soakBlock) confKey(rng *rand.Rand) *soakKey { return b.keys[rng.IntN(3)] }

func (b *soakBlock) addr() string { return fmt.Sprintf("127.0.0.1:%d", b.port) }

// corefile returns b's server block with an address for the key in its arguments.
func (b *soakBlock) corefile(address, more string) string {
	block := fmt.Sprintf("nanny %s {\nconfig %s\nargs --address=/%s/%s\n", b.zone, b.dir, b.args.name, address)
	if b.listen != 0 {
		block += fmt.Sprintf("listen 127.0.0.1:%d\n", b.listen)
	}
	return server(b.port, block+"}\n"+more)
}

// services returns b's dnsmasq processes that are to answer.
func (b *soakBlock) services(c *coreDNS) []process {
	return slices.DeleteFunc(c.services(), func(p process) bool {
		return (p.arg("--address=/"+b.args.name+"/") == "")
	})
}

// child waits until b has exactly one dnsmasq that answers, notes and returns it.
func (b *soakBlock) child(t *testing.T, c *coreDNS) process {
	t.Helper()
	var list []process
	within(t, patience, "exactly one dnsmasq, "+b.name, func() bool {
		list = b.services(c)
		return len(list) == 1 && answers(list[0].addr())
	})
	if list[0].pid != b.pid {
		b.pid, b.since = list[0].pid, time.Now()
	}
	return list[0]
}

// inService waits until k's newest version is.
func (b *soakBlock) inService(t *testing.T, limit time.Duration, k *soakKey) {
	t.Helper()
	want, got := validAddress(k.newest.Load()), ""
	defer func() {
		if got != want {
			t.Logf("%s: last answer %s", k.name, got)
		}
	}()
	within(t, limit, k.name+" is "+want, func() bool {
		got = says("udp", b.addr(), k.name)
		return got == want
	})
}

// soak is the test's state.
type soak struct {
	c       *coreDNS
	blocks  []*soakBlock
	pprof   int    // port
	taken   int    // port that the test holds
	touch   string // program that must never run
	list    string // 110,000 lines
	load    *soakLoad
	reloads int
	failed  int
}

// corefile returns the Corefile with the newest arguments.
func (s *soak) corefile() string {
	return s.blocks[0].corefile(validAddress(s.blocks[0].args.newest.Load()), fmt.Sprintf("pprof 127.0.0.1:%d", s.pprof)) +
		s.blocks[1].corefile(validAddress(s.blocks[1].args.newest.Load()), "")
}

// event is something that happens: do makes it happen, settle waits for its outcome.
type event struct {
	name   string
	kind   kind
	do     func(t *testing.T)
	settle func(t *testing.T)
	limit  time.Duration // for what it has changed to be in service; 0: patience
	alone  bool          // without a reload of the Corefile in between
}

// Each deck is dealt in an order that the seed gives, then shuffled again.
var (
	blockDeck = []string{
		"change", "change", "change", "change", "change", "change", "change", "change", "invalid", "invalid",
		"burst", "burst", "burst", "hosts", "hosts", "hosts", "SIGKILL", "SIGKILL", "SIGTERM", "SIGTERM",
		"SIGKILL and change", "SIGKILL and change", "SIGSTOP", "list",
	}
	corefileDeck = []string{"unchanged", "unchanged", "arguments", "broken", "health port taken"}
)

// deck deals its cards for ever.
type deck struct {
	rng   *rand.Rand
	cards []string
	next  int
}

func (d *deck) deal() string {
	if d.next%len(d.cards) == 0 {
		d.cards = slices.Clone(d.cards)
		d.rng.Shuffle(len(d.cards), func(i, j int) { d.cards[i], d.cards[j] = d.cards[j], d.cards[i] })
	}
	d.next++
	return d.cards[(d.next-1)%len(d.cards)]
}

func upTo(rng *rand.Rand, d time.Duration) time.Duration { return time.Duration(rng.Int64N(int64(d))) }

// change is the usual kind of a change of b.
func (b *soakBlock) change() kind {
	if b.listen != 0 {
		return inPlace
	}
	return bySwap
}

// event makes the event card of b.
func (s *soak) event(b *soakBlock, card string, rng *rand.Rand) event {
	e := event{name: card, kind: b.change(), settle: func(*testing.T) {}}
	mark := s.c.logs.mark()
	k := b.confKey(rng)
	switch card {
	case "change":
		e.name += " of " + k.file
		e.do = k.next
	case "burst":
		n := 3 + rng.IntN(15)
		e.name += fmt.Sprintf(" of %d", n)
		e.do = func(t *testing.T) {
			t.Helper()
			for range n {
				b.confKey(rng).next(t)
				time.Sleep(upTo(rng, 60*time.Millisecond))
			}
		}
	case "invalid":
		return s.invalid(b, k, rng)
	case "hosts":
		e.do = b.hosts.next
		if b.listen != 0 {
			e.kind = bySIGHUP
			e.alone = true
			e.settle = func(t *testing.T) {
				t.Helper()
				s.c.logs.wait(t, mark, "Configuration applied", "SIGHUP")
				if now := b.services(s.c); len(now) != 1 || now[0].pid != b.pid {
					t.Errorf("%s: a change of hosts replaced pid %d by %v", b.name, b.pid, now)
				}
			}
		}
	case "SIGKILL", "SIGTERM", "SIGKILL and change":
		sig := syscall.SIGKILL
		if card == "SIGTERM" {
			sig = syscall.SIGTERM
		}
		e.kind = killed
		e.do = func(t *testing.T) {
			t.Helper()
			if card == "SIGKILL and change" {
				k.next(t)
				time.Sleep(upTo(rng, 250*time.Millisecond))
			}
			if err := syscall.Kill(b.pid, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
				t.Fatal(err)
			}
		}
		e.settle = func(t *testing.T) {
			t.Helper()
			within(t, patience, "the end of the killed dnsmasq", func() bool { return !alive(b.pid) })
		}
		b.deaths++
	case "SIGSTOP":
		e.kind, e.alone = hung, true
		e.do = func(t *testing.T) {
			t.Helper()
			kill(t, b.pid, syscall.SIGSTOP)
		}
		e.settle = func(t *testing.T) {
			t.Helper()
			s.c.logs.wait(t, mark, fmt.Sprintf("(pid %d) lives but answers nothing", b.pid))
		}
		b.deaths++
	case "list":
		e.limit, e.alone = 4*patience, true
		in := &soakKey{name: "list." + b.zone}
		in.newest.Store(1)
		e.do = func(t *testing.T) {
			t.Helper()
			put(t, b.dir, "list.conf", s.list+in.content(validAddress(1)))
		}
		e.settle = func(t *testing.T) {
			t.Helper()
			b.inService(t, e.limit, in)
			remove(t, b.dir, "list.conf")
			in.newest.Store(0) // what all names have
			b.inService(t, e.limit, in)
		}
	}
	return e
}

// invalid makes the event of a change of b that is refused, and made good.
func (s *soak) invalid(b *soakBlock, k *soakKey, rng *rand.Rand) event {
	bad := []string{"JSON", "no-such-option", "conf-script=" + s.touch, "interface=nosuch0"}[rng.IntN(4)]
	if bad == "JSON" {
		k = b.keys[2]
	}
	mark := s.c.logs.mark()
	return event{
		name: "invalid " + k.file + ": " + bad, kind: b.change(),
		do: func(t *testing.T) {
			t.Helper()
			if bad == "JSON" {
				b.swap(t, k.content(soakAddress(11, 1)), `{"x.example": [`)
				return
			}
			k.write(t, bad+"\n"+k.content(soakAddress(11, 1)))
		},
		settle: func(t *testing.T) {
			t.Helper()
			s.c.logs.wait(t, mark, "[ERROR]", "Configuration rejected")
			k.next(t)
		},
		alone: true,
	}
}

// reload makes the event card of the Corefile.
func (s *soak) reload(card string) event {
	mark := 0
	e := event{name: "Corefile: " + card}
	give := func(text func() string) func(t *testing.T) {
		return func(t *testing.T) {
			t.Helper()
			mark = s.c.logs.mark()
			s.c.rewrite(t, text())
			s.load.reload()
			kill(t, s.c.pid, syscall.SIGUSR1)
		}
	}
	e.settle = func(t *testing.T) {
		t.Helper()
		s.c.logs.wait(t, mark, reloaded)
		s.load.reload()
		s.reloads++
	}
	refused := func(t *testing.T) {
		t.Helper()
		s.c.logs.wait(t, mark, failed)
		s.load.reload()
		s.c.rewrite(t, s.corefile())
		s.failed++
	}
	switch card {
	case "unchanged":
		e.do = give(s.corefile)
	case "arguments":
		e.do = give(func() string {
			for _, b := range s.blocks {
				b.args.newest.Add(1)
			}
			return s.corefile()
		})
	case "broken":
		e.do = give(func() string { return s.blocks[0].corefile(soakAddress(11, 1), "nosuchplugin") })
		e.settle = refused
	case "health port taken":
		e.do = give(func() string {
			return s.blocks[0].corefile(soakAddress(11, 1), fmt.Sprintf("health 127.0.0.1:%d", s.taken)) + s.blocks[1].corefile(soakAddress(11, 1), "")
		})
		e.settle = refused
	}
	return e
}

// step makes one event of each block, and perhaps one of the Corefile, happen at about the same time, and waits until
// all has settled.
func (s *soak) step(t *testing.T, n int, rng *rand.Rand, decks []*deck) {
	t.Helper()
	var events []event
	var names []string
	alone := false
	for i, b := range s.blocks {
		b.child(t, s.c)
		card := decks[i].deal()
		if n == 0 {
			card = []string{"SIGSTOP", "change"}[i]
		}
		if card == "list" && b.listen != 0 {
			card = "change" // dnsmasq reads so long a list for seconds on a slow machine, in which nobody answers
		}
		if card == "SIGSTOP" && b.deaths > 0 {
			// Found and replaced within a client's 5 s only if the next one starts without a pause.
			time.Sleep(time.Until(b.since.Add(settled)))
		}
		e := s.event(b, card, rng)
		b.kind.Store(int32(e.kind))
		alone = alone || e.alone
		events, names = append(events, e), append(names, b.name+": "+e.name)
	}
	if rng.IntN(2) == 0 && !alone {
		e := s.reload(decks[len(s.blocks)].deal())
		events, names = append(events, e), append(names, e.name)
	}
	t.Logf("%d: %s", n, strings.Join(names, "; "))
	for _, i := range rng.Perm(len(events)) {
		events[i].do(t)
		time.Sleep(upTo(rng, 100*time.Millisecond))
	}
	limit := patience
	for _, e := range events {
		limit = max(limit, e.limit)
		e.settle(t)
	}
	for _, b := range s.blocks {
		for _, k := range b.keys {
			b.inService(t, limit, k)
		}
		b.child(t, s.c)
		for _, k := range b.keys {
			k.floor.Store(k.newest.Load())
		}
	}
	time.Sleep(upTo(rng, 200*time.Millisecond))
}

// goroutines asks the plugin pprof how many goroutines CoreDNS has.
func (s *soak) goroutines(t *testing.T) int {
	t.Helper()
	r, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/debug/pprof/goroutine?debug=1", s.pprof))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	data, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	if _, err := fmt.Sscanf(string(data), "goroutine profile: total %d", &n); err != nil {
		t.Fatalf("%v: %.60q", err, data)
	}
	return n
}

// files returns how many files CoreDNS has open.
func (s *soak) files(t *testing.T) int {
	t.Helper()
	return openFiles(t, s.c.pid)
}

// returns waits until count is near before again.
func returns(t *testing.T, what string, before, slack int, count func(*testing.T) int) {
	t.Helper()
	now := 0
	defer func() { t.Logf("%s of CoreDNS: %d, at first %d", what, now, before) }()
	within(t, 2*patience, what+" as before", func() bool {
		now = count(t)
		return now <= before+slack
	})
}

// TestSoak lets everything happen at random under load: nothing may get lost, and nothing be left. The same seed gives the
// same events.
func TestSoak(t *testing.T) { // alone, as it counts what gets lost
	ran := filepath.Join(tempDir(t), "ran")
	s := &soak{pprof: freePort(t), taken: takenPort(t), touch: script(t, "touch "+ran+"\n"), list: longList()}
	s.blocks = []*soakBlock{
		newSoakBlock(t, "swap", "swap.example", 0),
		newSoakBlock(t, "in place", "place.example", freePort(t)),
	}
	s.c = startAs(t, s.blocks[0].port, s.corefile())
	for _, b := range s.blocks {
		for _, k := range b.keys {
			b.inService(t, patience, k)
			k.floor.Store(k.newest.Load())
		}
		b.child(t, s.c)
	}
	s.c.logs.wait(t, 0, "Configuration applied")
	files, goroutines := s.files(t), s.goroutines(t)

	s.load = newSoakLoad(t, s.blocks, *soakRate)
	rng := rand.New(rand.NewPCG(*soakSeed, 0))
	decks := []*deck{{rng: rng, cards: blockDeck}, {rng: rng, cards: blockDeck}, {rng: rng, cards: corefileDeck}}
	begin, steps := time.Now(), 0
	defer func() {
		s.load.end(t)
		s.load.check(t, fmt.Sprintf("seed %d, %s, %d steps", *soakSeed, time.Since(begin).Round(time.Second), steps), s)
	}()
	for ; time.Since(begin) < *soakTime && !t.Failed() && !s.load.bad(); steps++ {
		s.step(t, steps, rng, decks)
	}
	s.load.end(t)

	for _, b := range s.blocks {
		for _, k := range b.keys {
			b.inService(t, patience, k)
		}
		b.child(t, s.c)
	}
	within(t, patience, "two dnsmasq and nothing else", func() bool { return len(s.c.children()) == 2 && len(zombies(s.c.pid)) == 0 })
	returns(t, "open files", files, 4, s.files)
	returns(t, "goroutines", goroutines, 10, s.goroutines)
	s.c.stagesOnly(t, 2)
	for _, root := range s.c.staged(t) {
		within(t, patience, "one generation in "+root, func() bool {
			got, _ := filepath.Glob(root + "/[0-9]*")
			return len(got) == 1
		})
	}
	if _, err := os.Stat(ran); err == nil {
		t.Error("the script in a watched file ran")
	}
	if s.c.ended() {
		t.Error("CoreDNS ended")
	}
}

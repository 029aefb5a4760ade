package nanny

import (
	"errors"
	"testing"
)

// config_valid is of what the directory holds now, whatever is being tried meanwhile.
func TestStatsValid(t *testing.T) {
	a, b := &config{version: "a"}, &config{version: "b"}
	holds := func(c *config) func(*stats) { return func(s *stats) { s.looked(look{cfg: c, event: true}) } }
	again := func(c *config) func(*stats) {
		return func(s *stats) { s.looked(look{cfg: c, event: true, repeated: true}) }
	}
	broken := func(s *stats) { s.looked(look{err: errors.New("not JSON"), event: true}) }
	applied := func(c *config) func(*stats) { return func(s *stats) { s.applied(outcome{cfg: c}, false) } }
	refused := func(c *config) func(*stats) { return func(s *stats) { s.refused(outcome{cfg: c}) } }
	for _, tc := range []struct {
		name  string
		steps []func(*stats)
		want  bool
	}{
		{"applied", []func(*stats){holds(a), applied(a)}, true},
		{"refused by dnsmasq", []func(*stats){holds(a), refused(a)}, false},
		{"written once more as it was refused", []func(*stats){holds(a), refused(a), again(a)}, false},
		{"seen anew as it was refused, since the Corefile was reloaded", []func(*stats){holds(a), refused(a), holds(a)}, false},
		{"refused and applied later", []func(*stats){holds(a), refused(a), applied(a)}, true},
		{"applied later and seen anew", []func(*stats){holds(a), refused(a), applied(a), holds(a)}, true},
		{"mended", []func(*stats){holds(a), refused(a), holds(b), applied(b)}, true},
		{"broken while the one before is tried", []func(*stats){holds(a), broken, applied(a)}, false},
		{"taken back while it is tried", []func(*stats){holds(a), applied(a), holds(b), holds(a), refused(b)}, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newStats()
			for _, step := range tc.steps {
				step(s)
			}
			if got := s.valid.Load(); got != tc.want {
				t.Errorf("got %t, want %t", got, tc.want)
			}
		})
	}
}

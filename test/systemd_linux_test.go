package test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestSystemdUnit: the unit is without a mistake, and systemd rates its exposure at 2.0 of 10 at most.
func TestSystemdUnit(t *testing.T) {
	t.Parallel()
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		if os.Geteuid() == 0 || os.Getenv("CI") != "" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	const name = "coredns-nanny.service"
	text, err := os.ReadFile(filepath.Join("..", "deploy", "systemd", name))
	if err != nil {
		t.Fatal(err)
	}
	unit := filepath.Join(tempDir(t), name)
	installed := strings.Replace(string(text), "/usr/local/bin/coredns", program(), 1)
	if err := os.WriteFile(unit, []byte(installed), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"verify", unit}, {"security", "--offline=yes", "--threshold=20", unit}} {
		if out, err := exec.Command(analyze, args...).CombinedOutput(); err != nil {
			t.Errorf("systemd-analyze %q: %v\n%s", args, err, out)
		} else if args[0] == "verify" && len(out) > 0 {
			t.Errorf("systemd-analyze says: %s", out)
		}
	}
}

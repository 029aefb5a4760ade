// Package test runs the built CoreDNS with the real dnsmasq and looks at it from outside: by queries, signals, files,
// its log and /proc.
package test

import (
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

var given = flag.String("coredns", "", "the CoreDNS to test; empty: built from this tree")

// base is a directory that every user can reach: CoreDNS and dnsmasq run as several.
var base string

func TestMain(m *testing.M) {
	flag.Parse()
	// Most tests wait most of the time.
	if f := flag.Lookup("test.parallel"); f.Value.String() == f.DefValue {
		_ = f.Value.Set("6")
	}
	os.Exit(func() int {
		if err := prepare(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(base)
		code := m.Run()
		for _, p := range processes(base) {
			fmt.Fprintf(os.Stderr, "left running: pid %d: %q\n", p.pid, p.args)
			code = 1
		}
		return code
	}())
}

// prepare makes base and puts CoreDNS there: a rebuild meanwhile changes nothing, and its directory may be one that
// only its owner can enter.
func prepare() error {
	var err error
	if base, err = os.MkdirTemp("", "nanny-test-"); err != nil {
		return err
	}
	if err := os.Chmod(base, 0o755); err != nil {
		return err
	}
	built := *given
	if built == "" {
		built = filepath.Join("..", "bin", "coredns")
		out, err := exec.Command("go", "-C", filepath.Join("..", "cmd", "coredns"), "build", "-o", filepath.Join("..", built), ".").CombinedOutput()
		if err != nil {
			return fmt.Errorf("building CoreDNS: %w\n%s", err, out)
		}
	}
	src, err := os.Open(built)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := os.OpenFile(program(), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o755)
	if err != nil {
		return err
	}
	if _, err := io.Copy(dst, src); err != nil {
		return err
	}
	return dst.Close()
}

// program is the path of the CoreDNS under test.
func program() string { return filepath.Join(base, "coredns") }

package test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestNftset starts examples/nftset: what CoreDNS's clients resolve is in the sets.
func TestNftset(t *testing.T) {
	t.Parallel()
	needs(t, "nsenter", "unshare", "ip", "nft")
	n := newNetns(t, "lo")
	n.run(t, "ip", "address", "add", routerAddr+"/32", "dev", "lo")
	n.upstream(t, "--address=/updates.example/192.0.2.80", "--address=/updates.example/2001:db8::80", "--address=/other.example/192.0.2.81")

	example := filepath.Join("..", "examples", "nftset")
	n.run(t, "nft", "-f", filepath.Join(example, "sets.nft"))
	dir := filepath.Join(tempDir(t), "config")
	if err := os.CopyFS(dir, os.DirFS(filepath.Join(example, "config"))); err != nil {
		t.Fatal(err)
	}
	corefile, err := os.ReadFile(filepath.Join(example, "Corefile"))
	if err != nil {
		t.Fatal(err)
	}
	c := n.startIn(t, strings.ReplaceAll(string(corefile), "/etc/nanny/nftset", dir), tempDir(t))
	c.logs.wait(t, 0, "Configuration applied")

	set := func(name string) string { return n.run(t, "nft", "list", "set", "inet", "nanny", name) }
	if got := set("allow4"); strings.Contains(got, "192.0.2.80") {
		t.Fatalf("in the set beforehand: %s", got)
	}
	n.do(t, func() { _, err = exchange("udp", routerAddr+":53", question("www.updates.example", 28)) })
	if err != nil {
		t.Error(err)
	}
	if got := set("allow6"); !strings.Contains(got, "2001:db8::80") {
		t.Errorf("got %s, want 2001:db8::80", got)
	}
	if bad := c.logs.lines(0, "not permitted"); len(bad) > 0 {
		t.Errorf("in the log: %q", bad)
	}

	n.fills(t, c, func() string { return set("allow4") }, func() { put(t, dir, "more.conf", "nftset=/other.example/4#inet#nanny#allow4\n") })
}

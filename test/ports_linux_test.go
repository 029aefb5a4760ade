package test

import (
	"net"
	"testing"
)

// TestServicePortTaken: a change that needs a port which another program still has is tried again.
func TestServicePortTaken(t *testing.T) {
	t.Parallel()
	needs(t, "nsenter", "unshare", "ip")
	n := newNetns(t, "tftp0")
	dir := tempDir(t)
	const base = "no-resolv\nno-hosts\naddress=/a.example/192.0.2."
	put(t, dir, "a.conf", base+"80\n")
	c := n.startNanny(t, "127.0.0.1", dir)
	n.waits(t, "a.example", "192.0.2.80")

	var other net.PacketConn
	var err error
	n.do(t, func() { other, err = net.ListenPacket("udp4", "127.0.0.1:69") })
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	mark := c.logs.mark()
	put(t, dir, "a.conf", base+"81\nenable-tftp\ntftp-root="+dir+"\n")
	c.logs.wait(t, mark, "[ERROR]", "Configuration not applied, to be tried again", "Address already in use")
	if got := n.says(t, "udp", "127.0.0.1:53", "a.example"); got != "192.0.2.80" {
		t.Errorf("got %s, want the configuration before", got)
	}
	other.Close()
	n.waits(t, "a.example", "192.0.2.81")
}

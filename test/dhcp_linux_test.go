package test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
)

const routerAddr = "192.0.2.1"

// house is a router with CoreDNS and a client, each in a network namespace, joined by a wire.
type house struct {
	router, client *netns
	dir            string // the watched directory
	misc           string // is /var/lib/misc to CoreDNS; only root may write it
	corefile       string
	pool           *x509.CertPool
}

// newHouse makes a house from the files of examples/router, without starting CoreDNS.
func newHouse(t *testing.T) *house {
	t.Helper()
	needs(t, "nsenter", "unshare", "ip", "udhcpc")
	h := &house{
		router: newNetns(t, "lan0"), client: newNetns(t, "lan1"),
		dir: filepath.Join(tempDir(t), "config"), misc: tempDir(t), pool: x509.NewCertPool(),
	}
	if err := os.Chmod(h.misc, 0o755); err != nil {
		t.Fatal(err)
	}
	connect(t, h.router, h.client)
	h.router.run(t, "ip", "address", "add", routerAddr+"/24", "dev", "lan0")
	h.router.run(t, "ip", "address", "add", "2001:db8:1::1/64", "dev", "lan0")

	example := filepath.Join("..", "examples", "router")
	if err := os.CopyFS(h.dir, os.DirFS(filepath.Join(example, "config"))); err != nil {
		t.Fatal(err)
	}
	corefile, err := os.ReadFile(filepath.Join(example, "Corefile"))
	if err != nil {
		t.Fatal(err)
	}
	cert, key := h.certificate(t)
	h.corefile = strings.NewReplacer("/etc/nanny/router", h.dir, "/etc/nanny/cert.pem", cert, "/etc/nanny/key.pem", key).Replace(string(corefile))
	return h
}

// certificate makes a certificate for the router, which the clients trust, and returns the files' paths.
func (h *house) certificate(t *testing.T) (certFile, keyFile string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.ParseIP(routerAddr)},
	}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	certFile, keyFile = filepath.Join(tempDir(t), "cert.pem"), filepath.Join(tempDir(t), "key.pem")
	certPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert})
	h.pool.AppendCertsFromPEM(certPEM)
	put(t, filepath.Dir(certFile), "cert.pem", string(certPEM))
	put(t, filepath.Dir(keyFile), "key.pem", string(pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: private})))
	return certFile, keyFile
}

// start starts CoreDNS on the router and waits for its dnsmasq.
func (h *house) start(t *testing.T) *coreDNS {
	t.Helper()
	c := h.router.startIn(t, h.corefile, h.misc)
	c.logs.wait(t, 0, "Configuration applied")
	return c
}

// lease is what DHCP gave.
type lease struct{ address, dns, file string }

// lease lets a device with the last byte of its MAC address and a name ask for an address.
func (h *house) lease(t *testing.T, mac int, name string) lease {
	t.Helper()
	h.client.run(t, "ip", "link", "set", "lan1", "address", fmt.Sprintf("02:00:00:00:00:%02x", mac))
	take := script(t, `case $1 in bound|renew)
	ip -4 address flush dev $interface
	ip address add $ip/24 dev $interface
	echo "GOT=$ip=$dns=$boot_file="
esac
`)
	out := h.client.run(t, "udhcpc", "-f", "-q", "-n", "-i", "lan1", "-s", take, "-x", "hostname:"+name, "-t", "10", "-T", "1", "-A", "1")
	_, got, _ := strings.Cut(out, "GOT=")
	f := strings.Split(got, "=")
	if len(f) < 3 {
		t.Fatalf("no lease for %s: %s", name, out)
	}
	return lease{f[0], f[1], f[2]}
}

// asks asks CoreDNS from a namespace, over udp, tcp or tcp-tls, and returns the data of the first record, or else the RCODE
// or the error.
func (h *house) asks(t *testing.T, from *netns, network, name string, qtype uint16) (answer string) {
	t.Helper()
	from.do(t, func() {
		client := dns.Client{Net: network, Timeout: queryWait, TLSConfig: &tls.Config{RootCAs: h.pool, MinVersion: tls.VersionTLS12}}
		port := "53"
		if network == "tcp-tls" {
			port = "853"
		}
		r, _, err := client.Exchange(question(name, qtype), net.JoinHostPort(routerAddr, port))
		switch {
		case err != nil:
			answer = err.Error()
		case len(r.Answer) == 0:
			answer = dns.RcodeToString[r.Rcode]
		default:
			answer = strings.TrimPrefix(r.Answer[0].String(), r.Answer[0].Header().String())
		}
	})
	return answer
}

// known checks that a client resolves name to address and back, in each way.
func (h *house) known(t *testing.T, name, address string) {
	t.Helper()
	reverse, err := dns.ReverseAddr(address)
	if err != nil {
		t.Fatal(err)
	}
	qtype := dns.TypeA
	if strings.Contains(address, ":") {
		qtype = dns.TypeAAAA
	}
	for _, network := range []string{"udp", "tcp", "tcp-tls"} {
		if got := h.asks(t, h.client, network, name, qtype); got != address {
			t.Errorf("%s over %s: got %s, want %s", name, network, got, address)
		}
		if got := h.asks(t, h.client, network, reverse, dns.TypePTR); got != name+"." {
			t.Errorf("%s over %s: got %s, want %s.", address, network, got, name)
		}
	}
}

// child waits until there is exactly one dnsmasq that answers, and returns it.
func (h *house) child(t *testing.T, c *coreDNS) process {
	t.Helper()
	var list []process
	within(t, patience, "exactly one dnsmasq", func() (ok bool) {
		if list = c.services(); len(list) == 1 {
			h.router.do(t, func() { ok = answers(list[0].addr()) })
		}
		return ok
	})
	return list[0]
}

// probe asks CoreDNS for name again and again until the function that it returns is called, which reports the first
// answer that wasn't want, and how many there were.
func (h *house) probe(t *testing.T, name, want string) (end func()) {
	t.Helper()
	var quit atomic.Bool
	asked, first := 0, ""
	done := make(chan struct{})
	go func() {
		defer close(done)
		h.router.do(t, func() {
			for !quit.Load() {
				got := says("udp", routerAddr+":53", name)
				if asked++; got != want && first == "" {
					first = got
				}
			}
		})
	}()
	return func() {
		t.Helper()
		quit.Store(true)
		<-done
		if first != "" || asked == 0 {
			t.Errorf("%s: of %d answers one was %q, want all %s", name, asked, first, want)
		}
	}
}

func TestDHCP(t *testing.T) {
	t.Parallel()
	h := newHouse(t)
	ports := []*sampler{h.router.sample("udp", 67), h.router.sample("udp6", 547)}
	c := h.start(t)

	laptop := h.lease(t, 1, "laptop")
	start := time.Now()
	h.known(t, "laptop.home.example", laptop.address)
	t.Logf("known in each way %s after the lease", time.Since(start))
	if took := time.Since(start); took > soon {
		t.Errorf("known after %s, want 1 s", took)
	}
	if laptop.dns != routerAddr {
		t.Errorf("got name server %q, want CoreDNS's", laptop.dns)
	}
	printer := h.lease(t, 2, "some-printer")
	if printer.address != "192.0.2.50" {
		t.Errorf("got %s for the printer, want its fixed address", printer.address)
	}
	h.known(t, "printer.home.example", "192.0.2.50")

	leases := filepath.Join(h.misc, "dnsmasq.leases")
	info, err := os.Stat(leases)
	if err != nil {
		t.Fatal(err)
	}
	if uid := info.Sys().(*syscall.Stat_t).Uid; uid == 0 {
		t.Error("the lease file is root's")
	}

	end := h.probe(t, "laptop.home.example", laptop.address)
	t.Run("crash", func(t *testing.T) {
		child := h.child(t, c)
		kill(t, child.pid, syscall.SIGKILL)
		h.known(t, "laptop.home.example", laptop.address)
		if now := h.child(t, c); now.pid == child.pid {
			t.Error("it is the same dnsmasq")
		}
		h.known(t, "printer.home.example", "192.0.2.50")
	})
	t.Run("hosts and servers are SIGHUP", func(t *testing.T) {
		child, mark := h.child(t, c), c.logs.mark()
		put(t, h.dir, "lan.hosts", "192.0.2.1 router\n192.0.2.51 printer\n")
		c.logs.wait(t, mark, "Configuration applied", "~lan.hosts", `how="SIGHUP"`)
		if got := h.lease(t, 2, "some-printer"); got.address != "192.0.2.51" {
			t.Errorf("got %s for the printer, want its new fixed address", got.address)
		}
		h.known(t, "printer.home.example", "192.0.2.51")
		put(t, h.dir, "stubDomains", `{"corp.example": ["192.0.2.99"]}`)
		c.logs.wait(t, mark, "Configuration applied", "+stubDomains", `how="SIGHUP"`)
		if now := h.child(t, c); now.pid != child.pid {
			t.Errorf("got pid %d, want %d", now.pid, child.pid)
		}
		h.known(t, "laptop.home.example", laptop.address)
	})
	t.Run("another fixed address is stop and start", func(t *testing.T) {
		child, mark := h.child(t, c), c.logs.mark()
		put(t, h.dir, "more.conf", "dhcp-host=02:00:00:00:00:03,192.0.2.60,scanner\n")
		c.logs.wait(t, mark, "Configuration applied", "+more.conf", `how="in place"`)
		if now := h.child(t, c); now.pid == child.pid {
			t.Error("it is the same dnsmasq")
		}
		if got := h.lease(t, 3, "unnamed"); got.address != "192.0.2.60" {
			t.Errorf("got %s for the scanner, want its fixed address", got.address)
		}
		h.known(t, "scanner.home.example", "192.0.2.60")
		h.known(t, "laptop.home.example", laptop.address)
	})
	t.Run("a change that doesn't start", func(t *testing.T) {
		mark := c.logs.mark()
		put(t, h.dir, "bad.conf", "interface=nosuch0\n")
		c.logs.wait(t, mark, "[ERROR]", "Configuration rejected", "nosuch0")
		h.known(t, "laptop.home.example", laptop.address)
		remove(t, h.dir, "bad.conf")
		put(t, h.dir, "more.conf", "dhcp-host=02:00:00:00:00:03,192.0.2.61,scanner\n")
		c.logs.wait(t, mark, "Configuration applied", "~more.conf")
		h.known(t, "laptop.home.example", laptop.address)
	})
	end()

	t.Run("CoreDNS again", func(t *testing.T) {
		if err := c.end(syscall.SIGTERM); err != nil {
			t.Error(err)
		}
		if n := h.router.sockets("udp", 67); n != 0 {
			t.Errorf("%d sockets of port 67 are left", n)
		}
		h.start(t)
		h.known(t, "laptop.home.example", laptop.address)
	})
	for _, s := range ports {
		if s.end(); s.most != 1 || s.samples == 0 {
			t.Errorf("at most %d DHCP servers in %d samples, want 1", s.most, s.samples)
		}
	}
}

// TestRouterAdvertisements starts, changes and stops them.
func TestRouterAdvertisements(t *testing.T) {
	t.Parallel()
	h := newHouse(t)
	put(t, h.dir, "dnsmasq.conf", "interface=lan0\nno-resolv\nno-hosts\naddress=/kept.example/192.0.2.7\n")
	raw, udp := h.router.sample("raw6", 58), h.router.sample("udp6", 547)
	c := h.start(t)
	end := h.probe(t, "kept.example", "192.0.2.7")

	advertised := func(lifetime int) {
		t.Helper()
		within(t, patience, fmt.Sprintf("an advertisement with lifetime %d", lifetime), func() bool {
			ra, err := h.client.solicit(t)
			return err == nil && int(ra[6])<<8+int(ra[7]) == lifetime && strings.Contains(string(ra), string(net.ParseIP("2001:db8:1::")))
		})
	}
	if ra, err := h.client.solicit(t); err == nil {
		t.Errorf("got an advertisement that nobody asked for: %x", ra)
	}
	mark := c.logs.mark()
	put(t, h.dir, "ra.conf", "enable-ra\ndhcp-range=::100,::1ff,constructor:lan0,64,1h\nra-param=lan0,10,600\n")
	c.logs.wait(t, mark, "Configuration applied", "+ra.conf", `how="swap"`)
	advertised(600)
	put(t, h.dir, "ra.conf", "enable-ra\ndhcp-range=::100,::1ff,constructor:lan0,64,1h\nra-param=lan0,10,700\n")
	c.logs.wait(t, mark, "Configuration applied", "~ra.conf", `how="in place"`)
	advertised(700)
	remove(t, h.dir, "ra.conf")
	c.logs.wait(t, mark, "Configuration applied", "-ra.conf", `how="swap"`)
	within(t, patience, "no DHCPv6 socket is left", func() bool { return h.router.sockets("udp6", 547)+h.router.sockets("raw6", 58) == 0 })
	if ra, err := h.client.solicit(t); err == nil {
		t.Errorf("got an advertisement after the end: %x", ra)
	}
	end()
	for _, s := range []*sampler{raw, udp} {
		if s.end(); s.most != 1 || s.samples == 0 {
			t.Errorf("at most %d sockets in %d samples, want 1", s.most, s.samples)
		}
	}
}

// TestTFTP starts, changes and stops a TFTP server, and the DHCP that names its file.
func TestTFTP(t *testing.T) {
	t.Parallel()
	h := newHouse(t)
	needs(t, "busybox")
	base := "interface=lan0\nno-resolv\nno-hosts\nno-ping\naddress=/kept.example/192.0.2.7\ndhcp-range=192.0.2.100,192.0.2.200,255.255.255.0,1h\n"
	put(t, h.dir, "dnsmasq.conf", base)
	port, pxe := h.router.sample("udp", 69), h.router.sample("udp", 4011)
	c := h.start(t)
	end := h.probe(t, "kept.example", "192.0.2.7")
	got := h.lease(t, 1, "laptop")
	if got.file != "" {
		t.Errorf("got boot file %q, want none", got.file)
	}
	fetch := func() string {
		to := filepath.Join(tempDir(t), "boot")
		out, err := h.client.try("busybox", "tftp", "-g", "-r", "boot", "-l", to, routerAddr)
		if err != nil {
			return err.Error() + ": " + out
		}
		data, err := os.ReadFile(to)
		if err != nil {
			return err.Error()
		}
		return string(data)
	}
	for i, content := range []string{"one", "two"} {
		root := tempDir(t)
		put(t, root, "boot", content)
		mark := c.logs.mark()
		put(t, h.dir, "tftp.conf", "enable-tftp\ntftp-root="+root+"\ndhcp-boot=boot\npxe-service=x86PC,\"Start from the network\",boot\n")
		c.logs.wait(t, mark, "Configuration applied", "tftp.conf", `how="in place"`)
		if got := fetch(); got != content {
			t.Errorf("round %d: got %q, want %s", i, got, content)
		}
		if got := h.lease(t, 1, "laptop"); got.file != "boot" {
			t.Errorf("round %d: got boot file %q", i, got.file)
		}
		if n := h.router.sockets("udp", 4011); n != 1 {
			t.Errorf("round %d: %d sockets of PXE, want 1", i, n)
		}
	}
	mark := c.logs.mark()
	remove(t, h.dir, "tftp.conf")
	c.logs.wait(t, mark, "Configuration applied", "-tftp.conf", `how="in place"`)
	if n := h.router.sockets("udp", 69) + h.router.sockets("udp", 4011); n != 0 {
		t.Errorf("%d sockets of TFTP and PXE are left", n)
	}
	end()
	if pxe.end(); pxe.most != 1 {
		t.Errorf("at most %d sockets of PXE in %d samples, want 1", pxe.most, pxe.samples)
	}
	if port.end(); port.most != 2 {
		t.Errorf("at most %d sockets of TFTP in %d samples, want 2: on lan0 and on lo", port.most, port.samples)
	}
}

package test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
)

var portInFile = regexp.MustCompile(`:\d{3,5}\b`)

// ports are the free ports that stand for those of a Corefile, by these with their colon.
type ports map[string]int

// adapt returns the Corefile at path for this host: on 127.0.0.1, with other ports, and with replacements, pairs as of
// strings.NewReplacer, each of which has to be needed.
func adapt(t *testing.T, path string, replacements ...string) (string, ports) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	taken := ports{}
	text := portInFile.ReplaceAllStringFunc(string(data), func(port string) string {
		if taken[port] == 0 {
			taken[port] = freePort(t)
		}
		return fmt.Sprintf(":%d", taken[port])
	})
	replacements = append(replacements, "    errors\n", "    bind 127.0.0.1\n    errors\n")
	for i := 0; i < len(replacements); i += 2 {
		if !strings.Contains(text, replacements[i]) {
			t.Fatalf("%s has no %q", path, replacements[i])
		}
		text = strings.ReplaceAll(text, replacements[i], replacements[i+1])
	}
	return text, taken
}

func example(name string) string { return filepath.Join("..", "examples", "plugins", name+".corefile") }

// houseDir is a watched directory with the names of a house.
func houseDir(t *testing.T) string {
	t.Helper()
	return configDir(t, map[string]string{"names.hosts": "192.0.2.10 printer.home.example\n"})
}

// TestExamplesAreShown: each example is in the README beside it as it is.
func TestExamplesAreShown(t *testing.T) {
	readme, err := os.ReadFile(filepath.Join("..", "examples", "plugins", "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	paths, err := filepath.Glob(example("*"))
	if err != nil || len(paths) == 0 {
		t.Fatalf("%d examples, error %v", len(paths), err)
	}
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if shown := fmt.Sprintf("`%s`:\n\n~~~ corefile\n%s~~~\n", filepath.Base(path), text); !bytes.Contains(readme, []byte(shown)) {
			t.Errorf("the README doesn't show %s as it is", path)
		}
	}
	if got := bytes.Count(readme, []byte("~~~ corefile\n")); got != len(paths) {
		t.Errorf("the README shows %d Corefiles, want %d", got, len(paths))
	}
}

func TestExampleTLS(t *testing.T) {
	t.Parallel()
	cert, key, trusted := certificate(t)
	corefile, at := adapt(t, example("tls"), "/etc/coredns/cert.pem", cert, "/etc/coredns/key.pem", key, "/etc/nanny", houseDir(t))
	startAs(t, at[":853"], corefile)
	m := question("printer.home.example", dns.TypeA)

	client := dns.Client{Net: "tcp-tls", Timeout: queryWait, TLSConfig: trusted}
	overTLS, _, err := client.Exchange(m, fmt.Sprintf("127.0.0.1:%d", at[":853"]))
	if err != nil {
		t.Fatal(err)
	}
	wantAddress(t, overTLS, "192.0.2.10")

	packed, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	transport := &http.Transport{TLSClientConfig: trusted, ForceAttemptHTTP2: true}
	defer transport.CloseIdleConnections()
	web := http.Client{Transport: transport, Timeout: queryWait}
	body, err := askHTTP(t.Context(), &web, fmt.Sprintf("127.0.0.1:%d", at[":443"]), packed)
	if err != nil {
		t.Fatal(err)
	}
	overHTTPS := new(dns.Msg)
	if err := overHTTPS.Unpack(body); err != nil {
		t.Fatal(err)
	}
	wantAddress(t, overHTTPS, "192.0.2.10")
}

// askHTTP asks a server of DNS over HTTPS at addr (RFC 8484).
func askHTTP(ctx context.Context, client *http.Client, addr string, query []byte) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://"+addr+"/dns-query", bytes.NewReader(query))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/dns-message")
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", resp.Status, body)
	}
	return body, err
}

func wantAddress(t *testing.T, r *dns.Msg, want string) {
	t.Helper()
	if len(r.Answer) == 1 {
		if a, ok := r.Answer[0].(*dns.A); ok && a.A.String() == want {
			return
		}
	}
	t.Errorf("want the address %s, got\n%v", want, r)
}

// certificate makes a certificate for 127.0.0.1 and returns the paths of it and its key, and who trusts it.
func certificate(t *testing.T) (cert, key string, trusted *tls.Config) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
	signed, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	if err != nil {
		t.Fatal(err)
	}
	encoded, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	dir := tempDir(t)
	write := func(name, kind string, der []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o644); err != nil {
			t.Fatal(err)
		}
		return path
	}
	parsed, err := x509.ParseCertificate(signed)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(parsed)
	return write("cert.pem", "CERTIFICATE", signed), write("key.pem", "PRIVATE KEY", encoded), &tls.Config{RootCAs: pool}
}

// TestExampleCache: an answer from upstream is kept, one from dnsmasq's files isn't.
func TestExampleCache(t *testing.T) {
	t.Parallel()
	upstream := dnsmasq(t, "--local-ttl=600", "--address=/example.org/192.0.2.80")
	dir := configDir(t, map[string]string{"a.conf": fmt.Sprintf("server=127.0.0.1#%d\naddress=/here.example/192.0.2.1\n", upstream)})
	corefile, at := adapt(t, example("cache"), "/etc/nanny", dir)
	c := startAs(t, at[":1053"], corefile)
	c.waits(t, "www.example.org", "192.0.2.80")
	within(t, patience, "the TTL goes down", func() bool {
		r, err := exchange("udp", c.addr(), question("www.example.org", dns.TypeA))
		return err == nil && len(r.Answer) == 1 && r.Answer[0].Header().Ttl < 600
	})
	c.waits(t, "here.example", "192.0.2.1")
	before := c.applied()
	put(t, dir, "a.conf", "address=/here.example/192.0.2.2\n")
	within(t, patience, "the change is applied", func() bool { return c.applied() > before })
	c.wants(t, "here.example", "192.0.2.2")
	c.wants(t, "www.example.org", "192.0.2.80")
}

func TestExampleACL(t *testing.T) {
	t.Parallel()
	corefile, at := adapt(t, example("acl"), "/etc/nanny", houseDir(t), "192.0.2.0/24", "127.0.0.1/32")
	c := startAs(t, at[":1053"], corefile)
	c.waits(t, "printer.home.example", "192.0.2.10")
	guest := dns.Client{Timeout: queryWait, Dialer: &net.Dialer{LocalAddr: &net.UDPAddr{IP: net.IPv4(127, 0, 0, 2)}}}
	r, _, err := guest.Exchange(question("printer.home.example", dns.TypeA), c.addr())
	if err != nil {
		t.Fatal(err)
	}
	if r.Rcode != dns.RcodeRefused {
		t.Errorf("a guest got %s, want REFUSED", dns.RcodeToString[r.Rcode])
	}
}

func TestExampleKubernetes(t *testing.T) {
	t.Parallel()
	const block = "kubernetes cluster.example in-addr.arpa ip6.arpa {\n"
	corefile, at := adapt(t, example("kubernetes"), "/etc/nanny", houseDir(t), block, block+"endpoint "+apiServer(t)+"\n")
	c := startAs(t, at[":1053"], corefile)
	c.waits(t, "web.shop.svc.cluster.example", "192.0.2.100")
	c.wants(t, "none.shop.svc.cluster.example", "NXDOMAIN")
	c.waits(t, "printer.home.example", "192.0.2.10")
	for address, name := range map[string]string{"192.0.2.100": "web.shop.svc.cluster.example.", "192.0.2.10": "printer.home.example."} {
		reverse, err := dns.ReverseAddr(address)
		if err != nil {
			t.Fatal(err)
		}
		r, err := exchange("udp", c.addr(), question(reverse, dns.TypePTR))
		if err != nil {
			t.Fatal(err)
		}
		if len(r.Answer) != 1 || r.Answer[0].(*dns.PTR).Ptr != name {
			t.Errorf("%s: want %s, got\n%v", address, name, r)
		}
	}
}

func TestExampleForward(t *testing.T) {
	t.Parallel()
	outside := dnsmasq(t, "--address=/example/192.0.2.80")
	corefile, at := adapt(t, example("forward"), "/etc/nanny", houseDir(t), "192.0.2.53", fmt.Sprintf("127.0.0.1:%d", outside))
	c := startAs(t, at[":1053"], corefile)
	c.waits(t, "printer.home.example", "192.0.2.10")
	c.wants(t, "unknown.home.example", "192.0.2.80")
	c.wants(t, "www.shop.example", "192.0.2.80")
}

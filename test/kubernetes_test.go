package test

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestKubernetes runs the Corefile of deploy/kubernetes, with the kube-dns ConfigMap as the kubelet mounts it: missing at
// first, as it is optional.
func TestKubernetes(t *testing.T) {
	t.Parallel()
	v := &volume{dir: filepath.Join(tempDir(t), "kube-dns")}
	if err := os.Mkdir(v.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	const block = "kubernetes cluster.local in-addr.arpa ip6.arpa {\n"
	corefile, at := adapt(t, filepath.Join("..", "deploy", "kubernetes", "base", "Corefile"),
		"/etc/k8s/dns/dnsmasq-nanny", v.dir, block, block+"endpoint "+apiServer(t)+"\n",
		"health :", "health 127.0.0.1:", "ready :", "ready 127.0.0.1:", "prometheus :", "prometheus 127.0.0.1:")
	c := startAs(t, at[":1053"], corefile)
	c.waits(t, "web.shop.svc.cluster.local", "192.0.2.100")

	upstream := dnsmasq(t, "--address=/#/192.0.2.1")
	corp := dnsmasq(t, "--address=/corp.example/192.0.2.2")
	v.swap(t, map[string]string{
		"upstreamNameservers": fmt.Sprintf(`["127.0.0.1:%d"]`, upstream),
		"stubDomains":         fmt.Sprintf(`{"corp.example": ["127.0.0.1:%d"]}`, corp),
	})
	c.waits(t, "www.corp.example", "192.0.2.2")
	c.waits(t, "www.example.org", "192.0.2.1")
	c.wants(t, "web.shop.svc.cluster.local", "192.0.2.100")
	c.wants(t, "none.shop.svc.cluster.local", "NXDOMAIN")

	t.Run("probes", func(t *testing.T) {
		for _, url := range []string{
			fmt.Sprintf("http://127.0.0.1:%d/health", at[":8080"]),
			fmt.Sprintf("http://127.0.0.1:%d/ready", at[":8181"]),
		} {
			within(t, patience, url, func() bool {
				resp, err := http.Get(url)
				if err != nil {
					return false
				}
				defer resp.Body.Close()
				body, err := io.ReadAll(resp.Body)
				return err == nil && resp.StatusCode == http.StatusOK && string(body) == "OK"
			})
		}
	})
	t.Run("a server named by a service", func(t *testing.T) {
		// Its address isn't on this host, so the domain has no answer; that dnsmasq was given the address is in the log.
		mark := c.logs.mark()
		v.swap(t, map[string]string{
			"upstreamNameservers": v.keys["upstreamNameservers"],
			"stubDomains":         `{"shop.example": ["web.shop.svc.cluster.local"]}`,
		})
		c.logs.wait(t, mark, "using nameserver 192.0.2.100#53 for domain shop.example")
	})
	t.Run("a stub domain below the cluster's", func(t *testing.T) {
		inner := dnsmasq(t, "--address=/corp.cluster.local/192.0.2.3")
		mark := c.logs.mark()
		v.swap(t, map[string]string{
			"upstreamNameservers": v.keys["upstreamNameservers"],
			"stubDomains":         fmt.Sprintf(`{"corp.cluster.local": ["127.0.0.1:%d"]}`, inner),
		})
		c.logs.wait(t, mark, "Configuration applied")
		c.wants(t, "www.corp.cluster.local", "NXDOMAIN")
		const line, way = "fallthrough in-addr.arpa ip6.arpa", "fallthrough in-addr.arpa ip6.arpa corp.cluster.local\n"
		if doc := readFile(t, filepath.Join("..", "docs", "migration.md")); !strings.Contains(doc, way) {
			t.Errorf("docs/migration.md doesn't say %q", way)
		}
		c.reload(t, strings.Replace(corefile, line, way, 1), reloaded)
		c.waits(t, "www.corp.cluster.local", "192.0.2.3")
		c.wants(t, "corp.cluster.local", "192.0.2.3")
		c.wants(t, "web.shop.svc.cluster.local", "192.0.2.100")
		c.wants(t, "none.shop.svc.cluster.local", "NXDOMAIN")
		c.wants(t, "none.cluster.local", "NXDOMAIN")
	})
}

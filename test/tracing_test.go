package test

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"

	tap "github.com/dnstap/golang-dnstap"
	"github.com/miekg/dns"
	"google.golang.org/protobuf/proto"
)

// observed starts CoreDNS with two server blocks that ask the same dnsmasq: the first by nanny, the other by forward. Each
// has the plugins in block, where NAME is nanny or forward.
func observed(t *testing.T, block string) (nannyServer, forwardServer *coreDNS, child string) {
	t.Helper()
	port, other := freePort(t), freePort(t)
	child = fmt.Sprintf("127.0.0.1:%d", freePort(t))
	named := func(name string) string { return strings.ReplaceAll(block, "NAME", name) + "\n" }
	dir := configDir(t, map[string]string{"a.conf": "address=/kept.example/192.0.2.1\nlocal=/example/\n" +
		"txt-record=long.example" + strings.Repeat(","+strings.Repeat("x", 240), 3) + "\n"})
	c := startAs(t, port, server(port, named("nanny")+watching(dir, "args --no-resolv --no-hosts", "listen "+child))+
		server(other, named("forward")+"forward . "+child))
	c.waits(t, "kept.example", "192.0.2.1")
	return c, c.at(other), child
}

// TestDnstap compares what the dnstap plugin is told with what forward tells it of the same queries to the same dnsmasq.
func TestDnstap(t *testing.T) {
	t.Parallel()
	path := filepath.Join(tempDir(t), "tap")
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	messages := map[string][]*tap.Message{} // by identity
	var readers sync.WaitGroup
	readers.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			input, err := tap.NewFrameStreamInput(conn, true)
			if err != nil {
				t.Error(err)
				return
			}
			frames := make(chan []byte)
			readers.Go(func() {
				defer close(frames)
				input.ReadInto(frames)
			})
			readers.Go(func() {
				for frame := range frames {
					d := new(tap.Dnstap)
					if err := proto.Unmarshal(frame, d); err != nil {
						t.Error(err)
					}
					if m := d.GetMessage(); strings.HasPrefix(m.GetType().String(), "FORWARDER_") {
						mu.Lock()
						messages[string(d.GetIdentity())] = append(messages[string(d.GetIdentity())], m)
						mu.Unlock()
					}
				}
			})
		}
	})
	t.Cleanup(func() { // after CoreDNS's end, which closes its connections
		listener.Close()
		readers.Wait()
	})
	ours, theirs, child := observed(t, "dnstap unix://"+path+" full {\nidentity NAME\n}")

	for _, tt := range []struct {
		network, name string
		qtype         uint16
		rcode         int
	}{
		{"udp", "kept.example", dns.TypeA, dns.RcodeSuccess},
		{"udp", "none.example", dns.TypeA, dns.RcodeNameError},
		{"udp", "long.example", dns.TypeA, dns.RcodeSuccess},
		{"tcp", "kept.example", dns.TypeA, dns.RcodeSuccess},
		{"tcp", "long.example", dns.TypeTXT, dns.RcodeSuccess}, // truncated over UDP
	} {
		t.Run(tt.network+" "+tt.name+" "+dns.TypeToString[tt.qtype], func(t *testing.T) {
			m := question(tt.name, tt.qtype)
			var pairs [2][2]*tap.Message
			for i, c := range []*coreDNS{ours, theirs} {
				identity := []string{"nanny", "forward"}[i]
				of := func() (query, response *tap.Message) {
					mu.Lock()
					defer mu.Unlock()
					for _, seen := range messages[identity] {
						switch got := new(dns.Msg); seen.GetType() {
						case tap.Message_FORWARDER_QUERY:
							if got.Unpack(seen.GetQueryMessage()) == nil && got.Id == m.Id {
								query = seen
							}
						case tap.Message_FORWARDER_RESPONSE:
							if got.Unpack(seen.GetResponseMessage()) == nil && got.Id == m.Id {
								response = seen
							}
						}
					}
					return query, response
				}
				r, err := exchange(tt.network, c.addr(), m)
				if err != nil {
					t.Fatal(err)
				}
				if r.Rcode != tt.rcode {
					t.Fatalf("%s: RCODE %s", identity, dns.RcodeToString[r.Rcode])
				}
				within(t, patience, identity+" tells of it", func() bool {
					q, r := of()
					pairs[i] = [2]*tap.Message{q, r}
					return q != nil && r != nil
				})
			}
			for i, kind := range []string{"query", "response"} {
				got, want := pairs[0][i], pairs[1][i]
				if got.GetQueryTimeSec() == 0 || (got.GetResponseTimeSec() == 0) != (want.GetResponseTimeSec() == 0) {
					t.Errorf("%s: times %d and %d, forward has %d and %d", kind, got.GetQueryTimeSec(), got.GetResponseTimeSec(),
						want.GetQueryTimeSec(), want.GetResponseTimeSec())
				}
				if at := fmt.Sprintf("%s:%d", net.IP(got.GetResponseAddress()), got.GetResponsePort()); at != child {
					t.Errorf("%s: dnsmasq at %s, want %s", kind, at, child)
				}
				if got.GetQueryPort() == 0 || !net.IP(got.GetQueryAddress()).IsLoopback() {
					t.Errorf("%s: from %s:%d", kind, net.IP(got.GetQueryAddress()), got.GetQueryPort())
				}
				// Ours goes over TCP only where the answer is truncated; forward's goes as the client's.
				tcp := tt.qtype == dns.TypeTXT
				if got.GetSocketProtocol() == tap.SocketProtocol_TCP != tcp {
					t.Errorf("%s: by %s", kind, got.GetSocketProtocol())
				}
				for _, message := range []*tap.Message{got, want} {
					message.QueryTimeSec, message.QueryTimeNsec, message.ResponseTimeSec, message.ResponseTimeNsec = nil, nil, nil, nil
					message.QueryPort, message.SocketProtocol = nil, nil
				}
				if !proto.Equal(got, want) {
					t.Errorf("%s: nanny tells\n%v\nforward\n%v", kind, got, want)
				}
			}
		})
	}
}

// zipkinSpan is what the tests need of a span.
type zipkinSpan struct {
	Name           string                       `json:"name"`
	LocalEndpoint  struct{ ServiceName string } `json:"localEndpoint"`
	RemoteEndpoint map[string]any               `json:"remoteEndpoint"`
	Tags           map[string]string            `json:"tags"`
}

// TestTrace compares the spans with forward's for the same dnsmasq.
func TestTrace(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	spans := map[string]map[string]zipkinSpan{} // by service and name
	collector := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var list []zipkinSpan
		if err := json.NewDecoder(r.Body).Decode(&list); err != nil {
			t.Error(err)
		}
		mu.Lock()
		defer mu.Unlock()
		for _, s := range list {
			service := s.LocalEndpoint.ServiceName
			if spans[service] == nil {
				spans[service] = map[string]zipkinSpan{}
			}
			spans[service][s.Name] = s
		}
		w.WriteHeader(http.StatusAccepted)
	}))
	t.Cleanup(collector.Close)
	ours, theirs, _ := observed(t, "trace zipkin "+collector.URL+"/api/v2/spans {\nservice NAME\nzipkin_max_batch_interval 100ms\n}")
	ours.wants(t, "kept.example", "192.0.2.1")
	theirs.wants(t, "kept.example", "192.0.2.1")
	var got, want zipkinSpan
	within(t, patience, "the spans of both", func() bool {
		mu.Lock()
		defer mu.Unlock()
		var one, other bool
		got, one = spans["nanny"]["connect"]
		want, other = spans["forward"]["connect"]
		_, block := spans["nanny"]["nanny"]
		return one && other && block
	})
	got.LocalEndpoint, want.LocalEndpoint = struct{ ServiceName string }{}, struct{ ServiceName string }{}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("nanny's span is\n%+v\nforward's\n%+v", got, want)
	}
}

// TestMetadata: the log can have the address of dnsmasq and the version of the configuration.
func TestMetadata(t *testing.T) {
	t.Parallel()
	dir := configDir(t, map[string]string{"a.conf": "address=/kept.example/192.0.2.1\n"})
	c := start(t, "metadata\nlog . \"QUERY {name} by {/nanny/upstream} with {/nanny/version}.\"\n"+watching(dir))
	c.waits(t, "kept.example", "192.0.2.1")
	for i := range 2 {
		within(t, patience, "the log says so", func() bool { return c.applied() == i+1 })
		mark := c.logs.mark()
		c.waits(t, "kept.example", fmt.Sprintf("192.0.2.%d", i+1))
		line := c.logs.wait(t, mark, "QUERY kept.example. by "+c.child(t).addr()+" with "+c.versions()[i])
		if _, full, _ := strings.Cut(line, " with "); len(strings.TrimSuffix(full, ".")) != 64 {
			t.Errorf("%q is not a SHA-256", full)
		}
		put(t, dir, "a.conf", "address=/kept.example/192.0.2.2\n")
	}
}

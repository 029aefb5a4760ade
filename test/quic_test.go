package test

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/coredns/coredns/core/dnsserver"
	"github.com/miekg/dns"
	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
)

// TestQUIC asks over QUIC and over HTTP/3, whose clients are at UDP addresses: what dnsmasq truncates comes whole.
func TestQUIC(t *testing.T) {
	t.Parallel()
	var records strings.Builder
	for i := range 10 {
		fmt.Fprintf(&records, "txt-record=long.example,%d%s\n", i, strings.Repeat("x", 200))
	}
	dir := configDir(t, map[string]string{"a.conf": records.String()})
	cert, key, trusted := certificate(t)
	port, doq, doh3 := freePort(t), freePort(t), freePort(t)
	secure := func(scheme string, port int) string {
		return fmt.Sprintf("%s://.:%d {\nbind 127.0.0.1\ntls %s %s\n%s\n}\n", scheme, port, cert, key, watching(dir))
	}
	c := startAs(t, port, server(port, watching(dir))+secure("quic", doq)+secure("https3", doh3))
	within(t, patience, "the records are there", func() bool {
		r, err := exchange("tcp", c.addr(), question("long.example", dns.TypeTXT))
		return err == nil && len(r.Answer) == 10
	})
	query := question("long.example", dns.TypeTXT)
	query.Id = 0                // RFC 9250, section 4.2.1
	query.SetEdns0(4096, false) // more than dnsmasq's 1232; CoreDNS cuts what is longer than the client says, on QUIC too
	for name, ask := range map[string]func(context.Context, *tls.Config, []byte) ([]byte, error){
		"QUIC":   askQUIC(c.at(doq).addr()),
		"HTTP/3": askHTTP3(c.at(doh3).addr()),
	} {
		packed, err := query.Pack()
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		answer, err := ask(ctx, trusted.Clone(), packed)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		r := new(dns.Msg)
		if err := r.Unpack(answer); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if r.Truncated || len(r.Answer) != 10 {
			t.Errorf("%s: want 10 records, got\n%v", name, r)
		}
	}
}

func askQUIC(addr string) func(context.Context, *tls.Config, []byte) ([]byte, error) {
	return func(ctx context.Context, config *tls.Config, query []byte) ([]byte, error) {
		config.NextProtos = []string{"doq"}
		conn, err := quic.DialAddr(ctx, addr, config, nil)
		if err != nil {
			return nil, err
		}
		defer conn.CloseWithError(0, "")
		stream, err := conn.OpenStreamSync(ctx)
		if err != nil {
			return nil, err
		}
		if _, err := stream.Write(dnsserver.AddPrefix(query)); err != nil {
			return nil, err
		}
		if err := stream.Close(); err != nil {
			return nil, err
		}
		answer, err := io.ReadAll(stream)
		if err != nil || len(answer) < 2 {
			return nil, fmt.Errorf("%d octets of answer: %w", len(answer), err)
		}
		return answer[2:], nil
	}
}

func askHTTP3(addr string) func(context.Context, *tls.Config, []byte) ([]byte, error) {
	return func(ctx context.Context, config *tls.Config, query []byte) ([]byte, error) {
		transport := &http3.Transport{TLSClientConfig: config}
		defer transport.Close()
		return askHTTP(ctx, &http.Client{Transport: transport}, addr, query)
	}
}

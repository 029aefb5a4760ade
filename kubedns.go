package nanny

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
)

// maxUpstreams is kube-dns's limit, that of resolv.conf (MAXNS).
const maxUpstreams = 3

// server is one DNS server of stubDomains or upstreamNameservers. Either addr is
// valid or host is set.
type server struct {
	addr netip.Addr
	host string
	port uint16 // 0: none given, so 53
}

// stubDomain is a domain and the servers that its queries go to.
type stubDomain struct {
	domain  string
	servers []server
	line    int
}

// kubeDNS is what the keys of kube-dns's ConfigMap say, in their order.
type kubeDNS struct {
	stubs       []stubDomain
	upstreams   []server
	federations int
}

// parseKubeDNS reads and checks the kube-dns keys among the files of s. An error
// is a *configError.
func parseKubeDNS(s *snapshot) (*kubeDNS, error) {
	k := new(kubeDNS)
	for _, f := range s.files {
		if len(bytes.TrimSpace(f.data)) == 0 {
			continue // like an absent key
		}
		p := &jsonReader{file: f, line: 1}
		var err error
		switch f.name {
		case "stubDomains":
			k.stubs, err = p.stubDomains()
		case "upstreamNameservers":
			k.upstreams, err = p.upstreams()
		case "federations":
			k.federations, err = parseFederations(f)
		}
		if err != nil {
			return nil, err
		}
	}
	return k, nil
}

// jsonReader walks the tokens of a JSON file and knows the line it is at. The
// tokens, and not a map, keep the order and show what is given twice.
type jsonReader struct {
	file
	dec  *json.Decoder
	off  int // up to which lines are counted
	line int
}

// next returns the next token.
func (p *jsonReader) next() (json.Token, error) {
	if p.dec == nil {
		p.dec = json.NewDecoder(bytes.NewReader(p.data))
		p.dec.UseNumber()
	}
	// Spaces and separators belong to the token that follows, which is where
	// an error is then said to be.
	start := int(p.dec.InputOffset())
	for start < len(p.data) && bytes.IndexByte([]byte(" \t\r\n,:"), p.data[start]) >= 0 {
		start++
	}
	p.line += bytes.Count(p.data[p.off:start], []byte("\n"))
	p.off = start
	return p.dec.Token()
}

// fail returns reason with file and line.
func (p *jsonReader) fail(reason error) error { return &configError{p.name, p.line, reason} }

// delim reads one of "[{]}", which begins or ends what is called what.
func (p *jsonReader) delim(want json.Delim, what string) error {
	t, err := p.next()
	if err != nil {
		return p.fail(jsonError(err))
	}
	if t != want {
		return p.fail(fmt.Errorf("%s expected, found %s", what, describe(t)))
	}
	return nil
}

// str reads a string, which is called what.
func (p *jsonReader) str(what string) (string, error) {
	t, err := p.next()
	if err != nil {
		return "", p.fail(jsonError(err))
	}
	s, ok := t.(string)
	if !ok {
		return "", p.fail(fmt.Errorf("%s (a string) expected, found %s", what, describe(t)))
	}
	return s, nil
}

// end checks that nothing follows.
func (p *jsonReader) end() error {
	if _, err := p.next(); !errors.Is(err, io.EOF) {
		return p.fail(errors.New("something follows the end of the JSON value"))
	}
	return nil
}

// servers reads an array of servers, host names among them if hosts, limit at
// most unless that is 0.
func (p *jsonReader) servers(hosts bool, limit int) ([]server, error) {
	if err := p.delim('[', "an array of servers"); err != nil {
		return nil, err
	}
	var list []server
	for p.dec.More() {
		text, err := p.str("a server")
		if err != nil {
			return nil, err
		}
		srv, err := parseServer(text, hosts)
		if err != nil {
			return nil, p.fail(err)
		}
		if limit > 0 && len(list) == limit {
			return nil, p.fail(fmt.Errorf("a fourth nameserver, %s: at most %d are allowed", quote(text), limit))
		}
		list = append(list, srv)
	}
	return list, p.delim(']', "the end of the array")
}

// upstreams reads an upstreamNameservers file.
func (p *jsonReader) upstreams() ([]server, error) {
	list, err := p.servers(false, maxUpstreams)
	if err != nil {
		return nil, err
	}
	return list, p.end()
}

// stubDomains reads a stubDomains file.
func (p *jsonReader) stubDomains() ([]stubDomain, error) {
	if err := p.delim('{', "an object of domains"); err != nil {
		return nil, err
	}
	var stubs []stubDomain
	seen := make(map[string]bool)
	for p.dec.More() {
		domain, err := p.str("a domain")
		if err != nil {
			return nil, err
		}
		if err := checkDomain(domain); err != nil {
			return nil, p.fail(fmt.Errorf("domain %s: %w", quote(domain), err))
		}
		if seen[domain] {
			return nil, p.fail(fmt.Errorf("domain %s is given twice", domain))
		}
		seen[domain] = true
		stub := stubDomain{domain: domain, line: p.line}
		if stub.servers, err = p.servers(true, 0); err != nil {
			return nil, err
		}
		stubs = append(stubs, stub)
	}
	if err := p.delim('}', "the end of the object"); err != nil {
		return nil, err
	}
	return stubs, p.end()
}

// parseFederations checks a federations file and returns how many it names.
func parseFederations(f file) (int, error) {
	line, n := 1, 0
	for part := range strings.SplitSeq(strings.TrimRight(string(f.data), " \t\r\n"), ",") {
		text := strings.TrimLeft(part, " \t\r\n")
		at := line + strings.Count(part[:len(part)-len(text)], "\n")
		line += strings.Count(part, "\n")
		name, domain, ok := strings.Cut(text, "=")
		name, domain = strings.TrimSpace(name), strings.TrimSpace(domain)
		var err error
		if !ok {
			err = fmt.Errorf("federation %s: not of the form name=domain", quote(text))
		} else if msgs := validation.IsDNS1123Label(name); len(msgs) > 0 {
			err = fmt.Errorf("federation name %s: %s", quote(name), msgs[0])
		} else if err = checkDomain(domain); err != nil {
			err = fmt.Errorf("federation domain %s: %w", quote(domain), err)
		}
		if err != nil {
			return 0, &configError{f.name, at, err}
		}
		n++
	}
	return n, nil
}

// checkDomain checks domain as kube-dns does, and the length of labels, which
// that leaves out but dnsmasq ends for.
func checkDomain(domain string) error {
	if len(domain) > validation.DNS1123SubdomainMaxLength { // the regular expression below takes a second for 1 MB
		return errors.New(validation.MaxLenError(validation.DNS1123SubdomainMaxLength))
	}
	if msgs := validation.IsDNS1123Subdomain(domain); len(msgs) > 0 {
		return errors.New(msgs[0])
	}
	for label := range strings.SplitSeq(domain, ".") {
		if len(label) > validation.DNS1123LabelMaxLength {
			return fmt.Errorf("a label has more than %d characters", validation.DNS1123LabelMaxLength)
		}
	}
	return nil
}

// parseServer reads an address with or without a port, IPv6 with or without
// brackets, or, if hosts, a host name with or without a port. netip is as strict
// as it takes: dnsmasq itself reads 010.1.1.1 as 8.1.1.1.
func parseServer(s string, hosts bool) (server, error) {
	fail := func(reason string) (server, error) { return server{}, fmt.Errorf("server %s: %s", quote(s), reason) }
	host, port := s, ""
	bracket := strings.HasPrefix(s, "[")
	if bracket {
		var ok bool
		if host, port, ok = strings.Cut(s[1:], "]"); !ok {
			return fail("no closing bracket")
		}
		if port != "" && port[0] != ':' {
			return fail("only :port may follow the bracket")
		}
	} else if strings.Count(s, ":") == 1 {
		i := strings.IndexByte(s, ':')
		host, port = s[:i], s[i:]
	}
	var srv server
	if port != "" {
		n, err := strconv.ParseUint(port[1:], 10, 16)
		if err != nil || n == 0 || port[1] < '1' || port[1] > '9' {
			return fail("the port is not a number from 1 to 65535")
		}
		srv.port = uint16(n)
	}
	addr, err := netip.ParseAddr(host)
	if err == nil {
		switch srv.addr = addr.Unmap(); {
		case bracket && !addr.Is6():
			return fail("only an IPv6 address is put in brackets")
		case addr.Zone() != "" && !validZone(addr.Zone()):
			return fail("not an interface name after %")
		case srv.addr.IsUnspecified() || srv.addr.IsMulticast():
			return fail("not the address of one host")
		}
		return srv, nil
	}
	last := host[strings.LastIndexByte(host, '.')+1:]
	if _, err := strconv.ParseUint(last, 0, 64); !hosts || bracket || err == nil || strings.Contains(host, ":") {
		return fail("not an IP address")
	}
	if err := checkDomain(host); err != nil {
		return fail("neither an IP address nor a host name: " + err.Error())
	}
	srv.host = host
	return srv, nil
}

// validZone reports whether zone can be an interface name (at most 15 bytes,
// Linux's IFNAMSIZ) that has no meaning to dnsmasq.
func validZone(zone string) bool {
	return len(zone) <= 15 && !strings.ContainsFunc(zone, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("._-", r)
	})
}

// describe names a token that was not expected.
func describe(t json.Token) string {
	switch t := t.(type) {
	case nil:
		return "null"
	case json.Delim:
		return map[json.Delim]string{'{': "an object", '[': "an array"}[t]
	case string:
		return quote(t)
	}
	return cut(fmt.Sprint(t))
}

// jsonError says in a user's terms what the decoder says of a file's end.
func jsonError(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return errors.New("the JSON ends too early")
	}
	return fmt.Errorf("not JSON: %w", err)
}

// quote returns s for an error: harmless and not too long.
func quote(s string) string { return strconv.Quote(cut(s)) }

// cut shortens s to what an error can bear.
func cut(s string) string {
	if len(s) > 100 {
		return s[:100] + "..."
	}
	return s
}

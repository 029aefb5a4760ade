package nanny

import (
	"bytes"
	"fmt"
	"iter"
	"slices"
	"strings"
)

const (
	// maxLine is how many bytes a line of a watched *.conf may have. dnsmasq cuts
	// lines at 1024 and reads what is left as a line of its own.
	maxLine = 1000
	// maxWarnings is how many warnings one file may give.
	maxWarnings = 20
)

// managed are the settings that nanny alone makes.
var managed = strings.Fields(`port listen-address bind-interfaces bind-dynamic keep-in-foreground
	no-daemon pid-file log-facility log-async test version help`)

// forbidden run programs or read further configuration, which could do so. They
// are not for those who can only write the directory.
var forbidden = strings.Fields("conf-script dhcp-script dhcp-luascript conf-file conf-dir")

// argsFile stands for a file's name in a directive of the command line.
const argsFile = "args"

// directive is one line of a dnsmasq configuration file, or one command line
// option, as dnsmasq reads it.
type directive struct {
	file        string
	line        int // from 1
	name, value string
}

// parseConf gives the directives of a configuration file as dnsmasq's
// read_file does, except that it takes more for a directive than dnsmasq (names
// quoted in any way, unclosed quotes), never less, as long as no line is longer
// than maxLine. Lines without a directive are left out.
func parseConf(name string, data []byte) iter.Seq[directive] {
	return func(yield func(directive) bool) {
		n := 0
		for line := range bytes.SplitSeq(data, []byte("\n")) {
			n++
			key, value, _ := strings.Cut(lexLine(string(line)), "=")
			key = strings.Trim(unhide(key), " ")
			value = unhide(strings.TrimLeft(value, " "))
			if (key != "" || value != "") && !yield(directive{name, n, key, value}) {
				return
			}
		}
	}
}

// hidden stands for a blank in quotes, which isn't trimmed. No line has it: a
// NUL ends a line.
const hidden = "\x00"

// unhide puts quoted blanks back.
func unhide(s string) string { return strings.ReplaceAll(s, hidden, " ") }

// lexLine undoes dnsmasq's quoting in line, makes all white space blanks, and
// takes away comment, leading and trailing blanks.
func lexLine(line string) string {
	const escapes, escaped = `\"tnbre`, "\\\"\t\n\b\r\x1b"
	if !strings.ContainsAny(line, "\x00\"#\t\r\v\f") { // most of a long list
		return strings.Trim(line, " ")
	}
	line, _, _ = strings.Cut(line, "\x00")
	out := make([]byte, 0, len(line))
	white := true // a # now begins a comment; quoted text doesn't change that
	for i := 0; i < len(line); i++ {
		if line[i] == '"' {
			for i++; i < len(line) && line[i] != '"'; i++ {
				c := line[i]
				if c == '\\' && i+1 < len(line) {
					if e := strings.IndexByte(escapes, line[i+1]); e >= 0 {
						i++
						c = escaped[e]
					}
				}
				if c == ' ' {
					c = hidden[0]
				}
				out = append(out, c)
			}
			// What follows the closing quote is taken as it is, another quote too.
			if i++; i >= len(line) {
				break
			}
		}
		switch c := line[i]; c {
		case ' ', '\t', '\r', '\v', '\f':
			white = true
			out = append(out, ' ')
			continue
		case '#':
			if white {
				return string(bytes.Trim(out, " "))
			}
			fallthrough
		default:
			white = false
			out = append(out, c)
		}
	}
	return string(bytes.Trim(out, " "))
}

// sanitize returns the copy of a watched *.conf that dnsmasq may read: managed
// settings become comments, each with a warning, and lines keep their numbers. A
// forbidden directive or a line longer than maxLine is a *configError.
func sanitize(f file) (staged []byte, warnings []string, err error) {
	n := 0
	for line := range bytes.SplitSeq(f.data, []byte("\n")) {
		if n++; len(line) > maxLine {
			return nil, nil, &configError{f.name, n, fmt.Errorf("the line has more than %d bytes, dnsmasq would read its end as another line", maxLine)}
		}
	}
	var lines [][]byte // of f, once one is to change
	dropped := 0
	for d := range parseConf(f.name, f.data) {
		if slices.Contains(forbidden, d.name) {
			return nil, nil, &configError{f.name, d.line, fmt.Errorf("%s is allowed only in the Corefile's args, as it runs a program or reads further configuration", d.name)}
		}
		own := d.name == "user" || d.name == "group" // nanny gives these to the child itself
		if !own && !slices.Contains(managed, d.name) {
			continue
		}
		if lines == nil {
			lines = bytes.SplitAfter(f.data, []byte("\n"))
		}
		lines[d.line-1] = append([]byte("#"), lines[d.line-1]...)
		if own {
			continue
		}
		if dropped++; dropped <= maxWarnings {
			warnings = append(warnings, fmt.Sprintf("%s:%d: %s is set by nanny; line ignored", f.name, d.line, d.name))
		}
	}
	if more := dropped - maxWarnings; more > 0 {
		warnings = append(warnings, fmt.Sprintf("%s: %d further lines that nanny sets itself are ignored", f.name, more))
	}
	if lines == nil {
		return f.data, warnings, nil
	}
	return bytes.Join(lines, nil), warnings, nil
}

// options are dnsmasq 2.90's long options, each after its letter if it has one.
// A name that ends in = needs an argument, one that ends in ? may have one.
var options = strings.Fields(`
	H/addn-hosts= A/address= V/alias= z/bind-interfaces B/bogus-nxdomain= b/bogus-priv 3/bootp-dynamic?
	c/cache-size? 7/conf-dir= C/conf-file? K/dhcp-authoritative M/dhcp-boot= G/dhcp-host= J/dhcp-ignore=
	X/dhcp-lease-max= l/dhcp-leasefile? 4/dhcp-mac= O/dhcp-option= F/dhcp-range= 6/dhcp-script=
	j/dhcp-userclass= U/dhcp-vendorclass= 0/dns-forward-max= D/domain-needed s/domain=
	P/edns-packet-max= 1/enable-dbus? I/except-interface= E/expand-hosts f/filterwin2k g/group? w/help
	i/interface= k/keep-in-foreground 9/leasefile-ro a/listen-address= T/local-ttl= y/localise-queries
	L/localmx 8/log-facility= q/log-queries? m/mx-host= t/mx-target= d/no-daemon 2/no-dhcp-interface=
	h/no-hosts N/no-negcache 5/no-ping n/no-poll R/no-resolv x/pid-file? p/port= Q/query-port=
	Z/read-ethers r/resolv-file? e/selfmx S/server= W/srv-host= o/strict-order Y/txt-record= u/user?
	v/version add-cpe-id= add-mac? add-subnet? all-servers auth-peer= auth-sec-servers= auth-server=
	auth-soa= auth-ttl= auth-zone= bind-dynamic bridge-interface= caa-record= cache-rr= clear-on-reload
	cname= conf-script= connmark-allowlist-enable? connmark-allowlist= conntrack dhcp-alternate-port?
	dhcp-broadcast? dhcp-circuitid= dhcp-client-update dhcp-duid= dhcp-fqdn dhcp-generate-names?
	dhcp-hostsdir= dhcp-hostsfile= dhcp-ignore-clid dhcp-ignore-names? dhcp-lease= dhcp-luascript=
	dhcp-match= dhcp-name-match= dhcp-no-override dhcp-option-force= dhcp-optsdir= dhcp-optsfile=
	dhcp-proxy? dhcp-pxe-vendor= dhcp-rapid-commit dhcp-relay= dhcp-remoteid= dhcp-reply-delay=
	dhcp-scriptuser= dhcp-sequential-ip dhcp-subscrid= dhcp-ttl= dns-loop-detect dns-rr= dnssec
	dnssec-check-unsigned? dnssec-debug dnssec-limits= dnssec-no-timecheck dnssec-timestamp=
	domain-suffix= dumpfile= dumpmask= dynamic-host= enable-ra enable-tftp? enable-ubus? fast-dns-retry?
	filter-A filter-AAAA filter-rr= host-record= hostsdir= ignore-address= interface-name= ipset=
	local-service? local= log-async? log-debug log-dhcp max-cache-ttl= max-port= max-tcp-connections=
	max-ttl= min-cache-ttl= min-port= naptr-record= neg-ttl= nftset= no-dhcpv4-interface=
	no-dhcpv6-interface= no-ident no-round-robin port-limit= proxy-dnssec ptr-record= pxe-prompt=
	pxe-service= quiet-dhcp quiet-dhcp6 quiet-ra quiet-tftp ra-param= rebind-domain-ok=
	rebind-localhost-ok rev-server= script-arp script-on-renewal servers-file= shared-network=
	stop-dns-rebind strip-mac strip-subnet synth-domain= tag-if= test tftp-lowercase tftp-max= tftp-mtu=
	tftp-no-blocksize tftp-no-fail tftp-port-range= tftp-root= tftp-secure tftp-single-port
	tftp-unique-root? trust-anchor= umbrella? use-stale-cache?`)

// shortOptions is dnsmasq 2.90's option string, in getopt's notation.
const shortOptions = "951yZDNLERKzowefnbvhdkqr:m:p:c:l:s:i:t:u:g:a:x:S:C:A:T:H:Q:I:B:F:G:O:M:X:V:U:j:P:J:W:Y:2:4:6:7:8:0:3:"

// parseArgs reads command line arguments as getopt_long(3) does and returns a
// directive of file argsFile for each option; its line is the argument's number,
// from 1. What isn't an option, all after "--" too, is left out: dnsmasq doesn't
// start with it.
func parseArgs(args []string) []directive {
	var list []directive
	for i := 0; i < len(args); i++ {
		arg := args[i]
		add := func(name, value string) { list = append(list, directive{argsFile, i + 1, name, value}) }
		// follow is for an option whose argument is the next one.
		follow := func(name string) {
			if i+1 == len(args) {
				add(name, "")
				return
			}
			add(name, args[i+1])
			i++
		}
		if arg == "--" {
			break
		}
		if long, ok := strings.CutPrefix(arg, "--"); ok {
			name, value, given := strings.Cut(long, "=")
			name, needs := longOption(name)
			if needs && !given {
				follow(name)
			} else {
				add(name, value)
			}
			continue
		}
		if len(arg) < 2 || arg[0] != '-' {
			continue
		}
		for j := 1; j < len(arg); j++ {
			name := shortOption(arg[j])
			if !strings.Contains(shortOptions, arg[j:j+1]+":") {
				add(name, "")
				continue
			}
			if j+1 < len(arg) {
				add(name, arg[j+1:])
			} else {
				follow(name)
			}
			break
		}
	}
	return list
}

// longOption returns the option that name is or abbreviates, and whether that
// needs an argument. An abbreviation of several is the managed one among them,
// so that it gets refused; the set differs between versions of dnsmasq.
func longOption(name string) (full string, needs bool) {
	var found []string
	for _, o := range options {
		if o[1] == '/' {
			o = o[2:]
		}
		switch long := strings.TrimRight(o, "=?"); {
		case long == name:
			return long, strings.HasSuffix(o, "=")
		case strings.HasPrefix(long, name) && slices.Contains(managed, long):
			found = slices.Insert(found, 0, o)
		case strings.HasPrefix(long, name):
			found = append(found, o)
		}
	}
	if len(found) == 0 {
		return name, false
	}
	long := strings.TrimRight(found[0], "=?")
	if len(found) > 1 && !slices.Contains(managed, long) {
		return name, false
	}
	return long, strings.HasSuffix(found[0], "=")
}

// shortOption returns the long name of the option with the letter c, or c.
func shortOption(c byte) string {
	for _, o := range options {
		if o[0] == c && o[1] == '/' {
			return strings.TrimRight(o[2:], "=?")
		}
	}
	return string(c)
}

// refusedArg returns the first argument that makes a setting which is nanny's,
// and that setting's long name, or two empty strings.
func refusedArg(args []string) (arg, name string) {
	for _, d := range parseArgs(args) {
		if slices.Contains(managed, d.name) {
			return args[d.line-1], d.name
		}
	}
	return "", ""
}

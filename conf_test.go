package nanny

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// testConf lets the real dnsmasq check data and returns what it says.
func testConf(t *testing.T, dir string, data []byte, args ...string) (string, error) {
	t.Helper()
	path := filepath.Join(dir, "a.conf")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "/usr/sbin/dnsmasq", append([]string{"--test", "--conf-file=" + path}, args...)...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LANG=C"}
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

func TestParseConf(t *testing.T) {
	for _, tc := range []struct {
		name, in    string
		key, value  string
		line, count int
	}{
		{"plain", "port=53\n", "port", "53", 1, 1},
		{"no final newline", "port=53", "port", "53", 1, 1},
		{"flag", "no-daemon", "no-daemon", "", 1, 1},
		{"second line", "# a\n\nport=53", "port", "53", 3, 1},
		{"crlf", "port=53\r\n", "port", "53", 1, 1},
		{"blanks", " \t\v\fport \t=\v 53 \f", "port", "53", 1, 1},
		{"carriage returns only", "port=53\rno-hosts", "port", "53 no-hosts", 1, 1},
		{"comment", "port=53 # x", "port", "53", 1, 1},
		{"hash in a word", "server=1.2.3.4#53", "server", "1.2.3.4#53", 1, 1},
		{"hash after quotes at the start", `"port=1"#2`, "port", "1", 1, 1},
		{"nul", "port=53\x0099", "port", "53", 1, 1},
		{"only nul", "\x00port=53", "", "", 0, 0},
		{"only a comment", " #port=53", "", "", 0, 0},
		{"quoted name", `"conf-script"=x`, "conf-script", "x", 1, 1},
		{"partly quoted name", `conf-sc"ri"pt=x`, "conf-script", "x", 1, 1},
		{"quoted name with blank", `"conf-script "=x`, "conf-script", "x", 1, 1},
		{"quoted all", `"conf-script=x"`, "conf-script", "x", 1, 1},
		{"quoted equals sign", `conf-script"="x`, "conf-script", "x", 1, 1},
		{"two equals signs", "conf-script==x", "conf-script", "=x", 1, 1},
		{"empty quotes", `""conf-script=x`, "conf-script", "x", 1, 1},
		{"quote after a quote", `a=""""b"`, "a", `"b`, 1, 1},
		{"escapes", `a="\\\"\t\n\b\r\e\x#"`, "a", "\\\"\t\n\b\r\x1b\\x#", 1, 1},
		{"backslash outside", `a=\t`, "a", `\t`, 1, 1},
		{"quoted blanks", `a= " b " `, "a", " b ", 1, 1},
		{"open quote", `conf-script="x`, "conf-script", "x", 1, 1},
		{"open quote, backslash", `conf-script="x\`, "conf-script", `x\`, 1, 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := slices.Collect(parseConf("a.conf", []byte(tc.in)))
			if len(got) != tc.count {
				t.Fatalf("got %d directives %+v, want %d", len(got), got, tc.count)
			}
			if want := (directive{"a.conf", tc.line, tc.key, tc.value}); tc.count == 1 && got[0] != want {
				t.Errorf("got %+v, want %+v", got[0], want)
			}
		})
	}
}

// dnsmasq names the file that it can't read, which shows how it read the value.
func TestParseConfValueAsDnsmasq(t *testing.T) {
	dir := t.TempDir()
	for _, in := range []string{
		`/x`, ` /x `, `"/x"`, `"/x "`, `" /x"`, `/"x y"  z`, `/x "y"#z`, `/x ""#z`, `/x"a"#z`, `/x#z`, `/x #z`, "/x\ty", `"/\tx\\\""`, `/\x`,
		`/""""x"`, `/a"b"c"d"`, `/a"b""c"`, `"/a,b.c:1f"`, "/x\r", "/x\x00y", `=/x`, `"=/x"`, `/x "y"" z`,
	} {
		t.Run(fmt.Sprintf("%q", in), func(t *testing.T) {
			data := []byte("conf-file=" + in + "\n")
			out, err := testConf(t, dir, data)
			if err == nil {
				t.Fatalf("dnsmasq accepts it: %s", out)
			}
			got := slices.Collect(parseConf("a.conf", data))
			if len(got) != 1 || got[0].name != "conf-file" {
				t.Fatalf("got %+v, want one conf-file", got)
			}
			want := "dnsmasq: cannot read " + got[0].value + ": No such file or directory"
			if out != want && !strings.Contains(out, `missing "`) {
				t.Errorf("value %q, but dnsmasq says %q", got[0].value, out)
			}
		})
	}
}

func TestSanitize(t *testing.T) {
	for _, tc := range []struct {
		name, in, want string
		warnings       []string
		err            string
	}{
		{"empty", "", "", nil, ""},
		{"untouched", "# x\r\nno-hosts\r\n\xc3\xa4", "# x\r\nno-hosts\r\n\xc3\xa4", nil, ""},
		{"managed", "no-hosts\n\nport=53\n", "no-hosts\n\n#port=53\n", []string{"a.conf:3: port is set by nanny; line ignored"}, ""},
		{"no final newline", " \"l\"isten-address = 127.0.0.1", "# \"l\"isten-address = 127.0.0.1", []string{"a.conf:1: listen-address is set by nanny; line ignored"}, ""},
		{"flag", "no-daemon\ntest", "#no-daemon\n#test", []string{"a.conf:1: no-daemon is set by nanny; line ignored", "a.conf:2: test is set by nanny; line ignored"}, ""},
		{"in a comment", "#port=53\n # conf-script=x\n", "#port=53\n # conf-script=x\n", nil, ""},
		{"script", "no-hosts\nconf-script=x\n", "", nil, "a.conf:2: conf-script is allowed only in the Corefile's args"},
		{"flag without value", "conf-dir", "", nil, "a.conf:1: conf-dir is"},
		{"dhcp-script", "dhcp-script=/x", "", nil, "a.conf:1: dhcp-script is"},
		{"dhcp-luascript", "dhcp-luascript=/x", "", nil, "a.conf:1: dhcp-luascript is"},
		{"conf-file", "conf-file=/x", "", nil, "a.conf:1: conf-file is"},
		{"long line", strings.Repeat("x", 1000) + "\n#" + strings.Repeat("x", 1000), "", nil, "a.conf:2: the line has more than 1000 bytes"},
		{"longest line", strings.Repeat("x", 1000) + "\n", strings.Repeat("x", 1000) + "\n", nil, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, warnings, err := sanitize(file{name: "a.conf", data: []byte(tc.in)})
			if tc.err != "" {
				if err == nil || !strings.HasPrefix(err.Error(), tc.err) {
					t.Fatalf("got error %v, want %s...", err, tc.err)
				}
				if want := (*configError)(nil); !errors.As(err, &want) {
					t.Errorf("error %T is not a *configError", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if string(got) != tc.want {
				t.Errorf("got %q, want %q", got, tc.want)
			}
			if !slices.Equal(warnings, tc.warnings) {
				t.Errorf("got warnings %q, want %q", warnings, tc.warnings)
			}
		})
	}
}

func TestSanitizeWarningsAreBounded(t *testing.T) {
	_, warnings, err := sanitize(file{name: "a.conf", data: bytes.Repeat([]byte("port=1\n"), 1000)})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := warnings[len(warnings)-1], "a.conf: 980 further lines that nanny sets itself are ignored"; len(warnings) != 21 || got != want {
		t.Errorf("got %d warnings, the last %q, want 21 and %q", len(warnings), got, want)
	}
}

// What the real dnsmasq runs has to be refused, however it is spelled; what it
// takes for a port has to be a comment in the staged copy.
func TestSanitizeAsDnsmasq(t *testing.T) {
	dir := t.TempDir()
	ran := filepath.Join(dir, "ran")
	script := ":>" + ran
	spellings := []string{
		"conf-script=%", " conf-script = % ", "conf-sc\"ript\"=%", "conf-sc\"ri\"pt\"=\"%", "conf-sc\"ript=%\"", "\"\"conf-script=%", "\"\" conf-script=%",
		"\v\f\tconf-script\t=\v%\r\n", "no-hosts\nconf-script=%", "conf-script=% # x", "conf-script=%\x00x", "#x\nconf-script=%\n", "conf-\"script=%\"",
		"--conf-script=%", "conf-scrip=%", "CONF-SCRIPT=%", "conf-script %", "\ufeffconf-script=%", "conf-script=\n%", "#x\rconf-script=%", "\"conf-script=%\"",
		"#" + strings.Repeat("x", 1023) + "conf-script=%", strings.Repeat(" ", 1024) + "conf-script=%",
	}
	for _, s := range spellings {
		check(t, dir, ran, strings.ReplaceAll(s, "%", script))
	}
	rnd := rand.New(rand.NewPCG(1, 2))
	const extra = "\"\\ \t\r\v\f\n#=\x00nrst\x01\x07-"
	hits := 0
	for range 200 {
		s := []byte(spellings[rnd.IntN(13)])
		for range 1 + rnd.IntN(2) {
			i, j := rnd.IntN(len(s)), rnd.IntN(len(s)+1)
			switch rnd.IntN(4) {
			case 0:
				s[i] = extra[rnd.IntN(len(extra))]
			case 1:
				s = slices.Insert(s, i, extra[rnd.IntN(len(extra))])
			default: // quote a part
				s = slices.Insert(slices.Insert(s, max(i, j), '"'), min(i, j), '"')
			}
		}
		if check(t, dir, ran, strings.ReplaceAll(string(s), "%", script)) {
			hits++
		}
	}
	if hits < 20 {
		t.Errorf("dnsmasq ran only %d of the mutations, which proves little", hits)
	}
}

// check lets dnsmasq read conf and reports whether it ran the script, which
// sanitize must not let through.
func check(t *testing.T, dir, ran, conf string) bool {
	t.Helper()
	out, _ := testConf(t, dir, []byte(conf))
	if os.Remove(ran) != nil {
		return false
	}
	if _, _, err := sanitize(file{name: "a.conf", data: []byte(conf)}); err == nil {
		t.Errorf("%q passes but dnsmasq runs it: %s", conf, out)
	}
	return true
}

// The staged copy of any managed line is a comment to dnsmasq.
func TestSanitizedIsAComment(t *testing.T) {
	dir := t.TempDir()
	for _, name := range managed {
		for _, line := range []string{name, name + "=53", " \"\"" + name + "\t= \"x\" ", "\r" + name + "=\"", name + "=" + strings.Repeat("1", maxLine-1-len(name))} {
			staged, warnings, err := sanitize(file{name: "a.conf", data: []byte(line + "\nno-hosts=1")})
			if err != nil || len(warnings) != 1 {
				t.Errorf("%q: got warnings %q, error %v, want one warning", line, warnings, err)
				continue
			}
			if out, _ := testConf(t, dir, staged); !strings.Contains(out, "extraneous parameter at line 2 of") {
				t.Errorf("%q: dnsmasq says %q of the staged copy, want a complaint about line 2 only", staged, out)
			}
		}
	}
}

func TestParseArgs(t *testing.T) {
	for _, tc := range []struct {
		args []string
		want []directive
	}{
		{nil, nil},
		{[]string{"--port=53"}, []directive{{"args", 1, "port", "53"}}},
		{[]string{"--port", "53", "-h"}, []directive{{"args", 1, "port", "53"}, {"args", 3, "no-hosts", ""}}},
		{[]string{"-hkp53"}, []directive{{"args", 1, "no-hosts", ""}, {"args", 1, "keep-in-foreground", ""}, {"args", 1, "port", "53"}}},
		{[]string{"-F", "--port=1"}, []directive{{"args", 1, "dhcp-range", "--port=1"}}},
		{[]string{"--dhcp-range", "-p1"}, []directive{{"args", 1, "dhcp-range", "-p1"}}},
		{[]string{"--log-queries", "extra", "-q"}, []directive{{"args", 1, "log-queries", ""}, {"args", 3, "log-queries", ""}}},
		{[]string{"--log-queries=extra"}, []directive{{"args", 1, "log-queries", "extra"}}},
		{[]string{"-3", "tag:x"}, []directive{{"args", 1, "bootp-dynamic", "tag:x"}}},
		{[]string{"--dhcp-r", "x"}, []directive{{"args", 1, "dhcp-r", ""}}},
		{[]string{"--dhcp-ra", "x"}, []directive{{"args", 1, "dhcp-ra", ""}}},
		{[]string{"--dhcp-ran", "x"}, []directive{{"args", 1, "dhcp-range", "x"}}},
		{[]string{"--pid"}, []directive{{"args", 1, "pid-file", ""}}},
		{[]string{"--new-option", "-h", "-", "x"}, []directive{{"args", 1, "new-option", ""}, {"args", 2, "no-hosts", ""}}},
		{[]string{"-~"}, []directive{{"args", 1, "~", ""}}},
		{[]string{"-F"}, []directive{{"args", 1, "dhcp-range", ""}}},
		{[]string{"--", "-h"}, nil},
	} {
		t.Run(strings.Join(tc.args, " "), func(t *testing.T) {
			if got := parseArgs(tc.args); !slices.Equal(got, tc.want) {
				t.Errorf("got %+v, want %+v", got, tc.want)
			}
		})
	}
}

func TestRefusedArg(t *testing.T) {
	for _, tc := range []struct{ args, arg, name string }{
		{"--no-hosts -R --dhcp-range=10.0.0.1,10.0.0.9 --domain=x", "", ""},
		{"--port-limit=3 --no-dhcp-interface=x --log-queries=extra", "", ""},
		{"-h --port=53", "--port=53", "port"},
		{"--port 53", "--port", "port"},
		{"--por", "--por", "port"},
		{"--p=3", "--p=3", "port"},
		{"-p53", "-p53", "port"},
		{"-p 53", "-p", "port"},
		{"-hkp53", "-hkp53", "keep-in-foreground"},
		{"-hd", "-hd", "no-daemon"},
		{"--log-fac=x", "--log-fac=x", "log-facility"},
		{"-8-", "-8-", "log-facility"},
		{"--log-as", "--log-as", "log-async"},
		{"-x /x", "-x", "pid-file"},
		{"-a 127.0.0.1", "-a", "listen-address"},
		{"-qz", "-qz", "bind-interfaces"},
		{"--bind-d", "--bind-d", "bind-dynamic"},
		{"--te", "--te", "test"},
		{"-v", "-v", "version"},
		{"-w", "-w", "help"},
		{"--user --test", "--test", "test"},
		{"--domain --port", "", ""},
	} {
		t.Run(tc.args, func(t *testing.T) {
			if arg, name := refusedArg(strings.Fields(tc.args)); arg != tc.arg || name != tc.name {
				t.Errorf("got %q, %q, want %q, %q", arg, name, tc.arg, tc.name)
			}
		})
	}
}

// The installed dnsmasq's help has to agree with the tables.
func TestOptionsAsDnsmasq(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "/usr/sbin/dnsmasq", "--help").Output()
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for line := range strings.Lines(string(out)) {
		short, long, ok := strings.Cut(line, "--")
		if !ok || len(short) != 4 {
			continue
		}
		n++
		long, _, _ = strings.Cut(long, " ")
		long, arg, _ := strings.Cut(long, "=")
		long = strings.TrimSuffix(long, "[")
		full, needs := longOption(long)
		if !slices.ContainsFunc(options, func(o string) bool { return strings.TrimRight(o[strings.IndexByte(o, '/')+1:], "=?") == long }) {
			t.Errorf("%s is not in the table", long)
		}
		if full != long || needs && arg == "" {
			t.Errorf("--%s: got %q, needs an argument: %v", long, full, needs)
		}
		if short[0] == '-' && shortOption(short[1]) != long {
			t.Errorf("-%c: got %q, want %q", short[1], shortOption(short[1]), long)
		}
	}
	if n < 150 {
		t.Errorf("only %d options found in the help", n)
	}
}

func FuzzConf(f *testing.F) {
	for _, s := range []string{"port=53\n", "conf-sc\"ri\"pt=\"x\\\"y\" #z\r\n", "\x00\"\\", "#\n\n=\n\"\"\"=", strings.Repeat("x", 1001)} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		staged, warnings, err := sanitize(file{name: "a.conf", data: data})
		if err != nil {
			return
		}
		if got, want := bytes.Count(staged, []byte("\n")), bytes.Count(data, []byte("\n")); got != want {
			t.Errorf("staged copy has %d newlines, want %d", got, want)
		}
		for d := range parseConf("a.conf", staged) {
			if slices.Contains(managed, d.name) || slices.Contains(forbidden, d.name) {
				t.Errorf("staged copy has %+v", d)
			}
		}
		if again, more, err := sanitize(file{name: "a.conf", data: staged}); err != nil && len(warnings) == 0 || len(more) > 0 || err == nil && !bytes.Equal(again, staged) {
			t.Errorf("staged copy isn't clean: %q, %v", more, err)
		}
	})
}

// The child's working directory is /, wherever CoreDNS was started.
func TestIncludedRelative(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "a.conf", "user=root\n")
	t.Chdir(dir)
	for _, arg := range []string{"--conf-file=a.conf", "--conf-dir=."} {
		if ds, err := includedDirectives([]string{arg}); err == nil && len(ds) > 1 && ds[1].name == "user" {
			t.Errorf("%s: got the one in %s, which dnsmasq doesn't read", arg, dir)
		}
	}
	for _, arg := range []string{"--conf-file=" + dir[1:] + "/a.conf", "--conf-dir=" + dir[1:]} {
		t.Chdir("/")
		ds, err := includedDirectives([]string{arg})
		if err != nil || len(ds) != 2 || ds[1].watched() {
			t.Errorf("%s: got %+v, %v; want user=root, which isn't the watched directory's", arg, ds, err)
		}
	}
}
